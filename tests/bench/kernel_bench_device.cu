/* See kernel_bench_device.h. */
#include "tests/bench/kernel_bench_device.h"

#include "kernels/cuda/load_kernel.cuh"
#include "kernels/cuda/prepare.cuh"
#include "kernels/cuda/store_kernel.cuh"

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

/* Grid for the whole op, or as many blocks as the device holds. */
static cudaError_t grid_of(const void *kernel, uint64_t blocks, int threads, bool persistent, uint32_t *out) {
  uint32_t resident = 0;
  if (persistent) {
    cudaError_t error = resident_blocks_find(kernel, threads, 0, &resident);
    if (error != cudaSuccess) {
      return error;
    }
  }
  *out = (uint32_t)(persistent && resident < blocks ? resident : blocks);
  return cudaSuccess;
}

template <class format, class tuning, bool persistent>
static cudaError_t launch_store(const kvp_store_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  constexpr int rows = store_batch<format, tuning>::rows * tuning::threads / lanes_per_warp;
  void (*kernel)(const store_args) = store_kernel<format, tuning, true, false>;
  uint32_t blocks;
  cudaError_t error =
      grid_of((const void *)kernel, divide_up(params->row_count, rows), tuning::threads, persistent, &blocks);
  if (error != cudaSuccess) {
    return error;
  }
  return launch(kernel, blocks, tuning::threads, stream, store_args::make(*params, counts));
}

template <class format, class tuning, bool persistent>
static cudaError_t launch_load(const kvp_load_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  constexpr int warps = tuning::threads / lanes_per_warp;
  void (*kernel)(const load_args) = load_kernel<dequantized<format, tuning>, tuning, true>;
  load_cut cut = {(uint32_t)divide_up(params->segment_rows_max, tuning::piece_rows), tuning::piece_rows};
  uint32_t blocks;
  cudaError_t error = grid_of((const void *)kernel, divide_up(params->segment_count * cut.pieces, warps),
                              tuning::threads, persistent, &blocks);
  if (error != cudaSuccess) {
    return error;
  }
  return launch(kernel, blocks, tuning::threads, stream,
                load_args::make(*params, counts, cut, (uint64_t)blocks * warps));
}

constexpr load_hint ld = load_hint::plain;
constexpr load_hint ld_na = load_hint::no_allocate;
constexpr load_hint ld_ef = load_hint::evict_first;
constexpr store_hint st = store_hint::plain;
constexpr store_hint st_cs = store_hint::evict_first;

#define KVP_STORE_VARIANT(passes, threads, load, store, persistent)                                                  \
  {#passes " rows, " #threads " threads, " #load ", " #store ", persistent " #persistent, KVP_FORMAT_V41,            \
   launch_store<format_v41, store_tuning<passes, threads, load, store>, persistent>, nullptr},                       \
  {                                                                                                                  \
#passes " rows, " #threads " threads, " #load ", " #store ", persistent " #persistent, KVP_FORMAT_V41_FP4,       \
        launch_store < format_v41_fp4, store_tuning < passes, threads, load, store>, persistent>, nullptr            \
  }
#define KVP_LOAD_VARIANT(passes, threads, piece, load, store, persistent)                                            \
  {#passes " rows of " #piece ", " #threads " threads, " #load ", " #store ", persistent " #persistent,              \
   KVP_FORMAT_V41, nullptr, launch_load<format_v41, load_tuning<passes, threads, piece, load, store>, persistent>},  \
  {                                                                                                                  \
#passes " rows of " #piece ", " #threads " threads, " #load ", " #store ", persistent " #persistent,             \
        KVP_FORMAT_V41_FP4, nullptr, launch_load < format_v41_fp4, load_tuning < passes, threads, piece, load,       \
        store>, persistent>                                                                                          \
  }

static const kernel_variant variants[] = {
    KVP_STORE_VARIANT(4, 256, ld_na, st, false),       KVP_STORE_VARIANT(4, 256, ld, st, false),
    KVP_STORE_VARIANT(4, 256, ld_ef, st, false),       KVP_STORE_VARIANT(4, 256, ld_na, st_cs, false),
    KVP_STORE_VARIANT(2, 256, ld_na, st, false),       KVP_STORE_VARIANT(1, 256, ld_na, st, false),
    KVP_STORE_VARIANT(8, 128, ld_na, st, false),       KVP_STORE_VARIANT(4, 128, ld_na, st, false),
    KVP_STORE_VARIANT(2, 512, ld_na, st, false),       KVP_STORE_VARIANT(4, 256, ld_na, st, true),
    KVP_STORE_VARIANT(2, 256, ld_na, st, true),        KVP_LOAD_VARIANT(4, 256, 16, ld_na, st, false),
    KVP_LOAD_VARIANT(4, 256, 16, ld, st, false),       KVP_LOAD_VARIANT(4, 256, 16, ld_ef, st, false),
    KVP_LOAD_VARIANT(4, 256, 16, ld_na, st_cs, false), KVP_LOAD_VARIANT(2, 256, 16, ld_na, st, false),
    KVP_LOAD_VARIANT(4, 256, 8, ld_na, st, false),     KVP_LOAD_VARIANT(4, 256, 4, ld_na, st, false),
    KVP_LOAD_VARIANT(8, 256, 8, ld_na, st, false),     KVP_LOAD_VARIANT(8, 128, 16, ld_na, st, false),
    KVP_LOAD_VARIANT(4, 128, 16, ld_na, st, false),    KVP_LOAD_VARIANT(4, 256, 32, ld_na, st, false),
    KVP_LOAD_VARIANT(4, 256, 64, ld_na, st, true),     KVP_LOAD_VARIANT(4, 256, 16, ld_na, st, true),
};

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

extern "C" const struct kernel_variant *kernel_variant_get(uint32_t index) {
  return index < sizeof(kvp::variants) / sizeof(kvp::variants[0]) ? &kvp::variants[index] : nullptr;
}
