/* Millions of random rows of each format through the CUDA kernels, in batches with slots in random order.
 *
 * Of every batch: what a load returns is the store's cast-back, byte for byte (index formats: the records); a sample
 * of records and loaded rows is what the host kernels make. At the end all rows are loaded once more, block by block in
 * another order, and must be what they were when they were stored.
 *
 *   contract_population [rows] [rows of a batch] [format]
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

enum { tokens_per_block = 64, seed = 20260930, sample_rows = 4096 };

static uint64_t rows_wanted = 20000000;
static uint64_t batch_wanted = 5000000;

struct crowd {
  const struct kvp_format *format;
  struct kvp_geometry geometry;
  struct device_population slots_of;
  uint64_t rows;
  uint64_t batch_rows;
  struct gpu_memory region;
  struct gpu_memory source;
  struct gpu_memory cast_back;
  struct gpu_memory out;
  struct gpu_memory scales;
  struct gpu_memory slots;
  struct gpu_memory segments;
  struct gpu_memory hashes;
  struct kvp_cuda_counts *counts;       /* device: of the store, of the load */
  struct device_difference *difference; /* device */
  uint64_t nonfinite;
  cudaStream_t stream;
};

static uint64_t bytes_needed(const struct kvp_format_sizes *sizes, uint64_t rows, uint64_t batch) {
  return rows * (sizes->bytes_per_token + sizeof(uint64_t)) +
         batch * (2 * (uint64_t)sizes->row_bytes + sizes->loaded_row_bytes + sizes->loaded_scale_bytes + 20) +
         (UINT64_C(1) << 30);
}

static void crowd_init(struct crowd *crowd, const struct kvp_format *format) {
  *crowd = (struct crowd){.format = format, .rows = rows_wanted, .batch_rows = batch_wanted};
  struct kvp_format_sizes sizes;
  struct kvp_error error;
  if (kvp_format_sizes_init(format, 0, &sizes, &error) != KVP_OK) {
    report_failed("%s", error.text);
  }
  while (crowd->rows > 4096 && bytes_needed(&sizes, crowd->rows, crowd->batch_rows) > gpu_bytes_free()) {
    crowd->rows /= 2;
    crowd->batch_rows /= 2;
  }
  crowd->batch_rows = crowd->batch_rows / tokens_per_block * tokens_per_block;
  crowd->rows = crowd->rows / crowd->batch_rows * crowd->batch_rows;
  uint32_t blocks = (uint32_t)(crowd->rows / tokens_per_block);
  if (kvp_geometry_init(format, 0, tokens_per_block, blocks, 1, &crowd->geometry, &error) != KVP_OK) {
    report_failed("%s", error.text);
  }
  crowd->slots_of = (struct device_population){crowd->rows, seed + (uint64_t)format->id, tokens_per_block};
  crowd->region = gpu_memory_make(crowd->geometry.region_bytes);
  crowd->source = gpu_memory_make(crowd->batch_rows * sizes.row_bytes);
  crowd->cast_back = gpu_memory_make(crowd->batch_rows * sizes.row_bytes);
  crowd->out = gpu_memory_make(crowd->batch_rows * sizes.loaded_row_bytes);
  crowd->scales = gpu_memory_make(crowd->batch_rows * 4);
  crowd->slots = gpu_memory_make(crowd->batch_rows * sizeof(int32_t));
  crowd->segments = gpu_memory_make(crowd->batch_rows * sizeof(struct kvp_segment));
  crowd->hashes = gpu_memory_make(crowd->rows * sizeof(uint64_t));
  gpu_check(cudaMalloc((void **)&crowd->counts, 2 * sizeof(*crowd->counts)));
  gpu_check(cudaMalloc((void **)&crowd->difference, sizeof(*crowd->difference)));
  gpu_check(cudaMemset(crowd->difference, 0, sizeof(*crowd->difference)));
  gpu_check(cudaStreamCreateWithFlags(&crowd->stream, cudaStreamNonBlocking));
}

static void crowd_deinit(struct crowd *crowd) {
  gpu_memory_free(&crowd->region);
  gpu_memory_free(&crowd->source);
  gpu_memory_free(&crowd->cast_back);
  gpu_memory_free(&crowd->out);
  gpu_memory_free(&crowd->scales);
  gpu_memory_free(&crowd->slots);
  gpu_memory_free(&crowd->segments);
  gpu_memory_free(&crowd->hashes);
  gpu_check(cudaFree(crowd->counts));
  gpu_check(cudaFree(crowd->difference));
  gpu_check(cudaStreamDestroy(crowd->stream));
}

static struct kvp_layer crowd_layer(struct crowd *crowd) {
  return (struct kvp_layer){crowd->region.base, &crowd->geometry};
}

static bool is_index(const struct crowd *crowd) {
  return crowd->geometry.sizes.loaded_scale_bytes != 0;
}

static void expect_equal(struct crowd *crowd, const char *what, uint64_t first) {
  struct device_difference found;
  gpu_check(cudaStreamSynchronize(crowd->stream));
  gpu_check(cudaMemcpy(&found, crowd->difference, sizeof(found), cudaMemcpyDeviceToHost));
  if (found.count != 0) {
    report_failed("%s: %llu differ in the batch from row %llu on, first at %llu", what, found.count,
                  (unsigned long long)first, ~found.inverse);
  }
}

/* segment_rows: of each. */
static struct kvp_op_counts load(struct crowd *crowd, uint64_t segment_count, uint64_t segment_rows) {
  const struct kvp_format_sizes *sizes = &crowd->geometry.sizes;
  const struct kvp_load_params params = {
      .layer = crowd_layer(crowd),
      .segments = (const void *)crowd->segments.base,
      .segment_count = segment_count,
      .total_k = crowd->batch_rows,
      .out = {crowd->out.base, sizes->loaded_row_bytes},
      .scales = {is_index(crowd) ? crowd->scales.base : NULL, sizes->loaded_scale_bytes},
      .rows = segment_count * segment_rows,
      .segment_rows_max = segment_rows,
  };
  struct kvp_cuda_counts found;
  gpu_check(cudaMemsetAsync(crowd->out.base, 0x5A, crowd->batch_rows * sizes->loaded_row_bytes, crowd->stream));
  gpu_check(cudaMemsetAsync(crowd->counts + 1, 0, sizeof(*crowd->counts), crowd->stream));
  gpu_check(kvp_cuda_load_launch(&params, crowd->counts + 1, crowd->stream));
  gpu_check(cudaStreamSynchronize(crowd->stream));
  gpu_check(cudaMemcpy(&found, crowd->counts + 1, sizeof(found), cudaMemcpyDeviceToHost));
  struct kvp_op_counts counts = {0};
  kvp_cuda_load_counts(&params, &found, &counts);
  if (counts.rows_loaded != crowd->batch_rows || counts.rows_rejected != 0) {
    report_failed("%llu rows loaded, %llu rejected, %llu were asked for", (unsigned long long)counts.rows_loaded,
                  (unsigned long long)counts.rows_rejected, (unsigned long long)crowd->batch_rows);
  }
  return counts;
}

static void store(struct crowd *crowd) {
  const struct kvp_format_sizes *sizes = &crowd->geometry.sizes;
  const struct kvp_store_params params = {
      .layer = crowd_layer(crowd),
      .source = {crowd->source.base, sizes->row_bytes},
      .slots = (const void *)crowd->slots.base,
      .row_count = crowd->batch_rows,
      .cast_back = {is_index(crowd) ? NULL : crowd->cast_back.base, sizes->row_bytes},
  };
  struct kvp_cuda_counts found;
  gpu_check(cudaMemsetAsync(crowd->counts, 0, sizeof(*crowd->counts), crowd->stream));
  gpu_check(kvp_cuda_store_launch(&params, crowd->counts, crowd->stream));
  gpu_check(cudaStreamSynchronize(crowd->stream));
  gpu_check(cudaMemcpy(&found, crowd->counts, sizeof(found), cudaMemcpyDeviceToHost));
  struct kvp_op_counts counts = {0};
  kvp_cuda_store_counts(&params, &found, &counts);
  if (counts.rows_stored != crowd->batch_rows || counts.rows_skipped != 0 || counts.rows_rejected != 0) {
    report_failed("%llu rows stored, %llu skipped, %llu rejected of %llu", (unsigned long long)counts.rows_stored,
                  (unsigned long long)counts.rows_skipped, (unsigned long long)counts.rows_rejected,
                  (unsigned long long)crowd->batch_rows);
  }
  crowd->nonfinite += counts.rows_nonfinite;
}

/* Records of the whole batch, packed, where the cast-back of a main cache would be. */
static void compare_index(struct crowd *crowd) {
  const struct kvp_format_sizes *sizes = &crowd->geometry.sizes;
  struct kvp_layer layer = crowd_layer(crowd);
  uint8_t *records = crowd->cast_back.base;
  device_records_gather(&layer, (const void *)crowd->slots.base, crowd->batch_rows, records, crowd->stream);
  device_index_compare(records, crowd->out.base, crowd->scales.base, crowd->batch_rows, sizes->data_bytes,
                       crowd->difference, crowd->stream);
}

static void fetch(void *to, const uint8_t *from, uint64_t bytes) {
  gpu_check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

/* Neighbouring rows of the batch, and their records wherever they are. */
static void check_sample(struct crowd *crowd, uint64_t first) {
  const struct kvp_format_sizes *sizes = &crowd->geometry.sizes;
  static uint8_t records[(size_t)sample_rows * twin_bytes_max];
  static uint8_t loaded[(size_t)sample_rows * twin_bytes_max];
  static uint8_t scales[(size_t)sample_rows * 4];
  uint64_t count = crowd->batch_rows < sample_rows ? crowd->batch_rows : sample_rows;
  uint64_t begin = mix_bits(first + 1) % (crowd->batch_rows - count + 1);
  struct kvp_layer layer = crowd_layer(crowd);
  struct gpu_memory packed = gpu_memory_make(count * sizes->bytes_per_token);
  device_records_gather(&layer, (const int32_t *)(const void *)crowd->slots.base + begin, count, packed.base,
                        crowd->stream);
  gpu_check(cudaStreamSynchronize(crowd->stream));
  fetch(records, packed.base, count * sizes->bytes_per_token);
  fetch(loaded, crowd->out.base + begin * sizes->loaded_row_bytes, count * sizes->loaded_row_bytes);
  if (is_index(crowd)) {
    fetch(scales, crowd->scales.base + begin * 4, count * 4);
  }
  gpu_memory_free(&packed);
  static struct host_twin twin;
  for (uint64_t i = 0; i < count; i++) {
    unsigned long long row = first + begin + i;
    host_twin_make(crowd->format, 0, seed, row, &twin);
    if (memcmp(records + i * sizes->bytes_per_token, twin.record, sizes->bytes_per_token) != 0) {
      report_failed("the record of row %llu is not the host's", row);
    }
    if (memcmp(loaded + i * sizes->loaded_row_bytes, twin.loaded, sizes->loaded_row_bytes) != 0 ||
        (is_index(crowd) && memcmp(scales + i * 4, twin.scales, 4) != 0)) {
      report_failed("loaded row %llu is not the host's", row);
    }
  }
}

static struct device_loaded loaded_of(const struct crowd *crowd) {
  const struct kvp_format_sizes *sizes = &crowd->geometry.sizes;
  return (struct device_loaded){crowd->out.base, crowd->scales.base, sizes->loaded_row_bytes,
                                sizes->loaded_scale_bytes};
}

static void store_batch(struct crowd *crowd, uint64_t first) {
  const struct kvp_format_sizes *sizes = &crowd->geometry.sizes;
  const struct kvp_rows source = {crowd->source.base, sizes->row_bytes};
  struct kvp_segment *segments = (void *)crowd->segments.base;
  device_rows_make(&source, crowd->batch_rows, sizes->elements, seed, first, crowd->stream);
  device_slots_make(&crowd->slots_of, first, crowd->batch_rows, (void *)crowd->slots.base, segments, crowd->stream);
  store(crowd);
  (void)load(crowd, crowd->batch_rows, 1);
  if (is_index(crowd)) {
    compare_index(crowd);
  } else {
    device_bytes_compare(crowd->out.base, crowd->cast_back.base, crowd->batch_rows * sizes->row_bytes,
                         crowd->difference, crowd->stream);
  }
  expect_equal(crowd, "a load and what was stored", first);
  const struct device_loaded loaded = loaded_of(crowd);
  device_hashes_write(&loaded, segments, crowd->batch_rows, tokens_per_block, (void *)crowd->hashes.base,
                      crowd->stream);
  check_sample(crowd, first);
}

static void load_batch_again(struct crowd *crowd, uint64_t first) {
  struct kvp_segment *segments = (void *)crowd->segments.base;
  uint64_t blocks = crowd->batch_rows / tokens_per_block;
  device_blocks_make(&crowd->slots_of, first / tokens_per_block, blocks, segments, crowd->stream);
  (void)load(crowd, blocks, tokens_per_block);
  const struct device_loaded loaded = loaded_of(crowd);
  device_hashes_compare(&loaded, segments, blocks, tokens_per_block, (const void *)crowd->hashes.base,
                        crowd->difference, crowd->stream);
  expect_equal(crowd, "rows loaded at the end and when they were stored", first);
}

static void run_format(const struct kvp_format *format) {
  struct crowd crowd;
  report_begin("population %s", format->name);
  crowd_init(&crowd, format);
  for (uint64_t first = 0; first < crowd.rows; first += crowd.batch_rows) {
    store_batch(&crowd, first);
  }
  for (uint64_t first = 0; first < crowd.rows; first += crowd.batch_rows) {
    load_batch_again(&crowd, first);
  }
  uint64_t batches = crowd.rows / crowd.batch_rows;
  report_passed("%llu rows in %llu batches, region %.1f GB, %llu rows with non-finite input",
                (unsigned long long)crowd.rows, (unsigned long long)batches,
                (double)crowd.geometry.region_bytes / 1e9, (unsigned long long)crowd.nonfinite);
  crowd_deinit(&crowd);
}

int main(int argc, char **argv) {
  rows_wanted = argc > 1 ? strtoull(argv[1], NULL, 10) : rows_wanted;
  batch_wanted = argc > 2 ? strtoull(argv[2], NULL, 10) : batch_wanted;
  if (batch_wanted < tokens_per_block || rows_wanted < batch_wanted || rows_wanted > INT32_MAX) {
    (void)fprintf(stderr, "usage: contract_population [rows] [rows of a batch, at least %d] [format]\n",
                  tokens_per_block);
    return 1;
  }
  gpu_open();
  for (int id = 0; id < kvp_format_count; id++) {
    const struct kvp_format *format = kvp_format_get((enum kvp_format_id)id);
    if (argc <= 3 || strcmp(argv[3], format->name) == 0) {
      run_format(format);
    }
  }
  return 0;
}
