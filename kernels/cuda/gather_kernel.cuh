/* Rows in an order that an index gives: copy_rows, and store with a gather index or without slots. OPS "assemble",
 * part 2.
 *
 * One lane reads a row's entry and its slot and finds out what becomes of the row, the others are told. Rows of zeros
 * are written, never read.
 */
#ifndef KVPOOL_KERNELS_CUDA_GATHER_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_GATHER_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/row_store.cuh"

namespace kvp {

constexpr int gather_threads = 128;
constexpr int gather_passes = 4; /* vectors of a lane at a time */

struct gather_args {
  kvp_rows source;
  kvp_rows out;          /* of a store: its cast-back; base NULL: none */
  const int32_t *gather; /* NULL: row i */
  const int32_t *slots;  /* NULL: all are -1 */
  uint64_t source_rows;
  uint64_t row_count;
  layer_layout layer; /* store only */
  kvp_owner_check check;
  kvp_cuda_counts *counts;
  bool copies; /* store only: the output gets the rows as they are */
  /* Copies only: */
  uint32_t vectors;    /* of 16 bytes, a row */
  wide_divisor pieces; /* of a row */
  uint32_t shift;      /* 2^shift lanes a row */
};

constexpr int64_t source_zeros = -1; /* a row of zeros */

/* Where a row comes from: a row of the source, or zeros; and whether its entry is wrong. */
struct row_source {
  int64_t row;
  bool wrong;
};
__device__ __forceinline__ row_source find_source(const gather_args &args, uint64_t row) {
  if (args.gather == nullptr) {
    return row_source{(int64_t)row, false};
  }
  int32_t entry = read_once(&args.gather[row]);
  bool inside = entry >= 0 && (uint32_t)entry < args.source_rows;
  return row_source{inside ? entry : source_zeros, !inside && entry != -1};
}

/* What becomes of a row, as the lane that asked knows it. */
struct gathered_row {
  record_place place;
  int64_t source;
};

/* Counts the row, too. copies: its copy doesn't depend on its slot. */
__device__ __forceinline__ gathered_row find_row(const gather_args &args, bool copies, uint64_t row,
                                                 uint32_t data_step, row_tally &tally) {
  row_source source = find_source(args, row);
  int32_t slot = args.slots == nullptr ? -1 : read_once(&args.slots[row]);
  record_place place = {record_none, 0};
  bool wrong = source.wrong;
  if (source.row == source_zeros) {
    wrong = wrong || slot != -1;
  } else if (slot != -1) {
    place = find_record(args.layer, args.check, slot, data_step);
    wrong = place.data < 0;
  }
  if (copies && place.data == record_ignore) {
    place.data = record_none;
  }
  bool back = args.out.base != nullptr && place.data != record_ignore;
  bool loaded = back && !(copies && source.wrong);
  tally.stored += place.data >= 0;
  tally.rejected += wrong;
  tally.skipped += place.data == record_none && !wrong;
  tally.back += loaded;
  tally.zeroed += loaded && source.row == source_zeros;
  if (!back && place.data < 0) {
    place.data = record_ignore;
  }
  return gathered_row{place, source.row};
}

/* ---- quantized formats: a warp takes one row, or four of 128 elements ---- */

/* What goes to the output beside the record. */
enum gather_back { back_none, back_cast, back_copied };

template <class format, gather_back back>
__device__ __forceinline__ void store_gathered(const gather_args &args, uint64_t first, row_tally &tally) {
  const strip_lane lane = strip_lane::make<format>();
  gathered_row own = {{record_ignore, 0}, source_zeros};
  if (lane_index() < strip_shape<format>::rows && first + lane_index() < args.row_count) {
    own = find_row(args, back == back_copied, first + lane_index(), format::data_step, tally);
  }
  record_place place = record_from_lane<format>(own.place, lane.row);
  int64_t source = from_lane(own.source, lane.row);
  bool wanted = place.data != record_ignore;
  row_strip<format> row = {{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}, 0};
  if (wanted && source != source_zeros) {
    read_strip(args.source.base + (uint64_t)source * args.source.stride_bytes, lane.strip, row.words);
  }
  uint8_t *out = args.out.base + (first + lane.row) * args.out.stride_bytes;
  if (back == back_copied && wanted) {
    write_strip(out, lane.strip, row.words);
  }
  bool counts = back == back_copied ? place.data >= 0 : wanted;
  if (back == back_copied && !__any_sync(full_warp, counts)) {
    return; /* nothing to quantize */
  }
  strip_codes<format> made = quantize_strip(row, counts, lane, tally);
  if (place.data >= 0) {
    write_record(args.layer, place, made, lane.strip);
  }
  if (back == back_cast && wanted) {
    write_cast_back(out, made, lane.strip);
  }
}

__device__ __forceinline__ void gather_tally_add(const row_tally &tally, kvp_cuda_counts *to) {
  const uint64_t values[] = {tally.stored, tally.skipped,   tally.rejected, tally.back,
                             tally.zeroed, tally.nonfinite, tally.saturated};
  uint64_t *const targets[] = {&to->rows_stored, &to->rows_skipped,   &to->rows_rejected,   &to->rows_loaded,
                               &to->rows_zeroed, &to->rows_nonfinite, &to->groups_saturated};
  counts_add(values, targets);
}

/* Warps `index` and on of `count`, each some of the rows. */
template <class format, gather_back back>
__device__ __forceinline__ void store_all_gathered(const gather_args &args, uint64_t index, uint64_t count) {
  constexpr int rows = strip_shape<format>::rows;
  row_tally tally = {};
  for (uint64_t first = index * rows; first < args.row_count; first += count * rows) {
    store_gathered<format, back>(args, first, tally);
  }
  gather_tally_add(tally, args.counts);
}

template <class format, gather_back back>
__global__ void __launch_bounds__(gather_threads) gather_store_kernel(const __grid_constant__ gather_args args) {
  chain_begin(args.counts);
  store_all_gathered<format, back>(args, warp_index(), warp_count());
}

/* ---- copies: bf16 records, and copy_rows; several short rows lie side by side in a warp ---- */

/* Where a copied row comes from and goes to; NULL: zeros, nowhere. */
struct copied_row {
  const uint8_t *from;
  uint8_t *out;
  uint8_t *record;
};

/* Vectors [begin, end) of the lane's row. True: a value of the lane's is not finite; looked at in records only. */
template <bool records>
__device__ __forceinline__ bool copy_row_vectors(const copied_row &row, uint32_t begin, uint32_t end,
                                                 uint32_t lanes) {
  bool nonfinite = false;
  for (uint32_t vector = begin; vector < end; vector += gather_passes * lanes) {
    uint4 words[gather_passes];
#pragma unroll
    for (int pass = 0; pass < gather_passes; pass++) {
      words[pass] = make_uint4(0, 0, 0, 0);
      if (row.from != nullptr && vector + pass * lanes < end) {
        words[pass] = load_16_bytes(row.from + (uint64_t)(vector + pass * lanes) * 16);
      }
    }
#pragma unroll
    for (int pass = 0; pass < gather_passes; pass++) {
      const uint64_t at = (uint64_t)(vector + pass * lanes) * 16;
      if (row.out != nullptr && vector + pass * lanes < end) {
        store_16_bytes(row.out + at, words[pass]);
      }
      if (records && row.record != nullptr && vector + pass * lanes < end) {
        store_16_bytes(row.record + at, words[pass]);
      }
      nonfinite = nonfinite || (records && words_nonfinite(words[pass]));
    }
  }
  return nonfinite;
}

/* What becomes of a row of copy_rows; counted by its first piece. */
__device__ __forceinline__ gathered_row find_copied_row(const gather_args &args, uint64_t row, bool counts,
                                                        row_tally &tally) {
  row_source source = find_source(args, row);
  tally.rejected += source.wrong && counts;
  tally.zeroed += source.row == source_zeros && !source.wrong && counts;
  return gathered_row{{record_none, 0}, source.row};
}

/* A record has one piece, so that a row that is not finite is counted once. */
template <bool records>
__device__ __forceinline__ void copy_gathered(const gather_args &args, uint64_t unit, row_tally &tally) {
  const uint32_t lanes = 1u << args.shift;
  const uint32_t row_lane = lane_index() & (lanes - 1);
  const uint32_t row_of_warp = lane_index() >> args.shift;
  const uint32_t rows_of_warp = lanes_per_warp >> args.shift;
  uint64_t group = args.pieces.quotient(unit);
  uint32_t piece = (uint32_t)(unit - group * args.pieces.value);
  uint64_t first = group * rows_of_warp;
  gathered_row own = {{record_ignore, 0}, source_zeros};
  if (lane_index() < (int)rows_of_warp && first + lane_index() < args.row_count) {
    own = records ? find_row(args, args.copies, first + lane_index(), args.vectors * 16, tally)
                  : find_copied_row(args, first + lane_index(), piece == 0, tally);
  }
  int64_t data = from_lane(own.place.data, (int)row_of_warp);
  int64_t source = from_lane(own.source, (int)row_of_warp);
  bool wanted = data != record_ignore;
  copied_row row = {nullptr, nullptr, nullptr};
  if (wanted && source != source_zeros) {
    row.from = args.source.base + (uint64_t)source * args.source.stride_bytes;
  }
  if (wanted && args.out.base != nullptr) {
    row.out = args.out.base + (first + row_of_warp) * args.out.stride_bytes;
  }
  if (records && data >= 0) {
    row.record = args.layer.base + data;
  }
  uint32_t begin = piece * gather_passes * lanes;
  uint32_t end = records ? args.vectors : min(begin + gather_passes * lanes, args.vectors);
  bool nonfinite = wanted && copy_row_vectors<records>(row, begin + row_lane, end, lanes);
  if constexpr (records) {
    uint32_t of_row = __ballot_sync(full_warp, nonfinite) >> (row_of_warp << args.shift);
    bool counts = !args.copies || data >= 0;
    tally.nonfinite += (of_row & (full_warp >> (lanes_per_warp - lanes))) != 0 && row_lane == 0 && counts;
  }
}

template <bool records>
__device__ __forceinline__ void copy_all_gathered(const gather_args &args, uint64_t index, uint64_t count) {
  row_tally tally = {};
  uint64_t groups = (args.row_count + (lanes_per_warp >> args.shift) - 1) >> (5 - args.shift);
  for (uint64_t unit = index; unit < groups * args.pieces.value; unit += count) {
    copy_gathered<records>(args, unit, tally);
  }
  gather_tally_add(tally, args.counts);
}

template <bool records>
__global__ void __launch_bounds__(gather_threads) gather_copy_kernel(const __grid_constant__ gather_args args) {
  chain_begin(args.counts);
  copy_all_gathered<records>(args, warp_index(), warp_count());
}

} // namespace kvp

#endif
