/* The catalogue, its geometry and the decoding of records; expected numbers are those of the format's description or
 * worked out on paper.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "proto/format.h"
#include "proto/limits.h"
#include "proto/record.h"

static struct kvp_geometry geometry_of(const char *name, uint32_t tokens_per_block) {
  struct kvp_geometry geometry;
  struct kvp_error error;
  const struct kvp_format *format = kvp_format_find(name);
  assert_non_null(format);
  assert_int_equal(kvp_geometry_init(format, 0, tokens_per_block, 3, 2, &geometry, &error), KVP_OK);
  return geometry;
}

static void test_catalogue(void **state) {
  (void)state;
  static const char *const names[] = {"v41", "v41_fp4", "index_fp4", "index_fp8_f32", "index_mxfp8", "bf16"};
  for (int id = 0; id < kvp_format_count; id++) {
    const struct kvp_format *format = kvp_format_get((enum kvp_format_id)id);
    assert_string_equal(format->name, names[id]);
    assert_int_equal(format->id, id);
    assert_ptr_equal(kvp_format_find(names[id]), format);
    assert_int_equal(kvp_format_check(format, NULL), KVP_OK);
  }
  assert_null(kvp_format_find("v42"));
  assert_null(kvp_format_find(""));
}

static void test_sizes(void **state) {
  (void)state;
  static const struct {
    const char *name;
    uint32_t elements, num_scales, data, scale, token, row, loaded, loaded_scale, block_alignment, token_alignment;
    uint64_t stride_133, stride_1;
  } expected[] = {
      {"v41", 512, 16, 512, 16, 528, 1024, 1024, 0, 1056, 16, 70752, 1056},
      {"v41_fp4", 512, 32, 256, 32, 288, 1024, 1024, 0, 288, 32, 38304, 288},
      {"index_fp4", 128, 4, 64, 4, 68, 256, 64, 4, 32, 32, 9056, 96},
      {"index_fp8_f32", 128, 1, 128, 4, 132, 256, 128, 4, 32, 32, 17568, 160},
      {"index_mxfp8", 128, 4, 128, 4, 132, 256, 128, 4, 32, 32, 17568, 160},
      {"bf16", 512, 0, 1024, 0, 1024, 1024, 1024, 0, 32, 32, 136192, 1024},
  };
  for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
    struct kvp_geometry geometry = geometry_of(expected[i].name, 133);
    assert_int_equal(geometry.sizes.elements, expected[i].elements);
    assert_int_equal(geometry.sizes.num_scales, expected[i].num_scales);
    assert_int_equal(geometry.sizes.data_bytes, expected[i].data);
    assert_int_equal(geometry.sizes.scale_bytes, expected[i].scale);
    assert_int_equal(geometry.sizes.bytes_per_token, expected[i].token);
    assert_int_equal(geometry.sizes.row_bytes, expected[i].row);
    assert_int_equal(geometry.sizes.loaded_row_bytes, expected[i].loaded);
    assert_int_equal(geometry.sizes.loaded_scale_bytes, expected[i].loaded_scale);
    assert_int_equal(geometry.sizes.block_alignment_bytes, expected[i].block_alignment);
    assert_int_equal(geometry.sizes.token_alignment_bytes, expected[i].token_alignment);
    assert_int_equal(geometry.block_stride_bytes, expected[i].stride_133);
    assert_int_equal(geometry.layer_stride_bytes, 3 * expected[i].stride_133);
    assert_int_equal(geometry.region_bytes, 6 * expected[i].stride_133);
    assert_int_equal(geometry_of(expected[i].name, 1).block_stride_bytes, expected[i].stride_1);
  }
}

static void test_widths(void **state) {
  (void)state;
  struct kvp_format_sizes sizes;
  struct kvp_error error;
  const struct kvp_format *bf16 = kvp_format_get(KVP_FORMAT_BF16);
  assert_int_equal(kvp_format_sizes_init(bf16, 576, &sizes, &error), KVP_OK);
  assert_int_equal(sizes.bytes_per_token, 1152);
  assert_int_equal(kvp_format_sizes_init(bf16, 8, &sizes, &error), KVP_OK);
  assert_int_equal(sizes.token_alignment_bytes, 16);
  assert_int_equal(kvp_format_sizes_init(bf16, 12, &sizes, &error), KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "width = 12"));
  assert_int_equal(kvp_format_sizes_init(bf16, kvp_format_width_max, &sizes, &error), KVP_OK);
  assert_int_equal(kvp_format_sizes_init(bf16, kvp_format_width_max + 8, &sizes, &error), KVP_TOO_LARGE);
  const struct kvp_format *v41 = kvp_format_get(KVP_FORMAT_V41);
  assert_int_equal(kvp_format_sizes_init(v41, 512, &sizes, &error), KVP_OK);
  assert_int_equal(kvp_format_sizes_init(v41, 576, &sizes, &error), KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "width = 576"));
}

static void expect_refused(const struct kvp_format *format, const char *field) {
  struct kvp_error error;
  assert_int_equal(kvp_format_check(format, &error), KVP_INVALID_ARGUMENT);
  if (strstr(error.text, field) == NULL) {
    fail_msg("'%s' does not name %s", error.text, field);
  }
}

static void test_invalid_descriptors(void **state) {
  (void)state;
  struct kvp_format format = *kvp_format_get(KVP_FORMAT_BF16);
  format.quantized_elements = 16;
  expect_refused(&format, "quantized_elements");
  format = *kvp_format_get(KVP_FORMAT_BF16);
  format.elements_per_scale = 16;
  expect_refused(&format, "elements_per_scale");
  format = *kvp_format_get(KVP_FORMAT_BF16);
  format.scale_format = KVP_SCALE_F32;
  expect_refused(&format, "scale_format");
  format = *kvp_format_get(KVP_FORMAT_BF16);
  format.bf16_elements = 0;
  expect_refused(&format, "bf16_elements");
  format = *kvp_format_get(KVP_FORMAT_V41);
  format.quantized_elements = 0;
  expect_refused(&format, "quantized_elements");
  format = *kvp_format_get(KVP_FORMAT_V41);
  format.elements_per_scale = 0;
  expect_refused(&format, "elements_per_scale");
  format = *kvp_format_get(KVP_FORMAT_V41);
  format.scale_format = KVP_SCALE_NONE;
  expect_refused(&format, "scale_format");
  format = *kvp_format_get(KVP_FORMAT_V41);
  format.bf16_elements = 64;
  expect_refused(&format, "bf16_elements");
  format = *kvp_format_get(KVP_FORMAT_V41);
  format.token_interleaved = false;
  expect_refused(&format, "token_interleaved");
  format = *kvp_format_get(KVP_FORMAT_V41);
  format.quantized_elements = 520;
  expect_refused(&format, "data_bytes = 520");
  format = *kvp_format_get(KVP_FORMAT_V41);
  format.quantized_dtype = (enum kvp_quantized_dtype)9;
  expect_refused(&format, "quantized_dtype = 9");
  format = *kvp_format_get(KVP_FORMAT_V41);
  format.scale_format = (enum kvp_scale_format)9;
  expect_refused(&format, "scale_format = 9");
}

static void test_geometry_limits(void **state) {
  (void)state;
  const struct kvp_format *bf16 = kvp_format_get(KVP_FORMAT_BF16);
  struct kvp_geometry geometry;
  struct kvp_error error;
  assert_int_equal(kvp_geometry_init(bf16, 0, 0, 1, 1, &geometry, &error), KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "tokens_per_block"));
  assert_int_equal(kvp_geometry_init(bf16, 0, 1, 0, 1, &geometry, &error), KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "num_blocks"));
  assert_int_equal(kvp_geometry_init(bf16, 0, 1, 1, 0, &geometry, &error), KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "num_layers"));
  assert_int_equal(kvp_geometry_init(bf16, 0, 1, 1, kvp_layers_per_region_max + 1, &geometry, &error), KVP_TOO_LARGE);
  /* 2^31 - 1 slots are allowed, 2^31 are not; 46341^2 > 2^31. */
  assert_int_equal(kvp_geometry_init(bf16, 0, 1, INT32_MAX, 1, &geometry, &error), KVP_OK);
  assert_int_equal(geometry.region_bytes, UINT64_C(1024) * INT32_MAX);
  assert_int_equal(kvp_geometry_init(bf16, 0, 16, 134217728, 1, &geometry, &error), KVP_TOO_LARGE);
  assert_non_null(strstr(error.text, "2147483648"));
  assert_int_equal(kvp_geometry_init(bf16, 0, 46341, 46341, 1, &geometry, &error), KVP_TOO_LARGE);
  /* The largest region there can be: 2^31 - 1 records of 128 KiB in 1024 layers, below 2^58. */
  assert_int_equal(
      kvp_geometry_init(bf16, kvp_format_width_max, 1, INT32_MAX, kvp_layers_per_region_max, &geometry, &error),
      KVP_OK);
  assert_int_equal(geometry.region_bytes, UINT64_C(131072) * INT32_MAX * 1024);
}

static void test_record_offsets(void **state) {
  (void)state;
  uint64_t data;
  uint64_t scales;
  struct kvp_geometry v41 = geometry_of("v41", 133);
  kvp_record_offsets(&v41, 132, &data, &scales);
  assert_int_equal(data, 132 * 528);
  assert_int_equal(scales, 132 * 528 + 512);
  struct kvp_geometry index = geometry_of("index_fp4", 133);
  kvp_record_offsets(&index, 132, &data, &scales);
  assert_int_equal(data, 132 * 64);
  assert_int_equal(scales, 133 * 64 + 132 * 4);
}

static void test_decode_fp8(void **state) {
  (void)state;
  struct kvp_geometry geometry = geometry_of("v41", 1);
  uint8_t data[512] = {0x38, 0xB8, 0x7E, 0x01, 0x7F, 0x80, 0x08};
  uint8_t scales[16] = {128, 127, 0xFF};
  data[32] = 0x39;
  float out_scales[16];
  float values[512];
  kvp_record_decode(geometry.format, &geometry.sizes, data, scales, out_scales, values);
  assert_true(out_scales[0] == 2.0F && out_scales[1] == 1.0F && out_scales[3] == 0.0F);
  assert_true(isnan(out_scales[2]));
  assert_true(values[0] == 2.0F && values[1] == -2.0F && values[2] == 896.0F);
  assert_true(values[3] == 0x1p-8F && isnan(values[4]) && values[5] == 0.0F && signbit(values[5]));
  assert_true(values[6] == 0x1p-5F && values[32] == 1.125F && isnan(values[64]));
  kvp_record_decode(geometry.format, &geometry.sizes, data, scales, NULL, values);
  kvp_record_decode(geometry.format, &geometry.sizes, data, scales, out_scales, NULL);
  struct kvp_geometry index = geometry_of("index_fp8_f32", 1);
  const float scale = 0.25F;
  uint8_t scale_bytes[4];
  memcpy(scale_bytes, &scale, sizeof(scale));
  kvp_record_decode(index.format, &index.sizes, data, scale_bytes, out_scales, values);
  assert_true(out_scales[0] == 0.25F && values[0] == 0.25F && values[2] == 112.0F);
}

static void test_decode_fp4(void **state) {
  (void)state;
  struct kvp_geometry geometry = geometry_of("v41_fp4", 1);
  /* Low nibble first: 0.5 1 | 1.5 2 | 3 4 | 6 -6 | 0 -0 */
  uint8_t data[256] = {0x21, 0x43, 0x65, 0xF7, 0x80};
  uint8_t scales[32] = {0x40, 0x7F};
  float out_scales[32];
  float values[512];
  kvp_record_decode(geometry.format, &geometry.sizes, data, scales, out_scales, values);
  static const float expected[] = {1.0F, 2.0F, 3.0F, 4.0F, 6.0F, 8.0F, 12.0F, -12.0F, 0.0F, -0.0F};
  assert_memory_equal(values, expected, sizeof(expected));
  assert_true(out_scales[0] == 2.0F && isnan(out_scales[1]) && isnan(values[16]));
}

static void test_decode_bf16(void **state) {
  (void)state;
  struct kvp_geometry geometry = geometry_of("bf16", 1);
  uint8_t data[1024] = {0x80, 0x3F, 0x40, 0xC0};
  float values[512];
  kvp_record_decode(geometry.format, &geometry.sizes, data, NULL, NULL, values);
  assert_true(values[0] == 1.0F && values[1] == -3.0F && values[2] == 0.0F);
}

static void test_names(void **state) {
  (void)state;
  assert_string_equal(kvp_quantized_dtype_name(KVP_QUANTIZED_E2M1), "e2m1");
  assert_string_equal(kvp_quantized_dtype_name((enum kvp_quantized_dtype)7), "unknown");
  assert_string_equal(kvp_scale_format_name(KVP_SCALE_UE8M0), "ue8m0");
  assert_string_equal(kvp_scale_format_name((enum kvp_scale_format)7), "unknown");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_catalogue),       cmocka_unit_test(test_sizes),
      cmocka_unit_test(test_widths),          cmocka_unit_test(test_invalid_descriptors),
      cmocka_unit_test(test_geometry_limits), cmocka_unit_test(test_record_offsets),
      cmocka_unit_test(test_decode_fp8),      cmocka_unit_test(test_decode_fp4),
      cmocka_unit_test(test_decode_bf16),     cmocka_unit_test(test_names),
  };
  return cmocka_run_group_tests_name("format", tests, NULL, NULL);
}
