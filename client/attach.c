/* Attachments: the socket to the supervisor, from hello to the end.
 *
 * One request is asked at a time; what the supervisor tells by itself is taken whenever the socket is looked at. The
 * socket is looked at when the status page says that something happened, and once a millisecond while nothing does. */
#include "client/attach.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/failpoint.h"

#define DEFAULT_SOCKET "/run/kvpoold/kvpoold.attach.sock"

static const uint64_t glance_ns = 1000000;

void kvp_attachment_ref(kvpool_attachment *attachment) {
  atomic_fetch_add_explicit(&attachment->references, 1, memory_order_relaxed);
}

void kvp_attachment_unref(kvpool_attachment *attachment) {
  if (atomic_fetch_sub_explicit(&attachment->references, 1, memory_order_acq_rel) != 1) {
    return;
  }
  kvp_attachment_free_held(attachment);
  kvp_timelines_deinit(attachment);
  kvp_bytes_deinit(&attachment->payload);
  kvp_bytes_deinit(&attachment->reports);
  (void)pthread_mutex_destroy(&attachment->words_lock);
  free(attachment);
}

/* ---- the end ----------------------------------------------------------------------------------------------------
 */

void kvp_attachment_end(kvpool_attachment *attachment, const kvpool_error *why) {
  if (attachment->state == KVP_ATTACHMENT_ENDED) {
    return;
  }
  attachment->state = KVP_ATTACHMENT_ENDED;
  attachment->problem = *why;
  kvp_attachment_drop_ring(attachment, why);
  atomic_store(&attachment->gone, true);
}

static void attachment_end_disconnected(kvpool_attachment *attachment) {
  kvpool_error error;
  (void)kvp_fail(&error, KVPOOL_DISCONNECTED, "kvpoold at %s is gone, and the attachment with it", attachment->path);
  kvp_attachment_end(attachment, &error);
}

kvpool_status kvp_attachment_check(const kvpool_attachment *attachment, kvpool_error *error) {
  if (attachment->state == KVP_ATTACHMENT_SERVING) {
    return KVPOOL_OK;
  }
  if (error != NULL) {
    *error = attachment->problem;
  }
  return attachment->problem.status;
}

/* ---- messages ---------------------------------------------------------------------------------------------------
 */

kvpool_status kvp_attach_check_body(const struct kvp_fd_message *message, size_t bytes, kvpool_error *error) {
  if (message->body_bytes != bytes) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold sent a message of kind %u with %u bytes, not %zu",
                    message->kind, message->body_bytes, bytes);
  }
  return KVPOOL_OK;
}

/* A welcome's memory comes into use; its fds that are kept become -1. */
static kvpool_status welcome_take(kvpool_attachment *attachment, struct kvp_fd_message *message,
                                  kvpool_error *error) {
  kvpool_status status = kvp_attach_check_body(message, sizeof attachment->welcome, error);
  if (status == KVPOOL_OK && message->fd_count != kvp_attach_fd_count) {
    status = kvp_fail(error, KVPOOL_MALFORMED, "kvpoold welcomes with %u descriptors, not %d", message->fd_count,
                      kvp_attach_fd_count);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  struct kvp_attach_welcome welcome;
  memcpy(&welcome, message->body, sizeof welcome);
  if (welcome.version != KVP_ATTACH_VERSION) {
    return kvp_fail(error, KVPOOL_VERSION_MISMATCH,
                    "kvpoold speaks version %u of the attach protocol, this library %u", welcome.version,
                    KVP_ATTACH_VERSION);
  }
  status =
      kvp_timelines_add(attachment, message->fds[KVP_ATTACH_FD_TIMELINES], message->fds[KVP_ATTACH_FD_STATUS], error);
  if (status == KVPOOL_OK) {
    status = kvp_attachment_set_ring(attachment, message->fds[KVP_ATTACH_FD_RING],
                                     message->fds[KVP_ATTACH_FD_COMMAND_EVENT],
                                     message->fds[KVP_ATTACH_FD_COMPLETION_EVENT], error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  message->fds[KVP_ATTACH_FD_COMMAND_EVENT] = -1;
  message->fds[KVP_ATTACH_FD_COMPLETION_EVENT] = -1;
  welcome.device[sizeof welcome.device - 1] = '\0';
  welcome.uuid[sizeof welcome.uuid - 1] = '\0';
  attachment->welcome = welcome;
  kvpool_attachment_saw_epoch(attachment, welcome.epoch);
  attachment->state = KVP_ATTACHMENT_SERVING;
  return KVPOOL_OK;
}

static void message_close(struct kvp_fd_message *message) {
  for (uint32_t i = 0; i < message->fd_count; i++) {
    if (message->fds[i] >= 0) {
      (void)close(message->fds[i]);
    }
  }
  message->fd_count = 0;
}

/* The error that a message carries; OK of one that has none. */
static kvpool_status message_error(const struct kvp_fd_message *message, kvpool_error *error) {
  struct kvp_error from;
  kvpool_status status = kvp_attach_check_body(message, sizeof from, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  memcpy(&from, message->body, sizeof from);
  return from.status == KVP_OK ? KVPOOL_OK : kvp_fail_wire(error, &from);
}

static void notice_lost(kvpool_attachment *attachment, const struct kvp_fd_message *message) {
  kvpool_error error;
  if (attachment->state != KVP_ATTACHMENT_SERVING) {
    return;
  }
  if (message_error(message, &error) == KVPOOL_OK) {
    (void)kvp_fail(&error, KVPOOL_DEVICE_LOST, "the executor of %s died", attachment->welcome.device);
  }
  attachment->state = KVP_ATTACHMENT_LOST;
  attachment->problem = error;
  kvp_attachment_drop_ring(attachment, &error);
}

/* What the supervisor tells by itself. */
static void notice_take(kvpool_attachment *attachment, struct kvp_fd_message *message) {
  kvpool_error error;
  switch (message->kind) {
  case KVP_ATTACH_DEVICE_LOST:
    notice_lost(attachment, message);
    break;
  case KVP_ATTACH_DEVICE_RESTORED:
    if (attachment->state == KVP_ATTACHMENT_SERVING) { /* nobody told that it was lost */
      (void)kvp_fail(&error, KVPOOL_DEVICE_LOST, "the executor of %s died", attachment->welcome.device);
      kvp_attachment_drop_ring(attachment, &error);
    }
    if (attachment->state != KVP_ATTACHMENT_ENDED && welcome_take(attachment, message, &error) != KVPOOL_OK) {
      kvp_attachment_end(attachment, &error);
    }
    break;
  case KVP_ATTACH_ENDED:
    if (message_error(message, &error) == KVPOOL_OK) {
      (void)kvp_fail(&error, KVPOOL_UNKNOWN_SESSION, "the session has been closed, and the attachment with it");
    }
    kvp_attachment_end(attachment, &error);
    break;
  default:
    break; /* a notice of a newer daemon, or what is left of a request that nobody waits for any more */
  }
}

/* The next message, waiting until deadline_ns at most (0: not at all). KVP_BUSY: none; KVP_CANCELLED: no more. */
static enum kvp_status message_receive(kvpool_attachment *attachment, uint64_t deadline_ns) {
  for (;;) {
    enum kvp_status status = kvp_fd_socket_receive(attachment->socket, &attachment->message);
    uint64_t now = status == KVP_BUSY ? kvp_now_ns() : 0;
    if (status != KVP_BUSY || now >= deadline_ns) {
      return status;
    }
    struct pollfd waited = {.fd = attachment->socket, .events = POLLIN};
    uint64_t left = deadline_ns - now;
    struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000), .tv_nsec = (long)(left % 1000000000)};
    (void)ppoll(&waited, 1, &timeout, NULL); /* a signal only makes it look once more */
  }
}

void kvp_attachment_look(kvpool_attachment *attachment) {
  attachment->looked_at_ns = kvp_now_ns();
  while (attachment->state != KVP_ATTACHMENT_ENDED) {
    enum kvp_status status = message_receive(attachment, 0);
    if (status == KVP_BUSY) {
      return;
    }
    if (status != KVP_OK) {
      attachment_end_disconnected(attachment);
      return;
    }
    notice_take(attachment, &attachment->message);
    message_close(&attachment->message);
  }
}

void kvp_attachment_glance(kvpool_attachment *attachment) {
  if (attachment->state == KVP_ATTACHMENT_ENDED) {
    return;
  }
  const bool is_told =
      (attachment->state == KVP_ATTACHMENT_SERVING) != kvp_timelines_are_served(kvp_timelines_latest(attachment));
  if (is_told || kvp_now_ns() - attachment->looked_at_ns >= glance_ns) {
    kvp_attachment_look(attachment);
  }
}

/* ---- requests ---------------------------------------------------------------------------------------------------
 */

static kvpool_status request_send(kvpool_attachment *attachment, const struct kvp_attach_request *request,
                                  uint64_t deadline_ns, kvpool_error *error) {
  attachment->last_request++;
  for (;;) {
    enum kvp_status status =
        kvp_fd_socket_send(attachment->socket, request->kind, attachment->last_request, request->body,
                           request->body_bytes, &request->fd, request->fd >= 0 ? 1 : 0);
    if (status == KVP_OK) {
      return KVPOOL_OK;
    }
    uint64_t now = kvp_now_ns();
    if (status != KVP_BUSY) {
      kvp_attachment_look(attachment); /* why it went may stand there */
      attachment_end_disconnected(attachment);
      return kvp_attachment_check(attachment, error);
    }
    if (now >= deadline_ns) {
      return kvp_fail(error, KVPOOL_DEADLINE_EXCEEDED, "kvpoold at %s takes no request for %u ms", attachment->path,
                      attachment->timeout_ms);
    }
    struct pollfd waited = {.fd = attachment->socket, .events = POLLOUT};
    (void)poll(&waited, 1, 10);
  }
}

/* A child's requests, and what it reads, would be missing in its parent's talk with the daemon. */
static kvpool_status process_check(const kvpool_attachment *attachment, kvpool_error *error) {
  return attachment->pid == getpid() ? KVPOOL_OK : kvp_fail_forked(error, "the attachment", attachment->pid);
}

kvpool_status kvp_attachment_ask(kvpool_attachment *attachment, const struct kvp_attach_request *request,
                                 kvp_attach_part_fn on_part, void *context, kvpool_error *error) {
  if (process_check(attachment, error) != KVPOOL_OK) {
    return KVPOOL_INVALID_ARGUMENT;
  }
  kvp_attachment_look(attachment);
  if (attachment->state == KVP_ATTACHMENT_ENDED) {
    return kvp_attachment_check(attachment, error);
  }
  const uint64_t deadline_ns = kvp_now_ns() + (uint64_t)attachment->timeout_ms * 1000000;
  kvpool_status status = request_send(attachment, request, deadline_ns, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  KVP_FAILPOINT("worker.request_sent");
  for (;;) {
    struct kvp_fd_message *message = &attachment->message;
    enum kvp_status received = message_receive(attachment, deadline_ns);
    if (received == KVP_BUSY) {
      return kvp_fail(error, KVPOOL_DEADLINE_EXCEEDED, "kvpoold at %s doesn't answer for %u ms", attachment->path,
                      attachment->timeout_ms);
    }
    if (received != KVP_OK) {
      attachment_end_disconnected(attachment);
    } else if (message->request != attachment->last_request) {
      notice_take(attachment, message);
    } else if (message->kind == KVP_ATTACH_RESULT) {
      KVP_FAILPOINT("worker.request_answered");
      kvpool_status result = message_error(message, status == KVPOOL_OK ? error : NULL);
      message_close(message);
      return status == KVPOOL_OK ? result : status;
    } else if (status == KVPOOL_OK) {
      status = on_part == NULL
                   ? kvp_fail(error, KVPOOL_MALFORMED, "kvpoold answers with a message of kind %u", message->kind)
                   : on_part(context, message, error);
    }
    message_close(message);
    if (attachment->state == KVP_ATTACHMENT_ENDED) {
      return kvp_attachment_check(attachment, error);
    }
  }
}

/* ---- attach and detach ------------------------------------------------------------------------------------------
 */

static kvpool_status options_check(const kvpool_attach_options *options, kvpool_error *error) {
  if (options->size_bytes < sizeof *options) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "options", -1, (int64_t)options->size_bytes,
                       "kvpool_attach_options.size_bytes is %zu, not sizeof(kvpool_attach_options) = %zu",
                       options->size_bytes, sizeof *options);
  }
  if (options->device != NULL && strlen(options->device) >= kvp_name_bytes_max) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "a device's name has at most %d characters, this one %zu",
                    kvp_name_bytes_max - 1, strlen(options->device));
  }
  return KVPOOL_OK;
}

static kvpool_status socket_path(const kvpool_attach_options *options, char *out, size_t out_bytes,
                                 kvpool_error *error) {
  const char *path = options->socket;
  if (path == NULL) {
    path = getenv("KVPOOLD_ATTACH_SOCKET");
  }
  if (path == NULL || path[0] == '\0') {
    path = DEFAULT_SOCKET;
  }
  if (strlen(path) >= out_bytes) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "a socket's path has at most %zu characters, this one %zu",
                    out_bytes - 1, strlen(path));
  }
  (void)snprintf(out, out_bytes, "%s", path);
  return KVPOOL_OK;
}

static kvpool_status socket_connect(kvpool_attachment *attachment, kvpool_error *error) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", attachment->path);
  attachment->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (attachment->socket < 0) {
    return kvp_fail(error, KVPOOL_NO_MEMORY, "no socket: %s", strerror(errno));
  }
  const uint64_t deadline_ns = kvp_now_ns() + (uint64_t)attachment->timeout_ms * 1000000;
  while (connect(attachment->socket, (const struct sockaddr *)&address, sizeof address) != 0) {
    if ((errno == EAGAIN || errno == EINTR) && kvp_now_ns() < deadline_ns) { /* its backlog is full */
      (void)poll(NULL, 0, 1);
      continue;
    }
    switch (errno) {
    case EAGAIN:
    case EINTR:
      return kvp_fail(error, KVPOOL_DEADLINE_EXCEEDED, "kvpoold at %s takes no attachment for %u ms",
                      attachment->path, attachment->timeout_ms);
    case EACCES:
    case EPERM:
      return kvp_fail(error, KVPOOL_PERMISSION_DENIED, "%s may not be opened by this user: %s", attachment->path,
                      strerror(errno));
    case EPROTOTYPE:
      return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "%s is no attach socket; kvpoold's gRPC socket is another one",
                      attachment->path);
    default:
      return kvp_fail(error, KVPOOL_DISCONNECTED, "no kvpoold takes attachments at %s: %s", attachment->path,
                      strerror(errno));
    }
  }
  return KVPOOL_OK;
}

/* A welcome, or why there is none. */
static kvpool_status welcome_receive(kvpool_attachment *attachment, kvpool_error *error) {
  struct kvp_fd_message *message = &attachment->message;
  const uint64_t deadline_ns = kvp_now_ns() + (uint64_t)attachment->timeout_ms * 1000000;
  enum kvp_status received = message_receive(attachment, deadline_ns);
  if (received == KVP_BUSY) {
    return kvp_fail(error, KVPOOL_DEADLINE_EXCEEDED, "kvpoold at %s doesn't answer for %u ms", attachment->path,
                    attachment->timeout_ms);
  }
  if (received != KVP_OK) {
    return kvp_fail(error, received == KVP_MALFORMED ? KVPOOL_MALFORMED : KVPOOL_DISCONNECTED,
                    "kvpoold at %s hung up before it answered", attachment->path);
  }
  kvpool_status status = KVPOOL_OK;
  if (message->kind == KVP_ATTACH_ATTACHED) {
    status = welcome_take(attachment, message, error);
  } else {
    if (message->kind == KVP_ATTACH_RESULT || message->kind == KVP_ATTACH_ENDED) {
      status = message_error(message, error);
    }
    if (status == KVPOOL_OK) {
      status = kvp_fail(error, KVPOOL_MALFORMED, "%s answers to an attach with a message of kind %u",
                        attachment->path, message->kind);
    }
  }
  message_close(message);
  return status;
}

static kvpool_status attachment_greet(kvpool_attachment *attachment, const kvpool_attach_options *options,
                                      kvpool_error *error) {
  struct kvp_attach_hello hello = {.version = KVP_ATTACH_VERSION, .session_id = options->session_id};
  memcpy(hello.secret, options->secret, sizeof hello.secret);
  (void)snprintf(hello.device, sizeof hello.device, "%s", options->device == NULL ? "" : options->device);
  kvpool_status status = socket_connect(attachment, error);
  if (status == KVPOOL_OK) {
    KVP_FAILPOINT("worker.connected");
    const struct kvp_attach_request request = {
        .kind = KVP_ATTACH_ATTACH, .body = &hello, .body_bytes = sizeof hello, .fd = -1};
    const uint64_t deadline_ns = kvp_now_ns() + (uint64_t)attachment->timeout_ms * 1000000;
    status = request_send(attachment, &request, deadline_ns, error);
  }
  explicit_bzero(hello.secret, sizeof hello.secret);
  KVP_FAILPOINT("worker.greeted");
  return status == KVPOOL_OK ? welcome_receive(attachment, error) : status;
}

kvpool_status kvpool_attach(const kvpool_attach_options *options, kvpool_attachment **out, kvpool_error *error) {
  assert(options != NULL && out != NULL);
  kvpool_status status = options_check(options, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  kvpool_attachment *attachment = calloc(1, sizeof *attachment);
  if (attachment == NULL) {
    return kvp_fail_no_memory(error);
  }
  atomic_init(&attachment->references, 1);
  pthread_mutex_init(&attachment->words_lock, NULL);
  attachment->pid = getpid();
  attachment->timeout_ms = options->timeout_ms == 0 ? kvp_client_timeout_default_ms : options->timeout_ms;
  attachment->socket = attachment->command_event = attachment->completion_event = attachment->epoll = -1;
  attachment->state = KVP_ATTACHMENT_LOST;
  attachment->oldest = 1;
  status = socket_path(options, attachment->path, sizeof attachment->path, error);
  if (status == KVPOOL_OK) {
    status = attachment_greet(attachment, options, error);
  }
  if (status != KVPOOL_OK) {
    kvpool_detach(attachment);
    return status;
  }
  KVP_FAILPOINT("worker.attached");
  *out = attachment;
  return KVPOOL_OK;
}

void kvpool_detach(kvpool_attachment *attachment) {
  if (attachment == NULL) {
    return;
  }
  kvpool_error error;
  (void)kvp_fail(&error, KVPOOL_CANCELLED, "the attachment has been given up by kvpool_detach");
  kvp_attachment_end(attachment, &error);
  KVP_FAILPOINT("worker.detaching");
  if (attachment->socket >= 0) {
    if (attachment->pid == getpid()) {
      (void)shutdown(attachment->socket, SHUT_RDWR); /* a child of a fork may still hold it */
    }
    (void)close(attachment->socket);
    attachment->socket = -1;
  }
  if (attachment->epoll >= 0) {
    (void)close(attachment->epoll);
    attachment->epoll = -1;
  }
  kvp_attachment_unref(attachment);
}

/* ---- what it says of itself -------------------------------------------------------------------------------------
 */

void kvpool_attachment_info_get(const kvpool_attachment *attachment, kvpool_attachment_info *out) {
  assert(attachment != NULL && out != NULL);
  const struct kvp_attach_welcome *welcome = &attachment->welcome;
  *out = (kvpool_attachment_info){
      .attachment_id = welcome->attachment_id,
      .generation = welcome->generation,
      .epoch = atomic_load_explicit(&attachment->epoch, memory_order_relaxed),
      .deadline_ns_max = welcome->deadline_ns_max,
      .steps_in_flight = attachment->outstanding_count,
      .mps = (welcome->flags & KVP_ATTACH_MPS) != 0,
      .device_memory = (welcome->flags & KVP_ATTACH_DEVICE_FDS) != 0,
  };
  (void)snprintf(out->device, sizeof out->device, "%s", welcome->device);
  (void)snprintf(out->uuid, sizeof out->uuid, "%s", welcome->uuid);
}

kvpool_status kvpool_attachment_state(kvpool_attachment *attachment, kvpool_error *error) {
  assert(attachment != NULL);
  if (process_check(attachment, error) != KVPOOL_OK) {
    return KVPOOL_INVALID_ARGUMENT;
  }
  if (attachment->socket >= 0) {
    kvp_attachment_look(attachment);
  }
  return kvp_attachment_check(attachment, error);
}

void kvpool_attachment_saw_epoch(kvpool_attachment *attachment, uint64_t epoch) {
  assert(attachment != NULL);
  uint64_t known = atomic_load_explicit(&attachment->epoch, memory_order_relaxed);
  while (known < epoch && !atomic_compare_exchange_weak_explicit(&attachment->epoch, &known, epoch,
                                                                 memory_order_relaxed, memory_order_relaxed)) {
  }
}
