/* A call that runs steps. */
#include "server/supervisor/step_caller.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "server/supervisor/step_messages.h"
#include "server/supervisor/step_queue.h"

void kvp_step_caller_init(struct kvp_step_caller *caller, struct kvp_daemon *daemon, struct kvp_rpc_call *call,
                          const struct kvp_session *session) {
  memset(caller, 0, sizeof *caller);
  caller->daemon = daemon;
  caller->call = kvp_rpc_call_ref(call);
  caller->is_operator = session == NULL;
  if (session != NULL) {
    caller->session_slot = session->slot;
    caller->session_id = session->id;
  }
}

/* While it is there, closing or not; NULL for an operator's call. */
static struct kvp_session *caller_session_left(const struct kvp_step_caller *caller) {
  struct kvp_session *session = caller->is_operator ? NULL : caller->daemon->sessions.slots[caller->session_slot];
  return session != NULL && session->id == caller->session_id ? session : NULL;
}

enum kvp_status kvp_step_caller_place(struct kvp_step_caller *caller, struct kvp_device *device,
                                      struct kvp_error *error) {
  assert(caller->device == NULL);
  struct kvp_session *session = caller_session_left(caller);
  if (session != NULL && session->call_queues >= kvp_calls_per_session_max) {
    return kvp_error_set(error, KVP_BUSY, "session %" PRIu64 " has %u calls that run steps open, %d are allowed",
                         session->id, session->call_queues, kvp_calls_per_session_max);
  }
  uint32_t queue = kvp_step_queue_open(device, caller->is_operator, error);
  if (queue == 0) {
    return KVP_BUSY;
  }
  if (session != NULL) {
    session->call_queues++;
  }
  caller->device = device;
  caller->queue = queue;
  return KVP_OK;
}

struct kvp_session *kvp_step_caller_session(const struct kvp_step_caller *caller, struct kvp_error *error) {
  assert(!caller->is_operator);
  struct kvp_session *session = caller_session_left(caller);
  if (session != NULL && session->state == KVP_SESSION_OPEN) {
    return session;
  }
  (void)kvp_error_set(error, KVP_UNKNOWN_SESSION, "session %" PRIu64 " was closed", caller->session_id);
  return NULL;
}

enum kvp_status kvp_step_caller_submit(const struct kvp_step_caller *caller, struct kvp_wire_step *encoded,
                                       struct kvp_pool *const *pools, uint32_t pool_count,
                                       const struct kvp_step_events *events, void *context, uint64_t tag,
                                       struct kvp_error *error) {
  struct kvp_session *session = NULL;
  if (!caller->is_operator) {
    session = kvp_step_caller_session(caller, error);
    if (session == NULL) {
      kvp_step_free(encoded);
      return KVP_UNKNOWN_SESSION;
    }
    encoded->owner = session->slot;
  }
  encoded->queue = caller->queue;
  return kvp_step_submit(caller->device, session, encoded, pools, pool_count, events, context, tag, error);
}

void kvp_step_caller_abandon(const struct kvp_step_caller *caller, void *context) {
  if (caller->device != NULL) {
    kvp_step_abandon(caller->device, context);
  }
}

void kvp_step_caller_deinit(struct kvp_step_caller *caller) {
  if (caller->device != NULL) {
    struct kvp_session *session = caller_session_left(caller);
    if (session != NULL) {
      session->call_queues--;
    }
    kvp_step_queue_close(caller->device, caller->queue);
  }
  kvp_rpc_call_unref(caller->call);
}

void kvp_step_caller_release_buffer(const struct kvp_step_caller *caller, uint64_t buffer_id) {
  struct kvp_session *session = buffer_id == 0 ? NULL : kvp_step_caller_session(caller, NULL);
  struct kvp_buffer *buffer = session == NULL ? NULL : kvp_buffer_find(session, buffer_id, NULL);
  if (buffer != NULL) {
    kvp_buffer_release(caller->daemon, buffer);
  }
}
