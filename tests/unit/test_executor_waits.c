/* Waits, signals, what becomes of waits in vain, and fences. */
#include <string.h>
#include <unistd.h>

#include "tests/unit/service_rig.h"

/* ---- waits and signals ---- */

/* A step is launched leg by leg, each when its word is there, and not before; it is done when the last has ended. */
static void test_legs(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  rig_step_begin(&encoder);
  encoder.header.base = 100;
  rig_op_signals(rig_op_add(&encoder), done_a, 1);
  struct kvp_wire_op *op = rig_op_add(&encoder);
  rig_op_waits(op, client_a, 5);
  rig_op_signals(op, done_b, 2);
  rig_op_signals(rig_op_add(&encoder), done_c, 3);
  rig_op_waits(rig_op_add(&encoder), client_b, 7);
  rig_post_step(end, 1, &encoder);
  rig_post(end, 2, 0, 0, 0, 0); /* behind it, in order */
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 1);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 2);
  assert_int_equal(rig.device.launched, 1);
  assert_int_equal(rig.device.ops[0], 2);
  assert_true(kvp_dispatch_is_waiting(&rig.service.dispatch));
  fake_device_end_all(&rig.device);
  assert_int_equal(rig_word(end, done_a), 101);
  rig_word_set(end, client_a, 104);
  rig_word_set(end, client_b, 200);
  rig_serve();
  assert_int_equal(rig.device.launched, 1); /* the first wait isn't over */
  rig_word_set(end, client_a, 105);
  rig_serve();
  assert_int_equal(rig.device.launched, 4); /* the rest, without waiting for one another's end */
  assert_int_equal(rig.device.ops[1], 4);
  assert_int_equal(rig.device.ops[2], 1);
  assert_false(kvp_dispatch_is_waiting(&rig.service.dispatch));
  assert_int_equal(rig_word(end, done_b), 0);
  fake_device_end(&rig.device, 1);
  assert_int_equal(rig_word(end, done_b), 102);
  assert_int_equal(rig_word(end, done_c), 103);
  rig_serve();
  rig_expect_nothing(end);
  fake_device_end(&rig.device, 2);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_DONE, 1);
  rig_expect_nothing(end);
  fake_device_end(&rig.device, 3);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_DONE, 2);
}

/* A step that waits holds up its own queue and no other. */
static void test_waits_are_a_queue_s_own(void **state) {
  (void)state;
  struct end *end = rig_attach(0), *other = rig_attach(1);
  rig_post(end, 1, client_a, 1, 0, 0);
  rig_post(end, 2, 0, 0, 0, 0);
  rig_post(other, 1, 0, 0, 0, 0);
  rig_word_set(other, client_a, 1); /* another ring's word of that number */
  rig_serve();
  assert_int_equal(rig.device.launched, 1);
  fake_device_end_all(&rig.device);
  rig_serve();
  (void)rig_expect(other, KVP_COMPLETION_ACCEPTED, 1);
  (void)rig_expect(other, KVP_COMPLETION_DONE, 1);
  rig_word_set(end, client_a, 1);
  rig_serve();
  assert_int_equal(rig.device.launched, 3);
}

/* ACCEPTED is left out where it isn't wanted; a refusal isn't. */
static void test_acceptance_not_told(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  for (uint64_t tag = 1; tag <= 2; tag++) {
    rig_step_begin(&encoder);
    encoder.header.flags = KVP_STEP_NOT_ACCEPTED_TOLD;
    (void)rig_op_add_to(&encoder, tag == 1 ? buffer_id : other_buffer_id);
    rig_post_step(end, tag, &encoder);
  }
  rig_serve();
  assert_int_equal(rig_expect(end, KVP_COMPLETION_REFUSED, 2).status, KVP_UNKNOWN_BUFFER);
  rig_expect_nothing(end);
  fake_device_end_all(&rig.device);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_DONE, 1);
  rig_expect_nothing(end);
}

static void test_point_refusals(void **state) {
  (void)state;
  const uint64_t most = KVP_TIMELINE_POISON - 1;
  const struct {
    uint64_t base;
    struct kvp_wire_point point;
    int64_t value;
    enum kvp_status status;
    bool is_signal;
  } cases[] = {
      {0, {0, 0, 1}, 0, KVP_OK, false},
      {0, {kvp_timeline_words - 1, 0, most}, 0, KVP_OK, false},
      {0, {kvp_timeline_words, 0, 1}, kvp_timeline_words, KVP_OUT_OF_RANGE, false},
      {0, {UINT32_MAX, 0, 1}, UINT32_MAX, KVP_OUT_OF_RANGE, false},
      {0, {0, 2, 1}, 2, KVP_MALFORMED, false},
      {UINT64_MAX, {0, KVP_POINT_ABSOLUTE, most}, 0, KVP_OK, false},
      {0, {0, 0, 0}, 0, KVP_OUT_OF_RANGE, false},
      {0, {0, 0, most + 1}, (int64_t)most + 1, KVP_OUT_OF_RANGE, false},
      {1, {0, 0, most}, (int64_t)most, KVP_OUT_OF_RANGE, false},
      {most - 1, {0, 0, 1}, 0, KVP_OK, false},
      {UINT64_MAX, {0, 0, 2}, 2, KVP_OUT_OF_RANGE, false}, /* 1, if nobody looks */
      {0, {kvp_client_words, 0, 1}, 0, KVP_OK, true},
      {0, {kvp_timeline_words - 1, 0, 1}, 0, KVP_OK, true},
      {0, {kvp_client_words - 1, 0, 1}, kvp_client_words - 1, KVP_OUT_OF_RANGE, true}, /* the worker's own */
      {0, {kvp_timeline_words, 0, 1}, kvp_timeline_words, KVP_OUT_OF_RANGE, true},
      {0, {kvp_client_words, 0, 0}, 0, KVP_OUT_OF_RANGE, true},
  };
  struct end *end = rig_attach(0);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (int has_flag = 0; has_flag < 2; has_flag++) {
      struct step_encoder encoder;
      rig_step_begin(&encoder);
      encoder.header.base = cases[i].base;
      struct kvp_wire_op *op = rig_op_add(&encoder);
      op->flags = has_flag == 0 ? 0 : cases[i].is_signal ? KVP_OP_SIGNALS : KVP_OP_WAITS;
      *(cases[i].is_signal ? &op->signal : &op->wait) = cases[i].point;
      rig_post_step(end, i, &encoder);
      rig_serve();
      const bool is_empty = cases[i].point.word == 0 && cases[i].point.flags == 0 && cases[i].point.value == 0;
      const enum kvp_status status = has_flag != 0 ? cases[i].status : is_empty ? KVP_OK : KVP_MALFORMED;
      if (status == KVP_OK) {
        (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, i);
        continue;
      }
      const struct kvp_error error = rig_expect(end, KVP_COMPLETION_REFUSED, i);
      assert_int_equal(error.status, status);
      assert_int_equal(error.op, 0);
      assert_string_equal(error.array, cases[i].is_signal ? "signal" : "wait");
      if (has_flag != 0) {
        assert_int_equal(error.value, cases[i].value);
      }
    }
  }
}

/* ---- waits in vain ---- */

/* A poisoned word fails the step: what it would have signalled is poisoned, once what is launched of it has ended, and
 * stays so; who waits for that fails, too; who doesn't runs. */
static void test_poison(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  rig_step_begin(&encoder);
  rig_op_signals(rig_op_add(&encoder), done_a, 1);
  struct kvp_wire_op *op = rig_op_add(&encoder);
  rig_op_waits(op, client_a, 5);
  rig_op_signals(op, done_b, 1);
  rig_op_signals(rig_op_add(&encoder), done_c, 1);
  rig_post_step(end, 1, &encoder);
  rig_post(end, 2, done_b, 1, 0, 0);
  rig_post(end, 3, 0, 0, done_c, 2);
  rig_serve();
  for (uint64_t tag = 1; tag <= 3; tag++) {
    (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, tag);
  }
  assert_int_equal(rig.device.launched, 1);
  rig_word_set(end, client_a, KVP_TIMELINE_POISON);
  rig_serve();
  assert_int_equal(rig_word(end, done_b), 0); /* not yet: something of it runs */
  rig_expect_nothing(end);
  fake_device_end(&rig.device, 0);
  rig_serve();
  assert_int_equal(rig_word(end, done_a), 1);
  assert_int_equal(rig_word(end, done_b), KVP_TIMELINE_POISON);
  assert_int_equal(rig_word(end, done_c), KVP_TIMELINE_POISON);
  struct kvp_error error = rig_expect(end, KVP_COMPLETION_FAILED, 1);
  assert_int_equal(error.status, KVP_CANCELLED);
  assert_int_equal(error.op, 1);
  assert_string_equal(error.array, "wait");
  assert_int_equal(error.position, client_a);
  assert_int_equal(error.value, KVP_TIMELINE_POISON);
  assert_non_null(strstr(error.text, "word 1"));
  error = rig_expect(end, KVP_COMPLETION_FAILED, 2);
  assert_int_equal(error.status, KVP_CANCELLED);
  assert_int_equal(error.op, 0);
  assert_int_equal(error.position, done_b);
  assert_int_equal(rig.device.launched, 2); /* step 3 */
  assert_int_equal(rig.device.ops[1], 2);   /* its signal poisons the word once more: */
  rig_word_set(end, done_c, 0);             /* a worker set it back, and would wait for good */
  fake_device_end(&rig.device, 1);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_DONE, 3);
  assert_int_equal(rig_word(end, done_c), KVP_TIMELINE_POISON);
  assert_int_equal(rig.buffers[0].uses, 0);
}

/* From the failure on, not only when it shows: a later step that is launched before doesn't take the word back. */
static void test_poison_is_not_overtaken(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  rig_step_begin(&encoder);
  (void)rig_op_add(&encoder);
  struct kvp_wire_op *op = rig_op_add(&encoder);
  rig_op_waits(op, client_a, 1);
  rig_op_signals(op, done_a, 1);
  rig_post_step(end, 1, &encoder);
  rig_post(end, 2, 0, 0, done_a, 2);
  rig_serve();
  rig_word_set(end, client_a, KVP_TIMELINE_POISON);
  rig_serve();
  assert_int_equal(rig.device.launched, 2);
  assert_int_equal(rig_word(end, done_a), 0);
  fake_device_end_all(&rig.device); /* both, before anybody looks: the later step signals that the word is poisoned */
  assert_int_equal(rig_word(end, done_a), KVP_TIMELINE_POISON);
  rig_serve();
  assert_int_equal(rig_word(end, done_a), KVP_TIMELINE_POISON);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 1);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 2);
  (void)rig_expect(end, KVP_COMPLETION_FAILED, 1);
  (void)rig_expect(end, KVP_COMPLETION_DONE, 2);
}

/* A step before it that runs signals the same word: that doesn't take the poison back. */
static void test_poison_is_behind_what_runs(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  rig_word_set(end, client_a, KVP_TIMELINE_POISON);
  rig_post(end, 1, 0, 0, done_a, 1);
  rig_post(end, 2, client_a, 1, done_a, 2);
  rig_post(end, 3, 0, 0, done_b, 1);
  rig_serve();
  for (uint64_t tag = 1; tag <= 3; tag++) {
    (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, tag);
  }
  rig_expect_nothing(end);
  assert_int_equal(rig_word(end, done_a), 0);
  assert_int_equal(rig.device.launched, 2); /* the third, too: a step that fails holds nothing up */
  fake_device_end(&rig.device, 0);
  assert_int_equal(rig_word(end, done_a), 1);
  rig_serve();
  assert_int_equal(rig_word(end, done_a), KVP_TIMELINE_POISON);
  (void)rig_expect(end, KVP_COMPLETION_DONE, 1);
  assert_int_equal(rig_expect(end, KVP_COMPLETION_FAILED, 2).status, KVP_CANCELLED);
  fake_device_end(&rig.device, 1);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_DONE, 3);
  assert_int_equal(end->served->use.count, 0);
  assert_int_equal(rig.buffers[0].uses, 0);
}

/* A step that is refused as its second op names another session's buffer. */
static void refused_post(struct end *end, uint64_t tag, uint32_t first_word, uint32_t second_word) {
  struct step_encoder encoder;
  rig_step_begin(&encoder);
  rig_op_signals(rig_op_add(&encoder), first_word, 2);
  rig_op_signals(rig_op_add_to(&encoder, other_buffer_id), second_word, 2);
  rig_post_step(end, tag, &encoder);
}

/* It is told at once; its words are poisoned when its turn would have come, whatever runs before or comes behind. */
static void test_poison_of_refused_steps(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  rig_post(end, 1, 0, 0, done_a, 1);
  refused_post(end, 2, done_a, done_b);
  rig_post(end, 3, 0, 0, done_a, 3);
  rig_post(end, 4, done_b, 1, 0, 0);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 1);
  assert_int_equal(rig_expect(end, KVP_COMPLETION_REFUSED, 2).status, KVP_UNKNOWN_BUFFER);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 3);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 4);
  rig_expect_nothing(end);
  assert_int_equal(rig_word(end, done_a), 0);
  assert_int_equal(rig_word(end, done_b), 0);
  fake_device_end(&rig.device, 0);
  rig_serve();
  assert_int_equal(rig_word(end, done_a), KVP_TIMELINE_POISON);
  assert_int_equal(rig_word(end, done_b), KVP_TIMELINE_POISON);
  (void)rig_expect(end, KVP_COMPLETION_DONE, 1);
  fake_device_end_all(&rig.device);
  rig_serve();
  assert_int_equal(rig_word(end, done_a), KVP_TIMELINE_POISON); /* step 3 doesn't pass for step 2 */
  (void)rig_expect(end, KVP_COMPLETION_DONE, 3);
  const struct kvp_error error = rig_expect(end, KVP_COMPLETION_FAILED, 4);
  assert_int_equal(error.status, KVP_CANCELLED);
  assert_int_equal(error.position, done_b);
  assert_int_equal(end->served->use.count, 0);
  assert_int_equal(end->served->accepted_count, 0);
}

/* With nothing before it, too; words that aren't the executor's are left alone. */
static void test_poison_of_a_refused_step_alone(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  refused_post(end, 1, done_c, client_a);
  refused_post(end, 2, kvp_timeline_words, client_b);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_REFUSED, 1);
  (void)rig_expect(end, KVP_COMPLETION_REFUSED, 2);
  for (uint32_t word = 0; word < kvp_timeline_words; word++) {
    assert_int_equal(rig_word(end, word), word == done_c ? KVP_TIMELINE_POISON : 0);
  }
  assert_int_equal(end->served->use.count, 0);
}

/* Refused ones that wait for their turn count: a ring has no more of them than of others. */
static void test_refused_steps_are_counted(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  rig_post(end, 1, client_a, 1, 0, 0);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 1);
  uint32_t told = 0;
  for (uint64_t tag = 2; tag < 2 + 2 * (uint64_t)kvp_steps_in_flight_per_session_max; tag++) {
    struct exec_completion completion;
    refused_post(end, tag, done_a, done_b);
    rig_serve();
    if (!rig_try_take(end, &completion, NULL)) {
      break;
    }
    told += completion.kind == KVP_COMPLETION_REFUSED;
  }
  assert_int_equal(told, kvp_steps_in_flight_per_session_max - 1);
  rig_word_set(end, client_a, 1);
  rig_serve();
  fake_device_end_all(&rig.device);
  rig_serve();
  assert_int_equal(end->served->accepted_count, 0);
}

/* Of a step of three legs one can't be launched: what it and those behind it would have signalled is poisoned, they are
 * not launched, and what the leg before it has signalled stays. late: the others have been launched by then. */
static void step_of_three_legs_fails(bool late) {
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  rig_step_begin(&encoder);
  for (uint32_t i = 0; i < 3; i++) {
    struct kvp_wire_op *op = rig_op_add(&encoder);
    rig_op_waits(op, client_a, i + 1);
    rig_op_signals(op, done_a + i, 1);
  }
  rig_post_step(end, 1, &encoder);
  rig_post(end, 2, 0, 0, 0, 0);
  rig_word_set(end, client_a, late ? 3 : 2);
  rig_serve();
  assert_int_equal(rig.device.launched, late ? 4 : 2);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 1);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 2);
  rig.device.fails[1] = true;
  fake_device_end(&rig.device, 0);
  fake_device_end(&rig.device, 1);
  rig_serve();
  if (late) {
    rig_expect_nothing(end); /* its third leg runs */
    fake_device_end(&rig.device, 2);
    rig_serve();
  }
  const struct kvp_error error = rig_expect(end, KVP_COMPLETION_FAILED, 1);
  assert_int_equal(error.status, KVP_OUT_OF_MEMORY);
  assert_string_equal(error.text, "chain 1 could not be launched");
  assert_int_equal(rig_word(end, done_a), 1);
  assert_int_equal(rig_word(end, done_a + 1), KVP_TIMELINE_POISON);
  assert_int_equal(rig_word(end, done_a + 2), KVP_TIMELINE_POISON);
  assert_int_equal(rig.device.launched, late ? 4 : 3); /* the last is step 2 */
  fake_device_end_all(&rig.device);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_DONE, 2);
  assert_int_equal(rig.buffers[0].uses, 0);
}

static void test_a_leg_that_is_not_launched(void **state) {
  (void)state;
  step_of_three_legs_fails(false);
}

static void test_a_leg_that_is_not_launched_before_others(void **state) {
  (void)state;
  step_of_three_legs_fails(true);
}

/* No ring's waits are longer than the limit. */
static void test_longest_deadlines(void **state) {
  (void)state;
  const uint64_t limit = (uint64_t)kvp_wait_deadline_ms_max * 1000000;
  assert_int_equal(rig_attach_with(0, &rig_worker_sizes, 0)->served->deadline_ns_max, limit);
  assert_int_equal(rig_attach_with(1, &rig_worker_sizes, UINT64_MAX)->served->deadline_ns_max, limit);
  assert_int_equal(rig_attach_with(2, &rig_worker_sizes, limit - 1)->served->deadline_ns_max, limit - 1);
}

static void test_deadlines(void **state) {
  (void)state;
  struct end *end = rig_attach(0), *short_of_time = rig_attach_with(1, &rig_worker_sizes, 1);
  struct step_encoder encoder;
  rig_word_set(end, client_a, 3);
  rig_step_begin(&encoder);
  encoder.header.deadline_ns = 1;
  struct kvp_wire_op *op = rig_op_add(&encoder);
  rig_op_waits(op, client_a, 4);
  rig_op_signals(op, done_a, 1);
  rig_post_step(end, 1, &encoder);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 1);
  const struct kvp_error error = rig_expect(end, KVP_COMPLETION_FAILED, 1);
  assert_int_equal(error.status, KVP_DEADLINE_EXCEEDED);
  assert_int_equal(error.op, 0);
  assert_int_equal(error.position, client_a);
  assert_int_equal(error.value, 3);
  assert_int_equal(rig_word(end, done_a), KVP_TIMELINE_POISON);
  assert_int_equal(rig.device.launched, 0);

  rig_step_begin(&encoder); /* no longer than the ring's, whatever it asks for */
  encoder.header.deadline_ns = UINT64_MAX;
  rig_op_waits(rig_op_add(&encoder), client_a, 1);
  rig_post_step(short_of_time, 1, &encoder);
  rig_step_begin(&encoder);
  rig_op_waits(rig_op_add(&encoder), client_a, 1);
  rig_post_step(short_of_time, 2, &encoder);
  rig_step_begin(&encoder); /* what is there already was in time */
  rig_op_waits(rig_op_add(&encoder), client_b, 1);
  rig_word_set(short_of_time, client_b, 1);
  rig_post_step(short_of_time, 3, &encoder);
  rig_serve();
  for (uint64_t tag = 1; tag <= 3; tag++) {
    (void)rig_expect(short_of_time, KVP_COMPLETION_ACCEPTED, tag);
  }
  assert_int_equal(rig_expect(short_of_time, KVP_COMPLETION_FAILED, 1).status, KVP_DEADLINE_EXCEEDED);
  assert_int_equal(rig_expect(short_of_time, KVP_COMPLETION_FAILED, 2).status, KVP_DEADLINE_EXCEEDED);
  assert_int_equal(rig.device.launched, 1);
  rig_step_begin(&encoder); /* one that has time waits, nobody asks for how long */
  rig_op_waits(rig_op_add(&encoder), client_a, 4);
  rig_post_step(end, 2, &encoder);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 2);
  rig_expect_nothing(end);
}

/* ---- fences ---- */

static void test_fences(void **state) {
  (void)state;
  struct end *a = rig_attach(0), *b = rig_attach(1);
  rig_post_fence(50, session);
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 50); /* there is nothing to wait for */
  rig_post(a, 1, client_a, 1, 0, 0);
  rig_post(b, 1, 0, 0, 0, 0);
  rig_serve();
  rig_post_fence(51, session);
  rig_serve();
  rig_post(b, 2, client_b, 1, 0, 0); /* behind the fence */
  rig_serve();
  rig_post_fence(52, session);
  rig_serve();
  rig_expect_nothing(&rig.supervisor);
  fake_device_end(&rig.device, 0); /* b's first */
  rig_serve();
  rig_expect_nothing(&rig.supervisor);
  rig_word_set(a, client_a, 1);
  rig_serve();
  rig_expect_nothing(&rig.supervisor);
  fake_device_end(&rig.device, 1);
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 51);
  rig_expect_nothing(&rig.supervisor);
  rig_word_set(b, client_b, KVP_TIMELINE_POISON); /* a failed step has ended, too */
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 52);
  rig_post_fence(53, session);
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 53);
}

/* A fence waits for one owner's steps, through all rings; others may wait as long as they like. */
static void test_fences_of_owners(void **state) {
  (void)state;
  struct end *a = rig_attach(0), *b = rig_attach(1);
  b->served->owner = other_session;
  rig_post(a, 1, client_a, 1, 0, 0);
  rig_serve();
  rig_post_fence(50, session);
  rig_post_fence(51, other_session);
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 51);
  struct step_encoder encoder;
  rig_step_begin(&encoder);
  rig_op_waits(rig_op_add_to(&encoder, other_buffer_id), client_b, 1);
  rig_post_step(b, 1, &encoder);
  rig_serve();
  rig_post_fence(52, other_session);
  rig_post_fence(53, session);
  rig_post_fence(54, 1 << 20); /* numbers that no session has are one */
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 54);
  rig_expect_nothing(&rig.supervisor);
  rig_word_set(b, client_b, KVP_TIMELINE_POISON);
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 52); /* though 50 was posted before */
  rig_expect_nothing(&rig.supervisor);
  rig_word_set(a, client_a, KVP_TIMELINE_POISON);
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 50);
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 53);
  rig_expect_nothing(&rig.supervisor);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      RIG_TEST(test_legs),
      RIG_TEST(test_waits_are_a_queue_s_own),
      RIG_TEST(test_acceptance_not_told),
      RIG_TEST(test_point_refusals),
      RIG_TEST(test_poison),
      RIG_TEST(test_poison_is_not_overtaken),
      RIG_TEST(test_poison_is_behind_what_runs),
      RIG_TEST(test_poison_of_refused_steps),
      RIG_TEST(test_poison_of_a_refused_step_alone),
      RIG_TEST(test_refused_steps_are_counted),
      RIG_TEST(test_a_leg_that_is_not_launched),
      RIG_TEST(test_a_leg_that_is_not_launched_before_others),
      RIG_TEST(test_longest_deadlines),
      RIG_TEST(test_deadlines),
      RIG_TEST(test_fences),
      RIG_TEST(test_fences_of_owners),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
