/* Outgoing messages of a control socket that never blocks: what does not fit now waits here, fds included.
 *
 * Messages leave in the order they were put in. Loop thread only. The queue to an executor is as long as the objects
 * whose life the messages tell of, which are limited elsewhere; a worker's is kept short by `count`.
 */
#ifndef KVPOOL_SUPERVISOR_CONTROL_QUEUE_H
#define KVPOOL_SUPERVISOR_CONTROL_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/fd_socket.h"

struct kvp_control_queue {
  int socket; /* non-blocking; not owned */
  struct kvp_queued_control *first;
  struct kvp_queued_control *last;
  uint32_t count;
};

void kvp_control_queue_init(struct kvp_control_queue *queue, int socket);
/* Closes the fds of what was never sent. */
void kvp_control_queue_deinit(struct kvp_control_queue *queue);

/* Sends now or keeps a copy, with duplicates of the fds. cancelled: the peer is gone; internal: fds can't be
 * duplicated or sent. In both cases the message was dropped. */
enum kvp_status kvp_control_queue_put(struct kvp_control_queue *queue, uint32_t kind, uint32_t request,
                                      const void *body, uint32_t body_bytes, const int *fds, uint32_t fd_count);
/* Sends what the socket takes. The same statuses; OK also when something is left. */
enum kvp_status kvp_control_queue_flush(struct kvp_control_queue *queue);
bool kvp_control_queue_is_empty(const struct kvp_control_queue *queue);

#endif
