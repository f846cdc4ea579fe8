/* The planners of sliding windows against the golden plans, numbers on paper, and with bad input. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kvpool/kvpool.h"
#include "tests/unit/plan_support.h"

enum { golden_batch_max = 16, golden_rows_max = 512 };

/* ---- golden plans -----------------------------------------------------------------------------------------------
 */

static size_t golden_sequences(const char *name, size_t count, kvpool_swa_sequence *out) {
  char path[128];
  int32_t fields[golden_batch_max][4];
  assert_true(count <= golden_batch_max);
  (void)snprintf(path, sizeof path, "%s/seqs.bin", name);
  golden_read(path, fields, count * sizeof fields[0]);
  for (size_t i = 0; i < count; i++) {
    out[i] = (kvpool_swa_sequence){.state_id = fields[i][0],
                                   .seqlen_k = fields[i][1],
                                   .seqlen_q = fields[i][2],
                                   .swa_valid_start = fields[i][3]};
  }
  return count;
}

static void golden_out(const char *name, void *out, size_t bytes) {
  char path[128];
  (void)snprintf(path, sizeof path, "%s/out.bin", name);
  golden_read(path, out, bytes);
}

static void test_golden_load(void **state) {
  (void)state;
  static const struct {
    const char *name;
    uint32_t window;
    uint32_t ring_tokens;
    size_t sequences;
    size_t segments;
  } golden[] = {{"plan_swa_w40_r64", 40, 64, 9, 14},
                {"plan_swa_w64_r64", 64, 64, 9, 16},
                {"plan_swa_w64_r96", 64, 96, 9, 16},
                {"plan_walkthrough_swa", 4096, 4096, 1, 2}};
  for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++) {
    kvpool_swa_sequence sequences[golden_batch_max];
    kvpool_segment expected[golden_rows_max], segments[golden_rows_max];
    size_t count = 0;
    int64_t total_k = 0;
    size_t batch = golden_sequences(golden[i].name, golden[i].sequences, sequences);
    golden_out(golden[i].name, expected, golden[i].segments * sizeof expected[0]);
    assert_int_equal(kvpool_plan_swa(sequences, batch, golden[i].window, golden[i].ring_tokens, segments,
                                     golden[i].segments, &count, &total_k, NULL),
                     KVPOOL_OK);
    assert_int_equal(count, golden[i].segments);
    assert_int_equal(total_k, batch * golden[i].window);
    assert_memory_equal(segments, expected, count * sizeof segments[0]);
  }
}

static void test_golden_slots(void **state) {
  (void)state;
  static const struct {
    const char *name;
    uint32_t ring_tokens;
  } golden[] = {{"swa_store_slots_r64", 64}, {"swa_store_slots_r4096", 4096}};
  for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++) {
    kvpool_swa_sequence sequences[golden_batch_max];
    int32_t expected[387], slots[387];
    size_t count = 0;
    size_t batch = golden_sequences(golden[i].name, 9, sequences);
    golden_out(golden[i].name, expected, sizeof expected);
    assert_int_equal(kvpool_plan_swa_slots(sequences, batch, golden[i].ring_tokens, slots, 387, &count, NULL),
                     KVPOOL_OK);
    assert_int_equal(count, 387);
    assert_memory_equal(slots, expected, sizeof expected);
  }
}

static void test_golden_pivots(void **state) {
  (void)state;
  static const struct {
    const char *name;
    uint32_t window;
  } golden[] = {{"plan_swa_pivots_w40", 40}, {"plan_swa_pivots_w64", 64}};
  for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++) {
    kvpool_swa_sequence sequences[golden_batch_max];
    kvpool_swa_pivot expected[387], pivots[387];
    size_t count = 0;
    size_t batch = golden_sequences(golden[i].name, 9, sequences);
    golden_out(golden[i].name, expected, sizeof expected);
    assert_int_equal(kvpool_plan_swa_pivots(sequences, batch, golden[i].window, pivots, 387, &count, NULL),
                     KVPOOL_OK);
    assert_int_equal(count, 387);
    assert_memory_equal(pivots, expected, sizeof expected);
  }
}

static void test_golden_decode(void **state) {
  (void)state;
  static const struct {
    const char *name;
    uint32_t window;
    size_t sequences;
    size_t rows;
  } golden[] = {{"plan_swa_decode_w40", 40, 12, 42}, {"plan_swa_decode_w64", 64, 8, 8}};
  for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++) {
    kvpool_swa_sequence sequences[golden_batch_max];
    kvpool_swa_window expected[golden_rows_max], windows[golden_rows_max];
    size_t count = 0;
    size_t batch = golden_sequences(golden[i].name, golden[i].sequences, sequences);
    golden_out(golden[i].name, expected, golden[i].rows * sizeof expected[0]);
    assert_int_equal(
        kvpool_plan_swa_decode(sequences, batch, golden[i].window, 64, windows, golden[i].rows, &count, NULL),
        KVPOOL_OK);
    assert_int_equal(count, golden[i].rows);
    assert_memory_equal(windows, expected, count * sizeof windows[0]);
  }
}

/* ---- numbers on paper -------------------------------------------------------------------------------------------
 */

/* 10,000 tokens, the last 1024 of them new, window and ring of 4096: 8976 = 2 * 4096 + 784. */
static void test_walkthrough(void **state) {
  (void)state;
  enum { state_id = 5, base = state_id * 4096, new_tokens = 1024 };
  const kvpool_swa_sequence sequence = {.state_id = state_id, .seqlen_k = 10000, .seqlen_q = new_tokens};
  kvpool_segment segments[3];
  static int32_t slots[new_tokens];
  static kvpool_swa_pivot pivots[new_tokens];
  kvpool_swa_window window;
  size_t count = 0;
  int64_t total_k = 0;
  assert_int_equal(kvpool_plan_swa(&sequence, 1, 4096, 4096, segments, 3, &count, &total_k, NULL), KVPOOL_OK);
  const kvpool_segment expected[] = {{state_id, 784, 4096, 0}, {state_id, 0, 784, 3312}};
  assert_int_equal(count, 2);
  assert_memory_equal(segments, expected, sizeof expected);
  assert_int_equal(total_k, 4096);

  assert_int_equal(kvpool_plan_swa_slots(&sequence, 1, 4096, slots, new_tokens, &count, NULL), KVPOOL_OK);
  assert_int_equal(count, new_tokens);
  for (int32_t i = 0; i < new_tokens; i++) {
    assert_int_equal(slots[i], base + 784 + i); /* up to base + 1807: all of them slots of the first segment */
  }

  assert_int_equal(kvpool_plan_swa_pivots(&sequence, 1, 4096, pivots, new_tokens, &count, NULL), KVPOOL_OK);
  assert_int_equal(count, new_tokens);
  const kvpool_swa_pivot first = {1, 4095, 4096, 1}, last = {1024, 3072, 4096, 1024};
  assert_memory_equal(&pivots[0], &first, sizeof first);
  assert_memory_equal(&pivots[new_tokens - 1], &last, sizeof last);

  const kvpool_swa_sequence next = {.state_id = state_id, .seqlen_k = 10001, .seqlen_q = 1};
  assert_int_equal(kvpool_plan_swa_decode(&next, 1, 4096, 4096, &window, 1, &count, NULL), KVPOOL_OK);
  assert_int_equal(count, 1);
  assert_int_equal(window.start_slot, base + 1809); /* 10001 - 4096 = 4096 + 1809 */
  assert_int_equal(window.valid_length, 4096);
}

/* Lengths at the end of int64, and the largest ring there can be. */
static void test_far_lengths(void **state) {
  (void)state;
  kvpool_segment segments[3];
  kvpool_swa_window windows[2];
  kvpool_swa_pivot pivots[2];
  int32_t slots[2];
  size_t count = 0;
  int64_t total_k = 0;
  /* 2^63 - 1 = 15 mod 16: the history ends at 13 of the ring. */
  kvpool_swa_sequence sequence = {.state_id = 2, .seqlen_k = INT64_MAX, .seqlen_q = 2};
  assert_int_equal(kvpool_plan_swa(&sequence, 1, 15, 16, segments, 3, &count, &total_k, NULL), KVPOOL_OK);
  const kvpool_segment wrapped[] = {{2, 14, 16, 0}, {2, 0, 13, 2}};
  assert_int_equal(count, 2);
  assert_memory_equal(segments, wrapped, sizeof wrapped);
  assert_int_equal(kvpool_plan_swa_slots(&sequence, 1, 16, slots, 2, &count, NULL), KVPOOL_OK);
  assert_int_equal(slots[0], 45);
  assert_int_equal(slots[1], 46);
  assert_int_equal(kvpool_plan_swa_decode(&sequence, 1, 15, 16, windows, 2, &count, NULL), KVPOOL_OK);
  const kvpool_swa_window both[] = {{47, 15}, {32, 15}};
  assert_memory_equal(windows, both, sizeof both);

  sequence.swa_valid_start = INT64_MAX;
  assert_int_equal(kvpool_plan_swa(&sequence, 1, 15, 16, segments, 3, &count, &total_k, NULL), KVPOOL_OK);
  const kvpool_segment zeros = {-1, 0, 15, 0};
  assert_int_equal(count, 1);
  assert_memory_equal(segments, &zeros, sizeof zeros);

  /* Slot 2^31 - 2 is the last of the largest ring. */
  const kvpool_swa_sequence largest = {.state_id = 0, .seqlen_k = INT32_MAX, .seqlen_q = 1};
  assert_int_equal(kvpool_plan_swa(&largest, 1, INT32_MAX, INT32_MAX, segments, 3, &count, &total_k, NULL),
                   KVPOOL_OK);
  const kvpool_segment most[] = {{-1, 0, 1, 0}, {0, 0, INT32_MAX - 1, 1}};
  assert_int_equal(count, 2);
  assert_memory_equal(segments, most, sizeof most);
  assert_int_equal(total_k, INT32_MAX);
  assert_int_equal(kvpool_plan_swa_slots(&largest, 1, INT32_MAX, slots, 2, &count, NULL), KVPOOL_OK);
  assert_int_equal(slots[0], INT32_MAX - 1);
  assert_int_equal(kvpool_plan_swa_pivots(&largest, 1, INT32_MAX - 1, pivots, 2, &count, NULL), KVPOOL_OK);
  const kvpool_swa_pivot pivot = {1, INT32_MAX - 2, INT32_MAX - 1, 1};
  assert_memory_equal(pivots, &pivot, sizeof pivot);
}

/* ---- what is refused --------------------------------------------------------------------------------------------
 */

/* The same refusal from every planner that looks at the ring, and nothing written. */
static void expect_ring_refusal(const kvpool_swa_sequence *sequences, size_t count, uint32_t window,
                                uint32_t ring_tokens, kvpool_status expected, const char *array, int64_t position,
                                int64_t value, const char *text_part) {
  kvpool_segment segments[8] = {{.src_begin = 77}};
  kvpool_swa_window windows[8] = {{.start_slot = 77}};
  int32_t slots[8] = {77};
  size_t needed = 77;
  int64_t total_k = 77;
  kvpool_error error;
  assert_int_equal(kvpool_plan_swa(sequences, count, window, ring_tokens, segments, 8, &needed, &total_k, &error),
                   expected);
  expect_error(&error, expected, array, position, value, text_part);
  assert_int_equal(kvpool_plan_swa_decode(sequences, count, window, ring_tokens, windows, 8, &needed, &error),
                   expected);
  expect_error(&error, expected, array, position, value, text_part);
  if (strcmp(array, "window") != 0) {
    assert_int_equal(kvpool_plan_swa_slots(sequences, count, ring_tokens, slots, 8, &needed, &error), expected);
    expect_error(&error, expected, array, position, value, text_part);
  }
  assert_int_equal(segments[0].src_begin, 77);
  assert_int_equal(windows[0].start_slot, 77);
  assert_int_equal(slots[0], 77);
  assert_int_equal(needed, 77);
  assert_int_equal(total_k, 77);
}

static void test_bad_rings(void **state) {
  (void)state;
  kvpool_swa_sequence sequences[2] = {{.state_id = 1, .seqlen_k = 30, .seqlen_q = 1},
                                      {.state_id = 2, .seqlen_k = 30, .seqlen_q = 1}};
  expect_ring_refusal(sequences, 2, 0, 16, KVPOOL_INVALID_ARGUMENT, "window", -1, 0, "window = 0");
  expect_ring_refusal(sequences, 2, 1U << 31, 16, KVPOOL_INVALID_ARGUMENT, "window", -1, 1LL << 31, "2147483648");
  expect_ring_refusal(sequences, 2, 8, 0, KVPOOL_INVALID_ARGUMENT, "ring_tokens", -1, 0, "ring_tokens = 0");
  expect_ring_refusal(sequences, 2, 8, UINT32_MAX, KVPOOL_INVALID_ARGUMENT, "ring_tokens", -1, UINT32_MAX,
                      "4294967295");
  expect_ring_refusal(sequences, 2, 17, 16, KVPOOL_INVALID_ARGUMENT, "window", -1, 17,
                      "window = 17 is larger than the ring of 16");
  sequences[1].state_id = -1;
  expect_ring_refusal(sequences, 2, 8, 16, KVPOOL_INVALID_ARGUMENT, "state_id", 1, -1, "sequence 1: state_id = -1");
  sequences[1].state_id = INT32_MIN;
  expect_ring_refusal(sequences, 2, 8, 16, KVPOOL_INVALID_ARGUMENT, "state_id", 1, INT32_MIN, "-2147483648");
  sequences[1].state_id = 1 << 27; /* its first slot is 2^31; the ring before it ends at 2^31 - 1 */
  expect_ring_refusal(sequences, 2, 8, 16, KVPOOL_OUT_OF_RANGE, "state_id", 1, 1 << 27, "2147483663");
  sequences[1].state_id--;
  size_t count = 0;
  int32_t slots[2];
  assert_int_equal(kvpool_plan_swa_slots(sequences, 2, 16, slots, 2, &count, NULL), KVPOOL_OK);
  assert_int_equal(slots[1], INT32_MAX - 2); /* token 29 at 13 of 16 */
  sequences[1].state_id = 2;
  sequences[1].seqlen_q = 31;
  expect_ring_refusal(sequences, 2, 8, 16, KVPOOL_INVALID_ARGUMENT, "seqlen_q", 1, 31, "seqlen_k = 30");
  sequences[1].seqlen_q = -1;
  expect_ring_refusal(sequences, 2, 8, 16, KVPOOL_INVALID_ARGUMENT, "seqlen_q", 1, -1, "sequence 1");
  sequences[1].seqlen_q = 1;
  sequences[1].swa_valid_start = -1;
  expect_ring_refusal(sequences, 2, 8, 16, KVPOOL_INVALID_ARGUMENT, "swa_valid_start", 1, -1,
                      "swa_valid_start = -1 is negative");
}

static void test_bad_chunks(void **state) {
  (void)state;
  kvpool_swa_sequence sequences[2] = {{.seqlen_k = 30, .seqlen_q = 2}, {.seqlen_k = 30, .seqlen_q = 3}};
  kvpool_swa_pivot pivots[5];
  size_t count = 0;
  kvpool_error error;
  assert_int_equal(kvpool_plan_swa_pivots(sequences, 2, 0, pivots, 5, &count, &error), KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "window", -1, 0, "window = 0");
  assert_int_equal(kvpool_plan_swa_pivots(sequences, 2, 1 << 30, pivots, 5, &count, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "window", -1, 1 << 30, "2 sequences");
  /* 2 * (2^30 - 3) columns of history and 5 of the chunks are 2^31 - 1: they fit, one more doesn't. */
  assert_int_equal(kvpool_plan_swa_pivots(sequences, 2, (1 << 30) - 3, pivots, 5, &count, &error), KVPOOL_OK);
  assert_int_equal(pivots[4].offset2 + pivots[4].len2, INT32_MAX);
  sequences[1].seqlen_q = 4;
  assert_int_equal(kvpool_plan_swa_pivots(sequences, 2, (1 << 30) - 3, pivots, 5, &count, &error),
                   KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "seqlen_q", 1, 4, "2^31 - 1");
  sequences[1].seqlen_q = -1;
  assert_int_equal(kvpool_plan_swa_pivots(sequences, 2, 8, pivots, 5, &count, &error), KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "seqlen_q", 1, -1, "sequence 1");
  sequences[1].seqlen_q = 3;
  sequences[0].swa_valid_start = INT64_MIN;
  assert_int_equal(kvpool_plan_swa_pivots(sequences, 2, 8, pivots, 5, &count, &error), KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "swa_valid_start", 0, INT64_MIN, "sequence 0");
  sequences[0].swa_valid_start = 0;

  /* Rows in all past int32. */
  kvpool_segment segments[6];
  int32_t slots[5];
  int64_t total_k = 0;
  const kvpool_swa_sequence three[] = {{.seqlen_k = 1LL << 40, .seqlen_q = 1LL << 30},
                                       {.seqlen_k = 1LL << 40, .seqlen_q = 1LL << 30},
                                       {.seqlen_k = 1LL << 40, .seqlen_q = INT64_C(1) << 40}};
  assert_int_equal(kvpool_plan_swa(three, 2, 1 << 30, 1 << 30, segments, 6, &count, &total_k, &error),
                   KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "window", -1, 1 << 30, "2 sequences");
  assert_int_equal(kvpool_plan_swa_slots(three, 1, 16, NULL, 0, &count, &error), KVPOOL_OK);
  assert_int_equal(count, 1 << 30);
  assert_int_equal(kvpool_plan_swa_slots(three, 2, 16, slots, 5, &count, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "seqlen_q", 1, 1 << 30, "2^31 - 1");
  assert_int_equal(kvpool_plan_swa_slots(three + 2, 1, 16, slots, 5, &count, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "seqlen_q", 0, INT64_C(1) << 40, "1099511627776");
}

static void test_no_room(void **state) {
  (void)state;
  const kvpool_swa_sequence sequence = {.seqlen_k = 30, .seqlen_q = 3};
  kvpool_segment segments[2];
  kvpool_swa_pivot pivots[3];
  kvpool_swa_window windows[3];
  int32_t slots[3];
  size_t count = 77;
  kvpool_error error;
  /* 27 = 16 + 11: 8 rows from offset 3 on, in one piece. */
  assert_int_equal(kvpool_plan_swa(&sequence, 1, 8, 16, segments, 0, &count, NULL, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "out", -1, 1, "1 segments, room for 0");
  assert_int_equal(kvpool_plan_swa_slots(&sequence, 1, 16, slots, 2, &count, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "out", -1, 3, "3 slots, room for 2");
  assert_int_equal(kvpool_plan_swa_pivots(&sequence, 1, 8, pivots, 2, &count, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "out", -1, 3, "3 pivots, room for 2");
  assert_int_equal(kvpool_plan_swa_decode(&sequence, 1, 8, 16, windows, 2, &count, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "out", -1, 3, "3 windows, room for 2");
  assert_int_equal(count, 77);

  /* An empty batch needs none. */
  assert_int_equal(kvpool_plan_swa(NULL, 0, 8, 16, segments, 0, &count, NULL, &error), KVPOOL_OK);
  assert_int_equal(count, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_golden_load),   cmocka_unit_test(test_golden_slots), cmocka_unit_test(test_golden_pivots),
      cmocka_unit_test(test_golden_decode), cmocka_unit_test(test_walkthrough),  cmocka_unit_test(test_far_lengths),
      cmocka_unit_test(test_bad_rings),     cmocka_unit_test(test_bad_chunks),   cmocka_unit_test(test_no_room),
  };
  return cmocka_run_group_tests_name("plan_swa", tests, NULL, NULL);
}
