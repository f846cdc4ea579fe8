/* Checks the wire bytes of a message before protobuf-c sees them. Any thread; no state.
 *
 * protobuf-c takes invalid UTF-8 for a string, and as its strings are NUL-terminated it loses everything behind an
 * embedded NUL. So strings are checked where their length is still known: on the wire.
 */
#ifndef KVPOOL_SUPERVISOR_RPC_WIRE_H
#define KVPOOL_SUPERVISOR_RPC_WIRE_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

/* Messages within messages; kvpool.proto needs 5 and none of its messages holds itself. */
enum { kvp_rpc_wire_depth_max = 16 };

/* OK, or malformed naming message, field and, in a string, the byte's position and value. Whatever is accepted here
 * protobuf-c may still refuse; what is refused here it must not be given. */
enum kvp_status kvp_rpc_wire_check(const ProtobufCMessageDescriptor *type, const uint8_t *wire, size_t wire_bytes,
                                   struct kvp_error *error);

#endif
