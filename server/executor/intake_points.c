/* Waits and signals of ops: points of the ring's timelines. */
#include "proto/timeline_wire.h"
#include "server/executor/intake_op.h"

static enum kvp_status point_absent(struct kvp_intake_op *op, const char *name, const struct kvp_wire_point *wire) {
  if (wire->word != 0 || wire->reserved != 0 || wire->value != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, name, -1, wire->word, "%s is not empty, and its flag isn't set",
                             name);
  }
  return KVP_OK;
}

static enum kvp_status point_check(struct kvp_intake_op *op, const char *name, const struct kvp_wire_point *wire,
                                   uint32_t first_word, struct kvp_step_point *out) {
  const uint64_t base = op->header->base;
  uint64_t value = 0;
  if (wire->reserved != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, name, -1, wire->reserved, "%s: a reserved field is not 0", name);
  }
  if (wire->word < first_word || wire->word >= kvp_timeline_words) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, name, -1, wire->word, "%s.word = %u is outside [%u, %d)", name,
                             wire->word, first_word, kvp_timeline_words);
  }
  if (__builtin_add_overflow(base, wire->value, &value) || value == 0 || value >= KVP_TIMELINE_POISON) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, name, -1, wire->value,
                             "%s.value = %llu and base %llu are together not in (0, 2^62)", name,
                             (unsigned long long)wire->value, (unsigned long long)base);
  }
  *out = (struct kvp_step_point){.word = wire->word, .value = value};
  return KVP_OK;
}

enum kvp_status kvp_intake_points(struct kvp_intake_op *op) {
  const struct kvp_wire_op *wire = op->wire;
  struct kvp_step_op *out = op->out;
  out->waits = (wire->flags & KVP_OP_WAITS) != 0;
  const bool signals = (wire->flags & KVP_OP_SIGNALS) != 0;
  enum kvp_status status =
      out->waits ? point_check(op, "wait", &wire->wait, 0, &out->wait) : point_absent(op, "wait", &wire->wait);
  if (status != KVP_OK) {
    return status;
  }
  status = signals ? point_check(op, "signal", &wire->signal, kvp_client_words, &out->signal)
                   : point_absent(op, "signal", &wire->signal);
  if (status == KVP_OK && signals && kvp_intake_device_op(op, KVP_DEVICE_POINT) == NULL) {
    status = (enum kvp_status)op->error->status;
  }
  return status;
}
