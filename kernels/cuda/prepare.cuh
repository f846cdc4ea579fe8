/* Launching, for the files that do: one way to launch, and what is found out about a kernel and a device before the
 * first launch so that none has to ask. Host code, the threads of the executor: prepared once, read afterwards.
 */
#ifndef KVPOOL_KERNELS_CUDA_PREPARE_CUH
#define KVPOOL_KERNELS_CUDA_PREPARE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

namespace kvp {

constexpr int devices_max = 64;
constexpr uint64_t grid_blocks_max = 1 << 24; /* times 32 warps: below 2^32; kernels go round */

/* How many blocks of a kernel, each with so much dynamic shared memory, fill the device; allows that much, and loads the
 * kernel. 0: its code is for an older device than of compute capability `least` (90: 9.0), whatever this one is. */
inline cudaError_t resident_blocks_find(const void *kernel, int threads, uint32_t shared_bytes, int least, int device,
                                        uint32_t *out) {
  *out = 0;
  cudaFuncAttributes attributes;
  int multiprocessors;
  int blocks;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || attributes.ptxVersion < least) {
    return error;
  }
  if (shared_bytes != 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
  }
  if (error == cudaSuccess && shared_bytes != 0) {
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes);
  }
  if (error == cudaSuccess) {
    *out = (uint32_t)blocks * (uint32_t)multiprocessors;
  }
  return error;
}

template <class parameter>
inline cudaError_t launch(void (*kernel)(parameter), uint32_t blocks, uint32_t threads, cudaStream_t stream,
                          parameter argument, uint32_t shared_bytes = 0) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, argument);
}

inline uint64_t divide_up(uint64_t a, uint64_t b) {
  return a / b + (a % b != 0);
}

cudaError_t store_prepare(int device);
cudaError_t load_prepare(int device);

} // namespace kvp

#endif
