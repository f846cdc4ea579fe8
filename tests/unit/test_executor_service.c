/* Several rings, their turns, waits, signals, fences and ends: the serving thread's work, one call at a time, on a device
 * that does nothing until it is told to.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/owner_entry.h"
#include "server/executor/service.h"
#include "tests/unit/exec_harness.h"
#include "tests/unit/fake_device.h"

enum {
  session = 3,
  other_session = 4,
  buffer_id = 1,
  other_buffer_id = 2,
  pool_id = 7,
  workers_max = 16,
  first_queue = 100,
  watchdog_seconds = 120,
  /* words */
  client_a = 1,
  client_b = 2,
  done_a = kvp_client_words,
  done_b,
  done_c,
};

static const struct kvp_ring_sizes worker_sizes = {
    .commands = 1024, .completions = 2048, .command_arena_bytes = 8 << 20, .completion_arena_bytes = 4 << 20};

/* A worker's end, or the supervisor's. */
struct end {
  struct kvp_ring ring;
  int ring_fd;
  int command_event;
  int completion_event;
  int timelines_fd;
  struct kvp_timeline_word *words;
  struct kvp_served_ring *served;
};

static struct rig {
  struct fake_device device;
  struct kvp_service service;
  struct kvp_mailbox mailbox;
  struct kvp_ring supervisors;
  struct end supervisor;
  struct end workers[workers_max];
  struct kvp_buffer buffers[2];
  struct kvp_pool pool;
  int wake_event;
} rig;

static _Atomic uint64_t owners[2];
static _Alignas(64) uint8_t somewhere[4096]; /* nothing runs: what is there is never looked at */

static void rings_make(struct end *end, const struct kvp_ring_sizes *sizes) {
  struct kvp_error error;
  end->ring_fd = kvp_ring_create("test-ring", sizes, &error);
  assert_true(end->ring_fd >= 0);
  assert_int_equal(kvp_ring_init(&end->ring, end->ring_fd, KVP_RING_CLIENT, &error), KVP_OK);
  end->command_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

static void objects_add(void) {
  rig.buffers[0] = (struct kvp_buffer){.id = buffer_id, .base = somewhere, .bytes = 1 << 20, .owner = session};
  rig.buffers[1] =
      (struct kvp_buffer){.id = other_buffer_id, .base = somewhere, .bytes = 1 << 20, .owner = other_session};
  rig.pool = (struct kvp_pool){.id = pool_id, .num_blocks = 2, .region_count = 1, .owner_entries = owners};
  rig.pool.regions[0].base = somewhere;
  for (int i = 0; i < 2; i++) {
    owners[i] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  }
  assert_int_equal(
      kvp_geometry_init(kvp_format_get(KVP_FORMAT_BF16), 64, 16, 2, 1, &rig.pool.regions[0].geometry, NULL), KVP_OK);
  struct kvp_object_change changes[] = {{.kind = KVP_ADD_BUFFER, .buffer = &rig.buffers[0]},
                                        {.kind = KVP_ADD_BUFFER, .buffer = &rig.buffers[1]},
                                        {.kind = KVP_ADD_POOL, .pool = &rig.pool}};
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    assert_int_equal(kvp_service_change(&rig.service, &changes[i]), KVP_OK);
  }
}

static int setup(void **state) {
  (void)state;
  struct kvp_error error;
  memset(&rig, 0, sizeof rig);
  rig.device = (struct fake_device){.base.backend = &fake_backend, .capacity_ops = 100000};
  rig.wake_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  assert_true(kvp_mailbox_init(&rig.mailbox, rig.wake_event));
  rings_make(&rig.supervisor, &exec_harness_defaults.ring);
  rig.supervisor.completion_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  assert_int_equal(kvp_ring_init(&rig.supervisors, rig.supervisor.ring_fd, KVP_RING_EXECUTOR, &error), KVP_OK);
  rig.service.mailbox = &rig.mailbox;
  rig.service.rings.epoll = epoll_create1(EPOLL_CLOEXEC);
  kvp_served_ring_init(&rig.service.supervisors, &rig.supervisors, rig.supervisor.command_event,
                       rig.supervisor.completion_event);
  rig.supervisor.served = &rig.service.supervisors;
  assert_int_equal(kvp_service_init(&rig.service, &error), KVP_OK);
  assert_int_equal(kvp_dispatch_init(&rig.service.dispatch, &rig.device.base, &error), KVP_OK);
  objects_add();
  return 0;
}

static void end_close(struct end *end) {
  kvp_ring_deinit(&end->ring);
  (void)close(end->ring_fd);
  (void)close(end->command_event);
  (void)close(end->completion_event);
  if (end->words != NULL) {
    (void)munmap(end->words, kvp_timeline_bytes);
    (void)close(end->timelines_fd);
  }
}

static int teardown(void **state) {
  (void)state;
  kvp_dispatch_deinit(&rig.service.dispatch, kvp_service_step_drop, &rig.service);
  kvp_service_deinit(&rig.service);
  assert_int_equal(rig.service.steps.use.count, 0);
  assert_int_equal(rig.service.steps.use.bytes, 0);
  assert_int_equal(rig.device.registered, 0);
  kvp_mailbox_deinit(&rig.mailbox);
  kvp_ring_deinit(&rig.supervisors);
  end_close(&rig.supervisor);
  for (int i = 0; i < workers_max; i++) {
    if (rig.workers[i].words != NULL) {
      end_close(&rig.workers[i]);
    }
  }
  (void)close(rig.service.rings.epoll);
  (void)close(rig.wake_event);
  return 0;
}

/* Worker i: attachment and queue have its number. */
static struct end *worker_attach_with(uint32_t i, const struct kvp_ring_sizes *sizes, uint64_t deadline_ns_max) {
  struct end *end = &rig.workers[i];
  struct kvp_error error;
  int pair[2];
  rings_make(end, sizes);
  assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
  end->completion_event = pair[1];
  end->timelines_fd = kvp_memory_fd_create("timelines", kvp_timeline_bytes, &error);
  end->words = (struct kvp_timeline_word *)(void *)exec_harness_map(end->timelines_fd, kvp_timeline_bytes);
  const struct kvp_control_ring spec = {
      .attachment_id = i + 1, .owner = session, .queue = first_queue + i, .deadline_ns_max = deadline_ns_max};
  const int fds[kvp_control_ring_fd_count] = {
      [KVP_CONTROL_RING_FD_RING] = end->ring_fd,
      [KVP_CONTROL_RING_FD_COMMAND_EVENT] = dup(end->command_event),
      [KVP_CONTROL_RING_FD_COMPLETION_EVENT] = pair[0],
      [KVP_CONTROL_RING_FD_TIMELINES] = end->timelines_fd,
  };
  end->served = kvp_served_ring_new(&spec, fds, &rig.device.base, &error);
  assert_non_null(end->served);
  struct kvp_object_change change = {.kind = KVP_ADD_RING, .ring = end->served};
  assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
  return end;
}

static struct end *worker_attach(uint32_t i) {
  return worker_attach_with(i, &worker_sizes, 0);
}

/* ---- steps ---- */

static void record_post(struct end *end, uint32_t kind, uint64_t tag, const void *payload, uint32_t bytes) {
  void *place = kvp_lane_reserve(&end->ring.commands, bytes);
  assert_non_null(place);
  if (bytes > 0) {
    memcpy(place, payload, bytes);
  }
  (void)kvp_lane_publish(&end->ring.commands, kind, tag, bytes);
}

/* The encoder is freed. */
static void step_post(struct end *end, uint64_t tag, struct step_encoder *encoder) {
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  record_post(end, KVP_COMMAND_STEP, tag, encoded, bytes);
  free(encoded);
  step_encoder_deinit(encoder);
}

/* Of a worker that says it is the daemon itself. */
static void step_begin(struct step_encoder *encoder) {
  step_encoder_init(encoder, 7, 0, 1);
}

static struct kvp_wire_op *op_add_to(struct step_encoder *encoder, uint64_t buffer) {
  static const int32_t pivots[] = {3, 2, 9, 1};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_EXPAND_SWA_INDEX);
  op->argument = 4;
  op->second = step_view(buffer, 0, 1, 16, 16);
  op->arrays[0] = step_encoder_array(encoder, pivots, sizeof pivots);
  return op;
}

static struct kvp_wire_op *op_add(struct step_encoder *encoder) {
  return op_add_to(encoder, buffer_id);
}

static void op_waits(struct kvp_wire_op *op, uint32_t word, uint64_t value) {
  op->flags |= KVP_OP_WAITS;
  op->wait = (struct kvp_wire_point){.word = word, .value = value};
}

static void op_signals(struct kvp_wire_op *op, uint32_t word, uint64_t value) {
  op->flags |= KVP_OP_SIGNALS;
  op->signal = (struct kvp_wire_point){.word = word, .value = value};
}

/* A step of one op; 0: no wait, no signal. */
static void simple_post(struct end *end, uint64_t tag, uint32_t wait_word, uint64_t wait_value, uint32_t signal_word,
                        uint64_t signal_value) {
  struct step_encoder encoder;
  step_begin(&encoder);
  struct kvp_wire_op *op = op_add(&encoder);
  if (wait_word != 0) {
    op_waits(op, wait_word, wait_value);
  }
  if (signal_word != 0) {
    op_signals(op, signal_word, signal_value);
  }
  step_post(end, tag, &encoder);
}

static void word_set(struct end *end, uint32_t word, uint64_t value) {
  atomic_store(&end->words[word].value, value);
}

static uint64_t word_get(struct end *end, uint32_t word) {
  return atomic_load(&end->words[word].value);
}

/* Until nothing happens any more. */
static void serve(void) {
  bool any = true;
  while (any) {
    any = kvp_service_commands_take(&rig.service);
    any = kvp_service_finished_take(&rig.service) || any;
  }
}

static bool try_take(struct end *end, struct exec_completion *out, struct kvp_error *error) {
  struct kvp_ring_record record;
  if (kvp_lane_peek(&end->ring.completions, &record) != KVP_LANE_RECORD) {
    return false;
  }
  *out = (struct exec_completion){.kind = record.kind, .tag = record.tag, .payload_bytes = record.payload_bytes};
  if (error != NULL && record.payload_bytes == sizeof *error) {
    kvp_lane_copy_payload(&end->ring.completions, &record, error);
  }
  kvp_lane_advance(&end->ring.completions, &record);
  return true;
}

/* The next completion is this one. */
static struct kvp_error expect(struct end *end, enum kvp_completion_kind kind, uint64_t tag) {
  struct exec_completion completion = {0};
  struct kvp_error error = {0};
  assert_true(try_take(end, &completion, &error));
  if (completion.kind == KVP_COMPLETION_REFUSED && kind != KVP_COMPLETION_REFUSED) {
    print_error("%s\n", error.text);
  }
  assert_int_equal(completion.kind, kind);
  assert_int_equal(completion.tag, tag);
  return error;
}

static void expect_nothing(struct end *end) {
  struct exec_completion completion;
  assert_false(try_take(end, &completion, NULL));
}

/* ---- turns ---- */

static void turns_take(uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    assert_true(kvp_service_commands_take(&rig.service));
  }
}

/* A ring with a hundred commands and others with few: these get their turn after four of the first. */
static void test_turns(void **state) {
  (void)state;
  struct end *flood = worker_attach(0), *quiet = worker_attach(1), *idle = worker_attach(2);
  struct step_encoder encoder;
  for (uint64_t i = 0; i < 100; i++) {
    simple_post(flood, i, 0, 0, 0, 0);
  }
  for (uint64_t i = 0; i < 3; i++) {
    simple_post(quiet, i, 0, 0, 0, 0);
  }
  turns_take(2);
  assert_int_equal(flood->served->use.count, 4);
  assert_int_equal(quiet->served->use.count, 3);
  simple_post(idle, 0, 0, 0, 0, 0);
  for (uint64_t i = 0; i < 20; i++) {
    step_encoder_init(&encoder, 1, session, 1);
    step_post(&rig.supervisor, i, &encoder);
  }
  turns_take(3);
  assert_int_equal(idle->served->use.count, 1);
  assert_int_equal(rig.supervisor.served->use.count, 16); /* many sessions are behind it */
  assert_int_equal(flood->served->use.count, 8);
  turns_take(2);
  assert_int_equal(rig.supervisor.served->use.count, 20);
  assert_int_equal(flood->served->use.count, 12);
  turns_take(88 / 4); /* nobody else wants anything */
  assert_int_equal(flood->served->use.count, 100);
  assert_false(kvp_service_commands_take(&rig.service));
}

/* All rings are flooded: none has a third turn before all had two. */
static void test_turns_of_many(void **state) {
  (void)state;
  enum { turn = 4, turns = 2 };
  for (uint32_t w = 0; w < workers_max; w++) {
    struct end *end = worker_attach(w);
    for (uint64_t i = 0; i < 20; i++) {
      simple_post(end, i, 0, 0, 0, 0);
    }
  }
  turns_take(turns * workers_max);
  for (uint32_t w = 0; w < workers_max; w++) {
    assert_int_equal(rig.workers[w].served->use.count, turns * turn);
  }
}

/* What a large step takes to check counts, too: one of them is a turn. */
static void test_turns_by_bytes(void **state) {
  (void)state;
  enum { elements = 20000 };
  struct end *flood = worker_attach(0), *quiet = worker_attach(1);
  int32_t *pivots = calloc(elements, sizeof *pivots);
  assert_non_null(pivots);
  for (uint64_t i = 0; i < 10; i++) {
    struct step_encoder encoder;
    step_begin(&encoder);
    struct kvp_wire_op *op = op_add(&encoder);
    op->arrays[0] = step_encoder_array(&encoder, pivots, elements * sizeof *pivots);
    op->second.rows = elements / 4;
    step_post(flood, i, &encoder);
    simple_post(quiet, i, 0, 0, 0, 0);
  }
  free(pivots);
  turns_take(2);
  assert_int_equal(flood->served->use.count, 1);
  assert_int_equal(quiet->served->use.count, 4);
}

/* ---- quotas ---- */

/* A worker with as many steps under way as it may have leaves the others to the ring; nobody else is held up. */
static void test_quota(void **state) {
  (void)state;
  enum { posted = kvp_steps_in_flight_per_session_max + 40 };
  struct end *greedy = worker_attach(0), *other = worker_attach(1);
  for (uint64_t i = 0; i < posted; i++) {
    simple_post(greedy, i, client_a, 1, 0, 0);
  }
  serve();
  assert_int_equal(greedy->served->use.count, kvp_steps_in_flight_per_session_max);
  simple_post(other, 1, 0, 0, 0, 0);
  serve();
  (void)expect(other, KVP_COMPLETION_ACCEPTED, 1);
  assert_int_equal(rig.device.launched, 1);
  fake_device_end_all(&rig.device);
  serve();
  (void)expect(other, KVP_COMPLETION_DONE, 1);

  word_set(greedy, client_a, 1);
  uint64_t done = 0, accepted = 0;
  while (done < posted) {
    struct exec_completion completion;
    serve();
    fake_device_end_all(&rig.device);
    while (try_take(greedy, &completion, NULL)) {
      if (completion.kind == KVP_COMPLETION_DONE) {
        assert_int_equal(completion.tag, done++);
      } else {
        assert_int_equal(completion.kind, KVP_COMPLETION_ACCEPTED);
        assert_int_equal(completion.tag, accepted++);
      }
    }
  }
  assert_int_equal(accepted, posted);
  assert_int_equal(greedy->served->use.count, 0);
  assert_int_equal(greedy->served->use.bytes, 0);
}

/* All workers together leave room to the supervisor's ring; a ring with nothing under way always gets one step in. */
static void test_shared_quota(void **state) {
  (void)state;
  struct end *late = worker_attach(0), *greedy = worker_attach(1);
  struct step_encoder encoder;
  rig.service.steps.use.count += kvp_executor_steps_max / 2; /* as if others had them */
  for (uint64_t i = 0; i < 3; i++) {
    simple_post(late, i, client_a, 1, 0, 0);
    simple_post(greedy, i, client_a, 1, 0, 0);
    step_encoder_init(&encoder, 1, session, 1);
    step_post(&rig.supervisor, i, &encoder);
  }
  serve();
  assert_int_equal(late->served->use.count, 1);
  assert_int_equal(greedy->served->use.count, 1);
  assert_int_equal(rig.supervisor.served->use.count, 3);
  rig.service.steps.use.count -= kvp_executor_steps_max / 2;
  serve();
  assert_int_equal(late->served->use.count, 3);
}

/* A worker that doesn't take its completions blocks its own ring. */
static void test_blocked_outbox(void **state) {
  (void)state;
  const struct kvp_ring_sizes small = {
      .commands = 64, .completions = 4, .command_arena_bytes = 1 << 20, .completion_arena_bytes = 1 << 14};
  struct end *deaf = worker_attach_with(0, &small, 0), *other = worker_attach(1);
  for (uint64_t i = 0; i < 20; i++) {
    simple_post(deaf, i, 0, 0, 0, 0);
  }
  for (int i = 0; i < 10; i++) {
    serve();
    fake_device_end_all(&rig.device);
  }
  assert_true(kvp_service_is_blocked(&rig.service));
  assert_true(deaf->served->use.count < 10);
  for (uint64_t i = 0; i < 30; i++) {
    simple_post(other, i, 0, 0, 0, 0);
    serve();
    fake_device_end_all(&rig.device);
    serve();
    (void)expect(other, KVP_COMPLETION_ACCEPTED, i);
    (void)expect(other, KVP_COMPLETION_DONE, i);
  }
  uint64_t accepted = 0, done = 0;
  while (done < 20) {
    struct exec_completion completion;
    serve();
    fake_device_end_all(&rig.device);
    while (try_take(deaf, &completion, NULL)) {
      uint64_t *counter = completion.kind == KVP_COMPLETION_DONE ? &done : &accepted;
      assert_int_equal(completion.tag, (*counter)++);
    }
  }
  assert_int_equal(accepted, 20);
  assert_false(kvp_service_is_blocked(&rig.service));
}

/* Full of tokens or closed, the socket that wakes a worker never holds the executor up. */
static void test_deaf_socket(void **state) {
  (void)state;
  struct end *deaf = worker_attach(0);
  const uint64_t one = 1;
  while (send(deaf->served->completion_event, &one, sizeof one, MSG_DONTWAIT) > 0) {
  }
  assert_true(kvp_lane_prepare_sleep(&deaf->ring.completions));
  simple_post(deaf, 1, 0, 0, 0, 0);
  serve();
  (void)expect(deaf, KVP_COMPLETION_ACCEPTED, 1);
  assert_int_equal(shutdown(deaf->completion_event, SHUT_RDWR), 0);
  assert_true(kvp_lane_prepare_sleep(&deaf->ring.completions));
  fake_device_end_all(&rig.device);
  serve();
  (void)expect(deaf, KVP_COMPLETION_DONE, 1);
}

/* ---- whose steps they are ---- */

static void test_signed_steps(void **state) {
  (void)state;
  struct end *end = worker_attach(0);
  struct step_encoder encoder;
  step_begin(&encoder); /* owner 0 would own everything */
  (void)op_add_to(&encoder, other_buffer_id);
  step_post(end, 1, &encoder);
  step_begin(&encoder);
  step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source = step_view(buffer_id, 0, 1, 16, 16);
  step_post(end, 2, &encoder);
  record_post(end, KVP_COMMAND_STEP, 3, "short", 5);
  step_begin(&encoder);
  (void)op_add(&encoder);
  step_post(end, 4, &encoder);
  serve();
  assert_int_equal(expect(end, KVP_COMPLETION_REFUSED, 1).status, KVP_UNKNOWN_BUFFER);
  assert_int_equal(expect(end, KVP_COMPLETION_REFUSED, 2).status, KVP_PERMISSION_DENIED);
  assert_int_equal(expect(end, KVP_COMPLETION_REFUSED, 3).status, KVP_MALFORMED);
  (void)expect(end, KVP_COMPLETION_ACCEPTED, 4);
  assert_null(kvp_id_table_get(&rig.service.dispatch.queues.table, 7));
  assert_non_null(kvp_id_table_get(&rig.service.dispatch.queues.table, first_queue));
}

/* ---- waits and signals ---- */

/* A step is launched leg by leg, each when its word is there, and not before; it is done when the last has ended. */
static void test_legs(void **state) {
  (void)state;
  struct end *end = worker_attach(0);
  struct step_encoder encoder;
  step_begin(&encoder);
  encoder.header.base = 100;
  op_signals(op_add(&encoder), done_a, 1);
  struct kvp_wire_op *op = op_add(&encoder);
  op_waits(op, client_a, 5);
  op_signals(op, done_b, 2);
  op_signals(op_add(&encoder), done_c, 3);
  op_waits(op_add(&encoder), client_b, 7);
  step_post(end, 1, &encoder);
  simple_post(end, 2, 0, 0, 0, 0); /* behind it, in order */
  serve();
  (void)expect(end, KVP_COMPLETION_ACCEPTED, 1);
  (void)expect(end, KVP_COMPLETION_ACCEPTED, 2);
  assert_int_equal(rig.device.launched, 1);
  assert_int_equal(rig.device.ops[0], 2);
  assert_true(kvp_dispatch_is_waiting(&rig.service.dispatch));
  fake_device_end_all(&rig.device);
  assert_int_equal(word_get(end, done_a), 101);
  word_set(end, client_a, 104);
  word_set(end, client_b, 200);
  serve();
  assert_int_equal(rig.device.launched, 1); /* the first wait isn't over */
  word_set(end, client_a, 105);
  serve();
  assert_int_equal(rig.device.launched, 4); /* the rest, without waiting for one another's end */
  assert_int_equal(rig.device.ops[1], 4);
  assert_int_equal(rig.device.ops[2], 1);
  assert_false(kvp_dispatch_is_waiting(&rig.service.dispatch));
  assert_int_equal(word_get(end, done_b), 0);
  fake_device_end(&rig.device, 1);
  assert_int_equal(word_get(end, done_b), 102);
  assert_int_equal(word_get(end, done_c), 103);
  serve();
  expect_nothing(end);
  fake_device_end(&rig.device, 2);
  serve();
  (void)expect(end, KVP_COMPLETION_DONE, 1);
  expect_nothing(end);
  fake_device_end(&rig.device, 3);
  serve();
  (void)expect(end, KVP_COMPLETION_DONE, 2);
}

/* A step that waits holds up its own queue and no other. */
static void test_waits_are_a_queue_s_own(void **state) {
  (void)state;
  struct end *end = worker_attach(0), *other = worker_attach(1);
  simple_post(end, 1, client_a, 1, 0, 0);
  simple_post(end, 2, 0, 0, 0, 0);
  simple_post(other, 1, 0, 0, 0, 0);
  word_set(other, client_a, 1); /* another ring's word of that number */
  serve();
  assert_int_equal(rig.device.launched, 1);
  fake_device_end_all(&rig.device);
  serve();
  (void)expect(other, KVP_COMPLETION_ACCEPTED, 1);
  (void)expect(other, KVP_COMPLETION_DONE, 1);
  word_set(end, client_a, 1);
  serve();
  assert_int_equal(rig.device.launched, 3);
}

/* ACCEPTED is left out where it isn't wanted; a refusal isn't. */
static void test_acceptance_not_told(void **state) {
  (void)state;
  struct end *end = worker_attach(0);
  struct step_encoder encoder;
  for (uint64_t tag = 1; tag <= 2; tag++) {
    step_begin(&encoder);
    encoder.header.flags = KVP_STEP_NOT_ACCEPTED_TOLD;
    (void)op_add_to(&encoder, tag == 1 ? buffer_id : other_buffer_id);
    step_post(end, tag, &encoder);
  }
  serve();
  assert_int_equal(expect(end, KVP_COMPLETION_REFUSED, 2).status, KVP_UNKNOWN_BUFFER);
  expect_nothing(end);
  fake_device_end_all(&rig.device);
  serve();
  (void)expect(end, KVP_COMPLETION_DONE, 1);
  expect_nothing(end);
}

static void test_point_refusals(void **state) {
  (void)state;
  const uint64_t most = KVP_TIMELINE_POISON - 1;
  const struct {
    uint64_t base;
    struct kvp_wire_point point;
    int64_t value;
    enum kvp_status status;
    bool is_signal;
  } cases[] = {
      {0, {0, 0, 1}, 0, KVP_OK, false},
      {0, {kvp_timeline_words - 1, 0, most}, 0, KVP_OK, false},
      {0, {kvp_timeline_words, 0, 1}, kvp_timeline_words, KVP_OUT_OF_RANGE, false},
      {0, {UINT32_MAX, 0, 1}, UINT32_MAX, KVP_OUT_OF_RANGE, false},
      {0, {0, 2, 1}, 2, KVP_MALFORMED, false},
      {UINT64_MAX, {0, KVP_POINT_ABSOLUTE, most}, 0, KVP_OK, false},
      {0, {0, 0, 0}, 0, KVP_OUT_OF_RANGE, false},
      {0, {0, 0, most + 1}, (int64_t)most + 1, KVP_OUT_OF_RANGE, false},
      {1, {0, 0, most}, (int64_t)most, KVP_OUT_OF_RANGE, false},
      {most - 1, {0, 0, 1}, 0, KVP_OK, false},
      {UINT64_MAX, {0, 0, 2}, 2, KVP_OUT_OF_RANGE, false}, /* 1, if nobody looks */
      {0, {kvp_client_words, 0, 1}, 0, KVP_OK, true},
      {0, {kvp_timeline_words - 1, 0, 1}, 0, KVP_OK, true},
      {0, {kvp_client_words - 1, 0, 1}, kvp_client_words - 1, KVP_OUT_OF_RANGE, true}, /* the worker's own */
      {0, {kvp_timeline_words, 0, 1}, kvp_timeline_words, KVP_OUT_OF_RANGE, true},
      {0, {kvp_client_words, 0, 0}, 0, KVP_OUT_OF_RANGE, true},
  };
  struct end *end = worker_attach(0);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (int has_flag = 0; has_flag < 2; has_flag++) {
      struct step_encoder encoder;
      step_begin(&encoder);
      encoder.header.base = cases[i].base;
      struct kvp_wire_op *op = op_add(&encoder);
      op->flags = has_flag == 0 ? 0 : cases[i].is_signal ? KVP_OP_SIGNALS : KVP_OP_WAITS;
      *(cases[i].is_signal ? &op->signal : &op->wait) = cases[i].point;
      step_post(end, i, &encoder);
      serve();
      const bool is_empty = cases[i].point.word == 0 && cases[i].point.flags == 0 && cases[i].point.value == 0;
      const enum kvp_status status = has_flag != 0 ? cases[i].status : is_empty ? KVP_OK : KVP_MALFORMED;
      if (status == KVP_OK) {
        (void)expect(end, KVP_COMPLETION_ACCEPTED, i);
        continue;
      }
      const struct kvp_error error = expect(end, KVP_COMPLETION_REFUSED, i);
      assert_int_equal(error.status, status);
      assert_int_equal(error.op, 0);
      assert_string_equal(error.array, cases[i].is_signal ? "signal" : "wait");
      if (has_flag != 0) {
        assert_int_equal(error.value, cases[i].value);
      }
    }
  }
}

/* ---- waits in vain ---- */

/* A poisoned word fails the step: what it would have signalled is poisoned, once what is launched of it has ended, and
 * stays so; who waits for that fails, too; who doesn't runs. */
static void test_poison(void **state) {
  (void)state;
  struct end *end = worker_attach(0);
  struct step_encoder encoder;
  step_begin(&encoder);
  op_signals(op_add(&encoder), done_a, 1);
  struct kvp_wire_op *op = op_add(&encoder);
  op_waits(op, client_a, 5);
  op_signals(op, done_b, 1);
  op_signals(op_add(&encoder), done_c, 1);
  step_post(end, 1, &encoder);
  simple_post(end, 2, done_b, 1, 0, 0);
  simple_post(end, 3, 0, 0, done_c, 2);
  serve();
  for (uint64_t tag = 1; tag <= 3; tag++) {
    (void)expect(end, KVP_COMPLETION_ACCEPTED, tag);
  }
  assert_int_equal(rig.device.launched, 1);
  word_set(end, client_a, KVP_TIMELINE_POISON);
  serve();
  assert_int_equal(word_get(end, done_b), 0); /* not yet: something of it runs */
  expect_nothing(end);
  fake_device_end(&rig.device, 0);
  serve();
  assert_int_equal(word_get(end, done_a), 1);
  assert_int_equal(word_get(end, done_b), KVP_TIMELINE_POISON);
  assert_int_equal(word_get(end, done_c), KVP_TIMELINE_POISON);
  struct kvp_error error = expect(end, KVP_COMPLETION_FAILED, 1);
  assert_int_equal(error.status, KVP_CANCELLED);
  assert_int_equal(error.op, 1);
  assert_string_equal(error.array, "wait");
  assert_int_equal(error.position, client_a);
  assert_int_equal(error.value, KVP_TIMELINE_POISON);
  assert_non_null(strstr(error.text, "word 1"));
  error = expect(end, KVP_COMPLETION_FAILED, 2);
  assert_int_equal(error.status, KVP_CANCELLED);
  assert_int_equal(error.op, 0);
  assert_int_equal(error.position, done_b);
  assert_int_equal(rig.device.launched, 2); /* step 3 */
  assert_int_equal(rig.device.ops[1], 2);   /* its signal poisons the word once more: */
  word_set(end, done_c, 0);                 /* a worker set it back, and would wait for good */
  fake_device_end(&rig.device, 1);
  serve();
  (void)expect(end, KVP_COMPLETION_DONE, 3);
  assert_int_equal(word_get(end, done_c), KVP_TIMELINE_POISON);
  assert_int_equal(rig.buffers[0].uses, 0);
}

static void test_deadlines(void **state) {
  (void)state;
  struct end *end = worker_attach(0), *short_of_time = worker_attach_with(1, &worker_sizes, 1);
  struct step_encoder encoder;
  word_set(end, client_a, 3);
  step_begin(&encoder);
  encoder.header.deadline_ns = 1;
  struct kvp_wire_op *op = op_add(&encoder);
  op_waits(op, client_a, 4);
  op_signals(op, done_a, 1);
  step_post(end, 1, &encoder);
  serve();
  (void)expect(end, KVP_COMPLETION_ACCEPTED, 1);
  const struct kvp_error error = expect(end, KVP_COMPLETION_FAILED, 1);
  assert_int_equal(error.status, KVP_DEADLINE_EXCEEDED);
  assert_int_equal(error.op, 0);
  assert_int_equal(error.position, client_a);
  assert_int_equal(error.value, 3);
  assert_int_equal(word_get(end, done_a), KVP_TIMELINE_POISON);
  assert_int_equal(rig.device.launched, 0);

  step_begin(&encoder); /* no longer than the ring's, whatever it asks for */
  encoder.header.deadline_ns = UINT64_MAX;
  op_waits(op_add(&encoder), client_a, 1);
  step_post(short_of_time, 1, &encoder);
  step_begin(&encoder);
  op_waits(op_add(&encoder), client_a, 1);
  step_post(short_of_time, 2, &encoder);
  step_begin(&encoder); /* what is there already was in time */
  op_waits(op_add(&encoder), client_b, 1);
  word_set(short_of_time, client_b, 1);
  step_post(short_of_time, 3, &encoder);
  serve();
  for (uint64_t tag = 1; tag <= 3; tag++) {
    (void)expect(short_of_time, KVP_COMPLETION_ACCEPTED, tag);
  }
  assert_int_equal(expect(short_of_time, KVP_COMPLETION_FAILED, 1).status, KVP_DEADLINE_EXCEEDED);
  assert_int_equal(expect(short_of_time, KVP_COMPLETION_FAILED, 2).status, KVP_DEADLINE_EXCEEDED);
  assert_int_equal(rig.device.launched, 1);
  step_begin(&encoder); /* one that has time waits, nobody asks for how long */
  op_waits(op_add(&encoder), client_a, 4);
  step_post(end, 2, &encoder);
  serve();
  (void)expect(end, KVP_COMPLETION_ACCEPTED, 2);
  expect_nothing(end);
}

/* ---- fences ---- */

static void test_fences(void **state) {
  (void)state;
  struct end *a = worker_attach(0), *b = worker_attach(1);
  record_post(&rig.supervisor, KVP_COMMAND_FENCE, 50, NULL, 0);
  serve();
  (void)expect(&rig.supervisor, KVP_COMPLETION_FENCED, 50); /* there is nothing to wait for */
  simple_post(a, 1, client_a, 1, 0, 0);
  simple_post(b, 1, 0, 0, 0, 0);
  serve();
  record_post(&rig.supervisor, KVP_COMMAND_FENCE, 51, NULL, 0);
  serve();
  simple_post(b, 2, client_b, 1, 0, 0); /* behind the fence */
  serve();
  record_post(&rig.supervisor, KVP_COMMAND_FENCE, 52, NULL, 0);
  serve();
  expect_nothing(&rig.supervisor);
  fake_device_end(&rig.device, 0); /* b's first */
  serve();
  expect_nothing(&rig.supervisor);
  word_set(a, client_a, 1);
  serve();
  expect_nothing(&rig.supervisor);
  fake_device_end(&rig.device, 1);
  serve();
  (void)expect(&rig.supervisor, KVP_COMPLETION_FENCED, 51);
  expect_nothing(&rig.supervisor);
  word_set(b, client_b, KVP_TIMELINE_POISON); /* a failed step has ended, too */
  serve();
  (void)expect(&rig.supervisor, KVP_COMPLETION_FENCED, 52);
  record_post(&rig.supervisor, KVP_COMMAND_FENCE, 53, NULL, 0);
  serve();
  (void)expect(&rig.supervisor, KVP_COMPLETION_FENCED, 53);
}

/* ---- ends of rings ---- */

static struct kvp_news *news_take(enum kvp_news_kind kind) {
  struct kvp_news *news = kvp_mailbox_read(&rig.mailbox);
  assert_non_null(news);
  assert_null(news->next);
  assert_int_equal(news->kind, kind);
  return news;
}

static void ring_detached(struct end *end, const struct kvp_object_change *change) {
  assert_ptr_equal(change->ring, end->served);
  for (uint32_t word = kvp_client_words; word < kvp_timeline_words; word++) {
    assert_int_equal(word_get(end, word), KVP_TIMELINE_POISON);
  }
  assert_int_equal(end->served->use.count, 0);
  kvp_served_ring_destroy(end->served);
}

/* What waits is dropped, what is launched ends; only then is the ring given back. */
static void test_detach(void **state) {
  (void)state;
  struct end *end = worker_attach(0), *other = worker_attach(1);
  struct step_encoder encoder;
  simple_post(end, 1, 0, 0, done_a, 1);
  step_begin(&encoder);
  (void)op_add(&encoder);
  op_waits(op_add(&encoder), client_a, 1); /* half of it is launched */
  step_post(end, 2, &encoder);
  simple_post(end, 3, 0, 0, 0, 0);
  simple_post(other, 1, client_a, 1, 0, 0);
  serve();
  simple_post(end, 4, 0, 0, 0, 0); /* not even taken */
  assert_int_equal(rig.device.launched, 2);
  assert_int_equal(rig.buffers[0].uses, 5);
  record_post(&rig.supervisor, KVP_COMMAND_FENCE, 1, NULL, 0);
  word_set(other, client_a, 1);
  serve();
  fake_device_end_all(&rig.device);
  serve();
  simple_post(other, 2, 0, 0, 0, 0);

  struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = 1};
  struct kvp_object_change again = change, unknown = {.kind = KVP_REMOVE_RING, .id = 77};
  simple_post(end, 5, 0, 0, 0, 0);
  assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
  assert_false(change.is_pending); /* the half had ended, and nothing else was launched */
  assert_int_equal(kvp_service_change(&rig.service, &again), KVP_INVALID_ARGUMENT);
  assert_int_equal(kvp_service_change(&rig.service, &unknown), KVP_INVALID_ARGUMENT);
  ring_detached(end, &change);
  assert_int_equal(rig.buffers[0].uses, 0);
  assert_null(kvp_id_table_get(&rig.service.dispatch.queues.table, first_queue));
  (void)expect(&rig.supervisor, KVP_COMPLETION_FENCED, 1);
  serve();
  fake_device_end_all(&rig.device);
  serve();
  for (uint64_t tag = 1; tag <= 2; tag++) {
    (void)expect(other, KVP_COMPLETION_ACCEPTED, tag);
    (void)expect(other, KVP_COMPLETION_DONE, tag);
  }
}

static void test_detach_while_launched(void **state) {
  (void)state;
  struct end *end = worker_attach(0);
  struct step_encoder encoder;
  simple_post(end, 1, 0, 0, done_a, 1);
  step_begin(&encoder);
  (void)op_add(&encoder);
  op_waits(op_add(&encoder), client_a, 1);
  step_post(end, 2, &encoder);
  simple_post(end, 3, 0, 0, done_b, 1);
  serve();
  assert_int_equal(rig.device.launched, 2);
  struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = 1}, again = change;
  assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
  assert_true(change.is_pending);
  assert_int_equal(kvp_service_change(&rig.service, &again), KVP_INVALID_ARGUMENT);
  assert_int_equal(end->served->use.count, 2); /* the third is gone */
  fake_device_end(&rig.device, 0);
  serve();
  assert_null(kvp_mailbox_read(&rig.mailbox));
  fake_device_end(&rig.device, 1);
  serve();
  assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &change);
  ring_detached(end, &change);
  assert_int_equal(rig.buffers[0].uses, 0);
  end->words = NULL; /* the number is free for another one */
  (void)worker_attach(0);
}

/* Nonsense ends one ring; its steps end as those of one that is detached, and the others don't notice. */
static void test_corrupt_ring(void **state) {
  (void)state;
  for (uint32_t i = 0; i < 4; i++) {
    struct end *end = worker_attach(i), *other = worker_attach(4 + i);
    simple_post(end, 1, 0, 0, 0, 0);
    simple_post(end, 2, client_a, 1, 0, 0);
    serve();
    const uint32_t launched = rig.device.launched - 1;
    switch (i) {
    case 0:
      record_post(end, 99, 1, NULL, 0);
      break;
    case 1: /* the supervisor's alone */
      record_post(end, KVP_COMMAND_FENCE, 1, NULL, 0);
      break;
    case 2:
      record_post(end, KVP_COMMAND_QUEUE_CLOSE, first_queue, NULL, 0);
      break;
    default: /* a number out of order */
      end->ring.commands.position += 3;
      record_post(end, KVP_COMMAND_STEP, 1, NULL, 0);
      break;
    }
    simple_post(end, 3, 0, 0, 0, 0);
    simple_post(other, 1, 0, 0, 0, 0);
    serve();
    assert_false(rig.service.failed);
    assert_ptr_equal(news_take(KVP_NEWS_RING_FAILED), &end->served->failed);
    assert_int_equal(end->served->error.status, KVP_MALFORMED);
    assert_non_null(strstr(end->served->error.text, "makes no sense"));
    assert_int_equal(end->served->use.count, 1);
    fake_device_end(&rig.device, launched);
    serve();
    assert_int_equal(end->served->use.count, 0);
    (void)expect(other, KVP_COMPLETION_ACCEPTED, 1);
    struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = i + 1};
    assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
    assert_false(change.is_pending);
    ring_detached(end, &change);
  }
}

static void test_ring_refusals(void **state) {
  (void)state;
  struct end *end = worker_attach(0);
  struct kvp_error error;
  struct kvp_control_ring spec = {.attachment_id = 9, .owner = session, .queue = 5};
  int fds[kvp_control_ring_fd_count] = {end->ring_fd, end->command_event, end->completion_event, end->timelines_fd};
  struct kvp_served_ring *twin = kvp_served_ring_new(&spec, fds, &rig.device.base, &error);
  assert_non_null(twin);
  twin->attachment_id = 1;
  struct kvp_object_change change = {.kind = KVP_ADD_RING, .ring = twin};
  assert_int_equal(kvp_service_change(&rig.service, &change), KVP_ALREADY_EXISTS);
  twin->command_event = twin->completion_event = -1; /* the test's own */
  kvp_served_ring_destroy(twin);

  spec.owner = 0; /* would own every block */
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
  spec.owner = UINT16_MAX + 1;
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
  spec.owner = session;
  fds[KVP_CONTROL_RING_FD_COMPLETION_EVENT] = end->command_event;
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
  assert_non_null(strstr(error.text, "no socket"));
  fds[KVP_CONTROL_RING_FD_COMPLETION_EVENT] = end->completion_event;
  fds[KVP_CONTROL_RING_FD_TIMELINES] = end->ring_fd;
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
  fds[KVP_CONTROL_RING_FD_TIMELINES] = end->timelines_fd;
  fds[KVP_CONTROL_RING_FD_RING] = end->timelines_fd;
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
}

/* ---- removals of what is in use ---- */

static void test_deferred_removals(void **state) {
  (void)state;
  static const int32_t blocks[] = {1};
  struct end *end = worker_attach(0);
  struct step_encoder encoder;
  step_begin(&encoder);
  struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_ZERO_BLOCKS);
  op->pool_id = pool_id;
  op->arrays[0] = step_encoder_array(&encoder, blocks, sizeof blocks);
  op_waits(op, client_a, 1);
  (void)op_add(&encoder);
  step_post(end, 1, &encoder);
  simple_post(end, 2, client_a, 2, 0, 0);
  serve();
  (void)expect(end, KVP_COMPLETION_ACCEPTED, 1);
  (void)expect(end, KVP_COMPLETION_ACCEPTED, 2);
  struct kvp_object_change pool = {.kind = KVP_REMOVE_POOL, .id = pool_id},
                           buffer = {.kind = KVP_REMOVE_BUFFER, .id = buffer_id}, again = buffer;
  assert_int_equal(kvp_service_change(&rig.service, &pool), KVP_OK);
  assert_int_equal(kvp_service_change(&rig.service, &buffer), KVP_OK);
  assert_true(pool.is_pending && buffer.is_pending);
  assert_int_equal(kvp_service_change(&rig.service, &again), KVP_UNKNOWN_BUFFER);
  simple_post(end, 3, 0, 0, 0, 0);
  serve();
  assert_int_equal(expect(end, KVP_COMPLETION_REFUSED, 3).status, KVP_UNKNOWN_BUFFER);
  word_set(end, client_a, 1);
  serve();
  fake_device_end_all(&rig.device);
  serve();
  (void)expect(end, KVP_COMPLETION_DONE, 1);
  assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &pool);
  struct kvp_object_change ring = {.kind = KVP_REMOVE_RING, .id = 1}; /* its last step goes with it */
  assert_int_equal(kvp_service_change(&rig.service, &ring), KVP_OK);
  assert_false(ring.is_pending);
  assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &buffer);
  ring_detached(end, &ring);

  struct kvp_object_change other = {.kind = KVP_REMOVE_BUFFER, .id = other_buffer_id};
  assert_int_equal(kvp_service_change(&rig.service, &other), KVP_OK);
  assert_false(other.is_pending);
  assert_ptr_equal(other.buffer, &rig.buffers[1]);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
  const struct CMUnitTest tests[] = {
      TEST(test_turns),
      TEST(test_turns_of_many),
      TEST(test_turns_by_bytes),
      TEST(test_quota),
      TEST(test_shared_quota),
      TEST(test_blocked_outbox),
      TEST(test_deaf_socket),
      TEST(test_signed_steps),
      TEST(test_legs),
      TEST(test_waits_are_a_queue_s_own),
      TEST(test_acceptance_not_told),
      TEST(test_point_refusals),
      TEST(test_poison),
      TEST(test_deadlines),
      TEST(test_fences),
      TEST(test_detach),
      TEST(test_detach_while_launched),
      TEST(test_corrupt_ring),
      TEST(test_ring_refusals),
      TEST(test_deferred_removals),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
