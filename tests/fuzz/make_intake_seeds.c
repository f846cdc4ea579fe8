/* Writes the intake fuzzer's seeds: one good step of each kind of op, and a few that are mixed.
 *
 *   make_intake_seeds FOLDER
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/timeline_wire.h"
#include "tests/fuzz/intake_world.h"
#include "tests/unit/exec_harness.h"

static void write_seed(const char *folder, const char *name, uint8_t flags, struct step_encoder *encoder) {
  char path[1024];
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  (void)snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "we");
  HARNESS_CHECK(file != NULL);
  HARNESS_CHECK(fwrite(&flags, 1, 1, file) == 1 && fwrite(encoded, 1, bytes, file) == bytes);
  HARNESS_CHECK(fclose(file) == 0);
  free(encoded);
  step_encoder_deinit(encoder);
}

static void add_store(struct step_encoder *encoder, uint32_t region, uint32_t row_bytes, bool has_cast_back) {
  static const int32_t slots[] = {0, -1, 2, 1, 16};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_STORE);
  op->pool_id = intake_world_pool;
  op->region = region;
  op->source = step_view(1, 0, 6, row_bytes, row_bytes);
  if (has_cast_back) {
    op->second = step_view(3, 1024, 6, row_bytes, row_bytes);
  }
  op->arrays[0] = step_encoder_array(encoder, slots, region == 3 ? 12 : sizeof slots);
}

static void add_load(struct step_encoder *encoder, uint32_t region, uint32_t row_bytes, bool has_scales) {
  static const int32_t segments[] = {1, 0, 1, 8, -1, 0, 1, 0, 0, 0, 1, 2, 4, 0, 0, 3};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_LOAD);
  op->pool_id = intake_world_pool;
  op->region = region;
  op->layer = 1;
  op->total_k = 10;
  op->source = step_view(3, 0, 12, row_bytes, row_bytes);
  if (has_scales) {
    op->second = step_view(1, 4096, 12, 4, 4);
  }
  op->arrays[0] = step_encoder_array(encoder, segments, sizeof segments);
}

static void add_transfers(struct step_encoder *encoder) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_BUFFER_WRITE);
  op->source = step_view(1, 3, 2, 5, 7);
  op->arrays[0] = step_encoder_array(encoder, "0123456789", 10);
  op = step_encoder_op(encoder, KVP_OP_BUFFER_READ);
  op->source = step_view(1, 3, 2, 5, 7);
  op = step_encoder_op(encoder, KVP_OP_BUFFER_FILL);
  op->source = step_view(3, 100, 3, 9, 32);
  op->argument = 7;
  op = step_encoder_op(encoder, KVP_OP_REGION_READ);
  op->pool_id = intake_world_pool;
  op->argument = 50;
  op->total_k = 200;
}

/* Layer 0 of v41: a history of 6 rows, a gathered chunk of 3, stored; 4 compressed rows. */
static struct kvp_wire_op *add_assemble(struct step_encoder *encoder, uint32_t flags) {
  static const int32_t history[] = {1, 10, 14, 0, 1, 0, 2, 4};
  static const int32_t compressed[] = {2, 3, 7, 0};
  static const int32_t gather[] = {1, -1, 0};
  static const int32_t slots[] = {27, -1, 28};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_ASSEMBLE);
  op->flags = flags;
  op->pool_id = intake_world_ring;
  op->second_pool_id = intake_world_pool;
  op->total_k = 6;
  op->argument = 3;
  op->numbers[0] = 4;
  op->second = step_view(3, 0, 14, 1024, 1024);
  op->arrays[0] = step_encoder_array(encoder, history, sizeof history);
  op->arrays[3] = step_encoder_array(encoder, compressed, sizeof compressed);
  if ((flags & KVP_OP_CHUNK_RESERVED) == 0) {
    op->source = step_view(1, 0, 2, 1024, 1024);
    op->arrays[1] = step_encoder_array(encoder, gather, sizeof gather);
    op->arrays[2] = step_encoder_array(encoder, slots, sizeof slots);
  }
  return op;
}

static void add_fused_store(struct step_encoder *encoder, uint32_t layer) {
  static const int32_t slots[] = {700, -1, 3};
  static const int32_t positions[] = {2, 9, 0};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_FUSED_STORE);
  op->pool_id = intake_world_ring;
  op->region = 2;
  op->layer = layer;
  op->flags = KVP_OP_ROUND_TO_BF16 | KVP_OP_HADAMARD | (layer == 0 ? KVP_OP_NEOX : 0U);
  op->source = step_view(1, 0, 3, 16, 16);
  op->third = step_view(1, 64, 1, 16, 16);
  op->fourth = step_view(1, 128, 4, 16, 16);
  op->second = layer == 0 ? step_view(3, 20480, 3, 16, 32) : op->second;
  op->arrays[0] = step_encoder_array(encoder, slots, sizeof slots);
  op->arrays[1] = layer == 0 ? step_encoder_buffer_array(encoder, 1, 1024, sizeof positions)
                             : step_encoder_array(encoder, positions, sizeof positions);
  op->argument = 4;
  op->numbers[0] = 0x358637BD; /* 1e-6 */
}

static void add_indices(struct step_encoder *encoder) {
  static const int32_t tables[] = {0, 2, 1, -1};
  static const int32_t valid[] = {3, 2};
  static const int32_t topk[] = {5, 20, 0, 1, 2, -1};
  static const int32_t offset_len[] = {15, 4, 0, 0};
  static const int32_t pivots[] = {3, 2, 9, 1, 0, 9, 0, 0};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_CONVERT_KV_INDEX);
  op->pool_id = intake_world_pool;
  op->source = step_view(3, 0, 2, 12, 16);
  op->argument = 1;
  op->numbers[0] = 2;
  op->arrays[0] = step_encoder_array(encoder, tables, sizeof tables);
  op->arrays[1] = step_encoder_array(encoder, valid, sizeof valid);
  op = step_encoder_op(encoder, KVP_OP_CONVERT_KV_INDEX);
  *op = encoder->ops[0];
  op->source = (struct kvp_wire_view){0};
  op->second = step_view(3, 64, 3, 12, 12);
  op->arrays[0] = step_encoder_buffer_array(encoder, 1, 0, sizeof tables);
  op->arrays[2] = step_encoder_array(encoder, topk, sizeof topk);
  op = step_encoder_op(encoder, KVP_OP_SWA_INDEX_DECODE);
  op->pool_id = intake_world_ring;
  op->argument = 5;
  op->second = step_view(3, 128, 2, 20, 20);
  op->arrays[0] = step_encoder_array(encoder, offset_len, sizeof offset_len);
  op = step_encoder_op(encoder, KVP_OP_EXPAND_SWA_INDEX);
  op->argument = 4;
  op->second = step_view(3, 256, 2, 16, 16);
  op->arrays[0] = step_encoder_array(encoder, pivots, sizeof pivots);
  op = step_encoder_op(encoder, KVP_OP_KV_INDEX_CAT);
  op->source = step_view(3, 128, 2, 20, 20);
  op->second = step_view(3, 512, 2, 32, 32);
  op->arrays[1] = step_encoder_array(encoder, topk, sizeof topk);
  op->numbers[0] = 5;
  op->numbers[1] = 3;
  op->argument = 9;
}

static void add_blocks(struct step_encoder *encoder) {
  static const int32_t pairs[] = {4, 0, 4, 1};
  static const int32_t blocks[] = {2, 1};
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_COPY_BLOCKS);
  op->pool_id = intake_world_pool;
  op->arrays[0] = step_encoder_array(encoder, pairs, sizeof pairs);
  op = step_encoder_op(encoder, KVP_OP_ZERO_BLOCKS);
  op->pool_id = intake_world_ring;
  op->arrays[0] = step_encoder_array(encoder, blocks, sizeof blocks);
}

static void begin(struct step_encoder *encoder, uint32_t owner) {
  step_encoder_init(encoder, 1, owner, intake_world_epoch);
}

int main(int argc, char **argv) {
  static const uint32_t row_bytes[] = {1024, 256, 16, 1024};
  static const uint32_t loaded_bytes[] = {1024, 64, 16, 1024};
  struct step_encoder encoder;
  char name[64];
  HARNESS_CHECK(argc == 2);
  for (uint32_t region = 0; region < intake_world_regions; region++) {
    (void)snprintf(name, sizeof name, "store_%u", region);
    begin(&encoder, intake_world_session);
    add_store(&encoder, region, row_bytes[region], region != 1);
    write_seed(argv[1], name, 0, &encoder);
    (void)snprintf(name, sizeof name, "load_%u", region);
    begin(&encoder, region == 2 ? 0 : intake_world_session);
    add_load(&encoder, region, loaded_bytes[region], region == 1);
    write_seed(argv[1], name, 0, &encoder);
  }
  begin(&encoder, intake_world_session);
  add_transfers(&encoder);
  write_seed(argv[1], "transfers", 0, &encoder);
  begin(&encoder, intake_world_session);
  add_transfers(&encoder);
  write_seed(argv[1], "foreign_ring", 2, &encoder);

  begin(&encoder, intake_world_session);
  add_store(&encoder, 2, 16, false);
  add_load(&encoder, 2, 16, false);
  encoder.ops[0].source.rows = 10;
  encoder.ops[0].arrays[0] = step_encoder_buffer_array(&encoder, 3, 128, 40);
  encoder.ops[1].arrays[0] = step_encoder_buffer_array(&encoder, 1, 256, 48);
  encoder.ops[1].source = step_view(3, 8192, 64, 16, 32);
  write_seed(argv[1], "buffer_arrays", 0, &encoder);

  begin(&encoder, 0); /* a long segment, shared by two layers */
  const int32_t segments[] = {1, 0, 600, 0, 2, 10, 20, 700};
  for (uint32_t layer = 0; layer < 2; layer++) {
    add_load(&encoder, 2, 16, false);
    encoder.ops[layer].layer = layer;
    encoder.ops[layer].total_k = 710;
    encoder.ops[layer].source = step_view(3, (uint64_t)layer * 16, 710, 16, 32);
    if (layer == 0) {
      encoder.ops[0].arrays[0] = step_encoder_array(&encoder, segments, sizeof segments);
    } else {
      encoder.ops[1].arrays[0] = encoder.ops[0].arrays[0];
    }
  }
  write_seed(argv[1], "long_segment", 0, &encoder);
  begin(&encoder, intake_world_session);
  write_seed(argv[1], "empty", 1, &encoder);

  begin(&encoder, intake_world_session); /* kept by the second; the third reads what the first has stored to */
  (void)add_assemble(&encoder, 0);
  add_assemble(&encoder, KVP_OP_KEEP_COMPRESSED | KVP_OP_CHUNK_RESERVED)->layer = 1;
  (void)add_assemble(&encoder, KVP_OP_CHUNK_CAST_BACK | KVP_OP_ALLOW_STORE_BEFORE_LOAD);
  write_seed(argv[1], "assemble", 0, &encoder);
  begin(&encoder, intake_world_session);
  struct kvp_wire_op *op = add_assemble(&encoder, 0);
  op->arrays[1] = step_encoder_buffer_array(&encoder, 1, 4096, 12);
  op->arrays[2] = step_encoder_buffer_array(&encoder, 1, 4096 + 12, 12);
  (void)add_assemble(&encoder, KVP_OP_CHUNK_RESERVED);
  write_seed(argv[1], "assemble_buffers", 0, &encoder);
  begin(&encoder, intake_world_session);
  add_fused_store(&encoder, 0);
  add_fused_store(&encoder, 1);
  write_seed(argv[1], "fused_store", 0, &encoder);
  begin(&encoder, intake_world_session);
  add_indices(&encoder);
  write_seed(argv[1], "indices", 0, &encoder);
  begin(&encoder, intake_world_session); /* of a worker: each op waits for the one before */
  encoder.header.base = 7;
  encoder.header.deadline_ns = 1000;
  encoder.header.flags = KVP_STEP_NOT_ACCEPTED_TOLD;
  add_fused_store(&encoder, 0);
  add_fused_store(&encoder, 1);
  for (uint32_t i = 0; i < 2; i++) {
    encoder.ops[i].flags |= KVP_OP_SIGNALS | (i > 0 ? KVP_OP_WAITS : 0U);
    encoder.ops[i].signal = (struct kvp_wire_point){.word = kvp_client_words + i, .value = 1};
    encoder.ops[i].wait = (struct kvp_wire_point){.word = i * kvp_client_words, .value = i};
  }
  write_seed(argv[1], "points", 2, &encoder);
  begin(&encoder, intake_world_session);
  add_blocks(&encoder);
  write_seed(argv[1], "blocks", 0, &encoder);
  return 0;
}
