/* See kernel_bench_device.h. */
#include "tests/bench/kernel_bench_device.h"

#include "tests/bench/kernel_bench_variants.cuh"

namespace kvp {

constexpr uint32_t wide_grid = 2048;
constexpr uint32_t wide_block = 256;

static __global__ void fill_kernel(uint16_t *to, uint64_t elements) {
  uint64_t step = (uint64_t)gridDim.x * blockDim.x;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += step) {
    uint64_t bits = (i + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    float value = 0;
    for (int part = 0; part < 4; part++) {
      value += (float)(int16_t)(bits >> (16 * part)) / 32768.0f;
    }
    to[i] = (uint16_t)(__float_as_uint(value) >> 16);
  }
}

static __global__ void read_kernel(const uint4 *from, uint64_t vectors, uint32_t *never) {
  uint64_t step = (uint64_t)gridDim.x * blockDim.x;
  uint32_t all = 0;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += step) {
    uint4 v = from[i];
    all |= v.x | v.y | v.z | v.w;
  }
  if (all == 0x5EED5EED) {
    *never = all;
  }
}

/* Depends on what the words are and where. */
static __global__ void checksum_kernel(const uint64_t *from, uint64_t words, unsigned long long *sum) {
  uint64_t step = (uint64_t)gridDim.x * blockDim.x;
  uint64_t own = 0;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
    uint64_t bits = (from[i] ^ (i + 1) * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    own += (bits ^ bits >> 29) * 0x94D049BB133111EBu;
  }
  atomicAdd(sum, (unsigned long long)own);
}

} // namespace kvp

extern "C" cudaError_t kernel_bench_fill_rows(uint8_t *rows, uint64_t elements, cudaStream_t stream) {
  kvp::fill_kernel<<<kvp::wide_grid, kvp::wide_block, 0, stream>>>((uint16_t *)rows, elements);
  return cudaGetLastError();
}

extern "C" cudaError_t kernel_bench_read(const uint8_t *memory, uint64_t bytes, cudaStream_t stream) {
  kvp::read_kernel<<<kvp::wide_grid, kvp::wide_block, 0, stream>>>((const uint4 *)memory, bytes / sizeof(uint4),
                                                                   (uint32_t *)memory);
  return cudaGetLastError();
}

extern "C" cudaError_t kernel_bench_checksum(const uint8_t *memory, uint64_t bytes, uint64_t *sum,
                                             cudaStream_t stream) {
  kvp::checksum_kernel<<<kvp::wide_grid, kvp::wide_block, 0, stream>>>(
      (const uint64_t *)memory, bytes / sizeof(uint64_t), (unsigned long long *)sum);
  return cudaGetLastError();
}

extern "C" const struct kernel_variant *kernel_variant_get(uint32_t index) {
  return index < sizeof(kvp::variants) / sizeof(kvp::variants[0]) ? &kvp::variants[index] : nullptr;
}
