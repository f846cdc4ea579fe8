/* What an op may touch: layers, views, arrays. */
#include <assert.h>
#include <stdio.h>

#include "server/executor/intake_op.h"

enum kvp_status kvp_intake_pool(struct kvp_intake_op *op, const char *prefix, uint64_t pool_id,
                                struct kvp_pool **out) {
  char name[kvp_error_array_bytes_max];
  struct kvp_step_op *step_op = op->out;
  *out = kvp_objects_pool(op->intake->objects, pool_id);
  if (*out == NULL) {
    (void)snprintf(name, sizeof name, "%spool", prefix);
    return KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_POOL, name, -1, pool_id, "%spool %llu is not on this device", prefix,
                             (unsigned long long)pool_id);
  }
  if (step_op->pool_count == 0 || step_op->pools[0] != *out) {
    assert(step_op->pool_count < kvp_step_op_pools_max);
    step_op->pools[step_op->pool_count++] = *out;
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_place_find(struct kvp_intake_op *op, const char *prefix, uint64_t pool_id, uint32_t region,
                                      uint32_t layer, struct kvp_intake_place *out) {
  char name[kvp_error_array_bytes_max];
  enum kvp_status status = kvp_intake_pool(op, prefix, pool_id, &out->pool);
  if (status != KVP_OK) {
    return status;
  }
  if (region >= out->pool->region_count) {
    (void)snprintf(name, sizeof name, "%sregion", prefix);
    return KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_REGION, name, -1, region, "%sregion %u, the pool has %u", prefix, region,
                             out->pool->region_count);
  }
  out->region = &out->pool->regions[region];
  const struct kvp_geometry *geometry = &out->region->geometry;
  if (layer >= geometry->num_layers) {
    (void)snprintf(name, sizeof name, "%slayer", prefix);
    return KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_LAYER, name, -1, layer, "%slayer %u, region '%s' has %u", prefix, layer,
                             out->region->name, geometry->num_layers);
  }
  out->layer = (struct kvp_layer){out->region->base + layer * geometry->layer_stride_bytes, geometry};
  return KVP_OK;
}

enum kvp_status kvp_intake_place(struct kvp_intake_op *op, struct kvp_intake_place *out) {
  return kvp_intake_place_find(op, "", op->wire->pool_id, op->wire->region, op->wire->layer, out);
}

enum kvp_status kvp_intake_ring(struct kvp_intake_op *op, struct kvp_intake_place *out) {
  enum kvp_status status = kvp_intake_place(op, out);
  if (status == KVP_OK && out->pool->kind != KVP_POOL_RING) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "pool", -1, out->pool->id,
                             "pool %llu is paged, a ring's is needed", (unsigned long long)out->pool->id);
  }
  return status;
}

/* A buffer of the step's owner that has memory; the op holds it from here on. NULL: refused as unknown_buffer. */
static struct kvp_buffer *buffer_find(struct kvp_intake_op *op, const char *name, uint64_t id) {
  struct kvp_buffer *buffer = kvp_objects_buffer(op->intake->objects, id);
  if (buffer == NULL || (op->header->owner != 0 && buffer->owner != op->header->owner)) {
    (void)KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_BUFFER, name, -1, id, "%s: buffer %llu is not this session's", name,
                            (unsigned long long)id);
    return NULL;
  }
  if (buffer->is_lost) {
    (void)KVP_INTAKE_REFUSE(op, KVP_UNKNOWN_BUFFER, name, -1, id,
                            "%s: buffer %llu is lost: its memory could not be opened again when an executor had died "
                            "(the daemon's log says why); release it and make another one",
                            name, (unsigned long long)id);
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
                             "%s.row_bytes = %u, rows of this op have %llu", name, wire->row_bytes,
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
      .offset_bytes = wire->offset_bytes,
      .area = {buffer->base + wire->offset_bytes, wire->rows, wire->row_bytes, wire->row_stride_bytes},
  };
  return KVP_OK;
}

enum kvp_status kvp_intake_view_absent(struct kvp_intake_op *op, const char *name, const struct kvp_wire_view *wire) {
  if (wire->flags != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, wire->buffer_id, "%s: there is none here", name);
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_rows_enough(struct kvp_intake_op *op, const char *what, uint64_t count,
                                       const struct kvp_intake_view *view) {
  if (view->area.base != NULL && count > view->area.rows) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, what, view->area.rows, count, "%llu %s, but %s has %llu rows",
                             (unsigned long long)count, what, view->name, (unsigned long long)view->area.rows);
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_views_apart(struct kvp_intake_op *op, const struct kvp_intake_view *output,
                                       const struct kvp_intake_view *other) {
  if (!kvp_row_areas_overlap(&output->area, &other->area)) {
    return KVP_OK;
  }
  return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, output->name, -1, output->offset_bytes, "%s overlaps %s",
                           output->name, other->name);
}

enum kvp_status kvp_intake_array_optional(struct kvp_intake_op *op, uint32_t number, const char *name,
                                          uint64_t element_bytes, struct kvp_intake_array *out) {
  *out = (struct kvp_intake_array){.name = name, .index = KVP_WIRE_NO_ARRAY};
  return op->wire->arrays[number] == KVP_WIRE_NO_ARRAY ? KVP_OK
                                                       : kvp_intake_array_check(op, number, name, element_bytes, out);
}

enum kvp_status kvp_intake_array_check(struct kvp_intake_op *op, uint32_t number, const char *name,
                                       uint64_t element_bytes, struct kvp_intake_array *out) {
  const uint32_t index = op->wire->arrays[number];
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
  if (array->is_inline || array->data == NULL || array->bytes == 0) {
    return KVP_OK;
  }
  const struct kvp_intake_view view = {.name = array->name, .area = {array->data, 1, array->bytes, array->bytes}};
  return kvp_intake_views_apart(op, output, &view);
}
