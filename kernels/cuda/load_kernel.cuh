/* load: records named by segments to output rows. OPS "load".
 *
 * A warp takes one piece of a segment at a time: a few consecutive records, all asked for before the first is used.
 * How a piece becomes rows is a type: `dequantized` for main caches, `copied` for index caches and bf16.
 */
#ifndef KVPOOL_KERNELS_CUDA_LOAD_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_LOAD_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/counts.cuh"
#include "kernels/cuda/dequantize.cuh"
#include "kernels/cuda/layout.cuh"

namespace kvp {

/* passes_: what a lane asks for at once: rows, or vectors of copied ones. piece_rows_: the most rows of a piece where
 * there is work for every multiprocessor; 0: as many as the passes hold. */
template <int passes_, int threads_, int piece_rows_> struct load_tuning {
  static constexpr int passes = passes_;
  static constexpr int threads = threads_;
  static constexpr int piece_rows = piece_rows_;
};

struct load_tally {
  uint64_t loaded;
  uint64_t zeroed;
  uint64_t rejected;
};

/* Consecutive records to consecutive output rows; block -1: zero rows. */
struct segment_rows {
  int32_t block;
  uint32_t begin;
  uint64_t out;
  uint32_t rows;
};

__device__ __forceinline__ const uint8_t *block_of(const load_args &args, const segment_rows &range) {
  return args.layer.base + (uint64_t)(uint32_t)range.block * args.layer.block_stride_bytes;
}

/* Rows of a known width, or of the region's, as 16-byte vectors numbered one after the other. */
template <int bytes_> struct row_shape {
  __device__ __forceinline__ explicit row_shape(const load_args &args) { (void)args; }
  __device__ __forceinline__ uint32_t vectors() const { return bytes_ / 16; }
  __device__ __forceinline__ uint32_t row_of(uint32_t vector) const { return vector / (bytes_ / 16); }
};
template <> struct row_shape<0> {
  const divisor &row_vectors;
  __device__ __forceinline__ explicit row_shape(const load_args &args) : row_vectors(args.row_vectors) {}
  __device__ __forceinline__ uint32_t vectors() const { return row_vectors.value; }
  __device__ __forceinline__ uint32_t row_of(uint32_t vector) const { return row_vectors.quotient(vector); }
};

/* Vector by vector to the output rows of a range. */
template <int bytes> struct output_vectors {
  const row_shape<bytes> shape;
  uint8_t *to;
  uint64_t gap_bytes; /* behind a row */
  uint32_t count;

  __device__ __forceinline__ output_vectors(const load_args &args, const segment_rows &range)
      : shape(args), to(args.out.base + range.out * args.out.stride_bytes),
        gap_bytes(args.out.stride_bytes - shape.vectors() * 16), count(range.rows * shape.vectors()) {}
  __device__ __forceinline__ uint8_t *at(uint32_t vector) const {
    return to + (uint64_t)vector * 16 + shape.row_of(vector) * gap_bytes;
  }
};

template <int bytes> __device__ __forceinline__ void zero_rows(const load_args &args, const segment_rows &range) {
  const output_vectors<bytes> vectors(args, range);
#pragma unroll 1
  for (uint32_t vector = lane_index(); vector < vectors.count; vector += lanes_per_warp) {
    store_16_bytes(vectors.at(vector), make_uint4(0, 0, 0, 0));
  }
}

/* Records and rows in global memory. */
struct global_access {
  static __device__ __forceinline__ void read(const uint8_t *from, uint2 &codes) { codes = load_8_bytes(from); }
  static __device__ __forceinline__ void read(const uint8_t *from, uint32_t &codes) { codes = load_4_bytes(from); }
  static __device__ __forceinline__ uint32_t read_scale(const uint8_t *from) { return load_byte(from); }
  static __device__ __forceinline__ void write(uint8_t *to, const uint4 &words) { store_16_bytes(to, words); }
};

/* `rows` of at most rows_max records, all of them read before the first is used. Past the last row lanes decode that
 * one again and keep it to themselves. rows > 0. */
template <class format, uint32_t rows_max, class access>
__device__ __forceinline__ void decode_rows(const uint8_t *from, uint8_t *to, uint64_t stride_bytes, uint32_t rows) {
  static_assert(format::lanes_per_row == lanes_per_warp, "a warp is a row");
  const int lane = lane_index();
  typename format::codes codes[rows_max][format::chunks];
  uint32_t scales[rows_max][format::chunks];
#pragma unroll
  for (uint32_t row = 0; row < rows_max; row++) {
#pragma unroll
    for (int chunk = 0; chunk < format::chunks; chunk++) {
      access::read(from + (chunk * format::lanes_per_row + lane) * format::code_bytes, codes[row][chunk]);
      scales[row][chunk] = access::read_scale(from + format::data_bytes + format::group_of(lane, chunk));
    }
    from += row + 1 < rows ? format::data_step : 0;
  }
#pragma unroll
  for (uint32_t row = 0; row < rows_max; row++) {
    if (row < rows) {
#pragma unroll
      for (int chunk = 0; chunk < format::chunks; chunk++) {
        access::write(to + (chunk * format::lanes_per_row + lane) * 16,
                      decode<format>(codes[row][chunk], scales[row][chunk]));
      }
    }
    to += stride_bytes;
  }
}

template <class format, class tuning> struct dequantized {
  static constexpr int rows_at_once = tuning::passes;
  static_assert(tuning::piece_rows == tuning::passes, "a piece is read at once");

  static __device__ __forceinline__ void load(const load_args &args, const segment_rows &range) {
    const uint8_t *from = block_of(args, range) + (uint64_t)range.begin * format::data_step;
    uint8_t *to = args.out.base + range.out * args.out.stride_bytes;
    decode_rows<format, tuning::passes, global_access>(from, to, args.out.stride_bytes, range.rows);
  }

  static __device__ __forceinline__ void zero(const load_args &args, const segment_rows &range) {
    zero_rows<format::row_bytes>(args, range);
  }
};

/* Rows as they are: data_bytes of an index cache, with a scale of 4 bytes each; 0: bf16, of any width. */
template <int data_bytes, class tuning> struct copied {
  static constexpr bool scaled = data_bytes != 0;
  static constexpr int rows_at_once = scaled ? tuning::passes * lanes_per_warp * 16 / data_bytes : 0;
  static_assert(tuning::piece_rows <= lanes_per_warp, "a lane for every scale");

  static __device__ __forceinline__ void load(const load_args &args, const segment_rows &range) {
    const output_vectors<data_bytes> vectors(args, range);
    const uint8_t *from = block_of(args, range) + (uint64_t)range.begin * vectors.shape.vectors() * 16;
    uint32_t scale = read_scale(args, range);
    for (uint32_t first = lane_index(); first < vectors.count; first += tuning::passes * lanes_per_warp) {
      uint4 words[tuning::passes];
#pragma unroll
      for (int pass = 0; pass < tuning::passes; pass++) {
        uint32_t vector = first + pass * lanes_per_warp;
        words[pass] = make_uint4(0, 0, 0, 0);
        if (vector < vectors.count) {
          words[pass] = load_16_bytes(from + (uint64_t)vector * 16);
        }
      }
#pragma unroll
      for (int pass = 0; pass < tuning::passes; pass++) {
        uint32_t vector = first + pass * lanes_per_warp;
        if (vector < vectors.count) {
          store_16_bytes(vectors.at(vector), words[pass]);
        }
      }
    }
    write_scale(args, range, scale);
  }

  static __device__ __forceinline__ void zero(const load_args &args, const segment_rows &range) {
    zero_rows<data_bytes>(args, range);
    write_scale(args, range, 0);
  }

  static __device__ __forceinline__ uint32_t read_scale(const load_args &args, const segment_rows &range) {
    const uint32_t lane = lane_index();
    const uint8_t *from = block_of(args, range) + args.layer.scales_begin_bytes;
    return scaled && lane < range.rows ? load_4_bytes(from + ((uint64_t)range.begin + lane) * 4) : 0;
  }
  static __device__ __forceinline__ void write_scale(const load_args &args, const segment_rows &range,
                                                     uint32_t scale) {
    const uint32_t lane = lane_index();
    if (scaled && lane < range.rows) {
      store_4_bytes(args.scales.base + (range.out + lane) * args.scales.stride_bytes, scale);
    }
  }
};

/* Checks a segment whose words lanes 0 to 3 hold; false, and counted by its first piece, when it must not be followed.
 * A segment that is refused counts the rows it names, and one where it names none. Bounds are looked at even in an
 * array that was checked. Same answer in all lanes: each word, the owner's entry as well, was read by one of them. */
template <bool checked>
__device__ __forceinline__ bool take_segment(const load_args &args, int32_t word, uint32_t piece, segment_rows &out,
                                             load_tally &tally) {
  const int lane = lane_index();
  int32_t block = from_lane(word, 0);
  int32_t begin = from_lane(word, 1);
  int32_t end = from_lane(word, 2);
  int32_t to = from_lane(word, 3);
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

/* The pieces of a warp, in order; all lanes alike. */
template <bool checked> struct piece_walk {
  const load_args &args;
  load_tally &tally;
  uint64_t index;       /* segment that comes next */
  uint32_t piece;       /* of it */
  segment_rows segment; /* the present one; rows 0: none */
  uint32_t at;          /* its row to go on with */

  /* first: the warp's number, below 2^31. */
  __device__ __forceinline__ piece_walk(const load_args &args_, uint32_t first, load_tally &tally_)
      : args(args_), tally(tally_), index(0), piece(0), segment{}, at(0) {
    uint32_t quotient = args.pieces.quotient(first);
    index = quotient;
    piece = first - quotient * args.pieces.value;
  }

  /* False: no more. A range has at least one row. */
  __device__ __forceinline__ bool next(segment_rows &range) {
    for (;;) {
      if (at >= segment.rows) {
        if (index >= args.segment_count) {
          return false;
        }
        enter();
      }
      if (at < segment.rows) {
        range = segment_rows{segment.block, segment.begin + at, segment.out + at,
                             min(args.piece_rows, segment.rows - at)};
        at += args.pieces.value * args.piece_rows;
        if (take(range)) {
          return true;
        }
      }
    }
  }

private:
  __device__ __forceinline__ void enter() {
    const int lane = lane_index();
    int32_t word = lane < 4 ? read_once(&args.segments[index * 4 + lane]) : 0;
    counts_begin(args.counts, index == 0 && piece == 0);
    if (!take_segment<checked>(args, word, piece, segment, tally)) {
      segment.rows = 0;
    }
    at = piece * args.piece_rows;
    index += args.step_segments;
    piece += args.step_pieces;
    if (piece >= args.pieces.value) {
      piece -= args.pieces.value;
      index++;
    }
  }

  /* The op's budget, where it has one; false: nothing is left of the range. */
  __device__ __forceinline__ bool take(segment_rows &range) {
    if constexpr (!checked) {
      range.rows = take_rows(args, range.rows, tally);
      if (lane_index() == 0) {
        tally.loaded += range.rows;
        tally.zeroed += range.block == -1 ? range.rows : 0;
      }
    }
    return checked || range.rows != 0;
  }
};

template <bool checked> __device__ __forceinline__ void load_tally_add(const load_tally &tally, kvp_cuda_counts *to) {
  if constexpr (!checked) {
    const uint64_t values[] = {tally.loaded, tally.zeroed, tally.rejected};
    uint64_t *const targets[] = {&to->rows_loaded, &to->rows_zeroed, &to->rows_rejected};
    counts_add(values, targets);
  }
}

/* The pieces of warp `first`; all threads of the block. */
template <class body, bool checked>
__device__ __forceinline__ void load_pieces(const load_args &args, uint32_t first) {
  load_tally tally = {};
  piece_walk<checked> walk(args, first, tally);
  segment_rows range;
  while (walk.next(range)) {
    if (range.block == -1) {
      body::zero(args, range);
    } else {
      body::load(args, range);
    }
  }
  load_tally_add<checked>(tally, args.counts);
}

template <class body, class tuning, bool checked>
__global__ void __launch_bounds__(tuning::threads) load_kernel(const __grid_constant__ load_args args) {
  chain_begin();
  load_pieces<body, checked>(args, (uint32_t)warp_index());
}

/* `rows`, or, where that is 0, as many rows as the passes of a warp hold. */
inline uint32_t piece_rows_of(int rows, int passes, uint32_t row_bytes) {
  uint32_t result = rows != 0 ? (uint32_t)rows : (uint32_t)passes * lanes_per_warp * 16 / row_bytes;
  return result < 1 ? 1 : result;
}

} // namespace kvp

#endif
