/* load by bulk copies, compute capability 9.0 and later: the pieces of load_kernel.cuh by way of shared memory.
 *
 * A warp has `stages` pieces on their way at once. Main caches: each stage has room for the records as they come and
 * for the rows that they become; either side may do without. Index caches and bf16: records leave as they came.
 */
#ifndef KVPOOL_KERNELS_CUDA_LOAD_BULK_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_LOAD_BULK_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/load_kernel.cuh"
#include "kernels/cuda/ptx_bulk.cuh"

namespace kvp {

/* bulk_in, bulk_out: which side goes through shared memory. */
template <int piece_rows_, int stages_, int threads_, bool bulk_in_, bool bulk_out_, load_hint load_,
          store_hint store_, walk_kind walk_>
struct bulk_tuning {
  static constexpr int piece_rows = piece_rows_;
  static constexpr int passes = 1;
  static constexpr int stages = stages_;
  static constexpr int threads = threads_;
  static constexpr int warps = threads_ / lanes_per_warp;
  static constexpr bool bulk_in = bulk_in_;
  static constexpr bool bulk_out = bulk_out_;
  static constexpr load_hint load = load_;
  static constexpr store_hint store = store_;
  static constexpr walk_kind walk = walk_;
};

/* Shared memory of a block: barriers of all warps, then their stages. */
template <class tuning, int in_bytes_, int out_bytes_> struct bulk_room {
  static constexpr uint32_t in_bytes = in_bytes_;
  static constexpr uint32_t stage_bytes = (in_bytes_ + out_bytes_ + 127) / 128 * 128;
  static constexpr uint32_t barriers_bytes = (tuning::warps * tuning::stages * 8 + 127) / 128 * 128;
  static constexpr uint32_t bytes = barriers_bytes + tuning::warps * tuning::stages * stage_bytes;

  uint64_t *barriers; /* of this warp */
  uint8_t *stages;

  __device__ __forceinline__ explicit bulk_room(uint8_t *shared) {
    uint32_t warp = threadIdx.x / lanes_per_warp;
    barriers = (uint64_t *)shared + warp * tuning::stages;
    stages = shared + barriers_bytes + warp * tuning::stages * stage_bytes;
    if (lane_index() == 0) {
      for (int stage = 0; stage < tuning::stages; stage++) {
        barrier_init(&barriers[stage]);
      }
      barriers_publish();
    }
    __syncwarp();
  }
  __device__ __forceinline__ uint8_t *in(int stage) const { return stages + stage * stage_bytes; }
  __device__ __forceinline__ uint8_t *out(int stage) const { return in(stage) + in_bytes; }
};

/* One lane. */
template <class tuning, class room>
__device__ __forceinline__ void bulk_ask(const room &memory, int stage, const uint8_t *from, uint32_t bytes) {
  barrier_expect(&memory.barriers[stage], bytes);
  bulk_load<tuning::load>(memory.in(stage), from, bytes, &memory.barriers[stage]);
}

/* Rows that lie side by side in shared memory; lanes that wrote there have published it. All lanes commit a group. */
template <store_hint hint>
__device__ __forceinline__ void bulk_write_rows(const load_args &args, const segment_rows &range,
                                                const uint8_t *shared, uint32_t row_bytes) {
  const uint32_t lane = lane_index();
  uint8_t *to = args.out.base + range.out * args.out.stride_bytes;
  if (args.out.stride_bytes == row_bytes) {
    if (lane == 0) {
      bulk_store<hint>(to, shared, range.rows * row_bytes);
    }
  } else {
    for (uint32_t row = lane; row < range.rows; row += lanes_per_warp) {
      bulk_store<hint>(to + row * args.out.stride_bytes, shared + row * row_bytes, row_bytes);
    }
  }
  bulk_commit();
}

template <class format, class tuning> struct bulk_dequantized {
  static constexpr bool in_place = false;
  using room = bulk_room<tuning, tuning::bulk_in ? tuning::piece_rows * format::data_step : 0,
                         tuning::bulk_out ? tuning::piece_rows * format::row_bytes : 0>;

  /* rows != 0, block != -1; the result is for finish(). */
  static __device__ __forceinline__ uint32_t ask(const load_args &args, const room &memory, int stage,
                                                 const segment_rows &range) {
    if (tuning::bulk_in && lane_index() == 0) {
      const uint8_t *from = block_of(args, range) + (uint64_t)range.begin * format::data_step;
      bulk_ask<tuning>(memory, stage, from, range.rows * format::data_step);
    }
    return 0;
  }

  /* Four rows at a time, the last one again where there are less. */
  static __device__ __forceinline__ void finish(const load_args &args, const room &memory, int stage,
                                                const segment_rows &range, uint32_t parity, uint32_t) {
    const uint8_t *from = memory.in(stage);
    if constexpr (tuning::bulk_in) {
      barrier_wait(&memory.barriers[stage], parity);
    } else {
      from = block_of(args, range) + (uint64_t)range.begin * format::data_step;
    }
    uint8_t *to = args.out.base + range.out * args.out.stride_bytes;
    uint64_t stride_bytes = args.out.stride_bytes;
    if constexpr (tuning::bulk_out) {
      to = memory.out(stage);
      stride_bytes = format::row_bytes;
      bulk_wait_read<tuning::stages - 1>();
      __syncwarp();
    }
#pragma unroll
    for (uint32_t done = 0; done < tuning::piece_rows; done += batch_rows) {
      if (done < range.rows) {
        decode_rows(from + done * format::data_step, to + done * stride_bytes, stride_bytes, range.rows - done);
      }
    }
    if constexpr (tuning::bulk_out) {
      shared_publish();
      __syncwarp();
      bulk_write_rows<tuning::store>(args, range, memory.out(stage), format::row_bytes);
    } else {
      __syncwarp();
    }
  }

  static __device__ __forceinline__ void zero(const load_args &args, const segment_rows &range) {
    zero_rows<format::row_bytes, tuning>(args, range);
  }

private:
  static constexpr uint32_t batch_rows = tuning::piece_rows < 4 ? tuning::piece_rows : 4;
  using codes_type = typename format::codes;

  static __device__ __forceinline__ void decode_rows(const uint8_t *from, uint8_t *to, uint64_t stride_bytes,
                                                     uint32_t rows) {
    const int lane = lane_index();
    codes_type codes[batch_rows][format::chunks];
    uint32_t scales[batch_rows][format::chunks];
#pragma unroll
    for (uint32_t row = 0; row < batch_rows; row++) {
#pragma unroll
      for (int chunk = 0; chunk < format::chunks; chunk++) {
        read_codes(from + (chunk * format::lanes_per_row + lane) * format::code_bytes, codes[row][chunk]);
        scales[row][chunk] = read_scale(from + format::data_bytes + format::group_of(lane, chunk));
      }
      from += row + 1 < rows ? format::data_step : 0;
    }
#pragma unroll
    for (uint32_t row = 0; row < batch_rows; row++) {
      if (row < rows) {
#pragma unroll
        for (int chunk = 0; chunk < format::chunks; chunk++) {
          write(to + (chunk * format::lanes_per_row + lane) * 16,
                decode<format>(codes[row][chunk], scales[row][chunk]));
        }
      }
      to += stride_bytes;
    }
  }

  static __device__ __forceinline__ void read_codes(const uint8_t *from, uint2 &codes) {
    codes = tuning::bulk_in ? *(const uint2 *)from : load_8_bytes<tuning::load>(from);
  }
  static __device__ __forceinline__ void read_codes(const uint8_t *from, uint32_t &codes) {
    codes = tuning::bulk_in ? *(const uint32_t *)from : load_4_bytes<tuning::load>(from);
  }
  static __device__ __forceinline__ uint32_t read_scale(const uint8_t *from) {
    return tuning::bulk_in ? *from : load_byte(from);
  }
  static __device__ __forceinline__ void write(uint8_t *to, const uint4 &words) {
    if constexpr (tuning::bulk_out) {
      *(uint4 *)to = words;
    } else {
      store_16_bytes<tuning::store>(to, words);
    }
  }
};

/* data_bytes as in `copied`; bf16: a stage is piece_rows times 1 KiB. */
template <int data_bytes, class tuning> struct bulk_copied {
  static constexpr bool in_place = true;
  using room = bulk_room<tuning, tuning::piece_rows *(data_bytes != 0 ? data_bytes : 1024), 0>;
  using direct = copied<data_bytes, tuning>;

  static __device__ __forceinline__ uint32_t ask(const load_args &args, const room &memory, int stage,
                                                 const segment_rows &range) {
    const uint32_t row_bytes = row_shape<data_bytes>(args).vectors() * 16;
    if (lane_index() == 0) {
      const uint8_t *from = block_of(args, range) + (uint64_t)range.begin * row_bytes;
      bulk_ask<tuning>(memory, stage, from, range.rows * row_bytes);
    }
    return direct::read_scale(args, range);
  }

  static __device__ __forceinline__ void finish(const load_args &args, const room &memory, int stage,
                                                const segment_rows &range, uint32_t parity, uint32_t scale) {
    direct::write_scale(args, range, scale);
    barrier_wait(&memory.barriers[stage], parity);
    bulk_write_rows<tuning::store>(args, range, memory.in(stage), row_shape<data_bytes>(args).vectors() * 16);
  }

  static __device__ __forceinline__ void zero(const load_args &args, const segment_rows &range) {
    direct::zero(args, range);
  }
};

/* The pieces of a warp, some stages of them at a time. Where rows leave from where they came to, a stage is asked for
 * again one piece later: its rows have left by then. */
template <class body, class tuning, bool checked>
__device__ __forceinline__ void load_stages(const load_args &args, const typename body::room &memory,
                                            load_tally &tally) {
  constexpr int stages = tuning::stages;
  constexpr int behind = body::in_place && stages > 1 ? 1 : 0;
  piece_walk<tuning::walk, checked> walk(args, tally);
  segment_rows ranges[stages] = {};
  uint32_t scales[stages] = {};
  uint32_t parities = 0; /* a bit a stage */
  auto ask = [&](int stage) {
    ranges[stage].rows = walk.next(ranges[stage]) ? ranges[stage].rows : 0;
    if (ranges[stage].rows != 0 && ranges[stage].block != -1) {
      scales[stage] = body::ask(args, memory, stage, ranges[stage]);
    }
  };
#pragma unroll
  for (int stage = 0; stage < stages - behind; stage++) {
    ask(stage);
  }
  for (;;) {
#pragma unroll
    for (int stage = 0; stage < stages; stage++) {
      if (ranges[stage].rows == 0) {
        return;
      }
      if (ranges[stage].block == -1) {
        body::zero(args, ranges[stage]);
        bulk_commit(); /* a group a piece */
      } else {
        body::finish(args, memory, stage, ranges[stage], parities >> stage & 1, scales[stage]);
        parities ^= 1u << stage;
      }
      if (tuning::walk == walk_kind::once) {
        return;
      }
      if (body::in_place) {
        bulk_wait_read<behind>();
        __syncwarp();
      }
      ask((stage + stages - behind) % stages);
    }
  }
}

/* Dynamic shared memory: body::room::bytes. */
template <class body, class tuning, bool checked>
__global__ void __launch_bounds__(tuning::threads) load_bulk_kernel(const __grid_constant__ load_args args) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t load_bulk_shared[];
  const typename body::room memory(load_bulk_shared);
  load_tally tally = {};
  load_stages<body, tuning, checked>(args, memory, tally);
  bulk_wait_read<0>(); /* the block's memory may go */
  load_tally_add<checked>(tally, args.counts);
#endif
}

} // namespace kvp

#endif
