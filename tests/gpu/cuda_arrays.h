/* The arrays of one op in device memory, for the CUDA kernels that tests run as a variant of the host's. One thread.
 *
 * Memory was made once: each array is in a mapping of its own with nothing mapped around it, alternately at its end and
 * at its begin, with known bytes in what is left next to it. Everything is copied back and looked at: what the op may
 * write goes to the caller, the rest must be as it was.
 */
#ifndef KVPOOL_TESTS_GPU_CUDA_ARRAYS_H
#define KVPOOL_TESTS_GPU_CUDA_ARRAYS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/launch.h"
#include "kernels/ops.h"

enum cuda_area {
  AREA_LAYER,
  AREA_SOURCE,
  AREA_INDEX,
  AREA_SECOND_INDEX,
  AREA_TABLE,
  AREA_WEIGHT,
  AREA_OUT,
  AREA_SCALES,
  area_count
};
enum { alignment_layer = 32, alignment_view = 16, alignment_index = sizeof(int32_t), cuda_ops_max = 2 };

/* Opens the GPU, the first time. */
void cuda_arrays_open(void);
/* A new op; counts of cuda_ops_max ops are zero but for rows_taken. */
void cuda_arrays_begin(uint64_t rows_taken);
uint64_t cuda_arrays_ops(void); /* begun so far */
/* Where the kernel finds the array. An index array lies at any multiple of its elements' size. */
void *cuda_arrays_put(enum cuda_area area, const void *host, uint64_t bytes, uint32_t alignment);
/* The same of an array that the op writes to. */
void *cuda_arrays_put_written(enum cuda_area area, uint8_t *host, uint64_t bytes, uint32_t alignment);
const uint64_t *cuda_arrays_put_owners(const struct kvp_owner_check *check, uint32_t num_blocks);
/* Waits for the op, looks at everything, and gives the caller what is his. */
void cuda_arrays_get(void);

/* Of the ops launched since the begin: in device memory, and as get() found them. */
struct kvp_cuda_counts *cuda_arrays_counts(uint32_t op);
const struct kvp_cuda_counts *cuda_arrays_found(uint32_t op);
cudaStream_t cuda_arrays_stream(void);

uint64_t cuda_view_bytes(uint64_t rows, uint64_t stride, uint64_t row_bytes);
void cuda_counts_add(struct kvp_op_counts *counts, const struct kvp_op_counts *more);

#endif
