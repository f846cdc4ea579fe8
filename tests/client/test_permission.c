/* Another user than the daemon's: what an operator may do is refused, the rest is not. For root only, who can become
 * another user: a child does, before gRPC has begun in either process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/client/check.h"
#include "tests/client/process.h"

enum { other_uid = 65534 };

static bool may_be_opened(void *context) {
  return chmod(context, 0666) == 0;
}

/* In the child. 0: as it must be; else the number of the step that was not. */
static int other_user(const char *socket) {
  const kvpool_connect_options options = {.size_bytes = sizeof options, .wait_until_serving = true};
  const kvpool_region_spec region = {.name = "kv", .format = "v41", .num_layers = 1};
  const kvpool_pool_spec spec = {
      .name = "mine", .block_size = 64, .num_blocks = 4, .regions = &region, .region_count = 1};
  kvpool_client *client;
  kvpool_pool *pool, *made;
  kvpool_session *session;
  kvpool_record_list *records;
  kvpool_error error;
  int32_t block;
  uint8_t byte;
  if (setresuid(other_uid, other_uid, other_uid) != 0 ||
      kvpool_client_connect(socket, &options, &client, &error) != KVPOOL_OK ||
      pool_wait(client, &pool, &error) != KVPOOL_OK) {
    return 1;
  }
  const kvpool_layer layer = {.pool = pool, .region = 2, .layer = 0};
  if (kvpool_pool_create(client, &spec, &made, &error) != KVPOOL_PERMISSION_DENIED ||
      error.status != KVPOOL_PERMISSION_DENIED || strstr(error.text, "operator's right") == NULL) {
    return 2;
  }
  if (kvpool_pool_delete(pool, true, &error) != KVPOOL_PERMISSION_DENIED) {
    return 3;
  }
  if (kvpool_record_list_get(client, &layer, NULL, &(int32_t){0}, 1, &records, &error) != KVPOOL_PERMISSION_DENIED) {
    return 4;
  }
  if (kvpool_blocks_dump(client, &layer, NULL, 0, 0, &byte, 0, &error) != KVPOOL_PERMISSION_DENIED) {
    return 5;
  }
  if (kvpool_session_open(client, NULL, &session, &error) != KVPOOL_OK ||
      kvpool_blocks_allocate(session, pool, 1, &block, &error) != KVPOOL_OK) {
    return 6;
  }
  kvpool_session_close(session);
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
  return 0;
}

/* The same, whom the socket's mode keeps out. */
static int shut_out(const char *socket) {
  kvpool_client *client;
  kvpool_error error;
  if (setresuid(other_uid, other_uid, other_uid) != 0) {
    return 1;
  }
  return kvpool_client_connect(socket, NULL, &client, &error) == KVPOOL_PERMISSION_DENIED &&
                 strstr(error.text, socket) != NULL
             ? 0
             : 2;
}

static int in_child(int (*run)(const char *socket), const char *socket) {
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    _exit(run(socket));
  }
  int status = 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  return status;
}

static void test_other_user(void **state) {
  (void)state;
  if (geteuid() != 0) {
    skip();
  }
  struct process process;
  process_init(&process);
  process_start_daemon(&process);
  assert_int_equal(chmod(process.directory, 0711), 0);
  assert_true(eventually(may_be_opened, process.socket));
  assert_int_equal(in_child(other_user, process.socket), 0);
  assert_int_equal(chmod(process.socket, 0600), 0);
  assert_int_equal(in_child(shut_out, process.socket), 0);
  process_stop(&process);
  process_deinit(&process);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_other_user)};
  int failed = cmocka_run_group_tests_name("permission", tests, NULL, NULL);
  process_cleanup();
  return failed;
}
