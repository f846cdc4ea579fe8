/* store: BF16 rows quantized into the records their slots name. OPS "store".
 *
 * A warp takes `passes` rows (twice as many of 128 elements) at a time and asks for all of them before it looks at
 * any; a row does not depend on its slot, so both are fetched at once. One lane reads a slot and finds its record, the
 * others are told. When a row has a value that is not finite, or a group whose codes may saturate, the warp does all
 * of its rows again, one by one, on a path that knows of such things; the ordinary path does not.
 */
#ifndef KVPOOL_KERNELS_CUDA_STORE_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_STORE_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/counts.cuh"
#include "kernels/cuda/dequantize.cuh"
#include "kernels/cuda/layout.cuh"
#include "kernels/cuda/quantize.cuh"

namespace kvp {

/* How a kernel is built for speed; results don't depend on it. */
template <int passes_, int threads_> struct store_tuning {
  static constexpr int passes = passes_;
  static constexpr int threads = threads_;
};

struct store_tally {
  uint64_t stored;
  uint64_t skipped;
  uint64_t rejected;
  uint32_t nonfinite;
  uint32_t saturated;
};

/* Where a row goes. Rows that are not stored have no record: data is one of the negative numbers. */
struct slot_place {
  int64_t data; /* offset from the layer's base */
  uint32_t offset;
};
constexpr int64_t place_skipped = -1; /* slot -1: no record, but a cast-back row */
constexpr int64_t place_nothing = -2; /* refused, or past the last row */

/* Lane l reads the slot of row first + l, where that is one of the `remaining`. */
__device__ __forceinline__ int32_t read_slot(const store_args &args, uint64_t first, uint32_t remaining) {
  const uint32_t lane = lane_index();
  return lane < remaining ? read_once(&args.slots[first + lane]) : -1;
}

/* Checks the lane's slot, if it has a row. Slots out of range are refused even in an array that was checked: that
 * costs nothing. */
template <bool checked>
__device__ __forceinline__ slot_place place_slot(const store_args &args, int32_t slot, uint32_t remaining,
                                                 uint32_t data_step, store_tally &tally) {
  slot_place place = {place_nothing, 0};
  if ((uint32_t)lane_index() >= remaining) {
    return place;
  }
  if (slot == -1) {
    place.data = place_skipped;
    tally.skipped += !checked;
    return place;
  }
  if ((uint32_t)slot < args.layer.slots) {
    uint32_t block = args.layer.tokens_per_block.quotient((uint32_t)slot);
    if (checked || owner_allows(args.check, block, true)) {
      place.offset = (uint32_t)slot - block * args.layer.tokens_per_block.value;
      place.data = (int64_t)(block * args.layer.block_stride_bytes + (uint64_t)place.offset * data_step);
    }
  }
  if (!checked) {
    tally.stored += place.data >= 0;
    tally.rejected += place.data < 0;
  }
  return place;
}

/* The rows of a warp, as one lane sees them. */
template <class format, class tuning> struct store_batch {
  static constexpr int rows = tuning::passes * format::rows_per_pass;
  static constexpr int values = tuning::passes * format::chunks; /* group maxima, two a word */
  static constexpr int pairs = (values + 1) / 2;
  static_assert(rows <= lanes_per_warp, "a lane for every slot");

  uint4 words[tuning::passes][format::chunks];
  uint32_t maxima[pairs];

  __device__ __forceinline__ uint32_t amax(int pass, int chunk) const {
    int index = pass * format::chunks + chunk;
    return index % 2 == 0 ? maxima[index / 2] & 0xFFFF : maxima[index / 2] >> 16;
  }
};

/* Lanes past the last row read the last one of theirs, or the first of all, once more: what they make of it goes
 * nowhere. remaining > 0. */
template <class format, class tuning>
__device__ __forceinline__ void read_rows(const store_args &args, uint64_t first, uint32_t remaining, int row_lane,
                                          int row_of_pass, store_batch<format, tuning> &batch) {
  uint64_t begin = first + ((uint32_t)row_of_pass < remaining ? row_of_pass : 0);
  const uint8_t *from = args.source.base + begin * args.source.stride_bytes + row_lane * 16;
#pragma unroll
  for (int pass = 0; pass < tuning::passes; pass++) {
    if (pass > 0 && (uint32_t)(pass * format::rows_per_pass + row_of_pass) < remaining) {
      from += format::rows_per_pass * args.source.stride_bytes;
    }
#pragma unroll
    for (int chunk = 0; chunk < format::chunks; chunk++) {
      batch.words[pass][chunk] = load_16_bytes(from + chunk * format::lanes_per_row * 16);
    }
  }
}

/* Maxima of the groups, in all of their lanes. True: one of this lane's groups may be special. */
template <bool finite_only, class format, class tuning>
__device__ __forceinline__ bool find_maxima(store_batch<format, tuning> &batch) {
  using batch_type = store_batch<format, tuning>;
  uint32_t largest = 0;
  uint32_t smallest = 0xFFFFFFFF;
#pragma unroll
  for (int pair = 0; pair < batch_type::pairs; pair++) {
    uint32_t own[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int index = min(2 * pair + half, batch_type::values - 1);
      const uint4 &words = batch.words[index / format::chunks][index % format::chunks];
      own[half] = finite_only ? chunk_maxima_finite(words) : chunk_maxima(words);
    }
    uint32_t maxima = __vmaxu2(__byte_perm(own[0], own[1], 0x5410), __byte_perm(own[0], own[1], 0x7632));
#pragma unroll
    for (int distance = 1; distance < format::lanes_per_group; distance *= 2) {
      maxima = __vmaxu2(maxima, __shfl_xor_sync(full_warp, maxima, distance));
    }
    batch.maxima[pair] = maxima;
    largest = __vmaxu2(largest, maxima);
    smallest = __vminu2(smallest, maxima);
  }
  uint32_t top = max(largest & 0xFFFF, largest >> 16);
  if constexpr (format::scale == KVP_SCALE_E4M3) {
    return top > saturation_limit || min(smallest & 0xFFFF, smallest >> 16) < e4m3_scale_safe_min;
  }
  return top >= bf16_infinity;
}

/* Whole warp, one pass: counts what is special, where the lane's row counts, and makes the rest of the way harmless.
 * FP4 groups that are not finite lose their elements, others have them cut where they could saturate; FP8 groups take
 * their maximum over finite elements. */
template <class format, class tuning>
__device__ __forceinline__ void take_special(store_batch<format, tuning> &batch, bool counts, int row_lane,
                                             int row_of_pass, store_tally &tally) {
  static_assert(tuning::passes == 1, "row by row");
  constexpr uint32_t lanes_of_row = format::lanes_per_row == 32 ? full_warp : (1u << format::lanes_per_row) - 1;
  bool nonfinite = false;
#pragma unroll
  for (int chunk = 0; chunk < format::chunks; chunk++) {
    uint32_t amax = batch.amax(0, chunk);
    nonfinite = nonfinite || amax >= bf16_infinity;
    if (format::fp4 && amax >= bf16_infinity) {
      batch.words[0][chunk] = make_uint4(0, 0, 0, 0);
    } else if (format::scale == KVP_SCALE_E4M3) {
      batch.words[0][chunk] = cut_to_scale(batch.words[0][chunk], amax);
    }
    bool saturated = format::scale == KVP_SCALE_E4M3 && amax > saturation_limit && amax < bf16_infinity;
    tally.saturated += saturated && counts && row_lane % format::lanes_per_group == 0;
  }
  uint32_t lanes = __ballot_sync(full_warp, nonfinite) >> (row_of_pass * format::lanes_per_row % lanes_per_warp);
  tally.nonfinite += (lanes & lanes_of_row) != 0 && counts && row_lane == 0;
  if (!format::fp4) {
    (void)find_maxima<true>(batch);
  }
}

/* Scales of a main cache's row: lane i of a group's lanes stores that of chunk i, all of them at once. */
template <class format>
__device__ __forceinline__ void write_scales(uint8_t *to, const uint32_t (&scales)[format::chunks], int row_lane) {
  int chunk = row_lane % format::lanes_per_group;
  if (chunk < format::chunks) {
    store_byte(to + format::group_of(row_lane, chunk), chunk == 0 ? scales[0] : scales[format::chunks - 1]);
  }
}

/* Scales of an index cache's rows are 4 bytes each; here lane l gets those of row l, so that all are one store. */
template <class format, class tuning> struct row_scales {
  static constexpr int passes = tuning::passes;
  uint32_t of_pass[passes];

  __device__ __forceinline__ uint32_t of_row(uint32_t row) const {
    if constexpr (format::scale == KVP_SCALE_F32) {
      return of_row_f32(row);
    } else {
      return of_row_bytes(row);
    }
  }

private:
  static constexpr int rows_per_pass = format::rows_per_pass;
  static constexpr int lanes_per_row = format::lanes_per_row;

  /* Lane p of a row offers that of pass p. */
  __device__ __forceinline__ uint32_t of_row_f32(uint32_t row) const {
    static_assert(passes <= lanes_per_row, "a lane for every pass");
    uint32_t offered = of_pass[0];
#pragma unroll
    for (int pass = 1; pass < passes; pass++) {
      offered = lane_index() % lanes_per_row == pass ? of_pass[pass] : offered;
    }
    return from_lane(offered, (int)(row % rows_per_pass * lanes_per_row + row / rows_per_pass % passes));
  }

  /* Four passes at a time: the bytes of four groups and four passes change places. */
  __device__ __forceinline__ uint32_t of_row_bytes(uint32_t row) const {
    constexpr int distance = format::lanes_per_group;
    static_assert(format::scales_per_row == 4 && format::chunks == 1, "four groups side by side");
    uint32_t result = 0;
#pragma unroll
    for (int first = 0; first < passes; first += 4) {
      uint32_t scales = of_pass[first] & 0xFF;
#pragma unroll
      for (int pass = 1; pass < 4 && first + pass < passes; pass++) {
        scales = __byte_perm(scales, of_pass[first + pass], pass == 1 ? 0x3240 : pass == 2 ? 0x3410 : 0x4210);
      }
      uint32_t group = lane_index() % lanes_per_row / distance;
      uint32_t other = __shfl_xor_sync(full_warp, scales, distance);
      scales = __byte_perm(scales, other, group % 2 == 0 ? 0x6240 : 0x3715);
      other = __shfl_xor_sync(full_warp, scales, 2 * distance);
      scales = __byte_perm(scales, other, group < 2 ? 0x5410 : 0x3276);
      uint32_t pass = row / rows_per_pass;
      scales = from_lane(scales, (int)(row % rows_per_pass * lanes_per_row + pass % 4 * distance));
      result = pass / 4 == (uint32_t)first / 4 ? scales : result;
    }
    return result;
  }
};

/* Lane l stores those of row l, where it has a record; rows of the batch begin at lane `first_lane`. Whole warp. */
template <class format, class tuning>
__device__ __forceinline__ void write_row_scales(const store_args &args, const row_scales<format, tuning> &scales,
                                                 const slot_place &own, uint32_t first_lane) {
  constexpr uint32_t rows = tuning::passes * format::rows_per_pass;
  uint32_t row = lane_index() - first_lane;
  uint32_t of_row = scales.of_row(row);
  if (row < rows && own.data >= 0) {
    uint64_t back = (uint64_t)own.offset * (format::data_step - format::scale_step);
    store_4_bytes(args.layer.base + own.data + args.layer.scales_begin_bytes - back, of_row);
  }
}

__device__ __forceinline__ void write_codes(uint8_t *to, uint2 codes) {
  store_8_bytes(to, codes);
}
__device__ __forceinline__ void write_codes(uint8_t *to, uint32_t codes) {
  store_4_bytes(to, codes);
}

/* One pass: quantizes, writes the record where there is one, and its cast-back where that is asked for. Yields the
 * scale of the lane's first chunk. */
template <class format, class tuning, bool cast_back, bool special>
__device__ __forceinline__ uint32_t finish_pass(const store_args &args, const store_batch<format, tuning> &batch,
                                                int pass, int64_t place, uint64_t row, int row_lane) {
  uint32_t scales[format::chunks];
  typename format::codes codes[format::chunks];
#pragma unroll
  for (int chunk = 0; chunk < format::chunks; chunk++) {
    const uint4 &words = batch.words[pass][chunk];
    group_scale scale = scale_of_group<format>(batch.amax(pass, chunk));
    codes[chunk] = encode<format>(words, scale);
    scales[chunk] = scale.stored;
    if constexpr (special) {
      if constexpr (format::fp4) {
        uint32_t nan = format::scale == KVP_SCALE_E4M3 ? e4m3_nan : ue8m0_nan;
        scales[chunk] = batch.amax(pass, chunk) >= bf16_infinity ? nan : scales[chunk];
      } else {
        codes[chunk] = patch_e4m3_nan(words, codes[chunk]);
      }
    }
  }
  if (place >= 0) {
    uint8_t *data = args.layer.base + place;
#pragma unroll
    for (int chunk = 0; chunk < format::chunks; chunk++) {
      write_codes(data + (chunk * format::lanes_per_row + row_lane) * format::code_bytes, codes[chunk]);
    }
    if constexpr (format::main_cache) {
      write_scales<format>(data + format::data_bytes, scales, row_lane);
    }
  }
  if constexpr (cast_back) {
    if (place != place_nothing) {
      uint8_t *back = args.cast_back.base + row * args.cast_back.stride_bytes + row_lane * 16;
#pragma unroll
      for (int chunk = 0; chunk < format::chunks; chunk++) {
        store_16_bytes(back + chunk * format::lanes_per_row * 16, decode<format>(codes[chunk], scales[chunk]));
      }
    }
  }
  return scales[0];
}

/* All rows of the warp once more, row by row: rare. */
template <class format, class tuning, bool cast_back>
__device__ __forceinline__ void store_special_rows(const store_args &args, uint64_t first, uint32_t remaining,
                                                   const slot_place &own, int row_lane, int row_of_pass,
                                                   store_tally &tally) {
  using single = store_tuning<1, tuning::threads>;
#pragma unroll 1
  for (uint32_t done = 0; done < remaining; done += format::rows_per_pass) {
    store_batch<format, single> batch;
    row_scales<format, single> scales;
    read_rows(args, first + done, remaining - done, row_lane, row_of_pass, batch);
    int64_t place = from_lane(own.data, (int)done + row_of_pass);
    (void)find_maxima<false>(batch);
    bool counts = place >= 0 || (cast_back && place == place_skipped);
    take_special(batch, counts, row_lane, row_of_pass, tally);
    scales.of_pass[0] =
        finish_pass<format, single, cast_back, true>(args, batch, 0, place, first + done + row_of_pass, row_lane);
    if constexpr (!format::main_cache) {
      write_row_scales(args, scales, own, done);
    }
  }
}

template <class format, class tuning, bool checked, bool cast_back>
__device__ __forceinline__ void store_rows(const store_args &args, uint64_t first, store_tally &tally) {
  using batch_type = store_batch<format, tuning>;
  const int lane = lane_index();
  const int row_lane = lane % format::lanes_per_row;
  const int row_of_pass = lane / format::lanes_per_row;
  uint64_t rows_left = args.row_count - first;
  uint32_t remaining = rows_left < batch_type::rows ? (uint32_t)rows_left : batch_type::rows;
  batch_type batch;
  row_scales<format, tuning> scales;
  int32_t slot = read_slot(args, first, remaining);
  read_rows(args, first, remaining, row_lane, row_of_pass, batch);
  counts_begin(args.counts, first == 0);
  slot_place own = place_slot<checked>(args, slot, remaining, format::data_step, tally);
  if (__any_sync(full_warp, find_maxima<false>(batch))) {
    store_special_rows<format, tuning, cast_back>(args, first, remaining, own, row_lane, row_of_pass, tally);
    return;
  }
#pragma unroll
  for (int pass = 0; pass < tuning::passes; pass++) {
    int row = pass * format::rows_per_pass + row_of_pass;
    int64_t place = from_lane(own.data, row);
    scales.of_pass[pass] =
        finish_pass<format, tuning, cast_back, false>(args, batch, pass, place, first + row, row_lane);
  }
  if constexpr (!format::main_cache) {
    write_row_scales(args, scales, own, 0);
  }
}

template <bool checked>
__device__ __forceinline__ void store_tally_add(const store_tally &tally, kvp_cuda_counts *to) {
  if constexpr (checked) {
    const uint64_t values[] = {tally.nonfinite, tally.saturated};
    uint64_t *const targets[] = {&to->rows_nonfinite, &to->groups_saturated};
    counts_add(values, targets);
  } else {
    const uint64_t values[] = {tally.nonfinite, tally.saturated, tally.stored, tally.skipped, tally.rejected};
    uint64_t *const targets[] = {&to->rows_nonfinite, &to->groups_saturated, &to->rows_stored, &to->rows_skipped,
                                 &to->rows_rejected};
    counts_add(values, targets);
  }
}

template <class format, class tuning, bool checked, bool cast_back>
__global__ void __launch_bounds__(tuning::threads) store_kernel(const __grid_constant__ store_args args) {
  constexpr int rows = store_batch<format, tuning>::rows;
  chain_begin();
  store_tally tally = {};
  for (uint64_t first = warp_index() * rows; first < args.row_count; first += warp_count() * rows) {
    store_rows<format, tuning, checked, cast_back>(args, first, tally);
  }
  store_tally_add<checked>(tally, args.counts);
}

} // namespace kvp

#endif
