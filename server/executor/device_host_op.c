/* Ops of the host backend, cut into units of a few hundred rows. Any worker thread. */
#include <string.h>

#include "server/executor/device_host.h"

enum {
  store_unit_rows = 256,
  load_unit_rows = 512,
  load_unit_segments_max = 1024,
  transfer_unit_bytes = 256 << 10,
  fused_store_unit_rows = 64,
  index_unit_ints = 16 << 10,
};

static uint64_t units_of(uint64_t total, uint64_t per_unit) {
  return total / per_unit + (total % per_unit != 0);
}

static uint64_t min_u64(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

/* Segments that have about load_unit_rows rows together, as far as the totals tell. */
static uint64_t load_unit_segments(const struct kvp_load_params *load) {
  if (load->total_k == 0 || load->segment_count >= UINT32_MAX) {
    return load_unit_segments_max;
  }
  uint64_t segments = load_unit_rows * load->segment_count / load->total_k;
  return segments == 0 ? 1 : min_u64(segments, load_unit_segments_max);
}

static uint64_t transfer_bytes(const struct kvp_transfer_params *transfer) {
  return transfer->row_count * transfer->row_bytes;
}

/* Rows of a unit, where a row has so many bytes or int32. */
static uint64_t rows_per_unit(uint64_t unit, uint64_t row) {
  return row >= unit || row == 0 ? 1 : unit / row;
}

static uint64_t block_units_per_unit(const struct kvp_blocks_params *blocks) {
  return rows_per_unit(transfer_unit_bytes, blocks->geometry->block_stride_bytes);
}

/* An op as `total` things, of which a unit is `per_unit`. */
struct shape {
  uint64_t total;
  uint64_t per_unit;
};

static struct shape shape_of(const struct kvp_device_op *op) {
  switch (op->kind) {
  case KVP_DEVICE_STORE:
    return (struct shape){op->params.store.row_count, store_unit_rows};
  case KVP_DEVICE_LOAD:
    return (struct shape){op->params.load.segment_count, load_unit_segments(&op->params.load)};
  case KVP_DEVICE_WRITE:
  case KVP_DEVICE_READ:
  case KVP_DEVICE_FILL:
    return (struct shape){transfer_bytes(&op->params.transfer), transfer_unit_bytes};
  case KVP_DEVICE_COPY_ROWS:
    return (struct shape){op->params.copy_rows.row_count,
                          rows_per_unit(transfer_unit_bytes, op->params.copy_rows.row_bytes)};
  case KVP_DEVICE_FUSED_STORE:
    return (struct shape){op->params.fused_store.store.row_count, fused_store_unit_rows};
  case KVP_DEVICE_CONVERT_INDEX:
    return (struct shape){op->params.convert_index.batch * op->params.convert_index.queries,
                          rows_per_unit(index_unit_ints, op->params.convert_index.columns)};
  case KVP_DEVICE_SWA_INDEX:
    return (struct shape){op->params.swa_index.queries, rows_per_unit(index_unit_ints, op->params.swa_index.window)};
  case KVP_DEVICE_EXPAND_INDEX:
    return (struct shape){op->params.expand_index.row_count,
                          rows_per_unit(index_unit_ints, op->params.expand_index.width)};
  case KVP_DEVICE_CAT_INDEX:
    return (struct shape){
        op->params.cat_index.row_count,
        rows_per_unit(index_unit_ints, op->params.cat_index.left_columns + op->params.cat_index.right_columns)};
  case KVP_DEVICE_COPY_BLOCKS:
  case KVP_DEVICE_ZERO_BLOCKS:
    return (struct shape){op->params.blocks.geometry->num_layers * op->params.blocks.count,
                          block_units_per_unit(&op->params.blocks)};
  case KVP_DEVICE_REPLAY:
  case KVP_DEVICE_POINT:
  case KVP_DEVICE_SIGNAL:
    break;
  }
  return (struct shape){0, 1};
}

uint64_t kvp_host_op_units(const struct kvp_device_op *op) {
  const struct shape shape = shape_of(op);
  return units_of(shape.total, shape.per_unit);
}

/* Bytes [begin, end) of the rows as if they were packed. */
static void transfer_run(enum kvp_device_op_kind kind, const struct kvp_transfer_params *transfer, uint64_t begin,
                         uint64_t end) {
  uint64_t row_bytes = transfer->row_bytes;
  uint64_t stride_bytes = transfer->rows.stride_bytes;
  if (row_bytes == stride_bytes) { /* one long row */
    row_bytes = stride_bytes = transfer_bytes(transfer);
  }
  while (begin < end) {
    uint64_t row = begin / row_bytes;
    uint64_t column = begin % row_bytes;
    uint64_t bytes = min_u64(row_bytes - column, end - begin);
    uint8_t *device = transfer->rows.base + row * stride_bytes + column;
    if (kind == KVP_DEVICE_WRITE) {
      memcpy(device, transfer->host + begin, bytes);
    } else if (kind == KVP_DEVICE_READ) {
      memcpy(transfer->host + begin, device, bytes);
    } else {
      memset(device, transfer->fill, bytes);
    }
    begin += bytes;
  }
}

void kvp_host_op_run(const struct kvp_device_op *op, uint64_t unit, struct kvp_op_counts *counts) {
  const struct shape shape = shape_of(op);
  const uint64_t begin = unit * shape.per_unit;
  const uint64_t end = min_u64(begin + shape.per_unit, shape.total);
  switch (op->kind) {
  case KVP_DEVICE_STORE:
    kvp_host_store(&op->params.store, begin, end, counts);
    break;
  case KVP_DEVICE_LOAD:
    kvp_host_load(&op->params.load, begin, end, counts);
    break;
  case KVP_DEVICE_WRITE:
  case KVP_DEVICE_FILL:
    transfer_run(op->kind, &op->params.transfer, begin, end);
    counts->bytes_written += end - begin;
    break;
  case KVP_DEVICE_READ:
    transfer_run(op->kind, &op->params.transfer, begin, end);
    counts->bytes_read += end - begin;
    break;
  case KVP_DEVICE_COPY_ROWS:
    kvp_host_copy_rows(&op->params.copy_rows, begin, end, counts);
    break;
  case KVP_DEVICE_FUSED_STORE:
    kvp_host_fused_store(&op->params.fused_store, begin, end, counts);
    break;
  case KVP_DEVICE_CONVERT_INDEX:
    kvp_host_convert_index(&op->params.convert_index, begin, end, counts);
    break;
  case KVP_DEVICE_SWA_INDEX:
    kvp_host_swa_index(&op->params.swa_index, begin, end, counts);
    break;
  case KVP_DEVICE_EXPAND_INDEX:
    kvp_host_expand_index(&op->params.expand_index, begin, end, counts);
    break;
  case KVP_DEVICE_CAT_INDEX:
    kvp_host_cat_index(&op->params.cat_index, begin, end, counts);
    break;
  case KVP_DEVICE_COPY_BLOCKS:
    kvp_host_copy_blocks(&op->params.blocks, begin, end, counts);
    break;
  case KVP_DEVICE_ZERO_BLOCKS:
    kvp_host_zero_blocks(&op->params.blocks, begin, end, counts);
    break;
  case KVP_DEVICE_REPLAY:
  case KVP_DEVICE_POINT:
  case KVP_DEVICE_SIGNAL:
    break;
  }
}
