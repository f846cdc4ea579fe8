/* Whose blocks a pool may give, and who may map it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "server/supervisor/pool_access.h"

static const struct kvp_pool_spec free_spec = {.name = "main"};
static const struct kvp_pool_spec own_spec = {.name = "own", .namespace_name = "a"};
static struct kvp_error error;

/* Every text names the pool and the session's namespace, the last of which is in quotes. */
static void expect_denied(enum kvp_status status, const char *pool, const char *other,
                          const char *session_namespace) {
  char quoted[3][80];
  const char *names[] = {pool, other, session_namespace};
  assert_int_equal(status, KVP_PERMISSION_DENIED);
  assert_int_equal(error.status, KVP_PERMISSION_DENIED);
  for (size_t i = 0; i < 3; i++) {
    (void)snprintf(quoted[i], sizeof quoted[i], "'%s'", names[i]);
    assert_non_null(strstr(error.text, quoted[i]));
  }
}

static void test_a_pool_with_a_namespace(void **state) {
  (void)state;
  struct kvp_pool_access access = {0};
  assert_int_equal(kvp_pool_access_check(&own_spec, "a", &error), KVP_OK);
  assert_int_equal(kvp_pool_access_check_blocks(&access, &own_spec, "a", &error), KVP_OK);
  kvp_pool_access_add_blocks(&access, "a");
  assert_int_equal(kvp_pool_access_map(&access, &own_spec, "a", &error), KVP_OK);
  expect_denied(kvp_pool_access_check(&own_spec, "b", &error), "own", "a", "b");
  expect_denied(kvp_pool_access_check_blocks(&access, &own_spec, "aa", &error), "own", "a", "aa");
  expect_denied(kvp_pool_access_map(&access, &own_spec, "default", &error), "own", "a", "default");
  assert_int_equal(kvp_pool_access_map(&access, &own_spec, "a", &error), KVP_OK);
}

static void test_blocks_of_a_pool_without_one_are_anybodys(void **state) {
  (void)state;
  struct kvp_pool_access access = {0};
  const char *const namespaces[] = {"a", "b", "a", "c"};
  for (size_t i = 0; i < 4; i++) {
    assert_int_equal(kvp_pool_access_check(&free_spec, namespaces[i], &error), KVP_OK);
    assert_int_equal(kvp_pool_access_check_blocks(&access, &free_spec, namespaces[i], &error), KVP_OK);
    kvp_pool_access_add_blocks(&access, namespaces[i]);
  }
  expect_denied(kvp_pool_access_map(&access, &free_spec, "a", &error), "main", "a",
                "a"); /* the first, but not alone */
  assert_non_null(strstr(error.text, "and others"));
  expect_denied(kvp_pool_access_map(&access, &free_spec, "b", &error), "main", "a", "b");
  assert_false(access.is_mapped);
  assert_int_equal(kvp_pool_access_check_blocks(&access, &free_spec, "d", &error), KVP_OK);
}

static void test_a_map_makes_the_pool_its_namespaces(void **state) {
  (void)state;
  struct kvp_pool_access access = {0};
  assert_int_equal(kvp_pool_access_map(&access, &free_spec, "a", &error), KVP_OK); /* nobody has had blocks */
  expect_denied(kvp_pool_access_check_blocks(&access, &free_spec, "b", &error), "main", "a", "b");
  expect_denied(kvp_pool_access_map(&access, &free_spec, "b", &error), "main", "a", "b");
  assert_int_equal(kvp_pool_access_check_blocks(&access, &free_spec, "a", &error), KVP_OK);
  kvp_pool_access_add_blocks(&access, "a");
  assert_int_equal(kvp_pool_access_map(&access, &free_spec, "a", &error), KVP_OK);
}

static void test_who_used_it_alone_may_map_it(void **state) {
  (void)state;
  struct kvp_pool_access access = {0};
  kvp_pool_access_add_blocks(&access, "a");
  expect_denied(kvp_pool_access_map(&access, &free_spec, "b", &error), "main", "a", "b");
  assert_null(strstr(error.text, "and others"));
  assert_int_equal(kvp_pool_access_check_blocks(&access, &free_spec, "b", &error), KVP_OK); /* nobody has mapped it */
  assert_int_equal(kvp_pool_access_map(&access, &free_spec, "a", &error), KVP_OK);
  expect_denied(kvp_pool_access_check_blocks(&access, &free_spec, "b", &error), "main", "a", "b");
}

/* No text is cut, whatever the names. */
static void test_the_longest_names(void **state) {
  (void)state;
  struct kvp_pool_access access = {0};
  struct kvp_pool_spec spec = {0};
  char other[kvp_name_bytes_max] = {0};
  memset(spec.name, 'p', sizeof spec.name - 1);
  memset(access.user, 'u', sizeof access.user - 1);
  memset(other, 'o', sizeof other - 1);
  access.is_mapped = true;
  expect_denied(kvp_pool_access_check_blocks(&access, &spec, other, &error), spec.name, access.user, other);
  assert_string_equal(error.text + strlen(error.text) - strlen("own namespace"), "own namespace");
  access.is_mapped = false;
  access.is_mixed = true;
  expect_denied(kvp_pool_access_map(&access, &spec, other, &error), spec.name, access.user, other);
  assert_string_equal(error.text + strlen(error.text) - strlen("own namespace"), "own namespace");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_pool_with_a_namespace),
      cmocka_unit_test(test_blocks_of_a_pool_without_one_are_anybodys),
      cmocka_unit_test(test_a_map_makes_the_pool_its_namespaces),
      cmocka_unit_test(test_who_used_it_alone_may_map_it),
      cmocka_unit_test(test_the_longest_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
