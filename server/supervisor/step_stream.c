/* A Steps call.
 *
 * Always holds: a stream with a session is in that session's list and counted in its `queues`, and its session is
 * OPEN; without one its call has been ended and only waits to be closed. `reading`: the next message has been asked
 * for.
 */
#include "server/supervisor/step_stream.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/step_encode.h"
#include "server/supervisor/step_messages.h"
#include "server/supervisor/step_queue.h"

struct kvp_step_stream {
  struct kvp_daemon *daemon;
  struct kvp_rpc_call *call;
  struct kvp_session *session;  /* NULL: ended */
  struct kvp_step_stream *next; /* of the session */
  struct kvp_step_stream *previous;
  uint32_t queues[kvp_devices_max]; /* on the devices it has used; 0: none */
  uint32_t steps;                   /* not finished */
  bool reading;
  bool half_closed;
};

/* ---- end --------------------------------------------------------------------------------------------------------
 */

/* Gives back everything the stream has of its session and its devices. */
static void stream_detach(struct kvp_step_stream *stream) {
  struct kvp_session *session = stream->session;
  for (uint32_t i = 0; i < stream->daemon->device_count; i++) {
    if (stream->queues[i] != 0) {
      kvp_step_abandon(&stream->daemon->devices[i], stream);
      kvp_step_queue_close(&stream->daemon->devices[i], stream->queues[i]);
      stream->queues[i] = 0;
    }
  }
  if (stream->previous == NULL) {
    session->step_streams = stream->next;
  } else {
    stream->previous->next = stream->next;
  }
  if (stream->next != NULL) {
    stream->next->previous = stream->previous;
  }
  session->queues--; /* last: until here it keeps a closing session */
  stream->session = NULL;
}

void kvp_step_stream_end_all(struct kvp_daemon *daemon, struct kvp_session *session, const struct kvp_error *reason) {
  struct kvp_error error;
  if (reason != NULL && reason->status != KVP_OK) {
    error = *reason;
  } else {
    (void)kvp_error_set(&error, KVP_UNKNOWN_SESSION, "session %" PRIu64 " was closed", session->id);
  }
  while (session->step_streams != NULL) {
    struct kvp_step_stream *stream = session->step_streams;
    assert(stream->daemon == daemon);
    stream_detach(stream);
    kvp_rpc_call_fail(stream->call, &error);
  }
}

void kvp_step_stream_on_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct kvp_step_stream *stream = kvp_rpc_call_state(call);
  if (stream == NULL) {
    return; /* it never became one */
  }
  if (stream->session != NULL) {
    stream_detach(stream);
  }
  kvp_rpc_call_unref(stream->call);
  free(stream);
}

static void stream_finish_if_over(struct kvp_step_stream *stream) {
  if (stream->half_closed && stream->steps == 0) {
    kvp_rpc_call_finish(stream->call, NULL);
  }
}

/* ---- events -----------------------------------------------------------------------------------------------------
 */

static void stream_step_accepted(void *context, uint64_t step_id) {
  const struct kvp_step_stream *stream = context;
  kvp_step_send_accepted(stream->call, step_id);
}

static void stream_step_finished(void *context, uint64_t step_id, const struct kvp_step_result *result) {
  struct kvp_step_stream *stream = context;
  stream->steps--;
  kvp_step_send_finished(stream->call, step_id, result);
  stream_finish_if_over(stream);
}

static const struct kvp_step_events stream_events = {
    .accepted = stream_step_accepted,
    .finished = stream_step_finished,
};

/* ---- messages ---------------------------------------------------------------------------------------------------
 */

static void stream_read_on(struct kvp_step_stream *stream) {
  if (!stream->reading && kvp_rpc_call_queued_bytes(stream->call) <= kvp_rpc_high_water_bytes) {
    stream->reading = true;
    kvp_rpc_call_read_next(stream->call);
  }
}

void kvp_step_stream_on_writable(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct kvp_step_stream *stream = kvp_rpc_call_state(call);
  if (stream != NULL && stream->session != NULL && !stream->half_closed) {
    stream_read_on(stream);
  }
}

static enum kvp_status stream_queue(struct kvp_step_stream *stream, struct kvp_device *device, uint32_t *queue,
                                    struct kvp_error *error) {
  uint32_t *place = &stream->queues[device->index];
  if (*place == 0) {
    *place = kvp_step_queue_open(device, false, error);
  }
  if (*place == 0) {
    return KVP_BUSY;
  }
  *queue = *place;
  return KVP_OK;
}

static enum kvp_status stream_submit(struct kvp_step_stream *stream, const Kvpool__V1__StepRequest *request,
                                     struct kvp_error *error) {
  struct kvp_encoded_step encoded;
  if (stream->daemon->state >= KVP_DAEMON_DRAINING) {
    return kvp_error_set(error, KVP_SHUTTING_DOWN, "the daemon is draining");
  }
  enum kvp_status status = kvp_step_encode(stream->daemon, stream->session, request, &encoded, error);
  if (status != KVP_OK) {
    return status;
  }
  status = stream_queue(stream, encoded.device, &encoded.wire->queue, error);
  if (status != KVP_OK) {
    kvp_step_free(encoded.wire);
    return status;
  }
  encoded.wire->owner = stream->session->slot;
  status = kvp_step_submit(encoded.device, stream->session, encoded.wire, encoded.pools, encoded.pool_count,
                           &stream_events, stream, request->step_id, error);
  stream->steps += status == KVP_OK;
  return status;
}

/* A later message that names a session must name this one. */
static enum kvp_status stream_check_session(struct kvp_step_stream *stream, const Kvpool__V1__SessionRef *reference,
                                            struct kvp_error *error) {
  if (reference == NULL) {
    return KVP_OK;
  }
  const struct kvp_session *session = kvp_method_session(stream->daemon, reference, error);
  if (session == NULL) {
    return error->status;
  }
  if (session != stream->session) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "session", -1, (int64_t)session->id,
                            "the stream is session %" PRIu64 "'s, the step names session %" PRIu64,
                            stream->session->id, session->id);
  }
  return KVP_OK;
}

static struct kvp_step_stream *stream_new(struct kvp_daemon *daemon, struct kvp_rpc_call *call,
                                          const Kvpool__V1__StepRequest *request, struct kvp_error *error) {
  struct kvp_session *session = kvp_method_session(daemon, request->session, error);
  if (session == NULL) {
    return NULL;
  }
  if (session->queues >= kvp_queues_per_session_max) {
    (void)kvp_error_set(error, KVP_BUSY, "session %" PRIu64 " has %u step streams open, %d are allowed", session->id,
                        session->queues, kvp_queues_per_session_max);
    return NULL;
  }
  struct kvp_step_stream *stream = kvp_allocate(1, sizeof *stream);
  stream->daemon = daemon;
  stream->call = kvp_rpc_call_ref(call);
  stream->session = session;
  stream->next = session->step_streams;
  if (stream->next != NULL) {
    stream->next->previous = stream;
  }
  session->step_streams = stream;
  session->queues++;
  kvp_rpc_call_set_state(call, stream);
  return stream;
}

static void stream_take(struct kvp_step_stream *stream, const Kvpool__V1__StepRequest *request) {
  struct kvp_error error;
  if (stream_submit(stream, request, &error) != KVP_OK) {
    stream->session->steps_refused++;
    kvp_step_send_refused(stream->call, request->step_id, &error);
  }
  stream_read_on(stream);
}

void kvp_step_stream_on_message(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  struct kvp_step_stream *stream = kvp_rpc_call_state(call);
  struct kvp_error error;
  if (message == NULL) {
    if (stream == NULL) {
      kvp_rpc_call_finish(call, NULL);
    } else if (stream->session != NULL) {
      stream->half_closed = true;
      stream_finish_if_over(stream);
    }
    return;
  }
  const Kvpool__V1__StepRequest *request = (const Kvpool__V1__StepRequest *)message->body;
  if (stream == NULL) {
    stream = stream_new(context, call, request, &error);
    if (stream == NULL) {
      kvp_rpc_call_fail(call, &error);
      return;
    }
  } else if (stream->session == NULL) {
    return;
  } else if (stream_check_session(stream, request->session, &error) != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  stream->reading = false;
  stream_take(stream, request);
}
