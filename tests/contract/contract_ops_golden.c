/* Every golden case of the index ops and of fused_store through every variant of the host kernels: each byte of
 * outputs and cache, padding included. What a fused_store passes on to the quantizer is seen through a bf16 region,
 * whose cast-back is that row.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/host/variant.h"
#include "tests/contract/case_file.h"
#include "tests/contract/guarded.h"

static void expect_bytes(const char *what, const uint8_t *actual, const struct case_array *expected) {
  for (uint64_t i = 0; i < expected->bytes; i++) {
    if (actual[i] != expected->data[i]) {
      fail_msg("%s: byte %llu is 0x%02X, not 0x%02X", what, (unsigned long long)i, actual[i], expected->data[i]);
    }
  }
}

/* Dense rows of a two-dimensional array. */
static struct kvp_rows rows_of(const struct case_array *array) {
  return (struct kvp_rows){array->data, array->bytes / array->rows};
}

static const int32_t *indices_of(const struct case_array *array) {
  return (const void *)array->data;
}

static uint64_t columns_of(const struct case_array *array) {
  return array->bytes / array->rows / sizeof(int32_t);
}

typedef void check_fn(const struct case_file *file, const struct kvp_host_variant *variant);

static void check_convert(const struct case_file *file, const struct kvp_host_variant *variant) {
  const struct case_array *topk = case_file_array(file, "topk_idxs");
  const struct case_array *tables = case_file_array(file, "block_tables");
  const struct case_array *valid = case_file_array(file, "context_lens");
  const struct case_array *expected = case_file_array(file, "out");
  uint64_t queries = valid->bytes / sizeof(int32_t) / valid->rows;
  uint64_t columns = columns_of(topk) / queries;
  struct guarded out = guarded_make(expected->bytes, true, 0x5A);
  struct kvp_convert_index_params params = {.topk = {topk->data, columns * sizeof(int32_t)},
                                            .out = {out.base, columns * sizeof(int32_t)},
                                            .tables = rows_of(tables),
                                            .valid = indices_of(valid),
                                            .batch = topk->rows,
                                            .queries = queries,
                                            .columns = columns,
                                            .table_columns = columns_of(tables),
                                            .tokens_per_block = (uint32_t)case_file_number(file, "block_size"),
                                            .num_blocks = 256};
  struct kvp_op_counts counts = {0};
  variant->index->convert(&params, 0, params.batch * params.queries, &counts);
  expect_bytes("out", out.base, expected);
  assert_int_equal(counts.bytes_written, expected->bytes);
  memcpy(out.base, topk->data, topk->bytes);
  params.topk = params.out;
  variant->index->convert(&params, 0, params.batch * params.queries, &counts);
  expect_bytes("out, in place", out.base, expected);
  guarded_free(&out);
}

static void check_swa(const struct case_file *file, const struct kvp_host_variant *variant) {
  const struct case_array *offset_len = case_file_array(file, "offset_len");
  const struct case_array *expected = case_file_array(file, "out");
  struct guarded out = guarded_make(expected->bytes, true, 0x5A);
  struct kvp_swa_index_params params = {.offset_len = indices_of(offset_len),
                                        .out = {out.base, rows_of(expected).stride_bytes},
                                        .queries = offset_len->rows,
                                        .window = case_file_number(file, "window"),
                                        .ring_tokens = (uint32_t)case_file_number(file, "ring_tokens"),
                                        .num_blocks = 7};
  struct kvp_op_counts counts = {0};
  variant->index->swa(&params, 0, params.queries, &counts);
  expect_bytes("out", out.base, expected);
  assert_int_equal(counts.rows_rejected, 0);
  guarded_free(&out);
}

static void check_expand(const struct case_file *file, const struct kvp_host_variant *variant) {
  const struct case_array *pivots = case_file_array(file, "pivots");
  const struct case_array *expected = case_file_array(file, "out");
  struct guarded out = guarded_make(expected->bytes, true, 0x5A);
  struct kvp_expand_index_params params = {.pivots = indices_of(pivots),
                                           .out = {out.base, rows_of(expected).stride_bytes},
                                           .row_count = pivots->rows,
                                           .width = case_file_number(file, "width")};
  struct kvp_op_counts counts = {0};
  variant->index->expand(&params, 0, params.row_count, &counts);
  expect_bytes("out", out.base, expected);
  assert_int_equal(counts.rows_rejected, 0);
  guarded_free(&out);
}

static void check_cat(const struct case_file *file, const struct kvp_host_variant *variant) {
  const struct case_array *left = case_file_array(file, "left");
  const struct case_array *right = case_file_array(file, "right");
  const struct case_array *expected = case_file_array(file, "out");
  struct guarded out = guarded_make(expected->bytes, true, 0x5A);
  struct kvp_cat_index_params params = {
      .left = rows_of(left),
      .right = rows_of(right),
      .out = {out.base, rows_of(expected).stride_bytes},
      .row_count = expected->rows,
      .left_columns = columns_of(left),
      .right_columns = columns_of(right),
      .base = (int32_t)(case_file_number(file, "total_k_swa_cached") + case_file_number(file, "total_k_swa_cur")),
  };
  struct kvp_op_counts counts = {0};
  variant->index->cat(&params, 0, params.row_count, &counts);
  expect_bytes("out", out.base, expected);
  assert_int_equal(counts.rows_rejected, 0);
  guarded_free(&out);
}

static struct kvp_fused_store_params fused_params(const struct case_file *file) {
  const struct case_array *cos_sin = case_file_array(file, "cos_sin");
  uint32_t flags = 0;
  flags |= case_file_number(file, "neox") != 0 ? KVP_FUSED_NEOX : 0;
  flags |= case_file_number(file, "hadamard") != 0 ? KVP_FUSED_HADAMARD : 0;
  flags |= case_file_number(file, "round_to_bf16") != 0 ? KVP_FUSED_ROUND_TO_BF16 : 0;
  return (struct kvp_fused_store_params){
      .store = {.source = rows_of(case_file_array(file, "rows")),
                .slots = indices_of(case_file_array(file, "slots")),
                .row_count = case_file_array(file, "slots")->rows},
      .norm_weight = (const void *)case_file_array(file, "norm_weight")->data,
      .positions = indices_of(case_file_array(file, "positions")),
      .cos_sin = rows_of(cos_sin),
      .position_count = cos_sin->rows,
      .rotary_dims = (uint32_t)case_file_number(file, "rotary_dims"),
      .rope_offset = (uint32_t)case_file_number(file, "rope_offset"),
      .eps = strtof(case_file_param(file, "eps"), NULL),
      .flags = flags,
      .positions_checked = true,
  };
}

/* The rows after norm, RoPE and Hadamard. */
static void check_transformed(const struct case_file *file, const struct kvp_host_variant *variant) {
  const struct case_array *expected = case_file_array(file, "transformed");
  struct kvp_fused_store_params params = fused_params(file);
  struct kvp_geometry geometry;
  uint32_t width = (uint32_t)(params.store.source.stride_bytes / sizeof(uint16_t));
  uint32_t tokens = (uint32_t)case_file_number(file, "block_size");
  uint32_t blocks = (uint32_t)case_file_number(file, "num_blocks");
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_BF16), width, tokens, blocks, 1, &geometry, NULL),
                   KVP_OK);
  struct guarded region = guarded_make(geometry.region_bytes, true, 0xA5);
  struct guarded back = guarded_make(expected->bytes, true, 0x5A);
  params.store.layer = (struct kvp_layer){region.base, &geometry};
  params.store.cast_back = (struct kvp_rows){back.base, params.store.source.stride_bytes};
  struct kvp_op_counts counts = {0};
  variant->fused_store[KVP_FORMAT_BF16](&params, 0, params.store.row_count, &counts);
  expect_bytes("transformed", back.base, expected);
  guarded_free(&region);
  guarded_free(&back);
}

static void check_fused(const struct case_file *file, const struct kvp_host_variant *variant) {
  const struct case_array *cache = case_file_array(file, "cache");
  const struct case_array *expected_back = case_file_array(file, "cast_back");
  struct kvp_fused_store_params params = fused_params(file);
  struct kvp_geometry geometry;
  const struct kvp_format *format = kvp_format_find(case_file_param(file, "format"));
  assert_non_null(format);
  assert_int_equal(kvp_geometry_init(format, 0, (uint32_t)case_file_number(file, "block_size"),
                                     (uint32_t)case_file_number(file, "num_blocks"), 1, &geometry, NULL),
                   KVP_OK);
  assert_int_equal(geometry.region_bytes, cache->bytes);
  struct guarded region = guarded_make(cache->bytes, true, 0xA5);
  struct guarded back = guarded_make(expected_back->bytes, true, 0x5A);
  params.store.layer = (struct kvp_layer){region.base, &geometry};
  struct kvp_op_counts counts = {0};
  variant->fused_store[format->id](&params, 0, params.store.row_count, &counts);
  expect_bytes("cache", region.base, cache);
  assert_int_equal(counts.rows_stored + counts.rows_skipped, params.store.row_count);
  assert_int_equal(counts.rows_rejected, 0);
  if (format->dequantize_on_load) { /* index caches have no cast-back */
    memset(region.base, 0xA5, region.bytes);
    params.store.cast_back = (struct kvp_rows){back.base, params.store.source.stride_bytes};
    variant->fused_store[format->id](&params, 0, params.store.row_count, &counts);
    expect_bytes("cache, with a cast-back", region.base, cache);
    expect_bytes("cast_back", back.base, expected_back);
  }
  guarded_free(&region);
  guarded_free(&back);
  check_transformed(file, variant);
}

static const struct {
  const char *name;
  check_fn *check;
} cases[] = {
    {"convert_kv_index", check_convert},   {"swa_index_decode", check_swa},
    {"expand_swa_index", check_expand},    {"kv_index_cat_0_16", check_cat},
    {"kv_index_cat_16_0", check_cat},      {"kv_index_cat_24_40", check_cat},
    {"kv_index_cat_640_8", check_cat},     {"fused_v41_interleaved", check_fused},
    {"fused_v41_neox_nornd", check_fused}, {"fused_v41_hadamard", check_fused},
    {"fused_v41_fp4", check_fused},        {"fused_index_fp4", check_fused},
    {"fused_index_fp8_f32", check_fused},  {"fused_index_mxfp8_hadamard", check_fused},
};

static void test_golden_cases(void **state) {
  (void)state;
  const char *directory = getenv("KVPOOL_GOLDEN_DIR");
  if (directory == NULL) {
    directory = KVPOOL_GOLDEN_DIR;
  }
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
      char path[1024];
      (void)snprintf(path, sizeof(path), "%s/%s", directory, cases[i].name);
      struct case_file file;
      case_file_read(path, &file);
      cases[i].check(&file, variant);
      case_file_free(&file);
      print_message("%s %s\n", variant->isa, cases[i].name);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden_cases)};
  return cmocka_run_group_tests_name("contract_ops_golden", tests, NULL, NULL);
}
