/* Queues, full lanes, control requests, death and rebirth of the real executor. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/executor_world.h"

/* More queues than the device has, several steps each: every one runs, those of a queue in order. */
static void test_queues(void **state) {
  (void)state;
  enum { queue_count = 150, steps_per_queue = 12 };
  struct exec_harness_options options = exec_harness_defaults;
  options.ring.commands = options.ring.completions = 4096;
  struct world world;
  world_init_with(&world, &options);
  uint64_t seen[queue_count] = {0};
  for (uint32_t round = 0; round < steps_per_queue; round++) {
    for (uint32_t queue = 0; queue < queue_count; queue++) {
      struct step_encoder encoder;
      step_encoder_init(&encoder, queue, session, step_epoch);
      struct kvp_wire_op *fill = step_encoder_op(&encoder, KVP_OP_BUFFER_FILL); /* the queue's own page */
      fill->source = step_view(buffer, (uint64_t)queue * 4096, 1, 4096, 4096);
      fill->argument = round + 1;
      struct kvp_wire_op *read = step_encoder_op(&encoder, KVP_OP_BUFFER_READ);
      read->source = step_view(buffer, (uint64_t)queue * 4096, 1, 64, 64);
      uint32_t bytes = 0;
      uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
      const uint64_t tag = (uint64_t)queue << 32 | round;
      assert_true(exec_harness_post(&world.link, KVP_COMMAND_STEP, tag, encoded, bytes));
      free(encoded);
      step_encoder_deinit(&encoder);
    }
  }
  for (int i = 0; i < 2 * queue_count * steps_per_queue; i++) {
    struct exec_completion completion = exec_harness_take(&world.link);
    const uint64_t queue = completion.tag >> 32;
    const uint64_t round = completion.tag & 0xFFFFFFFF;
    if (completion.kind == KVP_COMPLETION_DONE) {
      assert_int_equal(round, seen[queue]++);
      const uint8_t *result = completion.payload + 2 * sizeof(struct kvp_wire_report);
      for (int k = 0; k < 64; k++) {
        assert_int_equal(result[k], round + 1);
      }
    } else {
      assert_int_equal(completion.kind, KVP_COMPLETION_ACCEPTED);
    }
    free(completion.payload);
  }
  for (uint32_t queue = 0; queue < queue_count; queue++) {
    assert_int_equal(seen[queue], steps_per_queue);
    assert_true(exec_harness_post(&world.link, KVP_COMMAND_QUEUE_CLOSE, queue, NULL, 0));
  }
  assert_true(exec_harness_post(&world.link, KVP_COMMAND_QUEUE_CLOSE, 12345, NULL, 0)); /* never opened */
  struct step_encoder encoder;
  step_encoder_init(&encoder, 3, session, step_epoch); /* a closed queue's number may come again */
  struct exec_completion done = world_run(&world, &encoder);
  assert_int_equal(done.payload_bytes, 0);
  world_deinit(&world);
}

/* Every tenth is no step at all. */
static bool post_any(struct world *world, uint64_t number, const uint8_t *encoded, uint32_t bytes) {
  const uint8_t bad = 0;
  return number % 10 == 9 ? exec_harness_post(&world->link, KVP_COMMAND_STEP, number, &bad, 1)
                          : exec_harness_post(&world->link, KVP_COMMAND_STEP, number, encoded, bytes);
}

/* The reader of completions falls asleep: nothing is lost, nothing grows, everything goes on afterwards. */
static void test_backpressure(void **state) {
  (void)state;
  enum { step_count = 3000 };
  struct exec_harness_options options = exec_harness_defaults;
  options.ring.completions = 16;
  options.ring.completion_arena_bytes = 16384;
  struct world world;
  struct step_encoder encoder;
  world_init_with(&world, &options);
  step_encoder_init(&encoder, 1, session, step_epoch);
  for (int i = 0; i < 3; i++) {
    step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(buffer, 0, 1, 1500, 1500);
  }
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  uint64_t posted = 0, accepted = 0, done = 0, refusals = 0;
  /* Fills the lanes first: the executor stops taking commands long before 3000, and doesn't go on by itself. */
  for (int tries = 0; posted < step_count && tries < 100; tries++) {
    while (posted < step_count && post_any(&world, posted, encoded, bytes)) {
      posted++;
      tries = 0;
    }
    (void)usleep(1000);
  }
  assert_true(posted < 400); /* 256 commands, 16 completions, and what was under way */
  uint64_t next_done = 0;
  for (uint64_t i = 0; done + refusals < step_count; i++) {
    if (posted < step_count) {
      posted += post_any(&world, posted, encoded, bytes);
    }
    struct exec_completion completion;
    if (!exec_harness_try_take(&world.link, &completion)) {
      (void)sched_yield();
      continue;
    }
    if (completion.kind == KVP_COMPLETION_ACCEPTED) {
      assert_int_equal(completion.tag % 10 == 9, 0);
      accepted++;
    } else if (completion.kind == KVP_COMPLETION_REFUSED) {
      assert_int_equal(completion.tag % 10, 9);
      refusals++;
    } else {
      assert_int_equal(completion.kind, KVP_COMPLETION_DONE);
      assert_true(done < accepted); /* never before its own acceptance */
      next_done += next_done % 10 == 9;
      assert_int_equal(completion.tag, next_done++);
      assert_int_equal(completion.payload_bytes, 3 * (sizeof(struct kvp_wire_report) + 1500));
      done++;
    }
    free(completion.payload);
  }
  assert_int_equal(accepted, step_count * 9 / 10);
  assert_int_equal(done, step_count * 9 / 10);
  assert_int_equal(refusals, step_count / 10);

  /* A completion that could never fit is refused up front. */
  step_encoder_deinit(&encoder);
  step_encoder_init(&encoder, 1, session, step_epoch);
  step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(buffer, 0, 1, 8192, 8192);
  assert_int_equal(world_refused(&world, &encoder).status, KVP_TOO_LARGE);
  step_encoder_deinit(&encoder);
  free(encoded);
  world_deinit(&world);
}

/* Steps that have ended before there was room for their acceptance. */
static void test_acceptance_without_room(void **state) {
  (void)state;
  enum { burst = 20, round_count = 20 };
  struct exec_harness_options options = exec_harness_defaults;
  options.ring.completions = 16;
  struct world world;
  struct step_encoder encoder;
  world_init_with(&world, &options);
  uint32_t bytes = 0;
  step_encoder_init(&encoder, 1, session, step_epoch);
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  uint64_t accepted = 0, done = 0;
  for (uint64_t round = 1; round <= round_count; round++) {
    /* A refusal is in the lane when the burst comes, all of it before the executor wakes up. */
    assert_true(exec_harness_post(&world.link, KVP_COMMAND_STEP, 0, encoded, 10));
    (void)usleep(5000);
    for (uint64_t i = 0; i < burst; i++) {
      void *place = kvp_lane_reserve(&world.link.ring.commands, bytes);
      assert_non_null(place);
      memcpy(place, encoded, bytes);
      (void)kvp_lane_publish(&world.link.ring.commands, KVP_COMMAND_STEP, i, bytes);
    }
    const uint64_t one = 1;
    assert_int_equal(write(world.link.command_event, &one, sizeof one), sizeof one);
    (void)usleep(5000);
    struct exec_completion refusal = exec_harness_take(&world.link);
    assert_int_equal(refusal.kind, KVP_COMPLETION_REFUSED);
    free(refusal.payload);
    for (int i = 0; i < 2 * burst; i++) {
      struct exec_completion completion = exec_harness_take(&world.link);
      accepted += completion.kind == KVP_COMPLETION_ACCEPTED;
      done += completion.kind == KVP_COMPLETION_DONE;
      assert_true(done <= accepted);
    }
    assert_int_equal(accepted, round * burst);
    assert_int_equal(done, accepted);
  }
  free(encoded);
  world_deinit(&world);
}

/* ---- life and death ---- */

static void test_successor_finds_the_contents(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  world_rows_fill(world.buffer, 256, 512, 21);
  int32_t slots[64];
  for (int i = 0; i < 64; i++) {
    slots[i] = 64 + i;
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, slots, 64);
  assert_int_equal(world_run_one(&world, &encoder).rows_stored, 64);
  uint8_t *before = malloc(main_bytes);
  assert_non_null(before);
  memcpy(before, world.main, main_bytes);

  assert_int_equal(kill(world.link.pid, SIGKILL), 0);
  int status = exec_harness_wait(&world.link);
  assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  world_assert_ok(exec_harness_start(&world.link, &exec_harness_defaults));
  world_assert_ok(exec_harness_memory_import(&world.link, main_memory, main_bytes, world.main_fd));
  world_assert_ok(exec_harness_memory_import(&world.link, index_memory, index_bytes, world.index_fd));
  world_assert_ok(exec_harness_memory_import(&world.link, buffer_memory, buffer_bytes, world.buffer_fd));
  world_assert_ok(exec_harness_memory_import(&world.link, other_memory, buffer_bytes, world.other_fd));
  world_pool_attach(&world);
  assert_memory_equal(world.main, before, main_bytes);

  memset(world.buffer + (1 << 20), 0x5A, 1 << 20);
  step_encoder_init(&encoder, 1, session, step_epoch);
  const int32_t segments[] = {1, 0, 64, 0};
  (void)world_add_load(&encoder, segments, 1, 64);
  struct kvp_wire_op *region = step_encoder_op(&encoder, KVP_OP_REGION_READ);
  region->pool_id = pool_id;
  region->argument = v41_block_stride;
  region->total_k = v41_block_stride;
  struct exec_completion done = world_run(&world, &encoder);
  assert_memory_equal(world.buffer + (1 << 20), world.buffer, 64 * (size_t)v41_row_bytes);
  assert_memory_equal(done.payload + 2 * sizeof(struct kvp_wire_report), before + v41_block_stride, v41_block_stride);
  free(done.payload);
  step_encoder_deinit(&encoder);
  free(before);
  world_deinit(&world);
}

/* An import of several chunks in two messages, and imports that don't add up. */
static void test_import_in_pieces(void **state) {
  (void)state;
  enum { chunk = 8192, chunk_count = 70, last = 100 };
  struct exec_harness link;
  struct kvp_error error;
  world_assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  int fds[chunk_count];
  struct kvp_control_chunks chunks = {
      .memory_id = 9, .memory_bytes = (chunk_count - 1) * chunk + last, .chunk_count = chunk_count};
  for (int i = 0; i < chunk_count; i++) {
    const uint64_t bytes = i + 1 < chunk_count ? chunk : last;
    fds[i] = kvp_memory_fd_create("fake-cuda:0", bytes, &error); /* what the CUDA in host memory takes for its own */
    const uint8_t mark = (uint8_t)i;
    assert_int_equal(pwrite(fds[i], &mark, 1, 0), 1);
    chunks.chunk_bytes[i % kvp_control_fds_max] = bytes;
    if (i + 1 == kvp_control_fds_max) {
      assert_int_equal(kvp_fd_socket_send(link.socket, KVP_CONTROL_MEMORY_IMPORT, 77, &chunks, sizeof chunks, fds,
                                          kvp_control_fds_max),
                       KVP_OK);
    }
  }
  chunks.first_chunk = kvp_control_fds_max;
  world_assert_ok(exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &chunks, sizeof chunks,
                                       fds + kvp_control_fds_max, chunk_count - kvp_control_fds_max));
  world_assert_ok(exec_harness_buffer_attach(&link, 1, 9, chunks.memory_bytes, session));
  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, 1);
  step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(1, 0, chunk_count, 1, chunk);
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  assert_true(exec_harness_post(&link, KVP_COMMAND_STEP, 1, encoded, bytes));
  assert_int_equal(exec_harness_take(&link).kind, KVP_COMPLETION_ACCEPTED);
  struct exec_completion done = exec_harness_take(&link);
  for (int i = 0; i < chunk_count; i++) {
    assert_int_equal(done.payload[sizeof(struct kvp_wire_report) + (size_t)i], i);
  }
  free(done.payload);
  free(encoded);
  step_encoder_deinit(&encoder);

  struct kvp_control_chunks bad = {.memory_id = 10, .memory_bytes = chunk, .chunk_count = 1, .chunk_bytes = {chunk}};
  bad.memory_bytes = chunk + 1;
  error = exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, fds, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  bad.memory_bytes = bad.chunk_bytes[0] = 2 * (uint64_t)chunk; /* says more than the memfd has */
  error = exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, fds, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if ((link.ready.flags & KVP_READY_DEVICE_FDS) == 0) { /* a driver's are not sealed; an empty one is none of its */
    assert_int_equal(ftruncate(unsealed, 2 * (off_t)chunk), 0);
  }
  error = exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, &unsealed, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  bad.first_chunk = 1;
  error = exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, fds, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  bad = (struct kvp_control_chunks){.memory_id = 10, .memory_bytes = chunk, .chunk_count = 1, .chunk_bytes = {chunk}};
  world_assert_ok(exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, fds, 1)); /* still works */
  (void)close(unsealed);
  for (int i = 0; i < chunk_count; i++) {
    (void)close(fds[i]);
  }
  assert_int_equal(exec_harness_stop(&link), 0);
}

static void test_control_refusals(void **state) {
  (void)state;
  struct world world;
  struct kvp_error error;
  int fd = -1;
  world_init(&world);
  error = exec_harness_memory_create(&world.link, 50, UINT64_C(1) << 41, &fd); /* 2 TiB */
  assert_int_equal(error.status, KVP_OUT_OF_MEMORY);
  assert_non_null(strstr(error.text, "2199023255552 bytes asked for"));
  assert_int_equal(exec_harness_memory_create(&world.link, 50, 0, &fd).status, KVP_TOO_LARGE);
  assert_int_equal(exec_harness_memory_create(&world.link, main_memory, 4096, &fd).status, KVP_ALREADY_EXISTS);

  struct kvp_control_memory memory = {.memory_id = main_memory};
  error = exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0);
  assert_int_equal(error.status, KVP_IN_USE);
  memory.memory_id = 999;
  error = exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);

  struct kvp_control_pool pool = world_pool_spec();
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1);
  assert_int_equal(error.status, KVP_IN_USE); /* its memories are */
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, NULL, 0);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT); /* no owner table */
  error = exec_harness_buffer_attach(&world.link, buffer, buffer_memory, buffer_bytes, session);
  assert_int_equal(error.status, KVP_ALREADY_EXISTS);
  error = exec_harness_buffer_attach(&world.link, 200, buffer_memory, buffer_bytes + 1, session);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  error = exec_harness_buffer_attach(&world.link, 200, main_memory, 4096, session);
  assert_int_equal(error.status, KVP_IN_USE);
  error = exec_harness_buffer_attach(&world.link, 0, buffer_memory, 4096, session);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  struct kvp_control_buffer detach = {.buffer_id = 200};
  error = exec_harness_request(&world.link, KVP_CONTROL_BUFFER_DETACH, &detach, sizeof detach, NULL, 0);
  assert_int_equal(error.status, KVP_UNKNOWN_BUFFER);

  /* Everything in the right order comes apart, and can be put together again. */
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_DETACH, &pool, sizeof pool, NULL, 0));
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_DETACH, &pool, sizeof pool, NULL, 0);
  assert_int_equal(error.status, KVP_UNKNOWN_POOL);
  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, (int32_t[]){1}, 1);
  assert_int_equal(world_refused(&world, &encoder).status, KVP_UNKNOWN_POOL);
  step_encoder_deinit(&encoder);
  pool.regions[0].num_layers = 3; /* larger than its memory */
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  pool = world_pool_spec();
  pool.num_blocks = 4096; /* more than the owner table has */
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  pool = world_pool_spec();
  pool.regions[1].memory_id = main_memory; /* two regions in one memory */
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1);
  assert_int_equal(error.status, KVP_IN_USE);
  pool = world_pool_spec();
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1));
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_DETACH, &pool, sizeof pool, NULL, 0));
  memory.memory_id = main_memory;
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0));
  detach.buffer_id = buffer;
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_BUFFER_DETACH, &detach, sizeof detach, NULL, 0));
  memory.memory_id = buffer_memory;
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0));
  world_deinit(&world);
}

/* Behind everything that was asked for before: a memory that was made is not free any more. */
static void test_a_look_at_what_is_free(void **state) {
  (void)state;
  struct world world;
  struct kvp_control_free body = {0};
  world_init(&world);
  assert_int_equal(kvp_fd_socket_send(world.link.socket, KVP_CONTROL_MEMORY_LOOK, 77, &body, sizeof body, NULL, 0),
                   KVP_OK);
  assert_int_equal(kvp_fd_socket_receive(world.link.socket, &world.link.message), KVP_OK);
  assert_int_equal(world.link.message.kind, KVP_CONTROL_MEMORY_FREE);
  assert_int_equal(world.link.message.request, 77);
  assert_int_equal(world.link.message.body_bytes, sizeof body);
  memcpy(&body, world.link.message.body, sizeof body);
  assert_true(body.memory_free_bytes > 0 && body.memory_free_bytes <= world.link.ready.memory_bytes);
  world_deinit(&world);
}

static void test_hello_refusals(void **state) {
  (void)state;
  struct exec_harness link;
  struct exec_harness_options options = exec_harness_defaults;
  options.version = KVP_CONTROL_VERSION + 1;
  assert_int_equal(exec_harness_start(&link, &options).status, KVP_VERSION_MISMATCH);
  assert_int_equal(WEXITSTATUS(exec_harness_wait(&link)), 2);
  options.version = 0;
  options.device = "cuda:9999"; /* no such GPU, no driver, or no backend for it */
  struct kvp_error error = exec_harness_start(&link, &options);
  assert_true(error.status == KVP_UNIMPLEMENTED || error.status == KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "cuda:9999"));
  assert_int_equal(WEXITSTATUS(exec_harness_wait(&link)), 2);
  options.device = "host:x";
  assert_int_equal(exec_harness_start(&link, &options).status, KVP_INVALID_ARGUMENT);
  assert_int_equal(WEXITSTATUS(exec_harness_wait(&link)), 2);
  options.device = "host:0";
  options.thread_count = 100000;
  assert_int_equal(exec_harness_start(&link, &options).status, KVP_TOO_LARGE);
  assert_int_equal(WEXITSTATUS(exec_harness_wait(&link)), 2);
}

/* The supervisor's end: its socket is removed if and only if nobody holds its lock. */
static void test_end_of_the_supervisor(void **state) {
  (void)state;
  char directory[] = "/tmp/kvp-test-XXXXXX";
  char socket_path[64], lock_path[64];
  assert_non_null(mkdtemp(directory));
  (void)snprintf(socket_path, sizeof socket_path, "%s/socket", directory);
  (void)snprintf(lock_path, sizeof lock_path, "%s/lock", directory);
  struct exec_harness_options options = exec_harness_defaults;
  options.socket_path = socket_path;
  options.lock_path = lock_path;
  int lock = open(lock_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  int other_lock = -1;
  int socket = open(socket_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  assert_true(lock >= 0 && socket >= 0);
  assert_int_equal(close(socket), 0);

  struct exec_harness link;
  assert_int_equal(flock(lock, LOCK_EX | LOCK_NB), 0); /* alive, or a successor is */
  world_assert_ok(exec_harness_start(&link, &options));
  assert_int_equal(kill(link.pid, SIGTERM), 0); /* not its own to decide */
  assert_int_equal(kill(link.pid, SIGINT), 0);
  int fd = -1;
  world_assert_ok(exec_harness_memory_create(&link, 1, 4096, &fd));
  (void)close(fd);
  assert_int_equal(exec_harness_stop(&link), 0);
  assert_int_equal(access(socket_path, F_OK), 0);

  world_assert_ok(exec_harness_start(&link, &options));
  assert_int_equal(unlink(lock_path), 0); /* ends; the socket and the lock there are a successor's */
  other_lock = open(lock_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  assert_true(other_lock >= 0);
  assert_int_equal(flock(other_lock, LOCK_EX | LOCK_NB), 0);
  assert_int_equal(close(lock), 0);
  assert_int_equal(exec_harness_stop(&link), 0);
  assert_int_equal(access(socket_path, F_OK), 0);
  lock = other_lock;

  world_assert_ok(exec_harness_start(&link, &options));
  assert_int_equal(close(lock), 0); /* dies, as far as anybody can see */
  assert_int_equal(exec_harness_stop(&link), 0);
  assert_int_equal(access(socket_path, F_OK), -1);
  assert_int_equal(errno, ENOENT);
  assert_int_equal(unlink(lock_path), 0);
  assert_int_equal(rmdir(directory), 0);
}

/* Steps are running and waiting when the supervisor goes: the executor goes too. */
static void test_end_in_the_middle(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  const uint32_t part = 800 << 10; /* each queue's own */
  world_init(&world);
  for (uint32_t i = 0; i < 100; i++) {
    step_encoder_init(&encoder, i % 5, session, step_epoch);
    for (int k = 0; k < 20; k++) {
      step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source =
          step_view(buffer, (uint64_t)part * (i % 5), 1, part, part);
    }
    (void)world_post(&world, &encoder);
    step_encoder_deinit(&encoder);
  }
  world_deinit(&world);
}

static void test_corrupt_lane(void **state) {
  (void)state;
  struct exec_harness link;
  world_assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  assert_true(exec_harness_post(&link, 99, 1, NULL, 0)); /* no such command */
  int status = exec_harness_wait(&link);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);

  world_assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  link.ring.commands.position = 1000000; /* the next record has a number out of order */
  (void)exec_harness_post(&link, KVP_COMMAND_STEP, 1, NULL, 0);
  link.ring.commands.position = 1000;
  link.ring.commands.reserved = true;
  (void)kvp_lane_publish(&link.ring.commands, KVP_COMMAND_STEP, 1, 0);
  const uint64_t one = 1;
  assert_int_equal(write(link.command_event, &one, sizeof one), sizeof one);
  status = exec_harness_wait(&link);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_queues),
      cmocka_unit_test(test_backpressure),
      cmocka_unit_test(test_acceptance_without_room),
      cmocka_unit_test(test_successor_finds_the_contents),
      cmocka_unit_test(test_import_in_pieces),
      cmocka_unit_test(test_control_refusals),
      cmocka_unit_test(test_a_look_at_what_is_free),
      cmocka_unit_test(test_hello_refusals),
      cmocka_unit_test(test_end_of_the_supervisor),
      cmocka_unit_test(test_end_in_the_middle),
      cmocka_unit_test(test_corrupt_lane),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
