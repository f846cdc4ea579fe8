/* A running executor with a pool, buffers of two sessions and blocks in every state: what its tests work on. */
#ifndef KVPOOL_TESTS_EXECUTOR_WORLD_H
#define KVPOOL_TESTS_EXECUTOR_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/exec_harness.h"

enum {
  session = 5,
  other_session = 9,
  step_epoch = 15,
  num_blocks = 8,
  tokens_per_block = 64,
  v41_record_bytes = 528,
  v41_row_bytes = 1024,
  v41_block_stride = 33792, /* 64 * 528, a multiple of 1056 */
  main_layers = 2,
  main_bytes = main_layers * num_blocks * v41_block_stride,
  index_tokens_per_block = 16,
  index_block_stride = 1088, /* 16 * 68 */
  index_bytes = num_blocks * index_block_stride,
  ring_tokens = 32,
  ring_layers = 3,
  ring_stride = 16896, /* 32 * 528, a multiple of 1056 */
  ring_bytes = ring_layers * num_blocks * ring_stride,
  narrow_row_bytes = 32, /* bf16, 16 elements */
  narrow_layers = 2,
  narrow_layer_bytes = num_blocks * ring_tokens * narrow_row_bytes,
  narrow_bytes = narrow_layers * narrow_layer_bytes,
  buffer_bytes = 4 << 20,
  pool_id = 7,
  ring_pool_id = 9,
  main_memory = 1,
  index_memory = 2,
  buffer_memory = 3,
  other_memory = 4,
  ring_memory = 5,
  narrow_memory = 6,
  buffer = 100,       /* the session's */
  other_buffer = 101, /* another session's */
  watchdog_seconds = 600,
};

/* A pool of a v41 and an index_fp4 region, buffers of two sessions, and blocks in every state. */
struct world {
  struct exec_harness link;
  int main_fd, index_fd, buffer_fd, other_fd, owner_fd;
  int ring_fd, narrow_fd; /* 0: there is no ring pool */
  uint8_t *ring;
  uint8_t *narrow;
  uint8_t *main;
  uint8_t *index;
  uint8_t *buffer;
  uint64_t *owners;
  uint64_t tag;
};

/* Blocks 0, 1, 2 are the session's; 3 was assigned after the step's epoch; 4 is sealed; 5 quarantined; 6 another
 * session's; 7 free. */
void world_init(struct world *world);
void world_init_with(struct world *world, const struct exec_harness_options *options);
/* The executor must end with exit code 0: no leak either, where that is looked for. */
void world_deinit(struct world *world);

struct kvp_control_pool world_pool_spec(void);
/* Attaches pool and buffers, whose memories are there. */
void world_pool_attach(struct world *world);

/* A ring pool beside the other one: regions "ring" (v41) and "narrow" (bf16), blocks in the same states. */
void world_ring_attach(struct world *world);

/* Prints the error's text before it fails. */
void world_assert_ok(struct kvp_error error);

/* Posts a step; returns its tag. */
uint64_t world_post(struct world *world, const struct step_encoder *encoder);
/* Runs a step that is to be accepted; its DONE payload, reports then results, is the caller's. */
struct exec_completion world_run(struct world *world, const struct step_encoder *encoder);
struct kvp_wire_report world_report(const struct exec_completion *done, uint32_t op);
/* Runs a step of one op, gives its report, and frees the encoder. */
struct kvp_wire_report world_run_one(struct world *world, struct step_encoder *encoder);
/* Runs a step that is to be refused. */
struct kvp_error world_refused(struct world *world, const struct step_encoder *encoder);

/* A store from 256 rows at the buffer's beginning; a load to 1024 rows from 1 MiB on. Layer 0 of region "main". */
struct kvp_wire_op *world_add_store(struct step_encoder *encoder, const int32_t *slots, uint32_t count);
struct kvp_wire_op *world_add_load(struct step_encoder *encoder, const int32_t *segments, uint32_t count,
                                   uint64_t total_k);

/* A load or store in layer `layer` of "ring"; views as above. */
struct kvp_wire_op *world_add_ring_store(struct step_encoder *encoder, uint32_t layer, const int32_t *slots,
                                         uint32_t count);
struct kvp_wire_op *world_add_ring_load(struct step_encoder *encoder, uint32_t layer, const int32_t *segments,
                                        uint32_t count, uint64_t total_k);
/* An assemble with nothing but its output: `rows` rows from 1 MiB on. */
struct kvp_wire_op *world_add_assemble(struct step_encoder *encoder, uint64_t rows);

/* BF16 rows that v41 keeps exactly: multiples of 1/8 up to 15/8, which are e4m3 numbers times a power of two. */
uint16_t world_exact_bf16(uint32_t row, uint32_t column);
void world_rows_fill(uint8_t *out, uint32_t row_count, uint32_t width, uint32_t seed);

#endif
