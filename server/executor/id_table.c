/* Open addressing with linear probing; a removal moves later entries back, so that no tombstones pile up. */
#include "server/executor/id_table.h"

#include <assert.h>
#include <stdlib.h>

enum { capacity_min = 64 };

static uint64_t home_of(const struct kvp_id_table *table, uint64_t id) {
  uint64_t hash = id * UINT64_C(0x9E3779B97F4A7C15);
  return (hash ^ hash >> 32) & (table->capacity - 1);
}

void kvp_id_table_deinit(struct kvp_id_table *table) {
  free(table->entries);
  *table = (struct kvp_id_table){0};
}

/* The entry of the id, or the free one where it would go. The table is never full. */
static struct kvp_id_entry *entry_find(const struct kvp_id_table *table, uint64_t id) {
  uint64_t i = home_of(table, id);
  while (table->entries[i].object != NULL && table->entries[i].id != id) {
    i = (i + 1) & (table->capacity - 1);
  }
  return &table->entries[i];
}

void *kvp_id_table_get(const struct kvp_id_table *table, uint64_t id) {
  return table->count == 0 ? NULL : entry_find(table, id)->object;
}

static bool grow(struct kvp_id_table *table) {
  struct kvp_id_table larger = {.capacity = table->capacity == 0 ? capacity_min : table->capacity * 2};
  larger.entries = calloc(larger.capacity, sizeof *larger.entries);
  if (larger.entries == NULL) {
    return false;
  }
  for (uint64_t i = 0; i < table->capacity; i++) {
    if (table->entries[i].object != NULL) {
      *entry_find(&larger, table->entries[i].id) = table->entries[i];
    }
  }
  larger.count = table->count;
  free(table->entries);
  *table = larger;
  return true;
}

bool kvp_id_table_add(struct kvp_id_table *table, uint64_t id, void *object) {
  if (table->count * 2 >= table->capacity && !grow(table)) {
    return false;
  }
  struct kvp_id_entry *entry = entry_find(table, id);
  assert(entry->object == NULL && object != NULL);
  *entry = (struct kvp_id_entry){id, object};
  table->count++;
  return true;
}

void *kvp_id_table_remove(struct kvp_id_table *table, uint64_t id) {
  if (table->count == 0) {
    return NULL;
  }
  struct kvp_id_entry *entry = entry_find(table, id);
  void *object = entry->object;
  if (object == NULL) {
    return NULL;
  }
  const uint64_t mask = table->capacity - 1;
  uint64_t hole = (uint64_t)(entry - table->entries);
  for (uint64_t i = (hole + 1) & mask; table->entries[i].object != NULL; i = (i + 1) & mask) {
    /* An entry may fill the hole when the hole lies between its home and where it is now. */
    if (((i - home_of(table, table->entries[i].id)) & mask) >= ((i - hole) & mask)) {
      table->entries[hole] = table->entries[i];
      hole = i;
    }
  }
  table->entries[hole].object = NULL;
  table->count--;
  return object;
}

void *kvp_id_table_take_any(struct kvp_id_table *table) {
  for (uint64_t i = 0; i < table->capacity; i++) {
    if (table->entries[i].object != NULL) {
      return kvp_id_table_remove(table, table->entries[i].id);
    }
  }
  return NULL;
}
