/* When an executor is started again: the table of pauses, and what a wait is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "server/log.h"
#include "server/supervisor/restart_policy.h"

static struct kvp_restart_policy policy;
static uint64_t now_ms;

static int setup(void **state) {
  (void)state;
  kvp_restart_policy_init(&policy, "cuda:0");
  now_ms = 1000000;
  return 0;
}

/* One executor's life; the pause behind it, which passes. */
static uint64_t live(uint64_t lifetime_ms, bool serves) {
  kvp_restart_policy_started(&policy, now_ms);
  if (serves) {
    kvp_restart_policy_served(&policy);
  }
  now_ms += lifetime_ms;
  uint64_t pause_ms = kvp_restart_policy_died(&policy, now_ms);
  now_ms += pause_ms;
  return pause_ms;
}

static uint64_t refuse(const char *text) {
  kvp_restart_policy_started(&policy, now_ms);
  uint64_t pause_ms = kvp_restart_policy_refused(&policy, now_ms, KVP_BUSY, text);
  now_ms += pause_ms;
  return pause_ms;
}

static void test_never_serves(void **state) {
  (void)state;
  static const uint64_t pauses[] = {0, 100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000};
  for (size_t i = 0; i < sizeof pauses / sizeof pauses[0]; i++) {
    assert_int_equal(live(5, false), pauses[i]);
  }
}

static void test_serves_and_dies(void **state) {
  (void)state;
  static const uint64_t pauses[] = {0, 100, 100, 100, 100};
  for (size_t i = 0; i < sizeof pauses / sizeof pauses[0]; i++) {
    assert_int_equal(live(5, true), pauses[i]);
  }
}

static void test_one_that_lived_long(void **state) {
  (void)state;
  assert_int_equal(live(5, false), 0);
  assert_int_equal(live(5, false), 100);
  assert_int_equal(live(5, false), 200);
  assert_int_equal(live(10000, false), 0);
  assert_int_equal(live(9999, false), 100);
}

static void test_a_wait_has_pauses_of_its_own(void **state) {
  (void)state;
  assert_int_equal(live(5, false), 0);
  assert_int_equal(live(5, false), 100);
  for (int i = 0; i < 1000; i++) {
    assert_int_equal(refuse("process 17"), 200);
    assert_true(policy.is_waiting);
  }
  assert_int_equal(policy.waiting_since_ms, now_ms - UINT64_C(200) * 1000);
  kvp_restart_policy_wait_over(&policy, now_ms, "ready");
  assert_false(policy.is_waiting);
  assert_int_equal(live(5, false), 200); /* as if nobody had waited */
}

static void test_a_wait_keeps_its_begin_and_takes_the_latest_text(void **state) {
  (void)state;
  uint64_t began_ms = now_ms;
  (void)refuse("processes 17 and 18");
  (void)refuse("process 18");
  assert_string_equal(policy.waiting_for, "process 18");
  assert_int_equal(policy.waiting_since_ms, began_ms);
  (void)live(5, false); /* something else than being busy */
  assert_false(policy.is_waiting);
  began_ms = now_ms;
  (void)refuse("process 19");
  assert_int_equal(policy.waiting_since_ms, began_ms);
}

static void test_reasons_that_stay(void **state) {
  (void)state;
  static const enum kvp_status final[] = {KVP_INVALID_ARGUMENT, KVP_WRONG_DEVICE,     KVP_TOO_LARGE,
                                          KVP_UNIMPLEMENTED,    KVP_VERSION_MISMATCH, KVP_PERMISSION_DENIED};
  static const enum kvp_status passing[] = {KVP_OK, KVP_BUSY, KVP_DEVICE_LOST, KVP_OUT_OF_MEMORY, KVP_INTERNAL};
  for (size_t i = 0; i < sizeof final / sizeof final[0]; i++) {
    assert_true(kvp_restart_policy_is_final(final[i]));
  }
  for (size_t i = 0; i < sizeof passing / sizeof passing[0]; i++) {
    assert_false(kvp_restart_policy_is_final(passing[i]));
  }
}

static void test_a_refusal_is_no_death(void **state) {
  (void)state;
  assert_int_equal(live(5, true), 0);
  for (int i = 0; i < 100; i++) {
    kvp_restart_policy_started(&policy, now_ms);
    assert_int_equal(kvp_restart_policy_refused(&policy, now_ms, KVP_UNIMPLEMENTED, "no driver"), 5000);
    assert_true(policy.is_waiting);
    assert_int_equal(policy.refused_as, KVP_UNIMPLEMENTED);
    now_ms += 5000;
  }
  assert_int_equal(refuse("process 17"), 200); /* the driver is there again, and somebody has the GPU */
  assert_int_equal(policy.refused_as, KVP_OK);
  assert_string_equal(policy.waiting_for, "process 17");
  kvp_restart_policy_wait_over(&policy, now_ms, "ready");
  assert_int_equal(policy.refused_as, KVP_OK);
  assert_int_equal(live(5, true), 100); /* as if nobody had been refused */
}

static void test_a_long_text_is_cut(void **state) {
  (void)state;
  char text[2 * kvp_error_text_bytes_max];
  memset(text, 'x', sizeof text - 1);
  text[sizeof text - 1] = '\0';
  (void)refuse(text);
  assert_int_equal(strlen(policy.waiting_for), kvp_error_text_bytes_max - 1);
}

int main(void) {
  kvp_log_set_level(KVP_LOG_ERROR);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(test_never_serves, setup),
      cmocka_unit_test_setup(test_serves_and_dies, setup),
      cmocka_unit_test_setup(test_one_that_lived_long, setup),
      cmocka_unit_test_setup(test_a_wait_has_pauses_of_its_own, setup),
      cmocka_unit_test_setup(test_a_wait_keeps_its_begin_and_takes_the_latest_text, setup),
      cmocka_unit_test_setup(test_reasons_that_stay, setup),
      cmocka_unit_test_setup(test_a_refusal_is_no_death, setup),
      cmocka_unit_test_setup(test_a_long_text_is_cut, setup),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
