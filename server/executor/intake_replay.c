/* A replay: fused stores whose points are words in a buffer, for which the device itself waits. */
#include <string.h>

#include "server/executor/intake_op.h"

enum { word_bytes = 64 };

/* The whole of the buffer is words. */
static enum kvp_status words_find(struct kvp_intake_op *op) {
  const uint64_t id = op->header->words_buffer_id;
  const struct kvp_wire_view wire = {.buffer_id = id,
                                     .rows = 1,
                                     .row_stride_bytes = word_bytes,
                                     .row_bytes = word_bytes,
                                     .flags = KVP_WIRE_VIEW_PRESENT};
  struct kvp_intake_view view;
  enum kvp_status status = kvp_intake_view_check(op, "words", &wire, word_bytes, KVP_INTAKE_ROW_ALIGNMENT, &view);
  if (status == KVP_OK) {
    op->words.base = (uint8_t *)view.area.base;
    op->words.count = kvp_objects_buffer(op->intake->objects, id)->bytes / word_bytes;
  }
  return status;
}

enum kvp_status kvp_intake_replay_begin(struct kvp_intake_op *op) {
  const uint32_t op_count = op->header->op_count;
  op->name = "replay";
  if (!op->intake->allows_device_words) {
    return kvp_error_set_at(op->error, KVP_UNIMPLEMENTED, -1, "words", -1, (int64_t)op->header->words_buffer_id, "%s",
                            "step: this device doesn't wait for words in its memory: without MPS a kernel that waits "
                            "keeps from running what it waits for");
  }
  if (op_count == 0) {
    return kvp_error_set_at(op->error, KVP_INVALID_ARGUMENT, -1, "ops", -1, 0, "%s",
                            "step: points in device memory, and no op");
  }
  struct kvp_device_op *replay = kvp_intake_device_op(op, KVP_DEVICE_REPLAY);
  if (replay == NULL) {
    return (enum kvp_status)op->error->status;
  }
  op->words.points = kvp_arena_alloc(&op->step->arena, op_count * sizeof *op->words.points);
  if (op->words.points == NULL) {
    return kvp_intake_no_memory(op);
  }
  memset(op->words.points, 0, op_count * sizeof *op->words.points);
  replay->params.replay = (struct kvp_replay_params){.points = op->words.points, .op_count = op_count};
  op->step->replay = replay;
  return words_find(op);
}

enum kvp_status kvp_intake_replay_kind(struct kvp_intake_op *op) {
  if (op->wire->kind != KVP_OP_FUSED_STORE) {
    return KVP_INTAKE_REFUSE(op, KVP_UNIMPLEMENTED, "kind", -1, op->wire->kind, "%s",
                             "points in device memory are for fused_store alone");
  }
  if ((op->wire->flags & (KVP_OP_WAITS | KVP_OP_SIGNALS)) == 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "flags", -1, op->wire->flags, "%s",
                             "it neither waits nor signals, in a step whose points are in device memory");
  }
  return KVP_OK;
}

/* *out: the word; NULL where there is none. */
static enum kvp_status point_check(struct kvp_intake_op *op, const char *name, const struct kvp_wire_point *wire,
                                   bool is_there, uint64_t **out, uint64_t *value) {
  *out = NULL;
  if (!is_there) {
    return kvp_intake_point_absent(op, name, wire);
  }
  if (wire->word >= op->words.count) {
    return KVP_INTAKE_REFUSE(
        op, KVP_OUT_OF_RANGE, name, -1, wire->word, "%s.word = %u, buffer %llu has %llu words of %d bytes", name,
        wire->word, (unsigned long long)op->header->words_buffer_id, (unsigned long long)op->words.count, word_bytes);
  }
  *out = (uint64_t *)(void *)(op->words.base + (uint64_t)wire->word * word_bytes);
  return kvp_intake_point_value(op, name, wire, value);
}

enum kvp_status kvp_intake_replay_points(struct kvp_intake_op *op) {
  const struct kvp_wire_op *wire = op->wire;
  struct kvp_replay_points *points = &op->words.points[op->index];
  uint64_t *wait = NULL;
  enum kvp_status status =
      point_check(op, "wait", &wire->wait, (wire->flags & KVP_OP_WAITS) != 0, &wait, &points->wait_value);
  points->wait = wait;
  return status == KVP_OK ? point_check(op, "signal", &wire->signal, (wire->flags & KVP_OP_SIGNALS) != 0,
                                        &points->signal, &points->signal_value)
                          : status;
}
