/* Every BF16 value through the conversions, as a group's largest element and below others; every pair of code and
 * scale byte through a load. Expected bytes come from the reference, by trying all codes.
 *
 *   contract_exhaustive [step]     only each step-th largest element, for slow machines and valgrind
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/host/convert.h"
#include "kernels/host/variant.h"
#include "tests/contract/guarded.h"
#include "tests/contract/reference.h"

enum { tokens_per_block = 64, bf16_count = 65536, bf16_inf = 0x7F80, amax_count = 24 };

static uint32_t step = 1;

static void test_small_float_codes(void **state) {
  (void)state;
  for (uint32_t bits = 0; bits < bf16_inf; bits++) {
    float magnitude = reference_bf16_value((uint16_t)bits);
    float for_e4m3 = magnitude > 448.0F ? 448.0F : magnitude;
    float for_e2m1 = magnitude > 6.0F ? 6.0F : magnitude;
    assert_int_equal(kvp_e4m3_code(for_e4m3), reference_e4m3((double)magnitude));
    assert_int_equal(kvp_e2m1_code(for_e2m1), reference_e2m1((double)magnitude));
  }
}

static void test_small_float_values(void **state) {
  (void)state;
  for (uint32_t code = 0; code < 0x7F; code++) {
    assert_true((double)kvp_e4m3_magnitude(code) == reference_e4m3_value((uint8_t)code));
  }
  for (uint32_t code = 0; code < 8; code++) {
    assert_true((double)kvp_e2m1_twice(code) == 2.0 * reference_e2m1_value((uint8_t)code));
  }
}

static void test_bf16_rounding(void **state) {
  (void)state;
  static const uint32_t low_bits[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  for (uint32_t bits = 0; bits < bf16_count; bits++) {
    for (size_t i = 0; i < sizeof(low_bits) / sizeof(low_bits[0]); i++) {
      float value = kvp_f32_from_bits(bits << 16 | low_bits[i]);
      assert_int_equal(kvp_bf16_from_f32(value), reference_bf16(value));
    }
  }
}

/* One store of rows 0 .. n - 1 to slots 0 .. n - 1. */
static struct kvp_op_counts store_in_order(struct kvp_layer layer, const struct guarded *rows, const int32_t *slots,
                                           uint64_t row_count, const struct kvp_host_variant *variant) {
  struct kvp_store_params params = {.layer = layer,
                                    .source = {rows->base, layer.geometry->sizes.row_bytes},
                                    .slots = slots,
                                    .row_count = row_count};
  struct kvp_op_counts counts = {0};
  if (variant == NULL) {
    reference_store(&params, &counts);
  } else {
    variant->store[layer.geometry->format->id](&params, 0, row_count, &counts);
  }
  assert_int_equal(counts.rows_stored, row_count);
  return counts;
}

static void compare_stores(const struct kvp_format *format, const struct guarded *rows, uint64_t row_count) {
  struct kvp_geometry geometry;
  uint32_t blocks = (uint32_t)((row_count + tokens_per_block - 1) / tokens_per_block);
  assert_int_equal(kvp_geometry_init(format, 0, tokens_per_block, blocks, 1, &geometry, NULL), KVP_OK);
  struct guarded expected = guarded_make(geometry.region_bytes, true, 0xA5);
  struct guarded actual = guarded_make(geometry.region_bytes, true, 0xA5);
  int32_t *slots = calloc(row_count, sizeof(int32_t));
  assert_non_null(slots);
  for (uint64_t i = 0; i < row_count; i++) {
    slots[i] = (int32_t)i;
  }
  struct kvp_op_counts expected_counts =
      store_in_order((struct kvp_layer){expected.base, &geometry}, rows, slots, row_count, NULL);
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    memset(actual.base, 0xA5, actual.bytes);
    struct kvp_op_counts counts =
        store_in_order((struct kvp_layer){actual.base, &geometry}, rows, slots, row_count, variant);
    assert_memory_equal(actual.base, expected.base, expected.bytes);
    assert_int_equal(counts.rows_nonfinite, expected_counts.rows_nonfinite);
    assert_int_equal(counts.groups_saturated, expected_counts.groups_saturated);
  }
  free(slots);
  guarded_free(&expected);
  guarded_free(&actual);
}

static void put(uint8_t *rows, uint64_t index, uint32_t bits) {
  uint16_t value = (uint16_t)bits;
  memcpy(rows + 2 * index, &value, sizeof(value));
}

/* Groups with a single value that is not 0: every largest element there is, NaN and Inf included. */
static void check_every_amax(const struct kvp_format *format) {
  uint64_t group = format->elements_per_scale;
  uint64_t per_row = format->quantized_elements / group;
  uint64_t row_count = (bf16_count / step + per_row - 1) / per_row;
  struct guarded rows = guarded_make(row_count * format->quantized_elements * 2, true, 0);
  for (uint32_t i = 0; i < bf16_count / step; i++) {
    put(rows.base, i * group + i % group, i * step);
  }
  compare_stores(format, &rows, row_count);
  guarded_free(&rows);
}

/* Groups of one largest element and every smaller value of both signs. */
static void check_every_value(const struct kvp_format *format, uint32_t amax) {
  uint64_t group = format->elements_per_scale;
  uint64_t per_row = format->quantized_elements / group;
  uint64_t groups = (2 * (uint64_t)amax + group) / (group - 1);
  uint64_t row_count = (groups + per_row - 1) / per_row;
  struct guarded rows = guarded_make(row_count * format->quantized_elements * 2, true, 0);
  uint32_t magnitude = 0;
  uint32_t sign = 0;
  for (uint64_t i = 0; i < row_count * format->quantized_elements; i++) {
    if (i % group == 0) {
      put(rows.base, i, amax);
    } else if (magnitude < amax) {
      put(rows.base, i, magnitude | sign << 15);
      magnitude += sign;
      sign ^= 1;
    }
  }
  assert_int_equal(magnitude, amax);
  compare_stores(format, &rows, row_count);
  guarded_free(&rows);
}

static void test_every_bf16(void **state) {
  (void)state;
  for (int id = 0; id < KVP_FORMAT_BF16; id++) {
    const struct kvp_format *format = kvp_format_get((enum kvp_format_id)id);
    check_every_amax(format);
    /* From the largest finite value down past the 1e-4 floor (0x38D2), mantissas of all kinds. */
    for (uint32_t i = 0; i < amax_count; i += step) {
      check_every_value(format, 0x7F7F - i * (0x7F7F - 0x3800) / amax_count);
    }
    check_every_value(format, 0x3F80);
    check_every_value(format, 0x43E0);
  }
}

/* Rows whose elements run through all codes under each scale byte. Each row has one scale byte only: the quick and
 * the general way of a load are taken as a whole row. */
static void check_every_record(const struct kvp_format *format) {
  enum { rows_per_byte = 2, row_count = 256 * rows_per_byte };
  struct kvp_geometry geometry;
  assert_int_equal(kvp_geometry_init(format, 0, row_count, 1, 1, &geometry, NULL), KVP_OK);
  const struct kvp_format_sizes *sizes = &geometry.sizes;
  struct guarded region = guarded_make(geometry.region_bytes, true, 0xA5);
  struct guarded expected = guarded_make((uint64_t)row_count * sizes->row_bytes, true, 0x5A);
  struct guarded actual = guarded_make((uint64_t)row_count * sizes->row_bytes, true, 0x5A);
  for (uint32_t row = 0; row < row_count; row++) {
    uint8_t *record = region.base + (uint64_t)row * sizes->bytes_per_token;
    for (uint32_t i = 0; i < sizes->data_bytes; i++) {
      record[i] = (uint8_t)(i + row % rows_per_byte * 77);
    }
    memset(record + sizes->data_bytes, (int)(row / rows_per_byte), sizes->scale_bytes);
  }
  struct kvp_segment segment = {0, 0, row_count, 0};
  struct kvp_load_params params = {.layer = {region.base, &geometry},
                                   .segments = &segment,
                                   .segment_count = 1,
                                   .total_k = row_count,
                                   .out = {expected.base, sizes->row_bytes}};
  struct kvp_op_counts counts = {0};
  reference_load(&params, &counts);
  params.out.base = actual.base;
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    memset(actual.base, 0x5A, actual.bytes);
    variant->load[format->id](&params, 0, 1, &counts);
    assert_memory_equal(actual.base, expected.base, expected.bytes);
  }
  guarded_free(&region);
  guarded_free(&expected);
  guarded_free(&actual);
}

static void test_every_record(void **state) {
  (void)state;
  check_every_record(kvp_format_get(KVP_FORMAT_V41));
  check_every_record(kvp_format_get(KVP_FORMAT_V41_FP4));
}

/* A few points of both references by hand, so that they are not only compared with each other. */
static void test_reference_on_paper(void **state) {
  (void)state;
  assert_int_equal(reference_e4m3(448.0), 0x7E);
  assert_int_equal(reference_e4m3(1e9), 0x7E);
  assert_int_equal(reference_e4m3(1.0), 0x38);
  assert_int_equal(reference_e4m3(1.0625), 0x38); /* tie between 0x38 and 0x39 */
  assert_int_equal(reference_e4m3(1.1875), 0x3A); /* tie between 0x39 and 0x3A */
  assert_int_equal(reference_e4m3(0x1p-9), 1);
  assert_int_equal(reference_e4m3(0x1p-10), 0);
  assert_int_equal(reference_e4m3(0x3p-10), 2);
  assert_int_equal(reference_e2m1(0.25), 0);
  assert_int_equal(reference_e2m1(0.75), 2);
  assert_int_equal(reference_e2m1(2.5), 4);
  assert_int_equal(reference_e2m1(3.5), 6);
  assert_int_equal(reference_e2m1(5.0), 6);
  assert_int_equal(reference_e2m1(5.5), 7);
  assert_int_equal(reference_bf16(1.00390625F), 0x3F80); /* 1 + 2^-8: tie, down to even */
  assert_int_equal(reference_bf16(1.01171875F), 0x3F82); /* 1 + 3 * 2^-8: tie, up to even */
  assert_int_equal(reference_bf16(-0.0F), 0x8000);
  assert_true(reference_bf16_value(0xC040) == -3.0F);
}

int main(int argc, char **argv) {
  if (argc > 1) {
    step = (uint32_t)strtoul(argv[1], NULL, 10);
  }
  reference_init();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_reference_on_paper), cmocka_unit_test(test_small_float_codes),
      cmocka_unit_test(test_small_float_values), cmocka_unit_test(test_bf16_rounding),
      cmocka_unit_test(test_every_bf16),         cmocka_unit_test(test_every_record),
  };
  return cmocka_run_group_tests_name("contract_exhaustive", tests, NULL, NULL);
}
