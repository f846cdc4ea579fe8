/* What one attachment and its executor share: a ring, its wake-ups, timelines, and a page that says what became of it.
 *
 * Made anew for every executor. The supervisor makes all of it, hands it to both sides and keeps two maps: of the
 * timelines, to poison what nobody will count up any more, and of the status, which nobody else can write. Nothing
 * in the ring or the timelines is believed. One thread at a time: making and unmaking takes long.
 */
#ifndef KVPOOL_SUPERVISOR_ATTACH_RING_H
#define KVPOOL_SUPERVISOR_ATTACH_RING_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/attach_wire.h"
#include "proto/timeline_wire.h"

/* Zeroed: there is none. */
struct kvp_attach_ring {
  bool there;
  int ring;                 /* -1: closed, like the others */
  int command_event;        /* eventfd */
  int executor_completions; /* the two ends of one pair */
  int worker_completions;
  int timelines;
  int status;
  struct kvp_timeline_word *words;       /* [kvp_timeline_words] */
  struct kvp_attach_status *status_page; /* ours to write */
};

/* Descriptors that one takes at most. */
enum { kvp_attach_ring_fds = 6 };

/* What one takes of the host's memory, in whole pages. */
uint64_t kvp_attach_ring_bytes(void);
/* status SERVING of this generation. Nothing is left on an error. */
enum kvp_status kvp_attach_ring_init(struct kvp_attach_ring *ring, uint64_t generation, struct kvp_error *error);
/* Idempotent, like the next one. */
void kvp_attach_ring_deinit(struct kvp_attach_ring *ring);
/* Both sides have theirs: closes what is not needed any more. */
void kvp_attach_ring_shared(struct kvp_attach_ring *ring);

/* Indexed by enum kvp_control_ring_fd, and enum kvp_attach_fd. Before kvp_attach_ring_shared. */
void kvp_attach_ring_executor_fds(const struct kvp_attach_ring *ring, int out[kvp_control_ring_fd_count]);
void kvp_attach_ring_worker_fds(const struct kvp_attach_ring *ring, int out[kvp_attach_fd_count]);

/* Tells those who look at the status: LOST or ENDED, and why. */
void kvp_attach_ring_tell(struct kvp_attach_ring *ring, enum kvp_attach_state state, const struct kvp_error *reason);
/* Every word of the executor's, so that nobody waits for what will not come. The executor writes none any more. */
void kvp_attach_ring_poison(struct kvp_attach_ring *ring);
/* Commands that the executor has taken from it, for display: the worker could have written anything. */
uint64_t kvp_attach_ring_commands(const struct kvp_attach_ring *ring);

#endif
