/* A wrong secret and an epoch of the past, which no caller of kvpool.h can produce: this test reaches inside the
 * library. And a buffer of somebody else's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "client/internal.h"
#include "tests/client/check.h"
#include "tests/client/process.h"

static void test_wrong_secret(void **state) {
  (void)state;
  struct process process;
  kvpool_client *client;
  kvpool_session *session;
  kvpool_pool *pool;
  kvpool_buffer *buffer;
  kvpool_step *step;
  kvpool_error error;
  int32_t block;
  uint8_t byte = 0;
  process_init(&process);
  process_start_daemon(&process);
  const kvpool_connect_options options = {.size_bytes = sizeof options, .wait_until_serving = true};
  assert_ok(kvpool_client_connect(process.socket, &options, &client, &error));
  assert_ok(pool_wait(client, &pool, &error));
  assert_ok(kvpool_session_open(client, NULL, &session, &error));
  assert_ok(kvpool_buffer_create(session, NULL, 16, &buffer, &error));
  assert_ok(kvpool_step_new(session, &step, &error));
  session->secret[7] ^= 1;
  assert_fails(kvpool_blocks_allocate(session, pool, 1, &block, &error), KVPOOL_WRONG_SECRET, "secret");
  assert_string_equal(error.array, "secret");
  assert_fails(kvpool_buffer_write(buffer, 0, &byte, 1, &error), KVPOOL_WRONG_SECRET, "secret");
  assert_fails(kvpool_buffer_read(buffer, 0, &byte, 1, &error), KVPOOL_WRONG_SECRET, "secret");
  assert_fails(kvpool_step_run(step, NULL, 0, &error), KVPOOL_WRONG_SECRET, "secret");
  session->secret[7] ^= 1;
  assert_ok(kvpool_blocks_allocate(session, pool, 1, &block, &error));

  /* As if the block had been taken from this session and given to it again since the step was made. */
  const kvpool_layer layer = {.pool = pool, .region = 2, .layer = 0};
  static const uint16_t row[64];
  const int32_t slot = block * 64 + 5;
  uint64_t epoch = kvpool_session_epoch(session);
  assert_ok(kvpool_rows_store(session, &layer, row, 1, sizeof row, &slot, 1, NULL, &error));
  atomic_store(&session->epoch, epoch - 1);
  assert_fails(kvpool_rows_store(session, &layer, row, 1, sizeof row, &slot, 1, NULL, &error), KVPOOL_STALE_BLOCK,
               "was assigned at epoch");
  assert_string_equal(error.array, "slots");
  assert_int_equal(error.position, 0);
  assert_int_equal(error.value, slot);
  atomic_store(&session->epoch, epoch);

  kvpool_session *other;
  kvpool_buffer *others;
  uint32_t array;
  assert_ok(kvpool_session_open(client, NULL, &other, &error));
  assert_ok(kvpool_buffer_create(other, NULL, sizeof row, &others, &error));
  const kvpool_view view = {.buffer = others, .rows = 1, .row_bytes = sizeof row};
  assert_ok(kvpool_step_add_array(step, &slot, 1, &array, &error));
  assert_ok(kvpool_step_add_store(step, &layer, &view, array, NULL, &error));
  assert_fails(kvpool_step_run(step, NULL, 0, &error), KVPOOL_UNKNOWN_BUFFER, "buffer");
  assert_int_equal(error.op, 0);
  others->session = session; /* its id, and another session's right */
  assert_fails(kvpool_buffer_read(others, 0, &byte, 1, &error), KVPOOL_UNKNOWN_BUFFER, "buffer");
  others->session = other;
  assert_ok(kvpool_buffer_release(others, &error));
  kvpool_session_close(other);
  kvpool_step_destroy(step);
  assert_ok(kvpool_buffer_release(buffer, &error));
  kvpool_session_close(session);
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
  process_stop(&process);
  process_deinit(&process);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_wrong_secret)};
  int failed = cmocka_run_group_tests_name("secret", tests, NULL, NULL);
  process_cleanup();
  return failed;
}
