/* What goes back to the client: messages in order, then the status. Loop thread but for the completions. What always
 * holds: one batch that sends is on at a time; the status comes after every message queued before it, in one batch
 * with the last of them. */
#include "server/supervisor/rpc_internal.h"

#include <assert.h>
#include <stdlib.h>

static struct kvp_rpc_send *send_new(const ProtobufCMessage *message) {
  const size_t bytes = protobuf_c_message_get_packed_size(message);
  struct kvp_rpc_send *send = malloc(sizeof *send);
  assert(send != NULL); /* gRPC itself aborts without memory */
  grpc_slice slice = grpc_slice_malloc(bytes);
  (void)protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
  *send = (struct kvp_rpc_send){.buffer = grpc_raw_byte_buffer_create(&slice, 1), .bytes = bytes};
  grpc_slice_unref(slice);
  return send;
}

static void send_destroy(struct kvp_rpc_send *send) {
  grpc_byte_buffer_destroy(send->buffer);
  free(send);
}

static void queue_push(struct kvp_rpc_call *call, struct kvp_rpc_send *send) {
  if (call->last_queued == NULL) {
    call->first_queued = send;
  } else {
    call->last_queued->next = send;
  }
  call->last_queued = send;
  call->queued_bytes += send->bytes;
}

static struct kvp_rpc_send *queue_pop(struct kvp_rpc_call *call) {
  struct kvp_rpc_send *send = call->first_queued;
  if (send == NULL) {
    return NULL;
  }
  call->first_queued = send->next;
  if (call->first_queued == NULL) {
    call->last_queued = NULL;
  }
  call->queued_bytes -= send->bytes;
  return send;
}

void kvp_rpc_reply_drop_queue(struct kvp_rpc_call *call) {
  for (struct kvp_rpc_send *send = queue_pop(call); send != NULL; send = queue_pop(call)) {
    send_destroy(send);
  }
}

/* Starts what comes next, if anything and if nothing is on. */
static void pump(struct kvp_rpc_call *call) {
  if (call->over || call->sending != NULL || atomic_load(&call->status_started)) {
    return;
  }
  call->sending = queue_pop(call);
  const bool last = call->finishing && call->first_queued == NULL;
  if (call->sending == NULL && !last) {
    return;
  }
  grpc_op ops[4] = {0};
  size_t op_count = 0;
  if (!call->headers_sent) {
    call->headers_sent = true;
    ops[op_count++].op = GRPC_OP_SEND_INITIAL_METADATA;
  }
  if (call->sending != NULL) {
    grpc_op *op = &ops[op_count++];
    op->op = GRPC_OP_SEND_MESSAGE;
    op->data.send_message.send_message = call->sending->buffer;
  }
  if (last) {
    grpc_op *op = &ops[op_count++];
    op->op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    op->data.send_status_from_server.status = call->trailer.code;
    if (call->trailer.code != GRPC_STATUS_OK) {
      op->data.send_status_from_server.status_details = &call->trailer.text;
      op->data.send_status_from_server.trailing_metadata = &call->trailing_metadata;
      op->data.send_status_from_server.trailing_metadata_count = GRPC_SLICE_IS_EMPTY(call->trailer.details) ? 0 : 1;
    }
    atomic_store(&call->status_started, true);
    if (!call->close_started) {
      call->close_started = true;
      op = &ops[op_count++];
      op->op = GRPC_OP_RECV_CLOSE_ON_SERVER;
      op->data.recv_close_on_server.cancelled = &call->cancelled;
    }
  }
  kvp_rpc_call_start_batch(call, ops, op_count, last ? &call->status : &call->write);
}

static void write_complete(struct kvp_rpc_event *event, bool ok) {
  (void)ok; /* false: the call is cancelled, and `close` says so */
  struct kvp_rpc_call *call = KVP_RPC_CONTAINER(event, struct kvp_rpc_call, write);
  kvp_rpc_server_post(call->server, event);
}

static void deliver_written(struct kvp_rpc_event *event) {
  struct kvp_rpc_call *call = KVP_RPC_CONTAINER(event, struct kvp_rpc_call, write);
  const struct kvp_rpc_method *method = &call->slot->method;
  const bool was_above = call->queued_bytes >= kvp_rpc_low_water_bytes;
  send_destroy(call->sending);
  call->sending = NULL;
  pump(call);
  const bool fell = was_above && call->queued_bytes < kvp_rpc_low_water_bytes;
  if (fell && !call->over && !call->finishing && method->on_writable != NULL) {
    method->on_writable(call->server->context, call);
  }
  kvp_rpc_call_delivered(call);
}

static void status_complete(struct kvp_rpc_event *event, bool ok) {
  (void)ok;
  kvp_rpc_call_completed(KVP_RPC_CONTAINER(event, struct kvp_rpc_call, status), event);
}

void kvp_rpc_reply_init(struct kvp_rpc_call *call) {
  atomic_init(&call->status_started, false);
  call->write.complete = write_complete;
  call->write.deliver = deliver_written;
  call->status.complete = status_complete;
}

void kvp_rpc_reply_deinit(struct kvp_rpc_call *call) {
  kvp_rpc_reply_drop_queue(call);
  if (call->sending != NULL) {
    send_destroy(call->sending);
    call->sending = NULL;
  }
  if (call->trailer.code != GRPC_STATUS_OK) {
    kvp_rpc_trailer_deinit(&call->trailer);
  }
}

bool kvp_rpc_call_send(struct kvp_rpc_call *call, const ProtobufCMessage *message) {
  if (call->over || call->finishing) {
    return false;
  }
  queue_push(call, send_new(message));
  pump(call);
  return true;
}

size_t kvp_rpc_call_queued_bytes(const struct kvp_rpc_call *call) {
  return call->queued_bytes;
}

void kvp_rpc_call_finish(struct kvp_rpc_call *call, const ProtobufCMessage *reply) {
  if (call->over || call->finishing) {
    return;
  }
  const enum kvp_rpc_shape shape = call->slot->method.shape;
  assert((reply != NULL) == (shape == KVP_RPC_UNARY || shape == KVP_RPC_CLIENT_STREAM));
  if (reply != NULL) {
    queue_push(call, send_new(reply));
  }
  call->finishing = true;
  pump(call);
}

void kvp_rpc_call_fail(struct kvp_rpc_call *call, const struct kvp_error *error) {
  assert(error->status != KVP_OK);
  if (call->over || call->finishing) {
    return;
  }
  kvp_rpc_trailer_init(&call->trailer, error);
  call->trailing_metadata.key = grpc_slice_from_static_string("grpc-status-details-bin");
  call->trailing_metadata.value = call->trailer.details;
  call->finishing = true;
  pump(call);
}

void kvp_rpc_reply_fail(struct kvp_rpc_call *call, grpc_status_code code, const char *text) {
  if (call->over || call->finishing) {
    return;
  }
  call->trailer.code = code;
  call->trailer.text = grpc_slice_from_static_string(text);
  call->trailer.details = grpc_empty_slice();
  call->finishing = true;
  pump(call);
}
