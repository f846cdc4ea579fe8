/* Kernels of the CUDA in host memory: those of the host, behind a stream, with a GPU's counts and clock. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cuda/fault.h"
#include "kernels/cuda/launch.h"
#include "proto/timeline_wire.h"
#include "server/executor/clock.h"
#include "tests/unit/fake_cuda_parts.h"

enum { clock_ahead_ns = 123456789 /* of the GPU's clock before ours */ };

static uint64_t gpu_clock_ns(void) {
  return kvp_clock_ns() + clock_ahead_ns;
}

static bool kernel_begin(struct kvp_cuda_counts *counts) {
  if (fake_kernel_faults()) {
    return false;
  }
  if (counts != NULL) {
    static const struct kvp_cuda_counts zero;
    fake_check(memcmp(counts, &zero, sizeof zero) == 0, "counts that are not zero");
    counts->started_ns = gpu_clock_ns();
  }
  return true;
}

cudaError_t kvp_cuda_kernels_load(void) {
  RETURN_INJECTED("kvp_cuda_kernels_load");
  return cudaSuccess;
}

/* What the host's kernel counted, as a GPU's: bytes where the real ones keep other things. */
static void counts_put(struct kvp_cuda_counts *found, const struct kvp_op_counts *counts) {
  found->rows_stored += counts->rows_stored;
  found->rows_loaded += counts->rows_loaded;
  found->rows_skipped += counts->rows_skipped;
  found->rows_rejected += counts->rows_rejected;
  found->rows_nonfinite += counts->rows_nonfinite;
  found->groups_saturated += counts->groups_saturated;
  found->rows_zeroed += counts->bytes_read;
  found->blocks_done += counts->bytes_written;
}

static void counts_get(const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  *out = (struct kvp_op_counts){.rows_stored = found->rows_stored,
                                .rows_loaded = found->rows_loaded,
                                .rows_skipped = found->rows_skipped,
                                .rows_rejected = found->rows_rejected,
                                .rows_nonfinite = found->rows_nonfinite,
                                .groups_saturated = found->groups_saturated,
                                .bytes_read = found->rows_zeroed,
                                .bytes_written = found->blocks_done};
}

/* ---- launches ---- */

static _Atomic uint64_t *launches;

/* Into the file, where there is one. */
static void launches_open(void) {
  static _Atomic uint64_t own;
  const char *path = getenv("FAKE_CUDA_LAUNCHES");
  launches = &own;
  if (path != NULL) {
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    void *file = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    fake_check(file != MAP_FAILED, "no file for the number of launches");
    (void)close(fd);
    launches = file;
  }
}

static void launches_add(int64_t count) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, launches_open);
  (void)atomic_fetch_add(launches, (uint64_t)count);
}

/* A launch of any of the kernels that the host has, too. */
struct kernel {
  void (*run)(const struct kernel *kernel, struct kvp_op_counts *counts);
  struct kvp_cuda_counts *counts;
  union {
    struct kvp_store_params store;
    struct kvp_load_params load;
    struct kvp_copy_rows_params copy_rows;
    struct kvp_fused_store_params fused_store;
    struct kvp_convert_index_params convert_index;
    struct kvp_swa_index_params swa_index;
    struct kvp_expand_index_params expand_index;
    struct kvp_cat_index_params cat_index;
    struct kvp_blocks_params blocks;
  } params;
};

static void kernel_run(void *arguments) {
  const struct kernel *kernel = arguments;
  if (kernel_begin(kernel->counts)) {
    struct kvp_op_counts counts = {0};
    kernel->run(kernel, &counts);
    counts_put(kernel->counts, &counts);
  }
}

static cudaError_t kernel_launch(const struct kernel *kernel, cudaStream_t stream) {
  RETURN_INJECTED("kernel");
  fake_check_device(kernel->counts, sizeof *kernel->counts, "counts that are nowhere");
  launches_add(1);
  return fake_enqueue(stream, kernel_run, kernel, sizeof *kernel);
}

static void check_entries(const struct kvp_owner_check *owners, const struct kvp_layer *layer) {
  if (owners->entries != NULL) {
    fake_check_visible(owners->entries, layer->geometry->num_blocks * sizeof *owners->entries,
                       "an owner table the device can't see");
  }
}

static void check_ints(const void *ints, uint64_t count, const char *what) {
  if (ints != NULL) {
    fake_check_visible(ints, count * sizeof(int32_t), what);
  }
}

static void check_store(const struct kvp_store_params *params) {
  check_ints(params->slots, params->row_count, "slots the device can't see");
  check_ints(params->gather, params->row_count, "an index the device can't see");
  fake_check_device(params->layer.base, params->layer.geometry->layer_stride_bytes, "a layer that is nowhere");
  fake_check_device(params->source.base, 1, "a source that is nowhere");
  check_entries(&params->check, &params->layer);
}

static void store_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_store(&kernel->params.store, 0, kernel->params.store.row_count, counts);
}

cudaError_t kvp_cuda_store_launch(const struct kvp_store_params *params, struct kvp_cuda_counts *counts,
                                  cudaStream_t stream) {
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  check_store(params);
  const struct kernel kernel = {.run = store_run, .counts = counts, .params.store = *params};
  return kernel_launch(&kernel, stream);
}

static void load_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_load(&kernel->params.load, 0, kernel->params.load.segment_count, counts);
}

cudaError_t kvp_cuda_load_launch(const struct kvp_load_params *params, struct kvp_cuda_counts *counts,
                                 cudaStream_t stream) {
  if (params->segment_count == 0) {
    return cudaSuccess;
  }
  fake_check_visible(params->segments, params->segment_count * sizeof *params->segments,
                     "segments the device can't see");
  fake_check_device(params->layer.base, params->layer.geometry->layer_stride_bytes, "a layer that is nowhere");
  if (params->check.entries != NULL) {
    fake_check_device(params->rows_taken, sizeof *params->rows_taken, "rows_taken that is nowhere");
  }
  check_entries(&params->check, &params->layer);
  const struct kernel kernel = {.run = load_run, .counts = counts, .params.load = *params};
  return kernel_launch(&kernel, stream);
}

static void copy_rows_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_copy_rows(&kernel->params.copy_rows, 0, kernel->params.copy_rows.row_count, counts);
}

cudaError_t kvp_cuda_copy_rows_launch(const struct kvp_copy_rows_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream) {
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  check_ints(params->gather, params->row_count, "an index the device can't see");
  fake_check_device(params->out.base, params->row_bytes, "rows that are nowhere");
  const struct kernel kernel = {.run = copy_rows_run, .counts = counts, .params.copy_rows = *params};
  return kernel_launch(&kernel, stream);
}

static void fused_store_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_fused_store(&kernel->params.fused_store, 0, kernel->params.fused_store.store.row_count, counts);
}

cudaError_t kvp_cuda_fused_store_launch(const struct kvp_fused_store_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream) {
  if (params->store.row_count == 0) {
    return cudaSuccess;
  }
  check_store(&params->store);
  check_ints(params->positions, params->store.row_count, "positions the device can't see");
  fake_check_device(params->norm_weight, 1, "a weight that is nowhere");
  const struct kernel kernel = {.run = fused_store_run, .counts = counts, .params.fused_store = *params};
  return kernel_launch(&kernel, stream);
}

/* Whoever relies on an order finds the other one. */
cudaError_t kvp_cuda_fused_stores_launch(const struct kvp_fused_store_params *const *params,
                                         struct kvp_cuda_counts *const *counts, uint32_t count, cudaStream_t stream) {
  cudaError_t code = cudaSuccess;
  for (uint32_t i = count; i > 0 && code == cudaSuccess; i--) {
    code = kvp_cuda_fused_store_launch(params[i - 1], counts[i - 1], stream);
    launches_add(i == count || params[i - 1]->store.row_count == 0 ? 0 : -1);
  }
  return code;
}

/* The same. */
cudaError_t kvp_cuda_assemble_launch(const struct kvp_cuda_assembly *assembly, cudaStream_t stream) {
  cudaError_t code = cudaSuccess;
  int64_t parts = 0;
  if (assembly->store != NULL) {
    code = kvp_cuda_store_launch(assembly->store, assembly->store_counts, stream);
    parts += assembly->store->row_count != 0;
  }
  if (code == cudaSuccess && assembly->copy != NULL) {
    code = kvp_cuda_copy_rows_launch(assembly->copy, assembly->copy_counts, stream);
    parts += assembly->copy->row_count != 0;
  }
  for (int i = 1; i >= 0; i--) {
    if (code == cudaSuccess && assembly->loads[i] != NULL) {
      code = kvp_cuda_load_launch(assembly->loads[i], assembly->load_counts[i], stream);
      parts += assembly->loads[i]->segment_count != 0;
    }
  }
  launches_add(parts > 1 ? 1 - parts : 0);
  return code;
}

/* A launch of a replay: it stops the other streams, too, while it waits. */
struct fake_replay {
  struct kvp_cuda_replay replay;
  struct kvp_fused_store_params ops[kvp_cuda_replay_ops_max];
  struct kvp_replay_points points[kvp_cuda_replay_ops_max];
};

static enum kvp_replay_end replay_wait(const struct kvp_cuda_replay *replay, const struct kvp_replay_points *points,
                                       uint64_t *value) {
  const struct timespec pause = {.tv_nsec = 20000};
  for (;; (void)nanosleep(&pause, NULL)) {
    *value = points->wait == NULL ? points->wait_value : __atomic_load_n(points->wait, __ATOMIC_ACQUIRE);
    if (*value >= KVP_TIMELINE_POISON) {
      return KVP_REPLAY_POISONED;
    }
    if (*value >= points->wait_value) {
      return KVP_REPLAY_DONE;
    }
    if (__atomic_load_n(replay->abort, __ATOMIC_ACQUIRE) >= replay->abort_value) {
      return KVP_REPLAY_ABORTED;
    }
    if (gpu_clock_ns() >= replay->deadline_ns) {
      return KVP_REPLAY_DEADLINE;
    }
  }
}

static void fake_replay_one(const struct fake_replay *fake, uint32_t i) {
  const struct kvp_cuda_replay *replay = &fake->replay;
  const struct kvp_replay_points *points = &fake->points[i];
  struct kvp_replay_result *result = (struct kvp_replay_result *)(void *)replay->state;
  struct kvp_op_counts counts = {0};
  uint64_t value = 0;
  if (result->end == KVP_REPLAY_DONE) {
    const enum kvp_replay_end end = replay_wait(replay, points, &value);
    *result = (struct kvp_replay_result){.end = end, .op = replay->first_op + i, .value = value};
  }
  if (result->end == KVP_REPLAY_DONE && kernel_begin(&replay->counts[i])) {
    kvp_host_fused_store(&fake->ops[i], 0, fake->ops[i].store.row_count, &counts);
    counts_put(&replay->counts[i], &counts);
  }
  value = result->end == KVP_REPLAY_DONE ? points->signal_value : KVP_TIMELINE_POISON;
  if (points->signal != NULL && *points->signal < value) {
    __atomic_store_n(points->signal, value, __ATOMIC_RELEASE);
  }
}

static void replay_run(void *arguments) {
  struct fake_replay *fake = arguments;
  for (uint32_t i = 0; i < fake->replay.op_count; i++) {
    fake_replay_one(fake, i);
  }
}

cudaError_t kvp_cuda_replay_launch(const struct kvp_cuda_replay *replay, cudaStream_t stream) {
  static struct fake_replay fake;
  fake_check(replay->op_count > 0 && replay->op_count <= kvp_cuda_replay_ops_max, "a replay of too many ops");
  fake_check_device(replay->counts, replay->op_count * sizeof *replay->counts, "counts that are nowhere");
  fake_check_device(replay->state, sizeof *replay->state, "a replay's state that is nowhere");
  fake_check(fake_in_ranges(replay->abort, sizeof *replay->abort, RANGE_MAPPED),
             "an abort word the device can't see");
  fake.replay = *replay;
  for (uint32_t i = 0; i < replay->op_count; i++) {
    fake.ops[i] = replay->ops[i];
    fake.points[i] = replay->points[i];
    check_store(&fake.ops[i].store);
    check_ints(fake.ops[i].positions, fake.ops[i].store.row_count, "positions the device can't see");
    if (fake.points[i].wait != NULL) {
      fake_check_device(fake.points[i].wait, sizeof *fake.points[i].wait, "a word that is nowhere");
    }
    if (fake.points[i].signal != NULL) {
      fake_check_device(fake.points[i].signal, sizeof *fake.points[i].signal, "a word that is nowhere");
    }
  }
  return fake_enqueue(stream, replay_run, &fake, sizeof fake);
}

void kvp_cuda_replay_result(const struct kvp_cuda_counts *found, struct kvp_replay_result *out) {
  memcpy(out, found, sizeof *out);
}

static void convert_index_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  const struct kvp_convert_index_params *params = &kernel->params.convert_index;
  kvp_host_convert_index(params, 0, params->batch * params->queries, counts);
}

cudaError_t kvp_cuda_convert_index_launch(const struct kvp_convert_index_params *params,
                                          struct kvp_cuda_counts *counts, cudaStream_t stream) {
  const uint64_t rows = params->batch * params->queries;
  if (rows == 0) {
    return cudaSuccess;
  }
  check_ints(params->tables.base, params->batch * params->table_columns, "block tables the device can't see");
  check_ints(params->valid, rows, "counts of entries the device can't see");
  check_ints(params->topk.base, params->columns, "indices the device can't see");
  fake_check_device(params->out.base, params->columns * sizeof(int32_t), "rows that are nowhere");
  const struct kernel kernel = {.run = convert_index_run, .counts = counts, .params.convert_index = *params};
  return kernel_launch(&kernel, stream);
}

static void swa_index_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_swa_index(&kernel->params.swa_index, 0, kernel->params.swa_index.queries, counts);
}

cudaError_t kvp_cuda_swa_index_launch(const struct kvp_swa_index_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream) {
  if (params->queries == 0) {
    return cudaSuccess;
  }
  check_ints(params->offset_len, 2 * params->queries, "windows the device can't see");
  fake_check_device(params->out.base, params->window * sizeof(int32_t), "rows that are nowhere");
  const struct kernel kernel = {.run = swa_index_run, .counts = counts, .params.swa_index = *params};
  return kernel_launch(&kernel, stream);
}

static void expand_index_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_expand_index(&kernel->params.expand_index, 0, kernel->params.expand_index.row_count, counts);
}

cudaError_t kvp_cuda_expand_index_launch(const struct kvp_expand_index_params *params, struct kvp_cuda_counts *counts,
                                         cudaStream_t stream) {
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  check_ints(params->pivots, 4 * params->row_count, "pivots the device can't see");
  fake_check_device(params->out.base, params->width * sizeof(int32_t), "rows that are nowhere");
  const struct kernel kernel = {.run = expand_index_run, .counts = counts, .params.expand_index = *params};
  return kernel_launch(&kernel, stream);
}

static void cat_index_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  kvp_host_cat_index(&kernel->params.cat_index, 0, kernel->params.cat_index.row_count, counts);
}

cudaError_t kvp_cuda_cat_index_launch(const struct kvp_cat_index_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream) {
  if (params->row_count == 0) {
    return cudaSuccess;
  }
  check_ints(params->left.base, params->left_columns, "a left side the device can't see");
  check_ints(params->right.base, params->right_columns, "a right side the device can't see");
  fake_check_device(params->out.base, sizeof(int32_t), "rows that are nowhere");
  const struct kernel kernel = {.run = cat_index_run, .counts = counts, .params.cat_index = *params};
  return kernel_launch(&kernel, stream);
}

static void copy_blocks_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  const struct kvp_blocks_params *params = &kernel->params.blocks;
  kvp_host_copy_blocks(params, 0, params->geometry->num_layers * params->count, counts);
}

static void zero_blocks_run(const struct kernel *kernel, struct kvp_op_counts *counts) {
  const struct kvp_blocks_params *params = &kernel->params.blocks;
  kvp_host_zero_blocks(params, 0, params->geometry->num_layers * params->count, counts);
}

static cudaError_t blocks_launch(const struct kvp_blocks_params *params, bool copies, struct kvp_cuda_counts *counts,
                                 cudaStream_t stream) {
  if (params->count == 0) {
    return cudaSuccess;
  }
  check_ints(params->pairs, (copies ? 2 : 1) * params->count, "blocks the device can't see");
  fake_check_device(params->base, params->geometry->region_bytes, "a region that is nowhere");
  const struct kernel kernel = {
      .run = copies ? copy_blocks_run : zero_blocks_run, .counts = counts, .params.blocks = *params};
  return kernel_launch(&kernel, stream);
}

cudaError_t kvp_cuda_copy_blocks_launch(const struct kvp_blocks_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream) {
  return blocks_launch(params, true, counts, stream);
}

cudaError_t kvp_cuda_zero_blocks_launch(const struct kvp_blocks_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream) {
  return blocks_launch(params, false, counts, stream);
}

static void signal_run(void *arguments) {
  const struct kvp_cuda_signal *signal = arguments;
  if (!kernel_begin(NULL)) {
    return;
  }
  for (uint32_t i = 0; i < signal->op_count; i++) {
    signal->found[i] = signal->counts[i];
    signal->counts[i] = (struct kvp_cuda_counts){0};
  }
  *signal->finished_ns = gpu_clock_ns();
  __atomic_store_n(signal->timeline, signal->value, __ATOMIC_RELEASE);
}

void kvp_cuda_launch_alone(void) {}

cudaError_t kvp_cuda_signal_launch(const struct kvp_cuda_signal *signal, cudaStream_t stream) {
  RETURN_INJECTED("kvp_cuda_signal_launch");
  fake_check_device(signal->counts, signal->op_count * sizeof *signal->counts, "counts that are nowhere");
  fake_check(fake_in_ranges(signal->found, signal->op_count * sizeof *signal->found, RANGE_MAPPED),
             "found is nowhere");
  fake_check(fake_in_ranges(signal->finished_ns, sizeof *signal->finished_ns, RANGE_MAPPED),
             "finished_ns is nowhere");
  fake_check(fake_in_ranges(signal->timeline, sizeof *signal->timeline, RANGE_MAPPED),
             "a timeline the device can't see");
  return fake_enqueue(stream, signal_run, signal, sizeof *signal);
}

static void point_run(void *arguments) {
  const struct kvp_cuda_point *point = arguments;
  if (kernel_begin(NULL)) {
    __atomic_store_n(point->word, point->value, __ATOMIC_RELEASE);
  }
}

cudaError_t kvp_cuda_point_launch(const struct kvp_cuda_point *point, cudaStream_t stream) {
  fake_check(fake_in_ranges(point->word, sizeof *point->word, RANGE_MAPPED),
             "a timeline's word the device can't see");
  return fake_enqueue(stream, point_run, point, sizeof *point);
}

static void empty_run(void *arguments) {
  uint64_t *now_ns = NULL;
  memcpy(&now_ns, arguments, sizeof now_ns);
  if (now_ns != NULL) {
    *now_ns = gpu_clock_ns();
  }
}

cudaError_t kvp_cuda_empty_launch(uint64_t *now_ns, cudaStream_t stream) {
  RETURN_INJECTED("kvp_cuda_empty_launch");
  if (now_ns != NULL) {
    fake_check_visible(now_ns, sizeof *now_ns, "a clock's word the device can't see");
  }
  return fake_enqueue(stream, empty_run, &now_ns, sizeof now_ns);
}

static void fault_run(void *arguments) {
  (void)arguments;
  fake_lose();
}

cudaError_t kvp_cuda_fault_launch(cudaStream_t stream) {
  return fake_enqueue(stream, fault_run, "", 0);
}

/* What was known before is taken from what the executor said: wrong facts show. A store without slots, or with an
 * index, counts for itself. */
void kvp_cuda_store_counts(const struct kvp_store_params *params, const struct kvp_cuda_counts *found,
                           struct kvp_op_counts *out) {
  counts_get(found, out);
  if (params->check.entries == NULL && params->slots != NULL && params->gather == NULL) {
    out->rows_skipped = params->rows_skipped;
    out->rows_stored = params->row_count - params->rows_skipped;
  }
}

void kvp_cuda_load_counts(const struct kvp_load_params *params, const struct kvp_cuda_counts *found,
                          struct kvp_op_counts *out) {
  counts_get(found, out);
  out->rows_loaded = params->check.entries == NULL ? params->rows : found->rows_loaded;
}

void kvp_cuda_copy_rows_counts(const struct kvp_copy_rows_params *params, const struct kvp_cuda_counts *found,
                               struct kvp_op_counts *out) {
  counts_get(found, out);
  fake_check(out->rows_loaded + out->rows_rejected == params->row_count, "rows that were not copied");
}

void kvp_cuda_fused_store_counts(const struct kvp_fused_store_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out) {
  counts_get(found, out);
  if (params->store.check.entries == NULL && params->positions_checked) {
    out->rows_skipped = params->store.rows_skipped;
    out->rows_stored = params->store.row_count - params->store.rows_skipped;
  }
}

#define INDEX_COUNTS(name)                                                                                           \
  void kvp_cuda_##name##_counts(const struct kvp_##name##_params *params, const struct kvp_cuda_counts *found,       \
                                struct kvp_op_counts *out) {                                                         \
    (void)params;                                                                                                    \
    counts_get(found, out);                                                                                          \
  }

INDEX_COUNTS(convert_index)
INDEX_COUNTS(swa_index)
INDEX_COUNTS(expand_index)
INDEX_COUNTS(cat_index)

void kvp_cuda_copy_blocks_counts(const struct kvp_blocks_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out) {
  (void)params;
  counts_get(found, out);
}

void kvp_cuda_zero_blocks_counts(const struct kvp_blocks_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out) {
  (void)params;
  counts_get(found, out);
}
