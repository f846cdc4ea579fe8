/* What the files of the CUDA in host memory share. Any thread. */
#ifndef KVPOOL_TESTS_FAKE_CUDA_PARTS_H
#define KVPOOL_TESTS_FAKE_CUDA_PARTS_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- fake_cuda.c ---- */

static inline void *fake_pointer(CUdeviceptr address) {
  void *pointer = NULL;
  memcpy(&pointer, &address, sizeof pointer);
  return pointer;
}

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
#define RETURN_INJECTED_RESULT(function)                                                                             \
  do {                                                                                                               \
    const cudaError_t injected_code = fake_injected(function);                                                       \
    if (injected_code != cudaSuccess) {                                                                              \
      return (CUresult)injected_code;                                                                                \
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

void fake_range_add(enum range_kind kind, void *begin, uint64_t bytes, void *host);
/* The range that begins there; its bytes. */
uint64_t fake_range_remove(const void *begin);
bool fake_in_ranges(const void *pointer, uint64_t bytes, enum range_kind kind);
/* Memory of the device, or that and host memory at the device's address. */
void fake_check_device(const void *pointer, uint64_t bytes, const char *what);
void fake_check_visible(const void *pointer, uint64_t bytes, const char *what);
/* Of the device's bytes; false: there are not so many left. */
bool fake_use_bytes(uint64_t bytes);
void fake_unuse_bytes(uint64_t bytes);

/* ---- fake_cuda_ipc.c ---- */

CUresult fake_ipc_open(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags);
CUresult fake_ipc_close(CUdeviceptr address);
CUresult fake_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);
CUresult fake_pointer_attribute(void *out, CUpointer_attribute attribute, CUdeviceptr address);
uint32_t fake_ipc_count(void);

#endif
