/* See rpc_client.h. A completion queue that is plucked: the calling thread does the I/O of what it waits for. */
#include "tests/bench/rpc_client.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { path_bytes_max = 128 };

struct bench_client {
  grpc_channel *channel;
  grpc_completion_queue *queue;
};

struct bench_call {
  struct bench_client *client;
  grpc_call *call;
  char path[path_bytes_max];
  grpc_metadata_array initial_metadata; /* its batch is started with the call and plucked at the end */
  bool cancelled;
};

static void fail(const char *path, const char *what) {
  (void)fprintf(stderr, "bench: %s: %s\n", path, what);
  exit(1);
}

static void method_path(const char *method, char path[path_bytes_max]) {
  (void)snprintf(path, path_bytes_max, "/kvpool.v1.Kvpool/%s", method);
}

static grpc_byte_buffer *packed(const ProtobufCMessage *message) {
  grpc_slice slice = grpc_slice_malloc(protobuf_c_message_get_packed_size(message));
  (void)protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
  grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
  grpc_slice_unref(slice);
  return buffer;
}

/* Takes the buffer. */
static ProtobufCMessage *unpacked(const char *path, grpc_byte_buffer *buffer,
                                  const ProtobufCMessageDescriptor *descriptor) {
  grpc_byte_buffer_reader reader;
  if (!grpc_byte_buffer_reader_init(&reader, buffer)) {
    fail(path, "a response can't be read");
  }
  grpc_slice slice = grpc_byte_buffer_reader_readall(&reader);
  grpc_byte_buffer_reader_destroy(&reader);
  grpc_byte_buffer_destroy(buffer);
  ProtobufCMessage *message =
      protobuf_c_message_unpack(descriptor, NULL, GRPC_SLICE_LENGTH(slice), GRPC_SLICE_START_PTR(slice));
  grpc_slice_unref(slice);
  if (!message) {
    fail(path, "a response can't be decoded");
  }
  return message;
}

static void start(grpc_call *call, const char *path, const grpc_op *ops, size_t count, void *tag) {
  if (grpc_call_start_batch(call, ops, count, tag, NULL) != GRPC_CALL_OK) {
    fail(path, "grpc_call_start_batch refused a batch");
  }
}

/* Whether what the batch did succeeded. */
static bool wait_for(struct bench_client *client, void *tag) {
  grpc_event event = grpc_completion_queue_pluck(client->queue, tag, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
  return event.type == GRPC_OP_COMPLETE && event.success;
}

static grpc_call *new_call(struct bench_client *client, const char *path) {
  grpc_slice method = grpc_slice_from_copied_string(path);
  grpc_call *call = grpc_channel_create_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, client->queue, method,
                                             NULL, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
  grpc_slice_unref(method);
  return call;
}

struct bench_client *bench_client_new(const char *socket_path) {
  grpc_init();
  struct bench_client *client = calloc(1, sizeof *client);
  char target[256];
  (void)snprintf(target, sizeof target, "unix:%s", socket_path);
  /* A daemon that is just starting is looked for again at once. */
  grpc_arg arguments[] = {
      {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, .value.integer = 50},
      {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, .value.integer = 100},
      {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, .value.integer = -1},
  };
  grpc_channel_args all = {.num_args = sizeof arguments / sizeof arguments[0], .args = arguments};
  grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
  if (!client) {
    fail("client", "out of memory");
  }
  client->channel = grpc_channel_create(target, credentials, &all);
  client->queue = grpc_completion_queue_create_for_pluck(NULL);
  grpc_channel_credentials_release(credentials);
  return client;
}

void bench_client_destroy(struct bench_client *client) {
  grpc_channel_destroy(client->channel);
  grpc_completion_queue_shutdown(client->queue);
  grpc_completion_queue_destroy(client->queue);
  free(client);
  grpc_shutdown_blocking();
}

static void check_status(const char *path, grpc_status_code status, grpc_slice details, bool cancelled) {
  if (status == GRPC_STATUS_OK || (cancelled && status == GRPC_STATUS_CANCELLED)) {
    return;
  }
  char *text = grpc_slice_to_c_string(details);
  (void)fprintf(stderr, "bench: %s: status %d: %s\n", path, (int)status, text);
  exit(1);
}

ProtobufCMessage *bench_client_call(struct bench_client *client, const char *method, const ProtobufCMessage *request,
                                    const ProtobufCMessageDescriptor *response) {
  char path[path_bytes_max];
  method_path(method, path);
  grpc_call *call = new_call(client, path);
  grpc_byte_buffer *sent = packed(request);
  grpc_byte_buffer *received = NULL;
  grpc_metadata_array initial, trailing;
  grpc_metadata_array_init(&initial);
  grpc_metadata_array_init(&trailing);
  grpc_status_code status = GRPC_STATUS_UNKNOWN;
  grpc_slice details = grpc_empty_slice();
  grpc_op ops[] = {
      {.op = GRPC_OP_SEND_INITIAL_METADATA},
      {.op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = sent},
      {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
      {.op = GRPC_OP_RECV_INITIAL_METADATA, .data.recv_initial_metadata.recv_initial_metadata = &initial},
      {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &received},
      {.op = GRPC_OP_RECV_STATUS_ON_CLIENT,
       .data.recv_status_on_client = {.trailing_metadata = &trailing, .status = &status, .status_details = &details}},
  };
  start(call, path, ops, sizeof ops / sizeof ops[0], call);
  (void)wait_for(client, call);
  if (status != GRPC_STATUS_UNAVAILABLE) {
    check_status(path, status, details, false);
  }
  ProtobufCMessage *message = received ? unpacked(path, received, response) : NULL;
  grpc_slice_unref(details);
  grpc_metadata_array_destroy(&initial);
  grpc_metadata_array_destroy(&trailing);
  grpc_byte_buffer_destroy(sent);
  grpc_call_unref(call);
  return message;
}

struct bench_call *bench_call_start(struct bench_client *client, const char *method) {
  struct bench_call *call = calloc(1, sizeof *call);
  if (!call) {
    fail(method, "out of memory");
  }
  method_path(method, call->path);
  call->client = client;
  call->call = new_call(client, call->path);
  grpc_metadata_array_init(&call->initial_metadata);
  grpc_op receive = {.op = GRPC_OP_RECV_INITIAL_METADATA,
                     .data.recv_initial_metadata.recv_initial_metadata = &call->initial_metadata};
  start(call->call, call->path, &receive, 1, &call->initial_metadata);
  grpc_op send = {.op = GRPC_OP_SEND_INITIAL_METADATA};
  start(call->call, call->path, &send, 1, call);
  (void)wait_for(client, call);
  return call;
}

void bench_call_send(struct bench_call *call, const ProtobufCMessage *message, bool last) {
  grpc_byte_buffer *sent = packed(message);
  grpc_op ops[] = {{.op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = sent},
                   {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}};
  start(call->call, call->path, ops, last ? 2 : 1, call);
  /* A stream that the daemon has ended refuses what is sent: the status, read later, says why. */
  (void)wait_for(call->client, call);
  grpc_byte_buffer_destroy(sent);
}

void bench_call_send_close(struct bench_call *call) {
  grpc_op close = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
  start(call->call, call->path, &close, 1, call);
  (void)wait_for(call->client, call);
}

ProtobufCMessage *bench_call_receive(struct bench_call *call, const ProtobufCMessageDescriptor *response) {
  grpc_byte_buffer *received = NULL;
  grpc_op op = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &received};
  start(call->call, call->path, &op, 1, call);
  (void)wait_for(call->client, call);
  return received ? unpacked(call->path, received, response) : NULL;
}

void bench_call_cancel(struct bench_call *call) {
  call->cancelled = true;
  (void)grpc_call_cancel(call->call, NULL);
}

void bench_call_finish(struct bench_call *call) {
  grpc_metadata_array trailing;
  grpc_metadata_array_init(&trailing);
  grpc_status_code status = GRPC_STATUS_UNKNOWN;
  grpc_slice details = grpc_empty_slice();
  grpc_op op = {
      .op = GRPC_OP_RECV_STATUS_ON_CLIENT,
      .data.recv_status_on_client = {.trailing_metadata = &trailing, .status = &status, .status_details = &details}};
  start(call->call, call->path, &op, 1, call);
  (void)wait_for(call->client, call);
  (void)wait_for(call->client, &call->initial_metadata);
  check_status(call->path, status, details, call->cancelled);
  grpc_slice_unref(details);
  grpc_metadata_array_destroy(&trailing);
  grpc_metadata_array_destroy(&call->initial_metadata);
  grpc_call_unref(call->call);
  free(call);
}
