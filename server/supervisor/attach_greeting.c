/* How an attachment begins: a connection, and its first message. Loop thread only. */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/failpoint.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/attachment_internal.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/name.h"
#include "server/supervisor/step_queue.h"

static uint64_t now_unix_ns(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_REALTIME, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* ---- ATTACH -----------------------------------------------------------------------------------------------------
 */

static struct kvp_device *hello_device(struct kvp_daemon *daemon, const struct kvp_attach_hello *hello,
                                       struct kvp_error *error) {
  if (memchr(hello->device, '\0', sizeof hello->device) == NULL) {
    (void)kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "device", -1, 0, "the device's name does not end");
    return NULL;
  }
  if (hello->device[0] == '\0') {
    if (daemon->device_count == 1) {
      return &daemon->devices[0];
    }
    (void)kvp_error_set_at(error, KVP_WRONG_DEVICE, -1, "device", -1, 0, "there are %u devices: one has to be named",
                           daemon->device_count);
    return NULL;
  }
  if (kvp_name_check(hello->device, "device", false, error) != KVP_OK) {
    return NULL;
  }
  return kvp_daemon_find_device(daemon, hello->device, error);
}

static enum kvp_status hello_check(const struct kvp_attachment *attachment, const struct kvp_attach_hello *hello,
                                   struct kvp_session **session, struct kvp_device **device,
                                   struct kvp_error *error) {
  struct kvp_daemon *daemon = attachment->daemon;
  if (hello->version != KVP_ATTACH_VERSION) {
    return kvp_error_set_at(error, KVP_VERSION_MISMATCH, -1, "version", -1, hello->version,
                            "the worker speaks version %u of the attach protocol, this daemon %u", hello->version,
                            KVP_ATTACH_VERSION);
  }
  *session = kvp_session_authenticate(daemon, hello->session_id, hello->secret, sizeof hello->secret, error);
  *device = *session == NULL ? NULL : hello_device(daemon, hello, error);
  if (*device == NULL) {
    return (enum kvp_status)error->status;
  }
  if ((*session)->attachments >= kvp_attachments_per_session_max) {
    return kvp_error_set(error, KVP_QUOTA_EXCEEDED, "session %" PRIu64 " has %u attachments, %d are allowed",
                         (*session)->id, (*session)->attachments, kvp_attachments_per_session_max);
  }
  if (daemon->attachments.count >= kvp_attachments_max) {
    return kvp_error_set(error, KVP_BUSY, "%u attachments are there already, %d are allowed",
                         daemon->attachments.count, kvp_attachments_max);
  }
  return kvp_device_check_serving(*device, error);
}

static enum kvp_status attach(struct kvp_attachment *attachment, const struct kvp_attach_hello *hello,
                              struct kvp_error *error) {
  struct kvp_daemon *daemon = attachment->daemon;
  struct kvp_session *session = NULL;
  struct kvp_device *device = NULL;
  enum kvp_status status = hello_check(attachment, hello, &session, &device, error);
  if (status != KVP_OK) {
    return status;
  }
  assert(session != NULL && device != NULL);
  status = kvp_fd_budget_charge(&daemon->fds, "an attachment", kvp_attachment_fds, KVP_BUSY, error);
  if (status != KVP_OK) {
    return status;
  }
  status = kvp_device_charge_ring(device, kvp_attach_ring_bytes(), error);
  if (status != KVP_OK) {
    goto err_fds;
  }
  attachment->queue = kvp_step_queue_open(device, false, error);
  if (attachment->queue == 0) {
    status = (enum kvp_status)error->status;
    goto err_ring;
  }
  attachment->id = ++daemon->attachments.next_id;
  attachment->session = session;
  attachment->device = device;
  attachment->attached_unix_ns = now_unix_ns();
  attachment->state = KVP_ATTACHMENT_ATTACHING;
  session->attachments++;
  daemon->attachments.count++;
  daemon->attachments.greeting_count--;
  kvp_attachment_make_ring(attachment);
  return KVP_OK;

err_ring:
  kvp_device_release_ring(device, kvp_attach_ring_bytes());
err_fds:
  kvp_fd_budget_release(&daemon->fds, kvp_attachment_fds);
  return status;
}

static void take_hello(struct kvp_attachment *attachment, const struct kvp_fd_message *message) {
  struct kvp_attach_hello hello;
  struct kvp_error error;
  attachment->hello_request = message->request;
  if (message->kind != KVP_ATTACH_ATTACH || message->body_bytes != sizeof hello || message->fd_count != 0) {
    (void)kvp_error_set(
        &error, KVP_MALFORMED,
        "the first message is of kind %u with %u bytes and %u descriptors: ATTACH, %zu bytes and none "
        "are wanted",
        message->kind, message->body_bytes, message->fd_count, sizeof hello);
    kvp_attachment_end(attachment, &error);
    return;
  }
  memcpy(&hello, message->body, sizeof hello);
  KVP_FAILPOINT("daemon.attach_greeted");
  if (attach(attachment, &hello, &error) == KVP_OK) {
    kvp_attachment_look(attachment);
  } else {
    kvp_attachment_end(attachment, &error);
  }
}

/* ---- its socket -------------------------------------------------------------------------------------------------
 */

static void on_message(void *context, struct kvp_fd_message *message) {
  struct kvp_attachment *attachment = context;
  struct kvp_error error;
  if (attachment->state == KVP_ATTACHMENT_GREETING) {
    take_hello(attachment, message);
  } else if (!kvp_attach_request_take(attachment, message, &error)) {
    kvp_attachment_end(attachment, &error);
  }
}

static void on_writable(void *context) {
  kvp_attach_request_go_on(context);
}

static void on_hung_up(void *context, const struct kvp_error *error) {
  kvp_attachment_end(context, error);
}

static const struct kvp_attach_channel_events channel_events = {
    .message = on_message,
    .writable = on_writable,
    .hung_up = on_hung_up,
};

static uint32_t greetings_of(const struct kvp_daemon *daemon, uid_t uid) {
  uint32_t count = 0;
  for (const struct kvp_attachment *one = daemon->attachments.first; one != NULL; one = one->next) {
    count += one->state == KVP_ATTACHMENT_GREETING && one->peer.uid == uid;
  }
  return count;
}

static enum kvp_status greeting_check(struct kvp_daemon *daemon, const struct kvp_rpc_peer *peer,
                                      struct kvp_error *error) {
  if (daemon->attachments.greeting_count >= kvp_greetings_max) {
    return kvp_error_set(error, KVP_BUSY, "%d connections have not sent ATTACH yet", kvp_greetings_max);
  }
  if (greetings_of(daemon, peer->uid) >= kvp_greetings_per_uid_max) {
    return kvp_error_set(error, KVP_BUSY, "%d connections of uid %u have not sent ATTACH yet",
                         kvp_greetings_per_uid_max, (unsigned)peer->uid);
  }
  return kvp_fd_reaper_check_uid(daemon->attach.reaper, peer->uid, 1, error);
}

static enum kvp_status greet(struct kvp_daemon *daemon, int socket, const struct kvp_rpc_peer *peer,
                             struct kvp_error *error) {
  enum kvp_status status = greeting_check(daemon, peer, error);
  if (status == KVP_OK) {
    status = kvp_fd_budget_charge(&daemon->fds, "a worker's connection", kvp_greeting_fds, KVP_BUSY, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_attachment *attachment = kvp_allocate(1, sizeof *attachment);
  const struct kvp_attach_channel_options options = {.loop = daemon->loop,
                                                     .socket = socket,
                                                     .uid = peer->uid,
                                                     .reaper = daemon->attach.reaper,
                                                     .incoming = &daemon->attach.incoming,
                                                     .events = &channel_events,
                                                     .context = attachment};
  status = kvp_attach_channel_init(&attachment->channel, &options, error);
  if (status != KVP_OK) {
    kvp_fd_budget_release(&daemon->fds, kvp_greeting_fds);
    free(attachment);
    return status;
  }
  attachment->daemon = daemon;
  attachment->peer = *peer;
  attachment->connected_ms = uv_now(daemon->loop);
  attachment->channel_open = true;
  attachment->next = daemon->attachments.first;
  attachment->link = &daemon->attachments.first;
  if (attachment->next != NULL) {
    attachment->next->link = &attachment->next;
  }
  daemon->attachments.first = attachment;
  daemon->attachments.greeting_count++;
  kvp_attachment_look(attachment);
  return KVP_OK;
}

enum kvp_status kvp_attachment_greet(struct kvp_daemon *daemon, int socket, const struct kvp_rpc_peer *peer,
                                     struct kvp_error *error) {
  enum kvp_status status = greet(daemon, socket, peer, error);
  if (status != KVP_OK) { /* it may not have asked anything yet: a notice, not an answer */
    (void)kvp_fd_socket_send(socket, KVP_ATTACH_ENDED, 0, error, sizeof *error, NULL, 0);
    kvp_fd_reaper_close_socket(daemon->attach.reaper, peer->uid, socket);
  }
  return status;
}
