/* The CUDA kernels as one more variant of the host kernels: the programs of tests/contract/ run on them unchanged.
 *
 * What an op names is copied into device memory that was made once: each array in a mapping of its own with nothing
 * mapped around it, alternately at its end and at its begin, with known bytes in what is left next to it. Everything
 * is copied back and looked at: what the op may write goes to the caller, the rest must be as it was.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cuda/launch.h"
#include "kernels/host/variant.h"
#include "tests/gpu/gpu.h"

enum area { area_layer, area_source, area_index, area_out, area_scales, area_count };
enum { margin_bytes = 512, margin_fill = 0xC7, owners_max = 1 << 16, alignment_layer = 32, alignment_view = 16 };

static const uint64_t area_bytes[area_count] = {16 << 20, 8 << 20, 2 << 20, 8 << 20, 2 << 20};

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
  struct kvp_cuda_counts *counts;
  struct kvp_cuda_counts *found; /* pinned */
  cudaStream_t stream;
  uint32_t turn;
} gpu;

static void open_once(void) {
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
  gpu_check(cudaMalloc((void **)&gpu.counts, sizeof(*gpu.counts)));
  gpu_check(cudaHostAlloc((void **)&gpu.found, sizeof(*gpu.found), cudaHostAllocDefault));
  gpu_check(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
}

static uint64_t smaller(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

/* Where the kernel finds the array. An index array lies at any multiple of its elements' size. */
static void *put(enum area area, const void *host, uint64_t bytes, uint32_t alignment) {
  struct gpu_memory *memory = &gpu.memory[area];
  struct array *array = &gpu.arrays[area];
  if (bytes > area_bytes[area]) {
    (void)fprintf(stderr, "an array of %llu bytes is larger than what was prepared\n", (unsigned long long)bytes);
    exit(1);
  }
  uint64_t place = gpu.turn % 2 == 0 ? (memory->bytes - bytes) / alignment * alignment : 0;
  if (alignment == sizeof(int32_t) && gpu.turn % 4 == 1) {
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

/* The same of an array that the op writes to. */
static void *put_written(enum area area, uint8_t *host, uint64_t bytes, uint32_t alignment) {
  void *device = put(area, host, bytes, alignment);
  gpu.arrays[area].result = host;
  return device;
}

static const uint64_t *put_owners(const struct kvp_owner_check *check, uint32_t num_blocks) {
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

static void get_all(void) {
  for (int area = 0; area < area_count; area++) {
    const struct array *array = &gpu.arrays[area];
    if (array->used) {
      gpu_check(cudaMemcpyAsync(gpu.copy[area], array->device - array->before,
                                array->before + array->bytes + array->after, cudaMemcpyDeviceToHost, gpu.stream));
    }
  }
  gpu_check(cudaMemcpyAsync(gpu.found, gpu.counts, sizeof(*gpu.found), cudaMemcpyDeviceToHost, gpu.stream));
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

static void begin(uint64_t rows_taken) {
  open_once();
  gpu.turn++;
  *gpu.found = (struct kvp_cuda_counts){.rows_taken = rows_taken};
  gpu_check(cudaMemcpyAsync(gpu.counts, gpu.found, sizeof(*gpu.found), cudaMemcpyHostToDevice, gpu.stream));
}

static void add_counts(struct kvp_op_counts *counts, const struct kvp_op_counts *more) {
  counts->rows_stored += more->rows_stored;
  counts->rows_loaded += more->rows_loaded;
  counts->rows_skipped += more->rows_skipped;
  counts->rows_rejected += more->rows_rejected;
  counts->rows_nonfinite += more->rows_nonfinite;
  counts->groups_saturated += more->groups_saturated;
  counts->bytes_read += more->bytes_read;
  counts->bytes_written += more->bytes_written;
}

static uint64_t view_bytes(uint64_t rows, uint64_t stride, uint64_t row_bytes) {
  return rows == 0 ? 0 : (rows - 1) * stride + row_bytes;
}

static void cuda_store(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                       struct kvp_op_counts *counts) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  uint64_t rows = row_end - row_begin;
  uint64_t row_bytes = geometry->sizes.row_bytes;
  struct kvp_store_params device = *params;
  begin(0);
  device.row_count = rows;
  device.layer.base = put_written(area_layer, params->layer.base, geometry->layer_stride_bytes, alignment_layer);
  device.source.base = put(area_source, params->source.base + row_begin * params->source.stride_bytes,
                           view_bytes(rows, params->source.stride_bytes, row_bytes), alignment_view);
  device.slots = put(area_index, params->slots + row_begin, rows * sizeof(int32_t), (uint32_t)sizeof(int32_t));
  if (params->cast_back.base != NULL) {
    device.cast_back.base = put_written(area_out, params->cast_back.base + row_begin * params->cast_back.stride_bytes,
                                        view_bytes(rows, params->cast_back.stride_bytes, row_bytes), alignment_view);
  }
  device.check.entries = put_owners(&params->check, geometry->num_blocks);
  device.rows_skipped = 0;
  for (uint64_t i = row_begin; params->check.entries == NULL && i < row_end; i++) {
    device.rows_skipped += params->slots[i] == -1;
  }
  gpu_check(kvp_cuda_store_launch(&device, gpu.counts, gpu.stream));
  get_all();
  struct kvp_op_counts told = {0};
  kvp_cuda_store_counts(&device, gpu.found, &told);
  add_counts(counts, &told);
}

/* What whoever checked the segments knows about them. */
static void know_segments(struct kvp_load_params *device, const struct kvp_segment *segments, uint64_t count) {
  device->rows = 0;
  device->rows_zeroed = 0;
  device->segment_rows_max = 0;
  for (uint64_t i = 0; device->check.entries == NULL && i < count; i++) {
    uint64_t rows = (uint64_t)((int64_t)segments[i].src_end - segments[i].src_begin);
    device->rows += rows;
    device->rows_zeroed += segments[i].src_block == -1 ? rows : 0;
    device->segment_rows_max = rows > device->segment_rows_max ? rows : device->segment_rows_max;
  }
}

static void cuda_load(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                      struct kvp_op_counts *counts) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  uint64_t count = segment_end - segment_begin;
  struct kvp_load_params device = *params;
  begin(params->rows_taken == NULL ? 0 : *params->rows_taken);
  device.segment_count = count;
  device.layer.base = put(area_layer, params->layer.base, geometry->layer_stride_bytes, alignment_layer);
  device.segments = put(area_index, params->segments + segment_begin, count * sizeof(struct kvp_segment),
                        (uint32_t)sizeof(int32_t));
  device.out.base =
      put_written(area_out, params->out.base,
                  view_bytes(params->total_k, params->out.stride_bytes, sizes->loaded_row_bytes), alignment_view);
  if (sizes->loaded_scale_bytes != 0) {
    device.scales.base = put_written(
        area_scales, params->scales.base,
        view_bytes(params->total_k, params->scales.stride_bytes, sizes->loaded_scale_bytes), alignment_view);
  }
  device.check.entries = put_owners(&params->check, geometry->num_blocks);
  device.rows_taken = params->check.entries == NULL ? NULL : &gpu.counts->rows_taken;
  know_segments(&device, params->segments + segment_begin, count);
  gpu_check(kvp_cuda_load_launch(&device, gpu.counts, gpu.stream));
  get_all();
  if (params->rows_taken != NULL) {
    *params->rows_taken = gpu.found->rows_taken;
  }
  struct kvp_op_counts told = {0};
  kvp_cuda_load_counts(&device, gpu.found, &told);
  add_counts(counts, &told);
}

static kvp_host_store_fn *const stores[kvp_format_count] = {
    [KVP_FORMAT_V41] = cuda_store,           [KVP_FORMAT_V41_FP4] = cuda_store, [KVP_FORMAT_INDEX_FP4] = cuda_store,
    [KVP_FORMAT_INDEX_FP8_F32] = cuda_store, [KVP_FORMAT_BF16] = cuda_store,    [KVP_FORMAT_INDEX_MXFP8] = cuda_store,
};

static kvp_host_load_fn *const loads[kvp_format_count] = {
    [KVP_FORMAT_V41] = cuda_load,           [KVP_FORMAT_V41_FP4] = cuda_load, [KVP_FORMAT_INDEX_FP4] = cuda_load,
    [KVP_FORMAT_INDEX_FP8_F32] = cuda_load, [KVP_FORMAT_BF16] = cuda_load,    [KVP_FORMAT_INDEX_MXFP8] = cuda_load,
};

static const struct kvp_host_variant cuda = {.isa = "cuda", .store = stores, .load = loads};

const struct kvp_host_variant *kvp_host_variant_get(size_t index) {
  if (index != 0) {
    return NULL;
  }
  open_once();
  return &cuda;
}

/* Far addresses are tried in memory that is mapped but never filled, which a GPU has not: contract_large does it. */
__attribute__((constructor)) static void leave_out_far_addresses(void) {
  cmocka_set_skip_filter("test_far_addresses");
}
