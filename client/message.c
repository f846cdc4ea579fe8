/* Messages: protobuf to and from gRPC's byte buffers. No state of its own: any thread. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/internal.h"

enum { varint_bytes_max = 10 };

bool kvp_bytes_reserve(struct kvp_bytes *bytes, size_t more) {
  size_t needed;
  if (__builtin_add_overflow(bytes->size, more, &needed)) {
    return false;
  }
  if (needed <= bytes->capacity) {
    return true;
  }
  size_t capacity = bytes->capacity == 0 ? 256 : bytes->capacity;
  while (capacity < needed) {
    if (__builtin_mul_overflow(capacity, 2, &capacity)) {
      return false;
    }
  }
  uint8_t *data = realloc(bytes->data, capacity);
  if (data == NULL) {
    return false;
  }
  bytes->data = data;
  bytes->capacity = capacity;
  return true;
}

static void bytes_put_varint(struct kvp_bytes *bytes, uint64_t value) {
  while (value >= 0x80) {
    bytes->data[bytes->size++] = (uint8_t)(value | 0x80);
    value >>= 7;
  }
  bytes->data[bytes->size++] = (uint8_t)value;
}

bool kvp_bytes_open_field(struct kvp_bytes *bytes, uint32_t field, size_t length) {
  size_t needed;
  if (__builtin_add_overflow(length, 2 * (size_t)varint_bytes_max, &needed) || !kvp_bytes_reserve(bytes, needed)) {
    return false;
  }
  bytes_put_varint(bytes, (uint64_t)field << 3 | KVP_WIRE_BYTES);
  bytes_put_varint(bytes, length);
  return true;
}

bool kvp_bytes_append_message(struct kvp_bytes *bytes, uint32_t field, const ProtobufCMessage *message) {
  size_t length = protobuf_c_message_get_packed_size(message);
  if (!kvp_bytes_open_field(bytes, field, length)) {
    return false;
  }
  bytes->size += protobuf_c_message_pack(message, bytes->data + bytes->size);
  return true;
}

void kvp_bytes_deinit(struct kvp_bytes *bytes) {
  free(bytes->data);
  *bytes = (struct kvp_bytes){0};
}

grpc_byte_buffer *kvp_message_pack(const ProtobufCMessage *message, const struct kvp_bytes *tail) {
  size_t head_bytes = protobuf_c_message_get_packed_size(message);
  size_t tail_bytes = tail == NULL ? 0 : tail->size;
  grpc_slice slice = grpc_slice_malloc(head_bytes + tail_bytes);
  size_t packed = protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
  assert(packed == head_bytes);
  if (tail_bytes > 0) {
    memcpy(GRPC_SLICE_START_PTR(slice) + head_bytes, tail->data, tail_bytes);
  }
  grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
  grpc_slice_unref(slice);
  return buffer;
}

ProtobufCMessage *kvp_message_unpack(grpc_byte_buffer *buffer, const ProtobufCMessageDescriptor *descriptor) {
  grpc_byte_buffer_reader reader;
  if (!grpc_byte_buffer_reader_init(&reader, buffer)) {
    return NULL;
  }
  grpc_slice whole = grpc_byte_buffer_reader_readall(&reader);
  ProtobufCMessage *message =
      protobuf_c_message_unpack(descriptor, NULL, GRPC_SLICE_LENGTH(whole), GRPC_SLICE_START_PTR(whole));
  grpc_slice_unref(whole);
  grpc_byte_buffer_reader_destroy(&reader);
  return message;
}

bool kvp_reader_init(struct kvp_reader *reader, grpc_byte_buffer *buffer) {
  *reader = (struct kvp_reader){.left = grpc_byte_buffer_length(buffer)};
  return grpc_byte_buffer_reader_init(&reader->slices, buffer) != 0;
}

static void reader_drop_slice(struct kvp_reader *reader) {
  if (reader->has_slice) {
    grpc_slice_unref(reader->slice);
    reader->has_slice = false;
  }
}

void kvp_reader_deinit(struct kvp_reader *reader) {
  reader_drop_slice(reader);
  grpc_byte_buffer_reader_destroy(&reader->slices);
}

/* A slice with something in it, or false at the end. */
static bool reader_fill(struct kvp_reader *reader) {
  while (reader->at == reader->end) {
    reader_drop_slice(reader);
    if (!grpc_byte_buffer_reader_next(&reader->slices, &reader->slice)) {
      return false;
    }
    reader->has_slice = true;
    reader->at = GRPC_SLICE_START_PTR(reader->slice);
    reader->end = GRPC_SLICE_END_PTR(reader->slice);
  }
  return true;
}

bool kvp_reader_bytes(struct kvp_reader *reader, void *out, size_t bytes) {
  if (bytes > reader->left) {
    return false;
  }
  uint8_t *to = out;
  while (bytes > 0) {
    if (!reader_fill(reader)) {
      return false;
    }
    size_t here = (size_t)(reader->end - reader->at);
    size_t piece = here < bytes ? here : bytes;
    if (to != NULL) {
      memcpy(to, reader->at, piece);
      to += piece;
    }
    reader->at += piece;
    reader->left -= piece;
    bytes -= piece;
  }
  return true;
}

static bool reader_varint(struct kvp_reader *reader, uint64_t *out) {
  uint64_t value = 0;
  for (unsigned i = 0; i < varint_bytes_max; i++) {
    uint8_t byte;
    if (!kvp_reader_bytes(reader, &byte, 1)) {
      return false;
    }
    value |= (uint64_t)(byte & 0x7F) << (7 * i);
    if ((byte & 0x80) == 0) {
      *out = value;
      return true;
    }
  }
  return false;
}

bool kvp_reader_next_field(struct kvp_reader *reader, struct kvp_field *field) {
  uint64_t tag;
  if (!reader_varint(reader, &tag)) {
    return false;
  }
  *field = (struct kvp_field){.number = (uint32_t)(tag >> 3), .wire_type = (uint32_t)(tag & 7)};
  switch (field->wire_type) {
  case KVP_WIRE_VARINT:
    return reader_varint(reader, &field->value);
  case KVP_WIRE_BYTES:
    return reader_varint(reader, &field->value) && field->value <= reader->left;
  case KVP_WIRE_FIXED64:
    return kvp_reader_bytes(reader, NULL, 8);
  case KVP_WIRE_FIXED32:
    return kvp_reader_bytes(reader, NULL, 4);
  default:
    return false;
  }
}
