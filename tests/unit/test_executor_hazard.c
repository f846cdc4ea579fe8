/* Steps through intake alone: stores before loads in rings against a model of single slots, what an array costs that
 * many layers share, compressed parts of steps that have not finished.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/owner_entry.h"
#include "server/executor/intake.h"
#include "tests/contract/random.h"
#include "tests/unit/exec_harness.h"

enum {
  session = 3,
  watchdog_seconds = 300,
  blocks = 5,
  ring_tokens = 100,
  layers = 61,
  modelled_layers = 2,
  slots_count = blocks * ring_tokens,
  row = 128, /* bf16, 64 elements */
  paged_pool = 1,
  ring_pool = 2,
  pools = 2,
};

struct intake_world {
  struct kvp_objects objects;
  struct kvp_intake intake;
  struct kvp_step_pool steps;
  struct kvp_pool pool[pools];
  struct kvp_buffer buffer;
};

static _Atomic uint64_t owners[blocks];
static const uint64_t device_owners[blocks];
static uint8_t *memory; /* addresses: nothing runs, nothing is looked at */

static void world_init(struct intake_world *world) {
  memset(world, 0, sizeof *world);
  world->intake = (struct kvp_intake){.objects = &world->objects, .completion_bytes_max = 1 << 20};
  for (uint32_t i = 0; i < blocks; i++) {
    owners[i] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  }
  memory = malloc(64);
  assert_non_null(memory);
  for (uint32_t p = 0; p < pools; p++) {
    struct kvp_pool *pool = &world->pool[p];
    *pool = (struct kvp_pool){.id = 1 + p,
                              .kind = 1 + p == ring_pool ? KVP_POOL_RING : KVP_POOL_PAGED,
                              .num_blocks = blocks,
                              .region_count = 1,
                              .owner_entries = owners,
                              .device_owner_entries = device_owners};
    pool->regions[0].base = memory + ((uint64_t)(1 + p) << 32);
    assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_BF16), row / 2, ring_tokens, blocks, layers,
                                       &pool->regions[0].geometry, NULL),
                     KVP_OK);
    assert_int_equal(kvp_objects_add_pool(&world->objects, pool, NULL), KVP_OK);
  }
  world->buffer = (struct kvp_buffer){.id = 1, .base = memory, .bytes = 1 << 24, .owner = session};
  assert_int_equal(kvp_objects_add_buffer(&world->objects, &world->buffer, NULL), KVP_OK);
}

static void world_deinit(struct intake_world *world) {
  kvp_id_table_deinit(&world->objects.pools);
  kvp_id_table_deinit(&world->objects.buffers);
  kvp_intake_deinit(&world->intake);
  kvp_step_pool_deinit(&world->steps);
  free(memory);
}

/* The step, checked or refused: error->status says. The encoder is freed. */
static struct kvp_step *take(struct intake_world *world, struct step_encoder *encoder, struct kvp_error *error) {
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  struct kvp_step *step = kvp_step_new(&world->steps, bytes);
  assert_non_null(step);
  memcpy(step->wire, encoded, bytes);
  free(encoded);
  step_encoder_deinit(encoder);
  *error = (struct kvp_error){0};
  error->status = (int32_t)kvp_intake_check(&world->intake, step, error);
  return step;
}

static struct kvp_wire_view rows_at(uint64_t place, uint64_t rows) {
  return step_view(1, place << 16, rows, row, row);
}

/* ---- stores before loads ---- */

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
    op->third = rows_at(20, 1);
    op->arrays[1] = step_encoder_buffer_array(encoder, 1, 1 << 22, it->slot_count * UINT64_C(4));
    op->numbers[0] = 0x3F800000; /* eps 1 */
    op->source = rows_at(0, 8);
    op->arrays[0] = slots_array(encoder, it);
    break;
  case USE_STORE:
    op->source = rows_at(0, 8);
    op->arrays[0] = slots_array(encoder, it);
    break;
  case USE_LOAD:
    op->source = rows_at(1, 300);
    op->total_k = 300;
    op->arrays[0] = segments_array(encoder, it);
    break;
  default:
    op->source = rows_at(0, it->slot_count);
    op->argument = it->slot_count;
    op->arrays[2] = slots_array(encoder, it);
    op->second = rows_at(1, 310);
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
  struct intake_world world;
  uint32_t refused = 0, unchecked_count = 0, clean = 0;
  world_init(&world);
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
    struct kvp_step *step = take(&world, &encoder, &error);
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
  world_deinit(&world);
}

/* ---- arrays that layers share ---- */

/* Sixty-one layers that store, load, assemble by the same arrays: each array is looked at once. */
static void test_shared_arrays_are_checked_once(void **state) {
  (void)state;
  struct intake_world world;
  struct step_encoder encoder;
  struct kvp_error error;
  int32_t slots[50], gather[50], positions[50];
  for (int32_t i = 0; i < 50; i++) {
    slots[i] = i % 7 == 0 ? -1 : ring_tokens + i;
    gather[i] = i % 7 == 0 ? -1 : i;
    positions[i] = i % 7 == 0 ? -5 : 9 - i % 10;
  }
  const int32_t segments[] = {0, 0, 100, 0, 2, 0, 50, 100};
  world_init(&world);
  step_encoder_init(&encoder, 1, session, 1);
  const uint32_t arrays[] = {step_encoder_array(&encoder, slots, sizeof slots),
                             step_encoder_array(&encoder, gather, sizeof gather),
                             step_encoder_array(&encoder, segments, sizeof segments),
                             step_encoder_array(&encoder, positions, sizeof positions)};
  for (uint32_t layer = 0; layer < layers; layer++) {
    struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_ASSEMBLE);
    op->pool_id = ring_pool;
    op->layer = layer;
    op->total_k = 150;
    op->argument = 50;
    op->source = rows_at(0, 60);
    op->second = rows_at(1, 200);
    op->arrays[0] = arrays[2];
    op->arrays[1] = arrays[1];
    op->arrays[2] = arrays[0];
    op = step_encoder_op(&encoder, KVP_OP_FUSED_STORE);
    op->pool_id = ring_pool;
    op->layer = layer;
    op->source = rows_at(0, 60);
    op->third = rows_at(20, 1);
    op->fourth = step_view(1, 1 << 22, 10, 64, 64);
    op->arrays[0] = arrays[0];
    op->arrays[1] = arrays[3];
    op->numbers[0] = 0x3F800000;
  }
  struct kvp_step *step = take(&world, &encoder, &error);
  if (error.status != KVP_OK) {
    fail_msg("%s", error.text);
  }
  assert_int_equal(world.intake.elements_checked, 50 + 50 + 8 + 50 + 2 * 50); /* slots against segments, too */
  for (size_t layer = 0; layer < layers; layer++) {                           /* load, store; then the fused store */
    const struct kvp_device_op *load = step->ops[2 * layer].first;
    const struct kvp_device_op *store = load->next;
    const struct kvp_device_op *fused = step->ops[2 * layer + 1].first;
    assert_int_equal(load->kind, KVP_DEVICE_LOAD);
    assert_int_equal(store->kind, KVP_DEVICE_STORE);
    assert_ptr_equal(store, step->ops[2 * layer].last);
    assert_int_equal(store->params.store.rows_skipped, 8);
    assert_int_equal(fused->params.fused_store.store.rows_skipped, 8);
    assert_ptr_equal(fused->params.fused_store.store.slots, store->params.store.slots);
    assert_ptr_equal(store->params.store.gather, step->ops[0].last->params.store.gather);
    assert_true(store->params.store.back_is_copy && store->joins && !load->joins);
    assert_ptr_equal(load->params.load.segments, step->ops[0].first->params.load.segments);
  }
  kvp_step_destroy(&world.steps, step);
  world_deinit(&world);
}

/* ---- compressed parts ---- */

static struct kvp_step *part_take(struct intake_world *world, uint32_t queue, bool keeps, struct kvp_error *error) {
  static const int32_t segments[] = {1, 0, 40, 0};
  struct step_encoder encoder;
  step_encoder_init(&encoder, queue, session, 1);
  struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_ASSEMBLE);
  op->flags = keeps ? KVP_OP_KEEP_COMPRESSED : 0;
  op->second = rows_at(1, 40);
  op->second_pool_id = paged_pool;
  op->numbers[0] = 40;
  op->arrays[3] = step_encoder_array(&encoder, segments, sizeof segments);
  return take(world, &encoder, error);
}

/* Steps of the assembling step's queue may rely on it at once, those of others when it has finished. A step that was
 * checked, and then not accepted, has assembled nothing. */
static void test_steps_in_flight(void **state) {
  (void)state;
  struct intake_world world;
  struct kvp_error error;
  world_init(&world);
  struct kvp_step *assembling = part_take(&world, 1, false, &error);
  assert_int_equal(error.status, KVP_OK);
  kvp_step_destroy(&world.steps, part_take(&world, 1, true, &error));
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  kvp_compressed_parts_accept(&world.intake.compressed, assembling);
  kvp_step_destroy(&world.steps, part_take(&world, 1, true, &error));
  assert_int_equal(error.status, KVP_OK);
  kvp_step_destroy(&world.steps, part_take(&world, 2, true, &error));
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "another queue assembles them, and has not finished"));
  kvp_compressed_parts_finish(&world.intake.compressed, assembling);
  kvp_step_destroy(&world.steps, part_take(&world, 2, true, &error));
  assert_int_equal(error.status, KVP_OK);
  kvp_step_destroy(&world.steps, assembling);
  world_deinit(&world);
}

/* Whole pools many times over: what a step may give the device has a bound. */
static void test_device_ops_are_bounded(void **state) {
  (void)state;
  enum { regions = kvp_regions_per_pool_max };
  struct intake_world world;
  struct step_encoder encoder;
  struct kvp_error error;
  world_init(&world);
  for (uint32_t i = 1; i < regions; i++) {
    world.pool[0].regions[i] = world.pool[0].regions[0];
  }
  world.pool[0].region_count = regions;
  const uint32_t count = kvp_device_ops_per_step_max / regions;
  for (uint32_t more = 0; more < 2; more++) {
    const uint64_t bytes = sizeof(struct kvp_wire_step) + (count + more) * sizeof(struct kvp_wire_op) +
                           sizeof(struct kvp_wire_array) + 8;
    step_encoder_init(&encoder, 1, session, 1);
    struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_ZERO_BLOCKS);
    op->pool_id = paged_pool;
    struct kvp_step *step = kvp_step_new(&world.steps, (uint32_t)bytes);
    memset(step->wire, 0, bytes);
    struct kvp_wire_step header = encoder.header;
    header.op_count = count + more;
    header.array_count = 1;
    header.bytes = (uint32_t)bytes;
    op->arrays[0] = 0;
    memcpy(step->wire, &header, sizeof header);
    for (uint32_t i = 0; i < count + more; i++) {
      memcpy(step->wire + sizeof header + i * sizeof *op, op, sizeof *op);
    }
    const struct kvp_wire_array array = {.offset_bytes = bytes - 8, .bytes = 4};
    memcpy(step->wire + bytes - 8 - sizeof array, &array, sizeof array);
    step_encoder_deinit(&encoder);
    error = (struct kvp_error){0};
    const enum kvp_status status = kvp_intake_check(&world.intake, step, &error);
    assert_int_equal(status, more == 0 ? KVP_OK : KVP_TOO_LARGE);
    assert_int_equal(error.op, more == 0 ? 0 : (int32_t)count);
    kvp_step_destroy(&world.steps, step);
  }
  world_deinit(&world);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_schedules),
      cmocka_unit_test(test_shared_arrays_are_checked_once),
      cmocka_unit_test(test_steps_in_flight),
      cmocka_unit_test(test_device_ops_are_bounded),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
