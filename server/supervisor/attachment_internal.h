/* What the files of an attachment's life share. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_ATTACHMENT_INTERNAL_H
#define KVPOOL_SUPERVISOR_ATTACHMENT_INTERNAL_H

#include "server/supervisor/attachment.h"

/* Descriptors of the budget: a connection, and what comes to it when it is attached - its ring, that in a message to
 * the executor, and those in messages that the worker has not taken. */
enum {
  kvp_greeting_fds = 1,
  kvp_attachment_fds = kvp_attach_ring_fds + kvp_control_ring_fd_count +
                       2 * kvp_attach_queue_max * kvp_attach_fd_count + kvp_attach_chunks_per_message,
};

/* ATTACHING or LOST: makes a ring and hands it to the executor, whose answer goes on. On an error nothing has changed.
 */
enum kvp_status kvp_attachment_make_ring(struct kvp_attachment *attachment, struct kvp_error *error);

#endif
