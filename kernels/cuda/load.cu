/* load: which kernel is launched, how wide, and into what pieces segments are cut. See load_kernel.cuh and
 * load_bulk_kernel.cuh. */
#include <assert.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/load_bulk_kernel.cuh"
#include "kernels/cuda/load_kernel.cuh"
#include "kernels/cuda/prepare.cuh"

namespace kvp {

using load_kernel_fn = void(const load_args);

struct load_entry {
  load_kernel_fn *kernel; /* nullptr: there is no such kernel */
  int threads;
  int passes;
  int piece_rows; /* the most, and what pieces are multiples of; 0: as many as the passes hold */
  int rows_at_once;
  uint32_t shared_bytes; /* of a bulk kernel */
  kernel_facts facts[devices_max];
};

/* Few rows: a row a warp, so that all of them are on their way at once. Many of a main cache: by bulk copies where the
 * device has them. */
enum load_size { load_few, load_many, load_bulk, load_sizes };

using main_few = load_tuning<1, 128, 1>;
using main_many = load_tuning<4, 256, 4>;
/* On an H200 0.945 and 0.94 of memcpy, against 0.92 for main_many. */
using v41_bulk = bulk_tuning<4, 128>;
using v41_fp4_bulk = bulk_tuning<2, 128>;
using copy_few = load_tuning<2, 128, 0>;
using copy_many = load_tuning<8, 256, 0>;
template <class format> using index_few = load_tuning<format::data_bytes / 64, 128, 32>;
/* On an H200 0.92 and 0.94 of memcpy; with the other's tuning 0.85 and 0.92. */
using index_fp4_many = load_tuning<4, 128, 32>;
using index_fp8_many = load_tuning<4, 256, 16>;

template <class body, class tuning, bool checked> constexpr load_entry loading() {
  return load_entry{load_kernel<body, tuning, checked>,
                    tuning::threads,
                    tuning::passes,
                    tuning::piece_rows,
                    body::rows_at_once,
                    0,
                    {}};
}
template <class format, class tuning, bool checked> constexpr load_entry loading_bulk() {
  return load_entry{load_bulk_kernel<format, tuning, checked>,
                    tuning::threads,
                    tuning::rows_at_once,
                    tuning::piece_rows,
                    tuning::rows_at_once,
                    bulk_room<format, tuning>::bytes,
                    {}};
}

#define KVP_LOADING_MAIN(format, bulk, checked)                                                                      \
  {                                                                                                                  \
    loading<dequantized<format, main_few>, main_few, checked>(),                                                     \
        loading<dequantized<format, main_many>, main_many, checked>(), loading_bulk<format, bulk, checked>()         \
  }
#define KVP_LOADING_COPIED(data_bytes, few, many, checked)                                                           \
  { loading<copied<data_bytes, few>, few, checked>(), loading<copied<data_bytes, many>, many, checked>() }
#define KVP_LOADING_INDEX(format, many, checked)                                                                     \
  KVP_LOADING_COPIED(format::data_bytes, index_few<format>, many, checked)

/* [format][array was checked][load_size]; index_fp8_f32 and index_mxfp8 differ in what their bytes mean only. */
static load_entry entries[kvp_format_count][2][load_sizes] = {
    {KVP_LOADING_MAIN(format_v41, v41_bulk, false), KVP_LOADING_MAIN(format_v41, v41_bulk, true)},
    {KVP_LOADING_MAIN(format_v41_fp4, v41_fp4_bulk, false), KVP_LOADING_MAIN(format_v41_fp4, v41_fp4_bulk, true)},
    {KVP_LOADING_INDEX(format_index_fp4, index_fp4_many, false),
     KVP_LOADING_INDEX(format_index_fp4, index_fp4_many, true)},
    {KVP_LOADING_INDEX(format_index_fp8_f32, index_fp8_many, false),
     KVP_LOADING_INDEX(format_index_fp8_f32, index_fp8_many, true)},
    {KVP_LOADING_INDEX(format_index_fp8_f32, index_fp8_many, false),
     KVP_LOADING_INDEX(format_index_fp8_f32, index_fp8_many, true)},
    {KVP_LOADING_COPIED(0, copy_few, copy_many, false), KVP_LOADING_COPIED(0, copy_few, copy_many, true)},
};
static_assert(KVP_FORMAT_V41 == 0 && KVP_FORMAT_V41_FP4 == 1 && KVP_FORMAT_INDEX_FP4 == 2 &&
                  KVP_FORMAT_INDEX_FP8_F32 == 3 && KVP_FORMAT_INDEX_MXFP8 == 4 && KVP_FORMAT_BF16 == 5,
              "the table is in catalogue order");

cudaError_t load_prepare(int device) {
  load_entry *all = &entries[0][0][0];
  for (size_t i = 0; i < sizeof(entries) / sizeof(load_entry); i++) {
    load_entry &entry = all[i];
    if (entry.kernel != nullptr) {
      cudaError_t error = kernel_facts_find((const void *)entry.kernel, entry.threads, device, &entry.facts[device],
                                            entry.shared_bytes, entry.shared_bytes != 0 ? bulk_capability : 0);
      if (error != cudaSuccess) {
        return error;
      }
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

static uint64_t resident_warps(const load_entry &entry, int device) {
  return (uint64_t)entry.facts[device].resident_blocks * (entry.threads / lanes_per_warp);
}

/* Segments are cut as the longest of them may need; where most are short, into fewer, larger strides. */
constexpr uint64_t pieces_max = 256;

load_share load_share_out(const kvp_load_params &params, uint64_t least, uint64_t most, uint64_t block_warps,
                          uint32_t resident_blocks) {
  const kvp_geometry &geometry = *params.layer.geometry;
  bool checked = params.check.entries == nullptr;
  uint64_t warps = resident_blocks * block_warps;
  uint64_t longest = checked ? params.segment_rows_max : at_most(geometry.tokens_per_block, params.total_k);
  longest = at_least(longest, 1);
  uint64_t rows = checked ? params.rows : params.total_k;
  uint64_t piece_rows = divide_up(at_least(rows / warps, 1), least) * least;
  piece_rows = at_most(piece_rows, most);
  uint64_t useful = (2 * divide_up(rows, piece_rows) + warps) / params.segment_count + 1;
  uint64_t pieces = at_most(at_most(divide_up(longest, piece_rows), useful), pieces_max);
  uint64_t blocks_max = checked ? grid_blocks_max : resident_blocks;
  uint32_t blocks = launched_blocks(
      divide_up(at_most(params.segment_count, blocks_max * block_warps) * pieces, block_warps), blocks_max);
  return load_share{load_cut{(uint32_t)pieces, (uint32_t)piece_rows}, blocks};
}

/* As in a store: narrow as long as every row gets its warp at once. Bulk copies need multiples of
 * 16 bytes: rows are, and so are the steps from record to record of a main cache, which leaves the layer's begin. */
static const load_entry &choose(const kvp_load_params &params, const load_entry (&sizes)[load_sizes], int device) {
  uint64_t rows = params.check.entries == nullptr ? params.rows : params.total_k;
  if (takes_few(rows <= resident_warps(sizes[load_few], device))) {
    return sizes[load_few];
  }
  bool bulk = sizes[load_bulk].facts[device].resident_blocks != 0 && (uintptr_t)params.layer.base % 16 == 0 &&
              pinned.size != KVP_CUDA_SIZE_MANY_NO_BULK;
  return sizes[bulk ? load_bulk : load_many];
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_load_launch(const struct kvp_load_params *params, struct kvp_cuda_counts *counts,
                                            cudaStream_t stream) {
  using namespace kvp;
  if (load_is_empty(*params)) {
    return cudaSuccess;
  }
  bool checked = params->check.entries == nullptr;
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const load_entry(&sizes)[load_sizes] = entries[params->layer.geometry->format->id][checked];
  assert(sizes[load_few].facts[device].resident_blocks > 0); /* kernels were loaded */
  const load_entry &entry = choose(*params, sizes, device);
  uint64_t block_warps = entry.threads / lanes_per_warp;
  uint32_t row_bytes = params->layer.geometry->sizes.loaded_row_bytes;
  load_share share = load_share_out(*params, piece_rows_of(entry.rows_at_once, entry.passes, row_bytes),
                                    piece_rows_of(entry.piece_rows, entry.passes, row_bytes), block_warps,
                                    entry.facts[device].resident_blocks);
  load_args args = load_args::make(*params, counts, share.cut, share.blocks * block_warps);
  return launch_chained(entry.kernel, entry.facts[device], dim3(share.blocks), entry.threads, entry.shared_bytes,
                        stream, args);
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
