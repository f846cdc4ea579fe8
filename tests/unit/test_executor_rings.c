/* Workers' rings on the real executor: steps, timelines, ends. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/exec_ring.h"
#include "tests/unit/executor_world.h"

enum { first_queue = 500, ready_word = 1, done_word = kvp_client_words, second_word };

static void ring_attach(struct world *world, struct exec_ring *ring, uint64_t id, uint32_t owner) {
  const struct kvp_control_ring spec = {
      .attachment_id = id, .owner = owner, .queue = first_queue + (uint32_t)id, .deadline_ns_max = 0};
  world_assert_ok(exec_ring_attach(&world->link, ring, &spec));
}

static void ring_detach(struct world *world, struct exec_ring *ring) {
  world_assert_ok(exec_ring_detach(&world->link, ring));
  exec_ring_close(ring);
}

/* The encoder is freed. */
static void ring_post(struct exec_ring *ring, uint64_t tag, struct step_encoder *encoder) {
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  assert_true(exec_ring_post(ring, KVP_COMMAND_STEP, tag, encoded, bytes));
  free(encoded);
  step_encoder_deinit(encoder);
}

/* The next completion's kind and tag are these; its error, if it has one. */
static struct kvp_error ring_expect(struct exec_ring *ring, enum kvp_completion_kind kind, uint64_t tag) {
  struct exec_completion completion = exec_ring_take(ring);
  struct kvp_error error = {0};
  if (completion.payload_bytes == sizeof error) {
    memcpy(&error, completion.payload, sizeof error);
  }
  if (completion.kind != (uint32_t)kind) {
    print_error("%s\n", error.text);
  }
  assert_int_equal(completion.kind, kind);
  assert_int_equal(completion.tag, tag);
  free(completion.payload);
  return error;
}

static void word_wait(struct exec_ring *ring, uint32_t word, uint64_t value) {
  while (atomic_load_explicit(&ring->words[word].value, memory_order_acquire) < value) {
    (void)sched_yield();
  }
}

static void word_set(struct exec_ring *ring, uint32_t word, uint64_t value) {
  atomic_store_explicit(&ring->words[word].value, value, memory_order_release);
}

static void op_points(struct kvp_wire_op *op, uint32_t wait_word, uint64_t wait_value, uint32_t signal_word,
                      uint64_t signal_value) {
  if (wait_value != 0) {
    op->flags |= KVP_OP_WAITS;
    op->wait = (struct kvp_wire_point){.word = wait_word, .value = wait_value};
  }
  if (signal_value != 0) {
    op->flags |= KVP_OP_SIGNALS;
    op->signal = (struct kvp_wire_point){.word = signal_word, .value = signal_value};
  }
}

/* A store and, when the worker says so, a load back: who sees the signals sees what was done before them. */
static void test_store_and_load(void **state) {
  (void)state;
  struct world world;
  struct exec_ring ring;
  struct step_encoder encoder;
  world_init(&world);
  ring_attach(&world, &ring, 1, session);
  int32_t slots[64];
  for (int i = 0; i < 64; i++) {
    slots[i] = 64 + i;
  }
  for (uint64_t round = 1; round <= 20; round++) {
    world_rows_fill(world.buffer, 256, 512, (uint32_t)round);
    memset(world.buffer + (1 << 20), 0x5A, 64 * (size_t)v41_row_bytes);
    step_encoder_init(&encoder, 1, other_session, step_epoch); /* whose it is is not the worker's to say */
    encoder.header.base = round * 10;
    encoder.header.flags = round % 2 == 0 ? KVP_STEP_NOT_ACCEPTED_TOLD : 0;
    op_points(world_add_store(&encoder, slots, 64), 0, 0, done_word, 1);
    const int32_t segments[] = {1, 0, 64, 0};
    op_points(world_add_load(&encoder, segments, 1, 64), ready_word, 1, second_word, 2);
    ring_post(&ring, round, &encoder);
    if (round % 2 != 0) {
      (void)ring_expect(&ring, KVP_COMPLETION_ACCEPTED, round);
    }
    word_wait(&ring, done_word, round * 10 + 1);
    assert_int_equal(atomic_load(&ring.words[done_word].value), round * 10 + 1);
    assert_true(atomic_load(&ring.words[second_word].value) < round * 10);
    assert_int_equal(world.buffer[1 << 20], 0x5A);
    word_set(&ring, ready_word, round * 10 + 1);
    word_wait(&ring, second_word, round * 10 + 2);
    assert_memory_equal(world.buffer + (1 << 20), world.buffer, 64 * (size_t)v41_row_bytes);
    struct exec_completion done = exec_ring_take(&ring);
    assert_int_equal(done.kind, KVP_COMPLETION_DONE);
    assert_int_equal(world_report(&done, 0).rows_stored, 64);
    assert_int_equal(world_report(&done, 1).rows_loaded, 64);
    const struct kvp_wire_report load = world_report(&done, 1);
    assert_true(load.queued_ns <= load.started_ns && load.started_ns <= load.finished_ns);
    free(done.payload);
  }
  ring_detach(&world, &ring);
  world_deinit(&world);
}

/* A ring is its session's, as far as buffers, blocks and epochs go; sessions' rings run side by side. */
static void test_two_sessions(void **state) {
  (void)state;
  struct world world;
  struct exec_ring ring, other;
  struct step_encoder encoder;
  world_init(&world);
  ring_attach(&world, &ring, 1, session);
  ring_attach(&world, &other, 2, other_session);
  step_encoder_init(&encoder, 1, session, step_epoch);
  op_points(world_add_store(&encoder, (int32_t[]){1}, 1), ready_word, 1, 0, 0);
  ring_post(&ring, 1, &encoder);
  (void)ring_expect(&ring, KVP_COMPLETION_ACCEPTED, 1);
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, (int32_t[]){1}, 1);
  ring_post(&other, 1, &encoder);
  assert_int_equal(ring_expect(&other, KVP_COMPLETION_REFUSED, 1).status, KVP_UNKNOWN_BUFFER);
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = world_add_store(&encoder, (int32_t[]){1}, 1);
  op->source.buffer_id = other_buffer;
  ring_post(&other, 2, &encoder);
  assert_int_equal(ring_expect(&other, KVP_COMPLETION_REFUSED, 2).status, KVP_NOT_OWNER);
  step_encoder_init(&encoder, 1, session, step_epoch);
  op = world_add_store(&encoder, (int32_t[]){6 * tokens_per_block}, 1);
  op->source.buffer_id = other_buffer;
  ring_post(&other, 3, &encoder);
  (void)ring_expect(&other, KVP_COMPLETION_ACCEPTED, 3);
  (void)ring_expect(&other, KVP_COMPLETION_DONE, 3);
  word_set(&ring, ready_word, 1);
  (void)ring_expect(&ring, KVP_COMPLETION_DONE, 1);
  ring_detach(&world, &ring);
  ring_detach(&world, &other);
  world_deinit(&world);
}

/* Poison and deadlines on the way through. */
static void test_waits_in_vain(void **state) {
  (void)state;
  struct world world;
  struct exec_ring ring;
  struct step_encoder encoder;
  world_init(&world);
  ring_attach(&world, &ring, 1, session);
  for (uint64_t tag = 1; tag <= 2; tag++) {
    step_encoder_init(&encoder, 1, session, step_epoch);
    encoder.header.deadline_ns = tag == 1 ? 3000000 : 0;
    op_points(world_add_store(&encoder, (int32_t[]){1}, 1), ready_word, 2, done_word + (uint32_t)tag, 1);
    ring_post(&ring, tag, &encoder);
    (void)ring_expect(&ring, KVP_COMPLETION_ACCEPTED, tag);
    if (tag == 2) {
      word_set(&ring, ready_word, KVP_TIMELINE_POISON);
    }
    const struct kvp_error error = ring_expect(&ring, KVP_COMPLETION_FAILED, tag);
    assert_int_equal(error.status, tag == 1 ? KVP_DEADLINE_EXCEEDED : KVP_CANCELLED);
    assert_int_equal(error.op, 0);
    assert_int_equal(error.position, ready_word);
    assert_int_equal(atomic_load(&ring.words[done_word + tag].value), KVP_TIMELINE_POISON);
  }
  ring_detach(&world, &ring);
  world_deinit(&world);
}

/* A ring ends with steps that wait: nobody waits for them, and whoever waits for its words is told. */
static void test_detach_with_waiting_steps(void **state) {
  (void)state;
  struct world world;
  struct exec_ring ring;
  struct step_encoder encoder;
  world_init(&world);
  ring_attach(&world, &ring, 1, session);
  for (uint64_t tag = 1; tag <= 50; tag++) {
    step_encoder_init(&encoder, 1, session, step_epoch);
    (void)world_add_store(&encoder, (int32_t[]){1}, 1);
    op_points(world_add_store(&encoder, (int32_t[]){2}, 1), ready_word, tag == 1 ? 1 : 2, done_word, tag);
    ring_post(&ring, tag, &encoder);
    (void)ring_expect(&ring, KVP_COMPLETION_ACCEPTED, tag);
  }
  word_set(&ring, ready_word, 1);
  (void)ring_expect(&ring, KVP_COMPLETION_DONE, 1);
  world_assert_ok(exec_ring_detach(&world.link, &ring));
  for (uint32_t word = kvp_client_words; word < kvp_timeline_words; word++) {
    assert_int_equal(atomic_load(&ring.words[word].value), KVP_TIMELINE_POISON);
  }
  assert_int_equal(exec_ring_detach(&world.link, &ring).status, KVP_INVALID_ARGUMENT);
  exec_ring_close(&ring);
  struct kvp_control_pool pool = world_pool_spec(); /* nothing uses it any more */
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_DETACH, &pool, sizeof pool, NULL, 0));
  world_deinit(&world);
}

/* The executor ends while rings have steps in every state. */
static void test_end_with_rings(void **state) {
  (void)state;
  struct world world;
  struct exec_ring rings[3];
  struct step_encoder encoder;
  world_init(&world);
  for (uint32_t i = 0; i < 3; i++) {
    ring_attach(&world, &rings[i], i + 1, session);
    for (uint64_t tag = 1; tag <= 20; tag++) {
      step_encoder_init(&encoder, 1, session, step_epoch);
      (void)world_add_store(&encoder, (int32_t[]){1}, 1);
      op_points(world_add_store(&encoder, (int32_t[]){2}, 1), ready_word, tag < 10 ? 0 : 1, done_word, tag);
      ring_post(&rings[i], tag, &encoder);
    }
    (void)ring_expect(&rings[i], KVP_COMPLETION_ACCEPTED, 1);
  }
  const struct kvp_control_buffer request = {.buffer_id = buffer}; /* never answered */
  assert_int_equal(
      kvp_fd_socket_send(world.link.socket, KVP_CONTROL_BUFFER_DETACH, 999, &request, sizeof request, NULL, 0),
      KVP_OK);
  world_deinit(&world);
  for (uint32_t i = 0; i < 3; i++) {
    exec_ring_close(&rings[i]);
  }
}

/* Nonsense in one ring: the supervisor is told, everything else goes on. */
static void test_corrupt_ring(void **state) {
  (void)state;
  struct world world;
  struct exec_ring ring, other;
  struct step_encoder encoder;
  world_init(&world);
  ring_attach(&world, &ring, 11, session);
  ring_attach(&world, &other, 12, session);
  assert_true(exec_ring_post(&ring, 99, 1, NULL, 0));
  assert_int_equal(kvp_fd_socket_receive(world.link.socket, &world.link.message), KVP_OK);
  struct kvp_control_ring_failed failed;
  assert_int_equal(world.link.message.kind, KVP_CONTROL_RING_FAILED);
  assert_int_equal(world.link.message.request, 0);
  assert_int_equal(world.link.message.body_bytes, sizeof failed);
  memcpy(&failed, world.link.message.body, sizeof failed);
  assert_int_equal(failed.attachment_id, 11);
  assert_int_equal(failed.error.status, KVP_MALFORMED);
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, (int32_t[]){1}, 1);
  ring_post(&other, 1, &encoder);
  (void)ring_expect(&other, KVP_COMPLETION_ACCEPTED, 1);
  (void)ring_expect(&other, KVP_COMPLETION_DONE, 1);
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, (int32_t[]){1}, 1);
  assert_int_equal(world_run_one(&world, &encoder).rows_stored, 1);
  ring_detach(&world, &ring);
  ring_detach(&world, &other);
  world_deinit(&world);
}

/* ---- one who rewrites everything while it is read ---- */

struct hostile {
  struct exec_ring *ring;
  const uint8_t *step;
  uint32_t step_bytes;
  uint64_t seed;
  atomic_bool stops;
};

static uint64_t random_next(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

/* Good steps, one after the other, while nobody else lets them be. */
static void *hostile_post(void *argument) {
  struct hostile *hostile = argument;
  while (!atomic_load(&hostile->stops)) {
    (void)exec_ring_post(hostile->ring, KVP_COMMAND_STEP, 1, hostile->step, hostile->step_bytes);
    struct kvp_ring_record record;
    if (kvp_lane_peek(&hostile->ring->ring.completions, &record) == KVP_LANE_RECORD) {
      kvp_lane_advance(&hostile->ring->ring.completions, &record);
    }
  }
  return NULL;
}

/* Mostly where the payloads are, so that it isn't over at once; seldom in the header, in records and in words. */
static void *hostile_scribble(void *argument) {
  struct hostile *hostile = argument;
  const struct kvp_ring *ring = &hostile->ring->ring;
  uint8_t *arena = ring->commands.arena;
  while (!atomic_load(&hostile->stops)) {
    const uint64_t value = random_next(&hostile->seed);
    const uint64_t place = random_next(&hostile->seed);
    __atomic_store_n(arena + place % (16 * (uint64_t)hostile->step_bytes), (uint8_t)value, __ATOMIC_RELAXED);
    if (value % 4096 == 1) {
      atomic_store(&hostile->ring->words[place % kvp_timeline_words].value, value);
    } else if (value % 100000 == 2) {
      __atomic_store_n((uint8_t *)ring->map + place % ring->map_bytes, (uint8_t)value, __ATOMIC_RELAXED);
    } else if (value % 1000000 == 3) {
      __atomic_store_n((uint8_t *)ring->map + place % 512, (uint8_t)value, __ATOMIC_RELAXED);
    }
  }
  return NULL;
}

/* What a request is answered with, whatever else the executor has to say before. */
static struct kvp_error patient_detach(struct world *world, const struct exec_ring *ring) {
  const struct kvp_control_ring spec = {.attachment_id = ring->attachment_id};
  struct kvp_error error = {0};
  struct kvp_fd_message *message = &world->link.message;
  const uint32_t request = ++world->link.last_request;
  assert_int_equal(
      kvp_fd_socket_send(world->link.socket, KVP_CONTROL_RING_DETACH, request, &spec, sizeof spec, NULL, 0), KVP_OK);
  do {
    assert_int_equal(kvp_fd_socket_receive(world->link.socket, message), KVP_OK);
    assert_true(message->request == request || message->kind == KVP_CONTROL_RING_FAILED);
  } while (message->request != request);
  memcpy(&error, message->body, sizeof error);
  return error;
}

static void test_hostile_writer(void **state) {
  (void)state;
  enum { attacks = 12, steps = 40 };
  struct world world;
  struct exec_ring ring, other;
  struct step_encoder encoder;
  uint32_t bytes = 0;
  world_init(&world);
  ring_attach(&world, &other, 1000, session);
  step_encoder_init(&encoder, 1, session, step_epoch);
  encoder.header.flags = KVP_STEP_NOT_ACCEPTED_TOLD;
  encoder.header.deadline_ns = 1000000;
  for (int i = 0; i < 3; i++) {
    op_points(world_add_store(&encoder, (int32_t[]){1, 2, 3, 4, 5}, 5), ready_word, (uint64_t)i, done_word, 1);
  }
  uint8_t *step = step_encoder_encode(&encoder, &bytes);
  step_encoder_deinit(&encoder);
  for (uint32_t attack = 1; attack <= attacks; attack++) {
    ring_attach(&world, &ring, attack, session);
    struct hostile hostile = {.ring = &ring, .step = step, .step_bytes = bytes, .seed = attack};
    struct hostile scribbler = hostile;
    pthread_t threads[2];
    assert_int_equal(pthread_create(&threads[0], NULL, hostile_post, &hostile), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, hostile_scribble, &scribbler), 0);
    for (uint64_t tag = 1; tag <= steps; tag++) {
      step_encoder_init(&encoder, 1, session, step_epoch);
      (void)world_add_store(&encoder, (int32_t[]){1}, 1);
      ring_post(&other, tag, &encoder);
      (void)ring_expect(&other, KVP_COMPLETION_ACCEPTED, tag);
      (void)ring_expect(&other, KVP_COMPLETION_DONE, tag);
    }
    world_assert_ok(patient_detach(&world, &ring)); /* under its hands */
    atomic_store(&hostile.stops, true);
    atomic_store(&scribbler.stops, true);
    assert_int_equal(pthread_join(threads[0], NULL), 0);
    assert_int_equal(pthread_join(threads[1], NULL), 0);
    exec_ring_close(&ring);
  }
  free(step);
  ring_detach(&world, &other);
  world_deinit(&world);
}

/* ---- what goes while it is used ---- */

/* A buffer goes while a step that waits names it: hidden at once, answered when the step has ended; the control thread
 * goes on in the meantime. */
static void test_deferred_detach(void **state) {
  (void)state;
  struct world world;
  struct exec_ring ring;
  struct step_encoder encoder;
  world_init(&world);
  ring_attach(&world, &ring, 1, session);
  step_encoder_init(&encoder, 1, session, step_epoch);
  op_points(world_add_store(&encoder, (int32_t[]){1}, 1), ready_word, 1, 0, 0);
  ring_post(&ring, 1, &encoder);
  (void)ring_expect(&ring, KVP_COMPLETION_ACCEPTED, 1);
  const struct kvp_control_buffer request = {.buffer_id = buffer};
  assert_int_equal(
      kvp_fd_socket_send(world.link.socket, KVP_CONTROL_BUFFER_DETACH, 999, &request, sizeof request, NULL, 0),
      KVP_OK);
  const struct kvp_control_memory memory = {.memory_id = buffer_memory};
  assert_int_equal(
      exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0).status,
      KVP_IN_USE);
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, (int32_t[]){1}, 1);
  assert_int_equal(world_refused(&world, &encoder).status, KVP_UNKNOWN_BUFFER);
  step_encoder_deinit(&encoder);
  word_set(&ring, ready_word, 1);
  (void)ring_expect(&ring, KVP_COMPLETION_DONE, 1);
  assert_int_equal(kvp_fd_socket_receive(world.link.socket, &world.link.message), KVP_OK);
  assert_int_equal(world.link.message.kind, KVP_CONTROL_RESULT);
  assert_int_equal(world.link.message.request, 999);
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0));
  ring_detach(&world, &ring);
  world_deinit(&world);
}

/* ---- drain ---- */

/* The answers to a ring's drain come with this number. */
static void drain_ask(struct world *world, uint64_t id, uint32_t request) {
  const struct kvp_control_ring body = {.attachment_id = id};
  assert_int_equal(
      kvp_fd_socket_send(world->link.socket, KVP_CONTROL_RING_DRAIN, request, &body, sizeof body, NULL, 0), KVP_OK);
}

static void answer_expect(struct world *world, uint32_t request, enum kvp_status status) {
  struct kvp_error error;
  assert_int_equal(kvp_fd_socket_receive(world->link.socket, &world->link.message), KVP_OK);
  assert_int_equal(world->link.message.kind, KVP_CONTROL_RESULT);
  assert_int_equal(world->link.message.request, request);
  memcpy(&error, world->link.message.body, sizeof error);
  assert_int_equal(error.status, status);
}

static void store_post(struct exec_ring *ring, uint64_t tag, uint64_t wait_value) {
  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, step_epoch);
  op_points(world_add_store(&encoder, (int32_t[]){1}, 1), ready_word, wait_value, done_word, tag);
  ring_post(ring, tag, &encoder);
}

/* What was accepted goes on to its end, which is told; nothing more is accepted, on this ring. */
static void test_drain(void **state) {
  (void)state;
  struct world world;
  struct exec_ring ring, other;
  world_init(&world);
  ring_attach(&world, &ring, 1, session);
  ring_attach(&world, &other, 2, session);
  drain_ask(&world, 3, 900);
  answer_expect(&world, 900, KVP_INVALID_ARGUMENT);
  store_post(&ring, 1, 1);
  (void)ring_expect(&ring, KVP_COMPLETION_ACCEPTED, 1);
  drain_ask(&world, 1, 901);
  drain_ask(&world, 2, 902);
  answer_expect(&world, 902, KVP_OK); /* it has no steps */
  store_post(&ring, 2, 0);
  store_post(&other, 3, 0);
  assert_int_equal(ring_expect(&ring, KVP_COMPLETION_REFUSED, 2).status, KVP_SHUTTING_DOWN);
  assert_int_equal(ring_expect(&other, KVP_COMPLETION_REFUSED, 3).status, KVP_SHUTTING_DOWN);
  assert_int_equal(atomic_load(&ring.words[done_word].value), 0);
  word_set(&ring, ready_word, 1);
  (void)ring_expect(&ring, KVP_COMPLETION_DONE, 1);
  assert_int_equal(atomic_load(&ring.words[done_word].value),
                   KVP_TIMELINE_POISON); /* by the refused one, behind it */
  answer_expect(&world, 901, KVP_OK);
  drain_ask(&world, 1, 903); /* again */
  answer_expect(&world, 903, KVP_OK);
  ring_detach(&world, &ring);
  ring_detach(&world, &other);
  world_deinit(&world);
}

/* A drain that waits ends with its ring, whatever ends that. */
static void test_drains_end_with_their_rings(void **state) {
  (void)state;
  struct world world;
  struct exec_ring ring, corrupt, left;
  world_init(&world);
  ring_attach(&world, &ring, 1, session);
  ring_attach(&world, &corrupt, 2, session);
  ring_attach(&world, &left, 3, session);
  struct exec_ring *rings[] = {&ring, &corrupt, &left};
  for (uint32_t i = 0; i < 3; i++) {
    store_post(rings[i], 1, 1);
    (void)ring_expect(rings[i], KVP_COMPLETION_ACCEPTED, 1);
    drain_ask(&world, i + 1, 900 + i);
  }
  const struct kvp_control_ring body = {.attachment_id = 1};
  assert_int_equal(kvp_fd_socket_send(world.link.socket, KVP_CONTROL_RING_DETACH, 910, &body, sizeof body, NULL, 0),
                   KVP_OK);
  answer_expect(&world, 900, KVP_OK);
  answer_expect(&world, 910, KVP_OK);
  assert_true(exec_ring_post(&corrupt, KVP_COMMAND_FENCE, 1, NULL, 0));
  answer_expect(&world, 901, KVP_OK);
  assert_int_equal(kvp_fd_socket_receive(world.link.socket, &world.link.message), KVP_OK);
  assert_int_equal(world.link.message.kind, KVP_CONTROL_RING_FAILED);
  exec_ring_close(&ring);
  exec_ring_close(&corrupt);
  exec_ring_close(&left);
  world_deinit(&world); /* with a drain under way */
}

/* ---- leaks ---- */

static int fds_of(pid_t pid) {
  char path[64];
  int count = 0;
  (void)snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
  DIR *directory = opendir(path);
  assert_non_null(directory);
  while (readdir(directory) != NULL) {
    count++;
  }
  assert_int_equal(closedir(directory), 0);
  return count;
}

static int maps_of(pid_t pid) {
  char path[64], line[512];
  int count = 0;
  (void)snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
  FILE *file = fopen(path, "re");
  assert_non_null(file);
  while (fgets(line, sizeof line, file) != NULL) {
    count++;
  }
  assert_int_equal(fclose(file), 0);
  return count;
}

static void test_nothing_leaks(void **state) {
  (void)state;
  enum { rounds = 300 };
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  int fds = 0, maps = 0;
  for (int round = 0; round < rounds; round++) {
    struct exec_ring ring;
    ring_attach(&world, &ring, (uint64_t)round + 1, session);
    step_encoder_init(&encoder, 1, session, step_epoch);
    op_points(world_add_store(&encoder, (int32_t[]){1}, 1), ready_word, round % 3 == 0, done_word, 1);
    ring_post(&ring, 1, &encoder);
    (void)ring_expect(&ring, KVP_COMPLETION_ACCEPTED, 1);
    if (round % 3 != 0) {
      (void)ring_expect(&ring, KVP_COMPLETION_DONE, 1);
    }
    ring_detach(&world, &ring);
    if (round == 10) {
      fds = fds_of(world.link.pid);
      maps = maps_of(world.link.pid);
    }
  }
  assert_int_equal(fds_of(world.link.pid), fds);
  assert_in_range(maps_of(world.link.pid), 0, maps + 3); /* the allocator's may come and go */
  world_deinit(&world);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_store_and_load), cmocka_unit_test(test_two_sessions),
      cmocka_unit_test(test_waits_in_vain),  cmocka_unit_test(test_detach_with_waiting_steps),
      cmocka_unit_test(test_end_with_rings), cmocka_unit_test(test_corrupt_ring),
      cmocka_unit_test(test_hostile_writer), cmocka_unit_test(test_deferred_detach),
      cmocka_unit_test(test_drain),          cmocka_unit_test(test_drains_end_with_their_rings),
      cmocka_unit_test(test_nothing_leaks),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
