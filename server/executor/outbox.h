/* Completions on their way out: posted when there is room in the lane, in order a step, kept when there is none.
 *
 * Each ring has its own: who doesn't take his completions blocks nobody else. Serving thread.
 */
#ifndef KVPOOL_EXECUTOR_OUTBOX_H
#define KVPOOL_EXECUTOR_OUTBOX_H

#include <stdbool.h>

#include "proto/ring.h"
#include "server/executor/step.h"

struct kvp_outbox {
  struct kvp_lane_end *lane;
  int wake_fd; /* of who reads the lane: an eventfd, or a socket */
  bool wakes_by_socket;
  bool is_closed; /* nobody reads any more: nothing is posted */
  struct kvp_step_pool *steps;
  struct kvp_step *first; /* steps with something to post that found no room */
  struct kvp_step *last;
};

/* ->accepted or, if not, ->error tells what to post. A refused step is destroyed once posted. */
void kvp_outbox_checked(struct kvp_outbox *outbox, struct kvp_step *step);
/* Posts the reports, or why it failed, or that a fence is passed; then destroys it. */
void kvp_outbox_finished(struct kvp_outbox *outbox, struct kvp_step *step);

/* Posts what was kept, as far as there is room. True when anything was posted. */
bool kvp_outbox_flush(struct kvp_outbox *outbox);
static inline bool kvp_outbox_is_blocked(const struct kvp_outbox *outbox) {
  return outbox->first != NULL;
}
/* Posts nothing any more: what is kept is destroyed, or is when it has finished. */
void kvp_outbox_close(struct kvp_outbox *outbox);
/* Destroys the steps that are kept, those that still run among them. */
void kvp_outbox_drop(struct kvp_outbox *outbox);

#endif
