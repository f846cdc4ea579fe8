/* See kernel_bench.h: memory, timing, actions. */
#include "tests/bench/kernel_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/bench/kernel_bench_device.h"

enum { row_bytes_max = 1024, block_room_bytes = 64 << 20, repeats_max = 1024, graph_case_bytes_max = 64 << 20 };

void kernel_bench_check(cudaError_t error, const char *call, const char *file, int line) {
  if (error != cudaSuccess) {
    (void)fprintf(stderr, "%s:%d: %s: %s (%s)\n", file, line, call, cudaGetErrorName(error),
                  cudaGetErrorString(error));
    exit(1);
  }
}

static void *allocate(uint64_t bytes) {
  void *memory;
  KERNEL_BENCH_CHECK(cudaMalloc(&memory, bytes));
  return memory;
}

void kernel_bench_init(struct kernel_bench *bench) {
  int device_count = 0;
  cudaError_t error = cudaGetDeviceCount(&device_count);
  if (error != cudaSuccess || device_count == 0) {
    (void)fprintf(stderr, "no GPU: %s\n", cudaGetErrorString(error));
    exit(1);
  }
  int driver = 0;
  KERNEL_BENCH_CHECK(cudaSetDevice(0));
  KERNEL_BENCH_CHECK(cudaDriverGetVersion(&driver));
  KERNEL_BENCH_CHECK(cudaGetDeviceProperties(&bench->device, 0));
  printf("%s, compute %d.%d, %d multiprocessors, L2 %d MiB, driver for CUDA %d.%d\n", bench->device.name,
         bench->device.major, bench->device.minor, bench->device.multiProcessorCount, bench->device.l2CacheSize >> 20,
         driver / 1000, driver % 1000 / 10);
  KERNEL_BENCH_CHECK(kvp_cuda_kernels_load());
  KERNEL_BENCH_CHECK(cudaStreamCreateWithFlags(&bench->stream, cudaStreamNonBlocking));
  KERNEL_BENCH_CHECK(cudaEventCreate(&bench->begin));
  KERNEL_BENCH_CHECK(cudaEventCreate(&bench->end));
  uint64_t rows_bytes = (uint64_t)kernel_bench_rows_max * row_bytes_max;
  bench->source = allocate(rows_bytes);
  bench->region = allocate(rows_bytes + block_room_bytes);
  bench->out = allocate(rows_bytes);
  bench->scales = allocate((uint64_t)kernel_bench_rows_max * 4);
  bench->slots = allocate((uint64_t)kernel_bench_rows_max * sizeof(int32_t));
  bench->segments = allocate((uint64_t)kernel_bench_rows_max * sizeof(struct kvp_segment));
  bench->other_bytes = 4 * (uint64_t)bench->device.l2CacheSize;
  bench->other = allocate(bench->other_bytes);
  bench->counts = allocate(sizeof(struct kvp_cuda_counts));
  bench->sum = allocate(sizeof(uint64_t));
  KERNEL_BENCH_CHECK(cudaMemset(bench->counts, 0, sizeof(struct kvp_cuda_counts)));
  KERNEL_BENCH_CHECK(cudaMemset(bench->other, 1, bench->other_bytes));
  KERNEL_BENCH_CHECK(kernel_bench_fill_rows(bench->source, rows_bytes / 2, bench->stream));
  KERNEL_BENCH_CHECK(cudaStreamSynchronize(bench->stream));
}

void kernel_bench_deinit(struct kernel_bench *bench) {
  KERNEL_BENCH_CHECK(cudaFree(bench->source));
  KERNEL_BENCH_CHECK(cudaFree(bench->region));
  KERNEL_BENCH_CHECK(cudaFree(bench->out));
  KERNEL_BENCH_CHECK(cudaFree(bench->scales));
  KERNEL_BENCH_CHECK(cudaFree(bench->slots));
  KERNEL_BENCH_CHECK(cudaFree(bench->segments));
  KERNEL_BENCH_CHECK(cudaFree(bench->other));
  KERNEL_BENCH_CHECK(cudaFree(bench->counts));
  KERNEL_BENCH_CHECK(cudaFree(bench->sum));
  KERNEL_BENCH_CHECK(cudaEventDestroy(bench->begin));
  KERNEL_BENCH_CHECK(cudaEventDestroy(bench->end));
  KERNEL_BENCH_CHECK(cudaStreamDestroy(bench->stream));
}

cudaError_t kernel_action_store(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                                const void *context) {
  (void)context;
  return kvp_cuda_store_launch(&bench_case->store[set], bench->counts, bench->stream);
}

cudaError_t kernel_action_load(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                               const void *context) {
  (void)context;
  return kvp_cuda_load_launch(&bench_case->load[set], bench->counts, bench->stream);
}

cudaError_t kernel_action_copy(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                               const void *context) {
  (void)bench_case;
  uint64_t bytes = *(const uint64_t *)context / 2;
  uint64_t at = set * ((bytes + 255) / 256 * 256);
  return cudaMemcpyAsync(bench->out + at, bench->source + at, bytes, cudaMemcpyDeviceToDevice, bench->stream);
}

cudaError_t kernel_action_empty(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                                const void *context) {
  (void)bench_case;
  (void)set;
  (void)context;
  return kvp_cuda_empty_launch(NULL, bench->stream);
}

static void add_output(const struct kernel_bench *bench, uint8_t *memory, uint64_t bytes, bool fill) {
  const int other = 0x5A;
  if (fill) {
    KERNEL_BENCH_CHECK(cudaMemsetAsync(memory, other, bytes, bench->stream));
  } else {
    KERNEL_BENCH_CHECK(kernel_bench_checksum(memory, bytes, bench->sum, bench->stream));
  }
}

/* Fills the output of all sets with something else, or adds it to the sum. */
static void each_output(const struct kernel_bench *bench, const struct kernel_case *bench_case, bool records,
                        bool fill) {
  const struct kvp_geometry *geometry = &bench_case->geometry;
  uint64_t rows = bench_case->set_count * bench_case->rows;
  if (records) {
    add_output(bench, bench->region, geometry->num_blocks * geometry->block_stride_bytes, fill);
  } else {
    add_output(bench, bench->out, rows * geometry->sizes.loaded_row_bytes, fill);
    add_output(bench, bench->scales, rows * geometry->sizes.loaded_scale_bytes, fill);
  }
}

bool kernel_bench_output(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                         const struct kernel_action *action, bool records, uint64_t *out) {
  each_output(bench, bench_case, records, true);
  for (uint32_t set = 0; set < bench_case->set_count; set++) {
    cudaError_t error = action->launch(bench, bench_case, set, action->context);
    if (error == cudaErrorNotSupported) {
      return false;
    }
    KERNEL_BENCH_CHECK(error);
  }
  KERNEL_BENCH_CHECK(cudaMemsetAsync(bench->sum, 0, sizeof(uint64_t), bench->stream));
  each_output(bench, bench_case, records, false);
  KERNEL_BENCH_CHECK(cudaMemcpyAsync(out, bench->sum, sizeof(uint64_t), cudaMemcpyDeviceToHost, bench->stream));
  KERNEL_BENCH_CHECK(cudaStreamSynchronize(bench->stream));
  return true;
}

static int compare_doubles(const void *a, const void *b) {
  double left = *(const double *)a;
  double right = *(const double *)b;
  return (left > right) - (left < right);
}

static double median(double *values, uint32_t count) {
  qsort(values, count, sizeof(values[0]), compare_doubles);
  return values[count / 2];
}

static void launch_sets(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                        const struct kernel_action *action) {
  for (uint32_t set = 0; set < bench_case->set_count; set++) {
    KERNEL_BENCH_CHECK(action->launch(bench, bench_case, set, action->context));
  }
}

static cudaGraphExec_t record(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                              const struct kernel_action *action) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  KERNEL_BENCH_CHECK(cudaStreamBeginCapture(bench->stream, cudaStreamCaptureModeThreadLocal));
  launch_sets(bench, bench_case, action);
  KERNEL_BENCH_CHECK(cudaStreamEndCapture(bench->stream, &graph));
  KERNEL_BENCH_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  KERNEL_BENCH_CHECK(cudaGraphDestroy(graph));
  return executable;
}

/* Microseconds of all sets. */
static double run_once(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                       const struct kernel_action *action, cudaGraphExec_t graph) {
  KERNEL_BENCH_CHECK(kernel_bench_read(bench->other, bench->other_bytes, bench->stream));
  KERNEL_BENCH_CHECK(cudaEventRecord(bench->begin, bench->stream));
  if (graph != NULL) {
    KERNEL_BENCH_CHECK(cudaGraphLaunch(graph, bench->stream));
  } else {
    launch_sets(bench, bench_case, action);
  }
  KERNEL_BENCH_CHECK(cudaEventRecord(bench->end, bench->stream));
  KERNEL_BENCH_CHECK(cudaEventSynchronize(bench->end));
  float ms;
  KERNEL_BENCH_CHECK(cudaEventElapsedTime(&ms, bench->begin, bench->end));
  return (double)ms * 1e3;
}

void kernel_bench_time(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                       struct kernel_action *actions, uint32_t action_count, uint32_t repeats) {
  static double times[kernel_bench_actions_max][repeats_max];
  cudaGraphExec_t graphs[kernel_bench_actions_max] = {0};
  bool small = bench_case->set_count > 1 && bench_case->store_bytes < graph_case_bytes_max;
  for (uint32_t i = 0; i < action_count; i++) {
    graphs[i] = small ? record(bench, bench_case, &actions[i]) : NULL;
    (void)run_once(bench, bench_case, &actions[i], graphs[i]);
  }
  for (uint32_t repeat = 0; repeat < repeats; repeat++) {
    for (uint32_t i = 0; i < action_count; i++) {
      times[i][repeat] = run_once(bench, bench_case, &actions[i], graphs[i]) / bench_case->set_count;
    }
  }
  for (uint32_t i = 0; i < action_count; i++) {
    actions[i].median_us = median(times[i], repeats);
    if (graphs[i] != NULL) {
      KERNEL_BENCH_CHECK(cudaGraphExecDestroy(graphs[i]));
    }
  }
}

static double now_us(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

void kernel_bench_time_sync(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                            struct kernel_action *actions, uint32_t action_count, uint32_t repeats) {
  static double times[kernel_bench_actions_max][repeats_max];
  const uint32_t warm_up = 20;
  for (uint32_t repeat = 0; repeat < warm_up + repeats; repeat++) {
    uint32_t set = repeat % bench_case->set_count;
    for (uint32_t i = 0; i < action_count; i++) {
      double begin = now_us();
      kvp_cuda_launch_alone(); /* as the executor does for a stream with nothing on it */
      KERNEL_BENCH_CHECK(actions[i].launch(bench, bench_case, set, actions[i].context));
      KERNEL_BENCH_CHECK(cudaStreamSynchronize(bench->stream));
      if (repeat >= warm_up) {
        times[i][repeat - warm_up] = now_us() - begin;
      }
    }
  }
  for (uint32_t i = 0; i < action_count; i++) {
    actions[i].median_us = median(times[i], repeats);
  }
}
