/* How a kernel begins that prepare.cuh's launch_chained() launches. */
#ifndef KVPOOL_KERNELS_CUDA_CHAIN_CUH
#define KVPOOL_KERNELS_CUDA_CHAIN_CUH

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace kvp {

/* First statement: nothing that an earlier kernel wrote, or still reads, was touched before. Every block waits itself,
 * so that a kernel that waited for this one has waited for all before it. */
__device__ __forceinline__ void chain_begin() {
  wait_for_kernels_before();
  let_next_kernel_begin();
}

/* When that was; of one of the blocks that have these counts. */
__device__ __forceinline__ void chain_stamp(kvp_cuda_counts *counts) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    counts->started_ns = global_timer_ns();
  }
}

__device__ __forceinline__ void chain_begin(kvp_cuda_counts *counts) {
  chain_begin();
  chain_stamp(counts);
}

} // namespace kvp

#endif
