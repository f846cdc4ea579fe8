/* Names of pools, regions, sessions, namespaces and devices: [A-Za-z0-9._:-], at most kvp_name_bytes_max - 1 of them.
 */
#ifndef KVPOOL_SUPERVISOR_NAME_H
#define KVPOOL_SUPERVISOR_NAME_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/status.h"

/* Refuses (naming `what`, position and value) a name that is too long, empty (unless allowed) or has other
 * characters. */
enum kvp_status kvp_name_check(const char *name, const char *what, bool empty_allowed, struct kvp_error *error);
/* The same for free text of one line: valid UTF-8, no control characters, shorter than bytes_max. */
enum kvp_status kvp_note_check(const char *note, const char *what, size_t bytes_max, struct kvp_error *error);
/* Do they name the same device? Digits of a GPU's UUID may be in upper or lower case. */
bool kvp_device_names_equal(const char *one, const char *other);

#endif
