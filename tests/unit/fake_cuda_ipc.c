/* IPC handles of the CUDA in host memory. A process opens an allocation once: whoever doesn't count, or closes what isn't
 * open, is aborted. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/unit/fake_cuda_handle.h"
#include "tests/unit/fake_cuda_parts.h"

enum { allocations_max = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation {
  struct fake_cuda_handle handle;
  uint8_t *block; /* NULL: none */
} allocations[allocations_max];

static struct allocation *allocation_at(CUdeviceptr address) {
  for (size_t i = 0; i < allocations_max; i++) {
    struct allocation *allocation = &allocations[i];
    const CUdeviceptr begin = (CUdeviceptr)(uintptr_t)allocation->block;
    if (begin != 0 && address >= begin && address - begin < allocation->handle.block_bytes) {
      return allocation;
    }
  }
  return NULL;
}

/* Or the process aborts. */
static struct allocation *allocation_of(CUdeviceptr address) {
  struct allocation *allocation = allocation_at(address);
  if (allocation == NULL) {
    (void)fprintf(stderr, "fake_cuda: an address of no IPC handle that is open\n");
    abort();
  }
  return allocation;
}

static struct allocation *allocation_new(const struct fake_cuda_handle *handle) {
  struct allocation *unused = NULL;
  for (size_t i = 0; i < allocations_max; i++) {
    if (allocations[i].block == NULL) {
      unused = &allocations[i];
    } else {
      fake_check(memcmp(&allocations[i].handle, handle, sizeof *handle) != 0, "an IPC handle is opened twice");
    }
  }
  fake_check(unused != NULL, "too many IPC handles");
  return unused;
}

CUresult fake_ipc_open(CUdeviceptr *out, CUipcMemHandle opaque, unsigned int flags) {
  struct fake_cuda_handle handle;
  RETURN_INJECTED_RESULT("cuIpcOpenMemHandle");
  fake_check(fake_has_device(), "a thread without a device");
  fake_check(flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, "flags that an IPC handle isn't opened with");
  memcpy(&handle, &opaque, sizeof handle);
  if (memcmp(handle.magic, fake_cuda_handle_magic, sizeof handle.magic) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (handle.owner == (int32_t)getpid()) {
    return CUDA_ERROR_INVALID_CONTEXT; /* that is what it says to that */
  }
  if (handle.loses_context == fake_cuda_handle_loses) {
    fake_lose();
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.holder, handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return CUDA_ERROR_INVALID_HANDLE; /* its process is gone */
  }
  struct stat stat;
  if (fstat(fd, &stat) != 0 || handle.block_bytes == 0 || handle.block_bytes > (uint64_t)stat.st_size ||
      handle.lead_bytes >= handle.block_bytes) {
    (void)close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  void *block = mmap(NULL, handle.block_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  (void)close(fd);
  fake_check(block != MAP_FAILED, "no addresses");
  (void)pthread_mutex_lock(&lock);
  *allocation_new(&handle) = (struct allocation){.handle = handle, .block = block};
  (void)pthread_mutex_unlock(&lock);
  fake_range_add(RANGE_DEVICE, block, handle.block_bytes, NULL);
  *out = (CUdeviceptr)(uintptr_t)block + handle.lead_bytes;
  return CUDA_SUCCESS;
}

CUresult fake_ipc_close(CUdeviceptr address) {
  (void)pthread_mutex_lock(&lock);
  struct allocation *allocation = allocation_of(address);
  fake_check(allocation->block + allocation->handle.lead_bytes == fake_pointer(address),
             "an IPC handle is closed by another address");
  const struct allocation closed = *allocation;
  allocation->block = NULL;
  (void)pthread_mutex_unlock(&lock);
  (void)fake_range_remove(closed.block);
  return munmap(closed.block, closed.handle.block_bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult fake_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
  RETURN_INJECTED_RESULT("cuMemGetAddressRange");
  (void)pthread_mutex_lock(&lock);
  const struct allocation *allocation = allocation_of(address);
  *base = (CUdeviceptr)(uintptr_t)allocation->block;
  *bytes = allocation->handle.block_bytes;
  (void)pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

CUresult fake_pointer_attribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
  fake_check(attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, "another attribute");
  RETURN_INJECTED_RESULT("cuPointerGetAttribute");
  (void)pthread_mutex_lock(&lock);
  const struct allocation *allocation = allocation_of(address);
  const int device = allocation->handle.device;
  (void)pthread_mutex_unlock(&lock);
  memcpy(out, &device, sizeof device);
  return CUDA_SUCCESS;
}

uint32_t fake_ipc_count(void) {
  uint32_t count = 0;
  (void)pthread_mutex_lock(&lock);
  for (size_t i = 0; i < allocations_max; i++) {
    count += allocations[i].block != NULL;
  }
  (void)pthread_mutex_unlock(&lock);
  return count;
}
