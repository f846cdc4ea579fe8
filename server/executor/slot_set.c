/* The table behind a slot set. */
#include "server/executor/slot_set.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/executor/hash_multiplier.h"

enum {
  capacity_min = 1 << 12,
  kept_capacity_max = 1 << 18, /* 4 MiB; a larger table is for one large step only */
};

void kvp_slot_set_deinit(struct kvp_slot_set *set) {
  free(set->groups);
  *set = (struct kvp_slot_set){0};
}

bool kvp_slot_set_begin(struct kvp_slot_set *set, uint64_t slot_count) {
  uint64_t needed = capacity_min;
  while (needed < slot_count * 2) {
    needed *= 2;
  }
  set->current = NULL;
  if (set->capacity < needed || (set->capacity > kept_capacity_max && needed <= kept_capacity_max)) {
    kvp_slot_set_deinit(set);
    set->groups = calloc(needed, sizeof *set->groups);
    if (set->groups == NULL) {
      return false;
    }
    set->capacity = needed;
    set->multiplier = kvp_hash_multiplier();
  }
  if (++set->generation == 0) { /* old entries would seem to be of this generation some day */
    memset(set->groups, 0, set->capacity * sizeof *set->groups);
    set->generation = 1;
  }
  return true;
}

static uint64_t group_hash(const struct kvp_slot_set *set, uint32_t group) {
  return group * set->multiplier >> 32;
}

struct kvp_slot_group *kvp_slot_set_group(struct kvp_slot_set *set, uint32_t group) {
  for (uint64_t i = group_hash(set, group);; i++) {
    struct kvp_slot_group *entry = &set->groups[i & (set->capacity - 1)];
    if (entry->generation != set->generation) {
      *entry = (struct kvp_slot_group){.generation = set->generation, .group = group};
      return entry;
    }
    if (entry->group == group) {
      return entry;
    }
  }
}

bool kvp_slot_set_has(const struct kvp_slot_set *set, int32_t slot) {
  const uint32_t group = (uint32_t)slot >> 6;
  for (uint64_t i = group_hash(set, group);; i++) {
    const struct kvp_slot_group *entry = &set->groups[i & (set->capacity - 1)];
    if (entry->generation != set->generation) {
      return false;
    }
    if (entry->group == group) {
      return (entry->members >> (slot & 63) & 1) != 0;
    }
  }
}
