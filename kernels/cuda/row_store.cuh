/* One row at a time into its record: what fused_store and a store through a gather index share.
 *
 * A lane has a strip of a row: sixteen consecutive elements, of which no group's scale has fewer. A warp has one row of
 * 512 elements or four of 128. Where the record is was found by one lane; what is special about a row's values is
 * looked for in every row and dealt with by the whole warp when there is any.
 */
#ifndef KVPOOL_KERNELS_CUDA_ROW_STORE_CUH
#define KVPOOL_KERNELS_CUDA_ROW_STORE_CUH

#include <stdint.h>

#include "kernels/cuda/counts.cuh"
#include "kernels/cuda/dequantize.cuh"
#include "kernels/cuda/layout.cuh"
#include "kernels/cuda/quantize.cuh"

namespace kvp {

constexpr int strip_chunks = 2;
constexpr int strip_elements = strip_chunks * chunk_elements;

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

/* How rows of a format lie in a warp. */
template <class format> struct strip_shape {
  static constexpr int lanes = format::elements / strip_elements; /* of a row */
  static constexpr int rows = lanes_per_warp / lanes;             /* of a warp */
  static constexpr uint32_t lanes_mask = full_warp >> (lanes_per_warp - lanes);
};

/* The lane's strip, and the largest magnitude of the group that it is in. */
template <class format> struct row_strip {
  static constexpr int lanes_per_group = format::lanes_per_group / strip_chunks;
  uint4 words[strip_chunks];
  uint32_t amax;

  template <bool finite_only> __device__ __forceinline__ void find_amax() {
    uint32_t maxima = __vmaxu2(chunk_maximum<finite_only>(words[0]), chunk_maximum<finite_only>(words[1]));
    amax = max(maxima & 0xFFFF, maxima >> 16);
#pragma unroll
    for (int distance = 1; distance < lanes_per_group; distance *= 2) {
      amax = max(amax, __shfl_xor_sync(full_warp, amax, distance));
    }
  }

  /* The group is not finite, or some of its codes may saturate. */
  __device__ __forceinline__ bool special() const {
    if constexpr (format::scale == KVP_SCALE_E4M3) {
      return amax > saturation_limit || amax < e4m3_scale_safe_min;
    }
    return amax >= bf16_infinity;
  }

private:
  template <bool finite_only> static __device__ __forceinline__ uint32_t chunk_maximum(const uint4 &chunk) {
    return finite_only ? chunk_maxima_finite(chunk) : chunk_maxima(chunk);
  }
};

/* What a record is made of, as far as it is the lane's. */
template <class format> struct strip_codes {
  typename format::codes codes[strip_chunks];
  uint32_t scale;
};

/* Where a lane is: which strip, of which of the warp's rows. */
struct strip_lane {
  int strip;
  int row;

  template <class format> static __device__ __forceinline__ strip_lane make() {
    return strip_lane{lane_index() % strip_shape<format>::lanes, lane_index() / strip_shape<format>::lanes};
  }
};

/* Whole warp: counts rows that are not finite. */
template <class format>
__device__ __forceinline__ void count_nonfinite(bool nonfinite, bool counts, const strip_lane &lane,
                                                row_tally &tally) {
  uint32_t lanes = __ballot_sync(full_warp, nonfinite) >> (lane.row * strip_shape<format>::lanes);
  tally.nonfinite += (lanes & strip_shape<format>::lanes_mask) != 0 && counts && lane.strip == 0;
}

/* Whole warp. Counts what is special, where the lane's row counts, and makes the rest of the way harmless. True: the
 * lane's group is not finite. */
template <class format>
__device__ __forceinline__ bool take_special_strip(row_strip<format> &row, bool counts, const strip_lane &lane,
                                                   row_tally &tally) {
  bool nonfinite = row.amax >= bf16_infinity;
  bool saturated = format::scale == KVP_SCALE_E4M3 && row.amax > saturation_limit && !nonfinite;
  tally.saturated += saturated && counts && lane.strip % row_strip<format>::lanes_per_group == 0;
  count_nonfinite<format>(nonfinite, counts, lane, tally);
#pragma unroll
  for (int chunk = 0; chunk < strip_chunks; chunk++) {
    if (format::fp4 && nonfinite) {
      row.words[chunk] = make_uint4(0, 0, 0, 0);
    } else if (format::scale == KVP_SCALE_E4M3) {
      row.words[chunk] = cut_to_scale(row.words[chunk], row.amax);
    }
  }
  if constexpr (format::fp4) {
    row.amax = nonfinite ? 0 : row.amax;
  } else {
    row.template find_amax<true>();
  }
  return nonfinite;
}

/* Whole warp. `counts`: something becomes of the lane's row. */
template <class format>
__device__ __forceinline__ strip_codes<format> quantize_strip(row_strip<format> &row, bool counts,
                                                              const strip_lane &lane, row_tally &tally) {
  row.template find_amax<false>();
  bool special = __any_sync(full_warp, row.special()) != 0;
  bool nonfinite = special && take_special_strip(row, counts, lane, tally);
  strip_codes<format> made;
  group_scale scale = scale_of_group<format>(row.amax);
  made.scale = scale.stored;
#pragma unroll
  for (int chunk = 0; chunk < strip_chunks; chunk++) {
    made.codes[chunk] = encode<format>(row.words[chunk], scale);
  }
  if (special) {
    if constexpr (format::fp4) {
      constexpr uint32_t nan = format::scale == KVP_SCALE_E4M3 ? e4m3_nan : ue8m0_nan;
      made.scale = nonfinite ? nan : made.scale;
    } else {
#pragma unroll
      for (int chunk = 0; chunk < strip_chunks; chunk++) {
        made.codes[chunk] = patch_e4m3_nan(row.words[chunk], made.codes[chunk]);
      }
    }
  }
  return made;
}

/* Data of records is where such stores may go: FORMATS section 2. */
__device__ __forceinline__ void write_strip_codes(uint8_t *data, int strip, const uint2 (&codes)[strip_chunks]) {
  store_16_bytes(data + strip * 16, make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y));
}
__device__ __forceinline__ void write_strip_codes(uint8_t *data, int strip, const uint32_t (&codes)[strip_chunks]) {
  store_8_bytes(data + strip * 8, make_uint2(codes[0], codes[1]));
}

/* The first lane of a group stores its scale. */
template <class format>
__device__ __forceinline__ void write_record(const layer_layout &layer, const record_place &place,
                                             const strip_codes<format> &made, int strip) {
  constexpr int lanes_per_group = row_strip<format>::lanes_per_group;
  uint8_t *data = layer.base + place.data;
  uint8_t *scales = data + format::data_bytes;
  if constexpr (!format::main_cache) {
    scales = data + layer.scales_begin_bytes - (uint64_t)place.offset * (format::data_step - format::scale_step);
  }
  write_strip_codes(data, strip, made.codes);
  if (strip % lanes_per_group == 0) {
    if constexpr (format::scale == KVP_SCALE_F32) {
      store_4_bytes(scales, made.scale);
    } else {
      store_byte(scales + strip / lanes_per_group, made.scale);
    }
  }
}

__device__ __forceinline__ void write_strip(uint8_t *row, int strip, const uint4 (&words)[strip_chunks]) {
#pragma unroll
  for (int chunk = 0; chunk < strip_chunks; chunk++) {
    store_16_bytes(row + (strip * strip_chunks + chunk) * 16, words[chunk]);
  }
}
template <bool live = false>
__device__ __forceinline__ void read_strip(const uint8_t *row, int strip, uint4 (&words)[strip_chunks]) {
#pragma unroll
  for (int chunk = 0; chunk < strip_chunks; chunk++) {
    const uint8_t *from = row + (strip * strip_chunks + chunk) * 16;
    words[chunk] = live ? load_16_bytes_live(from) : load_16_bytes(from);
  }
}

template <class format>
__device__ __forceinline__ void write_cast_back(uint8_t *row, const strip_codes<format> &made, int strip) {
  uint4 words[strip_chunks];
#pragma unroll
  for (int chunk = 0; chunk < strip_chunks; chunk++) {
    words[chunk] = decode<format>(made.codes[chunk], made.scale);
  }
  write_strip(row, strip, words);
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
