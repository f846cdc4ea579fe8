/* Replays of libkvpool on a host device, with a kvpoold of their own: what a captured graph would do, this process does
 * itself, point by point. Both ways of waiting, changing slots, failures.
 *
 * A row that is one number over and over is the weight with that number's sign after the norm, so that what is to be
 * stored is known on paper and shows when rows and weight were read.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/client/check.h"
#include "tests/client/process.h"

enum { layers = 5, elements = 64, row_bytes = 2 * elements, tokens_per_block = 64, block_count = 4, replays = 20 };

static struct process daemon_process;
static kvpool_client *client;
static kvpool_pool *pool;
static kvpool_session *session;
static kvpool_attachment *attachment;
static kvpool_pool_map *map;
static kvpool_buffer *rows; /* a row, then the weight */
static kvpool_error error;
static int32_t blocks[block_count];

static int setup(void **state) {
  (void)state;
  process_init(&daemon_process);
  process_start_daemon(&daemon_process);
  const kvpool_connect_options options = {
      .size_bytes = sizeof options, .timeout_ms = 30000, .wait_until_serving = true};
  char socket[128];
  kvpool_attach_options attach = {.size_bytes = sizeof attach, .socket = socket};
  (void)snprintf(socket, sizeof socket, "%s/kvpoold.attach.sock", daemon_process.directory);
  if (kvpool_client_connect(daemon_process.socket, &options, &client, &error) != KVPOOL_OK ||
      pool_wait(client, &pool, &error) != KVPOOL_OK ||
      kvpool_session_open(client, NULL, &session, &error) != KVPOOL_OK ||
      kvpool_blocks_allocate(session, pool, block_count, blocks, &error) != KVPOOL_OK) {
    goto err_setup;
  }
  attach.session_id = kvpool_session_id(session);
  kvpool_session_secret(session, attach.secret);
  if (kvpool_attach(&attach, &attachment, &error) != KVPOOL_OK ||
      kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error) != KVPOOL_OK ||
      kvpool_attachment_create_buffer(attachment, 4096, &rows, &error) != KVPOOL_OK) {
    goto err_setup;
  }
  return 0;

err_setup:
  (void)fprintf(stderr, "setup: %s\n", error.text);
  process_cleanup();
  return -1;
}

static int teardown(void **state) {
  (void)state;
  (void)kvpool_buffer_release(rows, &error);
  kvpool_pool_map_destroy(map);
  kvpool_detach(attachment);
  kvpool_session_close(session);
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
  process_stop(&daemon_process);
  process_deinit(&daemon_process);
  return 0;
}

/* ---- what is stored ---- */

static uint16_t bf16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static void row_fill(size_t row, float value) {
  uint16_t *out = (uint16_t *)kvpool_buffer_data(rows) + row * elements;
  for (size_t i = 0; i < elements; i++) {
    out[i] = bf16_of(value);
  }
}

static void assert_record(int32_t slot, float value) {
  const kvpool_mapped_region *region = kvpool_pool_map_region(map, 2);
  const uint8_t *record = (const uint8_t *)region->base +
                          (uint64_t)(slot / tokens_per_block) * region->block_stride_bytes +
                          (uint64_t)(slot % tokens_per_block) * region->token_stride_bytes;
  for (size_t i = 0; i < elements; i++) {
    uint16_t found;
    memcpy(&found, record + 2 * i, sizeof found);
    assert_int_equal(found, bf16_of(value));
  }
}

static int32_t slot_of(unsigned replay, unsigned layer) {
  const unsigned token = replay * layers + layer;
  return blocks[token / tokens_per_block] * tokens_per_block + (int32_t)(token % tokens_per_block);
}

static void op_add(kvpool_step *step, int32_t slot, uint32_t begins, uint32_t ends) {
  const int32_t position = 0;
  kvpool_fused_store fused = {
      .layer = {.pool = kvpool_pool_map_pool(map), .region = 2, .layer = 0},
      .source = {.buffer = rows, .rows = 1, .row_bytes = row_bytes},
      .norm_weight = {.buffer = rows, .offset_bytes = row_bytes, .rows = 1, .row_bytes = row_bytes},
      .eps = 1e-6F,
  };
  assert_ok(kvpool_step_add_array(step, &slot, 1, &fused.slots, &error));
  assert_ok(kvpool_step_add_array(step, &position, 1, &fused.positions, &error));
  assert_ok(kvpool_step_add_fused_store(step, &fused, &error));
  assert_ok(kvpool_step_set_replay_points(step, begins, ends, &error));
}

/* The step of one replay: an op a layer, each with a slot of its own. */
static void step_fill(kvpool_step *step, unsigned replay) {
  kvpool_step_clear(step);
  for (unsigned layer = 0; layer < layers; layer++) {
    op_add(step, slot_of(replay, layer), layer + 1, layer + 1);
  }
}

static const kvpool_completion *await(uint64_t step_id) {
  const kvpool_completion *completion;
  assert_ok(kvpool_attachment_wait(attachment, 60000, &completion, &error));
  assert_int_equal(completion->step_id, step_id);
  return completion;
}

static kvpool_replay *replay_new(kvpool_replay_mode mode, uint32_t deadline_ms) {
  const kvpool_replay_options options = {.size_bytes = sizeof options, .mode = mode, .deadline_ms = deadline_ms};
  kvpool_replay *replay;
  assert_ok(kvpool_replay_new(attachment, layers, &options, &replay, &error));
  return replay;
}

/* ---- tests ---- */

/* `waits`: at every layer, or at the end alone. */
static void replays_run(kvpool_replay_mode mode, bool waits) {
  kvpool_replay *replay = replay_new(mode, 0);
  kvpool_step *step;
  uint64_t ids[replays];
  assert_int_equal(kvpool_replay_mode_get(replay), mode);
  assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
  step_fill(step, 0);
  assert_ok(kvpool_replay_post(replay, step, &ids[0], &error));
  for (unsigned i = 0; i < replays; i++) {
    if (i + 1 < replays) { /* one ahead */
      step_fill(step, i + 1);
      assert_ok(kvpool_replay_post(replay, step, &ids[i + 1], &error));
    }
    row_fill(0, i % 2 == 0 ? 3 : -3);
    row_fill(1, (float)(i + 1));
    assert_ok(kvpool_replay_begin(replay, NULL, &error));
    for (unsigned layer = 0; layer < layers; layer++) {
      if (waits) {
        row_fill(0, layer % 2 == 0 ? 3 : -3);
        assert_ok(kvpool_replay_signal_and_wait(replay, NULL, layer + 1, &error));
        assert_record(slot_of(i, layer), layer % 2 == 0 ? (float)(i + 1) : -(float)(i + 1));
      } else {
        assert_ok(kvpool_replay_signal(replay, NULL, layer + 1, &error));
      }
    }
    assert_ok(kvpool_replay_end(replay, NULL, layers, &error));
    assert_ok(kvpool_replay_check(replay, &error));
    assert_record(slot_of(i, 0), waits || i % 2 == 0 ? (float)(i + 1) : -(float)(i + 1));
    const kvpool_completion *done = await(ids[i]);
    assert_null(done->error);
    assert_int_equal(done->report_count, layers);
    assert_int_equal(done->reports[layers - 1].rows_stored, 1);
  }
  kvpool_step_destroy(step);
  kvpool_replay_destroy(replay);
}

static void test_one_launch(void **state) {
  (void)state;
  replays_run(KVPOOL_REPLAY_ONE_LAUNCH, true);
  replays_run(KVPOOL_REPLAY_ONE_LAUNCH, false);
}

static void test_by_op(void **state) {
  (void)state;
  replays_run(KVPOOL_REPLAY_BY_OP, true);
  replays_run(KVPOOL_REPLAY_BY_OP, false);
}

/* A graph that never signals its second point: its step fails, and so do the graph's waits, at once. */
static void test_deadline(void **state) {
  (void)state;
  const kvpool_replay_mode modes[] = {KVPOOL_REPLAY_ONE_LAUNCH, KVPOOL_REPLAY_BY_OP};
  for (size_t i = 0; i < 2; i++) {
    kvpool_replay *replay = replay_new(modes[i], 50);
    kvpool_step *step;
    uint64_t id;
    assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
    step_fill(step, 0);
    assert_ok(kvpool_replay_post(replay, step, &id, &error));
    assert_ok(kvpool_replay_begin(replay, NULL, &error));
    assert_ok(kvpool_replay_signal_and_wait(replay, NULL, 1, &error));
    assert_ok(kvpool_replay_check(replay, &error));
    const kvpool_completion *failed = await(id);
    assert_non_null(failed->error);
    assert_int_equal(failed->error->status, KVPOOL_DEADLINE_EXCEEDED);
    assert_int_equal(failed->error->op, 1);
    assert_ok(kvpool_replay_wait(replay, NULL, 2, &error));
    assert_fails(kvpool_replay_check(replay, &error), KVPOOL_CANCELLED, "step");
    /* A launch that was under way already doesn't hang: the poison stays, whatever begins. */
    assert_ok(kvpool_replay_begin(replay, NULL, &error));
    assert_ok(kvpool_replay_wait(replay, NULL, 1, &error));
    kvpool_step_destroy(step);
    kvpool_replay_destroy(replay);
  }
}

/* The step has been ended; its deadline would be another error. */
static void expect_cancelled(uint64_t step_id) {
  const kvpool_completion *completion = await(step_id);
  assert_non_null(completion->error);
  assert_int_equal(completion->error->status, KVPOOL_CANCELLED);
}

/* A step with a block of a later lease is refused, and with it the replay is over: its waits, the step behind it. */
static void test_refused(void **state) {
  (void)state;
  const kvpool_replay_mode modes[] = {KVPOOL_REPLAY_ONE_LAUNCH, KVPOOL_REPLAY_BY_OP};
  for (size_t i = 0; i < 2; i++) {
    kvpool_replay *replay = replay_new(modes[i], 0);
    kvpool_step *step, *good;
    uint64_t refused, behind;
    int32_t block;
    assert_ok(kvpool_blocks_allocate(session, pool, 1, &block, &error));
    assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
    assert_ok(kvpool_attachment_step_new(attachment, &good, &error));
    op_add(step, block * tokens_per_block, 1, 1);
    step_fill(good, 0);
    assert_ok(kvpool_replay_post(replay, step, &refused, &error));
    /* In BY_OP's timelines the executor may have told it by now. */
    const kvpool_status status = kvpool_replay_post(replay, good, &behind, &error);
    assert_true(status == KVPOOL_OK || (status == KVPOOL_CANCELLED && modes[i] == KVPOOL_REPLAY_BY_OP));
    const kvpool_completion *completion = await(refused);
    assert_non_null(completion->error);
    assert_int_equal(completion->error->status, KVPOOL_STALE_BLOCK);
    assert_fails(kvpool_replay_check(replay, &error), KVPOOL_CANCELLED, "stale_block");
    if (status == KVPOOL_OK) {
      expect_cancelled(behind);
    }
    kvpool_attachment_saw_epoch(attachment, kvpool_session_epoch(session));
    assert_fails(kvpool_replay_post(replay, step, NULL, &error), KVPOOL_CANCELLED, "stale_block");
    assert_ok(kvpool_replay_begin(replay, NULL, &error));
    assert_ok(kvpool_replay_signal_and_wait(replay, NULL, 1, &error));
    kvpool_replay_destroy(replay);

    /* Another one, told the epoch. */
    replay = replay_new(modes[i], 0);
    assert_ok(kvpool_replay_post(replay, step, &refused, &error));
    assert_ok(kvpool_replay_begin(replay, NULL, &error));
    assert_ok(kvpool_replay_signal_and_wait(replay, NULL, 1, &error));
    assert_ok(kvpool_replay_check(replay, &error));
    assert_null(await(refused)->error);
    kvpool_step_destroy(step);
    kvpool_step_destroy(good);
    kvpool_replay_destroy(replay);
  }
}

/* An abort ends the steps as well: another replay's come next, and nothing is left to wait for. */
static void test_abort_ends_steps(void **state) {
  (void)state;
  const kvpool_replay_mode modes[] = {KVPOOL_REPLAY_ONE_LAUNCH, KVPOOL_REPLAY_BY_OP};
  for (size_t i = 0; i < 4; i++) {
    kvpool_replay *replay = replay_new(modes[i % 2], 0), *next = replay_new(modes[i % 2], 0);
    kvpool_step *step;
    uint64_t ids[3];
    assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
    step_fill(step, 0);
    assert_ok(kvpool_replay_post(replay, step, &ids[0], &error));
    assert_ok(kvpool_replay_post(replay, step, &ids[1], &error));
    if (i / 2 == 1) { /* the graph of the first one is half done */
      assert_ok(kvpool_replay_begin(replay, NULL, &error));
      assert_ok(kvpool_replay_signal_and_wait(replay, NULL, 1, &error));
    }
    kvpool_replay_abort(replay);
    if (i / 2 == 1) {
      assert_ok(kvpool_replay_signal(replay, NULL, 2, &error));
    }
    assert_ok(kvpool_replay_post(next, step, &ids[2], &error));
    expect_cancelled(ids[0]);
    expect_cancelled(ids[1]);
    kvpool_replay_destroy(replay);
    assert_ok(kvpool_replay_begin(next, NULL, &error));
    for (uint32_t layer = 1; layer <= layers; layer++) {
      assert_ok(kvpool_replay_signal_and_wait(next, NULL, layer, &error));
    }
    assert_ok(kvpool_replay_check(next, &error));
    assert_null(await(ids[2])->error);
    kvpool_step_destroy(step);
    kvpool_replay_destroy(next);
  }
}

/* Nobody has posted: the graph's own deadline, and an abort. */
static void test_waits_in_vain(void **state) {
  (void)state;
  const kvpool_replay_mode modes[] = {KVPOOL_REPLAY_ONE_LAUNCH, KVPOOL_REPLAY_BY_OP};
  for (size_t i = 0; i < 2; i++) {
    kvpool_replay *replay = replay_new(modes[i], 20);
    assert_ok(kvpool_replay_begin(replay, NULL, &error));
    assert_ok(kvpool_replay_signal_and_wait(replay, NULL, 3, &error));
    assert_fails(kvpool_replay_check(replay, &error), KVPOOL_DEADLINE_EXCEEDED, "point 3");
    kvpool_replay_destroy(replay);
    replay = replay_new(modes[i], 0);
    kvpool_replay_abort(replay);
    assert_ok(kvpool_replay_begin(replay, NULL, &error));
    assert_ok(kvpool_replay_signal_and_wait(replay, NULL, 1, &error));
    assert_int_equal(kvpool_replay_check(replay, &error), KVPOOL_CANCELLED);
    kvpool_replay_destroy(replay);
  }
  kvpool_replay_destroy(NULL);
}

static void test_refusals(void **state) {
  (void)state;
  kvpool_replay *replay;
  kvpool_step *step;
  kvpool_replay_options options = {.size_bytes = 3};
  assert_fails(kvpool_replay_new(attachment, layers, &options, &replay, &error), KVPOOL_INVALID_ARGUMENT,
               "size_bytes");
  assert_fails(kvpool_replay_new(attachment, 0, NULL, &replay, &error), KVPOOL_OUT_OF_RANGE, "0 points");
  options = (kvpool_replay_options){.size_bytes = sizeof options, .mode = (kvpool_replay_mode)7};
  assert_fails(kvpool_replay_new(attachment, layers, &options, &replay, &error), KVPOOL_INVALID_ARGUMENT, "mode 7");
  assert_ok(kvpool_replay_new(attachment, layers, NULL, &replay, &error));
  assert_int_equal(kvpool_replay_mode_get(replay), KVPOOL_REPLAY_ONE_LAUNCH);
  assert_fails(kvpool_replay_signal(replay, NULL, layers + 1, &error), KVPOOL_OUT_OF_RANGE, "point 6");
  assert_fails(kvpool_replay_wait(replay, NULL, 0, &error), KVPOOL_OUT_OF_RANGE, "point 0");

  assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
  assert_fails(kvpool_replay_post(replay, step, NULL, &error), KVPOOL_INVALID_ARGUMENT, "no op");
  assert_fails(kvpool_step_set_replay_points(step, 1, 1, &error), KVPOOL_INVALID_ARGUMENT, "no op");
  step_fill(step, 0);
  assert_fails(kvpool_step_set_replay_points(step, 0, 0, &error), KVPOOL_INVALID_ARGUMENT, "point");
  assert_ok(kvpool_step_set_replay_points(step, layers, layers + 3, &error));
  assert_fails(kvpool_replay_post(replay, step, NULL, &error), KVPOOL_OUT_OF_RANGE, "point 8");
  step_fill(step, 0);
  assert_ok(kvpool_step_set_wait(step, 3, 1, &error));
  assert_fails(kvpool_replay_post(replay, step, NULL, &error), KVPOOL_INVALID_ARGUMENT, "word 3");
  assert_ok(kvpool_attachment_post(attachment, step, NULL, NULL, &error)); /* points, and no replay */
  const kvpool_completion *refused;
  assert_ok(kvpool_attachment_wait(attachment, 60000, &refused, &error));
  assert_non_null(refused->error);
  assert_int_equal(refused->error->status, KVPOOL_OUT_OF_RANGE);
  kvpool_step_destroy(step);
  kvpool_replay_destroy(replay);
}

/* Of every mode alike: the first op waits for the graph, and points come in order. */
static void test_points_in_order(void **state) {
  (void)state;
  static const struct {
    uint32_t points[2][2];
    const char *text; /* NULL: it is taken */
  } cases[] = {
      {{{0, 1}, {1, 2}}, "op 0 begins at no point"},
      {{{1, 3}, {2, 1}}, "op 1 ends at point 1, one before it at 3"},
      {{{1, 2}, {2, 2}}, "op 1 ends at point 2, one before it at 2"},
      {{{2, 2}, {1, 3}}, "op 1 begins at point 1, one before it at 2"},
      {{{2, 0}, {2, 3}}, NULL},
      {{{1, 2}, {0, 3}}, NULL},
  };
  const kvpool_replay_mode modes[] = {KVPOOL_REPLAY_ONE_LAUNCH, KVPOOL_REPLAY_BY_OP};
  for (size_t i = 0; i < 2 * sizeof cases / sizeof cases[0]; i++) {
    kvpool_replay *replay = replay_new(modes[i % 2], 0);
    kvpool_step *step;
    uint64_t id;
    assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
    op_add(step, slot_of(0, 0), cases[i / 2].points[0][0], cases[i / 2].points[0][1]);
    op_add(step, slot_of(0, 1), cases[i / 2].points[1][0], cases[i / 2].points[1][1]);
    if (cases[i / 2].text != NULL) {
      assert_fails(kvpool_replay_post(replay, step, &id, &error), KVPOOL_INVALID_ARGUMENT, cases[i / 2].text);
    } else {
      assert_ok(kvpool_replay_post(replay, step, &id, &error));
      assert_ok(kvpool_replay_begin(replay, NULL, &error));
      assert_ok(kvpool_replay_signal(replay, NULL, 2, &error));
      assert_ok(kvpool_replay_end(replay, NULL, 3, &error));
      assert_ok(kvpool_replay_check(replay, &error));
      assert_null(await(id)->error);
    }
    kvpool_step_destroy(step);
    kvpool_replay_destroy(replay);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_one_launch), cmocka_unit_test(test_by_op),
      cmocka_unit_test(test_deadline),   cmocka_unit_test(test_waits_in_vain),
      cmocka_unit_test(test_refusals),   cmocka_unit_test(test_points_in_order),
      cmocka_unit_test(test_refused),    cmocka_unit_test(test_abort_ends_steps),
  };
  int failed = cmocka_run_group_tests_name("replay", tests, setup, teardown);
  process_cleanup();
  return failed;
}
