/* Ops of the host backend, cut into units of a few hundred rows. Any worker thread. */
#include <string.h>

#include "server/executor/device_host.h"

enum {
  store_unit_rows = 256,
  load_unit_rows = 512,
  load_unit_segments_max = 1024,
  transfer_unit_bytes = 256 << 10,
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

uint64_t kvp_host_op_units(const struct kvp_device_op *op) {
  switch (op->kind) {
  case KVP_DEVICE_STORE:
    return units_of(op->params.store.row_count, store_unit_rows);
  case KVP_DEVICE_LOAD:
    return units_of(op->params.load.segment_count, load_unit_segments(&op->params.load));
  case KVP_DEVICE_WRITE:
  case KVP_DEVICE_READ:
  case KVP_DEVICE_FILL:
    return units_of(transfer_bytes(&op->params.transfer), transfer_unit_bytes);
  case KVP_DEVICE_SIGNAL:
    break;
  }
  return 0;
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
  switch (op->kind) {
  case KVP_DEVICE_STORE: {
    uint64_t begin = unit * store_unit_rows;
    kvp_host_store(&op->params.store, begin, min_u64(begin + store_unit_rows, op->params.store.row_count), counts);
    break;
  }
  case KVP_DEVICE_LOAD: {
    uint64_t per_unit = load_unit_segments(&op->params.load);
    uint64_t begin = unit * per_unit;
    kvp_host_load(&op->params.load, begin, min_u64(begin + per_unit, op->params.load.segment_count), counts);
    break;
  }
  case KVP_DEVICE_WRITE:
  case KVP_DEVICE_READ:
  case KVP_DEVICE_FILL: {
    uint64_t begin = unit * transfer_unit_bytes;
    uint64_t end = min_u64(begin + transfer_unit_bytes, transfer_bytes(&op->params.transfer));
    transfer_run(op->kind, &op->params.transfer, begin, end);
    if (op->kind == KVP_DEVICE_READ) {
      counts->bytes_read += end - begin;
    } else {
      counts->bytes_written += end - begin;
    }
    break;
  }
  case KVP_DEVICE_SIGNAL:
    break;
  }
}
