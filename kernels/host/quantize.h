/* One BF16 row to one record, FORMATS section 4. Included by the kernels that write records; compiled once for each
 * instruction set.
 *
 * Every function: row [elements] BF16 -> data [data_bytes], scales [scale_bytes], at any byte address. A row whose
 * largest magnitude is not finite takes its group maxima a second time and has its codes patched afterwards, so that
 * the ordinary path knows nothing of NaN.
 */
#ifndef KVPOOL_KERNELS_HOST_QUANTIZE_H
#define KVPOOL_KERNELS_HOST_QUANTIZE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/convert.h"

enum { kvp_main_elements = 512, kvp_index_elements = 128 };

struct kvp_quantize_result {
  bool nonfinite;
  uint32_t groups_saturated;
};

typedef struct kvp_quantize_result kvp_quantize_fn(const uint16_t *restrict row, uint8_t *restrict data,
                                                   uint8_t *restrict scales);

KVP_INLINE int16_t magnitude_bits(uint16_t element) {
  return (int16_t)(element & KVP_BF16_ABS);
}

/* Largest magnitude of each group, as BF16 bits; signed, since that is the 16-bit maximum every machine has. Folded
 * to eight lanes a group first, which is what compilers reduce well. Returns the largest of all. */
KVP_INLINE int16_t group_maxima(const uint16_t *restrict row, int groups, int group_elements,
                                int16_t *restrict maxima) {
  enum { lanes = 8 };
  int16_t folded[kvp_main_elements / 16 * lanes] = {0};
  for (int g = 0; g < groups; g++) {
    for (int i = 0; i < group_elements; i += lanes) {
      for (int lane = 0; lane < lanes; lane++) {
        int16_t bits = magnitude_bits(row[g * group_elements + i + lane]);
        folded[g * lanes + lane] = kvp_max_i16(folded[g * lanes + lane], bits);
      }
    }
  }
  int16_t all = 0;
  for (int g = 0; g < groups; g++) {
    int16_t largest = 0;
    for (int lane = 0; lane < lanes; lane++) {
      largest = kvp_max_i16(largest, folded[g * lanes + lane]);
    }
    maxima[g] = largest;
    all = kvp_max_i16(all, largest);
  }
  return all;
}

/* The same over finite elements only. */
static __attribute__((noinline)) void group_maxima_finite(const uint16_t *row, int groups, int group_elements,
                                                          int16_t *maxima) {
  for (int g = 0; g < groups; g++) {
    int16_t largest = 0;
    for (int i = 0; i < group_elements; i++) {
      int16_t bits = magnitude_bits(row[g * group_elements + i]);
      largest = kvp_max_i16(largest, (int16_t)(bits < KVP_BF16_INF ? bits : 0));
    }
    maxima[g] = largest;
  }
}

/* ceil(log2(max(amax, 1e-4) / 448)) + 127 from amax's bits alone: 448 = 1.75 * 2^8, so a mantissa above 1.75
 * carries into the exponent; the floor's own byte is 105. */
KVP_INLINE uint8_t ue8m0_for_448(int16_t amax) {
  return (uint8_t)(kvp_max_i16((int16_t)((amax + 31) >> 7), 113) - 8);
}

/* The same for 6 = 1.5 * 2^2, floor 112. */
KVP_INLINE uint8_t ue8m0_for_6(int16_t amax) {
  return (uint8_t)(kvp_max_i16((int16_t)((amax + 63) >> 7), 114) - 2);
}

/* Under a scale 2^E the code follows from the element's BF16 bits alone, 16 bits a lane: less the bits of the scale
 * they are the code and its fraction, rounded by integer arithmetic. `less` is the bits of 2^E times the small
 * float's value one, less its code there.
 *
 * e4m3: fraction of 4 bits. A code below 8 is subnormal, where this is not linear in the value but the value is what
 * counts: the upper hull of its linear pieces, in 1/256. Those take as long again and are rare, so a row is first
 * tried without them; true: the row has some and the codes are not final. */
KVP_INLINE bool encode_e4m3_lanes(const uint16_t *restrict row, const int16_t *restrict less, int elements,
                                  bool subnormals, uint8_t *restrict data) {
  int16_t met = 0;
  for (int i = 0; i < elements; i++) {
    int16_t bits = (int16_t)(magnitude_bits(row[i]) - less[i]);
    int16_t code = (int16_t)((int16_t)(bits + 7 + (bits >> 4 & 1)) >> 4);
    if (subnormals) {
      int16_t above = kvp_max_i16((int16_t)(bits + 512), 0);
      int16_t value = kvp_max_i16(kvp_max_i16(above, (int16_t)(2 * above - 256)),
                                  kvp_max_i16((int16_t)(4 * above - 1024), (int16_t)(8 * above - 3072)));
      int16_t rounded = (int16_t)((int16_t)(value + 127 + (value >> 8 & 1)) >> 8);
      code = (int16_t)(bits < 128 ? rounded : code);
    } else {
      met = (int16_t)(met | ((bits < 128) & (bits > -512)));
      code = kvp_max_i16(code, 0);
    }
    data[i] = (uint8_t)(code | (row[i] >> 8 & 0x80));
  }
  return met != 0;
}

/* e2m1: fraction of 6 bits; below 1.0 the codes 1 and 2 begin at 0.25 (exclusive: ties go to even) and 0.75. Codes
 * come out as bytes. */
KVP_INLINE void encode_e2m1_lanes(const uint16_t *restrict row, const int16_t *restrict less, int elements,
                                  uint8_t *restrict codes) {
  for (int i = 0; i < elements; i++) {
    int16_t bits = (int16_t)(magnitude_bits(row[i]) - less[i]);
    int16_t code = (int16_t)((int16_t)(bits + 31 + (bits >> 6 & 1)) >> 6);
    int16_t small = (int16_t)((bits > -128) + (bits >= 64));
    codes[i] = (uint8_t)(kvp_max_i16(code, small) | (row[i] >> 12 & 8));
  }
}

/* Any scale: through float32, saturated first. `factors` has one for each element. */
KVP_INLINE void encode_e2m1_floats(const uint16_t *restrict row, const float *restrict factors, int elements,
                                   uint8_t *restrict codes) {
  for (int i = 0; i < elements; i++) {
    float magnitude = kvp_min_positive(kvp_bf16_to_f32(row[i] & KVP_BF16_ABS) * factors[i], 6.0F);
    codes[i] = (uint8_t)(kvp_e2m1_code(magnitude) | (row[i] >> 12 & 8));
  }
}

/* Codes as bytes to two a byte: a pair of bytes is one little-endian word. */
KVP_INLINE void pack_e2m1(const uint16_t *restrict code_pairs, int pairs, uint8_t *restrict data) {
  for (int i = 0; i < pairs; i++) {
    data[i] = (uint8_t)(code_pairs[i] | code_pairs[i] >> 4);
  }
}

static __attribute__((noinline)) void patch_e4m3_nan(const uint16_t *row, int elements, uint8_t *data) {
  for (int i = 0; i < elements; i++) {
    data[i] = (row[i] & KVP_BF16_ABS) >= KVP_BF16_INF ? KVP_E4M3_NAN : data[i];
  }
}

/* e4m3 codes under one ue8m0 scale for each 32 elements: v41, index_mxfp8. */
KVP_INLINE struct kvp_quantize_result quantize_mxfp8(const uint16_t *restrict row, int elements,
                                                     uint8_t *restrict data, uint8_t *restrict scales) {
  enum { group_elements = 32 };
  int groups = elements / group_elements;
  int16_t maxima[kvp_main_elements / group_elements];
  int16_t less[kvp_main_elements];
  bool nonfinite = group_maxima(row, groups, group_elements, maxima) >= KVP_BF16_INF;
  if (nonfinite) {
    group_maxima_finite(row, groups, group_elements, maxima);
  }
  for (int g = 0; g < groups; g++) {
    scales[g] = ue8m0_for_448(maxima[g]);
    for (int i = 0; i < group_elements; i++) {
      less[g * group_elements + i] = (int16_t)((scales[g] - 7) << 7);
    }
  }
  if (encode_e4m3_lanes(row, less, elements, false, data)) {
    (void)encode_e4m3_lanes(row, less, elements, true, data);
  }
  if (nonfinite) {
    patch_e4m3_nan(row, elements, data);
  }
  return (struct kvp_quantize_result){.nonfinite = nonfinite};
}

static struct kvp_quantize_result quantize_v41(const uint16_t *restrict row, uint8_t *restrict data,
                                               uint8_t *restrict scales) {
  return quantize_mxfp8(row, kvp_main_elements, data, scales);
}

static struct kvp_quantize_result quantize_index_mxfp8(const uint16_t *restrict row, uint8_t *restrict data,
                                                       uint8_t *restrict scales) {
  return quantize_mxfp8(row, kvp_index_elements, data, scales);
}

static struct kvp_quantize_result quantize_index_fp8_f32(const uint16_t *restrict row, uint8_t *restrict data,
                                                         uint8_t *restrict scales) {
  int16_t amax;
  bool nonfinite = group_maxima(row, 1, kvp_index_elements, &amax) >= KVP_BF16_INF;
  if (nonfinite) {
    group_maxima_finite(row, 1, kvp_index_elements, &amax);
  }
  float scale = kvp_max_positive(kvp_bf16_to_f32((uint16_t)amax), 1e-4F) / 448.0F;
  memcpy(scales, &scale, sizeof(scale));
  float factor = 1.0F / scale;
  for (int i = 0; i < kvp_index_elements; i++) {
    uint32_t code = kvp_e4m3_code(kvp_bf16_to_f32(row[i] & KVP_BF16_ABS) * factor);
    data[i] = (uint8_t)(code | (row[i] >> 8 & 0x80));
  }
  if (nonfinite) {
    patch_e4m3_nan(row, kvp_index_elements, data);
  }
  return (struct kvp_quantize_result){.nonfinite = nonfinite};
}

/* FP4 has no NaN: a group with one keeps no value at all. Its maximum is taken for 0 so that what is computed from it
 * before the patch is harmless and counts as nothing. */
KVP_INLINE uint32_t take_nonfinite_groups(int16_t *maxima, int groups) {
  uint32_t mask = 0;
  for (int g = 0; g < groups; g++) {
    if (maxima[g] >= KVP_BF16_INF) {
      maxima[g] = 0;
      mask |= UINT32_C(1) << g;
    }
  }
  return mask;
}

static __attribute__((noinline)) void patch_e2m1_nan(uint32_t mask, int group_elements, uint8_t nan, uint8_t *data,
                                                     uint8_t *scales) {
  for (int g = 0; mask >> g != 0; g++) {
    if ((mask >> g & 1) != 0) {
      memset(data + g * group_elements / 2, 0, (size_t)group_elements / 2);
      scales[g] = nan;
    }
    if (g == 31) {
      break;
    }
  }
}

static struct kvp_quantize_result quantize_v41_fp4(const uint16_t *restrict row, uint8_t *restrict data,
                                                   uint8_t *restrict scales) {
  enum { group_elements = 16, groups = kvp_main_elements / group_elements };
  int16_t maxima[groups];
  float factors[groups];
  float element_factors[kvp_main_elements];
  uint16_t code_pairs[kvp_main_elements / 2];
  uint32_t nonfinite_groups = 0;
  bool nonfinite = group_maxima(row, groups, group_elements, maxima) >= KVP_BF16_INF;
  if (nonfinite) {
    nonfinite_groups = take_nonfinite_groups(maxima, groups);
  }
  uint32_t saturated = 0;
  for (int g = 0; g < groups; g++) {
    float m = kvp_max_positive(kvp_bf16_to_f32((uint16_t)maxima[g]), 0x1p-9F * 6.0F) * (1.0F / 6.0F);
    saturated += kvp_f32_bits(m) > kvp_f32_bits(448.0F);
    uint32_t byte = kvp_e4m3_code(kvp_min_positive(m, 448.0F));
    factors[g] = 1.0F / kvp_e4m3_magnitude(byte);
    scales[g] = (uint8_t)byte;
  }
  for (int g = 0; g < groups; g++) {
    for (int i = 0; i < group_elements; i++) {
      element_factors[g * group_elements + i] = factors[g];
    }
  }
  encode_e2m1_floats(row, element_factors, kvp_main_elements, (uint8_t *)code_pairs);
  pack_e2m1(code_pairs, kvp_main_elements / 2, data);
  if (nonfinite) {
    patch_e2m1_nan(nonfinite_groups, group_elements, KVP_E4M3_NAN, data, scales);
  }
  return (struct kvp_quantize_result){.nonfinite = nonfinite, .groups_saturated = saturated};
}

static struct kvp_quantize_result quantize_index_fp4(const uint16_t *restrict row, uint8_t *restrict data,
                                                     uint8_t *restrict scales) {
  enum { group_elements = 32, groups = kvp_index_elements / group_elements };
  int16_t maxima[groups];
  int16_t less[kvp_index_elements];
  uint16_t code_pairs[kvp_index_elements / 2];
  uint32_t nonfinite_groups = 0;
  bool nonfinite = group_maxima(row, groups, group_elements, maxima) >= KVP_BF16_INF;
  if (nonfinite) {
    nonfinite_groups = take_nonfinite_groups(maxima, groups);
  }
  for (int g = 0; g < groups; g++) {
    scales[g] = ue8m0_for_6(maxima[g]);
    for (int i = 0; i < group_elements; i++) {
      less[g * group_elements + i] = (int16_t)((scales[g] - 1) << 7);
    }
  }
  encode_e2m1_lanes(row, less, kvp_index_elements, (uint8_t *)code_pairs);
  pack_e2m1(code_pairs, kvp_index_elements / 2, data);
  if (nonfinite) {
    patch_e2m1_nan(nonfinite_groups, group_elements, KVP_UE8M0_NAN, data, scales);
  }
  return (struct kvp_quantize_result){.nonfinite = nonfinite};
}

#endif
