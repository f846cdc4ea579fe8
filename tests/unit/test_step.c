/* Steps in the supervisor against an executor that is a list: order, limits, fences, queues, loss, torn blocks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/supervisor/daemon.h"
#include "server/supervisor/step_build.h"
#include "server/supervisor/step_queue.h"
#include "server/supervisor/step_writer.h"

static struct kvp_config config;
static struct kvp_daemon supervisor;
static struct kvp_device *device;
static struct kvp_pool pool;
static struct kvp_session session;
static struct kvp_buffer buffer; /* of the session */

/* ---- what step.c talks to ---------------------------------------------------------------------------------------
 */

static struct {
  enum kvp_status answer;
  uint32_t count;
  struct {
    uint32_t kind;
    uint32_t owner; /* of a fence */
    uint64_t tag;
  } posted[2 * kvp_ring_commands];
} link_fake;

static uint32_t told_retired;
static uint32_t settled;
static uint32_t torn_told;

enum kvp_status kvp_executor_link_post(struct kvp_executor_link *link, uint32_t kind, uint64_t tag,
                                       const void *payload, uint32_t payload_bytes) {
  assert_null(link);
  struct kvp_wire_fence fence = {0};
  if (kind == KVP_COMMAND_FENCE) {
    assert_int_equal(payload_bytes, sizeof fence);
    memcpy(&fence, payload, sizeof fence);
  } else {
    assert_true(kind == KVP_COMMAND_STEP ? payload_bytes >= sizeof(struct kvp_wire_step) : payload == NULL);
  }
  if (link_fake.answer == KVP_OK) {
    link_fake.posted[link_fake.count].kind = kind;
    link_fake.posted[link_fake.count].owner = fence.owner;
    link_fake.posted[link_fake.count++].tag = tag;
  }
  return link_fake.answer;
}

enum { a_slot = 5, other_slot = 6 };

static uint16_t last_with_rings; /* slots up to this one, on devices with rings */

bool kvp_attachment_has_ring(const struct kvp_device *where, uint16_t owner) {
  assert_true(where->rings > 0);
  return owner <= last_with_rings;
}

void kvp_daemon_steps_retired(struct kvp_daemon *retired) {
  assert_ptr_equal(retired, &supervisor);
  told_retired++;
}

void kvp_session_settle(struct kvp_daemon *owner, struct kvp_session *settled_session) {
  (void)owner;
  assert_ptr_equal(settled_session, &session);
  settled++;
}

void kvp_session_torn_add(struct kvp_session *owner, const struct kvp_torn_blocks *torn, uint32_t torn_count) {
  (void)torn;
  assert_ptr_equal(owner, &session);
  torn_told += torn_count;
}

struct kvp_buffer *kvp_buffer_find(struct kvp_session *owner, uint64_t buffer_id, struct kvp_error *error) {
  assert_ptr_equal(owner, &session);
  assert_null(error);
  return buffer_id == buffer.id ? &buffer : NULL;
}

struct kvp_pool *kvp_pool_find(struct kvp_daemon *owner, uint64_t pool_id, struct kvp_error *error) {
  (void)owner;
  (void)error;
  return pool_id == pool.id ? &pool : NULL;
}

/* ---- what steps tell --------------------------------------------------------------------------------------------
 */

static char told_text[kvp_error_text_bytes_max]; /* of the latest error */
static char events[512]; /* "a1 d1 f2:busy ": accepted, done, failed with its status, of which tag */
static int32_t torn_blocks[64];
static uint32_t torn_count;

static void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void note(const char *format, ...) {
  size_t used = strlen(events);
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(events + used, sizeof events - used, format, arguments);
  va_end(arguments);
}

static void on_accepted(void *context, uint64_t tag) {
  (void)context;
  note("a%d ", (int)tag);
}

static void on_finished(void *context, uint64_t tag, const struct kvp_step_result *result) {
  (void)context;
  if (result->error == NULL) {
    note("d%d ", (int)tag);
    return;
  }
  (void)snprintf(told_text, sizeof told_text, "%s", result->error->text);
  note("%c%d:%s ", result->refused ? 'r' : 'f', (int)tag, kvp_status_name((enum kvp_status)result->error->status));
  torn_count = result->torn_count > 0 ? result->torn[0].count : 0;
  for (uint32_t i = 0; i < torn_count; i++) {
    torn_blocks[i] = result->torn[0].blocks[i];
  }
}

static const struct kvp_step_events step_events = {.accepted = on_accepted, .finished = on_finished};

static int setup(void **state) {
  (void)state;
  last_with_rings = other_slot;
  memset(&supervisor, 0, sizeof supervisor);
  memset(&session, 0, sizeof session);
  memset(&pool, 0, sizeof pool);
  memset(&link_fake, 0, sizeof link_fake);
  memset(&buffer, 0, sizeof buffer);
  told_text[0] = '\0';
  told_retired = settled = torn_told = torn_count = 0;
  events[0] = '\0';
  config.steps_in_flight_max = 4;
  supervisor.config = &config;
  supervisor.state = KVP_DAEMON_SERVING;
  supervisor.device_count = 2;
  device = &supervisor.devices[1];
  supervisor.devices[0].daemon = device->daemon = &supervisor;
  memcpy(device->name, "host:1", 7);
  session.id = 77;
  session.slot = 5;
  supervisor.sessions.slots[5] = &session;
  pool.id = 3;
  pool.spec.region_count = 1;
  pool.regions[0].tokens_per_block = 16;
  supervisor.pools.pools[2] = &pool;
  assert_int_equal(kvp_owner_table_init(&pool.owners, "test", 200, NULL), KVP_OK);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  assert_int_equal(supervisor.devices[0].steps.count, 0);
  assert_int_equal(device->steps.count, 0);
  assert_int_equal(session.steps_in_flight, 0);
  assert_int_equal(session.step_bytes_in_flight, 0);
  assert_int_equal(pool.steps_in_flight, 0);
  kvp_step_table_deinit(&supervisor.devices[0].steps);
  kvp_step_table_deinit(&device->steps);
  kvp_owner_table_deinit(&pool.owners);
  return 0;
}

static enum kvp_status submit_on(struct kvp_device *where, uint32_t queue, uint64_t tag, void *context,
                                 const int32_t *slots, uint64_t slot_count) {
  const struct kvp_region_place place = {.pool_id = 3};
  struct kvp_error error;
  struct kvp_wire_step *step =
      kvp_step_build_store_rows(&place, 1, (const uint8_t *)slots, slot_count, 9, 1024, &error);
  assert_non_null(step);
  step->queue = queue;
  step->owner = session.slot;
  struct kvp_pool *pools[] = {&pool};
  return kvp_step_submit(where, &session, step, pools, 1, &step_events, context, tag, &error);
}

static enum kvp_status submit(uint32_t queue, uint64_t tag) {
  return submit_on(device, queue, tag, &session, NULL, 0);
}

static void complete(uint32_t kind, uint32_t posted, const void *payload, uint32_t payload_bytes) {
  struct kvp_ring_record record = {.kind = kind, .tag = link_fake.posted[posted].tag, .payload_bytes = payload_bytes};
  kvp_step_completion(device, &record, payload);
}

static void done(uint32_t posted) {
  const struct kvp_wire_report report = {.rows_stored = 1};
  complete(KVP_COMPLETION_ACCEPTED, posted, NULL, 0);
  complete(KVP_COMPLETION_DONE, posted, &report, sizeof report);
}

/* ---- tests ------------------------------------------------------------------------------------------------------
 */

static void test_order_and_fences(void **state) {
  (void)state;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  assert_int_equal(submit(queue, 1), KVP_OK);
  assert_int_equal(submit(queue, 2), KVP_OK);
  link_fake.answer = KVP_BUSY;
  assert_int_equal(submit(queue, 3), KVP_OK);
  link_fake.answer = KVP_OK;
  assert_int_equal(submit(queue, 4), KVP_OK); /* room again, but 3 is before it */
  assert_int_equal(link_fake.count, 2);
  assert_int_equal(pool.steps_in_flight, 4);
  assert_int_equal(kvp_step_retired_fence(&supervisor), 0);
  done(1);
  assert_int_equal(kvp_step_retired_fence(&supervisor), 0); /* the second: the first is still there */
  done(0);
  assert_int_equal(kvp_step_retired_fence(&supervisor), 2);
  assert_int_equal(told_retired, 0); /* a burst is told once, at its end */
  kvp_step_post_waiting(device);
  assert_int_equal(told_retired, 1);
  assert_int_equal(link_fake.count, 4);
  done(2);
  done(3);
  kvp_step_post_waiting(device);
  assert_int_equal(kvp_step_retired_fence(&supervisor), 4);
  assert_string_equal(events, "a2 d2 a1 d1 a3 d3 a4 d4 ");
  assert_int_equal(session.steps_done, 4);
  kvp_step_queue_close(device, queue);
}

static void test_fence_over_devices(void **state) {
  (void)state;
  struct kvp_device *other = &supervisor.devices[0];
  uint32_t queues[2] = {kvp_step_queue_open(other, true, NULL), kvp_step_queue_open(device, true, NULL)};
  assert_int_equal(submit_on(device, queues[1], 1, &session, NULL, 0), KVP_OK);
  assert_int_equal(submit_on(other, queues[0], 2, &session, NULL, 0), KVP_OK);
  assert_int_equal(submit_on(device, queues[1], 3, &session, NULL, 0), KVP_OK);
  done(0);
  assert_int_equal(kvp_step_retired_fence(&supervisor), 1); /* 2 is on the other one */
  kvp_step_device_lost(other);
  assert_int_equal(kvp_step_retired_fence(&supervisor), 2);
  done(2);
  assert_int_equal(kvp_step_retired_fence(&supervisor), 3);
  assert_string_equal(events, "a1 d1 f2:device_lost a3 d3 ");
}

static void test_limits(void **state) {
  (void)state;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  for (uint64_t i = 1; i <= 4; i++) {
    assert_int_equal(submit(queue, i), KVP_OK);
  }
  assert_int_equal(submit(queue, 5), KVP_BUSY);
  assert_int_equal(session.steps_in_flight, 4);
  done(0);
  assert_int_equal(submit(queue, 6), KVP_OK); /* at once, not only when the burst is over */
  kvp_step_device_lost(device);
  /* Steps of 2^23 bytes: eight of them are the 64 MiB of a session, the ninth is one too many. */
  config.steps_in_flight_max = 100;
  static int32_t slots[(kvp_step_bytes_max - 64 - 320 - 40) / 4];
  memset(slots, 0xFF, sizeof slots);
  for (uint64_t i = 1; i <= 8; i++) {
    assert_int_equal(submit_on(device, queue, i, &session, slots, sizeof slots / 4), KVP_OK);
  }
  assert_int_equal(submit(queue, 9), KVP_BUSY);
  session.state = KVP_SESSION_CLOSING;
  assert_int_equal(submit(queue, 10), KVP_UNKNOWN_SESSION);
  session.state = KVP_SESSION_OPEN;
  supervisor.state = KVP_DAEMON_STOPPING;
  assert_int_equal(submit(queue, 11), KVP_SHUTTING_DOWN);
  kvp_step_device_lost(device);
}

static void test_what_executors_say(void **state) {
  (void)state;
  struct kvp_error error;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  for (uint64_t i = 1; i <= 4; i++) {
    assert_int_equal(submit(queue, i), KVP_OK);
  }
  (void)kvp_error_set(&error, KVP_NOT_OWNER, "not yours");
  complete(KVP_COMPLETION_REFUSED, 0, &error, sizeof error);
  error.status = 4711; /* no status of ours */
  complete(KVP_COMPLETION_FAILED, 1, &error, sizeof error);
  complete(KVP_COMPLETION_FAILED, 2, "x", 1);
  complete(KVP_COMPLETION_DONE, 3, &error, sizeof(struct kvp_wire_report) - 1);
  done(3); /* twice: the tag is nobody's now */
  complete(99, 3, NULL, 0);
  assert_string_equal(events, "r1:not_owner f2:internal f3:internal f4:internal ");
  assert_int_equal(session.steps_refused, 1);
  assert_int_equal(session.steps_done, 0);
}

/* What an executor doesn't have the session may have elsewhere: buffer 9 is on device 0, the steps run on device 1. */
static void test_buffers_elsewhere(void **state) {
  (void)state;
  struct kvp_error error;
  buffer.id = 9;
  buffer.device = &supervisor.devices[0];
  memcpy(supervisor.devices[0].name, "host:0", 7);
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  for (uint64_t i = 1; i <= 4; i++) {
    assert_int_equal(submit(queue, i), KVP_OK);
  }
  (void)kvp_error_set_at(&error, KVP_UNKNOWN_BUFFER, 2, "source", -1, 9, "op 2 store: source: no such buffer");
  complete(KVP_COMPLETION_REFUSED, 0, &error, sizeof error);
  assert_string_equal(told_text, "op 2: source: buffer 9 is on host:0, the step runs on host:1");
  complete(KVP_COMPLETION_FAILED, 1, &error, sizeof error); /* nothing is known of what runs */
  assert_string_equal(told_text, error.text);
  error.value = 8; /* another session's, or nobody's */
  complete(KVP_COMPLETION_REFUSED, 2, &error, sizeof error);
  assert_string_equal(told_text, error.text);
  error.value = 9;
  buffer.device = device; /* here, and lost with an executor */
  complete(KVP_COMPLETION_REFUSED, 3, &error, sizeof error);
  assert_string_equal(events, "r1:wrong_device f2:unknown_buffer r3:unknown_buffer r4:unknown_buffer ");
}

static void test_lost(void **state) {
  (void)state;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  for (uint32_t block = 0; block < 200; block++) {
    uint16_t owner = block % 2 == 0 ? session.slot : 6;
    kvp_owner_table_set(&pool.owners, block, kvp_owner_entry_make(1, KVP_BLOCK_LEASED, owner));
  }
  /* 16 tokens a block: blocks 190 (twice), 3 (another's), 64, 0; a skipped row; a slot past the pool. */
  const int32_t slots[] = {190 * 16, 190 * 16 + 15, 3 * 16, 64 * 16 + 1, -1, 0, 200 * 16};
  assert_int_equal(submit_on(device, queue, 1, &session, slots, 7), KVP_OK);
  assert_int_equal(submit(queue, 2), KVP_OK);
  link_fake.answer = KVP_DEVICE_LOST;
  assert_int_equal(submit(queue, 3), KVP_OK); /* it waits for the successor */
  complete(KVP_COMPLETION_ACCEPTED, 0, NULL, 0);
  kvp_step_abandon(device, device);          /* somebody else's steps: nothing */
  complete(KVP_COMPLETION_DONE, 1, NULL, 0); /* no reports: malformed */
  torn_count = 0;
  kvp_step_device_lost(device);
  assert_string_equal(events, "a1 f2:internal f1:device_lost ");
  assert_int_equal(torn_count, 3);
  const int32_t expected[] = {0, 64, 190};
  assert_memory_equal(torn_blocks, expected, sizeof expected);
  assert_int_equal(torn_told, 1);
  assert_int_equal(device->steps.count, 1);
  link_fake.answer = KVP_OK;
  kvp_step_post_waiting(device);
  done(2);
  assert_string_equal(events, "a1 f2:internal f1:device_lost a3 d3 ");
  kvp_step_post_waiting(device);
}

/* One op of each kind on arrays of its own; returns the step. */
static struct kvp_wire_step *step_of_ops(const uint32_t *kinds, uint32_t op_count, const int32_t (*elements)[4]) {
  struct kvp_error error;
  struct kvp_step_writer writer;
  assert_int_equal(kvp_step_writer_init(&writer, op_count, op_count, (uint64_t)op_count * 16, &error), KVP_OK);
  for (uint32_t i = 0; i < op_count; i++) {
    writer.ops[i].kind = kinds[i];
    writer.ops[i].pool_id = 3;
    uint32_t array = kvp_step_writer_add_inline(&writer, elements[i], 16);
    writer.ops[i].arrays[kinds[i] == KVP_OP_ASSEMBLE ? 2 : 0] = array;
  }
  writer.step->owner = session.slot;
  return writer.step;
}

static void test_lost_by_kind(void **state) {
  (void)state;
  struct kvp_error error;
  for (uint32_t block = 0; block < 200; block++) {
    kvp_owner_table_set(&pool.owners, block, kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session.slot));
  }
  const uint32_t kinds[] = {KVP_OP_FUSED_STORE, KVP_OP_ASSEMBLE,         KVP_OP_COPY_BLOCKS,
                            KVP_OP_ZERO_BLOCKS, KVP_OP_CONVERT_KV_INDEX, KVP_OP_LOAD};
  const int32_t elements[][4] = {
      {20 * 16 + 3, -1, 21 * 16, -1}, /* slots */
      {-1, 30 * 16 + 15, -1, -1},     /* store_slots */
      {1, 40, 2, 41},                 /* from, to */
      {50, 199, 200, -1},             /* blocks */
      {60, 61, 62, 63},               /* read only, like the next one */
      {70, 0, 1, 0},
  };
  struct kvp_wire_step *step = step_of_ops(kinds, 6, elements);
  step->queue = kvp_step_queue_open(device, true, NULL);
  struct kvp_pool *pools[] = {&pool};
  assert_int_equal(kvp_step_submit(device, &session, step, pools, 1, &step_events, NULL, 1, &error), KVP_OK);
  kvp_step_device_lost(device);
  const int32_t expected[] = {20, 21, 30, 40, 41, 50, 199};
  assert_int_equal(torn_count, 7);
  assert_memory_equal(torn_blocks, expected, sizeof expected);
}

/* An assemble that stores nothing tears nothing. */
static void test_lost_assemble_without_slots(void **state) {
  (void)state;
  struct kvp_error error;
  const uint32_t kinds[] = {KVP_OP_ASSEMBLE};
  const int32_t elements[][4] = {{0, 16, 32, 48}};
  for (uint32_t block = 0; block < 4; block++) {
    kvp_owner_table_set(&pool.owners, block, kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session.slot));
  }
  struct kvp_wire_step *step = step_of_ops(kinds, 1, elements);
  struct kvp_wire_op *op = (struct kvp_wire_op *)(step + 1);
  op->arrays[0] = op->arrays[1] = op->arrays[3] = 0;
  op->arrays[2] = KVP_WIRE_NO_ARRAY;
  step->queue = kvp_step_queue_open(device, true, NULL);
  struct kvp_pool *pools[] = {&pool};
  assert_int_equal(kvp_step_submit(device, &session, step, pools, 1, &step_events, NULL, 1, &error), KVP_OK);
  kvp_step_device_lost(device);
  assert_string_equal(events, "f1:device_lost ");
  assert_int_equal(torn_count, 0);
}

static void test_lost_with_slots_in_a_buffer(void **state) {
  (void)state;
  struct kvp_error error;
  const struct kvp_region_place place = {.pool_id = 3};
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  for (uint32_t block = 10; block < 14; block++) {
    kvp_owner_table_set(&pool.owners, block, kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session.slot));
  }
  struct kvp_wire_step *step = kvp_step_build_store_rows(&place, 1, NULL, 0, 9, 1024, &error);
  struct kvp_wire_array *array = (struct kvp_wire_array *)((uint8_t *)step + 64 + 320);
  array->buffer_id = 4; /* nobody can say what it held: all that is the session's */
  step->queue = queue;
  step->owner = session.slot;
  struct kvp_pool *pools[] = {&pool};
  assert_int_equal(kvp_step_submit(device, &session, step, pools, 1, &step_events, NULL, 1, &error), KVP_OK);
  kvp_step_device_lost(device);
  assert_int_equal(torn_count, 4);
  assert_int_equal(torn_blocks[0], 10);
  assert_int_equal(torn_blocks[3], 13);
}

static void test_abandon(void **state) {
  (void)state;
  int mine = 0;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  assert_int_equal(submit_on(device, queue, 1, &mine, NULL, 0), KVP_OK);
  link_fake.answer = KVP_BUSY;
  assert_int_equal(submit_on(device, queue, 2, &mine, NULL, 0), KVP_OK);
  assert_int_equal(submit(queue, 3), KVP_OK);
  kvp_step_abandon(device, &mine);
  assert_int_equal(device->steps.count, 2); /* the one that waited went, the one in the ring stays */
  assert_int_equal(told_retired, 1);
  kvp_step_queue_close(device, queue); /* the executor may not hear of it before the last step is done */
  link_fake.answer = KVP_OK;
  kvp_step_post_waiting(device);
  done(0);
  assert_int_equal(link_fake.count, 2);
  done(1);
  assert_string_equal(events, "a3 d3 ");
  assert_int_equal(link_fake.count, 3);
  assert_int_equal(link_fake.posted[2].kind, KVP_COMMAND_QUEUE_CLOSE);
  assert_int_equal(link_fake.posted[2].tag, queue);
}

static void test_drops(void **state) {
  (void)state;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  assert_int_equal(submit(queue, 1), KVP_OK);
  link_fake.answer = KVP_BUSY;
  assert_int_equal(submit(queue, 2), KVP_OK);
  assert_int_equal(submit(queue, 3), KVP_OK);
  kvp_step_drop_session(&supervisor, &session);
  assert_string_equal(events, "f2:cancelled f3:cancelled ");
  assert_int_equal(session.steps_in_flight, 1);
  assert_int_equal(submit(queue, 4), KVP_OK);
  struct kvp_error why;
  (void)kvp_error_set(&why, KVP_SHUTTING_DOWN, "the end");
  kvp_step_drop_waiting(device, &why);
  kvp_step_device_lost(device);
  assert_string_equal(events, "f2:cancelled f3:cancelled f4:shutting_down f1:device_lost ");
}

static void test_queues(void **state) {
  (void)state;
  static uint32_t numbers[kvp_queues_per_executor_max];
  for (uint32_t i = 0; i < kvp_queues_per_executor_max; i++) {
    numbers[i] = kvp_step_queue_open(device, true, NULL);
    assert_int_not_equal(numbers[i], 0);
    assert_true(i == 0 || numbers[i] != numbers[i - 1]);
  }
  assert_int_equal(kvp_step_queue_open(device, true, NULL), 0);
  link_fake.answer = KVP_BUSY;
  kvp_step_queue_close(device, numbers[17]);
  assert_int_equal(kvp_step_queue_open(device, true, NULL), 0); /* the executor still has it */
  link_fake.answer = KVP_OK;
  kvp_step_post_waiting(device);
  assert_int_equal(link_fake.posted[0].tag, numbers[17]);
  uint32_t again = kvp_step_queue_open(device, true, NULL);
  assert_true(again != 0 && again != numbers[17]); /* a number is never used twice */
  assert_int_equal(kvp_step_queue_open(device, true, NULL), 0);
}

static void test_sessions_leave_queues_to_operators(void **state) {
  (void)state;
  const uint32_t of_sessions_max = 4096 - 64;
  struct kvp_error error;
  assert_int_not_equal(kvp_step_queue_open(device, true, NULL), 0);
  uint32_t last = 0;
  for (uint32_t i = 0; i < of_sessions_max; i++) {
    last = kvp_step_queue_open(device, false, NULL);
    assert_int_not_equal(last, 0);
  }
  assert_int_equal(kvp_step_queue_open(device, false, &error), 0);
  assert_int_equal(error.status, KVP_BUSY);
  assert_non_null(strstr(error.text, "4032"));
  for (uint32_t i = 1; i < 64; i++) {
    assert_int_not_equal(kvp_step_queue_open(device, true, NULL), 0);
  }
  assert_int_equal(kvp_step_queue_open(device, true, &error), 0);
  kvp_step_queue_close(device, last);
  assert_int_not_equal(kvp_step_queue_open(device, false, NULL), 0);
}

/* More steps than both lanes have records for: the rest waits, though the command lane would take it. */
static void test_never_more_than_completions_fit(void **state) {
  (void)state;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  config.steps_in_flight_max = 5000;
  for (uint64_t i = 1; i <= 3969; i++) {
    assert_int_equal(submit(queue, i), KVP_OK);
  }
  assert_int_equal(link_fake.count, 3968); /* (8192 - 256 fences) / 2 */
  const struct kvp_wire_report report = {0};
  kvp_step_abandon(device, NULL);
  complete(KVP_COMPLETION_DONE, 100, &report, sizeof report);
  kvp_step_post_waiting(device);
  assert_int_equal(link_fake.count, 3969);
  kvp_step_abandon(device, &session);
  kvp_step_device_lost(device);
  assert_string_equal(events, "d101 ");
}

/* ---- fences -----------------------------------------------------------------------------------------------------
 */

static void fenced(uint32_t posted) {
  assert_int_equal(link_fake.posted[posted].kind, KVP_COMMAND_FENCE);
  complete(KVP_COMPLETION_FENCED, posted, NULL, 0);
}

static uint64_t retired_of(uint16_t owner) {
  return kvp_step_retired_of(&supervisor, owner);
}

static void test_no_fence_without_rings(void **state) {
  (void)state;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  assert_int_equal(submit(queue, 1), KVP_OK);
  assert_int_equal(kvp_step_fence(&supervisor, a_slot), 1);
  kvp_step_fence_post(&supervisor);
  device->rings = 1; /* another session's */
  last_with_rings = a_slot;
  assert_int_equal(kvp_step_fence(&supervisor, other_slot), 1);
  kvp_step_fence_post(&supervisor);
  assert_int_equal(link_fake.count, 1);
  assert_int_equal(retired_of(a_slot), 0);
  done(0);
  assert_int_equal(retired_of(a_slot), 1);
}

static void test_fence(void **state) {
  (void)state;
  uint32_t queue = kvp_step_queue_open(device, true, NULL);
  device->rings = 1;
  assert_int_equal(submit(queue, 1), KVP_OK);
  assert_int_equal(kvp_step_fence(&supervisor, a_slot), 2);
  assert_int_equal(link_fake.count, 1); /* what it fences off may be changed now */
  kvp_step_fence_post(&supervisor);
  assert_int_equal(link_fake.count, 2);
  assert_int_equal(link_fake.posted[1].owner, a_slot);
  assert_int_equal(submit(queue, 3), KVP_OK);
  done(0);
  assert_int_equal(retired_of(a_slot), 1);     /* workers' steps may still run */
  assert_int_equal(retired_of(other_slot), 2); /* which is nothing to others */
  done(2);
  assert_int_equal(retired_of(a_slot), 1);
  assert_int_equal(retired_of(other_slot), 3);
  assert_int_equal(retired_of(kvp_lease_owner_nobody), 3);
  assert_int_equal(kvp_step_retired_fence(&supervisor), 3);
  kvp_step_post_waiting(device);
  told_retired = 0;
  fenced(1);
  assert_int_equal(retired_of(a_slot), 3);
  kvp_step_post_waiting(device);
  assert_int_equal(told_retired, 1);
  fenced(1); /* twice: it is nobody's now */
  assert_int_equal(retired_of(a_slot), 3);
}

static void test_fence_on_every_device_with_rings(void **state) {
  (void)state;
  struct kvp_device *other = &supervisor.devices[0];
  other->rings = device->rings = 1;
  assert_int_equal(kvp_step_fence(&supervisor, a_slot), 2);
  kvp_step_fence_post(&supervisor);
  assert_int_equal(link_fake.count, 2);
  fenced(1); /* the second device's */
  assert_int_equal(retired_of(a_slot), 0);
  kvp_step_device_lost(other); /* what ran there has ended */
  assert_int_equal(retired_of(a_slot), 2);
}

/* One of a session is posted at a time; what is freed meanwhile waits for the next one together. */
static void test_fences_of_a_session_are_one_behind_the_other(void **state) {
  (void)state;
  device->rings = 1;
  assert_int_equal(kvp_step_fence(&supervisor, a_slot), 1);
  kvp_step_fence_post(&supervisor);
  assert_int_equal(kvp_step_fence(&supervisor, a_slot), 2);
  assert_int_equal(kvp_step_fence(&supervisor, a_slot), 2);
  kvp_step_fence_post(&supervisor);
  assert_int_equal(link_fake.count, 1);
  assert_int_equal(kvp_step_fence(&supervisor, other_slot), 3);
  kvp_step_fence_post(&supervisor);
  assert_int_equal(link_fake.count, 2);
  assert_int_equal(link_fake.posted[1].owner, other_slot);
  fenced(1);
  assert_int_equal(retired_of(other_slot), 3);
  assert_int_equal(retired_of(a_slot), 0);
  fenced(0);
  assert_int_equal(retired_of(a_slot), 1); /* the second has not even been posted */
  kvp_step_post_waiting(device);
  assert_int_equal(link_fake.count, 3);
  assert_int_equal(link_fake.posted[2].owner, a_slot);
  fenced(2);
  assert_int_equal(retired_of(a_slot), 3);
}

/* However many sessions there are, fences take no more room from steps than is kept for them. */
static void test_fences_are_few(void **state) {
  (void)state;
  device->rings = 1;
  last_with_rings = kvp_sessions_max;
  for (uint32_t owner = 1; owner <= kvp_sessions_max; owner++) {
    assert_int_equal(kvp_step_fence(&supervisor, (uint16_t)owner), owner);
    kvp_step_fence_post(&supervisor);
  }
  assert_int_equal(link_fake.count, kvp_fences_posted_max);
  assert_int_equal(retired_of(kvp_sessions_max), kvp_sessions_max - 1);
  for (uint32_t i = 0; i < kvp_sessions_max; i++) {
    assert_int_equal(link_fake.posted[i].owner, i + 1);
    fenced(i);
    assert_int_equal(retired_of((uint16_t)(i + 1)), kvp_sessions_max);
    kvp_step_post_waiting(device);
  }
  assert_int_equal(link_fake.count, kvp_sessions_max);
}

static void test_fence_waits_for_the_lane(void **state) {
  (void)state;
  device->rings = 1;
  link_fake.answer = KVP_BUSY;
  assert_int_equal(kvp_step_fence(&supervisor, a_slot), 1);
  kvp_step_fence_post(&supervisor);
  assert_int_equal(retired_of(a_slot), 0);
  link_fake.answer = KVP_OK;
  kvp_step_post_waiting(device);
  assert_int_equal(link_fake.count, 1);
  link_fake.answer = KVP_DEVICE_LOST;
  assert_int_equal(kvp_step_fence(&supervisor, a_slot), 2);
  kvp_step_fence_post(&supervisor);
  told_retired = 0;
  kvp_step_device_lost(device); /* posted or not */
  assert_int_equal(retired_of(a_slot), 2);
  assert_int_equal(told_retired, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_order_and_fences, setup, teardown),
      cmocka_unit_test_setup_teardown(test_fence_over_devices, setup, teardown),
      cmocka_unit_test_setup_teardown(test_limits, setup, teardown),
      cmocka_unit_test_setup_teardown(test_what_executors_say, setup, teardown),
      cmocka_unit_test_setup_teardown(test_buffers_elsewhere, setup, teardown),
      cmocka_unit_test_setup_teardown(test_lost, setup, teardown),
      cmocka_unit_test_setup_teardown(test_lost_by_kind, setup, teardown),
      cmocka_unit_test_setup_teardown(test_lost_assemble_without_slots, setup, teardown),
      cmocka_unit_test_setup_teardown(test_lost_with_slots_in_a_buffer, setup, teardown),
      cmocka_unit_test_setup_teardown(test_abandon, setup, teardown),
      cmocka_unit_test_setup_teardown(test_drops, setup, teardown),
      cmocka_unit_test_setup_teardown(test_sessions_leave_queues_to_operators, setup, teardown),
      cmocka_unit_test_setup_teardown(test_queues, setup, teardown),
      cmocka_unit_test_setup_teardown(test_never_more_than_completions_fit, setup, teardown),
      cmocka_unit_test_setup_teardown(test_no_fence_without_rings, setup, teardown),
      cmocka_unit_test_setup_teardown(test_fence, setup, teardown),
      cmocka_unit_test_setup_teardown(test_fence_on_every_device_with_rings, setup, teardown),
      cmocka_unit_test_setup_teardown(test_fences_of_a_session_are_one_behind_the_other, setup, teardown),
      cmocka_unit_test_setup_teardown(test_fences_are_few, setup, teardown),
      cmocka_unit_test_setup_teardown(test_fence_waits_for_the_lane, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
