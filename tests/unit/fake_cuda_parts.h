/* What the files of the CUDA in host memory share. Any thread. */
#ifndef KVPOOL_TESTS_FAKE_CUDA_PARTS_H
#define KVPOOL_TESTS_FAKE_CUDA_PARTS_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- fake_cuda.c ---- */

/* Or the process aborts. */
void fake_check(bool condition, const char *what);
/* What the function of that name has to fail with. */
cudaError_t fake_injected(const char *function);
#define RETURN_INJECTED(function)                                                                                    \
  do {                                                                                                               \
    const cudaError_t injected_code = fake_injected(function);                                                       \
    if (injected_code != cudaSuccess) {                                                                              \
      return injected_code;                                                                                          \
    }                                                                                                                \
  } while (0)
/* arguments are copied. */
cudaError_t fake_enqueue(cudaStream_t stream, void (*run)(void *arguments), const void *arguments, size_t bytes);
uint64_t fake_total_bytes(void);
bool fake_has_device(void); /* the thread */
/* A kernel begins; true: the context is lost by it. */
bool fake_kernel_faults(void);
void fake_lose(void);

/* ---- fake_cuda_memory.c ---- */

enum range_kind { RANGE_FREE, RANGE_DEVICE, RANGE_PINNED, RANGE_MAPPED };

bool fake_in_ranges(const void *pointer, uint64_t bytes, enum range_kind kind);
/* Memory of the device, or that and host memory at the device's address. */
void fake_check_device(const void *pointer, uint64_t bytes, const char *what);
void fake_check_visible(const void *pointer, uint64_t bytes, const char *what);

#endif
