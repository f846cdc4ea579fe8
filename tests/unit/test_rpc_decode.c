/* From wire bytes to a checked message: UTF-8, the wire checker, the arena. Wire bytes are written by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvpool.pb-c.h"
#include "server/supervisor/rpc_decode.h"
#include "server/supervisor/rpc_wire.h"
#include "server/supervisor/utf8.h"

enum { arena_bytes = 1 << 20 };

#define BYTES(literal) (const uint8_t *)(literal), sizeof(literal) - 1

/* ---- UTF-8 ---- */

static size_t valid(const char *text) {
  return kvp_utf8_valid_bytes(text, strlen(text));
}

static void utf8_takes_the_ends_of_every_range(void **state) {
  (void)state;
  static const char *const good[] = {"\x01",
                                     "\x7F",
                                     "\xC2\x80",
                                     "\xDF\xBF",
                                     "\xE0\xA0\x80",
                                     "\xE0\xBF\xBF",
                                     "\xE1\x80\x80",
                                     "\xEC\xBF\xBF",
                                     "\xED\x80\x80",
                                     "\xED\x9F\xBF",
                                     "\xEE\x80\x80",
                                     "\xEF\xBF\xBF",
                                     "\xF0\x90\x80\x80",
                                     "\xF0\xBF\xBF\xBF",
                                     "\xF1\x80\x80\x80",
                                     "\xF3\xBF\xBF\xBF",
                                     "\xF4\x80\x80\x80",
                                     "\xF4\x8F\xBF\xBF",
                                     ""};
  for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
    assert_int_equal(valid(good[i]), strlen(good[i]));
  }
}

static void utf8_refuses_what_is_just_outside(void **state) {
  (void)state;
  static const char *const bad[] = {"\x80",
                                    "\xBF",
                                    "\xC0\x80",
                                    "\xC1\xBF",
                                    "\xC2",
                                    "\xC2\x7F",
                                    "\xC2\xC0",
                                    "\xE0\x9F\xBF",
                                    "\xE1\x80",
                                    "\xE1\x80\x7F",
                                    "\xED\xA0\x80",
                                    "\xED\xBF\xBF",
                                    "\xEF\xBF\xC0",
                                    "\xF0\x8F\xBF\xBF",
                                    "\xF0\x90\x80",
                                    "\xF1\x80\xC0\x80",
                                    "\xF4\x90\x80\x80",
                                    "\xF5\x80\x80\x80",
                                    "\xFE",
                                    "\xFF"};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    assert_int_equal(valid(bad[i]), 0);
  }
  assert_int_equal(valid("ab\xC3\xA9\xFFzz"), 4);
  assert_int_equal(kvp_utf8_valid_bytes("a\0b", 3), 1);
}

static void utf8_copy_replaces_and_cuts_between_characters(void **state) {
  (void)state;
  char out[6];
  kvp_utf8_copy("a\xFF\xC3\xA9", out, sizeof out);
  assert_string_equal(out, "a?\xC3\xA9");
  kvp_utf8_copy("abcd\xC3\xA9", out, sizeof out); /* 6 bytes and the NUL do not fit */
  assert_string_equal(out, "abcd");
  kvp_utf8_copy("\xE2\x82", out, sizeof out); /* cut before */
  assert_string_equal(out, "??");
  kvp_utf8_copy("abc", out, 1);
  assert_string_equal(out, "");
}

/* ---- decoding ---- */

static void decodes_by_hand_written_bytes(void **state) {
  (void)state;
  /* session {session_id 300, secret 01 00 02}, step_id 5, placement "host:0", arrays {inline ff 00}, ops {load
   * {total_k 9}} */
  static const char wire[] = "\x0a\x08\x08\xac\x02\x12\x03\x01\x00\x02"
                             "\x10\x05"
                             "\x1a\x06host:0"
                             "\x2a\x04\x0a\x02\xff\x00"
                             "\x32\x04\x12\x02\x18\x09";
  struct kvp_rpc_message *message = NULL;
  struct kvp_error error;
  assert_int_equal(kvp_rpc_decode(&kvpool__v1__step_request__descriptor, BYTES(wire), arena_bytes, &message, &error),
                   KVP_OK);
  assert_int_equal(message->wire_bytes, sizeof wire - 1);
  const Kvpool__V1__StepRequest *step = (const Kvpool__V1__StepRequest *)message->body;
  assert_int_equal(step->session->session_id, 300);
  assert_int_equal(step->session->secret.len, 3);
  assert_memory_equal(step->session->secret.data, "\x01\x00\x02", 3);
  assert_int_equal(step->step_id, 5);
  assert_string_equal(step->placement, "host:0");
  assert_int_equal(step->n_arrays, 1);
  assert_int_equal(step->arrays[0]->source_case, KVPOOL__V1__ARRAY__SOURCE_INLINE);
  assert_memory_equal(step->arrays[0]->inline_.data, "\xff\x00", 2);
  assert_int_equal(step->n_ops, 1);
  assert_int_equal(step->ops[0]->load->total_k, 9);

  assert_ptr_equal(kvp_rpc_message_ref(message), message);
  kvp_rpc_message_unref(message);
  assert_string_equal(step->placement, "host:0"); /* one reference is left */
  kvp_rpc_message_unref(message);
  kvp_rpc_message_unref(NULL);
}

static void check_malformed(const uint8_t *wire, size_t wire_bytes, const char *array, int64_t position,
                            int64_t value) {
  struct kvp_rpc_message *message = NULL;
  struct kvp_error error;
  assert_int_equal(
      kvp_rpc_decode(&kvpool__v1__create_pool_request__descriptor, wire, wire_bytes, arena_bytes, &message, &error),
      KVP_MALFORMED);
  assert_null(message);
  assert_int_equal(error.status, KVP_MALFORMED);
  assert_string_equal(error.array, array);
  assert_int_equal(error.position, position);
  assert_int_equal(error.value, value);
  assert_int_equal(error.op, -1);
}

static void refuses_malformed_wire(void **state) {
  (void)state;
  check_malformed(BYTES("\x00"), "", 0, 0);                                         /* field 0 */
  check_malformed(BYTES("\x0a"), "", 0, 0);                                         /* no length */
  check_malformed(BYTES("\x0a\x01"), "", 0, 0);                                     /* no content */
  check_malformed(BYTES("\x0a\x00\x0a\x7f"), "", 2, 0);                             /* the second field */
  check_malformed(BYTES("\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "", 0, 0);     /* a key of 64 bits */
  check_malformed(BYTES("\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), "", 0, 0); /* eleven bytes and more */
  check_malformed(BYTES("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "", 0, 0); /* a length of 2^64 - 1 */
  check_malformed(BYTES("\x0b"), "", 0, 0);                                         /* a group */
  check_malformed(BYTES("\x0e"), "", 0, 0);                                         /* wire type 6 */
  check_malformed(BYTES("\x0d\x00\x00\x00\x00"), "spec", -1, 5);                    /* 4 bytes for a message */
  check_malformed(BYTES("\x0a\x03\x1a\x01x"), "block_size", -1, 2);                 /* a packed singular number */
  check_malformed(BYTES("\x0a\x02\x08\x01"), "name", -1, 0);                        /* a number for a string */
}

static void refuses_strings_that_protobuf_c_takes(void **state) {
  (void)state;
  check_malformed(BYTES("\x0a\x05\x0a\x03"
                        "a\x00"
                        "b"),
                  "name", 1, 0);
  check_malformed(BYTES("\x0a\x04\x0a\x02\xc3\x28"), "name", 0, 0xC3);
  check_malformed(BYTES("\x0a\x07\x2a\x01"
                        "a\x2a\x02"
                        "b\xff"),
                  "placements", 1, 0xFF);
  check_malformed(BYTES("\x0a\x05\x32\x03\x12\x01\xf8"), "format", 0, 0xF8);
}

static void a_second_value_of_a_field_is_checked_too(void **state) {
  (void)state;
  check_malformed(BYTES("\x0a\x03\x0a\x01"
                        "a\x0a\x03\x0a\x01\xff"),
                  "name", 0, 0xFF);
}

/* ---- the arena ---- */

/* A PoolSpec with this many empty RegionSpecs, two bytes each. */
static uint8_t *many_regions(size_t count, size_t *wire_bytes) {
  const size_t body_bytes = 2 * count;
  assert_true(body_bytes < 1 << 21);
  uint8_t *wire = malloc(4 + body_bytes);
  assert_non_null(wire);
  wire[0] = 0x0A;
  wire[1] = (uint8_t)(0x80 | (body_bytes & 0x7F));
  wire[2] = (uint8_t)(0x80 | (body_bytes >> 7 & 0x7F));
  wire[3] = (uint8_t)(body_bytes >> 14);
  for (size_t i = 0; i < count; i++) {
    wire[4 + 2 * i] = 0x32;
    wire[5 + 2 * i] = 0x00;
  }
  *wire_bytes = 4 + body_bytes;
  return wire;
}

static enum kvp_status decode_regions(size_t count, size_t arena_bytes_max) {
  size_t wire_bytes = 0;
  uint8_t *wire = many_regions(count, &wire_bytes);
  struct kvp_rpc_message *message = NULL;
  struct kvp_error error;
  const enum kvp_status status = kvp_rpc_decode(&kvpool__v1__create_pool_request__descriptor, wire, wire_bytes,
                                                arena_bytes_max, &message, &error);
  if (status == KVP_OK) {
    assert_int_equal(((const Kvpool__V1__CreatePoolRequest *)message->body)->spec->n_regions, count);
  } else {
    assert_null(message);
  }
  kvp_rpc_message_unref(message);
  free(wire);
  return status;
}

static void the_arena_is_a_limit(void **state) {
  (void)state;
  const size_t least_bytes = 1000 * sizeof(Kvpool__V1__RegionSpec);
  assert_int_equal(decode_regions(1000, least_bytes), KVP_TOO_LARGE); /* their pointers do not fit any more */
  assert_int_equal(decode_regions(1000, 8 * least_bytes), KVP_OK);
  assert_int_equal(decode_regions(0, 0), KVP_TOO_LARGE);
  /* Wherever it ends, it ends cleanly. */
  for (size_t bytes = 0; bytes < 40000; bytes += 104) {
    const enum kvp_status status = decode_regions(200, bytes);
    assert_true(status == KVP_OK || status == KVP_TOO_LARGE);
  }
}

static void too_large_and_malformed_are_told_apart(void **state) {
  (void)state;
  size_t wire_bytes = 0;
  uint8_t *wire = many_regions(1000, &wire_bytes);
  wire[wire_bytes - 1] = 0x7F; /* the last one is cut short */
  struct kvp_rpc_message *message = NULL;
  struct kvp_error error;
  assert_int_equal(
      kvp_rpc_decode(&kvpool__v1__create_pool_request__descriptor, wire, wire_bytes, 100, &message, &error),
      KVP_MALFORMED);
  free(wire);
}

/* ---- depth ---- */

/* message Nested { Nested inner = 1; } */
struct nested {
  ProtobufCMessage base;
  struct nested *inner;
};

static const ProtobufCMessageDescriptor nested_descriptor;
static const ProtobufCFieldDescriptor nested_fields[] = {{.name = "inner",
                                                          .id = 1,
                                                          .label = PROTOBUF_C_LABEL_NONE,
                                                          .type = PROTOBUF_C_TYPE_MESSAGE,
                                                          .offset = offsetof(struct nested, inner),
                                                          .descriptor = &nested_descriptor}};
static const ProtobufCIntRange nested_ranges[] = {{1, 0}, {0, 1}};
static const ProtobufCMessageDescriptor nested_descriptor = {.magic = PROTOBUF_C__MESSAGE_DESCRIPTOR_MAGIC,
                                                             .short_name = "Nested",
                                                             .sizeof_message = sizeof(struct nested),
                                                             .n_fields = 1,
                                                             .fields = nested_fields,
                                                             .n_field_ranges = 1,
                                                             .field_ranges = nested_ranges};

static enum kvp_status check_depth(size_t depth, struct kvp_error *error) {
  uint8_t wire[2 * 100];
  for (size_t i = 0; i < depth; i++) {
    wire[2 * i] = 0x0A;
    wire[2 * i + 1] = (uint8_t)(2 * (depth - i - 1));
  }
  return kvp_rpc_wire_check(&nested_descriptor, wire, 2 * depth, error);
}

static void depth_is_limited(void **state) {
  (void)state;
  struct kvp_error error;
  assert_int_equal(check_depth(kvp_rpc_wire_depth_max, &error), KVP_OK);
  assert_int_equal(check_depth(kvp_rpc_wire_depth_max + 1, &error), KVP_MALFORMED);
  assert_string_equal(error.text, "Nested.inner: nested too deep");
  assert_int_equal(check_depth(60, &error), KVP_MALFORMED);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(utf8_takes_the_ends_of_every_range),
      cmocka_unit_test(utf8_refuses_what_is_just_outside),
      cmocka_unit_test(utf8_copy_replaces_and_cuts_between_characters),
      cmocka_unit_test(decodes_by_hand_written_bytes),
      cmocka_unit_test(refuses_malformed_wire),
      cmocka_unit_test(refuses_strings_that_protobuf_c_takes),
      cmocka_unit_test(a_second_value_of_a_field_is_checked_too),
      cmocka_unit_test(the_arena_is_a_limit),
      cmocka_unit_test(too_large_and_malformed_are_told_apart),
      cmocka_unit_test(depth_is_limited),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
