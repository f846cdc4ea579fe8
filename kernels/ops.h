/* The parameters of every kernel, one struct per op, the same for every backend.
 *
 * By the time a kernel sees one, everything host-side was checked; what a kernel checks itself is said at the field.
 * Pointers are in the backend's memory. Launchers and host kernels never allocate, never fail, never synchronise.
 */
#ifndef KVPOOL_KERNELS_OPS_H
#define KVPOOL_KERNELS_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/format.h"

/* One layer of a region. */
struct kvp_layer {
  uint8_t *base; /* first byte of the layer */
  const struct kvp_geometry *geometry;
};

/* rows every stride_bytes; base and stride are multiples of 16. */
struct kvp_rows {
  uint8_t *base;
  uint64_t stride_bytes;
};

/* Counters of one op; a kernel adds to them. */
struct kvp_op_counts {
  uint64_t rows_stored;
  uint64_t rows_loaded; /* zero-filled rows among them */
  uint64_t rows_skipped;
  uint64_t rows_rejected;
  uint64_t rows_nonfinite;
  uint64_t groups_saturated;
  uint64_t bytes_read;
  uint64_t bytes_written;
};

/* Who may touch which block; only for arrays that lie in device memory and could not be checked before. */
struct kvp_owner_check {
  const uint64_t *entries; /* the owner table, num_blocks; NULL: the array was checked, nothing to do here */
  uint64_t epoch;          /* the step's */
  uint32_t owner;          /* the step's session slot; 0 owns everything */
};

/* Quantize source rows [0, row_count) into the records their slots name. OPS.md "store". */
struct kvp_store_params {
  struct kvp_layer layer;
  struct kvp_rows source; /* [>= row_count, elements] BF16 */
  const int32_t *slots;   /* [row_count]; NULL: all of them are -1 */
  uint64_t row_count;
  /* Row i is source row gather[i]; -1: a zero row, which has slot -1. NULL: source row i. An entry outside
   * [-1, source_rows), and a -1 with another slot, is rejected: no record, and its cast-back is a zero row. A zero row
   * reads nothing; it counts as skipped or rejected, and its cast-back as written. */
  const int32_t *gather;
  uint64_t source_rows;      /* only with gather */
  uint64_t rows_skipped;     /* slots that are -1; only where the array was checked before */
  struct kvp_rows cast_back; /* [row_count, elements] BF16; base NULL: none */
  /* cast_back is no such thing but a copy of the rows, zeros where their gather entry is wrong; a row's slot doesn't
   * matter to its copy. Rows with a good entry count as rows_loaded; a row is read once and rejected once. */
  bool back_is_copy;
  struct kvp_owner_check check;
};

/* Rows copied as they are, or through an index: OPS.md "assemble", part 2. */
struct kvp_copy_rows_params {
  struct kvp_rows source; /* [source_rows, row_bytes] */
  struct kvp_rows out;    /* [row_count, row_bytes] */
  const int32_t *gather;  /* [row_count] as in kvp_store_params, or NULL */
  uint64_t row_count;
  uint64_t source_rows;
  uint32_t row_bytes; /* a multiple of 16 */
};

/* One int32 quadruple of a load plan. */
struct kvp_segment {
  int32_t src_block; /* -1: zero rows */
  int32_t src_begin;
  int32_t src_end;
  int32_t dst_offset;
};

/* Records named by segments to output rows. OPS.md "load". */
struct kvp_load_params {
  struct kvp_layer layer;
  const struct kvp_segment *segments; /* [segment_count] */
  uint64_t segment_count;
  uint64_t total_k;       /* rows of out */
  struct kvp_rows out;    /* [total_k, loaded_row_bytes] */
  struct kvp_rows scales; /* [total_k, loaded_scale_bytes]; base NULL when the format has none */
  /* Only where the array was checked before: */
  uint64_t rows;             /* of all segments */
  uint64_t rows_zeroed;      /* of those whose block is -1 */
  uint64_t segment_rows_max; /* of one segment */
  /* Only where it was not: rows taken so far by all ranges of the op, in the backend's memory, zero before. Together
   * they take no more than total_k, so that overlapping segments can't make an op longer than its output. */
  uint64_t *rows_taken;
  struct kvp_owner_check check;
};

/* ---- indices: OPS.md "convert_kv_index", "swa_index_decode", "expand_swa_index", "kv_index_cat" ----
 *
 * Matrices of int32 are rows with a stride, a multiple of 4; out has at least one column. Their contents are never
 * trusted: an entry that is wrong gives -1 and counts as one of rows_rejected, and so does a row that is wrong as a
 * whole. bytes_read and bytes_written are those of the matrices. */

/* x -> table[b, x / tpb] * tpb + x % tpb for the first valid[b, s] entries of each list, -1 behind them. */
struct kvp_convert_index_params {
  struct kvp_rows topk;   /* [batch * queries, columns] */
  struct kvp_rows out;    /* the same shape; may be topk itself */
  struct kvp_rows tables; /* [batch, table_columns] block ids */
  const int32_t *valid;   /* [batch * queries], clamped to [0, columns] */
  uint64_t batch;
  uint64_t queries;
  uint64_t columns;
  uint64_t table_columns;
  uint32_t tokens_per_block;
  uint32_t num_blocks;
};

/* [start_slot, valid_length] -> the ring slots of a window, in order. */
struct kvp_swa_index_params {
  const int32_t *offset_len; /* [queries, 2] */
  struct kvp_rows out;       /* [queries, window] */
  uint64_t queries;
  uint64_t window;
  uint32_t ring_tokens; /* the region's tokens_per_block */
  uint32_t num_blocks;
};

/* [offset1, len1, offset2, len2] -> two runs of columns. */
struct kvp_expand_index_params {
  const int32_t *pivots; /* [row_count, 4] */
  struct kvp_rows out;   /* [row_count, width] */
  uint64_t row_count;
  uint64_t width;
};

/* left | right + base. */
struct kvp_cat_index_params {
  struct kvp_rows left;  /* [row_count, left_columns] */
  struct kvp_rows right; /* [row_count, right_columns] */
  struct kvp_rows out;   /* [row_count, left_columns + right_columns] */
  uint64_t row_count;
  uint64_t left_columns;
  uint64_t right_columns;
  int32_t base; /* >= 0 */
};

/* ---- fused store: OPS.md "fused_store" ---- */

enum kvp_fused_flag { KVP_FUSED_NEOX = 1, KVP_FUSED_HADAMARD = 2, KVP_FUSED_ROUND_TO_BF16 = 4 };

/* Of a row that every backend takes. */
enum { kvp_fused_elements_max = 16384 };

/* RMSNorm, RoPE, Hadamard, then as a store; elements of the region's format, a power of two. */
struct kvp_fused_store_params {
  struct kvp_store_params
      store; /* its source: the rows before the norm; a row without slot and cast_back is not read */
  const uint16_t *norm_weight; /* [elements] BF16 */
  const int32_t *positions;    /* [row_count] */
  struct kvp_rows cos_sin;     /* [position_count, rotary_dims] float32: cosines, then sines */
  uint64_t position_count;
  uint32_t rotary_dims; /* even; rope_offset + rotary_dims <= elements */
  uint32_t rope_offset;
  float eps;
  uint32_t flags;         /* kvp_fused_flag */
  bool positions_checked; /* else a row outside the table is rejected */
  bool rows_are_known;    /* slots and positions don't change any more: they may be read before the op begins */
};

/* ---- replay: fused stores of a captured graph, one after another, each between two points ----
 *
 * A point is a word in the backend's memory, every 64 bytes one, that counts up (proto/timeline_wire.h), and a value. An
 * op begins when its wait's word has been counted up to the value by somebody else, and then all that it reads is read
 * anew, slots and positions that are known excepted; when it and those before it are done, its signal's word becomes the
 * value unless it is larger. */

struct kvp_replay_points {
  const uint64_t *wait; /* NULL: it doesn't */
  uint64_t wait_value;
  uint64_t *signal; /* NULL: it doesn't */
  uint64_t signal_value;
};

enum kvp_replay_end {
  KVP_REPLAY_DONE = 0,
  KVP_REPLAY_DEADLINE = 1, /* it passed while an op waited */
  KVP_REPLAY_ABORTED = 2,  /* likewise: whose it is wants it to end */
  KVP_REPLAY_POISONED = 3, /* the word that an op waited for */
};

/* What became of it. If it is not done, `op` and those behind it have not signalled and their words are poisoned. */
struct kvp_replay_result {
  enum kvp_replay_end end;
  uint32_t op;
  uint64_t value; /* that the word had */
};

/* ---- blocks: OPS.md "copy_blocks", "zero_blocks"; one region, every layer ---- */

struct kvp_blocks_params {
  uint8_t *base; /* of the region */
  const struct kvp_geometry *geometry;
  const int32_t *pairs; /* copy: [count, 2] = [from, to]; zero: [count] blocks. Checked. */
  uint64_t count;
};

/* ---- host backend: kernels/host/ ---- */

/* Rows [row_begin, row_end) of the op; ranges of one op may run on several threads, each with its own counts. A row
 * counts once: stored, skipped (-1) or rejected. bytes_read / bytes_written count rows and
 * records, not metadata. */
void kvp_host_store(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                    struct kvp_op_counts *counts);
/* Rows [row_begin, row_end) as above. Rows of the source and zero rows (-1) are rows_loaded, entries outside the source
 * rows_rejected, zero rows too; bytes_read is rows of the source, bytes_written all rows. */
void kvp_host_copy_rows(const struct kvp_copy_rows_params *params, uint64_t row_begin, uint64_t row_end,
                        struct kvp_op_counts *counts);
/* Output work of segments [segment_begin, segment_end). */
void kvp_host_load(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                   struct kvp_op_counts *counts);

/* Rows [row_begin, row_end) as above. Each row counts once: stored, skipped (-1), or rejected, which it is for its
 * position even where its slot is -1. rows_nonfinite and groups_saturated are those of rows after the norm;
 * bytes_read is source rows, bytes_written records and cast-back rows. */
void kvp_host_fused_store(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                          struct kvp_op_counts *counts);

/* Output rows [row_begin, row_end): lists of convert_index are batch * queries. Matrices are counted as whole rows:
 * bytes_read those of topk, left and right, bytes_written those of out. */
void kvp_host_convert_index(const struct kvp_convert_index_params *params, uint64_t row_begin, uint64_t row_end,
                            struct kvp_op_counts *counts);
void kvp_host_swa_index(const struct kvp_swa_index_params *params, uint64_t row_begin, uint64_t row_end,
                        struct kvp_op_counts *counts);
void kvp_host_expand_index(const struct kvp_expand_index_params *params, uint64_t row_begin, uint64_t row_end,
                           struct kvp_op_counts *counts);
void kvp_host_cat_index(const struct kvp_cat_index_params *params, uint64_t row_begin, uint64_t row_end,
                        struct kvp_op_counts *counts);

/* Units [unit_begin, unit_end): unit = layer * count + entry, num_layers * count in all. A block that is a target of
 * one pair is in no other; bytes are those of whole blocks, padding included. */
void kvp_host_copy_blocks(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                          struct kvp_op_counts *counts);
void kvp_host_zero_blocks(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                          struct kvp_op_counts *counts);

/* Name of the instruction set the host kernels use on this machine: "avx2", "baseline". */
const char *kvp_host_isa(void);

#endif
