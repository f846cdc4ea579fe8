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
  kvp_compressed_parts_deinit(&intake->compressed);
  kvp_slot_marks_deinit(&intake->marks);
  kvp_slot_set_deinit(&intake->slots);
}

enum kvp_status kvp_intake_no_memory(struct kvp_intake_op *op) {
  return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_MEMORY, "", -1, 0, "%s", "no memory to check it");
}

struct kvp_device_op *kvp_intake_device_op(struct kvp_intake_op *op, enum kvp_device_op_kind kind) {
  struct kvp_step_op *out = op->out;
  if (op->step->device_op_count >= kvp_device_ops_per_step_max) {
    (void)KVP_INTAKE_REFUSE(op, KVP_TOO_LARGE, "ops", -1, op->step->device_op_count,
                            "the ops up to this one are more than %d for the device", kvp_device_ops_per_step_max);
    return NULL;
  }
  struct kvp_device_op *device_op = kvp_arena_alloc(&op->step->arena, sizeof *device_op);
  if (device_op == NULL) {
    (void)kvp_intake_no_memory(op);
    return NULL;
  }
  memset(device_op, 0, sizeof *device_op);
  device_op->kind = kind;
  op->step->device_op_count++;
  if (kind == KVP_DEVICE_POINT) { /* between the op's and the next one's, unless its word is poisoned by then */
    out->point = device_op;
    return device_op;
  }
  if (out->first == NULL) {
    out->first = device_op;
  } else {
    out->last->next = device_op;
  }
  out->last = device_op;
  return device_op;
}

/* What goes with waits and signals is empty where there can't be any. */
static enum kvp_status header_points_check(const struct kvp_wire_step *header, bool allows_points,
                                           struct kvp_error *error) {
  const uint32_t flags = allows_points ? (uint32_t)KVP_STEP_NOT_ACCEPTED_TOLD | KVP_STEP_DEVICE_WORDS : 0U;
  if ((header->flags & ~flags) != 0) {
    return REFUSE_ENCODING(error, "flags", -1, header->flags, "step: flags are 0x%x, known are 0x%x", header->flags,
                           flags);
  }
  if ((header->flags & KVP_STEP_DEVICE_WORDS) == 0 && header->words_buffer_id != 0) {
    return REFUSE_ENCODING(error, "words", -1, header->words_buffer_id, "step: buffer %llu, and no flag that uses it",
                           (unsigned long long)header->words_buffer_id);
  }
  if (!allows_points && (header->base != 0 || header->deadline_ns != 0)) {
    return REFUSE_ENCODING(error, "base", -1, header->base,
                           "step: base %llu or deadline %llu without a timeline to wait for",
                           (unsigned long long)header->base, (unsigned long long)header->deadline_ns);
  }
  return KVP_OK;
}

static enum kvp_status header_check(const struct kvp_wire_step *header, uint32_t wire_bytes, bool allows_points,
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
  return header_points_check(header, allows_points, error);
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

/* ---- ops ---- */

enum { VIEW_SOURCE = 1, VIEW_SECOND = 2, VIEW_THIRD = 4, VIEW_FOURTH = 8, view_count = 4, number_count = 3 };

/* A kind of op, and which of an encoded op's fields it has. What it hasn't is empty. */
struct op_kind {
  const char *name;
  enum kvp_status (*check)(struct kvp_intake_op *op);
  uint32_t kind;
  uint32_t flags;
  uint32_t arrays; /* a bit each */
  uint32_t views;
  uint32_t numbers; /* how many */
  bool has_second_region;
};

static const struct op_kind op_kinds[] = {
    {"store", kvp_intake_store, KVP_OP_STORE, 0, 1, VIEW_SOURCE | VIEW_SECOND, 0, false},
    {"load", kvp_intake_load, KVP_OP_LOAD, KVP_OP_ALLOW_STORE_BEFORE_LOAD, 1, VIEW_SOURCE | VIEW_SECOND, 0, false},
    {"assemble", kvp_intake_assemble, KVP_OP_ASSEMBLE,
     KVP_OP_ALLOW_STORE_BEFORE_LOAD | KVP_OP_KEEP_COMPRESSED | KVP_OP_CHUNK_RESERVED | KVP_OP_CHUNK_CAST_BACK, 15,
     VIEW_SOURCE | VIEW_SECOND, 1, true},
    {"fused_store", kvp_intake_fused_store, KVP_OP_FUSED_STORE, KVP_OP_NEOX | KVP_OP_HADAMARD | KVP_OP_ROUND_TO_BF16,
     3, VIEW_SOURCE | VIEW_SECOND | VIEW_THIRD | VIEW_FOURTH, 1, false},
    {"convert_kv_index", kvp_intake_convert_kv_index, KVP_OP_CONVERT_KV_INDEX, 0, 7, VIEW_SOURCE | VIEW_SECOND, 1,
     false},
    {"swa_index_decode", kvp_intake_swa_index_decode, KVP_OP_SWA_INDEX_DECODE, 0, 1, VIEW_SECOND, 0, false},
    {"expand_swa_index", kvp_intake_expand_swa_index, KVP_OP_EXPAND_SWA_INDEX, 0, 1, VIEW_SECOND, 0, false},
    {"kv_index_cat", kvp_intake_kv_index_cat, KVP_OP_KV_INDEX_CAT, 0, 3, VIEW_SOURCE | VIEW_SECOND | VIEW_THIRD, 2,
     false},
    {"copy_blocks", kvp_intake_copy_blocks, KVP_OP_COPY_BLOCKS, 0, 1, 0, 0, false},
    {"zero_blocks", kvp_intake_zero_blocks, KVP_OP_ZERO_BLOCKS, 0, 1, 0, 0, false},
    {"buffer_write", kvp_intake_transfer, KVP_OP_BUFFER_WRITE, 0, 1, VIEW_SOURCE, 0, false},
    {"buffer_read", kvp_intake_transfer, KVP_OP_BUFFER_READ, 0, 0, VIEW_SOURCE, 0, false},
    {"buffer_fill", kvp_intake_transfer, KVP_OP_BUFFER_FILL, 0, 0, VIEW_SOURCE, 0, false},
    {"region_read", kvp_intake_transfer, KVP_OP_REGION_READ, 0, 0, 0, 0, false},
};

/* NULL: not known. */
static const struct op_kind *op_kind_find(uint32_t kind) {
  for (size_t i = 0; i < sizeof op_kinds / sizeof op_kinds[0]; i++) {
    if (op_kinds[i].kind == kind) {
      return &op_kinds[i];
    }
  }
  return NULL;
}

static enum kvp_status op_numbers_check(struct kvp_intake_op *op, const struct op_kind *kind) {
  const struct kvp_wire_op *wire = op->wire;
  for (uint32_t i = kind->numbers; i < number_count; i++) {
    if (wire->numbers[i] != 0) {
      return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, "numbers", i, wire->numbers[i], "it has no number %u", i);
    }
  }
  if (!kind->has_second_region &&
      (wire->second_pool_id != 0 || wire->second_region != 0 || wire->second_layer != 0)) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, "second_pool", -1, wire->second_pool_id, "%s",
                             "it has no second region");
  }
  return KVP_OK;
}

/* What is to be empty in an op of this kind. */
static enum kvp_status op_rest_check(struct kvp_intake_op *op, const struct op_kind *kind) {
  const struct kvp_wire_op *wire = op->wire;
  const struct kvp_wire_view *views[view_count] = {&wire->source, &wire->second, &wire->third, &wire->fourth};
  static const char *const names[view_count] = {"source", "second", "third", "fourth"};
  const uint32_t flags = kind->flags | (op->intake->allows_points ? KVP_OP_WAITS | KVP_OP_SIGNALS : 0U);
  if ((wire->flags & ~flags) != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, "flags", -1, wire->flags, "flags are 0x%x, known are 0x%x",
                             wire->flags, flags);
  }
  for (uint32_t i = 0; i < sizeof wire->arrays / sizeof wire->arrays[0]; i++) {
    if ((kind->arrays >> i & 1) == 0 && wire->arrays[i] != KVP_WIRE_NO_ARRAY) {
      return KVP_INTAKE_REFUSE(op, KVP_MALFORMED, "arrays", i, wire->arrays[i], "it has no array %u", i);
    }
  }
  for (uint32_t i = 0; i < view_count; i++) {
    if ((kind->views >> i & 1) == 0) {
      enum kvp_status status = kvp_intake_view_absent(op, names[i], views[i]);
      if (status != KVP_OK) {
        return status;
      }
    }
  }
  return op_numbers_check(op, kind);
}

static enum kvp_status op_check(struct kvp_intake_op *op) {
  const struct op_kind *kind = op_kind_find(op->wire->kind);
  op->name = kind != NULL ? kind->name : "unknown";
  if (kind == NULL) {
    return KVP_INTAKE_REFUSE(op, KVP_UNIMPLEMENTED, "kind", -1, op->wire->kind, "kind %u is not known",
                             op->wire->kind);
  }
  if (op->wire->kind >= KVP_OP_BUFFER_WRITE && !op->intake->allows_daemon_ops) {
    return KVP_INTAKE_REFUSE(op, KVP_PERMISSION_DENIED, "kind", -1, op->wire->kind, "kind %u is the daemon's own",
                             op->wire->kind);
  }
  const bool is_replay = op->words.count > 0;
  enum kvp_status status = is_replay ? kvp_intake_replay_kind(op) : KVP_OK;
  if (status != KVP_OK || (status = op_rest_check(op, kind)) != KVP_OK || (status = kind->check(op)) != KVP_OK) {
    return status;
  }
  return is_replay ? kvp_intake_replay_points(op) : kvp_intake_points(op);
}

/* ops: as they came. */
static enum kvp_status ops_check(struct kvp_intake_op *op, const struct kvp_wire_op *ops) {
  const struct kvp_wire_step *header = op->header;
  enum kvp_status status = KVP_OK;
  op->wire = ops;
  op->out = op->step->ops;
  if ((header->flags & KVP_STEP_DEVICE_WORDS) != 0) {
    status = kvp_intake_replay_begin(op);
  }
  for (uint32_t i = 0; i < header->op_count && status == KVP_OK; i++) {
    op->index = (int32_t)i;
    op->wire = &ops[i];
    op->out = &op->step->ops[i];
    status = op_check(op);
  }
  return status;
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
    struct kvp_device_op *first = step->ops[i].first;
    if (first != NULL && first->kind == KVP_DEVICE_READ) {
      first->params.transfer.host = step->results + step->ops[i].result_offset_bytes;
    }
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_check(struct kvp_intake *intake, struct kvp_step *step, struct kvp_error *error) {
  intake->elements_checked = 0;
  intake->pieces_cut = 0;
  kvp_compressed_parts_begin(&intake->compressed);
  kvp_slot_marks_begin(&intake->marks);
  const struct kvp_wire_step *header = (const struct kvp_wire_step *)(const void *)step->wire;
  if (step->wire_bytes < sizeof *header) {
    return REFUSE_ENCODING(error, "bytes", -1, step->wire_bytes, "step: %u bytes are no step", step->wire_bytes);
  }
  enum kvp_status status = header_check(header, step->wire_bytes, intake->allows_points, error);
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
  step->owner = header->owner;
  step->result_bytes = 0;
  step->device_op_count = 0;
  step->assembles = false;
  step->replay = NULL;
  status = ops_check(&op, ops);
  if (status != KVP_OK) {
    return status;
  }
  step->op_count = header->op_count;
  step->tells_acceptance = (header->flags & KVP_STEP_NOT_ACCEPTED_TOLD) == 0;
  status = kvp_step_cut(step, error);
  return status == KVP_OK ? results_place(step, intake->completion_bytes_max, error) : status;
}
