/* Fences: "every step that any ring of this device had got accepted by now has ended". Loop thread only.
 *
 * The supervisor does not see the steps of workers' rings. Before blocks that these may use are given to anybody else
 * it asks the executor to say when they are over: a fence is a number of the daemon's step_sequence like a step's, and
 * holds kvp_step_retired_fence back as a step does. A device without workers' rings needs none.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_FENCE_H
#define KVPOOL_SUPERVISOR_STEP_FENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/ring.h"

struct kvp_daemon;
struct kvp_device;

/* In the executor at a time. One more waits and then serves everybody who has asked meanwhile, so that fences which a
 * long wait holds up take no room from steps. */
enum { kvp_fences_posted_max = 64 };

struct kvp_step_fences {
  uint64_t posted[kvp_fences_posted_max]; /* their numbers, ascending */
  uint32_t posted_count;
  uint64_t waiting; /* the number of the one that is not posted yet; 0: there is none */
};

/* The number that kvp_step_retired_fence reaches when everything that is submitted and accepted before the next
 * kvp_step_fence_post, on all devices, has ended. What is to be fenced off changes between the two calls: a step that
 * is accepted later finds it changed. */
uint64_t kvp_step_fence(struct kvp_daemon *daemon);
void kvp_step_fence_post(struct kvp_daemon *daemon);

/* By step.c. The least number that has not retired; UINT64_MAX: none. */
uint64_t kvp_step_fence_oldest(const struct kvp_step_fences *fences);
/* False: the record is not about a fence of this device. */
bool kvp_step_fence_completion(struct kvp_device *device, const struct kvp_ring_record *record);
void kvp_step_fence_post_waiting(struct kvp_device *device);
/* What the executor ran has ended with it. */
void kvp_step_fence_device_lost(struct kvp_device *device);

#endif
