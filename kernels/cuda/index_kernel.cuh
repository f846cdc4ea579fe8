/* convert_kv_index, swa_index_decode, expand_swa_index, kv_index_cat: rows of int32 made from rows of int32. OPS
 * sections of those names.
 *
 * One kernel for all: a warp takes a piece of one row, or several short rows side by side; a lane makes four
 * neighbouring numbers at a time, those that one 16-byte store holds. What the numbers are is a type. Whatever a row is
 * made from lies in memory that others can write: each lane reads a number once, into a register, before it looks at
 * it. Other lanes may have read another one at another time; none of them follows it out of bounds.
 */
#ifndef KVPOOL_KERNELS_CUDA_INDEX_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_INDEX_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/counts.cuh"
#include "kernels/cuda/layout.cuh"

namespace kvp {

constexpr int index_threads = 128;
constexpr int index_blocks = 6; /* of a multiprocessor at least: numbers enough on their way */
constexpr int index_group = 4;  /* numbers of a lane at a time */

/* The matrix that is made, and how it is shared out. Columns are counted from the first whole 16 bytes: a group of a
 * row that begins between two of them begins before the row. */
struct index_shape {
  kvp_rows out;
  uint64_t row_count;
  int64_t columns;
  uint32_t shift;      /* 2^shift lanes a row */
  wide_divisor pieces; /* of a row */
  uint64_t units;      /* pieces of all rows that lie side by side */
  kvp_cuda_counts *counts;
};

struct int_group {
  int32_t value[index_group];
};

__device__ __forceinline__ const int32_t *row_at(const kvp_rows &rows, uint64_t row) {
  return (const int32_t *)(rows.base + row * rows.stride_bytes);
}

/* Numbers [column, column + 4) of a row, those in [0, end) of them. */
__device__ __forceinline__ int_group read_group(const int32_t *row, int64_t column, int64_t end) {
  const int32_t *from = row + column;
  if (column >= 0 && column + index_group <= end && (uintptr_t)from % 16 == 0) {
    int4 all = read_once_4(from);
    return int_group{{all.x, all.y, all.z, all.w}};
  }
  int_group group = {};
#pragma unroll
  for (int i = 0; i < index_group; i++) {
    if (column + i >= 0 && column + i < end) {
      group.value[i] = read_once_cached(from + i);
    }
  }
  return group;
}

__device__ __forceinline__ void write_group(int32_t *row, int64_t column, int64_t end, const int_group &group) {
  int32_t *to = row + column;
  if (column >= 0 && column + index_group <= end) { /* groups of whole 16 bytes */
    store_16_bytes(to, make_uint4((uint32_t)group.value[0], (uint32_t)group.value[1], (uint32_t)group.value[2],
                                  (uint32_t)group.value[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < index_group; i++) {
    if (column + i >= 0 && column + i < end) {
      store_4_bytes(to + i, (uint32_t)group.value[i]);
    }
  }
}

/* What the types below are: `words` numbers at `head` say what a row is, take() looks at them, and group() makes four
 * numbers, of which those outside [0, columns) are not used, from what fetch() and then look() have read for them: a lane
 * asks for all of its groups before it looks at any. take() yields 1 for a row that is wrong; group() adds entries that
 * are. many_passes: groups of a lane at a time where there is work for every multiprocessor. */

struct nothing {};

struct convert_op {
  static constexpr int many_passes = 2;
  static constexpr int words = 1;
  const int32_t *head; /* how many entries of a list are valid */
  kvp_rows topk;
  kvp_rows tables;
  wide_divisor queries;
  int64_t columns;
  uint32_t table_columns;
  uint32_t num_blocks;
  divisor tokens_per_block;

  struct row {
    const int32_t *entries;
    const int32_t *table;
    int64_t valid;
  };

  __device__ __forceinline__ uint32_t take(uint64_t index, const int32_t (&word)[words], row &out) const {
    int64_t valid = word[0] < 0 ? 0 : word[0];
    out = row{row_at(topk, index), row_at(tables, queries.quotient(index)), valid < columns ? valid : columns};
    return 0;
  }

  using fetched = int_group;
  using looked = int_group;

  /* -1 behind the valid ones. */
  __device__ __forceinline__ int_group fetch(const row &row, int64_t column) const {
    int_group x = {};
    if (column < row.valid) {
      x = read_group(row.entries, column, row.valid);
    }
#pragma unroll
    for (int i = 0; i < index_group; i++) {
      x.value[i] = column + i >= 0 && column + i < row.valid ? x.value[i] : -1;
    }
    return x;
  }

  /* -1 where there is no block. */
  template <class table_type>
  __device__ __forceinline__ int_group look_in(table_type table, const int_group &x) const {
    int_group block;
#pragma unroll
    for (int i = 0; i < index_group; i++) {
      uint32_t table_column = tokens_per_block.quotient((uint32_t)x.value[i]);
      block.value[i] = -1;
      if (x.value[i] >= 0 && table_column < table_columns) {
        block.value[i] = table.at(table_column);
      }
    }
    return block;
  }
  struct global_table {
    const int32_t *blocks;
    __device__ __forceinline__ int32_t at(uint32_t column) const { return read_once_cached(&blocks[column]); }
  };
  __device__ __forceinline__ int_group look(const row &row, const int_group &x) const {
    return look_in(global_table{row.table}, x);
  }

  __device__ __forceinline__ int_group group(const row &, int64_t, const int_group &x, const int_group &block,
                                             uint32_t &wrong) const {
    int_group made;
#pragma unroll
    for (int i = 0; i < index_group; i++) {
      bool found = (uint32_t)block.value[i] < num_blocks;
      uint32_t before = tokens_per_block.quotient((uint32_t)x.value[i]) * tokens_per_block.value;
      uint32_t slot = (uint32_t)block.value[i] * tokens_per_block.value + ((uint32_t)x.value[i] - before);
      wrong += !found && x.value[i] != -1;
      made.value[i] = found ? (int32_t)slot : -1;
    }
    return made;
  }
};

struct swa_op {
  static constexpr int many_passes = 4;
  static constexpr int words = 2;
  const int32_t *head; /* start slot, length */
  uint64_t slots;
  int64_t length_max;
  uint32_t ring_tokens;

  struct row {
    uint32_t base; /* the ring's first slot */
    uint32_t offset;
    int64_t length;
  };

  __device__ __forceinline__ uint32_t take(uint64_t, const int32_t (&word)[words], row &out) const {
    int32_t start = word[0];
    int32_t length = word[1];
    bool wrong = length < 0 || length > length_max || (length > 0 && (start < 0 || (uint32_t)start >= slots));
    out = row{0, 0, 0};
    if (!wrong && length > 0) {
      out.offset = (uint32_t)start % ring_tokens;
      out.base = (uint32_t)start - out.offset;
      out.length = length;
    }
    return wrong;
  }

  using fetched = nothing;
  using looked = nothing;
  __device__ __forceinline__ nothing fetch(const row &, int64_t) const { return {}; }
  __device__ __forceinline__ nothing look(const row &, const nothing &) const { return {}; }
  __device__ __forceinline__ int_group group(const row &row, int64_t column, const nothing &, const nothing &,
                                             uint32_t &) const {
    int_group made;
#pragma unroll
    for (int i = 0; i < index_group; i++) {
      uint32_t offset = row.offset + (uint32_t)(column + i);
      offset -= offset >= ring_tokens ? ring_tokens : 0;
      made.value[i] = column + i < row.length ? (int32_t)(row.base + offset) : -1;
    }
    return made;
  }
};

struct expand_op {
  static constexpr int many_passes = 4;
  static constexpr int words = 4;
  const int32_t *head; /* two times: first number, length */
  int64_t width;

  struct row {
    uint32_t first[2]; /* of a run, less the column where it begins */
    int64_t end[2];    /* the column behind it */
  };

  static __device__ __forceinline__ bool fits(int32_t first, int64_t count) {
    return count == 0 || count - 1 <= INT64_C(0x7FFFFFFF) - first;
  }

  __device__ __forceinline__ uint32_t take(uint64_t, const int32_t (&word)[words], row &out) const {
    int64_t one = word[1] < width ? word[1] : width;
    int64_t two = word[3] < width - one ? word[3] : width - one;
    bool wrong = word[1] < 0 || word[3] < 0 || !fits(word[0], one) || !fits(word[2], two);
    one = wrong ? 0 : one;
    two = wrong ? 0 : two;
    out = row{{(uint32_t)word[0], (uint32_t)word[2] - (uint32_t)one}, {one, one + two}};
    return wrong;
  }

  using fetched = nothing;
  using looked = nothing;
  __device__ __forceinline__ nothing fetch(const row &, int64_t) const { return {}; }
  __device__ __forceinline__ nothing look(const row &, const nothing &) const { return {}; }
  __device__ __forceinline__ int_group group(const row &row, int64_t column, const nothing &, const nothing &,
                                             uint32_t &) const {
    int_group made;
#pragma unroll
    for (int i = 0; i < index_group; i++) {
      int64_t at = column + i;
      uint32_t first = at < row.end[0] ? row.first[0] : row.first[1];
      made.value[i] = at < row.end[1] ? (int32_t)(first + (uint32_t)at) : -1;
    }
    return made;
  }
};

struct cat_op {
  static constexpr int many_passes = 4;
  static constexpr int words = 0;
  kvp_rows left;
  kvp_rows right;
  int64_t left_columns;
  int64_t columns;
  uint32_t base;

  struct row {
    const int32_t *left;
    const int32_t *right;
  };

  __device__ __forceinline__ uint32_t take(uint64_t index, row &out) const {
    out = row{row_at(left, index), row_at(right, index)};
    return 0;
  }

  using fetched = int_group;
  using looked = nothing;

  __device__ __forceinline__ int_group fetch(const row &row, int64_t column) const {
    if (column + index_group <= left_columns) {
      return read_group(row.left, column, left_columns);
    }
    if (column >= left_columns) {
      return read_group(row.right, column - left_columns, columns - left_columns);
    }
    int_group both = {};
#pragma unroll
    for (int i = 0; i < index_group; i++) {
      int64_t at = column + i;
      if (at >= 0 && at < columns) {
        both.value[i] = read_once_cached(at < left_columns ? row.left + at : row.right + (at - left_columns));
      }
    }
    return both;
  }
  __device__ __forceinline__ nothing look(const row &, const int_group &) const {
    return {};
  }

  __device__ __forceinline__ int_group group(const row &, int64_t column, const int_group &from, const nothing &,
                                             uint32_t &wrong) const {
    int_group made;
#pragma unroll
    for (int i = 0; i < index_group; i++) {
      int32_t entry = from.value[i];
      uint32_t sum = (uint32_t)entry + base;
      bool right_one = entry >= 0 && (int32_t)sum >= 0;
      bool of_right = column + i >= left_columns && column + i < columns;
      wrong += of_right && !right_one && entry != -1;
      made.value[i] = !of_right ? entry : right_one ? (int32_t)sum : -1;
    }
    return made;
  }
};

/* Lane w of a row's lanes reads word w. */
template <class op>
__device__ __forceinline__ uint32_t take_row(const op &made_by, uint64_t index, bool there, uint32_t row_lane,
                                             typename op::row &out) {
  if constexpr (op::words == 0) {
    return made_by.take(index, out);
  } else {
    int32_t own = 0;
    if (there && row_lane < op::words) {
      own = read_once(&made_by.head[index * op::words + row_lane]);
    }
    int32_t word[op::words];
#pragma unroll
    for (int i = 0; i < op::words; i++) {
      word[i] = from_lane(own, lane_index() - (int)row_lane + i);
    }
    return made_by.take(index, word, out);
  }
}

template <class op> struct index_args {
  index_shape shape;
  op made_by;
};

/* Groups of a row at `column`, and every `step` numbers from there. between(): done when all were asked for, before any
 * is looked at. */
template <class op, int passes, class look_fn, class between_fn>
__device__ __forceinline__ void make_groups(const index_args<op> &args, const typename op::row &row, int32_t *to,
                                            int64_t column, int64_t step, look_fn look, between_fn between,
                                            uint64_t &wrong) {
  const int64_t columns = args.shape.columns;
  typename op::fetched fetched[passes];
  typename op::looked looked[passes];
#pragma unroll
  for (int pass = 0; pass < passes; pass++) {
    fetched[pass] = {};
    if (column + pass * step < columns) {
      fetched[pass] = args.made_by.fetch(row, column + pass * step);
    }
  }
  between();
#pragma unroll
  for (int pass = 0; pass < passes; pass++) {
    looked[pass] = {};
    if (column + pass * step < columns) {
      looked[pass] = look(fetched[pass]);
    }
  }
#pragma unroll
  for (int pass = 0; pass < passes; pass++) {
    if (column + pass * step < columns) {
      uint32_t wrong_entries = 0;
      write_group(to, column + pass * step, columns,
                  args.made_by.group(row, column + pass * step, fetched[pass], looked[pass], wrong_entries));
      wrong += wrong_entries;
    }
  }
}

/* Numbers between a row's begin and the first of its first group. */
__device__ __forceinline__ int64_t before_row(const int32_t *to) {
  return (int64_t)((uintptr_t)to % 16 / sizeof(int32_t));
}

template <class op, int passes>
__device__ __forceinline__ void make_piece(const index_args<op> &args, uint64_t unit, uint64_t &wrong) {
  const index_shape &shape = args.shape;
  const uint32_t lanes = 1u << shape.shift;
  const uint32_t row_lane = lane_index() & (lanes - 1);
  uint64_t rows = shape.pieces.quotient(unit);
  uint64_t piece = unit - rows * shape.pieces.value;
  uint64_t index = (rows << (5 - shape.shift)) + (lane_index() >> shape.shift);
  bool there = index < shape.row_count;
  index = there ? index : 0;
  typename op::row row;
  uint32_t wrong_row = take_row(args.made_by, index, there, row_lane, row);
  if (!there) {
    return;
  }
  wrong += wrong_row != 0 && piece == 0 && row_lane == 0;
  int32_t *to = (int32_t *)(shape.out.base + index * shape.out.stride_bytes);
  int64_t column = (int64_t)(piece * passes * lanes + row_lane) * index_group - before_row(to);
  make_groups<op, passes>(
      args, row, to, column, lanes * index_group,
      [&](const typename op::fetched &fetched) { return args.made_by.look(row, fetched); }, [] {}, wrong);
}

__device__ __forceinline__ void wrong_add(uint64_t wrong, kvp_cuda_counts *to) {
  const uint64_t values[] = {wrong};
  uint64_t *const targets[] = {&to->rows_rejected};
  counts_add(values, targets);
}

template <class op, int passes>
__global__ void __launch_bounds__(index_threads, index_blocks)
    index_kernel(const __grid_constant__ index_args<op> args) {
  chain_begin(args.shape.counts);
  uint64_t wrong = 0;
  for (uint64_t unit = warp_index(); unit < args.shape.units; unit += warp_count()) {
    make_piece<op, passes>(args, unit, wrong);
  }
  wrong_add(wrong, args.shape.counts);
}

} // namespace kvp

#endif
