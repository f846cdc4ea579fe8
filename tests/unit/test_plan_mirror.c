/* The planners of the mirror order against a model that cuts, deals and gathers lists of tokens, and with bad input. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kvpool/kvpool.h"
#include "tests/unit/plan_support.h"

enum { cases = 4000, batch_max = 6, ranks_max = 9, tokens_max = 200, rows_max = batch_max * (tokens_max + 36) };

/* Ten tokens on two ranks: four pieces of three, [0 1 2] [3 4 5] [6 7 8] [9 - -]. Three more: pieces of one. */
static void test_on_paper(void **state) {
  (void)state;
  const int64_t seqlens_q[] = {10, 3};
  const int32_t rank0[] = {0, 1, 2, 9, -1, -1, 10, -1};
  const int32_t rank1[] = {3, 4, 5, 6, 7, 8, 11, 12};
  const int32_t undone[] = {0, 1, 2, 8, 9, 10, 11, 12, 13, 3, 6, 14, 15};
  int32_t out[16];
  size_t count = 0;
  assert_int_equal(kvpool_plan_mirror(seqlens_q, 2, 2, 0, out, 16, &count, NULL), KVPOOL_OK);
  assert_int_equal(count, 8);
  assert_memory_equal(out, rank0, sizeof rank0);
  assert_int_equal(kvpool_plan_mirror(seqlens_q, 2, 2, 1, out, 8, &count, NULL), KVPOOL_OK);
  assert_int_equal(count, 8);
  assert_memory_equal(out, rank1, sizeof rank1);
  assert_int_equal(kvpool_plan_mirror_reverse(seqlens_q, 2, 2, out, 13, &count, NULL), KVPOOL_OK);
  assert_int_equal(count, 13);
  assert_memory_equal(out, undone, sizeof undone);
}

/* Deals one chunk, whose tokens have the numbers from `first` on: a whole number of equal pieces, the last ones filled
 * up; from the front for ranks 0, 1, ..., then from there on for ranks ..., 1, 0. dealt[rank] grows by *used. */
static void model_deal(int32_t first, int64_t tokens, uint32_t ranks, int32_t (*dealt)[rows_max], size_t *used) {
  static int32_t padded[tokens_max + 2 * ranks_max];
  const size_t pieces = 2 * (size_t)ranks;
  size_t length = 0;
  for (int64_t token = 0; token < tokens; token++) {
    padded[length++] = first + (int32_t)token;
  }
  while (length % pieces != 0) {
    padded[length++] = -1;
  }
  size_t piece_tokens = length / pieces, at = 0;
  for (uint32_t rank = 0; rank < ranks; rank++) {
    for (size_t token = 0; token < piece_tokens; token++) {
      dealt[rank][*used + token] = padded[at++];
    }
  }
  for (uint32_t rank = ranks; rank-- > 0;) {
    for (size_t token = 0; token < piece_tokens; token++) {
      dealt[rank][*used + piece_tokens + token] = padded[at++];
    }
  }
  *used += 2 * piece_tokens;
}

static void test_against_model(void **state) {
  (void)state;
  static int32_t dealt[ranks_max][rows_max], out[rows_max], gathered[ranks_max * rows_max];
  for (int i = 0; i < cases; i++) {
    int64_t seqlens_q[batch_max];
    uint32_t ranks = 1 + random_below(ranks_max);
    size_t sequence_count = random_below(batch_max + 1), used = 0, count = 0, counted = 0;
    int32_t tokens = 0;
    for (size_t s = 0; s < sequence_count; s++) {
      const uint32_t lengths[] = {random_below(2), 2 * ranks * (1 + random_below(4)) + random_below(3) - 1,
                                  random_below(2 * ranks), random_below(tokens_max)};
      seqlens_q[s] = lengths[random_below(4)];
      model_deal(tokens, seqlens_q[s], ranks, dealt, &used);
      tokens += (int32_t)seqlens_q[s];
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
      assert_int_equal(kvpool_plan_mirror(seqlens_q, sequence_count, ranks, rank, NULL, 0, &counted, NULL),
                       KVPOOL_OK);
      assert_int_equal(kvpool_plan_mirror(seqlens_q, sequence_count, ranks, rank, out, counted, &count, NULL),
                       KVPOOL_OK);
      assert_int_equal(counted, used);
      assert_int_equal(count, used);
      assert_memory_equal(out, dealt[rank], used * sizeof out[0]);
      memcpy(gathered + rank * used, dealt[rank], used * sizeof out[0]);
    }
    assert_int_equal(kvpool_plan_mirror_reverse(seqlens_q, sequence_count, ranks, NULL, 0, &counted, NULL),
                     KVPOOL_OK);
    assert_int_equal(kvpool_plan_mirror_reverse(seqlens_q, sequence_count, ranks, out, counted, &count, NULL),
                     KVPOOL_OK);
    assert_int_equal(count, counted);
    assert_int_equal(count, tokens);
    for (int32_t token = 0; token < tokens; token++) {
      assert_true(out[token] >= 0 && (size_t)out[token] < ranks * used);
      assert_int_equal(gathered[out[token]], token);
    }
  }
}

static void expect_refusal(const int64_t *seqlens_q, size_t count, uint32_t ranks, kvpool_status expected,
                           const char *array, int64_t position, int64_t value, const char *text_part) {
  int32_t out[4] = {77};
  size_t needed = 77;
  kvpool_error error;
  assert_int_equal(kvpool_plan_mirror(seqlens_q, count, ranks, 0, out, 4, &needed, &error), expected);
  expect_error(&error, expected, array, position, value, text_part);
  assert_int_equal(kvpool_plan_mirror_reverse(seqlens_q, count, ranks, out, 4, &needed, &error), expected);
  expect_error(&error, expected, array, position, value, text_part);
  assert_int_equal(out[0], 77);
  assert_int_equal(needed, 77);
}

static void test_bad_input(void **state) {
  (void)state;
  int64_t seqlens_q[] = {4, 4};
  int32_t out[8];
  size_t count = 77;
  kvpool_error error;
  expect_refusal(seqlens_q, 2, 0, KVPOOL_INVALID_ARGUMENT, "ranks", -1, 0, "ranks = 0");
  expect_refusal(seqlens_q, 2, 1U << 31, KVPOOL_INVALID_ARGUMENT, "ranks", -1, 1LL << 31, "2147483648");
  seqlens_q[1] = -4;
  expect_refusal(seqlens_q, 2, 2, KVPOOL_INVALID_ARGUMENT, "seqlens_q", 1, -4, "sequence 1: seqlen_q = -4");
  seqlens_q[1] = INT64_MAX;
  expect_refusal(seqlens_q, 2, 1, KVPOOL_OUT_OF_RANGE, "seqlens_q", 1, INT64_MAX, "9223372036854775807");
  expect_refusal(seqlens_q, 2, INT32_MAX, KVPOOL_OUT_OF_RANGE, "seqlens_q", 0, 4, "2147483647 ranks");
  /* Two ranks: 4 and 2^31 - 8 are full pieces, 2^31 - 4 gathered rows in all; one token more is a row more each. */
  seqlens_q[1] = INT32_MAX - 7;
  assert_int_equal(kvpool_plan_mirror(seqlens_q, 2, 2, 1, NULL, 0, &count, &error), KVPOOL_OK);
  assert_int_equal(count, (1 << 30) - 2);
  assert_int_equal(kvpool_plan_mirror_reverse(seqlens_q, 2, 2, NULL, 0, &count, &error), KVPOOL_OK);
  assert_int_equal(count, INT32_MAX - 3);
  seqlens_q[1]++;
  expect_refusal(seqlens_q, 2, 2, KVPOOL_OUT_OF_RANGE, "seqlens_q", 1, INT32_MAX - 6, "2^31 - 1");

  seqlens_q[1] = 4;
  count = 77;
  assert_int_equal(kvpool_plan_mirror(seqlens_q, 2, 2, 2, out, 8, &count, &error), KVPOOL_INVALID_ARGUMENT);
  expect_error(&error, KVPOOL_INVALID_ARGUMENT, "rank", -1, 2, "rank = 2 of 2 ranks");
  assert_int_equal(kvpool_plan_mirror(seqlens_q, 2, 2, 1, out, 3, &count, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "out", -1, 4, "4 rows, room for 3");
  assert_int_equal(kvpool_plan_mirror_reverse(seqlens_q, 2, 2, out, 7, &count, &error), KVPOOL_OUT_OF_RANGE);
  expect_error(&error, KVPOOL_OUT_OF_RANGE, "out", -1, 8, "8 rows, room for 7");
  assert_int_equal(count, 77);
  assert_int_equal(kvpool_plan_mirror(NULL, 0, 2, 1, out, 0, &count, &error), KVPOOL_OK);
  assert_int_equal(count, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_on_paper),
      cmocka_unit_test(test_against_model),
      cmocka_unit_test(test_bad_input),
  };
  return cmocka_run_group_tests_name("plan_mirror", tests, NULL, NULL);
}
