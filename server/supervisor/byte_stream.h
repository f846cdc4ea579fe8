/* Bytes on their way from a device to a client: reading steps a few chunks ahead, delivered in order, no faster than
 * the client takes them. Part of a method's own state of a call. Loop thread only.
 */
#ifndef KVPOOL_SUPERVISOR_BYTE_STREAM_H
#define KVPOOL_SUPERVISOR_BYTE_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/supervisor/step_caller.h"

struct kvp_byte_source {
  /* A step whose result is the bytes [offset, offset + bytes); *pool is the pool it reads, if any. NULL with *error.
   */
  struct kvp_wire_step *(*build)(void *context, uint64_t offset, uint32_t bytes, struct kvp_pool **pool,
                                 struct kvp_error *error);
  /* In order, without a gap. */
  void (*deliver)(void *context, uint64_t offset, const uint8_t *data, size_t bytes);
  /* Once, last: everything was delivered (error NULL), or something failed. May start the same stream anew. */
  void (*end)(void *context, const struct kvp_error *error);
};

struct kvp_byte_stream {
  const struct kvp_step_caller *caller;
  const struct kvp_byte_source *source;
  void *context;
  uint64_t bytes; /* in all */
  uint64_t asked; /* in steps */
  uint64_t delivered;
  bool over;
};

/* Its steps carry the stream for their context. Nothing is called back from inside but `end`. */
void kvp_byte_stream_start(struct kvp_byte_stream *stream, const struct kvp_step_caller *caller,
                           const struct kvp_byte_source *source, void *context, uint64_t bytes);
/* The call's client has caught up. */
void kvp_byte_stream_go_on(struct kvp_byte_stream *stream);

#endif
