/* What a refused step leaves: the words that it would have signalled are poisoned, as a failed step's are, so that nobody
 * waits for them in vain, or takes a later step's signal for its own. It stands in the step's place in its queue, as what
 * was accepted before may signal the same words. Serving thread.
 */
#ifndef KVPOOL_EXECUTOR_REFUSAL_H
#define KVPOOL_EXECUTOR_REFUSAL_H

#include "server/executor/step.h"

/* *out: a step that fails when its turn comes, of the same ring; NULL: the refused one signals no word of its ring's
 * timelines. Refused: no memory. */
enum kvp_status kvp_refusal_new(struct kvp_step_pool *steps, const struct kvp_step *refused, struct kvp_step **out);

#endif
