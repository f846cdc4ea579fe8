/* Bytes on their way from a client into a buffer: one writing step a chunk, all in the caller's queue. Part of a
 * method's own state of a call. Loop thread only.
 */
#ifndef KVPOOL_SUPERVISOR_BYTE_WRITER_H
#define KVPOOL_SUPERVISOR_BYTE_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/supervisor/step_caller.h"

/* A step was done, or (error) failed; after a failure nothing is called any more. */
typedef void (*kvp_byte_writer_fn)(void *context, const struct kvp_error *error);

struct kvp_byte_writer {
  const struct kvp_step_caller *caller;
  kvp_byte_writer_fn progress;
  void *context;
  uint32_t steps; /* not done */
  bool failed;
};

/* Its steps carry the writer for their context. */
void kvp_byte_writer_init(struct kvp_byte_writer *writer, const struct kvp_step_caller *caller,
                          kvp_byte_writer_fn progress, void *context);
/* Copies. The range is inside the buffer. */
enum kvp_status kvp_byte_writer_write(struct kvp_byte_writer *writer, uint64_t buffer_id, uint64_t offset_bytes,
                                      const uint8_t *data, size_t bytes, struct kvp_error *error);
/* So many are under way that the client's next message had better wait. */
bool kvp_byte_writer_is_full(const struct kvp_byte_writer *writer);

#endif
