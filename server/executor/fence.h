/* Accepted steps in the order of their acceptance, and fences: commands that are answered when every step of one owner
 * accepted before them, of whatever ring, has ended. Serving thread.
 *
 * Why an owner's steps are all that its blocks have to wait for, long as others may take: the intake lets a step name
 * blocks of its own owner only, looks at the owner table as of the step's acceptance, and a ring's steps have the
 * ring's owner whatever they say; arrays that only the kernels see are checked by them against the same owner. So what
 * touches a block that its owner has freed is a step of that owner, accepted before the free - which is in the owner
 * table before the fence is posted, so that a step accepted behind the fence finds it there. A step that waits for its
 * worker was checked when it was accepted and is not checked again: it is waited for like one that runs. Steps of the
 * daemon itself, owner 0, may name any block: they come from the supervisor, which waits for them on its own.
 */
#ifndef KVPOOL_EXECUTOR_FENCE_H
#define KVPOOL_EXECUTOR_FENCE_H

#include "proto/limits.h"
#include "server/executor/step.h"

/* Slots of sessions, and one more: of numbers beyond them, which only a supervisor with other ideas uses, together. */
enum { kvp_fence_owners = kvp_sessions_max + 2 };

struct kvp_owner_steps {
  struct kvp_step *oldest; /* that was accepted and has not ended */
  struct kvp_step *newest;
};

/* Zeroed: empty. */
struct kvp_fences {
  uint64_t accepted; /* steps so far */
  struct kvp_owner_steps owners[kvp_fence_owners];
  struct kvp_step_list waiting; /* fences, in order */
};

void kvp_fences_step_accepted(struct kvp_fences *fences, struct kvp_step *step);
void kvp_fences_step_ended(struct kvp_fences *fences, struct kvp_step *step);

/* fence->owner is set. */
void kvp_fences_add(struct kvp_fences *fences, struct kvp_step *fence);
/* A fence whose steps have ended; NULL: none. */
struct kvp_step *kvp_fences_pop(struct kvp_fences *fences);

#endif
