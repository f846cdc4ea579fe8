/* Every field of every op, every entry of its arrays, and the step's own numbers, one at a time, as a number that
 * nobody should send: the step is refused and says why, or it runs and touches nothing that isn't the session's.
 *
 * The sanitizers look for what overflows on the way.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/good_ops.h"

enum { first_foreign_block = 3, word_bytes = 4 };

typedef struct kvp_wire_op *good_op_fn(struct step_encoder *encoder);

static good_op_fn *const good_ops[] = {
    good_store,      good_load,   good_assemble, good_fused_store, good_convert,
    good_swa_decode, good_expand, good_cat,      good_copy_blocks, good_zero_blocks,
};

static const uint32_t hostile_words[] = {
    1, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FC00000, 0x01000000, 0xFFFFFFF0,
};
static const uint64_t hostile_numbers[] = {
    UINT64_C(1) << 31, UINT64_C(1) << 32,   UINT64_C(1) << 62,     UINT64_C(1) << 63,  UINT64_MAX,
    UINT64_MAX - 15,   UINT64_MAX / 16 + 1, UINT64_MAX / 1024 + 1, (uint64_t)INT64_MAX};
enum {
  good_op_count = sizeof good_ops / sizeof good_ops[0],
  word_count = sizeof hostile_words / sizeof hostile_words[0],
  number_count = sizeof hostile_numbers / sizeof hostile_numbers[0],
};

static struct {
  struct world world;
  uint32_t refused;
  uint32_t run;
} it;

static void setup(void) {
  world_init(&it.world);
  world_ring_attach(&it.world);
  memset(it.world.main, 0x3C, main_bytes);
  memset(it.world.index, 0x3C, index_bytes);
  memset(it.world.ring, 0x3C, ring_bytes);
  memset(it.world.narrow, 0x3C, narrow_bytes);
}

static void expect_foreign_untouched(const uint8_t *memory, uint32_t region_layers, uint64_t stride) {
  for (uint32_t layer = 0; layer < region_layers; layer++) {
    const uint8_t *blocks = memory + (layer * num_blocks + first_foreign_block) * stride;
    const uint64_t bytes = (num_blocks - first_foreign_block) * stride;
    assert_int_equal(blocks[0], 0x3C);
    assert_memory_equal(blocks, blocks + 1, bytes - 1);
  }
}

/* What may have been written is what the step's session has. */
static void done_check(void) {
  expect_foreign_untouched(it.world.main, main_layers, v41_block_stride);
  expect_foreign_untouched(it.world.index, 1, index_block_stride);
  expect_foreign_untouched(it.world.ring, ring_layers, ring_stride);
  expect_foreign_untouched(it.world.narrow, narrow_layers, narrow_layer_bytes / num_blocks);
  it.run++;
}

static void refusal_check(const struct kvp_error *error) {
  assert_int_not_equal(error->status, KVP_OK);
  assert_true(error->array[0] != '\0');
  if (error->op >= 0) {
    assert_int_equal(error->op, 0);
    assert_non_null(strstr(error->text, "op 0 "));
  } else {
    assert_memory_equal(error->text, "step", 4);
  }
  it.refused++;
}

/* Posts the bytes and takes what comes of them. */
static void try(const uint8_t *encoded, uint32_t bytes) {
  assert_true(exec_harness_post(&it.world.link, KVP_COMMAND_STEP, ++it.world.tag, encoded, bytes));
  struct exec_completion completion = exec_harness_take(&it.world.link);
  assert_int_equal(completion.tag, it.world.tag);
  if (completion.kind == KVP_COMPLETION_REFUSED) {
    refusal_check((const struct kvp_error *)(const void *)completion.payload);
    free(completion.payload);
    return;
  }
  assert_int_equal(completion.kind, KVP_COMPLETION_ACCEPTED);
  completion = exec_harness_take(&it.world.link);
  assert_int_equal(completion.kind, KVP_COMPLETION_DONE);
  free(completion.payload);
  done_check();
}

/* With the bytes at that offset as they shall be; put back afterwards. */
static void try_with(uint8_t *encoded, uint32_t bytes, size_t offset, const void *value, size_t value_bytes) {
  uint8_t before[sizeof(uint64_t)];
  memcpy(before, encoded + offset, value_bytes);
  memcpy(encoded + offset, value, value_bytes);
  try(encoded, bytes);
  memcpy(encoded + offset, before, value_bytes);
}

/* The step's counts and lengths; owner and queue may be anything. */
static bool is_swept(size_t offset) {
  return offset != offsetof(struct kvp_wire_step, owner) && offset != offsetof(struct kvp_wire_step, queue);
}

static void sweep(good_op_fn *good_op) {
  struct step_encoder encoder;
  uint32_t bytes = 0;
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)good_op(&encoder);
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  const size_t tables = sizeof encoder.header + sizeof encoder.ops[0];
  try(encoded, bytes);
  for (size_t offset = 0; offset + word_bytes <= bytes; offset += word_bytes) {
    for (size_t i = 0; i < word_count && is_swept(offset); i++) {
      try_with(encoded, bytes, offset, &hostile_words[i], sizeof hostile_words[i]);
    }
    const bool is_number = offset % sizeof(uint64_t) == 0 && offset >= sizeof encoder.header &&
                           offset < tables + encoder.header.array_count * sizeof(struct kvp_wire_array);
    for (size_t i = 0; i < number_count && is_number; i++) {
      try_with(encoded, bytes, offset, &hostile_numbers[i], sizeof hostile_numbers[i]);
    }
  }
  try(encoded, bytes); /* it is none the worse for it */
  free(encoded);
  step_encoder_deinit(&encoder);
}

/* The same with its first array in a buffer, where nobody looks at it before. */
static void sweep_in_buffer(good_op_fn *good_op) {
  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = good_op(&encoder);
  if (op->arrays[0] != KVP_WIRE_NO_ARRAY && op->kind != KVP_OP_COPY_BLOCKS && op->kind != KVP_OP_ZERO_BLOCKS) {
    enum { at = 3 << 20 };
    const struct kvp_wire_array *array = &encoder.arrays[op->arrays[0]];
    for (uint64_t entry = 0; entry < array->bytes / word_bytes; entry++) {
      for (size_t i = 0; i < word_count; i++) {
        struct step_encoder changed = encoder;
        uint32_t bytes = 0;
        changed.arrays[op->arrays[0]].buffer_id = buffer;
        changed.arrays[op->arrays[0]].offset_bytes = at;
        memcpy(it.world.buffer + at, encoder.data + array->offset_bytes, array->bytes);
        memcpy(it.world.buffer + at + entry * word_bytes, &hostile_words[i], word_bytes);
        uint8_t *encoded = step_encoder_encode(&changed, &bytes);
        try(encoded, bytes);
        free(encoded);
      }
    }
  }
  step_encoder_deinit(&encoder);
}

static void test_hostile_numbers(void **state) {
  (void)state;
  setup();
  for (size_t i = 0; i < good_op_count; i++) {
    const uint32_t refused_before = it.refused, run_before = it.run;
    sweep(good_ops[i]);
    assert_true(it.refused - refused_before > 300);
    assert_true(it.run - run_before >= 2);
    sweep_in_buffer(good_ops[i]);
  }
  print_message("%u refused, %u run\n", it.refused, it.run);
  world_deinit(&it.world);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_hostile_numbers)};
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
