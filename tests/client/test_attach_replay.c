/* Replays whose steps are refused, fail or are lost, and their attachments' ends, against a daemon's end in this process:
 * what a replay says of it, and that nothing goes on waiting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include <pthread.h>
#include <sys/mman.h>

#include "tests/client/check.h"
#include "tests/client/fake_attach.h"

enum { points = 2, timeout_ms = 60000, row_bytes = 1024 };

static struct fake_attach fake;
static kvpool_attachment *attachment;
static kvpool_pool_map *map;
static kvpool_buffer *rows;
static kvpool_step *step;
static kvpool_replay *replay;
static uint32_t by_op_word; /* the graph's */
static kvpool_error error;

/* In what every test is run: the modes, on a host. */
static const kvpool_replay_mode modes[] = {KVPOOL_REPLAY_ONE_LAUNCH, KVPOOL_REPLAY_BY_OP};

static void attach(void) {
  const kvpool_attach_options options = {.size_bytes = sizeof options, .socket = fake.path, .timeout_ms = timeout_ms};
  assert_ok(kvpool_attach(&options, &attachment, &error));
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_NOTHING, &map, &error));
  assert_ok(kvpool_attachment_create_buffer(attachment, 4096, &rows, &error));
  const int32_t slot = 0, position = 0;
  kvpool_fused_store fused = {
      .layer = {.pool = kvpool_pool_map_pool(map), .region = 0, .layer = 0},
      .source = {.buffer = rows, .rows = 1, .row_bytes = row_bytes},
      .norm_weight = {.buffer = rows, .offset_bytes = row_bytes, .rows = 1, .row_bytes = row_bytes},
      .eps = 1e-6F,
  };
  assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
  assert_ok(kvpool_step_add_array(step, &slot, 1, &fused.slots, &error));
  assert_ok(kvpool_step_add_array(step, &position, 1, &fused.positions, &error));
  assert_ok(kvpool_step_add_fused_store(step, &fused, &error));
  assert_ok(kvpool_step_set_replay_points(step, 1, 1, &error));
}

static void give_back(void) {
  kvpool_step_destroy(step);
  (void)kvpool_buffer_release(rows, &error);
  kvpool_pool_map_destroy(map);
}

static int setup(void **state) {
  (void)state;
  fake_start(&fake);
  attach();
  return 0;
}

static int teardown(void **state) {
  (void)state;
  give_back();
  kvpool_detach(attachment);
  fake_stop(&fake);
  return 0;
}

static void replay_make(kvpool_replay_mode mode) {
  const kvpool_replay_options options = {.size_bytes = sizeof options, .mode = mode};
  /* The library gives out the first word that is free. */
  assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_WORKER, &by_op_word, NULL, &error));
  kvpool_timeline_free(attachment, by_op_word);
  assert_ok(kvpool_replay_new(attachment, points, &options, &replay, &error));
  assert_ok(kvpool_replay_check(replay, &error));
}

static uint64_t posted(void) {
  static uint8_t payload[fake_command_arena_bytes];
  struct kvp_ring_record record;
  uint64_t id;
  assert_ok(kvpool_replay_post(replay, step, &id, &error));
  assert_true(fake_take(&fake, &record, payload, sizeof payload));
  assert_int_equal(record.tag, id);
  return id;
}

/* The word that the executor would look at, in the fake's memory: the latest buffer, or the timelines. */
static uint64_t start_word(kvpool_replay_mode mode) {
  if (mode == KVPOOL_REPLAY_BY_OP) {
    return atomic_load(&fake.words[by_op_word].value);
  }
  uint64_t *words = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fake.buffer_fd, 0);
  assert_true(words != MAP_FAILED);
  const uint64_t found = words[0];
  (void)munmap(words, 4096);
  return found;
}

/* A graph's waits end without their points; one that did not would last for half a minute. */
static void expect_over(kvpool_status status, const char *text) {
  assert_fails(kvpool_replay_check(replay, &error), status, text);
  assert_ok(kvpool_replay_begin(replay, NULL, &error));
  assert_ok(kvpool_replay_signal_and_wait(replay, NULL, 1, &error));
  assert_ok(kvpool_replay_end(replay, NULL, points, &error));
  assert_fails(kvpool_replay_check(replay, &error), status, text);
  assert_fails(kvpool_replay_post(replay, step, NULL, &error), status, text);
}

static const kvpool_completion *next(void) {
  const kvpool_completion *completion;
  assert_ok(kvpool_attachment_poll(attachment, &completion, &error));
  assert_non_null(completion);
  return completion;
}

/* ---- tests ---- */

static void test_step_refused(void **state) {
  (void)state;
  const enum kvp_completion_kind kinds[] = {KVP_COMPLETION_REFUSED, KVP_COMPLETION_FAILED};
  const char *texts[] = {"was refused: stale_block: op 3 store: slots[5] = -8",
                         "failed: stale_block: op 3 store: slots[5] = -8"};
  for (int i = 0; i < 4; i++) {
    replay_make(modes[i % 2]);
    const uint64_t first = posted(), second = posted();
    fake_done(&fake, first, 1);
    fake_fail(&fake, kinds[i / 2], second, KVP_STALE_BLOCK);
    assert_int_equal(next()->step_id, first);
    assert_ok(
        kvpool_replay_check(replay, &error)); /* a step that is done ends nothing, and the next isn't told yet */
    assert_int_equal(next()->error->status, KVPOOL_STALE_BLOCK);
    expect_over(KVPOOL_CANCELLED, texts[i / 2]);
    assert_int_equal(error.op, 3);
    assert_string_equal(error.array, "slots");
    assert_int_equal(error.position, 5);
    assert_int_equal(error.value, -8);
    assert_int_equal(start_word(modes[i % 2]), KVP_TIMELINE_POISON); /* for steps behind it */
    kvpool_replay_destroy(replay);
  }
}

static void *refuse_and_do(void *context) {
  const uint64_t *refused = context;
  static uint8_t payload[fake_command_arena_bytes];
  struct kvp_ring_record record;
  while (!fake_take(&fake, &record, payload, sizeof payload)) {
  }
  fake_fail(&fake, KVP_COMPLETION_REFUSED, *refused, KVP_NOT_OWNER);
  fake_done(&fake, record.tag, 0);
  return NULL;
}

/* Its completion is kept for who polls next, while another step is run. */
static void test_refusal_kept(void **state) {
  (void)state;
  kvpool_step *other;
  assert_ok(kvpool_attachment_step_new(attachment, &other, &error));
  for (int i = 0; i < 2; i++) {
    replay_make(modes[i]);
    uint64_t refused = posted();
    pthread_t executor;
    assert_int_equal(pthread_create(&executor, NULL, refuse_and_do, &refused), 0);
    assert_ok(kvpool_attachment_run(attachment, other, NULL, NULL, 0, &error));
    (void)pthread_join(executor, NULL);
    expect_over(KVPOOL_CANCELLED, "not_owner");
    assert_int_equal(next()->step_id, refused);
    kvpool_replay_destroy(replay);
  }
  kvpool_step_destroy(other);
}

/* A step that outlives its replay is told, and touches nothing of it. */
static void test_destroyed_before_its_step(void **state) {
  (void)state;
  for (int i = 0; i < 2; i++) {
    replay_make(modes[i]);
    const uint64_t id = posted();
    kvpool_replay_abort(replay);
    assert_int_equal(start_word(modes[i]), KVP_TIMELINE_POISON);
    expect_over(KVPOOL_CANCELLED, "aborted");
    assert_int_equal(start_word(modes[i]), KVP_TIMELINE_POISON); /* whatever the graph has signalled since */
    kvpool_replay_destroy(replay);
    fake_fail(&fake, KVP_COMPLETION_FAILED, id, KVP_CANCELLED);
    assert_int_equal(next()->error->status, KVPOOL_CANCELLED);
  }
}

static void *wait_for_point(void *context) {
  (void)context;
  kvpool_error ignored;
  (void)kvpool_replay_wait(replay, NULL, points, &ignored);
  return NULL;
}

/* Whoever finds out first: a wait, a check, or the attachment. */
static void test_executor_lost(void **state) {
  (void)state;
  for (int i = 0; i < 6; i++) {
    replay_make(modes[i % 2]);
    const uint64_t id = posted();
    if (i / 2 == 0) { /* the graph waits, and another thread takes the loss, which the status doesn't tell */
      pthread_t graph;
      assert_ok(kvpool_replay_begin(replay, NULL, &error));
      assert_int_equal(pthread_create(&graph, NULL, wait_for_point, NULL), 0);
      fake_tell_lost(&fake, false);
      assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_DEVICE_LOST, "signal 9");
      (void)pthread_join(graph, NULL);
    } else {
      fake_tell_lost(&fake, true);
    }
    if (i / 2 == 1) {
      (void)wait_for_point(NULL);
    }
    expect_over(KVPOOL_DEVICE_LOST, "the executor that the replay was made with has died");
    assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_DEVICE_LOST, "signal 9");
    kvpool_replay *another;
    assert_fails(kvpool_replay_new(attachment, points, NULL, &another, &error), KVPOOL_DEVICE_LOST, "signal 9");
    fake_restore(&fake);
    assert_ok(kvpool_attachment_state(attachment, &error));
    expect_over(KVPOOL_DEVICE_LOST, "has died");
    const kvpool_completion *lost = next();
    assert_int_equal(lost->step_id, id);
    assert_int_equal(lost->error->status, KVPOOL_DEVICE_LOST);
    expect_over(KVPOOL_DEVICE_LOST, "has died");
    kvpool_replay_destroy(replay);
  }
}

static void test_attachment_ends(void **state) {
  (void)state;
  for (int i = 0; i < 6; i++) {
    const char *text = "given up by kvpool_detach";
    replay_make(modes[i % 2]);
    kvpool_attachment *ended = attachment;
    switch (i / 2) {
    case 0:
      kvpool_detach(attachment);
      break;
    case 1:
      fake_hang_up(&fake);
      assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_DISCONNECTED, "gone");
      text = "gone";
      break;
    default:
      fake_tell_ended(&fake, KVP_SHUTTING_DOWN, "the daemon is draining");
      assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_SHUTTING_DOWN, "draining");
      text = "the attachment has ended: the daemon is draining";
    }
    expect_over(KVPOOL_DISCONNECTED, text);
    if (i / 2 != 0) {
      kvpool_detach(ended);
    }
    give_back();
    kvpool_replay_destroy(replay);
    fake_wait_ended(&fake, (uint32_t)i + 1);
    fake_make_executor(&fake);
    attach();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_step_refused, setup, teardown),
      cmocka_unit_test_setup_teardown(test_refusal_kept, setup, teardown),
      cmocka_unit_test_setup_teardown(test_destroyed_before_its_step, setup, teardown),
      cmocka_unit_test_setup_teardown(test_executor_lost, setup, teardown),
      cmocka_unit_test_setup_teardown(test_attachment_ends, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
