/* Connections: accepted on the loop thread, handed to gRPC, watched until they are gone. Loop thread. What always
 * holds: `connections` is the number of sockets whose other end or whose gRPC side is still there, and every number
 * in use has its peer in the table. */
#include "server/supervisor/rpc_listener.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/log.h"

enum {
  number_highest_first = 65536,
  numbers_max = kvp_rpc_descriptors_max - number_highest_first, /* connections until a number comes again */
  accepts_per_wake_max = 32,
  pause_ms = 100,
};

struct kvp_rpc_connection {
  uv_poll_t hang_up;
  struct kvp_rpc_listener *listener;
  struct kvp_rpc_connection *next;
  struct kvp_rpc_connection **link; /* what points here */
  int fd;
};

static void handle_closed(struct kvp_rpc_listener *listener) {
  listener->open_handles--;
  if (listener->open_handles > 0) { /* `pause` is open until kvp_rpc_listener_close */
    return;
  }
  kvp_unix_socket_close(&listener->endpoint);
  free(listener->peers);
  listener->closed(listener->context);
}

static void on_connection_closed(uv_handle_t *handle) {
  struct kvp_rpc_connection *connection = handle->data;
  struct kvp_rpc_listener *listener = connection->listener;
  free(connection);
  handle_closed(listener);
}

static void connection_close(struct kvp_rpc_connection *connection) {
  struct kvp_rpc_listener *listener = connection->listener;
  *connection->link = connection->next;
  if (connection->next != NULL) {
    connection->next->link = connection->link;
  }
  uv_close((uv_handle_t *)&connection->hang_up, on_connection_closed);
  close(connection->fd);
  listener->connections--;
  listener->refusing = false;
}

static void on_hang_up(uv_poll_t *handle, int status, int events) {
  (void)status; /* an error ends the connection as well */
  (void)events;
  connection_close(handle->data);
}

/* Takes fd only when it succeeds. */
static bool connection_new(struct kvp_rpc_listener *listener, int fd) {
  struct kvp_rpc_connection *connection = malloc(sizeof *connection);
  if (connection == NULL) {
    return false;
  }
  if (uv_poll_init(listener->loop, &connection->hang_up, fd) != 0) {
    free(connection);
    return false;
  }
  connection->hang_up.data = connection;
  connection->listener = listener;
  connection->fd = fd;
  connection->next = listener->first;
  connection->link = &listener->first;
  if (connection->next != NULL) {
    connection->next->link = &connection->next;
  }
  listener->first = connection;
  listener->open_handles++;
  listener->connections++;
  (void)uv_poll_start(&connection->hang_up, UV_DISCONNECT, on_hang_up);
  return true;
}

/* A duplicate of fd with the next free number of the range; -1: none. */
static int number_duplicate(struct kvp_rpc_listener *listener, int fd) {
  int number = fcntl(fd, F_DUPFD_CLOEXEC, listener->number_next);
  if (number >= listener->number_end) {
    close(number);
    number = -1;
  }
  if (number < 0) {
    number = fcntl(fd, F_DUPFD_CLOEXEC, listener->number_first);
    if (number >= listener->number_end) {
      close(number);
      number = -1;
    }
  }
  if (number >= 0) {
    listener->number_next = number + 1 < listener->number_end ? number + 1 : listener->number_first;
  }
  return number;
}

/* fd belongs to the connection, or is closed, afterwards. */
static void take(struct kvp_rpc_listener *listener, int fd) {
  if (listener->connections == listener->connections_max) {
    if (!listener->refusing) {
      listener->refusing = true;
      kvp_log(KVP_LOG_WARNING, "connections_refused", "connections_max=%" PRIu32, listener->connections_max);
    }
    close(fd);
    return;
  }
  struct kvp_rpc_peer peer;
  if (!kvp_rpc_peer_of(fd, &peer)) {
    kvp_log(KVP_LOG_WARNING, "connection_refused", "reason=\"no peer credentials: %s\"", strerror(errno));
    close(fd);
    return;
  }
  const int number = number_duplicate(listener, fd);
  if (number < 0) {
    kvp_log(KVP_LOG_WARNING, "connection_refused", "pid=%ld reason=\"no free descriptor\"", (long)peer.pid);
    close(fd);
    return;
  }
  if (!connection_new(listener, fd)) {
    kvp_log(KVP_LOG_WARNING, "connection_refused", "pid=%ld reason=\"no memory\"", (long)peer.pid);
    close(number);
    close(fd);
    return;
  }
  listener->peers[number - listener->number_first] = peer;
  listener->adopt(listener->context, number);
}

static void on_acceptable(uv_poll_t *handle, int status, int events);

static void on_pause_over(uv_timer_t *timer) {
  struct kvp_rpc_listener *listener = timer->data;
  (void)uv_poll_start(&listener->acceptable, UV_READABLE, on_acceptable);
}

static void on_acceptable(uv_poll_t *handle, int status, int events) {
  (void)status;
  (void)events;
  struct kvp_rpc_listener *listener = handle->data;
  for (int i = 0; i < accepts_per_wake_max; i++) {
    const int fd = accept4(listener->endpoint.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      take(listener, fd);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      /* The connection stays in the backlog, so the poll would report it again at once. */
      kvp_log(KVP_LOG_WARNING, "accept_paused", "reason=\"%s\"", strerror(errno));
      (void)uv_poll_stop(&listener->acceptable);
      (void)uv_timer_start(&listener->pause, on_pause_over, pause_ms, 0);
      return;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return; /* EAGAIN: all taken */
    }
  }
}

/* Each connection needs a number and, below the range, the accepted descriptor. */
static enum kvp_status numbers_init(struct kvp_rpc_listener *listener, struct kvp_error *error) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "getrlimit: %s", strerror(errno));
  }
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "raising RLIMIT_NOFILE to its hard limit: %s", strerror(errno));
  }
  const rlim_t half = limit.rlim_max / 2;
  const int first = half > number_highest_first ? number_highest_first : (int)half;
  const int count = first > numbers_max ? numbers_max : first;
  if (listener->connections_max > (uint32_t)first / 2 || listener->connections_max > (uint32_t)count / 2) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "connections_max %" PRIu32 ": the hard limit of %ju descriptors allows %d",
                         listener->connections_max, (uintmax_t)limit.rlim_max, (first < count ? first : count) / 2);
  }
  listener->peers = calloc((size_t)count, sizeof *listener->peers);
  if (listener->peers == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the peers of %d connections", count);
  }
  listener->number_first = first;
  listener->number_end = first + count;
  listener->number_next = first;
  return KVP_OK;
}

enum kvp_status kvp_rpc_listener_init(struct kvp_rpc_listener *listener, uv_loop_t *loop,
                                      const struct kvp_rpc_server_options *options,
                                      void (*adopt)(void *context, int fd), void *context, struct kvp_error *error) {
  *listener = (struct kvp_rpc_listener){
      .loop = loop,
      .connections_max = options->connections_max,
      .context = context,
      .adopt = adopt,
  };
  enum kvp_status status = numbers_init(listener, error);
  if (status != KVP_OK) {
    return status;
  }
  status = kvp_unix_socket_open(&listener->endpoint, SOCK_STREAM, options->socket_path, options->socket_mode,
                                options->lock_path, error);
  if (status != KVP_OK) {
    goto err_numbers;
  }
  const int failed = uv_poll_init(loop, &listener->acceptable, listener->endpoint.fd);
  if (failed != 0) {
    status = kvp_error_set(error, KVP_INTERNAL, "watching \"%s\": %s", options->socket_path, uv_strerror(failed));
    goto err_socket;
  }
  (void)uv_timer_init(loop, &listener->pause);
  listener->acceptable.data = listener;
  listener->pause.data = listener;
  listener->open_handles = 2;
  return KVP_OK;

err_socket:
  kvp_unix_socket_close(&listener->endpoint);
err_numbers:
  free(listener->peers);
  return status;
}

void kvp_rpc_listener_start(struct kvp_rpc_listener *listener) {
  (void)uv_poll_start(&listener->acceptable, UV_READABLE, on_acceptable);
}

static void on_own_handle_closed(uv_handle_t *handle) {
  handle_closed(handle->data);
}

void kvp_rpc_listener_drain(struct kvp_rpc_listener *listener) {
  if (listener->draining) {
    return;
  }
  listener->draining = true;
  /* Closed, not stopped: a later close would take the descriptor's number out of the loop, whosever it is by then. */
  uv_close((uv_handle_t *)&listener->acceptable, on_own_handle_closed);
  (void)uv_timer_stop(&listener->pause);
  kvp_unix_socket_refuse(&listener->endpoint);
}

void kvp_rpc_listener_close(struct kvp_rpc_listener *listener, void (*closed)(void *context)) {
  listener->closed = closed;
  kvp_rpc_listener_drain(listener);
  while (listener->first != NULL) {
    connection_close(listener->first);
  }
  uv_close((uv_handle_t *)&listener->pause, on_own_handle_closed);
}

bool kvp_rpc_listener_peer(const struct kvp_rpc_listener *listener, int number, struct kvp_rpc_peer *out) {
  if (number < listener->number_first || number >= listener->number_end) {
    return false;
  }
  *out = listener->peers[number - listener->number_first];
  return true;
}
