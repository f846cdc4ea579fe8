/* The first message of a supervisor, and what to do when it is gone. Main thread. */
#ifndef KVPOOL_EXECUTOR_HELLO_H
#define KVPOOL_EXECUTOR_HELLO_H

#include <stdbool.h>

#include "proto/control_wire.h"

struct kvp_hello {
  uint32_t request;
  struct kvp_control_hello body;
  int ring;
  int command_event;    /* wakes the executor */
  int completion_event; /* wakes the supervisor */
};

/* Waits for HELLO and checks it. On success the descriptors are the caller's. A HELLO that is refused was answered.
 */
enum kvp_status kvp_hello_receive(int socket, const char *device, struct kvp_hello *out, struct kvp_error *error);
void kvp_hello_close_fds(const struct kvp_hello *hello);

/* The control socket has closed. If nobody holds the supervisor's locks, it died without a successor and its listening
 * sockets are left over: this removes them. may_be_dying: the supervisor has not said that it lives on, and may be about to
 * lose its locks. They are waited for, a second at most. */
void kvp_hello_clean_up(const struct kvp_hello *hello, bool may_be_dying);

#endif
