/* A store with a gather index, or without slots: what store.cu passes on to gather.cu. */
#ifndef KVPOOL_KERNELS_CUDA_GATHER_CUH
#define KVPOOL_KERNELS_CUDA_GATHER_CUH

#include <cuda_runtime.h>

#include "kernels/cuda/launch.h"

namespace kvp {

/* row_count > 0. The kernels count everything, whether arrays were checked or not. */
cudaError_t gather_store_launch(const kvp_store_params &params, kvp_cuda_counts *counts, cudaStream_t stream);
void gather_store_counts(const kvp_store_params &params, const kvp_cuda_counts &found, kvp_op_counts *out);

} // namespace kvp

#endif
