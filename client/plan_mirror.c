/* Planners of context-parallel prefill in mirror order: which rows a rank holds, and how a gather of all ranks is put
 * back in order. Pure functions: any thread, no allocation. */
#include <assert.h>

#include "client/plan_swa.h"

/* Of a chunk that is cut into 2 * ranks pieces. */
static int64_t piece_tokens_of(int64_t seqlen_q, uint32_t ranks) {
  int64_t pieces = 2 * (int64_t)ranks;
  return seqlen_q / pieces + (seqlen_q % pieces != 0);
}

/* *chunk_rows: of the packed chunks; *local_rows: of one rank. Neither ranks * *local_rows nor *chunk_rows, which is
 * less, passes int32. */
static kvpool_status mirror_check(const int64_t *seqlens_q, size_t sequence_count, uint32_t ranks,
                                  int64_t *chunk_rows, int64_t *local_rows, kvpool_error *error) {
  kvpool_status status = kvp_plan_check_length("ranks", ranks, error);
  int64_t chunks = 0;
  int64_t local = 0;
  for (size_t i = 0; i < sequence_count && status == KVPOOL_OK; i++) {
    if (seqlens_q[i] < 0) {
      status = kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "seqlens_q", (int64_t)i, seqlens_q[i],
                           "sequence %zu: seqlen_q = %lld is negative", i, (long long)seqlens_q[i]);
      continue;
    }
    int64_t piece_tokens = piece_tokens_of(seqlens_q[i], ranks);
    if (piece_tokens > INT32_MAX || local + 2 * piece_tokens > INT32_MAX / (int64_t)ranks) {
      status = kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "seqlens_q", (int64_t)i, seqlens_q[i],
                           "sequence %zu: seqlen_q = %lld padded for %u ranks: the gathered rows pass 2^31 - 1", i,
                           (long long)seqlens_q[i], ranks);
      continue;
    }
    chunks += seqlens_q[i];
    local += 2 * piece_tokens;
  }
  *chunk_rows = chunks;
  *local_rows = local;
  return status;
}

/* Piece `piece` of the chunk that begins at row q_start. */
static int32_t *piece_rows(int64_t q_start, int64_t seqlen_q, int64_t piece, int64_t piece_tokens, int32_t *out) {
  int64_t begin = piece * piece_tokens;
  int64_t valid = seqlen_q > begin ? seqlen_q - begin : 0;
  valid = valid < piece_tokens ? valid : piece_tokens;
  for (int64_t token = 0; token < valid; token++) {
    *out++ = (int32_t)(q_start + begin + token);
  }
  for (int64_t token = valid; token < piece_tokens; token++) {
    *out++ = -1;
  }
  return out;
}

kvpool_status kvpool_plan_mirror(const int64_t *seqlens_q, size_t sequence_count, uint32_t ranks, uint32_t rank,
                                 int32_t *out, size_t out_max, size_t *count, kvpool_error *error) {
  assert((seqlens_q != NULL || sequence_count == 0) && count != NULL);
  int64_t chunk_rows = 0;
  int64_t local_rows = 0;
  kvpool_status status = mirror_check(seqlens_q, sequence_count, ranks, &chunk_rows, &local_rows, error);
  if (status == KVPOOL_OK && rank >= ranks) {
    status = kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "rank", -1, rank, "rank = %u of %u ranks", rank, ranks);
  }
  if (status == KVPOOL_OK && out != NULL) {
    status = kvp_plan_check_room("rows", (size_t)local_rows, out_max, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  int64_t q_start = 0;
  for (size_t i = 0; i < sequence_count && out != NULL; i++) {
    int64_t piece_tokens = piece_tokens_of(seqlens_q[i], ranks);
    out = piece_rows(q_start, seqlens_q[i], rank, piece_tokens, out);
    out = piece_rows(q_start, seqlens_q[i], 2 * (int64_t)ranks - 1 - rank, piece_tokens, out);
    q_start += seqlens_q[i];
  }
  *count = (size_t)local_rows;
  return KVPOOL_OK;
}

kvpool_status kvpool_plan_mirror_reverse(const int64_t *seqlens_q, size_t sequence_count, uint32_t ranks,
                                         int32_t *out, size_t out_max, size_t *count, kvpool_error *error) {
  assert((seqlens_q != NULL || sequence_count == 0) && count != NULL);
  int64_t chunk_rows = 0;
  int64_t rank_rows = 0;
  kvpool_status status = mirror_check(seqlens_q, sequence_count, ranks, &chunk_rows, &rank_rows, error);
  if (status == KVPOOL_OK && out != NULL) {
    status = kvp_plan_check_room("rows", (size_t)chunk_rows, out_max, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  int64_t local_start = 0; /* of the sequence, in every rank's rows */
  for (size_t i = 0; i < sequence_count && out != NULL; i++) {
    int64_t piece_tokens = piece_tokens_of(seqlens_q[i], ranks);
    int64_t left = seqlens_q[i];
    for (int64_t piece = 0; left > 0; piece++) {
      int64_t rank = piece < ranks ? piece : 2 * (int64_t)ranks - 1 - piece;
      int64_t row = rank * rank_rows + local_start + (piece < ranks ? 0 : piece_tokens);
      int64_t tokens = left < piece_tokens ? left : piece_tokens;
      for (int64_t token = 0; token < tokens; token++) {
        *out++ = (int32_t)(row + token);
      }
      left -= tokens;
    }
    local_start += 2 * piece_tokens;
  }
  *count = (size_t)chunk_rows;
  return KVPOOL_OK;
}
