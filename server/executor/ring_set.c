/* The circle of served rings, and those beside it. */
#include "server/executor/ring_set.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

/* Edges: what is written to the event is never read, so that nobody can make a read of ours wait. */
static enum kvp_status event_watch(const struct kvp_ring_set *set, struct kvp_served_ring *ring,
                                   struct kvp_error *error) {
  struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = ring};
  if (epoll_ctl(set->epoll, EPOLL_CTL_ADD, ring->command_event, &event) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "a ring's command event can't be watched: %s", strerror(errno));
  }
  return KVP_OK;
}

enum kvp_status kvp_ring_set_add(struct kvp_ring_set *set, struct kvp_served_ring *ring, struct kvp_error *error) {
  if (!ring->is_supervisors && kvp_ring_set_find(set, ring->attachment_id) != NULL) {
    return kvp_error_set(error, KVP_ALREADY_EXISTS, "attachment %llu has a ring already",
                         (unsigned long long)ring->attachment_id);
  }
  if (set->served_count + set->other_count >= kvp_rings_max) {
    return kvp_error_set(error, KVP_BUSY, "%d workers' rings are served already", kvp_attachments_max);
  }
  enum kvp_status status = event_watch(set, ring, error);
  if (status == KVP_OK) {
    ring->place = set->served_count;
    set->looks[ring->place].produced = kvp_lane_produced(&ring->ring->commands);
    set->served[set->served_count++] = ring;
    kvp_ring_set_turned(set, ring);
  }
  return status;
}

static struct kvp_served_ring *find_in(struct kvp_served_ring *const *rings, uint32_t count, uint64_t id) {
  for (uint32_t i = 0; i < count; i++) {
    if (!rings[i]->is_supervisors && rings[i]->attachment_id == id) {
      return rings[i];
    }
  }
  return NULL;
}

struct kvp_served_ring *kvp_ring_set_find(const struct kvp_ring_set *set, uint64_t attachment_id) {
  struct kvp_served_ring *ring = find_in(set->served, set->served_count, attachment_id);
  return ring != NULL ? ring : find_in(set->others, set->other_count, attachment_id);
}

static void take_out(struct kvp_served_ring **rings, uint32_t *count, const struct kvp_served_ring *ring) {
  struct kvp_served_ring *last = rings[--*count];
  assert(rings[ring->place] == ring);
  rings[ring->place] = last;
  last->place = ring->place;
}

void kvp_ring_set_suspend(struct kvp_ring_set *set, struct kvp_served_ring *ring) {
  (void)epoll_ctl(set->epoll, EPOLL_CTL_DEL, ring->command_event, NULL);
  set->looks[ring->place] = set->looks[set->served_count - 1];
  take_out(set->served, &set->served_count, ring);
  ring->place = set->other_count;
  set->others[set->other_count++] = ring;
}

void kvp_ring_set_remove(struct kvp_ring_set *set, struct kvp_served_ring *ring) {
  take_out(set->others, &set->other_count, ring);
}

struct kvp_served_ring *kvp_ring_set_take_any(struct kvp_ring_set *set) {
  for (uint32_t i = 0; i < set->served_count; i++) {
    if (!set->served[i]->is_supervisors) {
      kvp_ring_set_suspend(set, set->served[i]);
      break;
    }
  }
  struct kvp_served_ring *ring = set->other_count > 0 ? set->others[0] : NULL;
  if (ring != NULL) {
    kvp_ring_set_remove(set, ring);
  }
  return ring;
}
