/* What kernels are given, where records lie, and who may touch a block: what store and load share.
 *
 * Indices from memory that others can write are read exactly once, into a register of one lane, before they are
 * checked. Addresses are 64-bit.
 */
#ifndef KVPOOL_KERNELS_CUDA_LAYOUT_CUH
#define KVPOOL_KERNELS_CUDA_LAYOUT_CUH

#include <stdint.h>

#include "kernels/cuda/format.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "proto/owner_entry.h"

namespace kvp {

constexpr uint32_t full_warp = 0xFFFFFFFF;

/* n / divisor for n < 2^31: (n * multiplier) >> (31 + shift), where 2^shift >= divisor and the multiplier is
 * 2^(31 + shift) / divisor rounded up. Rounding adds less than n * divisor / 2^(31 + shift) < 1 to n * multiplier's
 * quotient, not enough to reach the next integer. */
struct divisor {
  uint32_t value;
  uint32_t multiplier;
  uint32_t shift;

  static divisor make(uint32_t value) {
    uint32_t shift = 0;
    while ((UINT64_C(1) << shift) < value) {
      shift++;
    }
    uint64_t power = UINT64_C(1) << (31 + shift);
    return divisor{value, (uint32_t)((power + value - 1) / value), shift};
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return __umulhi(n << 1, multiplier) >> shift; }
};

/* The same of any n: a division, which is worth a hundred instructions, only where there is more work than is ever met. */
struct wide_divisor {
  uint64_t value;
  divisor small; /* of n below 2^31, which a larger value doesn't divide once */

  static wide_divisor make(uint64_t value) {
    return wide_divisor{value, value >> 31 == 0 ? divisor::make((uint32_t)value) : divisor{0, 0, 0}};
  }
  __device__ __forceinline__ uint64_t quotient(uint64_t n) const {
    return n >> 31 == 0 ? small.quotient((uint32_t)n) : n / value;
  }
};

/* One layer: record (block, offset) has its data at base + block * block_stride + offset * data_step, its scales at
 * base + block * block_stride + scales_begin + offset * scale_step; the steps are the format's. */
struct layer_layout {
  uint8_t *base;
  uint64_t block_stride_bytes;
  uint64_t scales_begin_bytes;
  uint32_t num_blocks;
  uint32_t slots; /* num_blocks * tokens_per_block */
  divisor tokens_per_block;

  static layer_layout make(const kvp_layer &layer) {
    const kvp_geometry &geometry = *layer.geometry;
    bool interleaved = geometry.format->token_interleaved;
    return layer_layout{layer.base,
                        geometry.block_stride_bytes,
                        (interleaved ? 1 : (uint64_t)geometry.tokens_per_block) * geometry.sizes.data_bytes,
                        geometry.num_blocks,
                        geometry.num_blocks * geometry.tokens_per_block,
                        divisor::make(geometry.tokens_per_block)};
  }
};

/* In structs of arguments, what the way of an array that was checked needs comes first. */
struct store_args {
  const int32_t *slots;
  uint64_t row_count;
  kvp_rows source;
  layer_layout layer;
  kvp_cuda_counts *counts;
  divisor row_vectors; /* bf16 only: 16-byte vectors of a row, */
  uint32_t warp_rows;  /* and rows of a warp at a time */
  kvp_rows cast_back;
  kvp_owner_check check;

  static store_args make(const kvp_store_params &params, kvp_cuda_counts *counts) {
    return store_args{params.slots,
                      params.row_count,
                      params.source,
                      layer_layout::make(params.layer),
                      counts,
                      divisor::make(params.layer.geometry->sizes.row_bytes / 16),
                      0,
                      params.cast_back,
                      params.check};
  }
};

/* How a load is cut up among warps, one piece each at a time: a segment is `pieces` of them, of piece_rows rows; where
 * that is not enough, piece p also takes the rows of p + pieces and so on. */
struct load_cut {
  uint32_t pieces;
  uint32_t piece_rows;
};

struct load_args {
  const int32_t *segments; /* 4 a segment */
  uint64_t segment_count;
  divisor pieces; /* of a segment: load_cut */
  uint32_t piece_rows;
  uint32_t step_pieces; /* from one piece of a warp to its next: so many segments and pieces */
  uint64_t step_segments;
  layer_layout layer;
  uint64_t total_k;
  kvp_rows out;
  kvp_cuda_counts *counts;
  divisor row_vectors; /* bf16 only: 16-byte vectors of a row */
  kvp_rows scales;
  uint64_t *rows_taken;
  kvp_owner_check check;

  static load_args make(const kvp_load_params &params, kvp_cuda_counts *counts, load_cut cut, uint64_t warps) {
    return load_args{(const int32_t *)params.segments,
                     params.segment_count,
                     divisor::make(cut.pieces),
                     cut.piece_rows,
                     (uint32_t)(warps % cut.pieces),
                     warps / cut.pieces,
                     layer_layout::make(params.layer),
                     params.total_k,
                     params.out,
                     counts,
                     divisor::make(params.layer.geometry->sizes.row_bytes / 16),
                     params.scales,
                     params.rows_taken,
                     params.check};
  }
};

/* Index caches have no cast-back. */
inline bool has_cast_back(const kvp_store_params &params) {
  const kvp_format &format = *params.layer.geometry->format;
  return params.cast_back.base != nullptr && (format.dequantize_on_load || format.id == KVP_FORMAT_BF16);
}

/* block < num_blocks; check.entries is not NULL. Sealed blocks may be read only. */
__device__ __forceinline__ bool owner_allows(const kvp_owner_check &check, uint32_t block, bool write) {
  if (check.owner == 0) {
    return true;
  }
  uint64_t entry = read_once(&check.entries[block]);
  uint32_t state = (uint32_t)(entry >> 16) & 0xFF;
  bool usable = state == KVP_BLOCK_LEASED || (!write && state == KVP_BLOCK_SEALED);
  return usable && ((uint32_t)entry & 0xFFFF) == check.owner && entry >> 24 <= check.epoch;
}

template <class value> __device__ __forceinline__ value from_lane(value v, int lane) {
  return __shfl_sync(full_warp, v, lane);
}

__device__ __forceinline__ int lane_index() {
  return (int)(threadIdx.x % lanes_per_warp);
}
__device__ __forceinline__ uint64_t warp_index() {
  return (uint64_t)blockIdx.x * (blockDim.x / lanes_per_warp) + threadIdx.x / lanes_per_warp;
}
__device__ __forceinline__ uint64_t warp_count() {
  return (uint64_t)gridDim.x * (blockDim.x / lanes_per_warp);
}

} // namespace kvp

#endif
