/* fused_store: BF16 rows through RMSNorm, RoPE and a Walsh-Hadamard transform into the records their slots name. OPS
 * "fused_store".
 *
 * A warp has one row of 512 elements, or four of 128, in registers from its source to its record: a lane's strip is the
 * sixteen elements whose squares are added one after the other. All sums have the order OPS gives them, every operation
 * is rounded on its own: neither the number of rows nor the machine shows in a single bit. Pairs of RoPE meet in shared
 * memory, wherever they are. A warp reads the slots and positions of up to 32 rows at once, and each row while the one
 * before is at work: issuing instructions is what takes the time here, not memory.
 */
#ifndef KVPOOL_KERNELS_CUDA_FUSED_STORE_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_FUSED_STORE_KERNEL_CUH

#include <assert.h>
#include <math.h>
#include <stdint.h>

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/row_store.cuh"

namespace kvp {

constexpr int fused_threads = 128;
constexpr int fused_blocks = 5; /* of a multiprocessor at least: rows enough to hide their way through memory */
constexpr int fused_warps = fused_threads / lanes_per_warp;
constexpr int fused_pairs_ahead = 32; /* of a row */

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
  uint32_t warp_rows; /* of a warp at a time */
  uint32_t elements;  /* bf16 only */
  uint32_t rotary_dims;
  uint32_t rope_offset;
  float eps;
  float mean_factor;     /* 1 / elements */
  float hadamard_factor; /* 1 / sqrt(elements) */
  uint32_t flags;        /* kvp_fused_flag */

  __device__ __forceinline__ bool has(kvp_fused_flag flag) const { return (flags & (uint32_t)flag) != 0; }

  static fused_args make(const kvp_fused_store_params &params, kvp_cuda_counts *counts, uint32_t warp_rows) {
    uint32_t elements = params.store.layer.geometry->sizes.elements;
    assert((elements & (elements - 1)) == 0 && elements >= 8 && elements <= kvp_cuda_fused_elements_max);
    assert(params.store.gather == nullptr);
    return fused_args{layer_layout::make(params.store.layer),
                      params.store.source,
                      params.store.cast_back,
                      params.store.slots,
                      params.positions,
                      params.norm_weight,
                      params.cos_sin,
                      params.store.row_count,
                      params.position_count,
                      params.store.check,
                      counts,
                      warp_rows,
                      elements,
                      params.rotary_dims,
                      params.rope_offset,
                      params.eps,
                      1.0f / (float)elements,
                      1.0f / sqrtf((float)elements),
                      params.flags};
  }
};

/* bf16 of another width than the default: fused_store_wide_kernel.cuh. */
inline bool fused_is_wide(const kvp_geometry &geometry) {
  return geometry.format->id == KVP_FORMAT_BF16 && geometry.sizes.elements != format_bf16_512::elements;
}

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

/* The lane's, of rows [first, first + count), count at most 32. */
template <bool counted, bool cast_back>
__device__ __forceinline__ fused_row find_own_row(const fused_args &args, uint64_t first, uint32_t count,
                                                  uint32_t data_step, row_tally &tally) {
  if ((uint32_t)lane_index() < count) {
    return find_fused_row<counted, cast_back>(args, first + lane_index(), data_step, tally);
  }
  return fused_row{{record_ignore, 0}, 0};
}

/* How many rows of a warp's pass are there, which begins with row `first`. */
__device__ __forceinline__ uint32_t fused_pass_rows(const fused_args &args, uint64_t first) {
  uint64_t left = args.row_count - first;
  return left < args.warp_rows ? (uint32_t)left : args.warp_rows;
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

__device__ __forceinline__ float round_to_bf16(float value) {
  return f32_of_low_bf16(bf16_pair(value, value));
}

/* A lane's strip. */
template <class format> struct fused_values {
  float of[strip_elements];

  static __device__ __forceinline__ fused_values from(const uint4 (&words)[strip_chunks]) {
    fused_values values;
#pragma unroll
    for (int i = 0; i < strip_elements; i++) {
      values.of[i] = float_chunk::from(words[i / chunk_elements]).of[i % chunk_elements];
    }
    return values;
  }
  __device__ __forceinline__ void round_into(uint4 (&words)[strip_chunks]) const {
#pragma unroll
    for (int chunk = 0; chunk < strip_chunks; chunk++) {
      const float *first = of + chunk * chunk_elements;
      words[chunk] =
          float_chunk{{first[0], first[1], first[2], first[3], first[4], first[5], first[6], first[7]}}.rounded();
    }
  }

  /* In registers as they are: they are not made anew from row to row. */
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int i = 0; i < strip_elements; i++) {
      of[i] = held(of[i]);
    }
  }

  __device__ __forceinline__ float sum_of_squares() const {
    float sum = __fmul_rn(of[0], of[0]);
#pragma unroll
    for (int i = 1; i < strip_elements; i++) {
      sum = __fadd_rn(sum, __fmul_rn(of[i], of[i]));
    }
#pragma unroll
    for (int distance = 1; distance < strip_shape<format>::lanes; distance *= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(full_warp, sum, distance));
    }
    return sum;
  }

  __device__ __forceinline__ void normalize(const fused_args &args, const fused_values &weights) {
    float variance = __fmul_rn(sum_of_squares(), args.mean_factor);
    float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(variance, args.eps)));
#pragma unroll
    for (int i = 0; i < strip_elements; i++) {
      of[i] = __fmul_rn(__fmul_rn(of[i], factor), weights.of[i]);
    }
  }

  /* Strides below sixteen are inside a strip, then come those from lane to lane. Of two the upper one is subtracted: a
   * product with -1 is exact. */
  __device__ __forceinline__ void hadamard(float factor) {
#pragma unroll
    for (int stride = 1; stride < strip_elements; stride *= 2) {
#pragma unroll
      for (int i = 0; i < strip_elements; i++) {
        if ((i & stride) == 0) {
          float a = of[i];
          float b = of[i + stride];
          of[i] = __fadd_rn(a, b);
          of[i + stride] = __fsub_rn(a, b);
        }
      }
    }
#pragma unroll
    for (int distance = 1; distance < strip_shape<format>::lanes; distance *= 2) {
      float sign = (lane_index() & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < strip_elements; i++) {
        of[i] = __fmaf_rn(of[i], sign, __shfl_xor_sync(full_warp, of[i], distance));
      }
    }
#pragma unroll
    for (int i = 0; i < strip_elements; i++) {
      of[i] = __fmul_rn(of[i], factor);
    }
  }
};

/* ---- RoPE ---- */

__device__ __forceinline__ void rotate_pair(float &first, float &second, float cosine, float sine) {
  float a = __fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine));
  float b = __fadd_rn(__fmul_rn(first, sine), __fmul_rn(second, cosine));
  first = a;
  second = b;
}

/* Pairs are dealt out to the lanes of a row one after the other, whatever strips their elements are in. The angles of a
 * lane's first pairs, all there are where 64 dimensions are rotated, are fetched early. */
template <class format> struct fused_angles {
  static constexpr int lanes = strip_shape<format>::lanes;
  static constexpr int ahead = fused_pairs_ahead / lanes;
  float cosine[ahead];
  float sine[ahead];

  static __device__ __forceinline__ const float *row_of(const fused_args &args, int32_t position) {
    return (const float *)(args.cos_sin.base + (uint64_t)(uint32_t)position * args.cos_sin.stride_bytes);
  }
  static __device__ __forceinline__ uint32_t read_angle(const float *from) {
    return format::live ? load_4_bytes_live(from) : load_4_bytes(from);
  }
  /* Not followed where nothing is wanted. */
  __device__ __forceinline__ void fetch(const fused_args &args, int32_t position, bool wanted, int strip) {
    const uint32_t half = args.rotary_dims / 2;
    const float *row = row_of(args, position);
#pragma unroll
    for (int k = 0; k < ahead; k++) {
      uint32_t pair = k * lanes + strip;
      cosine[k] = 0;
      sine[k] = 0;
      if (wanted && pair < half) {
        cosine[k] = __uint_as_float(read_angle(row + pair));
        sine[k] = __uint_as_float(read_angle(row + half + pair));
      }
    }
  }
};

/* A number of a row in shared memory: BF16, or float32 where nothing is rounded in between. */
__device__ __forceinline__ float float_of(const uint16_t &number) {
  return __uint_as_float((uint32_t)number << 16);
}
__device__ __forceinline__ float float_of(const float &number) {
  return number;
}
__device__ __forceinline__ void set_number(uint16_t &number, float value) {
  number = (uint16_t)bf16_pair(value, value);
}
__device__ __forceinline__ void set_number(float &number, float value) {
  number = value;
}

/* Shared memory of a warp: all elements that it has at once. */
constexpr int fused_warp_elements = lanes_per_warp * strip_elements;
struct __align__(16) fused_warp_rows {
  float of[fused_warp_elements];
};

/* Lane by lane, what doesn't depend on the row. */
template <class format> struct fused_lane : strip_lane {
  fused_values<format> weights;
  bool rotates; /* some of the strip's elements */
  void *shared; /* the row's */

  static __device__ __forceinline__ fused_lane make(const fused_args &args, fused_warp_rows *rows) {
    static_assert(strip_shape<format>::rows * format::elements == fused_warp_elements, "a warp's rows");
    fused_lane lane;
    (strip_lane &)lane = strip_lane::make<format>();
    uint4 words[strip_chunks];
    read_strip<format::live>((const uint8_t *)args.norm_weight, lane.strip, words);
    lane.weights = fused_values<format>::from(words);
    lane.weights.hold();
    uint32_t begin = (uint32_t)lane.strip * strip_elements;
    lane.rotates = begin < args.rope_offset + args.rotary_dims && args.rope_offset < begin + strip_elements;
    lane.shared = rows[threadIdx.x / lanes_per_warp].of + lane.row * format::elements;
    return lane;
  }
};

/* A row's pairs in shared memory. */
template <class number> struct rotary_pairs {
  number *first;
  uint32_t step;  /* from pair to pair, */
  uint32_t other; /* and from one of a pair to the other */

  __device__ __forceinline__ rotary_pairs(const fused_args &args, void *row) {
    bool neox = args.has(KVP_FUSED_NEOX);
    first = (number *)row + args.rope_offset;
    step = neox ? 1 : 2;
    other = neox ? args.rotary_dims / 2 : 1;
  }
  __device__ __forceinline__ void rotate(uint32_t pair, float cosine, float sine) const {
    number *at = first + pair * step;
    float a = float_of(at[0]);
    float b = float_of(at[other]);
    rotate_pair(a, b, cosine, sine);
    set_number(at[0], a);
    set_number(at[other], b);
  }
};

/* Whole warp: rotates the pairs of rows whose strips lie in shared memory. Pairs whose angles were not fetched early read
 * them here; not followed where nothing is wanted. */
template <class format, class number>
__device__ __forceinline__ void rotate_shared(const fused_args &args, const fused_lane<format> &lane,
                                              const fused_angles<format> &angles, int32_t position, bool wanted) {
  const rotary_pairs<number> pairs(args, lane.shared);
  const uint32_t half = args.rotary_dims / 2;
  __syncwarp();
#pragma unroll
  for (int k = 0; k < fused_angles<format>::ahead; k++) {
    uint32_t pair = k * fused_angles<format>::lanes + lane.strip;
    if (pair < half) {
      pairs.rotate(pair, angles.cosine[k], angles.sine[k]);
    }
  }
  if (half > fused_pairs_ahead) {
    const float *row = fused_angles<format>::row_of(args, position);
#pragma unroll 1
    for (uint32_t pair = fused_pairs_ahead + lane.strip; wanted && pair < half; pair += fused_angles<format>::lanes) {
      pairs.rotate(pair, row[pair], row[half + pair]);
    }
  }
  __syncwarp();
}

/* Rows that are BF16 after every step. */
template <class format>
__device__ __forceinline__ void rotate_words(const fused_args &args, const fused_lane<format> &lane,
                                             const fused_angles<format> &angles, int32_t position, bool wanted,
                                             uint4 (&words)[strip_chunks]) {
  uint4 *own = (uint4 *)lane.shared + lane.strip * strip_chunks;
  if (lane.rotates) {
    own[0] = words[0];
    own[1] = words[1];
  }
  rotate_shared<format, uint16_t>(args, lane, angles, position, wanted);
  if (lane.rotates) {
    words[0] = own[0];
    words[1] = own[1];
  }
}

template <class format>
__device__ __forceinline__ void rotate_floats(const fused_args &args, const fused_lane<format> &lane,
                                              const fused_angles<format> &angles, int32_t position, bool wanted,
                                              fused_values<format> &values) {
  float *own = (float *)lane.shared + lane.strip * strip_elements;
  if (lane.rotates) {
#pragma unroll
    for (int i = 0; i < strip_elements; i++) {
      own[i] = values.of[i];
    }
  }
  rotate_shared<format, float>(args, lane, angles, position, wanted);
  if (lane.rotates) {
#pragma unroll
    for (int i = 0; i < strip_elements; i++) {
      values.of[i] = own[i];
    }
  }
}

/* ---- the kernel ---- */

/* Norm, RoPE and Hadamard. values: of the source, spent afterwards. */
template <class format>
__device__ __forceinline__ void transform(const fused_args &args, const fused_lane<format> &lane,
                                          const fused_angles<format> &angles, int32_t position, bool wanted,
                                          fused_values<format> &values, uint4 (&words)[strip_chunks]) {
  values.normalize(args, lane.weights);
  if (!args.has(KVP_FUSED_ROUND_TO_BF16)) {
    if (args.rotary_dims != 0) {
      rotate_floats(args, lane, angles, position, wanted, values);
    }
    if (args.has(KVP_FUSED_HADAMARD)) {
      values.hadamard(args.hadamard_factor);
    }
    values.round_into(words);
    return;
  }
  values.round_into(words);
  if (args.rotary_dims != 0) {
    rotate_words(args, lane, angles, position, wanted, words);
  }
  if (args.has(KVP_FUSED_HADAMARD)) {
    values = fused_values<format>::from(words);
    values.hadamard(args.hadamard_factor);
    values.round_into(words);
  }
}

/* A row as it comes: the next one's is asked for as soon as this one's words were taken. */
template <class format> struct row_ahead {
  uint4 words[strip_chunks];
  fused_angles<format> angles;
  record_place place;
  int32_t position;

  /* Row first + of_warp, of those whose places and positions the lanes hold in `own`. A row that nothing becomes of
   * isn't read. */
  __device__ __forceinline__ void fetch(const fused_args &args, const fused_lane<format> &lane, const uint8_t *from,
                                        int of_warp, const fused_row &own) {
    place = record_from_lane<format>(own.place, of_warp);
    position = from_lane(own.position, of_warp);
    bool wanted = place.data != record_ignore;
    angles.fetch(args, position, wanted, lane.strip);
    words[0] = make_uint4(0, 0, 0, 0);
    words[1] = make_uint4(0, 0, 0, 0);
    if (wanted) {
      read_strip<format::live>(from, lane.strip, words);
    }
  }
};

template <class format, bool cast_back>
__device__ __forceinline__ void finish_row(const fused_args &args, const fused_lane<format> &lane, uint64_t row,
                                           const record_place &place, const uint4 (&words)[strip_chunks],
                                           row_tally &tally) {
  bool wanted = place.data != record_ignore;
  uint8_t *back = args.cast_back.base + row * args.cast_back.stride_bytes;
  if constexpr (format::quantized) {
    row_strip<format> strip = {{words[0], words[1]}, 0};
    strip_codes<format> made = quantize_strip(strip, wanted, lane, tally);
    if (place.data >= 0) {
      write_record(args.layer, place, made, lane.strip);
    }
    if (cast_back && wanted) {
      write_cast_back(back, made, lane.strip);
    }
  } else {
    bool nonfinite = words_nonfinite(words[0]) || words_nonfinite(words[1]);
    if (__any_sync(full_warp, nonfinite)) {
      count_nonfinite<format>(nonfinite, wanted, lane, tally);
    }
    if (place.data >= 0) {
      write_strip(args.layer.base + place.data, lane.strip, words);
    }
    if (cast_back && wanted) {
      write_strip(back, lane.strip, words);
    }
  }
}

/* Rows [first, first + count), which the lanes have found. */
template <class format, bool cast_back>
__device__ __forceinline__ void store_fused(const fused_args &args, const fused_lane<format> &lane, uint64_t first,
                                            uint32_t count, const fused_row &own, row_tally &tally) {
  constexpr uint32_t rows = strip_shape<format>::rows;
  const uint8_t *from = args.source.base + (first + lane.row) * args.source.stride_bytes;
  row_ahead<format> ahead;
  ahead.fetch(args, lane, from, lane.row, own);
#pragma unroll 1
  for (uint32_t done = 0; done < count; done += rows) {
    fused_values<format> values = fused_values<format>::from(ahead.words);
    fused_angles<format> angles = ahead.angles;
    record_place place = ahead.place;
    int32_t position = ahead.position;
    from += rows * args.source.stride_bytes;
    if (done + rows < count) {
      ahead.fetch(args, lane, from, (int)(done + rows) + lane.row, own);
    }
    bool wanted = place.data != record_ignore;
    if (__any_sync(full_warp, wanted)) {
      uint4 words[strip_chunks];
      transform(args, lane, angles, position, wanted, values, words);
      finish_row<format, cast_back>(args, lane, first + done + lane.row, place, words, tally);
    }
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

/* args.warp_rows: at most 32, a multiple of the rows that a warp has at once. */
template <class format, int ops, bool counted, bool cast_back>
__global__ void __launch_bounds__(fused_threads, fused_blocks)
    fused_store_kernel(const __grid_constant__ fused_batch<ops> batch) {
  const fused_args &args = batch.own();
  chain_begin(args.counts);
  __shared__ fused_warp_rows rows[fused_warps];
  row_tally tally = {};
  fused_lane<format> lane = fused_lane<format>::make(args, rows);
  for (uint64_t first = warp_index() * args.warp_rows; first < args.row_count;
       first += warp_count() * args.warp_rows) {
    uint32_t count = fused_pass_rows(args, first);
    fused_row own = find_own_row<counted, cast_back>(args, first, count, format::data_step, tally);
    store_fused<format, cast_back>(args, lane, first, count, own, tally);
  }
  fused_tally_add<counted>(tally, args.counts);
}

} // namespace kvp

#endif
