/* Sessions. Loop thread only.
 *
 * A slot is an owner in every pool's owner table, so it is given out again only when no step, buffer or quarantined
 * block names it any more. */
#include "server/supervisor/session.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "kvpool.pb-c.h"
#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/attachment.h"
#include "server/supervisor/buffer.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/rpc_status.h"
#include "server/supervisor/step_stream.h"

static uint16_t find_slot(const struct kvp_session_table *table, uint32_t sessions_max) {
  for (uint32_t slot = 1; slot <= sessions_max; slot++) {
    if (table->slots[slot] == NULL) {
      return (uint16_t)slot;
    }
  }
  return 0;
}

static bool fill_random(uint8_t *out, size_t bytes) {
  size_t filled = 0;
  while (filled < bytes) {
    ssize_t got = getrandom(out + filled, bytes - filled, 0);
    if (got < 0 && errno != EINTR) {
      return false;
    }
    filled += got > 0 ? (size_t)got : 0;
  }
  return true;
}

static uint64_t now_unix_ns(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_REALTIME, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

enum kvp_status kvp_session_open(struct kvp_daemon *daemon, struct kvp_rpc_call *stream, const char *name,
                                 const char *namespace_name, uint32_t blocks_max, struct kvp_session **out,
                                 struct kvp_error *error) {
  struct kvp_session_table *table = &daemon->sessions;
  uint16_t slot = find_slot(table, daemon->config->sessions_max);
  if (slot == 0) {
    return kvp_error_set(error, KVP_BUSY, "%u sessions are there already (%u of them closing), %u are allowed",
                         table->count, table->closing_count, daemon->config->sessions_max);
  }
  struct kvp_session *session = kvp_allocate(1, sizeof *session);
  if (!fill_random(session->secret, sizeof session->secret)) {
    free(session);
    return kvp_error_set(error, KVP_INTERNAL, "no random bytes for a session's secret: %s", strerror(errno));
  }
  assert(strlen(name) < sizeof session->name && strlen(namespace_name) < sizeof session->namespace_name);
  session->id = ++table->next_id;
  session->slot = slot;
  memcpy(session->name, name, strlen(name) + 1);
  memcpy(session->namespace_name, namespace_name, strlen(namespace_name) + 1);
  session->namespace_number = kvp_namespace_hold(&table->namespaces, namespace_name);
  session->peer = *kvp_rpc_call_peer(stream);
  session->opened_unix_ns = now_unix_ns();
  session->stream = kvp_rpc_call_ref(stream);
  session->blocks_max = blocks_max;
  table->slots[slot] = session;
  table->count++;
  kvp_log(KVP_LOG_INFO, "session_opened", "session=%" PRIu64 " slot=%u name=%s namespace=%s pid=%d uid=%u",
          session->id, slot, name, namespace_name, (int)session->peer.pid, (unsigned)session->peer.uid);
  *out = session;
  return KVP_OK;
}

static struct kvp_session *find_open(struct kvp_session_table *table, uint64_t session_id) {
  for (uint32_t slot = 1; slot <= kvp_sessions_max; slot++) {
    struct kvp_session *session = table->slots[slot];
    if (session != NULL && session->id == session_id) {
      return session->state == KVP_SESSION_OPEN ? session : NULL;
    }
  }
  return NULL;
}

/* Looks at every byte whatever it finds, so that the time taken tells nothing. */
static bool secrets_equal(const uint8_t *left, const uint8_t *right, size_t bytes) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < bytes; i++) {
    difference = (uint8_t)(difference | (left[i] ^ right[i]));
  }
  return difference == 0;
}

struct kvp_session *kvp_session_authenticate(struct kvp_daemon *daemon, uint64_t session_id, const void *secret,
                                             size_t secret_bytes, struct kvp_error *error) {
  struct kvp_session *session = find_open(&daemon->sessions, session_id);
  if (session == NULL) {
    (void)kvp_error_set_at(error, KVP_UNKNOWN_SESSION, -1, "session", -1, (int64_t)session_id,
                           "session %" PRIu64 " is not open", session_id);
    return NULL;
  }
  if (secret_bytes != sizeof session->secret) {
    (void)kvp_error_set_at(error, KVP_WRONG_SECRET, -1, "secret", -1, (int64_t)secret_bytes,
                           "the secret of session %" PRIu64 " has %zu bytes, %d are wanted", session_id, secret_bytes,
                           kvp_secret_bytes);
    return NULL;
  }
  if (!secrets_equal(secret, session->secret, sizeof session->secret)) {
    (void)kvp_error_set_at(error, KVP_WRONG_SECRET, -1, "secret", -1, 0, "the secret is not that of session %" PRIu64,
                           session_id);
    return NULL;
  }
  return session;
}

/* The last event and the stream's end. OK ends it with OK, anything else with that error. */
static void end_stream(struct kvp_session *session, const struct kvp_error *reason) {
  struct kvp_rpc_call *stream = session->stream;
  session->stream = NULL;
  kvp_rpc_call_set_state(stream, NULL);
  if (reason != NULL) {
    struct kvp_rpc_error_detail detail;
    kvp_rpc_error_detail_init(&detail, reason);
    Kvpool__V1__SessionEvent event = KVPOOL__V1__SESSION_EVENT__INIT;
    event.event_case = KVPOOL__V1__SESSION_EVENT__EVENT_CLOSING;
    event.closing = &detail.body;
    (void)kvp_rpc_call_send(stream, &event.base);
    if (reason->status == KVP_OK) {
      kvp_rpc_call_finish(stream, NULL);
    } else {
      kvp_rpc_call_fail(stream, reason);
    }
  }
  kvp_rpc_call_unref(stream);
}

static void end_attachments(struct kvp_daemon *daemon, const struct kvp_session *session,
                            const struct kvp_error *reason) {
  struct kvp_error ended;
  if (reason == NULL) {
    (void)kvp_error_set(&ended, KVP_CANCELLED, "the owner of session %" PRIu64 " has ended it", session->id);
    reason = &ended;
  }
  kvp_attachment_end_all(daemon, session, reason);
}

void kvp_session_close(struct kvp_daemon *daemon, struct kvp_session *session, const struct kvp_error *reason) {
  assert(session->state == KVP_SESSION_OPEN && session->stream != NULL);
  kvp_step_stream_end_all(daemon, session, reason);
  end_attachments(daemon, session, reason);
  end_stream(session, reason);
  uint32_t blocks = kvp_pool_free_owner_all(daemon, session->slot, kvp_step_fence(daemon, session->slot));
  kvp_step_fence_post(daemon);
  assert(blocks == session->blocks);
  session->blocks = 0;
  kvp_log(KVP_LOG_INFO, "session_closed", "session=%" PRIu64 " reason=\"%s\" blocks=%u buffers=%u steps_in_flight=%u",
          session->id, reason == NULL ? "the client ended its stream" : reason->text, blocks, session->buffer_count,
          session->steps_in_flight);
  kvp_buffer_release_all(daemon, session);
  kvp_pool_reach_all(daemon);
  session->state = KVP_SESSION_CLOSING; /* only now: until here nothing that ends could have settled it */
  daemon->sessions.closing_count++;
  kvp_step_drop_session(daemon, session);
  kvp_session_settle(daemon, session);
}

void kvp_session_settle(struct kvp_daemon *daemon, struct kvp_session *session) {
  if (session->state != KVP_SESSION_CLOSING || session->steps_in_flight > 0 || session->queues > 0 ||
      session->buffer_count > 0 || session->attachments > 0 || kvp_pool_quarantined_by(daemon, session->slot) > 0) {
    return;
  }
  assert(daemon->sessions.slots[session->slot] == session && session->stream == NULL && session->buffers == NULL);
  kvp_session_torn_drop(session);
  kvp_namespace_drop(&daemon->sessions.namespaces, session->namespace_number);
  daemon->sessions.slots[session->slot] = NULL;
  daemon->sessions.count--;
  daemon->sessions.closing_count--;
  kvp_log(KVP_LOG_DEBUG, "session_gone", "session=%" PRIu64 " slot=%u", session->id, session->slot);
  free(session);
}

void kvp_session_settle_all(struct kvp_daemon *daemon) {
  for (uint32_t slot = 1; slot <= kvp_sessions_max && daemon->sessions.closing_count > 0; slot++) {
    if (daemon->sessions.slots[slot] != NULL) {
      kvp_session_settle(daemon, daemon->sessions.slots[slot]);
    }
  }
}

void kvp_session_close_all(struct kvp_daemon *daemon, const struct kvp_error *reason) {
  for (uint32_t slot = 1; slot <= kvp_sessions_max; slot++) {
    struct kvp_session *session = daemon->sessions.slots[slot];
    if (session != NULL && session->state == KVP_SESSION_OPEN) {
      kvp_session_close(daemon, session, reason);
    }
  }
}

void kvp_session_tell_device(struct kvp_daemon *daemon, const char *device, bool lost) {
  Kvpool__V1__SessionEvent restored = KVPOOL__V1__SESSION_EVENT__INIT;
  restored.event_case = KVPOOL__V1__SESSION_EVENT__EVENT_DEVICE_RESTORED;
  restored.device_restored = (char *)device;
  for (uint32_t slot = 1; slot <= kvp_sessions_max; slot++) {
    struct kvp_session *session = daemon->sessions.slots[slot];
    if (session == NULL || session->state != KVP_SESSION_OPEN) {
      continue;
    }
    if (lost) {
      kvp_session_torn_tell(session, device);
    } else {
      (void)kvp_rpc_call_send(session->stream, &restored.base);
    }
  }
}
