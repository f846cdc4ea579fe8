/* Attachments of libkvpool against a daemon's end in this process: the socket's protocol, the ring, its loss. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include <poll.h>
#include <unistd.h>

#include "tests/client/check.h"
#include "tests/client/fake_attach.h"

enum { steps_max = 1024, timeout_ms = 60000 };

static struct fake_attach fake;
static kvpool_error error;

static kvpool_attach_options options_of(void) {
  kvpool_attach_options options = {.size_bytes = sizeof options,
                                   .socket = fake.path,
                                   .session_id = 0x1122334455,
                                   .secret = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
                                   .device = "host:0",
                                   .timeout_ms = timeout_ms};
  return options;
}

static int setup(void **state) {
  (void)state;
  fake_start(&fake);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  fake_stop(&fake);
  return 0;
}

static kvpool_attachment *attached(void) {
  kvpool_attachment *attachment;
  const kvpool_attach_options options = options_of();
  assert_ok(kvpool_attach(&options, &attachment, &error));
  return attachment;
}

/* The next completion, which must be there. */
static const kvpool_completion *next(kvpool_attachment *attachment) {
  const kvpool_completion *completion;
  assert_ok(kvpool_attachment_poll(attachment, &completion, &error));
  assert_non_null(completion);
  return completion;
}

static void expect_nothing(kvpool_attachment *attachment) {
  const kvpool_completion *completion;
  assert_ok(kvpool_attachment_poll(attachment, &completion, &error));
  assert_null(completion);
}

/* A step with arrays and no op: what it does is not the point. */
static kvpool_step *plain_step(kvpool_attachment *attachment, size_t elements) {
  kvpool_step *step;
  uint32_t array;
  int32_t *values = calloc(elements + 1, sizeof *values);
  assert_non_null(values);
  assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
  assert_ok(kvpool_step_add_array(step, values, elements, &array, &error));
  free(values);
  return step;
}

static uint64_t posted(kvpool_attachment *attachment, const kvpool_step *step) {
  uint64_t id;
  assert_ok(kvpool_attachment_post(attachment, step, NULL, &id, &error));
  return id;
}

static uint64_t taken(void) {
  static uint8_t payload[fake_command_arena_bytes];
  struct kvp_ring_record record;
  assert_true(fake_take(&fake, &record, payload, sizeof payload));
  assert_int_equal(record.kind, KVP_COMMAND_STEP);
  return record.tag;
}

/* ---- attach -----------------------------------------------------------------------------------------------------
 */

static void test_attach(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  assert_int_equal(fake.hello.version, 1);
  assert_int_equal(fake.hello.session_id, 0x1122334455);
  for (int i = 0; i < 16; i++) {
    assert_int_equal(fake.hello.secret[i], i + 1);
  }
  assert_string_equal(fake.hello.device, "host:0");
  kvpool_attachment_info info;
  kvpool_attachment_info_get(attachment, &info);
  assert_int_equal(info.attachment_id, 7);
  assert_int_equal(info.generation, 1);
  assert_int_equal(info.epoch, 41);
  assert_int_equal(info.deadline_ns_max, 30000000000);
  assert_int_equal(info.steps_in_flight, 0);
  assert_true(info.mps);
  assert_false(info.device_memory);
  assert_string_equal(info.device, "host:0");
  assert_string_equal(info.uuid, "");
  assert_ok(kvpool_attachment_state(attachment, &error));
  kvpool_attachment_saw_epoch(attachment, 99);
  kvpool_attachment_saw_epoch(attachment, 50);
  kvpool_attachment_info_get(attachment, &info);
  assert_int_equal(info.epoch, 99);
  kvpool_detach(attachment);
  fake_wait_ended(&fake, 1);
  kvpool_detach(NULL);
}

static void test_attach_refused(void **state) {
  (void)state;
  kvpool_attachment *attachment = NULL;
  kvpool_attach_options options = options_of();
  options.size_bytes = 8;
  assert_fails(kvpool_attach(&options, &attachment, &error), KVPOOL_INVALID_ARGUMENT, "size_bytes is 8");
  options = options_of();
  options.device = "a-name-that-is-much-longer-than-any-device-of-a-daemon-could-ever-have";
  assert_fails(kvpool_attach(&options, &attachment, &error), KVPOOL_INVALID_ARGUMENT, "63");
  options = options_of();
  options.socket = "/tmp/there/is/no/such/socket";
  assert_fails(kvpool_attach(&options, &attachment, &error), KVPOOL_DISCONNECTED, "/tmp/there/is/no/such/socket");
  char path[200];
  memset(path, 'a', sizeof path);
  path[199] = '\0';
  options.socket = path;
  assert_fails(kvpool_attach(&options, &attachment, &error), KVPOOL_INVALID_ARGUMENT, "199");

  static const struct {
    enum fake_fault fault;
    kvpool_status status;
    const char *text;
  } faults[] = {
      {FAKE_REFUSES, KVPOOL_WRONG_SECRET, "the secret is not this session's"},
      {FAKE_HANGS_UP, KVPOOL_DISCONNECTED, "hung up"},
      {FAKE_GARBAGE, KVPOOL_MALFORMED, "sent a message of 12 bytes, its header has 16"},
      {FAKE_NEWER, KVPOOL_VERSION_MISMATCH, "version 2"},
      {FAKE_FEW_FDS, KVPOOL_MALFORMED, "4 descriptors"},
      {FAKE_UNSEALED_RING, KVPOOL_INVALID_ARGUMENT, "seals"},
  };
  for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
    fake.fault = faults[i].fault;
    fake_make_executor(&fake);
    options = options_of();
    assert_fails(kvpool_attach(&options, &attachment, &error), faults[i].status, faults[i].text);
    assert_null(attachment);
    fake_wait_ended(&fake, (uint32_t)i + 1);
  }
}

/* ---- steps ------------------------------------------------------------------------------------------------------
 */

static void expect_ops(const struct kvp_wire_op *ops) {
  assert_int_equal(ops[0].kind, KVP_OP_STORE);
  assert_int_equal(ops[0].flags, KVP_OP_WAITS | KVP_OP_SIGNALS);
  assert_int_equal(ops[0].pool_id, 12);
  assert_int_equal(ops[0].region, 0);
  assert_int_equal(ops[0].layer, 1);
  assert_int_equal(ops[0].arrays[0], 0);
  assert_int_equal(ops[0].arrays[1], KVP_WIRE_NO_ARRAY);
  assert_int_equal(ops[0].source.buffer_id, 5);
  assert_int_equal(ops[0].source.offset_bytes, 256);
  assert_int_equal(ops[0].source.rows, 3);
  assert_int_equal(ops[0].source.row_stride_bytes, 1024);
  assert_int_equal(ops[0].source.flags, KVP_WIRE_VIEW_PRESENT);
  assert_int_equal(ops[0].second.flags, 0);
  assert_int_equal(ops[0].wait.word, 4);
  assert_int_equal(ops[0].wait.value, 7);
  assert_int_equal(ops[0].signal.word, 600);
  assert_int_equal(ops[0].signal.value, 8);
  assert_int_equal(ops[1].kind, KVP_OP_LOAD);
  assert_int_equal(ops[1].flags, KVP_OP_ALLOW_STORE_BEFORE_LOAD);
  assert_int_equal(ops[1].arrays[0], 2);
  assert_int_equal(ops[1].total_k, 3);
}

static void expect_arrays(const uint8_t *payload, const int32_t *slots, const int32_t *segments) {
  const struct kvp_wire_array *arrays = (const void *)(payload + 64 + 640);
  assert_int_equal(arrays[0].buffer_id, 0);
  assert_int_equal(arrays[0].offset_bytes, 64 + 640 + 120);
  assert_int_equal(arrays[0].bytes, 12);
  assert_int_equal(arrays[1].buffer_id, 5);
  assert_int_equal(arrays[1].offset_bytes, 128);
  assert_int_equal(arrays[1].bytes, 24);
  assert_int_equal(arrays[2].offset_bytes, 64 + 640 + 120 + 16);
  assert_int_equal(arrays[2].bytes, 16);
  assert_memory_equal(payload + 824, slots, 12);
  assert_memory_equal(payload + 836, "\0\0\0\0", 4);
  assert_memory_equal(payload + 840, segments, 16);
}

/* The bytes of a step, field by field as step_wire.h has them. */
static void test_step_bytes(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_pool_map *map;
  kvpool_buffer *buffer;
  kvpool_step *step;
  uint32_t slots, segments, by_buffer;
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_NOTHING, &map, &error));
  assert_ok(kvpool_attachment_create_buffer(attachment, 65536, &buffer, &error));
  assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
  const int32_t slot_values[] = {3, -1, 5}, segment_values[] = {0, 0, 3, 0};
  assert_ok(kvpool_step_add_array(step, slot_values, 3, &slots, &error));
  assert_ok(kvpool_step_add_buffer_array(step, buffer, 128, 6, &by_buffer, &error));
  assert_ok(kvpool_step_add_array(step, segment_values, 4, &segments, &error));
  const kvpool_layer layer = {.pool = kvpool_pool_map_pool(map), .region = 0, .layer = 1};
  const kvpool_view view = {.buffer = buffer, .offset_bytes = 256, .rows = 3, .row_bytes = 1024};
  assert_ok(kvpool_step_add_store(step, &layer, &view, slots, NULL, &error));
  assert_ok(kvpool_step_set_wait(step, 4, 7, &error));
  assert_ok(kvpool_step_set_signal(step, 600, 8, &error));
  assert_ok(
      kvpool_step_add_load_flags(step, &layer, segments, 3, &view, NULL, KVPOOL_ALLOW_STORE_BEFORE_LOAD, &error));
  kvpool_attachment_saw_epoch(attachment, 1000);
  const kvpool_post_options options = {
      .size_bytes = sizeof options, .base = 1 << 20, .deadline_ms = 12, .want_accepted = true};
  uint64_t id;
  assert_ok(kvpool_attachment_post(attachment, step, &options, &id, &error));
  assert_int_equal(id, 1);

  static _Alignas(16) uint8_t payload[8192];
  struct kvp_ring_record record;
  assert_true(fake_take(&fake, &record, payload, sizeof payload));
  assert_int_equal(record.tag, 1);
  assert_int_equal(record.payload_bytes, 64 + 2 * 320 + 3 * 40 + 16 + 16);
  const struct kvp_wire_step *wire = (const void *)payload;
  assert_int_equal(wire->magic, 0x7073766b);
  assert_int_equal(wire->version, 3);
  assert_int_equal(wire->op_count, 2);
  assert_int_equal(wire->array_count, 3);
  assert_int_equal(wire->bytes, record.payload_bytes);
  assert_int_equal(wire->queue, 0);
  assert_int_equal(wire->owner, 0);
  assert_int_equal(wire->flags, 0);
  assert_int_equal(wire->epoch, 1000);
  assert_int_equal(wire->base, 1 << 20);
  assert_int_equal(wire->deadline_ns, 12000000);
  expect_ops((const void *)(payload + 64));
  expect_arrays(payload, slot_values, segment_values);

  /* Without options: nothing of accepted is told, no base. */
  kvpool_step_clear(step);
  assert_int_equal(posted(attachment, step), 2);
  assert_true(fake_take(&fake, &record, payload, sizeof payload));
  assert_int_equal(record.payload_bytes, 64);
  assert_int_equal(wire->flags, KVP_STEP_NOT_ACCEPTED_TOLD);
  assert_int_equal(wire->op_count, 0);
  assert_int_equal(wire->base, 0);
  assert_int_equal(wire->deadline_ns, 0);
  kvpool_step_destroy(step);
  assert_ok(kvpool_buffer_release(buffer, &error));
  kvpool_pool_map_destroy(map);
  kvpool_detach(attachment);
}

static void test_points_refused(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_pool_map *map;
  kvpool_step *step;
  uint32_t blocks;
  const int32_t block = 3;
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_NOTHING, &map, &error));
  assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
  assert_fails(kvpool_step_set_wait(step, 0, 1, &error), KVPOOL_INVALID_ARGUMENT, "no op");
  assert_ok(kvpool_step_add_array(step, &block, 1, &blocks, &error));
  assert_ok(kvpool_step_add_zero_blocks(step, kvpool_pool_map_pool(map), blocks, &error));
  assert_fails(kvpool_step_set_wait(step, 1024, 1, &error), KVPOOL_OUT_OF_RANGE, "word 1024");
  assert_fails(kvpool_step_set_wait(step, 0, UINT64_C(1) << 62, &error), KVPOOL_OUT_OF_RANGE, "2^62");
  assert_fails(kvpool_step_set_signal(step, 511, 1, &error), KVPOOL_OUT_OF_RANGE, "512 to 1023");
  assert_fails(kvpool_step_set_signal(step, 1024, 1, &error), KVPOOL_OUT_OF_RANGE, "word 1024");
  assert_ok(kvpool_step_set_signal(step, 512, 1, &error));
  assert_fails(kvpool_step_run(step, NULL, 0, &error), KVPOOL_INVALID_ARGUMENT, "kvpool_attachment_post");
  assert_ok(kvpool_step_set_placement(step, "cuda:3", &error));
  assert_fails(kvpool_attachment_post(attachment, step, NULL, NULL, &error), KVPOOL_WRONG_DEVICE, "cuda:3");
  const kvpool_post_options options = {.size_bytes = 1};
  assert_fails(kvpool_attachment_post(attachment, step, &options, NULL, &error), KVPOOL_INVALID_ARGUMENT, "is 1");
  kvpool_step_destroy(step);
  kvpool_pool_map_destroy(map);
  kvpool_detach(attachment);
}

static void test_completions(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_step *empty = plain_step(attachment, 0), *two;
  kvpool_pool_map *map;
  uint32_t blocks;
  const int32_t block = 3;
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_NOTHING, &map, &error));
  assert_ok(kvpool_attachment_step_new(attachment, &two, &error));
  assert_ok(kvpool_step_add_array(two, &block, 1, &blocks, &error));
  assert_ok(kvpool_step_add_zero_blocks(two, kvpool_pool_map_pool(map), blocks, &error));
  assert_ok(kvpool_step_add_zero_blocks(two, kvpool_pool_map_pool(map), blocks, &error));
  expect_nothing(attachment);
  for (uint64_t i = 1; i <= 4; i++) {
    assert_int_equal(posted(attachment, i == 1 ? two : empty), i);
    assert_int_equal(taken(), i);
  }
  fake_complete(&fake, KVP_COMPLETION_ACCEPTED, 1, NULL, 0);
  fake_fail(&fake, KVP_COMPLETION_REFUSED, 3, KVP_OUT_OF_RANGE); /* before the ones in front of it are done */
  fake_done(&fake, 1, 2);
  fake_fail(&fake, KVP_COMPLETION_FAILED, 2, KVP_DEADLINE_EXCEEDED);
  fake_done(&fake, 2, 0);  /* has had its last word */
  fake_done(&fake, 99, 0); /* nobody posted it */
  fake_done(&fake, 0, 0);
  fake_done(&fake, 4, 0);

  const kvpool_completion *completion = next(attachment);
  assert_int_equal(completion->step_id, 1);
  assert_true(completion->accepted);
  assert_null(completion->error);
  completion = next(attachment);
  assert_int_equal(completion->step_id, 3);
  assert_false(completion->accepted);
  assert_int_equal(completion->error->status, KVPOOL_OUT_OF_RANGE);
  assert_int_equal(completion->error->op, 3);
  assert_int_equal(completion->error->position, 5);
  assert_int_equal(completion->error->value, -8);
  assert_string_equal(completion->error->array, "slots");
  assert_string_equal(completion->error->text, "op 3 store: slots[5] = -8");
  completion = next(attachment);
  assert_int_equal(completion->step_id, 1);
  assert_null(completion->error);
  assert_int_equal(completion->report_count, 2);
  assert_int_equal(completion->reports[0].rows_stored, 100);
  assert_int_equal(completion->reports[1].rows_stored, 101);
  assert_int_equal(completion->reports[1].finished_ns, 77);
  assert_int_equal(completion->reports[1].main_kv_offset, 9);
  assert_true(completion->reports[0].unchecked_arrays && !completion->reports[0].hazard_unchecked);
  assert_true(!completion->reports[1].unchecked_arrays && completion->reports[1].hazard_unchecked);
  completion = next(attachment);
  assert_int_equal(completion->step_id, 2);
  assert_int_equal(completion->error->status, KVPOOL_DEADLINE_EXCEEDED);
  do { /* what is no step's gives nothing */
    assert_ok(kvpool_attachment_poll(attachment, &completion, &error));
  } while (completion == NULL);
  assert_int_equal(completion->step_id, 4);
  kvpool_attachment_info info;
  kvpool_attachment_info_get(attachment, &info);
  assert_int_equal(info.steps_in_flight, 0);
  kvpool_step_destroy(empty);
  kvpool_step_destroy(two);
  kvpool_pool_map_destroy(map);
  kvpool_detach(attachment);
}

static void test_busy(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_step *large = plain_step(attachment, 5000); /* three of them fill 64 KiB */
  kvpool_step *empty = plain_step(attachment, 0);
  for (int i = 0; i < 3; i++) {
    (void)posted(attachment, large);
  }
  assert_fails(kvpool_attachment_post(attachment, large, NULL, NULL, &error), KVPOOL_BUSY, "ring is full: 3");
  assert_int_equal(taken(), 1);
  assert_int_equal(posted(attachment, large), 4);
  for (uint64_t id = 2; id <= 4; id++) {
    assert_int_equal(taken(), id);
  }
  kvpool_step *huge = plain_step(attachment, fake_command_arena_bytes / 8 + 1);
  assert_fails(kvpool_attachment_post(attachment, huge, NULL, NULL, &error), KVPOOL_TOO_LARGE, "32768");
  kvpool_step_destroy(huge);

  /* As many as may be outstanding, however fast the executor takes them. */
  for (uint64_t id = 5; id <= steps_max; id++) {
    assert_int_equal(posted(attachment, empty), id);
    assert_int_equal(taken(), id);
  }
  assert_fails(kvpool_attachment_post(attachment, empty, NULL, NULL, &error), KVPOOL_BUSY, "1024 steps");
  fake_done(&fake, 2, 0); /* the oldest still holds the place that the next one needs */
  (void)next(attachment);
  assert_fails(kvpool_attachment_post(attachment, empty, NULL, NULL, &error), KVPOOL_BUSY, "1023 steps");
  fake_done(&fake, 1, 0);
  (void)next(attachment);
  assert_int_equal(posted(attachment, empty), steps_max + 1);
  assert_int_equal(posted(attachment, empty), steps_max + 2);
  assert_fails(kvpool_attachment_post(attachment, empty, NULL, NULL, &error), KVPOOL_BUSY, "1024 steps");
  kvpool_step_destroy(large);
  kvpool_step_destroy(empty);
  kvpool_detach(attachment);
}

/* ---- waiting ----------------------------------------------------------------------------------------------------
 */

/* An executor that takes commands as they come and is done with them, in order; sleeps like the real one. */
static void *serve(void *context) {
  static uint8_t payload[fake_command_arena_bytes];
  uint64_t left = *(const uint64_t *)context;
  while (left > 0) {
    struct kvp_ring_record record;
    if (fake_take(&fake, &record, payload, sizeof payload)) {
      fake_done(&fake, record.tag, 0);
      left--;
    } else if (kvp_lane_prepare_sleep(&fake.ring.commands)) {
      uint64_t count;
      (void)!read(fake.command_event, &count, sizeof count);
    }
  }
  return NULL;
}

static void test_wait_and_run(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_step *step = plain_step(attachment, 0);
  const kvpool_completion *completion;
  assert_fails(kvpool_attachment_wait(attachment, 1, &completion, &error), KVPOOL_DEADLINE_EXCEEDED, "of the 0");
  pthread_t executor;
  uint64_t count = 3000;
  assert_int_equal(pthread_create(&executor, NULL, serve, &count), 0);
  for (uint64_t i = 1; i <= 1000; i++) { /* each side sleeps now and then */
    assert_int_equal(posted(attachment, step), i);
    assert_ok(kvpool_attachment_wait(attachment, timeout_ms, &completion, &error));
    assert_int_equal(completion->step_id, i);
    if (i % 100 == 0) {
      (void)usleep(1000);
    }
  }
  for (uint64_t i = 1001; i <= 2000; i++) {
    assert_ok(kvpool_attachment_run(attachment, step, NULL, NULL, 0, &error));
  }
  /* Those of others are told later, once each, in order. */
  for (uint64_t i = 2001; i < 3000; i++) {
    while (kvpool_attachment_post(attachment, step, NULL, NULL, &error) != KVPOOL_OK) {
      assert_int_equal(error.status, KVPOOL_BUSY);
    }
  }
  kvpool_status status;
  do {
    status = kvpool_attachment_run(attachment, step, NULL, NULL, 0, &error);
  } while (status == KVPOOL_BUSY);
  assert_ok(status);
  (void)pthread_join(executor, NULL);
  for (uint64_t i = 2001; i < 3000; i++) {
    assert_int_equal(next(attachment)->step_id, i);
  }
  expect_nothing(attachment);
  kvpool_step_destroy(step);
  kvpool_detach(attachment);
}

static bool is_readable(int fd) {
  struct pollfd waited = {.fd = fd, .events = POLLIN};
  return poll(&waited, 1, 0) == 1;
}

static void test_event_loop(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_step *step = plain_step(attachment, 0);
  const int fd = kvpool_attachment_fd(attachment);
  assert_true(fd >= 0);
  assert_int_equal(kvpool_attachment_fd(attachment), fd);
  assert_false(is_readable(fd));
  (void)posted(attachment, step);
  assert_true(kvpool_attachment_arm(attachment));
  assert_false(is_readable(fd));
  fake_done(&fake, taken(), 0);
  assert_true(is_readable(fd));
  assert_int_equal(next(attachment)->step_id, 1);
  assert_true(kvpool_attachment_arm(attachment));
  assert_false(is_readable(fd));
  /* There before the flag was set: nobody would wake us. */
  assert_int_equal(posted(attachment, step), 2);
  fake_done(&fake, taken(), 0);
  assert_int_equal(next(attachment)->step_id, 2);
  assert_int_equal(posted(attachment, step), 3);
  fake_done(&fake, taken(), 0);
  assert_false(kvpool_attachment_arm(attachment));
  assert_int_equal(next(attachment)->step_id, 3);

  /* The same descriptor over the executor's death. */
  assert_true(kvpool_attachment_arm(attachment));
  fake_tell_lost(&fake, true);
  assert_true(is_readable(fd));
  expect_nothing(attachment);
  assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_DEVICE_LOST, "signal 9");
  assert_true(kvpool_attachment_arm(attachment));
  assert_false(is_readable(fd));
  fake_restore(&fake);
  assert_true(is_readable(fd));
  assert_ok(kvpool_attachment_state(attachment, &error));
  (void)posted(attachment, step);
  assert_true(kvpool_attachment_arm(attachment));
  fake_done(&fake, taken(), 0);
  assert_true(is_readable(fd));
  assert_int_equal(next(attachment)->step_id, 4);
  kvpool_step_destroy(step);
  kvpool_detach(attachment);
}

/* ---- loss and end -----------------------------------------------------------------------------------------------
 */

static void test_device_lost(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_step *step = plain_step(attachment, 0);
  for (uint64_t id = 1; id <= 4; id++) {
    (void)posted(attachment, step);
    assert_int_equal(taken(), id);
  }
  fake_done(&fake, 1, 0);
  fake_done(&fake, 3, 0); /* what the executor said before it died counts */
  fake_tell_lost(&fake, true);
  assert_fails(kvpool_attachment_post(attachment, step, NULL, NULL, &error), KVPOOL_DEVICE_LOST,
               "died with signal 9");
  fake_restore(&fake);
  assert_ok(kvpool_attachment_state(attachment, &error));
  kvpool_attachment_info info;
  kvpool_attachment_info_get(attachment, &info);
  assert_int_equal(info.generation, 2);
  assert_int_equal(info.epoch, 42);
  assert_int_equal(info.steps_in_flight, 4);
  assert_int_equal(posted(attachment, step), 5); /* the new ring; ids go on */
  fake_done(&fake, taken(), 0);
  static const struct {
    uint64_t id;
    kvpool_status status;
  } expected[] = {{1, KVPOOL_OK}, {3, KVPOOL_OK}, {2, KVPOOL_DEVICE_LOST}, {4, KVPOOL_DEVICE_LOST}, {5, KVPOOL_OK}};
  for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
    const kvpool_completion *completion = next(attachment);
    assert_int_equal(completion->step_id, expected[i].id);
    assert_int_equal(completion->error == NULL ? KVPOOL_OK : completion->error->status, expected[i].status);
  }
  expect_nothing(attachment);

  /* A step that somebody runs while the executor dies. */
  (void)posted(attachment, step);
  fake_tell_lost(&fake, false);
  const kvpool_completion *completion = NULL;
  assert_ok(kvpool_attachment_wait(attachment, timeout_ms, &completion, &error));
  assert_int_equal(completion->step_id, 6);
  assert_int_equal(completion->error->status, KVPOOL_DEVICE_LOST);
  assert_string_equal(completion->error->text, "the executor of host:0 died with signal 9");
  fake_restore(&fake);
  while (kvpool_attachment_state(attachment, &error) != KVPOOL_OK) {
  }
  /* Restored without a word that it was lost. */
  (void)posted(attachment, step);
  fake_restore(&fake);
  assert_ok(kvpool_attachment_state(attachment, &error));
  completion = next(attachment);
  assert_int_equal(completion->step_id, 7);
  assert_int_equal(completion->error->status, KVPOOL_DEVICE_LOST);
  kvpool_step_destroy(step);
  kvpool_detach(attachment);
}

struct word_wait {
  kvpool_attachment *attachment;
  uint32_t word;
  kvpool_error error;
};

static void *wait_for_word(void *context) {
  struct word_wait *wait = context;
  (void)kvpool_timeline_wait(wait->attachment, wait->word, 1, timeout_ms, &wait->error);
  return NULL;
}

/* Who waits for a word while another thread takes the loss and the successor is told, whoever writes the word: it is
 * counted up elsewhere from now on. */
static void test_waiters_learn_of_the_loss(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  struct word_wait waits[2] = {{.attachment = attachment}, {.attachment = attachment}};
  pthread_t threads[2];
  uint64_t value;
  assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_WORKER, &waits[0].word, NULL, &error));
  assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_EXECUTOR, &waits[1].word, NULL, &error));
  for (int i = 0; i < 2; i++) {
    assert_int_equal(pthread_create(&threads[i], NULL, wait_for_word, &waits[i]), 0);
  }
  __atomic_store_n(&fake.status->state, KVP_ATTACH_STATE_LOST, __ATOMIC_RELEASE); /* before the poison, as kvpoold */
  fake_tell_lost(&fake, true);
  assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_DEVICE_LOST, "signal 9");
  for (int i = 0; i < 2; i++) {
    (void)pthread_join(threads[i], NULL);
    assert_int_equal(waits[i].error.status, KVPOOL_DEVICE_LOST);
    assert_non_null(strstr(waits[i].error.text, "the executor that it was shared with died"));
  }
  const uint32_t word = waits[0].word;
  uint32_t other;
  assert_fails(kvpool_timeline_signal(attachment, word, 1, &error), KVPOOL_DEVICE_LOST, "takes no value, 1");
  assert_fails(kvpool_timeline_read(attachment, word, &value, &error), KVPOOL_DEVICE_LOST, "died");
  assert_fails(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_WORKER, &other, NULL, &error), KVPOOL_DEVICE_LOST,
               "successor");
  fake_restore(&fake);
  assert_ok(kvpool_attachment_state(attachment, &error));
  assert_ok(kvpool_timeline_read(attachment, word, &value, &error));
  assert_int_equal(value, 0);
  assert_ok(kvpool_timeline_signal(attachment, word, 1, &error));
  assert_ok(kvpool_timeline_wait(attachment, word, 1, timeout_ms, &error));
  assert_int_equal(fake.words[word].value, 1);
  fake_hang_up(&fake);
  assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_DISCONNECTED, "gone");
  assert_fails(kvpool_timeline_wait(attachment, word, 2, timeout_ms, &error), KVPOOL_DISCONNECTED, "ended");
  kvpool_detach(attachment);
}

static void *kill_executor(void *context) {
  (void)context;
  while (fake.ring.map != NULL) {
    struct kvp_ring_record record;
    uint8_t payload[4096];
    if (fake_take(&fake, &record, payload, sizeof payload)) {
      fake_tell_lost(&fake, true);
      return NULL;
    }
  }
  return NULL;
}

static void test_lost_while_running(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_step *step = plain_step(attachment, 0);
  pthread_t killer;
  assert_int_equal(pthread_create(&killer, NULL, kill_executor, NULL), 0);
  assert_fails(kvpool_attachment_run(attachment, step, NULL, NULL, 0, &error), KVPOOL_DEVICE_LOST, "signal 9");
  (void)pthread_join(killer, NULL);
  expect_nothing(attachment);
  kvpool_step_destroy(step);
  kvpool_detach(attachment);
}

/* The steps are told, then the end, again and again. */
static void expect_end(kvpool_attachment *attachment, uint64_t step_id, kvpool_status status, const char *text) {
  const kvpool_completion *completion;
  assert_ok(kvpool_attachment_wait(attachment, timeout_ms, &completion, &error));
  assert_int_equal(completion->step_id, step_id);
  assert_int_equal(completion->error->status, status);
  assert_non_null(strstr(completion->error->text, text));
  for (int i = 0; i < 2; i++) {
    assert_fails(kvpool_attachment_poll(attachment, &completion, &error), status, text);
    assert_null(completion);
    assert_fails(kvpool_attachment_wait(attachment, timeout_ms, &completion, &error), status, text);
    assert_fails(kvpool_attachment_state(attachment, &error), status, text);
  }
  assert_false(kvpool_attachment_arm(attachment));
}

static void test_ends(void **state) {
  (void)state;
  for (int way = 0; way < 6; way++) {
    kvpool_attachment *attachment = attached();
    kvpool_step *step = plain_step(attachment, 0);
    kvpool_buffer *buffer;
    assert_ok(kvpool_attachment_create_buffer(attachment, 4096, &buffer, &error));
    (void)posted(attachment, step);
    (void)taken();
    switch (way) {
    case 0:
      fake_tell_ended(&fake, KVP_MALFORMED, "the ring holds nonsense: kind 99");
      expect_end(attachment, 1, KVPOOL_MALFORMED, "kind 99");
      break;
    case 1:
      fake_tell_ended(&fake, KVP_OK, "");
      expect_end(attachment, 1, KVPOOL_UNKNOWN_SESSION, "closed");
      break;
    case 2:
      fake_hang_up(&fake);
      expect_end(attachment, 1, KVPOOL_DISCONNECTED, fake.path);
      break;
    case 3: /* the daemon's end of the ring turns to nonsense */
      fake_complete(&fake, 99, 1, NULL, 0);
      expect_end(attachment, 1, KVPOOL_MALFORMED, "kind 99");
      break;
    case 4:
      fake_send_garbage(&fake);
      expect_end(attachment, 1, KVPOOL_MALFORMED, "sent a message of 12 bytes, its header has 16");
      break;
    default: /* fewer reports than the step has ops can't be decoded; more bytes than a step has are its result */
      fake_complete(&fake, KVP_COMPLETION_REFUSED, 1, "short", 5);
      expect_end(attachment, 1, KVPOOL_MALFORMED, "5 bytes");
    }
    const kvpool_status ended = kvpool_attachment_state(attachment, NULL);
    assert_int_equal(kvpool_attachment_post(attachment, step, NULL, NULL, &error), ended);
    kvpool_pool_map *map;
    assert_int_equal(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error), ended);
    kvpool_detach(attachment);
    fake_wait_ended(&fake, (uint32_t)way + 1);
    /* Handles left over may be given back afterwards. */
    assert_ok(kvpool_buffer_release(buffer, &error));
    kvpool_step_destroy(step);
    fake_make_executor(&fake);
  }
}

static void test_silent_daemon(void **state) {
  (void)state;
  kvpool_attachment *attachment;
  kvpool_attach_options options = options_of();
  options.timeout_ms = 20;
  assert_ok(kvpool_attach(&options, &attachment, &error));
  fake.fault = FAKE_SILENT;
  kvpool_pool_map *map;
  kvpool_step *step = plain_step(attachment, 0);
  assert_fails(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error),
               KVPOOL_DEADLINE_EXCEEDED, "20 ms");
  assert_fails(kvpool_attachment_run(attachment, step, NULL, NULL, 0, &error), KVPOOL_DEADLINE_EXCEEDED,
               "step 1 is not done after 20 ms");
  const kvpool_post_options patient = {.size_bytes = sizeof patient, .deadline_ms = 30};
  assert_fails(kvpool_attachment_run(attachment, step, &patient, NULL, 0, &error), KVPOOL_DEADLINE_EXCEEDED,
               "step 2 is not done after 50 ms");
  assert_ok(kvpool_attachment_state(attachment, &error));
  /* Their last words are still to come. */
  for (uint64_t id = 1; id <= 2; id++) {
    fake_done(&fake, taken(), 0);
    assert_int_equal(next(attachment)->step_id, id);
  }
  kvpool_step_destroy(step);
  kvpool_detach(attachment);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_attach, setup, teardown),
      cmocka_unit_test_setup_teardown(test_attach_refused, setup, teardown),
      cmocka_unit_test_setup_teardown(test_step_bytes, setup, teardown),
      cmocka_unit_test_setup_teardown(test_points_refused, setup, teardown),
      cmocka_unit_test_setup_teardown(test_completions, setup, teardown),
      cmocka_unit_test_setup_teardown(test_busy, setup, teardown),
      cmocka_unit_test_setup_teardown(test_wait_and_run, setup, teardown),
      cmocka_unit_test_setup_teardown(test_event_loop, setup, teardown),
      cmocka_unit_test_setup_teardown(test_device_lost, setup, teardown),
      cmocka_unit_test_setup_teardown(test_waiters_learn_of_the_loss, setup, teardown),
      cmocka_unit_test_setup_teardown(test_lost_while_running, setup, teardown),
      cmocka_unit_test_setup_teardown(test_ends, setup, teardown),
      cmocka_unit_test_setup_teardown(test_silent_daemon, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
