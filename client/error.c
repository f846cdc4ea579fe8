/* Errors: from the library's own checks, from the protocol's detail, from gRPC. Pure functions: any thread. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "client/internal.h"
#include "proto/status.h"

#define X(name, number, wire, grpc, text) _Static_assert((int)KVPOOL_##name == (int)KVP_##name, #name);
KVP_STATUS_MAP(X)
#undef X

const char *kvpool_version(void) {
  return KVPOOL_VERSION;
}

const char *kvpool_status_name(kvpool_status status) {
  switch (status) {
#define X(name, number, wire, grpc, text)                                                                            \
  case KVPOOL_##name:                                                                                                \
    return wire;
    KVP_STATUS_MAP(X)
#undef X
  case KVPOOL_DISCONNECTED:
    return "disconnected";
  case KVPOOL_NO_MEMORY:
    return "no_memory";
  }
  return "unknown";
}

static void error_clear(kvpool_error *error, kvpool_status status) {
  memset(error, 0, sizeof *error);
  error->status = status;
  error->op = -1;
  error->position = -1;
}

void kvp_error_fill(kvpool_error *error, kvpool_status status, const char *array, int64_t position, int64_t value,
                    const char *format, ...) {
  if (error == NULL) {
    return;
  }
  va_list arguments;
  va_start(arguments, format);
  error_clear(error, status);
  error->position = position;
  error->value = value;
  (void)snprintf(error->array, sizeof error->array, "%s", array);
  (void)vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
}

kvpool_status kvp_fail_detail(kvpool_error *error, const Kvpool__V1__ErrorDetail *detail) {
  /* A newer daemon may know codes that this library doesn't; it must not look like one of our own. */
  bool is_known = detail->status > 0 && (int)detail->status < kvp_status_count;
  kvpool_status status = is_known ? (kvpool_status)detail->status : KVPOOL_INTERNAL;
  if (error != NULL) {
    error_clear(error, status);
    error->op = detail->about_op ? (int32_t)detail->op : -1;
    error->position = detail->position;
    error->value = detail->value;
    (void)snprintf(error->array, sizeof error->array, "%s", detail->array);
    (void)snprintf(error->text, sizeof error->text, "%s", detail->message);
  }
  return status;
}

kvpool_status kvp_fail_wire(kvpool_error *error, const struct kvp_error *from) {
  bool is_known = from->status > 0 && from->status < kvp_status_count;
  kvpool_status status = is_known ? (kvpool_status)from->status : KVPOOL_INTERNAL;
  if (error != NULL) {
    error_clear(error, status);
    error->op = from->op;
    error->position = from->position;
    error->value = from->value;
    /* Of another process: it may have no end. */
    (void)snprintf(error->array, sizeof error->array, "%.*s", (int)sizeof from->array - 1, from->array);
    (void)snprintf(error->text, sizeof error->text, "%.*s", (int)sizeof from->text - 1, from->text);
  }
  return status;
}

/* The kvpool.v1.ErrorDetail inside a serialized google.rpc.Status; false when there is none. */
static bool error_from_details(kvpool_error *error, grpc_slice serialized, kvpool_status *status) {
  Kvpool__V1__RpcStatus *rpc_status =
      kvpool__v1__rpc_status__unpack(NULL, GRPC_SLICE_LENGTH(serialized), GRPC_SLICE_START_PTR(serialized));
  bool found = false;
  for (size_t i = 0; rpc_status != NULL && i < rpc_status->n_details && !found; i++) {
    const Kvpool__V1__RpcStatusDetail *any = rpc_status->details[i];
    if (strcmp(any->type_url, "type.googleapis.com/kvpool.v1.ErrorDetail") != 0) {
      continue;
    }
    Kvpool__V1__ErrorDetail *detail = kvpool__v1__error_detail__unpack(NULL, any->value.len, any->value.data);
    if (detail != NULL) {
      *status = kvp_fail_detail(error, detail);
      kvpool__v1__error_detail__free_unpacked(detail, NULL);
      found = true;
    }
  }
  if (rpc_status != NULL) {
    kvpool__v1__rpc_status__free_unpacked(rpc_status, NULL);
  }
  return found;
}

static kvpool_status status_from_grpc(grpc_status_code code) {
  switch (code) {
  case GRPC_STATUS_DEADLINE_EXCEEDED:
    return KVPOOL_DEADLINE_EXCEEDED;
  case GRPC_STATUS_UNIMPLEMENTED:
    return KVPOOL_UNIMPLEMENTED;
  case GRPC_STATUS_RESOURCE_EXHAUSTED:
    return KVPOOL_TOO_LARGE;
  case GRPC_STATUS_INVALID_ARGUMENT:
    return KVPOOL_INVALID_ARGUMENT;
  case GRPC_STATUS_PERMISSION_DENIED:
    return KVPOOL_PERMISSION_DENIED;
  default:
    return KVPOOL_INTERNAL;
  }
}

kvpool_status kvp_fail_grpc(kvpool_error *error, const char *method, const char *target, grpc_status_code code,
                            grpc_slice details, const grpc_metadata_array *trailing) {
  for (size_t i = 0; i < trailing->count; i++) {
    kvpool_status status = KVPOOL_INTERNAL;
    if (grpc_slice_str_cmp(trailing->metadata[i].key, "grpc-status-details-bin") == 0 &&
        error_from_details(error, trailing->metadata[i].value, &status)) {
      return status;
    }
  }
  int length = (int)GRPC_SLICE_LENGTH(details);
  const char *text = (const char *)GRPC_SLICE_START_PTR(details);
  if (code == GRPC_STATUS_UNAVAILABLE) {
    return kvp_fail(error, KVPOOL_DISCONNECTED, "%s: the connection to kvpoold at %s is lost (%.*s)", method, target,
                    length, text);
  }
  if (code == GRPC_STATUS_CANCELLED) {
    return kvp_fail(error, KVPOOL_CANCELLED, "%s: the call was cancelled", method);
  }
  return kvp_fail(error, status_from_grpc(code), "%s: kvpoold at %s answered with gRPC status %d (%.*s)", method,
                  target, (int)code, length, text);
}
