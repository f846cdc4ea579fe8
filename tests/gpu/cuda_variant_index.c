/* The CUDA variant's index ops: rows [row_begin, row_end) as an op of their own. See cuda_variant.c. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/launch.h"
#include "tests/gpu/cuda_arrays.h"
#include "tests/gpu/cuda_variant.h"
#include "tests/gpu/gpu.h"

static uint64_t matrix_bytes(uint64_t rows, const struct kvp_rows *matrix, uint64_t columns) {
  return columns == 0 ? 0 : cuda_view_bytes(rows, matrix->stride_bytes, columns * sizeof(int32_t));
}

/* Rows from `first` on. */
static uint8_t *put_matrix(enum cuda_area area, const struct kvp_rows *matrix, uint64_t first, uint64_t rows,
                           uint64_t columns) {
  uint64_t bytes = matrix_bytes(rows, matrix, columns);
  return cuda_arrays_put(area, bytes == 0 ? NULL : matrix->base + first * matrix->stride_bytes, bytes,
                         alignment_index);
}

static uint8_t *put_made(const struct kvp_rows *matrix, uint64_t first, uint64_t rows, uint64_t columns) {
  uint64_t bytes = matrix_bytes(rows, matrix, columns);
  return cuda_arrays_put_written(AREA_OUT, bytes == 0 ? NULL : matrix->base + first * matrix->stride_bytes, bytes,
                                 alignment_index);
}

/* Lists [first, first + lists) of whole sequences, or of a part of one. */
static void convert_lists(const struct kvp_convert_index_params *params, uint64_t first, uint64_t lists,
                          uint64_t sequences, struct kvp_op_counts *counts) {
  struct kvp_convert_index_params device = *params;
  const bool in_place = params->topk.base == params->out.base;
  device.batch = sequences;
  device.queries = lists / sequences;
  cuda_arrays_begin(0);
  device.out.base = put_made(&params->out, first, lists, params->columns);
  device.topk.base =
      in_place ? device.out.base : put_matrix(AREA_SOURCE, &params->topk, first, lists, params->columns);
  device.tables.base =
      put_matrix(AREA_TABLE, &params->tables, first / params->queries, sequences, params->table_columns);
  device.valid = cuda_arrays_put(AREA_INDEX, params->valid + first, lists * sizeof(int32_t), alignment_index);
  gpu_check(kvp_cuda_convert_index_launch(&device, cuda_arrays_counts(0), cuda_arrays_stream()));
  cuda_arrays_get();
  struct kvp_op_counts told = {0};
  kvp_cuda_convert_index_counts(&device, cuda_arrays_found(0), &told);
  cuda_counts_add(counts, &told);
}

static void cuda_convert(const struct kvp_convert_index_params *params, uint64_t row_begin, uint64_t row_end,
                         struct kvp_op_counts *counts) {
  for (uint64_t row = row_begin; row < row_end;) {
    uint64_t of_sequence = params->queries - row % params->queries;
    uint64_t sequences = 1;
    uint64_t lists = row_end - row < of_sequence ? row_end - row : of_sequence;
    if (lists == params->queries) {
      sequences = (row_end - row) / params->queries;
      lists = sequences * params->queries;
    }
    convert_lists(params, row, lists, sequences, counts);
    row += lists;
  }
}

static void cuda_swa(const struct kvp_swa_index_params *params, uint64_t row_begin, uint64_t row_end,
                     struct kvp_op_counts *counts) {
  struct kvp_swa_index_params device = *params;
  device.queries = row_end - row_begin;
  cuda_arrays_begin(0);
  device.offset_len = cuda_arrays_put(AREA_INDEX, params->offset_len + 2 * row_begin,
                                      device.queries * 2 * sizeof(int32_t), alignment_index);
  device.out.base = put_made(&params->out, row_begin, device.queries, params->window);
  gpu_check(kvp_cuda_swa_index_launch(&device, cuda_arrays_counts(0), cuda_arrays_stream()));
  cuda_arrays_get();
  struct kvp_op_counts told = {0};
  kvp_cuda_swa_index_counts(&device, cuda_arrays_found(0), &told);
  cuda_counts_add(counts, &told);
}

static void cuda_expand(const struct kvp_expand_index_params *params, uint64_t row_begin, uint64_t row_end,
                        struct kvp_op_counts *counts) {
  struct kvp_expand_index_params device = *params;
  device.row_count = row_end - row_begin;
  cuda_arrays_begin(0);
  device.pivots = cuda_arrays_put(AREA_INDEX, params->pivots + 4 * row_begin, device.row_count * 4 * sizeof(int32_t),
                                  alignment_index);
  device.out.base = put_made(&params->out, row_begin, device.row_count, params->width);
  gpu_check(kvp_cuda_expand_index_launch(&device, cuda_arrays_counts(0), cuda_arrays_stream()));
  cuda_arrays_get();
  struct kvp_op_counts told = {0};
  kvp_cuda_expand_index_counts(&device, cuda_arrays_found(0), &told);
  cuda_counts_add(counts, &told);
}

static void cuda_cat(const struct kvp_cat_index_params *params, uint64_t row_begin, uint64_t row_end,
                     struct kvp_op_counts *counts) {
  struct kvp_cat_index_params device = *params;
  device.row_count = row_end - row_begin;
  cuda_arrays_begin(0);
  device.left.base = put_matrix(AREA_SOURCE, &params->left, row_begin, device.row_count, params->left_columns);
  device.right.base = put_matrix(AREA_TABLE, &params->right, row_begin, device.row_count, params->right_columns);
  device.out.base = put_made(&params->out, row_begin, device.row_count, params->left_columns + params->right_columns);
  gpu_check(kvp_cuda_cat_index_launch(&device, cuda_arrays_counts(0), cuda_arrays_stream()));
  cuda_arrays_get();
  struct kvp_op_counts told = {0};
  kvp_cuda_cat_index_counts(&device, cuda_arrays_found(0), &told);
  cuda_counts_add(counts, &told);
}

const struct kvp_host_index cuda_variant_index = {
    .convert = cuda_convert, .swa = cuda_swa, .expand = cuda_expand, .cat = cuda_cat};
