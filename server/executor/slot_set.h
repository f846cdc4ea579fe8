/* A set of non-negative int32 that is filled once and forgotten: has this slot been named before?
 *
 * Slots come in runs, so the set maps groups of 64 neighbours to bit masks and keeps the current group at hand.
 * Beginning anew clears nothing. One thread.
 */
#ifndef KVPOOL_EXECUTOR_SLOT_SET_H
#define KVPOOL_EXECUTOR_SLOT_SET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvp_slot_group {
  uint32_t generation; /* another one: the entry is free */
  uint32_t group;      /* slot / 64 */
  uint64_t members;
};

/* Zeroed: ready to use. */
struct kvp_slot_set {
  struct kvp_slot_group *groups;
  uint64_t capacity; /* a power of two, or 0 */
  uint64_t multiplier;
  uint32_t generation;
  struct kvp_slot_group *current;
};

void kvp_slot_set_deinit(struct kvp_slot_set *set);

/* Empties the set and makes room for slot_count slots. False when the host has no memory. */
bool kvp_slot_set_begin(struct kvp_slot_set *set, uint64_t slot_count);

/* The group's entry, new or found. Not for callers of kvp_slot_set_add. */
struct kvp_slot_group *kvp_slot_set_group(struct kvp_slot_set *set, uint32_t group);

/* False: the slot is in the set already. No more than slot_count calls after begin. */
static inline bool kvp_slot_set_add(struct kvp_slot_set *set, int32_t slot) {
  uint32_t group = (uint32_t)slot >> 6;
  uint64_t member = UINT64_C(1) << (slot & 63);
  if (set->current == NULL || set->current->group != group) {
    set->current = kvp_slot_set_group(set, group);
  }
  bool is_new = (set->current->members & member) == 0;
  set->current->members |= member;
  return is_new;
}

/* Is the slot in the set? */
bool kvp_slot_set_has(const struct kvp_slot_set *set, int32_t slot);

#endif
