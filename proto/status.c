#include "proto/status.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static const struct {
  const char *name;
  const char *text;
  int grpc;
} statuses[] = {
#define X(name, number, wire, grpc, text) [number] = {wire, text, grpc},
    KVP_STATUS_MAP(X)
#undef X
};

enum {
#define X(name, number, wire, grpc, text) listed_##name,
  KVP_STATUS_MAP(X)
#undef X
      listed_count
};
_Static_assert((int)listed_count == (int)kvp_status_count, "numbers without a gap");

enum { grpc_internal = 13 };

static bool is_known(enum kvp_status status) {
  return (unsigned)status < kvp_status_count;
}

const char *kvp_status_name(enum kvp_status status) {
  return is_known(status) ? statuses[status].name : "unknown";
}

const char *kvp_status_text(enum kvp_status status) {
  return is_known(status) ? statuses[status].text : "unknown";
}

int kvp_status_grpc(enum kvp_status status) {
  return is_known(status) ? statuses[status].grpc : grpc_internal;
}

static void error_fill(struct kvp_error *error, enum kvp_status status, int32_t op, const char *array,
                       int64_t position, int64_t value, const char *format, va_list arguments) {
  if (error == NULL) {
    return;
  }
  memset(error, 0, sizeof *error);
  error->status = (int32_t)status;
  error->op = op;
  error->position = position;
  error->value = value;
  (void)snprintf(error->array, sizeof error->array, "%s", array);
  (void)vsnprintf(error->text, sizeof error->text, format, arguments);
}

enum kvp_status kvp_error_set(struct kvp_error *error, enum kvp_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  error_fill(error, status, -1, "", -1, 0, format, arguments);
  va_end(arguments);
  return status;
}

enum kvp_status kvp_error_set_at(struct kvp_error *error, enum kvp_status status, int32_t op, const char *array,
                                 int64_t position, int64_t value, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  error_fill(error, status, op, array, position, value, format, arguments);
  va_end(arguments);
  return status;
}
