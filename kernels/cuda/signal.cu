/* The end of a chain, a value in the middle of one, and what a launch costs: kernels of one block. The launchers' half
 * of it is host code that knows nothing but CUDA.
 */
#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/prepare.cuh"
#include "kernels/cuda/ptx.cuh"

namespace kvp {

size_pin pinned;
bool is_alone;

constexpr int signal_threads = 128;
constexpr uint32_t count_words = sizeof(kvp_cuda_counts) / sizeof(uint64_t);

/* Every thread makes its own writes visible to the system before the barrier; the release store behind it covers what
 * kernels launched before have written. */
__global__ void __launch_bounds__(signal_threads) signal_kernel(const __grid_constant__ kvp_cuda_signal signal) {
  chain_begin();
  uint64_t *counts = (uint64_t *)signal.counts;
  uint64_t *found = (uint64_t *)signal.found;
  for (uint32_t i = threadIdx.x; i < signal.op_count * count_words; i += signal_threads) {
    found[i] = counts[i];
    counts[i] = 0;
  }
  if (threadIdx.x == 0) {
    *signal.finished_ns = global_timer_ns();
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_release_system(signal.timeline, signal.value);
  }
}

static kernel_facts signal_facts[devices_max];

/* What kernels before have written is complete when this one begins; the release makes it seen by whoever sees the
 * value. */
__global__ void point_kernel(const __grid_constant__ kvp_cuda_point point) {
  __threadfence_system();
  store_release_system(point.word, point.value);
}

__global__ void empty_kernel(uint64_t *now_ns) {
  if (now_ns != nullptr) {
    *now_ns = global_timer_ns();
  }
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_signal_launch(const struct kvp_cuda_signal *signal, cudaStream_t stream) {
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  return kvp::launch_chained(kvp::signal_kernel, kvp::signal_facts[device], dim3(1), kvp::signal_threads, 0, stream,
                             *signal);
}

extern "C" cudaError_t kvp_cuda_point_launch(const struct kvp_cuda_point *point, cudaStream_t stream) {
  return kvp::launch(kvp::point_kernel, 1, 1, stream, *point);
}

extern "C" cudaError_t kvp_cuda_empty_launch(uint64_t *now_ns, cudaStream_t stream) {
  return kvp::launch(kvp::empty_kernel, 1, 1, stream, now_ns);
}

extern "C" void kvp_cuda_launch_alone(void) {
  kvp::is_alone = true;
}

extern "C" void kvp_cuda_size_pin(enum kvp_cuda_size size, uint32_t blocks_max) {
  kvp::pinned = kvp::size_pin{size, blocks_max};
}

extern "C" cudaError_t kvp_cuda_kernels_load(void) {
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  if (device >= kvp::devices_max) {
    return cudaErrorInvalidDevice;
  }
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, (const void *)kvp::empty_kernel);
  if (error == cudaSuccess) {
    error = cudaFuncGetAttributes(&attributes, (const void *)kvp::point_kernel);
  }
  if (error == cudaSuccess) {
    error = kvp::kernel_facts_find((const void *)kvp::signal_kernel, kvp::signal_threads, device,
                                   &kvp::signal_facts[device]);
  }
  if (error != cudaSuccess) {
    return error;
  }
  cudaError_t (*const prepares[])(int) = {kvp::store_prepare,       kvp::load_prepare,  kvp::gather_prepare,
                                          kvp::fused_store_prepare, kvp::index_prepare, kvp::blocks_prepare,
                                          kvp::assemble_prepare,    kvp::replay_prepare};
  for (cudaError_t (*prepare)(int) : prepares) {
    error = prepare(device);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}
