/* The table of allocations that were opened by IPC handles. */
#include "server/executor/device_cuda_ipc.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/attach_wire.h"
#include "server/executor/device_cuda_error.h"

_Static_assert(sizeof(CUipcMemHandle) == kvp_ipc_handle_bytes, "a handle travels as it is");

static struct kvp_cuda_ipc_allocation *allocation_find(const struct kvp_cuda_device *device, const uint8_t *handle) {
  struct kvp_cuda_ipc_allocation *allocation = device->ipc_allocations;
  while (allocation != NULL && memcmp(&allocation->handle, handle, sizeof allocation->handle) != 0) {
    allocation = allocation->next;
  }
  return allocation;
}

/* How far it goes, and whether it is this GPU's: a handle of another one may open too, where GPUs reach each other. */
static enum kvp_status allocation_look(struct kvp_cuda_device *device, struct kvp_cuda_ipc_allocation *allocation,
                                       uint64_t memory_id, struct kvp_error *error) {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  int ordinal = device->ordinal;
  CUresult code = device->driver.address_range(&base, &bytes, allocation->begin);
  if (code != CUDA_SUCCESS) {
    return kvp_cuda_foreign_error_set(device, (int)code, "cuMemGetAddressRange", error,
                                      "memory %llu: its IPC handle's allocation", (unsigned long long)memory_id);
  }
  /* A small allocation is a part of a block that is shared as a whole: its begin isn't the block's. */
  allocation->bytes = base + bytes - allocation->begin;
  code = device->driver.pointer_attribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, allocation->begin);
  if (code == CUDA_SUCCESS && ordinal >= 0 && ordinal != device->ordinal) {
    return kvp_error_set(error, KVP_WRONG_DEVICE, "memory %llu: its IPC handle is of GPU %d, this device is GPU %d",
                         (unsigned long long)memory_id, ordinal, device->ordinal);
  }
  return KVP_OK;
}

static void allocation_free(struct kvp_cuda_device *device, struct kvp_cuda_ipc_allocation *allocation) {
  if (kvp_cuda_frees_memory(device)) {
    (void)device->driver.ipc_close(allocation->begin);
  }
  free(allocation);
}

enum kvp_status kvp_cuda_ipc_use(struct kvp_cuda_device *device, const uint8_t *handle, uint64_t memory_id,
                                 struct kvp_cuda_ipc_allocation **out, struct kvp_error *error) {
  struct kvp_cuda_ipc_allocation *allocation = allocation_find(device, handle);
  if (allocation != NULL) {
    allocation->uses++;
    *out = allocation;
    return KVP_OK;
  }
  allocation = calloc(1, sizeof *allocation);
  if (allocation == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "memory %llu: no memory for it", (unsigned long long)memory_id);
  }
  memcpy(&allocation->handle, handle, sizeof allocation->handle);
  const CUresult code =
      device->driver.ipc_open(&allocation->begin, allocation->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (code != CUDA_SUCCESS) {
    free(allocation);
    return kvp_cuda_foreign_error_set(device, (int)code, "cuIpcOpenMemHandle", error,
                                      "memory %llu: its IPC handle can't be opened", (unsigned long long)memory_id);
  }
  const enum kvp_status status = allocation_look(device, allocation, memory_id, error);
  if (status != KVP_OK) {
    allocation_free(device, allocation);
    return status;
  }
  allocation->uses = 1;
  allocation->next = device->ipc_allocations;
  device->ipc_allocations = allocation;
  *out = allocation;
  return KVP_OK;
}

void kvp_cuda_ipc_unuse(struct kvp_cuda_device *device, struct kvp_cuda_ipc_allocation *allocation) {
  assert(allocation->uses > 0);
  if (--allocation->uses > 0) {
    return;
  }
  struct kvp_cuda_ipc_allocation **place = &device->ipc_allocations;
  while (*place != allocation) {
    place = &(*place)->next;
  }
  *place = allocation->next;
  allocation_free(device, allocation);
}
