/* One worker's socket. Loop thread only. */
#include "server/supervisor/attach_channel.h"

#include <assert.h>
#include <sys/socket.h>

static void channel_ready(uv_poll_t *poll, int status, int events);

static void channel_poll(struct kvp_attach_channel *channel) {
  if (channel->over) {
    return;
  }
  bool waits = !kvp_control_queue_is_empty(&channel->outgoing);
  int events = UV_DISCONNECT;
  events |= channel->wants_message && !waits ? UV_READABLE : 0;
  events |= channel->wants_writable || waits ? UV_WRITABLE : 0;
  (void)uv_poll_start(&channel->poll, events, channel_ready);
}

static void channel_hang_up(struct kvp_attach_channel *channel, enum kvp_status status, const char *why) {
  struct kvp_error error;
  (void)kvp_error_set(&error, status, "%s", why);
  channel->events->hung_up(channel->context, &error);
  assert(channel->over);
}

/* fd_count descriptors at most were counted on; those that nobody has taken go. */
static void channel_drop_fds(const struct kvp_attach_channel *channel, uint32_t reserved) {
  struct kvp_fd_message *message = channel->incoming;
  for (uint32_t i = 0; i < message->fd_count; i++) {
    kvp_fd_reaper_close(channel->reaper, channel->uid, message->fds[i]);
  }
  kvp_fd_reaper_release(channel->reaper, reserved - message->fd_count);
  message->fd_count = 0;
}

/* reserved: places for its descriptors. */
static void channel_take(struct kvp_attach_channel *channel, uint32_t reserved) {
  enum kvp_status status = kvp_fd_socket_take(channel->socket, channel->incoming);
  if (status == KVP_OK) {
    channel->events->message(channel->context, channel->incoming);
  } else if (status == KVP_MALFORMED) {
    channel_hang_up(channel, KVP_MALFORMED, "the worker sent what is no message, or one with too many descriptors");
  } else if (status != KVP_BUSY) {
    channel_hang_up(channel, KVP_CANCELLED, "the worker closed its socket");
  }
  channel_drop_fds(channel, reserved);
}

static void channel_receive(struct kvp_attach_channel *channel) {
  struct kvp_error error;
  bool has_fds = false;
  enum kvp_status status = kvp_fd_socket_peek(channel->socket, &has_fds);
  if (status != KVP_OK || !has_fds) {
    channel_take(channel, 0);
    return;
  }
  status = kvp_fd_reaper_check_uid(channel->reaper, channel->uid, kvp_packet_fds_max, &error);
  if (status == KVP_OK) {
    status = kvp_fd_reaper_reserve(channel->reaper, kvp_packet_fds_max, &error);
  }
  if (status != KVP_OK) {
    channel_hang_up(channel, status, error.text);
  } else {
    channel_take(channel, kvp_packet_fds_max);
  }
}

static void channel_flush(struct kvp_attach_channel *channel) {
  if (kvp_control_queue_flush(&channel->outgoing) != KVP_OK) {
    channel_hang_up(channel, KVP_CANCELLED, "the worker's socket takes nothing any more");
  }
}

static void channel_ready(uv_poll_t *poll, int status, int events) {
  struct kvp_attach_channel *channel = poll->data;
  if (status < 0 || (events & UV_DISCONNECT) != 0) {
    channel_hang_up(channel, KVP_CANCELLED, "the worker closed its socket");
    return;
  }
  if ((events & UV_WRITABLE) != 0) {
    bool waited = !kvp_control_queue_is_empty(&channel->outgoing);
    channel_flush(channel);
    if (!channel->over && !waited && channel->wants_writable) {
      channel->events->writable(channel->context);
    }
  }
  if (!channel->over && (events & UV_READABLE) != 0) {
    channel_receive(channel);
  }
  channel_poll(channel);
}

enum kvp_status kvp_attach_channel_init(struct kvp_attach_channel *channel,
                                        const struct kvp_attach_channel_options *options, struct kvp_error *error) {
  const int socket = options->socket;
  *channel = (struct kvp_attach_channel){.events = options->events,
                                         .context = options->context,
                                         .reaper = options->reaper,
                                         .incoming = options->incoming,
                                         .socket = socket,
                                         .uid = options->uid};
  const int smallest = 1; /* the kernel makes it its minimum */
  int failed = uv_poll_init(options->loop, &channel->poll, socket);
  if (failed != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "a worker's socket can't be watched: %s", uv_strerror(failed));
  }
  (void)setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &smallest, sizeof smallest);
  channel->poll.data = channel;
  kvp_control_queue_init(&channel->outgoing, socket);
  channel_poll(channel);
  return KVP_OK;
}

void kvp_attach_channel_send(struct kvp_attach_channel *channel, uint32_t kind, uint32_t request, const void *body,
                             uint32_t body_bytes, const int *fds, uint32_t fd_count) {
  if (channel->over) {
    return;
  }
  if (channel->outgoing.count >= kvp_attach_queue_max ||
      kvp_control_queue_put(&channel->outgoing, kind, request, body, body_bytes, fds, fd_count) != KVP_OK) {
    (void)shutdown(channel->socket, SHUT_RDWR); /* told from the loop, as a hang-up */
  }
  channel_poll(channel);
}

void kvp_attach_channel_want(struct kvp_attach_channel *channel, bool message, bool writable) {
  channel->wants_message = message;
  channel->wants_writable = writable;
  channel_poll(channel);
}

static void channel_closed(uv_handle_t *handle) {
  struct kvp_attach_channel *channel = handle->data;
  channel->closed(channel->context);
}

void kvp_attach_channel_close(struct kvp_attach_channel *channel, void (*closed)(void *context)) {
  channel->over = true;
  channel->closed = closed;
  uv_close((uv_handle_t *)&channel->poll, channel_closed);
  kvp_control_queue_deinit(&channel->outgoing);
  kvp_fd_reaper_close_socket(channel->reaper, channel->uid, channel->socket);
}
