/* What many layers share is looked at once, and goes to the device once; what a step may give it has a bound. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/executor/step_layout.h"
#include "tests/unit/intake_fixture.h"

/* ---- arrays that layers share ---- */

enum { shared_slots = 50, shared_positions = 10, gathered_from = 60 };

static int32_t slots[shared_slots], gather[shared_slots], positions[shared_slots];
static const int32_t history[] = {0, 0, 100, 0, 2, 0, 50, 100};
static const int32_t compressed[] = {1, 0, 25, 0, 3, 0, 7, 25};

static void arrays_fill(void) {
  for (int32_t i = 0; i < shared_slots; i++) {
    slots[i] = i % 7 == 0 ? -1 : ring_tokens + i;
    gather[i] = i % 7 == 0 ? -1 : i;
    positions[i] = i % 7 == 0 ? -5 : shared_positions - 1 - i % shared_positions;
  }
}

/* Numbers of the arrays above in the step. */
struct shared {
  uint32_t slots;
  uint32_t gather;
  uint32_t positions;
  uint32_t history;
  uint32_t compressed;
};

static struct shared arrays_add(struct step_encoder *encoder) {
  arrays_fill();
  return (struct shared){.slots = step_encoder_array(encoder, slots, sizeof slots),
                         .gather = step_encoder_array(encoder, gather, sizeof gather),
                         .positions = step_encoder_array(encoder, positions, sizeof positions),
                         .history = step_encoder_array(encoder, history, sizeof history),
                         .compressed = step_encoder_array(encoder, compressed, sizeof compressed)};
}

/* The layer's window, chunk and compressed rows, of a region of the paged pool; the chunk goes to the ring. */
static void layer_assemble(struct step_encoder *encoder, const struct shared *arrays, uint32_t layer,
                           uint32_t region) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_ASSEMBLE);
  op->pool_id = ring_pool;
  op->layer = layer;
  op->total_k = 150;
  op->argument = shared_slots;
  op->numbers[0] = 32;
  op->source = rows_at(own_buffer, 0, gathered_from);
  op->second = rows_at(own_buffer, 1, 150 + shared_slots + 32);
  op->second_pool_id = paged_pool;
  op->second_region = region;
  op->second_layer = layer;
  op->arrays[0] = arrays->history;
  op->arrays[1] = arrays->gather;
  op->arrays[2] = arrays->slots;
  op->arrays[3] = arrays->compressed;
}

static void layer_fused_store(struct step_encoder *encoder, const struct shared *arrays, uint32_t layer) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_FUSED_STORE);
  op->pool_id = ring_pool;
  op->layer = layer;
  op->source = rows_at(own_buffer, 0, gathered_from);
  op->third = rows_at(own_buffer, 20, 1);
  op->fourth = step_view(own_buffer, 1 << 22, shared_positions, 64, 64);
  op->arrays[0] = arrays->slots;
  op->arrays[1] = arrays->positions;
  op->numbers[0] = 0x3F800000; /* eps 1 */
}

/* As it is launched: the device ops of all ops, one chain. */
static const struct kvp_device_op *step_chain(struct kvp_step *step) {
  static struct kvp_device_op signal;
  struct kvp_device_op *first = &signal;
  signal = (struct kvp_device_op){.kind = KVP_DEVICE_SIGNAL};
  for (uint32_t i = step->op_count; i > 0; i--) {
    step->ops[i - 1].last->next = first;
    first = step->ops[i - 1].first;
  }
  return first;
}

static uint64_t padded(uint64_t bytes) {
  return (bytes + kvp_step_layout_alignment_bytes - 1) / kvp_step_layout_alignment_bytes *
         kvp_step_layout_alignment_bytes;
}

/* Of arrays whose slots are compared with what is loaded: marked once, and compared once. */
enum { compared_slots = 2 * shared_slots };

/* Sixty-one layers that load and store by the same arrays: as many elements are looked at, and as many bytes uploaded, as
 * by one layer. */
static void test_one_check_and_one_upload(void **state) {
  (void)state;
  static struct kvp_step_layout layout;
  const uint64_t elements = 3 * shared_slots + compared_slots + 8 + 8;
  for (uint32_t count = 1; count <= layers; count += layers - 1) {
    struct intake_fixture world;
    struct step_encoder encoder;
    struct kvp_error error;
    fixture_init(&world);
    step_encoder_init(&encoder, 1, session, 1);
    const struct shared arrays = arrays_add(&encoder);
    for (uint32_t layer = 0; layer < count; layer++) {
      layer_assemble(&encoder, &arrays, layer, 0);
      layer_fused_store(&encoder, &arrays, layer);
    }
    struct kvp_step *step = fixture_check(&world, &encoder, &error);
    if (error.status != KVP_OK) {
      fail_msg("%s", error.text);
    }
    assert_int_equal(world.intake.elements_checked, elements);
    kvp_step_layout_make(&layout, step_chain(step), 64);
    assert_int_equal(layout.op_count, 4 * count); /* load, load, store; fused store */
    assert_int_equal(layout.array_count, (1 + 1 + 2 + 2) * count);
    assert_int_equal(layout.group_count, 5); /* pieces of the step that are copied */
    assert_int_equal(layout.arrays_bytes, 3 * padded(sizeof slots) + 2 * padded(sizeof history));
    for (size_t layer = 0; layer < count; layer++) {
      const struct kvp_device_op *load = step->ops[2 * layer].first;
      const struct kvp_device_op *second_load = load->next;
      const struct kvp_device_op *store = second_load->next;
      const struct kvp_device_op *fused = step->ops[2 * layer + 1].first;
      assert_int_equal(load->kind, KVP_DEVICE_LOAD);
      assert_int_equal(second_load->kind, KVP_DEVICE_LOAD);
      assert_int_equal(store->kind, KVP_DEVICE_STORE);
      assert_ptr_equal(store, step->ops[2 * layer].last);
      assert_int_equal(store->params.store.rows_skipped, 8);
      assert_int_equal(fused->params.fused_store.store.rows_skipped, 8);
      assert_ptr_equal(fused->params.fused_store.store.slots, store->params.store.slots);
      assert_ptr_equal(store->params.store.gather, step->ops[0].last->params.store.gather);
      assert_true(store->params.store.back_is_copy); /* the chunk's rows of the output are its, too */
      assert_true(!load->joins && second_load->joins && store->joins && !fused->joins);
      assert_ptr_equal(load->params.load.segments, step->ops[0].first->params.load.segments);
      assert_ptr_equal(second_load->params.load.segments, step->ops[0].first->next->params.load.segments);
    }
    kvp_step_destroy(&world.steps, step);
    fixture_deinit(&world);
  }
}

/* A region of another geometry: the segments are looked at once more, and uploaded no second time. */
static void test_one_check_a_geometry(void **state) {
  (void)state;
  static struct kvp_step_layout layout;
  struct intake_fixture world;
  struct step_encoder encoder;
  struct kvp_error error;
  fixture_init(&world);
  step_encoder_init(&encoder, 1, session, 1);
  const struct shared arrays = arrays_add(&encoder);
  for (uint32_t layer = 0; layer < layers; layer++) {
    layer_assemble(&encoder, &arrays, layer, layer % 2);
  }
  struct kvp_step *step = fixture_check(&world, &encoder, &error);
  assert_int_equal(error.status, KVP_OK);
  assert_int_equal(world.intake.elements_checked, 2 * shared_slots + compared_slots + 8 + 2 * 8);
  kvp_step_layout_make(&layout, step_chain(step), 64);
  assert_int_equal(layout.arrays_bytes, 2 * padded(sizeof slots) + 2 * padded(sizeof history));
  kvp_step_destroy(&world.steps, step);

  /* And what fits one geometry only is refused for the other, by the op that has it. */
  step_encoder_init(&encoder, 1, session, 1);
  const int32_t longer[] = {1, 0, 26, 0, 3, 0, 6, 26};
  struct shared others = arrays_add(&encoder);
  others.compressed = step_encoder_array(&encoder, longer, sizeof longer);
  layer_assemble(&encoder, &others, 0, 0);
  layer_assemble(&encoder, &others, 1, 1);
  step = fixture_check(&world, &encoder, &error);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  assert_int_equal(error.op, 1);
  assert_string_equal(error.array, "compressed.segments");
  assert_int_equal(error.position, 2);
  assert_int_equal(error.value, 26);
  kvp_step_destroy(&world.steps, step);
  fixture_deinit(&world);
}

/* ---- bounds ---- */

/* Whole pools many times over: what a step may give the device has a bound. */
static void test_device_ops_are_bounded(void **state) {
  (void)state;
  enum { regions = kvp_regions_per_pool_max };
  struct intake_fixture world;
  struct step_encoder encoder;
  struct kvp_error error;
  fixture_init(&world);
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
  fixture_deinit(&world);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_one_check_and_one_upload),
      cmocka_unit_test(test_one_check_a_geometry),
      cmocka_unit_test(test_device_ops_are_bounded),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
