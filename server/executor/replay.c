/* What became of a replay. */
#include "server/executor/replay.h"

#include <assert.h>

/* The op as it came: intake has checked that it is there. */
static const struct kvp_wire_op *wire_op(const struct kvp_step *step, uint32_t index) {
  const struct kvp_wire_step *header = (const struct kvp_wire_step *)(const void *)step->wire;
  return (const struct kvp_wire_op *)(const void *)(header + 1) + index;
}

static enum kvp_status status_of(enum kvp_replay_end end) {
  return end == KVP_REPLAY_DEADLINE ? KVP_DEADLINE_EXCEEDED : KVP_CANCELLED;
}

static const char *text_of(enum kvp_replay_end end) {
  switch (end) {
  case KVP_REPLAY_DEADLINE:
    return "at the deadline it had";
  case KVP_REPLAY_POISONED:
    return "and it is poisoned:";
  default:
    return "when the replay was ended it had";
  }
}

void kvp_replay_look(struct kvp_step *step) {
  const struct kvp_replay_params *replay = &step->replay->params.replay;
  const struct kvp_replay_result *result = &replay->result;
  if (result->end == KVP_REPLAY_DONE || step->is_failed) {
    return;
  }
  assert(result->op < step->op_count);
  const struct kvp_wire_op *op = wire_op(step, result->op);
  const uint32_t word = op->wait.word;
  step->is_failed = true;
  if ((op->flags & KVP_OP_WAITS) == 0) {
    (void)kvp_error_set_at(&step->error, status_of(result->end), (int32_t)result->op, "", -1, 0,
                           "op %u: the replay had to end before it", result->op);
    return;
  }
  (void)kvp_error_set_at(&step->error, status_of(result->end), (int32_t)result->op, "wait", word,
                         (int64_t)result->value, "op %u: word %u of the buffer was to reach %llu, %s %llu",
                         result->op, word, (unsigned long long)replay->points[result->op].wait_value,
                         text_of(result->end), (unsigned long long)result->value);
}
