/* Ops that are right. */
#include "tests/unit/good_ops.h"

enum { row = v41_row_bytes, out_offset = 1 << 20, scales_offset = 2 << 20 };

#define INTS(encoder, ...)                                                                                           \
  step_encoder_array((encoder), (int32_t[]){__VA_ARGS__}, (uint32_t)sizeof((int32_t[]){__VA_ARGS__}))

struct kvp_wire_op *good_store(struct step_encoder *encoder) {
  struct kvp_wire_op *op = world_add_store(encoder, (int32_t[]){5, -1, 130}, 3);
  op->layer = 1;
  op->second = step_view(buffer, out_offset, 3, row, row);
  return op;
}

struct kvp_wire_op *good_load(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_LOAD);
  op->pool_id = pool_id;
  op->region = 1;
  op->source = step_view(buffer, out_offset, 10, 64, 64);
  op->second = step_view(buffer, scales_offset, 10, 4, 8);
  op->total_k = 10;
  op->arrays[0] = INTS(encoder, 0, 8, 16, 2, -1, 0, 2, 0);
  return op;
}

struct kvp_wire_op *good_assemble(struct step_encoder *encoder) {
  struct kvp_wire_op *op = world_add_assemble(encoder, 30);
  op->pool_id = ring_pool_id;
  op->total_k = 12;
  op->arrays[0] = INTS(encoder, 1, 0, 8, 0, -1, 0, 4, 8);
  op->source = step_view(buffer, 0, 6, row, row);
  op->argument = 4;
  op->arrays[1] = INTS(encoder, 5, -1, 0, 2);
  op->arrays[2] = INTS(encoder, 3, -1, 4, -1);
  op->second_pool_id = pool_id;
  op->numbers[0] = 8;
  op->arrays[3] = INTS(encoder, 2, 0, 8, 0);
  return op;
}

struct kvp_wire_op *good_fused_store(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_FUSED_STORE);
  op->pool_id = pool_id;
  op->source = step_view(buffer, 0, 8, row, row);
  op->third = step_view(buffer, 16384, 1, row, row);
  op->fourth = step_view(buffer, 32768, 10, 256, 256);
  op->second = step_view(buffer, out_offset, 3, row, row);
  op->arrays[0] = INTS(encoder, 5, -1, 7);
  op->arrays[1] = INTS(encoder, 9, 0, 3);
  op->argument = 448;
  op->numbers[0] = 0x358637BD; /* 1e-6 */
  op->flags = KVP_OP_NEOX | KVP_OP_HADAMARD | KVP_OP_ROUND_TO_BF16;
  return op;
}

struct kvp_wire_op *good_convert(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_CONVERT_KV_INDEX);
  op->pool_id = pool_id;
  op->source = step_view(buffer, 0, 4, 12, 12);
  op->argument = 2;
  op->numbers[0] = 3;
  op->arrays[0] = INTS(encoder, 0, 1, 2, 2, 1, 0);
  op->arrays[1] = INTS(encoder, 3, 3, 3, 3);
  return op;
}

struct kvp_wire_op *good_swa_decode(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_SWA_INDEX_DECODE);
  op->pool_id = ring_pool_id;
  op->argument = 4;
  op->second = step_view(buffer, 0, 2, 16, 20);
  op->arrays[0] = INTS(encoder, 0, 1, 30, 4);
  return op;
}

struct kvp_wire_op *good_expand(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_EXPAND_SWA_INDEX);
  op->argument = 4;
  op->second = step_view(buffer, 0, 2, 16, 20);
  op->arrays[0] = INTS(encoder, 0, 1, 0, 1, 7, 2, 9, 2);
  return op;
}

struct kvp_wire_op *good_cat(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_KV_INDEX_CAT);
  op->source = step_view(buffer, 0, 2, 8, 8);
  op->third = step_view(buffer, 1024, 2, 12, 12);
  op->second = step_view(buffer, 2048, 2, 20, 20);
  op->numbers[0] = 2;
  op->numbers[1] = 3;
  op->argument = INT32_MAX;
  return op;
}

struct kvp_wire_op *good_copy_blocks(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_COPY_BLOCKS);
  op->pool_id = pool_id;
  op->arrays[0] = INTS(encoder, 0, 1, 0, 2);
  return op;
}

struct kvp_wire_op *good_zero_blocks(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_ZERO_BLOCKS);
  op->pool_id = pool_id;
  op->arrays[0] = INTS(encoder, 1);
  return op;
}
