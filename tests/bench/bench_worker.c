/* A worker beside a kvpoold of its own, on one GPU: what a captured decode graph costs whose ops the daemon does, and what
 * a step costs through the ring. Both against the worker launching the same kernels itself, in the same run. Under MPS or
 * time-sliced, as the environment says.
 *
 *   bench_worker KVPOOLD EXECUTOR [repeats]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvpool/kvpool.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/replay_case.h"

enum {
  repeats_max = 1000,
  ring_rows = 256,
  ring_rounds = 3000,
  ring_warm_up = 200,
  serving_ms = 60000,
  waiting_deadline_ms = 1000, /* of the replay that waits all the time */
};

static struct bench_daemon server;
static kvpool_client *client;
static kvpool_pool *pool;
static kvpool_session *session;
static kvpool_attachment *attachment;
static kvpool_attachment_info info;
static kvpool_pool_map *map;
static kvpool_buffer *inputs;
static kvpool_step *step;
static struct replay_case rows;
static int32_t blocks[replay_case_blocks];
static int32_t positions[ring_rows];
static kvpool_error error;

#define KVPOOL_CHECK(call)                                                                                           \
  do {                                                                                                               \
    if ((call) != KVPOOL_OK) {                                                                                       \
      fail(#call);                                                                                                   \
    }                                                                                                                \
  } while (0)

static _Noreturn void fail(const char *what) {
  (void)fprintf(stderr, "bench_worker: %s: %s: %s\n", what, kvpool_status_name(error.status), error.text);
  bench_daemon_check(&server);
  exit(1);
}

static double now_us(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

/* ---- daemon, session, attachment ---- */

static void session_begin(void) {
  const kvpool_connect_options options = {
      .size_bytes = sizeof options, .timeout_ms = serving_ms, .wait_until_serving = true};
  const kvpool_region_spec region = {.name = "main", .format = "v41", .num_layers = replay_graph_layers};
  const char *device = "cuda:0";
  const kvpool_pool_spec spec = {.name = "decode",
                                 .block_size = replay_case_tokens,
                                 .num_blocks = replay_case_blocks,
                                 .placements = &device,
                                 .placement_count = 1,
                                 .regions = &region,
                                 .region_count = 1};
  kvpool_attach_options attach = {.size_bytes = sizeof attach, .socket = server.attach_path};
  KVPOOL_CHECK(kvpool_client_connect(server.socket_path, &options, &client, &error));
  const double begin_us = now_us();
  while (kvpool_pool_create(client, &spec, &pool, &error) != KVPOOL_OK) { /* its executor may be starting */
    if (now_us() - begin_us > 1e3 * serving_ms) {
      fail("kvpool_pool_create");
    }
    (void)nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
  }
  KVPOOL_CHECK(kvpool_session_open(client, NULL, &session, &error));
  KVPOOL_CHECK(kvpool_blocks_allocate(session, pool, replay_case_blocks, blocks, &error));
  attach.session_id = kvpool_session_id(session);
  kvpool_session_secret(session, attach.secret);
  KVPOOL_CHECK(kvpool_attach(&attach, &attachment, &error));
  kvpool_attachment_saw_epoch(attachment, kvpool_session_epoch(session));
  kvpool_attachment_info_get(attachment, &info);
  KVPOOL_CHECK(kvpool_attachment_map_pool(attachment, "decode", KVPOOL_MAP_READ, &map, &error));
  KVPOOL_CHECK(kvpool_attachment_create_buffer(attachment, replay_case_inputs_bytes, &inputs, &error));
  KVPOOL_CHECK(kvpool_attachment_step_new(attachment, &step, &error));
}

static void session_end(void) {
  kvpool_step_destroy(step);
  KVPOOL_CHECK(kvpool_buffer_release(inputs, &error));
  kvpool_pool_map_destroy(map);
  kvpool_detach(attachment);
  kvpool_session_close(session);
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
}

/* ---- steps ---- */

static void op_add(uint32_t layer, const int32_t *slots, uint32_t count) {
  const kvpool_view table = {.buffer = inputs,
                             .offset_bytes = replay_case_table_offset,
                             .rows = replay_case_positions,
                             .row_bytes = replay_case_rotary * sizeof(float)};
  kvpool_fused_store fused = {
      .layer = {.pool = kvpool_pool_map_pool(map), .layer = layer},
      .source = {.buffer = inputs,
                 .offset_bytes = (uint64_t)layer * replay_case_rows * replay_case_row_bytes,
                 .rows = count,
                 .row_bytes = replay_case_row_bytes},
      .norm_weight = {.buffer = inputs,
                      .offset_bytes = replay_case_weight_offset,
                      .rows = 1,
                      .row_bytes = replay_case_row_bytes},
      .eps = 1e-6F,
      .cos_sin = &table,
  };
  KVPOOL_CHECK(kvpool_step_add_array(step, slots, count, &fused.slots, &error));
  KVPOOL_CHECK(kvpool_step_add_array(step, positions, count, &fused.positions, &error));
  KVPOOL_CHECK(kvpool_step_add_fused_store(step, &fused, &error));
}

static void replay_step_fill(const int32_t *slots) {
  kvpool_step_clear(step);
  for (uint32_t layer = 0; layer < replay_graph_layers; layer++) {
    op_add(layer, slots, replay_case_rows);
    KVPOOL_CHECK(kvpool_step_set_replay_points(step, layer + 1, layer + 1, &error));
  }
}

/* Waits for the step; NULL: it is done, else why not. */
static const kvpool_error *step_await(uint64_t step_id) {
  const kvpool_completion *completion = NULL;
  KVPOOL_CHECK(kvpool_attachment_wait(attachment, serving_ms, &completion, &error));
  if (completion->step_id != step_id) {
    fail("a completion of another step");
  }
  return completion->error;
}

static void step_await_done(uint64_t step_id) {
  const kvpool_error *failed = step_await(step_id);
  if (failed != NULL) {
    error = *failed;
    fail("a step");
  }
}

/* ---- graphs ---- */

struct run {
  kvpool_replay *replay;
  bool posts_ahead; /* a replay's step while the one before still runs, as a decode loop knows its slots in advance */
  uint64_t step_id; /* of the last post */
  double build_us, post_us; /* the CPU's, of the last post */
};

static void own_op(void *context, cudaStream_t stream, uint32_t layer) {
  (void)context;
  replay_case_launch(&rows, layer, replay_case_rows, stream);
}
static void put_begin(void *context, cudaStream_t stream) {
  KVPOOL_CHECK(kvpool_replay_begin(((struct run *)context)->replay, stream, &error));
}
static void put_signal(void *context, cudaStream_t stream, uint32_t layer) {
  KVPOOL_CHECK(kvpool_replay_signal(((struct run *)context)->replay, stream, layer + 1, &error));
}
static void put_wait(void *context, cudaStream_t stream, uint32_t layer) {
  KVPOOL_CHECK(kvpool_replay_wait(((struct run *)context)->replay, stream, layer + 1, &error));
}
static void put_both(void *context, cudaStream_t stream, uint32_t layer) {
  KVPOOL_CHECK(kvpool_replay_signal_and_wait(((struct run *)context)->replay, stream, layer + 1, &error));
}
static void put_end(void *context, cudaStream_t stream) {
  KVPOOL_CHECK(kvpool_replay_end(((struct run *)context)->replay, stream, replay_graph_layers, &error));
}

static const struct replay_graph_ops floor_ops = {.own = own_op};
static const struct replay_graph_ops replay_ops = {
    .begin = put_begin, .signal = put_signal, .wait = put_wait, .signal_and_wait = put_both, .end = put_end};

/* Other slots each time. */
static void run_post(void *context) {
  struct run *run = context;
  int32_t slots[replay_case_rows];
  const double begin_us = now_us();
  replay_case_slots(slots, replay_case_rows, replay_case_blocks * replay_case_tokens);
  replay_step_fill(slots);
  const double built_us = now_us();
  KVPOOL_CHECK(kvpool_replay_post(run->replay, step, &run->step_id, &error));
  run->build_us = built_us - begin_us;
  run->post_us = now_us() - built_us;
}

static double floor_time(const struct replay_graph_bench *bench, enum replay_graph_waits waits, uint32_t repeats) {
  static double values[repeats_max];
  cudaGraphExec_t graph = replay_graph_make(bench, &floor_ops, waits, NULL);
  for (uint32_t i = 0; i < repeats + 3; i++) {
    values[i < 3 ? 0 : i - 3] = replay_graph_time(bench, graph, NULL, NULL);
  }
  REPLAY_CHECK(cudaGraphExecDestroy(graph));
  return replay_graph_median(values, repeats);
}

static double replay_time(const struct replay_graph_bench *bench, struct run *run, enum replay_graph_waits waits,
                          uint32_t repeats) {
  static double values[repeats_max], build[repeats_max], post[repeats_max];
  cudaGraphExec_t graph = replay_graph_make(bench, &replay_ops, waits, run);
  const uint32_t launches = repeats + 3;
  if (run->posts_ahead) {
    run_post(run);
  }
  for (uint32_t i = 0; i < launches; i++) {
    const uint32_t at = i < 3 ? 0 : i - 3;
    const uint64_t ahead_id = run->step_id;
    const bool posts = !run->posts_ahead || i < launches - 1;
    values[at] = replay_graph_time(bench, graph, posts ? run_post : NULL, run);
    KVPOOL_CHECK(kvpool_replay_check(run->replay, &error));
    step_await_done(run->posts_ahead ? ahead_id : run->step_id);
    build[at] = run->build_us;
    post[at] = run->post_us;
  }
  REPLAY_CHECK(cudaGraphExecDestroy(graph));
  run->build_us = replay_graph_median(build, repeats);
  run->post_us = replay_graph_median(post, repeats);
  return replay_graph_median(values, repeats);
}

static kvpool_replay *replay_make(kvpool_replay_mode mode, uint32_t deadline_ms) {
  const kvpool_replay_options options = {.size_bytes = sizeof options, .mode = mode, .deadline_ms = deadline_ms};
  kvpool_replay *replay = NULL;
  KVPOOL_CHECK(kvpool_replay_new(attachment, replay_graph_layers, &options, &replay, &error));
  return replay;
}

static void graphs_measure(const struct replay_graph_bench *bench, kvpool_replay_mode mode, bool posts_ahead,
                           uint32_t repeats) {
  struct run run = {.replay = replay_make(mode, 0), .posts_ahead = posts_ahead};
  const char *posted = posts_ahead ? "posted ahead" : "posted at the launch";
  const char *name =
      kvpool_replay_mode_get(run.replay) == KVPOOL_REPLAY_ONE_LAUNCH ? "one launch a replay" : "a launch an op";
  const double base = floor_time(bench, REPLAY_WAITS_AT_END, repeats);
  const double base_late = floor_time(bench, REPLAY_WAITS_LATE, repeats);
  const double every = replay_time(bench, &run, REPLAY_WAITS_AT_ONCE, repeats);
  const double late = replay_time(bench, &run, REPLAY_WAITS_LATE, repeats);
  const double end = replay_time(bench, &run, REPLAY_WAITS_AT_END, repeats);
  printf("FIGURE %s, %s, %s: a layer with an op of one's own %.2f us (%.2f where the work is two kernels); waiting "
         "every layer %.2f us (%+.2f), 20 us between %.2f us (%+.2f), asynchronous %.2f us (%+.2f)\n",
         info.mps ? "MPS" : "time-sliced", name, posted, base, base_late, every, every - base, late, late - base_late,
         end, end - base);
  printf("FIGURE %s, %s: the CPU builds a step of %d layers in %.1f us and posts it in %.1f us\n",
         info.mps ? "MPS" : "time-sliced", name, replay_graph_layers, run.build_us, run.post_us);
  kvpool_replay_destroy(run.replay);
}

/* Blocks that wait for a whole second beside something that wants every multiprocessor. */
static void full_measure(const struct replay_graph_bench *bench, uint32_t repeats) {
  static double alone[repeats_max], beside[repeats_max];
  struct run run = {.replay = replay_make(KVPOOL_REPLAY_ONE_LAUNCH, waiting_deadline_ms)};
  for (uint32_t i = 0; i < repeats; i++) {
    alone[i] = replay_graph_full_time(bench);
  }
  run_post(&run);
  const double begin_us = now_us();
  uint32_t count = 0;
  while (count < repeats && now_us() - begin_us < 500.0 * waiting_deadline_ms) {
    beside[count++] = replay_graph_full_time(bench);
  }
  if (step_await(run.step_id) == NULL) {
    fail("a replay that nobody signalled is done");
  }
  const double a = replay_graph_median(alone, repeats), b = replay_graph_median(beside, count);
  printf("FIGURE MPS: full occupancy beside a replay that waits: %.1f us alone, %.1f us beside (%+.2f %%)\n", a, b,
         100 * (b / a - 1));
  kvpool_replay_destroy(run.replay);
}

/* ---- the same bytes ---- */

static void contents_check(const struct replay_graph_bench *bench) {
  int32_t slots[replay_case_rows];
  struct run run = {.replay = replay_make(KVPOOL_REPLAY_AUTOMATIC, 0)};
  cudaGraphExec_t graph = replay_graph_make(bench, &replay_ops, REPLAY_WAITS_AT_ONCE, &run);
  cudaGraphExec_t own = replay_graph_make(bench, &floor_ops, REPLAY_WAITS_AT_ONCE, NULL);
  REPLAY_CHECK(cudaMemcpy(slots, rows.slots, sizeof slots, cudaMemcpyDeviceToHost));
  REPLAY_CHECK(cudaMemcpy(positions, rows.positions, sizeof positions, cudaMemcpyDeviceToHost));
  replay_step_fill(slots);
  KVPOOL_CHECK(kvpool_replay_post(run.replay, step, &run.step_id, &error));
  (void)replay_graph_time(bench, graph, NULL, NULL);
  (void)replay_graph_time(bench, own, NULL, NULL);
  step_await_done(run.step_id);
  const kvpool_mapped_region *region = kvpool_pool_map_region(map, 0);
  const uint64_t bytes = rows.geometry.region_bytes;
  uint8_t *theirs = malloc(bytes), *ours = malloc(bytes);
  if (theirs == NULL || ours == NULL || region->layer_stride_bytes != rows.geometry.layer_stride_bytes) {
    fail("memory for what was stored");
  }
  REPLAY_CHECK(cudaMemcpy(theirs, region->base, bytes, cudaMemcpyDeviceToHost));
  REPLAY_CHECK(cudaMemcpy(ours, rows.region, bytes, cudaMemcpyDeviceToHost));
  if (memcmp(theirs, ours, bytes) != 0) {
    fail("the pool doesn't hold what the worker's own kernels store");
  }
  printf("the pool holds what the worker's own kernels store, %d layers of %d rows\n", replay_graph_layers,
         replay_case_rows);
  free(theirs);
  free(ours);
  REPLAY_CHECK(cudaGraphExecDestroy(graph));
  REPLAY_CHECK(cudaGraphExecDestroy(own));
  kvpool_replay_destroy(run.replay);
}

/* ---- the ring ---- */

static double ring_once(void) {
  const kvpool_completion *completion = NULL;
  uint64_t step_id = 0;
  const double begin_us = now_us();
  KVPOOL_CHECK(kvpool_attachment_post(attachment, step, NULL, &step_id, &error));
  while (completion == NULL) {
    KVPOOL_CHECK(kvpool_attachment_poll(attachment, &completion, &error));
  }
  const double us = now_us() - begin_us;
  if (completion->error != NULL) {
    error = *completion->error;
    fail("a step");
  }
  return us;
}

/* The worker's own launch: slots in memory that the GPU reads over the bus, as the executor's are, and a word there. */
struct own_launch {
  int32_t *arrays; /* slots, positions */
  struct kvp_cuda_counts *found;
  uint64_t *words; /* timeline, finished */
  uint64_t launches;
};

static double own_once(struct own_launch *own, const int32_t *slots, cudaStream_t stream) {
  struct kvp_fused_store_params op = rows.ops[0];
  const double begin_us = now_us();
  memcpy(own->arrays, slots, ring_rows * sizeof *slots);
  memcpy(own->arrays + ring_rows, positions, sizeof positions);
  op.store.slots = own->arrays;
  op.positions = own->arrays + ring_rows;
  op.store.row_count = ring_rows;
  REPLAY_CHECK(kvp_cuda_fused_store_launch(&op, &rows.counts[0], stream));
  const struct kvp_cuda_signal signal = {.counts = &rows.counts[0],
                                         .found = own->found,
                                         .finished_ns = own->words + 8,
                                         .timeline = own->words,
                                         .value = ++own->launches,
                                         .op_count = 1};
  REPLAY_CHECK(kvp_cuda_signal_launch(&signal, stream));
  while (__atomic_load_n(own->words, __ATOMIC_ACQUIRE) != own->launches) {
  }
  return now_us() - begin_us;
}

static void ring_measure(cudaStream_t stream) {
  static double ring[ring_rounds], own_times[ring_rounds];
  int32_t slots[ring_rows];
  uint8_t *memory = NULL;
  REPLAY_CHECK(cudaHostAlloc((void **)&memory, 1 << 16, cudaHostAllocMapped));
  memset(memory, 0, 1 << 16);
  struct own_launch own = {.arrays = (int32_t *)(void *)memory,
                           .found = (struct kvp_cuda_counts *)(void *)(memory + (32 << 10)),
                           .words = (uint64_t *)(void *)(memory + (48 << 10))};
  replay_case_slots(slots, ring_rows, replay_case_blocks * replay_case_tokens);
  kvpool_step_clear(step);
  op_add(0, slots, ring_rows);
  for (uint32_t i = 0; i < ring_rounds + ring_warm_up; i++) {
    const uint32_t at = i < ring_warm_up ? 0 : i - ring_warm_up;
    ring[at] = ring_once();
    own_times[at] = own_once(&own, slots, stream);
  }
  const double p50 = replay_graph_percentile(ring, ring_rounds, 0.5),
               p99 = replay_graph_percentile(ring, ring_rounds, 0.99);
  const double own_p50 = replay_graph_percentile(own_times, ring_rounds, 0.5);
  const double own_p99 = replay_graph_percentile(own_times, ring_rounds, 0.99);
  printf(
      "FIGURE %s: fused_store of %d rows through the ring, post to completion: p50 %.2f us, p99 %.2f us; own launch "
      "and poll: p50 %.2f us, p99 %.2f us (%.2fx, %.2fx)\n",
      info.mps ? "MPS" : "time-sliced", ring_rows, p50, p99, own_p50, own_p99, p50 / own_p50, p99 / own_p99);
  REPLAY_CHECK(cudaFreeHost(memory));
}

int main(int argc, char **argv) {
  if (argc < 3) {
    (void)fprintf(stderr, "usage: bench_worker KVPOOLD EXECUTOR [repeats]\n");
    return 2;
  }
  const uint32_t asked = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 50;
  const uint32_t repeats = asked == 0 || asked > repeats_max ? 50 : asked;
  struct replay_graph_bench bench;
  bench_daemon_start_on(&server, argv[1], argv[2], "cuda:0");
  session_begin();
  replay_graph_bench_init(&bench);
  REPLAY_CHECK(kvp_cuda_kernels_load());
  replay_case_init(&rows, kvpool_buffer_data(inputs));
  contents_check(&bench);
  graphs_measure(&bench, KVPOOL_REPLAY_AUTOMATIC, true, repeats);
  graphs_measure(&bench, KVPOOL_REPLAY_AUTOMATIC, false, repeats);
  if (info.mps) {
    graphs_measure(&bench, KVPOOL_REPLAY_BY_OP, true, repeats < 20 ? repeats : 20);
    full_measure(&bench, repeats);
  }
  ring_measure(bench.stream);
  replay_case_deinit(&rows);
  replay_graph_bench_deinit(&bench);
  session_end();
  bench_daemon_stop(&server);
  return 0;
}
