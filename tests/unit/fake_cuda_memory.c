/* Memory of the CUDA in host memory: allocations and copies.
 *
 * Device memory and the device's side of host memory are ranges that this file knows; whatever a kernel or a copy is
 * given must lie in one of the right kind, or the process aborts. The device's side of host memory is another mapping
 * of the same pages.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/fake_cuda_parts.h"

enum { ranges_max = 4096 };

struct range {
  enum range_kind kind;
  uint8_t *begin;
  uint64_t bytes;
  void *host; /* of RANGE_MAPPED: the other mapping */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[ranges_max];
static uint64_t used_bytes;

void fake_range_add(enum range_kind kind, void *begin, uint64_t bytes, void *host) {
  (void)pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < ranges_max && ranges[i].kind != RANGE_FREE) {
    i++;
  }
  fake_check(i < ranges_max, "too many ranges");
  ranges[i] = (struct range){.kind = kind, .begin = begin, .bytes = bytes, .host = host};
  (void)pthread_mutex_unlock(&lock);
}

static struct range range_remove(const void *begin) {
  (void)pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < ranges_max && (ranges[i].kind == RANGE_FREE || ranges[i].begin != begin)) {
    i++;
  }
  fake_check(i < ranges_max, "no such range");
  const struct range range = ranges[i];
  ranges[i].kind = RANGE_FREE;
  (void)pthread_mutex_unlock(&lock);
  return range;
}

uint64_t fake_range_remove(const void *begin) {
  return range_remove(begin).bytes;
}

bool fake_use_bytes(uint64_t bytes) {
  (void)pthread_mutex_lock(&lock);
  const bool fits = used_bytes + bytes <= fake_total_bytes();
  used_bytes += fits ? bytes : 0;
  (void)pthread_mutex_unlock(&lock);
  return fits;
}

void fake_unuse_bytes(uint64_t bytes) {
  (void)pthread_mutex_lock(&lock);
  used_bytes -= bytes < used_bytes ? bytes : used_bytes;
  (void)pthread_mutex_unlock(&lock);
}

/* Neighbouring chunks are one range for whoever uses them. */
bool fake_in_ranges(const void *pointer, uint64_t bytes, enum range_kind kind) {
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

void fake_check_device(const void *pointer, uint64_t bytes, const char *what) {
  fake_check(fake_in_ranges(pointer, bytes, RANGE_DEVICE), what);
}

void fake_check_visible(const void *pointer, uint64_t bytes, const char *what) {
  fake_check(fake_in_ranges(pointer, bytes, RANGE_DEVICE) || fake_in_ranges(pointer, bytes, RANGE_MAPPED), what);
}

/* ---- memory ---- */

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  fake_check(fake_has_device(), "a thread without a device");
  (void)pthread_mutex_lock(&lock);
  *total = fake_total_bytes();
  *free_bytes = used_bytes < *total ? *total - used_bytes : 0;
  (void)pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
  RETURN_INJECTED("cudaMalloc");
  *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
  fake_check(*out != NULL, "no memory");
  memset(*out, 0xCD, bytes);
  fake_range_add(RANGE_DEVICE, *out, bytes, NULL);
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
  fake_check_device(memory, bytes, "cudaMemset of no device memory");
  memset(memory, value, bytes);
  return cudaSuccess;
}

/* A second mapping of the same pages. */
static cudaError_t host_map(void *host, size_t bytes) {
  void *mapped = mremap(host, 0, bytes, MREMAP_MAYMOVE);
  if (mapped == MAP_FAILED) {
    return cudaErrorInvalidValue;
  }
  fake_range_add(RANGE_MAPPED, mapped, bytes, host);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned int flags) {
  RETURN_INJECTED("cudaHostAlloc");
  fake_check((flags & cudaHostAllocMapped) != 0, "host memory that is not mapped");
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  fake_check(memory != MAP_FAILED, "no memory");
  fake_range_add(RANGE_PINNED, memory, bytes, NULL);
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
  fake_check(range.kind == RANGE_MAPPED, "host memory that was not mapped");
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
  fake_check(maps != NULL, "no /proc");
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
  fake_check((uintptr_t)host % 4096 == 0 && bytes % 4096 == 0, "host memory is no whole number of pages");
  fake_check((flags & cudaHostRegisterMapped) != 0, "host memory that is not mapped");
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
  fake_check(range.kind == RANGE_MAPPED, "host memory that was not mapped");
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
  fake_check(copy->row_bytes > 0 && copy->row_count > 0, "an empty copy");
  fake_check(copy->row_count == 1 || (copy->to_pitch <= 8192 && copy->from_pitch <= 8192), "a pitch beyond memPitch");
  fake_check(copy->row_count == 1 || copy->row_bytes <= copy->to_pitch, "rows wider than their pitch");
  const bool to_device = kind == cudaMemcpyHostToDevice;
  fake_check(to_device || kind == cudaMemcpyDeviceToHost, "a copy of another kind");
  fake_check(fake_in_ranges(copy->to, span_bytes(copy->to_pitch, copy->row_bytes, copy->row_count),
                            to_device ? RANGE_DEVICE : RANGE_PINNED),
             "a copy to where it doesn't belong");
  fake_check(copy->from == NULL ||
                 fake_in_ranges(copy->from, span_bytes(copy->from_pitch, copy->row_bytes, copy->row_count),
                                to_device ? RANGE_PINNED : RANGE_DEVICE),
             "a copy from where it doesn't belong");
  return fake_enqueue(stream, copy_run, copy, sizeof *copy);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  RETURN_INJECTED("cudaMemcpyAsync");
  const struct copy copy = {.to = to, .from = from, .row_bytes = bytes, .row_count = 1};
  return copy_enqueue(&copy, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  RETURN_INJECTED("cudaMemcpy2DAsync");
  const struct copy copy = {.to = to,
                            .from = from,
                            .to_pitch = to_pitch,
                            .from_pitch = from_pitch,
                            .row_bytes = width,
                            .row_count = height};
  return copy_enqueue(&copy, kind, stream);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  RETURN_INJECTED("cudaMemsetAsync");
  const struct copy copy = {.to = to, .row_bytes = bytes, .row_count = 1, .fill = value};
  return copy_enqueue(&copy, cudaMemcpyHostToDevice, stream);
}

cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  RETURN_INJECTED("cudaMemset2DAsync");
  const struct copy copy = {.to = to, .to_pitch = pitch, .row_bytes = width, .row_count = height, .fill = value};
  return copy_enqueue(&copy, cudaMemcpyHostToDevice, stream);
}
