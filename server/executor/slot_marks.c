/* The table behind slot marks. */
#include "server/executor/slot_marks.h"

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/executor/hash_multiplier.h"

enum {
  capacity_min = 1 << 10,
  kept_capacity_max = 1 << 16, /* 1.5 MiB; a larger table is for one large step only */
  group_bits = 6,
  group_slots = 1 << group_bits,
};

void kvp_slot_marks_deinit(struct kvp_slot_marks *marks) {
  free(marks->marks);
  *marks = (struct kvp_slot_marks){0};
}

void kvp_slot_marks_begin(struct kvp_slot_marks *marks) {
  marks->count = 0;
  if (marks->capacity > kept_capacity_max) {
    kvp_slot_marks_deinit(marks);
  }
  if (++marks->generation == 0) { /* old entries would seem to be of this generation some day */
    if (marks->marks != NULL) {
      memset(marks->marks, 0, marks->capacity * sizeof *marks->marks);
    }
    marks->generation = 1;
  }
}

/* The key's entry, or the free one where it would be. There is one: the table is never full. */
static struct kvp_slot_mark *mark_of(const struct kvp_slot_marks *marks, uint64_t key) {
  const uint64_t hash = key * marks->multiplier;
  for (uint64_t i = hash >> 32;; i++) {
    struct kvp_slot_mark *mark = &marks->marks[i & (marks->capacity - 1)];
    if (mark->generation != marks->generation || mark->key == key) {
      return mark;
    }
  }
}

static bool marks_grow(struct kvp_slot_marks *marks) {
  struct kvp_slot_marks larger = {.capacity = marks->capacity == 0 ? capacity_min : 2 * marks->capacity,
                                  .count = marks->count,
                                  .multiplier = kvp_hash_multiplier(),
                                  .generation = marks->generation};
  larger.marks = calloc(larger.capacity, sizeof *larger.marks);
  if (larger.marks == NULL) {
    return false;
  }
  for (uint64_t i = 0; i < marks->capacity; i++) {
    if (marks->marks[i].generation == marks->generation) {
      *mark_of(&larger, marks->marks[i].key) = marks->marks[i];
    }
  }
  free(marks->marks);
  *marks = larger;
  return true;
}

/* NULL: no memory. */
static struct kvp_slot_mark *mark_take(struct kvp_slot_marks *marks, uint64_t key) {
  if (2 * (marks->count + 1) > marks->capacity && !marks_grow(marks)) {
    return NULL;
  }
  struct kvp_slot_mark *mark = mark_of(marks, key);
  if (mark->generation != marks->generation) {
    *mark = (struct kvp_slot_mark){.generation = marks->generation, .key = key};
    marks->count++;
  }
  return mark;
}

static uint64_t key_of(uint32_t layer, uint64_t slot) {
  return (uint64_t)layer << 32 | slot >> group_bits;
}

bool kvp_slot_marks_add(struct kvp_slot_marks *marks, uint32_t layer, const int32_t *slots, uint64_t count) {
  assert(layer < kvp_slot_marks_layers_max && marks->generation != 0);
  struct kvp_slot_mark *mark = NULL;
  for (uint64_t i = 0; i < count; i++) {
    if (slots[i] < 0) {
      continue;
    }
    const uint64_t key = key_of(layer, (uint64_t)slots[i]);
    if (mark == NULL || mark->key != key) {
      mark = mark_take(marks, key);
      if (mark == NULL) {
        return false;
      }
    }
    mark->members |= UINT64_C(1) << (slots[i] & (group_slots - 1));
  }
  return true;
}

int64_t kvp_slot_marks_find(const struct kvp_slot_marks *marks, uint32_t layer, int64_t begin, int64_t end) {
  assert(begin >= 0);
  if (marks->capacity == 0) {
    return -1;
  }
  while (begin < end) {
    const int64_t group_begin = begin & ~(int64_t)(group_slots - 1);
    const struct kvp_slot_mark *mark = mark_of(marks, key_of(layer, (uint64_t)begin));
    uint64_t members = mark->generation == marks->generation ? mark->members : 0;
    members &= UINT64_MAX << (begin - group_begin);
    if (end - group_begin < group_slots) {
      members &= (UINT64_C(1) << (end - group_begin)) - 1;
    }
    if (members != 0) {
      return group_begin + __builtin_ctzll(members);
    }
    begin = group_begin + group_slots;
  }
  return -1;
}
