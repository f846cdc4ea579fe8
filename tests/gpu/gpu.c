/* See gpu.h. Driver functions are looked up at run time, so that the programs link where there is no driver. */
#include "tests/gpu/gpu.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/launch.h"

enum { driver_version = 12000 }; /* whose functions are looked up */

static const uint64_t chunk_bytes = UINT64_C(1) << 30; /* as large as the executor's */
static const uint64_t guard_bytes = UINT64_C(1) << 30;

static struct {
  PFN_cuMemAddressReserve_v10020 reserve;
  PFN_cuMemAddressFree_v10020 unreserve;
  PFN_cuMemCreate_v10020 create;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuMemSetAccess_v10020 set_access;
  PFN_cuMemGetAllocationGranularity_v10020 granularity;
} driver;
static uint64_t granularity_bytes;

static const CUmemAllocationProp memory_kind = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED,
    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
};

void gpu_check_at(cudaError_t error, const char *call, const char *file, int line) {
  if (error != cudaSuccess) {
    (void)fprintf(stderr, "%s:%d: %s: %s: %s\n", file, line, call, cudaGetErrorName(error),
                  cudaGetErrorString(error));
    exit(1);
  }
}

static void driver_check(CUresult result, const char *what, uint64_t bytes) {
  if (result != CUDA_SUCCESS) {
    (void)fprintf(stderr, "%s of %llu bytes: CUDA driver error %d\n", what, (unsigned long long)bytes, (int)result);
    exit(1);
  }
}

/* *function: a pointer to a function, which C does not let a void pointer become otherwise. */
static void find(const char *name, void *function) {
  void *address = NULL;
  enum cudaDriverEntryPointQueryResult result;
  gpu_check(cudaGetDriverEntryPointByVersion(name, &address, driver_version, cudaEnableDefault, &result));
  if (address == NULL) {
    (void)fprintf(stderr, "the driver has no %s\n", name);
    exit(1);
  }
  memcpy(function, &address, sizeof(address));
}

void gpu_open(void) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)fprintf(stderr, "no GPU: %s\n", error != cudaSuccess ? cudaGetErrorString(error) : "none is visible");
    exit(gpu_status_none);
  }
  gpu_check(cudaSetDevice(0));
  gpu_check(cudaFree(NULL));
  find("cuMemAddressReserve", &driver.reserve);
  find("cuMemAddressFree", &driver.unreserve);
  find("cuMemCreate", &driver.create);
  find("cuMemRelease", &driver.release);
  find("cuMemMap", &driver.map);
  find("cuMemUnmap", &driver.unmap);
  find("cuMemSetAccess", &driver.set_access);
  find("cuMemGetAllocationGranularity", &driver.granularity);
  size_t granularity = 0;
  driver_check(driver.granularity(&granularity, &memory_kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "granularity", 0);
  granularity_bytes = granularity;
  gpu_check(kvp_cuda_kernels_load());
}

static uint64_t chunk_at(const struct gpu_memory *memory, uint64_t offset) {
  uint64_t left = memory->bytes - offset;
  return left < chunk_bytes ? left : chunk_bytes;
}

struct gpu_memory gpu_memory_make(uint64_t bytes) {
  struct gpu_memory memory = {.bytes = (bytes + granularity_bytes - 1) / granularity_bytes * granularity_bytes};
  memory.reserved_bytes = memory.bytes + 2 * guard_bytes;
  CUdeviceptr range = 0;
  driver_check(driver.reserve(&range, memory.reserved_bytes, 0, 0, 0), "cuMemAddressReserve", memory.reserved_bytes);
  CUdeviceptr begin = range + guard_bytes;
  for (uint64_t offset = 0; offset < memory.bytes; offset += chunk_bytes) {
    uint64_t size = chunk_at(&memory, offset);
    CUmemGenericAllocationHandle handle = 0;
    driver_check(driver.create(&handle, size, &memory_kind, 0), "cuMemCreate", size);
    driver_check(driver.map(begin + offset, size, 0, handle, 0), "cuMemMap", size);
    driver_check(driver.release(handle), "cuMemRelease", size);
  }
  const CUmemAccessDesc access = {.location = memory_kind.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (memory.bytes != 0) {
    driver_check(driver.set_access(begin, memory.bytes, &access, 1), "cuMemSetAccess", memory.bytes);
  }
  memcpy(&memory.base, &begin, sizeof(memory.base));
  return memory;
}

void gpu_memory_free(struct gpu_memory *memory) {
  CUdeviceptr begin = (CUdeviceptr)(uintptr_t)memory->base;
  gpu_check(cudaDeviceSynchronize());
  for (uint64_t offset = 0; offset < memory->bytes; offset += chunk_bytes) {
    uint64_t size = chunk_at(memory, offset);
    driver_check(driver.unmap(begin + offset, size), "cuMemUnmap", size);
  }
  driver_check(driver.unreserve(begin - guard_bytes, memory->reserved_bytes), "cuMemAddressFree",
               memory->reserved_bytes);
  *memory = (struct gpu_memory){0};
}

uint64_t gpu_bytes_free(void) {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  gpu_check(cudaMemGetInfo(&free_bytes, &total_bytes));
  return free_bytes;
}

double gpu_seconds(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}
