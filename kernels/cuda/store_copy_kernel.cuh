/* store of bf16 regions: rows of any width (a multiple of 8 elements) copied as they are. OPS "store".
 *
 * 8, 16 or 32 lanes share a row, whatever its width needs; the rest is as in store_kernel.cuh.
 */
#ifndef KVPOOL_KERNELS_CUDA_STORE_COPY_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_STORE_COPY_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/store_kernel.cuh"

namespace kvp {

/* How a warp shares out rows of `row_bytes`: 2^shift lanes a row. */
struct row_split {
  uint32_t vectors; /* of 16 bytes, a row */
  uint32_t shift;

  static __host__ __device__ __forceinline__ row_split make(uint32_t row_bytes) {
    uint32_t vectors = row_bytes / 16;
    return row_split{vectors, vectors > 16 ? 5u : vectors > 8 ? 4u : 3u};
  }
  __device__ __forceinline__ uint32_t lanes() const { return 1u << shift; }
  __device__ __forceinline__ uint32_t rows() const { return lanes_per_warp >> shift; } /* side by side */
};

/* Per lane and pass: where its row is, and whether something in it was not finite. */
template <int passes> struct copy_batch {
  const uint8_t *from[passes];
  int64_t place[passes];
  bool nonfinite[passes];
};

template <class tuning, bool cast_back>
__device__ __forceinline__ void copy_vectors(const store_args &args, const row_split &split, uint64_t first,
                                             uint32_t row_lane, uint32_t row_of_pass,
                                             copy_batch<tuning::passes> &batch) {
  for (uint32_t vector = row_lane; vector < split.vectors; vector += split.lanes()) {
    const uint64_t at = (uint64_t)vector * 16;
    uint4 words[tuning::passes];
#pragma unroll
    for (int pass = 0; pass < tuning::passes; pass++) {
      words[pass] = load_16_bytes<tuning::load>(batch.from[pass] + at);
    }
#pragma unroll
    for (int pass = 0; pass < tuning::passes; pass++) {
      if (batch.place[pass] >= 0) {
        store_16_bytes<tuning::store>(args.layer.base + batch.place[pass] + at, words[pass]);
      }
      if (cast_back && batch.place[pass] != place_nothing) {
        uint64_t row = first + pass * split.rows() + row_of_pass;
        store_16_bytes<tuning::store>(args.cast_back.base + row * args.cast_back.stride_bytes + at, words[pass]);
      }
      uint32_t maxima = chunk_maxima(words[pass]);
      batch.nonfinite[pass] = batch.nonfinite[pass] || max(maxima & 0xFFFF, maxima >> 16) >= bf16_infinity;
    }
  }
}

template <class tuning, bool checked, bool cast_back>
__device__ __forceinline__ void store_copied_rows(const store_args &args, const row_split &split, uint64_t first,
                                                  store_tally &tally) {
  const uint32_t lane = lane_index();
  const uint32_t row_lane = lane & (split.lanes() - 1);
  const uint32_t row_of_pass = lane >> split.shift;
  const uint32_t rows = tuning::passes * split.rows();
  uint64_t rows_left = args.row_count - first;
  uint32_t remaining = rows_left < rows ? (uint32_t)rows_left : rows;
  slot_place own = {place_nothing, 0};
  if (lane < remaining) {
    own = place_slot<checked>(args, first + lane, args.row_bytes, tally);
  }
  copy_batch<tuning::passes> batch;
#pragma unroll
  for (int pass = 0; pass < tuning::passes; pass++) {
    uint32_t row = pass * split.rows() + row_of_pass;
    batch.from[pass] = args.source.base + (first + (row < remaining ? row : 0)) * args.source.stride_bytes;
    batch.place[pass] = from_lane(own.data, (int)row);
    batch.nonfinite[pass] = false;
  }
  copy_vectors<tuning, cast_back>(args, split, first, row_lane, row_of_pass, batch);
  bool any = false;
#pragma unroll
  for (int pass = 0; pass < tuning::passes; pass++) {
    any = any || batch.nonfinite[pass];
  }
  if (!__any_sync(full_warp, any)) {
    return;
  }
#pragma unroll
  for (int pass = 0; pass < tuning::passes; pass++) {
    uint32_t lanes = __ballot_sync(full_warp, batch.nonfinite[pass]) >> (row_of_pass << split.shift);
    bool counts = batch.place[pass] >= 0 || (cast_back && batch.place[pass] == place_skipped);
    tally.nonfinite += (lanes & (full_warp >> (lanes_per_warp - split.lanes()))) != 0 && counts && row_lane == 0;
  }
}

template <class tuning, bool checked, bool cast_back>
__global__ void __launch_bounds__(tuning::threads) store_copy_kernel(const __grid_constant__ store_args args) {
  static_assert(tuning::passes <= 8, "a lane for every slot, four rows side by side");
  counts_begin(args.counts);
  const row_split split = row_split::make(args.row_bytes);
  const uint32_t rows = tuning::passes * split.rows();
  store_tally tally = {};
  for (uint64_t first = warp_index() * rows; first < args.row_count; first += warp_count() * rows) {
    store_copied_rows<tuning, checked, cast_back>(args, split, first, tally);
  }
  store_tally_add<checked>(tally, args.counts);
}

} // namespace kvp

#endif
