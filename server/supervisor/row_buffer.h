/* The buffer that rows without one go through: of the caller's session, made for one call and gone with it. Part of a
 * method's own state of a call. Loop thread only.
 *
 * The state outlives a creation under way: when the call is closed its owner asks kvp_row_buffer_close, and frees the
 * state at once or in `orphaned`.
 */
#ifndef KVPOOL_SUPERVISOR_ROW_BUFFER_H
#define KVPOOL_SUPERVISOR_ROW_BUFFER_H

#include <stdbool.h>
#include <stdint.h>

#include "server/supervisor/step_caller.h"

/* What a call may take through one. */
enum { kvp_row_buffer_bytes_max = 1 << 30 };

struct kvp_row_buffer {
  const struct kvp_step_caller *caller;
  void (*ready)(void *context, const struct kvp_error *error); /* NULL: it is there */
  void (*orphaned)(void *context);                             /* its call was closed meanwhile: the state may go */
  void *context;
  uint64_t id; /* 0: none */
  bool creating;
  bool closed;
};

/* The caller is placed; ready or orphaned comes once, later. */
void kvp_row_buffer_create(struct kvp_row_buffer *buffer, const struct kvp_step_caller *caller, uint64_t bytes,
                           void (*ready)(void *context, const struct kvp_error *error),
                           void (*orphaned)(void *context), void *context, struct kvp_session *session);
/* Its memory goes when the steps that use it have retired. More than once is allowed. */
void kvp_row_buffer_release(struct kvp_row_buffer *buffer);
/* The call is closed. True: nothing is under way, the state may go. False: `orphaned` will come. */
bool kvp_row_buffer_close(struct kvp_row_buffer *buffer);

#endif
