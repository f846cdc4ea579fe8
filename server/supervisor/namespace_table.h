/* Numbers of namespaces: equal for sessions of the same name, so that a block can remember whose it was in 8 bytes.
 *
 * A name keeps its number while a session has it and as long after as there is room for names; a number is never given
 * to another name. A name that was forgotten gets a new number, which makes its own blocks look like somebody else's:
 * they are zeroed once more than they had to be. Loop thread only.
 */
#ifndef KVPOOL_SUPERVISOR_NAMESPACE_TABLE_H
#define KVPOOL_SUPERVISOR_NAMESPACE_TABLE_H

#include <stdint.h>

#include "proto/limits.h"

struct kvp_namespace {
  char name[kvp_name_bytes_max]; /* "": free */
  uint64_t number;               /* never 0 */
  uint32_t sessions;
};

struct kvp_namespace_table {
  struct kvp_namespace entries[kvp_sessions_max];
  uint64_t last_number;
};

/* For a session more; at most kvp_sessions_max hold one. name: not empty, fits. */
uint64_t kvp_namespace_hold(struct kvp_namespace_table *table, const char *name);
void kvp_namespace_drop(struct kvp_namespace_table *table, uint64_t number);

#endif
