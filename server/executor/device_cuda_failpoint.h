/* Test builds only (KVPOOL_FAILPOINTS): SIGUSR2 makes the next step of a CUDA device end in a fault of the GPU. */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_FAILPOINT_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_FAILPOINT_H

#include <cuda_runtime_api.h>

#ifdef KVPOOL_FAILPOINTS
void kvp_cuda_failpoint_arm(void);
/* Launches the fault when one was asked for. */
cudaError_t kvp_cuda_failpoint_pass(cudaStream_t stream);
#else
static inline void kvp_cuda_failpoint_arm(void) {}
static inline cudaError_t kvp_cuda_failpoint_pass(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}
#endif

#endif
