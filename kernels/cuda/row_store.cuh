/* One row at a time into its record: what fused_store and a store through a gather index share.
 *
 * A warp has one row of 512 elements or two of 128, as chunks (format.cuh). Where the record is was found by one lane;
 * what is special about a row's values is looked for in every row and dealt with by the whole warp when there is any.
 */
#ifndef KVPOOL_KERNELS_CUDA_ROW_STORE_CUH
#define KVPOOL_KERNELS_CUDA_ROW_STORE_CUH

#include <stdint.h>

#include "kernels/cuda/counts.cuh"
#include "kernels/cuda/dequantize.cuh"
#include "kernels/cuda/layout.cuh"
#include "kernels/cuda/quantize.cuh"

namespace kvp {

/* Where the record of a row is; without one, data is one of the negative numbers. */
struct record_place {
  int64_t data; /* offset from the layer's base */
  uint32_t offset;
};
constexpr int64_t record_none = -1;   /* the row has a cast-back only */
constexpr int64_t record_ignore = -2; /* nothing becomes of the row */

/* Of one thread: rows are shared out among so many that these are wide enough. */
struct row_tally {
  uint32_t stored;
  uint32_t skipped;
  uint32_t rejected;
  uint32_t back;   /* cast-back rows that were written; */
  uint32_t zeroed; /* zeros among them. Both: gather only */
  uint32_t nonfinite;
  uint32_t saturated;
};

/* The record of a slot, which is not -1; data negative: there is none that the session may write. */
__device__ __forceinline__ record_place find_record(const layer_layout &layer, const kvp_owner_check &check,
                                                    int32_t slot, uint32_t data_step) {
  record_place place = {record_ignore, 0};
  if ((uint32_t)slot < layer.slots) {
    uint32_t block = layer.tokens_per_block.quotient((uint32_t)slot);
    if (check.entries == nullptr || owner_allows(check, block, true)) {
      place.offset = (uint32_t)slot - block * layer.tokens_per_block.value;
      place.data = (int64_t)(block * layer.block_stride_bytes + (uint64_t)place.offset * data_step);
    }
  }
  return place;
}

/* The lane's chunks of a row, and the group maxima of both, one in each half. */
template <class format> struct row_chunks {
  uint4 words[format::chunks];
  uint32_t maxima;

  __device__ __forceinline__ uint32_t amax(int chunk) const { return chunk == 0 ? maxima & 0xFFFF : maxima >> 16; }

  template <bool finite_only> __device__ __forceinline__ void find_maxima() {
    uint32_t first = chunk_maximum<finite_only>(words[0]);
    uint32_t last = format::chunks == 1 ? first : chunk_maximum<finite_only>(words[format::chunks - 1]);
    maxima = __vmaxu2(__byte_perm(first, last, 0x5410), __byte_perm(first, last, 0x7632));
#pragma unroll
    for (int distance = 1; distance < format::lanes_per_group; distance *= 2) {
      maxima = __vmaxu2(maxima, __shfl_xor_sync(full_warp, maxima, distance));
    }
  }

  /* One of the lane's groups is not finite, or some of its codes may saturate. */
  __device__ __forceinline__ bool special() const {
    uint32_t top = max(amax(0), maxima >> 16);
    if constexpr (format::scale == KVP_SCALE_E4M3) {
      return top > saturation_limit || min(amax(0), maxima >> 16) < e4m3_scale_safe_min;
    }
    return top >= bf16_infinity;
  }

private:
  template <bool finite_only> static __device__ __forceinline__ uint32_t chunk_maximum(const uint4 &chunk) {
    return finite_only ? chunk_maxima_finite(chunk) : chunk_maxima(chunk);
  }
};

/* What a record is made of, as far as it is the lane's. */
template <class format> struct row_codes {
  typename format::codes codes[format::chunks];
  uint32_t scales[format::chunks];
};

/* Whole warp. Counts what is special, where the lane's row counts, and makes the rest of the way harmless. Yields which
 * of the lane's chunks are of groups that are not finite, bit by bit. */
template <class format>
__device__ __forceinline__ uint32_t take_special_row(row_chunks<format> &row, bool counts, int row_lane,
                                                     int row_of_warp, row_tally &tally) {
  constexpr uint32_t lanes_of_row = full_warp >> (lanes_per_warp - format::lanes_per_row);
  uint32_t nonfinite = 0;
#pragma unroll
  for (int chunk = 0; chunk < format::chunks; chunk++) {
    uint32_t amax = row.amax(chunk);
    nonfinite |= (amax >= bf16_infinity) << chunk;
    if (format::fp4 && amax >= bf16_infinity) {
      row.words[chunk] = make_uint4(0, 0, 0, 0);
    } else if (format::scale == KVP_SCALE_E4M3) {
      row.words[chunk] = cut_to_scale(row.words[chunk], amax);
    }
    bool saturated = format::scale == KVP_SCALE_E4M3 && amax > saturation_limit && amax < bf16_infinity;
    tally.saturated += saturated && counts && row_lane % format::lanes_per_group == 0;
  }
  uint32_t lanes = __ballot_sync(full_warp, nonfinite != 0) >> (row_of_warp * format::lanes_per_row);
  tally.nonfinite += (lanes & lanes_of_row) != 0 && counts && row_lane == 0;
  if constexpr (format::fp4) {
    row.maxima &= ((nonfinite & 1) != 0 ? 0 : 0xFFFF) | ((nonfinite & 2) != 0 ? 0 : 0xFFFF0000);
  } else {
    row.template find_maxima<true>();
  }
  return nonfinite;
}

/* Whole warp. `counts`: something becomes of the lane's row. */
template <class format>
__device__ __forceinline__ row_codes<format> quantize_row(row_chunks<format> &row, bool counts, int row_lane,
                                                          int row_of_warp, row_tally &tally) {
  row.template find_maxima<false>();
  bool special = __any_sync(full_warp, row.special()) != 0;
  uint32_t nonfinite = special ? take_special_row(row, counts, row_lane, row_of_warp, tally) : 0;
  row_codes<format> made;
#pragma unroll
  for (int chunk = 0; chunk < format::chunks; chunk++) {
    group_scale scale = scale_of_group<format>(row.amax(chunk));
    made.codes[chunk] = encode<format>(row.words[chunk], scale);
    made.scales[chunk] = scale.stored;
    if (special) {
      if constexpr (format::fp4) {
        constexpr uint32_t nan = format::scale == KVP_SCALE_E4M3 ? e4m3_nan : ue8m0_nan;
        made.scales[chunk] = (nonfinite >> chunk & 1) != 0 ? nan : made.scales[chunk];
      } else {
        made.codes[chunk] = patch_e4m3_nan(row.words[chunk], made.codes[chunk]);
      }
    }
  }
  return made;
}

__device__ __forceinline__ void write_chunk_codes(uint8_t *to, uint2 codes) {
  store_8_bytes(to, codes);
}
__device__ __forceinline__ void write_chunk_codes(uint8_t *to, uint32_t codes) {
  store_4_bytes(to, codes);
}

/* Lane i of a group's lanes stores the scale of its chunk i. */
template <class format>
__device__ __forceinline__ void write_record(const layer_layout &layer, const record_place &place,
                                             const row_codes<format> &made, int row_lane) {
  uint8_t *data = layer.base + place.data;
  uint8_t *scales = data + format::data_bytes;
  if constexpr (!format::main_cache) {
    scales = data + layer.scales_begin_bytes - (uint64_t)place.offset * (format::data_step - format::scale_step);
  }
#pragma unroll
  for (int chunk = 0; chunk < format::chunks; chunk++) {
    write_chunk_codes(data + (chunk * format::lanes_per_row + row_lane) * format::code_bytes, made.codes[chunk]);
  }
  int chunk = row_lane % format::lanes_per_group;
  if constexpr (format::scale == KVP_SCALE_F32) {
    if (chunk == 0) {
      store_4_bytes(scales, made.scales[0]);
    }
  } else if (chunk < format::chunks) {
    store_byte(scales + format::group_of(row_lane, chunk),
               chunk == 0 ? made.scales[0] : made.scales[format::chunks - 1]);
  }
}

template <class format>
__device__ __forceinline__ void write_cast_back(uint8_t *to, const row_codes<format> &made, int row_lane) {
#pragma unroll
  for (int chunk = 0; chunk < format::chunks; chunk++) {
    store_16_bytes(to + (chunk * format::lanes_per_row + row_lane) * 16,
                   decode<format>(made.codes[chunk], made.scales[chunk]));
  }
}

/* What lane `lane` found. */
template <class format> __device__ __forceinline__ record_place record_from_lane(const record_place &own, int lane) {
  return record_place{from_lane(own.data, lane), format::main_cache ? 0 : from_lane(own.offset, lane)};
}

__device__ __forceinline__ bool words_nonfinite(const uint4 &words) {
  uint32_t maxima = chunk_maxima(words);
  return max(maxima & 0xFFFF, maxima >> 16) >= bf16_infinity;
}

} // namespace kvp

#endif
