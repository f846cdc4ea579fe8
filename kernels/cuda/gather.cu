/* copy_rows, and store with a gather index or without slots: which kernel is launched, and how wide. See
 * gather_kernel.cuh.
 */
#include "kernels/cuda/gather.cuh"

#include <assert.h>

#include "kernels/cuda/gather_kernel.cuh"
#include "kernels/cuda/prepare.cuh"

namespace kvp {

struct gather_entry {
  void (*kernel)(const gather_args);
  int rows; /* of a warp at a time; 0: args.shift says */
  kernel_facts facts[devices_max];
};

template <class format, bool cast_back> constexpr gather_entry gathering() {
  return gather_entry{gather_store_kernel<format, cast_back>, format::rows_per_pass, {}};
}

/* [format][cast-back]; index caches have no cast-back. */
static gather_entry stores[kvp_format_count][2] = {
    {gathering<format_v41, false>(), gathering<format_v41, true>()},
    {gathering<format_v41_fp4, false>(), gathering<format_v41_fp4, true>()},
    {gathering<format_index_fp4, false>(), {}},
    {gathering<format_index_fp8_f32, false>(), {}},
    {gathering<format_index_mxfp8, false>(), {}},
    {{gather_copy_kernel<true>, 0, {}}, {gather_copy_kernel<true>, 0, {}}},
};
static_assert(KVP_FORMAT_V41 == 0 && KVP_FORMAT_V41_FP4 == 1 && KVP_FORMAT_INDEX_FP4 == 2 &&
                  KVP_FORMAT_INDEX_FP8_F32 == 3 && KVP_FORMAT_INDEX_MXFP8 == 4 && KVP_FORMAT_BF16 == 5,
              "the table is in catalogue order");
static gather_entry copy = {gather_copy_kernel<false>, 0, {}};

static cudaError_t prepare(gather_entry *entry, int device) {
  if (entry->kernel == nullptr) {
    return cudaSuccess;
  }
  return kernel_facts_find((const void *)entry->kernel, gather_threads, device, &entry->facts[device]);
}

cudaError_t gather_prepare(int device) {
  gather_entry *all = &stores[0][0];
  cudaError_t error = prepare(&copy, device);
  for (size_t i = 0; i < sizeof(stores) / sizeof(gather_entry) && error == cudaSuccess; i++) {
    error = prepare(&all[i], device);
  }
  return error;
}

/* How copied rows are shared out: `pieces` only where each may be counted on its own. */
static void share_out(gather_args *args, uint32_t row_bytes, bool pieces) {
  args->vectors = row_bytes / 16;
  args->shift = args->vectors > 16 ? 5 : args->vectors > 8 ? 4 : 3;
  args->pieces = pieces ? (uint32_t)divide_up(args->vectors, (uint64_t)gather_passes << args->shift) : 1;
}

static cudaError_t gather_launch(const gather_entry &entry, const gather_args &args, cudaStream_t stream) {
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const kernel_facts &facts = entry.facts[device];
  assert(facts.resident_blocks > 0); /* kernels were loaded */
  constexpr uint64_t block_warps = gather_threads / lanes_per_warp;
  uint64_t rows = entry.rows != 0 ? (uint64_t)entry.rows : (uint64_t)lanes_per_warp >> args.shift;
  uint64_t pieces = entry.rows != 0 ? 1 : args.pieces;
  uint64_t blocks = divide_up(divide_up(args.row_count, rows) * pieces, block_warps);
  return launch_chained(entry.kernel, facts, dim3(launched_blocks(blocks, grid_blocks_max)), gather_threads, 0,
                        stream, args);
}

cudaError_t gather_store_launch(const kvp_store_params &params, kvp_cuda_counts *counts, cudaStream_t stream) {
  const kvp_geometry &geometry = *params.layer.geometry;
  bool cast_back = has_cast_back(params);
  gather_args args = {};
  args.source = params.source;
  args.out = cast_back ? params.cast_back : kvp_rows{};
  args.gather = params.gather;
  args.slots = params.slots;
  args.source_rows = params.source_rows;
  args.row_count = params.row_count;
  args.layer = layer_layout::make(params.layer);
  args.check = params.check;
  args.counts = counts;
  share_out(&args, geometry.sizes.row_bytes, false);
  return gather_launch(stores[geometry.format->id][cast_back], args, stream);
}

void gather_store_counts(const kvp_store_params &params, const kvp_cuda_counts &found, kvp_op_counts *out) {
  const kvp_format_sizes &sizes = params.layer.geometry->sizes;
  *out = kvp_op_counts{};
  out->rows_stored = found.rows_stored;
  out->rows_skipped = found.rows_skipped;
  out->rows_rejected = found.rows_rejected;
  out->rows_nonfinite = found.rows_nonfinite;
  out->groups_saturated = found.groups_saturated;
  uint64_t read = has_cast_back(params) ? found.rows_loaded - found.rows_zeroed : found.rows_stored;
  out->bytes_read = read * sizes.row_bytes;
  out->bytes_written = found.rows_stored * sizes.bytes_per_token + found.rows_loaded * sizes.row_bytes;
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_copy_rows_launch(const struct kvp_copy_rows_params *params,
                                                 struct kvp_cuda_counts *counts, cudaStream_t stream) {
  using namespace kvp;
  if (params->row_count == 0 || params->row_bytes == 0) {
    return cudaSuccess;
  }
  gather_args args = {};
  args.source = params->source;
  args.out = params->out;
  args.gather = params->gather;
  args.source_rows = params->source_rows;
  args.row_count = params->row_count;
  args.counts = counts;
  share_out(&args, params->row_bytes, true);
  return gather_launch(copy, args, stream);
}

extern "C" void kvp_cuda_copy_rows_counts(const struct kvp_copy_rows_params *params,
                                          const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  *out = kvp_op_counts{};
  out->rows_rejected = found->rows_rejected;
  out->rows_loaded = params->row_count - found->rows_rejected;
  out->bytes_read = (out->rows_loaded - found->rows_zeroed) * params->row_bytes;
  out->bytes_written = params->row_count * (uint64_t)params->row_bytes;
}
