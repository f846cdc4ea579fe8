/* What an op may touch: layers, views, arrays, blocks. */
#include <assert.h>
#include <string.h>

#include "proto/owner_entry.h"
#include "server/executor/intake_op.h"

enum kvp_status kvp_intake_no_memory(struct kvp_intake_op *op) {
  return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_MEMORY, "", -1, 0, "%s", "no memory to check it");
}

enum kvp_status kvp_intake_layer(struct kvp_intake_op *op, struct kvp_layer *out) {
  const struct kvp_wire_op *wire = op->wire;
  struct kvp_pool *pool = kvp_objects_pool(op->intake->objects, wire->pool_id);
  if (pool == NULL) {
    return KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_POOL, "pool", -1, wire->pool_id, "pool %llu is not on this device",
                             (unsigned long long)wire->pool_id);
  }
  if (wire->region >= pool->region_count) {
    return KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_REGION, "region", -1, wire->region, "region %u, the pool has %u",
                             wire->region, pool->region_count);
  }
  const struct kvp_region *region = &pool->regions[wire->region];
  if (wire->layer >= region->geometry.num_layers) {
    return KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_LAYER, "layer", -1, wire->layer, "layer %u, region '%s' has %u",
                             wire->layer, region->name, region->geometry.num_layers);
  }
  op->out->pool = pool;
  out->base = region->base + wire->layer * region->geometry.layer_stride_bytes;
  out->geometry = &region->geometry;
  return KVP_OK;
}

/* A buffer of the step's owner; the op holds it from here on. NULL: refused as unknown_buffer. */
static struct kvp_buffer *buffer_find(struct kvp_intake_op *op, const char *name, uint64_t id) {
  struct kvp_buffer *buffer = kvp_objects_buffer(op->intake->objects, id);
  if (buffer == NULL || (op->header->owner != 0 && buffer->owner != op->header->owner)) {
    (void)KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_BUFFER, name, -1, id, "%s: buffer %llu is not this session's", name,
                            (unsigned long long)id);
    return NULL;
  }
  assert(op->out->buffer_count < kvp_step_op_buffers_max);
  op->out->buffers[op->out->buffer_count++] = buffer;
  return buffer;
}

static enum kvp_status view_shape_check(struct kvp_intake_op *op, const char *name, const struct kvp_wire_view *wire,
                                        uint64_t row_bytes, uint64_t stride_alignment) {
  const uint64_t base_alignment = stride_alignment == KVP_INTAKE_ANY_ALIGNMENT ? 1 : KVP_INTAKE_ROW_ALIGNMENT;
  if (wire->flags != KVP_WIRE_VIEW_PRESENT || wire->reserved != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, name, -1, wire->flags, "%s: flags 0x%x or a reserved field is not 0",
                             name, wire->flags);
  }
  if (wire->row_bytes == 0 || (row_bytes != 0 && wire->row_bytes != row_bytes)) {
    return KVP_INTAKE_REFUSE(op, KVP_WRONG_FORMAT, name, -1, wire->row_bytes,
                             "%s.row_bytes = %u, rows of this region have %llu", name, wire->row_bytes,
                             (unsigned long long)row_bytes);
  }
  if (wire->offset_bytes % base_alignment != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, wire->offset_bytes,
                             "%s.offset_bytes = %llu is no multiple of %llu", name,
                             (unsigned long long)wire->offset_bytes, (unsigned long long)base_alignment);
  }
  if (wire->row_stride_bytes % stride_alignment != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, wire->row_stride_bytes,
                             "%s.row_stride_bytes = %llu is no multiple of %llu", name,
                             (unsigned long long)wire->row_stride_bytes, (unsigned long long)stride_alignment);
  }
  if (wire->row_stride_bytes < wire->row_bytes) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, wire->row_stride_bytes,
                             "%s.row_stride_bytes = %llu < row_bytes %u", name,
                             (unsigned long long)wire->row_stride_bytes, wire->row_bytes);
  }
  return KVP_OK;
}

/* From the first byte of the first row to the last of the last. False when that is more than 64 bits say. */
static bool view_span(const struct kvp_wire_view *wire, uint64_t *out) {
  uint64_t span = 0;
  if (wire->rows > 0 && (__builtin_mul_overflow(wire->rows - 1, wire->row_stride_bytes, &span) ||
                         __builtin_add_overflow(span, wire->row_bytes, &span))) {
    return false;
  }
  *out = span;
  return true;
}

enum kvp_status kvp_intake_view_check(struct kvp_intake_op *op, const char *name, const struct kvp_wire_view *wire,
                                      uint64_t row_bytes, uint64_t stride_alignment, struct kvp_intake_view *out) {
  if (wire->flags == 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, 0, "%s is missing", name);
  }
  enum kvp_status status = view_shape_check(op, name, wire, row_bytes, stride_alignment);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_buffer *buffer = buffer_find(op, name, wire->buffer_id);
  if (buffer == NULL) {
    return KVP_UNKNOWN_BUFFER;
  }
  uint64_t span = 0;
  if (!view_span(wire, &span) || wire->offset_bytes > buffer->bytes || span > buffer->bytes - wire->offset_bytes) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, name, -1, wire->rows,
                             "%s: %llu rows every %llu bytes from offset %llu don't fit a buffer of %llu bytes", name,
                             (unsigned long long)wire->rows, (unsigned long long)wire->row_stride_bytes,
                             (unsigned long long)wire->offset_bytes, (unsigned long long)buffer->bytes);
  }
  *out = (struct kvp_intake_view){
      .name = name,
      .base = buffer->base + wire->offset_bytes,
      .rows = wire->rows,
      .row_bytes = wire->row_bytes,
      .stride_bytes = wire->row_stride_bytes,
  };
  return KVP_OK;
}

enum kvp_status kvp_intake_view_absent(struct kvp_intake_op *op, const char *name, const struct kvp_wire_view *wire) {
  if (wire->flags != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, wire->buffer_id, "%s: there is none here", name);
  }
  return KVP_OK;
}

/* The view's rows lie at columns [begin, begin + row_bytes) of a grid as wide as the stride: those of two views of
 * one stride don't touch when their columns don't. */
static bool columns_apart(const struct kvp_intake_view *a, const struct kvp_intake_view *b) {
  if (a->stride_bytes != b->stride_bytes || a->base == b->base) {
    return false;
  }
  uint64_t stride = a->stride_bytes;
  uint64_t distance = (uint64_t)((uintptr_t)b->base % stride + stride - (uintptr_t)a->base % stride) % stride;
  return distance >= a->row_bytes && stride - distance >= b->row_bytes;
}

enum kvp_status kvp_intake_views_apart(struct kvp_intake_op *op, const struct kvp_intake_view *output,
                                       const struct kvp_intake_view *other) {
  if (output->base == NULL || other->base == NULL || output->rows == 0 || other->rows == 0) {
    return KVP_OK;
  }
  const uintptr_t output_begin = (uintptr_t)output->base;
  const uintptr_t output_end = output_begin + (output->rows - 1) * output->stride_bytes + output->row_bytes;
  const uintptr_t other_begin = (uintptr_t)other->base;
  const uintptr_t other_end = other_begin + (other->rows - 1) * other->stride_bytes + other->row_bytes;
  if (output_end <= other_begin || other_end <= output_begin || columns_apart(output, other)) {
    return KVP_OK;
  }
  return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, output->name, -1, op->wire->second.offset_bytes,
                           "%s overlaps %s", output->name, other->name);
}

enum kvp_status kvp_intake_array_check(struct kvp_intake_op *op, const char *name, uint64_t element_bytes,
                                       struct kvp_intake_array *out) {
  const uint32_t index = op->wire->arrays[0];
  if (index == KVP_WIRE_NO_ARRAY) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, 0, "%s are missing", name);
  }
  if (index >= op->header->array_count) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, name, -1, index, "%s: array %u, the step has %u", name, index,
                             op->header->array_count);
  }
  const struct kvp_wire_array *array = &op->arrays[index];
  if (array->bytes % element_bytes != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, array->bytes,
                             "%s: %llu bytes are no multiple of %llu", name, (unsigned long long)array->bytes,
                             (unsigned long long)element_bytes);
  }
  *out = (struct kvp_intake_array){.name = name, .index = index, .bytes = array->bytes};
  if (array->buffer_id == 0) {
    out->data = op->step->wire + array->offset_bytes;
    out->is_inline = true;
    return KVP_OK;
  }
  struct kvp_buffer *buffer = buffer_find(op, name, array->buffer_id);
  if (buffer == NULL) {
    return KVP_UNKNOWN_BUFFER;
  }
  if (array->offset_bytes % sizeof(int32_t) != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, array->offset_bytes,
                             "%s: offset %llu is no multiple of 4", name, (unsigned long long)array->offset_bytes);
  }
  if (array->offset_bytes > buffer->bytes || array->bytes > buffer->bytes - array->offset_bytes) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, name, -1, array->bytes,
                             "%s: %llu bytes from offset %llu don't fit a buffer of %llu bytes", name,
                             (unsigned long long)array->bytes, (unsigned long long)array->offset_bytes,
                             (unsigned long long)buffer->bytes);
  }
  out->data = buffer->base + array->offset_bytes;
  return KVP_OK;
}

enum kvp_status kvp_intake_array_apart(struct kvp_intake_op *op, const struct kvp_intake_view *output,
                                       const struct kvp_intake_array *array) {
  if (array->is_inline || array->bytes == 0) {
    return KVP_OK;
  }
  const struct kvp_intake_view view = {
      .name = array->name,
      .base = (uint8_t *)array->data,
      .rows = 1,
      .row_bytes = array->bytes,
      .stride_bytes = array->bytes,
  };
  return kvp_intake_views_apart(op, output, &view);
}

static const char *block_state_name(enum kvp_block_state state) {
  switch (state) {
  case KVP_BLOCK_FREE:
    return "free";
  case KVP_BLOCK_LEASED:
    return "leased";
  case KVP_BLOCK_SEALED:
    return "sealed";
  case KVP_BLOCK_QUARANTINED:
    return "being freed";
  }
  return "in no known state";
}

/* "op 3 store: slots[7] = 130: " and what follows. */
#define ELEMENT_REFUSE(op, status, element, format, ...)                                                             \
  KVP_INTAKE_REFUSE(op, status, (element)->array, (element)->position, (element)->value,                             \
                    "%s[%llu]%s = %lld: " format, (element)->array, (unsigned long long)(element)->index,            \
                    (element)->field, (long long)(element)->value, __VA_ARGS__)

enum kvp_status kvp_intake_block_check(struct kvp_intake_op *op, const struct kvp_intake_element *element,
                                       uint32_t block, bool is_write) {
  if (op->header->owner == 0) {
    return KVP_OK;
  }
  const uint64_t entry = atomic_load_explicit(&op->out->pool->owner_entries[block], memory_order_acquire);
  const enum kvp_block_state state = kvp_owner_entry_state(entry);
  const bool is_held = state == KVP_BLOCK_LEASED || state == KVP_BLOCK_SEALED;
  if (!is_held || kvp_owner_entry_owner(entry) != op->header->owner) {
    return ELEMENT_REFUSE(op, KVP_NOT_OWNER, element, "block %u is not this session's (%s)", block,
                          is_held ? "another session's" : block_state_name(state));
  }
  if (is_write && state == KVP_BLOCK_SEALED) {
    return ELEMENT_REFUSE(op, KVP_SEALED_BLOCK, element, "block %u is sealed", block);
  }
  if (kvp_owner_entry_epoch(entry) > op->header->epoch) {
    return ELEMENT_REFUSE(op, KVP_STALE_BLOCK, element, "block %u was assigned at epoch %llu, the step's is %llu",
                          block, (unsigned long long)kvp_owner_entry_epoch(entry),
                          (unsigned long long)op->header->epoch);
  }
  return KVP_OK;
}

struct kvp_owner_check kvp_intake_owner_check(struct kvp_intake_op *op, const struct kvp_intake_array *array) {
  if (array->is_inline) {
    return (struct kvp_owner_check){0};
  }
  op->out->report_flags |= KVP_REPORT_UNCHECKED_ARRAYS;
  return (struct kvp_owner_check){
      .entries = op->out->pool->device_owner_entries,
      .epoch = op->header->epoch,
      .owner = op->header->owner,
  };
}

struct kvp_intake_memo *kvp_intake_memo_find(const struct kvp_intake_op *op, uint32_t array,
                                             const struct kvp_layer *layer) {
  for (struct kvp_intake_memo *memo = op->memos[array]; memo != NULL; memo = memo->next) {
    if (memo->pool == op->out->pool && memo->op_kind == op->wire->kind &&
        memo->tokens_per_block == layer->geometry->tokens_per_block) {
      return memo;
    }
  }
  return NULL;
}

struct kvp_intake_memo *kvp_intake_memo_add(struct kvp_intake_op *op, const struct kvp_intake_array *array,
                                            const struct kvp_layer *layer) {
  const uint64_t elements = array->bytes / sizeof(int32_t);
  op->intake->elements_checked += elements;
  if (op->intake->elements_checked > kvp_step_elements_checked_max) {
    (void)KVP_INTAKE_REFUSE(
        op, KVP_TOO_LARGE, array->name, -1, elements,
        "%s: with these %llu elements the step's arrays have %llu to check, over all pools and block "
        "sizes they are used with; at most %d are taken",
        array->name, (unsigned long long)elements, (unsigned long long)op->intake->elements_checked,
        kvp_step_elements_checked_max);
    return NULL;
  }
  struct kvp_intake_memo *memo = kvp_arena_alloc(&op->step->arena, sizeof *memo);
  if (memo == NULL) {
    (void)kvp_intake_no_memory(op);
    return NULL;
  }
  *memo = (struct kvp_intake_memo){
      .next = op->memos[array->index],
      .pool = op->out->pool,
      .op_kind = op->wire->kind,
      .tokens_per_block = layer->geometry->tokens_per_block,
  };
  op->memos[array->index] = memo;
  return memo;
}
