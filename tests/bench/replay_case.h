/* Rows of a decode step in GPU memory, and the fused stores that put them into a pool of the benchmark's own. */
#ifndef KVPOOL_TESTS_BENCH_REPLAY_CASE_H
#define KVPOOL_TESTS_BENCH_REPLAY_CASE_H

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"
#include "tests/bench/replay_graph.h"

enum {
  replay_case_rows = 64,
  replay_case_elements = 512,
  replay_case_row_bytes = 2 * replay_case_elements,
  replay_case_positions = 4096,
  replay_case_rotary = 64,
  replay_case_blocks = 64,
  replay_case_tokens = 64, /* of a block */
  /* Of one piece of memory: sources of every layer, the weight, the table. */
  replay_case_weight_offset = replay_graph_layers * replay_case_rows * replay_case_row_bytes,
  replay_case_table_offset = replay_case_weight_offset + replay_case_row_bytes,
  replay_case_inputs_bytes = replay_case_table_offset + replay_case_positions * replay_case_rotary * 4,
};

struct replay_case {
  uint8_t *inputs; /* replay_case_inputs_bytes of device memory, the caller's */
  uint8_t *region;
  int32_t *slots; /* of `replay_case_rows_max` rows, distinct; device memory, as are positions */
  int32_t *positions;
  struct kvp_geometry geometry;
  struct kvp_cuda_counts *counts; /* [1 + layers], zero between launches */
  struct kvp_fused_store_params ops[replay_graph_layers];
};

/* Fills the inputs. */
void replay_case_init(struct replay_case *it, uint8_t *inputs);
void replay_case_deinit(struct replay_case *it);
/* A random choice of distinct slots in [0, limit). */
void replay_case_slots(int32_t *out, uint32_t count, uint32_t limit);
/* One layer's op with `rows` rows, by the kernel that an engine would launch itself. */
void replay_case_launch(struct replay_case *it, uint32_t layer, uint32_t rows, cudaStream_t stream);

#endif
