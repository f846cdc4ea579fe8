/* NVIDIA's driver as a worker knows it, for hosts without: libcuda.so.1 of memfds, with two GPUs, "GPU-00000000-..." and
 * "GPU-11111111-...". The functions here are what a test does to it, and sees of it. */
#ifndef KVPOOL_TESTS_CLIENT_FAKE_WORKER_CUDA_H
#define KVPOOL_TESTS_CLIENT_FAKE_WORKER_CUDA_H

#include <stdint.h>

struct fake_worker_cuda_state {
  int64_t reserved_bytes;
  int64_t mapped_bytes;
  int64_t handles;
  int64_t retained[2]; /* of the primary contexts */
  int64_t registered;  /* host memory */
  int depth;           /* contexts on this thread's stack */
  int access;          /* of the latest cuMemSetAccess */
  int access_device;
  uint64_t waited_address; /* the latest cuStreamWaitValue64 */
  uint64_t waited_value;
  void *stream;
};

enum fake_worker_cuda_memory { FAKE_MALLOC, FAKE_VMM, FAKE_VMM_WITHOUT_HANDLE, FAKE_POOL_MEMORY };

#define FAKE_WORKER_CUDA_API __attribute__((visibility("default")))

FAKE_WORKER_CUDA_API void fake_worker_cuda_look(struct fake_worker_cuda_state *out);
/* The function of that name fails with this code from now on; "": none does. */
FAKE_WORKER_CUDA_API void fake_worker_cuda_fail(const char *function, int code);
/* An allocation of 64 KiB on a GPU. */
FAKE_WORKER_CUDA_API void *fake_worker_cuda_allocate(enum fake_worker_cuda_memory kind, int device);
FAKE_WORKER_CUDA_API void fake_worker_cuda_devices(int count);

#endif
