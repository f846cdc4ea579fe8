/* Steps, queues, rows and inspection of libkvpool against a kvpoold of its own.
 *
 * What comes back is known beforehand: bf16 records are their rows, and rows of 1.0, 2.0 and 3.0 are exact in v41 and
 * index_mxfp8, whose scales are powers of two. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/client/check.h"
#include "tests/client/process.h"
#include "tests/client/recorder.h"

enum {
  kv_elements = 512,
  kv_row_bytes = 2 * kv_elements,
  index_elements = 128,
  plain_elements = 64,
  plain_row_bytes = 2 * plain_elements,
  kv_tokens_per_block = 16,
  plain_tokens_per_block = 64,
  block_count = 4,
  queue_steps_max = 256
};

static const uint16_t bf16_1_2_3[] = {0x3F80, 0x4000, 0x4040};

static struct process daemon_process;
static kvpool_client *client;
static kvpool_pool *pool;
static kvpool_session *session;
static kvpool_error error;
static int32_t blocks[block_count];
static struct recorder recorder;

static int setup(void **state) {
  (void)state;
  process_init(&daemon_process);
  process_start_daemon(&daemon_process);
  const kvpool_connect_options options = {
      .size_bytes = sizeof options, .timeout_ms = 30000, .wait_until_serving = true};
  if (kvpool_client_connect(daemon_process.socket, &options, &client, &error) != KVPOOL_OK ||
      pool_wait(client, &pool, &error) != KVPOOL_OK ||
      kvpool_session_open(client, NULL, &session, &error) != KVPOOL_OK ||
      kvpool_blocks_allocate(session, pool, block_count, blocks, &error) != KVPOOL_OK) {
    (void)fprintf(stderr, "setup: %s\n", error.text);
    process_cleanup();
    return -1;
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  kvpool_session_close(session);
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
  process_stop(&daemon_process);
  process_deinit(&daemon_process);
  return 0;
}

static void fill_1_2_3(uint16_t *rows, size_t row_count, size_t row_elements) {
  for (size_t i = 0; i < row_count * row_elements; i++) {
    rows[i] = bf16_1_2_3[(i * 7 + i / 64) % 3];
  }
}

/* A buffer that holds `bytes` of data. */
static kvpool_buffer *buffer_with(const void *data, size_t bytes) {
  kvpool_buffer *buffer;
  assert_ok(kvpool_buffer_create(session, NULL, bytes, &buffer, &error));
  assert_ok(kvpool_buffer_write(buffer, 0, data, bytes, &error));
  return buffer;
}

static void test_step_run(void **state) {
  (void)state;
  enum { rows = 20, view_bytes = rows * kv_row_bytes };
  static uint16_t source[rows * kv_elements], got[rows * kv_elements];
  fill_1_2_3(source, rows, kv_elements);
  kvpool_buffer *in = buffer_with(source, sizeof source), *out, *cast_back;
  assert_ok(kvpool_buffer_create(session, "host:0", view_bytes, &out, &error));
  assert_ok(kvpool_buffer_create(session, "host:0", view_bytes, &cast_back, &error));
  int32_t slots[rows];
  kvpool_segment segments[block_count];
  size_t segment_count;
  assert_ok(kvpool_plan_slot_mapping(blocks, block_count, kv_tokens_per_block, 0, rows, slots, &error));
  assert_ok(kvpool_plan_paged_range(blocks, block_count, kv_tokens_per_block, 0, rows, 0, segments, block_count,
                                    &segment_count, &error));
  slots[7] = -1;

  kvpool_step *step;
  uint32_t slot_array, segment_array;
  const kvpool_layer layer = {.pool = pool, .region = 0, .layer = 1};
  const kvpool_view in_view = {.buffer = in, .rows = rows, .row_bytes = kv_row_bytes};
  const kvpool_view out_view = {.buffer = out, .rows = rows, .row_bytes = kv_row_bytes};
  const kvpool_view cast_back_view = {
      .buffer = cast_back, .rows = rows, .row_stride_bytes = kv_row_bytes, .row_bytes = kv_row_bytes};
  assert_ok(kvpool_step_new(session, &step, &error));
  assert_ok(kvpool_step_set_placement(step, "host:0", &error));
  assert_ok(kvpool_step_add_array(step, slots, rows, &slot_array, &error));
  assert_ok(kvpool_step_add_store(step, &layer, &in_view, slot_array, &cast_back_view, &error));
  assert_ok(kvpool_step_add_array(step, &segments[0].src_block, 4 * segment_count, &segment_array, &error));
  assert_ok(kvpool_step_add_load(step, &layer, segment_array, rows, &out_view, NULL, &error));
  for (int run = 0; run < 2; run++) { /* a step may be run any number of times */
    kvpool_op_report reports[3] = {0};
    assert_ok(kvpool_step_run(step, reports, 3, &error));
    assert_int_equal(reports[0].rows_stored, rows - 1);
    assert_int_equal(reports[0].rows_skipped, 1);
    assert_int_equal(reports[1].rows_loaded, rows);
    assert_int_equal(reports[1].bytes_written, view_bytes);
    assert_true(reports[0].queued_ns > 0 && reports[0].started_ns >= reports[0].queued_ns);
    assert_true(reports[0].finished_ns >= reports[0].started_ns);
    assert_false(reports[0].unchecked_arrays);
    assert_int_equal(reports[2].queued_ns, 0); /* two ops, two reports */
  }
  assert_ok(kvpool_buffer_read(cast_back, 0, got, sizeof got, &error));
  assert_memory_equal(got, source, sizeof source);
  assert_ok(kvpool_buffer_read(out, 0, got, sizeof got, &error));
  memset(&source[(size_t)7 * kv_elements], 0, kv_row_bytes); /* never stored: a new pool holds zeros */
  assert_memory_equal(got, source, sizeof source);

  /* Refused whole, and the error says where. */
  kvpool_step_clear(step);
  slots[7] = slots[3];
  assert_ok(kvpool_step_add_array(step, slots, rows, &slot_array, &error));
  assert_int_equal(slot_array, 0);
  assert_ok(kvpool_step_add_store(step, &layer, &in_view, slot_array, NULL, &error));
  assert_fails(kvpool_step_run(step, NULL, 0, &error), KVPOOL_INVALID_ARGUMENT, "slots");
  assert_int_equal(error.op, 0);
  assert_string_equal(error.array, "slots");
  assert_int_equal(error.position, 7);
  assert_int_equal(error.value, slots[3]);
  kvpool_step_destroy(step);
  kvpool_step_destroy(NULL);
  assert_ok(kvpool_buffer_release(in, &error));
  assert_ok(kvpool_buffer_release(out, &error));
  assert_ok(kvpool_buffer_release(cast_back, &error));
}

static void test_buffer_arrays(void **state) {
  (void)state;
  uint16_t source[3 * plain_elements], got[3 * plain_elements];
  fill_1_2_3(source, 3, plain_elements);
  int32_t slots[8] = {0};
  for (int i = 0; i < 3; i++) {
    slots[4 + i] = blocks[1] * plain_tokens_per_block + 2 * i;
  }
  kvpool_buffer *in = buffer_with(source, sizeof source), *array = buffer_with(slots, sizeof slots);
  kvpool_step *step;
  uint32_t number;
  const kvpool_layer layer = {.pool = pool, .region = 2, .layer = 0};
  const kvpool_view view = {.buffer = in, .rows = 3, .row_bytes = plain_row_bytes};
  assert_ok(kvpool_step_new(session, &step, &error));
  assert_ok(kvpool_step_add_buffer_array(step, array, 16, 3, &number, &error));
  assert_ok(kvpool_step_add_store(step, &layer, &view, number, NULL, &error));
  kvpool_op_report report;
  assert_ok(kvpool_step_run(step, &report, 1, &error));
  assert_int_equal(report.rows_stored, 3);
  const int32_t segments[] = {blocks[1], 0, 1, 0, blocks[1], 2, 3, 1, blocks[1], 4, 5, 2};
  assert_ok(kvpool_rows_load(session, &layer, segments, 3, 3, got, NULL, &report, &error));
  assert_memory_equal(got, source, sizeof source);
  kvpool_step_destroy(step);
  assert_ok(kvpool_buffer_release(in, &error));
  assert_ok(kvpool_buffer_release(array, &error));
}

static void test_step_checks(void **state) {
  (void)state;
  kvpool_buffer *buffer = buffer_with(bf16_1_2_3, sizeof bf16_1_2_3);
  kvpool_step *step;
  uint32_t number = 77;
  const kvpool_view view = {.buffer = buffer, .rows = 1, .row_bytes = plain_row_bytes};
  kvpool_layer layer = {.pool = pool, .region = 3, .layer = 0};
  assert_ok(kvpool_step_new(session, &step, &error));
  assert_fails(kvpool_step_add_store(step, &layer, &view, 0, NULL, &error), KVPOOL_UNKNOWN_REGION, "region 3");
  assert_int_equal(error.op, 0);
  layer = (kvpool_layer){.pool = pool, .region = 1, .layer = 2};
  assert_fails(kvpool_step_add_load(step, &layer, 0, 1, &view, NULL, &error), KVPOOL_UNKNOWN_LAYER, "layer 2");
  layer.layer = 0;
  assert_fails(kvpool_step_add_store(step, &layer, &view, 0, NULL, &error), KVPOOL_INVALID_ARGUMENT, "array 0");
  assert_fails(kvpool_step_add_load(step, &layer, 5, 1, &view, NULL, &error), KVPOOL_INVALID_ARGUMENT, "array 5");
  assert_string_equal(error.array, "segments");
  assert_fails(kvpool_step_add_array(step, blocks, 1 << 21, &number, &error), KVPOOL_TOO_LARGE, "2097152");
  char name[65];
  memset(name, 'a', 64);
  name[64] = '\0';
  assert_fails(kvpool_step_set_placement(step, name, &error), KVPOOL_INVALID_ARGUMENT, "64");
  assert_int_equal(number, 77);

  /* Two arrays that fit only one by one: the step is refused here, a queue would have been ended over it. */
  int32_t *large = calloc(1 << 19, sizeof *large);
  assert_non_null(large);
  assert_ok(kvpool_step_add_array(step, large, 1 << 19, &number, &error));
  assert_ok(kvpool_step_add_array(step, large, 1 << 19, &number, &error));
  assert_int_equal(number, 1);
  assert_fails(kvpool_step_run(step, NULL, 0, &error), KVPOOL_TOO_LARGE, "split it");
  free(large);
  kvpool_step_clear(step);
  for (int i = 0; i < 1024; i++) {
    assert_ok(kvpool_step_add_array(step, NULL, 0, &number, &error));
  }
  assert_fails(kvpool_step_add_array(step, NULL, 0, &number, &error), KVPOOL_TOO_LARGE, "1024 arrays");
  assert_fails(kvpool_step_add_buffer_array(step, buffer, 0, 1, &number, &error), KVPOOL_TOO_LARGE, "1024 arrays");
  kvpool_step_clear(step);
  assert_ok(kvpool_step_set_placement(step, "host:7", &error));
  assert_ok(kvpool_step_add_array(step, NULL, 0, &number, &error));
  layer.region = 2;
  assert_ok(kvpool_step_add_store(step, &layer, &view, 0, NULL, &error));
  assert_fails(kvpool_step_run(step, NULL, 0, &error), KVPOOL_WRONG_DEVICE, "host:7");
  assert_ok(kvpool_step_set_placement(step, NULL, &error));
  kvpool_step_destroy(step);
  assert_ok(kvpool_buffer_release(buffer, &error));
}

/* A step that stores one plain row to a slot of the first block. */
static kvpool_step *store_step(const kvpool_buffer *in, int32_t slot) {
  kvpool_step *step;
  uint32_t number;
  const kvpool_layer layer = {.pool = pool, .region = 2, .layer = 0};
  const kvpool_view view = {.buffer = in, .rows = 1, .row_bytes = plain_row_bytes};
  assert_ok(kvpool_step_new(session, &step, &error));
  assert_ok(kvpool_step_add_array(step, &slot, 1, &number, &error));
  assert_ok(kvpool_step_add_store(step, &layer, &view, number, NULL, &error));
  return step;
}

static void test_queue(void **state) {
  (void)state;
  enum { steps = 1000 };
  uint16_t row[plain_elements];
  fill_1_2_3(row, 1, plain_elements);
  kvpool_buffer *in = buffer_with(row, sizeof row);
  kvpool_step *step = store_step(in, blocks[0] * plain_tokens_per_block);
  kvpool_step *bad = store_step(in, 100 * plain_tokens_per_block);
  kvpool_queue *queue;
  recorder_init(&recorder);
  assert_ok(kvpool_queue_open(session, recorder_on_completion, &recorder, true, &queue, &error));
  assert_ok(kvpool_queue_wait(queue, &error)); /* nothing to wait for */
  for (uint64_t i = 1; i <= steps; i++) {
    uint64_t id = 0;
    kvpool_status status = kvpool_queue_submit(queue, i % 10 == 3 ? bad : step, &id, &error);
    if (status == KVPOOL_BUSY) {
      assert_ok(kvpool_queue_wait(queue, &error));
      status = kvpool_queue_submit(queue, i % 10 == 3 ? bad : step, &id, &error);
    }
    assert_ok(status);
    assert_int_equal(id, i);
  }
  assert_ok(kvpool_queue_wait(queue, &error));
  assert_int_equal(recorder_last_words(&recorder), steps);
  static int accepted[steps + 1], done[steps + 1];
  uint64_t last_done = 0;
  for (size_t i = 0; i < recorder.completion_count; i++) {
    const struct recorded_completion *completion = &recorder.completions[i];
    uint64_t id = completion->step_id;
    assert_in_range(id, 1, steps);
    if (completion->accepted) {
      assert_int_equal(done[id], 0); /* accepted comes first */
      accepted[id]++;
      continue;
    }
    done[id]++;
    if (id % 10 == 3) { /* a refused step ends nothing */
      assert_int_equal(completion->error.status, KVPOOL_OUT_OF_RANGE);
      assert_int_equal(completion->error.op, 0);
      assert_string_equal(completion->error.array, "slots");
      assert_int_equal(completion->error.value, 100 * plain_tokens_per_block);
    } else {
      assert_int_equal(completion->error.status, KVPOOL_OK);
      assert_int_equal(completion->report_count, 1);
      assert_int_equal(completion->first.rows_stored, 1);
      assert_true(id > last_done); /* in order */
      last_done = id;
    }
  }
  for (uint64_t id = 1; id <= steps; id++) {
    assert_int_equal(done[id], 1);
    assert_int_equal(accepted[id], id % 10 != 3);
  }
  kvpool_queue_close(queue);
  kvpool_queue_close(NULL);
  kvpool_step_destroy(step);
  kvpool_step_destroy(bad);
  assert_ok(kvpool_buffer_release(in, &error));
}

/* A chain: each completion submits the next step; blocking calls are refused there. */
struct chain {
  kvpool_queue *queue;
  const kvpool_step *step;
  atomic_int left;
  int refused;
};

static void chain_on_completion(void *context, const kvpool_completion *completion) {
  struct chain *chain = context;
  kvpool_server_info *info;
  kvpool_session *other;
  kvpool_client *another;
  uint8_t byte = 0;
  kvpool_error why;
  chain->refused += kvpool_server_info_get(client, &info, &why) == KVPOOL_INVALID_ARGUMENT;
  chain->refused += kvpool_session_open(client, NULL, &other, &why) == KVPOOL_INVALID_ARGUMENT;
  chain->refused += kvpool_client_connect(NULL, NULL, &another, &why) == KVPOOL_INVALID_ARGUMENT;
  chain->refused += kvpool_queue_wait(chain->queue, &why) == KVPOOL_INVALID_ARGUMENT;
  const kvpool_layer layer = {.pool = pool, .region = 2, .layer = 0};
  chain->refused += kvpool_rows_load(session, &layer, NULL, 0, 0, &byte, NULL, NULL, &why) == KVPOOL_INVALID_ARGUMENT;
  chain->refused += kvpool_blocks_dump(client, &layer, NULL, 0, 0, &byte, 0, &why) == KVPOOL_INVALID_ARGUMENT;
  int left = atomic_load(&chain->left) - 1;
  if (completion->error != NULL ||
      (left > 0 && kvpool_queue_submit(chain->queue, chain->step, NULL, &why) != KVPOOL_OK)) {
    left = -1000;
  }
  atomic_store(&chain->left, left);
}

static bool chain_is_done(void *context) {
  struct chain *chain = context;
  return atomic_load(&chain->left) <= 0;
}

static void test_callbacks(void **state) {
  (void)state;
  uint16_t row[plain_elements];
  fill_1_2_3(row, 1, plain_elements);
  kvpool_buffer *in = buffer_with(row, sizeof row);
  kvpool_step *step = store_step(in, blocks[0] * plain_tokens_per_block);
  struct chain chain = {.step = step};
  atomic_init(&chain.left, 20);
  assert_ok(kvpool_queue_open(session, chain_on_completion, &chain, false, &chain.queue, &error));
  assert_ok(kvpool_queue_submit(chain.queue, step, NULL, &error));
  assert_true(eventually(chain_is_done, &chain));
  kvpool_queue_close(chain.queue);
  assert_int_equal(atomic_load(&chain.left), 0);
  assert_int_equal(chain.refused, 20 * 6);
  kvpool_step_destroy(step);
  assert_ok(kvpool_buffer_release(in, &error));
}

/* With the executor stopped nothing gets done: the queue fills up, and empties when it goes on. */
static void test_queue_busy(void **state) {
  (void)state;
  uint16_t row[plain_elements];
  fill_1_2_3(row, 1, plain_elements);
  kvpool_buffer *in = buffer_with(row, sizeof row);
  kvpool_step *step = store_step(in, blocks[0] * plain_tokens_per_block);
  kvpool_server_info *info;
  kvpool_queue *queue;
  recorder_init(&recorder);
  assert_ok(kvpool_server_info_get(client, &info, &error));
  pid_t executor = (pid_t)kvpool_server_info_device(info, 0)->executor_pid;
  kvpool_server_info_destroy(info);
  assert_ok(kvpool_queue_open(session, recorder_on_completion, &recorder, false, &queue, &error));
  assert_int_equal(kill(executor, SIGSTOP), 0);
  for (int i = 0; i < queue_steps_max; i++) {
    assert_ok(kvpool_queue_submit(queue, step, NULL, &error));
  }
  assert_fails(kvpool_queue_submit(queue, step, NULL, &error), KVPOOL_BUSY, "256");
  assert_int_equal(recorder_last_words(&recorder), 0);
  assert_int_equal(kill(executor, SIGCONT), 0);
  kvpool_queue_close(queue); /* waits for its steps */
  assert_int_equal(recorder_last_words(&recorder), queue_steps_max);
  for (size_t i = 0; i < recorder.completion_count; i++) {
    assert_int_equal(recorder.completions[i].error.status, KVPOOL_OK);
  }
  kvpool_step_destroy(step);
  assert_ok(kvpool_buffer_release(in, &error));
}

static void test_rows(void **state) {
  (void)state;
  enum { rows = block_count * plain_tokens_per_block };
  static uint16_t stored[rows * plain_elements], loaded[(rows + 1) * plain_elements];
  fill_1_2_3(stored, rows, plain_elements);
  int32_t slots[rows];
  kvpool_segment segments[block_count];
  size_t count;
  kvpool_op_report report;
  const kvpool_layer layer = {.pool = pool, .region = 2, .layer = 0};
  assert_ok(kvpool_plan_slot_mapping(blocks, block_count, plain_tokens_per_block, 0, rows, slots, &error));
  assert_ok(kvpool_rows_store(session, &layer, stored, rows, plain_row_bytes, slots, rows, &report, &error));
  assert_int_equal(report.rows_stored, rows);
  /* Tokens 10 on, to row 1 on: row 0 is nobody's and becomes zero. */
  assert_ok(kvpool_plan_paged_range(blocks, block_count, plain_tokens_per_block, 10, rows, 1, segments, block_count,
                                    &count, &error));
  memset(loaded, 0x55, sizeof loaded);
  assert_ok(
      kvpool_rows_load(session, &layer, &segments[0].src_block, count, rows - 9, loaded, NULL, &report, &error));
  assert_int_equal(report.rows_loaded, rows - 10);
  const uint16_t zeros[plain_elements] = {0};
  assert_memory_equal(loaded, zeros, sizeof zeros);
  assert_memory_equal(&loaded[plain_elements], &stored[(size_t)10 * plain_elements],
                      (size_t)(rows - 10) * plain_row_bytes);
  assert_int_equal(loaded[(size_t)(rows - 9) * plain_elements], 0x5555);

  /* More rows than slots: the rest is ignored. None at all is fine. */
  assert_ok(kvpool_rows_store(session, &layer, stored, rows, plain_row_bytes, slots, 1, &report, &error));
  assert_int_equal(report.rows_stored, 1);
  assert_ok(kvpool_rows_store(session, &layer, NULL, 0, plain_row_bytes, NULL, 0, NULL, &error));
  assert_ok(kvpool_rows_load(session, &layer, NULL, 0, 0, NULL, NULL, NULL, &error));

  assert_fails(kvpool_rows_store(session, &layer, stored, 1, plain_row_bytes, slots, 2, NULL, &error),
               KVPOOL_INVALID_ARGUMENT, "2 slots but only 1");
  assert_fails(kvpool_rows_store(session, &layer, stored, 1, plain_row_bytes + 2, slots, 1, NULL, &error),
               KVPOOL_WRONG_FORMAT, "130");
  assert_fails(kvpool_rows_store(session, &layer, stored, UINT64_MAX, 1024, slots, 1, NULL, &error),
               KVPOOL_INVALID_ARGUMENT, "64 bits");
  assert_fails(kvpool_rows_store(session, &layer, stored, 1 << 21, 1, slots, 1 << 21, NULL, &error), KVPOOL_TOO_LARGE,
               "slots");
  assert_fails(kvpool_rows_load(session, &layer, slots, SIZE_MAX / 4, 1, loaded, NULL, NULL, &error),
               KVPOOL_TOO_LARGE, "segments");
  assert_fails(kvpool_rows_load(session, &layer, slots, 1, UINT64_MAX, loaded, NULL, NULL, &error),
               KVPOOL_INVALID_ARGUMENT, "64 bits");
  const int32_t past[] = {blocks[0], 0, 65, 0};
  assert_fails(kvpool_rows_load(session, &layer, past, 1, 65, loaded, NULL, NULL, &error), KVPOOL_OUT_OF_RANGE, "65");
  assert_string_equal(error.array, "segments");
  const kvpool_layer unknown = {.pool = pool, .region = 2, .layer = 1};
  assert_fails(kvpool_rows_load(session, &unknown, past, 1, 65, loaded, NULL, NULL, &error), KVPOOL_UNKNOWN_LAYER,
               "plain");
}

/* Rows of more than one piece, in and out. */
static void test_rows_in_pieces(void **state) {
  (void)state;
  enum { rows = 1500, blocks_needed = (rows + kv_tokens_per_block - 1) / kv_tokens_per_block }; /* 1.5 MB of BF16 */
  uint16_t *stored = malloc((size_t)rows * kv_row_bytes), *loaded = malloc((size_t)rows * kv_row_bytes);
  assert_true(stored != NULL && loaded != NULL);
  fill_1_2_3(stored, rows, kv_elements);
  int32_t table[blocks_needed], slots[rows];
  kvpool_segment segments[blocks_needed];
  size_t count;
  const kvpool_layer layer = {.pool = pool, .region = 0, .layer = 0};
  assert_ok(kvpool_blocks_allocate(session, pool, blocks_needed, table, &error));
  assert_ok(kvpool_plan_slot_mapping(table, blocks_needed, kv_tokens_per_block, 0, rows, slots, &error));
  assert_ok(kvpool_plan_paged_range(table, blocks_needed, kv_tokens_per_block, 0, rows, 0, segments, blocks_needed,
                                    &count, &error));
  assert_ok(kvpool_rows_store(session, &layer, stored, rows, kv_row_bytes, slots, rows, NULL, &error));
  assert_ok(kvpool_rows_load(session, &layer, &segments[0].src_block, count, rows, loaded, NULL, NULL, &error));
  assert_memory_equal(loaded, stored, (size_t)rows * kv_row_bytes);
  assert_ok(kvpool_blocks_free(session, pool, table, blocks_needed, &error));
  free(loaded);
  free(stored);
}

/* Rows of 1.0 in index_mxfp8: the largest of a group is 1.0, the smallest power of two s with 1.0 / s <= 448 is 2^-8,
 * so that the scale byte is 127 - 8 and the code that of 256.0: 0x78. */
static void test_index_rows_and_records(void **state) {
  (void)state;
  uint16_t row[index_elements];
  uint8_t codes[2 * index_elements], scales[8];
  for (int i = 0; i < index_elements; i++) {
    row[i] = 0x3F80;
  }
  const kvpool_layer layer = {.pool = pool, .region = 1, .layer = 1};
  const int32_t slots[] = {blocks[2] * kv_tokens_per_block + 5};
  const int32_t segments[] = {blocks[2], 5, 6, 1, -1, 0, 1, 0};
  assert_ok(kvpool_rows_store(session, &layer, row, 1, sizeof row, slots, 1, NULL, &error));
  memset(codes, 0x55, sizeof codes);
  memset(scales, 0x55, sizeof scales);
  assert_ok(kvpool_rows_load(session, &layer, segments, 2, 2, codes, scales, NULL, &error));
  for (int i = 0; i < index_elements; i++) {
    assert_int_equal(codes[i], 0);
    assert_int_equal(codes[index_elements + i], 0x78);
  }
  const uint8_t expected_scales[] = {0, 0, 0, 0, 119, 119, 119, 119};
  assert_memory_equal(scales, expected_scales, sizeof scales);
  assert_fails(kvpool_rows_load(session, &layer, segments, 2, 2, codes, NULL, NULL, &error), KVPOOL_INVALID_ARGUMENT,
               "scales");

  kvpool_record_list *list;
  assert_ok(kvpool_record_list_get(client, &layer, "host:0", slots, 1, &list, &error));
  assert_int_equal(kvpool_record_list_count(list), 1);
  const kvpool_record *record = kvpool_record_list_item(list, 0);
  assert_int_equal(record->slot, slots[0]);
  assert_int_equal(record->raw_bytes, index_elements + 4);
  assert_memory_equal(record->raw, &codes[index_elements], index_elements);
  assert_memory_equal(record->raw + index_elements, &expected_scales[4], 4);
  assert_int_equal(record->scale_count, 4);
  assert_int_equal(record->value_count, index_elements);
  for (uint32_t i = 0; i < record->scale_count; i++) {
    assert_true(record->scales[i] == 1.0F / 256);
  }
  for (uint32_t i = 0; i < record->value_count; i++) {
    assert_true(record->values[i] == 1.0F);
  }
  kvpool_record_list_destroy(list);
  kvpool_record_list_destroy(NULL);
  const int32_t past[] = {100 * kv_tokens_per_block};
  assert_fails(kvpool_record_list_get(client, &layer, NULL, past, 1, &list, &error), KVPOOL_OUT_OF_RANGE, "1600");
  assert_fails(kvpool_record_list_get(client, &layer, NULL, blocks, 1025, &list, &error), KVPOOL_TOO_LARGE, "1025");

  /* The block as it lies in memory: codes of all tokens, then scales of all. */
  uint64_t stride = kvpool_pool_region(pool, 1)->block_stride_bytes;
  uint8_t *dump = malloc(2 * stride);
  assert_non_null(dump);
  memset(dump, 0x55, 2 * stride);
  assert_ok(kvpool_blocks_dump(client, &layer, NULL, (uint32_t)blocks[2], 1, dump, 2 * stride, &error));
  assert_memory_equal(dump + (size_t)5 * index_elements, &codes[index_elements], index_elements);
  assert_memory_equal(dump + (size_t)16 * index_elements + 20, &expected_scales[4], 4);
  assert_int_equal(dump[stride], 0x55);
  assert_fails(kvpool_blocks_dump(client, &layer, NULL, 0, 3, dump, 2 * stride, &error), KVPOOL_OUT_OF_RANGE,
               "3 blocks");
  assert_fails(kvpool_blocks_dump(client, &layer, NULL, 99, 2, dump, 2 * stride, &error), KVPOOL_OUT_OF_RANGE, "100");
  free(dump);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_step_run),
      cmocka_unit_test(test_buffer_arrays),
      cmocka_unit_test(test_step_checks),
      cmocka_unit_test(test_queue),
      cmocka_unit_test(test_callbacks),
      cmocka_unit_test(test_queue_busy),
      cmocka_unit_test(test_rows),
      cmocka_unit_test(test_rows_in_pieces),
      cmocka_unit_test(test_index_rows_and_records),
  };
  int failed = cmocka_run_group_tests_name("steps", tests, setup, teardown);
  process_cleanup();
  return failed;
}
