/* assemble: its parts in one launch. OPS "assemble".
 *
 * The grid is cut in ranges of blocks, one a part; each block is one of the part's own kernel, of the same threads
 * everywhere. Which that is, is asked once a block: everything behind the question knows its format when it is compiled.
 */
#ifndef KVPOOL_KERNELS_CUDA_ASSEMBLE_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_ASSEMBLE_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/gather_kernel.cuh"
#include "kernels/cuda/load_bulk_kernel.cuh"
#include "kernels/cuda/load_kernel.cuh"

namespace kvp {

constexpr int assemble_threads = 128;
constexpr int assemble_blocks = 8; /* of a multiprocessor at least */
constexpr uint32_t assemble_warps = assemble_threads / lanes_per_warp;
static_assert(assemble_threads == gather_threads, "parts of one launch have the same blocks");

using assemble_few = load_tuning<1, assemble_threads, 1>;
using assemble_many = load_tuning<4, assemble_threads, 4>;
using assemble_copied = load_tuning<4, assemble_threads, 0>;
using assemble_v41_bulk = bulk_tuning<4, assemble_threads>;
using assemble_v41_fp4_bulk = bulk_tuning<2, assemble_threads>;

enum assembled_format { assembled_v41, assembled_v41_fp4, assembled_bf16 };

struct assembled_load {
  uint32_t blocks; /* 0: there is no such part */
  assembled_format format;
  bool few; /* a row a warp */
  bool checked;
  load_args args;
};
struct assembled_store {
  uint32_t blocks;
  assembled_format format;
  gather_back back;
  gather_args args;
};
struct assembled_copy {
  uint32_t blocks;
  gather_args args;
};
struct assemble_args {
  assembled_load loads[2];
  assembled_store store;
  assembled_copy copy;
};

/* How many rows of a main cache come at once. */
enum load_way { way_few, way_many, way_bulk };

template <class format, class bulk, bool checked, load_way many>
__device__ __forceinline__ void assemble_main(const assembled_load &load, uint32_t first_warp, uint8_t *shared) {
  if (load.few) {
    load_pieces<dequantized<format, assemble_few>, checked>(load.args, first_warp);
  } else if constexpr (many == way_bulk) {
#if __CUDA_ARCH__ >= 900
    const bulk_room<format, bulk> room(shared);
    load_bulk_pieces<format, bulk, checked>(load.args, first_warp, room);
#endif
  } else {
    load_pieces<dequantized<format, assemble_many>, checked>(load.args, first_warp);
  }
}

template <bool checked, load_way many>
__device__ __forceinline__ void assemble_load(const assembled_load &load, uint32_t first_warp, uint8_t *shared) {
  if (load.format == assembled_v41) {
    assemble_main<format_v41, assemble_v41_bulk, checked, many>(load, first_warp, shared);
  } else if (load.format == assembled_v41_fp4) {
    assemble_main<format_v41_fp4, assemble_v41_fp4_bulk, checked, many>(load, first_warp, shared);
  } else {
    load_pieces<copied<0, assemble_copied>, checked>(load.args, first_warp);
  }
}

template <class format>
__device__ __forceinline__ void assemble_quantized(const assembled_store &store, uint64_t index, uint64_t count) {
  if (store.back == back_none) {
    store_all_gathered<format, back_none>(store.args, index, count);
  } else if (store.back == back_cast) {
    store_all_gathered<format, back_cast>(store.args, index, count);
  } else {
    store_all_gathered<format, back_copied>(store.args, index, count);
  }
}

__device__ __forceinline__ void assemble_store(const assembled_store &store, uint64_t index, uint64_t count) {
  if (store.format == assembled_v41) {
    assemble_quantized<format_v41>(store, index, count);
  } else if (store.format == assembled_v41_fp4) {
    assemble_quantized<format_v41_fp4>(store, index, count);
  } else {
    copy_all_gathered<true>(store.args, index, count);
  }
}

/* The part's first block says when it began; `block` is counted within the part. */
__device__ __forceinline__ void assemble_begin(kvp_cuda_counts *counts, uint32_t block) {
  if (block == 0 && threadIdx.x == 0) {
    counts->started_ns = global_timer_ns();
  }
}

/* many: how loads of many rows are done; by bulk copies, there is dynamic shared memory for the larger bulk_room. */
template <load_way many>
__global__ void __launch_bounds__(assemble_threads, assemble_blocks)
    assemble_kernel(const __grid_constant__ assemble_args args) {
  extern __shared__ __align__(128) uint8_t assemble_shared[];
  chain_begin();
  uint32_t block = blockIdx.x;
  const uint32_t warp = threadIdx.x / lanes_per_warp;
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    const assembled_load &load = args.loads[i];
    if (block < load.blocks) {
      if (load.checked) {
        assemble_load<true, many>(load, block * assemble_warps + warp, assemble_shared);
      } else {
        assemble_load<false, many>(load, block * assemble_warps + warp, assemble_shared);
      }
      return;
    }
    block -= load.blocks;
  }
  if (block < args.store.blocks) {
    assemble_begin(args.store.args.counts, block);
    assemble_store(args.store, (uint64_t)block * assemble_warps + warp, (uint64_t)args.store.blocks * assemble_warps);
    return;
  }
  block -= args.store.blocks;
  assemble_begin(args.copy.args.counts, block);
  copy_all_gathered<false>(args.copy.args, (uint64_t)block * assemble_warps + warp,
                           (uint64_t)args.copy.blocks * assemble_warps);
}

} // namespace kvp

#endif
