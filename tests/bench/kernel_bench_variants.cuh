/* Ways to build the kernels that --variants compares. Part of kernel_bench_device.cu. */
#ifndef KVPOOL_TESTS_BENCH_KERNEL_BENCH_VARIANTS_CUH
#define KVPOOL_TESTS_BENCH_KERNEL_BENCH_VARIANTS_CUH

#include "kernels/cuda/load_bulk_kernel.cuh"
#include "kernels/cuda/load_kernel.cuh"
#include "kernels/cuda/prepare.cuh"
#include "kernels/cuda/store_copy_kernel.cuh"
#include "kernels/cuda/store_kernel.cuh"
#include "tests/bench/kernel_bench_device.h"

namespace kvp {

static cudaError_t launch_store_rows(void (*kernel)(const store_args), int threads, const store_args &args,
                                     cudaStream_t stream) {
  uint64_t block_rows = (uint64_t)args.warp_rows * (threads / lanes_per_warp);
  return launch(kernel, (uint32_t)divide_up(args.row_count, block_rows), threads, stream, args);
}

template <class format, class tuning>
static cudaError_t launch_store(const kvp_store_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  store_args args = store_args::make(*params, counts);
  args.warp_rows = store_batch<format, tuning>::rows;
  return launch_store_rows(store_kernel<format, tuning, true, false>, tuning::threads, args, stream);
}

template <class tuning>
static cudaError_t launch_store_copy(const kvp_store_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  store_args args = store_args::make(*params, counts);
  args.warp_rows = copied_warp_rows(tuning::passes, params->layer.geometry->sizes.row_bytes);
  return launch_store_rows(store_copy_kernel<tuning, true, false>, tuning::threads, args, stream);
}

/* A warp for every piece. */
static cudaError_t launch_pieces(void (*kernel)(const load_args), int threads, uint32_t shared_bytes,
                                 uint32_t piece_rows, const kvp_load_params &params, kvp_cuda_counts *counts,
                                 cudaStream_t stream) {
  load_cut cut = {(uint32_t)divide_up(params.segment_rows_max, piece_rows), piece_rows};
  uint64_t warps = threads / lanes_per_warp;
  uint64_t blocks = divide_up(params.segment_count * cut.pieces, warps);
  return launch(kernel, (uint32_t)blocks, threads, stream, load_args::make(params, counts, cut, blocks * warps),
                shared_bytes);
}

template <class body, class tuning>
static cudaError_t launch_load(const kvp_load_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  uint32_t row_bytes = params->layer.geometry->sizes.loaded_row_bytes;
  return launch_pieces(load_kernel<body, tuning, true>, tuning::threads, 0,
                       piece_rows_of(tuning::piece_rows, tuning::passes, row_bytes), *params, counts, stream);
}

template <class format, class tuning>
static cudaError_t launch_load_bulk(const kvp_load_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  const uint32_t shared_bytes = bulk_room<format, tuning>::bytes;
  uint32_t resident;
  cudaError_t error = resident_blocks_find((const void *)load_bulk_kernel<format, tuning, true>, tuning::threads,
                                           shared_bytes, bulk_capability, 0, &resident);
  if (error != cudaSuccess || resident == 0) {
    return error != cudaSuccess ? error : cudaErrorNotSupported;
  }
  return launch_pieces(load_bulk_kernel<format, tuning, true>, tuning::threads, shared_bytes, tuning::piece_rows,
                       *params, counts, stream);
}

/* clang-format off */
#define KVP_STORE(id, format, passes, threads)                                                                       \
  {#passes " passes, " #threads " threads", KVP_FORMAT_##id, launch_store<format, store_tuning<passes, threads>>,    \
   nullptr}
#define KVP_STORE_COPY(passes, threads)                                                                              \
  {#passes " vectors, " #threads " threads", KVP_FORMAT_BF16, launch_store_copy<store_tuning<passes, threads>>,      \
   nullptr}
#define KVP_LOAD(id, body, what, passes, threads, piece_rows)                                                        \
  {#passes " passes, pieces of " #piece_rows ", " #threads " threads", KVP_FORMAT_##id, nullptr,                     \
   launch_load<body<what, load_tuning<passes, threads, piece_rows>>, load_tuning<passes, threads, piece_rows>>}
#define KVP_LOAD_BULK(id, format, piece_rows, threads)                                                               \
  {"bulk, pieces of " #piece_rows ", " #threads " threads", KVP_FORMAT_##id, nullptr,                                \
   launch_load_bulk<format, bulk_tuning<piece_rows, threads>>}

#define KVP_MAIN_VARIANTS(id, format)                                                                                \
  KVP_STORE(id, format, 4, 128),                                                                                     \
  KVP_STORE(id, format, 4, 256),                                                                                     \
  KVP_STORE(id, format, 8, 128),                                                                                     \
  KVP_LOAD(id, dequantized, format, 4, 256, 4),                                                                      \
  KVP_LOAD_BULK(id, format, 2, 128),                                                                                 \
  KVP_LOAD_BULK(id, format, 2, 256),                                                                                 \
  KVP_LOAD_BULK(id, format, 2, 512),                                                                                 \
  KVP_LOAD_BULK(id, format, 4, 128),                                                                                 \
  KVP_LOAD_BULK(id, format, 4, 256),                                                                                 \
  KVP_LOAD_BULK(id, format, 4, 512),                                                                                 \
  KVP_LOAD_BULK(id, format, 8, 128),                                                                                 \
  KVP_LOAD_BULK(id, format, 8, 256),                                                                                 \
  KVP_LOAD_BULK(id, format, 8, 512)

static const kernel_variant variants[] = {
    KVP_MAIN_VARIANTS(V41, format_v41),
    KVP_MAIN_VARIANTS(V41_FP4, format_v41_fp4),
    KVP_STORE(INDEX_FP4, format_index_fp4, 4, 128),
    KVP_STORE(INDEX_FP4, format_index_fp4, 4, 256),
    KVP_LOAD(INDEX_FP4, copied, 64, 2, 256, 16),
    KVP_LOAD(INDEX_FP4, copied, 64, 4, 128, 32),
    KVP_LOAD(INDEX_FP4, copied, 64, 4, 256, 32),
    KVP_STORE(INDEX_FP8_F32, format_index_fp8_f32, 4, 128),
    KVP_STORE(INDEX_FP8_F32, format_index_fp8_f32, 4, 256),
    KVP_LOAD(INDEX_FP8_F32, copied, 128, 2, 256, 8),
    KVP_LOAD(INDEX_FP8_F32, copied, 128, 4, 256, 16),
    KVP_LOAD(INDEX_FP8_F32, copied, 128, 8, 256, 32),
    KVP_STORE_COPY(8, 128),
    KVP_STORE_COPY(8, 256),
    KVP_LOAD(BF16, copied, 0, 8, 128, 0),
    KVP_LOAD(BF16, copied, 0, 8, 256, 0),
};
/* clang-format on */

} // namespace kvp

#endif
