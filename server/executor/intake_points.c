/* Waits and signals of ops: points of the ring's timelines. */
#include "proto/timeline_wire.h"
#include "server/executor/intake_op.h"

enum kvp_status kvp_intake_point_absent(struct kvp_intake_op *op, const char *name,
                                        const struct kvp_wire_point *wire) {
  if (wire->word != 0 || wire->flags != 0 || wire->value != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, name, -1, wire->word, "%s is not empty, and its flag isn't set",
                             name);
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_point_value(struct kvp_intake_op *op, const char *name, const struct kvp_wire_point *wire,
                                       uint64_t *out) {
  const uint64_t base = (wire->flags & KVP_POINT_ABSOLUTE) != 0 ? 0 : op->header->base;
  if ((wire->flags & ~(uint32_t)KVP_POINT_ABSOLUTE) != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, name, -1, wire->flags, "%s.flags are 0x%x, known are 0x%x", name,
                             wire->flags, KVP_POINT_ABSOLUTE);
  }
  if (__builtin_add_overflow(base, wire->value, out) || *out == 0 || *out >= KVP_TIMELINE_POISON) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, name, -1, wire->value,
                             "%s.value = %llu and base %llu are together not in (0, 2^62)", name,
                             (unsigned long long)wire->value, (unsigned long long)base);
  }
  return KVP_OK;
}

static enum kvp_status point_check(struct kvp_intake_op *op, const char *name, const struct kvp_wire_point *wire,
                                   uint32_t first_word, struct kvp_step_point *out) {
  if (wire->word < first_word || wire->word >= kvp_timeline_words) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, name, -1, wire->word, "%s.word = %u is outside [%u, %d)", name,
                             wire->word, first_word, kvp_timeline_words);
  }
  out->word = wire->word;
  return kvp_intake_point_value(op, name, wire, &out->value);
}

enum kvp_status kvp_intake_points(struct kvp_intake_op *op) {
  const struct kvp_wire_op *wire = op->wire;
  struct kvp_step_op *out = op->out;
  out->waits = (wire->flags & KVP_OP_WAITS) != 0;
  out->signals = (wire->flags & KVP_OP_SIGNALS) != 0;
  enum kvp_status status = out->waits ? point_check(op, "wait", &wire->wait, 0, &out->wait)
                                      : kvp_intake_point_absent(op, "wait", &wire->wait);
  if (status != KVP_OK) {
    return status;
  }
  status = out->signals ? point_check(op, "signal", &wire->signal, kvp_client_words, &out->signal)
                        : kvp_intake_point_absent(op, "signal", &wire->signal);
  if (status == KVP_OK && out->signals && kvp_intake_device_op(op, KVP_DEVICE_POINT) == NULL) {
    status = (enum kvp_status)op->error->status;
  }
  return status;
}
