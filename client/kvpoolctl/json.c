/* Documents for --json. A part that can't be made means there is no memory, and ends the program. */
#include "client/kvpoolctl/json.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/kvpoolctl/text.h"

static json_t *whole;
static atomic_bool is_out;

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
  json_t *string = json_string(value);
  if (string == NULL) { /* not UTF-8 */
    char *clean = kvp_ctl_clean(value, NULL);
    string = json_string(clean);
    free(clean);
  }
  kvp_ctl_json_set(object, key, string);
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
  (void)ctl;
  if (atomic_load(&is_out)) {
    json_decref(document);
  } else if (whole == NULL) {
    whole = document;
  } else {
    check(json_object_update(whole, document));
    json_decref(document);
  }
}

void kvp_ctl_json_flush(const struct kvp_ctl *ctl) {
  size_t flags = JSON_REAL_PRECISION(9) | (ctl->terminal.is_tty ? JSON_INDENT(2) : JSON_COMPACT);
  if (whole == NULL || atomic_exchange(&is_out, true)) {
    return;
  }
  (void)json_dumpf(whole, stdout, flags); /* what could not be written is seen at the end */
  (void)putchar('\n');
  json_decref(whole);
  whole = NULL;
}

void kvp_ctl_json_interrupted(void) {
  static const char document[] = "{\"error\":{\"status\":\"cancelled\",\"text\":\"interrupted\"}}\n";
  if (!atomic_exchange(&is_out, true)) {
    ssize_t written = write(STDOUT_FILENO, document, sizeof document - 1);
    (void)written; /* nothing is left to be done about it */
  }
}
