/* Requests that make buffers, and whose answers come too late: the daemon has made a buffer that nobody has a handle of.
 * The attachment's thread takes such an answer whenever it looks at the socket, and gives the buffer back. */
#include <string.h>

#include "client/attach.h"

struct kvp_abandoned_request *kvp_abandoned_find(kvpool_attachment *attachment, uint32_t request) {
  for (size_t i = 0; i < kvp_abandoned_requests_max; i++) {
    if (attachment->abandoned[i].request == request) {
      return &attachment->abandoned[i];
    }
  }
  return NULL;
}

void kvp_attach_buffer_id(const struct kvp_fd_message *message, uint64_t *out) {
  struct kvp_attach_buffer body;
  if (message->kind == KVP_ATTACH_BUFFER && message->body_bytes == sizeof body) {
    memcpy(&body, message->body, sizeof body);
    *out = body.buffer_id;
  }
}

/* Nobody waits for its answer either. */
static void abandoned_release(kvpool_attachment *attachment, struct kvp_abandoned_request *abandoned) {
  const struct kvp_attach_buffer body = {.buffer_id = abandoned->buffer_id};
  if (abandoned->buffer_id == 0 ||
      kvp_fd_socket_send(attachment->socket, KVP_ATTACH_RELEASE_BUFFER, ++attachment->last_request, &body,
                         sizeof body, NULL, 0) != KVP_BUSY) {
    *abandoned = (struct kvp_abandoned_request){0};
  }
}

void kvp_abandoned_take(kvpool_attachment *attachment, const struct kvp_fd_message *message) {
  struct kvp_abandoned_request *abandoned =
      message->request == 0 ? NULL : kvp_abandoned_find(attachment, message->request);
  if (abandoned == NULL) {
    return;
  }
  if (message->kind == KVP_ATTACH_RESULT) {
    abandoned->is_answered = true;
    abandoned_release(attachment, abandoned);
  } else {
    kvp_attach_buffer_id(message, &abandoned->buffer_id);
  }
}

void kvp_abandoned_retry(kvpool_attachment *attachment) {
  for (size_t i = 0; i < kvp_abandoned_requests_max; i++) {
    if (attachment->abandoned[i].is_answered) {
      abandoned_release(attachment, &attachment->abandoned[i]);
    }
  }
}
