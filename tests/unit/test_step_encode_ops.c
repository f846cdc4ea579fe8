/* Each op of a StepRequest as an encoded op: every field that step_wire.h has for it, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/supervisor/daemon.h"
#include "server/supervisor/step_encode.h"

enum { array_count = 6 };

/* One device; pool 3 with a region of 512 elements and one of 128, pool 4 with one of 512. */
static struct kvp_config config;
static struct kvp_daemon supervisor;
static struct kvp_pool pools[2];

static int setup(void **state) {
  (void)state;
  supervisor.config = &config;
  supervisor.device_count = 1;
  supervisor.devices[0].daemon = &supervisor;
  memcpy(supervisor.devices[0].name, "host:0", 7);
  for (uint32_t i = 0; i < 2; i++) {
    pools[i].id = 3 + i;
    pools[i].serving = true;
    pools[i].placement_count = 1;
    pools[i].placements[0].device = &supervisor.devices[0];
    pools[i].spec.region_count = 2 - i;
    pools[i].regions[0].sizes.elements = 512;
    pools[i].regions[1].sizes.elements = 128;
    supervisor.pools.pools[i] = &pools[i];
  }
  return 0;
}

/* A request of one op and six arrays: five inline ones of 10, 20, .. elements, then one of 60 in a buffer. */
static struct {
  int32_t elements[60];
  Kvpool__V1__Array arrays[array_count];
  Kvpool__V1__Array *array_pointers[array_count];
  Kvpool__V1__BufferArray buffer_array;
  Kvpool__V1__RegionRef region;
  Kvpool__V1__RegionRef second_region;
  Kvpool__V1__View views[4];
  Kvpool__V1__Op op;
  Kvpool__V1__Op *op_pointer;
  Kvpool__V1__StepRequest request;
} made;

static void region_fill(Kvpool__V1__RegionRef *region, uint64_t pool_id, uint32_t number, uint32_t layer) {
  kvpool__v1__region_ref__init(region);
  region->pool_id = pool_id;
  region->region = number;
  region->layer = layer;
}

static int make(void **state) {
  (void)state;
  memset(&made, 0, sizeof made);
  for (uint32_t i = 0; i < array_count; i++) {
    kvpool__v1__array__init(&made.arrays[i]);
    made.arrays[i].source_case = KVPOOL__V1__ARRAY__SOURCE_INLINE;
    made.arrays[i].inline_.data = (uint8_t *)made.elements;
    made.arrays[i].inline_.len = (size_t)40 * (i + 1);
    made.array_pointers[i] = &made.arrays[i];
  }
  kvpool__v1__buffer_array__init(&made.buffer_array);
  made.buffer_array.buffer_id = 9;
  made.buffer_array.count = 60;
  made.arrays[5].source_case = KVPOOL__V1__ARRAY__SOURCE_BUFFER;
  made.arrays[5].buffer = &made.buffer_array;
  region_fill(&made.region, 3, 1, 2);
  region_fill(&made.second_region, 4, 0, 5);
  for (uint32_t i = 0; i < 4; i++) {
    uint64_t first = UINT64_C(1000) * (i + 1);
    kvpool__v1__view__init(&made.views[i]);
    made.views[i].buffer_id = first;
    made.views[i].offset_bytes = first + 1;
    made.views[i].rows = first + 2;
    made.views[i].row_stride_bytes = first + 3;
    made.views[i].row_bytes = (uint32_t)first + 4;
  }
  kvpool__v1__op__init(&made.op);
  made.op_pointer = &made.op;
  kvpool__v1__step_request__init(&made.request);
  made.request.arrays = made.array_pointers;
  made.request.n_arrays = array_count;
  made.request.ops = &made.op_pointer;
  made.request.n_ops = 1;
  return 0;
}

static struct kvp_wire_op encoded_op(void) {
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  if (kvp_step_encode(&supervisor, &made.request, &encoded, &error) != KVP_OK) {
    fail_msg("%s", error.text);
  }
  assert_ptr_equal(encoded.device, &supervisor.devices[0]);
  struct kvp_wire_op op = *(const struct kvp_wire_op *)(encoded.wire + 1);
  kvp_step_free(encoded.wire);
  static const struct kvp_wire_point none;
  assert_memory_equal(&op.wait, &none, sizeof none); /* gRPC has no timelines */
  assert_memory_equal(&op.signal, &none, sizeof none);
  return op;
}

static void expect_refused(enum kvp_status status, const char *array, int64_t value, const char *text) {
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  assert_int_equal(kvp_step_encode(&supervisor, &made.request, &encoded, &error), status);
  assert_int_equal(error.op, 0);
  assert_string_equal(error.array, array);
  assert_int_equal(error.position, -1);
  assert_int_equal(error.value, value);
  if (strstr(error.text, text) == NULL) {
    fail_msg("\"%s\" doesn't say \"%s\"", error.text, text);
  }
}

/* number: of `made.views`; -1: absent. */
static void expect_view(const struct kvp_wire_view *view, int number) {
  const struct kvp_wire_view absent = {0};
  if (number < 0) {
    assert_memory_equal(view, &absent, sizeof absent);
    return;
  }
  uint64_t first = UINT64_C(1000) * ((uint64_t)number + 1);
  const struct kvp_wire_view expected = {.buffer_id = first,
                                         .offset_bytes = first + 1,
                                         .rows = first + 2,
                                         .row_stride_bytes = first + 3,
                                         .row_bytes = (uint32_t)first + 4,
                                         .flags = KVP_WIRE_VIEW_PRESENT};
  assert_memory_equal(view, &expected, sizeof expected);
}

static void expect_views(const struct kvp_wire_op *op, int source, int second, int third, int fourth) {
  expect_view(&op->source, source);
  expect_view(&op->second, second);
  expect_view(&op->third, third);
  expect_view(&op->fourth, fourth);
}

static void expect_place(const struct kvp_wire_op *op, uint64_t pool_id, uint32_t region, uint32_t layer) {
  assert_int_equal(op->pool_id, pool_id);
  assert_int_equal(op->region, region);
  assert_int_equal(op->layer, layer);
}

static void expect_second_place(const struct kvp_wire_op *op, uint64_t pool_id, uint32_t region, uint32_t layer) {
  assert_int_equal(op->second_pool_id, pool_id);
  assert_int_equal(op->second_region, region);
  assert_int_equal(op->second_layer, layer);
}

/* -1: none. */
static void expect_arrays(const struct kvp_wire_op *op, int first, int second, int third, int fourth) {
  assert_int_equal(op->arrays[0], (uint32_t)first);
  assert_int_equal(op->arrays[1], (uint32_t)second);
  assert_int_equal(op->arrays[2], (uint32_t)third);
  assert_int_equal(op->arrays[3], (uint32_t)fourth);
}

static void expect_numbers(const struct kvp_wire_op *op, uint64_t total_k, uint64_t argument, uint64_t first,
                           uint64_t second) {
  assert_int_equal(op->total_k, total_k);
  assert_int_equal(op->argument, argument);
  assert_int_equal(op->numbers[0], first);
  assert_int_equal(op->numbers[1], second);
  assert_int_equal(op->numbers[2], 0);
}

/* ---- assemble ---------------------------------------------------------------------------------------------------
 */

static Kvpool__V1__AssembleOp assemble;
static Kvpool__V1__AssembleSwa swa;
static Kvpool__V1__AssembleChunk chunk;
static Kvpool__V1__AssembleCompressed compressed;

static int make_assemble(void **state) {
  (void)make(state);
  kvpool__v1__assemble_op__init(&assemble);
  kvpool__v1__assemble_swa__init(&swa);
  kvpool__v1__assemble_chunk__init(&chunk);
  kvpool__v1__assemble_compressed__init(&compressed);
  assemble.out = &made.views[1];
  assemble.swa = &swa;
  assemble.chunk = &chunk;
  assemble.compressed = &compressed;
  swa.region = &made.region;
  swa.segments = 0;
  swa.total_k = 640;
  chunk.rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_SOURCE;
  chunk.source = &made.views[0];
  compressed.region = &made.second_region;
  compressed.segments = 3;
  compressed.total_k = 250;
  made.op.op_case = KVPOOL__V1__OP__OP_ASSEMBLE;
  made.op.assemble = &assemble;
  return 0;
}

static void test_assemble(void **state) {
  (void)state;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.kind, KVP_OP_ASSEMBLE);
  assert_int_equal(op.flags, 0);
  expect_place(&op, 3, 1, 2);
  expect_second_place(&op, 4, 0, 5);
  expect_views(&op, 0, 1, -1, -1);
  expect_arrays(&op, 0, -1, -1, 3);
  expect_numbers(&op, 640, 1002, 250, 0); /* C: the rows of the source */

  chunk.optional_gather_case = KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_GATHER_GATHER;
  chunk.gather = 1;
  chunk.optional_store_slots_case = KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_STORE_SLOTS_STORE_SLOTS;
  chunk.store_slots = 2;
  chunk.cast_back = true;
  chunk.region = &made.region; /* once more the same */
  compressed.keep_compressed = true;
  assemble.allow_store_before_load = true;
  op = encoded_op();
  assert_int_equal(op.flags, 1 | 2 | 8);
  expect_arrays(&op, 0, 1, 2, 3);
  expect_numbers(&op, 640, 20, 250, 0); /* the gather's elements */
  chunk.gather = 5;                     /* in a buffer */
  op = encoded_op();
  expect_numbers(&op, 640, 60, 250, 0);
}

static void test_assemble_reserved(void **state) {
  (void)state;
  chunk.rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_RESERVED;
  chunk.reserved = UINT64_C(1) << 40;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.flags, 4);
  expect_views(&op, -1, 1, -1, -1);
  expect_numbers(&op, 640, UINT64_C(1) << 40, 250, 0);
}

static void test_assemble_parts_absent(void **state) {
  (void)state;
  assemble.swa = NULL;
  assemble.chunk = NULL;
  struct kvp_wire_op op = encoded_op();
  expect_place(&op, 0, 0, 0);
  expect_second_place(&op, 4, 0, 5);
  expect_views(&op, -1, 1, -1, -1);
  expect_arrays(&op, -1, -1, -1, 3);
  expect_numbers(&op, 0, 0, 250, 0);

  assemble.chunk = &chunk; /* copied only: it needs no ring */
  assemble.compressed = NULL;
  op = encoded_op();
  expect_place(&op, 0, 0, 0);
  expect_second_place(&op, 0, 0, 0);
  expect_arrays(&op, -1, -1, -1, -1);
  expect_numbers(&op, 0, 1002, 0, 0);

  chunk.cast_back = true;
  expect_refused(KVP_INVALID_ARGUMENT, "chunk.region", 0, "op 0 assemble: chunk.region is missing");
  chunk.region = &made.second_region;
  op = encoded_op();
  expect_place(&op, 4, 0, 5);

  assemble.chunk = NULL; /* nothing at all */
  op = encoded_op();
  expect_arrays(&op, -1, -1, -1, -1);
  expect_numbers(&op, 0, 0, 0, 0);
}

static void test_assemble_refused(void **state) {
  (void)state;
  assemble.out = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "out", 0, "out is missing");
  (void)make_assemble(state);
  swa.region = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "swa.region", 0, "swa.region is missing");
  (void)make_assemble(state);
  swa.segments = 6;
  expect_refused(KVP_OUT_OF_RANGE, "swa.segments", 6, "swa.segments = array 6, the step has 6 arrays");
  (void)make_assemble(state);
  chunk.rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS__NOT_SET;
  expect_refused(KVP_INVALID_ARGUMENT, "chunk.source", 0, "chunk.source is missing");
  (void)make_assemble(state);
  chunk.optional_gather_case = KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_GATHER_GATHER;
  chunk.gather = UINT32_MAX; /* the encoded step's "no array" is no number a client may say */
  expect_refused(KVP_OUT_OF_RANGE, "chunk.gather", UINT32_MAX, "4294967295");
  (void)make_assemble(state);
  chunk.optional_store_slots_case = KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_STORE_SLOTS_STORE_SLOTS;
  chunk.store_slots = 7;
  expect_refused(KVP_OUT_OF_RANGE, "chunk.store_slots", 7, "7");
  (void)make_assemble(state);
  compressed.region = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "compressed.region", 0, "compressed.region is missing");
  (void)make_assemble(state);
  compressed.segments = 8;
  expect_refused(KVP_OUT_OF_RANGE, "compressed.segments", 8, "8");
  (void)make_assemble(state);
  chunk.region = &made.second_region;
  expect_refused(KVP_INVALID_ARGUMENT, "chunk.region", 0,
                 "chunk.region = pool 4 region 0 layer 5, swa.region is pool 3 region 1 layer 2");
  (void)make_assemble(state);
  made.second_region.pool_id = 0; /* a client that forgot to say which */
  expect_refused(KVP_UNKNOWN_POOL, "pool_id", 0, "pool 0");
  (void)make_assemble(state);
  made.region.pool_id = 5;
  expect_refused(KVP_UNKNOWN_POOL, "pool_id", 5, "pool 5");
}

/* ---- fused_store ------------------------------------------------------------------------------------------------
 */

static Kvpool__V1__FusedStoreOp fused;

static int make_fused(void **state) {
  (void)make(state);
  kvpool__v1__fused_store_op__init(&fused);
  fused.region = &made.region;
  fused.source = &made.views[0];
  fused.norm_weight = &made.views[2];
  fused.eps = 0.25F; /* 2^-2: sign 0, exponent 125, mantissa 0 */
  fused.positions = 4;
  fused.slots = 2;
  made.op.op_case = KVPOOL__V1__OP__OP_FUSED_STORE;
  made.op.fused_store = &fused;
  return 0;
}

static void test_fused_store(void **state) {
  (void)state;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.kind, KVP_OP_FUSED_STORE);
  assert_int_equal(op.flags, 64);
  expect_place(&op, 3, 1, 2);
  expect_views(&op, 0, -1, 2, -1);
  expect_arrays(&op, 2, 4, -1, -1);
  expect_numbers(&op, 0, 0, UINT64_C(125) << 23, 0);

  fused.cast_back = &made.views[1];
  fused.cos_sin = &made.views[3];
  fused.neox = true;
  fused.hadamard = true;
  fused.keep_float32 = true;
  fused.optional_rope_offset_case = KVPOOL__V1__FUSED_STORE_OP__OPTIONAL_ROPE_OFFSET_ROPE_OFFSET;
  fused.rope_offset = 0;
  op = encoded_op();
  assert_int_equal(op.flags, 16 | 32);
  expect_views(&op, 0, 1, 2, 3);
  assert_int_equal(op.argument, 0);
  fused.rope_offset = UINT32_MAX;
  op = encoded_op();
  assert_int_equal(op.argument, UINT32_MAX);
}

/* D - rotary_dims, D that of the region. */
static void test_fused_store_rope_offset(void **state) {
  (void)state;
  fused.cos_sin = &made.views[3];
  made.views[3].row_bytes = 64 * 4;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.argument, 128 - 64);
  made.region.region = 0;
  op = encoded_op();
  assert_int_equal(op.argument, 512 - 64);
  made.views[3].row_bytes = 512 * 4;
  op = encoded_op();
  assert_int_equal(op.argument, 0);
  made.views[3].row_bytes = 514 * 4; /* more than the row has: refused by who checks rows */
  op = encoded_op();
  assert_int_equal(op.argument, 0);
  made.views[3].row_bytes = 64 * 4;
  made.region.region = 2; /* no such region: likewise */
  op = encoded_op();
  assert_int_equal(op.argument, 0);
}

static void test_fused_store_refused(void **state) {
  (void)state;
  fused.region = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "region", 0, "op 0 fused_store: region is missing");
  (void)make_fused(state);
  fused.source = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "source", 0, "source is missing");
  (void)make_fused(state);
  fused.norm_weight = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "norm_weight", 0, "norm_weight is missing");
  (void)make_fused(state);
  fused.slots = 6;
  expect_refused(KVP_OUT_OF_RANGE, "slots", 6, "slots = array 6");
  (void)make_fused(state);
  fused.positions = 99;
  expect_refused(KVP_OUT_OF_RANGE, "positions", 99, "positions = array 99");
}

/* ---- indices ----------------------------------------------------------------------------------------------------
 */

static Kvpool__V1__ConvertKvIndexOp convert;
static Kvpool__V1__Matrix matrices[2];

static int make_convert(void **state) {
  (void)make(state);
  kvpool__v1__convert_kv_index_op__init(&convert);
  kvpool__v1__matrix__init(&matrices[0]);
  matrices[0].source_case = KVPOOL__V1__MATRIX__SOURCE_VIEW;
  matrices[0].view = &made.views[0];
  convert.region = &made.region;
  convert.topk = &matrices[0];
  convert.block_tables = 1;
  convert.valid = 2;
  convert.queries = 3;
  convert.table_columns = 40;
  made.op.op_case = KVPOOL__V1__OP__OP_CONVERT_KV_INDEX;
  made.op.convert_kv_index = &convert;
  return 0;
}

static void test_convert_kv_index(void **state) {
  (void)state;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.kind, KVP_OP_CONVERT_KV_INDEX);
  assert_int_equal(op.flags, 0);
  expect_place(&op, 3, 1, 2);
  expect_views(&op, 0, -1, -1, -1);
  expect_arrays(&op, 1, 2, -1, -1);
  expect_numbers(&op, 0, 3, 40, 0);
  matrices[0].source_case = KVPOOL__V1__MATRIX__SOURCE_ARRAY;
  matrices[0].array = 4;
  convert.out = &made.views[1];
  op = encoded_op();
  expect_views(&op, -1, 1, -1, -1);
  expect_arrays(&op, 1, 2, 4, -1);
}

static void test_convert_kv_index_refused(void **state) {
  (void)state;
  convert.topk = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "topk", 0, "op 0 convert_kv_index: topk is missing");
  (void)make_convert(state);
  matrices[0].source_case = KVPOOL__V1__MATRIX__SOURCE__NOT_SET;
  expect_refused(KVP_INVALID_ARGUMENT, "topk", 0, "topk is missing");
  (void)make_convert(state);
  matrices[0].source_case = KVPOOL__V1__MATRIX__SOURCE_ARRAY;
  matrices[0].array = 6;
  expect_refused(KVP_OUT_OF_RANGE, "topk", 6, "topk = array 6");
  (void)make_convert(state);
  convert.block_tables = 6;
  expect_refused(KVP_OUT_OF_RANGE, "block_tables", 6, "block_tables = array 6");
  (void)make_convert(state);
  convert.valid = 6;
  expect_refused(KVP_OUT_OF_RANGE, "valid", 6, "valid = array 6");
  (void)make_convert(state);
  convert.region = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "region", 0, "region is missing");
}

static void test_swa_index_decode(void **state) {
  (void)state;
  Kvpool__V1__SwaIndexDecodeOp decode = KVPOOL__V1__SWA_INDEX_DECODE_OP__INIT;
  decode.region = &made.region;
  decode.offset_len = 3;
  decode.window = 4096;
  decode.out = &made.views[1];
  made.op.op_case = KVPOOL__V1__OP__OP_SWA_INDEX_DECODE;
  made.op.swa_index_decode = &decode;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.kind, KVP_OP_SWA_INDEX_DECODE);
  expect_place(&op, 3, 1, 2);
  expect_views(&op, -1, 1, -1, -1);
  expect_arrays(&op, 3, -1, -1, -1);
  expect_numbers(&op, 0, 4096, 0, 0);
  decode.out = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "out", 0, "op 0 swa_index_decode: out is missing");
  decode.out = &made.views[1];
  decode.offset_len = 6;
  expect_refused(KVP_OUT_OF_RANGE, "offset_len", 6, "offset_len = array 6");
  decode.region = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "region", 0, "region is missing");
}

/* Without a region: it runs where the step says, or on the first device. */
static void test_expand_swa_index(void **state) {
  (void)state;
  Kvpool__V1__ExpandSwaIndexOp expand = KVPOOL__V1__EXPAND_SWA_INDEX_OP__INIT;
  expand.pivots = 1;
  expand.width = 77;
  expand.out = &made.views[1];
  made.op.op_case = KVPOOL__V1__OP__OP_EXPAND_SWA_INDEX;
  made.op.expand_swa_index = &expand;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.kind, KVP_OP_EXPAND_SWA_INDEX);
  expect_place(&op, 0, 0, 0);
  expect_views(&op, -1, 1, -1, -1);
  expect_arrays(&op, 1, -1, -1, -1);
  expect_numbers(&op, 0, 77, 0, 0);
  expand.pivots = 6;
  expect_refused(KVP_OUT_OF_RANGE, "pivots", 6, "op 0 expand_swa_index: pivots = array 6");
  expand.out = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "out", 0, "out is missing");
}

static void test_kv_index_cat(void **state) {
  (void)state;
  Kvpool__V1__KvIndexCatOp cat = KVPOOL__V1__KV_INDEX_CAT_OP__INIT;
  kvpool__v1__matrix__init(&matrices[0]);
  kvpool__v1__matrix__init(&matrices[1]);
  matrices[0].source_case = KVPOOL__V1__MATRIX__SOURCE_VIEW;
  matrices[0].view = &made.views[0];
  matrices[1].source_case = KVPOOL__V1__MATRIX__SOURCE_VIEW;
  matrices[1].view = &made.views[2];
  cat.left = &matrices[0];
  cat.right = &matrices[1];
  cat.left_columns = 24;
  cat.right_columns = 40;
  cat.right_base = INT32_MAX;
  cat.out = &made.views[1];
  made.op.op_case = KVPOOL__V1__OP__OP_KV_INDEX_CAT;
  made.op.kv_index_cat = &cat;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.kind, KVP_OP_KV_INDEX_CAT);
  expect_place(&op, 0, 0, 0);
  expect_views(&op, 0, 1, 2, -1);
  expect_arrays(&op, -1, -1, -1, -1);
  expect_numbers(&op, 0, INT32_MAX, 24, 40);

  matrices[0].source_case = matrices[1].source_case = KVPOOL__V1__MATRIX__SOURCE_ARRAY;
  matrices[0].array = 2;
  matrices[1].array = 3;
  op = encoded_op();
  expect_views(&op, -1, 1, -1, -1);
  expect_arrays(&op, 2, 3, -1, -1);

  cat.left = NULL;
  op = encoded_op();
  expect_arrays(&op, -1, 3, -1, -1);
  cat.right_base = -1;
  expect_refused(KVP_OUT_OF_RANGE, "right_base", -1, "op 0 kv_index_cat: right_base = -1");
  matrices[1].array = 6;
  expect_refused(KVP_OUT_OF_RANGE, "right", 6, "right = array 6");
  matrices[1].source_case = KVPOOL__V1__MATRIX__SOURCE__NOT_SET;
  expect_refused(KVP_INVALID_ARGUMENT, "right", 0, "right is missing");
  cat.out = NULL;
  expect_refused(KVP_INVALID_ARGUMENT, "out", 0, "out is missing");
}

/* ---- blocks -----------------------------------------------------------------------------------------------------
 */

static void test_blocks(void **state) {
  (void)state;
  Kvpool__V1__CopyBlocksOp copy = KVPOOL__V1__COPY_BLOCKS_OP__INIT;
  Kvpool__V1__ZeroBlocksOp zero = KVPOOL__V1__ZERO_BLOCKS_OP__INIT;
  copy.pool_id = 4;
  copy.pairs = 2;
  made.op.op_case = KVPOOL__V1__OP__OP_COPY_BLOCKS;
  made.op.copy_blocks = &copy;
  struct kvp_wire_op op = encoded_op();
  assert_int_equal(op.kind, KVP_OP_COPY_BLOCKS);
  expect_place(&op, 4, 0, 0);
  expect_views(&op, -1, -1, -1, -1);
  expect_arrays(&op, 2, -1, -1, -1);
  expect_numbers(&op, 0, 0, 0, 0);
  copy.pairs = 6;
  expect_refused(KVP_OUT_OF_RANGE, "pairs", 6, "op 0 copy_blocks: pairs = array 6");

  zero.pool_id = 3;
  zero.blocks = 1;
  made.op.op_case = KVPOOL__V1__OP__OP_ZERO_BLOCKS;
  made.op.zero_blocks = &zero;
  op = encoded_op();
  assert_int_equal(op.kind, KVP_OP_ZERO_BLOCKS);
  expect_place(&op, 3, 0, 0);
  expect_arrays(&op, 1, -1, -1, -1);
  zero.pool_id = 0;
  expect_refused(KVP_UNKNOWN_POOL, "pool_id", 0, "pool 0");
  zero.blocks = 6;
  expect_refused(KVP_OUT_OF_RANGE, "blocks", 6, "op 0 zero_blocks: blocks = array 6");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(test_assemble, make_assemble),
      cmocka_unit_test_setup(test_assemble_reserved, make_assemble),
      cmocka_unit_test_setup(test_assemble_parts_absent, make_assemble),
      cmocka_unit_test_setup(test_assemble_refused, make_assemble),
      cmocka_unit_test_setup(test_fused_store, make_fused),
      cmocka_unit_test_setup(test_fused_store_rope_offset, make_fused),
      cmocka_unit_test_setup(test_fused_store_refused, make_fused),
      cmocka_unit_test_setup(test_convert_kv_index, make_convert),
      cmocka_unit_test_setup(test_convert_kv_index_refused, make_convert),
      cmocka_unit_test_setup(test_swa_index_decode, make),
      cmocka_unit_test_setup(test_expand_swa_index, make),
      cmocka_unit_test_setup(test_kv_index_cat, make),
      cmocka_unit_test_setup(test_blocks, make),
  };
  return cmocka_run_group_tests(tests, setup, NULL);
}
