/* Bytes on their way from a client into a buffer. */
#include "server/supervisor/byte_writer.h"

#include "server/supervisor/step_build.h"

enum { steps_ahead_max = 4 };

static void writer_step_finished(void *context, uint64_t tag, const struct kvp_step_result *result) {
  struct kvp_byte_writer *writer = context;
  (void)tag;
  writer->steps--;
  if (!writer->failed) {
    writer->failed = result->error != NULL;
    writer->progress(writer->context, result->error);
  }
}

static const struct kvp_step_events writer_events = {.finished = writer_step_finished};

void kvp_byte_writer_init(struct kvp_byte_writer *writer, const struct kvp_step_caller *caller,
                          kvp_byte_writer_fn progress, void *context) {
  *writer = (struct kvp_byte_writer){.caller = caller, .progress = progress, .context = context};
}

enum kvp_status kvp_byte_writer_write(struct kvp_byte_writer *writer, uint64_t buffer_id, uint64_t offset_bytes,
                                      const uint8_t *data, size_t bytes, struct kvp_error *error) {
  while (bytes > 0) {
    uint32_t chunk = bytes < kvp_chunk_bytes_max ? (uint32_t)bytes : kvp_chunk_bytes_max;
    struct kvp_wire_step *step = kvp_step_build_write(buffer_id, offset_bytes, data, chunk, error);
    if (step == NULL) {
      return (enum kvp_status)error->status;
    }
    enum kvp_status status = kvp_step_caller_submit(writer->caller, step, NULL, 0, &writer_events, writer, 0, error);
    if (status != KVP_OK) {
      return status;
    }
    writer->steps++;
    offset_bytes += chunk;
    data += chunk;
    bytes -= chunk;
  }
  return KVP_OK;
}

bool kvp_byte_writer_is_full(const struct kvp_byte_writer *writer) {
  return writer->steps >= steps_ahead_max;
}
