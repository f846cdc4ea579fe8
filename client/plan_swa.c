/* Planners of a sequence's ring: what a prefill chunk loads from it and where its new rows go. Pure functions: any
 * thread, no allocation. */
#include <assert.h>

#include "client/plan_swa.h"

enum { segments_per_sequence_max = 3 };

/* ---- checks -----------------------------------------------------------------------------------------------------
 */

kvpool_status kvp_plan_check_length(const char *name, uint32_t tokens, kvpool_error *error) {
  if (tokens == 0 || tokens > INT32_MAX) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, name, -1, tokens, "%s = %u, not in [1, 2^31)", name, tokens);
  }
  return KVPOOL_OK;
}

kvpool_status kvp_plan_check_window(uint32_t window, uint32_t ring_tokens, kvpool_error *error) {
  kvpool_status status = kvp_plan_check_length("window", window, error);
  if (status == KVPOOL_OK) {
    status = kvp_plan_check_length("ring_tokens", ring_tokens, error);
  }
  if (status == KVPOOL_OK && window > ring_tokens) {
    status = kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "window", -1, window,
                         "window = %u is larger than the ring of %u tokens", window, ring_tokens);
  }
  return status;
}

kvpool_status kvp_plan_check_chunk(const kvpool_swa_sequence *sequences, size_t index, kvpool_error *error) {
  const kvpool_swa_sequence *sequence = &sequences[index];
  if (sequence->seqlen_q < 0 || sequence->seqlen_q > sequence->seqlen_k) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "seqlen_q", (int64_t)index, sequence->seqlen_q,
                       "sequence %zu: seqlen_q = %lld is not in [0, seqlen_k = %lld]", index,
                       (long long)sequence->seqlen_q, (long long)sequence->seqlen_k);
  }
  if (sequence->swa_valid_start < 0) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "swa_valid_start", (int64_t)index, sequence->swa_valid_start,
                       "sequence %zu: swa_valid_start = %lld is negative", index,
                       (long long)sequence->swa_valid_start);
  }
  return KVPOOL_OK;
}

kvpool_status kvp_plan_check_ring(const kvpool_swa_sequence *sequences, size_t index, uint32_t ring_tokens,
                                  kvpool_error *error) {
  int32_t state_id = sequences[index].state_id;
  if (state_id < 0) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "state_id", (int64_t)index, state_id,
                       "sequence %zu: state_id = %d is no block", index, state_id);
  }
  int64_t last_slot = (int64_t)state_id * ring_tokens + (ring_tokens - 1); /* < 2^62 + 2^31 */
  if (last_slot > INT32_MAX) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "state_id", (int64_t)index, state_id,
                       "sequence %zu: state_id = %d with a ring of %u tokens: its last slot %lld passes 2^31 - 1",
                       index, state_id, ring_tokens, (long long)last_slot);
  }
  return KVPOOL_OK;
}

kvpool_status kvp_plan_add_queries(const kvpool_swa_sequence *sequences, size_t index, int64_t rows_max,
                                   int64_t *rows, kvpool_error *error) {
  int64_t seqlen_q = sequences[index].seqlen_q;
  if (seqlen_q > rows_max - *rows) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "seqlen_q", (int64_t)index, seqlen_q,
                       "sequence %zu: seqlen_q = %lld: the plan's rows pass 2^31 - 1", index, (long long)seqlen_q);
  }
  *rows += seqlen_q;
  return KVPOOL_OK;
}

kvpool_status kvp_plan_check_room(const char *what, size_t needed, size_t out_max, kvpool_error *error) {
  if (needed > out_max) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "out", -1, (int64_t)needed, "%zu %s, room for %zu", needed, what,
                       out_max);
  }
  return KVPOOL_OK;
}

/* ---- the history of a chunk -------------------------------------------------------------------------------------
 */

/* Returns how many segments it wrote. The rows from dst on fit into int32. */
static size_t history_plan(const kvpool_swa_sequence *sequence, uint32_t window, uint32_t ring_tokens, int32_t dst,
                           kvpool_segment *out) {
  int32_t history = kvp_plan_history_rows(sequence, window);
  int32_t padding = (int32_t)window - history;
  size_t count = 0;
  if (padding > 0) {
    /* A zero segment may be one block long; the window is no longer than the ring. */
    out[count++] = (kvpool_segment){.src_block = -1, .src_begin = 0, .src_end = padding, .dst_offset = dst};
  }
  if (history > 0) {
    int32_t begin = (int32_t)((sequence->seqlen_k - sequence->seqlen_q - history) % ring_tokens);
    int32_t room = (int32_t)ring_tokens - begin;
    int32_t first = history < room ? history : room;
    out[count++] = (kvpool_segment){
        .src_block = sequence->state_id, .src_begin = begin, .src_end = begin + first, .dst_offset = dst + padding};
    if (first < history) {
      out[count++] = (kvpool_segment){.src_block = sequence->state_id,
                                      .src_begin = 0,
                                      .src_end = history - first,
                                      .dst_offset = dst + padding + first};
    }
  }
  return count;
}

/* Everything that can be wrong, so that nothing is written when something is. */
static kvpool_status history_check(const kvpool_swa_sequence *sequences, size_t sequence_count, uint32_t window,
                                   uint32_t ring_tokens, size_t *segment_count, kvpool_error *error) {
  size_t segments = 0;
  kvpool_status status = kvp_plan_check_window(window, ring_tokens, error);
  if (status == KVPOOL_OK && sequence_count > (size_t)INT32_MAX / window) {
    status = kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "window", -1, window,
                         "%zu sequences with window = %u: the plan's rows pass 2^31 - 1", sequence_count, window);
  }
  for (size_t i = 0; i < sequence_count && status == KVPOOL_OK; i++) {
    status = kvp_plan_check_chunk(sequences, i, error);
    if (status == KVPOOL_OK) {
      status = kvp_plan_check_ring(sequences, i, ring_tokens, error);
    }
    if (status == KVPOOL_OK) {
      kvpool_segment counted[segments_per_sequence_max];
      segments += history_plan(&sequences[i], window, ring_tokens, 0, counted);
    }
  }
  *segment_count = segments;
  return status;
}

kvpool_status kvpool_plan_swa(const kvpool_swa_sequence *sequences, size_t sequence_count, uint32_t window,
                              uint32_t ring_tokens, kvpool_segment *out, size_t out_max, size_t *count,
                              int64_t *total_k, kvpool_error *error) {
  assert((sequences != NULL || sequence_count == 0) && count != NULL);
  size_t needed = 0;
  kvpool_status status = history_check(sequences, sequence_count, window, ring_tokens, &needed, error);
  if (status == KVPOOL_OK && out != NULL) {
    status = kvp_plan_check_room("segments", needed, out_max, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  for (size_t i = 0; i < sequence_count && out != NULL; i++) {
    out += history_plan(&sequences[i], window, ring_tokens, (int32_t)(i * window), out);
  }
  if (total_k != NULL) {
    *total_k = (int64_t)sequence_count * window;
  }
  *count = needed;
  return KVPOOL_OK;
}

/* ---- where a chunk goes -----------------------------------------------------------------------------------------
 */

static int32_t *chunk_slots(const kvpool_swa_sequence *sequence, uint32_t ring_tokens, int32_t *out) {
  int64_t skipped = sequence->seqlen_q > ring_tokens ? sequence->seqlen_q - ring_tokens : 0;
  for (int64_t i = 0; i < skipped; i++) {
    *out++ = -1;
  }
  int32_t base = (int32_t)(sequence->state_id * (int64_t)ring_tokens); /* the ring's last slot fits too */
  int32_t begin = (int32_t)((sequence->seqlen_k - sequence->seqlen_q + skipped) % ring_tokens);
  int32_t rows = (int32_t)(sequence->seqlen_q - skipped);
  int32_t room = (int32_t)ring_tokens - begin;
  int32_t first = rows < room ? rows : room;
  for (int32_t i = 0; i < first; i++) {
    *out++ = base + begin + i;
  }
  for (int32_t i = 0; i < rows - first; i++) {
    *out++ = base + i;
  }
  return out;
}

kvpool_status kvpool_plan_swa_slots(const kvpool_swa_sequence *sequences, size_t sequence_count, uint32_t ring_tokens,
                                    int32_t *out, size_t out_max, size_t *count, kvpool_error *error) {
  assert((sequences != NULL || sequence_count == 0) && count != NULL);
  int64_t rows = 0;
  kvpool_status status = kvp_plan_check_length("ring_tokens", ring_tokens, error);
  for (size_t i = 0; i < sequence_count && status == KVPOOL_OK; i++) {
    status = kvp_plan_check_chunk(sequences, i, error);
    if (status == KVPOOL_OK) {
      status = kvp_plan_check_ring(sequences, i, ring_tokens, error);
    }
    if (status == KVPOOL_OK) {
      status = kvp_plan_add_queries(sequences, i, INT32_MAX, &rows, error);
    }
  }
  if (status == KVPOOL_OK && out != NULL) {
    status = kvp_plan_check_room("slots", (size_t)rows, out_max, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  for (size_t i = 0; i < sequence_count && out != NULL; i++) {
    out = chunk_slots(&sequences[i], ring_tokens, out);
  }
  *count = (size_t)rows;
  return KVPOOL_OK;
}
