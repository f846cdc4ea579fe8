/* One worker's socket on the attach listener: messages of proto/fd_socket.h, one at a time, without ever blocking.
 *
 * Its send buffer is the smallest there is, so that it is `writable` only when the worker has read nearly all that was
 * sent: descriptors on their way to a worker are few, whatever it does. What does not fit waits in a short queue; a
 * worker that lets it overflow is hung up on. Loop thread only; events never come from inside a call of this API.
 */
#ifndef KVPOOL_SUPERVISOR_ATTACH_CHANNEL_H
#define KVPOOL_SUPERVISOR_ATTACH_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "server/supervisor/control_queue.h"
#include "server/supervisor/fd_reaper.h"

enum {
  kvp_attach_queue_max = 6,           /* messages that wait for the worker */
  kvp_attach_chunks_per_message = 16, /* descriptors of a MEMORY_CHUNKS message to a worker */
};

struct kvp_attach_channel_events {
  /* The fds of the message stay its own but for those taken, fd_count says. Nothing is known of them, and all that
   * may be done to one that is not known to be memory is to ask for its seals (proto/fd_socket.h). */
  void (*message)(void *context, struct kvp_fd_message *message);
  /* Asked for with kvp_attach_channel_want: nothing waits, a message with descriptors may be sent now. */
  void (*writable)(void *context);
  /* The worker is gone (cancelled), sent what is no message (malformed), or sends descriptors when too many wait to be
   * closed (busy). The callee closes the channel; a worker that is not gone can still be told why. */
  void (*hung_up)(void *context, const struct kvp_error *error);
};

struct kvp_attach_channel {
  uv_poll_t poll;
  const struct kvp_attach_channel_events *events;
  void *context;
  struct kvp_fd_reaper *reaper;
  struct kvp_fd_message *incoming; /* shared by all channels */
  int socket;
  uid_t uid;
  struct kvp_control_queue outgoing;
  bool wants_message;
  bool wants_writable;
  bool over; /* closed */
  void (*closed)(void *context);
};

struct kvp_attach_channel_options {
  uv_loop_t *loop;
  int socket; /* non-blocking */
  uid_t uid;  /* of the worker */
  struct kvp_fd_reaper *reaper;
  struct kvp_fd_message *incoming;
  const struct kvp_attach_channel_events *events;
  void *context;
};

/* Takes over the socket, and its place at the reaper, when it succeeds. Pointers of the options are kept. */
enum kvp_status kvp_attach_channel_init(struct kvp_attach_channel *channel,
                                        const struct kvp_attach_channel_options *options, struct kvp_error *error);
/* Never fails: a worker that takes nothing hangs up. fds stay the caller's. */
void kvp_attach_channel_send(struct kvp_attach_channel *channel, uint32_t kind, uint32_t request, const void *body,
                             uint32_t body_bytes, const int *fds, uint32_t fd_count);
/* What is to be told from now on; nothing at first. Messages are held back while answers wait to be sent. */
void kvp_attach_channel_want(struct kvp_attach_channel *channel, bool message, bool writable);
/* What has been sent can still be read by the worker, what waits is dropped. closed is called later, once; the channel
 * may go then. */
void kvp_attach_channel_close(struct kvp_attach_channel *channel, void (*closed)(void *context));

#endif
