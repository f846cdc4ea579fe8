/* assemble: its parts in one launch, how they are shared out among blocks. See assemble_kernel.cuh. */
#include <assert.h>

#include "kernels/cuda/assemble_kernel.cuh"
#include "kernels/cuda/gather.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/prepare.cuh"

namespace kvp {

constexpr uint32_t max_of(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}
constexpr uint32_t bulk_bytes =
    max_of(bulk_room<format_v41, assemble_v41_bulk>::bytes, bulk_room<format_v41_fp4, assemble_v41_fp4_bulk>::bytes);
constexpr uint64_t part_blocks_max = grid_blocks_max / 4;

struct assemble_entry {
  void (*kernel)(const assemble_args);
  uint32_t shared_bytes;
  int least; /* compute capability */
  kernel_facts facts[devices_max];
};
static assemble_entry direct = {assemble_kernel<way_many>, 0, 0, {}};
static assemble_entry bulk = {assemble_kernel<way_bulk>, bulk_bytes, bulk_capability, {}};

cudaError_t assemble_prepare(int device) {
  assemble_entry *const entries[] = {&direct, &bulk};
  for (assemble_entry *entry : entries) {
    cudaError_t error = kernel_facts_find((const void *)entry->kernel, assemble_threads, device,
                                          &entry->facts[device], entry->shared_bytes, entry->least);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

static assembled_format format_of(const kvp_geometry &geometry) {
  const kvp_format_id id = geometry.format->id;
  assert(id == KVP_FORMAT_V41 || id == KVP_FORMAT_V41_FP4 || id == KVP_FORMAT_BF16);
  return id == KVP_FORMAT_V41 ? assembled_v41 : id == KVP_FORMAT_V41_FP4 ? assembled_v41_fp4 : assembled_bf16;
}

static uint64_t load_rows(const kvp_load_params *params) {
  if (params == nullptr || params->segment_count == 0) {
    return 0;
  }
  return params->check.entries == nullptr ? params->rows : params->total_k;
}

static assembled_load share_load(const kvp_load_params *params, kvp_cuda_counts *counts, bool few, bool by_bulk,
                                 uint32_t resident_blocks) {
  assembled_load load = {};
  if (params == nullptr || load_is_empty(*params)) {
    return load;
  }
  const uint32_t row_bytes = params->layer.geometry->sizes.loaded_row_bytes;
  load.format = format_of(*params->layer.geometry);
  load.few = few;
  load.checked = params->check.entries == nullptr;
  uint64_t rows = few ? 1 : assemble_many::piece_rows;
  if (load.format == assembled_bf16) {
    rows = piece_rows_of(assemble_copied::piece_rows, assemble_copied::passes, row_bytes);
  } else if (load.format == assembled_v41_fp4 && by_bulk && !few) {
    rows = assemble_v41_fp4_bulk::piece_rows;
  }
  load_share share = load_share_out(*params, rows, rows, assemble_warps, resident_blocks);
  load.blocks = (uint32_t)(share.blocks < part_blocks_max ? share.blocks : part_blocks_max);
  load.args = load_args::make(*params, counts, share.cut, (uint64_t)load.blocks * assemble_warps);
  return load;
}

static assembled_store share_store(const kvp_store_params *params, kvp_cuda_counts *counts) {
  assembled_store store = {};
  if (params == nullptr || params->row_count == 0) {
    return store;
  }
  store.format = format_of(*params->layer.geometry);
  store.back = gather_back_of(*params);
  store.args = gather_store_args(*params, counts);
  store.blocks = launched_blocks(gather_blocks(store.args, store.format == assembled_bf16 ? 0 : 1), part_blocks_max);
  return store;
}

static assembled_copy share_copy(const kvp_copy_rows_params *params, kvp_cuda_counts *counts) {
  assembled_copy copy = {};
  if (params == nullptr || params->row_count == 0 || params->row_bytes == 0) {
    return copy;
  }
  copy.args = gather_copy_args(*params, counts);
  copy.blocks = launched_blocks(gather_blocks(copy.args, 0), part_blocks_max);
  return copy;
}

/* What bulk copies need of a layer: load.cu. */
static bool bulk_fits(const kvp_load_params *params) {
  return params == nullptr || (uintptr_t)params->layer.base % 16 == 0;
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_assemble_launch(const struct kvp_cuda_assembly *assembly, cudaStream_t stream) {
  using namespace kvp;
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const kvp_load_params *const *loads = assembly->loads;
  assert(direct.facts[device].resident_blocks > 0); /* kernels were loaded */
  /* As in a load: a row a warp as long as every row gets its warp at once. */
  uint64_t rows = load_rows(loads[0]) + load_rows(loads[1]);
  bool few = takes_few(rows <= (uint64_t)direct.facts[device].resident_blocks * assemble_warps);
  bool by_bulk = !few && bulk.facts[device].resident_blocks != 0 && bulk_fits(loads[0]) && bulk_fits(loads[1]) &&
                 pinned.size != KVP_CUDA_SIZE_MANY_NO_BULK;
  const assemble_entry &entry = by_bulk ? bulk : direct;
  const uint32_t resident = entry.facts[device].resident_blocks;
  const assemble_args args = {{share_load(loads[0], assembly->load_counts[0], few, by_bulk, resident),
                               share_load(loads[1], assembly->load_counts[1], few, by_bulk, resident)},
                              share_store(assembly->store, assembly->store_counts),
                              share_copy(assembly->copy, assembly->copy_counts)};
  const uint32_t blocks = args.loads[0].blocks + args.loads[1].blocks + args.store.blocks + args.copy.blocks;
  if (blocks == 0) {
    return cudaSuccess;
  }
  return launch_chained(entry.kernel, entry.facts[device], dim3(blocks), assemble_threads, entry.shared_bytes, stream,
                        args);
}
