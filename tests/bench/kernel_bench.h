/* What GPU benchmarks share: memory for the largest case, data in it, and timing. One thread, one stream.
 *
 * A case is launched once for each of its sets: sets don't share rows or records, and together they are larger than
 * twice the L2 cache (as far as there are enough launches: up to 50). Before each timed run other memory is read, so
 * that nothing of the case is cached. A CUDA error ends the program.
 */
#ifndef KVPOOL_TESTS_BENCH_KERNEL_BENCH_H
#define KVPOOL_TESTS_BENCH_KERNEL_BENCH_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/launch.h"
#include "kernels/ops.h"

enum { kernel_bench_rows_max = 1 << 20, kernel_bench_sets_max = 50, kernel_bench_actions_max = 64 };

#define KERNEL_BENCH_CHECK(call) kernel_bench_check((call), #call, __FILE__, __LINE__)
void kernel_bench_check(cudaError_t error, const char *call, const char *file, int line);

struct kernel_bench {
  cudaStream_t stream;
  cudaEvent_t begin;
  cudaEvent_t end;
  struct cudaDeviceProp device;
  uint8_t *source; /* [kernel_bench_rows_max, 512] BF16 */
  uint8_t *region;
  uint8_t *out;
  uint8_t *scales;
  int32_t *slots;
  struct kvp_segment *segments;
  uint8_t *other; /* read between runs */
  uint64_t other_bytes;
  struct kvp_cuda_counts *counts;
  uint64_t *sum;
};

/* Prints the device; exits when there is none. */
void kernel_bench_init(struct kernel_bench *bench);
void kernel_bench_deinit(struct kernel_bench *bench);

struct kernel_case {
  const struct kvp_format *format;
  uint64_t rows; /* of one launch */
  uint32_t tokens_per_block;
  uint32_t set_count;
  struct kvp_geometry geometry;
  struct kvp_store_params store[kernel_bench_sets_max];
  struct kvp_load_params load[kernel_bench_sets_max];
  uint64_t store_bytes; /* read and written by one launch, metadata apart */
  uint64_t load_bytes;
};

/* Blocks in random order, consecutive tokens in each; every record holds what a store writes. */
void kernel_case_init(const struct kernel_bench *bench, const struct kvp_format *format, uint64_t rows,
                      uint32_t tokens_per_block, struct kernel_case *out);

/* Launches something for one set. */
struct kernel_action {
  cudaError_t (*launch)(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                        const void *context);
  const void *context;
  double median_us; /* out: of one launch */
};

cudaError_t kernel_action_store(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                                const void *context);
cudaError_t kernel_action_load(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                               const void *context);
/* cudaMemcpyAsync that reads and writes as many bytes as a launch: context is that number, a uint64_t. */
cudaError_t kernel_action_copy(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                               const void *context);
cudaError_t kernel_action_empty(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                                const void *context);

/* What an action makes of the case, whatever was there before: a checksum of all its output, records or rows. False:
 * the device can't run it. */
bool kernel_bench_output(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                         const struct kernel_action *action, bool records, uint64_t *out);

/* GPU time, actions interleaved: small ones as graphs of all their sets. */
void kernel_bench_time(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                       struct kernel_action *actions, uint32_t action_count, uint32_t repeats);
/* CPU time from launch to the end of a synchronisation, actions interleaved. */
void kernel_bench_time_sync(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                            struct kernel_action *actions, uint32_t action_count, uint32_t repeats);

#endif
