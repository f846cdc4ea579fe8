/* The rig of the service's tests. */
#include "tests/unit/service_rig.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/owner_entry.h"

struct rig rig;

const struct kvp_ring_sizes rig_worker_sizes = {
    .commands = 1024, .completions = 2048, .command_arena_bytes = 8 << 20, .completion_arena_bytes = 4 << 20};

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

int rig_setup(void **state) {
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

int rig_teardown(void **state) {
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

struct end *rig_attach_with(uint32_t i, const struct kvp_ring_sizes *sizes, uint64_t deadline_ns_max) {
  struct end *end = &rig.workers[i];
  struct kvp_error error;
  int pair[2];
  rings_make(end, sizes);
  assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
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

struct end *rig_attach(uint32_t i) {
  return rig_attach_with(i, &rig_worker_sizes, 0);
}

/* ---- steps ---- */

void rig_post_record(struct end *end, uint32_t kind, uint64_t tag, const void *payload, uint32_t bytes) {
  void *place = kvp_lane_reserve(&end->ring.commands, bytes);
  assert_non_null(place);
  if (bytes > 0) {
    memcpy(place, payload, bytes);
  }
  (void)kvp_lane_publish(&end->ring.commands, kind, tag, bytes);
}

void rig_post_fence(uint64_t tag, uint32_t owner) {
  const struct kvp_wire_fence fence = {.owner = owner};
  rig_post_record(&rig.supervisor, KVP_COMMAND_FENCE, tag, &fence, sizeof fence);
}

void rig_post_step(struct end *end, uint64_t tag, struct step_encoder *encoder) {
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  rig_post_record(end, KVP_COMMAND_STEP, tag, encoded, bytes);
  free(encoded);
  step_encoder_deinit(encoder);
}

void rig_step_begin(struct step_encoder *encoder) {
  step_encoder_init(encoder, 7, 0, 1);
}

struct kvp_wire_op *rig_op_add_to(struct step_encoder *encoder, uint64_t buffer) {
  static const int32_t pivots[] = {3, 2, 9, 1};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_EXPAND_SWA_INDEX);
  op->argument = 4;
  op->second = step_view(buffer, 0, 1, 16, 16);
  op->arrays[0] = step_encoder_array(encoder, pivots, sizeof pivots);
  return op;
}

struct kvp_wire_op *rig_op_add(struct step_encoder *encoder) {
  return rig_op_add_to(encoder, buffer_id);
}

void rig_op_waits(struct kvp_wire_op *op, uint32_t word, uint64_t value) {
  op->flags |= KVP_OP_WAITS;
  op->wait = (struct kvp_wire_point){.word = word, .value = value};
}

void rig_op_signals(struct kvp_wire_op *op, uint32_t word, uint64_t value) {
  op->flags |= KVP_OP_SIGNALS;
  op->signal = (struct kvp_wire_point){.word = word, .value = value};
}

void rig_post(struct end *end, uint64_t tag, uint32_t wait_word, uint64_t wait_value, uint32_t signal_word,
              uint64_t signal_value) {
  struct step_encoder encoder;
  rig_step_begin(&encoder);
  struct kvp_wire_op *op = rig_op_add(&encoder);
  if (wait_word != 0) {
    rig_op_waits(op, wait_word, wait_value);
  }
  if (signal_word != 0) {
    rig_op_signals(op, signal_word, signal_value);
  }
  rig_post_step(end, tag, &encoder);
}

void rig_word_set(struct end *end, uint32_t word, uint64_t value) {
  atomic_store(&end->words[word].value, value);
}

uint64_t rig_word(struct end *end, uint32_t word) {
  return atomic_load(&end->words[word].value);
}

void rig_serve(void) {
  bool any = true;
  while (any) {
    any = kvp_service_commands_take(&rig.service);
    any = kvp_service_finished_take(&rig.service) || any;
  }
}

bool rig_try_take(struct end *end, struct exec_completion *out, struct kvp_error *error) {
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

struct kvp_error rig_expect(struct end *end, enum kvp_completion_kind kind, uint64_t tag) {
  struct exec_completion completion = {0};
  struct kvp_error error = {0};
  assert_true(rig_try_take(end, &completion, &error));
  if (completion.kind == KVP_COMPLETION_REFUSED && kind != KVP_COMPLETION_REFUSED) {
    print_error("%s\n", error.text);
  }
  assert_int_equal(completion.kind, kind);
  assert_int_equal(completion.tag, tag);
  return error;
}

void rig_expect_nothing(struct end *end) {
  struct exec_completion completion;
  assert_false(rig_try_take(end, &completion, NULL));
}
