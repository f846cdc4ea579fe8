/* Launching, for the files that do: one way to launch, which sizes tests asked for, and what is found out about a kernel and a device before the
 * first launch so that none has to ask. Host code, the threads of the executor: prepared once, read afterwards.
 */
#ifndef KVPOOL_KERNELS_CUDA_PREPARE_CUH
#define KVPOOL_KERNELS_CUDA_PREPARE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/cuda/launch.h"
#include "proto/limits.h"

namespace kvp {

constexpr int devices_max = kvp_cuda_device_index_max + 1;
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

/* What kvp_cuda_size_pin said. */
struct size_pin {
  kvp_cuda_size size;
  uint32_t blocks_max;
};
extern size_pin pinned;

/* `few`: what the op is about is little. */
inline bool takes_few(bool few) {
  return pinned.size == KVP_CUDA_SIZE_AUTOMATIC ? few : pinned.size == KVP_CUDA_SIZE_FEW;
}
inline uint32_t launched_blocks(uint64_t blocks, uint64_t most) {
  most = pinned.blocks_max != 0 && pinned.blocks_max < most ? pinned.blocks_max : most;
  return (uint32_t)(blocks < most ? blocks : most);
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

/* What is known of a kernel that may be launched chained. */
struct kernel_facts {
  uint32_t resident_blocks; /* 0: not for this device */
  bool chains;              /* it was compiled for a GPU that can, and runs on one */
};

inline cudaError_t kernel_facts_find(const void *kernel, int threads, int device, kernel_facts *out,
                                     uint32_t shared_bytes = 0, int least = 0) {
  cudaFuncAttributes attributes;
  int major;
  cudaError_t error = resident_blocks_find(kernel, threads, shared_bytes, least, device, &out->resident_blocks);
  if (error == cudaSuccess) {
    error = cudaFuncGetAttributes(&attributes, kernel);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    out->chains = major >= 9 && attributes.ptxVersion >= 90;
  }
  return error;
}

/* What kvp_cuda_launch_alone said: of the next launch only. */
extern bool is_alone;

/* Launches a kernel whose first statement is chain_begin(): its blocks may be brought in while the kernel before it on
 * the stream still runs. */
template <class parameter>
inline cudaError_t launch_chained(void (*kernel)(parameter), const kernel_facts &facts, dim3 blocks, uint32_t threads,
                                  uint32_t shared_bytes, cudaStream_t stream, const parameter &argument) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = facts.chains && !is_alone ? 1 : 0;
  is_alone = false;
  return cudaLaunchKernelEx(&config, kernel, argument);
}

inline uint64_t divide_up(uint64_t a, uint64_t b) {
  return a / b + (a % b != 0);
}

cudaError_t store_prepare(int device);
cudaError_t load_prepare(int device);
cudaError_t gather_prepare(int device);
cudaError_t fused_store_prepare(int device);
cudaError_t index_prepare(int device);
cudaError_t blocks_prepare(int device);
cudaError_t replay_prepare(int device);
cudaError_t assemble_prepare(int device);

} // namespace kvp

#endif
