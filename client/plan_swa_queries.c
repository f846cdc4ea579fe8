/* Planners of what each query sees through its sliding window: pivots of a prefill, windows of a decode step. Pure
 * functions: any thread, no allocation. */
#include <assert.h>

#include "client/plan_swa.h"

/* ---- prefill ----------------------------------------------------------------------------------------------------
 */

/* history_end: the column behind the sequence's history; chunk_begin: the column of its query 0. */
static kvpool_swa_pivot *chunk_pivots(const kvpool_swa_sequence *sequence, int32_t window, int32_t history_end,
                                      int32_t chunk_begin, kvpool_swa_pivot *out) {
  int32_t history = kvp_plan_history_rows(sequence, (uint32_t)window);
  for (int32_t query = 0; query < sequence->seqlen_q; query++) {
    int32_t current = query < window ? query + 1 : window;
    int32_t before = window - current < history ? window - current : history;
    *out++ = (kvpool_swa_pivot){.offset1 = history_end - before,
                                .len1 = before,
                                .offset2 = chunk_begin + query + 1 - current,
                                .len2 = current};
  }
  return out;
}

kvpool_status kvpool_plan_swa_pivots(const kvpool_swa_sequence *sequences, size_t sequence_count, uint32_t window,
                                     kvpool_swa_pivot *out, size_t out_max, size_t *count, kvpool_error *error) {
  assert((sequences != NULL || sequence_count == 0) && count != NULL);
  int64_t queries = 0;
  int64_t history_columns = 0;
  kvpool_status status = kvp_plan_check_length("window", window, error);
  if (status == KVPOOL_OK && sequence_count > (size_t)INT32_MAX / window) {
    status = kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "window", -1, window,
                         "%zu sequences with window = %u: their columns pass 2^31 - 1", sequence_count, window);
  } else {
    history_columns = (int64_t)sequence_count * window;
  }
  for (size_t i = 0; i < sequence_count && status == KVPOOL_OK; i++) {
    status = kvp_plan_check_chunk(sequences, i, error);
    if (status == KVPOOL_OK) {
      status = kvp_plan_add_queries(sequences, i, INT32_MAX - history_columns, &queries, error);
    }
  }
  if (status == KVPOOL_OK && out != NULL) {
    status = kvp_plan_check_room("pivots", (size_t)queries, out_max, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  int32_t chunk_begin = (int32_t)history_columns;
  for (size_t i = 0; i < sequence_count && out != NULL; i++) {
    out = chunk_pivots(&sequences[i], (int32_t)window, (int32_t)((i + 1) * window), chunk_begin, out);
    chunk_begin = (int32_t)(chunk_begin + sequences[i].seqlen_q);
  }
  *count = (size_t)queries;
  return KVPOOL_OK;
}

/* ---- decode -----------------------------------------------------------------------------------------------------
 */

/* The last new token still leaves the first one's window in the ring. */
static kvpool_status decode_check_ring(const kvpool_swa_sequence *sequences, size_t index, uint32_t window,
                                       uint32_t ring_tokens, kvpool_error *error) {
  int64_t seqlen_q = sequences[index].seqlen_q;
  if (seqlen_q - 1 > (int64_t)ring_tokens - window) {
    return kvp_fail_at(
        error, KVPOOL_INVALID_ARGUMENT, "seqlen_q", (int64_t)index, seqlen_q,
        "sequence %zu: seqlen_q = %lld new tokens with window = %u overwrite it in a ring of %u tokens; "
        "the ring has to have window + seqlen_q - 1",
        index, (long long)seqlen_q, window, ring_tokens);
  }
  return KVPOOL_OK;
}

static kvpool_swa_window *decode_windows(const kvpool_swa_sequence *sequence, uint32_t window, uint32_t ring_tokens,
                                         kvpool_swa_window *out) {
  int32_t base = (int32_t)(sequence->state_id * (int64_t)ring_tokens); /* the ring's last slot fits too */
  for (int64_t query = 0; query < sequence->seqlen_q; query++) {
    int64_t end = sequence->seqlen_k - sequence->seqlen_q + 1 + query;
    int64_t valid = end > sequence->swa_valid_start ? end - sequence->swa_valid_start : 0;
    int32_t length = (int32_t)(valid < window ? valid : window);
    *out++ =
        (kvpool_swa_window){.start_slot = base + (int32_t)((end - length) % ring_tokens), .valid_length = length};
  }
  return out;
}

kvpool_status kvpool_plan_swa_decode(const kvpool_swa_sequence *sequences, size_t sequence_count, uint32_t window,
                                     uint32_t ring_tokens, kvpool_swa_window *out, size_t out_max, size_t *count,
                                     kvpool_error *error) {
  assert((sequences != NULL || sequence_count == 0) && count != NULL);
  int64_t queries = 0;
  kvpool_status status = kvp_plan_check_window(window, ring_tokens, error);
  for (size_t i = 0; i < sequence_count && status == KVPOOL_OK; i++) {
    status = kvp_plan_check_chunk(sequences, i, error);
    if (status == KVPOOL_OK) {
      status = kvp_plan_check_ring(sequences, i, ring_tokens, error);
    }
    if (status == KVPOOL_OK) {
      status = decode_check_ring(sequences, i, window, ring_tokens, error);
    }
    if (status == KVPOOL_OK) {
      status = kvp_plan_add_queries(sequences, i, INT32_MAX, &queries, error);
    }
  }
  if (status == KVPOOL_OK && out != NULL) {
    status = kvp_plan_check_room("windows", (size_t)queries, out_max, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  for (size_t i = 0; i < sequence_count && out != NULL; i++) {
    out = decode_windows(&sequences[i], window, ring_tokens, out);
  }
  *count = (size_t)queries;
  return KVPOOL_OK;
}
