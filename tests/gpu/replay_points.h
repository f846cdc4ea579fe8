/* The library's kernels of captured graphs, launched by a test without the library. */
#ifndef KVPOOL_TESTS_GPU_REPLAY_POINTS_H
#define KVPOOL_TESTS_GPU_REPLAY_POINTS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct replay_points {
  uint64_t *start; /* device memory, a word each */
  uint64_t *done;
  uint64_t *base;
  uint64_t points;
  uint64_t deadline_ns;
  uint64_t *problem; /* registered host memory */
};

/* Before the first launch. */
cudaError_t replay_points_load(void);
cudaError_t replay_points_begin(const struct replay_points *it, cudaStream_t stream);
cudaError_t replay_points_put(const struct replay_points *it, uint32_t point, bool signals, bool waits,
                              cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
