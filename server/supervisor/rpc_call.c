/* A call: arrival, reads, end. What always holds: `pending` counts every batch that is not done and every event that
 * is not delivered, so a call is closed exactly once, by whoever takes the last one away, and from the loop's queue,
 * never from within a function that a method called.
 *
 * arrival -> [read]* -> closed; beside it the batch that tells of the client's end (`close`) from the first moment
 * on.
 */
#include "server/supervisor/rpc_internal.h"

#include <assert.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/support/alloc.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/limits.h"
#include "server/supervisor/rpc_decode.h"

enum { method_name_bytes_max = 100 }; /* of an unknown method, in the error's text */

static bool streams_requests(const struct kvp_rpc_call *call) {
  return call->slot->method.shape == KVP_RPC_CLIENT_STREAM || call->slot->method.shape == KVP_RPC_BIDI;
}

static bool is_known(const struct kvp_rpc_call *call) {
  return call->slot->registered != NULL;
}

/* ---- pending ---- */

void kvp_rpc_call_start_batch(struct kvp_rpc_call *call, const grpc_op *ops, size_t op_count,
                              struct kvp_rpc_event *event) {
  atomic_fetch_add(&call->pending, 1);
  atomic_store_explicit(&event->handed_over, true, memory_order_release);
  const grpc_call_error failed = grpc_call_start_batch(call->grpc, ops, op_count, event, NULL);
  assert(failed == GRPC_CALL_OK); /* anything else is a misuse of ours, whatever the client did */
  (void)failed;
}

static void call_free(struct kvp_rpc_call *call) {
  grpc_metadata_array_destroy(&call->metadata);
  grpc_call_details_destroy(&call->details);
  free(call);
}

/* Any thread. Gives back what is gRPC's; the call counts as open no longer. */
static void call_retire(struct kvp_rpc_call *call) {
  kvp_rpc_reply_deinit(call);
  grpc_call_unref(call->grpc);
  call->grpc = NULL;
  kvp_rpc_server_release(call->server);
}

/* Loop thread. */
static void call_closed(struct kvp_rpc_call *call) {
  const struct kvp_rpc_method *method = &call->slot->method;
  call->over = true;
  call_retire(call);
  if (call->announced && method->on_closed != NULL) {
    method->on_closed(call->server->context, call);
  }
  kvp_rpc_call_unref(call);
}

void kvp_rpc_call_delivered(struct kvp_rpc_call *call) {
  if (atomic_fetch_sub(&call->pending, 1) == 1) {
    call_closed(call);
  }
}

static void deliver_closed(struct kvp_rpc_event *event);

void kvp_rpc_call_completed(struct kvp_rpc_call *call, struct kvp_rpc_event *event) {
  if (atomic_fetch_sub(&call->pending, 1) > 1) {
    return;
  }
  if (call->slot->method.on_closed == NULL) { /* nobody waits for it: spares the loop a wake-up */
    call_retire(call);
    kvp_rpc_call_unref(call);
  } else {
    event->deliver = deliver_closed;
    kvp_rpc_server_post(call->server, event);
  }
}

/* ---- the client's end ---- */

static void close_complete(struct kvp_rpc_event *event, bool ok) {
  (void)ok;
  struct kvp_rpc_call *call = KVP_RPC_CONTAINER(event, struct kvp_rpc_call, close);
  if (atomic_load(&call->status_started)) {
    kvp_rpc_call_completed(call, event);
  } else {
    kvp_rpc_server_post(call->server, event);
  }
}

static void deliver_cancelled(struct kvp_rpc_event *event) {
  struct kvp_rpc_call *call = KVP_RPC_CONTAINER(event, struct kvp_rpc_call, close);
  call->over = true;
  kvp_rpc_reply_drop_queue(call);
  kvp_rpc_call_delivered(call);
}

/* The event is the last one's, whichever of the call's that is; only these two can be. */
static void deliver_closed(struct kvp_rpc_event *event) {
  struct kvp_rpc_call *call = event->complete == close_complete
                                  ? KVP_RPC_CONTAINER(event, struct kvp_rpc_call, close)
                                  : KVP_RPC_CONTAINER(event, struct kvp_rpc_call, status);
  call_closed(call);
}

/* Any thread. */
static void start_close(struct kvp_rpc_call *call) {
  const grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER, .data.recv_close_on_server.cancelled = &call->cancelled};
  call->close_started = true;
  kvp_rpc_call_start_batch(call, &op, 1, &call->close);
}

/* ---- reading ---- */

static enum kvp_status decode_slice(struct kvp_rpc_call *call, grpc_slice slice) {
  return kvp_rpc_decode(call->slot->method.request, GRPC_SLICE_START_PTR(slice), GRPC_SLICE_LENGTH(slice),
                        kvp_message_arena_bytes_max, &call->message, &call->refusal);
}

/* Completion-queue thread. */
static enum kvp_status decode_payload(struct kvp_rpc_call *call) {
  /* gRPC has refused what is larger or compressed; it must never get to the decoder. */
  if (call->payload->data.raw.compression != GRPC_COMPRESS_NONE) {
    return kvp_error_set(&call->refusal, KVP_UNIMPLEMENTED, "compressed messages are not taken");
  }
  const size_t bytes = grpc_byte_buffer_length(call->payload);
  if (bytes > kvp_message_bytes_max) {
    return kvp_error_set(&call->refusal, KVP_TOO_LARGE, "a message of %zu bytes, allowed are %d", bytes,
                         kvp_message_bytes_max);
  }
  grpc_byte_buffer_reader reader;
  if (!grpc_byte_buffer_reader_init(&reader, call->payload)) {
    return kvp_error_set(&call->refusal, KVP_MALFORMED, "a message that gRPC can't read");
  }
  enum kvp_status status = KVP_OK;
  if (call->payload->data.raw.slice_buffer.count == 1) {
    status = decode_slice(call, call->payload->data.raw.slice_buffer.slices[0]);
  } else {
    grpc_slice whole = grpc_byte_buffer_reader_readall(&reader);
    status = decode_slice(call, whole);
    grpc_slice_unref(whole);
  }
  grpc_byte_buffer_reader_destroy(&reader);
  return status;
}

/* Completion-queue thread. Turns payload into outcome. */
static void take_payload(struct kvp_rpc_call *call) {
  if (call->payload == NULL) {
    /* A client that died in the middle of an upload must not look like one that finished it. */
    call->outcome = grpc_call_failed_before_recv_message(call->grpc) ? KVP_RPC_READ_FAILED : KVP_RPC_READ_HALF_CLOSE;
    return;
  }
  call->outcome = decode_payload(call) == KVP_OK ? KVP_RPC_READ_MESSAGE : KVP_RPC_READ_REFUSED;
  grpc_byte_buffer_destroy(call->payload);
  call->payload = NULL;
}

static void read_complete(struct kvp_rpc_event *event, bool ok) {
  struct kvp_rpc_call *call = KVP_RPC_CONTAINER(event, struct kvp_rpc_call, read);
  take_payload(call);
  if (!ok && call->outcome == KVP_RPC_READ_HALF_CLOSE) {
    call->outcome = KVP_RPC_READ_FAILED;
  }
  kvp_rpc_server_post(call->server, event);
}

/* Any thread, when no read is on. */
static void start_read(struct kvp_rpc_call *call) {
  const grpc_op op = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &call->payload};
  kvp_rpc_call_start_batch(call, &op, 1, &call->read);
}

static void announce(struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  call->announced = true;
  call->slot->method.on_message(call->server->context, call, message);
}

/* Loop thread. The outcome's message goes with it. */
static void deliver_outcome(struct kvp_rpc_call *call) {
  struct kvp_rpc_message *message = call->message;
  call->message = NULL;
  call->reading = false;
  if (!call->over && !call->finishing) {
    switch (call->outcome) {
    case KVP_RPC_READ_MESSAGE:
      announce(call, message);
      break;
    case KVP_RPC_READ_REFUSED:
      kvp_rpc_call_fail(call, &call->refusal);
      break;
    case KVP_RPC_READ_HALF_CLOSE:
      call->half_closed = true;
      if (streams_requests(call)) {
        announce(call, NULL);
      } else {
        (void)kvp_error_set(&call->refusal, KVP_MALFORMED, "a call without a request message");
        kvp_rpc_call_fail(call, &call->refusal);
      }
      break;
    case KVP_RPC_READ_FAILED: /* the call's end is on its way */
      break;
    }
  }
  kvp_rpc_message_unref(message);
}

static void deliver_read(struct kvp_rpc_event *event) {
  struct kvp_rpc_call *call = KVP_RPC_CONTAINER(event, struct kvp_rpc_call, read);
  deliver_outcome(call);
  kvp_rpc_call_delivered(call);
}

void kvp_rpc_call_read_next(struct kvp_rpc_call *call) {
  if (call->over || call->finishing || call->half_closed) {
    return;
  }
  assert(streams_requests(call));
  assert(!call->reading); /* once per message */
  call->reading = true;
  start_read(call);
}

/* ---- arrival ---- */

/* The N of gRPC's "fd:N"; -1 when it says anything else. */
static int connection_number(grpc_call *call) {
  char *peer = grpc_call_get_peer(call);
  long number = -1;
  if (strncmp(peer, "fd:", 3) == 0) {
    char *end = NULL;
    number = strtol(peer + 3, &end, 10);
    if (*end != '\0' || number < 0 || number > INT32_MAX) {
      number = -1;
    }
  }
  gpr_free(peer);
  return (int)number;
}

static void arrival_complete(struct kvp_rpc_event *event, bool ok) {
  struct kvp_rpc_call *call = KVP_RPC_CONTAINER(event, struct kvp_rpc_call, arrival);
  if (!ok) { /* the server shuts down: no call came */
    call_free(call);
    return;
  }
  struct kvp_rpc_server *server = call->server;
  const struct kvp_rpc_slot *slot = call->slot;
  atomic_fetch_add(&server->users, 1);
  call->connection_number = connection_number(call->grpc);
  if (streams_requests(call)) {
    start_close(call);
    call->reading = true;
    start_read(call); /* its event comes behind this one: that takes this thread */
  } else if (is_known(call)) {
    take_payload(call);
  }
  kvp_rpc_server_post(server, event);
  kvp_rpc_call_arm(server, slot);
}

/* Why the call can't be served at all; OK when it can. */
static enum kvp_status admit(struct kvp_rpc_call *call, struct kvp_error *error) {
  const struct kvp_rpc_server *server = call->server;
  if (!kvp_rpc_listener_peer(&server->listener, call->connection_number, &call->peer)) {
    return kvp_error_set(error, KVP_INTERNAL, "no credentials for this connection");
  }
  if (!is_known(call)) {
    const grpc_slice name = call->details.method;
    const size_t bytes =
        GRPC_SLICE_LENGTH(name) < method_name_bytes_max ? GRPC_SLICE_LENGTH(name) : method_name_bytes_max;
    return kvp_error_set(error, KVP_UNIMPLEMENTED, "no method \"%.*s\"", (int)bytes,
                         (const char *)GRPC_SLICE_START_PTR(name));
  }
  if (server->draining && call->slot->method.on_message != kvp_rpc_health_check.on_message) {
    return kvp_error_set(error, KVP_SHUTTING_DOWN, "the daemon is draining and takes no new calls");
  }
  if (call->slot->method.operator_only && !call->peer.is_operator) {
    return kvp_error_set(error, KVP_PERMISSION_DENIED, "%s is an operator's right; the caller's uid is %ju",
                         call->slot->method.name, (uintmax_t)call->peer.uid);
  }
  return KVP_OK;
}

static void deliver_arrival(struct kvp_rpc_event *event) {
  struct kvp_rpc_call *call = KVP_RPC_CONTAINER(event, struct kvp_rpc_call, arrival);
  struct kvp_error error;
  if (admit(call, &error) != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
  }
  if (!streams_requests(call)) {
    deliver_outcome(call);
  }
  if (!call->close_started) { /* not answered at once: from now on the client's end is news */
    start_close(call);
  }
  kvp_rpc_call_delivered(call);
}

void kvp_rpc_call_arm(struct kvp_rpc_server *server, const struct kvp_rpc_slot *slot) {
  struct kvp_rpc_call *call = calloc(1, sizeof *call);
  assert(call != NULL); /* gRPC itself aborts without memory */
  call->server = server;
  call->slot = slot;
  atomic_init(&call->references, 1);
  atomic_init(&call->pending, 1); /* the arrival */
  call->arrival.complete = arrival_complete;
  call->arrival.deliver = deliver_arrival;
  call->read.complete = read_complete;
  call->read.deliver = deliver_read;
  call->close.complete = close_complete;
  call->close.deliver = deliver_cancelled;
  kvp_rpc_reply_init(call);
  grpc_metadata_array_init(&call->metadata);
  grpc_call_details_init(&call->details);
  atomic_store_explicit(&call->arrival.handed_over, true, memory_order_release);
  if (slot->registered == NULL) {
    (void)grpc_server_request_call(server->grpc, &call->grpc, &call->details, &call->metadata, server->queue,
                                   server->queue, &call->arrival);
  } else {
    const bool with_payload = !streams_requests(call);
    (void)grpc_server_request_registered_call(server->grpc, slot->registered, &call->grpc, &call->deadline,
                                              &call->metadata, with_payload ? &call->payload : NULL, server->queue,
                                              server->queue, &call->arrival);
  }
}

/* ---- what methods see ---- */

struct kvp_rpc_call *kvp_rpc_call_ref(struct kvp_rpc_call *call) {
  const unsigned before = atomic_fetch_add(&call->references, 1);
  assert(before > 0);
  (void)before;
  return call;
}

void kvp_rpc_call_unref(struct kvp_rpc_call *call) {
  const unsigned before = atomic_fetch_sub(&call->references, 1);
  assert(before > 0);
  if (before == 1) {
    assert(call->grpc == NULL);
    call_free(call);
  }
}

void kvp_rpc_call_set_state(struct kvp_rpc_call *call, void *state) {
  call->state = state;
}

void *kvp_rpc_call_state(const struct kvp_rpc_call *call) {
  return call->state;
}

const struct kvp_rpc_peer *kvp_rpc_call_peer(const struct kvp_rpc_call *call) {
  return &call->peer;
}
