/* Replays: steps of a worker's ring whose points are words in a buffer, for which the device itself waits. On devices
 * whose memory this process can map: the host, and a CUDA in host memory.
 *
 * A row of "narrow" that is one number over and over is the weight with that number's sign after the norm: what is to be
 * stored is known on paper, and shows when rows and weight were read.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/timeline_wire.h"
#include "tests/unit/executor_world.h"

enum {
  words_memory = 20,
  words_buffer = 120,
  words_bytes = 64 * 64, /* 64 words */
  attachment = 77,
  worker_queue = 40,
  start_word = 0, /* counted up by the worker */
  done_word = 1,  /* by the device */
  weight_offset = 4096,
  narrow_row = 32,
};

static const uint64_t second_ns = 1000000000;

/* A worker's end of a ring. */
struct worker {
  struct world *world;
  struct kvp_ring ring;
  int ring_fd, command_event, timelines_fd, words_fd;
  int events[2]; /* completion events: the executor's end, ours */
  uint64_t *words;
};

static void worker_init(struct worker *worker, struct world *world) {
  const struct kvp_ring_sizes sizes = {
      .commands = 16, .completions = 32, .command_arena_bytes = 1 << 20, .completion_arena_bytes = 1 << 20};
  const struct kvp_control_ring request = {
      .attachment_id = attachment, .deadline_ns_max = 60 * second_ns, .owner = session, .queue = worker_queue};
  struct kvp_error error;
  world_init(world);
  world_ring_attach(world);
  *worker = (struct worker){.world = world};
  world_assert_ok(exec_harness_memory_create(&world->link, words_memory, words_bytes, &worker->words_fd));
  world_assert_ok(exec_harness_buffer_attach(&world->link, words_buffer, words_memory, words_bytes, session));
  worker->words = (uint64_t *)(void *)exec_harness_map(worker->words_fd, words_bytes);
  worker->ring_fd = kvp_ring_create("worker", &sizes, &error);
  assert_int_equal(kvp_ring_init(&worker->ring, worker->ring_fd, KVP_RING_CLIENT, &error), KVP_OK);
  worker->command_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  worker->timelines_fd = kvp_memory_fd_create("timelines", kvp_timeline_bytes, &error);
  assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, worker->events), 0);
  const int fds[kvp_control_ring_fd_count] = {worker->ring_fd, worker->command_event, worker->events[0],
                                              worker->timelines_fd};
  world_assert_ok(exec_harness_request(&world->link, KVP_CONTROL_RING_ATTACH, &request, sizeof request, fds,
                                       kvp_control_ring_fd_count));
}

static void worker_detach(struct worker *worker) {
  const struct kvp_control_ring request = {.attachment_id = attachment};
  world_assert_ok(
      exec_harness_request(&worker->world->link, KVP_CONTROL_RING_DETACH, &request, sizeof request, NULL, 0));
}

static void worker_deinit(struct worker *worker) {
  world_deinit(worker->world);
  kvp_ring_deinit(&worker->ring);
  (void)munmap(worker->words, words_bytes);
  const int fds[] = {worker->ring_fd,   worker->command_event, worker->timelines_fd,
                     worker->events[0], worker->events[1],     worker->words_fd};
  for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
    (void)close(fds[i]);
  }
}

static void pause_for(uint64_t ns) {
  const struct timespec pause = {.tv_nsec = (long)ns};
  (void)nanosleep(&pause, NULL);
}

/* ---- words ---- */

static uint64_t *word_at(const struct worker *worker, uint32_t word) {
  return &worker->words[(size_t)word * 8];
}
static void word_set(const struct worker *worker, uint32_t word, uint64_t value) {
  __atomic_store_n(word_at(worker, word), value, __ATOMIC_RELEASE);
}
static uint64_t word_get(const struct worker *worker, uint32_t word) {
  return __atomic_load_n(word_at(worker, word), __ATOMIC_ACQUIRE);
}
static void word_await(const struct worker *worker, uint32_t word, uint64_t value) {
  while (word_get(worker, word) < value) {
    pause_for(20000);
  }
  assert_int_equal(word_get(worker, word), value);
}

/* ---- steps ---- */

static void replay_init(struct step_encoder *encoder, uint64_t base) {
  step_encoder_init(encoder, 1, session, step_epoch);
  encoder->header.flags = KVP_STEP_DEVICE_WORDS | KVP_STEP_NOT_ACCEPTED_TOLD;
  encoder->header.words_buffer_id = words_buffer;
  encoder->header.base = base;
}

/* Op k of a replay: row 0 of the buffer to a slot of a layer of "narrow", between points k + 1 of both words. */
static struct kvp_wire_op *replay_add(struct step_encoder *encoder, uint32_t layer, int32_t slot) {
  const int32_t position = 0;
  const float eps = 1e-6F;
  const uint32_t k = encoder->header.op_count + 1;
  uint32_t bits = 0;
  memcpy(&bits, &eps, sizeof bits);
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_FUSED_STORE);
  op->pool_id = ring_pool_id;
  op->region = 1;
  op->layer = layer;
  op->source = step_view(buffer, 0, 1, narrow_row, narrow_row);
  op->third = step_view(buffer, weight_offset, 1, narrow_row, narrow_row);
  op->numbers[0] = bits;
  op->arrays[0] = step_encoder_array(encoder, &slot, sizeof slot);
  op->arrays[1] = step_encoder_array(encoder, &position, sizeof position);
  op->flags = KVP_OP_WAITS | KVP_OP_SIGNALS;
  op->wait = (struct kvp_wire_point){.word = start_word, .value = k};
  op->signal = (struct kvp_wire_point){.word = done_word, .value = k};
  return op;
}

static void worker_post(struct worker *worker, const struct step_encoder *encoder, uint64_t tag) {
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  void *room = kvp_lane_reserve(&worker->ring.commands, bytes);
  assert_non_null(room);
  memcpy(room, encoded, bytes);
  free(encoded);
  if (kvp_lane_publish(&worker->ring.commands, KVP_COMMAND_STEP, tag, bytes)) {
    assert_int_equal(eventfd_write(worker->command_event, 1), 0);
  }
}

static struct exec_completion worker_take(struct worker *worker) {
  struct kvp_ring_record record;
  while (kvp_lane_peek(&worker->ring.completions, &record) == KVP_LANE_EMPTY) {
    pause_for(20000);
  }
  struct exec_completion out = {.kind = record.kind, .tag = record.tag, .payload_bytes = record.payload_bytes};
  out.payload = malloc(record.payload_bytes + 1);
  assert_non_null(out.payload);
  kvp_lane_copy_payload(&worker->ring.completions, &record, out.payload);
  kvp_lane_advance(&worker->ring.completions, &record);
  return out;
}

static struct kvp_error take_error(struct worker *worker, enum kvp_completion_kind kind, uint64_t tag) {
  struct kvp_error error;
  struct exec_completion completion = worker_take(worker);
  assert_int_equal(completion.kind, kind);
  assert_int_equal(completion.tag, tag);
  assert_int_equal(completion.payload_bytes, sizeof error);
  memcpy(&error, completion.payload, sizeof error);
  free(completion.payload);
  return error;
}

static void take_done(struct worker *worker, uint64_t tag, uint32_t op_count) {
  struct exec_completion done = worker_take(worker);
  if (done.kind != KVP_COMPLETION_DONE) {
    print_error("%s\n", ((struct kvp_error *)(void *)done.payload)->text);
  }
  assert_int_equal(done.kind, KVP_COMPLETION_DONE);
  assert_int_equal(done.tag, tag);
  for (uint32_t i = 0; i < op_count; i++) {
    const struct kvp_wire_report report = world_report(&done, i);
    assert_int_equal(report.rows_stored, 1);
    assert_int_equal(report.bytes_read, narrow_row);
    assert_true(report.started_ns <= report.finished_ns && report.queued_ns <= report.started_ns);
  }
  free(done.payload);
}

/* ---- rows ---- */

static uint16_t bf16_of(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static void row_fill(const struct world *world, uint64_t offset, float value) {
  const uint16_t number = bf16_of(value);
  for (size_t k = 0; k < narrow_row / 2; k++) {
    memcpy(world->buffer + offset + 2 * k, &number, 2);
  }
}

static void assert_record(const struct world *world, uint32_t layer, int32_t slot, uint16_t number) {
  for (size_t k = 0; k < narrow_row / 2; k++) {
    uint16_t found = 0;
    memcpy(&found, world->narrow + (size_t)layer * narrow_layer_bytes + (size_t)slot * narrow_row + 2 * k, 2);
    assert_int_equal(found, number);
  }
}

/* ---- tests ---- */

/* Ops run when their word says so, on what the rows are by then; two replays of one graph differ by their base. */
static void test_layers(void **state) {
  (void)state;
  enum { layers = 6, replays = 3 };
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  worker_init(&worker, &world);
  memset(world.narrow, 0xA5, narrow_bytes);
  for (uint64_t replay = 0; replay < replays; replay++) {
    const uint64_t base = replay * layers;
    replay_init(&encoder, base);
    for (uint32_t k = 0; k < layers; k++) {
      (void)replay_add(&encoder, k % narrow_layers, (int32_t)(k + replay * 10));
    }
    worker_post(&worker, &encoder, replay);
    step_encoder_deinit(&encoder);
    pause_for(2000000);
    for (uint32_t k = 0; k < layers; k++) {
      assert_int_equal(word_get(&worker, done_word), base + k);
      assert_record(&world, k % narrow_layers, (int32_t)(k + replay * 10), 0xA5A5);
      row_fill(&world, 0, k % 2 == 0 ? 3 : -3);
      row_fill(&world, weight_offset, (float)(k + 1));
      word_set(&worker, start_word, base + k + 1);
      word_await(&worker, done_word, base + k + 1);
      assert_record(&world, k % narrow_layers, (int32_t)(k + replay * 10),
                    bf16_of(k % 2 == 0 ? (float)(k + 1) : -(float)(k + 1)));
    }
    take_done(&worker, replay, layers);
  }
  worker_deinit(&worker);
}

/* More ops than a launch takes, and two posted ahead: words that are there already are no wait. */
static void test_many(void **state) {
  (void)state;
  enum { ops = 140, slots = 3 * ring_tokens }; /* of the session's blocks */
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  worker_init(&worker, &world);
  row_fill(&world, 0, 1);
  row_fill(&world, weight_offset, 0.5F);
  for (uint64_t replay = 0; replay < 2; replay++) {
    replay_init(&encoder, replay * ops);
    for (uint32_t k = 0; k < ops; k++) {
      struct kvp_wire_op *op = replay_add(&encoder, k / slots, (int32_t)(k % slots));
      if (k % 3 == 1) { /* the next one's signal says it, too */
        op->flags = KVP_OP_WAITS;
        op->signal = (struct kvp_wire_point){.word = 0};
      } else if (k % 3 == 2) {
        op->flags = KVP_OP_SIGNALS;
        op->wait = (struct kvp_wire_point){.word = 0};
      }
    }
    worker_post(&worker, &encoder, replay);
    step_encoder_deinit(&encoder);
  }
  word_set(&worker, start_word, ops);
  take_done(&worker, 0, ops);
  assert_int_equal(word_get(&worker, done_word), ops - 1); /* 139 = 3 * 46 + 1: the last one doesn't signal */
  assert_record(&world, 1, ops - 1 - slots, bf16_of(0.5F));
  word_set(&worker, start_word, UINT64_C(2) * ops);
  take_done(&worker, 1, ops);
  assert_int_equal(word_get(&worker, done_word), 2 * ops - 1);
  worker_deinit(&worker);
}

/* What is absolute doesn't move with the base; a signal doesn't take a word back. */
static void test_absolute(void **state) {
  (void)state;
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  worker_init(&worker, &world);
  replay_init(&encoder, 1000);
  struct kvp_wire_op *op = replay_add(&encoder, 0, 0);
  op->wait.flags = KVP_POINT_ABSOLUTE;
  op->signal.flags = KVP_POINT_ABSOLUTE;
  op = replay_add(&encoder, 0, 1);
  op->signal.word = done_word + 1;
  word_set(&worker, start_word, 1);
  worker_post(&worker, &encoder, 5);
  step_encoder_deinit(&encoder);
  word_await(&worker, done_word, 1);
  word_set(&worker, done_word + 1, 5000);
  word_set(&worker, start_word, 1002);
  take_done(&worker, 5, 2);
  assert_int_equal(word_get(&worker, done_word + 1), 5000);
  worker_deinit(&worker);
}

/* What was signalled stays; the rest is poisoned, and so it stays for later replays. */
static void test_deadline(void **state) {
  (void)state;
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  worker_init(&worker, &world);
  row_fill(&world, 0, 1);
  row_fill(&world, weight_offset, 2);
  memset(world.narrow, 0xA5, narrow_bytes);
  replay_init(&encoder, 0);
  for (uint32_t k = 0; k < 4; k++) {
    replay_add(&encoder, 0, (int32_t)k)->signal.word = done_word + k;
  }
  encoder.header.deadline_ns = 30000000;
  word_set(&worker, start_word, 2);
  worker_post(&worker, &encoder, 9);
  struct kvp_error error = take_error(&worker, KVP_COMPLETION_FAILED, 9);
  assert_int_equal(error.status, KVP_DEADLINE_EXCEEDED);
  assert_int_equal(error.op, 2);
  assert_string_equal(error.array, "wait");
  assert_int_equal(error.position, start_word);
  assert_int_equal(error.value, 2);
  assert_non_null(strstr(error.text, "word 0 of the buffer was to reach 3, at the deadline it had 2"));
  assert_int_equal(word_get(&worker, done_word), 1);
  assert_int_equal(word_get(&worker, done_word + 1), 2);
  assert_true(word_get(&worker, done_word + 2) == KVP_TIMELINE_POISON);
  assert_true(word_get(&worker, done_word + 3) == KVP_TIMELINE_POISON);
  assert_record(&world, 0, 1, bf16_of(2));
  assert_record(&world, 0, 2, 0xA5A5);
  /* The next step of the ring is served, and can't take the poison back. */
  word_set(&worker, start_word, 4);
  worker_post(&worker, &encoder, 10);
  take_done(&worker, 10, 4);
  assert_true(word_get(&worker, done_word + 3) == KVP_TIMELINE_POISON);
  step_encoder_deinit(&encoder);
  worker_deinit(&worker);
}

static void test_poison(void **state) {
  (void)state;
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  worker_init(&worker, &world);
  replay_init(&encoder, 0);
  (void)replay_add(&encoder, 0, 0);
  (void)replay_add(&encoder, 0, 1);
  worker_post(&worker, &encoder, 1);
  word_set(&worker, start_word, 1);
  word_await(&worker, done_word, 1);
  word_set(&worker, start_word, KVP_TIMELINE_POISON);
  struct kvp_error error = take_error(&worker, KVP_COMPLETION_FAILED, 1);
  assert_int_equal(error.status, KVP_CANCELLED);
  assert_int_equal(error.op, 1);
  assert_non_null(strstr(error.text, "poisoned"));
  assert_true(word_get(&worker, done_word) == KVP_TIMELINE_POISON);
  step_encoder_deinit(&encoder);
  worker_deinit(&worker);
}

/* A worker that goes: the device doesn't wait for it, and others go on. */
static void test_detached(void **state) {
  (void)state;
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  worker_init(&worker, &world);
  for (uint64_t i = 0; i < 3; i++) {
    replay_init(&encoder, i);
    (void)replay_add(&encoder, 0, (int32_t)i);
    if (i == 0) {
      (void)replay_add(&encoder, 0, 3);
    }
    worker_post(&worker, &encoder, i);
    step_encoder_deinit(&encoder);
  }
  word_set(&worker, start_word, 1);
  word_await(&worker, done_word, 1); /* the first replay runs, and waits for its second op */
  worker_detach(&worker);
  assert_true(word_get(&worker, done_word) == KVP_TIMELINE_POISON);
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, (int32_t[]){5}, 1);
  assert_int_equal(world_run_one(&world, &encoder).rows_stored, 1);
  worker_deinit(&worker);
}

/* An executor that is to end doesn't wait for a worker either. */
static void test_stopped(void **state) {
  (void)state;
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  worker_init(&worker, &world);
  replay_init(&encoder, 0);
  (void)replay_add(&encoder, 0, 0);
  worker_post(&worker, &encoder, 1);
  step_encoder_deinit(&encoder);
  pause_for(5000000);
  worker_deinit(&worker);
}

static struct kvp_error refused(struct worker *worker, struct step_encoder *encoder) {
  worker_post(worker, encoder, 3);
  step_encoder_deinit(encoder);
  return take_error(worker, KVP_COMPLETION_REFUSED, 3);
}

static void test_refusals(void **state) {
  (void)state;
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  worker_init(&worker, &world);
  replay_init(&encoder, 0);
  (void)replay_add(&encoder, 0, 0);
  (void)world_add_store(&encoder, (int32_t[]){1}, 1);
  struct kvp_error error = refused(&worker, &encoder);
  assert_int_equal(error.status, KVP_UNIMPLEMENTED);
  assert_int_equal(error.op, 1);
  assert_non_null(strstr(error.text, "op 1 store: points in device memory are for fused_store alone"));

  replay_init(&encoder, 0);
  struct kvp_wire_op *op = replay_add(&encoder, 0, 0);
  op->flags = 0;
  op->wait = op->signal = (struct kvp_wire_point){.word = 0};
  error = refused(&worker, &encoder);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "neither waits nor signals"));

  replay_init(&encoder, 0);
  replay_add(&encoder, 0, 0)->signal.word = words_bytes / 64;
  error = refused(&worker, &encoder);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  assert_int_equal(error.value, 64);
  assert_string_equal(error.array, "signal");

  replay_init(&encoder, UINT64_C(1) << 62);
  (void)replay_add(&encoder, 0, 0);
  error = refused(&worker, &encoder);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  assert_string_equal(error.array, "wait");

  replay_init(&encoder, 0);
  replay_add(&encoder, 0, 0)->wait.flags = 2;
  assert_int_equal(refused(&worker, &encoder).status, KVP_MALFORMED);

  replay_init(&encoder, 0);
  (void)replay_add(&encoder, 0, 0);
  encoder.header.words_buffer_id = other_buffer; /* another session's */
  error = refused(&worker, &encoder);
  assert_int_equal(error.status, KVP_UNKNOWN_BUFFER);
  assert_string_equal(error.array, "words");

  replay_init(&encoder, 0);
  assert_int_equal(refused(&worker, &encoder).status, KVP_INVALID_ARGUMENT); /* no op */

  replay_init(&encoder, 0); /* not a worker's ring */
  (void)replay_add(&encoder, 0, 0);
  assert_int_equal(world_refused(&world, &encoder).status, KVP_MALFORMED);
  step_encoder_deinit(&encoder);
  worker_deinit(&worker);
}

/* A device whose kernels must not wait says so. */
static void test_without_mps(void **state) {
  (void)state;
  const char *device = getenv("KVPOOL_TEST_DEVICE");
  const char *mps = getenv("FAKE_CUDA_MPS");
  if (device == NULL || mps == NULL) {
    skip();
  }
  struct world world;
  struct worker worker;
  struct step_encoder encoder;
  assert_int_equal(setenv("FAKE_CUDA_MPS", "0", 1), 0);
  worker_init(&worker, &world);
  replay_init(&encoder, 0);
  (void)replay_add(&encoder, 0, 0);
  struct kvp_error error = refused(&worker, &encoder);
  assert_int_equal(error.status, KVP_UNIMPLEMENTED);
  assert_non_null(strstr(error.text, "without MPS"));
  worker_deinit(&worker);
  assert_int_equal(setenv("FAKE_CUDA_MPS", "1", 1), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_layers),   cmocka_unit_test(test_many),     cmocka_unit_test(test_absolute),
      cmocka_unit_test(test_deadline), cmocka_unit_test(test_poison),   cmocka_unit_test(test_detached),
      cmocka_unit_test(test_stopped),  cmocka_unit_test(test_refusals), cmocka_unit_test(test_without_mps),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
