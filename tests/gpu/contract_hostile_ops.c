/* Arrays that change while the kernels of fused_store, stores through a gather index, copies of rows and index ops read
 * them: nothing outside the session's blocks and the op's output is touched, what is made is inside its bounds, and the
 * counts add up.
 *
 *   contract_hostile_ops [small]
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/hostile_scene.h"
#include "tests/gpu/report.h"
#include "tests/gpu/rewriter.h"

enum {
  tokens_per_block = 17,
  position_count = 300,
  rotary_dims = 64,
  queries = 37,
  table_columns = 50,
  ring_tokens = 400,
  cat_base = 5120,
  copied_row_words = 36,
};

static uint64_t rows_max = 20000; /* of one op */
static uint32_t num_blocks = 1024;
static uint64_t columns = 2050; /* of what an index op makes */
static uint32_t rounds = 20;
static uint64_t rewrites = rewrites_many;

/* Numbers around [0, limit): right ones, the edges of everything, any bits. */
static void fill_choices(struct rewriter *rewriter, uint64_t limit) {
  const int32_t edges[] = {INT32_MIN,      -2,        -1,         0,    (int32_t)limit - 1,
                           (int32_t)limit, INT32_MAX, 0x7FC00000, -256, (int32_t)limit + 7};
  for (uint64_t i = 0; i < rewriter_choices_max; i++) {
    uint64_t bits = mix_bits(i + 1);
    rewriter->choices[i] = (int32_t)(mix_bits(bits) % limit);
    if (bits % 4 == 0) {
      rewriter->choices[i] = edges[(bits >> 8) % (sizeof(edges) / sizeof(edges[0]))];
    } else if (bits % 4 == 1 && bits % 3 == 0) {
      rewriter->choices[i] = (int32_t)(uint32_t)bits;
    }
  }
}

static void expect_row_sum(const struct kvp_op_counts *counts, uint64_t rows) {
  uint64_t sum = counts->rows_stored + counts->rows_skipped + counts->rows_rejected;
  if (sum != rows) {
    report_failed("%llu rows stored, skipped and rejected of %llu", (unsigned long long)sum,
                  (unsigned long long)rows);
  }
}

/* ---- stores ---- */

static void changing_gather(struct scene *scene, bool on_host) {
  static struct rewriter rewriter;
  bool cast_back = scene->geometry.sizes.loaded_scale_bytes == 0;
  fill_choices(&rewriter, scene->rows_max);
  rewriter_start(&rewriter, 2 * scene->rows_max, rewrites, on_host);
  struct kvp_store_params params = scene_store(scene, scene->rows_max, cast_back);
  params.slots = rewriter.values;
  params.gather = rewriter.values + scene->rows_max;
  params.source_rows = scene->rows_max;
  scene_clear_outputs(scene);
  for (uint32_t round = 0; round < rounds; round++) {
    const struct kvp_op_counts counts = scene_run_store(scene, &params);
    expect_row_sum(&counts, params.row_count);
  }
  rewriter_end(&rewriter);
  scene_check_region(scene, false);
  if (cast_back) {
    scene_check_outputs(scene, params.row_count);
  }
}

static struct kvp_op_counts run_fused(struct scene *scene, const struct kvp_fused_store_params *params) {
  struct kvp_cuda_counts found;
  struct kvp_op_counts counts = {0};
  gpu_check(cudaMemsetAsync(scene->counts, 0, sizeof(*scene->counts), scene->stream));
  gpu_check(kvp_cuda_fused_store_launch(params, scene->counts, scene->stream));
  gpu_check(cudaStreamSynchronize(scene->stream));
  gpu_check(cudaMemcpy(&found, scene->counts, sizeof(found), cudaMemcpyDeviceToHost));
  kvp_cuda_fused_store_counts(params, &found, &counts);
  return counts;
}

static void changing_fused(struct scene *scene, bool on_host) {
  static struct rewriter rewriter;
  const bool cast_back = scene->geometry.sizes.loaded_scale_bytes == 0;
  struct gpu_memory table = gpu_memory_make((uint64_t)position_count * rotary_dims * sizeof(float));
  const uint64_t before = table.bytes - (uint64_t)position_count * rotary_dims * sizeof(float);
  gpu_check(cudaMemset(table.base, 0, table.bytes));
  fill_choices(&rewriter, position_count);
  rewriter_start(&rewriter, 2 * scene->rows_max, rewrites, on_host);
  struct kvp_fused_store_params params = {
      .store = scene_store(scene, scene->rows_max, cast_back),
      .norm_weight = (const void *)scene->source.base,
      .positions = rewriter.values + scene->rows_max,
      .cos_sin = {table.base + before, rotary_dims * sizeof(float)},
      .position_count = position_count,
      .rotary_dims = rotary_dims,
      .rope_offset = scene->geometry.sizes.elements - rotary_dims,
      .eps = 1e-6F,
  };
  params.store.slots = rewriter.values;
  scene_clear_outputs(scene);
  for (uint32_t round = 0; round < rounds; round++) {
    params.flags = round % 8;
    const struct kvp_op_counts counts = run_fused(scene, &params);
    expect_row_sum(&counts, params.store.row_count);
  }
  rewriter_end(&rewriter);
  scene_check_region(scene, false);
  if (cast_back) {
    scene_check_outputs(scene, params.store.row_count);
  }
  gpu_memory_free(&table);
}

/* ---- what makes rows of its own ---- */

/* Rows of int32 with a gap behind each, in known bytes. */
struct made {
  struct gpu_memory memory;
  struct kvp_rows rows;
  uint64_t row_count;
  uint64_t row_words;
  struct kvp_cuda_counts *counts;
  cudaStream_t stream;
};

static void made_init(struct made *made, uint64_t row_count, uint64_t row_words, uint64_t gap_words) {
  const uint64_t stride = (row_words + gap_words) * sizeof(int32_t);
  *made = (struct made){.row_count = row_count, .row_words = row_words};
  made->memory = gpu_memory_make(row_count * stride + 2 * (uint64_t)scene_margin_bytes);
  made->rows = (struct kvp_rows){made->memory.base + scene_margin_bytes, stride};
  gpu_check(cudaMemset(made->memory.base, scene_out_fill, made->memory.bytes));
  gpu_check(cudaMalloc((void **)&made->counts, sizeof(*made->counts)));
  gpu_check(cudaMemset(made->counts, 0, sizeof(*made->counts)));
  gpu_check(cudaStreamCreateWithFlags(&made->stream, cudaStreamNonBlocking));
  gpu_check(cudaDeviceSynchronize());
}

typedef bool value_fn(int32_t value, uint64_t column);

/* Everything outside the rows is what it was; inside, `allowed` says. */
static void made_check(const struct made *made, value_fn *allowed) {
  uint8_t *found = malloc(made->memory.bytes);
  if (found == NULL) {
    report_failed("out of memory");
  }
  gpu_check(cudaStreamSynchronize(made->stream));
  gpu_check(cudaMemcpy(found, made->memory.base, made->memory.bytes, cudaMemcpyDeviceToHost));
  for (uint64_t i = 0; i < made->memory.bytes; i += sizeof(int32_t)) {
    int32_t value;
    memcpy(&value, found + i, sizeof(value));
    const uint64_t at = i - scene_margin_bytes;
    const uint64_t column = at % made->rows.stride_bytes / sizeof(int32_t);
    const bool inside =
        i >= scene_margin_bytes && at / made->rows.stride_bytes < made->row_count && column < made->row_words;
    if (inside && !allowed(value, column)) {
      report_failed("column %llu of a row is %d", (unsigned long long)column, value);
    } else if (!inside && value != 0x01010101 * scene_out_fill) {
      report_failed("byte %lld of the output, or one next to it, was written", (long long)at);
    }
  }
  free(found);
}

static void made_deinit(struct made *made) {
  gpu_check(cudaStreamDestroy(made->stream));
  gpu_check(cudaFree(made->counts));
  gpu_memory_free(&made->memory);
}

static bool slot_allowed(int32_t value, uint64_t column) {
  (void)column;
  return value >= -1 && value < (int32_t)(num_blocks * tokens_per_block);
}

static bool ring_slot_allowed(int32_t value, uint64_t column) {
  (void)column;
  return value >= -1 && value < (int32_t)(num_blocks * ring_tokens);
}

static bool column_allowed(int32_t value, uint64_t column) {
  (void)value;
  (void)column;
  return true;
}

/* The second half is the right side's. */
static bool cat_allowed(int32_t value, uint64_t column) {
  return column < columns / 2 || value == -1 || value >= cat_base;
}

static void changing_convert(bool on_host) {
  static struct rewriter rewriter;
  struct made made;
  made_init(&made, queries, columns, 3);
  fill_choices(&rewriter, (uint64_t)table_columns * tokens_per_block);
  rewriter_start(&rewriter, queries * (columns + table_columns + 1), rewrites, on_host);
  const struct kvp_convert_index_params params = {
      .topk = {(uint8_t *)rewriter.values, columns * sizeof(int32_t)},
      .out = made.rows,
      .tables = {(uint8_t *)(rewriter.values + queries * columns), table_columns * sizeof(int32_t)},
      .valid = rewriter.values + queries * (columns + table_columns),
      .batch = queries,
      .queries = 1,
      .columns = columns,
      .table_columns = table_columns,
      .tokens_per_block = tokens_per_block,
      .num_blocks = num_blocks,
  };
  for (uint32_t round = 0; round < rounds; round++) {
    gpu_check(kvp_cuda_convert_index_launch(&params, made.counts, made.stream));
    made_check(&made, slot_allowed);
  }
  rewriter_end(&rewriter);
  made_deinit(&made);
}

static void changing_swa(bool on_host) {
  static struct rewriter rewriter;
  struct made made;
  made_init(&made, queries, columns, 1);
  fill_choices(&rewriter, ring_tokens);
  rewriter_start(&rewriter, 2 * (uint64_t)queries, rewrites, on_host);
  const struct kvp_swa_index_params params = {.offset_len = rewriter.values,
                                              .out = made.rows,
                                              .queries = queries,
                                              .window = columns,
                                              .ring_tokens = ring_tokens,
                                              .num_blocks = num_blocks};
  for (uint32_t round = 0; round < rounds; round++) {
    gpu_check(kvp_cuda_swa_index_launch(&params, made.counts, made.stream));
    made_check(&made, ring_slot_allowed);
  }
  rewriter_end(&rewriter);
  made_deinit(&made);
}

static void changing_expand(bool on_host) {
  static struct rewriter rewriter;
  struct made made;
  made_init(&made, queries, columns, 2);
  fill_choices(&rewriter, columns);
  rewriter_start(&rewriter, 4 * (uint64_t)queries, rewrites, on_host);
  const struct kvp_expand_index_params params = {
      .pivots = rewriter.values, .out = made.rows, .row_count = queries, .width = columns};
  for (uint32_t round = 0; round < rounds; round++) {
    gpu_check(kvp_cuda_expand_index_launch(&params, made.counts, made.stream));
    made_check(&made, column_allowed);
  }
  rewriter_end(&rewriter);
  made_deinit(&made);
}

static void changing_cat(bool on_host) {
  static struct rewriter rewriter;
  struct made made;
  const uint64_t half = columns / 2;
  made_init(&made, queries, columns, 0);
  fill_choices(&rewriter, columns);
  rewriter_start(&rewriter, queries * columns, rewrites, on_host);
  const struct kvp_cat_index_params params = {
      .left = {(uint8_t *)rewriter.values, columns * sizeof(int32_t)},
      .right = {(uint8_t *)(rewriter.values + half), columns * sizeof(int32_t)},
      .out = made.rows,
      .row_count = queries,
      .left_columns = half,
      .right_columns = columns - half,
      .base = cat_base,
  };
  for (uint32_t round = 0; round < rounds; round++) {
    gpu_check(kvp_cuda_cat_index_launch(&params, made.counts, made.stream));
    made_check(&made, cat_allowed);
  }
  rewriter_end(&rewriter);
  made_deinit(&made);
}

/* Words of the source are all cat_base: a row is that, or zeros. */
static bool copied_allowed(int32_t value, uint64_t column) {
  (void)column;
  return value == 0 || value == cat_base;
}

static void changing_copy_rows(bool on_host) {
  static struct rewriter rewriter;
  struct made made;
  const uint64_t source_rows = rows_max / 2;
  const uint64_t words = source_rows * copied_row_words;
  struct gpu_memory source = gpu_memory_make(words * sizeof(int32_t));
  int32_t *numbers = malloc(words * sizeof(*numbers));
  if (numbers == NULL) {
    report_failed("out of memory");
  }
  for (uint64_t i = 0; i < words; i++) {
    numbers[i] = cat_base;
  }
  uint8_t *first = source.base + (source.bytes - words * sizeof(int32_t)) / 16 * 16;
  gpu_check(cudaMemset(source.base, scene_foreign_byte, source.bytes));
  gpu_check(cudaMemcpy(first, numbers, words * sizeof(*numbers), cudaMemcpyHostToDevice));
  free(numbers);
  made_init(&made, rows_max, copied_row_words, 4);
  fill_choices(&rewriter, source_rows);
  rewriter_start(&rewriter, rows_max, rewrites, on_host);
  const struct kvp_copy_rows_params params = {.source = {first, copied_row_words * sizeof(int32_t)},
                                              .out = made.rows,
                                              .gather = rewriter.values,
                                              .row_count = rows_max,
                                              .source_rows = source_rows,
                                              .row_bytes = copied_row_words * sizeof(int32_t)};
  for (uint32_t round = 0; round < rounds; round++) {
    gpu_check(kvp_cuda_copy_rows_launch(&params, made.counts, made.stream));
    made_check(&made, copied_allowed);
  }
  rewriter_end(&rewriter);
  made_deinit(&made);
  gpu_memory_free(&source);
}

/* ---- all of them ---- */

static void run_format(const struct kvp_format *format, const char *size) {
  struct scene scene;
  scene_init(&scene, format, tokens_per_block, num_blocks, rows_max);
  for (int on_host = 0; on_host < 2; on_host++) {
    const char *who = on_host == 1 ? "the CPU" : "another stream";
    report_begin("slots and gather index rewritten by %s %s, %s", who, format->name, size);
    changing_gather(&scene, on_host == 1);
    report_passed("%u stores", rounds);
    report_begin("slots and positions rewritten by %s %s, %s", who, format->name, size);
    changing_fused(&scene, on_host == 1);
    report_passed("%u fused stores", rounds);
  }
  scene_deinit(&scene);
}

static void run_ops(const char *size) {
  static const struct {
    const char *name;
    void (*run)(bool on_host);
  } ops[] = {{"convert_kv_index", changing_convert},
             {"swa_index_decode", changing_swa},
             {"expand_swa_index", changing_expand},
             {"kv_index_cat", changing_cat},
             {"copy_rows", changing_copy_rows}};
  for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
    for (int on_host = 0; on_host < 2; on_host++) {
      report_begin("arrays of %s rewritten by %s, %s", ops[i].name, on_host == 1 ? "the CPU" : "another stream",
                   size);
      ops[i].run(on_host == 1);
      report_passed("%u ops", rounds);
    }
  }
}

int main(int argc, char **argv) {
  bool small = argc > 1 && strcmp(argv[1], "small") == 0;
  rows_max = small ? 600 : rows_max;
  num_blocks = small ? 96 : num_blocks;
  columns = small ? 270 : columns;
  rounds = small ? 3 : rounds;
  rewrites = small ? rewrites_few : rewrites;
  gpu_open();
  for (size_t i = 0; i < scene_size_count; i++) {
    const char *size = scene_size_pin(i);
    for (int id = 0; id < kvp_format_count; id++) {
      run_format(kvp_format_get((enum kvp_format_id)id), size);
    }
    run_ops(size);
  }
  return 0;
}
