/* A ring that the serving thread serves: the supervisor's, or a worker's with its timelines.
 *
 * A worker's is hostile: its steps get their owner and queue here, have a quota, and what doesn't fit a lane ends
 * this ring alone. Made and destroyed by the control thread, in between the serving thread's.
 */
#ifndef KVPOOL_EXECUTOR_SERVED_RING_H
#define KVPOOL_EXECUTOR_SERVED_RING_H

#include <stdbool.h>

#include "proto/ring.h"
#include "server/executor/device.h"
#include "server/executor/news.h"
#include "server/executor/outbox.h"
#include "server/executor/ring_timelines.h"

/* How far a ring has got with what was in it at some moment. Who asks numbers the moments, ascending; a ring follows one
 * at a time, and goes on with the latest. */
struct kvp_ring_mark {
  uint64_t number;   /* the moment that is followed */
  uint64_t position; /* behind what was in the ring then */
  uint64_t reached;  /* the latest moment of which all has been taken */
};

struct kvp_served_ring {
  uint64_t attachment_id; /* of a worker's */
  struct kvp_ring *ring;
  int command_event; /* watched, by its edges */
  bool is_supervisors;
  bool is_failed;         /* there was nonsense in it, see ->error */
  bool is_leaving;        /* it is to be removed */
  bool is_draining;       /* its commands are refused */
  bool is_prepared;       /* its sleeping flag is set */
  uint32_t turn_commands; /* at most so many in a row */
  uint32_t place;         /* in the set */
  struct kvp_outbox outbox;
  uint64_t completion_bytes_max; /* of one step */

  /* Steps taken and not yet gone, and how many there may be. */
  struct kvp_step_use use;
  uint32_t accepted_count; /* of them: accepted, and not ended */
  uint32_t steps_max;
  uint64_t step_bytes_max;

  struct kvp_ring_mark mark;

  /* A worker's. */
  uint32_t owner; /* of its steps */
  uint32_t queue;
  uint64_t deadline_ns_max;
  struct kvp_ring_timelines timelines;
  struct kvp_ring mapped; /* `ring` */
  int completion_event;
  struct kvp_error error;
  struct kvp_news failed; /* for the control thread */
};

/* The supervisor's: nothing is allocated, all of it stays the caller's. */
void kvp_served_ring_init(struct kvp_served_ring *ring, struct kvp_ring *lanes, int command_event,
                          int completion_event);

/* A worker's: maps ring and timelines. fds: enum kvp_control_ring_fd, the events among them are taken over when it
 * succeeds, the others stay the caller's. NULL with *error. */
struct kvp_served_ring *kvp_served_ring_new(const struct kvp_control_ring *spec, const int *fds,
                                            struct kvp_device *device, struct kvp_error *error);
/* Serving thread. All that was in the ring at moment `number` has been taken, or isn't there any more. latest: the last
 * moment so far. */
bool kvp_served_ring_has_taken(struct kvp_served_ring *ring, uint64_t number, uint64_t latest);
/* None of its steps is left. */
void kvp_served_ring_destroy(struct kvp_served_ring *ring);

#endif
