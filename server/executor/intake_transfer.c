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

static enum kvp_status transfer_add(struct kvp_intake_op *op, enum kvp_device_op_kind kind,
                                    const struct kvp_transfer_params *transfer) {
  struct kvp_device_op *device_op = kvp_intake_device_op(op, kind);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  device_op->params.transfer = *transfer;
  return kind == KVP_DEVICE_READ ? result_take(op, transfer->row_count * transfer->row_bytes) : KVP_OK;
}

static enum kvp_status buffer_write(struct kvp_intake_op *op, struct kvp_transfer_params *transfer) {
  struct kvp_intake_array data = {0};
  enum kvp_status status = kvp_intake_array_check(op, 0, "data", 1, &data);
  if (status != KVP_OK) {
    return status;
  }
  const uint64_t bytes = transfer->row_count * transfer->row_bytes; /* the view lies inside its buffer */
  if (!data.is_inline || data.bytes != bytes) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "data", -1, data.bytes,
                             "data: %llu bytes, inline bytes for %llu rows of %llu are needed",
                             (unsigned long long)data.bytes, (unsigned long long)transfer->row_count,
                             (unsigned long long)transfer->row_bytes);
  }
  transfer->host = (uint8_t *)data.data;
  return transfer_add(op, KVP_DEVICE_WRITE, transfer);
}

static enum kvp_status buffer_access(struct kvp_intake_op *op) {
  struct kvp_intake_view view = {0};
  enum kvp_status status = kvp_intake_view_check(op, "view", &op->wire->source, 0, KVP_INTAKE_ANY_ALIGNMENT, &view);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_transfer_params transfer = {
      .rows = kvp_intake_rows(&view), .row_count = view.area.rows, .row_bytes = view.area.row_bytes};
  if (op->wire->kind == KVP_OP_BUFFER_WRITE) {
    return buffer_write(op, &transfer);
  }
  if (op->wire->kind == KVP_OP_BUFFER_FILL) {
    transfer.fill = (uint8_t)(op->wire->argument & 0xFF);
    return transfer_add(op, KVP_DEVICE_FILL, &transfer);
  }
  return transfer_add(op, KVP_DEVICE_READ, &transfer);
}

static enum kvp_status region_read(struct kvp_intake_op *op) {
  struct kvp_intake_place place;
  enum kvp_status status = kvp_intake_place(op, &place);
  if (status != KVP_OK) {
    return status;
  }
  const uint64_t offset = op->wire->argument;
  const uint64_t bytes = op->wire->total_k;
  const uint64_t layer_bytes = place.layer.geometry->layer_stride_bytes;
  if (offset > layer_bytes || bytes > layer_bytes - offset) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "argument", -1, offset,
                             "%llu bytes from offset %llu are not inside a layer of %llu bytes",
                             (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)layer_bytes);
  }
  const struct kvp_transfer_params transfer = {
      .rows = {place.layer.base + offset, bytes}, .row_count = 1, .row_bytes = bytes};
  return transfer_add(op, KVP_DEVICE_READ, &transfer);
}

enum kvp_status kvp_intake_transfer(struct kvp_intake_op *op) {
  if (op->wire->kind != KVP_OP_REGION_READ) {
    return buffer_access(op);
  }
  return region_read(op);
}
