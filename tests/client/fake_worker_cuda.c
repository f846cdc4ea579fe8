#include "tests/client/fake_worker_cuda.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
  invalid_value = 1,
  no_context = 201,
  not_supported = 801,
  handles_max = 64,
  allocations_max = 16,
  allocation_bytes = 65536,
  stack_max = 8
};

struct access {
  int location_type;
  int location_id;
  int flags;
};

struct allocation {
  enum fake_worker_cuda_memory kind;
  int device;
  uint8_t *base;
  int fd;
};

static struct fake_worker_cuda_state state;
static int handle_fds[handles_max];
static struct allocation allocations[allocations_max];
static int allocation_count;
static char failing[64];
static int failing_code;
static int devices = 2;
static char contexts[2];
static _Thread_local int stack[stack_max];
static _Thread_local int depth;

void fake_worker_cuda_look(struct fake_worker_cuda_state *out) {
  *out = state;
  out->depth = depth;
}

void fake_worker_cuda_fail(const char *function, int code) {
  (void)snprintf(failing, sizeof failing, "%s", function);
  failing_code = code;
}

void fake_worker_cuda_devices(int count) {
  devices = count;
}

#define RETURN_FAILING(name)                                                                                         \
  do {                                                                                                               \
    if (strcmp(failing, name) == 0) {                                                                                \
      return failing_code;                                                                                           \
    }                                                                                                                \
  } while (0)

/* What wants a context of a GPU whose primary one is alive. */
#define RETURN_WITHOUT_CONTEXT()                                                                                     \
  do {                                                                                                               \
    if (depth == 0 || state.retained[stack[depth - 1]] == 0) {                                                       \
      return no_context;                                                                                             \
    }                                                                                                                \
  } while (0)

/* ---- devices and contexts ---------------------------------------------------------------------------------------
 */

EXPORT int cuInit(unsigned flags);
EXPORT int cuGetErrorName(int error, const char **name);
EXPORT int cuDeviceGetCount(int *count);
EXPORT int cuDeviceGet(int *device, int ordinal);
EXPORT int cuDeviceGetUuid_v2(uint8_t uuid[16], int device);
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device);
EXPORT int cuDevicePrimaryCtxRelease_v2(int device);
EXPORT int cuCtxPushCurrent_v2(const char *context);
EXPORT int cuCtxPopCurrent_v2(void **context);

int cuInit(unsigned flags) {
  return flags == 0 ? 0 : invalid_value;
}

int cuGetErrorName(int error, const char **name) {
  *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_A_TEST";
  return 0;
}

int cuDeviceGetCount(int *count) {
  *count = devices;
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetUuid_v2(uint8_t uuid[16], int device) {
  memset(uuid, 0x11 * device, 16);
  return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  RETURN_FAILING("cuDevicePrimaryCtxRetain");
  state.retained[device]++;
  *context = &contexts[device];
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  state.retained[device]--;
  return 0;
}

int cuCtxPushCurrent_v2(const char *context) {
  stack[depth++] = (int)(context - contexts);
  return 0;
}

int cuCtxPopCurrent_v2(void **context) {
  *context = &contexts[stack[--depth]];
  return 0;
}

/* ---- virtual memory ---------------------------------------------------------------------------------------------
 */

EXPORT int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t hint,
                               unsigned long long flags);
EXPORT int cuMemAddressFree(uint64_t address, size_t bytes);
EXPORT int cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type);
EXPORT int cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags);
EXPORT int cuMemRetainAllocationHandle(uint64_t *handle, const void *address);
EXPORT int cuMemRelease(uint64_t handle);
EXPORT int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
EXPORT int cuMemUnmap(uint64_t address, size_t bytes);
EXPORT int cuMemSetAccess(uint64_t address, size_t bytes, const struct access *access, size_t count);

static void *pointer_of(uint64_t address) {
  void *pointer = NULL;
  memcpy(&pointer, &address, sizeof pointer);
  return pointer;
}

/* As a driver: memory and addresses come in multiples of it. */
static bool is_granular(uint64_t bytes) {
  enum { granularity = 64 << 10 };
  return bytes != 0 && bytes % granularity == 0;
}

static uint64_t handle_new(int fd) {
  for (uint64_t i = 0; i < handles_max; i++) {
    if (handle_fds[i] == 0) {
      handle_fds[i] = dup(fd);
      state.handles++;
      return i + 1;
    }
  }
  abort();
}

int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t hint, unsigned long long flags) {
  RETURN_FAILING("cuMemAddressReserve");
  RETURN_WITHOUT_CONTEXT();
  void *map = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED || !is_granular(bytes) || alignment != 0 || hint != 0 || flags != 0) {
    return invalid_value;
  }
  state.reserved_bytes += (int64_t)bytes;
  *address = (uintptr_t)map;
  return 0;
}

int cuMemAddressFree(uint64_t address, size_t bytes) {
  state.reserved_bytes -= (int64_t)bytes;
  return munmap(pointer_of(address), bytes) == 0 ? 0 : invalid_value;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type) {
  RETURN_FAILING("cuMemImportFromShareableHandle");
  RETURN_WITHOUT_CONTEXT();
  *handle = handle_new((int)(intptr_t)os_handle);
  return type == 1 ? 0 : invalid_value;
}

int cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags) {
  RETURN_FAILING("cuMemExportToShareableHandle");
  *fd = dup(handle_fds[handle - 1]);
  return type == 1 && flags == 0 ? 0 : invalid_value;
}

int cuMemRelease(uint64_t handle) {
  (void)close(handle_fds[handle - 1]);
  handle_fds[handle - 1] = 0;
  state.handles--;
  return 0;
}

int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
  RETURN_FAILING("cuMemMap");
  RETURN_WITHOUT_CONTEXT();
  if (!is_granular(bytes) || offset != 0 || flags != 0 ||
      mmap(pointer_of(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle_fds[handle - 1], 0) == MAP_FAILED) {
    return invalid_value;
  }
  state.mapped_bytes += (int64_t)bytes;
  return 0;
}

int cuMemUnmap(uint64_t address, size_t bytes) {
  state.mapped_bytes -= (int64_t)bytes;
  return mmap(pointer_of(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED
             ? invalid_value
             : 0;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const struct access *access, size_t count) {
  RETURN_FAILING("cuMemSetAccess");
  RETURN_WITHOUT_CONTEXT();
  state.access = access->flags;
  state.access_device = access->location_id;
  const int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
  return count == 1 && access->location_type == 1 && mprotect(pointer_of(address), bytes, protection) == 0
             ? 0
             : invalid_value;
}

/* ---- allocations of the worker's own ----------------------------------------------------------------------------
 */

EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address);
EXPORT int cuPointerGetAttribute(void *out, int attribute, uint64_t address);
EXPORT int cuIpcGetMemHandle(uint8_t *out, uint64_t address);

void *fake_worker_cuda_allocate(enum fake_worker_cuda_memory kind, int device) {
  struct allocation *made = &allocations[allocation_count++];
  made->kind = kind;
  made->device = device;
  made->fd = memfd_create("gpu", MFD_CLOEXEC);
  if (made->fd < 0 || ftruncate(made->fd, allocation_bytes) != 0) {
    abort();
  }
  made->base = mmap(NULL, allocation_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made->fd, 0);
  return made->base;
}

static const struct allocation *find(uint64_t address) {
  for (int i = 0; i < allocation_count; i++) {
    if (address - (uintptr_t)allocations[i].base < allocation_bytes) {
      return &allocations[i];
    }
  }
  return NULL;
}

int cuMemRetainAllocationHandle(uint64_t *handle, const void *address) {
  const struct allocation *found = find((uintptr_t)address);
  if (found == NULL || (found->kind != FAKE_VMM && found->kind != FAKE_VMM_WITHOUT_HANDLE)) {
    return invalid_value;
  }
  *handle = handle_new(found->fd);
  return 0;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address) {
  RETURN_WITHOUT_CONTEXT();
  const struct allocation *found = find(address);
  if (found == NULL) {
    return invalid_value;
  }
  *base = (uintptr_t)found->base;
  *bytes = allocation_bytes;
  return 0;
}

static void put(void *out, uint64_t value, size_t bytes) {
  memcpy(out, &value, bytes);
}

int cuPointerGetAttribute(void *out, int attribute, uint64_t address) {
  RETURN_WITHOUT_CONTEXT();
  const struct allocation *found = find(address);
  if (found == NULL) {
    return invalid_value;
  }
  switch (attribute) {
  case 2:
    put(out, 2, 4);
    return 0;
  case 9:
    put(out, (uint64_t)found->device, 4);
    return 0;
  case 10:
    put(out, found->kind == FAKE_MALLOC, 1);
    return 0;
  case 14:
    put(out, found->kind == FAKE_VMM, 8);
    return 0;
  case 18:
    RETURN_FAILING("mapping attributes");
    put(out, allocation_bytes, 8);
    return 0;
  case 19:
    put(out, (uintptr_t)found->base, 8);
    return 0;
  default:
    return not_supported;
  }
}

int cuIpcGetMemHandle(uint8_t *out, uint64_t address) {
  RETURN_FAILING("cuIpcGetMemHandle");
  const struct allocation *found = find(address);
  if (found == NULL || address != (uintptr_t)found->base) {
    return invalid_value;
  }
  memset(out, 0x40 + found->device, 64);
  return 0;
}

/* ---- host memory and streams ------------------------------------------------------------------------------------
 */

EXPORT int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags);
EXPORT int cuMemHostUnregister(void *memory);
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *address, void *memory, unsigned flags);
EXPORT int cuStreamWriteValue64_v2(void *stream, uint64_t address, uint64_t value, unsigned flags);
EXPORT int cuStreamWaitValue64_v2(void *stream, uint64_t address, uint64_t value, unsigned flags);

int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
  RETURN_FAILING("cuMemHostRegister");
  RETURN_WITHOUT_CONTEXT();
  state.registered++;
  return memory != NULL && bytes == 65536 && flags == 3 ? 0 : invalid_value;
}

int cuMemHostUnregister(void *memory) {
  state.registered--;
  return memory != NULL ? 0 : invalid_value;
}

int cuMemHostGetDevicePointer_v2(uint64_t *address, void *memory, unsigned flags) {
  RETURN_FAILING("cuMemHostGetDevicePointer");
  *address = (uintptr_t)memory;
  return flags == 0 ? 0 : invalid_value;
}

int cuStreamWriteValue64_v2(void *stream, uint64_t address, uint64_t value, unsigned flags) {
  RETURN_FAILING("cuStreamWriteValue64");
  state.stream = stream;
  __atomic_store_n((uint64_t *)pointer_of(address), value, __ATOMIC_RELEASE);
  return flags == 0 ? 0 : invalid_value;
}

int cuStreamWaitValue64_v2(void *stream, uint64_t address, uint64_t value, unsigned flags) {
  RETURN_FAILING("cuStreamWaitValue64");
  state.stream = stream;
  state.waited_address = address;
  state.waited_value = value;
  return flags == 0 ? 0 : invalid_value;
}
