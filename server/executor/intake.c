/* The encoding of a step, and its ops one after another. */
#include "server/executor/intake.h"

#include <assert.h>
#include <string.h>

#include "server/executor/intake_op.h"

enum { inline_alignment_bytes = 8 };

/* An error about the step's encoding rather than an op. */
#define REFUSE_ENCODING(error, array, position, value, ...)                                                          \
  kvp_error_set_at((error), KVP_MALFORMED, -1, (array), (int64_t)(position), (int64_t)(value), __VA_ARGS__)

void kvp_intake_deinit(struct kvp_intake *intake) {
  kvp_slot_set_deinit(&intake->slots);
}

static enum kvp_status header_check(const struct kvp_wire_step *header, uint32_t wire_bytes,
                                    struct kvp_error *error) {
  if (header->magic != KVP_WIRE_STEP_MAGIC) {
    return REFUSE_ENCODING(error, "magic", -1, header->magic, "step: magic is 0x%08x", header->magic);
  }
  if (header->version != KVP_WIRE_VERSION) {
    return kvp_error_set_at(error, KVP_VERSION_MISMATCH, -1, "version", -1, header->version,
                            "step: version is %u, this executor speaks %u", header->version, KVP_WIRE_VERSION);
  }
  if (header->bytes != wire_bytes) {
    return REFUSE_ENCODING(error, "bytes", -1, header->bytes, "step: %u bytes came, it says %u", wire_bytes,
                           header->bytes);
  }
  if (header->op_count > kvp_ops_per_step_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "ops", -1, header->op_count,
                            "step: %u ops, at most %d are allowed", header->op_count, kvp_ops_per_step_max);
  }
  if (header->array_count > kvp_arrays_per_step_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "arrays", -1, header->array_count,
                            "step: %u arrays, at most %d are allowed", header->array_count, kvp_arrays_per_step_max);
  }
  if (header->owner > UINT16_MAX) {
    return REFUSE_ENCODING(error, "owner", -1, header->owner, "step: owner %u is no session slot", header->owner);
  }
  if (header->flags != 0 || header->reserved[0] != 0 || header->reserved[1] != 0 || header->reserved[2] != 0) {
    return REFUSE_ENCODING(error, "flags", -1, header->flags, "step: flags 0x%x or reserved fields are not 0",
                           header->flags);
  }
  return KVP_OK;
}

static uint64_t tables_bytes(const struct kvp_wire_step *header) {
  return sizeof *header + header->op_count * sizeof(struct kvp_wire_op) +
         header->array_count * sizeof(struct kvp_wire_array);
}

/* Extents of arrays inside the step; those in buffers are checked with the op that uses them. */
static enum kvp_status inline_arrays_check(const struct kvp_wire_step *header, const struct kvp_wire_array *arrays,
                                           struct kvp_error *error) {
  for (uint32_t i = 0; i < header->array_count; i++) {
    const struct kvp_wire_array *array = &arrays[i];
    if (array->reserved[0] != 0 || array->reserved[1] != 0) {
      return REFUSE_ENCODING(error, "arrays", i, array->reserved[0], "step: array %u: reserved fields are not 0", i);
    }
    if (array->buffer_id != 0) {
      continue;
    }
    if (array->offset_bytes % inline_alignment_bytes != 0 || array->offset_bytes < tables_bytes(header) ||
        array->offset_bytes > header->bytes || array->bytes > header->bytes - array->offset_bytes) {
      return REFUSE_ENCODING(
          error, "arrays", i, array->offset_bytes,
          "step: array %u: %llu bytes at offset %llu are not inside the data of a step of %u bytes", i,
          (unsigned long long)array->bytes, (unsigned long long)array->offset_bytes, header->bytes);
    }
  }
  return KVP_OK;
}

static const char *op_kind_name(uint32_t kind) {
  switch (kind) {
  case KVP_OP_STORE:
    return "store";
  case KVP_OP_LOAD:
    return "load";
  case KVP_OP_BUFFER_WRITE:
    return "buffer_write";
  case KVP_OP_BUFFER_READ:
    return "buffer_read";
  case KVP_OP_BUFFER_FILL:
    return "buffer_fill";
  case KVP_OP_REGION_READ:
    return "region_read";
  default:
    return NULL;
  }
}

/* What is to be empty in every op of this version. */
static enum kvp_status op_rest_check(struct kvp_intake_op *op) {
  const struct kvp_wire_op *wire = op->wire;
  if (wire->flags != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, "flags", -1, wire->flags, "flags are 0x%x, none is known",
                             wire->flags);
  }
  for (size_t i = 0; i < sizeof wire->reserved / sizeof wire->reserved[0]; i++) {
    if (wire->reserved[i] != 0) {
      return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, "reserved", i, wire->reserved[i], "reserved field %zu is not 0", i);
    }
  }
  bool has_array = wire->kind == KVP_OP_STORE || wire->kind == KVP_OP_LOAD || wire->kind == KVP_OP_BUFFER_WRITE;
  for (size_t i = has_array ? 1 : 0; i < sizeof wire->arrays / sizeof wire->arrays[0]; i++) {
    if (wire->arrays[i] != KVP_WIRE_NO_ARRAY) {
      return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, "arrays", i, wire->arrays[i], "it has no array %zu", i);
    }
  }
  return KVP_OK;
}

static enum kvp_status op_check(struct kvp_intake_op *op) {
  op->name = op_kind_name(op->wire->kind);
  if (op->name == NULL) {
    op->name = "unknown";
    return KVP_INTAKE_REFUSE(op, KVP_UNIMPLEMENTED, "kind", -1, op->wire->kind, "kind %u is not known",
                             op->wire->kind);
  }
  if (op->wire->kind >= KVP_OP_BUFFER_WRITE && !op->intake->allows_daemon_ops && op->header->owner != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_PERMISSION_DENIED, "kind", -1, op->wire->kind, "kind %u is the daemon's own",
                             op->wire->kind);
  }
  enum kvp_status status = op_rest_check(op);
  if (status != KVP_OK) {
    return status;
  }
  switch (op->wire->kind) {
  case KVP_OP_STORE:
    return kvp_intake_store(op);
  case KVP_OP_LOAD:
    return kvp_intake_load(op);
  default:
    return kvp_intake_transfer(op);
  }
}

/* Gives every read its place in the step's results. */
static enum kvp_status results_place(struct kvp_step *step, uint64_t completion_bytes_max, struct kvp_error *error) {
  uint64_t report_bytes = step->op_count * sizeof(struct kvp_wire_report);
  if (report_bytes + step->result_bytes > completion_bytes_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "results", -1, (int64_t)step->result_bytes,
                            "step: %llu result bytes and %u reports, at most %llu bytes are allowed together",
                            (unsigned long long)step->result_bytes, step->op_count,
                            (unsigned long long)completion_bytes_max);
  }
  step->results = kvp_arena_alloc(&step->arena, step->result_bytes);
  if (step->results == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "step: no memory for %llu result bytes",
                         (unsigned long long)step->result_bytes);
  }
  for (uint32_t i = 0; i < step->op_count; i++) {
    if (step->ops[i].device.kind == KVP_DEVICE_READ) {
      step->ops[i].device.params.transfer.host = step->results + step->ops[i].result_offset_bytes;
    }
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_check(struct kvp_intake *intake, struct kvp_step *step, struct kvp_error *error) {
  intake->elements_checked = 0;
  intake->pieces_cut = 0;
  const struct kvp_wire_step *header = (const struct kvp_wire_step *)(const void *)step->wire;
  if (step->wire_bytes < sizeof *header) {
    return REFUSE_ENCODING(error, "bytes", -1, step->wire_bytes, "step: %u bytes are no step", step->wire_bytes);
  }
  enum kvp_status status = header_check(header, step->wire_bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  if (tables_bytes(header) > step->wire_bytes) {
    return REFUSE_ENCODING(error, "bytes", -1, step->wire_bytes, "step: %u bytes don't hold %u ops and %u arrays",
                           step->wire_bytes, header->op_count, header->array_count);
  }
  const struct kvp_wire_op *ops = (const struct kvp_wire_op *)(const void *)(header + 1);
  const struct kvp_wire_array *arrays = (const struct kvp_wire_array *)(const void *)(ops + header->op_count);
  status = inline_arrays_check(header, arrays, error);
  if (status != KVP_OK) {
    return status;
  }
  const uint64_t ops_bytes = header->op_count * sizeof(struct kvp_step_op);
  const uint64_t memos_bytes = header->array_count * sizeof(struct kvp_intake_memo *);
  struct kvp_intake_op op = {.intake = intake, .step = step, .header = header, .arrays = arrays, .error = error};
  step->ops = kvp_arena_alloc(&step->arena, ops_bytes);
  op.memos = kvp_arena_alloc(&step->arena, memos_bytes);
  if (step->ops == NULL || op.memos == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "step: no memory for %u ops", header->op_count);
  }
  memset(step->ops, 0, ops_bytes);
  memset(op.memos, 0, memos_bytes);
  step->queue = header->queue;
  step->result_bytes = 0;
  for (uint32_t i = 0; i < header->op_count; i++) {
    op.index = (int32_t)i;
    op.wire = &ops[i];
    op.out = &step->ops[i];
    status = op_check(&op);
    if (status != KVP_OK) {
      return status;
    }
  }
  step->op_count = header->op_count;
  return results_place(step, intake->completion_bytes_max, error);
}
