/* What a worker asks on its socket: maps of pools and buffers, buffers of its own. Loop thread only.
 *
 * One request is under way at a time; the next one stays in the socket until it has been answered, so that a worker
 * can ask for as much as it likes and takes no memory by it. Pools and buffers are named by their ids while an answer
 * is being sent: they may go meanwhile, and the answer then ends in an error.
 */
#ifndef KVPOOL_SUPERVISOR_ATTACH_REQUESTS_H
#define KVPOOL_SUPERVISOR_ATTACH_REQUESTS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/fd_socket.h"

struct kvp_attachment;

enum kvp_attach_request_state {
  KVP_ATTACH_IDLE,
  KVP_ATTACH_SENDING_POOL, /* its chunks */
  KVP_ATTACH_SENDING_BUFFER,
  KVP_ATTACH_MAKING_BUFFER, /* the executor has not answered */
  KVP_ATTACH_RELEASING_BUFFER,
};

struct kvp_attach_request {
  enum kvp_attach_request_state state;
  uint32_t number;
  uint64_t pool_id;
  uint64_t buffer_id;
  uint32_t region; /* of what is sent next */
  uint32_t chunk;
};

/* The attachment has one, and is IDLE. False: it is nonsense, for which the attachment is to end (*error). The fds of
 * the message stay its own but for those taken, fd_count says. */
bool kvp_attach_request_take(struct kvp_attachment *attachment, struct kvp_fd_message *message,
                             struct kvp_error *error);
/* There is room for a message with descriptors. */
void kvp_attach_request_go_on(struct kvp_attachment *attachment);
bool kvp_attach_request_is_sending(const struct kvp_attach_request *request);
/* The buffer it waits for, if it does, is gone. */
void kvp_attach_request_buffer_gone(struct kvp_attachment *attachment, uint64_t buffer_id);

#endif
