/* The rings of the serving thread and whose turn it is.
 *
 * Rings that are served take turns, in a circle. Those that have failed, or are to go, are not served any more, and
 * stay until the last of their steps is gone. Serving thread.
 */
#ifndef KVPOOL_EXECUTOR_RING_SET_H
#define KVPOOL_EXECUTOR_RING_SET_H

#include "server/executor/served_ring.h"

enum { kvp_rings_max = 1 + kvp_attachments_max };

struct kvp_ring_set {
  int epoll; /* where command events of served rings are watched; the event's pointer is the ring's */
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

/* Whose turn it is; the next call gives the next one. There is one. */
static inline struct kvp_served_ring *kvp_ring_set_next(struct kvp_ring_set *set) {
  struct kvp_served_ring *ring = set->served[set->turn < set->served_count ? set->turn : 0];
  set->turn = ring->place + 1;
  return ring;
}

#endif
