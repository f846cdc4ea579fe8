/* Queues of one device: the numbers that steps carry, and when a number may be given back.
 *
 * A queue is closed in two halves: its caller says so, and its last step retires; only then is the executor told, as
 * soon as the lane has room. Loop thread only.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_QUEUE_H
#define KVPOOL_SUPERVISOR_STEP_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

struct kvp_device;

/* A queue number of this device, for a stream or for one call; never 0. 0 and busy: too many are open. Sessions
 * together leave kvp_queues_for_operators to operators' calls. */
uint32_t kvp_step_queue_open(struct kvp_device *device, bool for_operator, struct kvp_error *error);
/* Its steps may still be running. 0 is allowed. */
void kvp_step_queue_close(struct kvp_device *device, uint32_t queue);

/* By step.c: a step of this open queue was submitted, or retired. */
void kvp_step_queue_hold(struct kvp_device *device, uint32_t queue);
void kvp_step_queue_drop(struct kvp_device *device, uint32_t queue);
/* Tells the executor of queues that are over, as far as the lane has room. */
void kvp_step_queue_post_closed(struct kvp_device *device);
/* A successor knows no queues: nothing to tell it. */
void kvp_step_queue_device_lost(struct kvp_device *device);

#endif
