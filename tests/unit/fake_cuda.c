/* A CUDA runtime, driver and kernels in host memory: behind it, the CUDA backend runs where there is no GPU.
 *
 * Streams are worked off by one thread, each in order, turn by turn, so that a launch returns before it has been done.
 * Device memory and the device's side of host memory are ranges that this file knows; whatever a kernel or a copy is
 * given must lie in one of the right kind, or the process aborts. The device's side of host memory is another mapping
 * of the same pages. Environment: FAKE_CUDA_FAULT=N makes the Nth kernel lose the context, FAKE_CUDA_BYTES is the
 * size of the device, FAKE_CUDA_ERROR=NAME:CODE lets the function of that name fail, FAKE_CUDA_READ_ONLY=0 takes no
 * read-only host memory, FAKE_CUDA_LAUNCHES=FILE (8 bytes) gets the number of launches of kernels that are an op's.
 */
#include <assert.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/cuda/fault.h"
#include "kernels/cuda/launch.h"
#include "server/executor/clock.h"
#include "tests/unit/fake_cuda.h"

enum {
  ranges_max = 4096,
  handles_max = 4096,
  granularity = 4 << 10,
  sm_count = 132,
  clock_ahead_ns = 123456789, /* of the GPU's clock before ours */
};

static void check(bool condition, const char *what) {
  if (!condition) {
    (void)fprintf(stderr, "fake_cuda: %s\n", what);
    abort();
  }
}

/* ---- state ---- */

enum range_kind { RANGE_FREE, RANGE_DEVICE, RANGE_PINNED, RANGE_MAPPED };

struct range {
  enum range_kind kind;
  uint8_t *begin;
  uint64_t bytes;
  void *host; /* of RANGE_MAPPED: the other mapping */
};

struct work {
  void (*run)(void *arguments);
  struct work *next;
  _Alignas(16) uint8_t arguments[];
};

struct CUstream_st {
  struct work *first;
  struct work *last;
  bool runs; /* its first work is being done */
  struct CUstream_st *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct range ranges[ranges_max];
static struct CUstream_st *streams;
static bool has_worker;
static bool is_held;
static uint64_t kernels_until_fault;
static uint64_t used_bytes;
static atomic_int sticky;
static int handle_fds[handles_max];
static uint64_t handle_bytes[handles_max];
static _Thread_local bool has_device;

static cudaError_t injected(const char *function) {
  const char *text = getenv("FAKE_CUDA_ERROR");
  const size_t length = strlen(function);
  if (text != NULL && strncmp(text, function, length) == 0 && text[length] == ':') {
    return (cudaError_t)strtol(text + length + 1, NULL, 10);
  }
  return (cudaError_t)atomic_load(&sticky);
}

#define RETURN_INJECTED(function)                                                                                    \
  do {                                                                                                               \
    const cudaError_t injected_code = injected(function);                                                            \
    if (injected_code != cudaSuccess) {                                                                              \
      return injected_code;                                                                                          \
    }                                                                                                                \
  } while (0)

static uint64_t total_bytes(void) {
  const char *text = getenv("FAKE_CUDA_BYTES");
  return text == NULL ? UINT64_C(1) << 30 : strtoull(text, NULL, 10);
}

static void range_add(enum range_kind kind, void *begin, uint64_t bytes, void *host) {
  (void)pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < ranges_max && ranges[i].kind != RANGE_FREE) {
    i++;
  }
  check(i < ranges_max, "too many ranges");
  ranges[i] = (struct range){.kind = kind, .begin = begin, .bytes = bytes, .host = host};
  (void)pthread_mutex_unlock(&lock);
}

static struct range range_remove(const void *begin) {
  (void)pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < ranges_max && (ranges[i].kind == RANGE_FREE || ranges[i].begin != begin)) {
    i++;
  }
  check(i < ranges_max, "no such range");
  const struct range range = ranges[i];
  ranges[i].kind = RANGE_FREE;
  (void)pthread_mutex_unlock(&lock);
  return range;
}

/* Neighbouring chunks are one range for whoever uses them. */
static bool in_ranges(const void *pointer, uint64_t bytes, enum range_kind kind) {
  const uint8_t *begin = pointer;
  bool found = bytes == 0;
  (void)pthread_mutex_lock(&lock);
  for (size_t i = 0; i < ranges_max && bytes > 0; i++) {
    const struct range *range = &ranges[i];
    if (range->kind == kind && begin >= range->begin && begin < range->begin + range->bytes) {
      const uint64_t inside = (uint64_t)(range->begin + range->bytes - begin);
      if (inside >= bytes) {
        found = true;
        break;
      }
      begin += inside;
      bytes -= inside;
      i = SIZE_MAX; /* from the first one again */
    }
  }
  (void)pthread_mutex_unlock(&lock);
  return found;
}

static void check_device(const void *pointer, uint64_t bytes, const char *what) {
  check(in_ranges(pointer, bytes, RANGE_DEVICE), what);
}

static void check_visible(const void *pointer, uint64_t bytes, const char *what) {
  check(in_ranges(pointer, bytes, RANGE_DEVICE) || in_ranges(pointer, bytes, RANGE_MAPPED), what);
}

/* ---- streams ---- */

static struct CUstream_st *stream_with_work(void) {
  struct CUstream_st *stream = streams;
  while (stream != NULL && stream->first == NULL) {
    stream = stream->next;
  }
  return stream;
}

static void *worker_main(void *argument) {
  (void)argument;
  (void)pthread_mutex_lock(&lock);
  for (;;) {
    struct CUstream_st *stream = is_held ? NULL : stream_with_work();
    if (stream == NULL) {
      (void)pthread_cond_wait(&changed, &lock);
      continue;
    }
    struct work *work = stream->first;
    stream->runs = true;
    (void)pthread_mutex_unlock(&lock);
    if (atomic_load(&sticky) == 0) {
      work->run(work->arguments);
    }
    (void)pthread_mutex_lock(&lock);
    stream->runs = false;
    stream->first = work->next;
    free(work);
    (void)pthread_cond_broadcast(&changed);
  }
  return NULL;
}

void fake_cuda_hold(bool hold) {
  (void)pthread_mutex_lock(&lock);
  is_held = hold;
  (void)pthread_cond_broadcast(&changed);
  (void)pthread_mutex_unlock(&lock);
}

void fake_cuda_fault(void) {
  (void)pthread_mutex_lock(&lock);
  kernels_until_fault = 1;
  (void)pthread_mutex_unlock(&lock);
}

static cudaError_t enqueue(cudaStream_t stream, void (*run)(void *arguments), const void *arguments, size_t bytes) {
  check(stream != NULL, "the default stream is used");
  check(has_device, "a thread without a device");
  if (atomic_load(&sticky) != 0) {
    return (cudaError_t)atomic_load(&sticky);
  }
  struct work *work = malloc(sizeof *work + bytes);
  check(work != NULL, "no memory");
  work->run = run;
  work->next = NULL;
  memcpy(work->arguments, arguments, bytes);
  (void)pthread_mutex_lock(&lock);
  if (stream->first == NULL) {
    stream->first = work;
  } else {
    stream->last->next = work;
  }
  stream->last = work;
  (void)pthread_cond_broadcast(&changed);
  (void)pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags) {
  RETURN_INJECTED("cudaStreamCreateWithFlags");
  check(flags == cudaStreamNonBlocking, "a blocking stream");
  struct CUstream_st *stream = calloc(1, sizeof *stream);
  check(stream != NULL, "no memory");
  (void)pthread_mutex_lock(&lock);
  if (!has_worker) {
    pthread_t thread;
    const char *fault = getenv("FAKE_CUDA_FAULT");
    kernels_until_fault = fault == NULL ? 0 : strtoull(fault, NULL, 10);
    check(pthread_create(&thread, NULL, worker_main, NULL) == 0, "no thread");
    (void)pthread_detach(thread);
    has_worker = true;
  }
  stream->next = streams;
  streams = stream;
  (void)pthread_mutex_unlock(&lock);
  *out = stream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  (void)pthread_mutex_lock(&lock);
  while (stream->first != NULL || stream->runs) {
    (void)pthread_cond_wait(&changed, &lock);
  }
  struct CUstream_st **link = &streams;
  while (*link != stream) {
    link = &(*link)->next;
  }
  *link = stream->next;
  (void)pthread_mutex_unlock(&lock);
  free(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  (void)pthread_mutex_lock(&lock);
  const bool is_idle = stream->first == NULL;
  (void)pthread_mutex_unlock(&lock);
  RETURN_INJECTED("cudaStreamQuery");
  return is_idle ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  (void)pthread_mutex_lock(&lock);
  while (stream->first != NULL) {
    (void)pthread_cond_wait(&changed, &lock);
  }
  (void)pthread_mutex_unlock(&lock);
  return (cudaError_t)atomic_load(&sticky);
}

/* ---- device ---- */

cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  RETURN_INJECTED("cudaGetDeviceCount");
  const char *order = getenv("CUDA_DEVICE_ORDER");
  check(order != NULL && strcmp(order, "PCI_BUS_ID") == 0, "devices are counted in no order");
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  memset(out, 0, sizeof *out);
  (void)snprintf(out->name, sizeof out->name, "Fake GPU");
  memset(out->uuid.bytes, 0x10 + device, sizeof out->uuid.bytes);
  out->major = 9;
  out->multiProcessorCount = sm_count;
  out->memPitch = 8192; /* so that wider strides are tried */
  out->totalGlobalMem = total_bytes();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  const char *read_only = getenv("FAKE_CUDA_READ_ONLY");
  *value = attribute == cudaDevAttrHostRegisterReadOnlySupported && (read_only == NULL || read_only[0] != '0');
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  RETURN_INJECTED("cudaSetDevice");
  check(device >= 0 && device < 2, "no such device");
  has_device = true;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
  return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t code) {
  static _Thread_local char name[32];
  (void)snprintf(name, sizeof name, "fakeError%d", (int)code);
  return name;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  check(has_device, "a thread without a device");
  (void)pthread_mutex_lock(&lock);
  *total = total_bytes();
  *free_bytes = used_bytes < *total ? *total - used_bytes : 0;
  (void)pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **out, size_t bytes) {
  RETURN_INJECTED("cudaMalloc");
  *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
  check(*out != NULL, "no memory");
  memset(*out, 0xCD, bytes);
  range_add(RANGE_DEVICE, *out, bytes, NULL);
  return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
  if (memory != NULL) {
    (void)range_remove(memory);
    free(memory);
  }
  RETURN_INJECTED("cudaFree");
  return cudaSuccess;
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
  check_device(memory, bytes, "cudaMemset of no device memory");
  memset(memory, value, bytes);
  return cudaSuccess;
}

/* A second mapping of the same pages. */
static cudaError_t host_map(void *host, size_t bytes) {
  void *mapped = mremap(host, 0, bytes, MREMAP_MAYMOVE);
  if (mapped == MAP_FAILED) {
    return cudaErrorInvalidValue;
  }
  range_add(RANGE_MAPPED, mapped, bytes, host);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned int flags) {
  RETURN_INJECTED("cudaHostAlloc");
  check((flags & cudaHostAllocMapped) != 0, "host memory that is not mapped");
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  check(memory != MAP_FAILED, "no memory");
  range_add(RANGE_PINNED, memory, bytes, NULL);
  *out = memory;
  return host_map(memory, bytes);
}

static struct range mapped_find(const void *host) {
  struct range range = {.kind = RANGE_FREE};
  (void)pthread_mutex_lock(&lock);
  for (size_t i = 0; i < ranges_max; i++) {
    if (ranges[i].kind == RANGE_MAPPED && ranges[i].host == host) {
      range = ranges[i];
    }
  }
  (void)pthread_mutex_unlock(&lock);
  return range;
}

static void mapped_remove(const void *host) {
  const struct range range = mapped_find(host);
  check(range.kind == RANGE_MAPPED, "host memory that was not mapped");
  (void)range_remove(range.begin);
  (void)munmap(range.begin, range.bytes);
}

cudaError_t cudaFreeHost(void *host) {
  if (host == NULL) {
    return cudaSuccess;
  }
  mapped_remove(host);
  const struct range range = range_remove(host);
  (void)munmap(host, range.bytes);
  return cudaSuccess;
}

static bool is_writable(const void *memory) {
  FILE *maps = fopen("/proc/self/maps", "re");
  check(maps != NULL, "no /proc");
  char line[512];
  bool writable = false;
  while (fgets(line, sizeof line, maps) != NULL) {
    char *rest = line;
    const uintptr_t begin = strtoul(rest, &rest, 16);
    const uintptr_t end = strtoul(rest + 1, &rest, 16);
    if ((uintptr_t)memory >= begin && (uintptr_t)memory < end) {
      writable = rest[2] == 'w';
    }
  }
  (void)fclose(maps);
  return writable;
}

cudaError_t cudaHostRegister(void *host, size_t bytes, unsigned int flags) {
  RETURN_INJECTED("cudaHostRegister");
  check((uintptr_t)host % 4096 == 0 && bytes % 4096 == 0, "host memory is no whole number of pages");
  check((flags & cudaHostRegisterMapped) != 0, "host memory that is not mapped");
  int takes_read_only = 0;
  (void)cudaDeviceGetAttribute(&takes_read_only, cudaDevAttrHostRegisterReadOnlySupported, 0);
  if ((flags & cudaHostRegisterReadOnly) != 0 ? takes_read_only == 0 : !is_writable(host)) {
    return cudaErrorNotSupported;
  }
  return host_map(host, bytes);
}

cudaError_t cudaHostUnregister(void *host) {
  mapped_remove(host);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned int flags) {
  (void)flags;
  const struct range range = mapped_find(host);
  check(range.kind == RANGE_MAPPED, "host memory that was not mapped");
  *out = range.begin;
  return cudaSuccess;
}

/* ---- copies ---- */

struct copy {
  uint8_t *to;
  const uint8_t *from; /* NULL: a fill */
  uint64_t to_pitch;
  uint64_t from_pitch;
  uint64_t row_bytes;
  uint64_t row_count;
  int fill;
};

static void copy_run(void *arguments) {
  const struct copy *copy = arguments;
  for (uint64_t row = 0; row < copy->row_count; row++) {
    uint8_t *to = copy->to + row * copy->to_pitch;
    if (copy->from == NULL) {
      memset(to, copy->fill, copy->row_bytes);
    } else {
      memcpy(to, copy->from + row * copy->from_pitch, copy->row_bytes);
    }
  }
}

static uint64_t span_bytes(uint64_t pitch, uint64_t row_bytes, uint64_t row_count) {
  return (row_count - 1) * pitch + row_bytes;
}

static cudaError_t copy_enqueue(const struct copy *copy, enum cudaMemcpyKind kind, cudaStream_t stream) {
  check(copy->row_bytes > 0 && copy->row_count > 0, "an empty copy");
  check(copy->row_count == 1 || (copy->to_pitch <= 8192 && copy->from_pitch <= 8192), "a pitch beyond memPitch");
  check(copy->row_count == 1 || copy->row_bytes <= copy->to_pitch, "rows wider than their pitch");
  const bool to_device = kind == cudaMemcpyHostToDevice;
  check(to_device || kind == cudaMemcpyDeviceToHost, "a copy of another kind");
  check(in_ranges(copy->to, span_bytes(copy->to_pitch, copy->row_bytes, copy->row_count),
                  to_device ? RANGE_DEVICE : RANGE_PINNED),
        "a copy to where it doesn't belong");
  check(copy->from == NULL || in_ranges(copy->from, span_bytes(copy->from_pitch, copy->row_bytes, copy->row_count),
                                        to_device ? RANGE_PINNED : RANGE_DEVICE),
        "a copy from where it doesn't belong");
  return enqueue(stream, copy_run, copy, sizeof *copy);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  const struct copy copy = {.to = to, .from = from, .row_bytes = bytes, .row_count = 1};
  return copy_enqueue(&copy, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  const struct copy copy = {.to = to,
                            .from = from,
                            .to_pitch = to_pitch,
                            .from_pitch = from_pitch,
                            .row_bytes = width,
                            .row_count = height};
  return copy_enqueue(&copy, kind, stream);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  const struct copy copy = {.to = to, .row_bytes = bytes, .row_count = 1, .fill = value};
  return copy_enqueue(&copy, cudaMemcpyHostToDevice, stream);
}

cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  const struct copy copy = {.to = to, .to_pitch = pitch, .row_bytes = width, .row_count = height, .fill = value};
  return copy_enqueue(&copy, cudaMemcpyHostToDevice, stream);
}

/* ---- driver ---- */

static void *pointer_of(CUdeviceptr address) {
  void *pointer = NULL;
  memcpy(&pointer, &address, sizeof pointer);
  return pointer;
}

static CUresult fake_reserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
  (void)alignment;
  (void)address;
  (void)flags;
  check(bytes % granularity == 0, "a range that is no whole number of pieces");
  void *map = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  check(map != MAP_FAILED, "no addresses");
  *out = (CUdeviceptr)(uintptr_t)map;
  return CUDA_SUCCESS;
}

static CUresult fake_address_free(CUdeviceptr address, size_t bytes) {
  return munmap(pointer_of(address), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The handle is an index + 1. */
static CUresult handle_add(CUmemGenericAllocationHandle *out, int fd, uint64_t bytes) {
  (void)pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < handles_max && handle_bytes[i] != 0) {
    i++;
  }
  check(i < handles_max && fd >= 0, "no handle");
  handle_fds[i] = fd;
  handle_bytes[i] = bytes;
  (void)pthread_mutex_unlock(&lock);
  *out = i + 1;
  return CUDA_SUCCESS;
}

static CUresult fake_create(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
  (void)flags;
  const cudaError_t code = injected("cuMemCreate");
  if (code != cudaSuccess) {
    return (CUresult)code;
  }
  check(bytes > 0 && bytes % granularity == 0, "a chunk that is no whole number of pieces");
  check(properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "a chunk nobody can hand over");
  (void)pthread_mutex_lock(&lock);
  const bool fits = used_bytes + bytes <= total_bytes();
  used_bytes += fits ? bytes : 0;
  (void)pthread_mutex_unlock(&lock);
  if (!fits) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  check(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "no memory");
  return handle_add(out, fd, bytes);
}

static CUresult fake_release(CUmemGenericAllocationHandle handle) {
  check(close(handle_fds[handle - 1]) == 0, "released twice");
  (void)pthread_mutex_lock(&lock);
  handle_bytes[handle - 1] = 0;
  (void)pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static CUresult fake_map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  (void)offset;
  (void)flags;
  if (handle_bytes[handle - 1] != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  void *map = mmap(pointer_of(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle_fds[handle - 1], 0);
  check(map != MAP_FAILED, "not mapped");
  range_add(RANGE_DEVICE, pointer_of(address), bytes, NULL);
  return CUDA_SUCCESS;
}

static CUresult fake_set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  check(count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "another access");
  return mprotect(pointer_of(address), bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Whole mappings, one or several. */
static CUresult fake_unmap(CUdeviceptr address, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    done += range_remove(pointer_of(address + done)).bytes;
  }
  void *map =
      mmap(pointer_of(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  check(map != MAP_FAILED, "not unmapped");
  (void)pthread_mutex_lock(&lock);
  used_bytes -= bytes < used_bytes ? bytes : used_bytes; /* as if nobody else held it */
  (void)pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static CUresult fake_export(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                            unsigned long long flags) {
  (void)flags;
  check(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "another kind of handle");
  const int fd = fcntl(handle_fds[handle - 1], F_DUPFD_CLOEXEC, 0);
  memcpy(out, &fd, sizeof fd);
  return fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult fake_import(CUmemGenericAllocationHandle *out, void *descriptor, CUmemAllocationHandleType type) {
  check(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "another kind of handle");
  struct stat stat;
  const int fd = fcntl((int)(uintptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
  if (fd < 0 || fstat(fd, &stat) != 0 || stat.st_size <= 0) {
    (void)close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return handle_add(out, fd, ((uint64_t)stat.st_size + granularity - 1) / granularity * granularity);
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
      {"cuMemGetAllocationGranularity", (void (*)(void))fake_granularity},
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

/* ---- kernels ---- */

static uint64_t gpu_clock_ns(void) {
  return kvp_clock_ns() + clock_ahead_ns;
}

static bool kernel_begin(struct kvp_cuda_counts *counts) {
  (void)pthread_mutex_lock(&lock);
  const bool faults = kernels_until_fault > 0 && --kernels_until_fault == 0;
  (void)pthread_mutex_unlock(&lock);
  if (faults) {
    atomic_store(&sticky, cudaErrorIllegalAddress);
    return false;
  }
  if (counts != NULL) {
    static const struct kvp_cuda_counts zero;
    check(memcmp(counts, &zero, sizeof zero) == 0, "counts that are not zero");
    counts->started_ns = gpu_clock_ns();
  }
  return true;
}

cudaError_t kvp_cuda_kernels_load(void) {
  RETURN_INJECTED("kvp_cuda_kernels_load");
  return cudaSuccess;
}

/* What the host's kernel counted, as a GPU's: bytes where the real ones keep other things. */
static void counts_put(struct kvp_cuda_counts *found, const struct kvp_op_counts *counts) {
  found->rows_stored += counts->rows_stored;
  found->rows_loaded += counts->rows_loaded;
  found->rows_skipped += counts->rows_skipped;
  found->rows_rejected += counts->rows_rejected;
  found->rows_nonfinite += counts->rows_nonfinite;
  found->groups_saturated += counts->groups_saturated;
  found->rows_zeroed += counts->bytes_read;
  found->reserved += counts->bytes_written;
}

static void counts_get(const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  *out = (struct kvp_op_counts){.rows_stored = found->rows_stored,
                                .rows_loaded = found->rows_loaded,
                                .rows_skipped = found->rows_skipped,
                                .rows_rejected = found->rows_rejected,
                                .rows_nonfinite = found->rows_nonfinite,
                                .groups_saturated = found->groups_saturated,
                                .bytes_read = found->rows_zeroed,
                                .bytes_written = found->reserved};
}

/* ---- launches ---- */

static _Atomic uint64_t *launches;

/* Into the file, where there is one. */
static void launches_open(void) {
  static _Atomic uint64_t own;
  const char *path = getenv("FAKE_CUDA_LAUNCHES");
  launches = &own;
  if (path != NULL) {
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    void *file = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    check(file != MAP_FAILED, "no file for the number of launches");
    (void)close(fd);
    launches = file;
  }
}

static void launches_add(int64_t count) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, launches_open);
  (void)atomic_fetch_add(launches, (uint64_t)count);
}

/* A launch of any of the kernels that the host has, too. */
struct kernel {
  void (*run)(const struct kernel *kernel, struct kvp_op_counts *counts);
  struct kvp_cuda_counts *counts;
  union {
    struct kvp_store_params store;
    struct kvp_load_params load;
    struct kvp_copy_rows_params copy_rows;
    struct kvp_fused_store_params fused_store;
    struct kvp_convert_index_params convert_index;
    struct kvp_swa_index_params swa_index;
    struct kvp_expand_index_params expand_index;
    struct kvp_cat_index_params cat_index;
    struct kvp_blocks_params blocks;
  } params;
};

static void kernel_run(void *arguments) {
  const struct kernel *kernel = arguments;
  if (kernel_begin(kernel->counts)) {
    struct kvp_op_counts counts = {0};
    kernel->run(kernel, &counts);
    counts_put(kernel->counts, &counts);
  }
}

static cudaError_t kernel_launch(const struct kernel *kernel, cudaStream_t stream) {
  check_device(kernel->counts, sizeof *kernel->counts, "counts that are nowhere");
  launches_add(1);
  return enqueue(stream, kernel_run, kernel, sizeof *kernel);
}

static void check_entries(const struct kvp_owner_check *owners, const struct kvp_layer *layer) {
  if (owners->entries != NULL) {
    check_visible(owners->entries, layer->geometry->num_blocks * sizeof *owners->entries,
                  "an owner table the device can't see");
  }
}

static void check_ints(const void *ints, uint64_t count, const char *what) {
  if (ints != NULL) {
    check_visible(ints, count * sizeof(int32_t), what);
  }
}

static void check_store(const struct kvp_store_params *params) {
  check_ints(params->slots, params->row_count, "slots the device can't see");
  check_ints(params->gather, params->row_count, "an index the device can't see");
  check_device(params->layer.base, params->layer.geometry->layer_stride_bytes, "a layer that is nowhere");
  check_device(params->source.base, 1, "a source that is nowhere");
  check_entries(&params->check, &params->layer);
}

static void store_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_store(&kernel->params.store, 0, kernel->params.store.row_count, counts);
}

cudaError_t kvp_cuda_store_launch(const struct kvp_store_params *params, struct kvp_cuda_counts *counts,
                                  cudaStream_t stream) {
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  check_store(params);
  const struct kernel kernel = {.run = store_run, .counts = counts, .params.store = *params};
  return kernel_launch(&kernel, stream);
}

static void load_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_load(&kernel->params.load, 0, kernel->params.load.segment_count, counts);
}

cudaError_t kvp_cuda_load_launch(const struct kvp_load_params *params, struct kvp_cuda_counts *counts,
                                 cudaStream_t stream) {
  if (params->segment_count == 0) {
    return cudaSuccess;
  }
  check_visible(params->segments, params->segment_count * sizeof *params->segments, "segments the device can't see");
  check_device(params->layer.base, params->layer.geometry->layer_stride_bytes, "a layer that is nowhere");
  if (params->check.entries != NULL) {
    check_device(params->rows_taken, sizeof *params->rows_taken, "rows_taken that is nowhere");
  }
  check_entries(&params->check, &params->layer);
  const struct kernel kernel = {.run = load_run, .counts = counts, .params.load = *params};
  return kernel_launch(&kernel, stream);
}

static void copy_rows_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_copy_rows(&kernel->params.copy_rows, 0, kernel->params.copy_rows.row_count, counts);
}

cudaError_t kvp_cuda_copy_rows_launch(const struct kvp_copy_rows_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream) {
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  check_ints(params->gather, params->row_count, "an index the device can't see");
  check_device(params->out.base, params->row_bytes, "rows that are nowhere");
  const struct kernel kernel = {.run = copy_rows_run, .counts = counts, .params.copy_rows = *params};
  return kernel_launch(&kernel, stream);
}

static void fused_store_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_fused_store(&kernel->params.fused_store, 0, kernel->params.fused_store.store.row_count, counts);
}

cudaError_t kvp_cuda_fused_store_launch(const struct kvp_fused_store_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream) {
  if (params->store.row_count == 0) {
    return cudaSuccess;
  }
  check_store(&params->store);
  check_ints(params->positions, params->store.row_count, "positions the device can't see");
  check_device(params->norm_weight, 1, "a weight that is nowhere");
  const struct kernel kernel = {.run = fused_store_run, .counts = counts, .params.fused_store = *params};
  return kernel_launch(&kernel, stream);
}

/* Whoever relies on an order finds the other one. */
cudaError_t kvp_cuda_fused_stores_launch(const struct kvp_fused_store_params *const *params,
                                         struct kvp_cuda_counts *const *counts, uint32_t count, cudaStream_t stream) {
  cudaError_t code = cudaSuccess;
  for (uint32_t i = count; i > 0 && code == cudaSuccess; i--) {
    code = kvp_cuda_fused_store_launch(params[i - 1], counts[i - 1], stream);
    launches_add(i == count || params[i - 1]->store.row_count == 0 ? 0 : -1);
  }
  return code;
}

/* The same. */
cudaError_t kvp_cuda_assemble_launch(const struct kvp_cuda_assembly *assembly, cudaStream_t stream) {
  cudaError_t code = cudaSuccess;
  int64_t parts = 0;
  if (assembly->store != NULL) {
    code = kvp_cuda_store_launch(assembly->store, assembly->store_counts, stream);
    parts += assembly->store->row_count != 0;
  }
  if (code == cudaSuccess && assembly->copy != NULL) {
    code = kvp_cuda_copy_rows_launch(assembly->copy, assembly->copy_counts, stream);
    parts += assembly->copy->row_count != 0;
  }
  for (int i = 1; i >= 0; i--) {
    if (code == cudaSuccess && assembly->loads[i] != NULL) {
      code = kvp_cuda_load_launch(assembly->loads[i], assembly->load_counts[i], stream);
      parts += assembly->loads[i]->segment_count != 0;
    }
  }
  launches_add(parts > 1 ? 1 - parts : 0);
  return code;
}

static void convert_index_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  const struct kvp_convert_index_params *params = &kernel->params.convert_index;
  kvp_host_convert_index(params, 0, params->batch * params->queries, counts);
}

cudaError_t kvp_cuda_convert_index_launch(const struct kvp_convert_index_params *params,
                                          struct kvp_cuda_counts *counts, cudaStream_t stream) {
  const uint64_t rows = params->batch * params->queries;
  if (rows == 0) {
    return cudaSuccess;
  }
  check_ints(params->tables.base, params->batch * params->table_columns, "block tables the device can't see");
  check_ints(params->valid, rows, "counts of entries the device can't see");
  check_ints(params->topk.base, params->columns, "indices the device can't see");
  check_device(params->out.base, params->columns * sizeof(int32_t), "rows that are nowhere");
  const struct kernel kernel = {.run = convert_index_run, .counts = counts, .params.convert_index = *params};
  return kernel_launch(&kernel, stream);
}

static void swa_index_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_swa_index(&kernel->params.swa_index, 0, kernel->params.swa_index.queries, counts);
}

cudaError_t kvp_cuda_swa_index_launch(const struct kvp_swa_index_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream) {
  if (params->queries == 0) {
    return cudaSuccess;
  }
  check_ints(params->offset_len, 2 * params->queries, "windows the device can't see");
  check_device(params->out.base, params->window * sizeof(int32_t), "rows that are nowhere");
  const struct kernel kernel = {.run = swa_index_run, .counts = counts, .params.swa_index = *params};
  return kernel_launch(&kernel, stream);
}

static void expand_index_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_expand_index(&kernel->params.expand_index, 0, kernel->params.expand_index.row_count, counts);
}

cudaError_t kvp_cuda_expand_index_launch(const struct kvp_expand_index_params *params, struct kvp_cuda_counts *counts,
                                         cudaStream_t stream) {
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  check_ints(params->pivots, 4 * params->row_count, "pivots the device can't see");
  check_device(params->out.base, params->width * sizeof(int32_t), "rows that are nowhere");
  const struct kernel kernel = {.run = expand_index_run, .counts = counts, .params.expand_index = *params};
  return kernel_launch(&kernel, stream);
}

static void cat_index_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_cat_index(&kernel->params.cat_index, 0, kernel->params.cat_index.row_count, counts);
}

cudaError_t kvp_cuda_cat_index_launch(const struct kvp_cat_index_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream) {
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  check_ints(params->left.base, params->left_columns, "a left side the device can't see");
  check_ints(params->right.base, params->right_columns, "a right side the device can't see");
  check_device(params->out.base, sizeof(int32_t), "rows that are nowhere");
  const struct kernel kernel = {.run = cat_index_run, .counts = counts, .params.cat_index = *params};
  return kernel_launch(&kernel, stream);
}

static void copy_blocks_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  const struct kvp_blocks_params *params = &kernel->params.blocks;
  kvp_host_copy_blocks(params, 0, params->geometry->num_layers * params->count, counts);
}

static void zero_blocks_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  const struct kvp_blocks_params *params = &kernel->params.blocks;
  kvp_host_zero_blocks(params, 0, params->geometry->num_layers * params->count, counts);
}

static cudaError_t blocks_launch(const struct kvp_blocks_params *params, bool copies, struct kvp_cuda_counts *counts,
                                 cudaStream_t stream) {
  if (params->count == 0) {
    return cudaSuccess;
  }
  check_ints(params->pairs, (copies ? 2 : 1) * params->count, "blocks the device can't see");
  check_device(params->base, params->geometry->region_bytes, "a region that is nowhere");
  const struct kernel kernel = {
      .run = copies ? copy_blocks_run : zero_blocks_run, .counts = counts, .params.blocks = *params};
  return kernel_launch(&kernel, stream);
}

cudaError_t kvp_cuda_copy_blocks_launch(const struct kvp_blocks_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream) {
  return blocks_launch(params, true, counts, stream);
}

cudaError_t kvp_cuda_zero_blocks_launch(const struct kvp_blocks_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream) {
  return blocks_launch(params, false, counts, stream);
}

static void signal_run(void *arguments) {
  const struct kvp_cuda_signal *signal = arguments;
  if (!kernel_begin(NULL)) {
    return;
  }
  for (uint32_t i = 0; i < signal->op_count; i++) {
    signal->found[i] = signal->counts[i];
    signal->counts[i] = (struct kvp_cuda_counts){0};
  }
  *signal->finished_ns = gpu_clock_ns();
  __atomic_store_n(signal->timeline, signal->value, __ATOMIC_RELEASE);
}

cudaError_t kvp_cuda_signal_launch(const struct kvp_cuda_signal *signal, cudaStream_t stream) {
  check_device(signal->counts, signal->op_count * sizeof *signal->counts, "counts that are nowhere");
  check(in_ranges(signal->found, signal->op_count * sizeof *signal->found, RANGE_MAPPED), "found is nowhere");
  check(in_ranges(signal->finished_ns, sizeof *signal->finished_ns, RANGE_MAPPED), "finished_ns is nowhere");
  check(in_ranges(signal->timeline, sizeof *signal->timeline, RANGE_MAPPED), "a timeline the device can't see");
  return enqueue(stream, signal_run, signal, sizeof *signal);
}

static void empty_run(void *arguments) {
  uint64_t *now_ns = NULL;
  memcpy(&now_ns, arguments, sizeof now_ns);
  if (now_ns != NULL) {
    *now_ns = gpu_clock_ns();
  }
}

cudaError_t kvp_cuda_empty_launch(uint64_t *now_ns, cudaStream_t stream) {
  if (now_ns != NULL) {
    check_visible(now_ns, sizeof *now_ns, "a clock's word the device can't see");
  }
  return enqueue(stream, empty_run, &now_ns, sizeof now_ns);
}

static void fault_run(void *arguments) {
  (void)arguments;
  atomic_store(&sticky, cudaErrorIllegalAddress);
}

cudaError_t kvp_cuda_fault_launch(cudaStream_t stream) {
  return enqueue(stream, fault_run, "", 0);
}

/* What was known before is taken from what the executor said: wrong facts show. A store without slots, or with an
 * index, counts for itself. */
void kvp_cuda_store_counts(const struct kvp_store_params *params, const struct kvp_cuda_counts *found,
                           struct kvp_op_counts *out) {
  counts_get(found, out);
  if (params->check.entries == NULL && params->slots != NULL && params->gather == NULL) {
    out->rows_skipped = params->rows_skipped;
    out->rows_stored = params->row_count - params->rows_skipped;
  }
}

void kvp_cuda_load_counts(const struct kvp_load_params *params, const struct kvp_cuda_counts *found,
                          struct kvp_op_counts *out) {
  counts_get(found, out);
  out->rows_loaded = params->check.entries == NULL ? params->rows : found->rows_loaded;
}

void kvp_cuda_copy_rows_counts(const struct kvp_copy_rows_params *params, const struct kvp_cuda_counts *found,
                               struct kvp_op_counts *out) {
  counts_get(found, out);
  check(out->rows_loaded + out->rows_rejected == params->row_count, "rows that were not copied");
}

void kvp_cuda_fused_store_counts(const struct kvp_fused_store_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out) {
  counts_get(found, out);
  if (params->store.check.entries == NULL && params->positions_checked) {
    out->rows_skipped = params->store.rows_skipped;
    out->rows_stored = params->store.row_count - params->store.rows_skipped;
  }
}

#define INDEX_COUNTS(name)                                                                                           \
  void kvp_cuda_##name##_counts(const struct kvp_##name##_params *params, const struct kvp_cuda_counts *found,       \
                                struct kvp_op_counts *out) {                                                         \
    (void)params;                                                                                                    \
    counts_get(found, out);                                                                                          \
  }

INDEX_COUNTS(convert_index)
INDEX_COUNTS(swa_index)
INDEX_COUNTS(expand_index)
INDEX_COUNTS(cat_index)

void kvp_cuda_copy_blocks_counts(const struct kvp_blocks_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out) {
  (void)params;
  counts_get(found, out);
}

void kvp_cuda_zero_blocks_counts(const struct kvp_blocks_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out) {
  (void)params;
  counts_get(found, out);
}
