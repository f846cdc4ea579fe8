/* See replay_points.h. */
#include "tests/gpu/replay_points.h"

#include "client/kernels/replay.cu"

extern "C" cudaError_t replay_points_load(void) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, (const void *)kvp_replay_begin);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, (const void *)kvp_replay_point) : error;
}

extern "C" cudaError_t replay_points_begin(const struct replay_points *it, cudaStream_t stream) {
  kvp_replay_begin<<<1, 1, 0, stream>>>(kvp_replay_begin_args{it->base, it->points, nullptr});
  return cudaGetLastError();
}

extern "C" cudaError_t replay_points_put(const struct replay_points *it, uint32_t point, bool signals, bool waits,
                                         cudaStream_t stream) {
  kvp_replay_point<<<1, 1, 0, stream>>>(
      kvp_replay_point_args{it->base, signals ? it->start : nullptr, waits ? it->done : nullptr, point,
                            it->deadline_ns, it->problem, (uint64_t)point << 8 | 1, (uint64_t)point << 8 | 2});
  return cudaGetLastError();
}
