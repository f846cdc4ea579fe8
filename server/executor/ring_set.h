/* The rings of the serving thread and whose turn it is.
 *
 * Rings that are served take turns, in a circle. Those that have failed, or are to go, are not served any more, and
 * stay until the last of their steps is gone. Serving thread.
 */
#ifndef KVPOOL_EXECUTOR_RING_SET_H
#define KVPOOL_EXECUTOR_RING_SET_H

#include "server/executor/served_ring.h"

enum { kvp_rings_max = 1 + kvp_attachments_max };

/* What is looked at of a ring to see that there is nothing to do: few bytes of ours and one word of its lane. */
struct kvp_ring_look {
  const _Atomic uint64_t *produced;
  uint64_t idle; /* the word is this: nothing to do */
};

struct kvp_ring_set {
  int epoll; /* where command events of served rings are watched; the event's pointer is the ring's */
  struct kvp_ring_look looks[kvp_rings_max]; /* of those served */
  struct kvp_served_ring *served[kvp_rings_max];
  uint32_t served_count;
  uint32_t turn;
  struct kvp_served_ring *others[kvp_rings_max];
  uint32_t other_count;
};

/* Refused: an id that is there, too many, an event that can't be watched. */
enum kvp_status kvp_ring_set_add(struct kvp_ring_set *set, struct kvp_served_ring *ring, struct kvp_error *error);
/* NULL: no such worker's ring. */
struct kvp_served_ring *kvp_ring_set_find(const struct kvp_ring_set *set, uint64_t attachment_id);
/* It has no turns any more. */
void kvp_ring_set_suspend(struct kvp_ring_set *set, struct kvp_served_ring *ring);
/* One that is suspended: it is the caller's. */
void kvp_ring_set_remove(struct kvp_ring_set *set, struct kvp_served_ring *ring);
/* Any worker's ring, served or not; NULL: none is left. */
struct kvp_served_ring *kvp_ring_set_take_any(struct kvp_ring_set *set);

/* The next ring that has something to do, or may have; NULL: none has. The call after that goes on behind it. */
static inline struct kvp_served_ring *kvp_ring_set_next(struct kvp_ring_set *set) {
  uint32_t i = set->turn;
  for (uint32_t looked = 0; looked < set->served_count; looked++, i++) {
    i = i < set->served_count ? i : 0;
    if (atomic_load_explicit(set->looks[i].produced, memory_order_relaxed) != set->looks[i].idle) {
      set->turn = i + 1;
      return set->served[i];
    }
  }
  return NULL;
}

/* After its turn, or when its outbox is blocked: it has something to do when a command comes, or in any case. */
static inline void kvp_ring_set_turned(struct kvp_ring_set *set, const struct kvp_served_ring *ring) {
  const uint64_t position = ring->ring->commands.position;
  set->looks[ring->place].idle = kvp_outbox_is_blocked(&ring->outbox) ? position - 1 : position;
}

#endif
