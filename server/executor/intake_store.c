/* Checks of a store: slots [n], source rows, cast-back rows. */
#include "server/executor/intake_op.h"

static enum kvp_status slot_out_of_range(struct kvp_intake_op *op, uint64_t i, int64_t slot,
                                         const struct kvp_geometry *geometry) {
  if (slot < 0) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "slots", i, slot, "slots[%llu] = %lld < -1", (unsigned long long)i,
                             (long long)slot);
  }
  return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "slots", i, slot,
                           "slots[%llu] = %lld >= %u blocks * %u tokens_per_block", (unsigned long long)i,
                           (long long)slot, geometry->num_blocks, geometry->tokens_per_block);
}

static enum kvp_status slot_twice(struct kvp_intake_op *op, const int32_t *slots, uint64_t i) {
  uint64_t first = 0;
  while (slots[first] != slots[i]) {
    first++;
  }
  return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "slots", i, slots[i], "slots[%llu] = %d is slots[%llu] again",
                           (unsigned long long)i, slots[i], (unsigned long long)first);
}

/* Every slot: in range, in a block the owner may write, named once. Consecutive slots of a block are looked up once.
 */
static enum kvp_status slots_check(struct kvp_intake_op *op, const int32_t *slots, uint64_t count,
                                   const struct kvp_geometry *geometry, uint64_t *rows_skipped) {
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
        return slot_out_of_range(op, i, slot, geometry);
      }
      uint32_t block = (uint32_t)slot / geometry->tokens_per_block;
      const struct kvp_intake_element element = {
          .array = "slots", .field = "", .index = i, .position = i, .value = slot};
      enum kvp_status status = kvp_intake_block_check(op, &element, block, true);
      if (status != KVP_OK) {
        return status;
      }
      block_begin = (int64_t)block * geometry->tokens_per_block;
      block_end = block_begin + geometry->tokens_per_block;
    }
    if (!kvp_slot_set_add(set, (int32_t)slot)) {
      return slot_twice(op, slots, i);
    }
  }
  return KVP_OK;
}

static enum kvp_status slots_array_check(struct kvp_intake_op *op, const struct kvp_intake_array *array,
                                         const struct kvp_layer *layer, uint64_t *rows_skipped) {
  *rows_skipped = 0;
  if (!array->is_inline) {
    return KVP_OK;
  }
  struct kvp_intake_memo *memo = kvp_intake_memo_find(op, array->index, layer);
  if (memo == NULL) {
    memo = kvp_intake_memo_add(op, array, layer);
    if (memo == NULL) {
      return (enum kvp_status)op->error->status;
    }
    enum kvp_status status =
        slots_check(op, array->data, array->bytes / sizeof(int32_t), layer->geometry, &memo->rows_skipped);
    if (status != KVP_OK) {
      return status;
    }
  }
  *rows_skipped = memo->rows_skipped;
  return KVP_OK;
}

/* Optional, and only where a load gives BF16 rows. */
static enum kvp_status cast_back_check(struct kvp_intake_op *op, const struct kvp_layer *layer,
                                       struct kvp_intake_view *out) {
  const struct kvp_format *format = layer->geometry->format;
  if (op->wire->second.flags == 0) {
    return KVP_OK;
  }
  if (!format->dequantize_on_load && format->quantized_dtype != KVP_QUANTIZED_NONE) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "cast_back", -1, op->wire->second.buffer_id,
                             "cast_back: format %s has none", format->name);
  }
  return kvp_intake_view_check(op, "cast_back", &op->wire->second, layer->geometry->sizes.row_bytes,
                               KVP_INTAKE_ROW_ALIGNMENT, out);
}

static enum kvp_status rows_enough(struct kvp_intake_op *op, uint64_t count, const struct kvp_intake_view *view) {
  if (view->base != NULL && count > view->rows) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "slots", view->rows, count, "%llu slots, but %s has %llu rows",
                             (unsigned long long)count, view->name, (unsigned long long)view->rows);
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_store(struct kvp_intake_op *op) {
  struct kvp_layer layer;
  struct kvp_intake_view source = {0};
  struct kvp_intake_view cast_back = {0};
  struct kvp_intake_array slots = {0};
  enum kvp_status status = kvp_intake_layer(op, &layer);
  if (status != KVP_OK) {
    return status;
  }
  if ((status = kvp_intake_view_check(op, "source", &op->wire->source, layer.geometry->sizes.row_bytes,
                                      KVP_INTAKE_ROW_ALIGNMENT, &source)) != KVP_OK ||
      (status = cast_back_check(op, &layer, &cast_back)) != KVP_OK ||
      (status = kvp_intake_array_check(op, "slots", sizeof(int32_t), &slots)) != KVP_OK ||
      (status = kvp_intake_views_apart(op, &cast_back, &source)) != KVP_OK ||
      (status = kvp_intake_array_apart(op, &cast_back, &slots)) != KVP_OK) {
    return status;
  }
  const uint64_t count = slots.bytes / sizeof(int32_t);
  uint64_t rows_skipped = 0;
  if ((status = rows_enough(op, count, &source)) != KVP_OK ||
      (status = rows_enough(op, count, &cast_back)) != KVP_OK ||
      (status = slots_array_check(op, &slots, &layer, &rows_skipped)) != KVP_OK) {
    return status;
  }
  op->out->device.kind = KVP_DEVICE_STORE;
  op->out->device.params.store = (struct kvp_store_params){
      .layer = layer,
      .source = {source.base, source.stride_bytes},
      .slots = slots.data,
      .row_count = count,
      .rows_skipped = rows_skipped,
      .cast_back = {cast_back.base, cast_back.stride_bytes},
      .check = kvp_intake_owner_check(op, &slots),
  };
  return KVP_OK;
}
