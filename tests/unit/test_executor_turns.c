/* Whose turn it is, and who holds up whom. */
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/unit/service_rig.h"

/* ---- turns ---- */

static void turns_take(uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    assert_true(kvp_service_commands_take(&rig.service));
  }
}

/* A ring with a hundred commands and others with few: these get their turn after four of the first. */
static void test_turns(void **state) {
  (void)state;
  struct end *flood = rig_attach(0), *quiet = rig_attach(1), *idle = rig_attach(2);
  struct step_encoder encoder;
  for (uint64_t i = 0; i < 100; i++) {
    rig_post(flood, i, 0, 0, 0, 0);
  }
  for (uint64_t i = 0; i < 3; i++) {
    rig_post(quiet, i, 0, 0, 0, 0);
  }
  turns_take(2);
  assert_int_equal(flood->served->use.count, 4);
  assert_int_equal(quiet->served->use.count, 3);
  rig_post(idle, 0, 0, 0, 0, 0);
  for (uint64_t i = 0; i < 20; i++) {
    step_encoder_init(&encoder, 1, session, 1);
    rig_post_step(&rig.supervisor, i, &encoder);
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
    struct end *end = rig_attach(w);
    for (uint64_t i = 0; i < 20; i++) {
      rig_post(end, i, 0, 0, 0, 0);
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
  struct end *flood = rig_attach(0), *quiet = rig_attach(1);
  int32_t *pivots = calloc(elements, sizeof *pivots);
  assert_non_null(pivots);
  for (uint64_t i = 0; i < 10; i++) {
    struct step_encoder encoder;
    rig_step_begin(&encoder);
    struct kvp_wire_op *op = rig_op_add(&encoder);
    op->arrays[0] = step_encoder_array(&encoder, pivots, elements * sizeof *pivots);
    op->second.rows = elements / 4;
    rig_post_step(flood, i, &encoder);
    rig_post(quiet, i, 0, 0, 0, 0);
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
  struct end *greedy = rig_attach(0), *other = rig_attach(1);
  for (uint64_t i = 0; i < posted; i++) {
    rig_post(greedy, i, client_a, 1, 0, 0);
  }
  rig_serve();
  assert_int_equal(greedy->served->use.count, kvp_steps_in_flight_per_session_max);
  rig_post(other, 1, 0, 0, 0, 0);
  rig_serve();
  (void)rig_expect(other, KVP_COMPLETION_ACCEPTED, 1);
  assert_int_equal(rig.device.launched, 1);
  fake_device_end_all(&rig.device);
  rig_serve();
  (void)rig_expect(other, KVP_COMPLETION_DONE, 1);

  rig_word_set(greedy, client_a, 1);
  uint64_t done = 0, accepted = 0;
  while (done < posted) {
    struct exec_completion completion;
    rig_serve();
    fake_device_end_all(&rig.device);
    while (rig_try_take(greedy, &completion, NULL)) {
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
  struct end *late = rig_attach(0), *greedy = rig_attach(1);
  struct step_encoder encoder;
  rig.service.steps.use.count += kvp_executor_steps_max / 2; /* as if others had them */
  for (uint64_t i = 0; i < 3; i++) {
    rig_post(late, i, client_a, 1, 0, 0);
    rig_post(greedy, i, client_a, 1, 0, 0);
    step_encoder_init(&encoder, 1, session, 1);
    rig_post_step(&rig.supervisor, i, &encoder);
  }
  rig_serve();
  assert_int_equal(late->served->use.count, 1);
  assert_int_equal(greedy->served->use.count, 1);
  assert_int_equal(rig.supervisor.served->use.count, 3);
  rig.service.steps.use.count -= kvp_executor_steps_max / 2;
  rig_serve();
  assert_int_equal(late->served->use.count, 3);
}

/* A worker that doesn't take its completions blocks its own ring. */
static void test_blocked_outbox(void **state) {
  (void)state;
  const struct kvp_ring_sizes small = {
      .commands = 64, .completions = 4, .command_arena_bytes = 1 << 20, .completion_arena_bytes = 1 << 14};
  struct end *deaf = rig_attach_with(0, &small, 0), *other = rig_attach(1);
  for (uint64_t i = 0; i < 20; i++) {
    rig_post(deaf, i, 0, 0, 0, 0);
  }
  for (int i = 0; i < 10; i++) {
    rig_serve();
    fake_device_end_all(&rig.device);
  }
  assert_true(kvp_service_is_blocked(&rig.service));
  assert_true(deaf->served->use.count < 10);
  for (uint64_t i = 0; i < 30; i++) {
    rig_post(other, i, 0, 0, 0, 0);
    rig_serve();
    fake_device_end_all(&rig.device);
    rig_serve();
    (void)rig_expect(other, KVP_COMPLETION_ACCEPTED, i);
    (void)rig_expect(other, KVP_COMPLETION_DONE, i);
  }
  uint64_t accepted = 0, done = 0;
  while (done < 20) {
    struct exec_completion completion;
    rig_serve();
    fake_device_end_all(&rig.device);
    while (rig_try_take(deaf, &completion, NULL)) {
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
  struct end *deaf = rig_attach(0);
  const uint64_t one = 1;
  while (send(deaf->served->completion_event, &one, sizeof one, MSG_DONTWAIT) > 0) {
  }
  assert_true(kvp_lane_prepare_sleep(&deaf->ring.completions));
  rig_post(deaf, 1, 0, 0, 0, 0);
  rig_serve();
  (void)rig_expect(deaf, KVP_COMPLETION_ACCEPTED, 1);
  assert_int_equal(shutdown(deaf->completion_event, SHUT_RDWR), 0);
  assert_true(kvp_lane_prepare_sleep(&deaf->ring.completions));
  fake_device_end_all(&rig.device);
  rig_serve();
  (void)rig_expect(deaf, KVP_COMPLETION_DONE, 1);
}

/* ---- whose steps they are ---- */

static void test_signed_steps(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  rig_step_begin(&encoder); /* owner 0 would own everything */
  (void)rig_op_add_to(&encoder, other_buffer_id);
  rig_post_step(end, 1, &encoder);
  rig_step_begin(&encoder);
  step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source = step_view(buffer_id, 0, 1, 16, 16);
  rig_post_step(end, 2, &encoder);
  rig_post_record(end, KVP_COMMAND_STEP, 3, "short", 5);
  rig_step_begin(&encoder);
  (void)rig_op_add(&encoder);
  rig_post_step(end, 4, &encoder);
  rig_serve();
  assert_int_equal(rig_expect(end, KVP_COMPLETION_REFUSED, 1).status, KVP_UNKNOWN_BUFFER);
  assert_int_equal(rig_expect(end, KVP_COMPLETION_REFUSED, 2).status, KVP_PERMISSION_DENIED);
  assert_int_equal(rig_expect(end, KVP_COMPLETION_REFUSED, 3).status, KVP_MALFORMED);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 4);
  assert_null(kvp_id_table_get(&rig.service.dispatch.queues.table, 7));
  assert_non_null(kvp_id_table_get(&rig.service.dispatch.queues.table, first_queue));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      RIG_TEST(test_turns),       RIG_TEST(test_turns_of_many), RIG_TEST(test_turns_by_bytes),
      RIG_TEST(test_quota),       RIG_TEST(test_shared_quota),  RIG_TEST(test_blocked_outbox),
      RIG_TEST(test_deaf_socket), RIG_TEST(test_signed_steps),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
