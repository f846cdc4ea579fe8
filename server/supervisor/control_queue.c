/* Outgoing control messages that wait for room in the socket. */
#include "server/supervisor/control_queue.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/supervisor/allocate.h"

struct kvp_queued_control {
  struct kvp_queued_control *next;
  uint32_t kind;
  uint32_t request;
  uint32_t body_bytes;
  uint32_t fd_count;
  int fds[kvp_control_fds_max];
  uint8_t body[];
};

void kvp_control_queue_init(struct kvp_control_queue *queue, int socket) {
  memset(queue, 0, sizeof *queue);
  queue->socket = socket;
}

static void queued_destroy(struct kvp_queued_control *queued) {
  for (uint32_t i = 0; i < queued->fd_count; i++) {
    (void)close(queued->fds[i]);
  }
  free(queued);
}

static void queue_drop_first(struct kvp_control_queue *queue) {
  struct kvp_queued_control *first = queue->first;
  queue->first = first->next;
  if (queue->first == NULL) {
    queue->last = NULL;
  }
  queue->count--;
  queued_destroy(first);
}

void kvp_control_queue_deinit(struct kvp_control_queue *queue) {
  while (queue->first != NULL) {
    queue_drop_first(queue);
  }
}

static enum kvp_status queue_keep(struct kvp_control_queue *queue, uint32_t kind, uint32_t request, const void *body,
                                  uint32_t body_bytes, const int *fds, uint32_t fd_count) {
  struct kvp_queued_control *queued = kvp_allocate(1, sizeof *queued + body_bytes);
  queued->kind = kind;
  queued->request = request;
  queued->body_bytes = body_bytes;
  if (body_bytes > 0) {
    memcpy(queued->body, body, body_bytes);
  }
  for (uint32_t i = 0; i < fd_count; i++) {
    int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
    if (fd < 0) {
      queued_destroy(queued);
      return KVP_INTERNAL;
    }
    queued->fds[queued->fd_count++] = fd;
  }
  if (queue->last == NULL) {
    queue->first = queued;
  } else {
    queue->last->next = queued;
  }
  queue->last = queued;
  queue->count++;
  return KVP_OK;
}

enum kvp_status kvp_control_queue_put(struct kvp_control_queue *queue, uint32_t kind, uint32_t request,
                                      const void *body, uint32_t body_bytes, const int *fds, uint32_t fd_count) {
  if (queue->first == NULL) {
    enum kvp_status status = kvp_fd_socket_send(queue->socket, kind, request, body, body_bytes, fds, fd_count);
    if (status != KVP_BUSY) {
      return status;
    }
  }
  return queue_keep(queue, kind, request, body, body_bytes, fds, fd_count);
}

enum kvp_status kvp_control_queue_flush(struct kvp_control_queue *queue) {
  while (queue->first != NULL) {
    const struct kvp_queued_control *first = queue->first;
    enum kvp_status status = kvp_fd_socket_send(queue->socket, first->kind, first->request, first->body,
                                                first->body_bytes, first->fds, first->fd_count);
    if (status == KVP_BUSY) {
      return KVP_OK;
    }
    if (status != KVP_OK) {
      return status;
    }
    queue_drop_first(queue);
  }
  return KVP_OK;
}

bool kvp_control_queue_is_empty(const struct kvp_control_queue *queue) {
  return queue->first == NULL;
}
