/* Status codes: one list for proto, server and client.
 *
 * The numbers are part of the protocol (kvpool.proto, enum StatusCode) and never change meaning.
 */
#ifndef KVPOOL_PROTO_STATUS_H
#define KVPOOL_PROTO_STATUS_H

#include <stdint.h>

/* X(NAME, number, name on the wire and in logs, gRPC status code, text) */
#define KVP_STATUS_MAP(X)                                                                                            \
  X(OK, 0, "ok", 0, "success")                                                                                       \
  X(INVALID_ARGUMENT, 1, "invalid_argument", 3, "an argument is not valid")                                          \
  X(OUT_OF_RANGE, 2, "out_of_range", 11, "an index is outside what it indexes")                                      \
  X(NOT_OWNER, 3, "not_owner", 7, "the block is not this session's")                                                 \
  X(STALE_BLOCK, 4, "stale_block", 9, "the block was assigned after the step was built")                             \
  X(SEALED_BLOCK, 5, "sealed_block", 9, "the block is immutable")                                                    \
  X(HAZARD_STORE_BEFORE_LOAD, 6, "hazard_store_before_load", 9, "a store would overwrite what a load reads")         \
  X(WRONG_FORMAT, 7, "wrong_format", 3, "the width is not that of the region's format")                              \
  X(WRONG_DEVICE, 8, "wrong_device", 3, "the object lives on another device")                                        \
  X(TOO_LARGE, 9, "too_large", 8, "larger than a limit of this daemon")                                              \
  X(BUSY, 10, "busy", 14, "a queue is full; try again when a step is done")                                          \
  X(UNKNOWN_SESSION, 11, "unknown_session", 16, "no such session")                                                   \
  X(DEVICE_LOST, 12, "device_lost", 10, "the executor of this device died")                                          \
  X(UNKNOWN_POOL, 13, "unknown_pool", 5, "no such pool")                                                             \
  X(UNKNOWN_REGION, 14, "unknown_region", 5, "no such region in this pool")                                          \
  X(UNKNOWN_LAYER, 15, "unknown_layer", 5, "no such layer in this region")                                           \
  X(UNKNOWN_BUFFER, 16, "unknown_buffer", 5, "no such buffer in this session")                                       \
  X(WRONG_SECRET, 17, "wrong_secret", 16, "the secret is not this session's")                                        \
  X(PERMISSION_DENIED, 18, "permission_denied", 7, "the caller may not do this")                                     \
  X(OUT_OF_MEMORY, 19, "out_of_memory", 8, "it does not fit in the device's memory")                                 \
  X(OUT_OF_BLOCKS, 20, "out_of_blocks", 8, "not enough free blocks")                                                 \
  X(ALREADY_EXISTS, 21, "already_exists", 6, "the name is taken")                                                    \
  X(MALFORMED, 22, "malformed", 3, "the message can't be decoded")                                                   \
  X(QUOTA_EXCEEDED, 23, "quota_exceeded", 8, "over this session's quota")                                            \
  X(DEADLINE_EXCEEDED, 24, "deadline_exceeded", 4, "not done in time")                                               \
  X(CANCELLED, 25, "cancelled", 1, "the call's owner is gone")                                                       \
  X(SHUTTING_DOWN, 26, "shutting_down", 14, "the daemon is draining")                                                \
  X(UNIMPLEMENTED, 27, "unimplemented", 12, "not known to this daemon")                                              \
  X(IN_USE, 28, "in_use", 9, "somebody still uses it")                                                               \
  X(VERSION_MISMATCH, 29, "version_mismatch", 9, "the two sides speak different protocol versions")                  \
  X(INTERNAL, 30, "internal", 13, "a fault of the daemon; its log says more")

enum kvp_status {
#define X(name, number, wire, grpc, text) KVP_##name = (number),
  KVP_STATUS_MAP(X)
#undef X
};

enum { kvp_status_count = KVP_INTERNAL + 1 };

/* Never NULL; an unknown number gives "unknown". */
const char *kvp_status_name(enum kvp_status status);
const char *kvp_status_text(enum kvp_status status);
/* The grpc_status_code of a status; INTERNAL for an unknown number. */
int kvp_status_grpc(enum kvp_status status);

enum { kvp_error_text_bytes_max = 384, kvp_error_array_bytes_max = 32 };

/* What went wrong, where and with which value. Fixed size: supplied by the caller, copied freely, sent
 * through shared memory as it is. */
struct kvp_error {
  int32_t status;                        /* enum kvp_status */
  int32_t op;                            /* index of the op within its step; -1: not about an op */
  int64_t position;                      /* element of `array`; -1: none */
  int64_t value;                         /* what stood there */
  char array[kvp_error_array_bytes_max]; /* array or field; "" when none */
  char text[kvp_error_text_bytes_max];   /* one line for a person */
};

/* Fills *error (NULL is allowed) and returns status, so that a check reads `return kvp_error_set(...)`. */
enum kvp_status kvp_error_set(struct kvp_error *error, enum kvp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same for one element of an array of a step's op; the text is prefixed by nothing: say all of it. */
enum kvp_status kvp_error_set_at(struct kvp_error *error, enum kvp_status status, int32_t op, const char *array,
                                 int64_t position, int64_t value, const char *format, ...)
    __attribute__((format(printf, 7, 8)));

#endif
