/* Numbers of namespaces. */
#include "server/supervisor/namespace_table.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

/* The entry of a new name: a free one, else that of the oldest name which no session has. */
static struct kvp_namespace *entry_take(struct kvp_namespace_table *table) {
  struct kvp_namespace *oldest = NULL;
  for (uint32_t i = 0; i < kvp_sessions_max; i++) {
    struct kvp_namespace *entry = &table->entries[i];
    if (entry->sessions == 0 && (oldest == NULL || entry->number < oldest->number)) {
      oldest = entry; /* a free one has number 0 */
    }
  }
  assert(oldest != NULL);
  return oldest;
}

uint64_t kvp_namespace_hold(struct kvp_namespace_table *table, const char *name) {
  assert(name[0] != '\0' && strlen(name) < kvp_name_bytes_max);
  for (uint32_t i = 0; i < kvp_sessions_max; i++) {
    struct kvp_namespace *entry = &table->entries[i];
    if (strcmp(entry->name, name) == 0) {
      entry->sessions++;
      return entry->number;
    }
  }
  struct kvp_namespace *entry = entry_take(table);
  memcpy(entry->name, name, strlen(name) + 1);
  entry->number = ++table->last_number;
  entry->sessions = 1;
  return entry->number;
}

void kvp_namespace_drop(struct kvp_namespace_table *table, uint64_t number) {
  uint32_t at = 0;
  while (table->entries[at].number != number) {
    at++;
    assert(at < kvp_sessions_max);
  }
  assert(table->entries[at].sessions > 0);
  table->entries[at].sessions--;
}
