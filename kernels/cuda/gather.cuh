/* A store with a gather index, without slots, or with a copy of its rows: what store.cu passes on to gather.cu. And what
 * assemble.cu needs to do the same. */
#ifndef KVPOOL_KERNELS_CUDA_GATHER_CUH
#define KVPOOL_KERNELS_CUDA_GATHER_CUH

#include <cuda_runtime.h>

#include "kernels/cuda/gather_kernel.cuh"
#include "kernels/cuda/launch.h"

namespace kvp {

/* row_count > 0. The kernels count everything, whether arrays were checked or not. */
cudaError_t gather_store_launch(const kvp_store_params &params, kvp_cuda_counts *counts, cudaStream_t stream);
void gather_store_counts(const kvp_store_params &params, const kvp_cuda_counts &found, kvp_op_counts *out);

gather_args gather_store_args(const kvp_store_params &params, kvp_cuda_counts *counts);
gather_args gather_copy_args(const kvp_copy_rows_params &params, kvp_cuda_counts *counts);
/* Blocks of gather_threads. rows: of a warp at a time; 0: copies, the arguments say. */
uint64_t gather_blocks(const gather_args &args, int rows);
gather_back gather_back_of(const kvp_store_params &params);

} // namespace kvp

#endif
