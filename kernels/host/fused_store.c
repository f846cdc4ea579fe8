/* fused_store: BF16 rows through RMSNorm, RoPE and a Walsh-Hadamard transform into the records their slots name. OPS
 * "fused_store"; compiled once for each instruction set.
 *
 * A row is float32 from its source to its record, on the stack of the worker thread that runs a range of rows. Every
 * sum has the order OPS gives it, every operation is rounded on its own, so that neither the instruction set nor the
 * number of rows shows in a single bit. What runs side by side is independent: elements, pairs, partial sums. NaN
 * payloads do differ between machines; the last rounding makes all of them one.
 */
#include <assert.h>
#include <math.h>
#include <stdbool.h>

#include "kernels/host/dequantize.h"
#include "kernels/host/layout.h"
#include "kernels/host/quantize.h"
#include "kernels/host/slot.h"
#include "kernels/host/variant.h"
#include "proto/limits.h"

enum { square_group = 16, partial_sums_max = kvp_format_width_max / square_group };

/* One row on its way: floats, then BF16. Room for `elements`. */
struct fused_row {
  float *values;
  uint16_t *bf16;
  uint32_t elements;
};

KVP_INLINE float round_to_bf16(float value) {
  return kvp_bf16_to_f32(kvp_bf16_from_f32(value));
}

KVP_INLINE void round_values(float *restrict values, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    values[i] = round_to_bf16(values[i]);
  }
}

/* Eight groups side by side: one chain of sixteen additions alone would wait for each of them. */
KVP_INLINE void partial_sums(const float *restrict values, uint32_t groups, float *restrict partial) {
  enum { lanes = 8 };
  size_t g = 0;
  for (; g + lanes <= groups; g += lanes) {
    float sums[lanes];
    const float *first = values + g * square_group;
    for (size_t lane = 0; lane < lanes; lane++) {
      sums[lane] = first[lane * square_group] * first[lane * square_group];
    }
    for (uint32_t i = 1; i < square_group; i++) {
      for (size_t lane = 0; lane < lanes; lane++) {
        sums[lane] += first[lane * square_group + i] * first[lane * square_group + i];
      }
    }
    memcpy(partial + g, sums, sizeof(sums));
  }
  for (; g < groups; g++) {
    const float *group = values + g * square_group;
    float sum = group[0] * group[0];
    for (uint32_t i = 1; i < square_group; i++) {
      sum += group[i] * group[i];
    }
    partial[g] = sum;
  }
}

/* A row narrower than a group is one group. */
KVP_INLINE float sum_of_squares(const float *restrict values, uint32_t elements) {
  if (elements < square_group) {
    float sum = values[0] * values[0];
    for (uint32_t i = 1; i < elements; i++) {
      sum += values[i] * values[i];
    }
    return sum;
  }
  float partial[partial_sums_max];
  uint32_t groups = elements / square_group;
  assert(groups > 0 && groups <= partial_sums_max);
  partial_sums(values, groups, partial);
  for (uint32_t count = groups / 2; count > 0; count /= 2) {
    for (size_t i = 0; i < count; i++) {
      partial[i] = partial[2 * i] + partial[2 * i + 1];
    }
  }
  return partial[0];
}

KVP_INLINE void normalize(const struct kvp_fused_store_params *params, const uint16_t *restrict source,
                          float *restrict values, uint32_t elements) {
  for (uint32_t i = 0; i < elements; i++) {
    values[i] = kvp_bf16_to_f32(source[i]);
  }
  float variance = sum_of_squares(values, elements) * (1.0F / (float)elements);
  float factor = 1.0F / sqrtf(variance + params->eps);
  const uint16_t *weight = params->norm_weight;
  for (uint32_t i = 0; i < elements; i++) {
    values[i] = (values[i] * factor) * kvp_bf16_to_f32(weight[i]);
  }
}

KVP_INLINE void rotate_pair(float *restrict first, float *restrict second, float cosine, float sine) {
  float a = *first * cosine - *second * sine;
  float b = *first * sine + *second * cosine;
  *first = a;
  *second = b;
}

KVP_INLINE void rotate(const struct kvp_fused_store_params *params, const float *restrict cos_sin,
                       float *restrict values) {
  size_t half = params->rotary_dims / 2;
  float *rotary = values + params->rope_offset;
  if ((params->flags & KVP_FUSED_NEOX) != 0) {
    for (size_t i = 0; i < half; i++) {
      rotate_pair(&rotary[i], &rotary[half + i], cos_sin[i], cos_sin[half + i]);
    }
  } else {
    for (size_t i = 0; i < half; i++) {
      rotate_pair(&rotary[2 * i], &rotary[2 * i + 1], cos_sin[i], cos_sin[half + i]);
    }
  }
}

typedef float float_lanes __attribute__((vector_size(32)));
typedef uint32_t bit_lanes __attribute__((vector_size(32)));

enum { lane_count = sizeof(float_lanes) / sizeof(float) };

/* Strides 1, 2 and 4, eight elements at a time: each lane meets its neighbour at that distance, and the upper one of a
 * pair is subtracted, which is adding its negative. */
KVP_INLINE void butterflies_near(float *restrict values, uint32_t elements) {
  const uint32_t minus = UINT32_C(1) << 31;
  const bit_lanes odd = {0, minus, 0, minus, 0, minus, 0, minus};
  const bit_lanes odd_pair = {0, 0, minus, minus, 0, 0, minus, minus};
  const bit_lanes upper_half = {0, 0, 0, 0, minus, minus, minus, minus};
  for (uint32_t begin = 0; begin < elements; begin += lane_count) {
    float_lanes v;
    memcpy(&v, values + begin, sizeof(v));
    v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6) + (float_lanes)((bit_lanes)v ^ odd);
    v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5) + (float_lanes)((bit_lanes)v ^ odd_pair);
    v = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3) + (float_lanes)((bit_lanes)v ^ upper_half);
    memcpy(values + begin, &v, sizeof(v));
  }
}

/* Strides of eight and more. */
KVP_INLINE void butterflies(float *restrict values, uint32_t elements, uint32_t stride) {
  for (uint32_t begin = 0; begin < elements; begin += 2 * stride) {
    float *restrict low = values + begin;
    float *restrict high = low + stride;
    for (uint32_t i = 0; i < stride; i++) {
      float a = low[i];
      float b = high[i];
      low[i] = a + b;
      high[i] = a - b;
    }
  }
}

/* elements is at least 8: a bf16 record is a multiple of 16 bytes. */
KVP_INLINE void hadamard(float *restrict values, uint32_t elements) {
  butterflies_near(values, elements);
  for (uint32_t stride = lane_count; stride < elements; stride *= 2) {
    butterflies(values, elements, stride);
  }
  float factor = 1.0F / sqrtf((float)elements);
  for (uint32_t i = 0; i < elements; i++) {
    values[i] *= factor;
  }
}

KVP_INLINE void transform(const struct kvp_fused_store_params *params, uint64_t index, uint64_t position,
                          struct fused_row row) {
  bool rounds = (params->flags & KVP_FUSED_ROUND_TO_BF16) != 0;
  normalize(params, (const void *)kvp_rows_at(&params->store.source, index), row.values, row.elements);
  if (rounds) {
    round_values(row.values, row.elements);
  }
  if (params->rotary_dims != 0) { /* a table without columns may have no memory at all */
    rotate(params, (const void *)kvp_rows_at(&params->cos_sin, position), row.values);
  }
  if ((params->flags & KVP_FUSED_HADAMARD) != 0) {
    if (rounds) {
      round_values(row.values + params->rope_offset, params->rotary_dims);
    }
    hadamard(row.values, row.elements);
  }
  for (uint32_t i = 0; i < row.elements; i++) {
    row.bf16[i] = kvp_bf16_from_f32(row.values[i]);
  }
}

/* Reads the row's position; false: outside the table. */
KVP_INLINE bool take_position(const struct kvp_fused_store_params *params, uint64_t row, uint64_t *out) {
  int32_t position = kvp_read_once(&params->positions[row]);
  bool inside = position >= 0 && (uint64_t)position < params->position_count;
  assert(inside || !params->positions_checked);
  *out = (uint64_t)position;
  return inside;
}

/* The record of a transformed row: in the region, or `aside` where there is no slot; and its cast-back. quantize NULL:
 * bf16, which is no more than copied. */
KVP_INLINE void put_row(const struct kvp_store_params *store, const struct kvp_layout *layout,
                        struct slot_place place, uint64_t index, struct fused_row row, kvp_quantize_fn *quantize,
                        kvp_dequantize_fn *dequantize, struct kvp_op_counts *counts) {
  uint8_t aside[kvp_main_elements + kvp_main_elements / 16];
  uint8_t *data = aside;
  uint8_t *scales = aside + kvp_main_elements;
  uint8_t *back = store->cast_back.base == NULL ? NULL : kvp_rows_at(&store->cast_back, index);
  if (place.use == SLOT_STORE) {
    uint8_t *block = layout->base + place.block * layout->block_stride;
    data = block + place.offset * layout->data_step;
    scales = block + layout->scales_begin + place.offset * layout->scale_step;
  }
  if (quantize == NULL) {
    uint64_t row_bytes = row.elements * sizeof(uint16_t);
    if (place.use == SLOT_STORE) {
      memcpy(data, row.bf16, row_bytes);
    }
    if (back != NULL) {
      memcpy(back, row.bf16, row_bytes);
    }
    counts->rows_nonfinite += row_is_nonfinite(row.bf16, row.elements);
    return;
  }
  struct kvp_quantize_result result = quantize(row.bf16, data, scales);
  counts->rows_nonfinite += result.nonfinite;
  counts->groups_saturated += result.groups_saturated;
  if (dequantize != NULL && back != NULL) {
    dequantize(data, scales, (void *)back);
  }
}

KVP_INLINE void fused_rows(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                           struct kvp_op_counts *counts, struct fused_row row, kvp_quantize_fn *quantize,
                           kvp_dequantize_fn *dequantize) {
  const struct kvp_store_params *store = &params->store;
  const struct kvp_format_sizes *sizes = &store->layer.geometry->sizes;
  struct kvp_layout layout = kvp_layout_make(&store->layer);
  bool cast_back = (quantize == NULL || dequantize != NULL) && store->cast_back.base != NULL;
  struct kvp_op_counts local = {0};
  for (uint64_t index = row_begin; index < row_end; index++) {
    struct slot_place place = place_slot(store, index);
    if (place.use == SLOT_SKIP && !cast_back) {
      local.rows_skipped++;
      continue;
    }
    uint64_t position;
    if (place.use == SLOT_REJECT || !take_position(params, index, &position)) {
      local.rows_rejected++;
      continue;
    }
    local.rows_stored += place.use == SLOT_STORE;
    local.rows_skipped += place.use == SLOT_SKIP;
    local.bytes_read += sizes->row_bytes;
    local.bytes_written += place.use == SLOT_STORE ? sizes->bytes_per_token : 0;
    local.bytes_written += cast_back ? sizes->row_bytes : 0;
    transform(params, index, position, row);
    put_row(store, &layout, place, index, row, quantize, dequantize, &local);
  }
  kvp_op_counts_add(counts, &local);
}

KVP_INLINE void fused_main(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                           struct kvp_op_counts *counts, kvp_quantize_fn *quantize, kvp_dequantize_fn *dequantize) {
  float values[kvp_main_elements];
  uint16_t bf16[kvp_main_elements];
  fused_rows(params, row_begin, row_end, counts, (struct fused_row){values, bf16, kvp_main_elements}, quantize,
             dequantize);
}

KVP_INLINE void fused_index(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                            struct kvp_op_counts *counts, kvp_quantize_fn *quantize) {
  float values[kvp_index_elements];
  uint16_t bf16[kvp_index_elements];
  fused_rows(params, row_begin, row_end, counts, (struct fused_row){values, bf16, kvp_index_elements}, quantize,
             NULL);
}

static void fused_v41(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                      struct kvp_op_counts *counts) {
  fused_main(params, row_begin, row_end, counts, quantize_v41, dequantize_v41);
}

static void fused_v41_fp4(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                          struct kvp_op_counts *counts) {
  fused_main(params, row_begin, row_end, counts, quantize_v41_fp4, dequantize_v41_fp4);
}

static void fused_index_fp4(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                            struct kvp_op_counts *counts) {
  fused_index(params, row_begin, row_end, counts, quantize_index_fp4);
}

static void fused_index_fp8_f32(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                                struct kvp_op_counts *counts) {
  fused_index(params, row_begin, row_end, counts, quantize_index_fp8_f32);
}

static void fused_index_mxfp8(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                              struct kvp_op_counts *counts) {
  fused_index(params, row_begin, row_end, counts, quantize_index_mxfp8);
}

/* Rows of any width that is a power of two. */
static void fused_bf16(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                       struct kvp_op_counts *counts) {
  float values[kvp_format_width_max];
  uint16_t bf16[kvp_format_width_max];
  uint32_t elements = params->store.layer.geometry->sizes.elements;
  assert(elements >= lane_count && elements <= kvp_format_width_max);
  fused_rows(params, row_begin, row_end, counts, (struct fused_row){values, bf16, elements}, NULL, NULL);
}

kvp_host_fused_store_fn *const KVP_HOST_SYMBOL(kvp_host_fused_store)[kvp_format_count] = {
    [KVP_FORMAT_V41] = fused_v41,
    [KVP_FORMAT_V41_FP4] = fused_v41_fp4,
    [KVP_FORMAT_INDEX_FP4] = fused_index_fp4,
    [KVP_FORMAT_INDEX_FP8_F32] = fused_index_fp8_f32,
    [KVP_FORMAT_INDEX_MXFP8] = fused_index_mxfp8,
    [KVP_FORMAT_BF16] = fused_bf16,
};
