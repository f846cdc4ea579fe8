/* Looks for signals in a step of which nothing is known but that it was refused. */
#include "server/executor/refusal.h"

#include <string.h>

#include "proto/limits.h"
#include "proto/timeline_wire.h"

/* *count: how many; NULL: there are none, or nothing that could be told apart as ops. */
static const struct kvp_wire_op *ops_of(const struct kvp_step *step, uint32_t *count) {
  const struct kvp_wire_step *header = (const struct kvp_wire_step *)(const void *)step->wire;
  if (step->wire_bytes < sizeof *header || (header->flags & KVP_STEP_DEVICE_WORDS) != 0 ||
      header->op_count > kvp_ops_per_step_max ||
      (step->wire_bytes - sizeof *header) / sizeof(struct kvp_wire_op) < header->op_count) {
    return NULL;
  }
  *count = header->op_count;
  return (const struct kvp_wire_op *)(const void *)(header + 1);
}

static bool op_signals(const struct kvp_wire_op *op) {
  return (op->flags & KVP_OP_SIGNALS) != 0 && op->signal.word >= kvp_client_words &&
         op->signal.word < kvp_timeline_words;
}

/* Its ops: those that signal, and nothing of them but that. */
static enum kvp_status signals_copy(struct kvp_step *refusal, const struct kvp_wire_op *ops, uint32_t count,
                                    uint32_t signal_count) {
  refusal->ops = kvp_arena_alloc(&refusal->arena, signal_count * sizeof *refusal->ops);
  if (refusal->ops == NULL) {
    return KVP_OUT_OF_MEMORY;
  }
  memset(refusal->ops, 0, signal_count * sizeof *refusal->ops);
  for (uint32_t i = 0; i < count; i++) {
    if (op_signals(&ops[i])) {
      struct kvp_step_op *op = &refusal->ops[refusal->op_count++];
      op->signals = true;
      op->signal.word = ops[i].signal.word;
    }
  }
  return KVP_OK;
}

enum kvp_status kvp_refusal_new(struct kvp_step_pool *steps, const struct kvp_step *refused, struct kvp_step **out) {
  uint32_t count = 0;
  uint32_t signal_count = 0;
  const struct kvp_wire_op *ops = ops_of(refused, &count);
  *out = NULL;
  for (uint32_t i = 0; ops != NULL && i < count; i++) {
    signal_count += op_signals(&ops[i]);
  }
  if (signal_count == 0) {
    return KVP_OK;
  }
  struct kvp_step *refusal = kvp_step_new(steps, 0);
  if (refusal == NULL) {
    return KVP_OUT_OF_MEMORY;
  }
  if (signals_copy(refusal, ops, count, signal_count) != KVP_OK) {
    kvp_step_destroy(steps, refusal);
    return KVP_OUT_OF_MEMORY;
  }
  refusal->is_refusal = true;
  refusal->accepted = true;
  refusal->error = refused->error;
  refusal->ring = refused->ring;
  refusal->timelines = refused->timelines;
  *out = refusal;
  return kvp_step_cut(refusal, &refusal->error); /* one leg, for which there is room */
}
