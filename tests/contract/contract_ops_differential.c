/* Random index ops, copies of rows and block ops against the reference, every variant of the host kernels: shapes, strides, in place
 * and not, contents that are right, off by one and hostile. All memory is pre-filled, ends or begins at a guard page,
 * and is compared as a whole; every op is cut in two ranges.
 *
 *   contract_ops_differential [cases] [seed]
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/host/variant.h"
#include "tests/contract/guarded.h"
#include "tests/contract/random.h"
#include "tests/contract/reference.h"
#include "tests/contract/reference_ops.h"

static uint64_t case_count = 20000;
static uint64_t seed = 1;
static uint64_t cases_done;
static struct kvp_op_counts seen; /* of the reference, so that a test of nothing shows */

/* A matrix of int32 in guarded memory and what it must become. */
struct matrix {
  struct guarded memory;
  struct guarded expected;
  uint64_t rows;
  uint64_t columns;
  uint64_t stride;
};

static struct matrix matrix_make(uint64_t rows, uint64_t columns) {
  struct matrix matrix = {.rows = rows, .columns = columns, .stride = columns * sizeof(int32_t)};
  matrix.stride += random_chance(2) ? 0 : sizeof(int32_t) * random_below(20);
  uint64_t bytes = rows == 0 || columns == 0 ? 0 : (rows - 1) * matrix.stride + columns * sizeof(int32_t);
  bool at_end = !random_chance(3);
  matrix.memory = guarded_make(bytes, at_end, 0x5A);
  matrix.expected = guarded_make(bytes, at_end, 0x5A);
  return matrix;
}

static void matrix_free(struct matrix *matrix) {
  guarded_free(&matrix->memory);
  guarded_free(&matrix->expected);
}

static struct kvp_rows actual_rows(const struct matrix *matrix) {
  return (struct kvp_rows){matrix->memory.base, matrix->stride};
}

static struct kvp_rows expected_rows(const struct matrix *matrix) {
  return (struct kvp_rows){matrix->expected.base, matrix->stride};
}

static int32_t *entry(const struct matrix *matrix, uint64_t row, uint64_t column) {
  return (void *)(matrix->memory.base + row * matrix->stride + column * sizeof(int32_t));
}

static void matrix_compare(const struct matrix *matrix) {
  if (matrix->memory.base != NULL) {
    assert_memory_equal(matrix->memory.base, matrix->expected.base, matrix->memory.bytes);
  }
}

static void matrix_refill(struct matrix *matrix) {
  if (matrix->memory.base != NULL) {
    memset(matrix->memory.base, 0x5A, matrix->memory.bytes);
  }
}

static void expect_counts(const struct kvp_op_counts *actual, const struct kvp_op_counts *expected) {
  assert_memory_equal(actual, expected, sizeof(*actual));
  seen.rows_rejected += expected->rows_rejected;
  seen.bytes_read += expected->bytes_read;
  seen.bytes_written += expected->bytes_written;
}

static uint64_t random_columns(void) {
  static const uint32_t limits[] = {4, 70, 300, 700};
  return random_below(limits[random_below(4)]);
}

/* ---- convert_kv_index ---- */

static void fill_convert(const struct kvp_convert_index_params *params, const struct matrix *topk,
                         const struct matrix *tables, int32_t *valid) {
  int64_t tokens = params->tokens_per_block;
  uint32_t table_columns = (uint32_t)params->table_columns;
  for (uint64_t list = 0; list < topk->rows; list++) {
    bool hostile = random_chance(2);
    valid[list] = random_chance(4) ? (int32_t)topk->columns + 1 - (int32_t)random_below(3)
                                   : (int32_t)random_below((uint32_t)topk->columns + 1);
    valid[list] = random_chance(8) ? random_hostile() : valid[list];
    for (uint64_t k = 0; k < topk->columns; k++) {
      int64_t block = table_columns == 0 ? 0 : random_below(table_columns);
      int64_t x = block * tokens + random_below((uint32_t)tokens);
      if (random_chance(4)) { /* around the ends of blocks, the table's among them */
        x = random_below(table_columns + 2) * tokens + (int64_t)random_below(3) - 1;
      }
      x = x > INT32_MAX ? INT32_MAX : x;
      *entry(topk, list, k) = hostile && random_chance(3) ? random_hostile() : (int32_t)x;
    }
  }
  for (uint64_t row = 0; row < tables->rows; row++) {
    for (uint64_t column = 0; column < tables->columns; column++) {
      int32_t block = (int32_t)random_below(params->num_blocks);
      *entry(tables, row, column) = random_chance(9) ? random_hostile() : block;
      if (random_chance(20)) {
        *entry(tables, row, column) = (int32_t)params->num_blocks;
      }
    }
  }
}

static uint32_t random_tokens(void) {
  static const uint32_t sizes[] = {1, 2, 3, 7, 16, 17, 64, 133, 4096, 65537, INT32_MAX, INT32_MAX - 1, 1 << 30};
  uint32_t count = sizeof(sizes) / sizeof(sizes[0]);
  uint32_t index = random_below(count + 3);
  return index < count ? sizes[index] : 1 + random_below(INT32_MAX >> random_below(31));
}

static void run_convert(void) {
  uint64_t batch = random_below(4);
  uint64_t queries = 1 + random_below(3);
  uint64_t columns = 1 + random_columns();
  uint32_t tokens = random_tokens();
  uint32_t blocks_max = INT32_MAX / tokens;
  struct matrix topk = matrix_make(batch * queries, columns);
  struct matrix tables = matrix_make(batch, random_chance(9) ? 0 : 1 + random_below(50));
  struct matrix out = matrix_make(batch * queries, columns);
  struct guarded valid = guarded_make(batch * queries * sizeof(int32_t), true, 0);
  struct kvp_convert_index_params params = {.topk = actual_rows(&topk),
                                            .out = expected_rows(&out),
                                            .tables = actual_rows(&tables),
                                            .valid = (void *)valid.base,
                                            .batch = batch,
                                            .queries = queries,
                                            .columns = columns,
                                            .table_columns = tables.columns,
                                            .tokens_per_block = tokens,
                                            .num_blocks = 1 + random_below(blocks_max < 300 ? blocks_max : 300)};
  fill_convert(&params, &topk, &tables, (void *)valid.base);
  bool in_place = random_chance(2);
  struct matrix *result = in_place ? &topk : &out;
  struct guarded start = guarded_make(topk.memory.bytes, true, 0);
  if (start.base != NULL) {
    memcpy(start.base, topk.memory.base, start.bytes);
    memcpy(topk.expected.base, topk.memory.base, start.bytes);
  }
  params.out = expected_rows(result);
  struct kvp_op_counts expected = {0};
  reference_convert_index(&params, &expected);
  params.out = actual_rows(result);
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    if (start.base != NULL) {
      memcpy(topk.memory.base, start.base, start.bytes);
    }
    matrix_refill(&out);
    struct kvp_op_counts counts = {0};
    uint64_t cut = random_below((uint32_t)(batch * queries) + 1);
    variant->index->convert(&params, cut, batch * queries, &counts);
    variant->index->convert(&params, 0, cut, &counts);
    expect_counts(&counts, &expected);
    matrix_compare(&topk);
    matrix_compare(result);
  }
  guarded_free(&start);
  guarded_free(&valid);
  matrix_free(&topk);
  matrix_free(&tables);
  matrix_free(&out);
}

/* ---- swa_index_decode, expand_swa_index ---- */

static void run_swa(void) {
  uint32_t ring = random_chance(5) ? random_tokens() : 1 + random_below(400);
  uint32_t blocks_max = INT32_MAX / ring;
  struct matrix out = matrix_make(random_below(6), 1 + random_columns());
  struct guarded offset_len = guarded_make(out.rows * 2 * sizeof(int32_t), true, 0);
  struct kvp_swa_index_params params = {.offset_len = (void *)offset_len.base,
                                        .out = expected_rows(&out),
                                        .queries = out.rows,
                                        .window = out.columns,
                                        .ring_tokens = ring,
                                        .num_blocks = 1 + random_below(blocks_max)};
  for (uint64_t q = 0; q < out.rows; q++) {
    int32_t *pair = (int32_t *)(void *)offset_len.base + 2 * q;
    uint32_t slots = ring * params.num_blocks;
    uint32_t most = (uint32_t)out.columns < ring ? (uint32_t)out.columns : ring;
    pair[0] = (int32_t)random_below(slots);
    pair[1] = (int32_t)random_below(most + 1);
    switch (random_below(8)) {
    case 0:
      pair[0] = random_hostile();
      break;
    case 1:
      pair[1] = random_hostile();
      break;
    case 2:
      pair[0] = (int32_t)(slots - random_below(2)); /* the last slot or the one behind it */
      break;
    case 3:
      pair[1] = (int32_t)(most + random_below(2));
      break;
    default:
      break;
    }
  }
  struct kvp_op_counts expected = {0};
  reference_swa_index(&params, &expected);
  params.out = actual_rows(&out);
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    matrix_refill(&out);
    struct kvp_op_counts counts = {0};
    uint64_t cut = random_below((uint32_t)out.rows + 1);
    variant->index->swa(&params, 0, cut, &counts);
    variant->index->swa(&params, cut, out.rows, &counts);
    expect_counts(&counts, &expected);
    matrix_compare(&out);
  }
  guarded_free(&offset_len);
  matrix_free(&out);
}

/* Runs that end at the width, at INT32_MAX, or one behind. */
static void fill_pivots(int32_t *pivots, int32_t width) {
  for (size_t run = 0; run < 2; run++) {
    int32_t length = (int32_t)random_below((uint32_t)width + 4);
    int32_t near_end = (int32_t)random_below(3);
    pivots[2 * run] = (int32_t)random_below(1 << 20);
    pivots[2 * run + 1] = length;
    switch (random_below(8)) {
    case 0:
      pivots[2 * run] = random_hostile();
      break;
    case 1:
      pivots[2 * run + 1] = random_hostile();
      break;
    case 2:
      pivots[2 * run] = INT32_MAX - (length < width ? length : width) + (length < 2 || width < 2 ? 0 : near_end);
      break;
    case 3:
      pivots[2 * run + 1] = width - (run == 0 ? 0 : pivots[1] < width && pivots[1] >= 0 ? pivots[1] : 0);
      break;
    default:
      break;
    }
  }
}

static void run_expand(void) {
  struct matrix out = matrix_make(random_below(6), 1 + random_columns());
  struct guarded pivots = guarded_make(out.rows * 4 * sizeof(int32_t), true, 0);
  for (uint64_t row = 0; row < out.rows; row++) {
    fill_pivots((int32_t *)(void *)pivots.base + 4 * row, (int32_t)out.columns);
  }
  struct kvp_expand_index_params params = {
      .pivots = (void *)pivots.base, .out = expected_rows(&out), .row_count = out.rows, .width = out.columns};
  struct kvp_op_counts expected = {0};
  reference_expand_index(&params, &expected);
  params.out = actual_rows(&out);
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    matrix_refill(&out);
    struct kvp_op_counts counts = {0};
    uint64_t cut = random_below((uint32_t)out.rows + 1);
    variant->index->expand(&params, 0, cut, &counts);
    variant->index->expand(&params, cut, out.rows, &counts);
    expect_counts(&counts, &expected);
    matrix_compare(&out);
  }
  guarded_free(&pivots);
  matrix_free(&out);
}

/* ---- kv_index_cat ---- */

static void fill_cat(const struct matrix *side, int32_t base) {
  for (uint64_t row = 0; row < side->rows; row++) {
    bool hostile = random_chance(3);
    for (uint64_t column = 0; column < side->columns; column++) {
      int32_t value = random_chance(5) ? -1 : (int32_t)random_below(1 << 20);
      if (hostile && random_chance(4)) {
        value = random_chance(2) ? random_hostile() : INT32_MAX - base + (int32_t)(random_chance(2) && base > 0);
      }
      *entry(side, row, column) = value;
    }
  }
}

static void run_cat(void) {
  static const int32_t bases[] = {0, 1, 5120, INT32_MAX};
  uint64_t rows = random_below(6);
  struct matrix left = matrix_make(rows, random_columns());
  struct matrix right = matrix_make(rows, random_columns() + (left.columns == 0));
  struct matrix out = matrix_make(rows, left.columns + right.columns);
  int32_t base = random_chance(2) ? bases[random_below(4)] : (int32_t)random_below(INT32_MAX);
  fill_cat(&left, base);
  fill_cat(&right, base);
  struct kvp_cat_index_params params = {.left = actual_rows(&left),
                                        .right = actual_rows(&right),
                                        .out = expected_rows(&out),
                                        .row_count = rows,
                                        .left_columns = left.columns,
                                        .right_columns = right.columns,
                                        .base = base};
  struct kvp_op_counts expected = {0};
  reference_cat_index(&params, &expected);
  params.out = actual_rows(&out);
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    matrix_refill(&out);
    struct kvp_op_counts counts = {0};
    uint64_t cut = random_below((uint32_t)rows + 1);
    variant->index->cat(&params, 0, cut, &counts);
    variant->index->cat(&params, cut, rows, &counts);
    expect_counts(&counts, &expected);
    matrix_compare(&out);
  }
  matrix_free(&left);
  matrix_free(&right);
  matrix_free(&out);
}

/* ---- copy_rows ---- */

/* Rows of 16-byte words in guarded memory. */
static struct guarded rows_make(uint64_t rows, uint64_t row_bytes, uint64_t *stride_bytes) {
  *stride_bytes = row_bytes + (random_chance(2) ? 0 : 16 * (uint64_t)random_below(5));
  return guarded_make(rows == 0 ? 0 : (rows - 1) * *stride_bytes + row_bytes, !random_chance(3), 0x5A);
}

static void run_copy_rows(void) {
  static const uint32_t limits[] = {5, 40, 150, 700};
  uint32_t row_bytes = 16 * (1 + random_below(limits[random_below(4)]));
  uint64_t count = random_below(random_chance(4) ? 70 : 12);
  bool gathers = random_chance(2);
  uint64_t source_rows = gathers ? random_below(12) : count;
  struct kvp_copy_rows_params params = {.row_count = count, .source_rows = source_rows, .row_bytes = row_bytes};
  struct guarded source = rows_make(source_rows, row_bytes, &params.source.stride_bytes);
  struct guarded out = rows_make(count, row_bytes, &params.out.stride_bytes);
  struct guarded expected_out = guarded_make(out.bytes, true, 0x5A);
  struct guarded gather = guarded_make(gathers ? count * sizeof(int32_t) : 0, true, 0);
  for (uint64_t i = 0; i < source.bytes; i++) {
    source.base[i] = (uint8_t)random_bits();
  }
  for (uint64_t i = 0; i < gather.bytes / sizeof(int32_t); i++) {
    int32_t *from = (int32_t *)(void *)gather.base + i;
    *from = random_chance(6) ? random_hostile() : (int32_t)random_below((uint32_t)source_rows + 2) - 1;
  }
  params.source.base = source.base;
  params.out.base = expected_out.base;
  params.gather = (void *)gather.base;
  struct kvp_op_counts expected = {0};
  reference_copy_rows(&params, &expected);
  params.out.base = out.base;
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    if (out.base != NULL) {
      memset(out.base, 0x5A, out.bytes);
    }
    struct kvp_op_counts counts = {0};
    uint64_t cut = random_below((uint32_t)count + 1);
    variant->moves->copy_rows(&params, cut, count, &counts);
    variant->moves->copy_rows(&params, 0, cut, &counts);
    expect_counts(&counts, &expected);
    if (out.base != NULL) {
      assert_memory_equal(out.base, expected_out.base, out.bytes);
    }
  }
  guarded_free(&source);
  guarded_free(&out);
  guarded_free(&expected_out);
  guarded_free(&gather);
}

/* ---- copy_blocks, zero_blocks ---- */

/* Distinct blocks: pairs share no target, as the op wants it; a block copied to itself stays what it is. */
static void fill_blocks(int32_t *blocks, uint32_t num_blocks, uint64_t count) {
  uint32_t first = random_below(num_blocks);
  for (uint64_t i = 0; i < 2 * count; i++) {
    blocks[i] = (int32_t)((first + i) % num_blocks);
  }
  if (count > 0 && random_chance(3)) {
    blocks[0] = blocks[1];
  }
}

static void run_blocks(void) {
  static const uint32_t tokens[] = {1, 3, 16, 64};
  struct kvp_geometry geometry;
  assert_int_equal(kvp_geometry_init(kvp_format_get((enum kvp_format_id)random_below(kvp_format_count)), 0,
                                     tokens[random_below(4)], 1 + random_below(9), 1 + random_below(4), &geometry,
                                     NULL),
                   KVP_OK);
  uint64_t count = random_below(geometry.num_blocks / 2 + 1);
  struct guarded blocks = guarded_make(2 * count * sizeof(int32_t), true, 0);
  struct guarded region = guarded_make(geometry.region_bytes, !random_chance(3), 0);
  struct guarded start = guarded_make(geometry.region_bytes, true, 0);
  struct guarded expected_region = guarded_make(geometry.region_bytes, true, 0);
  fill_blocks((void *)blocks.base, geometry.num_blocks, count);
  for (uint64_t i = 0; i < start.bytes; i++) {
    start.base[i] = (uint8_t)random_bits();
  }
  memcpy(expected_region.base, start.base, start.bytes);
  struct kvp_blocks_params params = {
      .base = expected_region.base, .geometry = &geometry, .pairs = (void *)blocks.base, .count = count};
  bool copies = random_chance(2);
  struct kvp_op_counts expected = {0};
  if (copies) {
    reference_copy_blocks(&params, &expected);
  } else {
    reference_zero_blocks(&params, &expected);
  }
  params.base = region.base;
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    memcpy(region.base, start.base, start.bytes);
    struct kvp_op_counts counts = {0};
    uint64_t units = geometry.num_layers * count;
    uint64_t cut = random_below((uint32_t)units + 1);
    void (*move)(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                 struct kvp_op_counts *counts) = copies ? variant->moves->copy_blocks : variant->moves->zero_blocks;
    move(&params, cut, units, &counts);
    move(&params, 0, cut, &counts);
    expect_counts(&counts, &expected);
    assert_memory_equal(region.base, expected_region.base, region.bytes);
  }
  guarded_free(&blocks);
  guarded_free(&start);
  guarded_free(&region);
  guarded_free(&expected_region);
}

static void test_random_cases(void **state) {
  (void)state;
  static void (*const runs[])(void) = {run_convert, run_swa, run_expand, run_cat, run_blocks, run_copy_rows};
  for (cases_done = 0; cases_done < case_count; cases_done++) {
    random_start((seed << 32) + cases_done);
    runs[cases_done % 6]();
  }
  assert_true(case_count < 1000 || seen.rows_rejected > case_count);
}

/* Also after a failure: which case it was. */
static int print_cases_done(void **state) {
  (void)state;
  print_message("%llu of %llu cases passed, seed %llu; %llu entries and rows wrong, %llu bytes written\n",
                (unsigned long long)cases_done, (unsigned long long)case_count, (unsigned long long)seed,
                (unsigned long long)seen.rows_rejected, (unsigned long long)seen.bytes_written);
  return 0;
}

/* ---- both sides of 2^31 and 2^32 bytes, in address space that is never filled ---- */

enum { far_rows = 5, far_columns = 600, far_out = 4096 };

static const uint64_t far_stride = UINT64_C(1) << 30; /* rows begin at 0, 1, 2, 3 and 4 GiB */

static void *reserve(uint64_t bytes) {
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  assert_true(memory != MAP_FAILED);
  return memory;
}

struct far {
  struct kvp_cat_index_params cat;
  struct kvp_expand_index_params expand;
};

/* Every row of an op with far rows is that of the same op with near ones. */
static void check_far_rows(const struct far *near, uint8_t *memory, const struct kvp_host_variant *variant) {
  struct far far = *near;
  struct kvp_op_counts expected = {0};
  struct kvp_op_counts counts = {0};
  const uint64_t row_bytes = near->cat.out.stride_bytes;
  for (size_t row = 0; row < far_rows; row++) {
    memset(memory + far_out + row * far_stride, 0x5A, row_bytes);
  }
  reference_cat_index(&near->cat, &expected);
  far.cat.right = (struct kvp_rows){memory, far_stride};
  far.cat.out = (struct kvp_rows){memory + far_out, far_stride};
  variant->index->cat(&far.cat, 0, far_rows, &counts);
  for (size_t row = 0; row < far_rows; row++) {
    assert_memory_equal(memory + far_out + row * far_stride, near->cat.out.base + row * row_bytes, row_bytes);
  }
  reference_expand_index(&near->expand, &expected);
  far.expand.out = (struct kvp_rows){memory + far_out, far_stride};
  variant->index->expand(&far.expand, 0, far_rows, &counts);
  for (size_t row = 0; row < far_rows; row++) {
    assert_memory_equal(memory + far_out + row * far_stride, near->expand.out.base + row * row_bytes, row_bytes);
  }
  expect_counts(&counts, &expected);
}

static void test_host_far_rows(void **state) {
  (void)state;
  uint64_t far_bytes = far_rows * far_stride;
  uint8_t *memory = reserve(far_bytes);
  static int32_t out[far_rows][far_columns];
  static int32_t right[far_rows][far_columns];
  int32_t pivots[far_rows][4];
  random_start(seed);
  for (size_t row = 0; row < far_rows; row++) {
    for (size_t i = 0; i < 4; i++) {
      pivots[row][i] = (int32_t)random_below(300);
    }
    for (size_t i = 0; i < far_columns; i++) {
      right[row][i] = (int32_t)random_below(1000);
      memcpy(memory + row * far_stride + i * sizeof(int32_t), &right[row][i], sizeof(int32_t));
    }
  }
  const struct far near = {
      .cat = {.right = {(void *)right, sizeof(right[0])},
              .out = {(void *)out, sizeof(out[0])},
              .row_count = far_rows,
              .right_columns = far_columns,
              .base = 7},
      .expand = {
          .pivots = pivots[0], .out = {(void *)out, sizeof(out[0])}, .row_count = far_rows, .width = far_columns}};
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    check_far_rows(&near, memory, variant);
  }
  (void)munmap(memory, far_bytes);
}

/* Blocks of 2 MiB: 1023 ends at 2^31, 2047 at 2^32, and the second layer lies behind both. */
static void test_host_far_blocks(void **state) {
  (void)state;
  static const int32_t pairs[] = {0, 1023, 1024, 1, 2047, 2048, 2, 2199};
  struct kvp_geometry geometry;
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_V41), 0, 4096, 2200, 2, &geometry, NULL), KVP_OK);
  uint8_t *region = reserve(geometry.region_bytes);
  uint64_t last = geometry.block_stride_bytes - 1;
  for (uint64_t layer = 0; layer < 2; layer++) {
    for (uint64_t pair = 0; pair < 4; pair++) {
      uint8_t *block =
          region + layer * geometry.layer_stride_bytes + (uint64_t)pairs[2 * pair] * geometry.block_stride_bytes;
      block[0] = (uint8_t)(16 * layer + pair + 1);
      block[last] = (uint8_t)(16 * layer + pair + 101);
    }
  }
  struct kvp_blocks_params params = {.base = region, .geometry = &geometry, .pairs = pairs, .count = 4};
  struct kvp_op_counts counts = {0};
  kvp_host_copy_blocks(&params, 0, 8, &counts);
  for (uint64_t layer = 0; layer < 2; layer++) {
    for (uint64_t pair = 0; pair < 4; pair++) {
      uint8_t *block =
          region + layer * geometry.layer_stride_bytes + (uint64_t)pairs[2 * pair + 1] * geometry.block_stride_bytes;
      assert_int_equal(block[0], 16 * layer + pair + 1);
      assert_int_equal(block[last], 16 * layer + pair + 101);
    }
  }
  (void)munmap(region, geometry.region_bytes);
}

/* ---- memory that another process changes while an op reads it ---- */

enum { racing_columns = 300, racing_rounds = 3000, racing_tokens = 16, racing_blocks = 8 };

struct racing {
  int32_t topk[racing_columns];
  int32_t table[racing_blocks];
};

/* Between an entry that is right and one that is not, until it is killed. */
static __attribute__((noreturn)) void flip(struct racing *racing) {
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (uint32_t turn = 0;; turn++) {
    for (uint32_t i = 0; i < racing_columns; i++) {
      __atomic_store_n(&racing->topk[i], (turn + i) % 2 == 0 ? 5 : 0x7FC00000, __ATOMIC_RELAXED);
      __atomic_store_n(&racing->table[i % racing_blocks], (turn + i) % 3 == 0 ? 7 : INT32_MIN + 9, __ATOMIC_RELAXED);
    }
  }
}

/* Every slot is one of the entries that were there, and what is -1 was counted. */
static void convert_racing(const struct racing *racing, const struct kvp_host_variant *variant) {
  int32_t out[racing_columns];
  int32_t valid = racing_columns;
  struct kvp_convert_index_params params = {.topk = {(void *)racing->topk, sizeof(racing->topk)},
                                            .out = {(void *)out, sizeof(out)},
                                            .tables = {(void *)racing->table, sizeof(racing->table)},
                                            .valid = &valid,
                                            .batch = 1,
                                            .queries = 1,
                                            .columns = racing_columns,
                                            .table_columns = racing_blocks,
                                            .tokens_per_block = racing_tokens,
                                            .num_blocks = racing_blocks};
  struct kvp_op_counts counts = {0};
  variant->index->convert(&params, 0, 1, &counts);
  uint64_t wrong = 0;
  for (uint32_t i = 0; i < racing_columns; i++) {
    bool first_block = out[i] == 0 || out[i] == 5; /* before the first flip */
    assert_true(out[i] == -1 || first_block || out[i] == 7 * racing_tokens || out[i] == 7 * racing_tokens + 5);
    wrong += out[i] == -1;
  }
  assert_int_equal(counts.rows_rejected, wrong);
}

static void test_host_changing_memory(void **state) {
  (void)state;
  struct racing *racing = mmap(NULL, sizeof(*racing), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(racing != MAP_FAILED);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    flip(racing);
  }
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    for (uint32_t round = 0; round < racing_rounds; round++) {
      convert_racing(racing, variant);
    }
  }
  assert_int_equal(kill(child, SIGKILL), 0);
  assert_int_equal(waitpid(child, NULL, 0), child);
  (void)munmap(racing, sizeof(*racing));
}

int main(int argc, char **argv) {
  if (argc > 1) {
    case_count = strtoull(argv[1], NULL, 10);
  }
  if (argc > 2) {
    seed = strtoull(argv[2], NULL, 10);
  }
  reference_init();
  const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(test_random_cases, print_cases_done),
                                     cmocka_unit_test(test_host_far_rows), cmocka_unit_test(test_host_far_blocks),
                                     cmocka_unit_test(test_host_changing_memory)};
  return cmocka_run_group_tests_name("contract_ops_differential", tests, NULL, NULL);
}
