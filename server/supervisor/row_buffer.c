/* The buffer that rows without one go through. */
#include "server/supervisor/row_buffer.h"

#include "server/supervisor/buffer.h"

static void row_buffer_created(void *context, struct kvp_buffer *made, const struct kvp_error *error) {
  struct kvp_row_buffer *buffer = context;
  buffer->creating = false;
  buffer->id = made != NULL ? made->id : 0;
  if (buffer->closed) {
    kvp_row_buffer_release(buffer);
    buffer->orphaned(buffer->context);
  } else {
    buffer->ready(buffer->context, error);
  }
}

void kvp_row_buffer_create(struct kvp_row_buffer *buffer, const struct kvp_step_caller *caller, uint64_t bytes,
                           void (*ready)(void *context, const struct kvp_error *error),
                           void (*orphaned)(void *context), void *context, struct kvp_session *session) {
  *buffer = (struct kvp_row_buffer){
      .caller = caller, .ready = ready, .orphaned = orphaned, .context = context, .creating = true};
  kvp_buffer_create(caller->daemon, session, caller->device, bytes, row_buffer_created, buffer);
}

void kvp_row_buffer_release(struct kvp_row_buffer *buffer) {
  if (buffer->id != 0) {
    kvp_step_caller_release_buffer(buffer->caller, buffer->id);
    buffer->id = 0;
  }
}

bool kvp_row_buffer_close(struct kvp_row_buffer *buffer) {
  buffer->closed = true;
  if (buffer->creating) {
    return false;
  }
  if (buffer->caller != NULL) {
    kvp_row_buffer_release(buffer);
  }
  return true;
}
