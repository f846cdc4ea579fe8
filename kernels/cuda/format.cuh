/* The catalogue's quantized formats as types: what proto/format.c says, known when a kernel is compiled.
 *
 * A warp handles a row of 512 elements as two chunks a lane, or two rows of 128 as one; chunk c of the row's lane l is
 * elements (c * lanes_per_row + l) * 8 ... + 7. So BF16 is accessed 16 bytes a lane and codes 8 or 4, without gaps.
 */
#ifndef KVPOOL_KERNELS_CUDA_FORMAT_CUH
#define KVPOOL_KERNELS_CUDA_FORMAT_CUH

#include <cuda_runtime.h>
#include <stdint.h>
#include <type_traits>

#include "proto/format.h"

namespace kvp {

constexpr int lanes_per_warp = 32;
constexpr int chunk_elements = 8;

template <int elements_, int elements_per_scale_, kvp_quantized_dtype dtype_, kvp_scale_format scale_,
          bool main_cache_>
struct quantized_format {
  static constexpr bool quantized = true;
  static constexpr bool live = false;
  static constexpr int elements = elements_;
  static constexpr kvp_scale_format scale = scale_;
  static constexpr bool fp4 = dtype_ == KVP_QUANTIZED_E2M1;
  static constexpr bool main_cache = main_cache_; /* interleaved, and BF16 on load */

  static constexpr int row_bytes = 2 * elements;
  static constexpr int data_bytes = fp4 ? elements / 2 : elements;
  static constexpr int scales_per_row = elements / elements_per_scale_;
  static constexpr int scale_bytes = scales_per_row * (scale == KVP_SCALE_F32 ? 4 : 1);
  static constexpr int data_step = main_cache ? data_bytes + scale_bytes : data_bytes;
  static constexpr int scale_step = main_cache ? data_bytes + scale_bytes : scale_bytes;

  static constexpr int lanes_per_group = elements_per_scale_ / chunk_elements;
  static constexpr int lanes_per_row = elements == 512 ? 32 : 16;
  static constexpr int rows_per_pass = lanes_per_warp / lanes_per_row;
  static constexpr int chunks = elements / (lanes_per_row * chunk_elements);
  static constexpr int code_bytes = fp4 ? 4 : 8; /* of a chunk */
  using codes = typename std::conditional<fp4, uint32_t, uint2>::type;

  static_assert(chunks * lanes_per_row * chunk_elements == elements, "chunks cover a row");
  static_assert(lanes_per_group * scales_per_row == lanes_per_row * chunks, "groups cover a row");
  static_assert(chunks == 1 || lanes_per_group >= 2, "one byte of scale a lane");

  /* Scale of the group that this lane's chunk belongs to. */
  static __device__ __forceinline__ int group_of(int row_lane, int chunk) {
    return (chunk * lanes_per_row + row_lane) / lanes_per_group;
  }
};

using format_v41 = quantized_format<512, 32, KVP_QUANTIZED_E4M3, KVP_SCALE_UE8M0, true>;
using format_v41_fp4 = quantized_format<512, 16, KVP_QUANTIZED_E2M1, KVP_SCALE_E4M3, true>;
using format_index_fp4 = quantized_format<128, 32, KVP_QUANTIZED_E2M1, KVP_SCALE_UE8M0, false>;
using format_index_fp8_f32 = quantized_format<128, 128, KVP_QUANTIZED_E4M3, KVP_SCALE_F32, false>;
using format_index_mxfp8 = quantized_format<128, 32, KVP_QUANTIZED_E4M3, KVP_SCALE_UE8M0, false>;

/* bf16 of the default width, for kernels that know how wide a row is. */
struct format_bf16_512 {
  static constexpr bool quantized = false;
  static constexpr bool live = false;
  static constexpr int elements = 512;
  static constexpr bool main_cache = true;
  static constexpr int row_bytes = 2 * elements;
  static constexpr int data_step = row_bytes;
};

/* The same of rows, tables and weights that others write while the kernel runs: nothing of them is kept in a cache that
 * doesn't notice. */
template <class format> struct live_format : format { static constexpr bool live = true; };

/* Largest BF16 magnitude that an e4m3 scale of e2m1 codes holds: 2688 = 448 * 6. */
constexpr uint32_t saturation_limit = 0x4528;

} // namespace kvp

#endif
