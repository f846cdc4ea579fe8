/* Host index, fused-store and block ops against a memcpy that writes as many bytes as they do, in the same run, on one
 * thread; fused stores also against the store of the same rows. Prints median and p99 of the repeats.
 *
 *   bench_host_ops [op | all]
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/host/variant.h"
#include "kernels/ops.h"

enum {
  repeats_max = 2001,
  repeats_min = 7,
  tokens_per_block = 64,
  compressed_tokens = 16, /* 64 tokens at a ratio of 4 */
  ring_tokens = 4096,
  topk_columns = 2048,
  tables_columns = 1024,
  compressed_positions = tables_columns * compressed_tokens,
  rotary_dims = 64,
  positions = 4096,
};

static const uint64_t case_budget_ns = UINT64_C(200000000);

struct sample {
  double median_ns;
  double p99_ns;
};

/* Memory of every op, filled for the one being measured. */
struct bench {
  const struct kvp_host_variant *variant;
  uint8_t *in;
  uint8_t *other;
  uint8_t *out;
  uint8_t *tables;
  int32_t *small; /* valid, offset_len, pivots, slots, pairs */
  int32_t *positions;
  uint64_t rows;
  uint64_t bytes; /* written */
  struct kvp_geometry geometry;
  struct kvp_convert_index_params convert;
  struct kvp_swa_index_params swa;
  struct kvp_expand_index_params expand;
  struct kvp_cat_index_params cat;
  struct kvp_fused_store_params fused;
  struct kvp_blocks_params blocks;
};

static uint64_t now_ns(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

static uint64_t random_next(void) {
  static uint64_t state = 88172645463325252U;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static void *allocate(uint64_t bytes) {
  void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == NULL) {
    (void)fprintf(stderr, "out of memory: %llu bytes\n", (unsigned long long)bytes);
    exit(1);
  }
  memset(memory, 0, bytes);
  return memory;
}

static int compare_doubles(const void *a, const void *b) {
  double left = *(const double *)a;
  double right = *(const double *)b;
  return (left > right) - (left < right);
}

typedef void action_fn(struct bench *bench);

static struct sample measure(struct bench *bench, action_fn *action) {
  static double times[repeats_max];
  int count = 0;
  action(bench);
  uint64_t deadline = now_ns() + case_budget_ns;
  while (count < repeats_max && (count < repeats_min || now_ns() < deadline)) {
    uint64_t begin = now_ns();
    action(bench);
    times[count++] = (double)(now_ns() - begin);
  }
  qsort(times, (size_t)count, sizeof(times[0]), compare_doubles);
  return (struct sample){.median_ns = times[count / 2], .p99_ns = times[(count - 1) * 99 / 100]};
}

/* ---- what is measured ---- */

static struct kvp_op_counts counts;

static void do_convert(struct bench *bench) {
  bench->variant->index->convert(&bench->convert, 0, bench->rows, &counts);
}
static void do_swa(struct bench *bench) {
  bench->variant->index->swa(&bench->swa, 0, bench->rows, &counts);
}
static void do_expand(struct bench *bench) {
  bench->variant->index->expand(&bench->expand, 0, bench->rows, &counts);
}
static void do_cat(struct bench *bench) {
  bench->variant->index->cat(&bench->cat, 0, bench->rows, &counts);
}
static void do_fused(struct bench *bench) {
  bench->variant->fused_store[bench->geometry.format->id](&bench->fused, 0, bench->rows, &counts);
}
static void do_store(struct bench *bench) {
  bench->variant->store[bench->geometry.format->id](&bench->fused.store, 0, bench->rows, &counts);
}
static void do_copy_blocks(struct bench *bench) {
  kvp_host_copy_blocks(&bench->blocks, 0, bench->rows, &counts);
}
static void do_zero_blocks(struct bench *bench) {
  kvp_host_zero_blocks(&bench->blocks, 0, bench->rows, &counts);
}
static void do_copy(struct bench *bench) {
  memcpy(bench->out, bench->in, bench->bytes);
  __asm__ volatile("" ::: "memory");
}

/* ---- cases ---- */

static void report(struct bench *bench, const char *op, const char *shape, action_fn *action) {
  struct sample sample = measure(bench, action);
  struct sample copy = measure(bench, do_copy);
  printf("%-14s %-22s %-9s %6llu %10.2f %10.2f %8.2f %11.2f %7.2f\n", op, shape, bench->variant->isa,
         (unsigned long long)bench->rows, sample.median_ns / 1e3, sample.p99_ns / 1e3,
         (double)bench->bytes / sample.median_ns, copy.median_ns / 1e3, copy.median_ns / sample.median_ns);
}

static const uint64_t query_counts[] = {1, 64, 512};

static void run_convert(struct bench *bench) {
  for (size_t i = 0; i < 3; i++) {
    bench->rows = query_counts[i];
    bench->bytes = bench->rows * topk_columns * sizeof(int32_t);
    for (uint64_t k = 0; k < bench->rows * topk_columns; k++) {
      ((int32_t *)(void *)bench->in)[k] = (int32_t)(random_next() % compressed_positions);
    }
    for (uint64_t k = 0; k < bench->rows * tables_columns; k++) {
      ((int32_t *)(void *)bench->tables)[k] = (int32_t)(random_next() % 65536);
    }
    for (uint64_t row = 0; row < bench->rows; row++) {
      bench->small[row] = topk_columns;
    }
    bench->convert = (struct kvp_convert_index_params){.topk = {bench->in, topk_columns * sizeof(int32_t)},
                                                       .out = {bench->out, topk_columns * sizeof(int32_t)},
                                                       .tables = {bench->tables, tables_columns * sizeof(int32_t)},
                                                       .valid = bench->small,
                                                       .batch = bench->rows,
                                                       .queries = 1,
                                                       .columns = topk_columns,
                                                       .table_columns = tables_columns,
                                                       .tokens_per_block = compressed_tokens,
                                                       .num_blocks = 65536};
    report(bench, "convert", "2048 top-k", do_convert);
  }
}

static void run_swa(struct bench *bench) {
  for (size_t i = 0; i < 3; i++) {
    bench->rows = query_counts[i];
    bench->bytes = bench->rows * ring_tokens * sizeof(int32_t);
    for (uint64_t row = 0; row < bench->rows; row++) {
      bench->small[2 * row] = (int32_t)(row * ring_tokens + random_next() % ring_tokens);
      bench->small[2 * row + 1] = ring_tokens;
    }
    bench->swa = (struct kvp_swa_index_params){.offset_len = bench->small,
                                               .out = {bench->out, ring_tokens * sizeof(int32_t)},
                                               .queries = bench->rows,
                                               .window = ring_tokens,
                                               .ring_tokens = ring_tokens,
                                               .num_blocks = 1024};
    report(bench, "swa_decode", "window 4096", do_swa);
  }
}

static void run_expand(struct bench *bench) {
  enum { width = 4096 };
  bench->rows = 1024;
  bench->bytes = bench->rows * width * sizeof(int32_t);
  for (int32_t row = 0; row < (int32_t)bench->rows; row++) {
    const int32_t pivots[] = {row + 1, width - row - 1, width, row + 1};
    memcpy(bench->small + 4 * (size_t)row, pivots, sizeof(pivots));
  }
  bench->expand = (struct kvp_expand_index_params){
      .pivots = bench->small, .out = {bench->out, width * sizeof(int32_t)}, .row_count = bench->rows, .width = width};
  report(bench, "expand_swa", "width 4096", do_expand);
}

static void run_cat(struct bench *bench) {
  static const struct {
    uint64_t left;
    uint64_t right;
    const char *name;
  } shapes[] = {{128, 64, "128 | 64"}, {4096, 2048, "4096 | 2048"}};
  for (size_t i = 0; i < 2; i++) {
    uint64_t left = shapes[i].left;
    uint64_t right = shapes[i].right;
    bench->rows = 1024;
    bench->bytes = bench->rows * (left + right) * sizeof(int32_t);
    for (uint64_t k = 0; k < bench->rows * right; k++) {
      ((int32_t *)(void *)bench->other)[k] = (int32_t)(random_next() % 2500);
    }
    bench->cat = (struct kvp_cat_index_params){.left = {bench->in, left * sizeof(int32_t)},
                                               .right = {bench->other, right * sizeof(int32_t)},
                                               .out = {bench->out, (left + right) * sizeof(int32_t)},
                                               .row_count = bench->rows,
                                               .left_columns = left,
                                               .right_columns = right,
                                               .base = 5120};
    report(bench, "cat", shapes[i].name, do_cat);
  }
}

static void geometry_init(struct bench *bench, enum kvp_format_id id, uint64_t blocks, uint32_t layers) {
  if (kvp_geometry_init(kvp_format_get(id), 0, tokens_per_block, (uint32_t)blocks, layers, &bench->geometry, NULL) !=
      KVP_OK) {
    (void)fprintf(stderr, "no geometry\n");
    exit(1);
  }
}

/* Rows of bell-shaped values, as latents are; `other` holds weights, then the table of angles. */
static void fill_fused(struct bench *bench) {
  uint32_t elements = bench->geometry.sizes.elements;
  for (uint64_t i = 0; i < bench->rows * elements; i++) {
    uint64_t bits = random_next();
    float value = (float)(int16_t)bits / 32768.0F + (float)(int16_t)(bits >> 16) / 32768.0F;
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    ((uint16_t *)(void *)bench->in)[i] = (uint16_t)(word >> 16);
  }
  for (uint32_t i = 0; i < elements; i++) {
    ((uint16_t *)(void *)bench->other)[i] = (uint16_t)(0x3F00 + random_next() % 0x100);
  }
  for (uint64_t i = 0; i < (uint64_t)positions * rotary_dims; i++) {
    ((float *)(void *)bench->tables)[i] =
        (float)(i % rotary_dims < rotary_dims / 2 ? cos((double)i) : sin((double)i));
  }
  for (uint64_t row = 0; row < bench->rows; row++) {
    bench->small[row] = (int32_t)row;
    bench->positions[row] = (int32_t)(random_next() % positions);
  }
}

static void run_fused_format(struct bench *bench, enum kvp_format_id id, uint64_t rows, uint32_t flags) {
  bench->rows = rows;
  geometry_init(bench, id, (rows + tokens_per_block - 1) / tokens_per_block, 1);
  const struct kvp_format_sizes *sizes = &bench->geometry.sizes;
  bench->bytes = rows * sizes->bytes_per_token;
  fill_fused(bench);
  bench->fused = (struct kvp_fused_store_params){
      .store = {.layer = {bench->out, &bench->geometry},
                .source = {bench->in, sizes->row_bytes},
                .slots = bench->small,
                .row_count = rows},
      .norm_weight = (const void *)bench->other,
      .positions = bench->positions,
      .cos_sin = {bench->tables, rotary_dims * sizeof(float)},
      .position_count = positions,
      .rotary_dims = rotary_dims,
      .rope_offset = sizes->elements - rotary_dims,
      .eps = 1e-6F,
      .flags = flags,
      .positions_checked = true,
  };
  report(bench, (flags & KVP_FUSED_HADAMARD) != 0 ? "fused+hadamard" : "fused", bench->geometry.format->name,
         do_fused);
}

static void run_fused(struct bench *bench) {
  static const uint64_t row_counts[] = {1, 256, 4096};
  for (int id = 0; id < kvp_format_count; id++) {
    for (size_t i = 0; i < 3; i++) {
      run_fused_format(bench, (enum kvp_format_id)id, row_counts[i], KVP_FUSED_ROUND_TO_BF16);
      run_fused_format(bench, (enum kvp_format_id)id, row_counts[i], KVP_FUSED_ROUND_TO_BF16 | KVP_FUSED_HADAMARD);
      report(bench, "store", bench->geometry.format->name, do_store);
    }
  }
}

static void run_blocks(struct bench *bench) {
  enum { blocks = 32, layers = 8 };
  geometry_init(bench, KVP_FORMAT_V41, UINT64_C(2) * blocks, layers);
  bench->rows = (uint64_t)blocks * layers;
  bench->bytes = bench->rows * bench->geometry.block_stride_bytes;
  for (size_t i = 0; i < blocks; i++) {
    bench->small[2 * i] = (int32_t)i;
    bench->small[2 * i + 1] = (int32_t)(blocks + i);
  }
  bench->blocks = (struct kvp_blocks_params){
      .base = bench->other, .geometry = &bench->geometry, .pairs = bench->small, .count = blocks};
  report(bench, "copy_blocks", "v41, 32 x 8 layers", do_copy_blocks);
  report(bench, "zero_blocks", "v41, 32 x 8 layers", do_zero_blocks);
}

static void print_hardware(void) {
  char line[256];
  FILE *file = fopen("/proc/cpuinfo", "r");
  while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
    if (strncmp(line, "model name", 10) == 0) {
      printf("%s", line);
      break;
    }
  }
  if (file != NULL) {
    (void)fclose(file);
  }
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    action_fn *run;
  } ops[] = {{"convert", run_convert}, {"swa", run_swa},     {"expand", run_expand},
             {"cat", run_cat},         {"fused", run_fused}, {"blocks", run_blocks}};
  enum { memory_bytes = 32 << 20, small_bytes = 1 << 20 };
  struct bench bench = {.in = allocate(memory_bytes),
                        .other = allocate(memory_bytes),
                        .out = allocate(memory_bytes),
                        .tables = allocate(memory_bytes),
                        .small = allocate(small_bytes),
                        .positions = allocate(small_bytes)};
  print_hardware();
  printf("%-14s %-22s %-9s %6s %10s %10s %8s %11s %7s\n", "op", "shape", "isa", "rows", "median_us", "p99_us",
         "GB/s out", "memcpy_us", "ratio");
  for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
    if (argc > 1 && strcmp(argv[1], "all") != 0 && strcmp(argv[1], ops[i].name) != 0) {
      continue;
    }
    for (size_t v = 0; (bench.variant = kvp_host_variant_get(v)) != NULL; v++) {
      ops[i].run(&bench);
    }
  }
  free(bench.in);
  free(bench.other);
  free(bench.out);
  free(bench.tables);
  free(bench.small);
  free(bench.positions);
  return 0;
}
