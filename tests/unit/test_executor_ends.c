/* Rings, pools and buffers that go while steps use them. */
#include <string.h>
#include <unistd.h>

#include "tests/unit/service_rig.h"

/* ---- ends of rings ---- */

static struct kvp_news *news_take(enum kvp_news_kind kind) {
  struct kvp_news *news = kvp_mailbox_read(&rig.mailbox);
  assert_non_null(news);
  assert_null(news->next);
  assert_int_equal(news->kind, kind);
  return news;
}

static void ring_detached(struct end *end, const struct kvp_object_change *change) {
  assert_ptr_equal(change->ring, end->served);
  for (uint32_t word = kvp_client_words; word < kvp_timeline_words; word++) {
    assert_int_equal(rig_word(end, word), KVP_TIMELINE_POISON);
  }
  assert_int_equal(end->served->use.count, 0);
  kvp_served_ring_destroy(end->served);
}

/* What waits is dropped, what is launched ends; only then is the ring given back. */
static void test_detach(void **state) {
  (void)state;
  struct end *end = rig_attach(0), *other = rig_attach(1);
  struct step_encoder encoder;
  rig_post(end, 1, 0, 0, done_a, 1);
  rig_step_begin(&encoder);
  (void)rig_op_add(&encoder);
  rig_op_waits(rig_op_add(&encoder), client_a, 1); /* half of it is launched */
  rig_post_step(end, 2, &encoder);
  rig_post(end, 3, 0, 0, 0, 0);
  rig_post(other, 1, client_a, 1, 0, 0);
  rig_serve();
  rig_post(end, 4, 0, 0, 0, 0); /* not even taken */
  assert_int_equal(rig.device.launched, 2);
  assert_int_equal(rig.buffers[0].uses, 5);
  rig_post_fence(1, session);
  rig_word_set(other, client_a, 1);
  rig_serve();
  fake_device_end_all(&rig.device);
  rig_serve();
  rig_post(other, 2, 0, 0, 0, 0);

  struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = 1};
  struct kvp_object_change again = change, unknown = {.kind = KVP_REMOVE_RING, .id = 77};
  rig_post(end, 5, 0, 0, 0, 0);
  assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
  assert_false(change.is_pending); /* the half had ended, and nothing else was launched */
  assert_int_equal(kvp_service_change(&rig.service, &again), KVP_INVALID_ARGUMENT);
  assert_int_equal(kvp_service_change(&rig.service, &unknown), KVP_INVALID_ARGUMENT);
  ring_detached(end, &change);
  assert_int_equal(rig.buffers[0].uses, 0);
  assert_null(kvp_id_table_get(&rig.service.dispatch.queues.table, first_queue));
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_FENCED, 1);
  rig_serve();
  fake_device_end_all(&rig.device);
  rig_serve();
  for (uint64_t tag = 1; tag <= 2; tag++) {
    (void)rig_expect(other, KVP_COMPLETION_ACCEPTED, tag);
    (void)rig_expect(other, KVP_COMPLETION_DONE, tag);
  }
}

static void test_detach_while_launched(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  rig_post(end, 1, 0, 0, done_a, 1);
  rig_step_begin(&encoder);
  (void)rig_op_add(&encoder);
  rig_op_waits(rig_op_add(&encoder), client_a, 1);
  rig_post_step(end, 2, &encoder);
  rig_post(end, 3, 0, 0, done_b, 1);
  rig_serve();
  assert_int_equal(rig.device.launched, 2);
  struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = 1}, again = change;
  assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
  assert_true(change.is_pending);
  assert_int_equal(kvp_service_change(&rig.service, &again), KVP_INVALID_ARGUMENT);
  assert_int_equal(end->served->use.count, 2); /* the third is gone */
  fake_device_end(&rig.device, 0);
  rig_serve();
  assert_null(kvp_mailbox_read(&rig.mailbox));
  fake_device_end(&rig.device, 1);
  rig_serve();
  assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &change);
  ring_detached(end, &change);
  assert_int_equal(rig.buffers[0].uses, 0);
  end->words = NULL; /* the number is free for another one */
  (void)rig_attach(0);
}

/* Completions that found no room go with the ring, those of steps that still run among them. */
static void test_detach_of_a_blocked_ring(void **state) {
  (void)state;
  const struct kvp_ring_sizes small = {
      .commands = 64, .completions = 4, .command_arena_bytes = 1 << 16, .completion_arena_bytes = 1 << 14};
  for (uint32_t kept = 0; kept < 3; kept++) { /* an acceptance, a refusal, a report */
    struct end *end = rig_attach_with(kept, &small, 0);
    struct step_encoder encoder;
    for (uint64_t tag = 1; tag <= 5; tag++) {
      rig_step_begin(&encoder);
      (void)rig_op_add_to(&encoder, kept == 1 && tag == 5 ? other_buffer_id : buffer_id);
      encoder.header.flags = kept == 2 ? KVP_STEP_NOT_ACCEPTED_TOLD : 0;
      rig_post_step(end, tag, &encoder);
    }
    rig_serve();
    for (int i = 0; kept == 2 && i < 2; i++) { /* not all of them are launched at once */
      fake_device_end_all(&rig.device);
      rig_serve();
    }
    assert_true(kvp_service_is_blocked(&rig.service));
    struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = kept + 1};
    assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
    assert_int_equal(change.is_pending, kept != 2);
    if (change.is_pending) {
      fake_device_end_all(&rig.device);
      rig_serve();
      assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &change);
    }
    ring_detached(end, &change);
    assert_int_equal(rig.buffers[0].uses, 0);
  }
}

/* A ring that goes takes its own steps out of a queue, and nobody else's. */
static void test_detach_from_a_shared_queue(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  rig_post(end, 1, client_a, 1, 0, 0);
  rig_serve();
  step_encoder_init(&encoder, first_queue, session, 1);
  (void)rig_op_add(&encoder);
  rig_post_step(&rig.supervisor, 1, &encoder);
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_ACCEPTED, 1);
  assert_int_equal(rig.device.launched, 0);
  struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = 1};
  assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
  ring_detached(end, &change);
  rig_serve();
  assert_int_equal(rig.device.launched, 1);
  fake_device_end_all(&rig.device);
  rig_serve();
  (void)rig_expect(&rig.supervisor, KVP_COMPLETION_DONE, 1);
}

/* Nonsense ends one ring; its steps end as those of one that is detached, and the others don't notice. */
static void test_corrupt_ring(void **state) {
  (void)state;
  for (uint32_t i = 0; i < 4; i++) {
    struct end *end = rig_attach(i), *other = rig_attach(4 + i);
    rig_post(end, 1, 0, 0, 0, 0);
    rig_post(end, 2, client_a, 1, 0, 0);
    rig_serve();
    const uint32_t launched = rig.device.launched - 1;
    switch (i) {
    case 0:
      rig_post_record(end, 99, 1, NULL, 0);
      break;
    case 1: /* the supervisor's alone */
      rig_post_record(end, KVP_COMMAND_FENCE, 1, NULL, 0);
      break;
    case 2:
      rig_post_record(end, KVP_COMMAND_QUEUE_CLOSE, first_queue, NULL, 0);
      break;
    default: /* a number out of order */
      end->ring.commands.position += 3;
      rig_post_record(end, KVP_COMMAND_STEP, 1, NULL, 0);
      break;
    }
    rig_post(end, 3, 0, 0, 0, 0);
    rig_post(other, 1, 0, 0, 0, 0);
    rig_serve();
    assert_false(rig.service.failed);
    assert_ptr_equal(news_take(KVP_NEWS_RING_FAILED), &end->served->failed);
    assert_int_equal(end->served->error.status, KVP_MALFORMED);
    assert_non_null(strstr(end->served->error.text, "makes no sense"));
    assert_int_equal(end->served->use.count, 1);
    fake_device_end(&rig.device, launched);
    rig_serve();
    assert_int_equal(end->served->use.count, 0);
    (void)rig_expect(other, KVP_COMPLETION_ACCEPTED, 1);
    struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = i + 1};
    assert_int_equal(kvp_service_change(&rig.service, &change), KVP_OK);
    assert_false(change.is_pending);
    ring_detached(end, &change);
  }
}

static void test_ring_refusals(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  struct kvp_error error;
  struct kvp_control_ring spec = {.attachment_id = 9, .owner = session, .queue = 5};
  int fds[kvp_control_ring_fd_count] = {end->ring_fd, end->command_event, end->completion_event, end->timelines_fd};
  struct kvp_served_ring *twin = kvp_served_ring_new(&spec, fds, &rig.device.base, &error);
  assert_non_null(twin);
  twin->attachment_id = 1;
  struct kvp_object_change change = {.kind = KVP_ADD_RING, .ring = twin};
  assert_int_equal(kvp_service_change(&rig.service, &change), KVP_ALREADY_EXISTS);
  twin->command_event = twin->completion_event = -1; /* the test's own */
  kvp_served_ring_destroy(twin);

  spec.owner = 0; /* would own every block */
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
  spec.owner = kvp_sessions_max + 1;
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
  spec.owner = session;
  fds[KVP_CONTROL_RING_FD_COMPLETION_EVENT] = end->command_event;
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
  assert_non_null(strstr(error.text, "no socket"));
  fds[KVP_CONTROL_RING_FD_COMPLETION_EVENT] = end->completion_event;
  fds[KVP_CONTROL_RING_FD_TIMELINES] = end->ring_fd;
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
  fds[KVP_CONTROL_RING_FD_TIMELINES] = end->timelines_fd;
  fds[KVP_CONTROL_RING_FD_RING] = end->timelines_fd;
  assert_null(kvp_served_ring_new(&spec, fds, &rig.device.base, &error));
}

/* ---- removals of what is in use ---- */

static void test_deferred_removals(void **state) {
  (void)state;
  static const int32_t blocks[] = {1};
  struct end *end = rig_attach(0);
  struct step_encoder encoder;
  rig_step_begin(&encoder);
  struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_ZERO_BLOCKS);
  op->pool_id = pool_id;
  op->arrays[0] = step_encoder_array(&encoder, blocks, sizeof blocks);
  rig_op_waits(op, client_a, 1);
  (void)rig_op_add(&encoder);
  rig_post_step(end, 1, &encoder);
  rig_post(end, 2, client_a, 2, 0, 0);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 1);
  (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, 2);
  struct kvp_object_change pool = {.kind = KVP_REMOVE_POOL, .id = pool_id},
                           buffer = {.kind = KVP_REMOVE_BUFFER, .id = buffer_id}, again = buffer;
  assert_int_equal(kvp_service_change(&rig.service, &pool), KVP_OK);
  assert_int_equal(kvp_service_change(&rig.service, &buffer), KVP_OK);
  assert_true(pool.is_pending && buffer.is_pending);
  assert_int_equal(kvp_service_change(&rig.service, &again), KVP_UNKNOWN_BUFFER);
  rig_post(end, 3, 0, 0, 0, 0);
  rig_serve();
  assert_int_equal(rig_expect(end, KVP_COMPLETION_REFUSED, 3).status, KVP_UNKNOWN_BUFFER);
  rig_word_set(end, client_a, 1);
  rig_serve();
  fake_device_end_all(&rig.device);
  rig_serve();
  (void)rig_expect(end, KVP_COMPLETION_DONE, 1);
  assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &pool);
  struct kvp_object_change ring = {.kind = KVP_REMOVE_RING, .id = 1}; /* its last step goes with it */
  assert_int_equal(kvp_service_change(&rig.service, &ring), KVP_OK);
  assert_false(ring.is_pending);
  assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &buffer);
  ring_detached(end, &ring);

  struct kvp_object_change other = {.kind = KVP_REMOVE_BUFFER, .id = other_buffer_id};
  assert_int_equal(kvp_service_change(&rig.service, &other), KVP_OK);
  assert_false(other.is_pending);
  assert_ptr_equal(other.buffer, &rig.buffers[1]);
}

/* What the buffer's worker posted before the removal may name it, what comes behind it may not; other rings, of its
 * session or not, don't hold it up. */
static void test_steps_before_a_removal(void **state) {
  (void)state;
  enum { before = 40 };
  struct end *end = rig_attach(0);
  for (uint64_t i = 0; i < before; i++) {
    rig_post(end, i, 0, 0, 0, 0);
  }
  (void)rig_attach(1);
  struct kvp_object_change buffer = {.kind = KVP_REMOVE_BUFFER, .id = buffer_id, .attachment_id = 1}, again = buffer,
                           other = {.kind = KVP_REMOVE_BUFFER, .id = other_buffer_id, .attachment_id = 2};
  assert_int_equal(kvp_service_change(&rig.service, &buffer), KVP_OK);
  assert_true(buffer.is_pending);
  assert_int_equal(kvp_service_change(&rig.service, &again), KVP_UNKNOWN_BUFFER);
  assert_int_equal(kvp_service_change(&rig.service, &other), KVP_OK);
  assert_false(other.is_pending);
  assert_true(kvp_service_commands_take(&rig.service)); /* some of them */
  rig_post(end, before, 0, 0, 0, 0);
  rig_serve();
  for (uint64_t i = 0; i < before; i++) {
    (void)rig_expect(end, KVP_COMPLETION_ACCEPTED, i);
  }
  assert_int_equal(rig_expect(end, KVP_COMPLETION_REFUSED, before).status, KVP_UNKNOWN_BUFFER);
  assert_null(kvp_mailbox_read(&rig.mailbox));
  while (end->served->use.count > 0) {
    fake_device_end_all(&rig.device);
    rig_serve();
  }
  for (uint64_t i = 0; i < before; i++) {
    (void)rig_expect(end, KVP_COMPLETION_DONE, i);
  }
  assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &buffer);
  assert_ptr_equal(buffer.buffer, &rig.buffers[0]);
}

/* A ring that goes takes what was in it along. */
static void test_a_ring_goes_before_its_steps_are_taken(void **state) {
  (void)state;
  struct end *end = rig_attach(0);
  rig_post(end, 1, 0, 0, 0, 0);
  struct kvp_object_change buffer = {.kind = KVP_REMOVE_BUFFER, .id = buffer_id, .attachment_id = 1},
                           ring = {.kind = KVP_REMOVE_RING, .id = 1},
                           other = {.kind = KVP_REMOVE_BUFFER, .id = other_buffer_id, .attachment_id = 1};
  assert_int_equal(kvp_service_change(&rig.service, &buffer), KVP_OK);
  assert_true(buffer.is_pending);
  assert_int_equal(kvp_service_change(&rig.service, &ring), KVP_OK);
  assert_false(ring.is_pending);
  assert_ptr_equal(news_take(KVP_NEWS_CHANGE_DONE), &buffer);
  assert_int_equal(kvp_service_change(&rig.service, &other), KVP_OK); /* there is no such ring any more */
  assert_false(other.is_pending);
  ring_detached(end, &ring);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      RIG_TEST(test_detach),
      RIG_TEST(test_detach_while_launched),
      RIG_TEST(test_detach_of_a_blocked_ring),
      RIG_TEST(test_detach_from_a_shared_queue),
      RIG_TEST(test_corrupt_ring),
      RIG_TEST(test_ring_refusals),
      RIG_TEST(test_deferred_removals),
      RIG_TEST(test_steps_before_a_removal),
      RIG_TEST(test_a_ring_goes_before_its_steps_are_taken),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
