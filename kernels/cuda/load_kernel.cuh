/* load: records named by segments to output rows. OPS "load".
 *
 * A warp takes one piece of a segment at a time: a few consecutive records, all asked for before the first is used.
 * How a piece becomes rows is a type: `dequantized` for main caches, `copied` for index caches and bf16.
 */
#ifndef KVPOOL_KERNELS_CUDA_LOAD_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_LOAD_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/counts.cuh"
#include "kernels/cuda/dequantize.cuh"
#include "kernels/cuda/layout.cuh"
#include "kernels/cuda/store_copy_kernel.cuh"

namespace kvp {

/* piece_rows_: the most rows of a piece where there is work for every multiprocessor. */
template <int passes_, int threads_, int piece_rows_, load_hint load_, store_hint store_> struct load_tuning {
  static constexpr int passes = passes_;
  static constexpr int threads = threads_;
  static constexpr int piece_rows = piece_rows_;
  static constexpr load_hint load = load_;
  static constexpr store_hint store = store_;
};

struct load_tally {
  uint64_t loaded;
  uint64_t zeroed;
  uint64_t rejected;
};

struct segment_rows {
  int32_t block;
  uint32_t begin;
  uint64_t out;
  uint32_t rows;
};

/* Consecutive records to consecutive output rows; block -1: zero rows. */
__device__ __forceinline__ const uint8_t *block_of(const load_args &args, const segment_rows &range) {
  return args.layer.base + (uint64_t)(uint32_t)range.block * args.layer.block_stride_bytes;
}

template <class tuning>
__device__ __forceinline__ void zero_bytes(const kvp_rows &rows, const segment_rows &range, uint32_t row_bytes) {
  const row_split split = row_split::make(row_bytes);
  const uint32_t lane = lane_index();
  for (uint32_t row = lane >> split.shift; row < range.rows; row += split.rows()) {
    uint8_t *to = rows.base + (range.out + row) * rows.stride_bytes;
    for (uint32_t vector = lane & (split.lanes() - 1); vector < split.vectors; vector += split.lanes()) {
      store_16_bytes<tuning::store>(to + (uint64_t)vector * 16, make_uint4(0, 0, 0, 0));
    }
  }
}

template <class format, class tuning> struct dequantized {
  static constexpr int rows_side_by_side = 1;
  static_assert(format::lanes_per_row == lanes_per_warp, "a warp is a row");

  /* Lanes past the last row of the range decode the last one again and keep it to themselves. */
  static __device__ __forceinline__ void load(const load_args &args, const segment_rows &range) {
    const int lane = lane_index();
    const uint8_t *from = block_of(args, range) + (uint64_t)range.begin * format::data_step;
    uint8_t *to = args.out.base + range.out * args.out.stride_bytes + lane * 16;
    for (uint32_t done = 0; done < range.rows; done += tuning::passes) {
      typename format::codes codes[tuning::passes][format::chunks];
      uint32_t scales[tuning::passes][format::chunks];
#pragma unroll
      for (int pass = 0; pass < tuning::passes; pass++) {
#pragma unroll
        for (int chunk = 0; chunk < format::chunks; chunk++) {
          read_codes(from + (chunk * format::lanes_per_row + lane) * format::code_bytes, codes[pass][chunk]);
          scales[pass][chunk] = load_byte(from + format::data_bytes + format::group_of(lane, chunk));
        }
        if (done + pass + 1 < range.rows) {
          from += format::data_step;
        }
      }
#pragma unroll
      for (int pass = 0; pass < tuning::passes; pass++) {
        if (done + pass < range.rows) {
#pragma unroll
          for (int chunk = 0; chunk < format::chunks; chunk++) {
            store_16_bytes<tuning::store>(to + chunk * format::lanes_per_row * 16,
                                          decode<format>(codes[pass][chunk], scales[pass][chunk]));
          }
        }
        to += args.out.stride_bytes;
      }
    }
  }

  static __device__ __forceinline__ void zero(const load_args &args, const segment_rows &range) {
    zero_bytes<tuning>(args.out, range, format::row_bytes);
  }

private:
  static __device__ __forceinline__ void read_codes(const uint8_t *from, uint2 &codes) {
    codes = load_8_bytes<tuning::load>(from);
  }
  static __device__ __forceinline__ void read_codes(const uint8_t *from, uint32_t &codes) {
    codes = load_4_bytes<tuning::load>(from);
  }
};

/* Index caches: codes of `data_bytes` and a scale of 4 bytes. A piece is no more rows than a warp has lanes. */
template <int data_bytes, class tuning> struct copied_with_scales {
  static constexpr int lanes_per_record = data_bytes / 16;
  static constexpr int rows_side_by_side = lanes_per_warp / lanes_per_record;
  static_assert(tuning::passes * rows_side_by_side == lanes_per_warp && tuning::piece_rows == lanes_per_warp,
                "all rows of a piece at once, a lane for every scale");

  static __device__ __forceinline__ void load(const load_args &args, const segment_rows &range) {
    const uint32_t lane = lane_index();
    const uint32_t row_of_pass = lane / lanes_per_record;
    const uint32_t at = lane % lanes_per_record * 16;
    const uint8_t *block = block_of(args, range);
    const uint8_t *from = block + (uint64_t)range.begin * data_bytes + lane * 16;
    uint4 words[tuning::passes];
    uint32_t scale = 0;
#pragma unroll
    for (int pass = 0; pass < tuning::passes; pass++) {
      words[pass] = make_uint4(0, 0, 0, 0);
      if (pass * rows_side_by_side + row_of_pass < range.rows) {
        words[pass] = load_16_bytes<tuning::load>(from + pass * lanes_per_warp * 16);
      }
    }
    if (lane < range.rows) {
      scale = load_4_bytes<tuning::load>(block + args.layer.scales_begin_bytes + ((uint64_t)range.begin + lane) * 4);
      store_4_bytes<tuning::store>(args.scales.base + (range.out + lane) * args.scales.stride_bytes, scale);
    }
    uint8_t *to = args.out.base + (range.out + row_of_pass) * args.out.stride_bytes + at;
#pragma unroll
    for (int pass = 0; pass < tuning::passes; pass++) {
      if (pass * rows_side_by_side + row_of_pass < range.rows) {
        store_16_bytes<tuning::store>(to, words[pass]);
      }
      to += rows_side_by_side * args.out.stride_bytes;
    }
  }

  static __device__ __forceinline__ void zero(const load_args &args, const segment_rows &range) {
    zero_bytes<tuning>(args.out, range, data_bytes);
    if ((uint32_t)lane_index() < range.rows) {
      store_4_bytes<tuning::store>(args.scales.base + (range.out + lane_index()) * args.scales.stride_bytes, 0);
    }
  }
};

/* bf16: rows of any width. */
template <class tuning> struct copied {
  static constexpr int rows_side_by_side = 4; /* at most */

  static __device__ __forceinline__ void load(const load_args &args, const segment_rows &range) {
    const row_split split = row_split::make(args.row_bytes);
    const uint32_t lane = lane_index();
    const uint8_t *from = block_of(args, range) + (uint64_t)range.begin * args.row_bytes;
    for (uint32_t row = lane >> split.shift; row < range.rows; row += tuning::passes * split.rows()) {
      for (uint32_t vector = lane & (split.lanes() - 1); vector < split.vectors; vector += split.lanes()) {
        copy_column(args, range, split, from + (uint64_t)vector * 16, row, vector);
      }
    }
  }

  static __device__ __forceinline__ void zero(const load_args &args, const segment_rows &range) {
    zero_bytes<tuning>(args.out, range, args.row_bytes);
  }

private:
  /* One vector of rows row, row + split.rows(), ... */
  static __device__ __forceinline__ void copy_column(const load_args &args, const segment_rows &range,
                                                     const row_split &split, const uint8_t *from, uint32_t row,
                                                     uint32_t vector) {
    uint4 words[tuning::passes];
#pragma unroll
    for (int pass = 0; pass < tuning::passes; pass++) {
      uint32_t r = row + pass * split.rows();
      words[pass] = make_uint4(0, 0, 0, 0);
      if (r < range.rows) {
        words[pass] = load_16_bytes<tuning::load>(from + (uint64_t)r * args.row_bytes);
      }
    }
#pragma unroll
    for (int pass = 0; pass < tuning::passes; pass++) {
      uint32_t r = row + pass * split.rows();
      if (r < range.rows) {
        uint8_t *to = args.out.base + (range.out + r) * args.out.stride_bytes;
        store_16_bytes<tuning::store>(to + (uint64_t)vector * 16, words[pass]);
      }
    }
  }
};

/* Reads segment `index`; false, and counted by its first piece, when it must not be followed. A segment that is
 * refused counts the rows it names, and one where it names none. Bounds are looked at even in an array that was
 * checked. Same answer in all lanes: each word, the owner's entry as well, is read by one of them. */
template <bool checked>
__device__ __forceinline__ bool take_segment(const load_args &args, uint64_t index, uint32_t piece, segment_rows &out,
                                             load_tally &tally) {
  const int lane = lane_index();
  int32_t own = lane < 4 ? read_once(&args.segments[index * 4 + lane]) : 0;
  int32_t block = from_lane(own, 0);
  int32_t begin = from_lane(own, 1);
  int32_t end = from_lane(own, 2);
  int32_t to = from_lane(own, 3);
  bool rows_valid = begin >= 0 && begin <= end && (uint32_t)end <= args.layer.tokens_per_block.value;
  uint32_t rows = rows_valid ? (uint32_t)(end - begin) : 0;
  bool valid = rows_valid && to >= 0 && (uint64_t)to + rows <= args.total_k &&
               (block == -1 || (uint32_t)block < args.layer.num_blocks);
  if constexpr (!checked) {
    if (valid && block != -1) {
      bool allowed = lane == 0 && owner_allows(args.check, (uint32_t)block, false);
      valid = __any_sync(full_warp, allowed) != 0;
    }
    if (!valid && piece == 0 && lane == 0) {
      tally.rejected += rows > 0 ? rows : 1;
    }
  }
  out = segment_rows{block, (uint32_t)begin, (uint64_t)to, rows};
  return valid;
}

/* Takes `rows` from the budget of the op's output; how many it got. */
__device__ __forceinline__ uint32_t take_rows(const load_args &args, uint32_t rows, load_tally &tally) {
  uint32_t taken = 0;
  if (lane_index() == 0) {
    uint64_t before = atomicAdd((unsigned long long *)args.rows_taken, (unsigned long long)rows);
    uint64_t left = before < args.total_k ? args.total_k - before : 0;
    taken = left < rows ? (uint32_t)left : rows;
    tally.rejected += rows - taken;
  }
  return from_lane(taken, 0);
}

template <class body, bool checked>
__device__ __forceinline__ void load_piece(const load_args &args, uint64_t index, uint32_t piece, load_tally &tally) {
  segment_rows segment;
  if (!take_segment<checked>(args, index, piece, segment, tally)) {
    return;
  }
  for (uint32_t at = piece * args.cut.piece_rows; at < segment.rows; at += args.cut.pieces * args.cut.piece_rows) {
    segment_rows range = {segment.block, segment.begin + at, segment.out + at,
                          min(args.cut.piece_rows, segment.rows - at)};
    if constexpr (!checked) {
      range.rows = take_rows(args, range.rows, tally);
      if (lane_index() == 0) {
        tally.loaded += range.rows;
        tally.zeroed += range.block == -1 ? range.rows : 0;
      }
    }
    if (range.rows == 0) {
      continue;
    }
    if (range.block == -1) {
      body::zero(args, range);
    } else {
      body::load(args, range);
    }
  }
}

template <class body, class tuning, bool checked>
__global__ void __launch_bounds__(tuning::threads) load_kernel(const __grid_constant__ load_args args) {
  counts_begin(args.counts);
  load_tally tally = {};
  uint64_t first = warp_index(); /* below 2^32: the launcher sees to it */
  uint64_t segment = (uint32_t)first / args.cut.pieces;
  uint32_t piece = (uint32_t)first % args.cut.pieces;
  while (segment < args.segment_count) {
    load_piece<body, checked>(args, segment, piece, tally);
    segment += args.step_segments;
    piece += args.step_pieces;
    if (piece >= args.cut.pieces) {
      piece -= args.cut.pieces;
      segment++;
    }
  }
  if constexpr (!checked) {
    const uint64_t values[] = {tally.loaded, tally.zeroed, tally.rejected};
    uint64_t *const targets[] = {&args.counts->rows_loaded, &args.counts->rows_zeroed, &args.counts->rows_rejected};
    counts_add(values, targets);
  }
}

} // namespace kvp

#endif
