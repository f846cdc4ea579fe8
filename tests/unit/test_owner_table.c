/* The owner table: layout of an entry, the memfd that executors get. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/supervisor/owner_table.h"

enum { blocks = 1000 };

static void test_an_entry_is_what_the_header_says(void **state) {
  (void)state;
  assert_int_equal(kvp_owner_entry_make(0x0123456789, KVP_BLOCK_QUARANTINED, 0xBEEF), 0x012345678903BEEF);
  assert_int_equal(kvp_owner_entry_epoch(0xFFFFFFFFFF02FFFE), KVP_OWNER_EPOCH_MAX);
  assert_int_equal(kvp_owner_entry_state(0xFFFFFFFFFF02FFFE), KVP_BLOCK_SEALED);
  assert_int_equal(kvp_owner_entry_owner(0xFFFFFFFFFF02FFFE), 0xFFFE);
}

static void test_begins_free_and_keeps_what_is_set(void **state) {
  (void)state;
  struct kvp_owner_table table;
  struct kvp_error error;
  assert_int_equal(kvp_owner_table_init(&table, "main", blocks, &error), KVP_OK);
  for (uint32_t block = 0; block < blocks; block++) {
    assert_int_equal(kvp_owner_table_get(&table, block), 0);
  }
  kvp_owner_table_set(&table, blocks - 1, 0x1122334455667788);
  assert_int_equal(kvp_owner_table_get(&table, blocks - 1), 0x1122334455667788);
  assert_int_equal(kvp_owner_table_get(&table, blocks - 2), 0);
  kvp_owner_table_deinit(&table);
  assert_int_equal(table.fd, -1);
}

/* What an executor does: maps the same descriptor, read-only, and sees stores at once. */
static void test_another_mapping_sees_it(void **state) {
  (void)state;
  struct kvp_owner_table table;
  struct kvp_error error;
  assert_int_equal(kvp_owner_table_init(&table, "main", blocks, &error), KVP_OK);
  void *mapping = mmap(NULL, blocks * sizeof(uint64_t), PROT_READ, MAP_SHARED, table.fd, 0);
  assert_ptr_not_equal(mapping, MAP_FAILED);
  const uint64_t *seen = mapping;
  kvp_owner_table_set(&table, 17, kvp_owner_entry_make(5, KVP_BLOCK_LEASED, 3));
  assert_int_equal(seen[17], (UINT64_C(5) << 24) + (UINT64_C(1) << 16) + 3);
  assert_int_equal(munmap(mapping, blocks * sizeof(uint64_t)), 0);
  kvp_owner_table_deinit(&table);
}

static void test_its_descriptor(void **state) {
  (void)state;
  struct kvp_owner_table table;
  struct kvp_error error;
  assert_int_equal(kvp_owner_table_init(&table, "my-pool", blocks, &error), KVP_OK);
  int seals = fcntl(table.fd, F_GET_SEALS);
  assert_int_equal(seals & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  assert_int_equal(ftruncate(table.fd, 8), -1);
  assert_int_equal(fcntl(table.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  char link[64];
  char name[256] = {0};
  (void)snprintf(link, sizeof link, "/proc/self/fd/%d", table.fd);
  assert_true(readlink(link, name, sizeof name - 1) > 0);
  assert_non_null(strstr(name, "kvpool-owner:my-pool"));
  kvp_owner_table_deinit(&table);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_an_entry_is_what_the_header_says),
      cmocka_unit_test(test_begins_free_and_keeps_what_is_set),
      cmocka_unit_test(test_another_mapping_sees_it),
      cmocka_unit_test(test_its_descriptor),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
