/* The gRPC methods, a table per file; methods.c joins them. Each handler runs on the loop thread, its context is the
 * struct kvp_daemon. */
#ifndef KVPOOL_SUPERVISOR_METHODS_H
#define KVPOOL_SUPERVISOR_METHODS_H

#include <stddef.h>

#include "kvpool.pb-c.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/rpc.h"

struct kvp_method_table {
  const struct kvp_rpc_method *methods;
  size_t count;
};

extern const struct kvp_method_table kvp_methods_info;    /* GetServerInfo */
extern const struct kvp_method_table kvp_methods_pool;    /* CreatePool ... DeletePool */
extern const struct kvp_method_table kvp_methods_session; /* OpenSession, CloseSession, ListSessions */
extern const struct kvp_method_table kvp_methods_block;   /* AllocateBlocks ... FreeBlocks, ListBlocks */
extern const struct kvp_method_table kvp_methods_buffer;  /* CreateBuffer ... ReleaseBuffer */
extern const struct kvp_method_table kvp_methods_step;    /* Steps, RunStep */
extern const struct kvp_method_table kvp_methods_rows;    /* StoreRows, LoadRows */
extern const struct kvp_method_table kvp_methods_inspect; /* InspectRecords, DumpBlocks */

/* All tables as one. */
const struct kvp_rpc_method *kvp_methods_all(size_t *count);

/* The session a request names. NULL: *error says why; a missing SessionRef is unknown_session. */
struct kvp_session *kvp_method_session(struct kvp_daemon *daemon, const Kvpool__V1__SessionRef *reference,
                                       struct kvp_error *error);
/* A name from a client into a fixed field: too long, empty (unless allowed) or with characters other than
 * [A-Za-z0-9._:-] is refused, naming `what`. */
enum kvp_status kvp_method_name(const char *value, const char *what, bool empty_allowed, char *out, size_t out_bytes,
                                struct kvp_error *error);

#endif
