/* Device code of the kernel benchmarks, and the ways to build kernels that --variants compares. */
#ifndef KVPOOL_TESTS_BENCH_KERNEL_BENCH_DEVICE_H
#define KVPOOL_TESTS_BENCH_KERNEL_BENCH_DEVICE_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `elements` bell-shaped BF16 numbers around 0. */
cudaError_t kernel_bench_fill_rows(uint8_t *rows, uint64_t elements, cudaStream_t stream);
/* Reads memory and forgets it. */
cudaError_t kernel_bench_read(const uint8_t *memory, uint64_t bytes, cudaStream_t stream);

/* Adds to *sum, in device memory, a number that depends on every word and its place. */
cudaError_t kernel_bench_checksum(const uint8_t *memory, uint64_t bytes, uint64_t *sum, cudaStream_t stream);

/* RMSNorm and RoPE of a fused store's rows as a kernel of its own that writes BF16 rows: what its chain begins with where
 * nothing is fused. Up to 512 elements; arrays are good, sums have another order. */
cudaError_t kernel_bench_norm_rope(const struct kvp_fused_store_params *params, const struct kvp_rows *out,
                                   cudaStream_t stream);

struct kvp_cuda_counts;

/* One build of a kernel; only one of the launchers is there, and it yields cudaErrorNotSupported where the device
 * can't run the kernel. Arrays count as checked; segments of a load are of one length. */
struct kernel_variant {
  const char *text;
  enum kvp_format_id format;
  cudaError_t (*store)(const struct kvp_store_params *params, struct kvp_cuda_counts *counts, cudaStream_t stream);
  cudaError_t (*load)(const struct kvp_load_params *params, struct kvp_cuda_counts *counts, cudaStream_t stream);
};

/* NULL past the last. */
const struct kernel_variant *kernel_variant_get(uint32_t index);

#ifdef __cplusplus
}
#endif

#endif
