/* Bulk copies between global and shared memory, and the barriers that tell when one has come: compute capability 9.0
 * and later; only kernels that leave them out for others may name them. Addresses and sizes are multiples of 16 bytes.
 */
#ifndef KVPOOL_KERNELS_CUDA_PTX_BULK_CUH
#define KVPOOL_KERNELS_CUDA_PTX_BULK_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/cuda/ptx.cuh"

namespace kvp {

__device__ __forceinline__ uint32_t shared_address(const void *shared) {
  return (uint32_t)__cvta_generic_to_shared(shared);
}

/* One arrival completes a phase. Others see the barrier after barrier_publish and an execution barrier. */
__device__ __forceinline__ void barrier_init(uint64_t *barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
/* Also for the engine that copies. */
__device__ __forceinline__ void barrier_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
/* The phase ends when so many bytes have come. */
__device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/* Until the phase of that parity is over; what came is visible then. */
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile("{\n\t.reg .pred done;\n"
               "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}"
               :
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
}

__device__ __forceinline__ void bulk_load(void *shared, const void *from, uint32_t bytes, uint64_t *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

/* What threads wrote to shared memory becomes visible to bulk copies that are asked for behind an execution barrier. */
__device__ __forceinline__ void shared_publish() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
__device__ __forceinline__ void bulk_store(void *to, const void *shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(to), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
/* This thread's bulk stores since the last call are a group. */
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}
/* Until what all of this thread's groups wrote is visible to it. */
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}
/* Until none of this thread's groups reads shared memory. */
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
}

} // namespace kvp

#endif
