/* Checks of the daemon's own ops: bytes into a buffer, out of a buffer, out of a region. */
#include "server/executor/intake_op.h"

static const uint64_t result_bytes_max = UINT64_C(2) << 20; /* of one step */

static enum kvp_status result_take(struct kvp_intake_op *op, uint64_t bytes) {
  if (bytes > result_bytes_max - op->step->result_bytes) {
    return KVP_INTAKE_REFUSE(
        op, KVP_TOO_LARGE, "results", -1, bytes, "%llu result bytes behind %llu of earlier ops, %llu are allowed",
        (unsigned long long)bytes, (unsigned long long)op->step->result_bytes, (unsigned long long)result_bytes_max);
  }
  op->out->result_offset_bytes = op->step->result_bytes;
  op->step->result_bytes += bytes;
  return KVP_OK;
}

static enum kvp_status buffer_write(struct kvp_intake_op *op, const struct kvp_intake_view *view,
                                    struct kvp_transfer_params *transfer) {
  struct kvp_intake_array data = {0};
  enum kvp_status status = kvp_intake_array_check(op, "data", 1, &data);
  if (status != KVP_OK) {
    return status;
  }
  const uint64_t bytes = view->rows * view->row_bytes; /* no overflow: the view lies inside its buffer */
  if (!data.is_inline || data.bytes != bytes) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "data", -1, data.bytes,
                             "data: %llu bytes, inline bytes for %llu rows of %llu are needed",
                             (unsigned long long)data.bytes, (unsigned long long)view->rows,
                             (unsigned long long)view->row_bytes);
  }
  op->out->device.kind = KVP_DEVICE_WRITE;
  transfer->host = (uint8_t *)data.data;
  return KVP_OK;
}

static enum kvp_status buffer_access(struct kvp_intake_op *op) {
  struct kvp_intake_view view = {0};
  struct kvp_transfer_params *transfer = &op->out->device.params.transfer;
  enum kvp_status status = kvp_intake_view_check(op, "view", &op->wire->source, 0, KVP_INTAKE_ANY_ALIGNMENT, &view);
  if (status != KVP_OK) {
    return status;
  }
  transfer->rows = (struct kvp_rows){view.base, view.stride_bytes};
  transfer->row_count = view.rows;
  transfer->row_bytes = view.row_bytes;
  if (op->wire->kind == KVP_OP_BUFFER_WRITE) {
    return buffer_write(op, &view, transfer);
  }
  if (op->wire->kind == KVP_OP_BUFFER_FILL) {
    op->out->device.kind = KVP_DEVICE_FILL;
    transfer->fill = (uint8_t)(op->wire->argument & 0xFF);
    return KVP_OK;
  }
  op->out->device.kind = KVP_DEVICE_READ;
  return result_take(op, view.rows * view.row_bytes);
}

static enum kvp_status region_read(struct kvp_intake_op *op) {
  struct kvp_layer layer;
  enum kvp_status status = kvp_intake_layer(op, &layer);
  if (status != KVP_OK) {
    return status;
  }
  const uint64_t offset = op->wire->argument;
  const uint64_t bytes = op->wire->total_k;
  const uint64_t layer_bytes = layer.geometry->layer_stride_bytes;
  if (offset > layer_bytes || bytes > layer_bytes - offset) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "argument", -1, offset,
                             "%llu bytes from offset %llu are not inside a layer of %llu bytes",
                             (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)layer_bytes);
  }
  op->out->device.kind = KVP_DEVICE_READ;
  op->out->device.params.transfer = (struct kvp_transfer_params){
      .rows = {layer.base + offset, bytes},
      .row_count = 1,
      .row_bytes = bytes,
  };
  return result_take(op, bytes);
}

enum kvp_status kvp_intake_transfer(struct kvp_intake_op *op) {
  enum kvp_status status = kvp_intake_view_absent(op, "second", &op->wire->second);
  if (status != KVP_OK) {
    return status;
  }
  if (op->wire->kind != KVP_OP_REGION_READ) {
    return buffer_access(op);
  }
  status = kvp_intake_view_absent(op, "source", &op->wire->source);
  return status == KVP_OK ? region_read(op) : status;
}
