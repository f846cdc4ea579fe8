/* One record to one BF16 row, FORMATS section 5. Included by the kernels that return rows; compiled once for each
 * instruction set.
 *
 * Records a store wrote take the quick way: 16-bit integer arithmetic on BF16 bit patterns, exact because no result
 * is subnormal or overflows. Any other bytes (memory nobody stored to yet) take the formula as it is written.
 */
#ifndef KVPOOL_KERNELS_HOST_DEQUANTIZE_H
#define KVPOOL_KERNELS_HOST_DEQUANTIZE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/convert.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are little-endian");

typedef void kvp_dequantize_fn(const uint8_t *restrict data, const uint8_t *restrict scales, uint16_t *restrict row);

static __attribute__((noinline)) void dequantize_v41_any(const uint8_t *data, const uint8_t *scales, uint16_t *row) {
  for (int i = 0; i < 512; i++) {
    uint32_t code = data[i] & 0x7F;
    float magnitude = kvp_e4m3_magnitude(code) * kvp_f32_from_bits((uint32_t)scales[i / 32] << 23);
    uint16_t bits = (uint16_t)(kvp_bf16_from_f32(magnitude) | (data[i] & 0x80) << 8);
    bool nan = code == KVP_E4M3_NAN || (bits & KVP_BF16_ABS) > KVP_BF16_INF;
    row[i] = nan ? KVP_BF16_NAN : bits;
  }
}

/* BF16 magnitude bits of an e4m3 code under exponent 2^0, as a function of the code: concave and linear between
 * powers of two, so the least of its four lines (normal numbers; subnormal ones with 3, 2 and 1 significant bits). */
KVP_INLINE int16_t e4m3_lines(int16_t code) {
  int16_t lines = (int16_t)(16 * code);
  lines = kvp_min_i16(lines, (int16_t)(32 * code - 128));
  lines = kvp_min_i16(lines, (int16_t)(64 * code - 256));
  return kvp_min_i16(lines, (int16_t)(128 * code - 384));
}

static void dequantize_v41(const uint8_t *restrict data, const uint8_t *restrict scales, uint16_t *restrict row) {
  enum { smallest = 10, largest = 246 };
  uint8_t spread = 0;
  for (int g = 0; g < 16; g++) {
    uint8_t above = (uint8_t)(scales[g] - smallest);
    spread = above > spread ? above : spread;
  }
  if (spread > largest - smallest) {
    dequantize_v41_any(data, scales, row);
    return;
  }
  int16_t bias[512];
  for (int g = 0; g < 16; g++) {
    for (int i = 32 * g; i < 32 * g + 32; i++) {
      bias[i] = (int16_t)((scales[g] - 7) << 7);
    }
  }
  for (int i = 0; i < 512; i++) {
    int16_t code = (int16_t)(data[i] & 0x7F);
    int16_t bits = (int16_t)(e4m3_lines(code) + bias[i]);
    uint16_t sign = (uint16_t)((data[i] & 0x80) << 8);
    uint16_t number = (uint16_t)((code == 0 ? 0 : bits) | sign);
    row[i] = code == KVP_E4M3_NAN ? KVP_BF16_NAN : number;
  }
}

static __attribute__((noinline)) void dequantize_v41_fp4_any(const uint8_t *data, const uint8_t *scales,
                                                             uint16_t *row) {
  for (int i = 0; i < 512; i++) {
    uint32_t nibble = data[i / 2] >> (i % 2 * 4) & 0xF;
    uint32_t scale = scales[i / 16];
    float magnitude = (float)kvp_e2m1_twice(nibble & 7) * (kvp_e4m3_magnitude(scale & 0x7F) * 0.5F);
    uint32_t sign = ((nibble << 4) ^ scale) & 0x80;
    uint16_t bits = (uint16_t)(kvp_bf16_from_f32(magnitude) | sign << 8);
    row[i] = (scale & 0x7F) == KVP_E4M3_NAN ? KVP_BF16_NAN : bits;
  }
}

/* Under a scale s > 0 the magnitudes s/2, s, 2s, 4s are s's bits with another exponent, and 1.5s, 3s, 6s those of
 * 1.5s: two constants a group, then integer arithmetic. */
static void dequantize_v41_fp4(const uint8_t *restrict data, const uint8_t *restrict scales, uint16_t *restrict row) {
  uint16_t half[512];
  uint16_t more[512];
  uint16_t code_pairs[256];
  uint8_t ordinary = 1;
  for (int g = 0; g < 32; g++) {
    float scale = kvp_e4m3_magnitude(scales[g]);
    uint32_t bits = kvp_f32_bits(scale) >> 16;
    uint32_t bits_of_more = kvp_f32_bits(scale * 1.5F) >> 16;
    for (int i = 16 * g; i < 16 * g + 16; i++) {
      half[i] = (uint16_t)(bits - 128);
      more[i] = (uint16_t)(bits_of_more - bits);
    }
    ordinary &= (uint8_t)((uint8_t)(scales[g] - 1) < KVP_E4M3_NAN - 1);
  }
  if (!ordinary) {
    dequantize_v41_fp4_any(data, scales, row);
    return;
  }
  for (int i = 0; i < 256; i++) {
    code_pairs[i] = (uint16_t)((data[i] | data[i] << 4) & 0x0F0F);
  }
  const uint8_t *codes = (const uint8_t *)code_pairs;
  for (int i = 0; i < 512; i++) {
    uint16_t code = codes[i] & 7;
    uint16_t sign = (uint16_t)((codes[i] & 8) << 12);
    uint16_t odd = (uint16_t)((code & 1) != 0 && code > 1 ? more[i] : 0);
    uint16_t bits = (uint16_t)(half[i] + ((code & 6) << 6) + odd);
    row[i] = (uint16_t)((code == 0 ? 0 : bits) | sign);
  }
}

#endif
