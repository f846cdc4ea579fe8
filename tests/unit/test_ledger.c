/* The memory ledger: what is charged, what is refused, what the refusal says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "server/supervisor/ledger.h"

static void test_nothing_before_the_limit_is_known(void **state) {
  (void)state;
  struct kvp_ledger ledger = {0};
  struct kvp_error error;
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "main", 1, 1, &error), KVP_OUT_OF_MEMORY);
  assert_int_equal(kvp_ledger_left_bytes(&ledger), 0);
}

static void test_up_to_the_last_byte(void **state) {
  (void)state;
  struct kvp_ledger ledger = {.limit_bytes = 1000};
  struct kvp_error error;
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "main", 600, 600, &error), KVP_OK);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_BUFFER, "a buffer", 400, 400, &error), KVP_OK);
  assert_int_equal(kvp_ledger_left_bytes(&ledger), 0);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_BUFFER, "a buffer", 1, 1, &error),
                   KVP_OUT_OF_MEMORY);
  kvp_ledger_release(&ledger, KVP_LEDGER_POOL, 600);
  assert_int_equal(kvp_ledger_left_bytes(&ledger), 600);
  assert_int_equal(ledger.used_bytes[KVP_LEDGER_BUFFER], 400);
}

static void test_a_refusal_has_the_numbers(void **state) {
  (void)state;
  struct kvp_ledger ledger = {.limit_bytes = 5000};
  struct kvp_error error;
  assert_int_equal(kvp_ledger_charge(&ledger, "host:3", KVP_LEDGER_POOL, "main", 1200, 1200, &error), KVP_OK);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:3", KVP_LEDGER_BUFFER, "a buffer", 34, 34, &error), KVP_OK);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:3", KVP_LEDGER_POOL, "second", 3767, 3767, &error),
                   KVP_OUT_OF_MEMORY);
  assert_int_equal(error.status, KVP_OUT_OF_MEMORY);
  const char *const parts[] = {"second", "host:3", "3767", "3766", "5000", "1200", "34"};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    assert_non_null(strstr(error.text, parts[i]));
  }
  assert_int_equal(kvp_ledger_left_bytes(&ledger), 3766);
}

static void test_no_sum_wraps(void **state) {
  (void)state;
  struct kvp_ledger ledger = {.limit_bytes = UINT64_MAX - 1};
  struct kvp_error error;
  assert_int_equal(
      kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "main", UINT64_MAX - 2, UINT64_MAX - 2, &error), KVP_OK);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "b", UINT64_MAX, UINT64_MAX, &error),
                   KVP_OUT_OF_MEMORY);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "b", 2, 2, &error), KVP_OUT_OF_MEMORY);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "b", 1, 1, &error), KVP_OK);
}

static void test_a_memory_takes_whole_pieces(void **state) {
  (void)state;
  const struct kvp_ledger gpu = {.granularity_bytes = 2097152};
  static const uint64_t cases[][2] = {{0, 0},
                                      {1, 2097152},
                                      {2097151, 2097152},
                                      {2097152, 2097152},
                                      {2097153, 4194304},
                                      {UINT64_C(1073741824), UINT64_C(1073741824)},
                                      {UINT64_MAX - 2097151, UINT64_MAX - 2097151}, /* 2^64 - 2^21 */
                                      {UINT64_MAX - 2097150, UINT64_MAX},
                                      {UINT64_MAX, UINT64_MAX}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    assert_int_equal(kvp_ledger_memory_bytes(&gpu, cases[i][0]), cases[i][1]);
  }
  for (uint64_t granularity = 0; granularity <= 1; granularity++) {
    const struct kvp_ledger host = {.granularity_bytes = granularity};
    assert_int_equal(kvp_ledger_memory_bytes(&host, 2097153), 2097153);
    assert_int_equal(kvp_ledger_memory_bytes(&host, UINT64_MAX), UINT64_MAX);
  }
  const struct kvp_ledger odd = {.granularity_bytes = 3}; /* no power of two is needed */
  assert_int_equal(kvp_ledger_memory_bytes(&odd, 7), 9);
}

static void test_what_is_taken_counts(void **state) {
  (void)state;
  struct kvp_ledger ledger = {.limit_bytes = 5000000, .granularity_bytes = 2097152};
  struct kvp_error error;
  assert_int_equal(kvp_ledger_charge(&ledger, "cuda:0", KVP_LEDGER_BUFFER, "a buffer", 10, 2097152, &error), KVP_OK);
  assert_int_equal(kvp_ledger_used_bytes(&ledger), 2097152);
  assert_int_equal(kvp_ledger_left_bytes(&ledger), 2902848);
  assert_int_equal(kvp_ledger_charge(&ledger, "cuda:0", KVP_LEDGER_POOL, "pool 'p'", 2500000, 4194304, &error),
                   KVP_OUT_OF_MEMORY);
  const char *const parts[] = {"pool 'p'", "cuda:0", "2500000", "4194304", "2097152", "2902848", "5000000"};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    assert_non_null(strstr(error.text, parts[i]));
  }
  kvp_ledger_release(&ledger, KVP_LEDGER_BUFFER, 2097152);
  assert_int_equal(kvp_ledger_charge(&ledger, "cuda:0", KVP_LEDGER_POOL, "pool 'p'", 2500000, 4194304, &error),
                   KVP_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_nothing_before_the_limit_is_known), cmocka_unit_test(test_up_to_the_last_byte),
      cmocka_unit_test(test_a_refusal_has_the_numbers),         cmocka_unit_test(test_no_sum_wraps),
      cmocka_unit_test(test_a_memory_takes_whole_pieces),       cmocka_unit_test(test_what_is_taken_counts),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
