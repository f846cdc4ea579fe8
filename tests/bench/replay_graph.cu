/* See replay_graph.h. */
#include "tests/bench/replay_graph.h"

#include <stdio.h>
#include <stdlib.h>

static constexpr uint32_t work_us = 50;
static constexpr uint32_t late_us = 20;
static constexpr int work_threads = 256;
static constexpr uint32_t full_waves = 16;
static constexpr int full_fmas = 40000;

/* A block a multiprocessor, for so many cycles. */
static __global__ void __launch_bounds__(work_threads) work_kernel(uint64_t cycles) {
  int64_t begin = clock64();
  while ((uint64_t)(clock64() - begin) < cycles) {
  }
}

/* As many threads as there is room for, each with fused multiply-adds that depend on each other. */
static __global__ void __launch_bounds__(work_threads, 8) full_kernel(float *out, float factor) {
  float a = (float)threadIdx.x, b = a + 1, c = a + 2, d = a + 3;
  for (int i = 0; i < full_fmas / 4; i++) {
    a = fmaf(a, factor, b);
    b = fmaf(b, factor, c);
    c = fmaf(c, factor, d);
    d = fmaf(d, factor, a);
  }
  if (a + b + c + d == 12345.0f) {
    *out = a;
  }
}

extern "C" void replay_graph_check(cudaError_t error, const char *call, const char *file, int line) {
  if (error != cudaSuccess) {
    (void)fprintf(stderr, "%s:%d: %s: %s: %s\n", file, line, call, cudaGetErrorName(error),
                  cudaGetErrorString(error));
    exit(1);
  }
}

static void work_launch(const replay_graph_bench *bench, cudaStream_t stream, uint32_t us) {
  work_kernel<<<bench->multiprocessors, work_threads, 0, stream>>>(us * bench->cycles_of_us);
  REPLAY_CHECK(cudaGetLastError());
}

/* How many cycles go into a microsecond while the GPU is at work. */
static void calibrate(replay_graph_bench *bench) {
  constexpr uint64_t cycles = 2000000;
  float ms = 0;
  for (int i = 0; i < 20; i++) {
    REPLAY_CHECK(cudaEventRecord(bench->begin, bench->stream));
    work_kernel<<<bench->multiprocessors, work_threads, 0, bench->stream>>>(cycles);
    REPLAY_CHECK(cudaEventRecord(bench->end, bench->stream));
    REPLAY_CHECK(cudaEventSynchronize(bench->end));
    REPLAY_CHECK(cudaEventElapsedTime(&ms, bench->begin, bench->end));
  }
  bench->cycles_of_us = (uint64_t)((double)cycles / (1000.0 * ms));
}

extern "C" void replay_graph_bench_init(struct replay_graph_bench *bench) {
  cudaDeviceProp device;
  REPLAY_CHECK(cudaGetDeviceProperties(&device, 0));
  bench->multiprocessors = (uint32_t)device.multiProcessorCount;
  REPLAY_CHECK(cudaStreamCreateWithFlags(&bench->stream, cudaStreamNonBlocking));
  REPLAY_CHECK(cudaEventCreate(&bench->begin));
  REPLAY_CHECK(cudaEventCreate(&bench->end));
  calibrate(bench);
  printf("%s, %u multiprocessors at %llu MHz\n", device.name, bench->multiprocessors,
         (unsigned long long)bench->cycles_of_us);
}

extern "C" void replay_graph_bench_deinit(struct replay_graph_bench *bench) {
  REPLAY_CHECK(cudaEventDestroy(bench->begin));
  REPLAY_CHECK(cudaEventDestroy(bench->end));
  REPLAY_CHECK(cudaStreamDestroy(bench->stream));
}

static void layer_capture(const replay_graph_bench *bench, const replay_graph_ops *ops, replay_graph_waits waits,
                          void *context, uint32_t layer) {
  cudaStream_t stream = bench->stream;
  bool is_late = waits == REPLAY_WAITS_LATE;
  work_launch(bench, stream, is_late ? work_us - late_us : work_us);
  if (ops->own != nullptr) {
    ops->own(context, stream, layer);
  }
  if (ops->signal != nullptr && waits == REPLAY_WAITS_AT_ONCE) {
    ops->signal_and_wait(context, stream, layer);
  } else if (ops->signal != nullptr) {
    ops->signal(context, stream, layer);
  }
  if (is_late) {
    work_launch(bench, stream, late_us);
    if (ops->wait != nullptr) {
      ops->wait(context, stream, layer);
    }
  }
}

extern "C" cudaGraphExec_t replay_graph_make(const struct replay_graph_bench *bench,
                                             const struct replay_graph_ops *ops, enum replay_graph_waits waits,
                                             void *context) {
  cudaGraph_t graph;
  cudaGraphExec_t made;
  REPLAY_CHECK(cudaStreamBeginCapture(bench->stream, cudaStreamCaptureModeThreadLocal));
  if (ops->begin != nullptr) {
    ops->begin(context, bench->stream);
  }
  for (uint32_t layer = 0; layer < replay_graph_layers; layer++) {
    layer_capture(bench, ops, waits, context, layer);
  }
  if (ops->end != nullptr) {
    ops->end(context, bench->stream);
  }
  REPLAY_CHECK(cudaStreamEndCapture(bench->stream, &graph));
  REPLAY_CHECK(cudaGraphInstantiate(&made, graph, 0));
  REPLAY_CHECK(cudaGraphDestroy(graph));
  REPLAY_CHECK(cudaGraphUpload(made, bench->stream));
  REPLAY_CHECK(cudaStreamSynchronize(bench->stream));
  return made;
}

extern "C" double replay_graph_time(const struct replay_graph_bench *bench, cudaGraphExec_t graph,
                                    void (*before)(void *context), void *context) {
  float ms = 0;
  if (before != nullptr) {
    before(context);
  }
  REPLAY_CHECK(cudaEventRecord(bench->begin, bench->stream));
  REPLAY_CHECK(cudaGraphLaunch(graph, bench->stream));
  REPLAY_CHECK(cudaEventRecord(bench->end, bench->stream));
  REPLAY_CHECK(cudaEventSynchronize(bench->end));
  REPLAY_CHECK(cudaEventElapsedTime(&ms, bench->begin, bench->end));
  return 1000.0 * ms / replay_graph_layers;
}

static int compare(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

extern "C" double replay_graph_percentile(double *values, uint32_t count, double fraction) {
  qsort(values, count, sizeof *values, compare);
  return values[(uint32_t)((count - 1) * fraction)];
}

extern "C" double replay_graph_median(double *values, uint32_t count) {
  return replay_graph_percentile(values, count, 0.5);
}

extern "C" double replay_graph_full_time(const struct replay_graph_bench *bench) {
  float *out = nullptr;
  float ms = 0;
  REPLAY_CHECK(cudaEventRecord(bench->begin, bench->stream));
  full_kernel<<<bench->multiprocessors * 8 * full_waves, work_threads, 0, bench->stream>>>(out, 1.0f);
  REPLAY_CHECK(cudaGetLastError());
  REPLAY_CHECK(cudaEventRecord(bench->end, bench->stream));
  REPLAY_CHECK(cudaEventSynchronize(bench->end));
  REPLAY_CHECK(cudaEventElapsedTime(&ms, bench->begin, bench->end));
  return 1000.0 * ms;
}
