/* libcuda.so.1 of a worker whose executor is kvpool-exec-fake-cuda: memory of the worker's own is memfds, which that
 * executor opens by what it is given for handles. Two GPUs; a thread at a time.
 *
 * As a driver does, it puts small allocations of cuMemAlloc into blocks that are shared as a whole.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/fake_cuda_handle.h"

#define EXPORT __attribute__((visibility("default")))

enum {
  invalid_value = 1,
  out_of_memory = 2,
  invalid_context = 201,
  not_supported = 801,
  posix_fd = 1,
  of_device = 1,
  of_host = 3,
  granularity = 4096,
  block_bytes = 2 << 20,
  small_bytes_max = 1 << 20,
  small_alignment = 512,
  handles_max = 256,
  allocations_max = 256,
  device_count = 2
};

struct location {
  int type;
  int id;
};

struct properties {
  int type;
  int handle_types;
  struct location location;
  void *win32;
  uint8_t flags[8];
};

struct access {
  struct location location;
  int flags;
};

struct chunk {
  uint64_t bytes;
  int fd; /* 0: none */
  bool is_exportable;
};

enum kind { NONE, ORDINARY, VIRTUAL, POOLED };

struct allocation {
  uint64_t base;
  uint64_t bytes;
  uint64_t block_bytes;
  uint64_t lead_bytes; /* in the block */
  enum kind kind;
  int fd;
  bool is_exportable;
};

static struct chunk chunks[handles_max];
static struct allocation allocations[allocations_max];
static struct allocation small_block; /* the one that is being filled */
static uint64_t small_used;
static char contexts[device_count];
static _Thread_local bool has_context;

static void *pointer_of(uint64_t address) {
  void *pointer = NULL;
  memcpy(&pointer, &address, sizeof pointer);
  return pointer;
}

static void *checked(void *map) {
  if (map == MAP_FAILED) {
    abort();
  }
  return map;
}

static int memory_new(const char *name, uint64_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
    abort();
  }
  return fd;
}

/* ---- devices and contexts ---- */

EXPORT int cuInit(unsigned flags);
EXPORT int cuGetErrorName(int error, const char **name);
EXPORT int cuDeviceGetCount(int *count);
EXPORT int cuDeviceGet(int *device, int ordinal);
EXPORT int cuDeviceGetUuid_v2(uint8_t uuid[16], int device);
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device);
EXPORT int cuDevicePrimaryCtxRelease_v2(int device);
EXPORT int cuCtxSetCurrent(const char *context);
EXPORT int cuCtxPushCurrent_v2(const char *context);
EXPORT int cuCtxPopCurrent_v2(void **context);
EXPORT int cuCtxSynchronize(void);

int cuInit(unsigned flags) {
  return flags == 0 ? 0 : invalid_value;
}

int cuGetErrorName(int error, const char **name) {
  *name = error == out_of_memory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_A_TEST";
  return 0;
}

int cuDeviceGetCount(int *count) {
  *count = device_count;
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

/* As fake_cuda.c has them. */
int cuDeviceGetUuid_v2(uint8_t uuid[16], int device) {
  memset(uuid, 0xA0 + device, 16);
  return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = &contexts[device];
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  return 0;
}

int cuCtxSetCurrent(const char *context) {
  has_context = context != NULL;
  return 0;
}

int cuCtxPushCurrent_v2(const char *context) {
  return cuCtxSetCurrent(context);
}

int cuCtxPopCurrent_v2(void **context) {
  *context = contexts;
  return 0; /* that of the thread stays: it had one before, or needs none */
}

int cuCtxSynchronize(void) {
  return has_context ? 0 : invalid_context;
}

/* ---- allocations ---- */

EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes);
EXPORT int cuMemFree_v2(uint64_t address);
EXPORT int cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream);
EXPORT int cuMemFreeAsync(uint64_t address, void *stream);
EXPORT int cuMemcpyHtoD_v2(uint64_t address, const void *from, size_t bytes);
EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t address, size_t bytes);
EXPORT int cuMemsetD8_v2(uint64_t address, uint8_t byte, size_t bytes);
EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address);
EXPORT int cuPointerGetAttribute(void *out, int attribute, uint64_t address);
EXPORT int cuIpcGetMemHandle(struct fake_cuda_handle *out, uint64_t address);

static struct allocation *allocation_add(const struct allocation *allocation) {
  for (size_t i = 0; i < allocations_max; i++) {
    if (allocations[i].kind == NONE) {
      allocations[i] = *allocation;
      return &allocations[i];
    }
  }
  abort();
}

static struct allocation *allocation_at(uint64_t address) {
  for (size_t i = 0; i < allocations_max; i++) {
    if (allocations[i].kind != NONE && address >= allocations[i].base &&
        address - allocations[i].base < allocations[i].bytes) {
      return &allocations[i];
    }
  }
  return NULL;
}

static struct allocation block_new(uint64_t bytes) {
  struct allocation block = {.kind = ORDINARY, .bytes = bytes, .block_bytes = (bytes + 4095) / 4096 * 4096};
  block.fd = memory_new("a worker's", block.block_bytes);
  block.base = (uintptr_t)checked(mmap(NULL, block.block_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, block.fd, 0));
  return block;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  struct allocation made;
  if (!has_context || bytes == 0) {
    return has_context ? invalid_value : invalid_context;
  }
  if (bytes >= small_bytes_max) {
    made = block_new(bytes);
  } else {
    if (small_block.kind == NONE || small_used + bytes > block_bytes) {
      small_block = block_new(block_bytes);
      small_used = 0;
    }
    made = small_block;
    made.lead_bytes = small_used;
    made.base += small_used;
    made.bytes = bytes;
    small_used += (bytes + small_alignment - 1) / small_alignment * small_alignment;
  }
  *address = allocation_add(&made)->base;
  return 0;
}

/* Blocks of small ones stay. */
int cuMemFree_v2(uint64_t address) {
  struct allocation *found = allocation_at(address);
  if (found == NULL || found->kind != ORDINARY || found->base != address) {
    return invalid_value;
  }
  if (found->bytes >= small_bytes_max) {
    (void)munmap(pointer_of(address), found->block_bytes);
    (void)close(found->fd);
  }
  found->kind = NONE;
  return 0;
}

int cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) {
  (void)stream;
  struct allocation made = {.kind = POOLED, .bytes = bytes};
  made.base = (uintptr_t)checked(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  *address = allocation_add(&made)->base;
  return 0;
}

int cuMemFreeAsync(uint64_t address, void *stream) {
  (void)stream;
  struct allocation *found = allocation_at(address);
  if (found == NULL || found->kind != POOLED || munmap(pointer_of(address), found->bytes) != 0) {
    return invalid_value;
  }
  found->kind = NONE;
  return 0;
}

static bool is_inside(uint64_t address, size_t bytes) {
  const struct allocation *found = allocation_at(address);
  return found != NULL && bytes <= found->bytes - (address - found->base);
}

int cuMemcpyHtoD_v2(uint64_t address, const void *from, size_t bytes) {
  if (!is_inside(address, bytes)) {
    return invalid_value;
  }
  memcpy(pointer_of(address), from, bytes);
  return 0;
}

int cuMemcpyDtoH_v2(void *to, uint64_t address, size_t bytes) {
  if (!is_inside(address, bytes)) {
    return invalid_value;
  }
  memcpy(to, pointer_of(address), bytes);
  return 0;
}

int cuMemsetD8_v2(uint64_t address, uint8_t byte, size_t bytes) {
  if (!is_inside(address, bytes)) {
    return invalid_value;
  }
  memset(pointer_of(address), byte, bytes);
  return 0;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address) {
  const struct allocation *found = allocation_at(address);
  if (found == NULL) {
    return invalid_value;
  }
  *base = found->base;
  *bytes = found->bytes;
  return 0;
}

static int put(void *out, uint64_t value, size_t bytes) {
  memcpy(out, &value, bytes);
  return 0;
}

int cuPointerGetAttribute(void *out, int attribute, uint64_t address) {
  const struct allocation *found = allocation_at(address);
  if (found == NULL) {
    return invalid_value;
  }
  switch (attribute) {
  case 2: /* memory type: a device's */
    return put(out, 2, 4);
  case 9: /* device ordinal */
    return put(out, 0, 4);
  case 10: /* has an IPC handle */
    return put(out, found->kind == ORDINARY, 1);
  case 14: /* kinds of handles */
    return put(out, found->is_exportable ? posix_fd : 0, 8);
  case 18: /* mapping's size and begin */
    return put(out, found->bytes, 8);
  case 19:
    return put(out, found->base, 8);
  default:
    return not_supported;
  }
}

int cuIpcGetMemHandle(struct fake_cuda_handle *out, uint64_t address) {
  const struct allocation *found = allocation_at(address);
  if (found == NULL || found->kind != ORDINARY || found->base != address) {
    return invalid_value;
  }
  *out = fake_cuda_handle_of(found->fd, found->block_bytes, 0);
  out->lead_bytes = found->lead_bytes;
  out->owner = out->holder;
  return 0;
}

/* ---- virtual memory ---- */

EXPORT int cuMemCreate(uint64_t *handle, size_t bytes, const struct properties *properties, unsigned long long flags);
EXPORT int cuMemRelease(uint64_t handle);
EXPORT int cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags);
EXPORT int cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type);
EXPORT int cuMemRetainAllocationHandle(uint64_t *handle, const void *address);
EXPORT int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t hint,
                               unsigned long long flags);
EXPORT int cuMemAddressFree(uint64_t address, size_t bytes);
EXPORT int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
EXPORT int cuMemUnmap(uint64_t address, size_t bytes);
EXPORT int cuMemSetAccess(uint64_t address, size_t bytes, const struct access *access, size_t count);

static int chunk_add(uint64_t *handle, const struct chunk *chunk) {
  for (uint64_t i = 0; i < handles_max; i++) {
    if (chunks[i].fd == 0) {
      chunks[i] = *chunk;
      *handle = i + 1;
      return 0;
    }
  }
  abort();
}

int cuMemCreate(uint64_t *handle, size_t bytes, const struct properties *properties, unsigned long long flags) {
  char name[32];
  if (properties->type != 1 || bytes == 0 || bytes % granularity != 0 || flags != 0 ||
      (properties->location.type != of_device && properties->location.type != of_host)) {
    return invalid_value;
  }
  (void)snprintf(name, sizeof name, properties->location.type == of_host ? "fake-cuda:host" : "fake-cuda:%d",
                 properties->location.id);
  return chunk_add(handle, &(struct chunk){.fd = memory_new(name, bytes),
                                           .bytes = bytes,
                                           .is_exportable = (properties->handle_types & posix_fd) != 0});
}

int cuMemRelease(uint64_t handle) {
  (void)close(chunks[handle - 1].fd);
  chunks[handle - 1].fd = 0;
  return 0;
}

int cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags) {
  if (!chunks[handle - 1].is_exportable || type != posix_fd || flags != 0) {
    return invalid_value;
  }
  *fd = dup(chunks[handle - 1].fd);
  return *fd >= 0 ? 0 : invalid_value;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type) {
  const int fd = dup((int)(intptr_t)os_handle);
  const off_t bytes = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
  if (bytes <= 0 || type != posix_fd) {
    return invalid_value;
  }
  return chunk_add(handle, &(struct chunk){.fd = fd, .bytes = (uint64_t)bytes, .is_exportable = true});
}

int cuMemRetainAllocationHandle(uint64_t *handle, const void *address) {
  const struct allocation *found = allocation_at((uintptr_t)address);
  if (found == NULL || found->kind != VIRTUAL) {
    return invalid_value;
  }
  return chunk_add(
      handle, &(struct chunk){.fd = dup(found->fd), .bytes = found->bytes, .is_exportable = found->is_exportable});
}

int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t hint, unsigned long long flags) {
  if (bytes % granularity != 0 || alignment != 0 || hint != 0 || flags != 0) {
    return invalid_value;
  }
  *address = (uintptr_t)checked(mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return 0;
}

int cuMemAddressFree(uint64_t address, size_t bytes) {
  return munmap(pointer_of(address), bytes) == 0 ? 0 : invalid_value;
}

int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
  const struct chunk *chunk = &chunks[handle - 1];
  if (bytes == 0 || bytes % granularity != 0 || offset != 0 || flags != 0) {
    return invalid_value;
  }
  if (bytes > chunk->bytes) {
    return not_supported; /* as driver 580 has it */
  }
  (void)checked(mmap(pointer_of(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->fd, 0));
  (void)allocation_add(&(struct allocation){
      .kind = VIRTUAL, .base = address, .bytes = bytes, .fd = dup(chunk->fd), .is_exportable = chunk->is_exportable});
  return 0;
}

int cuMemUnmap(uint64_t address, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    struct allocation *found = allocation_at(address + done);
    if (found == NULL || found->kind != VIRTUAL) {
      return invalid_value;
    }
    (void)close(found->fd);
    found->kind = NONE;
    done += found->bytes;
  }
  (void)checked(mmap(pointer_of(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
  return 0;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const struct access *access, size_t count) {
  const int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
  return count == 1 && access->location.type == of_device && mprotect(pointer_of(address), bytes, protection) == 0
             ? 0
             : invalid_value;
}

/* ---- host memory and streams: a worker of tests has none ---- */

EXPORT int cuMemHostRegister_v2(void);
EXPORT int cuMemHostUnregister(void);
EXPORT int cuMemHostGetDevicePointer_v2(void);
EXPORT int cuStreamWriteValue64_v2(void);
EXPORT int cuStreamWaitValue64_v2(void);

int cuMemHostRegister_v2(void) {
  return not_supported;
}

int cuMemHostUnregister(void) {
  return not_supported;
}

int cuMemHostGetDevicePointer_v2(void) {
  return not_supported;
}

int cuStreamWriteValue64_v2(void) {
  return not_supported;
}

int cuStreamWaitValue64_v2(void) {
  return not_supported;
}
