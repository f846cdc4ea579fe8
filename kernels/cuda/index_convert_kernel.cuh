/* convert_kv_index of long lists: a block of threads takes a piece of one list, and has the list's block table in shared
 * memory. There, neighbours of a warp that look at far columns cost a few cycles; in the multiprocessor's cache one for
 * every line that they look at. What is read of the table is looked at only when a number names it.
 */
#ifndef KVPOOL_KERNELS_CUDA_INDEX_CONVERT_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_INDEX_CONVERT_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/index_kernel.cuh"

namespace kvp {

constexpr int convert_threads = 256;
constexpr int convert_passes = 2;
constexpr uint32_t convert_columns = convert_threads * convert_passes * index_group; /* of a piece */
constexpr uint32_t convert_table_max = 4096; /* columns of a table that is taken to shared memory */

struct shared_table {
  const int32_t *blocks;
  __device__ __forceinline__ int32_t at(uint32_t column) const { return blocks[column]; }
};

__device__ __forceinline__ void read_table(const int32_t *from, uint32_t columns, int32_t *to) {
  if ((uintptr_t)from % 16 == 0 && columns % index_group == 0) {
    for (uint32_t group = threadIdx.x; group < columns / index_group; group += convert_threads) {
      ((int4 *)to)[group] = read_once_4(from + (uint64_t)group * index_group);
    }
  } else {
    for (uint32_t column = threadIdx.x; column < columns; column += convert_threads) {
      to[column] = read_once_cached(&from[column]);
    }
  }
}

/* Units are pieces of rows. Dynamic shared memory: a row of the tables. */
__global__ void __launch_bounds__(convert_threads)
    convert_kernel(const __grid_constant__ index_args<convert_op> args) {
  extern __shared__ __align__(128) uint8_t convert_shared[];
  chain_begin(args.shape.counts);
  int32_t *table = (int32_t *)convert_shared;
  uint64_t wrong = 0;
  for (uint64_t unit = blockIdx.x; unit < args.shape.units; unit += gridDim.x) {
    uint64_t index = args.shape.pieces.quotient(unit);
    uint64_t piece = unit - index * args.shape.pieces.value;
    const int32_t word[] = {read_once(&args.made_by.head[index])};
    convert_op::row row;
    args.made_by.take(index, word, row);
    int32_t *to = (int32_t *)(args.shape.out.base + index * args.shape.out.stride_bytes);
    int64_t column = (int64_t)(piece * convert_columns + threadIdx.x * index_group) - before_row(to);
    make_groups<convert_op, convert_passes>(
        args, row, to, column, convert_threads * index_group,
        [&](const int_group &fetched) { return args.made_by.look_in(shared_table{table}, fetched); },
        [&] {
          __syncthreads(); /* the table before was looked at */
          read_table(row.table, args.made_by.table_columns, table);
          __syncthreads();
        },
        wrong);
  }
  wrong_add(wrong, args.shape.counts);
}

} // namespace kvp

#endif
