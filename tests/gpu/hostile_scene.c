/* See hostile_scene.h. */
#include "tests/gpu/hostile_scene.h"

#include <stdlib.h>
#include <string.h>

#include "proto/owner_entry.h"
#include "tests/gpu/report.h"

enum { page_bytes = 4096, source_seed = 5, twin_bytes_max = 2048 };

const char *scene_size_pin(size_t index) {
  static const struct {
    const char *name;
    enum kvp_cuda_size size;
  } sizes[scene_size_count] = {{"few rows", KVP_CUDA_SIZE_FEW},
                               {"many rows", KVP_CUDA_SIZE_MANY},
                               {"many rows, no bulk copies", KVP_CUDA_SIZE_MANY_NO_BULK}};
  kvp_cuda_size_pin(sizes[index].size, 0);
  return sizes[index].name;
}

static void *allocate(uint64_t bytes) {
  void *memory = aligned_alloc(page_bytes, (bytes + page_bytes - 1) / page_bytes * page_bytes);
  if (memory == NULL) {
    report_failed("out of memory: %llu bytes", (unsigned long long)bytes);
  }
  memset(memory, 0, bytes);
  return memory;
}

/* Four of eight are ours; a block of each other state among them. */
static uint64_t owner_entry(uint32_t block) {
  switch (block % 8) {
  case 3:
    return kvp_owner_entry_make(10, KVP_BLOCK_LEASED, scene_owner + 1);
  case 4:
    return kvp_owner_entry_make(10, KVP_BLOCK_SEALED, scene_owner);
  case 5:
    return block % 16 == 5 ? 0 : kvp_owner_entry_make(10, KVP_BLOCK_FREE, scene_owner);
  case 6:
    return kvp_owner_entry_make(10, KVP_BLOCK_QUARANTINED, scene_owner);
  case 7:
    return kvp_owner_entry_make(scene_epoch + 1 + block, KVP_BLOCK_LEASED, scene_owner);
  default:
    return kvp_owner_entry_make(block % 3 == 0 ? scene_epoch : 10, KVP_BLOCK_LEASED, scene_owner);
  }
}

bool scene_block_writable(const struct scene *scene, uint32_t block) {
  (void)scene;
  return block % 8 < 3;
}

bool scene_block_readable(const struct scene *scene, uint32_t block) {
  return scene_block_writable(scene, block) || block % 8 == 4;
}

static uint8_t *host_layer(const struct scene *scene) {
  return scene->host_region + scene_margin_bytes + scene_layer * scene->geometry.layer_stride_bytes;
}

/* Readable blocks hold records, all others one byte. */
static void fill_region(struct scene *scene) {
  const struct kvp_geometry *geometry = &scene->geometry;
  memset(scene->host_region, scene_foreign_byte, scene->region.bytes);
  uint8_t *row = allocate(geometry->sizes.row_bytes);
  const struct kvp_layer layer = {host_layer(scene), geometry};
  uint64_t slot_count = (uint64_t)geometry->num_blocks * geometry->tokens_per_block;
  for (uint64_t i = 0; i < slot_count; i++) {
    if (!scene_block_readable(scene, (uint32_t)(i / geometry->tokens_per_block))) {
      continue;
    }
    for (uint32_t element = 0; element < geometry->sizes.elements; element++) {
      uint16_t bits = row_element(source_seed + 1, i, element);
      memcpy(row + 2 * (size_t)element, &bits, sizeof(bits));
    }
    int32_t slot = (int32_t)i;
    const struct kvp_store_params store = {
        .layer = layer, .source = {row, geometry->sizes.row_bytes}, .slots = &slot, .row_count = 1};
    struct kvp_op_counts counts = {0};
    kvp_host_store(&store, 0, 1, &counts);
  }
  free(row);
  gpu_check(cudaMemcpy(scene->region.base, scene->host_region, scene->region.bytes, cudaMemcpyHostToDevice));
}

void scene_init(struct scene *scene, const struct kvp_format *format, uint32_t tokens_per_block, uint32_t num_blocks,
                uint64_t rows_max) {
  *scene = (struct scene){.rows_max = rows_max};
  struct kvp_error error;
  if (kvp_geometry_init(format, 0, tokens_per_block, num_blocks, scene_layers, &scene->geometry, &error) != KVP_OK) {
    report_failed("%s", error.text);
  }
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  scene->out_stride = sizes->row_bytes + 32;
  scene->scales_stride = 16;
  scene->region = gpu_memory_make(scene->geometry.region_bytes + 2 * (uint64_t)scene_margin_bytes);
  scene->source = gpu_memory_make(rows_max * sizes->row_bytes);
  scene->out = gpu_memory_make(rows_max * scene->out_stride + 2 * (uint64_t)scene_margin_bytes);
  scene->scales = gpu_memory_make(rows_max * scene->scales_stride + 2 * (uint64_t)scene_margin_bytes);
  scene->host_region = allocate(scene->region.bytes);
  uint64_t owner_bytes = (num_blocks * sizeof(uint64_t) + page_bytes - 1) / page_bytes * page_bytes;
  scene->owners = allocate(owner_bytes);
  for (uint32_t block = 0; block < num_blocks; block++) {
    scene->owners[block] = owner_entry(block);
  }
  gpu_check(cudaHostRegister(scene->owners, owner_bytes, cudaHostRegisterMapped));
  gpu_check(cudaHostGetDevicePointer((void **)&scene->owners_device, scene->owners, 0));
  gpu_check(cudaMalloc((void **)&scene->counts, sizeof(*scene->counts)));
  gpu_check(cudaStreamCreateWithFlags(&scene->stream, cudaStreamNonBlocking));
  fill_region(scene);
  gpu_check(cudaMemset(scene->source.base, 0, scene->source.bytes));
  gpu_check(cudaDeviceSynchronize());
  const struct kvp_rows source = {scene->source.base, sizes->row_bytes};
  device_rows_make(&source, rows_max, sizes->elements, source_seed, 0, scene->stream);
  scene_clear_outputs(scene);
}

void scene_deinit(struct scene *scene) {
  gpu_memory_free(&scene->region);
  gpu_memory_free(&scene->source);
  gpu_memory_free(&scene->out);
  gpu_memory_free(&scene->scales);
  gpu_check(cudaHostUnregister(scene->owners));
  gpu_check(cudaFree(scene->counts));
  gpu_check(cudaStreamDestroy(scene->stream));
  free(scene->owners);
  free(scene->host_region);
}

void scene_clear_outputs(struct scene *scene) {
  gpu_check(cudaMemsetAsync(scene->out.base, scene_out_fill, scene->out.bytes, scene->stream));
  gpu_check(cudaMemsetAsync(scene->scales.base, scene_out_fill, scene->scales.bytes, scene->stream));
  gpu_check(cudaStreamSynchronize(scene->stream));
}

static struct kvp_layer device_layer(const struct scene *scene) {
  return (struct kvp_layer){
      scene->region.base + scene_margin_bytes + scene_layer * scene->geometry.layer_stride_bytes, &scene->geometry};
}

static struct kvp_owner_check device_check(const struct scene *scene) {
  return (struct kvp_owner_check){scene->owners_device, scene_epoch, scene_owner};
}

struct kvp_store_params scene_store(const struct scene *scene, uint64_t row_count, bool cast_back) {
  return (struct kvp_store_params){
      .layer = device_layer(scene),
      .source = {scene->source.base, scene->geometry.sizes.row_bytes},
      .row_count = row_count,
      .cast_back = {cast_back ? scene->out.base + scene_margin_bytes : NULL, scene->out_stride},
      .check = device_check(scene),
  };
}

struct kvp_load_params scene_load(const struct scene *scene, uint64_t total_k) {
  bool scales = scene->geometry.sizes.loaded_scale_bytes != 0;
  return (struct kvp_load_params){
      .layer = device_layer(scene),
      .total_k = total_k,
      .out = {scene->out.base + scene_margin_bytes, scene->out_stride},
      .scales = {scales ? scene->scales.base + scene_margin_bytes : NULL, scene->scales_stride},
      .rows_taken = &scene->counts->rows_taken,
      .check = device_check(scene),
  };
}

static struct kvp_cuda_counts found_counts(struct scene *scene) {
  struct kvp_cuda_counts found;
  gpu_check(cudaStreamSynchronize(scene->stream));
  gpu_check(cudaMemcpy(&found, scene->counts, sizeof(found), cudaMemcpyDeviceToHost));
  return found;
}

struct kvp_op_counts scene_run_store(struct scene *scene, const struct kvp_store_params *params) {
  struct kvp_op_counts counts = {0};
  gpu_check(cudaMemsetAsync(scene->counts, 0, sizeof(*scene->counts), scene->stream));
  gpu_check(kvp_cuda_store_launch(params, scene->counts, scene->stream));
  const struct kvp_cuda_counts found = found_counts(scene);
  kvp_cuda_store_counts(params, &found, &counts);
  return counts;
}

struct kvp_op_counts scene_run_load(struct scene *scene, const struct kvp_load_params *params) {
  struct kvp_op_counts counts = {0};
  gpu_check(cudaMemsetAsync(scene->counts, 0, sizeof(*scene->counts), scene->stream));
  gpu_check(kvp_cuda_load_launch(params, scene->counts, scene->stream));
  const struct kvp_cuda_counts found = found_counts(scene);
  kvp_cuda_load_counts(params, &found, &counts);
  return counts;
}

static uint8_t *fetched(const struct gpu_memory *memory) {
  uint8_t *copy = allocate(memory->bytes);
  gpu_check(cudaMemcpy(copy, memory->base, memory->bytes, cudaMemcpyDeviceToHost));
  return copy;
}

void scene_check_region(struct scene *scene, bool all) {
  uint8_t *found = fetched(&scene->region);
  const struct kvp_geometry *geometry = &scene->geometry;
  uint64_t layer_begin = scene_margin_bytes + scene_layer * geometry->layer_stride_bytes;
  for (uint32_t block = 0; !all && block < geometry->num_blocks; block++) {
    if (scene_block_writable(scene, block)) {
      uint64_t at = layer_begin + block * geometry->block_stride_bytes;
      memcpy(found + at, scene->host_region + at, geometry->block_stride_bytes);
    }
  }
  for (uint64_t i = 0; i < scene->region.bytes; i++) {
    if (found[i] != scene->host_region[i]) {
      report_failed("byte %lld of the op's layer, blocks of %llu bytes, was written", (long long)(i - layer_begin),
                    (unsigned long long)geometry->block_stride_bytes);
    }
  }
  free(found);
}

/* What a record of a foreign block would load as. */
static const uint8_t *foreign_row(const struct scene *scene) {
  static uint8_t row[twin_bytes_max];
  uint8_t scale[16];
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  struct kvp_geometry one;
  static uint8_t record[twin_bytes_max];
  memset(record, scene_foreign_byte, sizeof(record));
  (void)kvp_geometry_init(scene->geometry.format, 0, 1, 1, 1, &one, NULL);
  const struct kvp_segment segment = {0, 0, 1, 0};
  const struct kvp_load_params load = {
      .layer = {record, &one},
      .segments = &segment,
      .segment_count = 1,
      .total_k = 1,
      .out = {row, sizes->loaded_row_bytes},
      .scales = {sizes->loaded_scale_bytes == 0 ? NULL : scale, sizes->loaded_scale_bytes},
      .rows = 1,
      .segment_rows_max = 1,
  };
  struct kvp_op_counts counts = {0};
  kvp_host_load(&load, 0, 1, &counts);
  return row;
}

/* found: a copy of out or scales; row_bytes may be written every stride. foreign NULL: four bytes tell nothing. */
static void check_output(const char *what, const uint8_t *found, uint64_t bytes, uint64_t rows, uint64_t stride,
                         uint64_t row_bytes, const uint8_t *foreign) {
  for (uint64_t i = 0; i < bytes; i++) {
    uint64_t at = i - scene_margin_bytes;
    bool inside = i >= scene_margin_bytes && at / stride < rows && at % stride < row_bytes;
    if (!inside && found[i] != scene_out_fill) {
      report_failed("byte %lld of %s, rows of %llu bytes every %llu, was written", (long long)at, what,
                    (unsigned long long)row_bytes, (unsigned long long)stride);
    }
  }
  for (uint64_t row = 0; foreign != NULL && row < rows; row++) {
    if (memcmp(found + scene_margin_bytes + row * stride, foreign, row_bytes) == 0) {
      report_failed("row %llu of %s came from a block of somebody else", (unsigned long long)row, what);
    }
  }
}

void scene_check_outputs(struct scene *scene, uint64_t rows) {
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  uint8_t *found = fetched(&scene->out);
  check_output("out", found, scene->out.bytes, rows, scene->out_stride, sizes->loaded_row_bytes, foreign_row(scene));
  free(found);
  if (sizes->loaded_scale_bytes != 0) {
    found = fetched(&scene->scales);
    check_output("scales", found, scene->scales.bytes, rows, scene->scales_stride, sizes->loaded_scale_bytes, NULL);
    free(found);
  }
}
