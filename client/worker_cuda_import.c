/* Memory of a worker's own on a GPU as buffers of its session: by a descriptor of the driver's virtual memory, or by the
 * IPC handle of an ordinary allocation. */
#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/worker_cuda.h"
#include "client/worker_cuda_driver.h"

/* An allocation, and how it can be shared. */
struct allocation {
  uint64_t base;
  uint64_t bytes;
  struct kvp_attach_import import;
  int fd; /* -1 of an IPC handle */
};

/* What to do about memory that can't be shared. */
#define USE_THE_DAEMONS "use a buffer that the daemon makes, kvpool_attachment_create_buffer"

static kvpool_status check_on_device(const kvpool_attachment *attachment, kvpool_error *error) {
  if ((attachment->welcome.flags & KVP_ATTACH_DEVICE_FDS) == 0) {
    return kvp_fail(error, KVPOOL_WRONG_DEVICE, "%s is no GPU: it takes memfds", attachment->welcome.device);
  }
  return KVPOOL_OK;
}

/* Attributes are of several widths, as cuda.h has them; none is wider than a zeroed uint64_t. */
static kvpool_status pointer_check(const struct kvp_cuda_scope *scope, uint64_t address, kvpool_error *error) {
  const struct kvp_cuda_driver *driver = scope->driver;
  uint64_t type = 0, ordinal = 0;
  if (driver->pointer_attribute(&type, CU_POINTER_MEMORY_TYPE, address) != CUDA_OK || type != CU_MEMORY_DEVICE) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "0x%llx is no memory of a GPU", (unsigned long long)address);
  }
  if (driver->pointer_attribute(&ordinal, CU_POINTER_DEVICE_ORDINAL, address) == CUDA_OK &&
      (int)ordinal != scope->ordinal) {
    return kvp_fail_at(error, KVPOOL_WRONG_DEVICE, "address", -1, (int)ordinal,
                       "0x%llx is memory of this process's GPU %d, the attachment's is GPU %d",
                       (unsigned long long)address, (int)ordinal, scope->ordinal);
  }
  return KVPOOL_OK;
}

static kvpool_status range_of(const struct kvp_cuda_driver *driver, uint64_t address, struct allocation *out,
                              kvpool_error *error) {
  size_t bytes = 0;
  const int code = driver->address_range(&out->base, &bytes, address);
  if (code != CUDA_OK) {
    return kvp_cuda_fail(driver, code, "cuMemGetAddressRange", "the memory to import", error);
  }
  out->bytes = bytes;
  return KVPOOL_OK;
}

/* The piece of virtual memory that was mapped at once; a driver that doesn't tell it gives what it takes for the
 * allocation. */
static kvpool_status mapping_of(const struct kvp_cuda_driver *driver, uint64_t address, struct allocation *out,
                                kvpool_error *error) {
  uint64_t bytes = 0, base = 0;
  if (driver->pointer_attribute(&base, CU_POINTER_MAPPING_BASE, address) == CUDA_OK &&
      driver->pointer_attribute(&bytes, CU_POINTER_MAPPING_SIZE, address) == CUDA_OK && bytes > 0) {
    out->base = base;
    out->bytes = bytes;
    return KVPOOL_OK;
  }
  return range_of(driver, address, out, error);
}

static kvpool_status ipc_open(const struct kvp_cuda_driver *driver, uint64_t address, struct allocation *out,
                              kvpool_error *error) {
  kvpool_status status = range_of(driver, address, out, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  out->import.kind = KVP_IMPORT_IPC_HANDLE;
  const int code = driver->ipc_handle(out->import.ipc_handle, out->base);
  return code == CUDA_OK
             ? KVPOOL_OK
             : kvp_cuda_fail(driver, code, "cuIpcGetMemHandle",
                             "a handle of the memory to import; where there is none, " USE_THE_DAEMONS, error);
}

static kvpool_status fd_open(const struct kvp_cuda_driver *driver, uint64_t handle, uint64_t address,
                             struct allocation *out, kvpool_error *error) {
  uint64_t allowed = 0;
  if (driver->pointer_attribute(&allowed, CU_POINTER_ALLOWED_HANDLE_TYPES, address) != CUDA_OK ||
      (allowed & CU_MEM_HANDLE_POSIX_FD) == 0) {
    return kvp_fail(error, KVPOOL_UNIMPLEMENTED,
                    "0x%llx is virtual memory that was made without a handle to share it by (PyTorch's expandable "
                    "segments are): " USE_THE_DAEMONS,
                    (unsigned long long)address);
  }
  kvpool_status status = mapping_of(driver, address, out, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  out->import.kind = KVP_IMPORT_VMM;
  const int code = driver->export_handle(&out->fd, handle, CU_MEM_HANDLE_POSIX_FD, 0);
  return code == CUDA_OK
             ? KVPOOL_OK
             : kvp_cuda_fail(driver, code, "cuMemExportToShareableHandle",
                             "a handle of the memory to import; where there is none, " USE_THE_DAEMONS, error);
}

/* The allocation that an address lies in. */
static kvpool_status allocation_open(const struct kvp_cuda_scope *scope, uint64_t address, struct allocation *out,
                                     kvpool_error *error) {
  const struct kvp_cuda_driver *driver = scope->driver;
  kvpool_status status = pointer_check(scope, address, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  uint64_t is_ipc_capable = 0;
  if (driver->pointer_attribute(&is_ipc_capable, CU_POINTER_IS_LEGACY_IPC_CAPABLE, address) == CUDA_OK &&
      is_ipc_capable != 0) {
    return ipc_open(driver, address, out, error);
  }
  uint64_t handle = 0;
  void *pointer = NULL;
  memcpy(&pointer, &address, sizeof pointer);
  if (driver->retain_handle(&handle, pointer) == CUDA_OK) {
    status = fd_open(driver, handle, address, out, error);
    (void)driver->release_handle(handle);
    return status;
  }
  return kvp_fail(error, KVPOOL_UNIMPLEMENTED,
                  "0x%llx has no handle that another process could open (memory of cudaMallocAsync and of pools has "
                  "none): " USE_THE_DAEMONS,
                  (unsigned long long)address);
}

kvpool_status kvpool_attachment_import_device(kvpool_attachment *attachment, void *address, uint64_t bytes,
                                              kvpool_buffer **out, kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  struct kvp_cuda_scope scope;
  kvpool_status status = check_on_device(attachment, error);
  if (status == KVPOOL_OK) {
    status = kvp_cuda_enter(&scope, attachment->welcome.uuid, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  struct allocation allocation = {.fd = -1};
  const uint64_t begin = (uintptr_t)address;
  status = allocation_open(&scope, begin, &allocation, error);
  kvp_cuda_leave(&scope);
  if (status != KVPOOL_OK) {
    return status;
  }
  const uint64_t offset = begin - allocation.base;
  if (bytes == 0 || offset > allocation.bytes || bytes > allocation.bytes - offset) {
    status =
        kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "bytes", -1, (int64_t)bytes,
                    "%llu bytes from 0x%llx are not inside one allocation, of %llu bytes from 0x%llx%s",
                    (unsigned long long)bytes, (unsigned long long)begin, (unsigned long long)allocation.bytes,
                    (unsigned long long)allocation.base,
                    allocation.fd >= 0 ? "; where virtual memory is mapped piece by piece, " USE_THE_DAEMONS : "");
  } else {
    allocation.import.allocation_bytes = allocation.bytes;
    allocation.import.offset_bytes = offset;
    allocation.import.bytes = bytes;
    status = kvp_attached_buffer_import(attachment, &allocation.import, allocation.fd, address, out, error);
  }
  if (allocation.fd >= 0) {
    (void)close(allocation.fd);
  }
  return status;
}

kvpool_status kvpool_attachment_import_vmm(kvpool_attachment *attachment, int fd, uint64_t allocation_bytes,
                                           uint64_t offset_bytes, uint64_t bytes, void *address, kvpool_buffer **out,
                                           kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  kvpool_status status = check_on_device(attachment, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (bytes == 0 || offset_bytes > allocation_bytes || bytes > allocation_bytes - offset_bytes) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "offset_bytes", -1, (int64_t)offset_bytes,
                       "%llu bytes at offset %llu are not inside an allocation of %llu bytes",
                       (unsigned long long)bytes, (unsigned long long)offset_bytes,
                       (unsigned long long)allocation_bytes);
  }
  const struct kvp_attach_import import = {
      .kind = KVP_IMPORT_VMM, .allocation_bytes = allocation_bytes, .offset_bytes = offset_bytes, .bytes = bytes};
  return kvp_attached_buffer_import(attachment, &import, fd, address, out, error);
}
