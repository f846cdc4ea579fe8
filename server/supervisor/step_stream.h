/* A Steps call: one queue of one session, as long as the stream is open. Loop thread only.
 *
 * Steps are read ahead: the next message is asked for when the one before has been submitted, unless the client does
 * not take its events. A refused step is told and ends nothing; an error of the session ends the call.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_STREAM_H
#define KVPOOL_SUPERVISOR_STEP_STREAM_H

#include "server/supervisor/daemon.h"
#include "server/supervisor/rpc.h"

/* The method's handlers; the context is the daemon. */
void kvp_step_stream_on_message(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message);
void kvp_step_stream_on_writable(void *context, struct kvp_rpc_call *call);
void kvp_step_stream_on_closed(void *context, struct kvp_rpc_call *call);

/* A session closes: ends its streams. Their steps in the ring go on unheard; those that wait are dropped. The caller
 * settles the session. reason NULL or OK: it was the client's wish. */
void kvp_step_stream_end_all(struct kvp_daemon *daemon, struct kvp_session *session, const struct kvp_error *reason);

#endif
