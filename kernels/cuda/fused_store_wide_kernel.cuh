/* fused_store into bf16 regions: rows of any width that is a power of two, a block of threads each, in shared memory.
 * OPS "fused_store".
 *
 * The same order of operations as in fused_store_kernel.cuh, element by element. A row narrower than sixteen elements is
 * one sum. Shared memory: the row, then its partial sums.
 */
#ifndef KVPOOL_KERNELS_CUDA_FUSED_STORE_WIDE_KERNEL_CUH
#define KVPOOL_KERNELS_CUDA_FUSED_STORE_WIDE_KERNEL_CUH

#include <stdint.h>

#include "kernels/cuda/fused_store_kernel.cuh"

namespace kvp {

constexpr uint32_t square_group = 16;
constexpr int wide_threads_max = 512;

inline uint32_t wide_shared_bytes(uint32_t elements) {
  return (elements + (elements + square_group - 1) / square_group) * (uint32_t)sizeof(float);
}
/* A thread for every sum of sixteen. */
inline uint32_t wide_threads(uint32_t elements) {
  uint32_t threads = elements / square_group;
  return threads < lanes_per_warp ? lanes_per_warp : threads < wide_threads_max ? threads : wide_threads_max;
}

/* A row in shared memory; every function is one of all threads and leaves it as all of them see it. */
struct wide_row {
  float *values;
  float *sums;
  uint32_t elements;

  template <bool live> __device__ __forceinline__ void read(const uint8_t *from) const {
    for (uint32_t i = threadIdx.x; i < elements / chunk_elements; i += blockDim.x) {
      const uint8_t *at = from + (uint64_t)i * 16;
      float_chunk chunk = float_chunk::from(live ? load_16_bytes_live(at) : load_16_bytes(at));
#pragma unroll
      for (int k = 0; k < chunk_elements; k++) {
        values[i * chunk_elements + k] = chunk.of[k];
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ float sum_of_squares() const {
    uint32_t group = elements < square_group ? elements : square_group;
    uint32_t groups = elements / group;
    for (uint32_t g = threadIdx.x; g < groups; g += blockDim.x) {
      const float *first = values + g * group;
      float sum = __fmul_rn(first[0], first[0]);
      for (uint32_t i = 1; i < group; i++) {
        sum = __fadd_rn(sum, __fmul_rn(first[i], first[i]));
      }
      sums[g] = sum;
    }
    __syncthreads();
    for (uint32_t stride = 1; stride < groups; stride *= 2) {
      for (uint32_t g = 2 * stride * threadIdx.x; g < groups; g += 2 * stride * blockDim.x) {
        sums[g] = __fadd_rn(sums[g], sums[g + stride]);
      }
      __syncthreads();
    }
    return sums[0];
  }

  __device__ __forceinline__ void normalize(const fused_args &args, bool rounds) const {
    float variance = __fmul_rn(sum_of_squares(), args.mean_factor);
    float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(variance, args.eps)));
    for (uint32_t i = threadIdx.x; i < elements; i += blockDim.x) {
      float weight = __uint_as_float((uint32_t)args.norm_weight[i] << 16);
      float value = __fmul_rn(__fmul_rn(values[i], factor), weight);
      values[i] = rounds ? round_to_bf16(value) : value;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void rotate(const fused_args &args, const float *angles) const {
    uint32_t half = args.rotary_dims / 2;
    float *rotary = values + args.rope_offset;
    bool neox = args.has(KVP_FUSED_NEOX);
    for (uint32_t i = threadIdx.x; i < half; i += blockDim.x) {
      rotate_pair(rotary[neox ? i : 2 * i], rotary[neox ? half + i : 2 * i + 1], angles[i], angles[half + i]);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void hadamard(float factor, bool rounds) const {
    for (uint32_t stride = 1; stride < elements; stride *= 2) {
      for (uint32_t i = threadIdx.x; i < elements / 2; i += blockDim.x) {
        uint32_t low = 2 * i - (i & (stride - 1)); /* i with a zero put in at the stride's bit */
        float a = values[low];
        float b = values[low + stride];
        if (rounds && stride == 1) {
          a = round_to_bf16(a);
          b = round_to_bf16(b);
        }
        values[low] = __fadd_rn(a, b);
        values[low + stride] = __fsub_rn(a, b);
      }
      __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < elements; i += blockDim.x) {
      values[i] = __fmul_rn(values[i], factor);
    }
    __syncthreads();
  }

  /* NULL: nowhere. True: one of the thread's values is not finite. */
  __device__ __forceinline__ bool write(uint8_t *record, uint8_t *back) const {
    bool nonfinite = false;
    for (uint32_t i = threadIdx.x; i < elements / chunk_elements; i += blockDim.x) {
      float_chunk chunk;
#pragma unroll
      for (int k = 0; k < chunk_elements; k++) {
        chunk.of[k] = values[i * chunk_elements + k];
      }
      uint4 words = chunk.rounded();
      if (record != nullptr) {
        store_16_bytes(record + (uint64_t)i * 16, words);
      }
      if (back != nullptr) {
        store_16_bytes(back + (uint64_t)i * 16, words);
      }
      nonfinite = nonfinite || words_nonfinite(words);
    }
    return nonfinite;
  }
};

template <bool live, bool counted, bool cast_back>
__device__ __forceinline__ void store_wide(const fused_args &args, const wide_row &row, uint64_t index,
                                           row_tally &tally) {
  __shared__ fused_row found;
  if (threadIdx.x == 0) {
    found = find_fused_row<counted, cast_back>(args, index, args.elements * 2, tally);
  }
  __syncthreads();
  int64_t data = found.place.data;
  uint64_t position = (uint32_t)found.position;
  __syncthreads(); /* before another row is found */
  if (data == record_ignore) {
    return;
  }
  bool rounds = args.has(KVP_FUSED_ROUND_TO_BF16);
  row.read<live>(args.source.base + index * args.source.stride_bytes);
  row.normalize(args, rounds);
  row.rotate(args, (const float *)(args.cos_sin.base + position * args.cos_sin.stride_bytes));
  if (args.has(KVP_FUSED_HADAMARD)) {
    row.hadamard(args.hadamard_factor, rounds);
  }
  uint8_t *back = cast_back ? args.cast_back.base + index * args.cast_back.stride_bytes : nullptr;
  bool nonfinite = row.write(data >= 0 ? args.layer.base + data : nullptr, back);
  nonfinite = __syncthreads_or(nonfinite) != 0;
  tally.nonfinite += nonfinite && threadIdx.x == 0;
}

template <int ops, bool counted, bool cast_back>
__global__ void __launch_bounds__(wide_threads_max)
    fused_store_wide_kernel(const __grid_constant__ fused_batch<ops> batch) {
  extern __shared__ float shared_floats[];
  const fused_args &args = batch.own();
  chain_begin(args.counts);
  row_tally tally = {};
  wide_row row = {shared_floats, shared_floats + args.elements, args.elements};
  for (uint64_t index = blockIdx.x; index < args.row_count; index += gridDim.x) {
    store_wide<false, counted, cast_back>(args, row, index, tally);
  }
  fused_tally_add<counted>(tally, args.counts);
}

} // namespace kvp

#endif
