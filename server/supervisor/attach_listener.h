/* The socket that workers on this host attach to: accepts, reads who is there, begins attachments. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_ATTACH_LISTENER_H
#define KVPOOL_SUPERVISOR_ATTACH_LISTENER_H

#include <stdbool.h>
#include <uv.h>

#include "proto/fd_socket.h"
#include "server/supervisor/fd_reaper.h"
#include "server/supervisor/unix_socket.h"

struct kvp_daemon;

struct kvp_attach_listener {
  struct kvp_daemon *daemon;
  struct kvp_unix_socket endpoint;
  uv_poll_t acceptable;
  uv_timer_t tick;                /* runs while connections have not said who they are, or accepting rests */
  bool resting;                   /* no descriptors left, or too many wait to be closed */
  bool open;                      /* accepting, or resting */
  struct kvp_fd_message incoming; /* of the worker that is being read */
  struct kvp_fd_reaper *reaper;   /* of what workers send; each connection has a place there */
};

enum kvp_status kvp_attach_listener_init(struct kvp_attach_listener *listener, struct kvp_daemon *daemon,
                                         struct kvp_error *error);
/* Accepts no more; attachments stay, connections without one go. Idempotent. */
void kvp_attach_listener_drain(struct kvp_attach_listener *listener);
/* After drain, once: unlinks the path, releases the lock. Its handles close on the loop. */
void kvp_attach_listener_close(struct kvp_attach_listener *listener);

#endif
