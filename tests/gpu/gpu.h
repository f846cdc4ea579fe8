/* The GPU of a test program: memory with nothing mapped before and behind it, and a check of every CUDA call. Test
 * code, one thread; every fault ends the program with its reason. Without a GPU that is status 2 and "no GPU".
 */
#ifndef KVPOOL_TESTS_GPU_GPU_H
#define KVPOOL_TESTS_GPU_GPU_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { gpu_status_none = 2 }; /* of a program that found no GPU */

#define gpu_check(call) gpu_check_at((call), #call, __FILE__, __LINE__)
void gpu_check_at(cudaError_t error, const char *call, const char *file, int line);

/* Device 0 of those that are visible, with all kernels of the CUDA backend loaded. */
void gpu_open(void);

/* Device memory in a larger range of addresses of which nothing else is mapped: one byte too far is a fault. */
struct gpu_memory {
  uint8_t *base;
  uint64_t bytes; /* mapped: a multiple of the granularity */
  uint64_t reserved_bytes;
};

/* At least `bytes`, with old bytes in it. */
struct gpu_memory gpu_memory_make(uint64_t bytes);
void gpu_memory_free(struct gpu_memory *memory);

/* What can still be allocated. */
uint64_t gpu_bytes_free(void);

double gpu_seconds(void); /* a clock that only goes forward */

#ifdef __cplusplus
}
#endif

#endif
