/* Memory of a worker's own: a descriptor of virtual memory, or an IPC handle and an offset. Control thread.
 *
 * What a worker says of its memory is checked against what the driver knows of it, and whatever it brings - no descriptor
 * of CUDA's, bytes that are no handle - is its own refusal: the device goes on, and nothing stays behind.
 */
#include <stdlib.h>

#include "proto/attach_wire.h"
#include "server/executor/device_cuda_error.h"
#include "server/executor/device_cuda_ipc.h"
#include "server/executor/device_cuda_memory.h"

/* What is there of it: driver and request count from the same place. */
static enum kvp_status extent_check(const struct kvp_control_open *request, uint64_t bytes, struct kvp_error *error) {
  if (request->offset_bytes > bytes || request->bytes > bytes - request->offset_bytes) {
    return kvp_error_set(error, KVP_OUT_OF_RANGE,
                         "memory %llu: %llu bytes from %llu on are not inside its allocation, which has %llu",
                         (unsigned long long)request->memory_id, (unsigned long long)request->bytes,
                         (unsigned long long)request->offset_bytes, (unsigned long long)bytes);
  }
  return KVP_OK;
}

/* ---- virtual memory ---- */

static enum kvp_status handle_check(struct kvp_cuda_device *device, const struct kvp_control_open *request,
                                    CUmemGenericAllocationHandle handle, struct kvp_error *error) {
  CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_INVALID};
  const CUresult code = device->driver.properties(&properties, handle);
  if (code != CUDA_SUCCESS) {
    return kvp_cuda_foreign_error_set(device, (int)code, "cuMemGetAllocationPropertiesFromHandle", error,
                                      "memory %llu: its descriptor's allocation",
                                      (unsigned long long)request->memory_id);
  }
  if (properties.type != CU_MEM_ALLOCATION_TYPE_PINNED || properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "memory %llu: its descriptor is of memory that lies in no GPU (type %d, location type %d)",
                         (unsigned long long)request->memory_id, (int)properties.type, (int)properties.location.type);
  }
  if (properties.location.id != device->ordinal) {
    return kvp_error_set(error, KVP_WRONG_DEVICE,
                         "memory %llu: its descriptor is of memory of GPU %d, this device is GPU %d",
                         (unsigned long long)request->memory_id, properties.location.id, device->ordinal);
  }
  return KVP_OK;
}

/* Mapped as a whole: the driver maps no more than there is, which is how the size is known. */
static enum kvp_status handle_map(struct kvp_cuda_device *device, const struct kvp_control_open *request,
                                  CUmemGenericAllocationHandle handle, struct kvp_memory **out,
                                  struct kvp_error *error) {
  struct kvp_cuda_memory *memory = kvp_cuda_memory_reserve(device, request->allocation_bytes, error);
  if (memory == NULL) {
    return (enum kvp_status)error->status;
  }
  const char *call = "";
  const CUresult code = kvp_cuda_memory_map(device, memory, handle, request->allocation_bytes, &call);
  if (code != CUDA_SUCCESS) {
    enum kvp_status status = kvp_cuda_foreign_error_set(
        device, (int)code, call, error, "memory %llu: %llu bytes of its descriptor's allocation can't be mapped",
        (unsigned long long)request->memory_id, (unsigned long long)request->allocation_bytes);
    if (status == KVP_UNIMPLEMENTED) { /* what drivers say of more bytes than the allocation has */
      status = KVP_INVALID_ARGUMENT;
      error->status = status;
    }
    kvp_cuda_memory_free(device, memory);
    return status;
  }
  memory->base.base += request->offset_bytes;
  memory->base.bytes = request->bytes;
  *out = &memory->base;
  return KVP_OK;
}

static enum kvp_status descriptor_open(struct kvp_cuda_device *device, const struct kvp_control_open *request, int fd,
                                       struct kvp_memory **out, struct kvp_error *error) {
  if (request->allocation_bytes % device->granularity_bytes != 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "memory %llu: an allocation of %llu bytes is no multiple of %llu, as all are of this device",
                         (unsigned long long)request->memory_id, (unsigned long long)request->allocation_bytes,
                         (unsigned long long)device->granularity_bytes);
  }
  CUmemGenericAllocationHandle handle = 0;
  const CUresult code =
      device->driver.import_handle(&handle, kvp_cuda_pointer((uint64_t)fd), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (code != CUDA_SUCCESS) {
    return kvp_cuda_foreign_error_set(device, (int)code, "cuMemImportFromShareableHandle", error,
                                      "memory %llu: its descriptor is not taken",
                                      (unsigned long long)request->memory_id);
  }
  enum kvp_status status = handle_check(device, request, handle, error);
  if (status == KVP_OK) {
    status = handle_map(device, request, handle, out, error);
  }
  if (!kvp_cuda_is_lost(device)) {
    (void)device->driver.release(handle); /* the mapping keeps the memory */
  }
  return status;
}

/* ---- IPC handles ---- */

static enum kvp_status ipc_open(struct kvp_cuda_device *device, const struct kvp_control_open *request,
                                struct kvp_memory **out, struct kvp_error *error) {
  struct kvp_cuda_memory *memory = calloc(1, sizeof *memory);
  if (memory == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a memory");
  }
  enum kvp_status status =
      kvp_cuda_ipc_use(device, request->ipc_handle, request->memory_id, &memory->allocation, error);
  if (status != KVP_OK) {
    free(memory);
    return status;
  }
  status = extent_check(request, memory->allocation->bytes, error);
  if (status != KVP_OK) {
    kvp_cuda_memory_free(device, memory);
    return status;
  }
  memory->base.base = kvp_cuda_pointer(memory->allocation->begin + request->offset_bytes);
  memory->base.bytes = request->bytes;
  *out = &memory->base;
  return KVP_OK;
}

enum kvp_status kvp_cuda_memory_open(struct kvp_device *base, const struct kvp_control_open *request, int fd,
                                     struct kvp_memory **out, struct kvp_error *error) {
  struct kvp_cuda_device *device = kvp_cuda_device_of(base);
  if (kvp_cuda_is_lost(device)) {
    return kvp_cuda_lost_error(device, error);
  }
  switch (request->kind) {
  case KVP_IMPORT_VMM:
    return descriptor_open(device, request, fd, out, error);
  case KVP_IMPORT_IPC_HANDLE:
    return ipc_open(device, request, out, error);
  default:
    return kvp_error_set(error, KVP_UNIMPLEMENTED,
                         "memory %llu: a GPU takes descriptors of its virtual memory (kind %d) and IPC handles (kind "
                         "%d), kind %u is neither",
                         (unsigned long long)request->memory_id, KVP_IMPORT_VMM, KVP_IMPORT_IPC_HANDLE,
                         request->kind);
  }
}
