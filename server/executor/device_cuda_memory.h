/* A piece of the GPU's memory that is mapped here: made, imported, or a worker's. Control thread. */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_MEMORY_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_MEMORY_H

#include <string.h>

#include "server/executor/device_cuda.h"

struct kvp_cuda_ipc_allocation;

struct kvp_cuda_memory {
  struct kvp_memory base; /* what ops use: all of what is mapped, or a part of it */
  CUdeviceptr reserved;
  uint64_t reserved_bytes;
  CUdeviceptr begin; /* of what is mapped */
  uint64_t mapped_bytes;
  struct kvp_cuda_ipc_allocation *allocation; /* it is a part of that; nothing is reserved or mapped then */
};

/* Numbers that the driver takes, or gives, for pointers. */
static inline void *kvp_cuda_pointer(uint64_t number) {
  void *pointer = NULL;
  memcpy(&pointer, &number, sizeof pointer);
  return pointer;
}

/* Addresses for it, nothing is mapped there yet. NULL with *error. */
struct kvp_cuda_memory *kvp_cuda_memory_reserve(struct kvp_cuda_device *device, uint64_t bytes,
                                                struct kvp_error *error);
/* Maps a chunk behind those that are mapped and lets the device use it; the handle stays the caller's. *call: which one
 * failed. */
CUresult kvp_cuda_memory_map(struct kvp_cuda_device *device, struct kvp_cuda_memory *memory,
                             CUmemGenericAllocationHandle handle, uint64_t bytes, const char **call);
/* And what is mapped. */
void kvp_cuda_memory_free(struct kvp_cuda_device *device, struct kvp_cuda_memory *memory);

#endif
