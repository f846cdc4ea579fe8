/* A StepRequest of protobuf as an encoded step. */
#include "server/supervisor/step_encode.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "proto/step_op_encode.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/step.h"
#include "server/supervisor/step_writer.h"

/* ---- arrays -----------------------------------------------------------------------------------------------------
 */

static enum kvp_status array_check(const Kvpool__V1__Array *array, uint32_t index, uint64_t *inline_bytes,
                                   struct kvp_error *error) {
  switch (array->source_case) {
  case KVPOOL__V1__ARRAY__SOURCE_INLINE:
    if (array->inline_.len % sizeof(int32_t) != 0) {
      return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "arrays", index, (int64_t)array->inline_.len,
                              "arrays[%u]: %zu bytes are not a whole number of int32", index, array->inline_.len);
    }
    *inline_bytes += kvp_step_inline_bytes(array->inline_.len);
    return KVP_OK;
  case KVPOOL__V1__ARRAY__SOURCE_BUFFER:
    if (array->buffer->buffer_id == 0) {
      return kvp_error_set_at(error, KVP_UNKNOWN_BUFFER, -1, "arrays", index, 0, "arrays[%u]: there is no buffer 0",
                              index);
    }
    if (array->buffer->count > INT64_MAX / sizeof(int32_t)) {
      return kvp_error_set_at(error, KVP_OUT_OF_RANGE, -1, "arrays", index, (int64_t)array->buffer->count,
                              "arrays[%u]: count = %" PRIu64 " elements are more than any buffer has", index,
                              array->buffer->count);
    }
    return KVP_OK;
  default:
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "arrays", index, 0,
                            "arrays[%u] has neither inline bytes nor a buffer", index);
  }
}

static void array_write(struct kvp_step_writer *writer, const Kvpool__V1__Array *array) {
  if (array->source_case == KVPOOL__V1__ARRAY__SOURCE_INLINE) {
    (void)kvp_step_writer_add_inline(writer, array->inline_.data, array->inline_.len);
  } else {
    (void)kvp_step_writer_add_buffer(writer, array->buffer->buffer_id, array->buffer->offset_bytes,
                                     array->buffer->count * sizeof(int32_t));
  }
}

/* ---- placement --------------------------------------------------------------------------------------------------
 */

struct kvp_device *kvp_step_place(struct kvp_daemon *daemon, struct kvp_pool *pool, const char *placement,
                                  struct kvp_error *error) {
  if (placement[0] == '\0') {
    return pool->placements[0].device;
  }
  struct kvp_device *device = kvp_daemon_find_device(daemon, placement, error);
  if (device != NULL && kvp_pool_placement(pool, device) == NULL) {
    (void)kvp_error_set_at(error, KVP_WRONG_DEVICE, -1, "placement", -1, (int64_t)pool->id,
                           "pool \"%s\" (%" PRIu64 ") is not placed on %s", pool->spec.name, pool->id, device->name);
    return NULL;
  }
  return device;
}

/* The pool that one op names: remembered in out->pools when it is new. Ops of a step nearly always follow their
 * predecessor's. */
static enum kvp_status op_place(struct kvp_daemon *daemon, const struct kvp_session *session,
                                const Kvpool__V1__StepRequest *request, int32_t index, uint64_t pool_id,
                                struct kvp_encoded_step *out, struct kvp_error *error) {
  for (uint32_t i = out->pool_count; i > 0; i--) {
    if (out->pools[i - 1]->id == pool_id) {
      return KVP_OK;
    }
  }
  struct kvp_pool *pool = kvp_pool_find(daemon, pool_id, error);
  if (pool == NULL || kvp_pool_access_check(&pool->spec, session->namespace_name, error) != KVP_OK) {
    error->op = index;
    return error->status;
  }
  if (out->device == NULL) {
    out->device = pool->placements[0].device;
  }
  if (kvp_pool_placement(pool, out->device) == NULL) {
    return kvp_error_set_at(error, KVP_WRONG_DEVICE, index, "region", -1, (int64_t)pool_id,
                            "op %d %s: pool \"%s\" (%" PRIu64 ") is not placed on %s", index,
                            kvp_step_op_name(request->ops[index]), pool->spec.name, pool_id, out->device->name);
  }
  assert(out->pool_count < kvp_pools_max); /* each is in the daemon's table, which has no more */
  out->pools[out->pool_count++] = pool;
  return KVP_OK;
}

/* Does the op's message name a pool, or a second one? Pool 0, of a client that forgot to say which, is a name too. */
static bool op_has_pool(const struct kvp_wire_op *op, const Kvpool__V1__Op *message) {
  switch (op->kind) {
  case KVP_OP_EXPAND_SWA_INDEX:
  case KVP_OP_KV_INDEX_CAT:
    return false;
  case KVP_OP_ASSEMBLE:
    return message->assemble->swa != NULL ||
           (message->assemble->chunk != NULL && message->assemble->chunk->region != NULL);
  default:
    return true;
  }
}

static bool op_has_second_pool(const struct kvp_wire_op *op, const Kvpool__V1__Op *message) {
  return op->kind == KVP_OP_ASSEMBLE && message->assemble->compressed != NULL;
}

static void op_fill_rope_offset(const struct kvp_encoded_step *encoded, struct kvp_wire_op *op) {
  if (op->kind != KVP_OP_FUSED_STORE || op->argument != KVP_STEP_ROPE_OFFSET_DEFAULT) {
    return;
  }
  op->argument = 0;
  for (uint32_t i = 0; i < encoded->pool_count; i++) {
    const struct kvp_pool *pool = encoded->pools[i];
    if (pool->id == op->pool_id && op->region < pool->spec.region_count) {
      op->argument = kvp_step_rope_offset(op, pool->regions[op->region].sizes.elements);
    }
  }
}

static enum kvp_status step_place(struct kvp_daemon *daemon, const struct kvp_session *session,
                                  const Kvpool__V1__StepRequest *request, struct kvp_wire_op *ops,
                                  struct kvp_encoded_step *out, struct kvp_error *error) {
  out->device = NULL;
  out->pool_count = 0;
  if (request->placement[0] != '\0') {
    out->device = kvp_daemon_find_device(daemon, request->placement, error);
    if (out->device == NULL) {
      return error->status;
    }
  }
  for (size_t i = 0; i < request->n_ops; i++) {
    enum kvp_status status = KVP_OK;
    if (op_has_pool(&ops[i], request->ops[i])) {
      status = op_place(daemon, session, request, (int32_t)i, ops[i].pool_id, out, error);
    }
    if (status == KVP_OK && op_has_second_pool(&ops[i], request->ops[i])) {
      status = op_place(daemon, session, request, (int32_t)i, ops[i].second_pool_id, out, error);
    }
    if (status != KVP_OK) {
      return status;
    }
    op_fill_rope_offset(out, &ops[i]);
  }
  if (out->device == NULL) {
    out->device = &daemon->devices[0];
  }
  return KVP_OK;
}

/* ---- step -------------------------------------------------------------------------------------------------------
 */

static enum kvp_status step_check(const Kvpool__V1__StepRequest *request, uint64_t *inline_bytes,
                                  struct kvp_error *error) {
  if (request->n_ops > kvp_ops_per_step_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "ops", -1, (int64_t)request->n_ops,
                            "the step has %zu ops, %d are allowed", request->n_ops, kvp_ops_per_step_max);
  }
  if (request->n_arrays > kvp_arrays_per_step_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "arrays", -1, (int64_t)request->n_arrays,
                            "the step has %zu arrays, %d are allowed", request->n_arrays, kvp_arrays_per_step_max);
  }
  *inline_bytes = 0;
  enum kvp_status status = KVP_OK;
  for (size_t i = 0; i < request->n_arrays && status == KVP_OK; i++) {
    status = array_check(request->arrays[i], (uint32_t)i, inline_bytes, error);
  }
  return status;
}

/* Of an array that has passed array_check. */
static uint64_t array_elements(const void *context, uint32_t number) {
  const Kvpool__V1__StepRequest *request = context;
  const Kvpool__V1__Array *array = request->arrays[number];
  return array->source_case == KVPOOL__V1__ARRAY__SOURCE_INLINE ? array->inline_.len / sizeof(int32_t)
                                                                : array->buffer->count;
}

static enum kvp_status ops_write(const Kvpool__V1__StepRequest *request, struct kvp_wire_op *ops,
                                 struct kvp_error *error) {
  const struct kvp_step_arrays arrays = {.count = request->n_arrays, .elements = array_elements, .context = request};
  enum kvp_status status = KVP_OK;
  for (size_t i = 0; i < request->n_ops && status == KVP_OK; i++) {
    status = kvp_step_op_encode(request->ops[i], (int32_t)i, &arrays, &ops[i], error);
  }
  return status;
}

enum kvp_status kvp_step_encode(struct kvp_daemon *daemon, const struct kvp_session *session,
                                const Kvpool__V1__StepRequest *request, struct kvp_encoded_step *out,
                                struct kvp_error *error) {
  uint64_t inline_bytes = 0;
  struct kvp_step_writer writer;
  enum kvp_status status = step_check(request, &inline_bytes, error);
  if (status == KVP_OK) {
    status =
        kvp_step_writer_init(&writer, (uint32_t)request->n_ops, (uint32_t)request->n_arrays, inline_bytes, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  status = ops_write(request, writer.ops, error);
  if (status == KVP_OK) {
    status = step_place(daemon, session, request, writer.ops, out, error);
  }
  if (status != KVP_OK) {
    kvp_step_free(writer.step);
    return status;
  }
  writer.step->epoch = request->epoch;
  for (size_t i = 0; i < request->n_arrays; i++) {
    array_write(&writer, request->arrays[i]); /* last: nothing is copied of a step that is refused here */
  }
  out->wire = writer.step;
  return KVP_OK;
}
