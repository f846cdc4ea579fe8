/* Numbers of namespaces, and which of them a pool's blocks remember. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "server/supervisor/block_namespaces.h"
#include "server/supervisor/namespace_table.h"

static void test_a_name_keeps_its_number(void **state) {
  (void)state;
  static struct kvp_namespace_table table;
  uint64_t first = kvp_namespace_hold(&table, "first");
  uint64_t second = kvp_namespace_hold(&table, "second");
  assert_true(first != 0 && second != 0 && first != second);
  assert_int_equal(kvp_namespace_hold(&table, "first"), first);
  kvp_namespace_drop(&table, first);
  kvp_namespace_drop(&table, first);
  assert_int_equal(kvp_namespace_hold(&table, "first"), first); /* nobody has it any more, but it is remembered */
  assert_int_equal(kvp_namespace_hold(&table, "firs"), 3);
}

static void test_no_number_is_given_twice(void **state) {
  (void)state;
  static struct kvp_namespace_table table;
  char name[16];
  uint64_t kept = kvp_namespace_hold(&table, "kept");
  uint64_t gone = kvp_namespace_hold(&table, "gone");
  kvp_namespace_drop(&table, gone);
  uint64_t last = gone;
  for (int i = 0; i < 5000; i++) { /* more than there is room for: the oldest are forgotten, but not one in use */
    (void)snprintf(name, sizeof name, "n%d", i);
    uint64_t number = kvp_namespace_hold(&table, name);
    assert_true(number > last);
    last = number;
    kvp_namespace_drop(&table, number);
  }
  assert_int_equal(kvp_namespace_hold(&table, "kept"), kept);
  assert_true(kvp_namespace_hold(&table, "gone") > last);
}

/* As many sessions as there can be, each in a namespace of its own. */
static void test_all_sessions_hold_one(void **state) {
  (void)state;
  static struct kvp_namespace_table table;
  char name[16];
  for (int i = 0; i < kvp_sessions_max; i++) {
    (void)snprintf(name, sizeof name, "n%d", i);
    assert_int_equal(kvp_namespace_hold(&table, name), i + 1);
  }
  kvp_namespace_drop(&table, 500);
  assert_int_equal(kvp_namespace_hold(&table, "one more"), kvp_sessions_max + 1);
}

static void test_blocks_of_one_namespace(void **state) {
  (void)state;
  struct kvp_block_namespaces namespaces = {0};
  assert_false(kvp_block_namespaces_mixed(&namespaces, 7));
  assert_false(kvp_block_namespaces_mixed(&namespaces, 7));
  assert_null(namespaces.each);
  kvp_block_namespaces_deinit(&namespaces);
}

static void test_blocks_of_several(void **state) {
  (void)state;
  struct kvp_block_namespaces namespaces = {0};
  struct kvp_error error;
  int32_t changed[4];
  uint32_t count = 77;
  assert_false(kvp_block_namespaces_mixed(&namespaces, 7));
  assert_true(kvp_block_namespaces_mixed(&namespaces, 8));
  const int32_t blocks[] = {9, 0, 4};
  assert_int_equal(kvp_block_namespaces_changed(&namespaces, 10, 8, blocks, 3, changed, &count, &error), KVP_OK);
  assert_int_equal(count, 3); /* nothing is known of any of them: as if all had been 7's */
  assert_int_equal(changed[0], 9);
  assert_int_equal(changed[2], 4);
  kvp_block_namespaces_set(&namespaces, 8, blocks, 3);
  assert_true(kvp_block_namespaces_mixed(&namespaces, 7)); /* the first one has to look now as well */
  const int32_t others[] = {3, 4, 5, 9};
  assert_int_equal(kvp_block_namespaces_changed(&namespaces, 10, 7, others, 4, changed, &count, &error), KVP_OK);
  assert_int_equal(count, 2);
  assert_int_equal(changed[0], 4);
  assert_int_equal(changed[1], 9);
  assert_int_equal(kvp_block_namespaces_changed(&namespaces, 10, 8, blocks, 3, changed, &count, &error), KVP_OK);
  assert_int_equal(count, 0);
  kvp_block_namespaces_deinit(&namespaces);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_name_keeps_its_number), cmocka_unit_test(test_no_number_is_given_twice),
      cmocka_unit_test(test_all_sessions_hold_one),   cmocka_unit_test(test_blocks_of_one_namespace),
      cmocka_unit_test(test_blocks_of_several),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
