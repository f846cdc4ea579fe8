/* Checks of a load: segments [m,4], output rows, output scales of index formats. */
#include "server/executor/intake_op.h"

static enum kvp_status out_scales_check(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                        struct kvp_intake_view *out) {
  const uint32_t scale_bytes = place->layer.geometry->sizes.loaded_scale_bytes;
  if (scale_bytes == 0) {
    return kvp_intake_view_absent(op, "out_scales", &op->wire->second);
  }
  return kvp_intake_view_check(op, "out_scales", &op->wire->second, scale_bytes, KVP_INTAKE_INT_ALIGNMENT, out);
}

static enum kvp_status total_k_check(struct kvp_intake_op *op, const struct kvp_intake_view *view) {
  const uint64_t total_k = op->wire->total_k;
  if (view->area.base != NULL && total_k > view->area.rows) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "total_k", -1, total_k, "total_k = %llu, but %s has %llu rows",
                             (unsigned long long)total_k, view->name, (unsigned long long)view->area.rows);
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_load(struct kvp_intake_op *op) {
  struct kvp_intake_place place;
  struct kvp_intake_view rows = {0};
  struct kvp_intake_view scales = {0};
  struct kvp_intake_array segments = {0};
  struct kvp_load_params load;
  enum kvp_status status = kvp_intake_place(op, &place);
  if (status != KVP_OK) {
    return status;
  }
  if ((status = kvp_intake_view_check(op, "out", &op->wire->source, place.layer.geometry->sizes.loaded_row_bytes,
                                      KVP_INTAKE_ROW_ALIGNMENT, &rows)) != KVP_OK ||
      (status = out_scales_check(op, &place, &scales)) != KVP_OK ||
      (status = kvp_intake_array_check(op, 0, "segments", sizeof(struct kvp_segment), &segments)) != KVP_OK ||
      (status = kvp_intake_views_apart(op, &scales, &rows)) != KVP_OK ||
      (status = kvp_intake_array_apart(op, &rows, &segments)) != KVP_OK ||
      (status = kvp_intake_array_apart(op, &scales, &segments)) != KVP_OK ||
      (status = total_k_check(op, &rows)) != KVP_OK || (status = total_k_check(op, &scales)) != KVP_OK ||
      (status = kvp_intake_segments(op, &place, &segments, op->wire->total_k, &load)) != KVP_OK ||
      (status = kvp_intake_hazard_load(op, &place, &segments)) != KVP_OK) {
    return status;
  }
  load.out = kvp_intake_rows(&rows);
  load.scales = kvp_intake_rows(&scales);
  return kvp_intake_load_add(op, &segments, &load);
}
