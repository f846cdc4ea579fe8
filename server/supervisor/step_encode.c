/* A StepRequest of protobuf as an encoded step. */
#include "server/supervisor/step_encode.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "server/supervisor/daemon.h"
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

/* ---- ops --------------------------------------------------------------------------------------------------------
 */

static const char *op_name(const Kvpool__V1__Op *op) {
  return op->op_case == KVPOOL__V1__OP__OP_STORE ? "store" : "load";
}

static const Kvpool__V1__RegionRef *op_region(const Kvpool__V1__Op *op) {
  return op->op_case == KVPOOL__V1__OP__OP_STORE ? op->store->region : op->load->region;
}

static void view_write(struct kvp_wire_view *out, const Kvpool__V1__View *view) {
  if (view != NULL) {
    out->buffer_id = view->buffer_id;
    out->offset_bytes = view->offset_bytes;
    out->rows = view->rows;
    out->row_stride_bytes = view->row_stride_bytes;
    out->row_bytes = view->row_bytes;
    out->flags = KVP_WIRE_VIEW_PRESENT;
  }
}

static enum kvp_status op_missing(int32_t index, const Kvpool__V1__Op *op, const char *field,
                                  struct kvp_error *error) {
  return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, index, field, -1, 0, "op %d %s: %s is missing", index,
                          op_name(op), field);
}

static enum kvp_status op_check(const Kvpool__V1__StepRequest *request, int32_t index, struct kvp_error *error) {
  const Kvpool__V1__Op *op = request->ops[index];
  if (op->op_case != KVPOOL__V1__OP__OP_STORE && op->op_case != KVPOOL__V1__OP__OP_LOAD) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, index, "ops", index, op->op_case,
                            "op %d says neither store nor load", index);
  }
  if (op_region(op) == NULL) {
    return op_missing(index, op, "region", error);
  }
  bool is_store = op->op_case == KVPOOL__V1__OP__OP_STORE;
  if ((is_store ? op->store->source : op->load->out) == NULL) {
    return op_missing(index, op, is_store ? "source" : "out", error);
  }
  const char *array = is_store ? "slots" : "segments";
  uint32_t number = is_store ? op->store->slots : op->load->segments;
  if (number >= request->n_arrays) {
    return kvp_error_set_at(error, KVP_OUT_OF_RANGE, index, array, -1, number,
                            "op %d %s: %s = array %u, the step has %zu arrays", index, op_name(op), array, number,
                            request->n_arrays);
  }
  return KVP_OK;
}

static void op_write(struct kvp_wire_op *out, const Kvpool__V1__Op *op) {
  const Kvpool__V1__RegionRef *region = op_region(op);
  out->pool_id = region->pool_id;
  out->region = region->region;
  out->layer = region->layer;
  if (op->op_case == KVPOOL__V1__OP__OP_STORE) {
    out->kind = KVP_OP_STORE;
    out->arrays[0] = op->store->slots;
    view_write(&out->source, op->store->source);
    view_write(&out->second, op->store->cast_back);
  } else {
    out->kind = KVP_OP_LOAD;
    out->arrays[0] = op->load->segments;
    out->total_k = op->load->total_k;
    view_write(&out->source, op->load->out);
    view_write(&out->second, op->load->out_scales);
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

/* The pool of one op: remembered in out->pools when it is new. Ops of a step nearly always follow their
 * predecessor's. */
static enum kvp_status op_place(struct kvp_daemon *daemon, const Kvpool__V1__StepRequest *request, int32_t index,
                                struct kvp_encoded_step *out, struct kvp_error *error) {
  uint64_t pool_id = op_region(request->ops[index])->pool_id;
  for (uint32_t i = out->pool_count; i > 0; i--) {
    if (out->pools[i - 1]->id == pool_id) {
      return KVP_OK;
    }
  }
  struct kvp_pool *pool = kvp_pool_find(daemon, pool_id, error);
  if (pool == NULL) {
    error->op = index;
    return error->status;
  }
  if (out->device == NULL) {
    out->device = pool->placements[0].device;
  }
  if (kvp_pool_placement(pool, out->device) == NULL) {
    return kvp_error_set_at(error, KVP_WRONG_DEVICE, index, "region", -1, (int64_t)pool_id,
                            "op %d %s: pool \"%s\" (%" PRIu64 ") is not placed on %s", index,
                            op_name(request->ops[index]), pool->spec.name, pool_id, out->device->name);
  }
  assert(out->pool_count < kvp_pools_max); /* each is in the daemon's table, which has no more */
  out->pools[out->pool_count++] = pool;
  return KVP_OK;
}

static enum kvp_status step_place(struct kvp_daemon *daemon, const Kvpool__V1__StepRequest *request,
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
    enum kvp_status status = op_place(daemon, request, (int32_t)i, out, error);
    if (status != KVP_OK) {
      return status;
    }
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
  for (size_t i = 0; i < request->n_ops && status == KVP_OK; i++) {
    status = op_check(request, (int32_t)i, error);
  }
  return status;
}

enum kvp_status kvp_step_encode(struct kvp_daemon *daemon, const Kvpool__V1__StepRequest *request,
                                struct kvp_encoded_step *out, struct kvp_error *error) {
  uint64_t inline_bytes = 0;
  struct kvp_step_writer writer;
  enum kvp_status status = step_check(request, &inline_bytes, error);
  if (status == KVP_OK) {
    status = step_place(daemon, request, out, error);
  }
  if (status == KVP_OK) {
    status =
        kvp_step_writer_init(&writer, (uint32_t)request->n_ops, (uint32_t)request->n_arrays, inline_bytes, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  writer.step->epoch = request->epoch;
  for (size_t i = 0; i < request->n_arrays; i++) {
    array_write(&writer, request->arrays[i]);
  }
  for (size_t i = 0; i < request->n_ops; i++) {
    op_write(&writer.ops[i], request->ops[i]);
  }
  out->wire = writer.step;
  return KVP_OK;
}
