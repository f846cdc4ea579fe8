/* store of bf16 regions: rows of any width (a multiple of 8 elements) copied as they are. OPS "store".
 *
 * The 16-byte vectors of a warp's rows are numbered one after the other and dealt out to its lanes; the rest is as in
 * store_kernel.cuh.
 */
#ifndef KVPOOL_KERNELS_CUDA_STORE_COPY_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_STORE_COPY_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/store_kernel.cuh"

namespace kvp {

/* What a warp copies: `count` vectors of consecutive rows. */
struct copied_rows {
  const uint8_t *from;
  uint64_t first;     /* row */
  uint64_t gap_bytes; /* behind a source row */
  uint32_t count;
};

/* Vectors begin + lane, begin + 32 + lane, ...; past the last one that one again. */
template <class tuning>
__device__ __forceinline__ void read_vectors(const store_args &args, const copied_rows &rows, uint32_t begin,
                                             uint4 (&words)[tuning::passes]) {
#pragma unroll
  for (int pass = 0; pass < tuning::passes; pass++) {
    uint32_t vector = min(begin + pass * lanes_per_warp + lane_index(), rows.count - 1);
    uint32_t row = args.row_vectors.quotient(vector);
    words[pass] = load_16_bytes(rows.from + (uint64_t)vector * 16 + row * rows.gap_bytes);
  }
}

__device__ __forceinline__ bool vector_nonfinite(const uint4 &words) {
  uint32_t maxima = chunk_maxima(words);
  return max(maxima & 0xFFFF, maxima >> 16) >= bf16_infinity;
}

/* Whole warp. True: one of the lane's vectors has a value that is not finite. */
template <class tuning, bool cast_back>
__device__ __forceinline__ bool write_vectors(const store_args &args, const copied_rows &rows, uint32_t begin,
                                              const uint4 (&words)[tuning::passes], const slot_place &own) {
  bool nonfinite = false;
#pragma unroll
  for (int pass = 0; pass < tuning::passes; pass++) {
    uint32_t vector = begin + pass * lanes_per_warp + lane_index();
    uint32_t row = args.row_vectors.quotient(min(vector, rows.count - 1));
    uint64_t at = (uint64_t)(vector - row * args.row_vectors.value) * 16;
    int64_t place = from_lane(own.data, (int)row);
    nonfinite = nonfinite || vector_nonfinite(words[pass]);
    if (vector < rows.count && place >= 0) {
      store_16_bytes(args.layer.base + place + at, words[pass]);
    }
    if (cast_back && vector < rows.count && place != place_nothing) {
      uint8_t *back = args.cast_back.base + (rows.first + row) * args.cast_back.stride_bytes;
      store_16_bytes(back + at, words[pass]);
    }
  }
  return nonfinite;
}

/* Reads the rows again: rare. */
template <bool cast_back>
__device__ __forceinline__ uint32_t count_nonfinite(const store_args &args, const copied_rows &rows,
                                                    uint32_t row_count, const slot_place &own) {
  uint32_t found = 0;
#pragma unroll 1
  for (uint32_t row = 0; row < row_count; row++) {
    bool nonfinite = false;
    for (uint32_t at = lane_index(); at < args.row_vectors.value; at += lanes_per_warp) {
      uint64_t vector = (uint64_t)row * args.row_vectors.value + at;
      const uint8_t *from = rows.from + vector * 16 + row * rows.gap_bytes;
      nonfinite = nonfinite || vector_nonfinite(load_16_bytes(from));
    }
    int64_t place = from_lane(own.data, (int)row);
    bool counts = place >= 0 || (cast_back && place == place_skipped);
    found += __any_sync(full_warp, nonfinite) != 0 && counts;
  }
  return found;
}

template <class tuning, bool checked, bool cast_back>
__device__ __forceinline__ void store_copied_rows(const store_args &args, uint64_t first, store_tally &tally) {
  const uint32_t row_bytes = args.row_vectors.value * 16;
  uint64_t rows_left = args.row_count - first;
  uint32_t remaining = rows_left < args.warp_rows ? (uint32_t)rows_left : args.warp_rows;
  copied_rows rows = {args.source.base + first * args.source.stride_bytes, first,
                      args.source.stride_bytes - row_bytes, remaining * args.row_vectors.value};
  uint4 words[tuning::passes];
  int32_t slot = read_slot(args, first, remaining);
  read_vectors<tuning>(args, rows, 0, words);
  counts_begin(args.counts, first == 0);
  slot_place own = place_slot<checked>(args, slot, remaining, row_bytes, tally);
  bool nonfinite = write_vectors<tuning, cast_back>(args, rows, 0, words, own);
#pragma unroll 1
  for (uint32_t begin = tuning::passes * lanes_per_warp; begin < rows.count;
       begin += tuning::passes * lanes_per_warp) {
    read_vectors<tuning>(args, rows, begin, words);
    nonfinite = write_vectors<tuning, cast_back>(args, rows, begin, words, own) || nonfinite;
  }
  if (__any_sync(full_warp, nonfinite)) {
    uint32_t found = count_nonfinite<cast_back>(args, rows, remaining, own);
    tally.nonfinite += lane_index() == 0 ? found : 0;
  }
}

/* args.warp_rows: at most 32. */
template <class tuning, bool checked, bool cast_back>
__global__ void __launch_bounds__(tuning::threads) store_copy_kernel(const __grid_constant__ store_args args) {
  chain_begin();
  store_tally tally = {};
  for (uint64_t first = warp_index() * args.warp_rows; first < args.row_count;
       first += warp_count() * args.warp_rows) {
    store_copied_rows<tuning, checked, cast_back>(args, first, tally);
  }
  store_tally_add<checked>(tally, args.counts);
}

/* Rows of a warp at a time: as many as its lanes have vectors, `passes` each. */
inline uint32_t copied_warp_rows(int passes, uint32_t row_bytes) {
  uint32_t rows = (uint32_t)passes * lanes_per_warp * 16 / row_bytes;
  return rows < 1 ? 1 : rows > lanes_per_warp ? lanes_per_warp : rows;
}

} // namespace kvp

#endif
