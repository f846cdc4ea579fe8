/* The planners against the golden plan, against a model that walks one token at a time, and with bad input. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kvpool/kvpool.h"
#include "tests/unit/plan_support.h"

enum { table_max = 300, segments_max = 4096, rows_max = 65536, sequences_max = 8, cases = 3000 };

static void test_golden_walkthrough(void **state) {
  (void)state;
  enum { blocks = 157 };
  int32_t table[blocks];
  kvpool_segment expected[blocks], segments[blocks + 1];
  golden_read("plan_walkthrough_compressed/block_table.bin", table, sizeof table);
  golden_read("plan_walkthrough_compressed/out.bin", expected, sizeof expected);
  const kvpool_sequence sequence = {.seqlen_k = 10000, .seqlen_q = 1024, .block_table = table, .table_count = blocks};
  int32_t cu_seqlens[2];
  size_t count = 0;
  int64_t total_k = 0;
  kvpool_error error;
  assert_int_equal(
      kvpool_plan_compressed(&sequence, 1, 4, 16, cu_seqlens, segments, blocks, &count, &total_k, &error), KVPOOL_OK);
  assert_int_equal(count, blocks);
  assert_int_equal(total_k, 2500);
  assert_int_equal(cu_seqlens[0], 0);
  assert_int_equal(cu_seqlens[1], 2500);
  assert_memory_equal(segments, expected, sizeof expected);

  /* The same cache as a plain range. */
  memset(segments, 0, sizeof segments);
  assert_int_equal(kvpool_plan_paged_range(table, blocks, 16, 0, 2500, 0, segments, blocks, &count, &error),
                   KVPOOL_OK);
  assert_int_equal(count, blocks);
  assert_memory_equal(segments, expected, sizeof expected);

  int64_t begin = 0, end = 0;
  assert_int_equal(kvpool_plan_new_compressed(10000, 1024, 4, &begin, &end, &error), KVPOOL_OK);
  assert_int_equal(begin, 2244); /* floor(8976 / 4) */
  assert_int_equal(end, 2500);
}

/* Where token t of a sequence lies, said the slow way. */
static int64_t model_slot(const int32_t *table, uint32_t tokens_per_block, int64_t token) {
  int64_t block = 0;
  while (token >= tokens_per_block) {
    token -= tokens_per_block;
    block++;
  }
  return (int64_t)table[block] * tokens_per_block + token;
}

/* Row by row: the slot that segments give to destination dst, -1 for a zero row, -2 when nothing covers it. */
static void expand(const kvpool_segment *segments, size_t count, uint32_t tokens_per_block, int32_t dst_begin,
                   int64_t *rows, size_t row_count) {
  for (size_t i = 0; i < row_count; i++) {
    rows[i] = -2;
  }
  for (size_t i = 0; i < count; i++) {
    const kvpool_segment *segment = &segments[i];
    assert_true(segment->src_begin >= 0 && segment->src_begin < segment->src_end);
    assert_true((uint32_t)segment->src_end <= tokens_per_block);
    for (int32_t token = segment->src_begin; token < segment->src_end; token++) {
      int64_t row = (int64_t)segment->dst_offset - dst_begin + (token - segment->src_begin);
      assert_true(row >= 0 && row < (int64_t)row_count);
      assert_int_equal(rows[row], -2);
      rows[row] = segment->src_block < 0 ? -1 : (int64_t)segment->src_block * tokens_per_block + token;
    }
  }
}

static void random_table(int32_t *table, size_t count) {
  for (size_t i = 0; i < count; i++) {
    table[i] = (int32_t)random_below(1000000);
  }
}

/* A token of the table or behind its last: mostly at a border of a block, or next to one. */
static uint32_t random_token(uint32_t tokens_per_block, uint32_t tokens_max) {
  const uint32_t border = tokens_per_block * random_below(tokens_max / tokens_per_block + 1);
  switch (random_below(5)) {
  case 0:
    return 0;
  case 1:
    return random_below(2) == 0 ? tokens_max : border;
  case 2:
    return border == 0 ? 1 : border - 1;
  case 3:
    return border < tokens_max ? border + 1 : border;
  default:
    return random_below(tokens_max + 1);
  }
}

static void test_range_and_slots_against_model(void **state) {
  (void)state;
  static kvpool_segment segments[segments_max];
  static int64_t rows[rows_max];
  static int32_t slots[rows_max];
  for (int i = 0; i < cases; i++) {
    int32_t table[table_max];
    uint32_t tokens_per_block = 1 + random_below(133);
    size_t table_count = 1 + random_below(table_max);
    random_table(table, table_count);
    uint32_t tokens_max = (uint32_t)table_count * tokens_per_block;
    uint32_t a = random_token(tokens_per_block, tokens_max);
    uint32_t b = random_below(6) == 0 ? a : random_token(tokens_per_block, tokens_max);
    int64_t begin = a < b ? a : b, end = a < b ? b : a;
    size_t length = (size_t)(end - begin), count = 0, counted = 0;
    int32_t dst = (int32_t)random_below(1000);
    kvpool_error error;
    assert_int_equal(
        kvpool_plan_paged_range(table, table_count, tokens_per_block, begin, end, dst, NULL, 0, &counted, &error),
        KVPOOL_OK);
    assert_int_equal(kvpool_plan_paged_range(table, table_count, tokens_per_block, begin, end, dst, segments,
                                             segments_max, &count, &error),
                     KVPOOL_OK);
    assert_int_equal(count, counted);
    expand(segments, count, tokens_per_block, dst, rows, length);
    assert_int_equal(kvpool_plan_slot_mapping(table, table_count, tokens_per_block, begin, end, slots, &error),
                     KVPOOL_OK);
    size_t blocks = 0;
    for (size_t row = 0; row < length; row++) {
      int64_t token = begin + (int64_t)row;
      assert_int_equal(rows[row], model_slot(table, tokens_per_block, token));
      assert_int_equal(slots[row], rows[row]);
      blocks += row == 0 || token % tokens_per_block == 0;
    }
    assert_int_equal(count, blocks); /* no more segments than blocks touched */
  }
}

static void random_batch(kvpool_sequence *sequences, size_t count, int32_t (*tables)[table_max], uint32_t ratio,
                         uint32_t tokens_per_block) {
  for (size_t i = 0; i < count; i++) {
    random_table(tables[i], table_max);
    const uint32_t at_border = ratio * (random_below(3) * tokens_per_block + random_below(2)) + random_below(3);
    const uint32_t lengths[] = {random_below(1500), at_border > 0 ? at_border - 1 : 0};
    uint32_t seqlen_k = lengths[random_below(2)];
    uint32_t needed = (seqlen_k / ratio + tokens_per_block - 1) / tokens_per_block;
    sequences[i] = (kvpool_sequence){.seqlen_k = seqlen_k,
                                     .seqlen_q = random_below(4) == 0 ? seqlen_k : random_below(seqlen_k + 1),
                                     .block_table = tables[i],
                                     .table_count = needed + random_below(3)};
  }
}

static void test_compressed_against_model(void **state) {
  (void)state;
  static kvpool_segment segments[sequences_max * table_max * 8];
  static int64_t rows[rows_max];
  static int32_t ks[rows_max], ke[rows_max];
  static int32_t tables[sequences_max][table_max];
  for (int i = 0; i < cases; i++) {
    kvpool_sequence sequences[sequences_max];
    size_t sequence_count = random_below(sequences_max + 1), count = 0, query = 0;
    uint32_t ratio = 1 + random_below(8), tokens_per_block = 8 + random_below(60);
    random_batch(sequences, sequence_count, tables, ratio, tokens_per_block);
    int32_t cu_seqlens[sequences_max + 1];
    int64_t total_k = -1, row = 0;
    kvpool_error error;
    assert_int_equal(kvpool_plan_compressed(sequences, sequence_count, ratio, tokens_per_block, cu_seqlens, segments,
                                            sizeof segments / sizeof segments[0], &count, &total_k, &error),
                     KVPOOL_OK);
    expand(segments, count, tokens_per_block, 0, rows, (size_t)total_k);
    assert_int_equal(
        kvpool_plan_compressed_visible(sequences, sequence_count, ratio, cu_seqlens, ks, ke, rows_max, &error),
        KVPOOL_OK);
    for (size_t s = 0; s < sequence_count; s++) {
      assert_int_equal(cu_seqlens[s], row);
      int64_t first_row = row, visible = 0, before = 0, new_begin = -1, new_end = -1;
      /* Token after token: every ratio-th completes a compressed one, which the queries from there on see. */
      for (int64_t position = 0; position < sequences[s].seqlen_k; position++) {
        if ((position + 1) % ratio == 0) {
          assert_int_equal(rows[row], model_slot(tables[s], tokens_per_block, visible));
          row++;
          visible++;
        }
        before += position + 1 == sequences[s].seqlen_k - sequences[s].seqlen_q ? visible : 0;
        if (position >= sequences[s].seqlen_k - sequences[s].seqlen_q) {
          assert_int_equal(ks[query], first_row);
          assert_int_equal(ke[query], first_row + visible);
          query++;
        }
      }
      assert_int_equal(kvpool_plan_new_compressed(sequences[s].seqlen_k, sequences[s].seqlen_q, ratio, &new_begin,
                                                  &new_end, &error),
                       KVPOOL_OK);
      assert_int_equal(new_begin, before);
      assert_int_equal(new_end, visible);
      if (visible == 0) {
        assert_int_equal(rows[row], -1);
        row++;
      }
    }
    assert_int_equal(total_k, row);
    assert_int_equal(cu_seqlens[sequence_count], row);
  }
}

static void test_bad_ranges(void **state) {
  (void)state;
  const int32_t table[] = {7, -1, 9, INT32_MAX};
  kvpool_segment segments[4];
  int32_t slots[8];
  size_t count = 77;
  kvpool_error error;
  memset(segments, 0x55, sizeof segments);
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, 0, 17, 0, segments, 4, &count, &error),
                   KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "block_table", 1, -1, "block_table[1] = -1");
  /* The entry is only looked at inside the range. */
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, 0, 16, 0, NULL, 0, &count, &error), KVPOOL_OK);
  assert_int_equal(count, 1);
  count = 77;
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, 32, 65, 0, segments, 4, &count, &error),
                   KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "block_table", 4, 4, "4 entries");
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, 32, 64, 0, segments, 1, &count, &error),
                   KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "out", -1, 2, "2 segments, room for 1");
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, -1, 3, 0, segments, 4, &count, &error),
                   KVPOOL_INVALID_ARGUMENT);
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, 4, 3, 0, segments, 4, &count, &error),
                   KVPOOL_INVALID_ARGUMENT);
  assert_int_equal(kvpool_plan_paged_range(table, 4, 0, 0, 3, 0, segments, 4, &count, &error),
                   KVPOOL_INVALID_ARGUMENT);
  assert_int_equal(kvpool_plan_paged_range(table, 4, 1U << 31, 0, 3, 0, segments, 4, &count, &error),
                   KVPOOL_INVALID_ARGUMENT);
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, 0, 3, -1, segments, 4, &count, &error),
                   KVPOOL_INVALID_ARGUMENT);
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, 0, 16, INT32_MAX - 15, segments, 4, &count, &error),
                   KVPOOL_OUT_OF_RANGE);
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, INT64_MAX - 1, INT64_MAX, 0, segments, 4, &count, NULL),
                   KVPOOL_OUT_OF_RANGE);
  assert_int_equal(count, 77);
  assert_int_equal(segments[0].src_block, 0x55555555);

  /* The last destination row is 2^31 - 2: it still fits. */
  assert_int_equal(kvpool_plan_paged_range(table, 4, 16, 0, 16, INT32_MAX - 16, segments, 4, &count, &error),
                   KVPOOL_OK);
  assert_int_equal(segments[0].dst_offset, INT32_MAX - 16);

  /* INT32_MAX * 1 + 0 is a slot, INT32_MAX * 2 is not. */
  memset(slots, 0x55, sizeof slots);
  assert_int_equal(kvpool_plan_slot_mapping(table, 4, 2, 5, 7, slots, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "block_table", 3, INT32_MAX, "4294967294");
  assert_int_equal(slots[0], 0x55555555);
  assert_int_equal(kvpool_plan_slot_mapping(table, 4, 1, 3, 4, slots, &error), KVPOOL_OK);
  assert_int_equal(slots[0], INT32_MAX);
  assert_int_equal(kvpool_plan_slot_mapping(table, 4, 16, 15, 17, slots, &error), KVPOOL_INVALID_ARGUMENT);
}

static void test_bad_batches(void **state) {
  (void)state;
  const int32_t table[] = {3, 4, -5};
  kvpool_sequence sequences[] = {{.seqlen_k = 64, .seqlen_q = 64, .block_table = table, .table_count = 1},
                                 {.seqlen_k = 129, .seqlen_q = 1, .block_table = table, .table_count = 2}};
  kvpool_segment segments[8];
  int32_t cu_seqlens[3] = {0, 16, 48}, ks[65], ke[65];
  size_t count = 0;
  int64_t total_k = 0, begin = 0, end = 0;
  kvpool_error error;
  assert_int_equal(kvpool_plan_compressed(sequences, 2, 4, 16, cu_seqlens, segments, 8, &count, &total_k, &error),
                   KVPOOL_OK);
  assert_int_equal(count, 3);
  assert_int_equal(kvpool_plan_compressed(sequences, 2, 4, 16, NULL, NULL, 0, &count, NULL, &error), KVPOOL_OK);
  assert_int_equal(kvpool_plan_compressed(sequences, 2, 4, 16, cu_seqlens, segments, 2, &count, &total_k, &error),
                   KVPOOL_OUT_OF_RANGE);
  assert_int_equal(kvpool_plan_compressed(sequences, 2, 0, 16, cu_seqlens, segments, 8, &count, &total_k, &error),
                   KVPOOL_INVALID_ARGUMENT);
  assert_int_equal(kvpool_plan_compressed_visible(sequences, 2, 4, cu_seqlens, ks, ke, 65, &error), KVPOOL_OK);
  assert_int_equal(kvpool_plan_compressed_visible(sequences, 2, 4, cu_seqlens, ks, ke, 64, &error),
                   KVPOOL_OUT_OF_RANGE);
  cu_seqlens[2]++;
  assert_int_equal(kvpool_plan_compressed_visible(sequences, 2, 4, cu_seqlens, ks, ke, 65, &error),
                   KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "cu_seqlens", 2, 49, "48");
  cu_seqlens[2]--;
  cu_seqlens[1] = 15;
  assert_int_equal(kvpool_plan_compressed_visible(sequences, 2, 4, cu_seqlens, ks, ke, 65, &error),
                   KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "cu_seqlens", 1, 15, "16");
  sequences[1].seqlen_k = 132;
  assert_int_equal(kvpool_plan_compressed(sequences, 2, 4, 16, cu_seqlens, segments, 8, &count, &total_k, &error),
                   KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "block_table", 2, 2, "sequence 1");
  sequences[1].table_count = 3;
  assert_int_equal(kvpool_plan_compressed(sequences, 2, 4, 16, cu_seqlens, segments, 8, &count, &total_k, &error),
                   KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "block_table", 2, -5, "sequence 1");
  sequences[1].seqlen_q = 133;
  assert_int_equal(kvpool_plan_compressed(sequences, 2, 4, 16, cu_seqlens, segments, 8, &count, &total_k, &error),
                   KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "seqlen_q", -1, 133, "132");
  assert_int_equal(kvpool_plan_new_compressed(10, 11, 4, &begin, &end, &error), KVPOOL_INVALID_ARGUMENT);
  assert_int_equal(kvpool_plan_new_compressed(10, -1, 4, &begin, &end, &error), KVPOOL_INVALID_ARGUMENT);
  assert_int_equal(kvpool_plan_new_compressed(INT64_MAX, 0, 1, &begin, &end, &error), KVPOOL_OK);
  assert_int_equal(begin, INT64_MAX);
}

/* Rows past int32 in all, although each sequence has few: one block of 2^31 - 1 tokens, read by three sequences. */
static void test_rows_overflow(void **state) {
  (void)state;
  const int32_t table[] = {0};
  kvpool_sequence sequences[3];
  for (size_t i = 0; i < 3; i++) {
    sequences[i] = (kvpool_sequence){.seqlen_k = 1 << 30, .seqlen_q = 0, .block_table = table, .table_count = 1};
  }
  kvpool_segment segments[3];
  int32_t cu_seqlens[4];
  size_t count = 0;
  int64_t total_k = 0;
  kvpool_error error;
  assert_int_equal(
      kvpool_plan_compressed(sequences, 1, 1, INT32_MAX, cu_seqlens, segments, 3, &count, &total_k, &error),
      KVPOOL_OK);
  assert_int_equal(total_k, 1 << 30);
  assert_int_equal(
      kvpool_plan_compressed(sequences, 2, 1, INT32_MAX, cu_seqlens, segments, 3, &count, &total_k, &error),
      KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "seqlen_k", 1, 1 << 30, "sequence 1");
  assert_int_equal(kvpool_plan_compressed_visible(sequences, 3, 1, (const int32_t[]){0, 1 << 30, 0}, cu_seqlens,
                                                  cu_seqlens, 4, &error),
                   KVPOOL_OUT_OF_RANGE);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_golden_walkthrough),
      cmocka_unit_test(test_range_and_slots_against_model),
      cmocka_unit_test(test_compressed_against_model),
      cmocka_unit_test(test_bad_ranges),
      cmocka_unit_test(test_bad_batches),
      cmocka_unit_test(test_rows_overflow),
  };
  return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
