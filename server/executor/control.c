/* The control thread and the messages it understands. */
#include "server/executor/control.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/control_wire.h"
#include "proto/failpoint.h"
#include "proto/fd_socket.h"
#include "server/executor/memories.h"
#include "server/log.h"

struct kvp_control {
  int socket;
  struct kvp_server *server;
  struct kvp_memories memories;
  pthread_t thread;
  bool closed_by_peer;
  bool told_to_stop;
  struct kvp_object_change *asked; /* removals that are pending */
  struct kvp_fd_message message;
};

void kvp_control_result_send(int socket, uint32_t request, const struct kvp_error *error) {
  if (request != 0) {
    /* A supervisor that is gone is noticed by whoever reads the socket. */
    (void)kvp_fd_socket_send(socket, KVP_CONTROL_RESULT, request, error, sizeof *error, NULL, 0);
  }
}

/* ---- memories ---- */

static void chunks_send(struct kvp_control *control, uint32_t request, uint64_t memory_id, uint64_t bytes,
                        const int *fds) {
  const uint32_t chunk_count = kvp_memory_chunk_count(bytes);
  for (uint32_t first = 0; first < chunk_count; first += kvp_control_fds_max) {
    const uint32_t left = chunk_count - first;
    const uint32_t count = left < kvp_control_fds_max ? left : kvp_control_fds_max;
    struct kvp_control_chunks chunks = {
        .memory_id = memory_id, .memory_bytes = bytes, .first_chunk = first, .chunk_count = chunk_count};
    for (uint32_t i = 0; i < count; i++) {
      chunks.chunk_bytes[i] = kvp_memory_chunk_bytes(bytes, first + i);
    }
    (void)kvp_fd_socket_send(control->socket, KVP_CONTROL_MEMORY_CHUNKS, request, &chunks, sizeof chunks, fds + first,
                             count);
  }
}

static enum kvp_status memory_create(struct kvp_control *control, struct kvp_error *error) {
  struct kvp_control_memory request;
  memcpy(&request, control->message.body, sizeof request);
  int *fds = NULL;
  enum kvp_status status = kvp_memories_create(&control->memories, &request, &fds, error);
  if (status != KVP_OK) {
    return status;
  }
  KVP_FAILPOINT("executor.memory_made");
  chunks_send(control, control->message.request, request.memory_id, request.bytes, fds);
  /* The mapping keeps the memory; the descriptors are the supervisor's now. */
  for (uint32_t i = 0; i < kvp_memory_chunk_count(request.bytes); i++) {
    (void)close(fds[i]);
  }
  free(fds);
  return KVP_OK;
}

static enum kvp_status memory_destroy(struct kvp_control *control, struct kvp_error *error) {
  struct kvp_control_memory request;
  memcpy(&request, control->message.body, sizeof request);
  return kvp_memories_destroy(&control->memories, request.memory_id, error);
}

static enum kvp_status memory_open(struct kvp_control *control, struct kvp_error *error) {
  struct kvp_control_open request;
  memcpy(&request, control->message.body, sizeof request);
  if (control->message.fd_count > 1) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory %llu: %u descriptors, at most one is needed",
                         (unsigned long long)request.memory_id, control->message.fd_count);
  }
  return kvp_memories_open(&control->memories, &request,
                           control->message.fd_count == 1 ? control->message.fds[0] : -1, error);
}

/* ---- pools ---- */

static void pool_free(struct kvp_control *control, struct kvp_pool *pool, uint32_t used_regions) {
  for (uint32_t i = 0; i < used_regions; i++) {
    kvp_memories_unuse_for_region(&control->memories, pool->regions[i].memory_id);
  }
  kvp_pool_destroy(pool);
}

static enum kvp_status pool_attach(struct kvp_control *control, struct kvp_error *error) {
  struct kvp_control_pool request;
  memcpy(&request, control->message.body, sizeof request);
  if (control->message.fd_count != 1) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "pool %llu: %u descriptors, its owner table's is needed",
                         (unsigned long long)request.pool_id, control->message.fd_count);
  }
  struct kvp_pool *pool = kvp_pool_new(&request, control->message.fds[0], control->memories.device, error);
  if (pool == NULL) {
    return (enum kvp_status)error->status;
  }
  enum kvp_status status = KVP_OK;
  uint32_t used_regions = 0;
  for (; used_regions < pool->region_count; used_regions++) {
    struct kvp_region *region = &pool->regions[used_regions];
    status = kvp_memories_use_for_region(&control->memories, region->memory_id, region->geometry.region_bytes,
                                         &region->base, error);
    if (status != KVP_OK) {
      goto err_pool;
    }
  }
  struct kvp_object_change change = {.kind = KVP_ADD_POOL, .pool = pool};
  status = kvp_server_change(control->server, &change);
  if (status != KVP_OK) {
    *error = change.error;
    goto err_pool;
  }
  return KVP_OK;

err_pool:
  pool_free(control, pool, used_regions);
  return status;
}

/* ---- buffers ---- */

static void buffer_free(struct kvp_control *control, struct kvp_buffer *buffer) {
  if (!buffer->is_lost) {
    kvp_memories_unuse_for_buffer(&control->memories, buffer->memory_id);
  }
  free(buffer);
}

static enum kvp_status buffer_attach(struct kvp_control *control, struct kvp_error *error) {
  struct kvp_control_buffer request;
  memcpy(&request, control->message.body, sizeof request);
  if (request.buffer_id == 0) { /* means inline data in an array */
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "buffer 0 can't be one");
  }
  struct kvp_buffer *buffer = calloc(1, sizeof *buffer);
  if (buffer == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a buffer");
  }
  buffer->id = request.buffer_id;
  buffer->memory_id = request.memory_id;
  buffer->bytes = request.bytes;
  buffer->owner = request.owner;
  buffer->is_lost = (request.flags & KVP_BUFFER_LOST) != 0;
  enum kvp_status status = KVP_OK;
  if (!buffer->is_lost) {
    status = kvp_memories_use_for_buffer(&control->memories, request.memory_id, request.bytes, &buffer->base, error);
  }
  if (status != KVP_OK) {
    free(buffer);
    return status;
  }
  KVP_FAILPOINT("executor.buffer_attaching");
  struct kvp_object_change change = {.kind = KVP_ADD_BUFFER, .buffer = buffer};
  status = kvp_server_change(control->server, &change);
  if (status != KVP_OK) {
    *error = change.error;
    buffer_free(control, buffer);
  }
  return status;
}

/* ---- rings ---- */

static enum kvp_status ring_attach(struct kvp_control *control, struct kvp_error *error) {
  struct kvp_control_ring request;
  memcpy(&request, control->message.body, sizeof request);
  if (control->message.fd_count != kvp_control_ring_fd_count) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "attachment %llu: %u descriptors, a ring has %d",
                         (unsigned long long)request.attachment_id, control->message.fd_count,
                         kvp_control_ring_fd_count);
  }
  struct kvp_served_ring *ring = kvp_served_ring_new(&request, control->message.fds, control->memories.device, error);
  if (ring == NULL) {
    return (enum kvp_status)error->status;
  }
  (void)close(control->message.fds[KVP_CONTROL_RING_FD_RING]); /* mapped */
  (void)close(control->message.fds[KVP_CONTROL_RING_FD_TIMELINES]);
  control->message.fd_count = 0;
  KVP_FAILPOINT("executor.ring_attaching");
  struct kvp_object_change change = {.kind = KVP_ADD_RING, .ring = ring};
  enum kvp_status status = kvp_server_change(control->server, &change);
  if (status != KVP_OK) {
    *error = change.error;
    kvp_served_ring_destroy(ring);
  }
  return status;
}

/* ---- removals ---- */

static void removed_free(struct kvp_control *control, const struct kvp_object_change *change) {
  switch (change->kind) {
  case KVP_REMOVE_POOL:
    pool_free(control, change->pool, change->pool->region_count);
    break;
  case KVP_REMOVE_BUFFER:
    buffer_free(control, change->buffer);
    break;
  case KVP_DRAIN_RING:
    break; /* it stays */
  default:
    kvp_served_ring_destroy(change->ring);
    break;
  }
}

static void change_done(struct kvp_control *control, struct kvp_object_change *change) {
  const struct kvp_error done = {.op = -1, .position = -1};
  struct kvp_object_change **link = &control->asked;
  while (*link != change) {
    link = &(*link)->next_asked;
  }
  *link = change->next_asked;
  removed_free(control, change);
  kvp_control_result_send(control->socket, change->request, &done);
  free(change);
}

static void ring_failed(const struct kvp_control *control, const struct kvp_news *news) {
  const struct kvp_served_ring *ring =
      (const void *)((const uint8_t *)news - offsetof(struct kvp_served_ring, failed));
  const struct kvp_control_ring_failed body = {.attachment_id = ring->attachment_id, .error = ring->error};
  (void)kvp_fd_socket_send(control->socket, KVP_CONTROL_RING_FAILED, 0, &body, sizeof body, NULL, 0);
}

static void news_read(struct kvp_control *control) {
  struct kvp_news *news = kvp_server_news(control->server);
  while (news != NULL) {
    struct kvp_news *next = news->next;
    if (news->kind == KVP_NEWS_RING_FAILED) {
      ring_failed(control, news);
    } else {
      change_done(control, (struct kvp_object_change *)news);
    }
    news = next;
  }
}

/* All of these bodies begin with the number of what is to go, or to be drained. */
_Static_assert(offsetof(struct kvp_control_pool, pool_id) == 0 &&
                   offsetof(struct kvp_control_buffer, buffer_id) == 0 &&
                   offsetof(struct kvp_control_ring, attachment_id) == 0,
               "wire layout");

static uint64_t message_id(const struct kvp_control *control) {
  uint64_t id = 0;
  memcpy(&id, control->message.body, sizeof id);
  return id;
}

/* *wants_reply: false when the answer comes later. */
static enum kvp_status removal_ask(struct kvp_control *control, enum kvp_object_change_kind kind, bool *wants_reply,
                                   struct kvp_error *error) {
  struct kvp_object_change *change = calloc(1, sizeof *change);
  if (change == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a removal");
  }
  change->kind = kind;
  change->id = message_id(control);
  if (kind == KVP_REMOVE_BUFFER) {
    struct kvp_control_buffer request;
    memcpy(&request, control->message.body, sizeof request);
    change->attachment_id = request.attachment_id;
  }
  change->request = control->message.request;
  enum kvp_status status = kvp_server_change(control->server, change);
  if (status == KVP_OK && change->is_pending) {
    change->next_asked = control->asked;
    control->asked = change;
    *wants_reply = false;
    return KVP_OK;
  }
  if (status == KVP_OK) {
    news_read(control); /* that a ring has failed, before it is freed */
    removed_free(control, change);
  } else {
    *error = change->error;
  }
  free(change);
  return status;
}

/* ---- what is free ---- */

static void free_send(struct kvp_control *control) {
  struct kvp_device *device = control->memories.device;
  struct kvp_device_description description = {0};
  device->backend->describe(device, &description);
  const struct kvp_control_free body = {.memory_free_bytes = description.memory_free_bytes};
  (void)kvp_fd_socket_send(control->socket, KVP_CONTROL_MEMORY_FREE, control->message.request, &body, sizeof body,
                           NULL, 0);
}

/* ---- the thread ---- */

/* Bytes of a request's body; 0: no such request. */
static uint32_t body_bytes_of(uint32_t kind) {
  switch (kind) {
  case KVP_CONTROL_MEMORY_CREATE:
  case KVP_CONTROL_MEMORY_DESTROY:
    return sizeof(struct kvp_control_memory);
  case KVP_CONTROL_MEMORY_IMPORT:
    return sizeof(struct kvp_control_chunks);
  case KVP_CONTROL_POOL_ATTACH:
  case KVP_CONTROL_POOL_DETACH:
    return sizeof(struct kvp_control_pool);
  case KVP_CONTROL_BUFFER_ATTACH:
  case KVP_CONTROL_BUFFER_DETACH:
    return sizeof(struct kvp_control_buffer);
  case KVP_CONTROL_RING_ATTACH:
  case KVP_CONTROL_RING_DETACH:
  case KVP_CONTROL_RING_DRAIN:
    return sizeof(struct kvp_control_ring);
  case KVP_CONTROL_MEMORY_OPEN:
    return sizeof(struct kvp_control_open);
  case KVP_CONTROL_MEMORY_LOOK:
    return sizeof(struct kvp_control_free);
  default:
    return 0;
  }
}

/* *wants_reply: false for a part of an import that goes on, for what is answered later, and for what has another
 * answer. */
static enum kvp_status message_handle(struct kvp_control *control, bool *wants_reply, struct kvp_error *error) {
  *wants_reply = true;
  switch (control->message.kind) {
  case KVP_CONTROL_MEMORY_CREATE:
    return memory_create(control, error);
  case KVP_CONTROL_MEMORY_IMPORT: {
    bool is_done = false;
    enum kvp_status status = kvp_memories_import(&control->memories, &control->message, &is_done, error);
    *wants_reply = is_done || status != KVP_OK;
    return status;
  }
  case KVP_CONTROL_MEMORY_DESTROY:
    return memory_destroy(control, error);
  case KVP_CONTROL_POOL_ATTACH:
    return pool_attach(control, error);
  case KVP_CONTROL_MEMORY_OPEN:
    return memory_open(control, error);
  case KVP_CONTROL_POOL_DETACH:
    return removal_ask(control, KVP_REMOVE_POOL, wants_reply, error);
  case KVP_CONTROL_BUFFER_ATTACH:
    return buffer_attach(control, error);
  case KVP_CONTROL_BUFFER_DETACH:
    return removal_ask(control, KVP_REMOVE_BUFFER, wants_reply, error);
  case KVP_CONTROL_RING_ATTACH:
    return ring_attach(control, error);
  case KVP_CONTROL_MEMORY_LOOK:
    free_send(control);
    *wants_reply = false;
    return KVP_OK;
  case KVP_CONTROL_RING_DRAIN:
    return removal_ask(control, KVP_DRAIN_RING, wants_reply, error);
  default:
    return removal_ask(control, KVP_REMOVE_RING, wants_reply, error);
  }
}

/* The next message; news is read while there is none. */
static enum kvp_status message_receive(struct kvp_control *control) {
  struct pollfd sources[] = {{.fd = control->socket, .events = POLLIN},
                             {.fd = kvp_server_news_event(control->server), .events = POLLIN}};
  while (sources[0].revents == 0) {
    if (poll(sources, 2, -1) < 0 && errno != EINTR) {
      return KVP_INTERNAL;
    }
    if (sources[1].revents != 0) {
      news_read(control);
    }
  }
  return kvp_fd_socket_receive(control->socket, &control->message);
}

static void *control_main(void *argument) {
  struct kvp_control *control = argument;
  struct kvp_fd_message *message = &control->message;
  enum kvp_status status = KVP_OK;
  (void)pthread_setname_np(pthread_self(), "kvp-control");
  struct kvp_device *device = control->memories.device;
  if (device->backend->thread_begin != NULL) {
    device->backend->thread_begin(device);
  }
  while ((status = message_receive(control)) == KVP_OK) {
    if (message->kind == KVP_CONTROL_STOP) {
      control->told_to_stop = true;
      kvp_fd_message_close_fds(message);
      continue;
    }
    const uint32_t expected = body_bytes_of(message->kind);
    if (expected == 0 || message->body_bytes != expected) {
      kvp_log(KVP_LOG_ERROR, "control_message_unknown", "kind=%u body_bytes=%u", message->kind, message->body_bytes);
      kvp_fd_message_close_fds(message);
      status = KVP_MALFORMED;
      break;
    }
    struct kvp_error error = {.op = -1, .position = -1};
    bool wants_reply = false;
    const enum kvp_status handled = message_handle(control, &wants_reply, &error);
    if (handled != KVP_OK) {
      kvp_log(KVP_LOG_WARNING, "control_request_refused", "kind=%u status=%s text=\"%s\"", message->kind,
              kvp_status_name((enum kvp_status)error.status), error.text);
    }
    kvp_fd_message_close_fds(message);
    if (wants_reply) {
      kvp_control_result_send(control->socket, message->request, &error);
    }
    if (handled == KVP_DEVICE_LOST) {
      kvp_server_check_device(control->server);
    }
  }
  control->closed_by_peer = status == KVP_CANCELLED;
  if (!control->closed_by_peer) {
    kvp_log(KVP_LOG_ERROR, "control_socket_failed", "status=%s", kvp_status_name(status));
  }
  kvp_server_stop(control->server);
  return NULL;
}

struct kvp_control *kvp_control_start(int socket, struct kvp_device *device, struct kvp_server *server,
                                      struct kvp_error *error) {
  struct kvp_control *control = calloc(1, sizeof *control);
  if (control == NULL) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the control thread");
    return NULL;
  }
  control->socket = socket;
  control->server = server;
  control->memories.device = device;
  int result = pthread_create(&control->thread, NULL, control_main, control);
  if (result != 0) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "the control thread can't be started: %s", strerror(result));
    free(control);
    return NULL;
  }
  return control;
}

enum kvp_control_end kvp_control_destroy(struct kvp_control *control) {
  atomic_store(&control->memories.device->closing, true);
  (void)shutdown(control->socket, SHUT_RDWR); /* ends a receive that waits */
  (void)pthread_join(control->thread, NULL);
  news_read(control);
  while (control->asked != NULL) { /* their steps will never end; a ring is the server's yet */
    struct kvp_object_change *change = control->asked;
    control->asked = change->next_asked;
    const bool is_removed = change->kind != KVP_REMOVE_BUFFER || change->buffer != NULL; /* else it is below */
    if (change->kind != KVP_REMOVE_RING && is_removed) {
      removed_free(control, change);
    }
    free(change);
  }
  struct kvp_objects *objects = kvp_server_objects(control->server);
  struct kvp_pool *pool = NULL;
  struct kvp_buffer *buffer = NULL;
  while ((pool = kvp_id_table_take_any(&objects->pools)) != NULL) {
    pool_free(control, pool, pool->region_count);
  }
  while ((buffer = kvp_id_table_take_any(&objects->buffers)) != NULL) {
    buffer_free(control, buffer);
  }
  kvp_memories_deinit(&control->memories);
  const enum kvp_control_end end = !control->closed_by_peer ? KVP_CONTROL_END_NONSENSE
                                   : control->told_to_stop  ? KVP_CONTROL_END_TOLD
                                                            : KVP_CONTROL_END_CLOSED;
  free(control);
  return end;
}
