/* Documents for --json. A part that can't be made means there is no memory, and ends the program. */
#include "client/kvpoolctl/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int failed) {
  if (failed != 0) {
    (void)fputs("kvpoolctl: the JSON document can't be made: out of memory\n", stderr);
    exit(KVP_CTL_FAILED);
  }
}

void kvp_ctl_json_set(json_t *object, const char *key, json_t *value) {
  check(json_object_set_new(object, key, value));
}

void kvp_ctl_json_string(json_t *object, const char *key, const char *value) {
  kvp_ctl_json_set(object, key, json_string(value));
}

void kvp_ctl_json_integer(json_t *object, const char *key, int64_t value) {
  kvp_ctl_json_set(object, key, json_integer(value));
}

void kvp_ctl_json_bool(json_t *object, const char *key, bool value) {
  kvp_ctl_json_set(object, key, json_boolean(value));
}

void kvp_ctl_json_real(json_t *object, const char *key, double value) {
  kvp_ctl_json_set(object, key, kvp_ctl_json_number(value));
}

void kvp_ctl_json_append(json_t *array, json_t *value) {
  check(json_array_append_new(array, value));
}

json_t *kvp_ctl_json_number(double value) {
  if (isfinite(value)) {
    return json_real(value);
  }
  return json_string(isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
}

json_t *kvp_ctl_json_int32_array(const int32_t *items, size_t count) {
  json_t *array = json_array();
  for (size_t i = 0; i < count; i++) {
    kvp_ctl_json_append(array, json_integer(items[i]));
  }
  return array;
}

void kvp_ctl_json_print(const struct kvp_ctl *ctl, json_t *document) {
  size_t flags = JSON_REAL_PRECISION(9) | (ctl->terminal.is_tty ? JSON_INDENT(2) : JSON_COMPACT);
  (void)json_dumpf(document, stdout, flags); /* what could not be written is seen at the end */
  (void)putchar('\n');
  json_decref(document);
}
