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

/* ---- the end ----------------------------------------------------------------------------------------------------
 */

void kvp_attachment_forget_ring(struct kvp_attachment *attachment) {
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
  free(attachment);
  if (session != NULL) {
    kvp_session_settle(daemon, session);
  }
  kvp_daemon_look_again(daemon);
}

void kvp_attachment_settle(struct kvp_attachment *attachment) {
  if (attachment->state != KVP_ATTACHMENT_ENDING || attachment->channel_open || attachment->answers_owed > 0 ||
      attachment->buffers > 0 || attachment->request.state == KVP_ATTACH_MAKING_BUFFER || attachment->ring_at_work) {
    return;
  }
  if (attachment->ring.there) {
    kvp_attachment_unmake_ring(attachment); /* and once more, then */
  } else {
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
  kvp_attachment_forget_ring(attachment);
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
  struct kvp_error refusal;
  if (was_asking && reason->status == KVP_OK) { /* a session's good end is no good answer to ATTACH */
    (void)kvp_error_set(&refusal, KVP_UNKNOWN_SESSION, "%s", reason->text);
    reason = &refusal;
  }
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

/* ---- requests ---------------------------------------------------------------------------------------------------
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

/* ---- its executor -----------------------------------------------------------------------------------------------
 */

void kvp_attachment_device_lost(struct kvp_device *device) {
  struct kvp_error error;
  (void)kvp_error_set(&error, KVP_DEVICE_LOST, "the executor of device %s died", device->name);
  for (struct kvp_attachment *attachment = device->daemon->attachments.first; attachment != NULL;
       attachment = attachment->next) {
    if (attachment->device == device && attachment->state == KVP_ATTACHMENT_SERVING) {
      kvp_attachment_forget_ring(attachment);
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
    if (attachment->device != device || attachment->state != KVP_ATTACHMENT_LOST) {
      continue;
    }
    if (device->daemon->state >= KVP_DAEMON_DRAINING) {
      end_draining(attachment);
    } else if (!attachment->ring_at_work) { /* else a ring for the executor before is made: its end sees this one */
      kvp_attachment_make_ring(attachment);
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
