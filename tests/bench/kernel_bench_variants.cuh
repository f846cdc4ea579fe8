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

constexpr int shared_reserved_bytes = 1024; /* of every block */

/* How wide a kernel is launched. blocks: on a multiprocessor at most, by taking its shared memory; 0: as many as fit.
 * persistent: no more blocks than fit at once. */
struct launch_shape {
  int threads;
  int blocks;
  uint32_t shared_bytes;
  bool persistent;
};

/* Allows the shared memory, and finds the grid. */
static cudaError_t shape_launch(const void *kernel, uint64_t blocks, launch_shape &shape, uint32_t &grid) {
  int multiprocessors;
  int room;
  int resident;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0);
  }
  if (error == cudaSuccess && shape.blocks != 0) {
    shape.shared_bytes = (uint32_t)(room / shape.blocks - shared_reserved_bytes) / 128 * 128;
  }
  if (error == cudaSuccess && shape.shared_bytes != 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shape.shared_bytes);
  }
  if (error == cudaSuccess && shape.shared_bytes != 0) {
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, shape.threads, shape.shared_bytes);
  }
  if (error == cudaSuccess) {
    uint64_t all = (uint64_t)resident * (uint64_t)multiprocessors;
    grid = (uint32_t)(shape.persistent && all < blocks ? all : blocks);
  }
  return error;
}

static cudaError_t launch_store_rows(void (*kernel)(const store_args), store_args args, launch_shape shape,
                                     cudaStream_t stream) {
  uint64_t block_rows = (uint64_t)args.warp_rows * (shape.threads / lanes_per_warp);
  uint32_t grid;
  cudaError_t error = shape_launch((const void *)kernel, divide_up(args.row_count, block_rows), shape, grid);
  return error != cudaSuccess ? error : launch(kernel, grid, shape.threads, stream, args, shape.shared_bytes);
}

template <class format, class tuning, int blocks>
static cudaError_t launch_store(const kvp_store_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  store_args args = store_args::make(*params, counts);
  args.warp_rows = store_batch<format, tuning>::rows;
  return launch_store_rows(store_kernel<format, tuning, true, false>, args, {tuning::threads, blocks, 0, false},
                           stream);
}

template <class tuning, int blocks>
static cudaError_t launch_store_copy(const kvp_store_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  store_args args = store_args::make(*params, counts);
  args.warp_rows = copied_warp_rows(tuning::passes, params->layer.geometry->sizes.row_bytes);
  return launch_store_rows(store_copy_kernel<tuning, true, false>, args, {tuning::threads, blocks, 0, false}, stream);
}

static cudaError_t launch_pieces(void (*kernel)(const load_args), const kvp_load_params *params,
                                 kvp_cuda_counts *counts, uint32_t piece_rows, launch_shape shape,
                                 cudaStream_t stream) {
  load_cut cut = {(uint32_t)divide_up(params->segment_rows_max, piece_rows), piece_rows};
  uint64_t warps = shape.threads / lanes_per_warp;
  uint32_t grid;
  cudaError_t error =
      shape_launch((const void *)kernel, divide_up(params->segment_count * cut.pieces, warps), shape, grid);
  if (error != cudaSuccess) {
    return error;
  }
  return launch(kernel, grid, shape.threads, stream, load_args::make(*params, counts, cut, grid * warps),
                shape.shared_bytes);
}

template <class body, class tuning, int blocks>
static cudaError_t launch_load(const kvp_load_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  uint32_t row_bytes = params->layer.geometry->sizes.loaded_row_bytes;
  return launch_pieces(load_kernel<body, tuning, true>, params, counts,
                       piece_rows_of(tuning::piece_rows, tuning::passes, row_bytes),
                       {tuning::threads, blocks, 0, tuning::walk == walk_kind::ahead}, stream);
}

/* cudaErrorNotSupported before compute capability 9.0. */
template <class body, class tuning, bool of_bytes>
static cudaError_t launch_bulk(const kvp_load_params *params, kvp_cuda_counts *counts, cudaStream_t stream) {
  int major;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  if (error != cudaSuccess || major < 9) {
    return error != cudaSuccess ? error : cudaErrorNotSupported;
  }
  uint32_t row_bytes = params->layer.geometry->sizes.loaded_row_bytes;
  uint32_t piece_rows = of_bytes ? tuning::piece_rows * 1024 / row_bytes : tuning::piece_rows;
  return launch_pieces(load_bulk_kernel<body, tuning, true>, params, counts, piece_rows,
                       {tuning::threads, 0, body::room::bytes, tuning::walk == walk_kind::ahead}, stream);
}

constexpr load_hint ld = load_hint::plain;
constexpr load_hint ld_na = load_hint::no_allocate;
constexpr load_hint ld_128 = load_hint::fetch_128;
constexpr load_hint ld_256 = load_hint::fetch_256;
constexpr load_hint ld_ef = load_hint::l2_evict_first;
constexpr store_hint st = store_hint::plain;
constexpr store_hint st_cs = store_hint::evict_first;
constexpr store_hint st_wt = store_hint::write_through;
constexpr store_hint st_cg = store_hint::l2_only;
constexpr store_hint st_ef = store_hint::l2_evict_first;
constexpr walk_kind once = walk_kind::once;
constexpr walk_kind again = walk_kind::again;
constexpr walk_kind ahead = walk_kind::ahead;

/* clang-format off: tables */
#define KVP_STORE(id, format, passes, threads, load, store, blocks)                                                  \
  {                                                                                                                  \
#passes " passes, " #threads " threads, " #load ", " #store ", blocks " #blocks, KVP_FORMAT_##id,                \
        launch_store < format, store_tuning < passes, threads, load, store>, blocks>, nullptr                        \
  }
#define KVP_STORE_COPY(passes, threads, load, store, blocks)                                                         \
  {                                                                                                                  \
#passes " vectors, " #threads " threads, " #load ", " #store ", blocks " #blocks, KVP_FORMAT_BF16,               \
        launch_store_copy < store_tuning < passes, threads, load, store>, blocks>, nullptr                           \
  }
#define KVP_LOAD(id, body, what, passes, threads, piece, load, store, walk, blocks)                                  \
  {                                                                                                                  \
#passes " passes, pieces of " #piece ", " #threads " threads, " #load ", " #store ", " #walk                     \
            ", blocks " #blocks,                                                                                     \
        KVP_FORMAT_##id, nullptr, launch_load < body < what, load_tuning < passes, threads, piece, load, store,      \
        walk>>, load_tuning < passes, threads, piece, load, store, walk>, blocks>                                    \
  }
#define KVP_BULK(id, body, what, piece, stages, threads, in, out, load, store, walk)                                 \
  {                                                                                                                  \
    "bulk in " #in " out " #out ", pieces of " #piece ", " #stages " stages, " #threads " threads, " #load           \
    ", " #store ", " #walk,                                                                                          \
        KVP_FORMAT_##id, nullptr,                                                                                    \
        launch_bulk<body<what, bulk_tuning<piece, stages, threads, in, out, load, store, walk>>,                     \
                    bulk_tuning<piece, stages, threads, in, out, load, store, walk>,                                 \
                    KVP_FORMAT_##id == KVP_FORMAT_BF16>                                                              \
  }

#define KVP_MAIN_STORES(id, format)                                                                                  \
  KVP_STORE(id, format, 4, 256, ld_na, st, 0), KVP_STORE(id, format, 4, 128, ld, st, 0),                             \
      KVP_STORE(id, format, 4, 512, ld, st, 0), KVP_STORE(id, format, 2, 256, ld, st, 0),                            \
      KVP_STORE(id, format, 8, 128, ld, st, 0), KVP_STORE(id, format, 4, 256, ld_128, st, 0),                        \
      KVP_STORE(id, format, 4, 256, ld_256, st, 0), KVP_STORE(id, format, 4, 256, ld_ef, st, 0),                     \
      KVP_STORE(id, format, 4, 256, ld, st_ef, 0), KVP_STORE(id, format, 4, 256, ld, st_cg, 0),                      \
      KVP_STORE(id, format, 4, 256, ld, st, 2), KVP_STORE(id, format, 4, 256, ld, st, 3)

#define KVP_INDEX_STORES(id, format)                                                                                 \
  KVP_STORE(id, format, 4, 256, ld_na, st, 0), KVP_STORE(id, format, 4, 128, ld, st, 0),                             \
      KVP_STORE(id, format, 4, 512, ld, st, 0), KVP_STORE(id, format, 2, 256, ld, st, 0),                            \
      KVP_STORE(id, format, 2, 512, ld, st, 0), KVP_STORE(id, format, 4, 256, ld_256, st, 0),                        \
      KVP_STORE(id, format, 4, 256, ld_ef, st, 0), KVP_STORE(id, format, 1, 256, ld, st, 0)

#define KVP_MAIN_LOADS(id, format)                                                                                   \
  KVP_LOAD(id, dequantized, format, 4, 256, 4, ld_na, st, once, 0),                                                  \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st, once, 0),                                                 \
      KVP_LOAD(id, dequantized, format, 2, 256, 2, ld, st, once, 0),                                                 \
      KVP_LOAD(id, dequantized, format, 8, 256, 8, ld, st, once, 0),                                                 \
      KVP_LOAD(id, dequantized, format, 4, 128, 4, ld, st, once, 0),                                                 \
      KVP_LOAD(id, dequantized, format, 8, 128, 8, ld, st, once, 0),                                                 \
      KVP_LOAD(id, dequantized, format, 4, 64, 4, ld, st, once, 0),                                                  \
      KVP_LOAD(id, dequantized, format, 4, 512, 4, ld, st, once, 0),                                                 \
      KVP_LOAD(id, dequantized, format, 4, 1024, 4, ld, st, once, 0),                                                \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld_128, st, once, 0),                                             \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld_256, st, once, 0),                                             \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld_ef, st, once, 0),                                              \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld_ef, st_ef, once, 0),                                           \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st_ef, once, 0),                                              \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st_cs, once, 0),                                              \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st_wt, once, 0),                                              \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st_cg, once, 0),                                              \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st, once, 1),                                                 \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st, once, 2),                                                 \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st, once, 3),                                                 \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st, once, 4),                                                 \
      KVP_LOAD(id, dequantized, format, 8, 256, 8, ld, st, once, 2),                                                 \
      KVP_LOAD(id, dequantized, format, 4, 256, 4, ld, st, ahead, 0),                                                \
      KVP_BULK(id, bulk_dequantized, format, 4, 1, 256, true, true, ld, st, once),                                   \
      KVP_BULK(id, bulk_dequantized, format, 8, 1, 128, true, true, ld, st, once),                                   \
      KVP_BULK(id, bulk_dequantized, format, 16, 1, 64, true, true, ld, st, once),                                   \
      KVP_BULK(id, bulk_dequantized, format, 16, 1, 128, true, true, ld, st, once),                                  \
      KVP_BULK(id, bulk_dequantized, format, 8, 1, 128, true, true, ld_ef, st, once),                                \
      KVP_BULK(id, bulk_dequantized, format, 8, 1, 128, true, true, ld_ef, st_ef, once),                             \
      KVP_BULK(id, bulk_dequantized, format, 8, 1, 256, true, false, ld, st, once),                                  \
      KVP_BULK(id, bulk_dequantized, format, 16, 1, 256, true, false, ld, st, once),                                 \
      KVP_BULK(id, bulk_dequantized, format, 4, 1, 256, false, true, ld, st, once),                                  \
      KVP_BULK(id, bulk_dequantized, format, 8, 1, 128, false, true, ld, st, once),                                  \
      KVP_BULK(id, bulk_dequantized, format, 4, 2, 256, true, true, ld, st, ahead),                                  \
      KVP_BULK(id, bulk_dequantized, format, 8, 2, 128, true, true, ld, st, ahead),                                  \
      KVP_BULK(id, bulk_dequantized, format, 4, 4, 128, true, true, ld, st, ahead),                                  \
      KVP_BULK(id, bulk_dequantized, format, 16, 2, 64, true, true, ld, st, ahead),                                  \
      KVP_BULK(id, bulk_dequantized, format, 8, 2, 256, true, false, ld, st, ahead)

/* Pieces of bf16: as many rows as the passes hold; for bulk copies KiB. */
#define KVP_BF16_LOADS                                                                                               \
  KVP_LOAD(BF16, copied, 0, 8, 256, 0, ld_na, st, once, 0), KVP_LOAD(BF16, copied, 0, 8, 256, 0, ld, st, once, 0),   \
      KVP_LOAD(BF16, copied, 0, 4, 256, 0, ld, st, once, 0), KVP_LOAD(BF16, copied, 0, 16, 256, 0, ld, st, once, 0), \
      KVP_LOAD(BF16, copied, 0, 8, 128, 0, ld, st, once, 0), KVP_LOAD(BF16, copied, 0, 8, 512, 0, ld, st, once, 0),  \
      KVP_LOAD(BF16, copied, 0, 8, 256, 0, ld_256, st, once, 0),                                                     \
      KVP_LOAD(BF16, copied, 0, 8, 256, 0, ld_ef, st, once, 0),                                                      \
      KVP_LOAD(BF16, copied, 0, 8, 256, 0, ld, st_cg, once, 0),                                                      \
      KVP_LOAD(BF16, copied, 0, 8, 256, 0, ld, st, once, 2), KVP_LOAD(BF16, copied, 0, 4, 256, 0, ld, st, once, 4),  \
      KVP_BULK(BF16, bulk_copied, 0, 4, 1, 256, true, true, ld, st, once),                                           \
      KVP_BULK(BF16, bulk_copied, 0, 8, 1, 128, true, true, ld, st, once),                                           \
      KVP_BULK(BF16, bulk_copied, 0, 16, 1, 64, true, true, ld, st, once),                                           \
      KVP_BULK(BF16, bulk_copied, 0, 4, 4, 128, true, true, ld, st, ahead),                                          \
      KVP_BULK(BF16, bulk_copied, 0, 8, 3, 128, true, true, ld, st, ahead),                                          \
      KVP_BULK(BF16, bulk_copied, 0, 8, 4, 64, true, true, ld, st, ahead),                                           \
      KVP_BULK(BF16, bulk_copied, 0, 16, 3, 64, true, true, ld, st, ahead)

#define KVP_INDEX_LOADS(id, bytes)                                                                                   \
  KVP_LOAD(id, copied, bytes, bytes / 16, 256, 32, ld_na, st, once, 0),                                              \
      KVP_LOAD(id, copied, bytes, bytes / 16, 256, 32, ld, st, once, 0),                                             \
      KVP_LOAD(id, copied, bytes, bytes / 16, 128, 32, ld, st, once, 0),                                             \
      KVP_LOAD(id, copied, bytes, bytes / 16, 512, 32, ld, st, once, 0),                                             \
      KVP_LOAD(id, copied, bytes, bytes / 32, 256, 16, ld, st, once, 0),                                             \
      KVP_LOAD(id, copied, bytes, bytes / 16, 256, 32, ld_256, st, once, 0),                                         \
      KVP_LOAD(id, copied, bytes, bytes / 16, 256, 32, ld_ef, st, once, 0),                                          \
      KVP_BULK(id, bulk_copied, bytes, 32, 1, 256, true, true, ld, st, once),                                        \
      KVP_BULK(id, bulk_copied, bytes, 32, 3, 128, true, true, ld, st, ahead)

static const kernel_variant variants[] = {
    KVP_MAIN_STORES(V41, format_v41),
    KVP_MAIN_STORES(V41_FP4, format_v41_fp4),
    KVP_INDEX_STORES(INDEX_FP4, format_index_fp4),
    KVP_STORE_COPY(8, 256, ld_na, st, 0),
    KVP_STORE_COPY(4, 256, ld, st, 0),
    KVP_STORE_COPY(8, 128, ld, st, 0),
    KVP_STORE_COPY(8, 512, ld, st, 0),
    KVP_STORE_COPY(16, 128, ld, st, 0),
    KVP_STORE_COPY(8, 256, ld_256, st, 0),
    KVP_STORE_COPY(8, 256, ld_ef, st, 0),
    KVP_STORE_COPY(8, 256, ld, st, 2),
    KVP_MAIN_LOADS(V41, format_v41),
    KVP_MAIN_LOADS(V41_FP4, format_v41_fp4),
    KVP_INDEX_LOADS(INDEX_FP4, format_index_fp4::data_bytes),
    KVP_BF16_LOADS,
};
/* clang-format on */

} // namespace kvp

#endif
