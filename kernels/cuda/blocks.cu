/* copy_blocks, zero_blocks: whole blocks of one region, padding included, in every layer. OPS "copy_blocks,
 * zero_blocks".
 *
 * A unit is one entry of the list in one layer; it is cut in pieces of one block of threads each. The list was checked;
 * an entry that is no block all the same is passed over.
 */
#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/prepare.cuh"

namespace kvp {

constexpr int blocks_threads = 256;
constexpr int blocks_vectors = 4; /* of 16 bytes, a thread's at a time */
constexpr uint64_t vector_bytes = 16;

struct blocks_args {
  uint8_t *base;
  const int32_t *pairs;
  uint64_t count;
  uint64_t units;
  uint64_t pieces;        /* of a unit */
  uint64_t piece_vectors; /* of a piece */
  uint64_t vectors;       /* of a unit */
  uint64_t layer_stride_bytes;
  uint64_t block_stride_bytes;
  uint32_t num_blocks;
  kvp_cuda_counts *counts;
};

/* NULL: no block. */
__device__ __forceinline__ uint8_t *block_at(const blocks_args &args, uint64_t layer, int32_t block) {
  uint8_t *first = args.base + layer * args.layer_stride_bytes;
  return (uint32_t)block < args.num_blocks ? first + (uint64_t)(uint32_t)block * args.block_stride_bytes : nullptr;
}

/* Vectors [begin, end) of a block, all threads of ours. */
__device__ __forceinline__ void copy_vectors(const uint8_t *from, uint8_t *to, uint64_t begin, uint64_t end) {
  for (uint64_t first = begin + threadIdx.x; first < end; first += blocks_vectors * blocks_threads) {
    uint4 words[blocks_vectors];
#pragma unroll
    for (int i = 0; i < blocks_vectors; i++) {
      uint64_t vector = first + i * blocks_threads;
      words[i] = load_16_bytes(from + (vector < end ? vector : first) * vector_bytes);
    }
#pragma unroll
    for (int i = 0; i < blocks_vectors; i++) {
      uint64_t vector = first + i * blocks_threads;
      if (vector < end) {
        store_16_bytes(to + vector * vector_bytes, words[i]);
      }
    }
  }
}

__device__ __forceinline__ void zero_vectors(uint8_t *to, uint64_t begin, uint64_t end) {
  for (uint64_t vector = begin + threadIdx.x; vector < end; vector += blocks_threads) {
    store_16_bytes(to + vector * vector_bytes, make_uint4(0, 0, 0, 0));
  }
}

template <bool copies>
__global__ void __launch_bounds__(blocks_threads) blocks_kernel(const __grid_constant__ blocks_args args) {
  chain_begin(args.counts);
  for (uint64_t work = blockIdx.x; work < args.units * args.pieces; work += gridDim.x) {
    uint64_t unit = work / args.pieces;
    uint64_t begin = (work - unit * args.pieces) * args.piece_vectors;
    uint64_t end = begin + args.piece_vectors < args.vectors ? begin + args.piece_vectors : args.vectors;
    uint64_t layer = unit / args.count;
    const int32_t *entry = args.pairs + (unit - layer * args.count) * (copies ? 2 : 1);
    if constexpr (copies) {
      const uint8_t *from = block_at(args, layer, read_once(&entry[0]));
      uint8_t *to = block_at(args, layer, read_once(&entry[1]));
      if (from != nullptr && to != nullptr && from != to) {
        copy_vectors(from, to, begin, end);
      }
    } else {
      uint8_t *to = block_at(args, layer, read_once(entry));
      if (to != nullptr) {
        zero_vectors(to, begin, end);
      }
    }
  }
}

static kernel_facts facts[2][devices_max]; /* [copies] */

cudaError_t blocks_prepare(int device) {
  cudaError_t error =
      kernel_facts_find((const void *)blocks_kernel<false>, blocks_threads, device, &facts[false][device]);
  if (error == cudaSuccess) {
    error = kernel_facts_find((const void *)blocks_kernel<true>, blocks_threads, device, &facts[true][device]);
  }
  return error;
}

static uint64_t bytes_of(const kvp_blocks_params &params) {
  return params.geometry->num_layers * params.count * params.geometry->block_stride_bytes;
}

template <bool copies>
static cudaError_t blocks_launch(const kvp_blocks_params &params, kvp_cuda_counts *counts, cudaStream_t stream) {
  if (params.count == 0) {
    return cudaSuccess;
  }
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const kvp_geometry &geometry = *params.geometry;
  uint64_t vectors = geometry.block_stride_bytes / vector_bytes;
  uint64_t pieces = divide_up(vectors, blocks_vectors * blocks_threads);
  uint64_t units = geometry.num_layers * params.count;
  blocks_args args = {params.base,
                      params.pairs,
                      params.count,
                      units,
                      pieces,
                      divide_up(vectors, pieces),
                      vectors,
                      geometry.layer_stride_bytes,
                      geometry.block_stride_bytes,
                      geometry.num_blocks,
                      counts};
  uint64_t blocks = units * pieces;
  return launch_chained(blocks_kernel<copies>, facts[copies][device], dim3(launched_blocks(blocks, grid_blocks_max)),
                        blocks_threads, 0, stream, args);
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_copy_blocks_launch(const struct kvp_blocks_params *params,
                                                   struct kvp_cuda_counts *counts, cudaStream_t stream) {
  return kvp::blocks_launch<true>(*params, counts, stream);
}

extern "C" cudaError_t kvp_cuda_zero_blocks_launch(const struct kvp_blocks_params *params,
                                                   struct kvp_cuda_counts *counts, cudaStream_t stream) {
  return kvp::blocks_launch<false>(*params, counts, stream);
}

extern "C" void kvp_cuda_copy_blocks_counts(const struct kvp_blocks_params *params,
                                            const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  (void)found;
  *out = kvp_op_counts{};
  out->bytes_read = kvp::bytes_of(*params);
  out->bytes_written = kvp::bytes_of(*params);
}

extern "C" void kvp_cuda_zero_blocks_counts(const struct kvp_blocks_params *params,
                                            const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  (void)found;
  *out = kvp_op_counts{};
  out->bytes_written = kvp::bytes_of(*params);
}
