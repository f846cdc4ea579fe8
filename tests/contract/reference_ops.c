/* See reference_ops.h. */
#include "tests/contract/reference_ops.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "proto/limits.h"
#include "tests/contract/reference.h"

static int64_t get(const struct kvp_rows *rows, uint64_t row, uint64_t column) {
  int32_t value;
  memcpy(&value, rows->base + row * rows->stride_bytes + column * sizeof(value), sizeof(value));
  return value;
}

static void put(const struct kvp_rows *rows, uint64_t row, uint64_t column, int64_t value) {
  int32_t narrow = (int32_t)value;
  memcpy(rows->base + row * rows->stride_bytes + column * sizeof(narrow), &narrow, sizeof(narrow));
}

/* ---- indices ---- */

/* -2: wrong. */
static int64_t convert(const struct kvp_convert_index_params *params, uint64_t sequence, int64_t x) {
  int64_t tokens = params->tokens_per_block;
  if (x == -1) {
    return -1;
  }
  if (x < -1 || x / tokens >= (int64_t)params->table_columns) {
    return -2;
  }
  int64_t block = get(&params->tables, sequence, (uint64_t)(x / tokens));
  return block < 0 || block >= (int64_t)params->num_blocks ? -2 : block * tokens + x % tokens;
}

void reference_convert_index(const struct kvp_convert_index_params *params, struct kvp_op_counts *counts) {
  for (uint64_t b = 0; b < params->batch; b++) {
    for (uint64_t s = 0; s < params->queries; s++) {
      uint64_t list = b * params->queries + s;
      for (uint64_t k = 0; k < params->columns; k++) {
        int64_t slot = -1;
        if ((int64_t)k < params->valid[list]) {
          slot = convert(params, b, get(&params->topk, list, k));
        }
        counts->rows_rejected += slot == -2 ? 1 : 0;
        put(&params->out, list, k, slot == -2 ? -1 : slot);
        counts->bytes_read += 4;
        counts->bytes_written += 4;
      }
    }
  }
}

void reference_swa_index(const struct kvp_swa_index_params *params, struct kvp_op_counts *counts) {
  int64_t ring = params->ring_tokens;
  for (uint64_t q = 0; q < params->queries; q++) {
    int64_t start = params->offset_len[2 * q];
    int64_t length = params->offset_len[2 * q + 1];
    bool wrong = length < 0 || length > (int64_t)params->window || length > ring;
    wrong = wrong || (length != 0 && (start < 0 || start >= ring * params->num_blocks));
    counts->rows_rejected += wrong ? 1 : 0;
    for (uint64_t i = 0; i < params->window; i++) {
      int64_t slot = -1;
      if (!wrong && (int64_t)i < length) {
        slot = start - start % ring + (start % ring + (int64_t)i) % ring;
      }
      put(&params->out, q, i, slot);
      counts->bytes_written += 4;
    }
  }
}

void reference_expand_index(const struct kvp_expand_index_params *params, struct kvp_op_counts *counts) {
  for (uint64_t row = 0; row < params->row_count; row++) {
    const int32_t *pivots = &params->pivots[4 * row];
    int64_t length_one = pivots[1];
    int64_t length_two = pivots[3];
    bool wrong = length_one < 0 || length_two < 0;
    for (uint64_t column = 0; column < params->width; column++) {
      int64_t value = -1;
      if ((int64_t)column < length_one) {
        value = pivots[0] + (int64_t)column;
      } else if ((int64_t)column < length_one + length_two) {
        value = pivots[2] + (int64_t)column - length_one;
      }
      wrong = wrong || value > INT32_MAX;
      put(&params->out, row, column, value);
      counts->bytes_written += 4;
    }
    counts->rows_rejected += wrong ? 1 : 0;
    for (uint64_t column = 0; wrong && column < params->width; column++) {
      put(&params->out, row, column, -1);
    }
  }
}

void reference_cat_index(const struct kvp_cat_index_params *params, struct kvp_op_counts *counts) {
  for (uint64_t row = 0; row < params->row_count; row++) {
    for (uint64_t column = 0; column < params->left_columns; column++) {
      put(&params->out, row, column, get(&params->left, row, column));
    }
    for (uint64_t column = 0; column < params->right_columns; column++) {
      int64_t entry = get(&params->right, row, column);
      int64_t sum = entry + params->base;
      bool wrong = entry < -1 || (entry >= 0 && sum > INT32_MAX);
      counts->rows_rejected += wrong ? 1 : 0;
      put(&params->out, row, params->left_columns + column, entry >= 0 && !wrong ? sum : -1);
    }
    counts->bytes_read += 4 * (params->left_columns + params->right_columns);
    counts->bytes_written += 4 * (params->left_columns + params->right_columns);
  }
}

/* ---- fused store ---- */

static float add(float a, float b) {
  return (float)((double)a + (double)b);
}
static float subtract(float a, float b) {
  return (float)((double)a - (double)b);
}
static float multiply(float a, float b) {
  return (float)((double)a * (double)b);
}
static float divide(float a, float b) {
  return (float)((double)a / (double)b);
}
static float root(float a) {
  return (float)sqrt((double)a);
}

/* Sixteen consecutive squares from the left; neighbours in pairs above that. */
static float squares(const float *row, uint32_t count) {
  if (count > 16) {
    return add(squares(row, count / 2), squares(row + count / 2, count / 2));
  }
  float sum = multiply(row[0], row[0]);
  for (uint32_t i = 1; i < count; i++) {
    sum = add(sum, multiply(row[i], row[i]));
  }
  return sum;
}

static void walsh_hadamard(float *row, uint32_t count) {
  if (count == 1) {
    return;
  }
  uint32_t half = count / 2;
  walsh_hadamard(row, half);
  walsh_hadamard(row + half, half);
  for (uint32_t i = 0; i < half; i++) {
    float a = row[i];
    float b = row[half + i];
    row[i] = add(a, b);
    row[half + i] = subtract(a, b);
  }
}

static void round_row(float *row, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    row[i] = reference_bf16_value(reference_bf16(row[i]));
  }
}

static void norm(const struct kvp_fused_store_params *params, float *row, uint32_t count) {
  float variance = multiply(squares(row, count), divide(1.0F, (float)count));
  float r = divide(1.0F, root(add(variance, params->eps)));
  for (uint32_t i = 0; i < count; i++) {
    row[i] = multiply(multiply(row[i], r), reference_bf16_value(params->norm_weight[i]));
  }
}

static void rope(const struct kvp_fused_store_params *params, float *row, const float *cos_sin) {
  uint32_t half = params->rotary_dims / 2;
  for (uint32_t pair = 0; pair < half; pair++) {
    bool neox = (params->flags & KVP_FUSED_NEOX) != 0;
    float *y0 = row + params->rope_offset + (neox ? pair : 2 * pair);
    float *y1 = neox ? y0 + half : y0 + 1;
    float a = subtract(multiply(*y0, cos_sin[pair]), multiply(*y1, cos_sin[half + pair]));
    float b = add(multiply(*y0, cos_sin[half + pair]), multiply(*y1, cos_sin[pair]));
    *y0 = a;
    *y1 = b;
  }
}

static void transform(const struct kvp_fused_store_params *params, uint64_t index, uint16_t *out, uint32_t count) {
  static float row[kvp_format_width_max];
  const struct kvp_rows *source = &params->store.source;
  bool rounds = (params->flags & KVP_FUSED_ROUND_TO_BF16) != 0;
  for (uint32_t i = 0; i < count; i++) {
    uint16_t bits;
    memcpy(&bits, source->base + index * source->stride_bytes + 2 * (size_t)i, sizeof(bits));
    row[i] = reference_bf16_value(bits);
  }
  norm(params, row, count);
  if (rounds) {
    round_row(row, count);
  }
  if (params->rotary_dims > 0) {
    uint64_t position = (uint64_t)params->positions[index];
    rope(params, row, (const void *)(params->cos_sin.base + position * params->cos_sin.stride_bytes));
  }
  if (rounds) {
    round_row(row, count);
  }
  if ((params->flags & KVP_FUSED_HADAMARD) != 0) {
    walsh_hadamard(row, count);
    for (uint32_t i = 0; i < count; i++) {
      row[i] = multiply(row[i], divide(1.0F, root((float)count)));
    }
  }
  for (uint32_t i = 0; i < count; i++) {
    out[i] = reference_bf16(row[i]);
  }
}

void reference_fused_store(const struct kvp_fused_store_params *params, struct kvp_op_counts *counts) {
  static uint16_t row[kvp_format_width_max];
  for (uint64_t i = 0; i < params->store.row_count; i++) {
    struct kvp_store_params store = params->store;
    store.slots = &params->store.slots[i];
    store.row_count = 1;
    store.source = (struct kvp_rows){(void *)row, sizeof(row)};
    if (store.cast_back.base != NULL) {
      store.cast_back.base += i * store.cast_back.stride_bytes;
    }
    if (*store.slots == -1 && store.cast_back.base == NULL) {
      counts->rows_skipped++;
      continue;
    }
    int64_t position = params->positions[i];
    if (position < 0 || position >= (int64_t)params->position_count) {
      counts->rows_rejected++;
      continue;
    }
    transform(params, i, row, store.layer.geometry->sizes.elements);
    reference_store(&store, counts);
  }
}

/* ---- rows and blocks as they are ---- */

void reference_copy_rows(const struct kvp_copy_rows_params *params, struct kvp_op_counts *counts) {
  for (uint64_t i = 0; i < params->row_count; i++) {
    int64_t from = params->gather == NULL ? (int64_t)i : params->gather[i];
    bool inside = params->gather == NULL || (from >= 0 && from < (int64_t)params->source_rows);
    for (uint64_t byte = 0; byte < params->row_bytes; byte++) {
      uint8_t value = 0;
      if (inside) {
        value = params->source.base[(uint64_t)from * params->source.stride_bytes + byte];
        counts->bytes_read++;
      }
      params->out.base[i * params->out.stride_bytes + byte] = value;
      counts->bytes_written++;
    }
    if (inside || from == -1) {
      counts->rows_loaded++;
    } else {
      counts->rows_rejected++;
    }
  }
}

void reference_copy_blocks(const struct kvp_blocks_params *params, struct kvp_op_counts *counts) {
  const struct kvp_geometry *geometry = params->geometry;
  for (uint64_t i = 0; i < params->count; i++) {
    for (uint64_t layer = 0; layer < geometry->num_layers; layer++) {
      for (uint64_t byte = 0; byte < geometry->block_stride_bytes; byte++) {
        uint64_t from =
            (layer * geometry->num_blocks + (uint64_t)params->pairs[2 * i]) * geometry->block_stride_bytes;
        uint64_t to =
            (layer * geometry->num_blocks + (uint64_t)params->pairs[2 * i + 1]) * geometry->block_stride_bytes;
        params->base[to + byte] = params->base[from + byte];
        counts->bytes_read++;
        counts->bytes_written++;
      }
    }
  }
}

void reference_zero_blocks(const struct kvp_blocks_params *params, struct kvp_op_counts *counts) {
  const struct kvp_geometry *geometry = params->geometry;
  for (uint64_t i = 0; i < params->count; i++) {
    for (uint64_t layer = 0; layer < geometry->num_layers; layer++) {
      for (uint64_t byte = 0; byte < geometry->block_stride_bytes; byte++) {
        uint64_t at = (layer * geometry->num_blocks + (uint64_t)params->pairs[i]) * geometry->block_stride_bytes;
        params->base[at + byte] = 0;
        counts->bytes_written++;
      }
    }
  }
}
