/* Regions and outputs larger than 4 and 8 GiB: records on both sides of every 2^31 bytes, output rows likewise, slots
 * up to 2^31 - 2. Records and loaded rows are compared with the host kernels', then put back to what was there before:
 * after that every byte of region and outputs must be as it was.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/launch.h"
#include "tests/gpu/device_rows.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/host_twin.h"
#include "tests/gpu/report.h"

enum { rows_max = 2048, random_rows = 500, neighbours = 4, seed = 77, region_fill = 0xA5, out_fill = 0x5A };

static const uint64_t border_bytes = UINT64_C(1) << 31;
static const uint64_t gib = UINT64_C(1) << 30;

struct shape {
  const char *name;
  enum kvp_format_id format;
  uint32_t width;
  uint32_t tokens_per_block;
  uint32_t num_layers;
  uint64_t region_bytes; /* about; 0: as many slots as there can be */
};

static const struct shape shapes[] = {
    {"v41, 3 layers", KVP_FORMAT_V41, 0, 64, 3, UINT64_C(13) << 30},
    {"v41 in blocks of 4096", KVP_FORMAT_V41, 0, 4096, 1, UINT64_C(9) << 30},
    {"v41_fp4 in blocks of 133", KVP_FORMAT_V41_FP4, 0, 133, 2, UINT64_C(9) << 30},
    {"index_fp4, 2 layers", KVP_FORMAT_INDEX_FP4, 0, 64, 2, UINT64_C(9) << 30},
    {"index_fp8_f32 in blocks of 17", KVP_FORMAT_INDEX_FP8_F32, 0, 17, 1, UINT64_C(9) << 30},
    {"index_mxfp8", KVP_FORMAT_INDEX_MXFP8, 0, 64, 1, UINT64_C(9) << 30},
    {"bf16, 2 layers", KVP_FORMAT_BF16, 512, 64, 2, UINT64_C(10) << 30},
    {"bf16 of width 8, one block of 2^31 - 1 tokens", KVP_FORMAT_BF16, 8, INT32_MAX, 1, 0},
    {"bf16 of width 8, 2^31 - 1 blocks of one token", KVP_FORMAT_BF16, 8, 1, 1, 0},
};

struct bench {
  const struct shape *shape;
  struct kvp_geometry geometry;
  uint64_t total_k;
  uint32_t scale_stride_bytes;
  struct gpu_memory region;
  struct gpu_memory out;
  struct gpu_memory scales;
  struct gpu_memory rows;     /* [rows_max], the source */
  struct gpu_memory slots;    /* [rows_max] */
  struct gpu_memory segments; /* [rows_max] */
  struct kvp_cuda_counts *counts;
  struct device_difference *difference;
};

/* Distinct numbers in ascending order. */
struct picks {
  uint64_t values[4 * rows_max];
  uint64_t count;
};

static void pick(struct picks *picks, uint64_t value, uint64_t limit) {
  if (value < limit && picks->count < sizeof(picks->values) / sizeof(picks->values[0])) {
    picks->values[picks->count++] = value;
  }
}

static int compare_numbers(const void *a, const void *b) {
  uint64_t left = *(const uint64_t *)a;
  uint64_t right = *(const uint64_t *)b;
  return (left > right) - (left < right);
}

static void sort_picks(struct picks *picks) {
  qsort(picks->values, picks->count, sizeof(picks->values[0]), compare_numbers);
  uint64_t kept = 0;
  for (uint64_t i = 0; i < picks->count; i++) {
    if (kept == 0 || picks->values[i] != picks->values[kept - 1]) {
      picks->values[kept++] = picks->values[i];
    }
  }
  picks->count = kept;
}

static void pick_around(struct picks *picks, uint64_t value, uint64_t limit) {
  for (uint64_t i = 0; i < neighbours; i++) {
    pick(picks, value + i, limit);
    pick(picks, value - i, limit); /* what wraps is past the limit */
  }
}

/* Slots of a layer whose data or scales lie at multiples of 2^31 from the region's or the layer's begin, the first,
 * the last and random ones. */
static void pick_slots(const struct kvp_geometry *geometry, uint32_t layer, struct picks *picks) {
  uint64_t limit = (uint64_t)geometry->num_blocks * geometry->tokens_per_block;
  uint64_t layer_begin = layer * geometry->layer_stride_bytes;
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  uint64_t step = geometry->format->token_interleaved ? sizes->bytes_per_token : sizes->data_bytes;
  picks->count = 0;
  for (uint64_t border = border_bytes; border < geometry->region_bytes; border += border_bytes) {
    const uint64_t offsets[] = {border - layer_begin, border};
    for (int i = 0; i < 2; i++) {
      if (offsets[i] >= geometry->layer_stride_bytes) {
        continue;
      }
      uint64_t at = offsets[i] % geometry->block_stride_bytes;
      uint64_t block_first = offsets[i] / geometry->block_stride_bytes * geometry->tokens_per_block;
      pick_around(picks, block_first + (at / step < geometry->tokens_per_block ? at / step : 0), limit);
      if (at / step >= geometry->tokens_per_block && !geometry->format->token_interleaved &&
          sizes->scale_bytes != 0) {
        pick_around(picks, block_first + (at - geometry->tokens_per_block * step) / sizes->scale_bytes, limit);
      }
      pick_around(picks, block_first, limit);
      pick_around(picks, block_first + geometry->tokens_per_block - 1, limit);
    }
  }
  pick_around(picks, 0, limit);
  pick_around(picks, limit - 1, limit);
  pick_around(picks, limit / 2, limit);
  for (uint64_t i = 0; i < random_rows; i++) {
    pick(picks, mix_bits(i * 3 + layer + 1) % limit, limit);
  }
  sort_picks(picks);
}

static bool contains(const struct picks *picks, uint64_t count, uint64_t value) {
  for (uint64_t i = 0; i < count; i++) {
    if (picks->values[i] == value) {
      return true;
    }
  }
  return false;
}

/* As many output rows, those around multiples of 2^31 bytes, the first and the last among them. */
static void pick_outputs(const struct bench *bench, uint64_t count, struct picks *picks) {
  uint64_t row_bytes = bench->geometry.sizes.loaded_row_bytes;
  picks->count = 0;
  for (uint64_t border = border_bytes; border < bench->total_k * row_bytes; border += border_bytes) {
    pick_around(picks, border / row_bytes, bench->total_k);
  }
  pick_around(picks, 0, bench->total_k);
  pick_around(picks, bench->total_k - 1, bench->total_k);
  sort_picks(picks);
  uint64_t chosen = picks->count;
  for (uint64_t row = bench->total_k / 3; picks->count < count; row += 7) {
    if (!contains(picks, chosen, row)) {
      pick(picks, row, bench->total_k);
    }
  }
}

static uint32_t blocks_of(const struct shape *shape) {
  if (shape->region_bytes == 0) {
    return INT32_MAX / shape->tokens_per_block;
  }
  struct kvp_geometry one;
  struct kvp_error error;
  if (kvp_geometry_init(kvp_format_get(shape->format), shape->width, shape->tokens_per_block, 1, shape->num_layers,
                        &one, &error) != KVP_OK) {
    report_failed("%s", error.text);
  }
  return (uint32_t)(shape->region_bytes / one.region_bytes);
}

/* False: there is not enough memory for it. */
static bool bench_init(struct bench *bench, const struct shape *shape) {
  *bench = (struct bench){.shape = shape};
  struct kvp_geometry *geometry = &bench->geometry;
  struct kvp_error error;
  if (kvp_geometry_init(kvp_format_get(shape->format), shape->width, shape->tokens_per_block, blocks_of(shape),
                        shape->num_layers, geometry, &error) != KVP_OK) {
    report_failed("%s", error.text);
  }
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  bench->scale_stride_bytes = sizes->loaded_row_bytes; /* so that the scales lie as far apart */
  bench->total_k = 2 * border_bytes / sizes->loaded_row_bytes + 100000;
  uint64_t out_bytes = bench->total_k * sizes->loaded_row_bytes;
  uint64_t scales_bytes = sizes->loaded_scale_bytes == 0 ? 0 : bench->total_k * bench->scale_stride_bytes;
  uint64_t needed = geometry->region_bytes + out_bytes + scales_bytes + gib;
  if (needed > gpu_bytes_free()) {
    report_skipped("needs %.1f GB, %.1f GB are free", (double)needed / 1e9, (double)gpu_bytes_free() / 1e9);
    return false;
  }
  bench->region = gpu_memory_make(geometry->region_bytes);
  bench->out = gpu_memory_make(out_bytes);
  bench->scales = gpu_memory_make(scales_bytes);
  bench->rows = gpu_memory_make((uint64_t)rows_max * sizes->row_bytes);
  bench->slots = gpu_memory_make(rows_max * sizeof(int32_t));
  bench->segments = gpu_memory_make(rows_max * sizeof(struct kvp_segment));
  gpu_check(cudaMalloc((void **)&bench->counts, 2 * sizeof(*bench->counts)));
  gpu_check(cudaMalloc((void **)&bench->difference, sizeof(*bench->difference)));
  gpu_check(cudaMemset(bench->difference, 0, sizeof(*bench->difference)));
  gpu_check(cudaMemset(bench->region.base, region_fill, bench->region.bytes));
  gpu_check(cudaMemset(bench->out.base, out_fill, bench->out.bytes));
  if (bench->scales.bytes != 0) {
    gpu_check(cudaMemset(bench->scales.base, out_fill, bench->scales.bytes));
  }
  return true;
}

static void bench_deinit(struct bench *bench) {
  gpu_memory_free(&bench->region);
  gpu_memory_free(&bench->out);
  gpu_memory_free(&bench->scales);
  gpu_memory_free(&bench->rows);
  gpu_memory_free(&bench->slots);
  gpu_memory_free(&bench->segments);
  gpu_check(cudaFree(bench->counts));
  gpu_check(cudaFree(bench->difference));
}

static void run_ops(struct bench *bench, uint32_t layer_index, const struct picks *slots,
                    const struct picks *outputs) {
  static int32_t slot_values[rows_max];
  static struct kvp_segment segments[rows_max];
  const struct kvp_format_sizes *sizes = &bench->geometry.sizes;
  uint64_t count = slots->count;
  for (uint64_t i = 0; i < count; i++) {
    int32_t token = (int32_t)(slots->values[i] % bench->geometry.tokens_per_block);
    slot_values[i] = (int32_t)slots->values[i];
    segments[i] = (struct kvp_segment){(int32_t)(slots->values[i] / bench->geometry.tokens_per_block), token,
                                       token + 1, (int32_t)outputs->values[i]};
  }
  gpu_check(cudaMemcpy(bench->slots.base, slot_values, count * sizeof(slot_values[0]), cudaMemcpyHostToDevice));
  gpu_check(cudaMemcpy(bench->segments.base, segments, count * sizeof(segments[0]), cudaMemcpyHostToDevice));
  gpu_check(cudaMemset(bench->counts, 0, 2 * sizeof(*bench->counts)));
  const struct kvp_rows source = {bench->rows.base, sizes->row_bytes};
  const struct kvp_layer layer = {bench->region.base + layer_index * bench->geometry.layer_stride_bytes,
                                  &bench->geometry};
  const struct kvp_store_params store = {
      .layer = layer, .source = source, .slots = (const void *)bench->slots.base, .row_count = count};
  const struct kvp_load_params load = {
      .layer = layer,
      .segments = (const void *)bench->segments.base,
      .segment_count = count,
      .total_k = bench->total_k,
      .out = {bench->out.base, sizes->loaded_row_bytes},
      .scales = {bench->scales.bytes == 0 ? NULL : bench->scales.base, bench->scale_stride_bytes},
      .rows = count,
      .segment_rows_max = 1,
  };
  device_rows_make(&source, count, sizes->elements, seed + layer_index, 0, NULL);
  gpu_check(kvp_cuda_store_launch(&store, bench->counts, NULL));
  gpu_check(kvp_cuda_load_launch(&load, bench->counts + 1, NULL));
  gpu_check(cudaDeviceSynchronize());
}

/* Compares, and puts back what was there before. */
static void check_bytes(const char *what, uint64_t index, uint8_t *device, const uint8_t *expected, uint64_t bytes,
                        uint8_t fill) {
  static uint8_t found[twin_bytes_max];
  if (bytes == 0) {
    return;
  }
  gpu_check(cudaMemcpy(found, device, bytes, cudaMemcpyDeviceToHost));
  if (memcmp(found, expected, bytes) != 0) {
    report_failed("%s %llu, %llu bytes at device address %p: not what the host has", what, (unsigned long long)index,
                  (unsigned long long)bytes, (void *)device);
  }
  gpu_check(cudaMemset(device, fill, bytes));
}

static void check_row(struct bench *bench, uint32_t layer, uint64_t row, uint64_t slot, uint64_t output) {
  static struct host_twin twin;
  const struct kvp_geometry *geometry = &bench->geometry;
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  host_twin_make(geometry->format, bench->shape->width, seed + layer, row, &twin);
  uint8_t *block = bench->region.base + layer * geometry->layer_stride_bytes +
                   slot / geometry->tokens_per_block * geometry->block_stride_bytes;
  uint64_t token = slot % geometry->tokens_per_block;
  if (geometry->format->token_interleaved) {
    check_bytes("record of slot", slot, block + token * sizes->bytes_per_token, twin.record, sizes->bytes_per_token,
                region_fill);
  } else {
    uint8_t *scales = block + geometry->tokens_per_block * (uint64_t)sizes->data_bytes;
    check_bytes("data of slot", slot, block + token * sizes->data_bytes, twin.record, sizes->data_bytes, region_fill);
    check_bytes("scales of slot", slot, scales + token * sizes->scale_bytes, twin.record + sizes->data_bytes,
                sizes->scale_bytes, region_fill);
  }
  check_bytes("output row", output, bench->out.base + output * sizes->loaded_row_bytes, twin.loaded,
              sizes->loaded_row_bytes, out_fill);
  check_bytes("output scale", output, bench->scales.base + output * bench->scale_stride_bytes, twin.scales,
              sizes->loaded_scale_bytes, out_fill);
}

static void check_untouched(struct bench *bench, const char *what, const struct gpu_memory *memory, uint8_t fill) {
  struct device_difference found;
  device_bytes_expect(memory->base, fill, memory->bytes, bench->difference, NULL);
  gpu_check(cudaDeviceSynchronize());
  gpu_check(cudaMemcpy(&found, bench->difference, sizeof(found), cudaMemcpyDeviceToHost));
  if (found.count != 0) {
    report_failed("%s: %llu words written that nobody named, the first at byte %llu", what, found.count,
                  8 * ~found.inverse);
  }
}

static void run_shape(const struct shape *shape) {
  static struct picks slots;
  static struct picks outputs;
  struct bench bench;
  report_begin("large %s", shape->name);
  if (!bench_init(&bench, shape)) {
    return;
  }
  uint64_t rows = 0;
  for (uint32_t layer = 0; layer < shape->num_layers; layer++) {
    pick_slots(&bench.geometry, layer, &slots);
    pick_outputs(&bench, slots.count, &outputs);
    if (slots.count > rows_max || outputs.count != slots.count) {
      report_failed("%llu slots and %llu outputs were chosen", (unsigned long long)slots.count,
                    (unsigned long long)outputs.count);
    }
    run_ops(&bench, layer, &slots, &outputs);
    for (uint64_t i = 0; i < slots.count; i++) {
      check_row(&bench, layer, i, slots.values[i], outputs.values[i]);
    }
    check_untouched(&bench, "region", &bench.region, region_fill);
    check_untouched(&bench, "out", &bench.out, out_fill);
    check_untouched(&bench, "scales", &bench.scales, out_fill);
    rows += slots.count;
  }
  report_passed("region %.1f GB, %llu rows, slots up to %llu, output of %.1f GB",
                (double)bench.geometry.region_bytes / 1e9, (unsigned long long)rows,
                (unsigned long long)slots.values[slots.count - 1],
                (double)(bench.total_k * bench.geometry.sizes.loaded_row_bytes) / 1e9);
  bench_deinit(&bench);
}

int main(void) {
  gpu_open();
  for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
    run_shape(&shapes[i]);
  }
  return 0;
}
