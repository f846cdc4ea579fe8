/* A map from 64-bit ids to objects. One thread; nothing is owned. */
#ifndef KVPOOL_EXECUTOR_ID_TABLE_H
#define KVPOOL_EXECUTOR_ID_TABLE_H

#include <stdbool.h>
#include <stdint.h>

struct kvp_id_entry {
  uint64_t id;
  void *object; /* NULL: the entry is free */
};

/* Zeroed: empty. */
struct kvp_id_table {
  struct kvp_id_entry *entries;
  uint64_t capacity; /* a power of two, or 0 */
  uint64_t count;
};

void kvp_id_table_deinit(struct kvp_id_table *table);

/* NULL when there is no such id. */
void *kvp_id_table_get(const struct kvp_id_table *table, uint64_t id);

/* The id must not be in the table, object not NULL. False when the host has no memory. */
bool kvp_id_table_add(struct kvp_id_table *table, uint64_t id, void *object);

/* Returns what was removed, or NULL. */
void *kvp_id_table_remove(struct kvp_id_table *table, uint64_t id);

/* Removes and returns any object; NULL when the table is empty. */
void *kvp_id_table_take_any(struct kvp_id_table *table);

#endif
