/* A fault of the GPU on purpose, for test builds (KVPOOL_FAILPOINTS). */
#ifndef KVPOOL_KERNELS_CUDA_FAULT_H
#define KVPOOL_KERNELS_CUDA_FAULT_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes to an address where nothing is mapped: the context is lost when it runs. */
cudaError_t kvp_cuda_fault_launch(cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
