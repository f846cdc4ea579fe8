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
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "main", 1, &error), KVP_OUT_OF_MEMORY);
  assert_int_equal(kvp_ledger_left_bytes(&ledger), 0);
}

static void test_up_to_the_last_byte(void **state) {
  (void)state;
  struct kvp_ledger ledger = {.limit_bytes = 1000};
  struct kvp_error error;
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "main", 600, &error), KVP_OK);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_BUFFER, "a buffer", 400, &error), KVP_OK);
  assert_int_equal(kvp_ledger_left_bytes(&ledger), 0);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_BUFFER, "a buffer", 1, &error), KVP_OUT_OF_MEMORY);
  kvp_ledger_release(&ledger, KVP_LEDGER_POOL, 600);
  assert_int_equal(kvp_ledger_left_bytes(&ledger), 600);
  assert_int_equal(ledger.used_bytes[KVP_LEDGER_BUFFER], 400);
}

static void test_a_refusal_has_the_numbers(void **state) {
  (void)state;
  struct kvp_ledger ledger = {.limit_bytes = 5000};
  struct kvp_error error;
  assert_int_equal(kvp_ledger_charge(&ledger, "host:3", KVP_LEDGER_POOL, "main", 1200, &error), KVP_OK);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:3", KVP_LEDGER_BUFFER, "a buffer", 34, &error), KVP_OK);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:3", KVP_LEDGER_POOL, "second", 3767, &error), KVP_OUT_OF_MEMORY);
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
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "main", UINT64_MAX - 2, &error), KVP_OK);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "b", UINT64_MAX, &error), KVP_OUT_OF_MEMORY);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "b", 2, &error), KVP_OUT_OF_MEMORY);
  assert_int_equal(kvp_ledger_charge(&ledger, "host:0", KVP_LEDGER_POOL, "b", 1, &error), KVP_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_nothing_before_the_limit_is_known),
      cmocka_unit_test(test_up_to_the_last_byte),
      cmocka_unit_test(test_a_refusal_has_the_numbers),
      cmocka_unit_test(test_no_sum_wraps),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
