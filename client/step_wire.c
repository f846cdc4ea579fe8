/* Steps as a ring takes them: the ops of a step once more, by the encoder that the supervisor has for the same ops.
 *
 * Inline arrays stay where protobuf has them, in the step's body, and are copied once, when the step is posted. */
#include <assert.h>
#include <string.h>

#include "client/attach.h"
#include "proto/step_op_encode.h"

enum { inline_alignment_bytes = 8 };

static uint64_t inline_room(uint64_t bytes) {
  return (bytes + inline_alignment_bytes - 1) / inline_alignment_bytes * inline_alignment_bytes;
}

static bool bytes_append(struct kvp_bytes *bytes, const void *data, size_t size) {
  if (!kvp_bytes_reserve(bytes, size)) {
    return false;
  }
  memcpy(bytes->data + bytes->size, data, size);
  bytes->size += size;
  return true;
}

static uint64_t step_array_elements(const void *context, uint32_t number) {
  const kvpool_step *step = context;
  const struct kvp_wire_array *arrays = (const void *)step->wire_arrays.data;
  return arrays[number].bytes / kvp_int32_bytes;
}

kvpool_status kvp_step_wire_add_op(kvpool_step *step, const Kvpool__V1__Op *op, uint32_t elements,
                                   kvpool_error *error) {
  const struct kvp_step_arrays arrays = {
      .count = step->array_count, .elements = step_array_elements, .context = step};
  struct kvp_wire_op wire = {.kind = 0};
  struct kvp_error refused;
  memset(wire.arrays, 0xFF, sizeof wire.arrays); /* KVP_WIRE_NO_ARRAY */
  if (kvp_step_op_encode(op, (int32_t)step->op_count, &arrays, &wire, &refused) != KVP_OK) {
    return kvp_fail_wire(error, &refused);
  }
  if (wire.kind == KVP_OP_FUSED_STORE && wire.argument == KVP_STEP_ROPE_OFFSET_DEFAULT) {
    wire.argument = kvp_step_rope_offset(&wire, elements);
  }
  return bytes_append(&step->wire_ops, &wire, sizeof wire) ? KVPOOL_OK : kvp_fail_no_memory(error);
}

bool kvp_step_wire_add_inline(kvpool_step *step, size_t body_offset, size_t bytes) {
  const struct kvp_wire_array array = {.offset_bytes = body_offset, .bytes = bytes};
  if (!bytes_append(&step->wire_arrays, &array, sizeof array)) {
    return false;
  }
  step->inline_bytes += inline_room(bytes);
  return true;
}

bool kvp_step_wire_add_buffer(kvpool_step *step, uint64_t buffer_id, uint64_t offset_bytes, uint64_t count) {
  /* What no buffer has stays what no buffer has. */
  const uint64_t bytes = count > UINT64_MAX / kvp_int32_bytes ? UINT64_MAX : count * kvp_int32_bytes;
  const struct kvp_wire_array array = {.buffer_id = buffer_id, .offset_bytes = offset_bytes, .bytes = bytes};
  return bytes_append(&step->wire_arrays, &array, sizeof array);
}

uint64_t kvp_step_wire_bytes(const kvpool_step *step) {
  return sizeof(struct kvp_wire_step) + step->wire_ops.size + step->wire_arrays.size + step->inline_bytes;
}

/* ops: the copy that is posted. */
static void replay_words_set(struct kvp_wire_op *ops, uint32_t count, const struct kvp_replay_words *words) {
  for (uint32_t i = 0; i < count; i++) {
    if ((ops[i].flags & KVP_OP_WAITS) != 0) {
      ops[i].wait.word = words->start;
    }
    if ((ops[i].flags & KVP_OP_SIGNALS) != 0) {
      ops[i].signal.word = words->done;
      ops[i].signal.flags = words->is_absolute ? KVP_POINT_ABSOLUTE : 0;
    }
  }
}

void kvp_step_wire_write(const kvpool_step *step, const struct kvp_step_head *head, uint32_t bytes, void *out) {
  assert(bytes == kvp_step_wire_bytes(step));
  *(struct kvp_wire_step *)out = (struct kvp_wire_step){
      .magic = KVP_WIRE_STEP_MAGIC,
      .version = KVP_WIRE_VERSION,
      .op_count = step->op_count,
      .array_count = step->array_count,
      .bytes = bytes,
      .flags = head->flags,
      .epoch = head->epoch,
      .base = head->base,
      .deadline_ns = head->deadline_ns,
      .words_buffer_id = head->words_buffer_id,
  };
  uint8_t *at = (uint8_t *)out + sizeof(struct kvp_wire_step);
  if (step->op_count > 0) {
    memcpy(at, step->wire_ops.data, step->wire_ops.size);
  }
  if (head->replay != NULL) {
    replay_words_set((struct kvp_wire_op *)(void *)at, step->op_count, head->replay);
  }
  at += step->wire_ops.size;
  struct kvp_wire_array *table = (struct kvp_wire_array *)(void *)at;
  const struct kvp_wire_array *arrays = (const void *)step->wire_arrays.data;
  uint64_t begin = sizeof(struct kvp_wire_step) + step->wire_ops.size + step->wire_arrays.size;
  for (uint32_t i = 0; i < step->array_count; i++) {
    table[i] = arrays[i];
    if (arrays[i].buffer_id != 0) {
      continue;
    }
    uint8_t *place = (uint8_t *)out + begin;
    const uint64_t room = inline_room(arrays[i].bytes);
    table[i].offset_bytes = begin;
    if (arrays[i].bytes > 0) {
      memcpy(place, step->body.data + arrays[i].offset_bytes, arrays[i].bytes);
      memset(place + arrays[i].bytes, 0, room - arrays[i].bytes);
    }
    begin += room;
  }
  assert(begin == bytes);
}
