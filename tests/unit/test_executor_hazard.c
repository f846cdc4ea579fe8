/* Stores before loads in rings, through intake alone, against a model of single slots. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/contract/random.h"
#include "tests/unit/intake_fixture.h"

enum {
  modelled_layers = 2,
  slots_count = blocks * ring_tokens,
};

enum op_use { USE_STORE, USE_FUSED, USE_LOAD, USE_ASSEMBLE, uses };

/* What an op of a random schedule does, for the model. */
struct planned {
  enum op_use use;
  uint32_t pool;
  uint32_t layer;
  bool allows;
  bool slots_in_buffer;
  bool segments_in_buffer;
  uint32_t slot_count;
  int32_t slots[8];
  uint32_t segment_count;
  int32_t segments[4][4];
};

static void slots_plan(struct planned *it) {
  it->slot_count = 1 + random_below(7);
  const uint32_t first = random_below(slots_count);
  const uint32_t step = 1 + random_below(40);
  for (uint32_t i = 0; i < it->slot_count; i++) {
    it->slots[i] = random_chance(6) ? -1 : (int32_t)((first + i * step) % slots_count);
  }
  it->slots_in_buffer = random_chance(10);
}

static void segments_plan(struct planned *it) {
  it->segment_count = 1 + random_below(3);
  uint32_t filled = 0;
  for (uint32_t i = 0; i < it->segment_count; i++) {
    const uint32_t begin = random_below(ring_tokens + 1);
    const uint32_t length = random_chance(5) ? 0 : random_below(ring_tokens + 1 - begin);
    const int32_t block = random_chance(6) ? -1 : (int32_t)random_below(blocks);
    const int32_t segment[] = {block, (int32_t)begin, (int32_t)(begin + length), (int32_t)filled};
    memcpy(it->segments[i], segment, sizeof segment);
    filled += length;
  }
  it->segments_in_buffer = random_chance(12);
}

static struct planned op_plan(void) {
  struct planned it = {.use = (enum op_use)random_below(uses),
                       .pool = random_chance(5) ? paged_pool : ring_pool,
                       .layer = random_below(modelled_layers),
                       .allows = random_chance(8)};
  if (it.use == USE_ASSEMBLE) { /* its region is a ring's */
    it.pool = ring_pool;
  }
  if (it.use != USE_LOAD) {
    slots_plan(&it);
  }
  if (it.use == USE_LOAD || it.use == USE_ASSEMBLE) {
    segments_plan(&it);
  }
  return it;
}

static uint32_t slots_array(struct step_encoder *encoder, const struct planned *it) {
  return it->slots_in_buffer ? step_encoder_buffer_array(encoder, 1, 1 << 23, it->slot_count * UINT64_C(4))
                             : step_encoder_array(encoder, it->slots, it->slot_count * 4);
}

static uint32_t segments_array(struct step_encoder *encoder, const struct planned *it) {
  return it->segments_in_buffer
             ? step_encoder_buffer_array(encoder, 1, (1 << 23) + 4096, it->segment_count * UINT64_C(16))
             : step_encoder_array(encoder, it->segments, it->segment_count * 16);
}

static void op_encode(struct step_encoder *encoder, const struct planned *it) {
  const enum kvp_op_kind kinds[] = {KVP_OP_STORE, KVP_OP_FUSED_STORE, KVP_OP_LOAD, KVP_OP_ASSEMBLE};
  struct kvp_wire_op *op = step_encoder_op(encoder, kinds[it->use]);
  op->pool_id = it->pool;
  op->layer = it->layer;
  op->flags = it->allows && it->use >= USE_LOAD ? KVP_OP_ALLOW_STORE_BEFORE_LOAD : 0;
  switch (it->use) {
  case USE_FUSED:
    op->third = rows_at(own_buffer, 20, 1);
    op->arrays[1] = step_encoder_buffer_array(encoder, 1, 1 << 22, it->slot_count * UINT64_C(4));
    op->numbers[0] = 0x3F800000; /* eps 1 */
    op->source = rows_at(own_buffer, 0, 8);
    op->arrays[0] = slots_array(encoder, it);
    break;
  case USE_STORE:
    op->source = rows_at(own_buffer, 0, 8);
    op->arrays[0] = slots_array(encoder, it);
    break;
  case USE_LOAD:
    op->source = rows_at(own_buffer, 1, 300);
    op->total_k = 300;
    op->arrays[0] = segments_array(encoder, it);
    break;
  default:
    op->source = rows_at(own_buffer, 0, it->slot_count);
    op->argument = it->slot_count;
    op->arrays[2] = slots_array(encoder, it);
    op->second = rows_at(own_buffer, 1, 310);
    op->total_k = 300;
    op->arrays[0] = segments_array(encoder, it);
    break;
  }
}

/* Slot by slot: who stored it first, in which layer. */
struct model {
  int32_t stored_by[modelled_layers][slots_count]; /* op + 1 */
  bool unknown[modelled_layers];
};

/* The slot that the op must not read, or -1; *unchecked: whether that can't be said. */
static int32_t model_read(const struct model *model, const struct planned *it, bool *unchecked) {
  bool any = model->unknown[it->layer];
  for (uint32_t i = 0; i < slots_count; i++) {
    any = any || model->stored_by[it->layer][i] != 0;
  }
  const bool asks = it->use >= USE_LOAD && it->pool == ring_pool && !it->allows;
  *unchecked = asks && (model->unknown[it->layer] || (any && it->segments_in_buffer));
  for (uint32_t i = 0; asks && !it->segments_in_buffer && i < it->segment_count; i++) {
    for (int32_t k = it->segments[i][1]; k < it->segments[i][2] && it->segments[i][0] >= 0; k++) {
      const int32_t slot = it->segments[i][0] * ring_tokens + k;
      if (model->stored_by[it->layer][slot] != 0) {
        return slot;
      }
    }
  }
  return -1;
}

static void model_write(struct model *model, const struct planned *it, int32_t op) {
  if (it->use == USE_LOAD || it->pool != ring_pool) {
    return;
  }
  model->unknown[it->layer] = model->unknown[it->layer] || it->slots_in_buffer;
  for (uint32_t i = 0; !it->slots_in_buffer && i < it->slot_count; i++) {
    if (it->slots[i] >= 0 && model->stored_by[it->layer][it->slots[i]] == 0) {
      model->stored_by[it->layer][it->slots[i]] = op + 1;
    }
  }
}

static bool slots_are_distinct(const struct planned *it) {
  for (uint32_t i = 0; i < it->slot_count; i++) {
    for (uint32_t k = 0; k < i; k++) {
      if (it->slots[i] >= 0 && it->slots[i] == it->slots[k]) {
        return false;
      }
    }
  }
  return true;
}

static void test_random_schedules(void **state) {
  (void)state;
  enum { rounds = 6000, ops_max = 10 };
  static struct planned plan[ops_max];
  struct intake_fixture world;
  uint32_t refused = 0, unchecked_count = 0, clean = 0;
  fixture_init(&world);
  for (uint32_t round = 0; round < rounds; round++) {
    static struct model model;
    struct step_encoder encoder;
    struct kvp_error error;
    bool unchecked[ops_max] = {0};
    int32_t hazard_op = -1, hazard_slot = -1;
    random_start(round + 1);
    memset(&model, 0, sizeof model);
    step_encoder_init(&encoder, 1, session, 1);
    const uint32_t count = 1 + random_below(ops_max);
    for (uint32_t i = 0; i < count; i++) {
      do {
        plan[i] = op_plan();
      } while (!slots_are_distinct(&plan[i]));
      op_encode(&encoder, &plan[i]);
      const int32_t slot = hazard_op < 0 ? model_read(&model, &plan[i], &unchecked[i]) : -1;
      if (slot >= 0) {
        hazard_op = (int32_t)i;
        hazard_slot = slot;
      }
      model_write(&model, &plan[i], (int32_t)i);
    }
    struct kvp_step *step = fixture_check(&world, &encoder, &error);
    if (hazard_op >= 0) {
      char by[64];
      assert_int_equal(error.status, KVP_HAZARD_STORE_BEFORE_LOAD);
      assert_int_equal(error.op, hazard_op);
      assert_int_equal(error.value, hazard_slot);
      assert_string_equal(error.array, plan[hazard_op].use == USE_LOAD ? "segments" : "swa.segments");
      (void)snprintf(by, sizeof by, "which op %d ", model.stored_by[plan[hazard_op].layer][hazard_slot] - 1);
      assert_non_null(strstr(error.text, by));
      refused++;
    } else {
      if (error.status != KVP_OK) {
        fail_msg("round %u: %s", round, error.text);
      }
      for (uint32_t i = 0; i < count; i++) {
        assert_int_equal((step->ops[i].report_flags & KVP_REPORT_HAZARD_UNCHECKED) != 0, unchecked[i]);
        unchecked_count += unchecked[i];
      }
      clean++;
    }
    kvp_step_destroy(&world.steps, step);
  }
  print_message("%u refused, %u run, %u ops unchecked\n", refused, clean, unchecked_count);
  assert_true(refused > rounds / 10 && clean > rounds / 10 && unchecked_count > rounds / 100);
  fixture_deinit(&world);
}

/* The compressed part of an assemble may come from a ring, too, even from the layer that its chunk is stored to: the
 * store is the last thing that the op does. The next op that reads there is told. */
static void test_a_compressed_part_of_a_ring(void **state) {
  (void)state;
  const int32_t slots[] = {2 * ring_tokens + 40, 2 * ring_tokens + 41};
  const int32_t segment[] = {2, 30, 41, 0};
  struct intake_fixture world;
  for (uint32_t ops = 1; ops <= 2; ops++) {
    struct step_encoder encoder;
    struct kvp_error error;
    fixture_init(&world);
    step_encoder_init(&encoder, 1, session, 1);
    const uint32_t arrays[] = {step_encoder_array(&encoder, slots, sizeof slots),
                               step_encoder_array(&encoder, segment, sizeof segment)};
    for (uint32_t i = 0; i < ops; i++) {
      struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_ASSEMBLE);
      op->pool_id = op->second_pool_id = ring_pool;
      op->source = rows_at(own_buffer, 0, 2);
      op->second = rows_at(own_buffer, 1 + i, 2 + 11);
      op->argument = 2;
      op->numbers[0] = 11;
      op->arrays[2] = arrays[0];
      op->arrays[3] = arrays[1];
    }
    struct kvp_step *step = fixture_check(&world, &encoder, &error);
    if (ops == 1) {
      assert_int_equal(error.status, KVP_OK);
      assert_int_equal(step->ops[0].last->kind, KVP_DEVICE_STORE);
    } else {
      assert_int_equal(error.status, KVP_HAZARD_STORE_BEFORE_LOAD);
      assert_int_equal(error.op, 1);
      assert_string_equal(error.array, "compressed.segments");
      assert_int_equal(error.value, slots[0]);
      assert_non_null(strstr(error.text, "which op 0 assemble overwrites first (chunk.store_slots[0])"));
    }
    kvp_step_destroy(&world.steps, step);
    fixture_deinit(&world);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_schedules),
      cmocka_unit_test(test_a_compressed_part_of_a_ring),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
