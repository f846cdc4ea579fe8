/* A wrong secret, which no caller of kvpool.h can produce: this test reaches inside the library. */
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
