/* Number conversions of FORMATS sections 4 and 5, element by element: integer and float32 operations without tables
 * or branches, so that a loop over them vectorises.
 *
 * Every float operation here is one IEEE operation; the build forbids contraction into fused multiply-adds, and
 * nothing relies on flushed subnormals. So all instruction sets give the same bytes.
 */
#ifndef KVPOOL_KERNELS_HOST_CONVERT_H
#define KVPOOL_KERNELS_HOST_CONVERT_H

#include <stdint.h>
#include <string.h>

#define KVP_INLINE static inline __attribute__((always_inline))

#define KVP_BF16_SIGN    UINT16_C(0x8000)
#define KVP_BF16_ABS     UINT16_C(0x7FFF)
#define KVP_BF16_INF     UINT16_C(0x7F80)
#define KVP_BF16_NAN     UINT16_C(0x7FFF)
#define KVP_F32_EXPONENT UINT32_C(0x7F800000)
#define KVP_E4M3_NAN     UINT8_C(0x7F)
#define KVP_UE8M0_NAN    UINT8_C(0xFF)

KVP_INLINE float kvp_f32_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

KVP_INLINE uint32_t kvp_f32_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

KVP_INLINE float kvp_bf16_to_f32(uint16_t bf16) {
  return kvp_f32_from_bits((uint32_t)bf16 << 16);
}

KVP_INLINE uint32_t kvp_max_u32(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}
KVP_INLINE uint32_t kvp_min_u32(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}
KVP_INLINE int16_t kvp_max_i16(int16_t a, int16_t b) {
  return (int16_t)(a > b ? a : b);
}
KVP_INLINE int16_t kvp_min_i16(int16_t a, int16_t b) {
  return (int16_t)(a < b ? a : b);
}

/* Floats >= 0 are ordered as their bits are, NaN on top; unlike float comparisons these always vectorise. */
KVP_INLINE float kvp_max_positive(float a, float b) {
  return kvp_f32_from_bits(kvp_max_u32(kvp_f32_bits(a), kvp_f32_bits(b)));
}
KVP_INLINE float kvp_min_positive(float a, float b) {
  return kvp_f32_from_bits(kvp_min_u32(kvp_f32_bits(a), kvp_f32_bits(b)));
}

/* The code of a float32 >= 0, at most 2^64, in a small float of `mantissa_bits` whose smallest normal number is
 * 2^min_exponent; nearest even, not saturated.
 *
 * e is the value's exponent, or min_exponent if that is larger. Adding 2^(e + 23 - mantissa_bits) leaves exactly the
 * mantissa bits that the small float has at e, rounded by the adder: the low bits of the sum are that mantissa,
 * hidden bit included (one more than fits when it was rounded up to the next exponent), and e times 2^mantissa_bits
 * is the rest of the code. The final shift comes last because compilers would otherwise narrow each term on its own.
 */
KVP_INLINE uint32_t kvp_small_float_code(float value, uint32_t mantissa_bits, int min_exponent) {
  uint32_t shift = 23 - mantissa_bits;
  uint32_t smallest = (uint32_t)(min_exponent + 127) << 23;
  uint32_t exponent = kvp_max_u32(kvp_f32_bits(value) & KVP_F32_EXPONENT, smallest);
  uint32_t sum = kvp_f32_bits(value + kvp_f32_from_bits(exponent + (shift << 23)));
  return ((sum << shift) + (exponent - smallest)) >> shift;
}

KVP_INLINE uint32_t kvp_e4m3_code(float magnitude) {
  return kvp_small_float_code(magnitude, 3, -6);
}

KVP_INLINE uint32_t kvp_e2m1_code(float magnitude) {
  return kvp_small_float_code(magnitude, 1, 0);
}

/* Magnitude of an e4m3 code 0 .. 0x7E: normal numbers by a shift and the other bias, subnormal ones as
 * 2^-6 * (1 + code / 8) - 2^-6, so that no float32 subnormal is touched. Both subtract, one of them 0: a subtraction
 * under a condition would not vectorise. */
KVP_INLINE float kvp_e4m3_magnitude(uint32_t code) {
  uint32_t subnormal = code < 8;
  float biased = kvp_f32_from_bits((code << 20) + ((120 + subnormal) << 23));
  return biased - kvp_f32_from_bits((0 - subnormal) & (UINT32_C(121) << 23));
}

/* Twice the magnitude of an e2m1 code 0 .. 7 (0 1 2 3 4 6 8 12): the upper hull of its three linear pieces. */
KVP_INLINE uint32_t kvp_e2m1_twice(uint32_t code) {
  uint32_t low = code;
  uint32_t middle = kvp_max_u32(2 * code, 4) - 4;
  uint32_t high = kvp_max_u32(4 * code, 16) - 16;
  return kvp_max_u32(low, kvp_max_u32(middle, high));
}

/* float32 to BF16, nearest even; every NaN becomes 0x7FFF. */
KVP_INLINE uint16_t kvp_bf16_from_f32(float value) {
  uint32_t bits = kvp_f32_bits(value);
  uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & ~(UINT32_C(1) << 31)) > KVP_F32_EXPONENT ? KVP_BF16_NAN : rounded);
}

#endif
