/* A call that runs steps: its device, its queue there, its session. Part of a method's own state of a call.
 *
 * It names its session by slot and id and looks it up each time, since a session may end before a call that acts for
 * it. Loop thread only.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_CALLER_H
#define KVPOOL_SUPERVISOR_STEP_CALLER_H

#include <stdbool.h>
#include <stdint.h>

#include "server/supervisor/daemon.h"
#include "server/supervisor/step.h"

struct kvp_step_caller {
  struct kvp_daemon *daemon;
  struct kvp_rpc_call *call; /* referenced */
  struct kvp_device *device; /* NULL: not known yet */
  uint32_t queue;
  bool is_operator; /* its steps are the daemon's own */
  uint16_t session_slot;
  uint64_t session_id;
};

/* session NULL: an operator's call. */
void kvp_step_caller_init(struct kvp_step_caller *caller, struct kvp_daemon *daemon, struct kvp_rpc_call *call,
                          const struct kvp_session *session);
/* The device, and a queue of its own there. busy: the session or the device has no queue left. */
enum kvp_status kvp_step_caller_place(struct kvp_step_caller *caller, struct kvp_device *device,
                                      struct kvp_error *error);
/* NULL and unknown_session when it has ended. Not for an operator's call. */
struct kvp_session *kvp_step_caller_session(const struct kvp_step_caller *caller, struct kvp_error *error);
/* Takes over `encoded`; sets its queue and owner. As kvp_step_submit; unknown_session besides. */
enum kvp_status kvp_step_caller_submit(const struct kvp_step_caller *caller, struct kvp_wire_step *encoded,
                                       struct kvp_pool *const *pools, uint32_t pool_count,
                                       const struct kvp_step_events *events, void *context, uint64_t tag,
                                       struct kvp_error *error);
/* Steps submitted with this context tell nothing any more. */
void kvp_step_caller_abandon(const struct kvp_step_caller *caller, void *context);
/* When the call is closed, after its steps were abandoned. */
void kvp_step_caller_deinit(struct kvp_step_caller *caller);

/* Releases a buffer of the session, if both are still there. 0: none. */
void kvp_step_caller_release_buffer(const struct kvp_step_caller *caller, uint64_t buffer_id);

#endif
