/* The driver of the CUDA in host memory: chunks as descriptors, and the functions by their names.
 *
 * A chunk is a memfd whose name says whose memory it is: fake-cuda:N of GPU N, fake-cuda:host of none. No other descriptor
 * is one.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/fake_cuda.h"
#include "tests/unit/fake_cuda_parts.h"

enum { handles_max = 4096, granularity = 4 << 10, of_host = -1 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle {
  int fd;
  int device;
  uint64_t bytes; /* 0: it is none */
} handles[handles_max];
static atomic_ullong reserved_bytes;
static atomic_ullong mapped_bytes;

static CUresult fake_reserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
  (void)alignment;
  (void)address;
  (void)flags;
  RETURN_INJECTED_RESULT("cuMemAddressReserve");
  fake_check(bytes % granularity == 0, "a range that is no whole number of pieces");
  void *map = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  fake_check(map != MAP_FAILED, "no addresses");
  *out = (CUdeviceptr)(uintptr_t)map;
  atomic_fetch_add(&reserved_bytes, bytes);
  return CUDA_SUCCESS;
}

static CUresult fake_address_free(CUdeviceptr address, size_t bytes) {
  atomic_fetch_sub(&reserved_bytes, bytes);
  return munmap(fake_pointer(address), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The handle is an index + 1. */
static CUresult handle_add(CUmemGenericAllocationHandle *out, int fd, int device, uint64_t bytes) {
  (void)pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < handles_max && handles[i].bytes != 0) {
    i++;
  }
  fake_check(i < handles_max && fd >= 0, "no handle");
  handles[i] = (struct handle){.fd = fd, .device = device, .bytes = bytes};
  (void)pthread_mutex_unlock(&lock);
  *out = i + 1;
  return CUDA_SUCCESS;
}

static CUresult fake_create(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
  (void)flags;
  RETURN_INJECTED_RESULT("cuMemCreate");
  fake_check(bytes > 0 && bytes % granularity == 0, "a chunk that is no whole number of pieces");
  fake_check(properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
             "a chunk nobody can hand over");
  if (!fake_use_bytes(bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  char name[32];
  (void)snprintf(name, sizeof name, "fake-cuda:%d", properties->location.id);
  int fd = memfd_create(name, MFD_CLOEXEC);
  fake_check(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "no memory");
  return handle_add(out, fd, properties->location.id, bytes);
}

static CUresult fake_release(CUmemGenericAllocationHandle handle) {
  fake_check(close(handles[handle - 1].fd) == 0, "released twice");
  (void)pthread_mutex_lock(&lock);
  handles[handle - 1].bytes = 0;
  (void)pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static CUresult fake_map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  (void)offset;
  (void)flags;
  RETURN_INJECTED_RESULT("cuMemMap");
  fake_check(bytes > 0 && bytes % granularity == 0, "a mapping that is no whole number of pieces");
  if (bytes > handles[handle - 1].bytes) {
    return CUDA_ERROR_NOT_SUPPORTED; /* as driver 580 has it */
  }
  void *map = mmap(fake_pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle - 1].fd, 0);
  fake_check(map != MAP_FAILED, "not mapped");
  fake_range_add(RANGE_DEVICE, fake_pointer(address), bytes, NULL);
  atomic_fetch_add(&mapped_bytes, bytes);
  return CUDA_SUCCESS;
}

static CUresult fake_set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  RETURN_INJECTED_RESULT("cuMemSetAccess");
  fake_check(count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "another access");
  return mprotect(fake_pointer(address), bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS
                                                                             : CUDA_ERROR_INVALID_VALUE;
}

/* Whole mappings, one or several. */
static CUresult fake_unmap(CUdeviceptr address, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    done += fake_range_remove(fake_pointer(address + done));
  }
  void *map =
      mmap(fake_pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  fake_check(map != MAP_FAILED, "not unmapped");
  fake_unuse_bytes(bytes); /* as if nobody else held it */
  atomic_fetch_sub(&mapped_bytes, bytes);
  return CUDA_SUCCESS;
}

static CUresult fake_export(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                            unsigned long long flags) {
  (void)flags;
  fake_check(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "another kind of handle");
  const int fd = fcntl(handles[handle - 1].fd, F_DUPFD_CLOEXEC, 0);
  memcpy(out, &fd, sizeof fd);
  return fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* Whose memory a descriptor is; false: it is no chunk. */
static bool chunk_of(int fd, int *device) {
  char path[64], name[64] = "", *end = NULL;
  const char *const prefix = "/memfd:fake-cuda:";
  (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  if (readlink(path, name, sizeof name - 1) < 0 || strncmp(name, prefix, strlen(prefix)) != 0) {
    return false;
  }
  const char *of = name + strlen(prefix);
  *device = (int)strtol(of, &end, 10);
  if (end == of) {
    *device = of_host;
  }
  return true;
}

static CUresult fake_import(CUmemGenericAllocationHandle *out, void *descriptor, CUmemAllocationHandleType type) {
  fake_check(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "another kind of handle");
  RETURN_INJECTED_RESULT("cuMemImportFromShareableHandle");
  struct stat stat;
  int device = 0;
  const int fd = fcntl((int)(uintptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
  if (fd < 0 || !chunk_of(fd, &device) || fstat(fd, &stat) != 0 || stat.st_size <= 0) {
    (void)close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return handle_add(out, fd, device, ((uint64_t)stat.st_size + granularity - 1) / granularity * granularity);
}

static CUresult fake_properties(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle) {
  RETURN_INJECTED_RESULT("cuMemGetAllocationPropertiesFromHandle");
  const int device = handles[handle - 1].device;
  *out = (CUmemAllocationProp){
      .type = CU_MEM_ALLOCATION_TYPE_PINNED,
      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
      .location = {.type = device == of_host ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE,
                   .id = device == of_host ? 0 : device},
  };
  return CUDA_SUCCESS;
}

void fake_cuda_look(struct fake_cuda_state *out) {
  *out = (struct fake_cuda_state){.reserved_bytes = atomic_load(&reserved_bytes),
                                  .mapped_bytes = atomic_load(&mapped_bytes),
                                  .ipc_allocations = fake_ipc_count()};
  (void)pthread_mutex_lock(&lock);
  for (size_t i = 0; i < handles_max; i++) {
    out->handles += handles[i].bytes != 0;
  }
  (void)pthread_mutex_unlock(&lock);
}

static CUresult fake_granularity(size_t *out, const CUmemAllocationProp *properties,
                                 CUmemAllocationGranularity_flags option) {
  (void)properties;
  (void)option;
  *out = granularity;
  return CUDA_SUCCESS;
}

static CUresult fake_attribute(int *out, CUdevice_attribute attribute, CUdevice device) {
  (void)attribute;
  (void)device;
  *out = 1;
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  (void)version;
  (void)flags;
  const struct {
    const char *symbol;
    void (*function)(void);
  } functions[] = {
      {"cuMemAddressReserve", (void (*)(void))fake_reserve},
      {"cuMemAddressFree", (void (*)(void))fake_address_free},
      {"cuMemCreate", (void (*)(void))fake_create},
      {"cuMemRelease", (void (*)(void))fake_release},
      {"cuMemMap", (void (*)(void))fake_map},
      {"cuMemUnmap", (void (*)(void))fake_unmap},
      {"cuMemSetAccess", (void (*)(void))fake_set_access},
      {"cuMemExportToShareableHandle", (void (*)(void))fake_export},
      {"cuMemImportFromShareableHandle", (void (*)(void))fake_import},
      {"cuMemGetAllocationPropertiesFromHandle", (void (*)(void))fake_properties},
      {"cuMemGetAllocationGranularity", (void (*)(void))fake_granularity},
      {"cuMemGetAddressRange", (void (*)(void))fake_address_range},
      {"cuPointerGetAttribute", (void (*)(void))fake_pointer_attribute},
      {"cuIpcOpenMemHandle", (void (*)(void))fake_ipc_open},
      {"cuIpcCloseMemHandle", (void (*)(void))fake_ipc_close},
      {"cuDeviceGetAttribute", (void (*)(void))fake_attribute},
  };
  *out = NULL;
  *result = cudaDriverEntryPointSymbolNotFound;
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    if (strcmp(functions[i].symbol, symbol) == 0) {
      memcpy(out, &functions[i].function, sizeof *out);
      *result = cudaDriverEntryPointSuccess;
    }
  }
  return cudaSuccess;
}
