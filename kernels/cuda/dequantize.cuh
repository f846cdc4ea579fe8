/* Codes and scales to BF16, FORMATS section 5, for one chunk: 8 consecutive elements of one lane.
 *
 * Any bytes are fine: records of a store as well as memory that nobody stored to.
 */
#ifndef KVPOOL_KERNELS_CUDA_DEQUANTIZE_CUH
#define KVPOOL_KERNELS_CUDA_DEQUANTIZE_CUH

#include <stdint.h>

#include "kernels/cuda/format.cuh"
#include "kernels/cuda/ptx.cuh"

namespace kvp {

constexpr uint32_t bf16_pair_nan = 0x7FFF7FFF;

#if KVP_HAVE_E4M3_CONVERSIONS
__device__ __forceinline__ float2 f32_pair_of_e4m3(uint32_t codes) {
  return f32_pair_of_f16(f16_pair_of_e4m3(codes));
}
#else
/* Sign and seven bits put into a float32 are the number times 2^-120, subnormal ones included. */
__device__ __forceinline__ float f32_of_e4m3(uint32_t code) {
  float small = __uint_as_float((code & 0x80) << 24 | (code & 0x7F) << 20);
  return (code & 0x7F) == 0x7F ? __uint_as_float(0x7FFFFFFF) : __fmul_rn(small, __uint_as_float((127u + 120u) << 23));
}
__device__ __forceinline__ float2 f32_pair_of_e4m3(uint32_t codes) {
  return make_float2(f32_of_e4m3(codes & 0xFF), f32_of_e4m3(codes >> 8 & 0xFF));
}
#endif

__device__ __forceinline__ uint32_t decode_e4m3_pair(uint32_t codes, float scale) {
  float2 v = f32_pair_of_e4m3(codes & 0xFFFF);
  return bf16_pair(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale));
}

/* A ue8m0 byte is the exponent of a float32: 0 gives 0, 0xFF infinity. */
__device__ __forceinline__ uint4 decode_e4m3(uint2 codes, uint32_t scale_byte) {
  float scale = __uint_as_float(scale_byte << 23);
  return make_uint4(decode_e4m3_pair(codes.x, scale), decode_e4m3_pair(codes.x >> 16, scale),
                    decode_e4m3_pair(codes.y, scale), decode_e4m3_pair(codes.y >> 16, scale));
}

/* The BF16 magnitudes of 0 0.5 1 1.5 | 2 3 4 6 as two tables of bytes: a byte permutation looks up four codes. */
constexpr uint32_t e2m1_high_0 = 0x3F3F3F00;
constexpr uint32_t e2m1_high_4 = 0x40404040;
constexpr uint32_t e2m1_low_0 = 0xC0800000;
constexpr uint32_t e2m1_low_4 = 0xC0804000;

/* Four codes without signs in the low 16 bits, signs at the top of four bytes. */
__device__ __forceinline__ uint2 bf16_of_four_e2m1(uint32_t magnitudes, uint32_t signs) {
  uint32_t high = __byte_perm(e2m1_high_0, e2m1_high_4, magnitudes) | (signs & 0x80808080);
  uint32_t low = __byte_perm(e2m1_low_0, e2m1_low_4, magnitudes);
  return make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
}

/* An e4m3 scale as a BF16 pair: exact, its NaN is handled by the caller. */
__device__ __forceinline__ uint32_t bf16_pair_of_e4m3(uint32_t byte) {
  float magnitude = __fmul_rn(__uint_as_float((byte & 0x7F) << 20), __uint_as_float((127u + 120u) << 23));
  uint32_t bits = __float_as_uint(magnitude) | (byte & 0x80) << 24;
  return __byte_perm(bits, 0, 0x3232);
}

__device__ __forceinline__ uint4 decode_e2m1(uint32_t codes, uint32_t scale_byte) {
  uint32_t scale = bf16_pair_of_e4m3(scale_byte);
  bool nan = (scale_byte & 0x7F) == 0x7F;
  uint32_t magnitudes = codes & 0x77777777;
  uint32_t even_signs = codes << 4;
  uint2 first = bf16_of_four_e2m1(magnitudes, __byte_perm(even_signs, codes, 0x5140));
  uint2 second = bf16_of_four_e2m1(magnitudes >> 16, __byte_perm(even_signs, codes, 0x7362));
  return make_uint4(nan ? bf16_pair_nan : bf16_pair_multiply(first.x, scale),
                    nan ? bf16_pair_nan : bf16_pair_multiply(first.y, scale),
                    nan ? bf16_pair_nan : bf16_pair_multiply(second.x, scale),
                    nan ? bf16_pair_nan : bf16_pair_multiply(second.y, scale));
}

template <class format> __device__ __forceinline__ uint4 decode(typename format::codes codes, uint32_t scale_byte) {
  if constexpr (format::fp4) {
    return decode_e2m1(codes, scale_byte);
  } else {
    return decode_e4m3(codes, scale_byte);
  }
}

} // namespace kvp

#endif
