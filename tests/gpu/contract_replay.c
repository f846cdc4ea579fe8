/* Replays on a GPU: ops of every format, each of whose rows are put where the last op's were when its turn comes, and so
 * are slots and positions that are not known before, by a stream that signals and waits as a captured graph does. Records, rows cast back and counts are the host kernels', for
 * any number of blocks; and what is left when the word is poisoned, the deadline passes or the replay is aborted.
 *
 *   contract_replay [small]
 *   contract_replay alone      every point reached before: nothing runs beside the replay's kernel (compute-sanitizer),
 *                              and nothing but that keeps the ops in their order
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/launch.h"
#include "proto/owner_entry.h"
#include "proto/timeline_wire.h"
#include "tests/contract/random.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/replay_points.h"
#include "tests/gpu/report.h"

enum {
  ops_max = 300, /* several launches */
  rows_max = 70,
  width_max = 2048,
  view_bytes = rows_max * 2 * width_max,
  num_blocks = 16,
  tokens_per_block = 16,
  slot_count = num_blocks * tokens_per_block,
  position_count = 50,
  rotary_dims = 32,
  owner = 7,
  epoch = 1000,
  kind_count = 8,
  start_word = 0, /* of the words; those of the ops' ends come behind them */
  base_word = 1,
  done_word = 2,
};

static const struct {
  enum kvp_format_id format;
  uint32_t width;
} kinds[kind_count] = {
    {KVP_FORMAT_V41, 512},   {KVP_FORMAT_V41_FP4, 512},       {KVP_FORMAT_INDEX_FP4, 128},
    {KVP_FORMAT_BF16, 512},  {KVP_FORMAT_INDEX_FP8_F32, 128}, {KVP_FORMAT_INDEX_MXFP8, 128},
    {KVP_FORMAT_BF16, 2048}, {KVP_FORMAT_BF16, 32},
};

static const size_t words_bytes = (size_t)(done_word + ops_max) * 64;
static uint32_t op_count = ops_max;

/* The same memory twice. */
struct twin {
  uint8_t *host;
  uint8_t *device;
  uint64_t bytes;
};

struct kind {
  struct kvp_geometry geometry;
  struct twin region;
  struct twin weight;
  struct twin source; /* of whose turn it is */
};

struct op {
  struct kind *kind;
  struct twin input; /* becomes the kind's source */
  struct twin back;
  struct twin slots; /* of an op whose rows are not known: on the device others, until its turn comes */
  struct twin positions;
  struct twin late; /* slots, then positions: what they become */
  struct kvp_fused_store_params host;
  struct kvp_fused_store_params device;
};

static struct kind all_kinds[kind_count];
static struct op ops[ops_max];
static struct twin table, owners;
static struct kvp_cuda_counts *counts; /* device: the replay's, then the ops' */
static struct kvp_cuda_counts *found;
static uint64_t *words; /* device */
static uint64_t *bell;  /* registered: abort, problem, timeline, finished, a clock */
static uint64_t replays, base;
static cudaStream_t daemon_stream, worker_stream;

enum { bell_abort = 0, bell_problem = 8, bell_timeline = 16, bell_finished = 24, bell_clock = 32, bell_bytes = 4096 };

static struct twin twin_make(uint64_t bytes) {
  struct twin it = {.bytes = bytes, .host = calloc(1, bytes + 1)};
  if (it.host == NULL) {
    report_failed("no memory");
  }
  gpu_check(cudaMalloc((void **)&it.device, bytes + 1));
  return it;
}

static void twin_push(const struct twin *it) {
  gpu_check(cudaMemcpy(it->device, it->host, it->bytes, cudaMemcpyHostToDevice));
}

static void twin_compare(const struct twin *it, const char *what, uint32_t number) {
  uint8_t *seen = malloc(it->bytes + 1);
  if (seen == NULL) {
    report_failed("no memory");
  }
  gpu_check(cudaMemcpy(seen, it->device, it->bytes, cudaMemcpyDeviceToHost));
  for (uint64_t i = 0; i < it->bytes; i++) {
    if (seen[i] != it->host[i]) {
      report_failed("%s %u: byte %llu is 0x%02x, the host has 0x%02x", what, number, (unsigned long long)i, seen[i],
                    it->host[i]);
    }
  }
  free(seen);
}

static void fill_rows(uint8_t *out, uint64_t numbers) {
  const uint32_t style = random_chance(3) ? random_below(random_bf16_kinds) : 0;
  for (uint64_t i = 0; i < numbers; i++) {
    const uint16_t bits = random_bf16(random_chance(200) ? (uint32_t)random_bf16_special : style);
    memcpy(out + 2 * i, &bits, 2);
  }
}

/* ---- what there is ---- */

static void kind_init(struct kind *kind, uint32_t number) {
  const uint64_t row_bytes = 2 * (uint64_t)kinds[number].width;
  if (kvp_geometry_init(kvp_format_get(kinds[number].format), kinds[number].width, tokens_per_block, num_blocks, 1,
                        &kind->geometry, NULL) != KVP_OK) {
    report_failed("a geometry of kind %u", number);
  }
  kind->region = twin_make(kind->geometry.region_bytes);
  kind->weight = twin_make(row_bytes);
  kind->source = twin_make(rows_max * row_bytes);
  memset(kind->region.host, 0xA5, kind->region.bytes);
  fill_rows(kind->weight.host, kinds[number].width);
  twin_push(&kind->region);
  twin_push(&kind->weight);
}

static void shared_init(void) {
  table = twin_make(sizeof(float) * position_count * rotary_dims);
  owners = twin_make(num_blocks * sizeof(uint64_t));
  float *angles = (float *)(void *)table.host;
  for (uint32_t i = 0; i < position_count * rotary_dims; i++) {
    const float angle = (float)i / 7.0F;
    angles[i] = i % rotary_dims < rotary_dims / 2 ? cosf(angle) : sinf(angle);
  }
  for (uint32_t block = 0; block < num_blocks; block++) {
    const uint64_t entry =
        kvp_owner_entry_make(1, block == 3 ? KVP_BLOCK_SEALED : KVP_BLOCK_LEASED, block == 5 ? 9 : owner);
    memcpy(owners.host + block * sizeof entry, &entry, sizeof entry);
  }
  twin_push(&table);
  twin_push(&owners);
  for (uint32_t i = 0; i < kind_count; i++) {
    kind_init(&all_kinds[i], i);
  }
  gpu_check(cudaMalloc((void **)&counts, (1 + ops_max) * sizeof *counts));
  gpu_check(cudaMemset(counts, 0, (1 + ops_max) * sizeof *counts));
  gpu_check(cudaHostAlloc((void **)&found, (1 + ops_max) * sizeof *found, cudaHostAllocMapped));
  gpu_check(cudaHostAlloc((void **)&bell, bell_bytes, cudaHostAllocMapped));
  memset(bell, 0, bell_bytes);
  gpu_check(cudaMalloc((void **)&words, words_bytes));
  gpu_check(cudaMemset(words, 0, words_bytes));
  gpu_check(cudaStreamCreateWithFlags(&daemon_stream, cudaStreamNonBlocking));
  gpu_check(cudaStreamCreateWithFlags(&worker_stream, cudaStreamNonBlocking));
}

static uint64_t *word_at(uint32_t word) {
  return words + (uint64_t)word * 8;
}

/* ---- ops ---- */

static void op_memory(struct op *op) {
  op->input = twin_make(view_bytes);
  op->back = twin_make(view_bytes);
  op->slots = twin_make(rows_max * sizeof(int32_t));
  op->positions = twin_make(rows_max * sizeof(int32_t));
  op->late = twin_make(2 * sizeof(int32_t) * rows_max);
}

/* What the op must not use yet: a slot and a position that would do. */
static void metadata_push_late(struct op *op) {
  memcpy(op->late.host, op->slots.host, op->slots.bytes);
  memcpy(op->late.host + op->slots.bytes, op->positions.host, op->positions.bytes);
  twin_push(&op->late);
  gpu_check(cudaMemset(op->slots.device, 0, op->slots.bytes));
  gpu_check(cudaMemset(op->positions.device, 0, op->positions.bytes));
}

/* Distinct slots, holes, and where the kernel checks, ones that are wrong. */
static void fill_metadata(struct op *op, uint64_t rows, bool checked) {
  int32_t *slots = (int32_t *)(void *)op->slots.host;
  int32_t *positions = (int32_t *)(void *)op->positions.host;
  const uint32_t first = random_below(slot_count);
  for (uint64_t i = 0; i < rows; i++) {
    slots[i] = random_chance(8) ? -1 : (int32_t)((first + 3 * i) % slot_count);
    positions[i] = (int32_t)random_below(position_count);
    if (!checked && random_chance(10)) {
      slots[i] = random_chance(2) ? slot_count : -5;
    }
    if (!checked && random_chance(10)) {
      positions[i] = random_chance(2) ? position_count : -1;
    }
  }
}

static uint64_t skipped_of(const struct op *op, uint64_t rows) {
  uint64_t skipped = 0;
  for (uint64_t i = 0; i < rows; i++) {
    skipped += ((const int32_t *)(const void *)op->slots.host)[i] == -1;
  }
  return skipped;
}

static void op_make(struct op *op) {
  const uint32_t number = random_below(kind_count);
  op->kind = &all_kinds[number];
  const struct kvp_format_sizes *sizes = &op->kind->geometry.sizes;
  const uint64_t rows = random_chance(12) ? 0 : 1 + random_below(rows_max);
  const bool checked = random_chance(2);
  const bool casts_back = sizes->loaded_scale_bytes == 0 && random_chance(2);
  fill_metadata(op, rows, checked);
  fill_rows(op->input.host, rows * sizes->elements);
  memset(op->back.host, 0x5A, op->back.bytes);
  op->host = (struct kvp_fused_store_params){
      .store = {.layer = {op->kind->region.host, &op->kind->geometry},
                .source = {op->input.host, sizes->row_bytes},
                .slots = (const int32_t *)(const void *)op->slots.host,
                .row_count = rows,
                .rows_skipped = checked ? skipped_of(op, rows) : 0,
                .cast_back = {casts_back ? op->back.host : NULL, sizes->row_bytes},
                .check = {checked ? NULL : (const uint64_t *)(const void *)owners.host, epoch, owner}},
      .norm_weight = (const uint16_t *)(const void *)op->kind->weight.host,
      .positions = (const int32_t *)(const void *)op->positions.host,
      .cos_sin = {table.host, rotary_dims * sizeof(float)},
      .position_count = position_count,
      .rotary_dims = rotary_dims,
      .rope_offset = sizes->elements - rotary_dims,
      .eps = 1e-6F,
      .flags = random_below(8),
      .positions_checked = checked,
      .rows_are_known = random_chance(2),
  };
  op->device = op->host;
  op->device.store.layer.base = op->kind->region.device;
  op->device.store.source.base = op->kind->source.device;
  op->device.store.slots = (const int32_t *)(const void *)op->slots.device;
  op->device.store.cast_back.base = casts_back ? op->back.device : NULL;
  op->device.store.check.entries = checked ? NULL : (const uint64_t *)(const void *)owners.device;
  op->device.norm_weight = (const uint16_t *)(const void *)op->kind->weight.device;
  op->device.positions = (const int32_t *)(const void *)op->positions.device;
  op->device.cos_sin.base = table.device;
  const struct twin *twins[] = {&op->input, &op->back, &op->slots, &op->positions};
  for (size_t i = 0; i < sizeof twins / sizeof twins[0]; i++) {
    twin_push(twins[i]);
  }
  if (!op->host.rows_are_known) {
    metadata_push_late(op);
  }
}

/* ---- both ends ---- */

static struct replay_points points_of(uint32_t op) {
  return (struct replay_points){.start = word_at(start_word),
                                .done = word_at(done_word + op),
                                .base = word_at(base_word),
                                .points = ops_max,
                                .deadline_ns = UINT64_C(20000000000),
                                .problem = bell + bell_problem};
}

/* As the executor does it. */
static void replay_start(uint64_t deadline_ns) {
  static struct kvp_fused_store_params params[ops_max];
  static struct kvp_replay_points points[ops_max];
  replays++;
  base = replays * ops_max;
  for (uint32_t i = 0; i < op_count; i++) {
    params[i] = ops[i].device;
    points[i] = (struct kvp_replay_points){word_at(start_word), base + i + 1, word_at(done_word + i), base + i + 1};
  }
  for (uint32_t done = 0; done < op_count;) {
    const uint32_t left = op_count - done;
    const struct kvp_cuda_replay replay = {
        .ops = params + done,
        .points = points + done,
        .counts = counts + 1 + done,
        .op_count = left < kvp_cuda_replay_ops_max ? left : kvp_cuda_replay_ops_max,
        .first_op = done,
        .state = counts,
        .abort = bell + bell_abort,
        .abort_value = replays,
        .deadline_ns = deadline_ns,
    };
    gpu_check(kvp_cuda_replay_launch(&replay, daemon_stream));
    done += replay.op_count;
  }
  const struct kvp_cuda_signal signal = {.counts = counts,
                                         .found = found,
                                         .finished_ns = bell + bell_finished,
                                         .timeline = bell + bell_timeline,
                                         .value = replays,
                                         .op_count = 1 + op_count};
  gpu_check(kvp_cuda_signal_launch(&signal, daemon_stream));
}

/* The op's slots and positions, where they were not known before. */
static void metadata_become_late(const struct op *op) {
  if (op->host.rows_are_known) {
    return;
  }
  gpu_check(
      cudaMemcpyAsync(op->slots.device, op->late.device, op->slots.bytes, cudaMemcpyDeviceToDevice, worker_stream));
  gpu_check(cudaMemcpyAsync(op->positions.device, op->late.device + op->slots.bytes, op->positions.bytes,
                            cudaMemcpyDeviceToDevice, worker_stream));
}

/* The worker's first `count` ops, whose rows are put where the last one's were. */
static void worker_run(uint32_t count) {
  struct replay_points points = points_of(0);
  gpu_check(replay_points_begin(&points, worker_stream));
  for (uint32_t i = 0; i < count; i++) {
    const struct op *op = &ops[i];
    const uint64_t bytes = op->host.store.row_count * op->kind->geometry.sizes.row_bytes;
    points = points_of(i);
    gpu_check(
        cudaMemcpyAsync(op->kind->source.device, op->input.device, bytes, cudaMemcpyDeviceToDevice, worker_stream));
    metadata_become_late(op);
    gpu_check(replay_points_put(&points, i + 1, true, i % 3 == 0, worker_stream));
    gpu_check(replay_points_put(&points, i + 1, false, true, worker_stream));
  }
  gpu_check(cudaStreamSynchronize(worker_stream));
}

static struct kvp_replay_result replay_end(void) {
  struct kvp_replay_result result;
  gpu_check(cudaStreamSynchronize(daemon_stream));
  if (bell[bell_timeline] != replays) {
    report_failed("the replay's end is %llu, not %llu", (unsigned long long)bell[bell_timeline],
                  (unsigned long long)replays);
  }
  kvp_cuda_replay_result(found, &result);
  return result;
}

static void op_check(uint32_t number) {
  struct op *op = &ops[number];
  struct kvp_op_counts expected = {0}, told = {0};
  kvp_host_fused_store(&op->host, 0, op->host.store.row_count, &expected);
  kvp_cuda_fused_store_counts(&op->device, &found[1 + number], &told);
  if (memcmp(&expected, &told, sizeof told) != 0) {
    report_failed("op %u of %s: %llu stored, %llu skipped, %llu rejected, %llu not finite; the host has %llu, %llu, "
                  "%llu, %llu",
                  number, op->kind->geometry.format->name, (unsigned long long)told.rows_stored,
                  (unsigned long long)told.rows_skipped, (unsigned long long)told.rows_rejected,
                  (unsigned long long)told.rows_nonfinite, (unsigned long long)expected.rows_stored,
                  (unsigned long long)expected.rows_skipped, (unsigned long long)expected.rows_rejected,
                  (unsigned long long)expected.rows_nonfinite);
  }
  if (op->host.store.cast_back.base != NULL) {
    twin_compare(&op->back, "cast-back of op", number);
  }
}

/* ---- tests ---- */

static void contents_begin(uint32_t blocks, const char *how) {
  report_begin("a replay of %u ops, %u blocks at most%s", op_count, blocks == 0 ? kvp_cuda_replay_blocks_max : blocks,
               how);
  kvp_cuda_size_pin(KVP_CUDA_SIZE_AUTOMATIC, blocks);
  for (uint32_t i = 0; i < op_count; i++) {
    op_make(&ops[i]);
  }
}

static void contents_check(void) {
  uint64_t rows = 0;
  const struct kvp_replay_result result = replay_end();
  if (result.end != KVP_REPLAY_DONE || bell[bell_problem] != 0) {
    report_failed("it ended with %d at op %u, the worker found 0x%llx", (int)result.end, result.op,
                  (unsigned long long)bell[bell_problem]);
  }
  for (uint32_t i = 0; i < op_count; i++) {
    op_check(i);
    rows += ops[i].host.store.row_count;
  }
  for (uint32_t i = 0; i < kind_count; i++) {
    twin_compare(&all_kinds[i].region, "region", i);
  }
  report_passed("%llu rows", (unsigned long long)rows);
}

static void test_contents(uint32_t blocks) {
  contents_begin(blocks, "");
  gpu_check(cudaDeviceSynchronize());
  replay_start(UINT64_MAX);
  worker_run(op_count);
  contents_check();
}

/* Rows of the op's own, or those that the op before casts back. */
static void source_choose(uint32_t number) {
  struct op *op = &ops[number];
  const struct op *before = number == 0 ? NULL : &ops[number - 1];
  const bool from_before =
      before != NULL && before->kind == op->kind && before->host.store.cast_back.base != NULL && random_chance(2);
  op->host.store.source.base = from_before ? before->back.host : op->input.host;
  op->device.store.source.base = from_before ? before->back.device : op->input.device;
}

/* Nobody waits between ops: what keeps their order is the kernel. */
static void test_alone(uint32_t blocks) {
  const uint64_t last = (replays + 1) * ops_max + op_count;
  contents_begin(blocks, ", every point reached before");
  for (uint32_t i = 0; i < op_count; i++) {
    source_choose(i);
    metadata_become_late(&ops[i]);
  }
  gpu_check(cudaMemcpy(word_at(start_word), &last, sizeof last, cudaMemcpyHostToDevice));
  gpu_check(cudaDeviceSynchronize());
  replay_start(UINT64_MAX);
  contents_check();
}

static uint64_t gpu_clock(void) {
  gpu_check(kvp_cuda_empty_launch(bell + bell_clock, worker_stream));
  gpu_check(cudaStreamSynchronize(worker_stream));
  return bell[bell_clock];
}

/* Ops before `failed` are done, the others' words are poisoned. */
static void failure_check(enum kvp_replay_end end, uint32_t failed, uint64_t value) {
  static uint64_t seen[(done_word + ops_max) * 8];
  const struct kvp_replay_result result = replay_end();
  if (result.end != end || result.op != failed || result.value != value) {
    report_failed("it ended with %d at op %u, value 0x%llx; expected %d, %u, 0x%llx", (int)result.end, result.op,
                  (unsigned long long)result.value, (int)end, failed, (unsigned long long)value);
  }
  gpu_check(cudaMemcpy(seen, words, sizeof seen, cudaMemcpyDeviceToHost));
  for (uint32_t i = 0; i < op_count; i++) {
    const uint64_t expected = i < failed ? base + i + 1 : KVP_TIMELINE_POISON;
    if (seen[(size_t)(done_word + i) * 8] != expected) {
      report_failed("the word of op %u is 0x%llx, not 0x%llx", i,
                    (unsigned long long)seen[(size_t)(done_word + i) * 8], (unsigned long long)expected);
    }
  }
  for (uint32_t i = 0; i < failed; i++) {
    op_check(i);
  }
  for (uint32_t i = 0; i < kind_count; i++) {
    twin_compare(&all_kinds[i].region, "region", i);
  }
  gpu_check(cudaMemset(words, 0, sizeof seen));
  gpu_check(cudaDeviceSynchronize());
}

/* The words are 0 again, but for what the next replay counts from. */
static void words_begin(void) {
  const uint64_t before = replays * ops_max;
  gpu_check(cudaMemcpy(word_at(base_word), &before, sizeof before, cudaMemcpyHostToDevice));
}

static void test_poison(uint32_t at) {
  const uint64_t poison = KVP_TIMELINE_POISON;
  report_begin("the word is poisoned at op %u", at);
  for (uint32_t i = 0; i < op_count; i++) {
    op_make(&ops[i]);
  }
  words_begin();
  replay_start(UINT64_MAX);
  worker_run(at);
  gpu_check(cudaMemcpyAsync(word_at(start_word), &poison, sizeof poison, cudaMemcpyHostToDevice, worker_stream));
  failure_check(KVP_REPLAY_POISONED, at, poison);
  report_passed("%u ops were done", at);
}

static void test_deadline(uint32_t at) {
  report_begin("the deadline passes at op %u", at);
  for (uint32_t i = 0; i < op_count; i++) {
    op_make(&ops[i]);
  }
  words_begin();
  replay_start(gpu_clock() + 400000000);
  worker_run(at);
  failure_check(KVP_REPLAY_DEADLINE, at, at == 0 ? 0 : base + at);
  report_passed("%u ops were done", at);
}

static void test_abort(uint32_t at) {
  report_begin("it is aborted at op %u", at);
  for (uint32_t i = 0; i < op_count; i++) {
    op_make(&ops[i]);
  }
  words_begin();
  replay_start(UINT64_MAX);
  worker_run(at);
  __atomic_store_n(bell + bell_abort, replays, __ATOMIC_RELEASE);
  failure_check(KVP_REPLAY_ABORTED, at, at == 0 ? 0 : base + at);
  report_passed("%u ops were done", at);
}

int main(int argc, char **argv) {
  const uint32_t blocks[] = {0, 1, 2, 3, 5};
  const bool is_alone = argc > 1 && strcmp(argv[1], "alone") == 0;
  if (is_alone || (argc > 1 && strcmp(argv[1], "small") == 0)) {
    op_count = 140; /* two launches still */
  }
  random_start(1);
  gpu_open();
  gpu_check(replay_points_load()); /* not while a kernel waits for them */
  shared_init();
  for (uint32_t i = 0; i < op_count; i++) {
    op_memory(&ops[i]);
  }
  for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
    (is_alone ? test_alone : test_contents)(blocks[i]);
  }
  if (is_alone) {
    return 0;
  }
  kvp_cuda_size_pin(KVP_CUDA_SIZE_AUTOMATIC, 0);
  gpu_check(cudaMemset(words, 0, words_bytes));
  const uint32_t places[] = {0, 7, 130};
  for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
    test_poison(places[i]);
    test_deadline(places[i]);
    test_abort(places[i]);
  }
  return 0;
}
