/* A replay: fused stores of a captured graph in one launch, each waiting for its word and followed by its signal.
 *
 * A few blocks stay on the device for the whole of it. Each waits for itself, one thread of it, first for all blocks to
 * have done the op before, which the op may read from or write over, then for the op's word; and does its share of the
 * op's rows by the same code as fused_store_kernel.cuh. Whichever of them is done last signals. Who waits for the signal
 * before it goes on finds the blocks at the word: the first wait costs nothing then.
 *
 * All ends, whatever the words say: whoever waits looks at the deadline, at the abort word, and at whether another block
 * has given up. A block that gives up raises `failure` to its op, and goes; so op k's signal is written if and only if no
 * block has given up at k or before, as that takes all of them. The last one to go poisons the signals that were not
 * written. What a client can write decides about nothing else than whether its own replay goes on.
 */
#ifndef KVPOOL_KERNELS_CUDA_REPLAY_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_REPLAY_KERNEL_CUH

#include "kernels/cuda/fused_store_kernel.cuh"
#include "kernels/cuda/fused_store_wide_kernel.cuh"
#include "proto/timeline_wire.h"

namespace kvp {

constexpr int replay_threads = 256;
constexpr int replay_warps = replay_threads / lanes_per_warp;

/* A look at the word takes more than half a microsecond; the pauses between looks are short at first. */
constexpr uint32_t short_pause_ns = 32;
constexpr uint32_t long_pause_ns = 512;
constexpr uint32_t looks_before_long_pauses = 1024;
/* A look at the abort word crosses the bus, and delays the next one at the word by more than a microsecond. */
constexpr uint32_t looks_before_abort = 64;

/* Which code an op takes: format, or replay_wide, and cast-back. */
enum { replay_wide = kvp_format_count };
__host__ __device__ constexpr uint32_t replay_kind(uint32_t format, bool cast_back) {
  return format * 2 + cast_back;
}
__device__ __forceinline__ bool kind_casts_back(uint32_t kind) {
  return kind % 2 != 0;
}

struct replay_op {
  fused_args fused;
  kvp_replay_points points;
  uint32_t kind;
  uint32_t early_data_step; /* the format's; 0: slots and positions may still change while the op waits */
};

struct replay_batch {
  replay_op of[kvp_cuda_replay_ops_max];
  kvp_cuda_replay_state *state;
  const uint64_t *abort;
  uint64_t abort_value;
  uint64_t deadline_ns;
  uint32_t first_op;
  uint32_t op_count;
};
static_assert(sizeof(replay_batch) <= 32764, "parameters of a kernel");
static_assert(sizeof(kvp_cuda_replay_state) == sizeof(kvp_cuda_counts), "one is kept in the other's place");

/* ---- failures ---- */

constexpr int failure_end_bits = 8;
__host__ __device__ __forceinline__ uint64_t failure_of(uint32_t op, uint32_t end) {
  return (uint64_t)(UINT32_MAX - op) << failure_end_bits | end;
}
__host__ __device__ __forceinline__ uint32_t failure_op(uint64_t failure) {
  return UINT32_MAX - (uint32_t)(failure >> failure_end_bits);
}

/* Has a block given up at op `op` or before? */
__device__ __forceinline__ bool others_gave_up(const replay_batch &batch, uint32_t op) {
  uint64_t failure = load_acquire_system(&batch.state->failure);
  return failure != 0 && failure_op(failure) <= op;
}

__device__ __forceinline__ void give_up(const replay_batch &batch, uint32_t op, kvp_replay_end end, uint64_t value) {
  uint64_t failure = failure_of(op, (uint32_t)end);
  if (raise_acquire_release(&batch.state->failure, failure) < failure) {
    batch.state->value = value;
  }
}

/* ---- waiting: one thread of a block ---- */

/* True: go on with the op. */
__device__ __forceinline__ bool look_around(const replay_batch &batch, uint32_t op, uint64_t value) {
  if (others_gave_up(batch, op)) {
    return false;
  }
  if (read_once(batch.abort) >= batch.abort_value) {
    give_up(batch, op, KVP_REPLAY_ABORTED, value);
    return false;
  }
  if (global_timer_ns() >= batch.deadline_ns) {
    give_up(batch, op, KVP_REPLAY_DEADLINE, value);
    return false;
  }
  return true;
}

/* Until all blocks have done the op before. False: the block is to go. op: among those of the step. */
__device__ __forceinline__ bool wait_for_blocks(const replay_batch &batch, uint32_t op, const uint64_t *blocks_done) {
  for (uint32_t looks = 1; load_acquire_device(blocks_done) < gridDim.x; looks++) {
    if (looks % looks_before_abort == 0 && !look_around(batch, op, 0)) {
      return false;
    }
    pause_ns(short_pause_ns);
  }
  return true;
}

/* Likewise, until the op's word has been counted up. */
__device__ __forceinline__ bool wait_for_word(const replay_batch &batch, uint32_t op,
                                              const kvp_replay_points &points) {
  if (points.wait == nullptr) {
    return look_around(batch, op, 0);
  }
  for (uint32_t looks = 1;; looks++) {
    uint64_t value = load_acquire_system(points.wait);
    if (value >= KVP_TIMELINE_POISON) {
      give_up(batch, op, KVP_REPLAY_POISONED, value);
      return false;
    }
    if (value >= points.wait_value) {
      return true;
    }
    if (looks % looks_before_abort == 0 && !look_around(batch, op, value)) {
      return false;
    }
    pause_ns(looks < looks_before_long_pauses ? short_pause_ns : long_pause_ns);
  }
}

/* ---- an op ---- */

/* The lane's row of the warp's first pass, while the op waits: a way through memory less when it goes on. */
__device__ __forceinline__ fused_row find_row_early(const replay_op &op, row_tally &tally) {
  uint64_t first = warp_index() * op.fused.warp_rows;
  if (op.early_data_step == 0 || first >= op.fused.row_count) {
    return fused_row{{record_ignore, 0}, 0};
  }
  uint32_t count = fused_pass_rows(op.fused, first);
  return kind_casts_back(op.kind) ? find_own_row<true, true>(op.fused, first, count, op.early_data_step, tally)
                                  : find_own_row<true, false>(op.fused, first, count, op.early_data_step, tally);
}

template <class format, bool cast_back>
__device__ __forceinline__ void replay_rows(const replay_op &op, const fused_row &early, fused_warp_rows *rows,
                                            row_tally &tally) {
  using live = live_format<format>;
  const fused_args &args = op.fused;
  fused_lane<live> lane = fused_lane<live>::make(args, rows);
  fused_row own = early;
  bool is_found = op.early_data_step != 0;
  for (uint64_t first = warp_index() * args.warp_rows; first < args.row_count;
       first += warp_count() * args.warp_rows) {
    uint32_t count = fused_pass_rows(args, first);
    if (!is_found) {
      own = find_own_row<true, cast_back>(args, first, count, live::data_step, tally);
    }
    is_found = false;
    store_fused<live, cast_back>(args, lane, first, count, own, tally);
  }
}

template <bool cast_back>
__device__ __forceinline__ void replay_wide_rows(const fused_args &args, float *memory, row_tally &tally) {
  wide_row row = {memory, memory + args.elements, args.elements};
  for (uint64_t index = blockIdx.x; index < args.row_count; index += gridDim.x) {
    store_wide<true, true, cast_back>(args, row, index, tally);
  }
}

/* The block's share of an op. */
__device__ __forceinline__ void replay_store(const replay_op &op, const fused_row &early, fused_warp_rows *rows,
                                             float *wide_memory, row_tally &tally) {
  switch (op.kind) {
#define KVP_REPLAY_CASE(id, format, cast_back)                                                                       \
  case replay_kind(id, cast_back):                                                                                   \
    replay_rows<format, cast_back>(op, early, rows, tally);                                                          \
    break;
    KVP_REPLAY_CASE(KVP_FORMAT_V41, format_v41, false)
    KVP_REPLAY_CASE(KVP_FORMAT_V41, format_v41, true)
    KVP_REPLAY_CASE(KVP_FORMAT_V41_FP4, format_v41_fp4, false)
    KVP_REPLAY_CASE(KVP_FORMAT_V41_FP4, format_v41_fp4, true)
    KVP_REPLAY_CASE(KVP_FORMAT_INDEX_FP4, format_index_fp4, false)
    KVP_REPLAY_CASE(KVP_FORMAT_INDEX_FP8_F32, format_index_fp8_f32, false)
    KVP_REPLAY_CASE(KVP_FORMAT_INDEX_MXFP8, format_index_mxfp8, false)
    KVP_REPLAY_CASE(KVP_FORMAT_BF16, format_bf16_512, false)
    KVP_REPLAY_CASE(KVP_FORMAT_BF16, format_bf16_512, true)
#undef KVP_REPLAY_CASE
  case replay_kind(replay_wide, false):
    replay_wide_rows<false>(op.fused, wide_memory, tally);
    break;
  case replay_kind(replay_wide, true):
    replay_wide_rows<true>(op.fused, wide_memory, tally);
    break;
  }
}

/* Arguments come from memory of their own, far away: they are fetched while the op still waits. */
__device__ __forceinline__ void fetch_op(const replay_op &from, replay_op &to) {
  static_assert(sizeof(replay_op) % sizeof(uint64_t) == 0 && sizeof(replay_op) / sizeof(uint64_t) <= replay_threads,
                "a word a thread");
  if (threadIdx.x < sizeof(replay_op) / sizeof(uint64_t)) {
    ((uint64_t *)&to)[threadIdx.x] = ((const uint64_t *)&from)[threadIdx.x];
  }
}

/* One thread, behind a barrier: what the block has written is done. */
__device__ __forceinline__ void op_done(const replay_op &op) {
  bool is_last = gridDim.x == 1 || add_acquire_release(&op.fused.counts->blocks_done, 1) == gridDim.x - 1;
  if (is_last && op.points.signal != nullptr) {
    raise_release_system(op.points.signal, op.points.signal_value);
  }
}

/* Whole block. True: it has done op `index` of the batch, whose arguments are in `op` now. */
__device__ __forceinline__ bool replay_one(const replay_batch &batch, uint32_t index, replay_op &op,
                                           fused_warp_rows *rows, float *wide_memory) {
  const uint64_t *before = index == 0 || gridDim.x == 1 ? nullptr : &batch.of[index - 1].fused.counts->blocks_done;
  fetch_op(batch.of[index], op);
  __syncthreads();
  row_tally tally = {};
  const fused_row early = find_row_early(op, tally);
  bool stays = true;
  if (threadIdx.x == 0) {
    uint32_t number = batch.first_op + index;
    stays = (before == nullptr || wait_for_blocks(batch, number, before)) && wait_for_word(batch, number, op.points);
  }
  if (__syncthreads_or(!stays)) {
    return false;
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == replay_threads - 1) {
    op.fused.counts->started_ns = global_timer_ns();
  }
  replay_store(op, early, rows, wide_memory, tally);
  __syncthreads();
  if (threadIdx.x == 0) {
    op_done(op);
  }
  fused_tally_add<true>(tally, op.fused.counts); /* ends with the op's arguments still in use */
  __syncthreads();
  return true;
}

/* Whole block: its last statement. */
__device__ __forceinline__ void replay_end(const replay_batch &batch) {
  __shared__ uint64_t failure;
  if (threadIdx.x == 0) {
    failure = 0;
    if (add_acquire_release(&batch.state->blocks_ended, 1) == gridDim.x - 1) {
      failure = load_acquire_system(&batch.state->failure);
      batch.state->blocks_ended = 0; /* for the next launch */
    }
  }
  __syncthreads();
  if (failure == 0) {
    return;
  }
  uint32_t op = failure_op(failure);
  uint32_t first = op < batch.first_op ? 0 : op - batch.first_op;
  for (uint32_t i = first + threadIdx.x; i < batch.op_count; i += replay_threads) {
    if (batch.of[i].points.signal != nullptr) {
      raise_release_system(batch.of[i].points.signal, KVP_TIMELINE_POISON);
    }
  }
}

__global__ void __launch_bounds__(replay_threads) replay_kernel(const __grid_constant__ replay_batch batch) {
  extern __shared__ float shared_floats[];
  __shared__ fused_warp_rows rows[replay_warps];
  __shared__ replay_op op;
  if (blockIdx.x == 0 && threadIdx.x == 0 && batch.first_op == 0) {
    batch.state->started_ns = global_timer_ns();
  }
  bool stays = true;
  for (uint32_t i = 0; stays && i < batch.op_count; i++) {
    stays = replay_one(batch, i, op, rows, shared_floats);
  }
  replay_end(batch);
}

} // namespace kvp

#endif
