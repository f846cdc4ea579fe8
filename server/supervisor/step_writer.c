/* Writes an encoded step. */
#include "server/supervisor/step_writer.h"

#include <assert.h>
#include <string.h>

#include "proto/limits.h"
#include "server/supervisor/step.h"

enum { inline_alignment_bytes = 8 };

uint64_t kvp_step_inline_bytes(uint64_t bytes) {
  return (bytes + inline_alignment_bytes - 1) / inline_alignment_bytes * inline_alignment_bytes;
}

enum kvp_status kvp_step_writer_init(struct kvp_step_writer *writer, uint32_t op_count, uint32_t array_count,
                                     uint64_t inline_bytes, struct kvp_error *error) {
  uint64_t table_bytes = sizeof(struct kvp_wire_step) + (uint64_t)op_count * sizeof(struct kvp_wire_op) +
                         (uint64_t)array_count * sizeof(struct kvp_wire_array);
  uint64_t bytes = table_bytes + inline_bytes;
  if (bytes > kvp_step_bytes_max) {
    return kvp_error_set(error, KVP_TOO_LARGE, "the step takes %llu bytes, %d are allowed", (unsigned long long)bytes,
                         kvp_step_bytes_max);
  }
  struct kvp_wire_step *step = kvp_step_alloc((uint32_t)bytes);
  if (step == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a step of %llu bytes", (unsigned long long)bytes);
  }
  memset(step, 0, table_bytes);
  step->magic = KVP_WIRE_STEP_MAGIC;
  step->version = KVP_WIRE_VERSION;
  step->op_count = op_count;
  step->array_count = array_count;
  step->bytes = (uint32_t)bytes;
  writer->step = step;
  writer->ops = (struct kvp_wire_op *)(step + 1);
  writer->arrays = (struct kvp_wire_array *)(writer->ops + op_count);
  writer->arrays_used = 0;
  writer->inline_begin = table_bytes;
  for (uint32_t i = 0; i < op_count; i++) {
    memset(writer->ops[i].arrays, 0xFF, sizeof writer->ops[i].arrays); /* KVP_WIRE_NO_ARRAY */
  }
  return KVP_OK;
}

static struct kvp_wire_array *writer_next(struct kvp_step_writer *writer) {
  assert(writer->arrays_used < writer->step->array_count);
  return &writer->arrays[writer->arrays_used++];
}

uint32_t kvp_step_writer_add_inline(struct kvp_step_writer *writer, const void *data, uint64_t bytes) {
  struct kvp_wire_array *array = writer_next(writer);
  uint64_t room = kvp_step_inline_bytes(bytes);
  assert(room <= writer->step->bytes - writer->inline_begin);
  array->offset_bytes = writer->inline_begin;
  array->bytes = bytes;
  uint8_t *place = (uint8_t *)writer->step + writer->inline_begin;
  if (bytes > 0) {
    memcpy(place, data, bytes);
  }
  memset(place + bytes, 0, room - bytes); /* what no one wrote is never sent to another process */
  writer->inline_begin += room;
  return writer->arrays_used - 1;
}

uint32_t kvp_step_writer_add_buffer(struct kvp_step_writer *writer, uint64_t buffer_id, uint64_t offset_bytes,
                                    uint64_t bytes) {
  struct kvp_wire_array *array = writer_next(writer);
  array->buffer_id = buffer_id;
  array->offset_bytes = offset_bytes;
  array->bytes = bytes;
  return writer->arrays_used - 1;
}
