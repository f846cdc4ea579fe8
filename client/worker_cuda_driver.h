/* Functions of the CUDA driver that a worker needs, from libcuda.so.1, which is loaded when the first GPU is attached to:
 * a scheduler needs none, and a build of this library needs no toolkit. Types and numbers are cuda.h's.
 *
 * Loaded once for the process and never unloaded. Any thread.
 */
#ifndef KVPOOL_CLIENT_WORKER_CUDA_DRIVER_H
#define KVPOOL_CLIENT_WORKER_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "client/internal.h"

enum {
  CUDA_OK = 0,
  CU_MEM_LOCATION_DEVICE = 1,
  CU_MEM_ACCESS_READ = 1,
  CU_MEM_ACCESS_READ_WRITE = 3,
  CU_MEM_HANDLE_POSIX_FD = 1,
  CU_MEMORY_DEVICE = 2,
  CU_POINTER_MEMORY_TYPE = 2,
  CU_POINTER_DEVICE_ORDINAL = 9,
  CU_POINTER_IS_LEGACY_IPC_CAPABLE = 10,
  CU_POINTER_ALLOWED_HANDLE_TYPES = 14,
  CU_POINTER_MAPPING_SIZE = 18,
  CU_POINTER_MAPPING_BASE = 19,
  CU_HOST_REGISTER_PORTABLE = 1,
  CU_HOST_REGISTER_DEVICEMAP = 2,
  CU_STREAM_WAIT_GEQ = 0
};

struct kvp_cuda_access {
  int location_type;
  int location_id;
  int flags;
};

struct kvp_cuda_driver {
  int (*init)(unsigned flags);
  int (*error_name)(int error, const char **name);
  int (*device_count)(int *count);
  int (*device_get)(int *device, int ordinal);
  int (*device_uuid)(uint8_t uuid[16], int device);
  int (*primary_retain)(void **context, int device);
  int (*primary_release)(int device);
  int (*context_push)(void *context);
  int (*context_pop)(void **context);
  int (*address_reserve)(uint64_t *address, size_t bytes, size_t alignment, uint64_t hint, unsigned long long flags);
  int (*address_free)(uint64_t address, size_t bytes);
  int (*import_handle)(uint64_t *handle, void *os_handle, int type);
  int (*export_handle)(void *os_handle, uint64_t handle, int type, unsigned long long flags);
  int (*retain_handle)(uint64_t *handle, void *address);
  int (*release_handle)(uint64_t handle);
  int (*map)(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
  int (*unmap)(uint64_t address, size_t bytes);
  int (*set_access)(uint64_t address, size_t bytes, const struct kvp_cuda_access *access, size_t count);
  int (*address_range)(uint64_t *base, size_t *bytes, uint64_t address);
  int (*pointer_attribute)(void *out, int attribute, uint64_t address);
  int (*ipc_handle)(void *out, uint64_t address);
  int (*host_register)(void *memory, size_t bytes, unsigned flags);
  int (*host_unregister)(void *memory);
  int (*host_device_pointer)(uint64_t *address, void *memory, unsigned flags);
  int (*stream_write)(void *stream, uint64_t address, uint64_t value, unsigned flags);
  int (*stream_wait)(void *stream, uint64_t address, uint64_t value, unsigned flags);
};

/* A function of the driver, and the pointer to it that is to be set. */
struct kvp_cuda_symbol {
  const char *name;
  void *place;
};
/* KVPOOL_UNIMPLEMENTED: there is no driver here, or one that has not all of them. */
kvpool_status kvp_cuda_symbols_load(const struct kvp_cuda_symbol *symbols, size_t count, kvpool_error *error);
/* KVPOOL_UNIMPLEMENTED: there is no driver here, or one that is too old. */
kvpool_status kvp_cuda_load(const struct kvp_cuda_driver **out, kvpool_error *error);
/* "cuMemMap: CUDA_ERROR_OUT_OF_MEMORY (2), ...". what: of the call, for a person. */
kvpool_status kvp_cuda_fail(const struct kvp_cuda_driver *driver, int code, const char *call, const char *what,
                            kvpool_error *error);
/* This process's number of the GPU "GPU-..."; -1: it doesn't see it. */
int kvp_cuda_find(const struct kvp_cuda_driver *driver, const char *uuid);

/* A context of the GPU is current on this thread between the two: its primary one, which the process may have already
 * and is made when it has none. */
struct kvp_cuda_scope {
  const struct kvp_cuda_driver *driver;
  int device;
  int ordinal;
};
kvpool_status kvp_cuda_enter(struct kvp_cuda_scope *scope, const char *uuid, kvpool_error *error);
void kvp_cuda_leave(const struct kvp_cuda_scope *scope);

#endif
