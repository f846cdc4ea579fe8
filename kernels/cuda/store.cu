/* store: which kernel is launched, and how wide. See store_kernel.cuh. */
#include <assert.h>

#include "kernels/cuda/gather.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/prepare.cuh"
#include "kernels/cuda/store_copy_kernel.cuh"
#include "kernels/cuda/store_kernel.cuh"

namespace kvp {

using store_kernel_fn = void(const store_args);

/* One kernel and what is known of it. */
struct store_entry {
  store_kernel_fn *kernel;
  int threads;
  int rows; /* of a warp at a time; bf16: 16-byte vectors of a lane */
  uint32_t resident_blocks[devices_max];
};

/* Few rows: a row a warp, so that all of them are on their way at once. */
enum store_size { store_few, store_many, store_sizes };

/* On an H200, blocks of 128 threads are as fast as wider ones for v41 and bf16 and up to 4 % faster for FP4. */
using few = store_tuning<1, 128>;
using many = store_tuning<4, 128>;
/* bf16: passes are vectors of a lane. */
using copy_few = store_tuning<2, 128>;
using copy_many = store_tuning<8, 128>;

template <class format, class tuning, bool checked, bool cast_back> constexpr store_entry quantizing() {
  return store_entry{
      store_kernel<format, tuning, checked, cast_back>, tuning::threads, store_batch<format, tuning>::rows, {}};
}
template <class tuning, bool checked, bool cast_back> constexpr store_entry copying() {
  return store_entry{store_copy_kernel<tuning, checked, cast_back>, tuning::threads, tuning::passes, {}};
}

#define KVP_QUANTIZING(format, cast_back)                                                                            \
  {                                                                                                                  \
    {quantizing<format, few, false, cast_back>(), quantizing<format, many, false, cast_back>()}, {                   \
      quantizing<format, few, true, cast_back>(), quantizing<format, many, true, cast_back>()                        \
    }                                                                                                                \
  }
#define KVP_COPYING(cast_back)                                                                                       \
  {                                                                                                                  \
    {copying<copy_few, false, cast_back>(), copying<copy_many, false, cast_back>()}, {                               \
      copying<copy_few, true, cast_back>(), copying<copy_many, true, cast_back>()                                    \
    }                                                                                                                \
  }

/* [format][cast-back][array was checked][store_size]; index caches have no cast-back. */
static store_entry entries[kvp_format_count][2][2][store_sizes] = {
    {KVP_QUANTIZING(format_v41, false), KVP_QUANTIZING(format_v41, true)},
    {KVP_QUANTIZING(format_v41_fp4, false), KVP_QUANTIZING(format_v41_fp4, true)},
    {KVP_QUANTIZING(format_index_fp4, false)},
    {KVP_QUANTIZING(format_index_fp8_f32, false)},
    {KVP_QUANTIZING(format_index_mxfp8, false)},
    {KVP_COPYING(false), KVP_COPYING(true)},
};
static_assert(KVP_FORMAT_V41 == 0 && KVP_FORMAT_V41_FP4 == 1 && KVP_FORMAT_INDEX_FP4 == 2 &&
                  KVP_FORMAT_INDEX_FP8_F32 == 3 && KVP_FORMAT_INDEX_MXFP8 == 4 && KVP_FORMAT_BF16 == 5,
              "the table is in catalogue order");

cudaError_t store_prepare(int device) {
  store_entry *all = &entries[0][0][0][0];
  for (size_t i = 0; i < sizeof(entries) / sizeof(store_entry); i++) {
    if (all[i].kernel != nullptr) {
      cudaError_t error = resident_blocks_find((const void *)all[i].kernel, all[i].threads, 0, 0, device,
                                               &all[i].resident_blocks[device]);
      if (error != cudaSuccess) {
        return error;
      }
    }
  }
  return cudaSuccess;
}

/* Stores that are not the plain case have kernels of their own. */
static bool is_gathered(const kvp_store_params &params) {
  return params.gather != nullptr || params.slots == nullptr;
}

static uint32_t warp_rows(const store_entry &entry, const kvp_geometry &geometry) {
  bool copies = geometry.format->id == KVP_FORMAT_BF16;
  return copies ? copied_warp_rows(entry.rows, geometry.sizes.row_bytes) : (uint32_t)entry.rows;
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_store_launch(const struct kvp_store_params *params, struct kvp_cuda_counts *counts,
                                             cudaStream_t stream) {
  using namespace kvp;
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  if (is_gathered(*params)) {
    return gather_store_launch(*params, counts, stream);
  }
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const kvp_geometry &geometry = *params->layer.geometry;
  bool checked = params->check.entries == nullptr;
  const store_entry *sizes = entries[geometry.format->id][has_cast_back(*params)][checked];
  /* The wide kernel starts to pay when the narrow one would need a second round. */
  const store_entry &narrow = sizes[store_few];
  assert(narrow.resident_blocks[device] > 0); /* kernels were loaded */
  uint64_t few_rows =
      (uint64_t)narrow.resident_blocks[device] * (narrow.threads / lanes_per_warp) * warp_rows(narrow, geometry);
  const store_entry &entry = sizes[takes_few(params->row_count <= few_rows) ? store_few : store_many];
  store_args args = store_args::make(*params, counts);
  args.warp_rows = warp_rows(entry, geometry);
  uint64_t blocks = divide_up(params->row_count, (uint64_t)args.warp_rows * (entry.threads / lanes_per_warp));
  uint64_t blocks_max = checked ? grid_blocks_max : entry.resident_blocks[device];
  return launch(entry.kernel, launched_blocks(blocks, blocks_max), entry.threads, stream, args);
}

extern "C" void kvp_cuda_store_counts(const struct kvp_store_params *params, const struct kvp_cuda_counts *found,
                                      struct kvp_op_counts *out) {
  if (kvp::is_gathered(*params)) {
    kvp::gather_store_counts(*params, *found, out);
    return;
  }
  const kvp_format_sizes &sizes = params->layer.geometry->sizes;
  *out = kvp_op_counts{};
  if (params->check.entries == nullptr) {
    out->rows_skipped = params->rows_skipped;
    out->rows_stored = params->row_count - params->rows_skipped;
  } else {
    out->rows_skipped = found->rows_skipped;
    out->rows_stored = found->rows_stored;
    out->rows_rejected = found->rows_rejected;
  }
  out->rows_nonfinite = found->rows_nonfinite;
  out->groups_saturated = found->groups_saturated;
  uint64_t cast_back = kvp::has_cast_back(*params) ? out->rows_stored + out->rows_skipped : 0;
  uint64_t read = cast_back != 0 ? cast_back : out->rows_stored;
  out->bytes_read = read * sizes.row_bytes;
  out->bytes_written = out->rows_stored * sizes.bytes_per_token + cast_back * sizes.row_bytes;
}
