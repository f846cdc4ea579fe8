/* The control thread: the supervisor's messages about memories, pools, buffers and workers' rings.
 *
 * Making and mapping memory takes long, so that it happens here; what is ready is handed to the serving thread. What
 * goes while steps still use it comes back later, and is answered then. The table of memories is this thread's own.
 */
#ifndef KVPOOL_EXECUTOR_CONTROL_H
#define KVPOOL_EXECUTOR_CONTROL_H

#include "server/executor/device.h"
#include "server/executor/server.h"

struct kvp_control;

/* Starts the thread. The socket is read by it alone, but stays the caller's. NULL with *error. When the socket is
 * closed or nonsense arrives, the thread stops the server and ends. */
struct kvp_control *kvp_control_start(int socket, struct kvp_device *device, struct kvp_server *server,
                                      struct kvp_error *error);

enum kvp_control_end {
  KVP_CONTROL_END_NONSENSE, /* from the supervisor */
  KVP_CONTROL_END_CLOSED,   /* the socket, without a word: the supervisor may be dead */
  KVP_CONTROL_END_TOLD,
};

/* The server has stopped. Ends the thread, then frees the server's objects and all memories. */
enum kvp_control_end kvp_control_destroy(struct kvp_control *control);

/* Sends the outcome of a request; those numbered 0 want none. */
void kvp_control_result_send(int socket, uint32_t request, const struct kvp_error *error);

#endif
