/* Buffers: device memory of a session, written and read in pieces. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/internal.h"

enum { chunk_field_data = 2 };

static const char *device_first(const kvpool_client *client) {
  return kvpool_server_info_device_count(client->info) == 0 ? "" : kvpool_server_info_device(client->info, 0)->name;
}

kvpool_status kvpool_buffer_create(kvpool_session *session, const char *device, uint64_t bytes, kvpool_buffer **out,
                                   kvpool_error *error) {
  assert(session != NULL && out != NULL);
  kvpool_status status = kvp_session_check(session, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  kvpool_buffer *buffer = calloc(1, sizeof *buffer);
  if (buffer == NULL) {
    return kvp_fail_no_memory(error);
  }
  Kvpool__V1__SessionRef reference = kvp_session_reference(session);
  Kvpool__V1__CreateBufferRequest request = KVPOOL__V1__CREATE_BUFFER_REQUEST__INIT;
  request.session = &reference;
  request.device = (char *)(device == NULL ? device_first(session->client) : device);
  request.bytes = bytes;
  ProtobufCMessage *message;
  status = kvp_call_unary(session->client, KVP_METHOD_CREATE_BUFFER, &request.base, &kvpool__v1__buffer__descriptor,
                          &message, error);
  if (status != KVPOOL_OK) {
    free(buffer);
    return status;
  }
  const Kvpool__V1__Buffer *response = (const Kvpool__V1__Buffer *)message;
  kvp_session_ref(session);
  buffer->session = session;
  buffer->id = response->buffer_id;
  buffer->bytes = response->bytes;
  (void)snprintf(buffer->device, sizeof buffer->device, "%s", response->device);
  protobuf_c_message_free_unpacked(message, NULL);
  *out = buffer;
  return KVPOOL_OK;
}

static kvpool_status buffer_check_range(const kvpool_buffer *buffer, uint64_t offset_bytes, uint64_t bytes,
                                        kvpool_error *error) {
  if (buffer->session == NULL) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT,
                    "buffer %llu is an attachment's: its memory is mapped, see kvpool_buffer_data",
                    (unsigned long long)buffer->id);
  }
  if (offset_bytes > buffer->bytes || bytes > buffer->bytes - offset_bytes) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "offset_bytes", -1, (int64_t)offset_bytes,
                       "%llu bytes at offset %llu are not inside buffer %llu of %llu bytes",
                       (unsigned long long)bytes, (unsigned long long)offset_bytes, (unsigned long long)buffer->id,
                       (unsigned long long)buffer->bytes);
  }
  return kvp_session_check(buffer->session, error);
}

/* One piece as a message; the first names session and buffer. */
static grpc_byte_buffer *buffer_piece(const kvpool_buffer *buffer, bool is_first, uint64_t offset_bytes,
                                      const uint8_t *data, size_t bytes) {
  Kvpool__V1__SessionRef reference = kvp_session_reference(buffer->session);
  Kvpool__V1__WriteBufferRequest request = KVPOOL__V1__WRITE_BUFFER_REQUEST__INIT;
  if (is_first) {
    request.session = &reference;
    request.buffer_id = buffer->id;
  }
  request.offset_bytes = offset_bytes;
  request.data = (ProtobufCBinaryData){.len = bytes, .data = (uint8_t *)data};
  return kvp_message_pack(&request.base, NULL);
}

/* The next piece is packed while the one before is on its way. */
static kvpool_status buffer_send(struct kvp_call *call, const kvpool_buffer *buffer, uint64_t offset_bytes,
                                 const uint8_t *data, uint64_t bytes, kvpool_error *error) {
  size_t piece_max = call->client->chunk_bytes_max;
  bool is_open = true;
  for (uint64_t done = 0; done < bytes && is_open;) {
    size_t piece = bytes - done < piece_max ? (size_t)(bytes - done) : piece_max;
    bool is_last = done + piece == bytes;
    grpc_byte_buffer *message = buffer_piece(buffer, done == 0, offset_bytes + done, data + done, piece);
    if (done == 0) {
      kvp_call_start_stream(call, message, is_last);
    } else {
      kvpool_status status = kvp_call_wait_sent(call, error);
      if (status != KVPOOL_OK) {
        grpc_byte_buffer_destroy(message);
        return status;
      }
      is_open = kvp_call_send(call, message, is_last);
    }
    done += piece;
  }
  return kvp_call_wait_closed(call, error);
}

kvpool_status kvpool_buffer_write(kvpool_buffer *buffer, uint64_t offset_bytes, const void *data, uint64_t bytes,
                                  kvpool_error *error) {
  assert(buffer != NULL && (data != NULL || bytes == 0));
  kvpool_status status = buffer_check_range(buffer, offset_bytes, bytes, error);
  if (status != KVPOOL_OK || bytes == 0) {
    return status;
  }
  status = kvp_client_check_may_block("kvpool_buffer_write", error);
  if (status != KVPOOL_OK) {
    return status;
  }
  struct kvp_call *call;
  status = kvp_call_new(buffer->session->client, KVP_METHOD_WRITE_BUFFER, NULL, NULL, &call, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  status = buffer_send(call, buffer, offset_bytes, data, bytes, error);
  if (status == KVPOOL_OK) {
    Kvpool__V1__WriteBufferResponse *response = NULL;
    if (call->incoming != NULL) {
      response = (Kvpool__V1__WriteBufferResponse *)kvp_message_unpack(
          call->incoming, &kvpool__v1__write_buffer_response__descriptor);
    }
    if (response == NULL || response->bytes_written != bytes) {
      status = kvp_call_malformed(KVP_METHOD_WRITE_BUFFER, error);
    }
    kvpool__v1__write_buffer_response__free_unpacked(response, NULL);
  }
  kvp_call_unref(call);
  return status;
}

/* The data of one BytesChunk to out + *got, which goes up. */
static bool chunk_take(grpc_byte_buffer *message, uint8_t *out, uint64_t bytes, uint64_t *got) {
  struct kvp_reader reader;
  if (!kvp_reader_init(&reader, message)) {
    return false;
  }
  bool is_whole = true;
  while (is_whole && reader.left > 0) {
    struct kvp_field field;
    is_whole = kvp_reader_next_field(&reader, &field);
    if (!is_whole || field.wire_type != KVP_WIRE_BYTES) {
      continue;
    }
    bool is_data = field.number == chunk_field_data;
    is_whole = (!is_data || field.value <= bytes - *got) &&
               kvp_reader_bytes(&reader, is_data ? out + *got : NULL, (size_t)field.value);
    *got += is_whole && is_data ? field.value : 0;
  }
  kvp_reader_deinit(&reader);
  return is_whole;
}

kvpool_status kvp_call_collect(kvpool_client *client, enum kvp_method method, const ProtobufCMessage *request,
                               void *out, uint64_t bytes, kvpool_error *error) {
  struct kvp_call *call;
  kvpool_status status = kvp_client_check_may_block(kvp_method_name(method), error);
  if (status == KVPOOL_OK) {
    status = kvp_call_new(client, method, NULL, NULL, &call, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  kvp_call_start_stream(call, kvp_message_pack(request, NULL), true);
  uint64_t got = 0;
  bool is_whole = true;
  grpc_byte_buffer *message;
  while ((status = kvp_call_wait_message(call, &message, error)) == KVPOOL_OK && message != NULL && is_whole) {
    (void)kvp_call_receive(call); /* when the call is over the next wait gives no message */
    is_whole = chunk_take(message, out, bytes, &got);
    grpc_byte_buffer_destroy(message);
  }
  if (!is_whole) {
    kvp_call_cancel(call);
    status = kvp_call_malformed(method, error);
  } else if (status == KVPOOL_OK) {
    status = kvp_call_wait_closed(call, error);
  }
  if (status == KVPOOL_OK && got != bytes) {
    status = kvp_fail(error, KVPOOL_INTERNAL, "%s: %llu bytes came, not %llu", kvp_method_name(method),
                      (unsigned long long)got, (unsigned long long)bytes);
  }
  kvp_call_unref(call);
  return status;
}

kvpool_status kvpool_buffer_read(kvpool_buffer *buffer, uint64_t offset_bytes, void *out, uint64_t bytes,
                                 kvpool_error *error) {
  assert(buffer != NULL && (out != NULL || bytes == 0));
  kvpool_status status = buffer_check_range(buffer, offset_bytes, bytes, error);
  if (status != KVPOOL_OK || bytes == 0) {
    return status;
  }
  Kvpool__V1__SessionRef reference = kvp_session_reference(buffer->session);
  Kvpool__V1__ReadBufferRequest request = KVPOOL__V1__READ_BUFFER_REQUEST__INIT;
  request.session = &reference;
  request.buffer_id = buffer->id;
  request.offset_bytes = offset_bytes;
  request.bytes = bytes;
  return kvp_call_collect(buffer->session->client, KVP_METHOD_READ_BUFFER, &request.base, out, bytes, error);
}

kvpool_status kvpool_buffer_release(kvpool_buffer *buffer, kvpool_error *error) {
  if (buffer == NULL) {
    return KVPOOL_OK;
  }
  if (buffer->attached != NULL) {
    return kvp_attached_buffer_release(buffer, error);
  }
  kvpool_session *session = buffer->session;
  kvpool_status status = kvp_session_check(session, error);
  if (status == KVPOOL_OK) {
    Kvpool__V1__SessionRef reference = kvp_session_reference(session);
    Kvpool__V1__ReleaseBufferRequest request = KVPOOL__V1__RELEASE_BUFFER_REQUEST__INIT;
    request.session = &reference;
    request.buffer_id = buffer->id;
    ProtobufCMessage *message;
    status = kvp_call_unary(session->client, KVP_METHOD_RELEASE_BUFFER, &request.base,
                            &kvpool__v1__release_buffer_response__descriptor, &message, error);
    if (status == KVPOOL_OK) {
      protobuf_c_message_free_unpacked(message, NULL);
    }
  }
  kvp_session_unref(session);
  free(buffer);
  return status;
}

void *kvpool_buffer_data(const kvpool_buffer *buffer) {
  assert(buffer != NULL);
  return buffer->attached == NULL ? NULL : kvp_attached_buffer_data(buffer);
}

uint64_t kvpool_buffer_id(const kvpool_buffer *buffer) {
  return buffer->id;
}

uint64_t kvpool_buffer_bytes(const kvpool_buffer *buffer) {
  return buffer->bytes;
}
