/* Accepted steps in the order of their acceptance, and fences: commands that are answered when every step accepted
 * before them, of whatever ring, has ended. Serving thread.
 */
#ifndef KVPOOL_EXECUTOR_FENCE_H
#define KVPOOL_EXECUTOR_FENCE_H

#include "server/executor/step.h"

/* Zeroed: empty. */
struct kvp_fences {
  uint64_t accepted;       /* steps so far */
  struct kvp_step *oldest; /* that was accepted and has not ended */
  struct kvp_step *newest;
  struct kvp_step_list waiting; /* fences, in order */
};

void kvp_fences_step_accepted(struct kvp_fences *fences, struct kvp_step *step);
void kvp_fences_step_ended(struct kvp_fences *fences, struct kvp_step *step);

void kvp_fences_add(struct kvp_fences *fences, struct kvp_step *fence);
/* The next fence whose steps have ended; NULL: none. */
struct kvp_step *kvp_fences_pop(struct kvp_fences *fences);

#endif
