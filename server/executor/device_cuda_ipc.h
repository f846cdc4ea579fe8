/* Allocations of other processes, by their IPC handles. Control thread.
 *
 * Opening a handle maps the whole allocation, however little of it is wanted, and a process opens it once: all memories
 * of an allocation share one mapping, which is closed with the last of them.
 */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_IPC_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_IPC_H

#include "server/executor/device_cuda.h"

struct kvp_cuda_ipc_allocation {
  CUipcMemHandle handle;
  CUdeviceptr begin; /* where offsets of its owner's count from */
  uint64_t bytes;    /* from there to its end, as the driver has it */
  uint32_t uses;
  struct kvp_cuda_ipc_allocation *next;
};

/* One use more of the handle's allocation. handle [kvp_ipc_handle_bytes]; memory_id: for *error. Whatever the bytes are,
 * the device goes on. */
enum kvp_status kvp_cuda_ipc_use(struct kvp_cuda_device *device, const uint8_t *handle, uint64_t memory_id,
                                 struct kvp_cuda_ipc_allocation **out, struct kvp_error *error);
void kvp_cuda_ipc_unuse(struct kvp_cuda_device *device, struct kvp_cuda_ipc_allocation *allocation);

#endif
