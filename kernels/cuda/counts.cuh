/* What kernels count: in registers while they run, added to the op's counts at the end of a block where there is
 * anything to add. Nothing is known about order; a thread's part is below 2^64.
 */
#ifndef KVPOOL_KERNELS_CUDA_COUNTS_CUH
#define KVPOOL_KERNELS_CUDA_COUNTS_CUH

#include <stdint.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/layout.cuh"

namespace kvp {

/* Once, by the first warp, behind the first reads that it asks for: the clock is read while they are on their way. */
__device__ __forceinline__ void counts_begin(kvp_cuda_counts *counts, bool first_warp) {
  if (first_warp && lane_index() == 0) {
    counts->started_ns = global_timer_ns();
  }
}

/* Last statement of a kernel, all threads of the block: values[i] of every thread to *targets[i]. */
template <int n>
__device__ __forceinline__ void counts_add(const uint64_t (&values)[n], uint64_t *const (&targets)[n]) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < n; i++) {
    any = any || values[i] != 0;
  }
  if (!__syncthreads_or(any)) {
    return;
  }
  __shared__ unsigned long long sums[n];
  if (threadIdx.x < n) {
    sums[threadIdx.x] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; i++) {
    if (values[i] != 0) {
      atomicAdd(&sums[i], (unsigned long long)values[i]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; i++) {
    if (threadIdx.x == i && sums[i] != 0) {
      atomicAdd((unsigned long long *)targets[i], sums[i]);
    }
  }
}

} // namespace kvp

#endif
