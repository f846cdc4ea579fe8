/* Fences: "every step of this session that any ring of this device had got accepted by now has ended". Loop thread
 * only.
 *
 * The supervisor does not see the steps of workers' rings. Before blocks that these may use are given to anybody else
 * it asks the executor to say when they are over: a fence is a number of the daemon's step_sequence like a step's, and
 * holds kvp_step_retired_of back as a step does. Only the session that freed the blocks can have steps that use them
 * (server/executor/fence.h says why), so whatever others' steps wait for, and for how long, is nothing to it. A device
 * on which the session has no ring needs no fence.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_FENCE_H
#define KVPOOL_SUPERVISOR_STEP_FENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/limits.h"
#include "proto/ring.h"

struct kvp_daemon;
struct kvp_device;

/* In the executor at a time: one of each session with a ring. One more waits and then serves all that was freed
 * meanwhile, so that fences which a long wait holds up take no room from steps. */
enum { kvp_fences_posted_max = kvp_attachments_max };

/* Numbers; 0: there is none. */
struct kvp_owner_fence {
  uint64_t posted;
  uint64_t waiting;
};

struct kvp_step_fences {
  struct kvp_owner_fence of[kvp_sessions_max + 1]; /* by slot */
  uint32_t posted_count;
  uint32_t postable_count; /* that wait, and nothing of their session is posted */
};

/* The number that kvp_step_retired_of this session's slot reaches when everything that is submitted, and what of its
 * own is accepted before the next kvp_step_fence_post, on all devices, has ended. What is to be fenced off changes
 * between the two calls: a step that is accepted later finds it changed. */
uint64_t kvp_step_fence(struct kvp_daemon *daemon, uint16_t owner);
void kvp_step_fence_post(struct kvp_daemon *daemon);

/* By step.c. The least number of the owner's that has not retired; UINT64_MAX: none. */
uint64_t kvp_step_fence_oldest(const struct kvp_step_fences *fences, uint16_t owner);
/* False: the record is not about a fence of this device. */
bool kvp_step_fence_completion(struct kvp_device *device, const struct kvp_ring_record *record);
void kvp_step_fence_post_waiting(struct kvp_device *device);
/* What the executor ran has ended with it. */
void kvp_step_fence_device_lost(struct kvp_device *device);

#endif
