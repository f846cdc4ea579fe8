/* Slots of many layers that were named so far: a set that grows, and is asked for ranges.
 *
 * Groups of 64 neighbours of a layer are one bit mask. Beginning anew clears nothing. One thread.
 */
#ifndef KVPOOL_EXECUTOR_SLOT_MARKS_H
#define KVPOOL_EXECUTOR_SLOT_MARKS_H

#include <stdbool.h>
#include <stdint.h>

enum { kvp_slot_marks_layers_max = 1 << 16 };

struct kvp_slot_mark {
  uint32_t generation; /* another one: the entry is free */
  uint64_t key;        /* layer << 32 | slot / 64 */
  uint64_t members;
};

/* Zeroed: empty. */
struct kvp_slot_marks {
  struct kvp_slot_mark *marks;
  uint64_t capacity; /* a power of two, or 0 */
  uint64_t count;
  uint64_t multiplier;
  uint32_t generation;
};

void kvp_slot_marks_deinit(struct kvp_slot_marks *marks);
void kvp_slot_marks_begin(struct kvp_slot_marks *marks);

/* Slots of -1 are none. False when the host has no memory. */
bool kvp_slot_marks_add(struct kvp_slot_marks *marks, uint32_t layer, const int32_t *slots, uint64_t count);
/* The first slot of [begin, end) that is in the set; -1: none is. */
int64_t kvp_slot_marks_find(const struct kvp_slot_marks *marks, uint32_t layer, int64_t begin, int64_t end);

#endif
