/* A region of three layers, its owner table and a buffer, on the GPU and once more on the host, for ops whose arrays
 * hold anything. Blocks are of every state; those that the session may not touch hold one byte over and over, so that
 * a row of them is known when it shows up. Test code, one thread; every fault ends the program with its reason.
 */
#ifndef KVPOOL_TESTS_GPU_HOSTILE_SCENE_H
#define KVPOOL_TESTS_GPU_HOSTILE_SCENE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/launch.h"
#include "tests/gpu/device_rows.h"
#include "tests/gpu/gpu.h"

enum {
  scene_layers = 3,
  scene_layer = 1, /* the one that ops name */
  scene_owner = 7,
  scene_epoch = 1000,
  scene_margin_bytes = 1 << 16, /* before and behind what an op may write */
  scene_foreign_byte = 0xEE,
  scene_out_fill = 0x5A,
};

struct scene {
  struct kvp_geometry geometry;
  struct gpu_memory region; /* margin, layers, margin, up to the granularity */
  struct gpu_memory source;
  struct gpu_memory out; /* margin, rows every out_stride, margin: of loads, or cast-backs */
  struct gpu_memory scales;
  uint8_t *host_region; /* what region held after scene_init, all of it */
  uint64_t *owners;     /* registered host memory */
  uint64_t *owners_device;
  struct kvp_cuda_counts *counts; /* device */
  cudaStream_t stream;
  uint64_t rows_max;
  uint64_t out_stride;
  uint64_t scales_stride;
};

/* Every op from now on by kernels of that size, [0, scene_size_count), few rows or many; yields its name. */
enum { scene_size_count = 3 };
const char *scene_size_pin(size_t index);

void scene_init(struct scene *scene, const struct kvp_format *format, uint32_t tokens_per_block, uint32_t num_blocks,
                uint64_t rows_max);
void scene_deinit(struct scene *scene);

/* May the session write to it, read from it? Two answers of one table, from the rules of the owner table. */
bool scene_block_writable(const struct scene *scene, uint32_t block);
bool scene_block_readable(const struct scene *scene, uint32_t block);

/* All of out and scales to scene_out_fill. */
void scene_clear_outputs(struct scene *scene);

/* Params over the scene's memory; the caller sets the arrays. */
struct kvp_store_params scene_store(const struct scene *scene, uint64_t row_count, bool cast_back);
struct kvp_load_params scene_load(const struct scene *scene, uint64_t total_k);

/* Launches, waits, and gives the op's counts. */
struct kvp_op_counts scene_run_store(struct scene *scene, const struct kvp_store_params *params);
struct kvp_op_counts scene_run_load(struct scene *scene, const struct kvp_load_params *params);

/* Region: every byte outside the writable blocks of the op's layer (all: every byte) is what it was. */
void scene_check_region(struct scene *scene, bool all);
/* Outputs: every byte outside rows [0, rows) of the views is scene_out_fill, and no row of them is what a block that
 * the session may not read would load as. */
void scene_check_outputs(struct scene *scene, uint64_t rows);

#endif
