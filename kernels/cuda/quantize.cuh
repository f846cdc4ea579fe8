/* BF16 to codes and scales, FORMATS section 4, for one chunk: 8 consecutive elements, which one lane holds as four
 * words. A group's lanes all compute its scale; nothing here talks to another lane.
 *
 * Float operations are single IEEE operations (the _rn intrinsics are never fused), subnormals are kept. Every trick
 * is exact: the contract suite holds it against the host kernels and a reference written to be read.
 */
#ifndef KVPOOL_KERNELS_CUDA_QUANTIZE_CUH
#define KVPOOL_KERNELS_CUDA_QUANTIZE_CUH

#include <stdint.h>

#include "kernels/cuda/format.cuh"
#include "kernels/cuda/ptx.cuh"

namespace kvp {

constexpr uint32_t bf16_infinity = 0x7F80;
constexpr uint32_t bf16_pair_magnitude = 0x7FFF7FFF;
constexpr uint32_t f32_exponent = 0x7F800000;
constexpr uint32_t e4m3_nan = 0x7F;
constexpr uint32_t ue8m0_nan = 0xFF;

/* Magnitudes are ordered as their bits are, NaN on top. Result: even elements low, odd ones high. */
__device__ __forceinline__ uint32_t chunk_maxima(const uint4 &words) {
  uint32_t left = __vmaxu2(words.x & bf16_pair_magnitude, words.y & bf16_pair_magnitude);
  uint32_t right = __vmaxu2(words.z & bf16_pair_magnitude, words.w & bf16_pair_magnitude);
  return __vmaxu2(left, right);
}

/* The same over finite elements only. */
__device__ __forceinline__ uint32_t finite_magnitudes(uint32_t word) {
  uint32_t low = word & 0x7FFF;
  uint32_t high = word >> 16 & 0x7FFF;
  return (low < bf16_infinity ? low : 0) | (high < bf16_infinity ? high : 0) << 16;
}
__device__ __forceinline__ uint32_t chunk_maxima_finite(const uint4 &words) {
  return __vmaxu2(__vmaxu2(finite_magnitudes(words.x), finite_magnitudes(words.y)),
                  __vmaxu2(finite_magnitudes(words.z), finite_magnitudes(words.w)));
}

__device__ __forceinline__ float f32_of_low_bf16(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float f32_of_high_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000);
}

/* 1/v correctly rounded: one Newton step from an approximation. Proved for what it is used with: e4m3 numbers (their
 * reciprocals are far from the middle between two floats), and by trial of every scale of index_fp8_f32. */
__device__ __forceinline__ float reciprocal(float v) {
  float r = reciprocal_approximate(v);
  return __fmaf_rn(r, __fmaf_rn(-v, r, 1.0f), r);
}

/* Rounds |v| to a small float of `mantissa_bits` whose smallest normal number is 2^min_exponent: nearest even, not
 * saturated. Adding 2^(e + 23 - mantissa_bits), e the exponent of v or min_exponent, lets the adder round; the sum's
 * low bits are the mantissa with its hidden bit. `shifter` has some units more, an even number, so that the low byte
 * of code_word() is the code: nothing is left to mask. */
template <int mantissa_bits, int min_exponent> struct small_float {
  static constexpr uint32_t shift = 23 - mantissa_bits;
  static constexpr uint32_t smallest = (uint32_t)(min_exponent + 127) + shift; /* biased exponent of a shifter */
  static constexpr uint32_t units = (uint32_t) - (int32_t)(smallest << mantissa_bits) & 0xFF;
  static_assert(units % 2 == 0, "ties must stay ties");

  static __device__ __forceinline__ uint32_t shifter(float v) {
    return __viaddmax_u32(__float_as_uint(v) & f32_exponent, (shift << 23) + units, (smallest << 23) + units);
  }
  static __device__ __forceinline__ float shifted(float v, uint32_t shifter) {
    return __fadd_rn(fabsf(v), __uint_as_float(shifter));
  }
  /* The code is the low byte, the rest is noise. */
  static __device__ __forceinline__ uint32_t code_word(float shifted, uint32_t shifter) {
    return __float_as_uint(shifted) + (shifter >> shift);
  }
  static __device__ __forceinline__ uint32_t code_word(float v) {
    uint32_t s = shifter(v);
    return code_word(shifted(v, s), s);
  }
};

using e4m3 = small_float<3, -6>;
using e2m1 = small_float<1, 0>;

/* What a group's lanes need of its scale. */
struct group_scale {
  uint32_t stored; /* the scale's bytes; of those of one byte the low one */
  float factor;    /* elements are multiplied by it */
};

/* A power of two s >= max(amax, 1e-4) / 448 or / 6, from amax's bits: 448 = 1.75 * 2^8 and 6 = 1.5 * 2^2, so a mantissa
 * above 1.75 or 1.5 carries into the exponent; the floor's own bytes are 105 and 112. */
template <bool fp4> __device__ __forceinline__ group_scale scale_ue8m0(uint32_t amax) {
  constexpr uint32_t carry = fp4 ? 63 : 31;
  constexpr uint32_t down = fp4 ? 2 : 8;
  constexpr uint32_t least = fp4 ? 112 + down : 105 + down;
  uint32_t exponent = max((amax + carry) >> 7, least);
  return group_scale{exponent - down, __uint_as_float((254 + down - exponent) << 23)};
}

/* e4m3 scales. amax is brought into [6 * 2^-9, 6 * 448] first, which is the same: the product with 1/6 is monotonic and
 * meets both ends exactly. Rounding to e4m3 yields the scale as a float, too. */
struct e4m3_rounding {
  float scale;
  uint32_t code_word;
};
__device__ __forceinline__ e4m3_rounding round_scale_e4m3(uint32_t amax) {
  uint32_t clamped = min(max(amax, 0x3C40u), saturation_limit);
  float m = __fmul_rn(__uint_as_float(clamped << 16), 1.0f / 6.0f);
  uint32_t shifter = e4m3::shifter(m);
  float shifted = e4m3::shifted(m, shifter);
  return e4m3_rounding{__fsub_rn(shifted, __uint_as_float(shifter)), e4m3::code_word(shifted, shifter)};
}
__device__ __forceinline__ group_scale scale_e4m3(uint32_t amax) {
  e4m3_rounding rounded = round_scale_e4m3(amax);
  return group_scale{rounded.code_word, reciprocal(rounded.scale)};
}

/* Under an e4m3 scale that was rounded down to 2^-9 or 2 * 2^-9, or saturated, an element may be 7 scales and more,
 * where e2m1's next code would begin. Then magnitudes are cut to 6 scales (exact in BF16) before they are encoded. */
constexpr uint32_t e4m3_scale_safe_min = 0x3CF1; /* amax above 15 * 2^-9, whose scale is 3 * 2^-9 or more */

__device__ __forceinline__ uint32_t cut_word(uint32_t word, uint32_t limits) {
  return (word & ~bf16_pair_magnitude) | __vminu2(word & bf16_pair_magnitude, limits);
}
__device__ __forceinline__ uint4 cut_to_scale(const uint4 &words, uint32_t amax) {
  uint32_t limit = __float_as_uint(__fmul_rn(round_scale_e4m3(amax).scale, 6.0f));
  uint32_t limits = __byte_perm(limit, 0, 0x3232);
  return make_uint4(cut_word(words.x, limits), cut_word(words.y, limits), cut_word(words.z, limits),
                    cut_word(words.w, limits));
}

/* float32 scales: a / 448 by a rounded reciprocal and one correction, correctly rounded for every BF16 amax. */
__device__ __forceinline__ group_scale scale_f32(uint32_t amax) {
  float a = fmaxf(__uint_as_float(amax << 16), 1e-4f);
  float quotient = __fmul_rn(a, 1.0f / 448.0f);
  float scale = __fmaf_rn(__fmaf_rn(-448.0f, quotient, a), 1.0f / 448.0f, quotient);
  return group_scale{__float_as_uint(scale), reciprocal(scale)};
}

template <class format> __device__ __forceinline__ group_scale scale_of_group(uint32_t amax) {
  if constexpr (format::scale == KVP_SCALE_UE8M0) {
    return scale_ue8m0<format::fp4>(amax);
  } else if constexpr (format::scale == KVP_SCALE_E4M3) {
    return scale_e4m3(amax);
  } else {
    return scale_f32(amax);
  }
}

#if !KVP_HAVE_E4M3_CONVERSIONS
__device__ __forceinline__ uint32_t e4m3_code(float v) {
  float magnitude = fminf(fabsf(v), 448.0f);
  return (e4m3::code_word(magnitude) & 0xFF) | (__float_as_uint(v) >> 24 & 0x80);
}
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  return e4m3_code(low) | e4m3_code(high) << 8;
}
#endif

__device__ __forceinline__ uint32_t e4m3_of_two_words(uint32_t first, uint32_t second, float factor) {
  uint32_t low = e4m3_pair(__fmul_rn(f32_of_low_bf16(first), factor), __fmul_rn(f32_of_high_bf16(first), factor));
  uint32_t high = e4m3_pair(__fmul_rn(f32_of_low_bf16(second), factor), __fmul_rn(f32_of_high_bf16(second), factor));
  return low | high << 16;
}

__device__ __forceinline__ uint2 encode_e4m3(const uint4 &words, const group_scale &scale) {
  return make_uint2(e4m3_of_two_words(words.x, words.y, scale.factor),
                    e4m3_of_two_words(words.z, words.w, scale.factor));
}

/* Codes 0x7F where elements are not finite. */
__device__ __forceinline__ uint32_t patch_nan_of_two_words(uint32_t first, uint32_t second, uint32_t codes) {
  uint32_t nan = (first & 0x7FFF) >= bf16_infinity ? 0xFF : 0;
  nan |= (first >> 16 & 0x7FFF) >= bf16_infinity ? 0xFF00 : 0;
  nan |= (second & 0x7FFF) >= bf16_infinity ? 0xFF0000 : 0;
  nan |= (second >> 16 & 0x7FFF) >= bf16_infinity ? 0xFF000000 : 0;
  return (codes & ~nan) | (nan & e4m3_nan * 0x01010101u);
}
__device__ __forceinline__ uint2 patch_e4m3_nan(const uint4 &words, uint2 codes) {
  return make_uint2(patch_nan_of_two_words(words.x, words.y, codes.x),
                    patch_nan_of_two_words(words.z, words.w, codes.y));
}

/* The two codes of a pair in the low byte, magnitudes only; the rest is noise. */
__device__ __forceinline__ uint32_t e2m1_of_word(uint32_t word, float factor) {
  uint32_t even = e2m1::code_word(__fmul_rn(f32_of_low_bf16(word), factor));
  uint32_t odd = e2m1::code_word(__fmul_rn(f32_of_high_bf16(word), factor));
  return odd * 16 + even;
}

/* Signs of eight elements where their codes have them. The top byte of every element has its sign: 1 of a word the
 * even one's, 3 the odd one's. */
__device__ __forceinline__ uint32_t e2m1_with_signs(uint32_t codes, const uint4 &words) {
  uint32_t tops_first = __byte_perm(words.x, words.y, 0x7351);
  uint32_t tops_second = __byte_perm(words.z, words.w, 0x7351);
  uint32_t even_tops = __byte_perm(tops_first, tops_second, 0x5410);
  uint32_t odd_tops = __byte_perm(tops_first, tops_second, 0x7632);
  return codes | (even_tops >> 4 & 0x08080808) | (odd_tops & 0x80808080);
}

/* Every element is below 7 scales. */
__device__ __forceinline__ uint32_t encode_e2m1(const uint4 &words, const group_scale &scale) {
  uint32_t first = __byte_perm(e2m1_of_word(words.x, scale.factor), e2m1_of_word(words.y, scale.factor), 0x0040);
  uint32_t second = __byte_perm(e2m1_of_word(words.z, scale.factor), e2m1_of_word(words.w, scale.factor), 0x0040);
  return e2m1_with_signs(__byte_perm(first, second, 0x5410), words);
}

/* The same under a power of two, where products are exact in BF16: small_float's way with two elements a word. The
 * shifter's exponent comes from the element's and the factor's, as signed numbers: what is tiny goes to the smallest.
 * A shifter is 2^(e + 6), e >= 0, and 6 units: sum and shifter >> 6 have 6 + code - 2e and 10 + 2e in their low
 * nibbles, and nothing carries from the low half into the high one. */
struct e2m1_factor {
  uint32_t pair;   /* twice in BF16 */
  uint32_t to_add; /* to an element's exponent: the shifter's */
};
__device__ __forceinline__ e2m1_factor e2m1_factor_of(const group_scale &scale) {
  constexpr uint32_t exponent_bias = 127u << 7;
  uint32_t high = __float_as_uint(scale.factor) >> 16;
  uint32_t to_add = high - exponent_bias + (6u << 7) + 6;
  return e2m1_factor{__byte_perm(high, 0, 0x1010), __byte_perm(to_add, 0, 0x1010)};
}
/* Codes of both elements in the low nibbles of the halves, magnitudes only; the rest is noise. */
__device__ __forceinline__ uint32_t e2m1_of_pair(uint32_t word, const e2m1_factor &factor) {
  constexpr uint32_t smallest = 0x42864286; /* 2^6 and 6 units */
  uint32_t shifter = __viaddmax_s16x2(word & 0x7F807F80, factor.to_add, smallest);
  return bf16_pair_multiply_add(word & bf16_pair_magnitude, factor.pair, shifter) + (shifter >> 6);
}
__device__ __forceinline__ uint32_t encode_e2m1_ue8m0(const uint4 &words, const group_scale &scale) {
  e2m1_factor factor = e2m1_factor_of(scale);
  uint32_t first = __byte_perm(e2m1_of_pair(words.x, factor), e2m1_of_pair(words.y, factor), 0x6420);
  uint32_t second = __byte_perm(e2m1_of_pair(words.z, factor), e2m1_of_pair(words.w, factor), 0x6420);
  uint32_t even = __byte_perm(first, second, 0x6420);
  uint32_t odd = __byte_perm(first, second, 0x7531);
  return e2m1_with_signs((even & 0x0F0F0F0F) | (odd << 4 & 0xF0F0F0F0), words);
}

/* Codes of a chunk in the format's own type. */
template <class format>
__device__ __forceinline__ typename format::codes encode(const uint4 &words, const group_scale &scale) {
  if constexpr (format::fp4 && format::scale == KVP_SCALE_UE8M0) {
    return encode_e2m1_ue8m0(words, scale);
  } else if constexpr (format::fp4) {
    return encode_e2m1(words, scale);
  } else {
    return encode_e4m3(words, scale);
  }
}

} // namespace kvp

#endif
