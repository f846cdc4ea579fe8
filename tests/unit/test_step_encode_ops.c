/* Each op of a StepRequest as an encoded op: every field that step_wire.h has for it, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "server/supervisor/daemon.h"
#include "server/supervisor/step_encode.h"

enum { array_count = 6 };

/* One device; pool 3 with a region of 512 elements and one of 128, pool 4 with one of 512. */
static struct kvp_config config;
static struct kvp_daemon supervisor;
static struct kvp_pool pools[2];
static const struct kvp_session session = {.namespace_name = "default"};

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

#define NONE KVP_WIRE_NO_ARRAY

/* As made.views[number] is encoded. */
static struct kvp_wire_view view(uint32_t number) {
  uint64_t first = UINT64_C(1000) * (number + 1);
  return (struct kvp_wire_view){.buffer_id = first,
                                .offset_bytes = first + 1,
                                .rows = first + 2,
                                .row_stride_bytes = first + 3,
                                .row_bytes = (uint32_t)first + 4,
                                .flags = KVP_WIRE_VIEW_PRESENT};
}

/* Every byte of the op: what isn't said is 0. */
static void expect_op(struct kvp_wire_op expected) {
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  if (kvp_step_encode(&supervisor, &session, &made.request, &encoded, &error) != KVP_OK) {
    fail_msg("%s", error.text);
  }
  assert_ptr_equal(encoded.device, &supervisor.devices[0]);
  assert_memory_equal(encoded.wire + 1, &expected, sizeof expected);
  kvp_step_free(encoded.wire);
}

#define EXPECT_OP(...) expect_op((struct kvp_wire_op){__VA_ARGS__})

static void expect_refused(enum kvp_status status, const char *array, int64_t value, const char *text) {
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  assert_int_equal(kvp_step_encode(&supervisor, &session, &made.request, &encoded, &error), status);
  assert_int_equal(error.op, 0);
  assert_string_equal(error.array, array);
  assert_int_equal(error.position, -1);
  assert_int_equal(error.value, value);
  if (strstr(error.text, text) == NULL) {
    fail_msg("\"%s\" doesn't say \"%s\"", error.text, text);
  }
}

/* ---- assemble ---------------------------------------------------------------------------------------------------
 */

static Kvpool__V1__AssembleOp assemble;
static Kvpool__V1__AssembleSwa swa;
static Kvpool__V1__AssembleChunk chunk;
static Kvpool__V1__AssembleCompressed compressed;

/* With everything that it may have. */
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
  assemble.allow_store_before_load = true;
  swa.region = &made.region;
  swa.segments = 0;
  swa.total_k = 640;
  chunk.rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_SOURCE;
  chunk.source = &made.views[0];
  chunk.optional_gather_case = KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_GATHER_GATHER;
  chunk.gather = 1;
  chunk.optional_store_slots_case = KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_STORE_SLOTS_STORE_SLOTS;
  chunk.store_slots = 2;
  chunk.cast_back = true;
  chunk.region = &made.region; /* once more the same */
  compressed.region = &made.second_region;
  compressed.segments = 3;
  compressed.total_k = 250;
  compressed.keep_compressed = true;
  made.op.op_case = KVPOOL__V1__OP__OP_ASSEMBLE;
  made.op.assemble = &assemble;
  return 0;
}

/* Its chunk is copied, nothing more. */
static int make_plain_assemble(void **state) {
  (void)make_assemble(state);
  assemble.allow_store_before_load = false;
  compressed.keep_compressed = false;
  kvpool__v1__assemble_chunk__init(&chunk);
  chunk.rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_SOURCE;
  chunk.source = &made.views[0];
  return 0;
}

static struct kvp_wire_op assemble_encoded(uint32_t flags, uint64_t chunk_rows) {
  return (struct kvp_wire_op){.kind = KVP_OP_ASSEMBLE,
                              .flags = flags,
                              .pool_id = 3,
                              .region = 1,
                              .layer = 2,
                              .second_pool_id = 4,
                              .second_layer = 5,
                              .arrays = {0, NONE, NONE, 3},
                              .source = view(0),
                              .second = view(1),
                              .total_k = 640,
                              .argument = chunk_rows,
                              .numbers = {250}};
}

static void test_assemble(void **state) {
  struct kvp_wire_op expected = assemble_encoded(1 | 2 | 8, 20); /* the gather's elements */
  expected.arrays[1] = 1;
  expected.arrays[2] = 2;
  expect_op(expected);
  chunk.gather = 5; /* in a buffer */
  expected.arrays[1] = 5;
  expected.argument = 60;
  expect_op(expected);
  (void)make_plain_assemble(state);
  expect_op(assemble_encoded(0, 1002)); /* the rows of the source */
}

static void test_assemble_reserved(void **state) {
  (void)state;
  chunk.rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_RESERVED;
  chunk.reserved = UINT64_C(1) << 40;
  struct kvp_wire_op expected = assemble_encoded(4, UINT64_C(1) << 40);
  expected.source = (struct kvp_wire_view){0};
  expect_op(expected);
}

static void test_assemble_parts_absent(void **state) {
  (void)state;
  const struct kvp_wire_op nothing = {.kind = KVP_OP_ASSEMBLE, .arrays = {NONE, NONE, NONE, NONE}, .second = view(1)};
  struct kvp_wire_op expected = nothing;
  assemble.swa = NULL;
  assemble.chunk = NULL;
  expected.second_pool_id = 4;
  expected.second_layer = 5;
  expected.arrays[3] = 3;
  expected.numbers[0] = 250;
  expect_op(expected);

  assemble.chunk = &chunk; /* copied only: it needs no ring */
  assemble.compressed = NULL;
  expected = nothing;
  expected.source = view(0);
  expected.argument = 1002;
  expect_op(expected);

  chunk.cast_back = true;
  expect_refused(KVP_INVALID_ARGUMENT, "chunk.region", 0, "op 0 assemble: chunk.region is missing");
  chunk.region = &made.second_region;
  expected.flags = 8;
  expected.pool_id = 4;
  expected.layer = 5;
  expect_op(expected);

  assemble.chunk = NULL; /* nothing at all */
  expect_op(nothing);
}

static void test_assemble_refused(void **state) {
  chunk.rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS__NOT_SET;
  expect_refused(KVP_INVALID_ARGUMENT, "chunk.source", 0, "chunk.source is missing");
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

static struct kvp_wire_op fused_encoded(uint32_t flags, uint64_t rope_offset) {
  return (struct kvp_wire_op){.kind = KVP_OP_FUSED_STORE,
                              .flags = flags,
                              .pool_id = 3,
                              .region = 1,
                              .layer = 2,
                              .arrays = {2, 4, NONE, NONE},
                              .source = view(0),
                              .third = view(2),
                              .argument = rope_offset,
                              .numbers = {UINT64_C(125) << 23}};
}

static void test_fused_store(void **state) {
  (void)state;
  expect_op(fused_encoded(64, 0));
  fused.cast_back = &made.views[1];
  fused.cos_sin = &made.views[3];
  fused.neox = true;
  fused.hadamard = true;
  fused.keep_float32 = true;
  fused.optional_rope_offset_case = KVPOOL__V1__FUSED_STORE_OP__OPTIONAL_ROPE_OFFSET_ROPE_OFFSET;
  const uint32_t offsets[] = {0, UINT32_MAX};
  for (size_t i = 0; i < 2; i++) {
    fused.rope_offset = offsets[i];
    struct kvp_wire_op expected = fused_encoded(16 | 32, offsets[i]);
    expected.second = view(1);
    expected.fourth = view(3);
    expect_op(expected);
  }
}

/* D - rotary_dims, D that of the region. What can't be right is 0: refused by who checks rows and regions. */
static void test_fused_store_rope_offset(void **state) {
  (void)state;
  static const struct {
    uint32_t region; /* of 512 elements, of 128, none */
    uint32_t rotary_dims;
    uint64_t offset;
  } cases[] = {{1, 64, 128 - 64}, {0, 64, 512 - 64}, {0, 512, 0}, {0, 514, 0}, {2, 64, 0}};
  fused.cos_sin = &made.views[3];
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    made.region.region = cases[i].region;
    made.views[3].row_bytes = cases[i].rotary_dims * 4;
    struct kvp_wire_op expected = fused_encoded(64, cases[i].offset);
    expected.region = cases[i].region;
    expected.fourth = view(3);
    expected.fourth.row_bytes = cases[i].rotary_dims * 4;
    expect_op(expected);
  }
}

/* ---- indices ----------------------------------------------------------------------------------------------------
 */

static Kvpool__V1__ConvertKvIndexOp convert;
static Kvpool__V1__SwaIndexDecodeOp decode;
static Kvpool__V1__ExpandSwaIndexOp expand;
static Kvpool__V1__KvIndexCatOp cat;
static Kvpool__V1__Matrix matrices[2];

static void matrix_of_view(Kvpool__V1__Matrix *matrix, Kvpool__V1__View *rows) {
  kvpool__v1__matrix__init(matrix);
  matrix->source_case = KVPOOL__V1__MATRIX__SOURCE_VIEW;
  matrix->view = rows;
}

static void matrix_of_array(Kvpool__V1__Matrix *matrix, uint32_t array) {
  kvpool__v1__matrix__init(matrix);
  matrix->source_case = KVPOOL__V1__MATRIX__SOURCE_ARRAY;
  matrix->array = array;
}

static int make_convert(void **state) {
  (void)make(state);
  kvpool__v1__convert_kv_index_op__init(&convert);
  matrix_of_array(&matrices[0], 4);
  convert.region = &made.region;
  convert.topk = &matrices[0];
  convert.block_tables = 1;
  convert.valid = 2;
  convert.queries = 3;
  convert.table_columns = 40;
  convert.out = &made.views[1];
  made.op.op_case = KVPOOL__V1__OP__OP_CONVERT_KV_INDEX;
  made.op.convert_kv_index = &convert;
  return 0;
}

static void test_convert_kv_index(void **state) {
  (void)state;
  struct kvp_wire_op expected = {.kind = KVP_OP_CONVERT_KV_INDEX,
                                 .pool_id = 3,
                                 .region = 1,
                                 .layer = 2,
                                 .arrays = {1, 2, 4, NONE},
                                 .second = view(1),
                                 .argument = 3,
                                 .numbers = {40}};
  expect_op(expected);
  matrix_of_view(&matrices[0], &made.views[0]);
  convert.out = NULL;
  expected.arrays[2] = NONE;
  expected.source = view(0);
  expected.second = (struct kvp_wire_view){0};
  expect_op(expected);
  kvpool__v1__matrix__init(&matrices[0]); /* neither */
  expect_refused(KVP_INVALID_ARGUMENT, "topk", 0, "topk is missing");
}

static int make_decode(void **state) {
  (void)make(state);
  kvpool__v1__swa_index_decode_op__init(&decode);
  decode.region = &made.region;
  decode.offset_len = 3;
  decode.window = 4096;
  decode.out = &made.views[1];
  made.op.op_case = KVPOOL__V1__OP__OP_SWA_INDEX_DECODE;
  made.op.swa_index_decode = &decode;
  return 0;
}

static void test_swa_index_decode(void **state) {
  (void)state;
  EXPECT_OP(.kind = KVP_OP_SWA_INDEX_DECODE, .pool_id = 3, .region = 1, .layer = 2, .arrays = {3, NONE, NONE, NONE},
            .second = view(1), .argument = 4096);
}

static int make_expand(void **state) {
  (void)make(state);
  kvpool__v1__expand_swa_index_op__init(&expand);
  expand.pivots = 1;
  expand.width = 77;
  expand.out = &made.views[1];
  made.op.op_case = KVPOOL__V1__OP__OP_EXPAND_SWA_INDEX;
  made.op.expand_swa_index = &expand;
  return 0;
}

/* Without a region: it runs where the step says, or on the first device. */
static void test_expand_swa_index(void **state) {
  (void)state;
  EXPECT_OP(.kind = KVP_OP_EXPAND_SWA_INDEX, .arrays = {1, NONE, NONE, NONE}, .second = view(1), .argument = 77);
}

static int make_cat(void **state) {
  (void)make(state);
  kvpool__v1__kv_index_cat_op__init(&cat);
  matrix_of_array(&matrices[0], 2);
  matrix_of_array(&matrices[1], 3);
  cat.left = &matrices[0];
  cat.right = &matrices[1];
  cat.left_columns = 24;
  cat.right_columns = 40;
  cat.right_base = INT32_MAX;
  cat.out = &made.views[1];
  made.op.op_case = KVPOOL__V1__OP__OP_KV_INDEX_CAT;
  made.op.kv_index_cat = &cat;
  return 0;
}

static void test_kv_index_cat(void **state) {
  (void)state;
  struct kvp_wire_op expected = {.kind = KVP_OP_KV_INDEX_CAT,
                                 .arrays = {2, 3, NONE, NONE},
                                 .second = view(1),
                                 .argument = INT32_MAX,
                                 .numbers = {24, 40}};
  expect_op(expected);
  cat.left = NULL;
  expected.arrays[0] = NONE;
  expect_op(expected);
  cat.left = &matrices[0];
  matrix_of_view(&matrices[0], &made.views[0]);
  matrix_of_view(&matrices[1], &made.views[2]);
  expected.arrays[1] = NONE;
  expected.source = view(0);
  expected.third = view(2);
  expect_op(expected);
  cat.right_base = -1;
  expect_refused(KVP_OUT_OF_RANGE, "right_base", -1, "op 0 kv_index_cat: right_base = -1");
  kvpool__v1__matrix__init(&matrices[1]); /* neither */
  expect_refused(KVP_INVALID_ARGUMENT, "right", 0, "right is missing");
}

/* ---- blocks -----------------------------------------------------------------------------------------------------
 */

static Kvpool__V1__CopyBlocksOp copy;
static Kvpool__V1__ZeroBlocksOp zero;

static int make_copy(void **state) {
  (void)make(state);
  kvpool__v1__copy_blocks_op__init(&copy);
  copy.pool_id = 4;
  copy.pairs = 2;
  made.op.op_case = KVPOOL__V1__OP__OP_COPY_BLOCKS;
  made.op.copy_blocks = &copy;
  return 0;
}

static int make_zero(void **state) {
  (void)make(state);
  kvpool__v1__zero_blocks_op__init(&zero);
  zero.pool_id = 3;
  zero.blocks = 1;
  made.op.op_case = KVPOOL__V1__OP__OP_ZERO_BLOCKS;
  made.op.zero_blocks = &zero;
  return 0;
}

static void test_blocks(void **state) {
  (void)make_copy(state);
  EXPECT_OP(.kind = KVP_OP_COPY_BLOCKS, .pool_id = 4, .arrays = {2, NONE, NONE, NONE});
  (void)make_zero(state);
  EXPECT_OP(.kind = KVP_OP_ZERO_BLOCKS, .pool_id = 3, .arrays = {1, NONE, NONE, NONE});
  zero.pool_id = 0;
  expect_refused(KVP_UNKNOWN_POOL, "pool_id", 0, "pool 0");
}

/* ---- what every op's fields have in common ----------------------------------------------------------------------
 */

/* A message that has to be there, or an array. */
struct field {
  int (*make)(void **state);
  const char *op;
  const char *name;
  void *message;    /* where the pointer to it is; NULL: it is a number */
  uint32_t *number; /* the array's */
};

static const struct field fields[] = {
    {make_assemble, "assemble", "out", &assemble.out, NULL},
    {make_assemble, "assemble", "swa.region", &swa.region, NULL},
    {make_assemble, "assemble", "swa.segments", NULL, &swa.segments},
    {make_assemble, "assemble", "chunk.gather", NULL, &chunk.gather},
    {make_assemble, "assemble", "chunk.store_slots", NULL, &chunk.store_slots},
    {make_assemble, "assemble", "compressed.region", &compressed.region, NULL},
    {make_assemble, "assemble", "compressed.segments", NULL, &compressed.segments},
    {make_fused, "fused_store", "region", &fused.region, NULL},
    {make_fused, "fused_store", "source", &fused.source, NULL},
    {make_fused, "fused_store", "norm_weight", &fused.norm_weight, NULL},
    {make_fused, "fused_store", "slots", NULL, &fused.slots},
    {make_fused, "fused_store", "positions", NULL, &fused.positions},
    {make_convert, "convert_kv_index", "region", &convert.region, NULL},
    {make_convert, "convert_kv_index", "topk", &convert.topk, NULL},
    {make_convert, "convert_kv_index", "topk", NULL, &matrices[0].array},
    {make_convert, "convert_kv_index", "block_tables", NULL, &convert.block_tables},
    {make_convert, "convert_kv_index", "valid", NULL, &convert.valid},
    {make_decode, "swa_index_decode", "region", &decode.region, NULL},
    {make_decode, "swa_index_decode", "out", &decode.out, NULL},
    {make_decode, "swa_index_decode", "offset_len", NULL, &decode.offset_len},
    {make_expand, "expand_swa_index", "out", &expand.out, NULL},
    {make_expand, "expand_swa_index", "pivots", NULL, &expand.pivots},
    {make_cat, "kv_index_cat", "out", &cat.out, NULL},
    {make_cat, "kv_index_cat", "left", NULL, &matrices[0].array},
    {make_cat, "kv_index_cat", "right", NULL, &matrices[1].array},
    {make_copy, "copy_blocks", "pairs", NULL, &copy.pairs},
    {make_zero, "zero_blocks", "blocks", NULL, &zero.blocks},
};

static void test_fields_refused(void **state) {
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
    const struct field *field = &fields[i];
    /* The encoded step's "no array" is no number that a client may say. */
    const uint32_t numbers[] = {array_count, UINT32_MAX};
    char text[128];
    if (field->message != NULL) {
      (void)field->make(state);
      memset(field->message, 0, sizeof(void *));
      (void)snprintf(text, sizeof text, "op 0 %s: %s is missing", field->op, field->name);
      expect_refused(KVP_INVALID_ARGUMENT, field->name, 0, text);
    }
    for (size_t k = 0; k < 2 && field->number != NULL; k++) {
      (void)field->make(state);
      *field->number = numbers[k];
      (void)snprintf(text, sizeof text, "op 0 %s: %s = array %u, the step has 6 arrays", field->op, field->name,
                     numbers[k]);
      expect_refused(KVP_OUT_OF_RANGE, field->name, numbers[k], text);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(test_assemble, make_assemble),
      cmocka_unit_test_setup(test_assemble_reserved, make_plain_assemble),
      cmocka_unit_test_setup(test_assemble_parts_absent, make_plain_assemble),
      cmocka_unit_test_setup(test_assemble_refused, make_assemble),
      cmocka_unit_test_setup(test_fused_store, make_fused),
      cmocka_unit_test_setup(test_fused_store_rope_offset, make_fused),
      cmocka_unit_test_setup(test_convert_kv_index, make_convert),
      cmocka_unit_test_setup(test_swa_index_decode, make_decode),
      cmocka_unit_test_setup(test_expand_swa_index, make_expand),
      cmocka_unit_test_setup(test_kv_index_cat, make_cat),
      cmocka_unit_test(test_blocks),
      cmocka_unit_test(test_fields_refused),
  };
  return cmocka_run_group_tests(tests, setup, NULL);
}
