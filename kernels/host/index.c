/* convert_kv_index, swa_index_decode, expand_swa_index, kv_index_cat: rows of int32 made from rows of int32. OPS
 * sections of those names; compiled once for each instruction set.
 *
 * They run on worker threads of the executor, over a range of rows. What a row is made from lies in memory that others
 * can write: it is copied once, piece by piece, and only the copy is looked at. Nothing found there becomes an address
 * before it was bounded.
 */
#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/host/layout.h"
#include "kernels/host/variant.h"

enum { piece_columns = 256 };

/* The compiler forgets where the memory's content came from, so that it can't be read there a second time. */
KVP_INLINE void hide_origin(void *memory) {
  __asm__ volatile("" : : "r"(memory) : "memory");
}

KVP_INLINE void take_indices(int32_t *restrict to, const uint8_t *restrict from, uint64_t count) {
  memcpy(to, from, count * sizeof(int32_t));
  hide_origin(to);
}

KVP_INLINE uint64_t least(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

/* ---- convert_kv_index ---- */

/* x / divisor = x * magic >> shift for every 0 <= x < 2^31: with l = ceil(log2 divisor) and magic =
 * ceil(2^(31 + l) / divisor), the error x * (magic * divisor - 2^(31 + l)) / (divisor * 2^(31 + l)) is below
 * 1 / divisor. */
struct divisor {
  uint32_t magic;
  uint32_t shift;
};

static struct divisor divisor_make(uint32_t divisor) {
  assert(divisor > 0 && divisor <= INT32_MAX);
  uint32_t log2 = divisor == 1 ? 0 : 32 - (uint32_t)__builtin_clz(divisor - 1);
  uint64_t power = UINT64_C(1) << (31 + log2);
  return (struct divisor){.magic = (uint32_t)((power + divisor - 1) / divisor), .shift = 31 + log2};
}

struct lookup {
  const int32_t *table; /* of the list's sequence; never empty */
  uint32_t table_columns;
  uint32_t tokens_per_block;
  uint32_t num_blocks;
  struct divisor divisor;
};

static const int32_t no_block = -1; /* what a table without columns is read as */

/* Converts up to piece_columns entries in place; returns how many were wrong. */
static uint32_t convert_piece(const struct lookup *lookup, int32_t *restrict piece, uint64_t count) {
  uint32_t table_columns = lookup->table_columns;
  uint32_t tokens_per_block = lookup->tokens_per_block;
  uint32_t num_blocks = lookup->num_blocks;
  struct divisor divisor = lookup->divisor;
  uint32_t columns[piece_columns];
  uint32_t blocks[piece_columns];
  for (uint64_t i = 0; i < count; i++) {
    uint32_t column = (uint32_t)((uint64_t)(uint32_t)piece[i] * divisor.magic >> divisor.shift);
    columns[i] = piece[i] >= 0 && column < table_columns ? column : table_columns;
  }
  for (uint64_t i = 0; i < count; i++) { /* no branch: where there is no column any other is read and forgotten */
    uint32_t block = (uint32_t)kvp_read_once(&lookup->table[columns[i] < table_columns ? columns[i] : 0]);
    blocks[i] = columns[i] < table_columns ? block : UINT32_MAX;
  }
  uint32_t wrong = 0;
  for (uint64_t i = 0; i < count; i++) {
    uint32_t offset = (uint32_t)piece[i] - columns[i] * tokens_per_block;
    uint32_t slot = blocks[i] * tokens_per_block + offset;
    bool found = blocks[i] < num_blocks;
    wrong += !found & (piece[i] != -1);
    piece[i] = found ? (int32_t)slot : -1;
  }
  return wrong;
}

KVP_INLINE const int32_t *table_of_row(const struct kvp_convert_index_params *params, uint64_t row) {
  return (const void *)kvp_rows_at(&params->tables, row / params->queries);
}

static void convert_index(const struct kvp_convert_index_params *params, uint64_t row_begin, uint64_t row_end,
                          struct kvp_op_counts *counts) {
  struct lookup lookup = {.table_columns = (uint32_t)least(params->table_columns, INT32_MAX),
                          .tokens_per_block = params->tokens_per_block,
                          .num_blocks = params->num_blocks,
                          .divisor = divisor_make(params->tokens_per_block)};
  uint64_t wrong = 0;
  for (uint64_t row = row_begin; row < row_end; row++) {
    int32_t valid_entry = kvp_read_once(&params->valid[row]);
    uint64_t valid = valid_entry < 0 ? 0 : least((uint64_t)valid_entry, params->columns);
    lookup.table = lookup.table_columns == 0 ? &no_block : table_of_row(params, row);
    const uint8_t *from = kvp_rows_at(&params->topk, row);
    uint8_t *to = kvp_rows_at(&params->out, row);
    for (uint64_t column = 0; column < valid; column += piece_columns) {
      int32_t piece[piece_columns];
      uint64_t count = least(valid - column, piece_columns);
      take_indices(piece, from + column * sizeof(int32_t), count);
      wrong += convert_piece(&lookup, piece, count);
      memcpy(to + column * sizeof(int32_t), piece, count * sizeof(int32_t));
    }
    memset(to + valid * sizeof(int32_t), 0xFF, (params->columns - valid) * sizeof(int32_t));
  }
  counts->rows_rejected += wrong;
  counts->bytes_read += (row_end - row_begin) * params->columns * sizeof(int32_t);
  counts->bytes_written += (row_end - row_begin) * params->columns * sizeof(int32_t);
}

/* ---- swa_index_decode, expand_swa_index ---- */

/* first, first + 1, ... */
struct index_run {
  int32_t first;
  uint64_t count;
};

/* Two runs, then -1 up to width. */
KVP_INLINE void write_runs(uint8_t *row, uint64_t width, struct index_run one, struct index_run two) {
  int32_t *out = (void *)row;
  for (uint64_t i = 0; i < one.count; i++) {
    out[i] = (int32_t)((uint32_t)one.first + (uint32_t)i);
  }
  out += one.count;
  for (uint64_t i = 0; i < two.count; i++) {
    out[i] = (int32_t)((uint32_t)two.first + (uint32_t)i);
  }
  memset(out + two.count, 0xFF, (width - one.count - two.count) * sizeof(int32_t));
}

static void swa_index(const struct kvp_swa_index_params *params, uint64_t row_begin, uint64_t row_end,
                      struct kvp_op_counts *counts) {
  uint32_t ring = params->ring_tokens;
  uint64_t slots = (uint64_t)ring * params->num_blocks;
  uint64_t length_max = least(params->window, ring);
  uint64_t wrong = 0;
  for (uint64_t row = row_begin; row < row_end; row++) {
    int32_t start = kvp_read_once(&params->offset_len[2 * row]);
    int32_t length = kvp_read_once(&params->offset_len[2 * row + 1]);
    struct index_run before_wrap = {0};
    struct index_run after_wrap = {0};
    if (length < 0 || (uint64_t)length > length_max ||
        (length > 0 && (start < 0 || (uint64_t)(uint32_t)start >= slots))) {
      wrong++;
    } else if (length > 0) {
      uint32_t offset = (uint32_t)start % ring;
      before_wrap = (struct index_run){.first = start, .count = least((uint64_t)length, ring - offset)};
      after_wrap = (struct index_run){.first = (int32_t)((uint32_t)start - offset),
                                      .count = (uint64_t)length - before_wrap.count};
    }
    write_runs(kvp_rows_at(&params->out, row), params->window, before_wrap, after_wrap);
  }
  counts->rows_rejected += wrong;
  counts->bytes_written += (row_end - row_begin) * params->window * sizeof(int32_t);
}

KVP_INLINE bool run_fits(struct index_run run) {
  return run.count == 0 || (int64_t)(run.count - 1) <= (int64_t)INT32_MAX - run.first;
}

static void expand_index(const struct kvp_expand_index_params *params, uint64_t row_begin, uint64_t row_end,
                         struct kvp_op_counts *counts) {
  uint64_t wrong = 0;
  for (uint64_t row = row_begin; row < row_end; row++) {
    const int32_t *pivots = &params->pivots[4 * row];
    struct index_run one = {.first = kvp_read_once(&pivots[0])};
    int32_t length_one = kvp_read_once(&pivots[1]);
    struct index_run two = {.first = kvp_read_once(&pivots[2])};
    int32_t length_two = kvp_read_once(&pivots[3]);
    bool right = length_one >= 0 && length_two >= 0;
    if (right) {
      one.count = least((uint64_t)length_one, params->width);
      two.count = least((uint64_t)length_two, params->width - one.count);
      right = run_fits(one) && run_fits(two);
    }
    if (!right) {
      wrong++;
      one.count = 0;
      two.count = 0;
    }
    write_runs(kvp_rows_at(&params->out, row), params->width, one, two);
  }
  counts->rows_rejected += wrong;
  counts->bytes_written += (row_end - row_begin) * params->width * sizeof(int32_t);
}

/* ---- kv_index_cat ---- */

/* Shifts up to piece_columns entries in place; returns how many were wrong. */
static uint32_t shift_piece(int32_t *restrict piece, uint64_t count, uint32_t base) {
  uint32_t wrong = 0;
  for (uint64_t i = 0; i < count; i++) {
    uint32_t entry = (uint32_t)piece[i];
    uint32_t sum = entry + base;
    bool right = (int32_t)entry >= 0 && (int32_t)sum >= 0;
    wrong += !right & (entry != UINT32_MAX);
    piece[i] = right ? (int32_t)sum : -1;
  }
  return wrong;
}

static void cat_index(const struct kvp_cat_index_params *params, uint64_t row_begin, uint64_t row_end,
                      struct kvp_op_counts *counts) {
  assert(params->base >= 0);
  uint64_t left_bytes = params->left_columns * sizeof(int32_t);
  uint64_t row_bytes = left_bytes + params->right_columns * sizeof(int32_t);
  uint64_t wrong = 0;
  for (uint64_t row = row_begin; row < row_end; row++) {
    uint8_t *to = kvp_rows_at(&params->out, row);
    if (left_bytes != 0) { /* a side without columns may have no memory at all */
      memcpy(to, kvp_rows_at(&params->left, row), left_bytes);
    }
    for (uint64_t column = 0; column < params->right_columns; column += piece_columns) {
      int32_t piece[piece_columns];
      uint64_t count = least(params->right_columns - column, piece_columns);
      take_indices(piece, kvp_rows_at(&params->right, row) + column * sizeof(int32_t), count);
      wrong += shift_piece(piece, count, (uint32_t)params->base);
      memcpy(to + left_bytes + column * sizeof(int32_t), piece, count * sizeof(int32_t));
    }
  }
  counts->rows_rejected += wrong;
  counts->bytes_read += (row_end - row_begin) * row_bytes;
  counts->bytes_written += (row_end - row_begin) * row_bytes;
}

const struct kvp_host_index KVP_HOST_SYMBOL(kvp_host_index) = {
    .convert = convert_index, .swa = swa_index, .expand = expand_index, .cat = cat_index};
