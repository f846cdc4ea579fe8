/* The planners of sliding windows against a model that writes and reads a ring one token at a time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kvpool/kvpool.h"
#include "tests/unit/plan_support.h"

enum {
  cases = 4000,
  batch_max = 6,
  states = 16,
  ring_max = 90,
  tokens_max = 8 * ring_max + 8, /* of a sequence */
  rows_max = batch_max * tokens_max,
  model_id = 1000000,  /* sequence i's token t has the value i * model_id + t */
  model_unset = -1000, /* nothing was written there */
  model_zero = -1,
};

struct batch {
  uint32_t window;
  uint32_t ring_tokens;
  size_t count;
  kvpool_swa_sequence sequences[batch_max];
};

static int64_t clamped(int64_t value, int64_t max) {
  return value < 0 ? 0 : value > max ? max : value;
}

/* A number of tokens: mostly one at a border. */
static int64_t random_length(uint32_t window, uint32_t ring_tokens) {
  const int64_t near = (int64_t)random_below(3) - 1; /* -1, 0, 1 */
  switch (random_below(7)) {
  case 0:
    return random_below(2);
  case 1:
    return clamped(window + near, tokens_max);
  case 2:
  case 3:
    return clamped((int64_t)ring_tokens * (1 + random_below(3)) + near, tokens_max);
  default:
    return random_below(4 * ring_tokens);
  }
}

static int64_t random_valid_start(int64_t seqlen_k, int64_t seqlen_q, uint32_t window) {
  const int64_t near = (int64_t)random_below(3) - 1;
  switch (random_below(6)) {
  case 0:
    return clamped(seqlen_k - seqlen_q + near, INT32_MAX);
  case 1:
    return clamped(seqlen_k - seqlen_q - window + near, INT32_MAX);
  case 2:
    return clamped(seqlen_k + near, INT32_MAX);
  case 3:
    return random_below((uint32_t)seqlen_k + 1);
  default:
    return 0;
  }
}

static void random_batch(struct batch *batch, bool is_decode) {
  batch->ring_tokens = 1 + random_below(random_below(4) == 0 ? 3 : ring_max);
  const uint32_t windows[] = {1, batch->ring_tokens, (batch->ring_tokens + 1) / 2,
                              1 + random_below(batch->ring_tokens)};
  batch->window = windows[random_below(4)];
  batch->count = random_below(batch_max + 1);
  int32_t first_state = (int32_t)random_below(states);
  for (size_t i = 0; i < batch->count; i++) {
    const int64_t spare = (int64_t)batch->ring_tokens - batch->window; /* new tokens - 1 that a decode may have */
    int64_t history = random_length(batch->window, batch->ring_tokens);
    int64_t queries = !is_decode             ? random_length(batch->window, batch->ring_tokens)
                      : random_below(2) == 0 ? 1 + random_below(2)
                                             : random_below((uint32_t)spare + 4);
    batch->sequences[i] = (kvpool_swa_sequence){
        .state_id = (first_state + 5 * (int32_t)i) % states, /* 5 and 16 have no divisor in common: all different */
        .seqlen_k = history + queries,
        .seqlen_q = queries,
        .swa_valid_start = random_valid_start(history + queries, queries, batch->window)};
  }
}

/* Writes tokens [valid_start, end) of a sequence to its ring, one after the other. */
static void model_write(int32_t *memory, const struct batch *batch, size_t index, int64_t valid_start, int64_t end) {
  int32_t *ring = memory;
  for (int32_t i = 0; i < batch->sequences[index].state_id; i++) {
    ring += batch->ring_tokens;
  }
  uint32_t at = 0;
  for (int64_t token = 0; token < end; token++) {
    if (token >= valid_start) {
      ring[at] = (int32_t)(index * model_id + (size_t)token);
    }
    at = at + 1 == batch->ring_tokens ? 0 : at + 1;
  }
}

static void model_clear(int32_t *memory, size_t count) {
  for (size_t i = 0; i < count; i++) {
    memory[i] = model_unset;
  }
}

/* The window of history, token by token back from the chunk's begin. */
static void model_history(const struct batch *batch, size_t index, int32_t *rows) {
  const kvpool_swa_sequence *sequence = &batch->sequences[index];
  int64_t token = sequence->seqlen_k - sequence->seqlen_q;
  for (int64_t row = (int64_t)batch->window - 1; row >= 0; row--) {
    token--;
    rows[row] =
        token >= 0 && token >= sequence->swa_valid_start ? (int32_t)(index * model_id + (size_t)token) : model_zero;
  }
}

/* What a load of the segments gives; no row twice, and every segment inside its block. */
static void model_load(const int32_t *memory, uint32_t ring_tokens, const kvpool_segment *segments, size_t count,
                       int32_t *rows, size_t row_count) {
  model_clear(rows, row_count);
  for (size_t i = 0; i < count; i++) {
    assert_true(segments[i].src_block >= -1 && segments[i].src_block < states);
    assert_true(segments[i].src_begin >= 0 && segments[i].src_begin < segments[i].src_end);
    assert_true((uint32_t)segments[i].src_end <= ring_tokens);
    for (int32_t token = segments[i].src_begin; token < segments[i].src_end; token++) {
      int32_t row = segments[i].dst_offset + token - segments[i].src_begin;
      assert_true(row >= 0 && (size_t)row < row_count && rows[row] == model_unset);
      rows[row] = segments[i].src_block == -1 ? model_zero
                                              : memory[(size_t)segments[i].src_block * ring_tokens + (size_t)token];
    }
  }
}

/* How many pieces a window has to be read in: a new one where the zeros end and where the ring does. */
static size_t model_pieces(const int32_t *rows, const struct batch *batch) {
  size_t pieces = 0;
  for (uint32_t row = 0; row < batch->window; row++) {
    bool is_zero = rows[row] == model_zero;
    bool was_zero = row > 0 && rows[row - 1] == model_zero;
    pieces +=
        row == 0 || is_zero != was_zero || (!is_zero && rows[row] % model_id % (int32_t)batch->ring_tokens == 0);
  }
  return pieces;
}

static void test_load_against_model(void **state) {
  (void)state;
  static int32_t memory[states * ring_max], rows[batch_max * ring_max], expected[batch_max * ring_max];
  for (int i = 0; i < cases; i++) {
    struct batch batch;
    kvpool_segment segments[3 * batch_max];
    size_t counted = 0, count = 0, pieces = 0;
    int64_t total_k = 0;
    random_batch(&batch, false);
    model_clear(memory, sizeof memory / sizeof memory[0]);
    for (size_t s = 0; s < batch.count; s++) {
      const kvpool_swa_sequence *sequence = &batch.sequences[s];
      model_write(memory, &batch, s, sequence->swa_valid_start, sequence->seqlen_k - sequence->seqlen_q);
      model_history(&batch, s, expected + s * batch.window);
      pieces += model_pieces(expected + s * batch.window, &batch);
    }
    assert_int_equal(
        kvpool_plan_swa(batch.sequences, batch.count, batch.window, batch.ring_tokens, NULL, 0, &counted, NULL, NULL),
        KVPOOL_OK);
    assert_int_equal(kvpool_plan_swa(batch.sequences, batch.count, batch.window, batch.ring_tokens, segments, counted,
                                     &count, &total_k, NULL),
                     KVPOOL_OK);
    assert_int_equal(count, counted);
    assert_int_equal(count, pieces);
    assert_int_equal(total_k, batch.count * batch.window);
    model_load(memory, batch.ring_tokens, segments, count, rows, (size_t)total_k);
    assert_memory_equal(rows, expected, (size_t)total_k * sizeof rows[0]);
  }
}

static void test_slots_against_model(void **state) {
  (void)state;
  static int32_t memory[states * ring_max], expected[states * ring_max], slots[rows_max];
  static uint8_t stored[states * ring_max];
  for (int i = 0; i < cases; i++) {
    struct batch batch;
    size_t counted = 0, count = 0, row = 0;
    random_batch(&batch, false);
    model_clear(memory, sizeof memory / sizeof memory[0]);
    model_clear(expected, sizeof expected / sizeof expected[0]);
    memset(stored, 0, sizeof stored);
    assert_int_equal(kvpool_plan_swa_slots(batch.sequences, batch.count, batch.ring_tokens, NULL, 0, &counted, NULL),
                     KVPOOL_OK);
    assert_int_equal(
        kvpool_plan_swa_slots(batch.sequences, batch.count, batch.ring_tokens, slots, counted, &count, NULL),
        KVPOOL_OK);
    assert_int_equal(count, counted);
    for (size_t s = 0; s < batch.count; s++) {
      const kvpool_swa_sequence *sequence = &batch.sequences[s];
      model_write(expected, &batch, s, 0, sequence->seqlen_k);
      model_write(memory, &batch, s, 0, sequence->seqlen_k - sequence->seqlen_q);
      for (int64_t token = sequence->seqlen_k - sequence->seqlen_q; token < sequence->seqlen_k; token++, row++) {
        if (slots[row] == -1) {
          continue;
        }
        assert_true(slots[row] >= 0 && (uint32_t)slots[row] < states * batch.ring_tokens && !stored[slots[row]]);
        stored[slots[row]] = 1;
        memory[slots[row]] = (int32_t)(s * model_id + (size_t)token);
      }
    }
    assert_int_equal(count, row);
    assert_memory_equal(memory, expected, sizeof expected);
  }
}

/* The keys of the query at `position`, newest first: of the chunk, and of the history that is valid. */
static int32_t model_keys(const struct batch *batch, size_t index, int64_t position, int64_t valid_start,
                          int32_t *keys) {
  int32_t count = 0;
  for (int64_t token = position; token >= 0 && token >= valid_start && count < (int32_t)batch->window; token--) {
    keys[count++] = (int32_t)(index * model_id + (size_t)token);
  }
  return count;
}

static void test_pivots_against_model(void **state) {
  (void)state;
  static int32_t columns[rows_max + batch_max * ring_max];
  static kvpool_swa_pivot pivots[rows_max];
  for (int i = 0; i < cases; i++) {
    struct batch batch;
    size_t counted = 0, count = 0, row = 0;
    random_batch(&batch, false);
    int32_t column_count = 0;
    for (size_t s = 0; s < batch.count; s++, column_count += (int32_t)batch.window) {
      model_history(&batch, s, columns + column_count);
    }
    for (size_t s = 0; s < batch.count; s++) {
      for (int64_t q = batch.sequences[s].seqlen_k - batch.sequences[s].seqlen_q; q < batch.sequences[s].seqlen_k;
           q++) {
        columns[column_count++] = (int32_t)(s * model_id + (size_t)q);
      }
    }
    assert_int_equal(kvpool_plan_swa_pivots(batch.sequences, batch.count, batch.window, NULL, 0, &counted, NULL),
                     KVPOOL_OK);
    assert_int_equal(
        kvpool_plan_swa_pivots(batch.sequences, batch.count, batch.window, pivots, counted, &count, NULL), KVPOOL_OK);
    assert_int_equal(count, counted);
    for (size_t s = 0; s < batch.count; s++) {
      const kvpool_swa_sequence *sequence = &batch.sequences[s];
      int64_t history_end = sequence->seqlen_k - sequence->seqlen_q;
      /* The chunk's own keys are seen wherever the valid rows of the ring begin. */
      int64_t valid = sequence->swa_valid_start < history_end ? sequence->swa_valid_start : history_end;
      for (int64_t position = history_end; position < sequence->seqlen_k; position++, row++) {
        const kvpool_swa_pivot pivot = pivots[row];
        int32_t keys[ring_max], seen[ring_max];
        int32_t key_count = model_keys(&batch, s, position, valid, keys), seen_count = 0;
        assert_true(pivot.len1 >= 0 && pivot.len2 >= 1 && pivot.len1 + pivot.len2 == key_count);
        assert_true(pivot.offset1 >= 0 && pivot.offset1 + pivot.len1 == (int32_t)((s + 1) * batch.window));
        assert_true(pivot.offset2 >= 0 && pivot.offset2 + pivot.len2 <= column_count);
        for (int32_t k = pivot.len2; k-- > 0;) {
          seen[seen_count++] = columns[pivot.offset2 + k];
        }
        for (int32_t k = pivot.len1; k-- > 0;) {
          seen[seen_count++] = columns[pivot.offset1 + k];
        }
        assert_memory_equal(seen, keys, (size_t)key_count * sizeof keys[0]);
      }
    }
    assert_int_equal(count, row);
  }
}

/* The query at `position` against a ring that was given every token of the sequence. */
static void decode_check(const int32_t *memory, const struct batch *batch, size_t index, int64_t position,
                         kvpool_swa_window window) {
  int32_t keys[ring_max], seen[ring_max];
  int32_t key_count = model_keys(batch, index, position, batch->sequences[index].swa_valid_start, keys);
  int32_t begin = batch->sequences[index].state_id * (int32_t)batch->ring_tokens;
  int32_t end = begin + (int32_t)batch->ring_tokens;
  int32_t slot = window.start_slot;
  assert_int_equal(window.valid_length, key_count);
  assert_true(slot >= begin && slot < end);
  for (int32_t k = key_count; k-- > 0;) {
    seen[k] = memory[slot++];
    slot = slot == end ? begin : slot;
  }
  assert_memory_equal(seen, keys, (size_t)key_count * sizeof keys[0]);
  /* Behind the newest key, whatever the length, comes the next token's place. */
  assert_int_equal(slot - begin, (position + 1) % batch->ring_tokens);
}

/* The first sequence whose ring is too small for its new tokens; batch->count when there is none. */
static size_t decode_too_many(const struct batch *batch, const int32_t *memory) {
  for (size_t s = 0; s < batch->count; s++) {
    const kvpool_swa_sequence *sequence = &batch->sequences[s];
    if (sequence->seqlen_q == 0 || batch->window + (uint32_t)sequence->seqlen_q - 1 <= batch->ring_tokens) {
      continue;
    }
    /* Where the first query's window is full, its oldest key is indeed gone. */
    int32_t keys[ring_max];
    int32_t key_count =
        model_keys(batch, s, sequence->seqlen_k - sequence->seqlen_q, sequence->swa_valid_start, keys);
    if (key_count > 0 && key_count == (int32_t)batch->window) {
      const int32_t *ring = memory + (size_t)sequence->state_id * batch->ring_tokens;
      int32_t oldest = keys[key_count - 1];
      assert_int_not_equal(ring[oldest % model_id % (int32_t)batch->ring_tokens], oldest);
    }
    return s;
  }
  return batch->count;
}

static void test_decode_against_model(void **state) {
  (void)state;
  static int32_t memory[states * ring_max];
  static kvpool_swa_window windows[rows_max];
  int refused = 0;
  for (int i = 0; i < cases; i++) {
    struct batch batch;
    kvpool_error error;
    size_t counted = 0, count = 0, row = 0;
    random_batch(&batch, true);
    model_clear(memory, sizeof memory / sizeof memory[0]);
    for (size_t s = 0; s < batch.count; s++) {
      model_write(memory, &batch, s, batch.sequences[s].swa_valid_start, batch.sequences[s].seqlen_k);
    }
    size_t too_many = decode_too_many(&batch, memory);
    kvpool_status status = kvpool_plan_swa_decode(batch.sequences, batch.count, batch.window, batch.ring_tokens, NULL,
                                                  0, &counted, &error);
    if (too_many < batch.count) {
      assert_int_equal(status, KVPOOL_INVALID_ARGUMENT);
      expect_error(&error, KVPOOL_INVALID_ARGUMENT, "seqlen_q", (int64_t)too_many, batch.sequences[too_many].seqlen_q,
                   "window + seqlen_q - 1");
      refused++;
      continue;
    }
    assert_int_equal(status, KVPOOL_OK);
    assert_int_equal(kvpool_plan_swa_decode(batch.sequences, batch.count, batch.window, batch.ring_tokens, windows,
                                            counted, &count, NULL),
                     KVPOOL_OK);
    assert_int_equal(count, counted);
    for (size_t s = 0; s < batch.count; s++) {
      const kvpool_swa_sequence *sequence = &batch.sequences[s];
      for (int64_t position = sequence->seqlen_k - sequence->seqlen_q; position < sequence->seqlen_k; position++) {
        decode_check(memory, &batch, s, position, windows[row++]);
      }
    }
    assert_int_equal(count, row);
  }
  assert_true(refused > cases / 10 && refused < cases - cases / 10);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_load_against_model),
      cmocka_unit_test(test_slots_against_model),
      cmocka_unit_test(test_pivots_against_model),
      cmocka_unit_test(test_decode_against_model),
  };
  return cmocka_run_group_tests_name("plan_swa_model", tests, NULL, NULL);
}
