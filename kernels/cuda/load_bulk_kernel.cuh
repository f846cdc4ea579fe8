/* load of main caches by bulk copies, compute capability 9.0 and later: the pieces of load_kernel.cuh by way of shared
 * memory, where each warp has room for the records of one piece as they come and for the rows that they become.
 */
#ifndef KVPOOL_KERNELS_CUDA_LOAD_BULK_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_LOAD_BULK_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/load_kernel.cuh"
#include "kernels/cuda/ptx_bulk.cuh"

namespace kvp {

constexpr int bulk_capability = 90; /* what code must be compiled for to have such a kernel; else it is empty */

template <int piece_rows_, int threads_> struct bulk_tuning {
  static constexpr int piece_rows = piece_rows_;
  static constexpr int threads = threads_;
  static constexpr int rows_at_once = piece_rows < 4 ? piece_rows : 4; /* that a warp decodes */
};

/* Shared memory of a block: a barrier for each warp, then the warps' pieces. */
template <class format, class tuning> struct bulk_room {
  static constexpr uint32_t warps = tuning::threads / lanes_per_warp;
  static constexpr uint32_t records_bytes = tuning::piece_rows * format::data_step;
  static constexpr uint32_t warp_bytes = (records_bytes + tuning::piece_rows * format::row_bytes + 127) / 128 * 128;
  static constexpr uint32_t barriers_bytes = (warps * 8 + 127) / 128 * 128;
  static constexpr uint32_t bytes = barriers_bytes + warps * warp_bytes;
  static_assert(records_bytes % 16 == 0 && format::data_step % 16 == 0, "what bulk copies need");

  uint64_t *barrier; /* of this warp */
  uint8_t *records;
  uint8_t *rows;

  __device__ __forceinline__ explicit bulk_room(uint8_t *shared) {
    uint32_t warp = threadIdx.x / lanes_per_warp;
    barrier = (uint64_t *)shared + warp;
    records = shared + barriers_bytes + warp * warp_bytes;
    rows = records + records_bytes;
    if (lane_index() == 0) {
      barrier_init(barrier);
      barrier_publish();
    }
    __syncwarp();
  }
};

struct shared_access {
  static __device__ __forceinline__ void read(const uint8_t *from, uint2 &codes) { codes = *(const uint2 *)from; }
  static __device__ __forceinline__ void read(const uint8_t *from, uint32_t &codes) {
    codes = *(const uint32_t *)from;
  }
  static __device__ __forceinline__ uint32_t read_scale(const uint8_t *from) { return *from; }
  static __device__ __forceinline__ void write(uint8_t *to, const uint4 &words) { *(uint4 *)to = words; }
};

/* Rows that lie side by side in shared memory, where every lane has published what it wrote. All lanes commit. */
__device__ __forceinline__ void write_rows(const load_args &args, const segment_rows &range, const uint8_t *shared,
                                           uint32_t row_bytes) {
  const uint32_t lane = lane_index();
  uint8_t *to = args.out.base + range.out * args.out.stride_bytes;
  if (args.out.stride_bytes == row_bytes) {
    if (lane == 0) {
      bulk_store(to, shared, range.rows * row_bytes);
    }
  } else if (lane < range.rows) {
    bulk_store(to + lane * args.out.stride_bytes, shared + lane * row_bytes, row_bytes);
  }
  bulk_commit();
}

/* Records come while the rows of the piece before may still leave. parity: of the barrier's phase. */
template <class format, class tuning>
__device__ __forceinline__ void load_piece(const load_args &args, const bulk_room<format, tuning> &room,
                                           const segment_rows &range, uint32_t parity) {
  static_assert(tuning::piece_rows <= lanes_per_warp, "a lane for every row");
  if (lane_index() == 0) {
    uint32_t bytes = range.rows * format::data_step;
    barrier_expect(room.barrier, bytes);
    bulk_load(room.records, block_of(args, range) + (uint64_t)range.begin * format::data_step, bytes, room.barrier);
  }
  bulk_wait_read();
  __syncwarp();
  barrier_wait(room.barrier, parity);
#pragma unroll
  for (uint32_t done = 0; done < tuning::piece_rows; done += tuning::rows_at_once) {
    if (done < range.rows) {
      decode_rows<format, tuning::rows_at_once, shared_access>(room.records + done * format::data_step,
                                                               room.rows + done * format::row_bytes,
                                                               format::row_bytes, range.rows - done);
    }
  }
  shared_publish();
  __syncwarp();
  write_rows(args, range, room.rows, format::row_bytes);
}

/* The pieces of warp `first`; all threads of the block. shared: bulk_room::bytes. The layer's base is a multiple of 16.
 */
template <class format, class tuning, bool checked>
__device__ __forceinline__ void load_bulk_pieces(const load_args &args, uint32_t first,
                                                 const bulk_room<format, tuning> &room) {
  load_tally tally = {};
  piece_walk<checked> walk(args, first, tally);
  segment_rows range;
  uint32_t parity = 0;
  while (walk.next(range)) {
    if (range.block == -1) {
      zero_rows<format::row_bytes>(args, range);
    } else {
      load_piece(args, room, range, parity);
      parity ^= 1;
    }
  }
  bulk_wait(); /* what the copies wrote is this thread's, as if it had stored it: the end of the kernel passes it on */
  load_tally_add<checked>(tally, args.counts);
}

template <class format, class tuning, bool checked>
__global__ void __launch_bounds__(tuning::threads) load_bulk_kernel(const __grid_constant__ load_args args) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t load_bulk_shared[];
  const bulk_room<format, tuning> room(load_bulk_shared);
  chain_begin();
  load_bulk_pieces<format, tuning, checked>(args, (uint32_t)warp_index(), room);
#endif
}

} // namespace kvp

#endif
