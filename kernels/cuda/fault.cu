/* One write that no GPU survives. */
#include "kernels/cuda/fault.h"

#include <stdint.h>

static __global__ void fault_kernel(uintptr_t address) {
  *reinterpret_cast<volatile uint32_t *>(address) = 1;
}

cudaError_t kvp_cuda_fault_launch(cudaStream_t stream) {
  const uintptr_t nowhere = 64; /* the first pages of the address space are never mapped */
  fault_kernel<<<1, 1, 0, stream>>>(nowhere);
  return cudaGetLastError();
}
