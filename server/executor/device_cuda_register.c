/* Host memory that kernels use where it lies: timelines, which they write, and owner tables, which they read. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "server/executor/device_cuda_error.h"

/* Where a device takes no read-only memory, it is writable while the driver takes hold of it. A table's descriptor
 * allows that, and whoever writes to the mapping afterwards still faults. */
static enum kvp_status register_writable(struct kvp_cuda_device *device, void *host, uint64_t bytes, bool read_only,
                                         struct kvp_error *error) {
  if (read_only && mprotect(host, bytes, PROT_READ | PROT_WRITE) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "%llu bytes of host memory can't be made writable for the device: %s",
                         (unsigned long long)bytes, strerror(errno));
  }
  const cudaError_t code = cudaHostRegister(host, bytes, cudaHostRegisterMapped);
  if (read_only) {
    (void)mprotect(host, bytes, PROT_READ);
  }
  if (code != cudaSuccess) {
    return kvp_cuda_error_set(device, (int)code, "cudaHostRegister", error, "%llu bytes of host memory",
                              (unsigned long long)bytes);
  }
  return KVP_OK;
}

enum kvp_status kvp_cuda_host_register(struct kvp_device *base, void *host, uint64_t bytes, bool read_only,
                                       void **out, struct kvp_error *error) {
  struct kvp_cuda_device *device = kvp_cuda_device_of(base);
  if (kvp_cuda_is_lost(device)) {
    return kvp_cuda_lost_error(device, error);
  }
  enum kvp_status status = KVP_OK;
  bool is_registered = false;
  if (read_only && device->registers_read_only) {
    is_registered = cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterReadOnly) == cudaSuccess;
    if (!is_registered) {
      (void)cudaGetLastError();
    }
  }
  if (!is_registered) {
    status = register_writable(device, host, bytes, read_only, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  const cudaError_t code = cudaHostGetDevicePointer(out, host, 0);
  if (code != cudaSuccess) {
    status = kvp_cuda_error_set(device, (int)code, "cudaHostGetDevicePointer", error, "%llu bytes of host memory",
                                (unsigned long long)bytes);
    kvp_cuda_host_unregister(base, host);
  }
  return status;
}

void kvp_cuda_host_unregister(struct kvp_device *base, void *host) {
  struct kvp_cuda_device *device = kvp_cuda_device_of(base);
  if (kvp_cuda_frees_memory(device)) {
    (void)cudaHostUnregister(host);
  }
}
