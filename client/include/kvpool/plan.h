/* libkvpool: planners. CPU only, no daemon. Part of kvpool.h, which includes it; conventions are those there. */
#ifndef KVPOOL_PLAN_H
#define KVPOOL_PLAN_H

#include "kvpool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Section 3 of OPS. All of them check int32 overflow and refuse with the values in the text; they allocate nothing,
 * keep nothing, may be called by any thread, and are linear in their output. Where an output is sized by a count
 * that they give (*count), calling with out = NULL gives the count, and everything else that is wanted, without it;
 * out_max, elements of out, is not looked at then. Other outputs can't be NULL. An input of no elements may be NULL.
 * Nothing is written of a plan that is refused.
 *
 * Refused: KVPOOL_INVALID_ARGUMENT - what makes no sense: lengths, ratios, windows, entries of block tables.
 * KVPOOL_OUT_OF_RANGE - what doesn't fit: a block table that is too short, int32, out_max (array "out", value = the
 * count). error->array names the parameter or field, error->position its element, error->value what stood there.
 * Tokens, rows and columns are counted from 0. */

/* A load plan's element, int32[4] in memory. */
typedef struct kvpool_segment {
  int32_t src_block; /* -1: zero rows */
  int32_t src_begin;
  int32_t src_end;
  int32_t dst_offset;
} kvpool_segment;

/* Segments that read tokens [token_begin, token_end) of a sequence through its block table, cut at block borders,
 * destinations running on from dst_begin. block_table: int32[table_count]; an entry < 0 inside the range is refused.
 * *count: segments needed; KVPOOL_OUT_OF_RANGE when out_max (elements of out) is less. */
KVPOOL_API kvpool_status kvpool_plan_paged_range(const int32_t *block_table, size_t table_count,
                                                 uint32_t tokens_per_block, int64_t token_begin, int64_t token_end,
                                                 int32_t dst_begin, kvpool_segment *out, size_t out_max,
                                                 size_t *count, kvpool_error *error);

/* Slots of tokens [token_begin, token_end): table[t / tokens_per_block] * tokens_per_block + t % tokens_per_block,
 * which a store takes. out: int32[token_end - token_begin]; entries of block_table as above. */
KVPOOL_API kvpool_status kvpool_plan_slot_mapping(const int32_t *block_table, size_t table_count,
                                                  uint32_t tokens_per_block, int64_t token_begin, int64_t token_end,
                                                  int32_t *out, kvpool_error *error);

/* The compressed tokens that a chunk completes: t in [floor((seqlen_k - seqlen_q) / ratio), floor(seqlen_k / ratio)).
 * Their slots: kvpool_plan_slot_mapping of that range, tokens_per_block that of the compressed region. */
KVPOOL_API kvpool_status kvpool_plan_new_compressed(int64_t seqlen_k, int64_t seqlen_q, uint32_t ratio,
                                                    int64_t *token_begin, int64_t *token_end, kvpool_error *error);

/* One sequence of a prefill batch. */
typedef struct kvpool_sequence {
  int64_t seqlen_k; /* tokens after this chunk */
  int64_t seqlen_q; /* tokens of this chunk */
  const int32_t *block_table;
  size_t table_count;
} kvpool_sequence;

/* Load plan of the compressed main cache of a batch. Sequence i: n_i = floor(seqlen_k / ratio) tokens, this chunk's
 * included; n_i = 0 gives one zero row, so that every sequence owns at least one. tokens_per_block: the region's.
 *   cu_seqlens  int32[sequence_count + 1]: running sum of max(1, n_i); NULL: not wanted
 *   out         segments, *count of them (out_max: room)
 *   *total_k    rows of the plan; NULL: not wanted */
KVPOOL_API kvpool_status kvpool_plan_compressed(const kvpool_sequence *sequences, size_t sequence_count,
                                                uint32_t ratio, uint32_t tokens_per_block, int32_t *cu_seqlens,
                                                kvpool_segment *out, size_t out_max, size_t *count, int64_t *total_k,
                                                kvpool_error *error);

/* Per query row of the batch the visible compressed columns [ks, ke): ks = cu_seqlens[i], ke = ks + min(n_i,
 * floor((position + 1) / ratio)), position counted from the sequence's begin. ks, ke: int32[sum of seqlen_q]
 * (out_max: room of each). cu_seqlens: kvpool_plan_compressed's for the same batch, int32[sequence_count + 1], each of
 * which is checked; block tables are not looked at. */
KVPOOL_API kvpool_status kvpool_plan_compressed_visible(const kvpool_sequence *sequences, size_t sequence_count,
                                                        uint32_t ratio, const int32_t *cu_seqlens, int32_t *ks,
                                                        int32_t *ke, size_t out_max, kvpool_error *error);

/* One sequence of a batch whose sliding window (SWA) lives in a ring pool. */
typedef struct kvpool_swa_sequence {
  int32_t state_id; /* its block of the ring pool; token t lies at slot state_id * ring_tokens + t % ring_tokens */
  int64_t seqlen_k; /* tokens after this chunk */
  int64_t seqlen_q; /* tokens of this chunk */
  int64_t swa_valid_start; /* the first token whose row the ring was given; those before it read as zero rows */
} kvpool_swa_sequence;

/* The SWA planners follow OPS section 3. Of all of them: window and ring_tokens (tokens_per_block of the ring region)
 * are in [1, 2^31), window <= ring_tokens; 0 <= seqlen_q <= seqlen_k; swa_valid_start >= 0, past seqlen_k too (nothing
 * is valid then). A ring whose last slot passes 2^31 - 1 is refused, a batch whose rows do so as well. An error about a
 * sequence has its index as position, and the field's name as array. */

/* Load plan of the history that a prefill chunk sees, `window` rows a sequence, always: sequence i fills rows
 * [i * window, (i + 1) * window), in logical order. history_end = seqlen_k - seqlen_q; padding =
 * clamp(swa_valid_start - (history_end - window), 0, window) zero rows, then the ring's rows of [history_end - window +
 * padding, history_end): at most three segments.
 *   out       segments, *count of them (out_max: room)
 *   *total_k  rows of the plan, sequence_count * window; NULL: not wanted */
KVPOOL_API kvpool_status kvpool_plan_swa(const kvpool_swa_sequence *sequences, size_t sequence_count, uint32_t window,
                                         uint32_t ring_tokens, kvpool_segment *out, size_t out_max, size_t *count,
                                         int64_t *total_k, kvpool_error *error);

/* Slots that a chunk's new rows go to, sequence after sequence: token j of seqlen_q to state_id * ring_tokens +
 * (seqlen_k - seqlen_q + j) % ring_tokens, or -1 when j < seqlen_q - ring_tokens: the chunk itself would overwrite it.
 *   out  int32[*count], *count = sum of seqlen_q (out_max: room) */
KVPOOL_API kvpool_status kvpool_plan_swa_slots(const kvpool_swa_sequence *sequences, size_t sequence_count,
                                               uint32_t ring_tokens, int32_t *out, size_t out_max, size_t *count,
                                               kvpool_error *error);

/* The keys of one prefill query, int32[4] in memory, as expand_swa_index takes them: columns [offset1, offset1 + len1)
 * and then [offset2, offset2 + len2) of the assembled buffer. */
typedef struct kvpool_swa_pivot {
  int32_t offset1; /* history */
  int32_t len1;
  int32_t offset2; /* the chunk's own rows */
  int32_t len2;
} kvpool_swa_pivot;

/* Pivots of a prefill, one for each query, sequence after sequence. Sequence i's history is kvpool_plan_swa's, its
 * chunk begins at column S + q_start_i, S = sequence_count * window, q_start_i = sum of seqlen_q before it. Query j
 * sees `window` keys, its own included, as far as they are valid: cur = min(j + 1, window) of the chunk, hist =
 * min(window - cur, history rows that are not padding) -> [(i + 1) * window - hist, hist, S + q_start_i + j + 1 - cur,
 * cur].
 * state_id is not looked at.
 *   out  pivots, *count of them = sum of seqlen_q (out_max: room) */
KVPOOL_API kvpool_status kvpool_plan_swa_pivots(const kvpool_swa_sequence *sequences, size_t sequence_count,
                                                uint32_t window, kvpool_swa_pivot *out, size_t out_max, size_t *count,
                                                kvpool_error *error);

/* The window of one decode query, int32[2] in memory, as swa_index_decode takes it. */
typedef struct kvpool_swa_window {
  int32_t start_slot; /* of the oldest key; the others follow, wrapping at the ring's end */
  int32_t valid_length;
} kvpool_swa_window;

/* Windows of the new tokens of a decode batch, sequence after sequence; their rows are in the ring already. Query j:
 * L = seqlen_k - seqlen_q + j + 1, n = clamp(L - swa_valid_start, 0, window) -> [state_id * ring_tokens + (L - n) %
 * ring_tokens, n]. ring_tokens < window + seqlen_q - 1 is refused: the last of the new tokens lie where the first one's
 * window was.
 *   out  windows, *count of them = sum of seqlen_q (out_max: room) */
KVPOOL_API kvpool_status kvpool_plan_swa_decode(const kvpool_swa_sequence *sequences, size_t sequence_count,
                                                uint32_t window, uint32_t ring_tokens, kvpool_swa_window *out,
                                                size_t out_max, size_t *count, kvpool_error *error);

/* Context-parallel prefill in mirror order (OPS section 3): each sequence's chunk is padded to 2 * ranks equal pieces
 * of ceil(seqlen_q / (2 * ranks)) tokens, and rank r holds pieces r and 2 * ranks - 1 - r, so that every rank has early
 * and late tokens. seqlens_q: int64[sequence_count]; the chunks lie one behind the other, row q_start_i + t is token t
 * of sequence i. Padded rows of all ranks together are at most 2^31 - 1.
 *
 * Rows that `rank` holds, sequence after sequence, -1 for padding; every rank has as many.
 *   out  int32[*count], rows of the packed chunks (out_max: room) */
KVPOOL_API kvpool_status kvpool_plan_mirror(const int64_t *seqlens_q, size_t sequence_count, uint32_t ranks,
                                            uint32_t rank, int32_t *out, size_t out_max, size_t *count,
                                            kvpool_error *error);
/* What undoes it after a gather of the ranks' rows, rank 0 first: for each row of the packed chunks the gathered row
 * that holds it, never -1. It is the gather index that assemble takes.
 *   out  int32[*count], *count = sum of seqlens_q (out_max: room) */
KVPOOL_API kvpool_status kvpool_plan_mirror_reverse(const int64_t *seqlens_q, size_t sequence_count, uint32_t ranks,
                                                    int32_t *out, size_t out_max, size_t *count, kvpool_error *error);

#ifdef __cplusplus
}
#endif

#endif
