/* Instructions that C++ has no name for, one function each: memory accesses by a path or in an order of their own,
 * number conversions, the clock. Bulk copies are in ptx_bulk.cuh; nothing else in this directory has inline assembly.
 */
#ifndef KVPOOL_KERNELS_CUDA_PTX_CUH
#define KVPOOL_KERNELS_CUDA_PTX_CUH

#include <cuda_runtime.h>
#include <stdint.h>

namespace kvp {

/* Memory that no one writes while the kernel runs. */
__device__ __forceinline__ uint4 load_16_bytes(const void *from) {
  uint4 v;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

__device__ __forceinline__ uint2 load_8_bytes(const void *from) {
  uint2 v;
  asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}

__device__ __forceinline__ uint32_t load_4_bytes(const void *from) {
  uint32_t v;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

__device__ __forceinline__ uint32_t load_byte(const void *from) {
  uint32_t v;
  asm("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

__device__ __forceinline__ void store_16_bytes(void *to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_8_bytes(void *to, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(to), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_4_bytes(void *to, uint32_t v) {
  asm volatile("st.global.u32 [%0], %1;" : : "l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ void store_byte(void *to, uint32_t v) {
  asm volatile("st.global.u8 [%0], %1;" : : "l"(to), "r"(v) : "memory");
}

/* Memory that others write while the kernel runs, but not now: from cache lines that were fetched after the last
 * acquire. */
__device__ __forceinline__ uint4 load_16_bytes_live(const void *from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_4_bytes_live(const void *from) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

/* Memory that others may write at any time: one access, whatever the compiler would like. */
__device__ __forceinline__ int32_t read_once(const int32_t *from) {
  int32_t v;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

/* The same of numbers that many threads of a block read: it may come from the multiprocessor's own cache. */
__device__ __forceinline__ int32_t read_once_cached(const int32_t *from) {
  int32_t v;
  asm volatile("ld.relaxed.cta.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

/* Four numbers, each of them once. */
__device__ __forceinline__ int4 read_once_4(const int32_t *from) {
  int4 v;
  asm volatile("ld.relaxed.sys.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ uint64_t read_once(const uint64_t *from) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

/* What this thread wrote or saw written is visible to everybody who sees the value. */
__device__ __forceinline__ void store_release_system(uint64_t *to, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(v) : "memory");
}

/* The same of a value that is not below what stands there. */
__device__ __forceinline__ void raise_release_system(uint64_t *to, uint64_t v) {
  asm volatile("red.release.sys.global.max.u64 [%0], %1;" : : "l"(to), "l"(v) : "memory");
}

/* What was written before the value was is seen from here on, by the block behind its next barrier. */
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t *from) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

/* The same among blocks of a device. */
__device__ __forceinline__ uint64_t load_acquire_device(const uint64_t *from) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

/* Among blocks of a device; returns what stood there before. */
__device__ __forceinline__ uint64_t add_acquire_release(uint64_t *to, uint64_t v) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(v) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t raise_acquire_release(uint64_t *to, uint64_t v) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.max.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(v) : "memory");
  return before;
}

/* So that a thread that looks again and again leaves the others of its multiprocessor their turns. */
__device__ __forceinline__ void pause_ns(uint32_t ns) {
  asm volatile("nanosleep.u32 %0;" : : "r"(ns) : "memory");
}

__device__ __forceinline__ uint64_t global_timer_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v) : : "memory");
  return v;
}

/* Kernels that follow each other closely: the next one may begin when every block has called the second function, and
 * goes on from its call of the first when all before it have ended and what they wrote is seen. */
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

/* The same number, of which the compiler knows nothing: it stays in a register. */
__device__ __forceinline__ float held(float v) {
  asm volatile("" : "+f"(v));
  return v;
}

/* At most one unit in the last place off; for normal numbers whose reciprocal is normal. */
__device__ __forceinline__ float reciprocal_approximate(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

#if __CUDA_ARCH__ >= 890
#define KVP_HAVE_E4M3_CONVERSIONS 1

/* Two e4m3 codes, nearest even, saturated at 448; low byte: low. */
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

/* Two e4m3 codes as float16, exactly; NaN for NaN. */
__device__ __forceinline__ uint32_t f16_pair_of_e4m3(uint32_t codes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16_t)codes));
  return pair;
}

__device__ __forceinline__ float2 f32_pair_of_f16(uint32_t pair) {
  float2 v;
  asm("{\n\t.reg .f16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}
#endif

/* Two float32 to BF16, nearest even; NaN becomes 0x7FFF. */
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/* Products of two BF16 pairs, each rounded once. sm_80 has the fused form only: adding -0 changes no product. */
__device__ __forceinline__ uint32_t bf16_pair_multiply(uint32_t a, uint32_t b) {
  uint32_t product;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return product;
}

/* a * b + c of two BF16 pairs, rounded once. */
__device__ __forceinline__ uint32_t bf16_pair_multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

} // namespace kvp

#endif
