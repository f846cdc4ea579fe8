/* What the files of an attachment's life share. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_ATTACHMENT_INTERNAL_H
#define KVPOOL_SUPERVISOR_ATTACHMENT_INTERNAL_H

#include "server/supervisor/attachment.h"

/* Descriptors of the budget: a connection, and what comes to it when it is attached - its ring, beside the one before,
 * that in a message to the executor, and those in messages that wait for the worker. Of these every other one brings a
 * ring, for between two rings stands that a device was lost, and one brings chunks, which are sent when nothing waits.
 * What is in the socket is no descriptor of this process. */
enum {
  kvp_greeting_fds = 1,
  kvp_attachment_fds = kvp_attach_ring_fds + 1 + kvp_control_ring_fd_count +
                       (kvp_attach_queue_max + 1) / 2 * kvp_attach_fd_count + kvp_attach_chunks_per_message,
};

/* By attachment_ring.c. ATTACHING or LOST: makes a ring, later, and hands it to the executor, whose answer goes on; what
 * goes wrong ends the attachment. */
void kvp_attachment_make_ring(struct kvp_attachment *attachment);
/* By attachment_ring.c. An ENDING one's, that nobody knows any more: settles again when it is gone. */
void kvp_attachment_unmake_ring(struct kvp_attachment *attachment);
/* By attachment.c: the executor hasn't got it any more. */
void kvp_attachment_forget_ring(struct kvp_attachment *attachment);

#endif
