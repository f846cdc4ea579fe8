/* Documents for --json: one a command, on standard output. Members keep their order. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_JSON_H
#define KVPOOL_CLIENT_KVPOOLCTL_JSON_H

#include <jansson.h>

#include "client/kvpoolctl/ctl.h"

/* Each sets a member of an object; value is taken over. */
void kvp_ctl_json_set(json_t *object, const char *key, json_t *value);
void kvp_ctl_json_string(json_t *object, const char *key, const char *value);
void kvp_ctl_json_integer(json_t *object, const char *key, int64_t value);
void kvp_ctl_json_bool(json_t *object, const char *key, bool value);
void kvp_ctl_json_real(json_t *object, const char *key, double value);

void kvp_ctl_json_append(json_t *array, json_t *value);
/* JSON has no NaN and no infinities: "nan", "inf" and "-inf" stand for them. */
json_t *kvp_ctl_json_number(double value);
json_t *kvp_ctl_json_int32_array(const int32_t *items, size_t count);

/* Takes it. What more than one call gives becomes members of one object. It is written by _flush, which main calls at
 * the end; what is given later than that is dropped. */
void kvp_ctl_json_print(const struct kvp_ctl *ctl, json_t *document);
void kvp_ctl_json_flush(const struct kvp_ctl *ctl);
/* For a program that ends where it stands, from any thread: says so, unless a document is out already. */
void kvp_ctl_json_interrupted(void);

#endif
