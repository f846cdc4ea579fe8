/* A LoadRows call: one load into a zeroed buffer of its own, which is then streamed. Loop thread only; the context is
 * the daemon. */
#ifndef KVPOOL_SUPERVISOR_LOAD_ROWS_H
#define KVPOOL_SUPERVISOR_LOAD_ROWS_H

#include "server/supervisor/rpc.h"

void kvp_load_rows_on_message(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message);
void kvp_load_rows_on_writable(void *context, struct kvp_rpc_call *call);
void kvp_load_rows_on_closed(void *context, struct kvp_rpc_call *call);

#endif
