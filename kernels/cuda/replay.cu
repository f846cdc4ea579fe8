/* Replays: how many blocks one gets, and what they are told. See replay_kernel.cuh. */
#include <assert.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/prepare.cuh"
#include "kernels/cuda/replay_kernel.cuh"

namespace kvp {

static kernel_facts facts[devices_max];

cudaError_t replay_prepare(int device) {
  cudaError_t error = cudaFuncSetAttribute((const void *)replay_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)wide_shared_bytes(kvp_cuda_fused_elements_max));
  return error != cudaSuccess
             ? error
             : kernel_facts_find((const void *)replay_kernel, replay_threads, device, &facts[device]);
}

/* Rows that a warp has at once. */
static uint32_t rows_at_once(const kvp_geometry &geometry) {
  return (uint32_t)fused_warp_elements / geometry.sizes.elements;
}

/* So that no warp of a long op goes round, up to as many as there may be. */
static uint32_t blocks_wanted(const kvp_fused_store_params &op) {
  const kvp_geometry &geometry = *op.store.layer.geometry;
  uint64_t rows = fused_is_wide(geometry) ? 1 : (uint64_t)rows_at_once(geometry) * replay_warps;
  return launched_blocks(divide_up(op.store.row_count, rows), kvp_cuda_replay_blocks_max);
}

/* Rows of a warp at a time, at most 32. */
static uint32_t warp_rows_of(const kvp_fused_store_params &op, uint32_t blocks) {
  const kvp_geometry &geometry = *op.store.layer.geometry;
  if (fused_is_wide(geometry)) {
    return 1;
  }
  uint64_t least = rows_at_once(geometry);
  uint64_t warps = (uint64_t)blocks * replay_warps;
  uint64_t rows = divide_up(divide_up(op.store.row_count, warps), least) * least;
  rows = rows == 0 ? least : rows;
  return (uint32_t)(rows < lanes_per_warp ? rows : lanes_per_warp);
}

static uint32_t kind_of(const kvp_fused_store_params &op) {
  const kvp_geometry &geometry = *op.store.layer.geometry;
  return replay_kind(fused_is_wide(geometry) ? (uint32_t)replay_wide : (uint32_t)geometry.format->id,
                     op.store.cast_back.base != nullptr);
}

static uint32_t early_data_step_of(const kvp_fused_store_params &op) {
  const kvp_geometry &geometry = *op.store.layer.geometry;
  if (!op.rows_are_known || fused_is_wide(geometry)) {
    return 0;
  }
  return geometry.format->token_interleaved ? geometry.sizes.bytes_per_token : geometry.sizes.data_bytes;
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_replay_launch(const struct kvp_cuda_replay *replay, cudaStream_t stream) {
  using namespace kvp;
  assert(replay->op_count > 0 && replay->op_count <= kvp_cuda_replay_ops_max);
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  assert(facts[device].resident_blocks > 0); /* kernels were loaded */
  uint32_t blocks = 1;
  uint32_t shared_bytes = 0;
  for (uint32_t i = 0; i < replay->op_count; i++) {
    const kvp_geometry &geometry = *replay->ops[i].store.layer.geometry;
    uint32_t wanted = blocks_wanted(replay->ops[i]);
    uint32_t bytes = fused_is_wide(geometry) ? wide_shared_bytes(geometry.sizes.elements) : 0;
    blocks = wanted > blocks ? wanted : blocks;
    shared_bytes = bytes > shared_bytes ? bytes : shared_bytes;
  }
  /* Blocks wait for each other, so an op is not done before the last one has come onto the device: an eighth of it is
   * what two replays and more find beside each other. */
  blocks = launched_blocks(blocks, divide_up(facts[device].resident_blocks, 8));
  replay_batch batch = {};
  batch.state = (kvp_cuda_replay_state *)replay->state;
  batch.abort = replay->abort;
  batch.abort_value = replay->abort_value;
  batch.deadline_ns = replay->deadline_ns;
  batch.first_op = replay->first_op;
  batch.op_count = replay->op_count;
  for (uint32_t i = 0; i < replay->op_count; i++) {
    const kvp_fused_store_params &op = replay->ops[i];
    batch.of[i] = {fused_args::make(op, &replay->counts[i], warp_rows_of(op, blocks)), replay->points[i], kind_of(op),
                   early_data_step_of(op)};
  }
  return launch(replay_kernel, blocks, replay_threads, stream, batch, shared_bytes);
}

extern "C" void kvp_cuda_replay_result(const struct kvp_cuda_counts *found, struct kvp_replay_result *out) {
  const kvp_cuda_replay_state *state = (const kvp_cuda_replay_state *)found;
  *out = kvp_replay_result{KVP_REPLAY_DONE, 0, 0};
  if (state->failure != 0) {
    out->end = (kvp_replay_end)(state->failure & ((1u << kvp::failure_end_bits) - 1));
    out->op = kvp::failure_op(state->failure);
    out->value = state->value;
  }
}
