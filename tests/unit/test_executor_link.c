/* The supervisor's side of an executor, against processes that behave as the test asks (fake_executor.c). */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/fd_socket.h"
#include "proto/step_wire.h"
#include "server/log.h"
#include "server/supervisor/executor_link.h"
#include "server/supervisor/memory.h"

/* What was called back, in the order of its letters: R ready, L lost, S stopped, C completion, W waiting, r result, m
 * memory, f what is free. */
struct watch {
  uv_loop_t loop;
  uv_timer_t tick; /* UV_RUN_ONCE may run a timer and then wait for more: this is more */
  struct kvp_executor_link *link;
  char events[64];
  size_t event_count;
  bool inside; /* a call of the API is on */
  bool serve_when_ready;
  uint64_t memory_bytes; /* that it has to tell */
  uint64_t free_bytes;
  struct kvp_error result;
  struct kvp_error memory_result;
  char completion[64];
  uint64_t completion_tag;
  uint32_t progress_count;
};

static void watch_note(struct watch *watch, char event) {
  assert_false(watch->inside);
  assert_true(watch->event_count + 1 < sizeof watch->events);
  watch->events[watch->event_count++] = event;
}

static uint32_t watch_count(const struct watch *watch, char event) {
  uint32_t count = 0;
  for (size_t i = 0; i < watch->event_count; i++) {
    count += watch->events[i] == event;
  }
  return count;
}

static void on_ready(void *context, struct kvp_executor_link *link, const struct kvp_control_ready *ready) {
  struct watch *watch = context;
  watch_note(watch, 'R');
  assert_ptr_equal(kvp_executor_link_info(link), ready);
  assert_int_equal(ready->memory_bytes, watch->memory_bytes);
  assert_int_equal(ready->pid, kvp_executor_link_pid(link));
  assert_int_equal(kvp_executor_link_state(link), KVP_LINK_RESTORING);
  if (watch->serve_when_ready) {
    kvp_executor_link_serve(link);
  }
}

static void on_lost(void *context, struct kvp_executor_link *link) {
  watch_note(context, 'L');
  assert_int_equal(kvp_executor_link_pid(link), 0);
}

static void on_completion(void *context, struct kvp_executor_link *link, const struct kvp_ring_record *record,
                          const uint8_t *payload) {
  (void)link;
  struct watch *watch = context;
  watch_note(watch, 'C');
  watch->completion_tag = record->tag;
  assert_true(record->payload_bytes < sizeof watch->completion);
  memcpy(watch->completion, payload, record->payload_bytes);
}

static void on_progress(void *context, struct kvp_executor_link *link) {
  (void)link;
  ((struct watch *)context)->progress_count++;
}

static void on_waiting(void *context, struct kvp_executor_link *link) {
  watch_note(context, 'W');
  assert_non_null(kvp_executor_link_waiting(link));
}

static void on_memory_free(void *context, struct kvp_executor_link *link, uint64_t free_bytes) {
  (void)link;
  struct watch *watch = context;
  watch_note(watch, 'f');
  watch->free_bytes = free_bytes;
}

static void on_stopped(void *context, struct kvp_executor_link *link) {
  struct watch *watch = context;
  watch_note(watch, 'S');
  kvp_executor_link_destroy(link);
}

static void on_result(void *context, const struct kvp_error *error) {
  struct watch *watch = context;
  watch_note(watch, 'r');
  watch->result = *error;
}

static void on_memory(void *context, const struct kvp_error *error) {
  struct watch *watch = context;
  watch_note(watch, 'm');
  watch->memory_result = *error;
}

static const struct kvp_link_events events = {.ready = on_ready,
                                              .lost = on_lost,
                                              .completion = on_completion,
                                              .progress = on_progress,
                                              .waiting = on_waiting,
                                              .memory_free = on_memory_free,
                                              .stopped = on_stopped};

static void on_tick(uv_timer_t *timer) {
  (void)timer;
}

static void watch_init(struct watch *watch, const char *device, const char *path) {
  memset(watch, 0, sizeof *watch);
  watch->serve_when_ready = true;
  watch->memory_bytes = 1234;
  const struct kvp_link_options options = {.device = device,
                                           .executor_path = path,
                                           .socket_path = "/socket",
                                           .lock_path = "/lock",
                                           .attach_socket_path = "/workers",
                                           .attach_lock_path = "/workers.lock",
                                           .thread_count = 3};
  assert_int_equal(uv_loop_init(&watch->loop), 0);
  assert_int_equal(uv_timer_init(&watch->loop, &watch->tick), 0);
  assert_int_equal(uv_timer_start(&watch->tick, on_tick, 10, 10), 0);
  struct kvp_error error;
  assert_int_equal(kvp_executor_link_new(&watch->loop, &options, &events, watch, &watch->link, &error), KVP_OK);
}

static void watch_start(struct watch *watch, const char *device) {
  struct kvp_error error;
  watch_init(watch, device, FAKE_EXECUTOR);
  assert_int_equal(kvp_executor_link_start(watch->link, &error), KVP_OK);
}

/* Runs the loop until `event` has come `count` times in all. ctest's timeout bounds it. */
static void watch_until(struct watch *watch, char event, uint32_t count) {
  while (watch_count(watch, event) < count) {
    (void)uv_run(&watch->loop, UV_RUN_ONCE);
  }
}

static void watch_end(struct watch *watch) {
  kvp_executor_link_stop(watch->link);
  watch_until(watch, 'S', 1);
  uv_close((uv_handle_t *)&watch->tick, NULL);
  (void)uv_run(&watch->loop, UV_RUN_DEFAULT);
  assert_int_equal(uv_loop_close(&watch->loop), 0);
  assert_int_equal(watch_count(watch, 'R'), watch_count(watch, 'L'));
}

static int open_fd_count(void) {
  DIR *directory = opendir("/proc/self/fd");
  assert_non_null(directory);
  int count = 0;
  while (readdir(directory) != NULL) {
    count++;
  }
  assert_int_equal(closedir(directory), 0);
  return count;
}

static void request(struct watch *watch, enum kvp_control_kind kind) {
  struct kvp_control_buffer body = {.buffer_id = 1};
  watch->inside = true;
  kvp_executor_link_request(watch->link, kind, &body, sizeof body, NULL, 0, NULL, on_result, watch);
  watch->inside = false;
}

/* ---- requests ---------------------------------------------------------------------------------------------------
 */

static void test_ready_request_stop(void **state) {
  (void)state;
  struct watch watch;
  int before = open_fd_count();
  watch_start(&watch, "good");
  assert_int_equal(kvp_executor_link_state(watch.link), KVP_LINK_STARTING);
  assert_null(kvp_executor_link_info(watch.link));
  request(&watch, KVP_CONTROL_BUFFER_ATTACH); /* nobody is ready yet */
  watch_until(&watch, 'r', 1);
  assert_int_equal(watch.result.status, KVP_DEVICE_LOST);
  watch_until(&watch, 'R', 1);
  request(&watch, KVP_CONTROL_BUFFER_ATTACH);
  watch_until(&watch, 'r', 2);
  assert_int_equal(watch.result.status, KVP_OK);
  assert_int_equal(kvp_executor_link_restarts(watch.link), 0);
  watch_end(&watch);
  assert_string_equal(watch.events, "rRrLS");
  assert_int_equal(open_fd_count(), before);
}

static void test_only_its_fds_are_inherited(void **state) {
  (void)state;
  struct watch watch;
  int other = fcntl(0, F_DUPFD_CLOEXEC, 20);
  assert_true(other >= 20);
  watch_start(&watch, "fds");
  watch_until(&watch, 'R', 1);
  bool seen[10] = {false}; /* the order of a directory is its own */
  const char *description = kvp_executor_link_info(watch.link)->description;
  for (const char *at = description; *at != '\0'; at += 2) {
    assert_true(at[1] == ' ' && *at >= '1' && *at <= '9'); /* "1 2 3 " */
    seen[*at - '0'] = true;
  }
  assert_int_equal(strlen(description), 6);
  assert_true(seen[1] && seen[2] && seen[3]);
  watch_end(&watch);
  assert_int_equal(close(other), 0);
}

static void test_request_dies_with_its_executor(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "mute");
  watch_until(&watch, 'R', 1);
  pid_t first = kvp_executor_link_pid(watch.link);
  request(&watch, KVP_CONTROL_BUFFER_ATTACH);
  assert_int_equal(kill(first, SIGKILL), 0);
  watch_until(&watch, 'R', 2);
  assert_string_equal(watch.events, "RrLR"); /* answered before `lost`, and only then a new one */
  assert_int_equal(watch.result.status, KVP_DEVICE_LOST);
  assert_int_equal(kvp_executor_link_restarts(watch.link), 1);
  assert_int_not_equal(kvp_executor_link_pid(watch.link), first);
  assert_int_equal(kill(first, 0), -1); /* reaped */
  watch_end(&watch);
}

static void test_garbage_is_the_end(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "garbage");
  watch_until(&watch, 'R', 1);
  request(&watch, KVP_CONTROL_BUFFER_ATTACH);
  watch_until(&watch, 'L', 1);
  assert_string_equal(watch.events, "RrL");
  assert_int_equal(watch.result.status, KVP_DEVICE_LOST);
  watch_end(&watch);
}

static void test_stop_with_requests_pending(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "mute");
  watch_until(&watch, 'R', 1);
  request(&watch, KVP_CONTROL_BUFFER_ATTACH);
  watch_end(&watch);
  assert_string_equal(watch.events, "RrLS");
  assert_int_equal(watch.result.status, KVP_DEVICE_LOST);
}

static void test_more_than_the_socket_holds(void **state) {
  (void)state;
  struct watch watch;
  enum { request_count = 2000 };
  int before = open_fd_count();
  watch_start(&watch, "good");
  watch_until(&watch, 'R', 1);
  struct kvp_control_pool body = {.pool_id = 1};
  int fd = kvp_memory_fd_create("test", 4096, NULL);
  assert_true(fd >= 0);
  const pid_t executor = kvp_executor_link_pid(watch.link);
  assert_int_equal(kill(executor, SIGSTOP), 0); /* it must not read while they are counted */
  for (int i = 0; i < request_count; i++) {     /* 4 KiB each: many times the socket's buffer */
    bool last = i == request_count - 1;
    kvp_executor_link_request(watch.link, KVP_CONTROL_POOL_ATTACH, &body, sizeof body, &fd, 1, NULL,
                              last ? on_result : NULL, last ? &watch : NULL);
  }
  assert_int_equal(close(fd), 0);
  assert_true(open_fd_count() > before + 100); /* they wait, with their fds */
  assert_int_equal(kill(executor, SIGCONT), 0);
  watch_until(&watch, 'r', 1);
  assert_int_equal(watch.result.status, KVP_OK);
  watch_end(&watch);
  assert_int_equal(open_fd_count(), before);
}

/* ---- start and restart ------------------------------------------------------------------------------------------
 */

static void test_no_executor_to_run(void **state) {
  (void)state;
  struct watch watch;
  struct kvp_error error;
  watch_init(&watch, "good", "/no/such/kvpool-exec");
  assert_int_equal(kvp_executor_link_start(watch.link, &error), KVP_INTERNAL);
  assert_non_null(strstr(error.text, "/no/such/kvpool-exec"));
  watch_end(&watch);
  assert_string_equal(watch.events, "S");
}

static void test_dies_before_ready(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "exits");
  while (kvp_executor_link_restarts(watch.link) < 3) {
    (void)uv_run(&watch.loop, UV_RUN_ONCE);
  }
  assert_int_equal(kvp_executor_link_state(watch.link), KVP_LINK_PAUSED);
  watch_end(&watch);
  assert_string_equal(watch.events, "S"); /* never ready: nothing was lost */
}

static void test_refused(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "refuses");
  watch_until(&watch, 'W', 1);
  enum kvp_status status = KVP_OK;
  assert_string_equal(kvp_executor_link_refusal(watch.link, &status), "there is no GPU 7");
  assert_int_equal(status, KVP_WRONG_DEVICE);
  assert_string_equal(kvp_executor_link_waiting(watch.link), "there is no GPU 7");
  assert_int_equal(kvp_executor_link_refused(watch.link), KVP_WRONG_DEVICE);
  assert_int_equal(kvp_executor_link_restarts(watch.link), 0); /* nobody died */
  assert_int_equal(kvp_executor_link_state(watch.link), KVP_LINK_PAUSED);
  watch_end(&watch);
  assert_string_equal(watch.events, "WS");
}

/* One answer for each look, none for one that comes too early; and it is the device's figure of now. */
static void test_look(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "good");
  assert_false(kvp_executor_link_look(watch.link)); /* not ready */
  watch_until(&watch, 'R', 1);
  assert_true(kvp_executor_link_look(watch.link));
  assert_false(kvp_executor_link_look(watch.link)); /* one is under way */
  watch_until(&watch, 'f', 1);
  assert_int_equal(watch.free_bytes, 1000);
  assert_true(kvp_executor_link_look(watch.link));
  watch_until(&watch, 'f', 2);
  watch_end(&watch);
  assert_string_equal(watch.events, "RffLS");
}

/* Who is in the way: a file that the fake executor reads at every start. */
static char busy_path[64];

static void busy_write(const char *text) {
  int file = open(busy_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  assert_true(file >= 0);
  assert_int_equal(write(file, text, strlen(text)), strlen(text));
  assert_int_equal(close(file), 0);
}

static int busy_setup(void **state) {
  (void)state;
  (void)snprintf(busy_path, sizeof busy_path, "/tmp/kvpool-test-busy-XXXXXX");
  int file = mkstemp(busy_path);
  assert_true(file >= 0);
  assert_int_equal(close(file), 0);
  return setenv("FAKE_EXECUTOR_BUSY", busy_path, 1);
}

static int busy_teardown(void **state) {
  (void)state;
  (void)unlink(busy_path); /* the test has removed it already, unless it failed */
  return unsetenv("FAKE_EXECUTOR_BUSY");
}

static void wait_for_text(struct watch *watch, const char *text) {
  while (kvp_executor_link_waiting(watch->link) == NULL ||
         strcmp(kvp_executor_link_waiting(watch->link), text) != 0) {
    (void)uv_run(&watch->loop, UV_RUN_ONCE);
  }
}

static void test_waits_for_others(void **state) {
  (void)state;
  struct watch watch;
  busy_write("processes 17 and 18 have to end");
  watch_start(&watch, "cuda:0");
  watch.memory_bytes = UINT64_C(80) << 30;
  wait_for_text(&watch, "processes 17 and 18 have to end");
  watch_until(&watch, 'W', 8);
  busy_write("process 18 has to end");
  wait_for_text(&watch, "process 18 has to end");
  /* Deaths would have brought pauses of 100, 200, 400 ... ms; here all are the same, and nothing counts as one. */
  assert_true(kvp_executor_link_waiting_ms(watch.link) >= 1600);
  assert_int_equal(kvp_executor_link_restarts(watch.link), 0);
  assert_int_equal(watch_count(&watch, 'R'), 0);
  request(&watch, KVP_CONTROL_BUFFER_ATTACH);
  watch_until(&watch, 'r', 1);
  assert_int_equal(watch.result.status, KVP_DEVICE_LOST);
  assert_int_equal(unlink(busy_path), 0);
  watch_until(&watch, 'R', 1);
  assert_null(kvp_executor_link_waiting(watch.link));
  assert_int_equal(kvp_executor_link_waiting_ms(watch.link), 0);
  assert_int_equal(kvp_executor_link_restarts(watch.link), 0);
  watch_end(&watch);
}

static void test_waits_after_a_death(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "cuda:0");
  watch.memory_bytes = UINT64_C(80) << 30;
  assert_int_equal(unlink(busy_path), 0);
  watch_until(&watch, 'R', 1);
  busy_write("process 5 has to end");
  assert_int_equal(kill(kvp_executor_link_pid(watch.link), SIGKILL), 0);
  watch_until(&watch, 'W', 3);
  assert_string_equal(watch.events, "RLWWW");
  assert_int_equal(kvp_executor_link_restarts(watch.link), 1);
  assert_int_equal(unlink(busy_path), 0);
  watch_until(&watch, 'R', 2);
  assert_int_equal(kvp_executor_link_restarts(watch.link), 1);
  watch_end(&watch);
}

static void test_stopped_while_it_waits(void **state) {
  (void)state;
  struct watch watch;
  busy_write("somebody");
  watch_start(&watch, "cuda:0");
  watch_until(&watch, 'W', 2);
  watch_end(&watch);
  assert_string_equal(watch.events, "WWS");
}

/* ---- ring -------------------------------------------------------------------------------------------------------
 */

static void test_step_there_and_back(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "good");
  watch.serve_when_ready = false;
  watch_until(&watch, 'R', 1);
  assert_int_equal(kvp_executor_link_post(watch.link, KVP_COMMAND_STEP, 5, "hello", 6), KVP_DEVICE_LOST);
  kvp_executor_link_serve(watch.link);
  for (uint32_t i = 1; i <= 3; i++) {
    assert_int_equal(kvp_executor_link_post(watch.link, KVP_COMMAND_STEP, 40 + i, "hello", 6), KVP_OK);
    watch_until(&watch, 'C', i);
    assert_int_equal(watch.completion_tag, 40 + i);
    assert_string_equal(watch.completion, "hello");
  }
  assert_true(watch.progress_count >= 3);
  watch_end(&watch);
}

static void test_done_before_death_counts(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "done");
  watch_until(&watch, 'R', 1);
  assert_int_equal(kvp_executor_link_post(watch.link, KVP_COMMAND_STEP, 9, "last words", 11), KVP_OK);
  watch_until(&watch, 'L', 1);
  assert_string_equal(watch.events, "RCL");
  assert_string_equal(watch.completion, "last words");
  watch_end(&watch);
}

static void test_corrupt_lane_is_given_up(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "corrupt");
  watch_until(&watch, 'R', 1);
  for (uint32_t i = 0; i < 4; i++) {
    (void)kvp_executor_link_post(watch.link, KVP_COMMAND_STEP, i, "x", 2);
  }
  watch_until(&watch, 'L', 1);
  watch_until(&watch, 'R', 2); /* and served again, by another one */
  assert_int_equal(kvp_executor_link_restarts(watch.link), 1);
  watch_end(&watch);
}

static void test_full_lane(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "mute");
  watch_until(&watch, 'R', 1);
  for (uint32_t i = 0; i < kvp_ring_commands; i++) {
    assert_int_equal(kvp_executor_link_post(watch.link, KVP_COMMAND_STEP, i, NULL, 0), KVP_OK);
  }
  assert_int_equal(kvp_executor_link_post(watch.link, KVP_COMMAND_STEP, 1, NULL, 0), KVP_BUSY);
  assert_int_equal(watch.progress_count, 0);
  while (watch.progress_count == 0) { /* who was told busy is told to try again */
    (void)uv_run(&watch.loop, UV_RUN_ONCE);
  }
  watch_end(&watch);
}

/* ---- memory -----------------------------------------------------------------------------------------------------
 */

enum { chunk_count = 2 * kvp_control_fds_max + 2, memory_bytes = chunk_count * 4096 };

static void test_memory_outlives_executors(void **state) {
  (void)state;
  struct watch watch;
  struct kvp_memory *memory = NULL;
  struct kvp_fd_budget fds = {.limit = 2, .used = 2}; /* one chunk's worth */
  int before = open_fd_count();
  watch_start(&watch, "good");
  watch_until(&watch, 'R', 1);
  int without = open_fd_count();
  watch.inside = true;
  kvp_memory_create(watch.link, &fds, 7, "test", memory_bytes, on_memory, &watch, &memory);
  watch.inside = false;
  watch_until(&watch, 'm', 1);
  assert_int_equal(watch.memory_result.status, KVP_OK);
  assert_int_equal(open_fd_count(), without + chunk_count);
  assert_int_equal(kill(kvp_executor_link_pid(watch.link), SIGKILL), 0);
  watch_until(&watch, 'R', 2);
  assert_int_equal(open_fd_count(), without + chunk_count);
  watch.inside = true;
  kvp_memory_restore(memory, on_memory, &watch);
  watch.inside = false;
  watch_until(&watch, 'm', 2);
  assert_int_equal(watch.memory_result.status, KVP_OK);
  assert_string_equal(watch.memory_result.text, "130 chunks"); /* three messages: 64, 64 and 2 fds */
  assert_int_equal(fds.used, 2);
  kvp_memory_destroy(memory);
  assert_int_equal(fds.used, 0);
  assert_int_equal(open_fd_count(), without);
  watch_end(&watch);
  assert_int_equal(open_fd_count(), before);
}

/* With a descriptor and (an IPC handle) without: opened again by the next one, closed with the last word. */
static void test_memory_of_a_worker(void **state) {
  (void)state;
  for (uint32_t with_fd = 0; with_fd < 2; with_fd++) {
    struct watch watch;
    struct kvp_memory *memory = NULL;
    struct kvp_fd_budget fds = {.limit = kvp_memory_open_fds, .used = kvp_memory_open_fds};
    const struct kvp_control_open open = {.allocation_bytes = 8192, .offset_bytes = 16, .bytes = 100};
    watch_start(&watch, "good");
    watch_until(&watch, 'R', 1);
    int without = open_fd_count();
    int fd = with_fd ? kvp_memory_fd_create("test", 8192, NULL) : -1;
    kvp_memory_open(watch.link, &fds, 7, &open, fd, on_memory, &watch, &memory);
    watch_until(&watch, 'm', 1);
    assert_int_equal(watch.memory_result.status, KVP_OK);
    assert_int_equal(kvp_memory_bytes(memory), 100);
    assert_int_equal(kvp_memory_chunk_count(memory), with_fd);
    assert_int_equal(kill(kvp_executor_link_pid(watch.link), SIGKILL), 0);
    watch_until(&watch, 'R', 2);
    kvp_memory_restore(memory, on_memory, &watch);
    watch_until(&watch, 'm', 2);
    assert_int_equal(watch.memory_result.status, KVP_OK);
    assert_null(kvp_memory_failure(memory));
    assert_int_equal(open_fd_count(), without + (int)with_fd);
    kvp_memory_restore(memory, on_memory, &watch);
    kvp_memory_destroy(memory); /* under way: the answer is waited for */
    assert_int_equal(fds.used, kvp_memory_open_fds);
    request(&watch, KVP_CONTROL_BUFFER_ATTACH);
    watch_until(&watch, 'r', 1);
    assert_int_equal(watch_count(&watch, 'm'), 2);
    assert_int_equal(fds.used, 0);
    assert_int_equal(open_fd_count(), without);
    watch_end(&watch);
  }
}

/* A worker's memory that an executor lets go of, and one that dies before it could. */
static void test_memory_closed(void **state) {
  (void)state;
  static const char *const executors[] = {"good", "mute"};
  for (size_t i = 0; i < sizeof executors / sizeof executors[0]; i++) {
    struct watch watch;
    struct kvp_memory *memory = NULL;
    struct kvp_fd_budget fds = {.limit = kvp_memory_open_fds, .used = kvp_memory_open_fds};
    const struct kvp_control_open open = {.allocation_bytes = 8192, .bytes = 100};
    watch_start(&watch, executors[i]);
    watch_until(&watch, 'R', 1);
    int without = open_fd_count();
    kvp_memory_open(watch.link, &fds, 7, &open, kvp_memory_fd_create("test", 8192, NULL), on_memory, &watch, &memory);
    watch.inside = true;
    kvp_memory_close(memory, on_result, &watch);
    watch.inside = false;
    if (i == 1) {
      assert_int_equal(kill(kvp_executor_link_pid(watch.link), SIGKILL), 0);
    }
    watch_until(&watch, 'r', 1);
    assert_int_equal(watch_count(&watch, 'm'), 1); /* in the order in which they were asked for */
    assert_int_equal(fds.used, kvp_memory_open_fds);
    kvp_memory_destroy(memory);
    assert_int_equal(fds.used, 0);
    assert_int_equal(open_fd_count(), without);
    watch_end(&watch);
  }
}

static void test_memory_destroyed_while_made(void **state) {
  (void)state;
  struct watch watch;
  struct kvp_memory *memory = NULL;
  struct kvp_fd_budget fds = {.limit = 2, .used = 2}; /* one chunk's worth */
  watch_start(&watch, "good");
  watch_until(&watch, 'R', 1);
  int without = open_fd_count();
  kvp_memory_create(watch.link, &fds, 7, "test", memory_bytes, on_memory, &watch, &memory);
  kvp_memory_destroy(memory);
  assert_int_equal(fds.used, 2);              /* what is under way still comes */
  request(&watch, KVP_CONTROL_BUFFER_ATTACH); /* answered after it */
  watch_until(&watch, 'r', 1);
  assert_int_equal(watch_count(&watch, 'm'), 0);
  assert_int_equal(fds.used, 0);
  assert_int_equal(open_fd_count(), without);
  watch_end(&watch);
}

static void test_memory_of_a_dying_executor(void **state) {
  (void)state;
  struct watch watch;
  struct kvp_memory *memory = NULL;
  struct kvp_fd_budget fds = {.limit = 2, .used = 2}; /* one chunk's worth */
  watch_start(&watch, "mute");
  watch_until(&watch, 'R', 1);
  kvp_memory_create(watch.link, &fds, 7, "test", memory_bytes, on_memory, &watch, &memory);
  assert_int_equal(kill(kvp_executor_link_pid(watch.link), SIGKILL), 0);
  watch_until(&watch, 'm', 1);
  assert_int_equal(watch.memory_result.status, KVP_DEVICE_LOST);
  kvp_memory_destroy(memory);
  assert_int_equal(fds.used, 0);
  watch_end(&watch);
}

/* A driver's descriptors are nobody's to look into; anything else has to be a sealed memfd. */
static void test_chunks_of_a_driver(void **state) {
  (void)state;
  struct watch watch;
  struct kvp_memory *memory = NULL;
  struct kvp_fd_budget fds = {.limit = 6, .used = 6}; /* three chunks' worth */
  const uint64_t bytes = (UINT64_C(2) << 30) + 5;
  watch_start(&watch, "cuda:GPU-1");
  watch.memory_bytes = UINT64_C(80) << 30;
  watch_until(&watch, 'R', 1);
  int without = open_fd_count();
  kvp_memory_create(watch.link, &fds, 7, "test", bytes, on_memory, &watch, &memory);
  watch_until(&watch, 'm', 1);
  assert_int_equal(watch.memory_result.status, KVP_OK);
  assert_int_equal(open_fd_count(), without + 3);
  assert_int_equal(kill(kvp_executor_link_pid(watch.link), SIGKILL), 0);
  watch_until(&watch, 'R', 2);
  kvp_memory_restore(memory, on_memory, &watch);
  watch_until(&watch, 'm', 2);
  assert_int_equal(watch.memory_result.status, KVP_OK);
  assert_string_equal(watch.memory_result.text, "3 chunks");
  kvp_memory_destroy(memory);
  assert_int_equal(open_fd_count(), without);
  watch_end(&watch);
}

static void test_chunks_that_are_no_memfds(void **state) {
  (void)state;
  struct watch watch;
  struct kvp_memory *memory = NULL;
  struct kvp_fd_budget fds = {.limit = 2, .used = 2};
  watch_start(&watch, "memfds");
  watch_until(&watch, 'R', 1);
  int without = open_fd_count();
  kvp_memory_create(watch.link, &fds, 7, "test", 4096, on_memory, &watch, &memory);
  watch_until(&watch, 'm', 1);
  assert_int_not_equal(watch.memory_result.status, KVP_OK);
  assert_int_equal(open_fd_count(), without);
  kvp_memory_destroy(memory);
  watch_end(&watch);
}

/* libuv keeps a pipe for signals from its first child on: not a leak of ours. */
static int warm_up(void **state) {
  (void)state;
  struct watch watch;
  watch_start(&watch, "good");
  watch_until(&watch, 'R', 1);
  watch_end(&watch);
  return 0;
}

int main(void) {
  kvp_log_set_level(KVP_LOG_ERROR);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_ready_request_stop),
      cmocka_unit_test(test_only_its_fds_are_inherited),
      cmocka_unit_test(test_request_dies_with_its_executor),
      cmocka_unit_test(test_garbage_is_the_end),
      cmocka_unit_test(test_stop_with_requests_pending),
      cmocka_unit_test(test_more_than_the_socket_holds),
      cmocka_unit_test(test_no_executor_to_run),
      cmocka_unit_test(test_dies_before_ready),
      cmocka_unit_test(test_refused),
      cmocka_unit_test(test_look),
      cmocka_unit_test_setup_teardown(test_waits_for_others, busy_setup, busy_teardown),
      cmocka_unit_test_setup_teardown(test_waits_after_a_death, busy_setup, busy_teardown),
      cmocka_unit_test_setup_teardown(test_stopped_while_it_waits, busy_setup, busy_teardown),
      cmocka_unit_test(test_step_there_and_back),
      cmocka_unit_test(test_done_before_death_counts),
      cmocka_unit_test(test_corrupt_lane_is_given_up),
      cmocka_unit_test(test_full_lane),
      cmocka_unit_test(test_memory_outlives_executors),
      cmocka_unit_test(test_memory_of_a_worker),
      cmocka_unit_test(test_memory_closed),
      cmocka_unit_test(test_memory_destroyed_while_made),
      cmocka_unit_test(test_memory_of_a_dying_executor),
      cmocka_unit_test(test_chunks_of_a_driver),
      cmocka_unit_test(test_chunks_that_are_no_memfds),
  };
  return cmocka_run_group_tests(tests, warm_up, NULL);
}
