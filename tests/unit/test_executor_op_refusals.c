/* What the executor refuses of assembles, fused stores, indices and whole blocks: op, array, position, value, and that
 * nothing of the step ran.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/good_ops.h"

enum { row = v41_row_bytes, out_offset = 1 << 20, array_offset = 3 << 20 };

struct refusal_world {
  struct world world;
  uint8_t *main_before;
  uint8_t *ring_before;
  uint8_t *buffer_before;
};

static struct step_encoder encoder;

/* The step of one op, which is the second behind a store that is good, is refused with these facts. */
static void refuse(struct refusal_world *it, enum kvp_status status, const char *array, int64_t position,
                   int64_t value, const char *text) {
  const struct kvp_error error = world_refused(&it->world, &encoder);
  step_encoder_deinit(&encoder);
  if (error.status != (int32_t)status || error.op != 1 || strcmp(error.array, array) != 0 ||
      error.position != position || error.value != value || strstr(error.text, text) == NULL) {
    fail_msg("expected %s op 1 %s[%lld] = %lld '%s', got %s op %d %s[%lld] = %lld '%s'", kvp_status_name(status),
             array, (long long)position, (long long)value, text, kvp_status_name((enum kvp_status)error.status),
             error.op, error.array, (long long)error.position, (long long)error.value, error.text);
  }
  assert_memory_equal(it->world.main, it->main_before, main_bytes);
  assert_memory_equal(it->world.ring, it->ring_before, ring_bytes);
  assert_memory_equal(it->world.buffer, it->buffer_before, buffer_bytes);
}

static uint32_t ints(const int32_t *values, uint32_t count) {
  return step_encoder_array(&encoder, values, count * 4);
}

#define INTS(...) ints((int32_t[]){__VA_ARGS__}, sizeof((int32_t[]){__VA_ARGS__}) / 4)

static void begin(void) {
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, (int32_t[]){0}, 1);
}

static void accept(struct refusal_world *it) {
  struct exec_completion done = world_run(&it->world, &encoder);
  step_encoder_deinit(&encoder);
  free(done.payload);
}

/* ---- assemble ---- */

static struct kvp_wire_op *assemble(void) {
  begin();
  return good_assemble(&encoder);
}

static void refusals_of_assemble_parts(struct refusal_world *it) {
  assemble()->arrays[0] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "swa.segments", -1, 12, "op 1 assemble: swa.segments are missing for 12 rows");
  assemble()->arrays[3] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "compressed.segments", -1, 8, "compressed.segments are missing for 8 rows");
  assemble()->second.flags = 0;
  refuse(it, KVP_INVALID_ARGUMENT, "out", -1, 0, "out is missing");
  assemble()->pool_id = pool_id;
  refuse(it, KVP_INVALID_ARGUMENT, "pool", -1, pool_id, "pool 7 is paged, a ring's is needed");
  assemble()->pool_id = 0;
  refuse(it, KVP_UNKNOWN_POOL, "pool", -1, 0, "pool 0");
  assemble()->layer = 3;
  refuse(it, KVP_UNKNOWN_LAYER, "layer", -1, 3, "layer 3, region 'ring' has 3");
  assemble()->second_pool_id = 8;
  refuse(it, KVP_UNKNOWN_POOL, "compressed.pool", -1, 8, "compressed.pool 8 is not on this device");
  assemble()->second_region = 2;
  refuse(it, KVP_UNKNOWN_REGION, "compressed.region", -1, 2, "compressed.region 2, the pool has 2");
  assemble()->second_layer = 2;
  refuse(it, KVP_UNKNOWN_LAYER, "compressed.layer", -1, 2, "compressed.layer 2");
  assemble()->second_region = 1;
  refuse(it, KVP_WRONG_FORMAT, "compressed.region", -1, 1, "format index_fp4 of region 'index' gives no BF16 rows");
  assemble()->region = 1;
  refuse(it, KVP_WRONG_FORMAT, "out", -1, 1024, "out.row_bytes = 1024, rows of region 'narrow' have 32");
  assemble()->total_k = 19;
  refuse(it, KVP_OUT_OF_RANGE, "compressed.total_k", -1, 8, "8 rows behind 23 of other parts, but out has 30 rows");
  assemble()->total_k = UINT64_MAX;
  refuse(it, KVP_OUT_OF_RANGE, "swa.total_k", -1, -1, "but out has 30 rows");
  struct kvp_wire_op *op = assemble();
  op->argument = UINT64_MAX - 3;
  refuse(it, KVP_OUT_OF_RANGE, "chunk", -1, -4, "rows behind 12 of other parts");
  assemble()->numbers[0] = UINT64_MAX - 15;
  refuse(it, KVP_OUT_OF_RANGE, "compressed.total_k", -1, -16, "behind 16 of other parts");
  assemble()->numbers[1] = 1;
  refuse(it, KVP_MALFORMED, "numbers", 1, 1, "it has no number 1");
  assemble()->fourth = step_view(buffer, 0, 1, 16, 16);
  refuse(it, KVP_INVALID_ARGUMENT, "fourth", -1, buffer, "there is none here");
  assemble()->flags = KVP_OP_NEOX;
  refuse(it, KVP_MALFORMED, "flags", -1, KVP_OP_NEOX, "flags are 0x10, known are 0xf");
}

static void refusals_of_assemble_segments(struct refusal_world *it) {
  struct kvp_wire_op *op = assemble();
  op->arrays[0] = INTS(1, 0, 33, 0);
  refuse(it, KVP_OUT_OF_RANGE, "swa.segments", 2, 33, "swa.segments[0].src_end = 33 > tokens_per_block 32");
  op = assemble();
  op->arrays[0] = INTS(1, 0, 8, 5);
  refuse(it, KVP_OUT_OF_RANGE, "swa.segments", 3, 5, "swa.segments[0].dst_offset = 5: rows up to 13 > total_k 12");
  op = assemble();
  op->arrays[0] = INTS(6, 0, 8, 0);
  refuse(it, KVP_NOT_OWNER, "swa.segments", 0, 6, "swa.segments[0].src_block = 6: block 6");
  op = assemble();
  op->arrays[3] = INTS(2, 0, 4, 0, 2, 0, 4, 3);
  refuse(it, KVP_INVALID_ARGUMENT, "compressed.segments", 7, 3, "its rows overlap those of compressed.segments[0]");
  op = assemble();
  op->arrays[3] = INTS(2, 0, 9, 0);
  refuse(it, KVP_OUT_OF_RANGE, "compressed.segments", 3, 0, "rows up to 9 > total_k 8");
  op = assemble();
  op->arrays[3] = INTS(3, 0, 8, 0);
  refuse(it, KVP_STALE_BLOCK, "compressed.segments", 0, 3, "epoch 16");
}

static void refusals_of_assemble_chunk(struct refusal_world *it) {
  struct kvp_wire_op *op = assemble();
  op->argument = 5;
  refuse(it, KVP_INVALID_ARGUMENT, "chunk", -1, 5, "chunk: 5 rows, chunk.gather has 4");
  op = assemble();
  op->arrays[1] = op->arrays[2] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "chunk", -1, 4, "chunk: 4 rows, chunk.source has 6");
  op = assemble();
  op->arrays[2] = INTS(3, -1, 4);
  refuse(it, KVP_INVALID_ARGUMENT, "chunk.store_slots", -1, 3, "3 slots for 4 rows");
  op = assemble();
  op->arrays[1] = INTS(5, 6, 0, 2);
  refuse(it, KVP_OUT_OF_RANGE, "chunk.gather", 1, 6, "chunk.gather[1] = 6 is not in [-1, 6)");
  op = assemble();
  op->arrays[1] = INTS(5, -1, -2, 2);
  refuse(it, KVP_OUT_OF_RANGE, "chunk.gather", 2, -2, "chunk.gather[2] = -2");
  op = assemble();
  op->arrays[1] = INTS(-1, -1, 0, 2);
  refuse(it, KVP_INVALID_ARGUMENT, "chunk.store_slots", 0, 3, "chunk.store_slots[0] = 3, but chunk.gather[0] = -1");
  op = assemble();
  op->arrays[2] = INTS(3, -1, 3, -1);
  refuse(it, KVP_INVALID_ARGUMENT, "chunk.store_slots", 2, 3,
         "chunk.store_slots[2] = 3 is chunk.store_slots[0] again");
  op = assemble();
  op->arrays[2] = INTS(4 * 32, -1, 3, -1);
  refuse(it, KVP_SEALED_BLOCK, "chunk.store_slots", 0, 128, "block 4 is sealed");
  op = assemble();
  op->flags = KVP_OP_CHUNK_RESERVED;
  refuse(it, KVP_INVALID_ARGUMENT, "chunk.gather", -1, 2, "there is none where the chunk is reserved");
  op = assemble();
  op->flags = KVP_OP_CHUNK_RESERVED;
  op->arrays[1] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "chunk.store_slots", -1, 3, "there is none where the chunk is reserved");
  op = assemble();
  op->flags = KVP_OP_CHUNK_RESERVED;
  op->arrays[1] = op->arrays[2] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "chunk.source", -1, buffer, "chunk.source: there is none here");
  op = assemble();
  op->source.flags = 0;
  op->arrays[1] = op->arrays[2] = KVP_WIRE_NO_ARRAY;
  op->flags = KVP_OP_CHUNK_CAST_BACK;
  refuse(it, KVP_INVALID_ARGUMENT, "chunk.cast_back", -1, 1, "there is none where the chunk is absent");
  op = assemble();
  op->source.flags = 0;
  op->arrays[1] = op->arrays[2] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "chunk.source", -1, 4, "chunk.source is missing for 4 rows");
  assemble()->source = step_view(buffer, 0, 6, 512, 1024);
  refuse(it, KVP_WRONG_FORMAT, "chunk.source", -1, 512, "chunk.source.row_bytes = 512");
  assemble()->source = step_view(buffer, out_offset + 29 * row, 6, row, row);
  refuse(it, KVP_INVALID_ARGUMENT, "out", -1, out_offset, "out overlaps chunk.source");
  op = assemble();
  op->arrays[1] = step_encoder_buffer_array(&encoder, buffer, out_offset + 64, 16);
  refuse(it, KVP_INVALID_ARGUMENT, "out", -1, out_offset, "out overlaps chunk.gather");
}

/* ---- fused store ---- */

static struct kvp_wire_op *fused(void) {
  begin();
  return good_fused_store(&encoder);
}

static void refusals_of_fused_numbers(struct refusal_world *it) {
  const uint32_t wrong_eps[] = {0, 0x80000000, 0xB58637BD, 0x7F800000, 0x7FC00000};
  for (size_t i = 0; i < sizeof wrong_eps / sizeof wrong_eps[0]; i++) {
    fused()->numbers[0] = wrong_eps[i];
    refuse(it, KVP_INVALID_ARGUMENT, "eps", -1, wrong_eps[i], "is not finite and > 0");
  }
  fused()->numbers[0] = (UINT64_C(1) << 32) | 0x358637BD;
  refuse(it, KVP_INVALID_ARGUMENT, "eps", -1, INT64_C(0x1358637BD), "eps = ");
  fused()->argument = 449;
  refuse(it, KVP_OUT_OF_RANGE, "rope_offset", -1, 449, "rope_offset 449 + 64 rotary_dims > 512 elements");
  fused()->argument = UINT64_MAX;
  refuse(it, KVP_OUT_OF_RANGE, "rope_offset", -1, -1, "rotary_dims > 512 elements");
  struct kvp_wire_op *op = fused();
  op->fourth = step_view(buffer, 32768, 10, 4, 16);
  refuse(it, KVP_INVALID_ARGUMENT, "cos_sin", -1, 4, "cos_sin.row_bytes = 4 is no even number of float32");
  fused()->flags = 128;
  refuse(it, KVP_MALFORMED, "flags", -1, 128, "flags are 0x80");
  op = fused();
  op->third.rows = 2;
  refuse(it, KVP_INVALID_ARGUMENT, "norm_weight", -1, 2, "norm_weight has 2 rows, one is needed");
  fused()->third = step_view(buffer, 16384, 1, 512, 512);
  refuse(it, KVP_WRONG_FORMAT, "norm_weight", -1, 512, "norm_weight.row_bytes = 512");
  fused()->fourth.row_stride_bytes = 264;
  refuse(it, KVP_INVALID_ARGUMENT, "cos_sin", -1, 264, "no multiple of 16");
}

static void refusals_of_fused_rows(struct refusal_world *it) {
  struct kvp_wire_op *op = fused();
  op->arrays[1] = INTS(9, 0, 10);
  refuse(it, KVP_OUT_OF_RANGE, "positions", 2, 10, "positions[2] = 10 is not in [0, 10), the rows of cos_sin");
  op = fused();
  op->arrays[1] = INTS(9, -1, 3); /* its row is cast back */
  refuse(it, KVP_OUT_OF_RANGE, "positions", 1, -1, "positions[1] = -1");
  op = fused(); /* not cast back: the row without a slot is not looked at, the others are */
  op->second = (struct kvp_wire_view){0};
  op->arrays[1] = INTS(9, -1, -7);
  refuse(it, KVP_OUT_OF_RANGE, "positions", 2, -7, "positions[2] = -7");
  op = fused();
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, array_offset, 12); /* nobody knows which are */
  op->second = (struct kvp_wire_view){0};
  op->arrays[1] = INTS(9, -1, 3);
  refuse(it, KVP_OUT_OF_RANGE, "positions", 1, -1, "positions[1] = -1");
  op = fused();
  op->arrays[1] = INTS(9, 0);
  refuse(it, KVP_INVALID_ARGUMENT, "positions", -1, 2, "2 positions for 3 slots");
  fused()->arrays[1] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "positions", -1, 0, "positions are missing");
  op = fused();
  op->arrays[0] = INTS(5, -1, 5);
  refuse(it, KVP_INVALID_ARGUMENT, "slots", 2, 5, "slots[2] = 5 is slots[0] again");
  op = fused();
  op->arrays[0] = INTS(5, -1, 4 * 64);
  refuse(it, KVP_SEALED_BLOCK, "slots", 2, 256, "block 4 is sealed");
  fused()->source.rows = 2;
  refuse(it, KVP_OUT_OF_RANGE, "slots", 2, 3, "3 slots, but source has 2 rows");
  fused()->second.rows = 2;
  refuse(it, KVP_OUT_OF_RANGE, "slots", 2, 3, "3 slots, but cast_back has 2 rows");
  fused()->second.offset_bytes = 32768 + 2304;
  refuse(it, KVP_INVALID_ARGUMENT, "cast_back", -1, 32768 + 2304, "cast_back overlaps cos_sin");
  fused()->second.offset_bytes = 16384;
  refuse(it, KVP_INVALID_ARGUMENT, "cast_back", -1, 16384, "cast_back overlaps norm_weight");
  op = fused();
  op->region = 1;
  op->source = step_view(buffer, 0, 8, 256, 256);
  refuse(it, KVP_INVALID_ARGUMENT, "cast_back", -1, buffer, "format index_fp4 has none");
}

/* ---- indices ---- */

static struct kvp_wire_op *convert(void) {
  begin();
  return good_convert(&encoder);
}

static void refusals_of_convert(struct refusal_world *it) {
  convert()->argument = 0;
  refuse(it, KVP_INVALID_ARGUMENT, "queries", -1, 0, "queries = 0, at least 1");
  convert()->numbers[0] = 0;
  refuse(it, KVP_INVALID_ARGUMENT, "table_columns", -1, 0, "table_columns = 0, at least 1");
  convert()->argument = 3;
  refuse(it, KVP_INVALID_ARGUMENT, "queries", -1, 3, "4 lists are no multiple of 3 queries");
  struct kvp_wire_op *op = convert();
  op->arrays[0] = INTS(0, 1, 2, 2, 1);
  refuse(it, KVP_INVALID_ARGUMENT, "block_tables", -1, 5, "block_tables: 5 elements, 2 rows of 3 are needed");
  op = convert();
  op->arrays[1] = INTS(3, 3, 3);
  refuse(it, KVP_INVALID_ARGUMENT, "valid", -1, 3, "valid: 3 elements, 4 rows of 1 are needed");
  convert()->arrays[1] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "valid", -1, 0, "valid are missing");
  convert()->source = step_view(buffer, 0, 4, 14, 16);
  refuse(it, KVP_WRONG_FORMAT, "topk", -1, 14, "topk.row_bytes = 14 is no multiple of 4");
  convert()->source = step_view(buffer, 0, 4, 12, 14);
  refuse(it, KVP_INVALID_ARGUMENT, "topk", -1, 14, "no multiple of 4");
  convert()->second = step_view(buffer, 4096, 4, 16, 16);
  refuse(it, KVP_WRONG_FORMAT, "out", -1, 16, "out.row_bytes = 16");
  convert()->second = step_view(buffer, 4096, 3, 12, 12);
  refuse(it, KVP_OUT_OF_RANGE, "lists", 3, 4, "4 lists, but out has 3 rows");
  convert()->second = step_view(buffer, 16, 4, 12, 12);
  refuse(it, KVP_INVALID_ARGUMENT, "out", -1, 16, "out overlaps topk");
  convert()->second = step_view(buffer, 0, 4, 12, 16); /* the same place, other rows */
  refuse(it, KVP_INVALID_ARGUMENT, "out", -1, 0, "out overlaps topk");
  op = convert();
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, 40, 24);
  refuse(it, KVP_INVALID_ARGUMENT, "topk", -1, 0, "topk overlaps block_tables");
  op = convert(); /* from an array: not in place, and of the output's width */
  op->source = (struct kvp_wire_view){0};
  op->arrays[2] = INTS(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
  refuse(it, KVP_INVALID_ARGUMENT, "out", -1, 0, "out is missing");
  op = convert();
  op->source = (struct kvp_wire_view){0};
  op->second = step_view(buffer, 0, 4, 12, 12);
  op->arrays[2] = INTS(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10);
  refuse(it, KVP_INVALID_ARGUMENT, "topk", -1, 11, "topk: 11 elements, 4 rows of 3 are needed");
  op = convert();
  op->arrays[2] = INTS(0);
  refuse(it, KVP_INVALID_ARGUMENT, "topk", -1, buffer, "topk: there is none here");
  convert()->arrays[3] = 0;
  refuse(it, KVP_MALFORMED, "arrays", 3, 0, "it has no array 3");
}

static void refusals_of_windows(struct refusal_world *it) {
  for (int decode = 0; decode < 2; decode++) {
    const char *array = decode != 0 ? "offset_len" : "pivots";
    const char *columns = decode != 0 ? "window" : "width";
    for (int form = 0; form < 5; form++) {
      begin();
      struct kvp_wire_op *op =
          step_encoder_op(&encoder, decode != 0 ? KVP_OP_SWA_INDEX_DECODE : KVP_OP_EXPAND_SWA_INDEX);
      op->pool_id = decode != 0 ? ring_pool_id : 0;
      op->argument = form == 0 ? 0 : form == 4 ? UINT64_C(1) << 40 : 4;
      op->second = step_view(buffer, 0, form == 1 ? 1 : 2, form == 2 ? 20 : 16, 20);
      op->arrays[0] = form == 3 ? INTS(1, 2, 3) : decode != 0 ? INTS(0, 1, 0, 1) : INTS(0, 1, 0, 1, 0, 1, 0, 1);
      if (form == 0 || form == 4) {
        refuse(it, KVP_INVALID_ARGUMENT, columns, -1, (int64_t)op->argument, "at least 1 and at most 1073741823");
      } else if (form == 1) {
        refuse(it, KVP_OUT_OF_RANGE, array, 1, 2, "but out has 1 rows");
      } else if (form == 2) {
        refuse(it, KVP_WRONG_FORMAT, "out", -1, 20, "out.row_bytes = 20");
      } else {
        refuse(it, KVP_INVALID_ARGUMENT, array, -1, 12, "12 bytes are no multiple of");
      }
    }
  }
  begin();
  struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_SWA_INDEX_DECODE);
  op->pool_id = pool_id;
  op->argument = 4;
  op->second = step_view(buffer, 0, 1, 16, 16);
  op->arrays[0] = INTS(0, 1);
  refuse(it, KVP_INVALID_ARGUMENT, "pool", -1, pool_id, "pool 7 is paged, a ring's is needed");
}

static struct kvp_wire_op *cat(void) {
  begin();
  return good_cat(&encoder);
}

static void refusals_of_cat(struct refusal_world *it) {
  cat()->argument = (uint64_t)INT32_MAX + 1;
  refuse(it, KVP_OUT_OF_RANGE, "right_base", -1, (int64_t)INT32_MAX + 1, "right_base = 2147483648");
  cat()->argument = UINT64_MAX;
  refuse(it, KVP_OUT_OF_RANGE, "right_base", -1, -1, "right_base = -1");
  struct kvp_wire_op *op = cat();
  op->numbers[0] = op->numbers[1] = 0;
  refuse(it, KVP_INVALID_ARGUMENT, "columns", -1, 0, "columns = 0, at least 1");
  cat()->numbers[1] = UINT64_MAX;
  refuse(it, KVP_INVALID_ARGUMENT, "right_columns", -1, -1, "right_columns = ");
  cat()->numbers[0] = 0;
  refuse(it, KVP_INVALID_ARGUMENT, "left", -1, buffer, "left: there is none here");
  op = cat();
  op->numbers[1] = 0;
  op->third = (struct kvp_wire_view){0};
  op->arrays[1] = INTS(1);
  refuse(it, KVP_INVALID_ARGUMENT, "right", -1, 1, "right: there is none without columns");
  cat()->numbers[0] = 3;
  refuse(it, KVP_WRONG_FORMAT, "left", -1, 8, "left.row_bytes = 8");
  cat()->third.flags = 0;
  refuse(it, KVP_INVALID_ARGUMENT, "right", -1, 0, "right is missing");
  cat()->third.rows = 3;
  refuse(it, KVP_INVALID_ARGUMENT, "right", -1, 3, "right has 3 rows, left has 2");
  op = cat();
  op->source = (struct kvp_wire_view){0};
  op->arrays[0] = INTS(1, 2, 3);
  refuse(it, KVP_INVALID_ARGUMENT, "left", -1, 3, "left: 3 elements, 1 rows of 2 are needed");
  cat()->second.rows = 1;
  refuse(it, KVP_OUT_OF_RANGE, "rows", 1, 2, "2 rows, but out has 1 rows");
  cat()->second.offset_bytes = 0; /* in place: not here */
  refuse(it, KVP_INVALID_ARGUMENT, "out", -1, 0, "out overlaps left");
  cat()->second.offset_bytes = 1040;
  refuse(it, KVP_INVALID_ARGUMENT, "out", -1, 1040, "out overlaps right");
}

/* ---- whole blocks ---- */

static struct kvp_wire_op *blocks(enum kvp_op_kind kind) {
  begin();
  struct kvp_wire_op *op = step_encoder_op(&encoder, kind);
  op->pool_id = pool_id;
  return op;
}

static void refusals_of_blocks(struct refusal_world *it) {
  struct kvp_wire_op *op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(0, 1, 8, 2);
  refuse(it, KVP_OUT_OF_RANGE, "pairs", 2, 8, "pairs[1].from = 8 is not in [0, 8), the pool's blocks");
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(0, -1);
  refuse(it, KVP_OUT_OF_RANGE, "pairs", 1, -1, "pairs[0].to = -1");
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(0, 1, 2, 1);
  refuse(it, KVP_INVALID_ARGUMENT, "pairs", 3, 1, "pairs[1].to = 1: that block is written already");
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(0, 1, 1, 2);
  refuse(it, KVP_INVALID_ARGUMENT, "pairs", 2, 1, "pairs[1].from = 1: another pair writes that block");
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(1, 2, 0, 1);
  refuse(it, KVP_INVALID_ARGUMENT, "pairs", 0, 1, "pairs[0].from = 1: another pair writes that block");
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(0, 4);
  refuse(it, KVP_SEALED_BLOCK, "pairs", 1, 4, "pairs[0].to = 4: block 4 is sealed");
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(6, 1);
  refuse(it, KVP_NOT_OWNER, "pairs", 0, 6, "another session's");
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(0, 1, 2);
  refuse(it, KVP_INVALID_ARGUMENT, "pairs", -1, 12, "12 bytes are no multiple of 8");
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, array_offset, 8);
  refuse(it, KVP_INVALID_ARGUMENT, "pairs", -1, 1, "pairs lie in a buffer");
  blocks(KVP_OP_COPY_BLOCKS)->pool_id = 8;
  refuse(it, KVP_UNKNOWN_POOL, "pool", -1, 8, "pool 8");
  op = blocks(KVP_OP_ZERO_BLOCKS);
  op->arrays[0] = INTS(0, 2, 0);
  refuse(it, KVP_INVALID_ARGUMENT, "blocks", 2, 0, "blocks[2] = 0: that block is written already");
  op = blocks(KVP_OP_ZERO_BLOCKS);
  op->arrays[0] = INTS(4);
  refuse(it, KVP_SEALED_BLOCK, "blocks", 0, 4, "block 4 is sealed");
  op = blocks(KVP_OP_ZERO_BLOCKS);
  op->arrays[0] = INTS(2, 3);
  refuse(it, KVP_STALE_BLOCK, "blocks", 1, 3, "epoch 16");
  op = blocks(KVP_OP_ZERO_BLOCKS);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, array_offset, 8);
  refuse(it, KVP_INVALID_ARGUMENT, "blocks", -1, 1, "blocks lie in a buffer");
  op = blocks(KVP_OP_ZERO_BLOCKS);
  op->arrays[0] = KVP_WIRE_NO_ARRAY;
  refuse(it, KVP_INVALID_ARGUMENT, "blocks", -1, 0, "blocks are missing");
  blocks(KVP_OP_ZERO_BLOCKS)->second_pool_id = 1;
  refuse(it, KVP_MALFORMED, "second_pool", -1, 1, "it has no second region");
}

/* ---- stores before loads ---- */

static void refusals_of_hazards(struct refusal_world *it) {
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_ring_store(&encoder, 1, (int32_t[]){-1, 40, 35}, 3);
  (void)world_add_ring_load(&encoder, 1, (int32_t[]){0, 0, 32, 0, 1, 4, 9, 32}, 2, 64);
  refuse(it, KVP_HAZARD_STORE_BEFORE_LOAD, "segments", 4, 40,
         "op 1 load: segments[1] reads slot 40, which op 0 store overwrites first (slots[1])");
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_ring_store(&encoder, 0, (int32_t[]){39}, 1);
  struct kvp_wire_op *op = world_add_assemble(&encoder, 30);
  op->pool_id = ring_pool_id;
  op->total_k = 8;
  op->arrays[0] = INTS(1, 0, 8, 0);
  refuse(it, KVP_HAZARD_STORE_BEFORE_LOAD, "swa.segments", 0, 39, "op 1 assemble: swa.segments[0] reads slot 39");
}

static void test_refusals(void **state) {
  (void)state;
  struct refusal_world it;
  world_init(&it.world);
  world_ring_attach(&it.world);
  for (int i = 0; i < main_bytes; i++) {
    it.world.main[i] = (uint8_t)(i * 7);
  }
  memset(it.world.ring, 0, ring_bytes);
  for (int i = 0; i < buffer_bytes; i++) {
    it.world.buffer[i] = (uint8_t)(i * 5);
  }
  it.main_before = malloc(main_bytes);
  it.ring_before = malloc(ring_bytes);
  it.buffer_before = malloc(buffer_bytes);
  assert_true(it.main_before != NULL && it.ring_before != NULL && it.buffer_before != NULL);
  memcpy(it.main_before, it.world.main, main_bytes);
  memcpy(it.ring_before, it.world.ring, ring_bytes);
  memcpy(it.buffer_before, it.world.buffer, buffer_bytes);

  refusals_of_assemble_parts(&it);
  refusals_of_assemble_segments(&it);
  refusals_of_assemble_chunk(&it);
  refusals_of_fused_numbers(&it);
  refusals_of_fused_rows(&it);
  refusals_of_convert(&it);
  refusals_of_windows(&it);
  refusals_of_cat(&it);
  refusals_of_blocks(&it);
  refusals_of_hazards(&it);

  /* The steps that all of these were made from are good ones; so are their empty forms. */
  (void)assemble();
  accept(&it);
  (void)fused();
  accept(&it);
  (void)convert();
  accept(&it);
  (void)cat();
  accept(&it);
  struct kvp_wire_op *op = convert();
  op->source.rows = 0;
  op->argument = 0;
  op->arrays[0] = op->arrays[1] = step_encoder_array(&encoder, NULL, 0);
  accept(&it);
  op = blocks(KVP_OP_COPY_BLOCKS);
  op->arrays[0] = INTS(0, 1, 0, 2);
  accept(&it);
  free(it.main_before);
  free(it.ring_before);
  free(it.buffer_before);
  world_deinit(&it.world);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_refusals)};
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
