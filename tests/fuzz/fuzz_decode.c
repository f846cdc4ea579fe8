/* libFuzzer: bytes -> a request of each type, through checker, arena and protobuf-c.
 *
 * The first byte picks the type, the second the arena. What is taken must hold only valid strings, and what it packs
 * to must be taken again.
 */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>

#include "kvpool.pb-c.h"
#include "proto/limits.h"
#include "server/supervisor/rpc_decode.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static const ProtobufCMessageDescriptor *const types[] = {
    &kvpool__v1__get_server_info_request__descriptor,
    &kvpool__v1__create_pool_request__descriptor,
    &kvpool__v1__list_pools_request__descriptor,
    &kvpool__v1__describe_pool_request__descriptor,
    &kvpool__v1__delete_pool_request__descriptor,
    &kvpool__v1__open_session_request__descriptor,
    &kvpool__v1__close_session_request__descriptor,
    &kvpool__v1__list_sessions_request__descriptor,
    &kvpool__v1__allocate_blocks_request__descriptor,
    &kvpool__v1__allocate_block_range_request__descriptor,
    &kvpool__v1__free_blocks_request__descriptor,
    &kvpool__v1__create_buffer_request__descriptor,
    &kvpool__v1__write_buffer_request__descriptor,
    &kvpool__v1__read_buffer_request__descriptor,
    &kvpool__v1__release_buffer_request__descriptor,
    &kvpool__v1__step_request__descriptor,
    &kvpool__v1__store_rows_request__descriptor,
    &kvpool__v1__load_rows_request__descriptor,
    &kvpool__v1__list_blocks_request__descriptor,
    &kvpool__v1__inspect_records_request__descriptor,
    &kvpool__v1__dump_blocks_request__descriptor,
    /* not requests, but they have what requests have not: unions of strings, repeated numbers */
    &kvpool__v1__session_event__descriptor,
    &kvpool__v1__record__descriptor,
};

static void check_taken_again(const ProtobufCMessageDescriptor *type, const ProtobufCMessage *body) {
  const size_t bytes = protobuf_c_message_get_packed_size(body);
  uint8_t *wire = malloc(bytes + 1);
  if (wire == NULL) {
    return;
  }
  assert(protobuf_c_message_pack(body, wire) == bytes);
  struct kvp_rpc_message *again = NULL;
  struct kvp_error error;
  const enum kvp_status status =
      kvp_rpc_decode(type, wire, bytes, (size_t)2 * kvp_message_arena_bytes_max, &again, &error);
  assert(status == KVP_OK);
  (void)status;
  kvp_rpc_message_unref(again);
  free(wire);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  if (bytes < 2) {
    return 0;
  }
  const ProtobufCMessageDescriptor *type = types[data[0] % (sizeof types / sizeof types[0])];
  const size_t arena_bytes = data[1] < 128 ? kvp_message_arena_bytes_max : 64 * ((size_t)data[1] - 128);
  struct kvp_rpc_message *message = NULL;
  struct kvp_error error;
  const enum kvp_status status = kvp_rpc_decode(type, data + 2, bytes - 2, arena_bytes, &message, &error);
  if (status == KVP_OK) {
    check_taken_again(type, message->body);
    kvp_rpc_message_unref(message);
  } else {
    assert(error.status == (int32_t)status);
    assert(status == KVP_MALFORMED || status == KVP_TOO_LARGE);
  }
  return 0;
}
