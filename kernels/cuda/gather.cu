/* copy_rows, and store with a gather index or without slots: which kernel is launched, and how wide. See
 * gather_kernel.cuh.
 */
#include "kernels/cuda/gather.cuh"

#include <assert.h>

#include "kernels/cuda/prepare.cuh"

namespace kvp {

struct gather_entry {
  void (*kernel)(const gather_args);
  int rows; /* of a warp at a time; 0: args.shift says */
  kernel_facts facts[devices_max];
};

template <class format, gather_back back> constexpr gather_entry gathering() {
  return gather_entry{gather_store_kernel<format, back>, strip_shape<format>::rows, {}};
}
#define KVP_GATHERING(format)                                                                                        \
  { gathering<format, back_none>(), gathering<format, back_cast>(), gathering<format, back_copied>() }

/* [format][gather_back]; index caches have none. */
static gather_entry stores[kvp_format_count][back_copied + 1] = {
    KVP_GATHERING(format_v41),
    KVP_GATHERING(format_v41_fp4),
    {gathering<format_index_fp4, back_none>(), {}, {}},
    {gathering<format_index_fp8_f32, back_none>(), {}, {}},
    {gathering<format_index_mxfp8, back_none>(), {}, {}},
    {{gather_copy_kernel<true>, 0, {}}, {gather_copy_kernel<true>, 0, {}}, {gather_copy_kernel<true>, 0, {}}},
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
  args->pieces = wide_divisor::make(pieces ? divide_up(args->vectors, (uint64_t)gather_passes << args->shift) : 1);
}

gather_args gather_store_args(const kvp_store_params &params, kvp_cuda_counts *counts) {
  gather_args args = {};
  args.source = params.source;
  args.out = has_cast_back(params) ? params.cast_back : kvp_rows{};
  args.gather = params.gather;
  args.slots = params.slots;
  args.source_rows = params.source_rows;
  args.row_count = params.row_count;
  args.layer = layer_layout::make(params.layer);
  args.check = params.check;
  args.counts = counts;
  args.copies = params.back_is_copy;
  share_out(&args, params.layer.geometry->sizes.row_bytes, false);
  return args;
}

gather_args gather_copy_args(const kvp_copy_rows_params &params, kvp_cuda_counts *counts) {
  gather_args args = {};
  args.source = params.source;
  args.out = params.out;
  args.gather = params.gather;
  args.source_rows = params.source_rows;
  args.row_count = params.row_count;
  args.counts = counts;
  share_out(&args, params.row_bytes, true);
  return args;
}

uint64_t gather_blocks(const gather_args &args, int rows) {
  uint64_t units = rows != 0 ? divide_up(args.row_count, (uint64_t)rows)
                             : divide_up(args.row_count, (uint64_t)lanes_per_warp >> args.shift) * args.pieces.value;
  return divide_up(units, gather_threads / lanes_per_warp);
}

gather_back gather_back_of(const kvp_store_params &params) {
  return !has_cast_back(params) ? back_none : params.back_is_copy ? back_copied : back_cast;
}

static cudaError_t gather_launch(const gather_entry &entry, const gather_args &args, cudaStream_t stream) {
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const kernel_facts &facts = entry.facts[device];
  assert(facts.resident_blocks > 0); /* kernels were loaded */
  uint64_t blocks = gather_blocks(args, entry.rows);
  return launch_chained(entry.kernel, facts, dim3(launched_blocks(blocks, grid_blocks_max)), gather_threads, 0,
                        stream, args);
}

cudaError_t gather_store_launch(const kvp_store_params &params, kvp_cuda_counts *counts, cudaStream_t stream) {
  const gather_entry &entry = stores[params.layer.geometry->format->id][gather_back_of(params)];
  return gather_launch(entry, gather_store_args(params, counts), stream);
}

void gather_store_counts(const kvp_store_params &params, const kvp_cuda_counts &found, kvp_op_counts *out) {
  const kvp_format_sizes &sizes = params.layer.geometry->sizes;
  bool copied = has_cast_back(params) && params.back_is_copy;
  *out = kvp_op_counts{};
  out->rows_stored = found.rows_stored;
  out->rows_loaded = copied ? found.rows_loaded : 0;
  out->rows_skipped = found.rows_skipped;
  out->rows_rejected = found.rows_rejected;
  out->rows_nonfinite = found.rows_nonfinite;
  out->groups_saturated = found.groups_saturated;
  uint64_t read = has_cast_back(params) ? found.rows_loaded - found.rows_zeroed : found.rows_stored;
  uint64_t back = copied ? params.row_count : found.rows_loaded;
  out->bytes_read = read * sizes.row_bytes;
  out->bytes_written = found.rows_stored * sizes.bytes_per_token + back * sizes.row_bytes;
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_copy_rows_launch(const struct kvp_copy_rows_params *params,
                                                 struct kvp_cuda_counts *counts, cudaStream_t stream) {
  using namespace kvp;
  if (params->row_count == 0 || params->row_bytes == 0) {
    return cudaSuccess;
  }
  return gather_launch(copy, gather_copy_args(*params, counts), stream);
}

extern "C" void kvp_cuda_copy_rows_counts(const struct kvp_copy_rows_params *params,
                                          const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  *out = kvp_op_counts{};
  out->rows_rejected = found->rows_rejected;
  out->rows_loaded = params->row_count - found->rows_rejected;
  out->bytes_read = (out->rows_loaded - found->rows_zeroed) * params->row_bytes;
  out->bytes_written = params->row_count * (uint64_t)params->row_bytes;
}
