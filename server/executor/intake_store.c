/* Checks of a store: slots [n], source rows, cast-back rows. */
#include "server/executor/intake_op.h"

enum kvp_status kvp_intake_store(struct kvp_intake_op *op) {
  struct kvp_intake_place place;
  struct kvp_intake_view source = {0};
  struct kvp_intake_view cast_back = {0};
  struct kvp_intake_array slots = {0};
  enum kvp_status status = kvp_intake_place(op, &place);
  if (status != KVP_OK) {
    return status;
  }
  if ((status = kvp_intake_view_check(op, "source", &op->wire->source, place.layer.geometry->sizes.row_bytes,
                                      KVP_INTAKE_ROW_ALIGNMENT, &source)) != KVP_OK ||
      (status = kvp_intake_cast_back(op, &place, &op->wire->second, &cast_back)) != KVP_OK ||
      (status = kvp_intake_array_check(op, 0, "slots", sizeof(int32_t), &slots)) != KVP_OK ||
      (status = kvp_intake_views_apart(op, &cast_back, &source)) != KVP_OK ||
      (status = kvp_intake_array_apart(op, &cast_back, &slots)) != KVP_OK) {
    return status;
  }
  const uint64_t count = slots.bytes / sizeof(int32_t);
  uint64_t rows_skipped = 0;
  if ((status = kvp_intake_rows_enough(op, "slots", count, &source)) != KVP_OK ||
      (status = kvp_intake_rows_enough(op, "slots", count, &cast_back)) != KVP_OK ||
      (status = kvp_intake_slots(op, &place, &slots, &rows_skipped)) != KVP_OK ||
      (status = kvp_intake_hazard_store(op, &place, &slots, rows_skipped)) != KVP_OK) {
    return status;
  }
  struct kvp_device_op *device_op = kvp_intake_device_op(op, KVP_DEVICE_STORE);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  device_op->host_arrays = kvp_intake_host_bit(&slots, KVP_ARRAY_SLOTS);
  device_op->params.store = (struct kvp_store_params){
      .layer = place.layer,
      .source = kvp_intake_rows(&source),
      .slots = slots.data,
      .row_count = count,
      .rows_skipped = rows_skipped,
      .cast_back = kvp_intake_rows(&cast_back),
      .check = kvp_intake_owner_check(op, place.pool, &slots),
  };
  return KVP_OK;
}
