/* Steps that are replays, seen from the executor's side of the device. Serving thread. */
#ifndef KVPOOL_EXECUTOR_REPLAY_H
#define KVPOOL_EXECUTOR_REPLAY_H

#include "server/executor/step.h"

/* The device has ended it. If not as it should, the step has failed, and ->error says why. */
void kvp_replay_look(struct kvp_step *step);

#endif
