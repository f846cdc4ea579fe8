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

constexpr int norm_threads = 128;
constexpr int norm_elements_max = 512;

struct norm_rope_args {
  kvp_rows source;
  kvp_rows out;
  kvp_rows cos_sin;
  const uint16_t *weight;
  const int32_t *positions;
  uint64_t row_count;
  uint32_t elements;
  uint32_t rotary_dims;
  uint32_t rope_offset;
  float eps;
  bool neox;
};

/* A warp a row, which it has in shared memory. */
static __global__ void __launch_bounds__(norm_threads) norm_rope_kernel(const __grid_constant__ norm_rope_args args) {
  __shared__ float rows[norm_threads / 32][norm_elements_max];
  float *values = rows[threadIdx.x / 32];
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t row = (uint64_t)blockIdx.x * (norm_threads / 32) + threadIdx.x / 32;
  if (row >= args.row_count) {
    return;
  }
  const uint4 *from = (const uint4 *)(args.source.base + row * args.source.stride_bytes);
  const float *cosines = (const float *)(args.cos_sin.base + args.positions[row] * args.cos_sin.stride_bytes);
  const uint32_t half = args.rotary_dims / 2;
  float sum = 0;
  for (uint32_t chunk = lane; chunk < args.elements / 8; chunk += 32) {
    const uint4 words = from[chunk];
    const uint32_t pairs[] = {words.x, words.y, words.z, words.w};
    for (int i = 0; i < 8; i++) {
      float value = __uint_as_float(i % 2 == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xFFFF0000);
      values[chunk * 8 + i] = value;
      sum += value * value;
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
  }
  const float factor = rsqrtf(sum / (float)args.elements + args.eps);
  __syncwarp();
  for (uint32_t i = lane; i < args.elements; i += 32) {
    values[i] *= factor * __uint_as_float((uint32_t)args.weight[i] << 16);
  }
  __syncwarp();
  for (uint32_t pair = lane; pair < half; pair += 32) {
    float *first = values + args.rope_offset + (args.neox ? pair : 2 * pair);
    float *second = first + (args.neox ? half : 1);
    const float a = *first;
    *first = a * cosines[pair] - *second * cosines[half + pair];
    *second = a * cosines[half + pair] + *second * cosines[pair];
  }
  __syncwarp();
  uint4 *to = (uint4 *)(args.out.base + row * args.out.stride_bytes);
  for (uint32_t chunk = lane; chunk < args.elements / 8; chunk += 32) {
    const float *v = values + chunk * 8;
    to[chunk] =
        make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
  }
}

} // namespace kvp

extern "C" cudaError_t kernel_bench_norm_rope(const struct kvp_fused_store_params *params, const struct kvp_rows *out,
                                              cudaStream_t stream) {
  const kvp_store_params &store = params->store;
  const kvp::norm_rope_args args = {store.source,
                                    *out,
                                    params->cos_sin,
                                    params->norm_weight,
                                    params->positions,
                                    store.row_count,
                                    store.layer.geometry->sizes.elements,
                                    params->rotary_dims,
                                    params->rope_offset,
                                    params->eps,
                                    (params->flags & KVP_FUSED_NEOX) != 0};
  const uint64_t rows = kvp::norm_threads / 32;
  kvp::norm_rope_kernel<<<(uint32_t)((store.row_count + rows - 1) / rows), kvp::norm_threads, 0, stream>>>(args);
  return cudaGetLastError();
}

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
