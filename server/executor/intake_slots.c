/* Slots [n] of ops that store: checked once in a step. Their cast-back. */
#include "server/executor/intake_op.h"

static enum kvp_status slot_out_of_range(struct kvp_intake_op *op, const char *name, uint64_t i, int64_t slot,
                                         const struct kvp_geometry *geometry) {
  if (slot < 0) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, name, i, slot, "%s[%llu] = %lld < -1", name, (unsigned long long)i,
                             (long long)slot);
  }
  return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, name, i, slot, "%s[%llu] = %lld >= %u blocks * %u tokens_per_block",
                           name, (unsigned long long)i, (long long)slot, geometry->num_blocks,
                           geometry->tokens_per_block);
}

static enum kvp_status slot_twice(struct kvp_intake_op *op, const char *name, const int32_t *slots, uint64_t i) {
  uint64_t first = 0;
  while (slots[first] != slots[i]) {
    first++;
  }
  return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, i, slots[i], "%s[%llu] = %d is %s[%llu] again", name,
                           (unsigned long long)i, slots[i], name, (unsigned long long)first);
}

/* Every slot: in range, in a block the owner may write, named once. Consecutive slots of a block are looked up once.
 */
static enum kvp_status slots_check(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                   const struct kvp_intake_array *array, uint64_t *rows_skipped) {
  const struct kvp_geometry *geometry = place->layer.geometry;
  const int32_t *slots = array->data;
  const uint64_t count = array->bytes / sizeof *slots;
  const int64_t slots_end = (int64_t)geometry->num_blocks * geometry->tokens_per_block;
  struct kvp_slot_set *set = &op->intake->slots;
  if (!kvp_slot_set_begin(set, count)) {
    return kvp_intake_no_memory(op);
  }
  int64_t block_begin = 0; /* [block_begin, block_end): the block that was looked up last */
  int64_t block_end = 0;
  *rows_skipped = 0;
  for (uint64_t i = 0; i < count; i++) {
    const int64_t slot = slots[i];
    if (slot == -1) {
      ++*rows_skipped;
      continue;
    }
    if (slot < block_begin || slot >= block_end) {
      if (slot < 0 || slot >= slots_end) {
        return slot_out_of_range(op, array->name, i, slot, geometry);
      }
      uint32_t block = (uint32_t)slot / geometry->tokens_per_block;
      const struct kvp_intake_element element = {
          .array = array->name, .field = "", .index = i, .position = i, .value = slot};
      enum kvp_status status = kvp_intake_block_check(op, place->pool, &element, block, true);
      if (status != KVP_OK) {
        return status;
      }
      block_begin = (int64_t)block * geometry->tokens_per_block;
      block_end = block_begin + geometry->tokens_per_block;
    }
    if (!kvp_slot_set_add(set, (int32_t)slot)) {
      return slot_twice(op, array->name, slots, i);
    }
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_slots(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                 const struct kvp_intake_array *array, uint64_t *rows_skipped) {
  *rows_skipped = 0;
  if (!array->is_inline) {
    return KVP_OK;
  }
  const struct kvp_intake_memo_key key = {
      .use = KVP_USE_SLOTS,
      .array = array->index,
      .other = KVP_WIRE_NO_ARRAY,
      .pool = place->pool,
      .tokens_per_block = place->layer.geometry->tokens_per_block,
  };
  struct kvp_intake_memo *memo = kvp_intake_memo_find(op, &key);
  if (memo == NULL) {
    memo = kvp_intake_memo_add(op, array, &key);
    if (memo == NULL) {
      return (enum kvp_status)op->error->status;
    }
    enum kvp_status status = slots_check(op, place, array, &memo->rows_skipped);
    if (status != KVP_OK) {
      return status;
    }
  }
  *rows_skipped = memo->rows_skipped;
  return KVP_OK;
}

enum kvp_status kvp_intake_cast_back(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                     const struct kvp_wire_view *wire, struct kvp_intake_view *out) {
  const struct kvp_format *format = place->layer.geometry->format;
  if (wire->flags == 0) {
    return KVP_OK;
  }
  if (!format->dequantize_on_load && format->quantized_dtype != KVP_QUANTIZED_NONE) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "cast_back", -1, wire->buffer_id,
                             "cast_back: format %s has none", format->name);
  }
  return kvp_intake_view_check(op, "cast_back", wire, place->layer.geometry->sizes.row_bytes,
                               KVP_INTAKE_ROW_ALIGNMENT, out);
}
