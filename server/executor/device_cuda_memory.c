/* GPU memory: chunks of the driver side by side in one reserved range of addresses. Control thread.
 *
 * The range keeps a piece without memory at both ends, so that what runs past a memory's ends faults instead of
 * hitting its neighbour. The last chunk is rounded up to what the driver gives out; a memory's size is what was asked
 * for.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "server/executor/device_cuda_error.h"
#include "server/executor/device_cuda_ipc.h"
#include "server/executor/device_cuda_memory.h"

static CUmemAllocationProp chunk_properties(const struct kvp_cuda_device *device) {
  return (CUmemAllocationProp){
      .type = CU_MEM_ALLOCATION_TYPE_PINNED,
      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal},
  };
}

enum kvp_status kvp_cuda_memory_granularity(struct kvp_cuda_device *device, struct kvp_error *error) {
  const CUmemAllocationProp properties = chunk_properties(device);
  size_t bytes = 0;
  const CUresult code = device->driver.granularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (code != CUDA_SUCCESS) {
    return kvp_cuda_error_set(device, (int)code, "cuMemGetAllocationGranularity", error, "memory of the device");
  }
  if (bytes == 0 || kvp_chunk_memory_bytes % bytes != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "the driver gives memory in pieces of %zu bytes, chunks have %d", bytes,
                         kvp_chunk_memory_bytes);
  }
  device->granularity_bytes = bytes;
  return KVP_OK;
}

static uint64_t round_up(const struct kvp_cuda_device *device, uint64_t bytes) {
  return (bytes + device->granularity_bytes - 1) / device->granularity_bytes * device->granularity_bytes;
}

void kvp_cuda_memory_free(struct kvp_cuda_device *device, struct kvp_cuda_memory *memory) {
  if (memory->allocation != NULL) {
    kvp_cuda_ipc_unuse(device, memory->allocation);
  } else if (kvp_cuda_frees_memory(device)) {
    if (memory->mapped_bytes > 0) {
      (void)device->driver.unmap(memory->begin, memory->mapped_bytes);
    }
    (void)device->driver.address_free(memory->reserved, memory->reserved_bytes);
  }
  free(memory);
}

struct kvp_cuda_memory *kvp_cuda_memory_reserve(struct kvp_cuda_device *device, uint64_t bytes,
                                                struct kvp_error *error) {
  struct kvp_cuda_memory *memory = calloc(1, sizeof *memory);
  if (memory == NULL) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a memory");
    return NULL;
  }
  const uint64_t reserved_bytes = round_up(device, bytes) + 2 * device->granularity_bytes;
  const CUresult code = device->driver.address_reserve(&memory->reserved, reserved_bytes, 0, 0, 0);
  if (code != CUDA_SUCCESS) {
    free(memory);
    (void)kvp_cuda_error_set(device, (int)code, "cuMemAddressReserve", error, "%llu bytes of addresses",
                             (unsigned long long)reserved_bytes);
    return NULL;
  }
  memory->reserved_bytes = reserved_bytes;
  memory->begin = memory->reserved + device->granularity_bytes;
  memory->base.base = kvp_cuda_pointer(memory->begin);
  memory->base.bytes = bytes;
  return memory;
}

CUresult kvp_cuda_memory_map(struct kvp_cuda_device *device, struct kvp_cuda_memory *memory,
                             CUmemGenericAllocationHandle handle, uint64_t bytes, const char **call) {
  const uint64_t offset = memory->mapped_bytes;
  *call = "cuMemMap";
  CUresult code = device->driver.map(memory->begin + offset, bytes, 0, handle, 0);
  if (code != CUDA_SUCCESS) {
    return code;
  }
  memory->mapped_bytes += bytes;
  const CUmemAccessDesc access = {
      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal},
      .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
  };
  *call = "cuMemSetAccess";
  return device->driver.set_access(memory->begin + offset, bytes, &access, 1);
}

/* Memory comes with the bytes of whoever had it before. */
static enum kvp_status chunk_zero(struct kvp_cuda_device *device, const struct kvp_cuda_memory *memory,
                                  uint64_t offset, uint64_t bytes, struct kvp_error *error) {
  const char *call = "cudaMemsetAsync";
  cudaError_t code = cudaMemsetAsync(memory->base.base + offset, 0, bytes, device->control_stream);
  if (code == cudaSuccess) {
    call = "cudaStreamSynchronize";
    code = cudaStreamSynchronize(device->control_stream);
  }
  if (code != cudaSuccess) {
    return kvp_cuda_error_set(device, (int)code, call, error, "zeroes in %llu bytes at offset %llu",
                              (unsigned long long)bytes, (unsigned long long)offset);
  }
  return KVP_OK;
}

static enum kvp_status chunk_create(struct kvp_cuda_device *device, struct kvp_cuda_memory *memory, const char *name,
                                    uint64_t bytes, int *fd, struct kvp_error *error) {
  const CUmemAllocationProp properties = chunk_properties(device);
  const uint64_t offset = memory->mapped_bytes;
  const char *call = "cuMemExportToShareableHandle";
  CUmemGenericAllocationHandle handle = 0;
  CUresult code = device->driver.create(&handle, bytes, &properties, 0);
  if (code != CUDA_SUCCESS) {
    return kvp_cuda_error_set(device, (int)code, "cuMemCreate", error,
                              "memory '%s': %llu bytes asked for, %llu of them are there", name,
                              (unsigned long long)memory->base.bytes, (unsigned long long)offset);
  }
  *fd = -1;
  enum kvp_status status = KVP_OK;
  code = device->driver.export_handle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (code == CUDA_SUCCESS) {
    (void)fcntl(*fd, F_SETFD, FD_CLOEXEC);
    code = kvp_cuda_memory_map(device, memory, handle, bytes, &call);
  }
  if (code != CUDA_SUCCESS) {
    status = kvp_cuda_error_set(device, (int)code, call, error, "memory '%s': a chunk of %llu bytes at offset %llu",
                                name, (unsigned long long)bytes, (unsigned long long)offset);
  } else {
    status = chunk_zero(device, memory, offset, bytes, error);
  }
  if (!kvp_cuda_is_lost(device)) {
    (void)device->driver.release(handle); /* mapping and descriptor keep the memory */
  }
  if (status != KVP_OK && *fd >= 0) {
    (void)close(*fd);
  }
  return status;
}

/* Before anything is taken: a memory that can't fit as a whole is refused with its own number, not a chunk's. */
static enum kvp_status memory_fits(struct kvp_cuda_device *device, const char *name, uint64_t bytes,
                                   struct kvp_error *error) {
  size_t free_bytes = 0, total_bytes = 0;
  const cudaError_t code = cudaMemGetInfo(&free_bytes, &total_bytes);
  if (code != cudaSuccess) {
    return kvp_cuda_error_set(device, (int)code, "cudaMemGetInfo", error, "memory '%s'", name);
  }
  if (round_up(device, bytes) > free_bytes) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "memory '%s': %llu bytes asked for, %zu of %zu are free", name,
                         (unsigned long long)bytes, free_bytes, total_bytes);
  }
  return KVP_OK;
}

enum kvp_status kvp_cuda_memory_create(struct kvp_device *base, const char *name, uint64_t bytes, int *fds,
                                       struct kvp_memory **out, struct kvp_error *error) {
  struct kvp_cuda_device *device = kvp_cuda_device_of(base);
  if (kvp_cuda_is_lost(device)) {
    return kvp_cuda_lost_error(device, error);
  }
  enum kvp_status status = memory_fits(device, name, bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_cuda_memory *memory = kvp_cuda_memory_reserve(device, bytes, error);
  if (memory == NULL) {
    return (enum kvp_status)error->status;
  }
  const uint32_t chunk_count = kvp_memory_chunk_count(bytes);
  uint32_t made = 0;
  for (; made < chunk_count; made++) {
    if (atomic_load_explicit(&base->closing, memory_order_relaxed)) {
      status = kvp_error_set(error, KVP_CANCELLED, "memory '%s': the executor stops", name);
      goto err_chunks;
    }
    status =
        chunk_create(device, memory, name, round_up(device, kvp_memory_chunk_bytes(bytes, made)), &fds[made], error);
    if (status != KVP_OK) {
      goto err_chunks;
    }
  }
  *out = &memory->base;
  return KVP_OK;

err_chunks:
  while (made > 0) {
    (void)close(fds[--made]);
  }
  kvp_cuda_memory_free(device, memory);
  return status;
}

/* What makes no sense to the driver is a descriptor that is not what we were told. */
static enum kvp_status import_error_set(struct kvp_cuda_device *device, CUresult code, const char *call,
                                        uint64_t bytes, uint64_t offset, struct kvp_error *error) {
  if (kvp_cuda_error_classify((int)code) == KVP_CUDA_BUG) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "a chunk of %llu bytes at offset %llu: %s: %s (%d)",
                         (unsigned long long)bytes, (unsigned long long)offset, call,
                         cudaGetErrorName((cudaError_t)code), (int)code);
  }
  return kvp_cuda_error_set(device, (int)code, call, error, "a chunk of %llu bytes at offset %llu",
                            (unsigned long long)bytes, (unsigned long long)offset);
}

static enum kvp_status chunk_import(struct kvp_cuda_device *device, struct kvp_cuda_memory *memory, int fd,
                                    uint64_t bytes, struct kvp_error *error) {
  const uint64_t offset = memory->mapped_bytes;
  const char *call = "cuMemImportFromShareableHandle";
  CUmemGenericAllocationHandle handle = 0;
  CUresult code =
      device->driver.import_handle(&handle, kvp_cuda_pointer((uint64_t)fd), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (code != CUDA_SUCCESS) {
    return import_error_set(device, code, call, bytes, offset, error);
  }
  code = kvp_cuda_memory_map(device, memory, handle, bytes, &call);
  const enum kvp_status status =
      code == CUDA_SUCCESS ? KVP_OK : import_error_set(device, code, call, bytes, offset, error);
  if (!kvp_cuda_is_lost(device)) {
    (void)device->driver.release(handle);
  }
  return status;
}

enum kvp_status kvp_cuda_memory_import(struct kvp_device *base, uint64_t bytes, const int *fds,
                                       const uint64_t *chunk_bytes, uint32_t chunk_count, struct kvp_memory **out,
                                       struct kvp_error *error) {
  struct kvp_cuda_device *device = kvp_cuda_device_of(base);
  if (kvp_cuda_is_lost(device)) {
    return kvp_cuda_lost_error(device, error);
  }
  struct kvp_cuda_memory *memory = kvp_cuda_memory_reserve(device, bytes, error);
  if (memory == NULL) {
    return (enum kvp_status)error->status;
  }
  enum kvp_status status = KVP_OK;
  for (uint32_t i = 0; i < chunk_count && status == KVP_OK; i++) {
    if (i + 1 < chunk_count && chunk_bytes[i] % device->granularity_bytes != 0) {
      status = kvp_error_set(error, KVP_INVALID_ARGUMENT, "chunk %u of %u: %llu bytes are no multiple of %llu", i,
                             chunk_count, (unsigned long long)chunk_bytes[i],
                             (unsigned long long)device->granularity_bytes);
    } else {
      status = chunk_import(device, memory, fds[i], round_up(device, chunk_bytes[i]), error);
    }
  }
  if (status != KVP_OK) {
    kvp_cuda_memory_free(device, memory);
    return status;
  }
  *out = &memory->base;
  return KVP_OK;
}

void kvp_cuda_memory_destroy(struct kvp_device *base, struct kvp_memory *memory) {
  kvp_cuda_memory_free(kvp_cuda_device_of(base), (struct kvp_cuda_memory *)memory);
}
