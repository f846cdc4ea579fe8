/* Does a load read ring slots that an op before it in the step stores to? New rows go to the slots that the window
 * they belong to is still read from: in a ring the load comes first.
 *
 * Layers are remembered with the arrays that were stored by; slots are marked only when a load asks. Linear in the
 * sizes of the arrays.
 */
#include "server/executor/intake_op.h"

enum { slots_per_look = 64 };

/* Marks of an array's own slots, whatever the layer, are kept where layers would be numbered last. */
static uint32_t array_number(const struct kvp_intake_array *slots) {
  return kvp_slot_marks_layers_max - 1 - slots->index;
}
_Static_assert((int)kvp_arrays_per_step_max + (int)kvp_ops_per_step_max < (int)kvp_slot_marks_layers_max,
               "numbers of both");

struct hazard_store {
  struct hazard_store *next;
  int32_t op;
  const char *op_name;
  struct kvp_intake_array slots;
  bool is_marked;
};

struct kvp_hazard_layer {
  struct kvp_hazard_layer *next;
  const uint8_t *base; /* which layer it is */
  uint32_t number;
  bool has_unknown; /* slots in a buffer */
  struct hazard_store *stores;
};

static struct kvp_hazard_layer *layer_find(const struct kvp_intake_op *op, const uint8_t *base) {
  struct kvp_hazard_layer *layer = op->hazards;
  while (layer != NULL && layer->base != base) {
    layer = layer->next;
  }
  return layer;
}

static struct kvp_hazard_layer *layer_take(struct kvp_intake_op *op, const uint8_t *base) {
  struct kvp_hazard_layer *layer = layer_find(op, base);
  if (layer != NULL) {
    return layer;
  }
  layer = kvp_arena_alloc(&op->step->arena, sizeof *layer);
  if (layer != NULL) {
    *layer = (struct kvp_hazard_layer){
        .next = op->hazards, .base = base, .number = op->hazards == NULL ? 0 : op->hazards->number + 1};
    op->hazards = layer;
  }
  return layer;
}

enum kvp_status kvp_intake_hazard_store(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                        const struct kvp_intake_array *slots, uint64_t rows_skipped) {
  if (place->pool->kind != KVP_POOL_RING || slots->bytes == rows_skipped * sizeof(int32_t)) {
    return KVP_OK;
  }
  struct kvp_hazard_layer *layer = layer_take(op, place->layer.base);
  if (layer == NULL) {
    return kvp_intake_no_memory(op);
  }
  if (!slots->is_inline) {
    layer->has_unknown = true;
    return KVP_OK;
  }
  for (const struct hazard_store *store = layer->stores; store != NULL; store = store->next) {
    if (store->slots.index == slots->index) {
      return KVP_OK;
    }
  }
  struct hazard_store *store = kvp_arena_alloc(&op->step->arena, sizeof *store);
  if (store == NULL) {
    return kvp_intake_no_memory(op);
  }
  *store = (struct hazard_store){.next = layer->stores, .op = op->index, .op_name = op->name, .slots = *slots};
  layer->stores = store;
  return KVP_OK;
}

static enum kvp_status stores_mark(struct kvp_intake_op *op, struct kvp_hazard_layer *layer) {
  for (struct hazard_store *store = layer->stores; store != NULL && !store->is_marked; store = store->next) {
    const uint64_t count = store->slots.bytes / sizeof(int32_t);
    enum kvp_status status = kvp_intake_count_elements(op, store->slots.name, count);
    if (status != KVP_OK) {
      return status;
    }
    if (!kvp_slot_marks_add(&op->intake->marks, layer->number, store->slots.data, count)) {
      return kvp_intake_no_memory(op);
    }
    store->is_marked = true;
  }
  return KVP_OK;
}

/* Says which op stores to the slot, and where. */
static enum kvp_status hazard_refuse(struct kvp_intake_op *op, const struct kvp_hazard_layer *layer,
                                     const struct kvp_intake_array *segments, uint64_t segment, int64_t slot) {
  const struct hazard_store *found = NULL;
  uint64_t found_at = 0;
  for (const struct hazard_store *store = layer->stores; store != NULL; store = store->next) {
    const int32_t *slots = store->slots.data;
    for (uint64_t i = 0; i < store->slots.bytes / sizeof *slots; i++) {
      if (slots[i] == slot) { /* the earliest op is the last that is found */
        found = store;
        found_at = i;
        break;
      }
    }
  }
  return KVP_INTAKE_REFUSE(op, KVP_HAZARD_STORE_BEFORE_LOAD, segments->name, segment * 4, slot,
                           "%s[%llu] reads slot %lld, which op %d %s overwrites first (%s[%llu])", segments->name,
                           (unsigned long long)segment, (long long)slot, found == NULL ? -1 : found->op,
                           found == NULL ? "" : found->op_name, found == NULL ? "" : found->slots.name,
                           (unsigned long long)found_at);
}

static enum kvp_status segments_look(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                     const struct kvp_intake_array *array, const struct kvp_hazard_layer *layer) {
  const struct kvp_segment *segments = array->data;
  const int64_t tokens_per_block = place->layer.geometry->tokens_per_block;
  uint64_t looks = 0;
  for (uint64_t i = 0; i < array->bytes / sizeof *segments; i++) {
    const struct kvp_segment *segment = &segments[i];
    if (segment->src_block < 0) {
      continue;
    }
    const int64_t block_begin = segment->src_block * tokens_per_block;
    looks += 1 + (uint64_t)(segment->src_end - segment->src_begin) / slots_per_look;
    if (op->intake->elements_checked + looks > kvp_step_elements_checked_max) {
      break; /* refused below */
    }
    const int64_t slot = kvp_slot_marks_find(&op->intake->marks, layer->number, block_begin + segment->src_begin,
                                             block_begin + segment->src_end);
    if (slot >= 0) {
      return hazard_refuse(op, layer, array, i, slot);
    }
  }
  return kvp_intake_count_elements(op, array->name, looks);
}

enum kvp_status kvp_intake_hazard_load(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                       const struct kvp_intake_array *segments) {
  if (place->pool->kind != KVP_POOL_RING || segments->bytes == 0 ||
      (op->wire->flags & KVP_OP_ALLOW_STORE_BEFORE_LOAD) != 0) {
    return KVP_OK;
  }
  struct kvp_hazard_layer *layer = layer_find(op, place->layer.base);
  if (layer == NULL) {
    return KVP_OK;
  }
  if (layer->has_unknown || !segments->is_inline) {
    op->out->report_flags |= KVP_REPORT_HAZARD_UNCHECKED;
  }
  if (!segments->is_inline) {
    return KVP_OK;
  }
  enum kvp_status status = stores_mark(op, layer);
  return status == KVP_OK ? segments_look(op, place, segments, layer) : status;
}

/* ---- an op's own segments and slots ---- */

static bool looks_are_left(const struct kvp_intake_op *op, uint64_t elements) {
  return op->intake->elements_checked + elements <= kvp_step_elements_checked_max;
}

/* Once for the array. */
static enum kvp_status slots_mark(struct kvp_intake_op *op, const struct kvp_intake_array *slots) {
  const struct kvp_intake_memo_key key = {.use = KVP_USE_MARKS, .array = slots->index, .other = KVP_WIRE_NO_ARRAY};
  if (kvp_intake_memo_find(op, &key) != NULL) {
    return KVP_OK;
  }
  if (kvp_intake_memo_add(op, slots, &key) == NULL) {
    return (enum kvp_status)op->error->status;
  }
  return kvp_slot_marks_add(&op->intake->marks, array_number(slots), slots->data, slots->bytes / sizeof(int32_t))
             ? KVP_OK
             : kvp_intake_no_memory(op);
}

static bool segments_miss(const struct kvp_intake_op *op, const struct kvp_intake_array *slots,
                          const struct kvp_intake_array *array, int64_t tokens_per_block) {
  const struct kvp_segment *segments = array->data;
  for (uint64_t i = 0; i < array->bytes / sizeof *segments; i++) {
    const int64_t block_begin = segments[i].src_block * tokens_per_block;
    if (segments[i].src_block >= 0 &&
        kvp_slot_marks_find(&op->intake->marks, array_number(slots), block_begin + segments[i].src_begin,
                            block_begin + segments[i].src_end) >= 0) {
      return false;
    }
  }
  return true;
}

/* At slots and segments. */
static uint64_t looks_of(const struct kvp_intake_array *slots, const struct kvp_intake_array *array) {
  const struct kvp_segment *segments = array->data;
  uint64_t looks = slots->bytes / sizeof(int32_t) + array->bytes / sizeof(int32_t);
  for (uint64_t i = 0; i < array->bytes / sizeof *segments; i++) {
    looks += (uint64_t)(segments[i].src_end - segments[i].src_begin) / slots_per_look;
  }
  return looks;
}

enum kvp_status kvp_intake_slots_apart(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                       const struct kvp_intake_array *slots, const struct kvp_intake_array *segments,
                                       bool *out) {
  *out = false;
  if (!slots->is_inline || !segments->is_inline) {
    return KVP_OK;
  }
  const struct kvp_intake_memo_key key = {.use = KVP_USE_APART,
                                          .array = slots->index,
                                          .other = segments->index,
                                          .tokens_per_block = place->layer.geometry->tokens_per_block};
  const struct kvp_intake_memo *known = kvp_intake_memo_find(op, &key);
  if (known != NULL) {
    *out = known->apart;
    return KVP_OK;
  }
  if (!looks_are_left(op, 2 * looks_of(slots, segments))) {
    return KVP_OK;
  }
  enum kvp_status status = slots_mark(op, slots);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_intake_memo *memo = kvp_intake_memo_add(op, slots, &key);
  if (memo == NULL) {
    return (enum kvp_status)op->error->status;
  }
  memo->apart = segments_miss(op, slots, segments, place->layer.geometry->tokens_per_block);
  *out = memo->apart;
  return KVP_OK;
}
