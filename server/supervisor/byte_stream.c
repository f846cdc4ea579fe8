/* Bytes on their way from a device to a client. */
#include "server/supervisor/byte_stream.h"

#include <inttypes.h>

/* Enough to keep executor and connection busy at the same time. */
enum { chunks_ahead_max = 4 };

static uint32_t chunk_at(const struct kvp_byte_stream *stream, uint64_t offset) {
  uint64_t left = stream->bytes - offset;
  return left < kvp_chunk_bytes_max ? (uint32_t)left : kvp_chunk_bytes_max;
}

static void stream_end(struct kvp_byte_stream *stream, const struct kvp_error *error) {
  stream->over = true;
  stream->source->end(stream->context, error);
}

static void stream_step_finished(void *context, uint64_t offset, const struct kvp_step_result *result) {
  struct kvp_byte_stream *stream = context;
  if (stream->over) {
    return;
  }
  if (result->error != NULL) {
    stream_end(stream, result->error);
    return;
  }
  uint32_t bytes = chunk_at(stream, offset);
  if (offset != stream->delivered || result->byte_count != bytes) {
    struct kvp_error error;
    (void)kvp_error_set(&error, KVP_INTERNAL, "device %s: %zu bytes came for [%" PRIu64 ", +%u)",
                        stream->caller->device->name, result->byte_count, offset, bytes);
    stream_end(stream, &error);
    return;
  }
  stream->source->deliver(stream->context, offset, result->bytes, bytes);
  stream->delivered += bytes;
  kvp_byte_stream_go_on(stream);
}

static const struct kvp_step_events stream_events = {.finished = stream_step_finished};

static enum kvp_status stream_ask(struct kvp_byte_stream *stream, struct kvp_error *error) {
  uint32_t bytes = chunk_at(stream, stream->asked);
  struct kvp_pool *pool = NULL;
  struct kvp_wire_step *step = stream->source->build(stream->context, stream->asked, bytes, &pool, error);
  if (step == NULL) {
    return (enum kvp_status)error->status;
  }
  return kvp_step_caller_submit(stream->caller, step, &pool, pool != NULL ? 1 : 0, &stream_events, stream,
                                stream->asked, error);
}

void kvp_byte_stream_go_on(struct kvp_byte_stream *stream) {
  if (stream->over) {
    return;
  }
  if (stream->delivered == stream->bytes) {
    stream_end(stream, NULL);
    return;
  }
  while (stream->asked < stream->bytes &&
         stream->asked - stream->delivered < (uint64_t)chunks_ahead_max * kvp_chunk_bytes_max &&
         kvp_rpc_call_queued_bytes(stream->caller->call) <= kvp_rpc_high_water_bytes) {
    struct kvp_error error;
    if (stream_ask(stream, &error) != KVP_OK) {
      stream_end(stream, &error);
      return;
    }
    stream->asked += chunk_at(stream, stream->asked);
  }
}

void kvp_byte_stream_start(struct kvp_byte_stream *stream, const struct kvp_step_caller *caller,
                           const struct kvp_byte_source *source, void *context, uint64_t bytes) {
  *stream = (struct kvp_byte_stream){.caller = caller, .source = source, .context = context, .bytes = bytes};
  kvp_byte_stream_go_on(stream);
}
