/* The CUDA kernels as variants of the host kernels, one for each size that kernels come in: the programs of
 * tests/contract/ run on them unchanged. What an op names is copied into device memory (cuda_arrays.h), the index ops are
 * in cuda_variant_index.c.
 */
#include "tests/gpu/cuda_variant.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "kernels/cuda/launch.h"
#include "kernels/host/variant.h"
#include "tests/gpu/cuda_arrays.h"
#include "tests/gpu/gpu.h"

static uint64_t slots_skipped(const int32_t *slots, uint64_t row_begin, uint64_t row_end) {
  uint64_t skipped = 0;
  for (uint64_t i = row_begin; i < row_end; i++) {
    skipped += slots == NULL || slots[i] == -1;
  }
  return skipped;
}

/* Everything of rows [row_begin, row_end) but where they come from. */
static void put_store(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                      struct kvp_store_params *out) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  const uint64_t rows = row_end - row_begin;
  *out = *params;
  out->row_count = rows;
  out->layer.base =
      cuda_arrays_put_written(AREA_LAYER, params->layer.base, geometry->layer_stride_bytes, alignment_layer);
  if (params->slots != NULL) {
    out->slots = cuda_arrays_put(AREA_INDEX, params->slots + row_begin, rows * sizeof(int32_t), alignment_index);
  }
  if (params->cast_back.base != NULL) {
    const uint64_t stride = params->cast_back.stride_bytes;
    out->cast_back.base =
        cuda_arrays_put_written(AREA_OUT, params->cast_back.base + row_begin * stride,
                                cuda_view_bytes(rows, stride, geometry->sizes.row_bytes), alignment_view);
  }
  out->check.entries = cuda_arrays_put_owners(&params->check, geometry->num_blocks);
  out->rows_skipped = params->check.entries == NULL ? slots_skipped(params->slots, row_begin, row_end) : 0;
}

/* Source rows of output rows [row_begin, row_end): those, or all of them through a gather index. */
static void put_source(const struct kvp_rows *source, const int32_t *gather, uint64_t source_rows, uint64_t row_bytes,
                       uint64_t row_begin, uint64_t row_end, struct kvp_rows *out_source,
                       const int32_t **out_gather) {
  uint64_t first = row_begin;
  uint64_t rows = row_end - row_begin;
  if (gather != NULL) {
    *out_gather = cuda_arrays_put(AREA_SECOND_INDEX, gather + row_begin, rows * sizeof(int32_t), alignment_index);
    first = 0;
    rows = source_rows;
  }
  out_source->base = cuda_arrays_put(AREA_SOURCE, source->base + first * source->stride_bytes,
                                     cuda_view_bytes(rows, source->stride_bytes, row_bytes), alignment_view);
}

/* Every other time by the launch that an assemble has for its parts. */
static bool as_a_part(const struct kvp_geometry *geometry) {
  static bool other;
  other = !other;
  return other && (geometry == NULL || geometry->sizes.loaded_scale_bytes == 0);
}

static cudaError_t launch_store(const struct kvp_store_params *device) {
  const struct kvp_cuda_assembly assembly = {.store = device, .store_counts = cuda_arrays_counts(0)};
  return as_a_part(device->layer.geometry)
             ? kvp_cuda_assemble_launch(&assembly, cuda_arrays_stream())
             : kvp_cuda_store_launch(device, cuda_arrays_counts(0), cuda_arrays_stream());
}

static void cuda_store(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                       struct kvp_op_counts *counts) {
  struct kvp_store_params device;
  cuda_arrays_begin(0);
  put_store(params, row_begin, row_end, &device);
  put_source(&params->source, params->gather, params->source_rows, params->layer.geometry->sizes.row_bytes, row_begin,
             row_end, &device.source, &device.gather);
  gpu_check(launch_store(&device));
  cuda_arrays_get();
  struct kvp_op_counts told = {0};
  kvp_cuda_store_counts(&device, cuda_arrays_found(0), &told);
  cuda_counts_add(counts, &told);
}

static void cuda_copy_rows(const struct kvp_copy_rows_params *params, uint64_t row_begin, uint64_t row_end,
                           struct kvp_op_counts *counts) {
  struct kvp_copy_rows_params device = *params;
  const uint64_t stride = params->out.stride_bytes;
  cuda_arrays_begin(0);
  device.row_count = row_end - row_begin;
  put_source(&params->source, params->gather, params->source_rows, params->row_bytes, row_begin, row_end,
             &device.source, &device.gather);
  device.out.base =
      cuda_arrays_put_written(AREA_OUT, params->out.base + row_begin * stride,
                              cuda_view_bytes(device.row_count, stride, params->row_bytes), alignment_view);
  const struct kvp_cuda_assembly assembly = {.copy = &device, .copy_counts = cuda_arrays_counts(0)};
  gpu_check(as_a_part(NULL) ? kvp_cuda_assemble_launch(&assembly, cuda_arrays_stream())
                            : kvp_cuda_copy_rows_launch(&device, cuda_arrays_counts(0), cuda_arrays_stream()));
  cuda_arrays_get();
  struct kvp_op_counts told = {0};
  kvp_cuda_copy_rows_counts(&device, cuda_arrays_found(0), &told);
  cuda_counts_add(counts, &told);
}

/* The rows behind the first `rows` of an op that is in device memory. */
static struct kvp_fused_store_params rest_of(const struct kvp_fused_store_params *op, uint64_t rows,
                                             const int32_t *slots) {
  struct kvp_fused_store_params rest = *op;
  rest.store.row_count -= rows;
  rest.store.slots += rows;
  rest.store.source.base += rows * rest.store.source.stride_bytes;
  rest.store.cast_back.base += rest.store.cast_back.base == NULL ? 0 : rows * rest.store.cast_back.stride_bytes;
  rest.store.rows_skipped -= op->store.check.entries == NULL ? slots_skipped(slots, 0, rows) : 0;
  rest.positions += rows;
  return rest;
}

/* Every other time as two ops of one launch. */
static void launch_fused(const struct kvp_fused_store_params *op, const int32_t *slots,
                         struct kvp_op_counts *counts) {
  static bool halves;
  const uint64_t rows = op->store.row_count / 2;
  halves = !halves;
  struct kvp_fused_store_params ops[cuda_ops_max] = {*op};
  const struct kvp_fused_store_params *const params[] = {&ops[0], &ops[1]};
  struct kvp_cuda_counts *const found[] = {cuda_arrays_counts(0), cuda_arrays_counts(1)};
  const bool two = halves && rows > 0;
  if (two) {
    ops[1] = rest_of(op, rows, slots);
    ops[0].store.row_count = rows;
    ops[0].store.rows_skipped -= ops[1].store.rows_skipped;
  }
  gpu_check(two ? kvp_cuda_fused_stores_launch(params, found, 2, cuda_arrays_stream())
                : kvp_cuda_fused_store_launch(params[0], found[0], cuda_arrays_stream()));
  cuda_arrays_get();
  for (uint32_t i = 0; i < (two ? 2 : 1); i++) {
    struct kvp_op_counts told = {0};
    kvp_cuda_fused_store_counts(params[i], cuda_arrays_found(i), &told);
    cuda_counts_add(counts, &told);
  }
}

static void cuda_fused_store(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                             struct kvp_op_counts *counts) {
  struct kvp_fused_store_params device = *params;
  const uint64_t row_bytes = params->store.layer.geometry->sizes.row_bytes;
  const uint64_t rows = row_end - row_begin;
  cuda_arrays_begin(0);
  put_store(&params->store, row_begin, row_end, &device.store);
  put_source(&params->store.source, NULL, 0, row_bytes, row_begin, row_end, &device.store.source, NULL);
  device.norm_weight = cuda_arrays_put(AREA_WEIGHT, params->norm_weight, row_bytes, alignment_view);
  device.positions =
      cuda_arrays_put(AREA_SECOND_INDEX, params->positions + row_begin, rows * sizeof(int32_t), alignment_index);
  device.cos_sin.base = cuda_arrays_put(
      AREA_TABLE, params->cos_sin.base,
      cuda_view_bytes(params->position_count, params->cos_sin.stride_bytes, params->rotary_dims * sizeof(float)),
      alignment_view);
  launch_fused(&device, params->store.slots + row_begin, counts);
}

typedef cudaError_t blocks_launch_fn(const struct kvp_blocks_params *params, struct kvp_cuda_counts *counts,
                                     cudaStream_t stream);
typedef void blocks_counts_fn(const struct kvp_blocks_params *params, const struct kvp_cuda_counts *found,
                              struct kvp_op_counts *out);

/* A launch is of whole layers, so a range is some of the first layer's entries, whole layers, some of the last's. */
static void cuda_blocks(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                        uint32_t entry_words, blocks_launch_fn *launch, blocks_counts_fn *count,
                        struct kvp_op_counts *counts) {
  for (uint64_t unit = unit_begin; unit < unit_end;) {
    struct kvp_geometry geometry = *params->geometry;
    const uint64_t layer = unit / params->count;
    const uint64_t entry = unit % params->count;
    const bool whole = entry == 0 && unit_end - unit >= params->count;
    const uint64_t left = unit_end - unit < params->count - entry ? unit_end - unit : params->count - entry;
    geometry.num_layers = whole ? (uint32_t)((unit_end - unit) / params->count) : 1;
    struct kvp_blocks_params device = {.geometry = &geometry, .count = whole ? params->count : left};
    cuda_arrays_begin(0);
    device.base = cuda_arrays_put_written(AREA_LAYER, params->base + layer * geometry.layer_stride_bytes,
                                          geometry.num_layers * geometry.layer_stride_bytes, alignment_layer);
    device.pairs = cuda_arrays_put(AREA_INDEX, params->pairs + entry * entry_words,
                                   device.count * entry_words * sizeof(int32_t), alignment_index);
    gpu_check(launch(&device, cuda_arrays_counts(0), cuda_arrays_stream()));
    cuda_arrays_get();
    struct kvp_op_counts told = {0};
    count(&device, cuda_arrays_found(0), &told);
    cuda_counts_add(counts, &told);
    unit += geometry.num_layers * device.count;
  }
}

static void cuda_copy_blocks(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                             struct kvp_op_counts *counts) {
  cuda_blocks(params, unit_begin, unit_end, 2, kvp_cuda_copy_blocks_launch, kvp_cuda_copy_blocks_counts, counts);
}

static void cuda_zero_blocks(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                             struct kvp_op_counts *counts) {
  cuda_blocks(params, unit_begin, unit_end, 1, kvp_cuda_zero_blocks_launch, kvp_cuda_zero_blocks_counts, counts);
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

/* As the parts of an assemble: one, or where the op has no budget for its rows, half the segments each. */
static void launch_load_parts(const struct kvp_load_params *op, const struct kvp_segment *segments,
                              struct kvp_op_counts *counts) {
  const uint64_t half = op->check.entries == NULL ? op->segment_count / 2 : op->segment_count;
  struct kvp_load_params ops[] = {*op, *op};
  ops[0].segment_count = half;
  ops[1].segment_count -= half;
  ops[1].segments += half;
  know_segments(&ops[0], segments, half);
  know_segments(&ops[1], segments + half, ops[1].segment_count);
  const struct kvp_cuda_assembly assembly = {.loads = {&ops[0], &ops[1]},
                                             .load_counts = {cuda_arrays_counts(0), cuda_arrays_counts(1)}};
  gpu_check(kvp_cuda_assemble_launch(&assembly, cuda_arrays_stream()));
  cuda_arrays_get();
  for (uint32_t i = 0; i < 2; i++) {
    struct kvp_op_counts told = {0};
    kvp_cuda_load_counts(&ops[i], cuda_arrays_found(i), &told);
    cuda_counts_add(counts, &told);
  }
}

static void launch_load(const struct kvp_load_params *op, const struct kvp_segment *segments,
                        struct kvp_op_counts *counts) {
  if (as_a_part(op->layer.geometry)) {
    launch_load_parts(op, segments, counts);
    return;
  }
  gpu_check(kvp_cuda_load_launch(op, cuda_arrays_counts(0), cuda_arrays_stream()));
  cuda_arrays_get();
  struct kvp_op_counts told = {0};
  kvp_cuda_load_counts(op, cuda_arrays_found(0), &told);
  cuda_counts_add(counts, &told);
}

static void cuda_load(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                      struct kvp_op_counts *counts) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  uint64_t count = segment_end - segment_begin;
  struct kvp_load_params device = *params;
  cuda_arrays_begin(params->rows_taken == NULL ? 0 : *params->rows_taken);
  device.segment_count = count;
  device.layer.base = cuda_arrays_put(AREA_LAYER, params->layer.base, geometry->layer_stride_bytes, alignment_layer);
  device.segments = cuda_arrays_put(AREA_INDEX, params->segments + segment_begin, count * sizeof(struct kvp_segment),
                                    alignment_index);
  device.out.base = cuda_arrays_put_written(
      AREA_OUT, params->out.base, cuda_view_bytes(params->total_k, params->out.stride_bytes, sizes->loaded_row_bytes),
      alignment_view);
  if (sizes->loaded_scale_bytes != 0) {
    device.scales.base = cuda_arrays_put_written(
        AREA_SCALES, params->scales.base,
        cuda_view_bytes(params->total_k, params->scales.stride_bytes, sizes->loaded_scale_bytes), alignment_view);
  }
  device.check.entries = cuda_arrays_put_owners(&params->check, geometry->num_blocks);
  device.rows_taken = params->check.entries == NULL ? NULL : &cuda_arrays_counts(0)->rows_taken;
  know_segments(&device, params->segments + segment_begin, count);
  launch_load(&device, params->segments + segment_begin, counts);
  if (params->rows_taken != NULL) {
    *params->rows_taken = cuda_arrays_found(0)->rows_taken;
  }
}

static kvp_host_store_fn *const stores[kvp_format_count] = {
    [KVP_FORMAT_V41] = cuda_store,           [KVP_FORMAT_V41_FP4] = cuda_store, [KVP_FORMAT_INDEX_FP4] = cuda_store,
    [KVP_FORMAT_INDEX_FP8_F32] = cuda_store, [KVP_FORMAT_BF16] = cuda_store,    [KVP_FORMAT_INDEX_MXFP8] = cuda_store,
};

static kvp_host_load_fn *const loads[kvp_format_count] = {
    [KVP_FORMAT_V41] = cuda_load,           [KVP_FORMAT_V41_FP4] = cuda_load, [KVP_FORMAT_INDEX_FP4] = cuda_load,
    [KVP_FORMAT_INDEX_FP8_F32] = cuda_load, [KVP_FORMAT_BF16] = cuda_load,    [KVP_FORMAT_INDEX_MXFP8] = cuda_load,
};

static kvp_host_fused_store_fn *const fused_stores[kvp_format_count] = {
    [KVP_FORMAT_V41] = cuda_fused_store,         [KVP_FORMAT_V41_FP4] = cuda_fused_store,
    [KVP_FORMAT_INDEX_FP4] = cuda_fused_store,   [KVP_FORMAT_INDEX_FP8_F32] = cuda_fused_store,
    [KVP_FORMAT_INDEX_MXFP8] = cuda_fused_store, [KVP_FORMAT_BF16] = cuda_fused_store,
};

static const struct kvp_host_moves moves = {
    .copy_rows = cuda_copy_rows, .copy_blocks = cuda_copy_blocks, .zero_blocks = cuda_zero_blocks};

/* The same functions: what differs is which kernels their launches get. An op of a test has so few rows that it gets the
 * kernels for many only where they are asked for. */
#define KVP_CUDA_VARIANT(name)                                                                                       \
  {                                                                                                                  \
    .isa = (name), .store = stores, .load = loads, .fused_store = fused_stores, .index = &cuda_variant_index,        \
    .moves = &moves, .fused_elements_max = kvp_cuda_fused_elements_max                                               \
  }

enum { variant_count = 4 };
static struct {
  const struct kvp_host_variant variant;
  const enum kvp_cuda_size size;
  const uint32_t blocks_max;
  uint64_t ops; /* run by it */
} variants[variant_count] = {
    {KVP_CUDA_VARIANT("cuda"), KVP_CUDA_SIZE_AUTOMATIC, 0, 0},
    {KVP_CUDA_VARIANT("cuda, many rows"), KVP_CUDA_SIZE_MANY, 0, 0},
    {KVP_CUDA_VARIANT("cuda, many rows, no bulk copies"), KVP_CUDA_SIZE_MANY_NO_BULK, 0, 0},
    {KVP_CUDA_VARIANT("cuda, many rows, 2 blocks"), KVP_CUDA_SIZE_MANY, 2, 0},
};
static size_t present; /* the variant whose kernels run */

/* What is asked for is what runs, until another one is. */
const struct kvp_host_variant *kvp_host_variant_get(size_t index) {
  static uint64_t ops;
  cuda_arrays_open();
  variants[present].ops += cuda_arrays_ops() - ops;
  ops = cuda_arrays_ops();
  if (index >= variant_count) {
    return NULL;
  }
  present = index;
  kvp_cuda_size_pin(variants[index].size, variants[index].blocks_max);
  return &variants[index].variant;
}

/* For run.sh, which counts them. */
__attribute__((destructor)) static void print_ops(void) {
  for (size_t i = 0; i < variant_count; i++) {
    printf("variant %s: %llu ops\n", variants[i].variant.isa, (unsigned long long)variants[i].ops);
  }
}

/* Memory that is mapped but never filled, and memory that another process writes, is the host's: contract_large and
 * contract_hostile are about a GPU's. */
__attribute__((constructor)) static void leave_out_host_memory(void) {
  cmocka_set_skip_filter("test_host_*");
}
