/* What libkvpool says and does when the other side dies, hangs, comes back, or misbehaves. */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/client/check.h"
#include "tests/client/process.h"
#include "tests/client/recorder.h"

enum { elements = 64, row_bytes = 2 * elements, tokens_per_block = 64, steps = 5 };

/* What most of the tests begin with: a daemon, a client, a session with a block, a queue, and a step for it. */
struct scene {
  struct process process;
  struct recorder recorder;
  kvpool_client *client;
  kvpool_pool *pool;
  kvpool_session *session;
  kvpool_buffer *buffer;
  kvpool_step *step;
  kvpool_queue *queue;
  int32_t block;
};

static struct scene scene;
static kvpool_error error;

static pid_t executor_pid(void) {
  kvpool_server_info *info;
  assert_ok(kvpool_server_info_get(scene.client, &info, &error));
  pid_t pid = (pid_t)kvpool_server_info_device(info, 0)->executor_pid;
  kvpool_server_info_destroy(info);
  return pid;
}

static void scene_connect(uint32_t timeout_ms) {
  const kvpool_connect_options options = {
      .size_bytes = sizeof options, .timeout_ms = timeout_ms, .wait_until_serving = true};
  assert_ok(kvpool_client_connect(scene.process.socket, &options, &scene.client, &error));
}

static void scene_open_session(void) {
  const kvpool_session_options options = {
      .size_bytes = sizeof options, .on_event = recorder_on_event, .context = &scene.recorder};
  assert_ok(pool_wait(scene.client, &scene.pool, &error));
  assert_ok(kvpool_session_open(scene.client, &options, &scene.session, &error));
  assert_ok(kvpool_blocks_allocate(scene.session, scene.pool, 1, &scene.block, &error));
  assert_ok(kvpool_buffer_create(scene.session, NULL, 8192, &scene.buffer, &error));
  const kvpool_layer layer = {.pool = scene.pool, .region = 2, .layer = 0};
  const kvpool_view view = {.buffer = scene.buffer, .rows = 1, .row_bytes = row_bytes};
  const int32_t slot = scene.block * tokens_per_block;
  uint32_t array;
  assert_ok(kvpool_step_new(scene.session, &scene.step, &error));
  assert_ok(kvpool_step_add_array(scene.step, &slot, 1, &array, &error));
  assert_ok(kvpool_step_add_store(scene.step, &layer, &view, array, NULL, &error));
  assert_ok(kvpool_queue_open(scene.session, recorder_on_completion, &scene.recorder, false, &scene.queue, &error));
  assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  assert_ok(kvpool_queue_wait(scene.queue, &error));
  assert_int_equal(recorder_last_words(&scene.recorder), 1);
}

static void scene_close_session(void) {
  kvpool_queue_close(scene.queue);
  kvpool_step_destroy(scene.step);
  (void)kvpool_buffer_release(scene.buffer, NULL);
  kvpool_session_close(scene.session);
  kvpool_pool_destroy(scene.pool);
}

static int setup(void **state) {
  (void)state;
  process_init(&scene.process);
  process_start_daemon(&scene.process);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  kvpool_client_destroy(scene.client);
  scene.client = NULL;
  if (scene.process.pid != 0) {
    process_kill(&scene.process);
  }
  process_deinit(&scene.process);
  return 0;
}

static bool server_answers(void *context) {
  kvpool_server_info *info;
  if (kvpool_server_info_get(context, &info, &error) != KVPOOL_OK) {
    return false;
  }
  bool serves = kvpool_server_info_device(info, 0)->state == KVPOOL_DEVICE_SERVING;
  kvpool_server_info_destroy(info);
  return serves;
}

/* All of the submitted steps have come to the daemon. */
static bool steps_are_in_flight(void *context) {
  (void)context;
  kvpool_session_list *list;
  assert_ok(kvpool_session_list_get(scene.client, &list, &error));
  assert_int_equal(kvpool_session_list_count(list), 1);
  bool all = kvpool_session_list_item(list, 0)->steps_in_flight == steps;
  kvpool_session_list_destroy(list);
  return all;
}

/* SIGKILL with steps under way: each has its last word, the session tells, later calls say what was lost; and when
 * the daemon is back, the same client is served again. */
static void test_daemon_killed_and_restarted(void **state) {
  (void)state;
  recorder_init(&scene.recorder);
  scene_connect(10000);
  scene_open_session();
  pid_t executor = executor_pid();
  assert_int_equal(kill(executor, SIGSTOP), 0);
  for (int i = 0; i < steps; i++) {
    assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  }
  process_kill(&scene.process);
  (void)kill(executor, SIGCONT); /* it ends with its control socket */
  assert_ok(kvpool_queue_wait(scene.queue, &error));
  assert_int_equal(recorder_last_words(&scene.recorder), 1 + steps);
  for (size_t i = 1; i < scene.recorder.completion_count; i++) {
    assert_int_equal(scene.recorder.completions[i].step_id, i + 1);
    assert_int_equal(scene.recorder.completions[i].error.status, KVPOOL_DISCONNECTED);
  }
  struct recorded_event ended;
  assert_true(recorder_wait_event(&scene.recorder, KVPOOL_SESSION_ENDED, &ended));
  assert_int_equal(ended.error.status, KVPOOL_DISCONNECTED);
  assert_non_null(strstr(ended.error.text, "blocks and buffers"));
  assert_fails(kvpool_session_state(scene.session, &error), KVPOOL_DISCONNECTED, "went away");

  kvpool_server_info *info;
  uint8_t byte;
  assert_fails(kvpool_server_info_get(scene.client, &info, &error), KVPOOL_DISCONNECTED, "kvpoold");
  assert_fails(kvpool_queue_submit(scene.queue, scene.step, NULL, &error), KVPOOL_UNKNOWN_SESSION, "went away");
  assert_fails(kvpool_step_run(scene.step, NULL, 0, &error), KVPOOL_UNKNOWN_SESSION, "has ended");
  assert_fails(kvpool_buffer_read(scene.buffer, 0, &byte, 1, &error), KVPOOL_UNKNOWN_SESSION, "has ended");
  kvpool_queue *queue;
  assert_fails(kvpool_queue_open(scene.session, NULL, NULL, false, &queue, &error), KVPOOL_UNKNOWN_SESSION, "ended");

  process_start_daemon(&scene.process);
  assert_true(eventually(server_answers, scene.client));
  assert_fails(kvpool_blocks_allocate(scene.session, scene.pool, 1, &scene.block, &error), KVPOOL_UNKNOWN_SESSION,
               "has ended");
  scene_close_session();
  recorder_init(&scene.recorder);
  scene_open_session(); /* and everything works anew */
  scene_close_session();
  assert_int_equal(scene.recorder.event_count, 0); /* a close of one's own is no event */
}

/* The executor dies: steps end with device_lost, the session lives and hears of it, contents are there, and so is the
 * next step's device. */
static void test_executor_killed(void **state) {
  (void)state;
  recorder_init(&scene.recorder);
  scene_connect(30000);
  scene_open_session();
  const kvpool_layer layer = {.pool = scene.pool, .region = 2, .layer = 0};
  uint16_t row[elements], loaded[elements];
  for (int i = 0; i < elements; i++) {
    row[i] = (uint16_t)(0x3F80 + i);
  }
  const int32_t slot = scene.block * tokens_per_block + 9, segment[] = {scene.block, 9, 10, 0};
  assert_ok(kvpool_rows_store(scene.session, &layer, row, 1, row_bytes, &slot, 1, NULL, &error));
  pid_t executor = executor_pid();
  assert_int_equal(kill(executor, SIGSTOP), 0);
  for (int i = 0; i < steps; i++) {
    assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  }
  assert_true(eventually(steps_are_in_flight, NULL));
  assert_int_equal(kill(executor, SIGKILL), 0);
  assert_ok(kvpool_queue_wait(scene.queue, &error));
  assert_int_equal(recorder_last_words(&scene.recorder), 1 + steps);
  for (size_t i = 1; i < scene.recorder.completion_count; i++) {
    assert_int_equal(scene.recorder.completions[i].error.status, KVPOOL_DEVICE_LOST);
  }
  struct recorded_event lost, restored;
  assert_true(recorder_wait_event(&scene.recorder, KVPOOL_SESSION_DEVICE_LOST, &lost));
  assert_string_equal(lost.device, "host:0");
  for (size_t i = 0; i < lost.block_count; i++) { /* torn or not: no block but the one that was written */
    assert_int_equal(lost.pool_id, kvpool_pool_id(scene.pool));
    assert_int_equal(lost.blocks[i], scene.block);
  }
  assert_true(recorder_wait_event(&scene.recorder, KVPOOL_SESSION_DEVICE_RESTORED, &restored));
  assert_string_equal(restored.device, "host:0");
  assert_ok(kvpool_session_state(scene.session, &error));
  assert_ok(kvpool_rows_load(scene.session, &layer, segment, 1, 1, loaded, NULL, NULL, &error));
  assert_memory_equal(loaded, row, row_bytes);
  kvpool_op_report report;
  assert_ok(kvpool_step_run(scene.step, &report, 1, &error));
  assert_int_equal(report.rows_stored, 1);
  assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  assert_ok(kvpool_queue_wait(scene.queue, &error));
  assert_int_equal(scene.recorder.completions[scene.recorder.completion_count - 1].error.status, KVPOOL_OK);
  scene_close_session();
}

/* SIGTERM: the session hears that the daemon is leaving. */
static void test_daemon_drains(void **state) {
  (void)state;
  recorder_init(&scene.recorder);
  scene_connect(10000);
  scene_open_session();
  process_stop(&scene.process);
  struct recorded_event ended;
  assert_true(recorder_wait_event(&scene.recorder, KVPOOL_SESSION_ENDED, &ended));
  assert_true(ended.error.status == KVPOOL_SHUTTING_DOWN || ended.error.status == KVPOOL_DISCONNECTED);
  assert_fails(kvpool_step_run(scene.step, NULL, 0, &error), KVPOOL_UNKNOWN_SESSION, "has ended");
  scene_close_session();
}

/* A daemon that hangs: every blocking call ends at the client's timeout, nothing is left behind, and when the daemon
 * goes on so does the client. */
static void test_timeouts(void **state) {
  (void)state;
  recorder_init(&scene.recorder);
  scene_connect(10000);
  kvpool_client_destroy(scene.client);
  scene_connect(1000);
  kvpool_client *patient = scene.client;
  scene_open_session();
  process_signal(&scene.process, SIGSTOP);
  kvpool_server_info *info;
  kvpool_session *session;
  kvpool_client *client;
  uint8_t bytes[row_bytes] = {0};
  assert_fails(kvpool_server_info_get(patient, &info, &error), KVPOOL_DEADLINE_EXCEEDED, "1000 ms");
  assert_fails(kvpool_session_open(patient, NULL, &session, &error), KVPOOL_DEADLINE_EXCEEDED, "1000 ms");
  assert_fails(kvpool_buffer_write(scene.buffer, 0, bytes, sizeof bytes, &error), KVPOOL_DEADLINE_EXCEEDED,
               "1000 ms");
  assert_fails(kvpool_buffer_read(scene.buffer, 0, bytes, sizeof bytes, &error), KVPOOL_DEADLINE_EXCEEDED, "1000 ms");
  assert_fails(kvpool_step_run(scene.step, NULL, 0, &error), KVPOOL_DEADLINE_EXCEEDED, "1000 ms");
  const kvpool_layer layer = {.pool = scene.pool, .region = 2, .layer = 0};
  const int32_t segment[] = {scene.block, 0, 1, 0};
  assert_fails(kvpool_rows_load(scene.session, &layer, segment, 1, 1, bytes, NULL, NULL, &error),
               KVPOOL_DEADLINE_EXCEEDED, "1000 ms");
  assert_fails(kvpool_rows_store(scene.session, &layer, bytes, 1, row_bytes, &(int32_t){-1}, 1, NULL, &error),
               KVPOOL_DEADLINE_EXCEEDED, "1000 ms");
  assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  assert_fails(kvpool_queue_wait(scene.queue, &error), KVPOOL_DEADLINE_EXCEEDED, "1 steps");
  const kvpool_connect_options options = {.size_bytes = sizeof options, .timeout_ms = 1000};
  assert_fails(kvpool_client_connect(scene.process.socket, &options, &client, &error), KVPOOL_DEADLINE_EXCEEDED,
               "1000 ms");
  process_signal(&scene.process, SIGCONT);
  assert_true(eventually(server_answers, patient));
  while (kvpool_queue_wait(scene.queue, &error) == KVPOOL_DEADLINE_EXCEEDED) {
  }
  assert_int_equal(recorder_last_words(&scene.recorder), 2);
  assert_int_equal(scene.recorder.completions[1].error.status, KVPOOL_OK);
  assert_int_equal(scene.recorder.event_count, 0);

  /* Closing against a daemon that hangs: the steps left over are told so, and it returns. */
  process_signal(&scene.process, SIGSTOP);
  assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  scene_close_session();
  assert_int_equal(recorder_last_words(&scene.recorder), 3);
  assert_int_equal(scene.recorder.completions[2].error.status, KVPOOL_CANCELLED);
  process_signal(&scene.process, SIGCONT);
}

/* What a handle names is gone with its daemon, and never another daemon's pool: of the same name, made as the same
 * one of its pools, whatever the call is. */
static void test_pool_handles_of_a_daemon_before(void **state) {
  (void)state;
  recorder_init(&scene.recorder);
  scene_connect(10000);
  assert_ok(pool_wait(scene.client, &scene.pool, &error));
  const uint64_t id = kvpool_pool_id(scene.pool);
  assert_true(id < UINT64_C(1) << 53); /* a JSON number holds it */
  process_kill(&scene.process);
  process_start_daemon(&scene.process);
  assert_true(eventually(server_answers, scene.client));
  kvpool_pool *now;
  assert_ok(pool_wait(scene.client, &now, &error));
  assert_int_not_equal(kvpool_pool_id(now), id);

  const kvpool_layer layer = {.pool = scene.pool, .region = 2, .layer = 0};
  const int32_t slot = 0, segment[] = {0, 0, 1, 0};
  static uint8_t bytes[tokens_per_block * row_bytes];
  kvpool_session *session;
  kvpool_block_map *map;
  kvpool_record_list *records;
  int32_t block;
  assert_ok(kvpool_session_open(scene.client, NULL, &session, &error));
#define assert_gone(call) assert_fails(call, KVPOOL_UNKNOWN_POOL, "pool \"main\"")
  assert_gone(kvpool_pool_refresh(scene.pool, &error));
  assert_int_equal(kvpool_pool_id(scene.pool), id);
  assert_gone(kvpool_blocks_allocate(session, scene.pool, 1, &block, &error));
  assert_gone(kvpool_blocks_allocate_range(session, scene.pool, 0, 1, &error));
  assert_gone(kvpool_blocks_free(session, scene.pool, &slot, 1, &error));
  assert_gone(kvpool_block_map_get(scene.client, scene.pool, &map, &error));
  assert_gone(kvpool_rows_store(session, &layer, bytes, 1, row_bytes, &slot, 1, NULL, &error));
  assert_gone(kvpool_rows_load(session, &layer, segment, 1, 1, bytes, NULL, NULL, &error));
  assert_gone(kvpool_record_list_get(scene.client, &layer, NULL, &slot, 1, &records, &error));
  assert_gone(kvpool_blocks_dump(scene.client, &layer, NULL, 0, 1, bytes, sizeof bytes, &error));
  assert_gone(kvpool_pool_delete(scene.pool, true, &error));
  assert_int_equal(error.value, id);

  kvpool_step *step;
  kvpool_buffer *buffer;
  uint32_t array;
  assert_ok(kvpool_buffer_create(session, NULL, row_bytes, &buffer, &error));
  const kvpool_view view = {.buffer = buffer, .rows = 1, .row_bytes = row_bytes};
  assert_ok(kvpool_step_new(session, &step, &error));
  assert_ok(kvpool_step_add_array(step, &slot, 1, &array, &error));
  assert_ok(kvpool_step_add_store(step, &layer, &view, array, NULL, &error));
  assert_fails(kvpool_step_run(step, NULL, 0, &error), KVPOOL_UNKNOWN_POOL, "there is no pool");
  kvpool_step_destroy(step);
  assert_ok(kvpool_buffer_release(buffer, &error));
  kvpool_session_close(session);

  assert_ok(kvpool_pool_refresh(now, &error)); /* nothing of this has touched the one that is there */
  assert_int_equal(kvpool_pool_free_blocks(now), 100);
  kvpool_pool_destroy(now);
  kvpool_pool_destroy(scene.pool);
}

/* A daemon that stops reading while it is sent more than a socket holds: gRPC doesn't end such a call however it is
 * cancelled, and everything that closes does so all the same. */
static void test_closing_while_data_is_on_its_way(void **state) {
  (void)state;
  enum { bytes = 64 << 20 };
  recorder_init(&scene.recorder);
  scene_connect(3000);
  scene_open_session();
  kvpool_buffer *buffer;
  assert_ok(kvpool_buffer_create(scene.session, NULL, bytes, &buffer, &error));
  uint8_t *data = calloc(1, bytes);
  assert_non_null(data);
  process_signal(&scene.process, SIGSTOP);
  assert_fails(kvpool_buffer_write(buffer, 0, data, bytes, &error), KVPOOL_DEADLINE_EXCEEDED, "3000 ms");
  assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  (void)kvpool_buffer_release(buffer, NULL);
  scene_close_session(); /* each of these returns */
  assert_int_equal(recorder_last_words(&scene.recorder), 2);
  assert_int_equal(scene.recorder.completions[1].error.status, KVPOOL_CANCELLED);
  assert_int_equal(scene.recorder.event_count, 0);
  kvpool_client_destroy(scene.client);
  process_signal(&scene.process, SIGCONT);
  scene_connect(10000); /* the daemon has lost nothing by it */
  free(data);
}

/* The session is closed by the client's end alone, in the same state. */
static void test_destroying_while_data_is_on_its_way(void **state) {
  (void)state;
  enum { bytes = 64 << 20 };
  recorder_init(&scene.recorder);
  scene_connect(3000);
  scene_open_session();
  kvpool_buffer *buffer;
  assert_ok(kvpool_buffer_create(scene.session, NULL, bytes, &buffer, &error));
  uint8_t *data = calloc(1, bytes);
  assert_non_null(data);
  process_signal(&scene.process, SIGSTOP);
  assert_fails(kvpool_buffer_write(buffer, 0, data, bytes, &error), KVPOOL_DEADLINE_EXCEEDED, "3000 ms");
  assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  kvpool_client_destroy(scene.client);
  scene.client = NULL;
  assert_int_equal(recorder_last_words(&scene.recorder), 2);
  assert_int_equal(scene.recorder.completions[1].error.status, KVPOOL_CANCELLED);
  assert_int_equal(scene.recorder.event_count, 1);
  assert_int_equal(scene.recorder.events[0].kind, KVPOOL_SESSION_ENDED);
  process_signal(&scene.process, SIGCONT);
  (void)kvpool_buffer_release(buffer, NULL);
  scene_close_session();
  free(data);
}

/* In a thread: a call to whoever listens there. */
static void *ask(void *context) {
  kvpool_error *told = context;
  kvpool_server_info *info;
  if (kvpool_server_info_get(scene.client, &info, told) == KVPOOL_OK) {
    kvpool_server_info_destroy(info);
  }
  return NULL;
}

/* The next connection; -1: the thread has ended, and been joined, before there was one. gRPC may tell what it knows of
 * the daemon before without another look. */
static int accept_from(int listener, pthread_t thread) {
  struct pollfd connecting = {.fd = listener, .events = POLLIN};
  while (poll(&connecting, 1, 50) == 0) {
    if (pthread_tryjoin_np(thread, NULL) == 0) {
      return -1;
    }
  }
  int connection = accept(listener, NULL, NULL);
  assert_true(connection >= 0);
  return connection;
}

/* Somebody listens when the call begins, so that it waits to be connected, and is gone before it is. That is
 * KVPOOL_DISCONNECTED, long before a minute is over. */
static void test_listener_gone_while_connecting(void **state) {
  (void)state;
  scene_connect(60000);
  process_kill(&scene.process);
  kvpool_server_info *info;
  assert_fails(kvpool_server_info_get(scene.client, &info, &error), KVPOOL_DISCONNECTED, "kvpoold");
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", scene.process.socket);
  (void)unlink(scene.process.socket);
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(bind(listener, (const struct sockaddr *)&address, sizeof address), 0);
  assert_int_equal(listen(listener, 16), 0);
  kvpool_error told = {0};
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, ask, &told), 0);
  int first = accept_from(listener, thread); /* the library's own look */
  int second = first < 0 ? -1 : accept_from(listener, thread);
  assert_int_equal(close(listener), 0);
  if (first >= 0) {
    assert_int_equal(close(first), 0);
  }
  if (second >= 0) {
    assert_int_equal(close(second), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
  }
  assert_int_equal(told.status, KVPOOL_DISCONNECTED);
}

/* What is under way ends at once for whoever waits for it, and calls are served after it. */
static void test_interrupt(void **state) {
  (void)state;
  recorder_init(&scene.recorder);
  scene_connect(60000);
  scene_open_session();
  process_signal(&scene.process, SIGSTOP);
  kvpool_error told = {0};
  pthread_t thread;
  assert_ok(kvpool_queue_submit(scene.queue, scene.step, NULL, &error));
  assert_int_equal(pthread_create(&thread, NULL, ask, &told), 0);
  while (pthread_tryjoin_np(thread, NULL) != 0) {
    kvpool_client_interrupt(scene.client, 60000); /* before the thread's call has begun it has nothing to end */
    (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
  assert_int_equal(told.status, KVPOOL_CANCELLED);
  assert_ok(kvpool_queue_wait(scene.queue, &error));
  assert_int_equal(scene.recorder.completions[1].error.status, KVPOOL_CANCELLED);
  struct recorded_event ended;
  assert_true(recorder_wait_event(&scene.recorder, KVPOOL_SESSION_ENDED, &ended));
  assert_int_equal(ended.error.status, KVPOOL_CANCELLED);
  process_signal(&scene.process, SIGCONT);
  assert_true(server_answers(scene.client));
  scene_close_session();
}

static void on_event_close(void *context, const kvpool_session_event *event) {
  (void)event;
  _Atomic(kvpool_session *) *session = context;
  kvpool_session_close(atomic_load(session)); /* from inside a callback: it doesn't wait */
  atomic_store(session, NULL);
}

static bool is_closed(void *context) {
  _Atomic(kvpool_session *) *session = context;
  return atomic_load(session) == NULL;
}

static void test_close_from_callback(void **state) {
  (void)state;
  recorder_init(&scene.recorder);
  scene_connect(10000);
  static _Atomic(kvpool_session *) session;
  kvpool_session *opened;
  const kvpool_session_options options = {
      .size_bytes = sizeof options, .on_event = on_event_close, .context = (void *)&session};
  assert_ok(kvpool_session_open(scene.client, &options, &opened, &error));
  atomic_store(&session, opened);
  assert_int_equal(kill(executor_pid(), SIGKILL), 0);
  assert_true(eventually(is_closed, (void *)&session));
}

static void start_fake(const char *mode) {
  process_kill(&scene.process);
  process_deinit(&scene.process);
  process_init(&scene.process);
  process_start_fake(&scene.process, mode);
}

static void test_version_mismatch(void **state) {
  (void)state;
  start_fake("version");
  kvpool_client *client;
  assert_fails(kvpool_client_connect(scene.process.socket, NULL, &client, &error), KVPOOL_VERSION_MISMATCH,
               "speaks protocol version 2");
  assert_int_equal(error.value, 2);
  process_stop(&scene.process);
}

static void test_garbage(void **state) {
  (void)state;
  start_fake("garbage");
  kvpool_client *client;
  assert_fails(kvpool_client_connect(scene.process.socket, NULL, &client, &error), KVPOOL_MALFORMED, "GetServerInfo");
  process_stop(&scene.process);
}

/* Answers that are wrong in ways a daemon's bug would make them; nothing is written past what was asked for. */
static void test_lies(void **state) {
  (void)state;
  enum { bytes = 2500 };
  start_fake("lies");
  scene_connect(10000);
  recorder_init(&scene.recorder);
  kvpool_pool *pool;
  kvpool_session *session;
  kvpool_buffer *buffer;
  kvpool_pool_list *list;
  static uint8_t data[bytes + 2];
  int32_t blocks[5] = {-7, -7, -7, -7, -7};
  assert_ok(kvpool_pool_open(scene.client, "main", &pool, &error));
  assert_ok(kvpool_session_open(scene.client, NULL, &session, &error));
  assert_int_equal(kvpool_session_epoch(session), 5);
  assert_fails(kvpool_pool_list_get(scene.client, &list, &error), KVPOOL_UNIMPLEMENTED, "ListPools");
  assert_fails(kvpool_blocks_allocate(session, pool, 4, blocks, &error), KVPOOL_MALFORMED, "AllocateBlocks");
  assert_int_equal(blocks[0], -7);
  assert_fails(kvpool_blocks_free(session, pool, blocks, 1, &error), KVPOOL_INTERNAL, "from the future");
  assert_int_equal(error.op, 4);
  assert_string_equal(error.array, "slots");
  assert_int_equal(error.position, 2);
  assert_int_equal(error.value, -3);
  assert_ok(kvpool_buffer_create(session, NULL, bytes + 1, &buffer, &error));
  assert_fails(kvpool_buffer_write(buffer, 0, data, bytes, &error), KVPOOL_MALFORMED, "WriteBuffer");
  assert_fails(kvpool_buffer_read(buffer, 0, data, bytes, &error), KVPOOL_INTERNAL, "2499 bytes came, not 2500");
  memset(data, 0x55, sizeof data);
  assert_fails(kvpool_buffer_read(buffer, 1, data, bytes, &error), KVPOOL_MALFORMED, "ReadBuffer");
  assert_int_equal(data[bytes], 0x55);
  const kvpool_layer layer = {.pool = pool, .region = 0, .layer = 0};
  memset(data, 0x55, sizeof data);
  assert_fails(kvpool_rows_load(session, &layer, blocks, 0, 3, data, NULL, NULL, &error), KVPOOL_MALFORMED,
               "LoadRows");
  assert_int_equal(data[48], 0x55);

  kvpool_step *step;
  kvpool_queue *queue;
  assert_ok(kvpool_step_new(session, &step, &error));
  assert_ok(kvpool_queue_open(session, recorder_on_completion, &scene.recorder, true, &queue, &error));
  assert_ok(kvpool_queue_submit(queue, step, NULL, &error));
  assert_ok(kvpool_queue_wait(queue, &error));
  assert_int_equal(scene.recorder.completion_count, 1);
  assert_int_equal(scene.recorder.completions[0].first.rows_stored, 11);
  assert_ok(kvpool_queue_submit(queue, step, NULL, &error));
  assert_ok(kvpool_queue_wait(queue, &error));
  assert_int_equal(scene.recorder.completion_count, 2);
  assert_int_equal(scene.recorder.completions[1].step_id, 2);
  assert_int_equal(scene.recorder.completions[1].error.status, KVPOOL_MALFORMED);
  assert_fails(kvpool_queue_submit(queue, step, NULL, &error), KVPOOL_MALFORMED, "Steps");
  kvpool_queue_close(queue);
  kvpool_step_destroy(step);
  assert_fails(kvpool_buffer_release(buffer, &error), KVPOOL_INTERNAL, "what buffer?");
  kvpool_session_close(session);
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(scene.client);
  scene.client = NULL;
  process_stop(&scene.process);
}

int main(void) {
#define test_in_scene(function) cmocka_unit_test_setup_teardown(function, setup, teardown)
  const struct CMUnitTest tests[] = {
      test_in_scene(test_daemon_killed_and_restarted),
      test_in_scene(test_executor_killed),
      test_in_scene(test_daemon_drains),
      test_in_scene(test_timeouts),
      test_in_scene(test_pool_handles_of_a_daemon_before),
      test_in_scene(test_closing_while_data_is_on_its_way),
      test_in_scene(test_destroying_while_data_is_on_its_way),
      test_in_scene(test_listener_gone_while_connecting),
      test_in_scene(test_interrupt),
      test_in_scene(test_close_from_callback),
      test_in_scene(test_version_mismatch),
      test_in_scene(test_garbage),
      test_in_scene(test_lies),
  };
  int failed = cmocka_run_group_tests_name("faults", tests, NULL, NULL);
  process_cleanup();
  return failed;
}
