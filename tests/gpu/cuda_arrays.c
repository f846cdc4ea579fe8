/* See cuda_arrays.h. */
#include "tests/gpu/cuda_arrays.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/gpu/gpu.h"

enum { margin_bytes = 512, margin_fill = 0xC7, owners_max = 1 << 16 };

static const uint64_t area_bytes[area_count] = {
    [AREA_LAYER] = 16 << 20, [AREA_SOURCE] = 16 << 20, [AREA_INDEX] = 2 << 20, [AREA_SECOND_INDEX] = 2 << 20,
    [AREA_TABLE] = 2 << 20,  [AREA_WEIGHT] = 2 << 20,  [AREA_OUT] = 8 << 20,   [AREA_SCALES] = 2 << 20,
};

/* One array of an op: [margin | data | margin] in `copy`, the same on the device from `device` - before on. */
struct array {
  uint8_t *device;
  const uint8_t *host; /* the caller's */
  uint8_t *result;     /* where it goes when the op wrote to it; NULL: the op only reads it */
  uint64_t bytes;
  uint64_t before;
  uint64_t after;
  bool used;
};

static struct {
  struct gpu_memory memory[area_count];
  uint8_t *copy[area_count]; /* pinned */
  struct array arrays[area_count];
  uint64_t *owners; /* registered */
  uint64_t *owners_device;
  struct kvp_cuda_counts *counts; /* [cuda_ops_max] */
  struct kvp_cuda_counts *found;  /* the same, pinned */
  cudaStream_t stream;
  uint64_t turn; /* an op each */
} gpu;

void cuda_arrays_open(void) {
  if (gpu.stream != NULL) {
    return;
  }
  gpu_open();
  for (int area = 0; area < area_count; area++) {
    gpu.memory[area] = gpu_memory_make(area_bytes[area]);
    gpu_check(cudaMemset(gpu.memory[area].base, margin_fill, gpu.memory[area].bytes));
    gpu_check(
        cudaHostAlloc((void **)&gpu.copy[area], area_bytes[area] + 2 * (uint64_t)margin_bytes, cudaHostAllocDefault));
  }
  uint64_t owner_bytes = owners_max * sizeof(uint64_t);
  gpu.owners = aligned_alloc(4096, owner_bytes);
  if (gpu.owners == NULL) {
    (void)fprintf(stderr, "out of memory\n");
    exit(1);
  }
  memset(gpu.owners, 0, owner_bytes);
  gpu_check(cudaHostRegister(gpu.owners, owner_bytes, cudaHostRegisterMapped));
  gpu_check(cudaHostGetDevicePointer((void **)&gpu.owners_device, gpu.owners, 0));
  gpu_check(cudaMalloc((void **)&gpu.counts, cuda_ops_max * sizeof(*gpu.counts)));
  gpu_check(cudaHostAlloc((void **)&gpu.found, cuda_ops_max * sizeof(*gpu.found), cudaHostAllocDefault));
  gpu_check(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
}

static uint64_t smaller(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

void *cuda_arrays_put(enum cuda_area area, const void *host, uint64_t bytes, uint32_t alignment) {
  struct gpu_memory *memory = &gpu.memory[area];
  struct array *array = &gpu.arrays[area];
  if (bytes > area_bytes[area]) {
    (void)fprintf(stderr, "an array of %llu bytes is larger than what was prepared\n", (unsigned long long)bytes);
    exit(1);
  }
  uint64_t place = gpu.turn % 2 == 0 ? (memory->bytes - bytes) / alignment * alignment : 0;
  if (alignment == alignment_index && gpu.turn % 4 == 1) {
    place = sizeof(int32_t);
  }
  *array = (struct array){.device = memory->base + place,
                          .host = host,
                          .bytes = bytes,
                          .before = smaller(place, margin_bytes),
                          .after = smaller(memory->bytes - place - bytes, margin_bytes),
                          .used = true};
  uint8_t *copy = gpu.copy[area];
  memset(copy, margin_fill, array->before);
  if (bytes != 0) {
    memcpy(copy + array->before, host, bytes);
  }
  memset(copy + array->before + bytes, margin_fill, array->after);
  gpu_check(cudaMemcpyAsync(array->device - array->before, copy, array->before + bytes + array->after,
                            cudaMemcpyHostToDevice, gpu.stream));
  return array->device;
}

void *cuda_arrays_put_written(enum cuda_area area, uint8_t *host, uint64_t bytes, uint32_t alignment) {
  void *device = cuda_arrays_put(area, host, bytes, alignment);
  gpu.arrays[area].result = host;
  return device;
}

const uint64_t *cuda_arrays_put_owners(const struct kvp_owner_check *check, uint32_t num_blocks) {
  if (check->entries == NULL) {
    return NULL;
  }
  if (num_blocks > owners_max) {
    (void)fprintf(stderr, "%u blocks are more than what was prepared\n", num_blocks);
    exit(1);
  }
  uint32_t first = owners_max - num_blocks;
  memcpy(gpu.owners + first, check->entries, num_blocks * sizeof(uint64_t));
  return gpu.owners_device + first;
}

static void expect_margin(const uint8_t *bytes, uint64_t count, const char *where) {
  for (uint64_t i = 0; i < count; i++) {
    if (bytes[i] != margin_fill) {
      fail_msg("written %s an array: byte %llu is 0x%02X", where, (unsigned long long)i, bytes[i]);
    }
  }
}

void cuda_arrays_get(void) {
  for (int area = 0; area < area_count; area++) {
    const struct array *array = &gpu.arrays[area];
    if (array->used) {
      gpu_check(cudaMemcpyAsync(gpu.copy[area], array->device - array->before,
                                array->before + array->bytes + array->after, cudaMemcpyDeviceToHost, gpu.stream));
    }
  }
  gpu_check(
      cudaMemcpyAsync(gpu.found, gpu.counts, cuda_ops_max * sizeof(*gpu.found), cudaMemcpyDeviceToHost, gpu.stream));
  gpu_check(cudaStreamSynchronize(gpu.stream));
  for (int area = 0; area < area_count; area++) {
    struct array *array = &gpu.arrays[area];
    if (!array->used) {
      continue;
    }
    const uint8_t *data = gpu.copy[area] + array->before;
    expect_margin(gpu.copy[area], array->before, "before");
    expect_margin(data + array->bytes, array->after, "behind");
    if (array->bytes != 0 && array->result != NULL) {
      memcpy(array->result, data, array->bytes);
    } else if (array->bytes != 0 && memcmp(array->host, data, array->bytes) != 0) {
      fail_msg("an input of %llu bytes was changed", (unsigned long long)array->bytes);
    }
    array->used = false;
  }
}

void cuda_arrays_begin(uint64_t rows_taken) {
  cuda_arrays_open();
  gpu.turn++;
  memset(gpu.found, 0, cuda_ops_max * sizeof(*gpu.found));
  gpu.found->rows_taken = rows_taken;
  gpu_check(
      cudaMemcpyAsync(gpu.counts, gpu.found, cuda_ops_max * sizeof(*gpu.found), cudaMemcpyHostToDevice, gpu.stream));
}

uint64_t cuda_arrays_ops(void) {
  return gpu.turn;
}

struct kvp_cuda_counts *cuda_arrays_counts(uint32_t op) {
  return &gpu.counts[op];
}

const struct kvp_cuda_counts *cuda_arrays_found(uint32_t op) {
  return &gpu.found[op];
}

cudaStream_t cuda_arrays_stream(void) {
  return gpu.stream;
}

void cuda_counts_add(struct kvp_op_counts *counts, const struct kvp_op_counts *more) {
  counts->rows_stored += more->rows_stored;
  counts->rows_loaded += more->rows_loaded;
  counts->rows_skipped += more->rows_skipped;
  counts->rows_rejected += more->rows_rejected;
  counts->rows_nonfinite += more->rows_nonfinite;
  counts->groups_saturated += more->groups_saturated;
  counts->bytes_read += more->bytes_read;
  counts->bytes_written += more->bytes_written;
}

uint64_t cuda_view_bytes(uint64_t rows, uint64_t stride, uint64_t row_bytes) {
  return rows == 0 ? 0 : (rows - 1) * stride + row_bytes;
}
