/* The socket that workers attach to. Loop thread only. */
#include "server/supervisor/attach_listener.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/log.h"
#include "server/supervisor/daemon.h"

enum { accepts_per_wake_max = 16, tick_ms = 500 };

static void on_acceptable(uv_poll_t *handle, int status, int events);

static void listener_tick(uv_timer_t *timer) {
  struct kvp_attach_listener *listener = timer->data;
  struct kvp_daemon *daemon = listener->daemon;
  kvp_attachment_end_silent(daemon, uv_now(daemon->loop));
  if (listener->resting && listener->open) {
    listener->resting = false;
    (void)uv_poll_start(&listener->acceptable, UV_READABLE, on_acceptable);
  }
  if (daemon->attachments.greeting_count == 0) {
    (void)uv_timer_stop(timer);
  }
}

static void listener_rest(struct kvp_attach_listener *listener, const char *reason) {
  /* The connection stays in the backlog, so the poll would report it again at once. */
  kvp_log(KVP_LOG_WARNING, "attach_paused", "reason=\"%s\"", reason);
  listener->resting = true;
  (void)uv_poll_stop(&listener->acceptable);
  (void)uv_timer_start(&listener->tick, listener_tick, tick_ms, tick_ms);
}

/* fd and its place at the reaper are the attachment's, or gone, afterwards. */
static void listener_take(struct kvp_attach_listener *listener, int fd) {
  struct kvp_rpc_peer peer;
  struct kvp_error error;
  if (!kvp_rpc_peer_of(fd, &peer)) {
    kvp_log(KVP_LOG_WARNING, "attach_refused", "text=\"no peer credentials: %s\"", strerror(errno));
    kvp_fd_reaper_close_socket(listener->reaper, (uid_t)-1, fd);
  } else if (kvp_attachment_greet(listener->daemon, fd, &peer, &error) != KVP_OK) {
    kvp_log(KVP_LOG_DEBUG, "attach_refused", "pid=%d uid=%u status=%s text=\"%s\"", (int)peer.pid, (unsigned)peer.uid,
            kvp_status_name((enum kvp_status)error.status), error.text);
  } else if (!uv_is_active((uv_handle_t *)&listener->tick)) {
    (void)uv_timer_start(&listener->tick, listener_tick, tick_ms, tick_ms);
  }
}

static void on_acceptable(uv_poll_t *handle, int status, int events) {
  (void)status;
  (void)events;
  struct kvp_attach_listener *listener = handle->data;
  for (int i = 0; i < accepts_per_wake_max; i++) {
    struct kvp_error error;
    /* Descriptors may wait in a connection by the time it is accepted: it can't be closed without a place. */
    if (kvp_fd_reaper_reserve(listener->reaper, 1, &error) != KVP_OK) {
      listener_rest(listener, error.text);
      return;
    }
    int fd = accept4(listener->endpoint.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      listener_take(listener, fd);
      continue;
    }
    const int number = errno;
    kvp_fd_reaper_release(listener->reaper, 1);
    if (number == EMFILE || number == ENFILE || number == ENOBUFS || number == ENOMEM) {
      listener_rest(listener, strerror(number));
      return;
    }
    if (number != EINTR && number != ECONNABORTED) {
      return; /* EAGAIN: all taken */
    }
  }
}

enum kvp_status kvp_attach_listener_init(struct kvp_attach_listener *listener, struct kvp_daemon *daemon,
                                         struct kvp_error *error) {
  const struct kvp_config *config = daemon->config;
  listener->daemon = daemon;
  enum kvp_status status = kvp_fd_reaper_new(daemon->loop, &daemon->fds, &listener->reaper, error);
  if (status != KVP_OK) {
    return status;
  }
  status = kvp_unix_socket_open(&listener->endpoint, SOCK_SEQPACKET, config->attach_socket_path, config->socket_mode,
                                config->attach_lock_path, error);
  if (status != KVP_OK) {
    goto err_reaper;
  }
  int failed = uv_poll_init(daemon->loop, &listener->acceptable, listener->endpoint.fd);
  if (failed != 0) {
    status =
        kvp_error_set(error, KVP_INTERNAL, "watching \"%s\": %s", config->attach_socket_path, uv_strerror(failed));
    goto err_socket;
  }
  (void)uv_timer_init(daemon->loop, &listener->tick);
  listener->acceptable.data = listener;
  listener->tick.data = listener;
  listener->open = true;
  (void)uv_poll_start(&listener->acceptable, UV_READABLE, on_acceptable);
  return KVP_OK;

err_socket:
  kvp_unix_socket_close(&listener->endpoint);
err_reaper:
  kvp_fd_reaper_destroy(listener->reaper);
  return status;
}

/* Connections wait in it, and in those what workers have sent. */
static void listener_refuse(struct kvp_attach_listener *listener) {
  struct kvp_error error;
  const int fd = kvp_unix_socket_shut(&listener->endpoint);
  if (kvp_fd_reaper_reserve(listener->reaper, 1, &error) == KVP_OK) {
    kvp_fd_reaper_close(listener->reaper, geteuid(), fd);
  } else { /* the process's end closes it */
    kvp_log(KVP_LOG_WARNING, "attach_not_closed", "reason=\"%s\"", error.text);
  }
}

void kvp_attach_listener_drain(struct kvp_attach_listener *listener) {
  if (!listener->open) {
    return;
  }
  listener->open = false;
  /* Closed, not stopped: a later close would take the descriptor's number out of the loop, whosever it is by then. */
  uv_close((uv_handle_t *)&listener->acceptable, NULL);
  listener_refuse(listener);
  struct kvp_error reason;
  (void)kvp_error_set(&reason, KVP_SHUTTING_DOWN, "the daemon is draining");
  kvp_attachment_end_all(listener->daemon, NULL, &reason);
}

void kvp_attach_listener_close(struct kvp_attach_listener *listener) {
  uv_close((uv_handle_t *)&listener->tick, NULL);
  kvp_fd_reaper_destroy(listener->reaper);
  kvp_unix_socket_close(&listener->endpoint);
}
