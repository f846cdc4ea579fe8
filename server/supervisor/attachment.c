/* Attachments: their coming, their end, and what becomes of them when their executor dies. Loop thread only.
 *
 * Always holds: an attachment is in the daemon's list from its connection until it is gone; it holds a queue number,
 * a place in its session, a ring's bytes of its device and kvp_attachment_fds descriptors of the budget as long as it
 * has a session. */
#include "server/supervisor/attachment.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/failpoint.h"
#include "server/log.h"
#include "server/supervisor/attachment_internal.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/step_queue.h"

static const uint64_t ns_per_ms = 1000000;

/* ---- the end ----------------------------------------------------------------------------------------------------
 */

static void ring_forget(struct kvp_attachment *attachment) {
  if (attachment->ring_known) {
    attachment->ring_known = false;
    attachment->device->rings--;
  }
}

static void attachment_free(struct kvp_attachment *attachment) {
  struct kvp_daemon *daemon = attachment->daemon;
  struct kvp_session *session = attachment->session;
  *attachment->link = attachment->next;
  if (attachment->next != NULL) {
    attachment->next->link = attachment->link;
  }
  if (session != NULL) {
    kvp_step_queue_close(attachment->device, attachment->queue);
    kvp_fd_budget_release(&daemon->fds, kvp_attachment_fds);
    kvp_device_release_ring(attachment->device, kvp_attach_ring_bytes());
    daemon->attachments.count--;
    session->attachments--;
  }
  kvp_fd_budget_release(&daemon->fds, kvp_greeting_fds);
  kvp_attach_ring_deinit(&attachment->ring);
  free(attachment);
  if (session != NULL) {
    kvp_session_settle(daemon, session);
  }
  kvp_daemon_look_again(daemon);
}

void kvp_attachment_settle(struct kvp_attachment *attachment) {
  if (attachment->state == KVP_ATTACHMENT_ENDING && !attachment->channel_open && attachment->answers_owed == 0 &&
      attachment->buffers == 0 && attachment->request.state != KVP_ATTACH_MAKING_BUFFER) {
    attachment_free(attachment);
  }
}

static void on_channel_closed(void *context) {
  struct kvp_attachment *attachment = context;
  attachment->channel_open = false;
  kvp_attachment_settle(attachment);
}

static void on_detached(void *context, const struct kvp_error *error) {
  struct kvp_attachment *attachment = context;
  KVP_FAILPOINT("daemon.ring_detached");
  (void)error; /* device_lost is as good, and so is a ring that it has not got: it writes no word any more */
  attachment->answers_owed--;
  ring_forget(attachment);
  kvp_attach_ring_poison(&attachment->ring);
  kvp_attachment_settle(attachment);
}

static void detach(struct kvp_attachment *attachment) {
  const struct kvp_control_ring body = {.attachment_id = attachment->id};
  attachment->answers_owed++;
  kvp_executor_link_request(attachment->device->link, KVP_CONTROL_RING_DETACH, &body, sizeof body, NULL, 0, NULL,
                            on_detached, attachment);
}

static void release_buffers(const struct kvp_attachment *attachment) {
  struct kvp_buffer *next = NULL;
  for (struct kvp_buffer *buffer = attachment->session->buffers; buffer != NULL; buffer = next) {
    next = buffer->next;
    if (buffer->attachment == attachment && !buffer->releasing) {
      kvp_buffer_release(attachment->daemon, buffer);
    }
  }
}

static void say_end(struct kvp_attachment *attachment, const struct kvp_error *reason) {
  bool was_asking = attachment->state <= KVP_ATTACHMENT_ATTACHING;
  kvp_attach_channel_send(&attachment->channel, was_asking ? KVP_ATTACH_RESULT : KVP_ATTACH_ENDED,
                          was_asking ? attachment->hello_request : 0, reason, sizeof *reason, NULL, 0);
  if (attachment->state >= KVP_ATTACHMENT_SERVING) {
    kvp_log(reason->status == KVP_MALFORMED ? KVP_LOG_WARNING : KVP_LOG_INFO, "detached",
            "attachment=%" PRIu64 " session=%" PRIu64 " device=%s pid=%d uid=%u steps=%" PRIu64
            " buffers=%u reason=\"%s\"",
            attachment->id, attachment->session->id, attachment->device->name, (int)attachment->peer.pid,
            (unsigned)attachment->peer.uid, kvp_attach_ring_commands(&attachment->ring), attachment->buffers,
            reason->text);
  } else {
    kvp_log(KVP_LOG_DEBUG, "attach_refused", "pid=%d uid=%u status=%s text=\"%s\"", (int)attachment->peer.pid,
            (unsigned)attachment->peer.uid, kvp_status_name((enum kvp_status)reason->status), reason->text);
  }
}

void kvp_attachment_end(struct kvp_attachment *attachment, const struct kvp_error *reason) {
  if (attachment->state == KVP_ATTACHMENT_ENDING) {
    return;
  }
  kvp_attach_ring_tell(&attachment->ring, KVP_ATTACH_STATE_ENDED, reason); /* first: who was told finds it there */
  say_end(attachment, reason);
  if (attachment->session == NULL) {
    attachment->daemon->attachments.greeting_count--;
  }
  attachment->state = KVP_ATTACHMENT_ENDING;
  if (attachment->ring_known) {
    detach(attachment);
  }
  if (attachment->session != NULL) {
    release_buffers(attachment);
  }
  kvp_attach_channel_close(&attachment->channel, on_channel_closed);
}

void kvp_attachment_end_all(struct kvp_daemon *daemon, const struct kvp_session *session,
                            const struct kvp_error *reason) {
  for (struct kvp_attachment *attachment = daemon->attachments.first; attachment != NULL;
       attachment = attachment->next) {
    if (attachment->session == session) {
      kvp_attachment_end(attachment, reason);
    }
  }
}

static void on_drained(void *context, const struct kvp_error *error) {
  struct kvp_attachment *attachment = context;
  struct kvp_daemon *daemon = attachment->daemon;
  (void)error; /* a ring that isn't served any more has no steps either */
  attachment->answers_owed--;
  daemon->attachments.drains--;
  kvp_attachment_settle(attachment);
  kvp_daemon_look_again(daemon);
}

static void drain(struct kvp_attachment *attachment) {
  const struct kvp_control_ring body = {.attachment_id = attachment->id};
  attachment->answers_owed++;
  attachment->daemon->attachments.drains++;
  kvp_executor_link_request(attachment->device->link, KVP_CONTROL_RING_DRAIN, &body, sizeof body, NULL, 0, NULL,
                            on_drained, attachment);
}

static void end_draining(struct kvp_attachment *attachment) {
  struct kvp_error reason;
  (void)kvp_error_set(&reason, KVP_SHUTTING_DOWN, "the daemon is draining");
  kvp_attachment_end(attachment, &reason);
}

void kvp_attachment_drain_all(struct kvp_daemon *daemon) {
  for (struct kvp_attachment *attachment = daemon->attachments.first; attachment != NULL;
       attachment = attachment->next) {
    if (attachment->ring_known && attachment->state != KVP_ATTACHMENT_ENDING) {
      drain(attachment);
    } else {
      end_draining(attachment);
    }
  }
}

void kvp_attachment_end_silent(struct kvp_daemon *daemon, uint64_t now_ms) {
  struct kvp_error reason;
  (void)kvp_error_set(&reason, KVP_DEADLINE_EXCEEDED, "no ATTACH came within %d ms", kvp_greeting_ms);
  for (struct kvp_attachment *attachment = daemon->attachments.first; attachment != NULL;
       attachment = attachment->next) {
    if (attachment->state == KVP_ATTACHMENT_GREETING && now_ms - attachment->connected_ms >= kvp_greeting_ms) {
      kvp_attachment_end(attachment, &reason);
    }
  }
}

/* ---- ring -------------------------------------------------------------------------------------------------------
 */

void kvp_attachment_look(struct kvp_attachment *attachment) {
  bool greeting = attachment->state == KVP_ATTACHMENT_GREETING;
  bool attached = attachment->state == KVP_ATTACHMENT_SERVING || attachment->state == KVP_ATTACHMENT_LOST;
  bool idle = attachment->request.state == KVP_ATTACH_IDLE;
  if (attachment->state != KVP_ATTACHMENT_ENDING) {
    kvp_attach_channel_want(&attachment->channel, greeting || (attached && idle),
                            kvp_attach_request_is_sending(&attachment->request));
  }
}

static void fill_welcome(const struct kvp_attachment *attachment, struct kvp_attach_welcome *out) {
  const struct kvp_daemon *daemon = attachment->daemon;
  const struct kvp_device *device = attachment->device;
  const struct kvp_control_ready *ready = kvp_executor_link_info(device->link);
  memset(out, 0, sizeof *out);
  out->version = KVP_ATTACH_VERSION;
  out->flags |= (ready->flags & KVP_READY_MPS) != 0 ? (uint32_t)KVP_ATTACH_MPS : 0U;
  out->flags |= (ready->flags & KVP_READY_DEVICE_FDS) != 0 ? (uint32_t)KVP_ATTACH_DEVICE_FDS : 0U;
  out->attachment_id = attachment->id;
  out->generation = attachment->ring.status_page->generation;
  out->epoch = daemon->epoch;
  out->deadline_ns_max = daemon->config->wait_deadline_max_ms * ns_per_ms;
  out->memory_granularity_bytes = ready->memory_granularity_bytes;
  memcpy(out->device, device->name, sizeof out->device);
  memcpy(out->uuid, ready->uuid, sizeof out->uuid);
}

static void welcome(struct kvp_attachment *attachment) {
  bool first = attachment->state == KVP_ATTACHMENT_ATTACHING;
  struct kvp_attach_welcome body;
  int fds[kvp_attach_fd_count];
  fill_welcome(attachment, &body);
  kvp_attach_ring_worker_fds(&attachment->ring, fds);
  attachment->state = KVP_ATTACHMENT_SERVING;
  kvp_log(first ? KVP_LOG_INFO : KVP_LOG_DEBUG, first ? "attached" : "attached_again",
          "attachment=%" PRIu64 " session=%" PRIu64 " device=%s pid=%d uid=%u generation=%" PRIu64, attachment->id,
          attachment->session->id, attachment->device->name, (int)attachment->peer.pid,
          (unsigned)attachment->peer.uid, body.generation);
  kvp_attach_channel_send(&attachment->channel, first ? KVP_ATTACH_ATTACHED : KVP_ATTACH_DEVICE_RESTORED,
                          first ? attachment->hello_request : 0, &body, sizeof body, fds, kvp_attach_fd_count);
  kvp_attach_ring_shared(&attachment->ring);
  KVP_FAILPOINT("daemon.attach_welcomed");
  kvp_attachment_look(attachment);
}

static void on_ring_attached(void *context, const struct kvp_error *error) {
  struct kvp_attachment *attachment = context;
  attachment->answers_owed--;
  if (error->status != KVP_OK) {
    ring_forget(attachment);
  }
  if (attachment->state == KVP_ATTACHMENT_ENDING) {
    kvp_attachment_settle(attachment);
  } else if (error->status == KVP_OK) {
    welcome(attachment);
  } else if (attachment->state == KVP_ATTACHMENT_LOST && error->status == KVP_DEVICE_LOST) {
    kvp_attach_ring_deinit(&attachment->ring); /* it was never handed out; the next executor gets another */
  } else {
    kvp_attachment_end(attachment, error);
  }
}

enum kvp_status kvp_attachment_make_ring(struct kvp_attachment *attachment, struct kvp_error *error) {
  struct kvp_device *device = attachment->device;
  struct kvp_attach_ring ring;
  enum kvp_status status = kvp_attach_ring_init(&ring, kvp_executor_link_restarts(device->link) + 1, error);
  if (status != KVP_OK) {
    return status;
  }
  kvp_attach_ring_deinit(&attachment->ring);
  attachment->ring = ring;
  const struct kvp_control_ring body = {.attachment_id = attachment->id,
                                        .deadline_ns_max =
                                            attachment->daemon->config->wait_deadline_max_ms * ns_per_ms,
                                        .owner = attachment->session->slot,
                                        .queue = attachment->queue};
  int fds[kvp_control_ring_fd_count];
  kvp_attach_ring_executor_fds(&attachment->ring, fds);
  attachment->ring_known = true;
  device->rings++;
  attachment->answers_owed++;
  kvp_executor_link_request(device->link, KVP_CONTROL_RING_ATTACH, &body, sizeof body, fds, kvp_control_ring_fd_count,
                            NULL, on_ring_attached, attachment);
  KVP_FAILPOINT("daemon.ring_made");
  return KVP_OK;
}

/* ---- its executor -----------------------------------------------------------------------------------------------
 */

void kvp_attachment_device_lost(struct kvp_device *device) {
  struct kvp_error error;
  (void)kvp_error_set(&error, KVP_DEVICE_LOST, "the executor of device %s died", device->name);
  for (struct kvp_attachment *attachment = device->daemon->attachments.first; attachment != NULL;
       attachment = attachment->next) {
    if (attachment->device == device && attachment->state == KVP_ATTACHMENT_SERVING) {
      ring_forget(attachment);
      kvp_attach_ring_tell(&attachment->ring, KVP_ATTACH_STATE_LOST, &error);
      kvp_attach_ring_poison(&attachment->ring);
      attachment->state = KVP_ATTACHMENT_LOST;
      kvp_attach_channel_send(&attachment->channel, KVP_ATTACH_DEVICE_LOST, 0, &error, sizeof error, NULL, 0);
      kvp_attachment_look(attachment);
    }
  }
  assert(device->rings == 0);
}

void kvp_attachment_device_serving(struct kvp_device *device) {
  for (struct kvp_attachment *attachment = device->daemon->attachments.first; attachment != NULL;
       attachment = attachment->next) {
    struct kvp_error error;
    if (attachment->device != device || attachment->state != KVP_ATTACHMENT_LOST) {
      continue;
    }
    if (device->daemon->state >= KVP_DAEMON_DRAINING) {
      end_draining(attachment);
    } else if (kvp_attachment_make_ring(attachment, &error) != KVP_OK) {
      kvp_attachment_end(attachment, &error);
    }
  }
}

bool kvp_attachment_has_ring(const struct kvp_device *device, uint16_t owner) {
  const struct kvp_attachment *attachment = device->daemon->attachments.first;
  while (attachment != NULL &&
         !(attachment->ring_known && attachment->device == device && attachment->session->slot == owner)) {
    attachment = attachment->next;
  }
  return attachment != NULL;
}

void kvp_attachment_ring_failed(struct kvp_device *device, const struct kvp_control_ring_failed *failed) {
  for (struct kvp_attachment *attachment = device->daemon->attachments.first; attachment != NULL;
       attachment = attachment->next) {
    if (attachment->device == device && attachment->id == failed->attachment_id) {
      kvp_attachment_end(attachment, &failed->error);
      return;
    }
  }
}

void kvp_attachment_buffer_gone(struct kvp_attachment *attachment, uint64_t buffer_id) {
  assert(attachment->buffers > 0);
  attachment->buffers--;
  kvp_attach_request_buffer_gone(attachment, buffer_id);
  kvp_attachment_settle(attachment);
}
