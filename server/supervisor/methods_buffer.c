/* CreateBuffer, WriteBuffer, ReadBuffer, ReleaseBuffer. Loop thread only. */
#include <inttypes.h>
#include <stdlib.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/byte_stream.h"
#include "server/supervisor/byte_writer.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/step_build.h"
#include "server/supervisor/step_caller.h"

/* ---- create -----------------------------------------------------------------------------------------------------
 */

struct create_call {
  struct kvp_step_caller caller; /* its session; it runs no steps */
  bool closed;
};

static void create_done(void *context, struct kvp_buffer *buffer, const struct kvp_error *error) {
  struct create_call *create = context;
  if (buffer == NULL) {
    kvp_rpc_call_fail(create->caller.call, error);
  } else if (create->closed) {
    kvp_buffer_release(create->caller.daemon, buffer); /* nobody knows of it */
  } else {
    Kvpool__V1__Buffer reply = KVPOOL__V1__BUFFER__INIT;
    reply.buffer_id = buffer->id;
    reply.device = buffer->device->name;
    reply.bytes = buffer->bytes;
    kvp_rpc_call_finish(create->caller.call, &reply.base);
  }
  if (!create->closed) {
    kvp_rpc_call_set_state(create->caller.call, NULL);
  }
  kvp_step_caller_deinit(&create->caller);
  free(create);
}

static void on_create_buffer(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__CreateBufferRequest *request = (const Kvpool__V1__CreateBufferRequest *)message->body;
  struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  struct kvp_device *device = session == NULL ? NULL : kvp_daemon_find_device(daemon, request->device, &error);
  if (device == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  struct create_call *create = kvp_allocate(1, sizeof *create);
  kvp_step_caller_init(&create->caller, daemon, call, session);
  kvp_rpc_call_set_state(call, create);
  kvp_buffer_create(daemon, session, device, request->bytes, create_done, create);
}

static void on_create_buffer_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct create_call *create = kvp_rpc_call_state(call);
  if (create != NULL) {
    create->closed = true;
  }
}

/* ---- write ------------------------------------------------------------------------------------------------------
 */

struct write_call {
  struct kvp_step_caller caller;
  struct kvp_byte_writer writer;
  uint64_t buffer_id;
  uint64_t bytes_written; /* handed to the executor */
  bool read_owed;         /* the next message has not been asked for */
  bool half_closed;
};

static void write_go_on(struct write_call *write) {
  if (write->half_closed) {
    if (write->writer.steps == 0) {
      Kvpool__V1__WriteBufferResponse reply = KVPOOL__V1__WRITE_BUFFER_RESPONSE__INIT;
      reply.bytes_written = write->bytes_written;
      kvp_rpc_call_finish(write->caller.call, &reply.base);
    }
  } else if (write->read_owed && !kvp_byte_writer_is_full(&write->writer)) {
    write->read_owed = false;
    kvp_rpc_call_read_next(write->caller.call);
  }
}

static void write_progress(void *context, const struct kvp_error *error) {
  struct write_call *write = context;
  if (error != NULL) {
    kvp_rpc_call_fail(write->caller.call, error);
  } else {
    write_go_on(write);
  }
}

/* Overflow-safe: nothing is added to an offset before it is known to be inside. */
static enum kvp_status buffer_check_range(const struct kvp_buffer *buffer, uint64_t offset, uint64_t bytes,
                                          struct kvp_error *error) {
  if (offset > buffer->bytes || bytes > buffer->bytes - offset) {
    return kvp_error_set_at(error, KVP_OUT_OF_RANGE, -1, "offset_bytes", -1, (int64_t)offset,
                            "buffer %" PRIu64 ": %" PRIu64 " bytes from offset %" PRIu64
                            " are not inside its %" PRIu64,
                            buffer->id, bytes, offset, buffer->bytes);
  }
  return KVP_OK;
}

static enum kvp_status write_begin(struct write_call *write, struct kvp_session *session,
                                   const Kvpool__V1__WriteBufferRequest *request, struct kvp_error *error) {
  const struct kvp_buffer *buffer = kvp_buffer_find(session, request->buffer_id, error);
  if (buffer == NULL) {
    return KVP_UNKNOWN_BUFFER;
  }
  write->buffer_id = buffer->id;
  return kvp_step_caller_place(&write->caller, buffer->device, error);
}

static enum kvp_status write_take(struct write_call *write, const Kvpool__V1__WriteBufferRequest *request,
                                  struct kvp_error *error) {
  struct kvp_session *session = kvp_step_caller_session(&write->caller, error);
  if (session == NULL) {
    return KVP_UNKNOWN_SESSION;
  }
  if (request->buffer_id != 0 && request->buffer_id != write->buffer_id) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "buffer_id", -1, (int64_t)request->buffer_id,
                            "the call writes to buffer %" PRIu64 ", a later message names buffer %" PRIu64,
                            write->buffer_id, request->buffer_id);
  }
  const struct kvp_buffer *buffer = kvp_buffer_find(session, write->buffer_id, error);
  if (buffer == NULL) {
    return KVP_UNKNOWN_BUFFER;
  }
  if (request->data.len > kvp_chunk_bytes_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "data", -1, (int64_t)request->data.len,
                            "buffer %" PRIu64 ": a chunk of %zu bytes, %d are allowed", buffer->id, request->data.len,
                            kvp_chunk_bytes_max);
  }
  enum kvp_status status = buffer_check_range(buffer, request->offset_bytes, request->data.len, error);
  if (status == KVP_OK) {
    status = kvp_byte_writer_write(&write->writer, buffer->id, request->offset_bytes, request->data.data,
                                   request->data.len, error);
  }
  if (status == KVP_OK) {
    write->bytes_written += request->data.len;
  }
  return status;
}

static struct write_call *write_new(struct kvp_daemon *daemon, struct kvp_rpc_call *call,
                                    const Kvpool__V1__WriteBufferRequest *request, struct kvp_error *error) {
  struct kvp_session *session = kvp_method_session(daemon, request->session, error);
  if (session == NULL) {
    return NULL;
  }
  struct write_call *write = kvp_allocate(1, sizeof *write);
  kvp_step_caller_init(&write->caller, daemon, call, session);
  kvp_byte_writer_init(&write->writer, &write->caller, write_progress, write);
  kvp_rpc_call_set_state(call, write);
  return write_begin(write, session, request, error) == KVP_OK ? write : NULL; /* it goes when the call is closed */
}

static void on_write_buffer(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  struct write_call *write = kvp_rpc_call_state(call);
  struct kvp_error error;
  if (message == NULL) {
    if (write == NULL) {
      (void)kvp_error_set(&error, KVP_INVALID_ARGUMENT, "the call ended before it named a buffer");
      kvp_rpc_call_fail(call, &error);
    } else {
      write->half_closed = true;
      write_go_on(write);
    }
    return;
  }
  const Kvpool__V1__WriteBufferRequest *request = (const Kvpool__V1__WriteBufferRequest *)message->body;
  if (write == NULL) {
    write = write_new(context, call, request, &error);
  }
  if (write == NULL || write_take(write, request, &error) != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  write->read_owed = true;
  write_go_on(write);
}

static void on_write_buffer_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct write_call *write = kvp_rpc_call_state(call);
  if (write != NULL) {
    kvp_step_caller_abandon(&write->caller, &write->writer);
    kvp_step_caller_deinit(&write->caller);
    free(write);
  }
}

/* ---- read -------------------------------------------------------------------------------------------------------
 */

struct read_call {
  struct kvp_step_caller caller;
  struct kvp_byte_stream stream;
  uint64_t buffer_id;
  uint64_t begin_bytes;
};

static struct kvp_wire_step *read_build(void *context, uint64_t offset, uint32_t bytes, struct kvp_pool **pool,
                                        struct kvp_error *error) {
  const struct read_call *read = context;
  (void)pool; /* a buffer is no pool's */
  struct kvp_session *session = kvp_step_caller_session(&read->caller, error);
  if (session == NULL || kvp_buffer_find(session, read->buffer_id, error) == NULL) {
    return NULL;
  }
  return kvp_step_build_read(read->buffer_id, read->begin_bytes + offset, bytes, error);
}

static void read_deliver(void *context, uint64_t offset, const uint8_t *data, size_t bytes) {
  const struct read_call *read = context;
  Kvpool__V1__BytesChunk chunk = KVPOOL__V1__BYTES_CHUNK__INIT;
  chunk.offset_bytes = read->begin_bytes + offset;
  chunk.data.data = (uint8_t *)data; /* packing only reads it */
  chunk.data.len = bytes;
  (void)kvp_rpc_call_send(read->caller.call, &chunk.base);
}

static void read_end(void *context, const struct kvp_error *error) {
  const struct read_call *read = context;
  if (error != NULL) {
    kvp_rpc_call_fail(read->caller.call, error);
  } else {
    kvp_rpc_call_finish(read->caller.call, NULL);
  }
}

static const struct kvp_byte_source read_source = {.build = read_build, .deliver = read_deliver, .end = read_end};

static enum kvp_status read_begin(struct read_call *read, struct kvp_session *session,
                                  const Kvpool__V1__ReadBufferRequest *request, struct kvp_error *error) {
  const struct kvp_buffer *buffer = kvp_buffer_find(session, request->buffer_id, error);
  if (buffer == NULL) {
    return KVP_UNKNOWN_BUFFER;
  }
  enum kvp_status status = buffer_check_range(buffer, request->offset_bytes, request->bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  read->buffer_id = buffer->id;
  read->begin_bytes = request->offset_bytes;
  return kvp_step_caller_place(&read->caller, buffer->device, error);
}

static void on_read_buffer(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__ReadBufferRequest *request = (const Kvpool__V1__ReadBufferRequest *)message->body;
  struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  if (session == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  struct read_call *read = kvp_allocate(1, sizeof *read);
  kvp_step_caller_init(&read->caller, daemon, call, session);
  kvp_rpc_call_set_state(call, read);
  if (read_begin(read, session, request, &error) != KVP_OK) {
    read->stream.over = true;
    kvp_rpc_call_fail(call, &error);
    return;
  }
  kvp_byte_stream_start(&read->stream, &read->caller, &read_source, read, request->bytes);
}

static void on_read_buffer_writable(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct read_call *read = kvp_rpc_call_state(call);
  if (read != NULL) {
    kvp_byte_stream_go_on(&read->stream);
  }
}

static void on_read_buffer_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct read_call *read = kvp_rpc_call_state(call);
  if (read != NULL) {
    kvp_step_caller_abandon(&read->caller, &read->stream);
    kvp_step_caller_deinit(&read->caller);
    free(read);
  }
}

/* ---- release ----------------------------------------------------------------------------------------------------
 */

static void on_release_buffer(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__ReleaseBufferRequest *request = (const Kvpool__V1__ReleaseBufferRequest *)message->body;
  struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  struct kvp_buffer *buffer = session == NULL ? NULL : kvp_buffer_find(session, request->buffer_id, &error);
  if (buffer == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  kvp_buffer_release(daemon, buffer);
  Kvpool__V1__ReleaseBufferResponse reply = KVPOOL__V1__RELEASE_BUFFER_RESPONSE__INIT;
  kvp_rpc_call_finish(call, &reply.base);
}

static const struct kvp_rpc_method methods[] = {
    {.name = "CreateBuffer",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__create_buffer_request__descriptor,
     .on_message = on_create_buffer,
     .on_closed = on_create_buffer_closed},
    {.name = "WriteBuffer",
     .shape = KVP_RPC_CLIENT_STREAM,
     .request = &kvpool__v1__write_buffer_request__descriptor,
     .on_message = on_write_buffer,
     .on_closed = on_write_buffer_closed},
    {.name = "ReadBuffer",
     .shape = KVP_RPC_SERVER_STREAM,
     .request = &kvpool__v1__read_buffer_request__descriptor,
     .on_message = on_read_buffer,
     .on_closed = on_read_buffer_closed,
     .on_writable = on_read_buffer_writable},
    {.name = "ReleaseBuffer",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__release_buffer_request__descriptor,
     .on_message = on_release_buffer},
};

const struct kvp_method_table kvp_methods_buffer = {methods, sizeof methods / sizeof methods[0]};
