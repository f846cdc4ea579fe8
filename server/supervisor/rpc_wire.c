/* Checks the wire bytes of a message before protobuf-c sees them, field by field along its descriptor. Any thread; no
 * state. What always holds: the reader never looks behind its end, and depth is bounded. */
#include "server/supervisor/rpc_wire.h"

#include <inttypes.h>
#include <stdbool.h>

#include "server/supervisor/utf8.h"

enum { WIRE_VARINT = 0, WIRE_64_BIT = 1, WIRE_BYTES = 2, WIRE_32_BIT = 5 };

struct span {
  const uint8_t *data;
  size_t bytes;
};

static enum kvp_status malformed(struct kvp_error *error, const ProtobufCMessageDescriptor *type, const char *field,
                                 const char *what) {
  return kvp_error_set_at(error, KVP_MALFORMED, -1, field, -1, 0, "%s%s%s: %s", type->short_name,
                          field[0] == '\0' ? "" : ".", field, what);
}

static bool take_bytes(struct span *from, size_t bytes, struct span *out) {
  if (bytes > from->bytes) {
    return false;
  }
  *out = (struct span){from->data, bytes};
  from->data += bytes;
  from->bytes -= bytes;
  return true;
}

static bool take_varint(struct span *from, uint64_t *out) {
  uint64_t value = 0;
  for (size_t i = 0; i < 10 && i < from->bytes; i++) {
    const uint8_t byte = from->data[i];
    value |= (uint64_t)(byte & 0x7F) << (7 * i);
    if ((byte & 0x80) == 0) {
      from->data += i + 1;
      from->bytes -= i + 1;
      *out = value;
      return true;
    }
  }
  return false;
}

/* *out: the content of length-delimited values, without meaning for the others. */
static bool take_value(struct span *from, uint32_t wire_type, struct span *out) {
  uint64_t number = 0;
  switch (wire_type) {
  case WIRE_VARINT:
    return take_varint(from, &number);
  case WIRE_64_BIT:
    return take_bytes(from, 8, out);
  case WIRE_32_BIT:
    return take_bytes(from, 4, out);
  case WIRE_BYTES:
    return take_varint(from, &number) && number <= from->bytes && take_bytes(from, (size_t)number, out);
  default: /* groups */
    return false;
  }
}

static uint32_t wire_type_of(ProtobufCType type) {
  switch (type) {
  case PROTOBUF_C_TYPE_SFIXED32:
  case PROTOBUF_C_TYPE_FIXED32:
  case PROTOBUF_C_TYPE_FLOAT:
    return WIRE_32_BIT;
  case PROTOBUF_C_TYPE_SFIXED64:
  case PROTOBUF_C_TYPE_FIXED64:
  case PROTOBUF_C_TYPE_DOUBLE:
    return WIRE_64_BIT;
  case PROTOBUF_C_TYPE_STRING:
  case PROTOBUF_C_TYPE_BYTES:
  case PROTOBUF_C_TYPE_MESSAGE:
    return WIRE_BYTES;
  default:
    return WIRE_VARINT;
  }
}

static enum kvp_status check_string(const ProtobufCMessageDescriptor *type, const char *field, struct span text,
                                    struct kvp_error *error) {
  const size_t valid = kvp_utf8_valid_bytes((const char *)text.data, text.bytes);
  if (valid == text.bytes) {
    return KVP_OK;
  }
  return kvp_error_set_at(error, KVP_MALFORMED, -1, field, (int64_t)valid, text.data[valid],
                          "%s.%s: %s 0x%02x at position %zu of %zu", type->short_name, field,
                          text.data[valid] == 0 ? "a string may not hold" : "not valid UTF-8, byte", text.data[valid],
                          valid, text.bytes);
}

static enum kvp_status check_message(const ProtobufCMessageDescriptor *type, struct span wire, unsigned depth,
                                     struct kvp_error *error);

static enum kvp_status check_field(const ProtobufCMessageDescriptor *type, const ProtobufCFieldDescriptor *field,
                                   uint32_t wire_type, struct span value, unsigned depth, struct kvp_error *error) {
  const uint32_t expected = wire_type_of(field->type);
  const bool packed = field->label == PROTOBUF_C_LABEL_REPEATED && wire_type == WIRE_BYTES;
  if (wire_type != expected && !packed) {
    return kvp_error_set_at(error, KVP_MALFORMED, -1, field->name, -1, wire_type,
                            "%s.%s: wire type %" PRIu32 ", expected %" PRIu32, type->short_name, field->name,
                            wire_type, expected);
  }
  if (field->type == PROTOBUF_C_TYPE_STRING) {
    return check_string(type, field->name, value, error);
  }
  if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
    if (depth == kvp_rpc_wire_depth_max) {
      return malformed(error, type, field->name, "nested too deep");
    }
    return check_message(field->descriptor, value, depth + 1, error);
  }
  return KVP_OK;
}

static enum kvp_status check_message(const ProtobufCMessageDescriptor *type, struct span wire, unsigned depth,
                                     struct kvp_error *error) {
  const size_t total_bytes = wire.bytes;
  while (wire.bytes > 0) {
    const size_t offset = total_bytes - wire.bytes;
    uint64_t key = 0;
    struct span value = {NULL, 0};
    if (!take_varint(&wire, &key) || key > UINT32_MAX || key >> 3 == 0 ||
        !take_value(&wire, (uint32_t)(key & 7), &value)) {
      return kvp_error_set_at(error, KVP_MALFORMED, -1, "", (int64_t)offset, 0,
                              "%s: no valid field at byte %zu of %zu", type->short_name, offset, total_bytes);
    }
    const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(type, (unsigned)(key >> 3));
    if (field == NULL) {
      continue;
    }
    const enum kvp_status status = check_field(type, field, (uint32_t)(key & 7), value, depth, error);
    if (status != KVP_OK) {
      return status;
    }
  }
  return KVP_OK;
}

enum kvp_status kvp_rpc_wire_check(const ProtobufCMessageDescriptor *type, const uint8_t *wire, size_t wire_bytes,
                                   struct kvp_error *error) {
  return check_message(type, (struct span){wire, wire_bytes}, 0, error);
}
