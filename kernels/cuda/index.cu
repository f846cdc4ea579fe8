/* The index ops: which kernel is launched, how wide, and how rows are shared out among warps. See index_kernel.cuh. */
#include <assert.h>

#include "kernels/cuda/index_kernel.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/prepare.cuh"

namespace kvp {

/* Few numbers: a group a lane, so that all are on their way at once. */
constexpr int few_passes = 1;

template <class op> struct index_kernels {
  static kernel_facts few[devices_max];
  static kernel_facts many[devices_max];
};
template <class op> kernel_facts index_kernels<op>::few[devices_max];
template <class op> kernel_facts index_kernels<op>::many[devices_max];

template <class op> static cudaError_t prepare(int device) {
  cudaError_t error = kernel_facts_find((const void *)index_kernel<op, few_passes>, index_threads, device,
                                        &index_kernels<op>::few[device]);
  if (error == cudaSuccess) {
    error = kernel_facts_find((const void *)index_kernel<op, op::many_passes>, index_threads, device,
                              &index_kernels<op>::many[device]);
  }
  return error;
}

cudaError_t index_prepare(int device) {
  cudaError_t (*const prepares[])(int) = {prepare<convert_op>, prepare<swa_op>, prepare<expand_op>, prepare<cat_op>};
  for (cudaError_t (*one)(int) : prepares) {
    cudaError_t error = one(device);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

template <class op, int passes>
static cudaError_t launch_index(const op &made_by, index_shape shape, uint64_t groups, const kernel_facts &facts,
                                cudaStream_t stream) {
  constexpr uint64_t block_warps = index_threads / lanes_per_warp;
  uint64_t side_by_side = divide_up(shape.row_count, lanes_per_warp >> shape.shift);
  shape.pieces = divide_up(groups, passes * (UINT64_C(1) << shape.shift));
  shape.units = side_by_side * shape.pieces;
  uint64_t blocks = divide_up(shape.units, block_warps);
  index_args<op> args = {shape, made_by};
  return launch_chained(index_kernel<op, passes>, facts, dim3(launched_blocks(blocks, grid_blocks_max)),
                        index_threads, 0, stream, args);
}

/* A row takes as many lanes as it has groups, at most a warp; what is longer is cut in pieces. */
template <class op>
static cudaError_t make_index(const op &made_by, const kvp_rows &out, uint64_t row_count, uint64_t columns,
                              kvp_cuda_counts *counts, cudaStream_t stream) {
  if (row_count == 0) {
    return cudaSuccess;
  }
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const kernel_facts &few = index_kernels<op>::few[device];
  assert(few.resident_blocks > 0); /* kernels were loaded */
  bool whole = ((uintptr_t)out.base | out.stride_bytes) % 16 == 0;
  uint64_t groups = divide_up(columns + (whole ? 0 : index_group - 1), index_group);
  uint32_t shift = 2; /* lanes enough for the words that say what a row is */
  while (shift < 5 && (UINT64_C(1) << shift) < groups) {
    shift++;
  }
  index_shape shape = {out, row_count, (int64_t)columns, shift, 0, 0, counts};
  uint64_t warps = (uint64_t)few.resident_blocks * (index_threads / lanes_per_warp);
  if (takes_few(groups <= lanes_per_warp || divide_up(groups, lanes_per_warp) * row_count <= warps)) {
    return launch_index<op, few_passes>(made_by, shape, groups, few, stream);
  }
  return launch_index<op, op::many_passes>(made_by, shape, groups, index_kernels<op>::many[device], stream);
}

static uint64_t matrix_bytes(uint64_t rows, uint64_t columns) {
  return rows * columns * sizeof(int32_t);
}

static void index_counts(uint64_t read, uint64_t written, const kvp_cuda_counts &found, kvp_op_counts *out) {
  *out = kvp_op_counts{};
  out->rows_rejected = found.rows_rejected;
  out->bytes_read = read;
  out->bytes_written = written;
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_convert_index_launch(const struct kvp_convert_index_params *params,
                                                     struct kvp_cuda_counts *counts, cudaStream_t stream) {
  using namespace kvp;
  uint64_t table_columns = params->table_columns < INT32_MAX ? params->table_columns : INT32_MAX;
  convert_op made_by = {params->valid,
                        params->topk,
                        params->tables,
                        params->queries,
                        (int64_t)params->columns,
                        (uint32_t)table_columns,
                        params->num_blocks,
                        divisor::make(params->tokens_per_block)};
  return make_index(made_by, params->out, params->batch * params->queries, params->columns, counts, stream);
}

extern "C" cudaError_t kvp_cuda_swa_index_launch(const struct kvp_swa_index_params *params,
                                                 struct kvp_cuda_counts *counts, cudaStream_t stream) {
  using namespace kvp;
  uint64_t length_max = params->window < params->ring_tokens ? params->window : params->ring_tokens;
  swa_op made_by = {params->offset_len, (uint64_t)params->ring_tokens * params->num_blocks, (int64_t)length_max,
                    params->ring_tokens};
  return make_index(made_by, params->out, params->queries, params->window, counts, stream);
}

extern "C" cudaError_t kvp_cuda_expand_index_launch(const struct kvp_expand_index_params *params,
                                                    struct kvp_cuda_counts *counts, cudaStream_t stream) {
  kvp::expand_op made_by = {params->pivots, (int64_t)params->width};
  return kvp::make_index(made_by, params->out, params->row_count, params->width, counts, stream);
}

extern "C" cudaError_t kvp_cuda_cat_index_launch(const struct kvp_cat_index_params *params,
                                                 struct kvp_cuda_counts *counts, cudaStream_t stream) {
  uint64_t columns = params->left_columns + params->right_columns;
  kvp::cat_op made_by = {params->left, params->right, (int64_t)params->left_columns, (int64_t)columns,
                         (uint32_t)params->base};
  return kvp::make_index(made_by, params->out, params->row_count, columns, counts, stream);
}

extern "C" void kvp_cuda_convert_index_counts(const struct kvp_convert_index_params *params,
                                              const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  uint64_t bytes = kvp::matrix_bytes(params->batch * params->queries, params->columns);
  kvp::index_counts(bytes, bytes, *found, out);
}

extern "C" void kvp_cuda_swa_index_counts(const struct kvp_swa_index_params *params,
                                          const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  kvp::index_counts(0, kvp::matrix_bytes(params->queries, params->window), *found, out);
}

extern "C" void kvp_cuda_expand_index_counts(const struct kvp_expand_index_params *params,
                                             const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  kvp::index_counts(0, kvp::matrix_bytes(params->row_count, params->width), *found, out);
}

extern "C" void kvp_cuda_cat_index_counts(const struct kvp_cat_index_params *params,
                                          const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  uint64_t bytes = kvp::matrix_bytes(params->row_count, params->left_columns + params->right_columns);
  kvp::index_counts(bytes, bytes, *found, out);
}
