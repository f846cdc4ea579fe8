/* fused_store: BF16 rows through RMSNorm, RoPE and a Walsh-Hadamard transform into the records their slots name. OPS
 * "fused_store".
 *
 * A warp has one row of 512 elements, or two of 128, in registers from its source to its record: a lane's chunks are
 * those that it quantizes. Sixteen elements whose squares are added one after the other are the chunks of two
 * neighbouring lanes, and all sums have the order OPS gives them; every operation is rounded on its own. So neither the
 * number of rows nor the machine shows in a single bit. A row and its position don't depend on its slot: all are
 * fetched at once.
 */
#ifndef KVPOOL_KERNELS_CUDA_FUSED_STORE_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_FUSED_STORE_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/row_store.cuh"

namespace kvp {

constexpr int fused_threads = 128;
constexpr int fused_blocks = 5; /* of a multiprocessor at least: rows enough to hide their way through memory */
constexpr int fused_warps = fused_threads / lanes_per_warp;

struct fused_args {
  layer_layout layer;
  kvp_rows source;
  kvp_rows cast_back;
  const int32_t *slots; /* NULL: all are -1 */
  const int32_t *positions;
  const uint16_t *norm_weight;
  kvp_rows cos_sin;
  uint64_t row_count;
  uint64_t position_count;
  kvp_owner_check check;
  kvp_cuda_counts *counts;
  uint32_t elements; /* bf16 only */
  uint32_t rotary_dims;
  uint32_t rope_offset;
  float eps;
  float mean_factor;     /* 1 / elements */
  float hadamard_factor; /* 1 / sqrt(elements) */
  uint32_t flags;        /* kvp_fused_flag */

  __device__ __forceinline__ bool has(kvp_fused_flag flag) const { return (flags & (uint32_t)flag) != 0; }
};

/* Ops of one launch: blockIdx.y says which. */
template <int ops> struct fused_batch {
  fused_args of[ops];

  __device__ __forceinline__ const fused_args &own() const { return of[ops == 1 ? 0 : blockIdx.y]; }
};

/* What becomes of a row: `data` is record_ignore where nothing does. */
struct fused_row {
  record_place place;
  int32_t position;
};

/* Reads and counts a row's slot and position. */
template <bool counted, bool cast_back>
__device__ __forceinline__ fused_row find_fused_row(const fused_args &args, uint64_t row, uint32_t data_step,
                                                    row_tally &tally) {
  int32_t slot = args.slots == nullptr ? -1 : read_once(&args.slots[row]);
  int32_t position = read_once(&args.positions[row]);
  fused_row found = {{cast_back ? record_none : record_ignore, 0}, position};
  if (slot == -1 && !cast_back) {
    tally.skipped += counted;
    return found;
  }
  if (slot != -1) {
    found.place = find_record(args.layer, args.check, slot, data_step);
  }
  if (position < 0 || (uint32_t)position >= args.position_count) {
    found.place.data = record_ignore;
  }
  if (counted) {
    tally.rejected += found.place.data == record_ignore;
    tally.skipped += found.place.data == record_none;
    tally.stored += found.place.data >= 0;
  }
  return found;
}

/* ---- a row in registers ---- */

/* Eight elements in a row. */
struct float_chunk {
  float of[chunk_elements];

  static __device__ __forceinline__ float_chunk from(const uint4 &words) {
    return float_chunk{{f32_of_low_bf16(words.x), f32_of_high_bf16(words.x), f32_of_low_bf16(words.y),
                        f32_of_high_bf16(words.y), f32_of_low_bf16(words.z), f32_of_high_bf16(words.z),
                        f32_of_low_bf16(words.w), f32_of_high_bf16(words.w)}};
  }
  __device__ __forceinline__ uint4 rounded() const {
    return make_uint4(bf16_pair(of[0], of[1]), bf16_pair(of[2], of[3]), bf16_pair(of[4], of[5]),
                      bf16_pair(of[6], of[7]));
  }
};

template <class format> struct fused_values {
  static constexpr int chunks = format::chunks;
  float_chunk chunk[chunks];

  /* To BF16 and back. */
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int c = 0; c < chunks; c++) {
      chunk[c] = float_chunk::from(chunk[c].rounded());
    }
  }

  /* Even lanes begin a sum of sixteen, the odd ones next to them go on; what the others compute is not used. */
  __device__ __forceinline__ float sum_of_squares() const {
    float sum[chunks];
    float squares[chunks][chunk_elements];
#pragma unroll
    for (int c = 0; c < chunks; c++) {
#pragma unroll
      for (int i = 0; i < chunk_elements; i++) {
        squares[c][i] = __fmul_rn(chunk[c].of[i], chunk[c].of[i]);
      }
      sum[c] = squares[c][0];
#pragma unroll
      for (int i = 1; i < chunk_elements; i++) {
        sum[c] = __fadd_rn(sum[c], squares[c][i]);
      }
    }
#pragma unroll
    for (int c = 0; c < chunks; c++) {
      sum[c] = __shfl_xor_sync(full_warp, sum[c], 1);
#pragma unroll
      for (int i = 0; i < chunk_elements; i++) {
        sum[c] = __fadd_rn(sum[c], squares[c][i]);
      }
#pragma unroll
      for (int distance = 2; distance < format::lanes_per_row; distance *= 2) {
        sum[c] = __fadd_rn(sum[c], __shfl_xor_sync(full_warp, sum[c], distance));
      }
    }
    float total = chunks == 1 ? sum[0] : __fadd_rn(sum[0], sum[chunks - 1]);
    return from_lane(total, lane_index() | 1);
  }

  __device__ __forceinline__ void normalize(const fused_args &args, const uint4 (&weights)[chunks]) {
    float variance = __fmul_rn(sum_of_squares(), args.mean_factor);
    float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(variance, args.eps)));
#pragma unroll
    for (int c = 0; c < chunks; c++) {
      float_chunk weight = float_chunk::from(weights[c]);
#pragma unroll
      for (int i = 0; i < chunk_elements; i++) {
        chunk[c].of[i] = __fmul_rn(__fmul_rn(chunk[c].of[i], factor), weight.of[i]);
      }
    }
  }

  /* Strides of up to four are inside a chunk, then come those from lane to lane, and one from chunk to chunk. Of two
   * the upper one is subtracted, which is adding its negative. */
  __device__ __forceinline__ void hadamard(float factor) {
#pragma unroll
    for (int c = 0; c < chunks; c++) {
#pragma unroll
      for (int stride = 1; stride < chunk_elements; stride *= 2) {
#pragma unroll
        for (int i = 0; i < chunk_elements; i++) {
          if ((i & stride) == 0) {
            butterfly(chunk[c].of[i], chunk[c].of[i + stride]);
          }
        }
      }
#pragma unroll
      for (int distance = 1; distance < format::lanes_per_row; distance *= 2) {
        uint32_t sign = (lane_index() & distance) != 0 ? 0x80000000 : 0;
#pragma unroll
        for (int i = 0; i < chunk_elements; i++) {
          float other = __shfl_xor_sync(full_warp, chunk[c].of[i], distance);
          chunk[c].of[i] = __fadd_rn(other, __uint_as_float(__float_as_uint(chunk[c].of[i]) ^ sign));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < chunk_elements; i++) {
      if (chunks == 2) {
        butterfly(chunk[0].of[i], chunk[chunks - 1].of[i]);
      }
#pragma unroll
      for (int c = 0; c < chunks; c++) {
        chunk[c].of[i] = __fmul_rn(chunk[c].of[i], factor);
      }
    }
  }

private:
  static __device__ __forceinline__ void butterfly(float &low, float &high) {
    float a = low;
    float b = high;
    low = __fadd_rn(a, b);
    high = __fsub_rn(a, b);
  }
};

/* ---- RoPE ---- */

__device__ __forceinline__ void rotate_pair(float &first, float &second, float cosine, float sine) {
  float a = __fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine));
  float b = __fadd_rn(__fmul_rn(first, sine), __fmul_rn(second, cosine));
  first = a;
  second = b;
}

/* Interleaved pairs that lie in chunks: angles of the lane's pairs, fetched early. */
template <class format> struct near_rope {
  static constexpr int chunks = format::chunks;
  uint4 cosines[chunks];
  uint4 sines[chunks];
  bool rotates[chunks];

  static __device__ __forceinline__ bool possible(const fused_args &args) {
    return !args.has(KVP_FUSED_NEOX) && (args.rope_offset | args.rotary_dims) % chunk_elements == 0;
  }

  /* angles: the row of the position's table; not followed where `wanted` is false. */
  __device__ __forceinline__ void fetch(const fused_args &args, const uint8_t *angles, bool wanted, int row_lane) {
#pragma unroll
    for (int c = 0; c < chunks; c++) {
      uint32_t at = (uint32_t)(c * format::lanes_per_row + row_lane) * chunk_elements - args.rope_offset;
      rotates[c] = wanted && at < args.rotary_dims;
      if (rotates[c]) { /* half as many pairs, 4 bytes each */
        cosines[c] = load_16_bytes(angles + at * 2);
        sines[c] = load_16_bytes(angles + (args.rotary_dims + at) * 2);
      }
    }
  }

  __device__ __forceinline__ void rotate(fused_values<format> &values) const {
#pragma unroll
    for (int c = 0; c < chunks; c++) {
      if (rotates[c]) {
        float(&of)[chunk_elements] = values.chunk[c].of;
        rotate_pair(of[0], of[1], __uint_as_float(cosines[c].x), __uint_as_float(sines[c].x));
        rotate_pair(of[2], of[3], __uint_as_float(cosines[c].y), __uint_as_float(sines[c].y));
        rotate_pair(of[4], of[5], __uint_as_float(cosines[c].z), __uint_as_float(sines[c].z));
        rotate_pair(of[6], of[7], __uint_as_float(cosines[c].w), __uint_as_float(sines[c].w));
      }
    }
  }
};

/* Any pairs: an element finds its other half in the warp's part of the block's shared memory. Whole warp; not followed
 * where `wanted` is false. */
template <class format>
__device__ __forceinline__ void rotate_far(const fused_args &args, fused_values<format> &values,
                                           const uint8_t *angles, bool wanted, int row_lane, int row_of_warp) {
  __shared__ float rows[fused_warps][format::rows_per_pass][format::elements];
  float *row = rows[threadIdx.x / lanes_per_warp][row_of_warp];
  const float *cosines = (const float *)angles;
  uint32_t half = args.rotary_dims / 2;
  __syncwarp(); /* the row before was read */
#pragma unroll
  for (int c = 0; c < format::chunks; c++) {
#pragma unroll
    for (int i = 0; i < chunk_elements; i++) {
      row[(c * format::lanes_per_row + row_lane) * chunk_elements + i] = values.chunk[c].of[i];
    }
  }
  __syncwarp();
#pragma unroll
  for (int c = 0; c < format::chunks; c++) {
#pragma unroll
    for (int i = 0; i < chunk_elements; i++) {
      uint32_t element = (uint32_t)((c * format::lanes_per_row + row_lane) * chunk_elements + i);
      uint32_t at = element - args.rope_offset;
      if (wanted && at < args.rotary_dims) {
        bool neox = args.has(KVP_FUSED_NEOX);
        bool second = neox ? at >= half : (at & 1) != 0;
        uint32_t pair = neox ? (second ? at - half : at) : at / 2;
        uint32_t distance = neox ? half : 1;
        float other = row[second ? element - distance : element + distance];
        float own = values.chunk[c].of[i];
        float first = second ? other : own;
        float last = second ? own : other;
        rotate_pair(first, last, cosines[pair], cosines[half + pair]);
        values.chunk[c].of[i] = second ? last : first;
      }
    }
  }
}

/* ---- the kernel ---- */

template <class format> struct fused_lane {
  int row_lane;
  int row_of_warp;
  uint4 weights[format::chunks];

  static __device__ __forceinline__ fused_lane make(const fused_args &args) {
    fused_lane lane;
    lane.row_lane = lane_index() % format::lanes_per_row;
    lane.row_of_warp = lane_index() / format::lanes_per_row;
    lane.read((const uint8_t *)args.norm_weight, lane.weights);
    return lane;
  }
  __device__ __forceinline__ void read(const uint8_t *row, uint4 (&words)[format::chunks]) const {
#pragma unroll
    for (int c = 0; c < format::chunks; c++) {
      words[c] = load_16_bytes(row + (c * format::lanes_per_row + row_lane) * 16);
    }
  }
};

/* values: the source's row. words: after norm, RoPE and Hadamard. */
template <class format>
__device__ __forceinline__ void transform(const fused_args &args, const fused_lane<format> &lane,
                                          fused_values<format> &values, const uint8_t *angles, bool wanted,
                                          uint4 (&words)[format::chunks]) {
  bool rounds = args.has(KVP_FUSED_ROUND_TO_BF16);
  bool near = near_rope<format>::possible(args);
  near_rope<format> rope;
  rope.fetch(args, angles, wanted && near, lane.row_lane);
  values.normalize(args, lane.weights);
  if (rounds) {
    values.round();
  }
  if (near) {
    rope.rotate(values);
  } else {
    rotate_far(args, values, angles, wanted, lane.row_lane, lane.row_of_warp);
  }
  if (args.has(KVP_FUSED_HADAMARD)) {
    if (rounds) {
      values.round();
    }
    values.hadamard(args.hadamard_factor);
  }
#pragma unroll
  for (int c = 0; c < format::chunks; c++) {
    words[c] = values.chunk[c].rounded();
  }
}

template <class format, bool counted, bool cast_back>
__device__ __forceinline__ void store_fused(const fused_args &args, const fused_lane<format> &lane, uint64_t first,
                                            row_tally &tally) {
  fused_row own = {{record_ignore, 0}, 0};
  if (lane_index() < format::rows_per_pass && first + lane_index() < args.row_count) {
    own = find_fused_row<counted, cast_back>(args, first + lane_index(), format::data_step, tally);
  }
  uint64_t index = first + lane.row_of_warp;
  uint64_t read = index < args.row_count ? index : first; /* what becomes of it goes nowhere */
  row_chunks<format> row;
  lane.read(args.source.base + read * args.source.stride_bytes, row.words);
  record_place place = record_from_lane<format>(own.place, lane.row_of_warp);
  int32_t position = from_lane(own.position, lane.row_of_warp);
  bool wanted = place.data != record_ignore;
  if (!__any_sync(full_warp, wanted)) {
    return;
  }
  fused_values<format> values;
#pragma unroll
  for (int c = 0; c < format::chunks; c++) {
    values.chunk[c] = float_chunk::from(row.words[c]);
  }
  const uint8_t *angles = args.cos_sin.base + (uint64_t)(uint32_t)position * args.cos_sin.stride_bytes;
  transform(args, lane, values, angles, wanted, row.words);
  row_codes<format> made = quantize_row(row, wanted, lane.row_lane, lane.row_of_warp, tally);
  if (place.data >= 0) {
    write_record(args.layer, place, made, lane.row_lane);
  }
  if (cast_back && wanted) {
    write_cast_back(args.cast_back.base + index * args.cast_back.stride_bytes, made, lane.row_lane);
  }
}

template <bool counted> __device__ __forceinline__ void fused_tally_add(const row_tally &tally, kvp_cuda_counts *to) {
  if constexpr (counted) {
    const uint64_t values[] = {tally.nonfinite, tally.saturated, tally.stored, tally.skipped, tally.rejected};
    uint64_t *const targets[] = {&to->rows_nonfinite, &to->groups_saturated, &to->rows_stored, &to->rows_skipped,
                                 &to->rows_rejected};
    counts_add(values, targets);
  } else {
    const uint64_t values[] = {tally.nonfinite, tally.saturated};
    uint64_t *const targets[] = {&to->rows_nonfinite, &to->groups_saturated};
    counts_add(values, targets);
  }
}

template <class format, int ops, bool counted, bool cast_back>
__global__ void __launch_bounds__(fused_threads, fused_blocks)
    fused_store_kernel(const __grid_constant__ fused_batch<ops> batch) {
  const fused_args &args = batch.own();
  chain_begin(args.counts);
  row_tally tally = {};
  fused_lane<format> lane = fused_lane<format>::make(args);
  for (uint64_t first = warp_index() * format::rows_per_pass; first < args.row_count;
       first += warp_count() * format::rows_per_pass) {
    store_fused<format, counted, cast_back>(args, lane, first, tally);
  }
  fused_tally_add<counted>(tally, args.counts);
}

} // namespace kvp

#endif
