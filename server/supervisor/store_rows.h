/* A StoreRows call: rows gathered in a buffer of its own, then one store. Loop thread only; the context is the
 * daemon. */
#ifndef KVPOOL_SUPERVISOR_STORE_ROWS_H
#define KVPOOL_SUPERVISOR_STORE_ROWS_H

#include "server/supervisor/rpc.h"

void kvp_store_rows_on_message(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message);
void kvp_store_rows_on_closed(void *context, struct kvp_rpc_call *call);

#endif
