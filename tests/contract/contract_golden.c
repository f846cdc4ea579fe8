/* Every golden store/load case through every variant of the host kernels: each byte of cache and outputs, padding and
 * uncovered rows included, and the cast-back against what a load returns.
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

static const char *const case_names[] = {
    "v41_b64",  "v41_fp4_b64",  "index_fp4_b64",  "index_fp8_f32_b64",  "index_mxfp8_b64",  "bf16_b64",
    "v41_b133", "v41_fp4_b133", "index_fp4_b133", "index_fp8_f32_b133", "index_mxfp8_b133", "bf16_b133",
};

static void expect_bytes(const char *what, const uint8_t *actual, const uint8_t *expected, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i++) {
    if (actual[i] != expected[i]) {
      fail_msg("%s: byte %llu is 0x%02X, not 0x%02X", what, (unsigned long long)i, actual[i], expected[i]);
    }
  }
}

struct run {
  const struct case_file *file;
  const struct kvp_host_variant *variant;
  struct kvp_geometry geometry;
  struct guarded cache;
};

static void run_init(struct run *run, const struct case_file *file, const struct kvp_host_variant *variant) {
  run->file = file;
  run->variant = variant;
  const struct kvp_format *format = kvp_format_find(case_file_param(file, "format"));
  assert_non_null(format);
  struct kvp_error error;
  enum kvp_status status =
      kvp_geometry_init(format, 0, (uint32_t)case_file_number(file, "block_size"),
                        (uint32_t)case_file_number(file, "num_blocks"), 1, &run->geometry, &error);
  assert_int_equal(status, KVP_OK);
  assert_int_equal(run->geometry.sizes.bytes_per_token, case_file_number(file, "bytes_per_token"));
  assert_int_equal(run->geometry.block_stride_bytes, case_file_number(file, "block_stride_bytes"));
  assert_int_equal(run->geometry.region_bytes, case_file_array(file, "cache")->bytes);
  run->cache = guarded_make(run->geometry.region_bytes, true, (uint8_t)case_file_number(file, "cache_fill"));
}

static void run_store(struct run *run, struct kvp_rows cast_back) {
  const struct case_array *slots = case_file_array(run->file, "slots");
  const struct kvp_format_sizes *sizes = &run->geometry.sizes;
  struct kvp_store_params params = {
      .layer = {run->cache.base, &run->geometry},
      .source = {case_file_array(run->file, "rows")->data, sizes->row_bytes},
      .slots = (const void *)slots->data,
      .row_count = slots->rows,
      .cast_back = cast_back,
  };
  struct kvp_op_counts counts = {0};
  run->variant->store[run->geometry.format->id](&params, 0, params.row_count, &counts);
  uint64_t skipped = 0;
  for (uint64_t i = 0; i < slots->rows; i++) {
    skipped += params.slots[i] == -1;
  }
  assert_int_equal(counts.rows_skipped, skipped);
  assert_int_equal(counts.rows_stored, slots->rows - skipped);
  assert_int_equal(counts.rows_rejected, 0);
}

static void check_load(struct run *run) {
  const struct case_array *segments = case_file_array(run->file, "segments");
  const struct case_array *out = case_file_array(run->file, "out");
  const struct case_array *out_scale = case_file_find(run->file, "out_scale");
  uint8_t fill = (uint8_t)case_file_number(run->file, "out_fill");
  struct guarded rows = guarded_make(out->bytes, true, fill);
  struct guarded scales = guarded_make(out_scale == NULL ? 0 : out_scale->bytes, true, fill);
  const struct kvp_format_sizes *sizes = &run->geometry.sizes;
  struct kvp_load_params params = {
      .layer = {run->cache.base, &run->geometry},
      .segments = (const void *)segments->data,
      .segment_count = segments->rows,
      .total_k = case_file_number(run->file, "total_k"),
      .out = {rows.base, sizes->loaded_row_bytes},
      .scales = {scales.base, sizes->loaded_scale_bytes},
  };
  struct kvp_op_counts counts = {0};
  run->variant->load[run->geometry.format->id](&params, 0, params.segment_count, &counts);
  expect_bytes("out", rows.base, out->data, out->bytes);
  if (out_scale != NULL) {
    expect_bytes("out_scale", scales.base, out_scale->data, out_scale->bytes);
  }
  guarded_free(&rows);
  guarded_free(&scales);
}

/* A row's cast-back is what a load of its slot returns. */
static void check_cast_back(struct run *run) {
  const struct case_array *slots = case_file_array(run->file, "slots");
  uint32_t row_bytes = run->geometry.sizes.row_bytes;
  struct guarded back = guarded_make(slots->rows * row_bytes, true, 0x5A);
  struct guarded row = guarded_make(row_bytes, true, 0x5A);
  run_store(run, (struct kvp_rows){back.base, row_bytes});
  const struct case_array *cache = case_file_array(run->file, "cache");
  expect_bytes("cache after a store with cast-back", run->cache.base, cache->data, cache->bytes);
  uint32_t compared = 0;
  for (uint64_t i = 0; i < slots->rows; i++) {
    int32_t slot = ((const int32_t *)(const void *)slots->data)[i];
    if (slot < 0) {
      continue;
    }
    int32_t tokens = (int32_t)run->geometry.tokens_per_block;
    struct kvp_segment segment = {slot / tokens, slot % tokens, slot % tokens + 1, 0};
    struct kvp_load_params params = {.layer = {run->cache.base, &run->geometry},
                                     .segments = &segment,
                                     .segment_count = 1,
                                     .total_k = 1,
                                     .out = {row.base, row_bytes}};
    struct kvp_op_counts counts = {0};
    run->variant->load[run->geometry.format->id](&params, 0, 1, &counts);
    expect_bytes("cast-back", back.base + i * row_bytes, row.base, row_bytes);
    compared++;
  }
  assert_true(compared > 0);
  guarded_free(&back);
  guarded_free(&row);
}

static void check_case(const char *directory, const char *name, const struct kvp_host_variant *variant) {
  char path[1024];
  (void)snprintf(path, sizeof(path), "%s/%s", directory, name);
  struct case_file file;
  case_file_read(path, &file);
  struct run run;
  run_init(&run, &file, variant);
  run_store(&run, (struct kvp_rows){0});
  const struct case_array *cache = case_file_array(&file, "cache");
  expect_bytes("cache", run.cache.base, cache->data, cache->bytes);
  check_load(&run);
  bool index = run.geometry.sizes.loaded_scale_bytes != 0;
  if (!index) {
    check_cast_back(&run);
  }
  guarded_free(&run.cache);
  case_file_free(&file);
  print_message("%s %s\n", variant->isa, name);
}

static void test_golden_cases(void **state) {
  (void)state;
  const char *directory = getenv("KVPOOL_GOLDEN_DIR");
  if (directory == NULL) {
    directory = KVPOOL_GOLDEN_DIR;
  }
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    for (size_t i = 0; i < sizeof(case_names) / sizeof(case_names[0]); i++) {
      check_case(directory, case_names[i], variant);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden_cases)};
  return cmocka_run_group_tests_name("contract_golden", tests, NULL, NULL);
}
