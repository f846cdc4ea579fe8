/* The fixture of the executor's tests. */
#include "tests/unit/executor_world.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/format.h"
#include "proto/owner_entry.h"

static void owners_fill(uint64_t *owners) {
  owners[0] = kvp_owner_entry_make(10, KVP_BLOCK_LEASED, session);
  owners[1] = kvp_owner_entry_make(15, KVP_BLOCK_LEASED, session);
  owners[2] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  owners[3] = kvp_owner_entry_make(16, KVP_BLOCK_LEASED, session); /* after the step's epoch */
  owners[4] = kvp_owner_entry_make(10, KVP_BLOCK_SEALED, session);
  owners[5] = kvp_owner_entry_make(10, KVP_BLOCK_QUARANTINED, session);
  owners[6] = kvp_owner_entry_make(10, KVP_BLOCK_LEASED, other_session);
  owners[7] = kvp_owner_entry_make(10, KVP_BLOCK_FREE, 0);
}

struct kvp_control_pool world_pool_spec(void) {
  struct kvp_control_pool pool = {.pool_id = pool_id, .num_blocks = num_blocks, .region_count = 2};
  pool.regions[0] = (struct kvp_control_region){.memory_id = main_memory,
                                                .format = KVP_FORMAT_V41,
                                                .width = 512,
                                                .tokens_per_block = tokens_per_block,
                                                .num_layers = main_layers,
                                                .name = "main"};
  pool.regions[1] = (struct kvp_control_region){.memory_id = index_memory,
                                                .format = KVP_FORMAT_INDEX_FP4,
                                                .width = 128,
                                                .tokens_per_block = index_tokens_per_block,
                                                .num_layers = 1,
                                                .name = "index"};
  return pool;
}

void world_assert_ok(struct kvp_error error) {
  if (error.status != KVP_OK) {
    print_error("%s\n", error.text);
  }
  assert_int_equal(error.status, KVP_OK);
}

void world_pool_attach(struct world *world) {
  struct kvp_control_pool pool = world_pool_spec();
  world_assert_ok(
      exec_harness_request(&world->link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world->owner_fd, 1));
  world_assert_ok(exec_harness_buffer_attach(&world->link, buffer, buffer_memory, buffer_bytes, session));
  world_assert_ok(exec_harness_buffer_attach(&world->link, other_buffer, other_memory, buffer_bytes, other_session));
}

void world_ring_attach(struct world *world) {
  struct kvp_control_pool pool = {
      .pool_id = ring_pool_id, .num_blocks = num_blocks, .region_count = 2, .kind = KVP_POOL_RING};
  pool.regions[0] = (struct kvp_control_region){.memory_id = ring_memory,
                                                .format = KVP_FORMAT_V41,
                                                .width = 512,
                                                .tokens_per_block = ring_tokens,
                                                .num_layers = ring_layers,
                                                .name = "ring"};
  pool.regions[1] = (struct kvp_control_region){.memory_id = narrow_memory,
                                                .format = KVP_FORMAT_BF16,
                                                .width = narrow_row_bytes / 2,
                                                .tokens_per_block = ring_tokens,
                                                .num_layers = narrow_layers,
                                                .name = "narrow"};
  world_assert_ok(exec_harness_memory_create(&world->link, ring_memory, ring_bytes, &world->ring_fd));
  world_assert_ok(exec_harness_memory_create(&world->link, narrow_memory, narrow_bytes, &world->narrow_fd));
  world->ring = exec_harness_map(world->ring_fd, ring_bytes);
  world->narrow = exec_harness_map(world->narrow_fd, narrow_bytes);
  world_assert_ok(
      exec_harness_request(&world->link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world->owner_fd, 1));
}

void world_init_with(struct world *world, const struct exec_harness_options *options) {
  struct kvp_error error;
  memset(world, 0, sizeof *world);
  world_assert_ok(exec_harness_start(&world->link, options));
  world_assert_ok(exec_harness_memory_create(&world->link, main_memory, main_bytes, &world->main_fd));
  world_assert_ok(exec_harness_memory_create(&world->link, index_memory, index_bytes, &world->index_fd));
  world_assert_ok(exec_harness_memory_create(&world->link, buffer_memory, buffer_bytes, &world->buffer_fd));
  world_assert_ok(exec_harness_memory_create(&world->link, other_memory, buffer_bytes, &world->other_fd));
  world->owner_fd = kvp_memory_fd_create("owners", num_blocks * sizeof(uint64_t), &error);
  world->main = exec_harness_map(world->main_fd, main_bytes);
  world->index = exec_harness_map(world->index_fd, index_bytes);
  world->buffer = exec_harness_map(world->buffer_fd, buffer_bytes);
  world->owners = (uint64_t *)(void *)exec_harness_map(world->owner_fd, num_blocks * sizeof(uint64_t));
  owners_fill(world->owners);
  world_pool_attach(world);
}

void world_init(struct world *world) {
  world_init_with(world, &exec_harness_defaults);
}

static void world_unmap(struct world *world) {
  if (world->ring != NULL) {
    (void)munmap(world->ring, ring_bytes);
    (void)munmap(world->narrow, narrow_bytes);
    (void)close(world->ring_fd);
    (void)close(world->narrow_fd);
  }
  (void)munmap(world->main, main_bytes);
  (void)munmap(world->index, index_bytes);
  (void)munmap(world->buffer, buffer_bytes);
  (void)munmap(world->owners, num_blocks * sizeof(uint64_t));
  const int fds[] = {world->main_fd, world->index_fd, world->buffer_fd, world->other_fd, world->owner_fd};
  for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
    (void)close(fds[i]);
  }
}

void world_deinit(struct world *world) {
  assert_int_equal(exec_harness_stop(&world->link), 0); /* exit code 0: no leak either, where that is looked for */
  world_unmap(world);
}

uint64_t world_post(struct world *world, const struct step_encoder *encoder) {
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  assert_true(exec_harness_post(&world->link, KVP_COMMAND_STEP, ++world->tag, encoded, bytes));
  free(encoded);
  return world->tag;
}

struct exec_completion world_run(struct world *world, const struct step_encoder *encoder) {
  const uint64_t tag = world_post(world, encoder);
  struct exec_completion accepted = exec_harness_take(&world->link);
  if (accepted.kind == KVP_COMPLETION_REFUSED) {
    print_error("%s\n", ((struct kvp_error *)(void *)accepted.payload)->text);
  }
  assert_int_equal(accepted.kind, KVP_COMPLETION_ACCEPTED);
  assert_int_equal(accepted.tag, tag);
  assert_int_equal(accepted.payload_bytes, 0);
  struct exec_completion done = exec_harness_take(&world->link);
  assert_int_equal(done.kind, KVP_COMPLETION_DONE);
  assert_int_equal(done.tag, tag);
  assert_true(done.payload_bytes >= encoder->header.op_count * sizeof(struct kvp_wire_report));
  return done;
}

struct kvp_wire_report world_report(const struct exec_completion *done, uint32_t op) {
  struct kvp_wire_report report;
  memcpy(&report, done->payload + op * sizeof report, sizeof report);
  return report;
}

struct kvp_wire_report world_run_one(struct world *world, struct step_encoder *encoder) {
  assert_int_equal(encoder->header.op_count, 1);
  struct exec_completion done = world_run(world, encoder);
  struct kvp_wire_report report = world_report(&done, 0);
  free(done.payload);
  step_encoder_deinit(encoder);
  return report;
}

struct kvp_error world_refused(struct world *world, const struct step_encoder *encoder) {
  struct kvp_error error;
  const uint64_t tag = world_post(world, encoder);
  struct exec_completion completion = exec_harness_take(&world->link);
  assert_int_equal(completion.kind, KVP_COMPLETION_REFUSED);
  assert_int_equal(completion.tag, tag);
  assert_int_equal(completion.payload_bytes, sizeof error);
  memcpy(&error, completion.payload, sizeof error);
  free(completion.payload);
  return error;
}

struct kvp_wire_op *world_add_store(struct step_encoder *encoder, const int32_t *slots, uint32_t count) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_STORE);
  op->pool_id = pool_id;
  op->source = step_view(buffer, 0, 256, v41_row_bytes, v41_row_bytes);
  op->arrays[0] = step_encoder_array(encoder, slots, count * 4);
  return op;
}

struct kvp_wire_op *world_add_load(struct step_encoder *encoder, const int32_t *segments, uint32_t count,
                                   uint64_t total_k) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_LOAD);
  op->pool_id = pool_id;
  op->source = step_view(buffer, 1 << 20, 1024, v41_row_bytes, v41_row_bytes);
  op->total_k = total_k;
  op->arrays[0] = step_encoder_array(encoder, segments, count * 16);
  return op;
}

struct kvp_wire_op *world_add_ring_store(struct step_encoder *encoder, uint32_t layer, const int32_t *slots,
                                         uint32_t count) {
  struct kvp_wire_op *op = world_add_store(encoder, slots, count);
  op->pool_id = ring_pool_id;
  op->layer = layer;
  return op;
}

struct kvp_wire_op *world_add_ring_load(struct step_encoder *encoder, uint32_t layer, const int32_t *segments,
                                        uint32_t count, uint64_t total_k) {
  struct kvp_wire_op *op = world_add_load(encoder, segments, count, total_k);
  op->pool_id = ring_pool_id;
  op->layer = layer;
  return op;
}

struct kvp_wire_op *world_add_assemble(struct step_encoder *encoder, uint64_t rows) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_ASSEMBLE);
  op->second = step_view(buffer, 1 << 20, rows, v41_row_bytes, v41_row_bytes);
  return op;
}

uint16_t world_exact_bf16(uint32_t row, uint32_t column) {
  const float value = (float)((int)((row * 7 + column * 5) % 31) - 15) / 8.0F;
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

void world_rows_fill(uint8_t *out, uint32_t row_count, uint32_t width, uint32_t seed) {
  for (uint32_t row = 0; row < row_count; row++) {
    for (uint32_t column = 0; column < width; column++) {
      const uint16_t value = world_exact_bf16(row + seed, column);
      memcpy(out + ((size_t)row * width + column) * 2, &value, 2);
    }
  }
}
