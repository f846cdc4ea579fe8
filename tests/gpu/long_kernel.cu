/* Holds a kernel on the GPU until it is killed, for tests of what that does to others. Prints "running" when the kernel
 * does; ends by itself after the seconds given.
 *
 *   long_kernel [seconds]
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "tests/gpu/gpu.h"

static __device__ uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

static __global__ void spin(volatile int *started, uint64_t duration_ns) {
  uint64_t end = now_ns() + duration_ns;
  *started = 1;
  while (now_ns() < end) {
  }
}

int main(int argc, char **argv) {
  uint64_t seconds = argc > 1 ? strtoull(argv[1], nullptr, 10) : 60;
  gpu_open();
  int *started = nullptr;
  gpu_check(cudaHostAlloc(reinterpret_cast<void **>(&started), sizeof(*started), cudaHostAllocMapped));
  volatile int *watched = started;
  *watched = 0;
  spin<<<8, 32>>>(started, seconds * UINT64_C(1000000000));
  gpu_check(cudaGetLastError());
  while (*watched == 0) {
    cudaError_t state = cudaStreamQuery(nullptr);
    if (state != cudaErrorNotReady) {
      gpu_check(state);
    }
  }
  printf("running\n");
  (void)fflush(stdout);
  gpu_check(cudaDeviceSynchronize());
  return 0;
}
