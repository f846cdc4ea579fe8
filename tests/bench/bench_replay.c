/* What a replay costs a graph, with both ends in this process: 61 layers of 50 us and 64 rows each. The executor's kernel
 * on one stream, the graph with the library's kernels on another one, no daemon and no MPS in between. Against the same
 * graph with the engine's own launch of the op in it.
 *
 *   bench_replay [repeats]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/timeline_wire.h"
#include "tests/bench/replay_case.h"
#include "tests/gpu/replay_points.h"

enum { repeats_max = 1000, start_word = 0, done_word = 8, base_word = 16, blocks_full = 8 };

static const uint64_t far_ns = UINT64_C(20000000000);

/* Both ends of the replays. */
struct rig {
  struct replay_case rows;
  struct replay_points points;
  cudaStream_t stream; /* the executor's */
  uint64_t *words;
  uint64_t *host;   /* registered: abort, problem, timeline, finished, then found */
  uint64_t replays; /* launched */
  uint64_t *timeline;
};

static void rig_init(struct rig *rig) {
  uint8_t *inputs = NULL;
  REPLAY_CHECK(kvp_cuda_kernels_load());
  REPLAY_CHECK(cudaMalloc((void **)&inputs, replay_case_inputs_bytes));
  replay_case_init(&rig->rows, inputs);
  REPLAY_CHECK(cudaStreamCreateWithFlags(&rig->stream, cudaStreamNonBlocking));
  REPLAY_CHECK(cudaMalloc((void **)&rig->words, 4096));
  REPLAY_CHECK(cudaMemset(rig->words, 0, 4096));
  REPLAY_CHECK(cudaHostAlloc((void **)&rig->host, 1 << 16, cudaHostAllocMapped));
  memset(rig->host, 0, 1 << 16);
  rig->timeline = rig->host + 16;
  rig->points = (struct replay_points){.start = rig->words + start_word,
                                       .done = rig->words + done_word,
                                       .base = rig->words + base_word,
                                       .points = replay_graph_layers,
                                       .deadline_ns = far_ns,
                                       .problem = rig->host + 8};
}

/* As the executor launches one, and its end. */
static void rig_launch(void *context) {
  struct rig *rig = context;
  struct kvp_replay_points points[replay_graph_layers];
  const uint64_t base = ++rig->replays * replay_graph_layers;
  for (uint32_t i = 0; i < replay_graph_layers; i++) {
    points[i] = (struct kvp_replay_points){rig->points.start, base + i + 1, rig->points.done, base + i + 1};
  }
  const struct kvp_cuda_replay replay = {.ops = rig->rows.ops,
                                         .points = points,
                                         .counts = rig->rows.counts + 1,
                                         .op_count = replay_graph_layers,
                                         .state = rig->rows.counts,
                                         .abort = rig->host,
                                         .abort_value = rig->replays,
                                         .deadline_ns = UINT64_MAX};
  const struct kvp_cuda_signal signal = {.counts = rig->rows.counts,
                                         .found = (struct kvp_cuda_counts *)(void *)(rig->host + 1024),
                                         .finished_ns = rig->host + 24,
                                         .timeline = rig->timeline,
                                         .value = rig->replays,
                                         .op_count = 1 + replay_graph_layers};
  REPLAY_CHECK(kvp_cuda_replay_launch(&replay, rig->stream));
  REPLAY_CHECK(kvp_cuda_signal_launch(&signal, rig->stream));
}

static void rig_check(const struct rig *rig, const char *what) {
  struct kvp_replay_result result;
  REPLAY_CHECK(cudaStreamSynchronize(rig->stream));
  kvp_cuda_replay_result((const struct kvp_cuda_counts *)(const void *)(rig->host + 1024), &result);
  if (*rig->timeline != rig->replays || rig->host[8] != 0 || result.end != KVP_REPLAY_DONE) {
    (void)fprintf(stderr, "%s: replay %llu ended with %d at op %u, the graph found 0x%llx\n", what,
                  (unsigned long long)rig->replays, (int)result.end, result.op, (unsigned long long)rig->host[8]);
    exit(1);
  }
}

/* ---- what goes into graphs ---- */

static void own_op(void *context, cudaStream_t stream, uint32_t layer) {
  struct rig *rig = context;
  replay_case_launch(&rig->rows, layer, replay_case_rows, stream);
}
static void put_begin(void *context, cudaStream_t stream) {
  REPLAY_CHECK(replay_points_begin(&((struct rig *)context)->points, stream));
}
static void put_signal(void *context, cudaStream_t stream, uint32_t layer) {
  REPLAY_CHECK(replay_points_put(&((struct rig *)context)->points, layer + 1, true, false, stream));
}
static void put_wait(void *context, cudaStream_t stream, uint32_t layer) {
  REPLAY_CHECK(replay_points_put(&((struct rig *)context)->points, layer + 1, false, true, stream));
}
static void put_both(void *context, cudaStream_t stream, uint32_t layer) {
  REPLAY_CHECK(replay_points_put(&((struct rig *)context)->points, layer + 1, true, true, stream));
}
static void put_end(void *context, cudaStream_t stream) {
  put_wait(context, stream, replay_graph_layers - 1);
}

static const struct replay_graph_ops nothing = {0};
static const struct replay_graph_ops floor_ops = {.own = own_op};
static const struct replay_graph_ops replay_ops = {
    .begin = put_begin, .signal = put_signal, .wait = put_wait, .signal_and_wait = put_both, .end = put_end};

static double time_of(struct rig *rig, const struct replay_graph_bench *bench, const struct replay_graph_ops *ops,
                      enum replay_graph_waits waits, uint32_t repeats, const char *what) {
  static double values[repeats_max];
  cudaGraphExec_t graph = replay_graph_make(bench, ops, waits, rig);
  const bool is_replay = ops->begin != NULL;
  for (uint32_t i = 0; i < repeats + 3; i++) { /* the first three warm up */
    const double us = replay_graph_time(bench, graph, is_replay ? rig_launch : NULL, rig);
    if (is_replay) {
      rig_check(rig, what);
    }
    values[i < 3 ? 0 : i - 3] = us;
  }
  REPLAY_CHECK(cudaGraphExecDestroy(graph));
  return replay_graph_median(values, repeats);
}

/* Replays that wait all the time beside something that wants the whole GPU. */
static void full_beside(struct rig *rig, const struct replay_graph_bench *bench, uint32_t repeats) {
  static double alone[repeats_max], beside[repeats_max];
  for (uint32_t i = 0; i < repeats; i++) {
    alone[i] = replay_graph_full_time(bench);
  }
  rig_launch(rig);
  for (uint32_t i = 0; i < repeats; i++) {
    beside[i] = replay_graph_full_time(bench);
  }
  __atomic_store_n(rig->host, rig->replays, __ATOMIC_RELEASE); /* abort */
  REPLAY_CHECK(cudaStreamSynchronize(rig->stream));
  const double a = replay_graph_median(alone, repeats), b = replay_graph_median(beside, repeats);
  printf("FIGURE full occupancy beside a replay that waits: %.1f us alone, %.1f us beside (%+.2f %%)\n", a, b,
         100 * (b / a - 1));
}

int main(int argc, char **argv) {
  const uint32_t asked = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 50;
  const uint32_t repeats = asked == 0 || asked > repeats_max ? 50 : asked;
  struct replay_graph_bench bench;
  struct rig rig = {0};
  replay_graph_bench_init(&bench);
  rig_init(&rig);
  const double bare = time_of(&rig, &bench, &nothing, REPLAY_WAITS_AT_END, repeats, "nothing");
  const double base = time_of(&rig, &bench, &floor_ops, REPLAY_WAITS_AT_END, repeats, "floor");
  const double base_late = time_of(&rig, &bench, &floor_ops, REPLAY_WAITS_LATE, repeats, "floor, cut");
  printf("FIGURE a layer: %.2f us of work, %.2f us with an op of one's own, %.2f us where the work is two kernels\n",
         bare, base, base_late);
  for (uint32_t blocks = 1; blocks <= blocks_full; blocks *= 2) {
    kvp_cuda_size_pin(KVP_CUDA_SIZE_AUTOMATIC, blocks == blocks_full ? 0 : blocks);
    const double every = time_of(&rig, &bench, &replay_ops, REPLAY_WAITS_AT_ONCE, repeats, "every layer");
    const double late = time_of(&rig, &bench, &replay_ops, REPLAY_WAITS_LATE, repeats, "20 us between");
    const double end = time_of(&rig, &bench, &replay_ops, REPLAY_WAITS_AT_END, repeats, "at the end");
    printf("FIGURE in one process, %u blocks: waiting every layer %.2f us (%+.2f), 20 us between %.2f us (%+.2f), "
           "asynchronous %.2f us (%+.2f)\n",
           blocks, every, every - base, late, late - base_late, end, end - base);
  }
  kvp_cuda_size_pin(KVP_CUDA_SIZE_AUTOMATIC, 0);
  full_beside(&rig, &bench, repeats);
  replay_graph_bench_deinit(&bench);
  return 0;
}
