/* A decode step as a CUDA graph, for benchmarks: layers of work, and after each an op that stores the layer's rows. One
 * thread, one stream. A CUDA error ends the program.
 */
#ifndef KVPOOL_TESTS_BENCH_REPLAY_GRAPH_H
#define KVPOOL_TESTS_BENCH_REPLAY_GRAPH_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { replay_graph_layers = 61 };

/* Who does the ops. Functions may be NULL: nothing is put into the graph. */
struct replay_graph_ops {
  void (*begin)(void *context, cudaStream_t stream);
  void (*own)(void *context, cudaStream_t stream, uint32_t layer); /* does the op itself */
  void (*signal)(void *context, cudaStream_t stream, uint32_t layer);
  void (*wait)(void *context, cudaStream_t stream, uint32_t layer);
  void (*signal_and_wait)(void *context, cudaStream_t stream, uint32_t layer);
  void (*end)(void *context, cudaStream_t stream);
};

enum replay_graph_waits {
  REPLAY_WAITS_AT_ONCE, /* signal and wait, behind the layer's work */
  REPLAY_WAITS_LATE,    /* 20 us of it between the two */
  REPLAY_WAITS_AT_END,
};

struct replay_graph_bench {
  cudaStream_t stream;
  cudaEvent_t begin;
  cudaEvent_t end;
  uint64_t cycles_of_us; /* of a multiprocessor */
  uint32_t multiprocessors;
};

void replay_graph_bench_init(struct replay_graph_bench *bench);
void replay_graph_bench_deinit(struct replay_graph_bench *bench);

/* 50 us of work a layer. */
cudaGraphExec_t replay_graph_make(const struct replay_graph_bench *bench, const struct replay_graph_ops *ops,
                                  enum replay_graph_waits waits, void *context);
/* One launch: GPU time of a layer, in us. before: called before the launch, NULL: nothing. */
double replay_graph_time(const struct replay_graph_bench *bench, cudaGraphExec_t graph, void (*before)(void *context),
                         void *context);
double replay_graph_median(double *values, uint32_t count);
double replay_graph_percentile(double *values, uint32_t count, double fraction);

/* Something that fills every multiprocessor, some milliseconds of it: GPU time in us, while other things run or not. */
double replay_graph_full_time(const struct replay_graph_bench *bench);

#define REPLAY_CHECK(call) replay_graph_check((call), #call, __FILE__, __LINE__)
void replay_graph_check(cudaError_t error, const char *call, const char *file, int line);

#ifdef __cplusplus
}
#endif

#endif
