/* Checks of the index ops: shapes of int32 matrices. What stands in them is never trusted by anybody, so it isn't looked
 * at here.
 */
#include "server/executor/intake_op.h"

/* A matrix from a view or an array: packed rows. */
struct matrix {
  struct kvp_intake_view view;
  struct kvp_intake_array array;
};

static struct kvp_rows matrix_rows(const struct matrix *matrix, uint64_t columns) {
  return matrix->array.data != NULL ? (struct kvp_rows){(uint8_t *)matrix->array.data, columns * sizeof(int32_t)}
                                    : kvp_intake_rows(&matrix->view);
}

/* Arrays whose contents nobody checks before the op runs are told of when they might change: those in buffers. */
static void unchecked_note(struct kvp_intake_op *op, const struct kvp_intake_array *array) {
  op->out->report_flags |= array->data != NULL && !array->is_inline ? KVP_REPORT_UNCHECKED_ARRAYS : 0;
}

static enum kvp_status columns_check(struct kvp_intake_op *op, const char *name, uint64_t columns) {
  if (columns == 0 || columns > UINT32_MAX / sizeof(int32_t)) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, columns, "%s = %llu, at least 1 and at most %llu",
                             name, (unsigned long long)columns, (unsigned long long)(UINT32_MAX / sizeof(int32_t)));
  }
  return KVP_OK;
}

/* An output of `rows` rows or more. */
static enum kvp_status out_check(struct kvp_intake_op *op, uint64_t columns, const char *what, uint64_t rows,
                                 struct kvp_intake_view *out) {
  enum kvp_status status =
      kvp_intake_view_check(op, "out", &op->wire->second, columns * sizeof(int32_t), KVP_INTAKE_INT_ALIGNMENT, out);
  return status == KVP_OK ? kvp_intake_rows_enough(op, what, rows, out) : status;
}

/* Exactly so many elements. */
static enum kvp_status count_check(struct kvp_intake_op *op, const struct kvp_intake_array *array, uint64_t rows,
                                   uint64_t columns) {
  uint64_t expected = 0;
  const uint64_t count = array->bytes / sizeof(int32_t);
  if (__builtin_mul_overflow(rows, columns, &expected) || count != expected) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, array->name, -1, count,
                             "%s: %llu elements, %llu rows of %llu are needed", array->name,
                             (unsigned long long)count, (unsigned long long)rows, (unsigned long long)columns);
  }
  return KVP_OK;
}

/* ---- convert_kv_index ---- */

struct convert {
  struct kvp_intake_place place;
  struct matrix topk;
  struct kvp_intake_view out;
  struct kvp_intake_array tables;
  struct kvp_intake_array valid;
  uint64_t rows; /* lists */
  uint64_t columns;
  uint64_t batch;
};

/* topk from a view, in place or not; or from an array, to an output that says how wide it is. */
static enum kvp_status topk_check(struct kvp_intake_op *op, struct convert *it) {
  const struct kvp_wire_op *wire = op->wire;
  enum kvp_status status = kvp_intake_array_optional(op, 2, "topk", sizeof(int32_t), &it->topk.array);
  if (status != KVP_OK) {
    return status;
  }
  if (it->topk.array.data != NULL) {
    status = kvp_intake_view_absent(op, "topk", &wire->source);
    it->columns = wire->second.row_bytes / sizeof(int32_t);
    it->rows = it->valid.bytes / sizeof(int32_t);
  } else {
    status = kvp_intake_view_check(op, "topk", &wire->source, 0, KVP_INTAKE_INT_ALIGNMENT, &it->topk.view);
    it->columns = it->topk.view.area.row_bytes / sizeof(int32_t);
    it->rows = it->topk.view.area.rows;
  }
  if (status != KVP_OK) {
    return status;
  }
  if (it->topk.array.data == NULL && it->topk.view.area.row_bytes % sizeof(int32_t) != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_WRONG_FORMAT, "topk", -1, it->topk.view.area.row_bytes,
                             "topk.row_bytes = %llu is no multiple of 4",
                             (unsigned long long)it->topk.view.area.row_bytes);
  }
  if (it->topk.array.data == NULL && wire->second.flags == 0) {
    it->out = it->topk.view;
    it->out.name = "topk";
    return KVP_OK;
  }
  if ((status = out_check(op, it->columns, "lists", it->rows, &it->out)) != KVP_OK) {
    return status;
  }
  if (it->columns == 0) {
    return KVP_INTAKE_REFUSE(op, KVP_WRONG_FORMAT, "out", -1, wire->second.row_bytes,
                             "out.row_bytes = %u is no row of int32", wire->second.row_bytes);
  }
  return it->topk.array.data != NULL ? count_check(op, &it->topk.array, it->rows, it->columns) : KVP_OK;
}

static enum kvp_status convert_shape(struct kvp_intake_op *op, struct convert *it) {
  const uint64_t queries = op->wire->argument;
  const uint64_t table_columns = op->wire->numbers[0];
  enum kvp_status status = KVP_OK;
  if (it->rows == 0 && queries == 0) {
    return count_check(op, &it->valid, 0, 1);
  }
  if ((status = columns_check(op, "queries", queries)) != KVP_OK ||
      (status = columns_check(op, "table_columns", table_columns)) != KVP_OK) {
    return status;
  }
  if (it->rows % queries != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "queries", -1, queries,
                             "%llu lists are no multiple of %llu queries", (unsigned long long)it->rows,
                             (unsigned long long)queries);
  }
  it->batch = it->rows / queries;
  if ((status = count_check(op, &it->valid, it->rows, 1)) != KVP_OK) {
    return status;
  }
  return count_check(op, &it->tables, it->batch, table_columns);
}

static enum kvp_status convert_apart(struct kvp_intake_op *op, const struct convert *it) {
  const bool in_place =
      it->out.area.base == it->topk.view.area.base && it->out.area.stride_bytes == it->topk.view.area.stride_bytes;
  enum kvp_status status = KVP_OK;
  if ((!in_place && (status = kvp_intake_views_apart(op, &it->out, &it->topk.view)) != KVP_OK) ||
      (status = kvp_intake_array_apart(op, &it->out, &it->topk.array)) != KVP_OK ||
      (status = kvp_intake_array_apart(op, &it->out, &it->tables)) != KVP_OK) {
    return status;
  }
  return kvp_intake_array_apart(op, &it->out, &it->valid);
}

enum kvp_status kvp_intake_convert_kv_index(struct kvp_intake_op *op) {
  struct convert it = {0};
  enum kvp_status status = kvp_intake_place(op, &it.place);
  if (status != KVP_OK ||
      (status = kvp_intake_array_check(op, 0, "block_tables", sizeof(int32_t), &it.tables)) != KVP_OK ||
      (status = kvp_intake_array_check(op, 1, "valid", sizeof(int32_t), &it.valid)) != KVP_OK ||
      (status = topk_check(op, &it)) != KVP_OK || (status = convert_shape(op, &it)) != KVP_OK ||
      (status = convert_apart(op, &it)) != KVP_OK) {
    return status;
  }
  struct kvp_device_op *device_op = kvp_intake_device_op(op, KVP_DEVICE_CONVERT_INDEX);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  unchecked_note(op, &it.topk.array);
  unchecked_note(op, &it.tables);
  unchecked_note(op, &it.valid);
  device_op->host_arrays = kvp_intake_host_bit(&it.tables, KVP_ARRAY_TABLES) |
                           kvp_intake_host_bit(&it.valid, KVP_ARRAY_VALID) |
                           kvp_intake_host_bit(&it.topk.array, KVP_ARRAY_TOPK);
  device_op->params.convert_index = (struct kvp_convert_index_params){
      .topk = matrix_rows(&it.topk, it.columns),
      .out = kvp_intake_rows(&it.out),
      .tables = {(uint8_t *)it.tables.data, op->wire->numbers[0] * sizeof(int32_t)},
      .valid = it.valid.data,
      .batch = it.batch,
      .queries = op->wire->argument,
      .columns = it.columns,
      .table_columns = op->wire->numbers[0],
      .tokens_per_block = it.place.layer.geometry->tokens_per_block,
      .num_blocks = it.place.layer.geometry->num_blocks,
  };
  return KVP_OK;
}

/* ---- swa_index_decode, expand_swa_index ---- */

/* Rows of `row_ints` in an array make rows of `columns` in an output. */
static enum kvp_status runs_check(struct kvp_intake_op *op, const char *array_name, uint64_t row_ints,
                                  const char *columns_name, struct kvp_intake_array *array,
                                  struct kvp_intake_view *out) {
  enum kvp_status status = columns_check(op, columns_name, op->wire->argument);
  if (status != KVP_OK ||
      (status = kvp_intake_array_check(op, 0, array_name, row_ints * sizeof(int32_t), array)) != KVP_OK) {
    return status;
  }
  status = out_check(op, op->wire->argument, array_name, array->bytes / (row_ints * sizeof(int32_t)), out);
  return status == KVP_OK ? kvp_intake_array_apart(op, out, array) : status;
}

enum kvp_status kvp_intake_swa_index_decode(struct kvp_intake_op *op) {
  struct kvp_intake_place place;
  struct kvp_intake_array offset_len = {0};
  struct kvp_intake_view out = {0};
  enum kvp_status status = kvp_intake_ring(op, &place);
  if (status != KVP_OK || (status = runs_check(op, "offset_len", 2, "window", &offset_len, &out)) != KVP_OK) {
    return status;
  }
  struct kvp_device_op *device_op = kvp_intake_device_op(op, KVP_DEVICE_SWA_INDEX);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  unchecked_note(op, &offset_len);
  device_op->host_arrays = kvp_intake_host_bit(&offset_len, KVP_ARRAY_OFFSET_LEN);
  device_op->params.swa_index = (struct kvp_swa_index_params){
      .offset_len = offset_len.data,
      .out = kvp_intake_rows(&out),
      .queries = offset_len.bytes / (2 * sizeof(int32_t)),
      .window = op->wire->argument,
      .ring_tokens = place.layer.geometry->tokens_per_block,
      .num_blocks = place.layer.geometry->num_blocks,
  };
  return KVP_OK;
}

enum kvp_status kvp_intake_expand_swa_index(struct kvp_intake_op *op) {
  struct kvp_intake_array pivots = {0};
  struct kvp_intake_view out = {0};
  enum kvp_status status = runs_check(op, "pivots", 4, "width", &pivots, &out);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_device_op *device_op = kvp_intake_device_op(op, KVP_DEVICE_EXPAND_INDEX);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  unchecked_note(op, &pivots);
  device_op->host_arrays = kvp_intake_host_bit(&pivots, KVP_ARRAY_PIVOTS);
  device_op->params.expand_index = (struct kvp_expand_index_params){
      .pivots = pivots.data,
      .out = kvp_intake_rows(&out),
      .row_count = pivots.bytes / (4 * sizeof(int32_t)),
      .width = op->wire->argument,
  };
  return KVP_OK;
}

/* ---- kv_index_cat ---- */

/* One side; *rows: what it has, untouched where it is absent. */
static enum kvp_status side_check(struct kvp_intake_op *op, uint32_t number, const char *name,
                                  const struct kvp_wire_view *wire, uint64_t columns, struct matrix *side,
                                  uint64_t *rows) {
  enum kvp_status status = kvp_intake_array_optional(op, number, name, sizeof(int32_t), &side->array);
  if (status != KVP_OK) {
    return status;
  }
  if (columns == 0 && side->array.data != NULL) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, side->array.index,
                             "%s: there is none without columns", name);
  }
  if (columns == 0 || side->array.data != NULL) {
    status = kvp_intake_view_absent(op, name, wire);
  } else {
    status = kvp_intake_view_check(op, name, wire, columns * sizeof(int32_t), KVP_INTAKE_INT_ALIGNMENT, &side->view);
    *rows = side->view.area.rows;
  }
  if (status == KVP_OK && side->array.data != NULL) {
    *rows = side->array.bytes / (columns * sizeof(int32_t));
    status = count_check(op, &side->array, *rows, columns);
  }
  return status;
}

static enum kvp_status sides_apart(struct kvp_intake_op *op, const struct kvp_intake_view *out,
                                   const struct matrix *side) {
  enum kvp_status status = kvp_intake_views_apart(op, out, &side->view);
  return status == KVP_OK ? kvp_intake_array_apart(op, out, &side->array) : status;
}

static enum kvp_status cat_numbers_check(struct kvp_intake_op *op) {
  const struct kvp_wire_op *wire = op->wire;
  enum kvp_status status = KVP_OK;
  if (wire->argument > INT32_MAX) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "right_base", -1, wire->argument,
                             "right_base = %lld is not in [0, 2147483647]", (long long)wire->argument);
  }
  if ((wire->numbers[0] != 0 && (status = columns_check(op, "left_columns", wire->numbers[0])) != KVP_OK) ||
      (wire->numbers[1] != 0 && (status = columns_check(op, "right_columns", wire->numbers[1])) != KVP_OK)) {
    return status;
  }
  return columns_check(op, "columns", wire->numbers[0] + wire->numbers[1]);
}

enum kvp_status kvp_intake_kv_index_cat(struct kvp_intake_op *op) {
  const struct kvp_wire_op *wire = op->wire;
  struct matrix left = {0};
  struct matrix right = {0};
  struct kvp_intake_view out = {0};
  uint64_t left_rows = UINT64_MAX;
  uint64_t right_rows = UINT64_MAX;
  enum kvp_status status = cat_numbers_check(op);
  if (status != KVP_OK ||
      (status = side_check(op, 0, "left", &wire->source, wire->numbers[0], &left, &left_rows)) != KVP_OK ||
      (status = side_check(op, 1, "right", &wire->third, wire->numbers[1], &right, &right_rows)) != KVP_OK) {
    return status;
  }
  const uint64_t rows = left_rows != UINT64_MAX ? left_rows : right_rows;
  if (right_rows != UINT64_MAX && right_rows != rows) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "right", -1, right_rows, "right has %llu rows, left has %llu",
                             (unsigned long long)right_rows, (unsigned long long)rows);
  }
  if ((status = out_check(op, wire->numbers[0] + wire->numbers[1], "rows", rows, &out)) != KVP_OK ||
      (status = sides_apart(op, &out, &left)) != KVP_OK || (status = sides_apart(op, &out, &right)) != KVP_OK) {
    return status;
  }
  struct kvp_device_op *device_op = kvp_intake_device_op(op, KVP_DEVICE_CAT_INDEX);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  unchecked_note(op, &left.array);
  unchecked_note(op, &right.array);
  device_op->host_arrays =
      kvp_intake_host_bit(&left.array, KVP_ARRAY_LEFT) | kvp_intake_host_bit(&right.array, KVP_ARRAY_RIGHT);
  device_op->params.cat_index = (struct kvp_cat_index_params){
      .left = matrix_rows(&left, wire->numbers[0]),
      .right = matrix_rows(&right, wire->numbers[1]),
      .out = kvp_intake_rows(&out),
      .row_count = rows,
      .left_columns = wire->numbers[0],
      .right_columns = wire->numbers[1],
      .base = (int32_t)wire->argument,
  };
  return KVP_OK;
}
