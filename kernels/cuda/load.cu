/* load: which kernel is launched, how wide, and into what pieces segments are cut. See load_kernel.cuh. */
#include <assert.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/load_kernel.cuh"
#include "kernels/cuda/prepare.cuh"

namespace kvp {

using load_kernel_fn = void(const load_args);

struct load_entry {
  load_kernel_fn *kernel;
  int threads;
  int piece_rows;     /* the most */
  int piece_rows_min; /* what a warp has in flight at least; pieces are multiples of it */
  uint32_t resident_blocks[devices_max];
};

using main_tuning = load_tuning<4, 256, 16, load_hint::no_allocate, store_hint::plain>;
using copy_tuning = load_tuning<4, 256, 16, load_hint::no_allocate, store_hint::plain>;
using index_64_tuning = load_tuning<4, 256, 32, load_hint::no_allocate, store_hint::plain>;
using index_128_tuning = load_tuning<8, 256, 32, load_hint::no_allocate, store_hint::plain>;

template <class body, class tuning, bool checked> constexpr load_entry loading() {
  return load_entry{load_kernel<body, tuning, checked>, tuning::threads, tuning::piece_rows, tuning::passes, {}};
}

#define KVP_LOADING(body, tuning)                                                                                    \
  { loading<body, tuning, false>(), loading<body, tuning, true>() }

using load_v41 = dequantized<format_v41, main_tuning>;
using load_v41_fp4 = dequantized<format_v41_fp4, main_tuning>;
using load_index_fp4 = copied_with_scales<format_index_fp4::data_bytes, index_64_tuning>;
using load_index_fp8 = copied_with_scales<format_index_fp8_f32::data_bytes, index_128_tuning>;
using load_bf16 = copied<copy_tuning>;

/* [format][array was checked]; index_fp8_f32 and index_mxfp8 differ in what their bytes mean only. */
static load_entry entries[kvp_format_count][2] = {
    KVP_LOADING(load_v41, main_tuning),
    KVP_LOADING(load_v41_fp4, main_tuning),
    KVP_LOADING(load_index_fp4, index_64_tuning),
    KVP_LOADING(load_index_fp8, index_128_tuning),
    KVP_LOADING(load_index_fp8, index_128_tuning),
    KVP_LOADING(load_bf16, copy_tuning),
};
static_assert(KVP_FORMAT_V41 == 0 && KVP_FORMAT_V41_FP4 == 1 && KVP_FORMAT_INDEX_FP4 == 2 &&
                  KVP_FORMAT_INDEX_FP8_F32 == 3 && KVP_FORMAT_INDEX_MXFP8 == 4 && KVP_FORMAT_BF16 == 5,
              "the table is in catalogue order");

cudaError_t load_prepare(int device) {
  load_entry *all = &entries[0][0];
  for (size_t i = 0; i < sizeof(entries) / sizeof(load_entry); i++) {
    cudaError_t error =
        resident_blocks_find((const void *)all[i].kernel, all[i].threads, device, &all[i].resident_blocks[device]);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

static uint64_t at_most(uint64_t value, uint64_t limit) {
  return value < limit ? value : limit;
}
static uint64_t at_least(uint64_t value, uint64_t limit) {
  return value > limit ? value : limit;
}

/* Pieces so small that all warps of the device get one, up to the kernel's size. Segments are cut as the longest of
 * them may need; where most are short, into fewer, larger strides. */
constexpr uint64_t pieces_max = 256;

static load_cut cut_segments(const kvp_load_params &params, const load_entry &entry, uint64_t warps) {
  bool checked = params.check.entries == nullptr;
  uint64_t longest =
      checked ? params.segment_rows_max : at_most(params.layer.geometry->tokens_per_block, params.total_k);
  longest = at_least(longest, 1);
  uint64_t rows = checked ? params.rows : params.total_k;
  uint64_t step = entry.piece_rows_min;
  uint64_t piece_rows = divide_up(at_least(rows / warps, 1), step) * step;
  piece_rows = at_most(piece_rows, entry.piece_rows);
  uint64_t useful = (2 * divide_up(rows, piece_rows) + warps) / params.segment_count + 1;
  uint64_t pieces = at_most(at_most(divide_up(longest, piece_rows), useful), pieces_max);
  return load_cut{(uint32_t)pieces, (uint32_t)piece_rows};
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_load_launch(const struct kvp_load_params *params, struct kvp_cuda_counts *counts,
                                            cudaStream_t stream) {
  using namespace kvp;
  bool checked = params->check.entries == nullptr;
  if (params->segment_count == 0 || (checked && params->rows == 0)) {
    return cudaSuccess;
  }
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const kvp_geometry &geometry = *params->layer.geometry;
  const load_entry &entry = entries[geometry.format->id][checked];
  assert(entry.resident_blocks[device] > 0); /* kernels were loaded */
  uint64_t block_warps = entry.threads / lanes_per_warp;
  uint64_t resident_warps = entry.resident_blocks[device] * block_warps;
  load_cut cut = cut_segments(*params, entry, resident_warps);
  uint64_t blocks_max = checked ? grid_blocks_max : entry.resident_blocks[device];
  uint64_t blocks = at_most(
      divide_up(at_most(params->segment_count, blocks_max * block_warps) * cut.pieces, block_warps), blocks_max);
  load_args args = load_args::make(*params, counts, cut, blocks * block_warps);
  return launch(entry.kernel, (uint32_t)blocks, entry.threads, stream, args);
}

extern "C" void kvp_cuda_load_counts(const struct kvp_load_params *params, const struct kvp_cuda_counts *found,
                                     struct kvp_op_counts *out) {
  const kvp_format_sizes &sizes = params->layer.geometry->sizes;
  bool checked = params->check.entries == nullptr;
  uint64_t zeroed = checked ? params->rows_zeroed : found->rows_zeroed;
  *out = kvp_op_counts{};
  out->rows_loaded = checked ? params->rows : found->rows_loaded;
  out->rows_rejected = checked ? 0 : found->rows_rejected;
  out->bytes_read = (out->rows_loaded - zeroed) * sizes.bytes_per_token;
  out->bytes_written = out->rows_loaded * ((uint64_t)sizes.loaded_row_bytes + sizes.loaded_scale_bytes);
}
