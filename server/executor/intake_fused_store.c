/* Checks of a fused store: rows before the norm, its weight, positions and their table, slots, cast-back. */
#include <math.h>
#include <string.h>

#include "server/executor/intake_op.h"

/* What the op says, checked piece by piece. Absent pieces are zero. */
struct fused {
  struct kvp_intake_place place;
  struct kvp_intake_view source;
  struct kvp_intake_view weight;
  struct kvp_intake_view cos_sin;
  struct kvp_intake_view cast_back;
  struct kvp_intake_array slots;
  struct kvp_intake_array positions;
  uint64_t row_count;
  uint64_t rows_skipped;
  uint64_t position_count;
  uint32_t rotary_dims;
  float eps;
};

static enum kvp_status eps_check(struct kvp_intake_op *op, float *out) {
  const uint64_t bits = op->wire->numbers[0];
  const uint32_t low = (uint32_t)bits;
  memcpy(out, &low, sizeof *out);
  if (bits > UINT32_MAX || !isfinite(*out) || *out <= 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "eps", -1, bits, "eps = %g (0x%08llx) is not finite and > 0",
                             (double)*out, (unsigned long long)bits);
  }
  return KVP_OK;
}

static enum kvp_status elements_check(struct kvp_intake_op *op, const struct kvp_intake_place *place) {
  const uint32_t elements = place->layer.geometry->sizes.elements;
  if ((elements & (elements - 1)) != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_WRONG_FORMAT, "region", -1, elements,
                             "rows of region '%s' have %u elements, which is no power of two", place->region->name,
                             elements);
  }
  if (elements > kvp_fused_elements_max) {
    return KVP_INTAKE_REFUSE(op, KVP_WRONG_FORMAT, "region", -1, elements,
                             "rows of region '%s' have %u elements, at most %d are taken", place->region->name,
                             elements, kvp_fused_elements_max);
  }
  return KVP_OK;
}

/* Rows of float32: cosines, then sines, of each position. */
static enum kvp_status table_check(struct kvp_intake_op *op, struct fused *it) {
  const uint32_t elements = it->place.layer.geometry->sizes.elements;
  const uint64_t offset = op->wire->argument;
  it->position_count = (uint64_t)INT32_MAX + 1; /* without a table no position is outside of it */
  if (op->wire->fourth.flags != 0) {
    const uint32_t row_bytes = op->wire->fourth.row_bytes;
    enum kvp_status status =
        kvp_intake_view_check(op, "cos_sin", &op->wire->fourth, 0, KVP_INTAKE_ROW_ALIGNMENT, &it->cos_sin);
    if (status != KVP_OK) {
      return status;
    }
    if (row_bytes % (2 * sizeof(float)) != 0) {
      return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "cos_sin", -1, row_bytes,
                               "cos_sin.row_bytes = %u is no even number of float32", row_bytes);
    }
    it->position_count = it->cos_sin.area.rows;
    it->rotary_dims = row_bytes / sizeof(float);
  }
  if (offset > elements || it->rotary_dims > elements - offset) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "rope_offset", -1, offset,
                             "rope_offset %llu + %u rotary_dims > %u elements of a row", (unsigned long long)offset,
                             it->rotary_dims, elements);
  }
  return KVP_OK;
}

/* Least and largest position of the rows that are looked at: those with a slot, or all. */
static void positions_look(const struct fused *it, bool with_slots, struct kvp_intake_memo *memo) {
  const int32_t *positions = it->positions.data;
  const int32_t *slots = it->slots.data;
  memo->least = INT64_MAX;
  memo->largest = INT64_MIN;
  for (uint64_t i = 0; i < it->row_count; i++) {
    if (!with_slots || slots[i] != -1) {
      memo->least = positions[i] < memo->least ? positions[i] : memo->least;
      memo->largest = positions[i] > memo->largest ? positions[i] : memo->largest;
    }
  }
}

static enum kvp_status positions_check(struct kvp_intake_op *op, const struct fused *it) {
  if (!it->positions.is_inline) {
    op->out->report_flags |= KVP_REPORT_UNCHECKED_ARRAYS;
    return KVP_OK;
  }
  const bool with_slots = it->slots.is_inline && it->cast_back.area.base == NULL;
  const struct kvp_intake_memo_key key = {.use = KVP_USE_POSITIONS,
                                          .array = it->positions.index,
                                          .other = with_slots ? it->slots.index : KVP_WIRE_NO_ARRAY};
  struct kvp_intake_memo *memo = kvp_intake_memo_find(op, &key);
  if (memo == NULL) {
    memo = kvp_intake_memo_add(op, &it->positions, &key);
    if (memo == NULL) {
      return (enum kvp_status)op->error->status;
    }
    positions_look(it, with_slots, memo);
  }
  if (memo->least > memo->largest || (memo->least >= 0 && memo->largest < (int64_t)it->position_count)) {
    return KVP_OK;
  }
  const int32_t *positions = it->positions.data;
  const int32_t *slots = it->slots.data;
  uint64_t i = 0;
  while ((with_slots && slots[i] == -1) || (positions[i] >= 0 && (uint64_t)positions[i] < it->position_count)) {
    i++;
  }
  return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "positions", i, positions[i],
                           "positions[%llu] = %d is not in [0, %llu), the rows of cos_sin", (unsigned long long)i,
                           positions[i], (unsigned long long)it->position_count);
}

static enum kvp_status views_check(struct kvp_intake_op *op, struct fused *it) {
  const uint32_t row_bytes = it->place.layer.geometry->sizes.row_bytes;
  enum kvp_status status = KVP_OK;
  if ((status = kvp_intake_view_check(op, "source", &op->wire->source, row_bytes, KVP_INTAKE_ROW_ALIGNMENT,
                                      &it->source)) != KVP_OK ||
      (status = kvp_intake_cast_back(op, &it->place, &op->wire->second, &it->cast_back)) != KVP_OK ||
      (status = kvp_intake_view_check(op, "norm_weight", &op->wire->third, row_bytes, KVP_INTAKE_ROW_ALIGNMENT,
                                      &it->weight)) != KVP_OK) {
    return status;
  }
  if (it->weight.area.rows != 1) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "norm_weight", -1, it->weight.area.rows,
                             "norm_weight has %llu rows, one is needed", (unsigned long long)it->weight.area.rows);
  }
  return table_check(op, it);
}

static enum kvp_status apart_check(struct kvp_intake_op *op, const struct fused *it) {
  const struct kvp_intake_view *inputs[] = {&it->source, &it->weight, &it->cos_sin};
  const struct kvp_intake_array *arrays[] = {&it->slots, &it->positions};
  enum kvp_status status = KVP_OK;
  for (size_t i = 0; i < sizeof inputs / sizeof inputs[0] && status == KVP_OK; i++) {
    status = kvp_intake_views_apart(op, &it->cast_back, inputs[i]);
  }
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0] && status == KVP_OK; i++) {
    status = kvp_intake_array_apart(op, &it->cast_back, arrays[i]);
  }
  return status;
}

static enum kvp_status arrays_check(struct kvp_intake_op *op, struct fused *it) {
  enum kvp_status status = KVP_OK;
  if ((status = kvp_intake_array_check(op, 0, "slots", sizeof(int32_t), &it->slots)) != KVP_OK ||
      (status = kvp_intake_array_check(op, 1, "positions", sizeof(int32_t), &it->positions)) != KVP_OK) {
    return status;
  }
  it->row_count = it->slots.bytes / sizeof(int32_t);
  if (it->positions.bytes != it->slots.bytes) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "positions", -1, it->positions.bytes / sizeof(int32_t),
                             "%llu positions for %llu slots",
                             (unsigned long long)(it->positions.bytes / sizeof(int32_t)),
                             (unsigned long long)it->row_count);
  }
  if ((status = kvp_intake_rows_enough(op, "slots", it->row_count, &it->source)) != KVP_OK ||
      (status = kvp_intake_rows_enough(op, "slots", it->row_count, &it->cast_back)) != KVP_OK ||
      (status = apart_check(op, it)) != KVP_OK ||
      (status = kvp_intake_slots(op, &it->place, &it->slots, &it->rows_skipped)) != KVP_OK ||
      (status = positions_check(op, it)) != KVP_OK) {
    return status;
  }
  return kvp_intake_hazard_store(op, &it->place, &it->slots, it->rows_skipped);
}

static uint32_t kernel_flags(uint32_t flags) {
  return ((flags & KVP_OP_NEOX) != 0 ? KVP_FUSED_NEOX : 0U) |
         ((flags & KVP_OP_HADAMARD) != 0 ? KVP_FUSED_HADAMARD : 0U) |
         ((flags & KVP_OP_ROUND_TO_BF16) != 0 ? KVP_FUSED_ROUND_TO_BF16 : 0U);
}

enum kvp_status kvp_intake_fused_store(struct kvp_intake_op *op) {
  struct fused it;
  memset(&it, 0, sizeof it);
  enum kvp_status status = kvp_intake_place(op, &it.place);
  if (status != KVP_OK || (status = elements_check(op, &it.place)) != KVP_OK ||
      (status = eps_check(op, &it.eps)) != KVP_OK || (status = views_check(op, &it)) != KVP_OK ||
      (status = arrays_check(op, &it)) != KVP_OK) {
    return status;
  }
  struct kvp_device_op *device_op = kvp_intake_device_op(op, KVP_DEVICE_FUSED_STORE);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  device_op->host_arrays =
      kvp_intake_host_bit(&it.slots, KVP_ARRAY_SLOTS) | kvp_intake_host_bit(&it.positions, KVP_ARRAY_POSITIONS);
  device_op->params.fused_store = (struct kvp_fused_store_params){
      .store = {.layer = it.place.layer,
                .source = kvp_intake_rows(&it.source),
                .slots = it.slots.data,
                .row_count = it.row_count,
                .rows_skipped = it.rows_skipped,
                .cast_back = kvp_intake_rows(&it.cast_back),
                .check = kvp_intake_owner_check(op, it.place.pool, &it.slots)},
      .norm_weight = (const uint16_t *)(const void *)it.weight.area.base,
      .positions = it.positions.data,
      .cos_sin = kvp_intake_rows(&it.cos_sin),
      .position_count = it.position_count,
      .rotary_dims = it.rotary_dims,
      .rope_offset = (uint32_t)op->wire->argument,
      .eps = it.eps,
      .flags = kernel_flags(op->wire->flags),
      .positions_checked = it.positions.is_inline,
      .rows_are_known = it.positions.is_inline && (it.slots.is_inline || it.slots.data == NULL),
  };
  return KVP_OK;
}
