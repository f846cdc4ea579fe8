/* keep_compressed while steps are under way: who may rely on what a step assembles, and what others that are not done
 * may do to it. Through intake alone, so that a step ends when the test says so. */
#include <string.h>
#include <unistd.h>

#include "proto/owner_entry.h"
#include "tests/contract/random.h"
#include "tests/unit/intake_fixture.h"

enum { kept_rows = 40, part_queue = 1, writer_queue = 2, part_block = 1, part_place = 1 };

static const int32_t part_segments[] = {part_block, 0, kept_rows, 0};

/* ---- steps ---- */

static struct kvp_step *accept(struct intake_fixture *world, struct step_encoder *encoder) {
  struct kvp_error error;
  struct kvp_step *step = fixture_check(world, encoder, &error);
  if (error.status != KVP_OK) {
    fail_msg("%s", error.text);
  }
  kvp_compressed_parts_accept(&world->intake.compressed, step);
  return step;
}

static void finish(struct intake_fixture *world, struct kvp_step *step) {
  kvp_compressed_parts_finish(&world->intake.compressed, step);
  kvp_step_destroy(&world->steps, step);
}

static void part_encode(struct step_encoder *encoder, uint32_t queue, bool keeps) {
  step_encoder_init(encoder, queue, session, 1);
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_ASSEMBLE);
  op->flags = keeps ? KVP_OP_KEEP_COMPRESSED : 0;
  op->second = rows_at(own_buffer, part_place, kept_rows);
  op->second_pool_id = paged_pool;
  op->numbers[0] = kept_rows;
  op->arrays[3] = step_encoder_array(encoder, part_segments, sizeof part_segments);
}

static struct kvp_step *assemble(struct intake_fixture *world) {
  struct step_encoder encoder;
  part_encode(&encoder, part_queue, false);
  return accept(world, &encoder);
}

/* text NULL: the step may keep the part. */
static void expect_kept(struct intake_fixture *world, uint32_t queue, const char *text) {
  struct step_encoder encoder;
  struct kvp_error error;
  part_encode(&encoder, queue, true);
  struct kvp_step *step = fixture_check(world, &encoder, &error);
  if (text == NULL && error.status != KVP_OK) {
    fail_msg("%s", error.text);
  } else if (text != NULL) {
    assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
    assert_string_equal(error.array, "keep_compressed");
    if (strstr(error.text, text) == NULL) {
      fail_msg("expected \"%s\", got \"%s\"", text, error.text);
    }
  }
  kvp_step_destroy(&world->steps, step);
}

/* Steps of the assembling step's queue may rely on it at once, those of others when it has finished. A step that was
 * checked, and then not accepted, has assembled nothing. */
static void test_an_assemble_in_flight(void **state) {
  (void)state;
  struct intake_fixture world;
  struct step_encoder encoder;
  struct kvp_error error;
  fixture_init(&world);
  part_encode(&encoder, part_queue, false);
  struct kvp_step *assembling = fixture_check(&world, &encoder, &error);
  assert_int_equal(error.status, KVP_OK);
  expect_kept(&world, part_queue, "no assemble");
  kvp_compressed_parts_accept(&world.intake.compressed, assembling);
  expect_kept(&world, part_queue, NULL);
  expect_kept(&world, writer_queue, "another queue assembles them, and has not finished");
  finish(&world, assembling);
  expect_kept(&world, writer_queue, NULL);
  assembling = assemble(&world);
  assembling->is_failed = true; /* it failed: nobody knows how far it came */
  finish(&world, assembling);
  expect_kept(&world, part_queue, "no assemble");
  fixture_deinit(&world);
}

/* The chunk's store comes last: a part of the ring's own layer that it writes to is not there any more. */
static void test_an_assemble_that_stores(void **state) {
  (void)state;
  for (int32_t block = part_block; block <= part_block + 1; block++) {
    struct intake_fixture world;
    fixture_init(&world);
    for (uint32_t keep_at = 1; keep_at <= 2; keep_at++) { /* in the same step, in one behind it */
      struct step_encoder encoder;
      struct kvp_error error;
      struct kvp_step *before = NULL;
      const int32_t slot = block * ring_tokens + 5;
      for (uint32_t i = 0; i < 2; i++) {
        if (i == 0) {
          part_encode(&encoder, part_queue, false);
        } else if (keep_at == 1) {
          encoder.ops[encoder.header.op_count++] = encoder.ops[0];
        } else {
          before = accept(&world, &encoder);
          part_encode(&encoder, part_queue, true);
        }
        struct kvp_wire_op *op = &encoder.ops[encoder.header.op_count - 1];
        op->pool_id = op->second_pool_id = ring_pool;
        op->flags = i == 0 ? 0 : KVP_OP_KEEP_COMPRESSED;
        op->source = i == 0 ? rows_at(own_buffer, 30, 1) : (struct kvp_wire_view){0};
        op->argument = i == 0;
        op->second = rows_at(own_buffer, part_place, kept_rows + 1);
        op->second.offset_bytes -= i == 0 ? row : 0;
        op->arrays[2] = i == 0 ? step_encoder_array(&encoder, &slot, sizeof slot) : KVP_WIRE_NO_ARRAY;
      }
      struct kvp_step *step = fixture_check(&world, &encoder, &error);
      assert_int_equal(error.status, block == part_block ? KVP_INVALID_ARGUMENT : KVP_OK);
      assert_true(block != part_block || strstr(error.text, "blocks that they were assembled from") != NULL);
      kvp_step_destroy(&world.steps, step);
      if (before != NULL) {
        finish(&world, before);
      }
    }
    fixture_deinit(&world);
  }
}

/* ---- writers ---- */

struct writer {
  void (*add)(struct step_encoder *encoder);
  bool touches;
};

static void store_add(struct step_encoder *encoder, uint32_t layer, int32_t slot) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_STORE);
  op->pool_id = paged_pool;
  op->layer = layer;
  op->source = rows_at(own_buffer, 30, 1);
  op->arrays[0] = step_encoder_array(encoder, &slot, sizeof slot);
}

static void add_store(struct step_encoder *encoder) {
  store_add(encoder, 0, part_block * ring_tokens + 99);
}

static void add_store_elsewhere(struct step_encoder *encoder) {
  store_add(encoder, 0, (part_block + 1) * ring_tokens);
  store_add(encoder, 1, part_block * ring_tokens);
  store_add(encoder, 0, -1);
}

static void add_store_unknown(struct step_encoder *encoder) {
  store_add(encoder, 0, 0);
  encoder->ops[0].arrays[0] = step_encoder_buffer_array(encoder, own_buffer, 1 << 22, 4);
}

static void add_fused_store(struct step_encoder *encoder) {
  const int32_t position = 0;
  store_add(encoder, 0, part_block * ring_tokens);
  struct kvp_wire_op *op = &encoder->ops[0];
  op->kind = KVP_OP_FUSED_STORE;
  op->third = rows_at(own_buffer, 20, 1);
  op->arrays[1] = step_encoder_array(encoder, &position, sizeof position);
  op->numbers[0] = 0x3F800000; /* eps 1 */
}

static void add_cast_back(struct step_encoder *encoder) {
  store_add(encoder, 7, 0);
  encoder->ops[0].second = rows_at(own_buffer, part_place, 1);
}

static void blocks_add(struct step_encoder *encoder, enum kvp_op_kind kind, const int32_t *ints, uint32_t count) {
  struct kvp_wire_op *op = step_encoder_op(encoder, kind);
  op->pool_id = paged_pool;
  op->arrays[0] = step_encoder_array(encoder, ints, count * 4);
}

static void add_zero(struct step_encoder *encoder) {
  blocks_add(encoder, KVP_OP_ZERO_BLOCKS, (const int32_t[]){0, part_block}, 2);
}

static void add_copy(struct step_encoder *encoder) {
  blocks_add(encoder, KVP_OP_COPY_BLOCKS, (const int32_t[]){0, part_block}, 2);
}

static void add_copy_from(struct step_encoder *encoder) {
  blocks_add(encoder, KVP_OP_COPY_BLOCKS, (const int32_t[]){part_block, 0}, 2);
}

static void load_add(struct step_encoder *encoder, uint64_t first_row) {
  const int32_t zeros[] = {-1, 0, 1, 0};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_LOAD);
  op->pool_id = paged_pool;
  op->source = rows_at(own_buffer, part_place, 1);
  op->source.offset_bytes += first_row * row;
  op->total_k = 1;
  op->arrays[0] = step_encoder_array(encoder, zeros, sizeof zeros);
}

static void add_load(struct step_encoder *encoder) {
  load_add(encoder, kept_rows - 1);
}

static void add_load_behind(struct step_encoder *encoder) {
  load_add(encoder, kept_rows);
}

static void add_indices(struct step_encoder *encoder) {
  const int32_t pivots[] = {0, 1, 0, 1};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_EXPAND_SWA_INDEX);
  op->argument = 4;
  op->arrays[0] = step_encoder_array(encoder, pivots, sizeof pivots);
  op->second = step_view(own_buffer, (uint64_t)part_place * place_bytes, 1, 16, 16);
}

static const struct writer writers[] = {
    {add_store, true},         {add_store_elsewhere, false}, {add_fused_store, true},
    {add_store_unknown, true}, {add_cast_back, true},        {add_zero, true},
    {add_copy, true},          {add_copy_from, false},       {add_load, true},
    {add_load_behind, false},  {add_indices, true},
};
enum { writer_count = sizeof writers / sizeof writers[0] };

static struct kvp_step *writer_accept(struct intake_fixture *world, const struct writer *writer, uint32_t queue,
                                      uint32_t owner) {
  struct step_encoder encoder;
  step_encoder_init(&encoder, queue, owner, 1);
  writer->add(&encoder);
  return accept(world, &encoder);
}

static const char in_flight[] = "a step of another queue, which had not finished when they were assembled";

/* Accepted before the part is assembled, and not finished: it may run behind. Nothing that it does later makes the
 * part good again, but another assemble does. */
static void test_an_earlier_writer_of_another_queue(void **state) {
  (void)state;
  for (size_t i = 0; i < writer_count; i++) {
    const uint32_t owners[] = {session, 0}; /* the session's own, an operator's */
    for (size_t o = 0; o < 2; o++) {
      struct intake_fixture world;
      fixture_init(&world);
      struct kvp_step *writing = writer_accept(&world, &writers[i], writer_queue, owners[o]);
      struct kvp_step *assembling = assemble(&world);
      const char *text = writers[i].touches ? in_flight : NULL;
      expect_kept(&world, part_queue, text);
      finish(&world, assembling);
      expect_kept(&world, part_queue, text);
      finish(&world, writing);
      expect_kept(&world, part_queue, text);
      expect_kept(&world, writer_queue, text);
      assembling = assemble(&world);
      expect_kept(&world, part_queue, NULL);
      finish(&world, assembling);
      fixture_deinit(&world);
    }
  }
}

/* In the same queue it runs before, and what has finished has run before. */
static void test_earlier_writers_that_are_through(void **state) {
  (void)state;
  for (size_t i = 0; i < writer_count; i++) {
    struct intake_fixture world;
    fixture_init(&world);
    finish(&world, writer_accept(&world, &writers[i], writer_queue, session));
    struct kvp_step *writing = writer_accept(&world, &writers[i], part_queue, session);
    struct kvp_step *assembling = assemble(&world);
    expect_kept(&world, part_queue, NULL);
    finish(&world, writing);
    finish(&world, assembling);
    expect_kept(&world, part_queue, NULL);
    fixture_deinit(&world);
  }
}

static void test_later_writers(void **state) {
  (void)state;
  for (size_t i = 0; i < writer_count; i++) {
    for (uint32_t queue = part_queue; queue <= writer_queue; queue++) {
      struct intake_fixture world;
      fixture_init(&world);
      struct kvp_step *assembling = assemble(&world);
      struct kvp_step *writing = writer_accept(&world, &writers[i], queue, session);
      expect_kept(&world, part_queue, writers[i].touches ? "written since" : NULL);
      finish(&world, assembling);
      finish(&world, writing);
      expect_kept(&world, part_queue, writers[i].touches ? "written since" : NULL);
      fixture_deinit(&world);
    }
  }
}

/* Any of many steps under way, whichever end first. */
static void test_many_steps_in_flight(void **state) {
  (void)state;
  enum { steps = 20 };
  for (uint32_t writing = 0; writing < steps; writing++) {
    struct intake_fixture world;
    struct kvp_step *under_way[steps];
    fixture_init(&world);
    for (uint32_t i = 0; i < steps; i++) {
      under_way[i] = writer_accept(&world, &writers[i == writing ? 0 : 1], 10 + i, session);
    }
    for (uint32_t i = 0; i < steps; i += 3) { /* some are gone before */
      finish(&world, under_way[i]);
    }
    struct kvp_step *assembling = assemble(&world);
    expect_kept(&world, part_queue, writing % 3 == 0 ? NULL : in_flight);
    for (uint32_t i = 0; i < steps; i++) {
      if (i % 3 != 0) {
        finish(&world, under_way[i]);
      }
    }
    finish(&world, assembling);
    for (uint32_t i = 0; i < kvp_pending_lists; i++) {
      assert_null(world.intake.compressed.pending[i]);
    }
    fixture_deinit(&world);
  }
}

/* ---- sessions ---- */

/* A block that was another's for a time, or nobody's, is not what it was, whoever stored to it. */
static void test_blocks_that_change_hands(void **state) {
  (void)state;
  struct intake_fixture world;
  fixture_init(&world);
  finish(&world, assemble(&world));
  expect_kept(&world, part_queue, NULL);
  struct step_encoder encoder;
  struct kvp_error error;
  world.owners[part_block] = kvp_owner_entry_make(2, KVP_BLOCK_LEASED, session);
  part_encode(&encoder, part_queue, true);
  encoder.header.epoch = 2; /* it knows that the block is its own again */
  struct kvp_step *step = fixture_check(&world, &encoder, &error);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "blocks that they were assembled from were freed, and assigned again since"));
  kvp_step_destroy(&world.steps, step);
  world.owners[part_block] = kvp_owner_entry_make(1, KVP_BLOCK_SEALED, session); /* read as before */
  expect_kept(&world, part_queue, NULL);
  fixture_deinit(&world);
}

/* What another session stores, to blocks of its own in the same layer, and however much: this one's part stays. */
static void test_other_sessions_change_nothing(void **state) {
  (void)state;
  enum { segment_count = 200000, stores = 100 };
  static int32_t segments[segment_count][4];
  struct intake_fixture world;
  struct step_encoder encoder;
  struct kvp_error error;
  for (int32_t i = 0; i < segment_count; i++) { /* the last row, over and over nothing */
    const int32_t segment[] = {part_block, 5, 5 + (i == 0), 0};
    memcpy(segments[i], segment, sizeof segment);
  }
  fixture_init(&world);
  for (int keeps = 0; keeps < 2; keeps++) {
    part_encode(&encoder, part_queue, keeps != 0);
    encoder.ops[0].arrays[3] = step_encoder_array(&encoder, segments, sizeof segments);
    if (keeps != 0) {
      struct kvp_step *step = fixture_check(&world, &encoder, &error);
      if (error.status != KVP_OK) {
        fail_msg("%s", error.text);
      }
      kvp_step_destroy(&world.steps, step);
      break;
    }
    struct kvp_step *assembling = accept(&world, &encoder);
    step_encoder_init(&encoder, writer_queue, other_session, 1);
    for (int32_t i = 0; i < stores; i++) {
      store_add(&encoder, 0, blocks * ring_tokens + i);
      encoder.ops[i].source.buffer_id = other_buffer;
    }
    finish(&world, accept(&world, &encoder));
    finish(&world, assembling);
  }
  fixture_deinit(&world);
}

/* ---- bounds ---- */

/* Two equal arrays in turn, compared by every op: there is an end to it, and the error says so. The same array, by as
 * many layers as there are, is compared once. */
static void test_comparing_has_a_bound(void **state) {
  (void)state;
  enum { segment_count = 100000, keeps = 60 };
  static int32_t segments[segment_count][4];
  for (int32_t i = 0; i < segment_count; i++) {
    const int32_t segment[] = {part_block, 5, 5 + (i == 0), 0};
    memcpy(segments[i], segment, sizeof segment);
  }
  for (uint32_t arrays = 1; arrays <= 2; arrays++) {
    struct intake_fixture world;
    struct step_encoder encoder;
    struct kvp_error error;
    fixture_init(&world);
    part_encode(&encoder, part_queue, false);
    encoder.ops[0].arrays[3] = step_encoder_array(&encoder, segments, sizeof segments);
    struct kvp_step *assembling = accept(&world, &encoder);
    step_encoder_init(&encoder, part_queue, session, 1);
    const uint32_t copies[] = {step_encoder_array(&encoder, segments, sizeof segments),
                               step_encoder_array(&encoder, segments, sizeof segments)};
    for (uint32_t i = 0; i < keeps; i++) {
      struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_ASSEMBLE);
      op->flags = KVP_OP_KEEP_COMPRESSED;
      op->second = rows_at(own_buffer, part_place, kept_rows);
      op->second_pool_id = paged_pool;
      op->numbers[0] = kept_rows;
      op->arrays[3] = copies[i % arrays];
    }
    struct kvp_step *step = fixture_check(&world, &encoder, &error);
    if (arrays == 1) {
      assert_int_equal(error.status, KVP_OK);
      assert_true(world.intake.compressed.looks <= UINT64_C(2) * segment_count);
    } else {
      assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
      assert_non_null(strstr(error.text, "more to compare than is looked at"));
      assert_true(error.op > 10);
    }
    kvp_step_destroy(&world.steps, step);
    finish(&world, assembling);
    fixture_deinit(&world);
  }
}

/* ---- any order ---- */

enum { queues = 3, events = 40 };

/* What was accepted, in order; of each queue the steps end in order. */
struct event {
  struct kvp_step *step;
  uint32_t queue;
  bool assembles;
  bool touches;
  bool has_finished;
};

struct schedule {
  struct event events[events];
  uint32_t count;
};

/* May the last assemble be relied on by a step of that queue? Not if it may still be running then, and not if any step
 * that may run behind it writes: one accepted later, or one of another queue that was not through when it came. */
static bool model_keeps(const struct schedule *schedule, const bool (*was_through)[events], uint32_t queue) {
  uint32_t last = schedule->count;
  while (last > 0 && !schedule->events[last - 1].assembles) {
    last--;
  }
  if (last == 0) {
    return false;
  }
  const struct event *assembling = &schedule->events[last - 1];
  bool keeps = assembling->has_finished || assembling->queue == queue;
  for (uint32_t i = 0; i < schedule->count; i++) {
    const struct event *event = &schedule->events[i];
    const bool is_before = i < last && (event->queue == assembling->queue || was_through[last - 1][i]);
    keeps = keeps && (i == last - 1 || is_before || !(event->touches || event->assembles));
  }
  return keeps;
}

static void event_add(struct intake_fixture *world, struct schedule *schedule, bool (*was_through)[events]) {
  struct step_encoder encoder;
  struct event *event = &schedule->events[schedule->count];
  *event = (struct event){.queue = part_queue + random_below(queues), .assembles = random_chance(3)};
  for (uint32_t i = 0; i < schedule->count; i++) {
    was_through[schedule->count][i] = schedule->events[i].has_finished;
  }
  if (event->assembles) {
    part_encode(&encoder, event->queue, false);
    event->step = accept(world, &encoder);
  } else {
    const struct writer *writer = &writers[random_below(writer_count)];
    writer = random_chance(2) ? writer : &writers[1]; /* many that write elsewhere */
    event->touches = writer->touches;
    event->step = writer_accept(world, writer, event->queue, random_chance(8) ? 0 : session);
  }
  schedule->count++;
}

/* The oldest step of a queue that has any. */
static void event_finish(struct intake_fixture *world, struct schedule *schedule) {
  const uint32_t queue = part_queue + random_below(queues);
  for (uint32_t i = 0; i < schedule->count; i++) {
    struct event *event = &schedule->events[i];
    if (!event->has_finished && event->queue == queue) {
      event->has_finished = true;
      kvp_compressed_parts_finish(&world->intake.compressed, event->step);
      kvp_step_destroy(&world->steps, event->step);
      return;
    }
  }
}

/* A step may keep the part exactly if it is what was assembled in whatever order the queues run. */
static void test_any_schedule(void **state) {
  (void)state;
  enum { rounds = 1500 };
  uint32_t kept = 0, refused = 0;
  for (uint32_t round = 0; round < rounds; round++) {
    static bool was_through[events][events];
    struct schedule schedule = {.count = 0};
    struct intake_fixture world;
    fixture_init(&world);
    random_start(round + 1);
    while (schedule.count < events) {
      if (random_chance(3)) {
        event_add(&world, &schedule, was_through);
      } else {
        event_finish(&world, &schedule);
      }
      const uint32_t queue = part_queue + random_below(queues);
      const bool keeps = model_keeps(&schedule, (const bool(*)[events])was_through, queue);
      struct step_encoder encoder;
      struct kvp_error error;
      part_encode(&encoder, queue, true);
      kvp_step_destroy(&world.steps, fixture_check(&world, &encoder, &error));
      if ((error.status == KVP_OK) != keeps) {
        fail_msg("round %u, %u steps: %s, but %s", round, schedule.count,
                 keeps ? "it is there" : "it may not be there", error.status == KVP_OK ? "it was kept" : error.text);
      }
      kept += keeps;
      refused += !keeps;
    }
    for (uint32_t i = 0; i < events; i++) {
      if (!schedule.events[i].has_finished) {
        finish(&world, schedule.events[i].step);
      }
    }
    fixture_deinit(&world);
  }
  print_message("%u kept, %u refused\n", kept, refused);
  assert_true(kept > 1000 && refused > 1000);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_an_assemble_in_flight),
      cmocka_unit_test(test_an_assemble_that_stores),
      cmocka_unit_test(test_an_earlier_writer_of_another_queue),
      cmocka_unit_test(test_earlier_writers_that_are_through),
      cmocka_unit_test(test_later_writers),
      cmocka_unit_test(test_many_steps_in_flight),
      cmocka_unit_test(test_any_schedule),
      cmocka_unit_test(test_blocks_that_change_hands),
      cmocka_unit_test(test_other_sessions_change_nothing),
      cmocka_unit_test(test_comparing_has_a_bound),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
