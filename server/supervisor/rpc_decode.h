/* Decodes the bytes of a request into a kvp_rpc_message whose memory is bounded. Any thread.
 *
 * A few bytes of wire can decode to many times as much (empty submessages, unknown fields); the arena stops that and
 * tells it apart from a message that is malformed.
 */
#ifndef KVPOOL_SUPERVISOR_RPC_DECODE_H
#define KVPOOL_SUPERVISOR_RPC_DECODE_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"
#include "server/supervisor/rpc.h"

/* Checks, unpacks and gives the message with one reference. malformed: not a message of this type, or a string that
 * is not UTF-8 or holds a NUL; too_large: it needs more than arena_bytes_max; out_of_memory. */
enum kvp_status kvp_rpc_decode(const ProtobufCMessageDescriptor *type, const uint8_t *wire, size_t wire_bytes,
                               size_t arena_bytes_max, struct kvp_rpc_message **out, struct kvp_error *error);

#endif
