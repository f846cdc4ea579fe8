/* Streams and the steps launched on them. */
#include "server/executor/dispatch.h"

#include <assert.h>
#include <string.h>

enum kvp_status kvp_dispatch_init(struct kvp_dispatch *dispatch, struct kvp_device *device, struct kvp_error *error) {
  memset(dispatch, 0, sizeof *dispatch);
  dispatch->device = device;
  dispatch->timelines = kvp_timelines_new(kvp_streams_max);
  if (dispatch->timelines == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for %d timelines", kvp_streams_max);
  }
  uint32_t made = 0;
  for (; made < kvp_streams_max; made++) {
    struct kvp_stream *stream = &dispatch->streams[made];
    enum kvp_status status = device->backend->queue_create(device, &stream->device_queue, error);
    if (status != KVP_OK) {
      while (made > 0) {
        device->backend->queue_destroy(device, dispatch->streams[--made].device_queue);
      }
      kvp_timelines_destroy(dispatch->timelines, kvp_streams_max);
      return status;
    }
    stream->timeline = &dispatch->timelines[made];
    stream->next_free = dispatch->free_streams;
    dispatch->free_streams = stream;
  }
  return KVP_OK;
}

void kvp_dispatch_deinit(struct kvp_dispatch *dispatch, void (*drop)(void *context, struct kvp_step *step),
                         void *context) {
  for (uint32_t i = 0; i < kvp_streams_max; i++) {
    struct kvp_stream *stream = &dispatch->streams[i];
    struct kvp_step *step = NULL;
    while ((step = kvp_step_list_pop(&stream->launched)) != NULL) {
      drop(context, step);
    }
    dispatch->device->backend->queue_destroy(dispatch->device, stream->device_queue);
  }
  kvp_queues_deinit(&dispatch->queues, drop, context);
  kvp_timelines_destroy(dispatch->timelines, kvp_streams_max);
}

enum kvp_status kvp_dispatch_open(struct kvp_dispatch *dispatch, uint32_t queue_id, struct kvp_queue **out,
                                  struct kvp_error *error) {
  return kvp_queues_get(&dispatch->queues, queue_id, out, error);
}

void kvp_dispatch_submit(struct kvp_dispatch *dispatch, struct kvp_queue *queue, struct kvp_step *step) {
  kvp_queue_push(&dispatch->queues, queue, step);
}

void kvp_dispatch_close_queue(struct kvp_dispatch *dispatch, uint32_t queue_id) {
  kvp_queues_close(&dispatch->queues, queue_id);
}

/* The stream of the queue, borrowed if it has none; NULL when all are out. */
static struct kvp_stream *stream_of(struct kvp_dispatch *dispatch, struct kvp_queue *queue) {
  if (queue->stream == NULL && dispatch->free_streams != NULL) {
    struct kvp_stream *stream = dispatch->free_streams;
    dispatch->free_streams = stream->next_free;
    dispatch->busy_streams[dispatch->busy_count++] = stream;
    stream->user = queue;
    queue->stream = stream;
  }
  return queue->stream;
}

static void step_launch(struct kvp_dispatch *dispatch, struct kvp_stream *stream, struct kvp_step *step) {
  const struct kvp_device_backend *backend = dispatch->device->backend;
  stream->launched_value++;
  step->signal = (struct kvp_device_op){
      .kind = KVP_DEVICE_SIGNAL,
      .params.signal = {.timeline = stream->timeline, .value = stream->launched_value},
  };
  kvp_step_list_push(&stream->launched, step);
  for (uint32_t i = 0; i < step->op_count; i++) {
    backend->launch(stream->device_queue, &step->ops[i].device);
  }
  backend->launch(stream->device_queue, &step->signal);
}

static bool launch_ready(struct kvp_dispatch *dispatch) {
  bool any = false;
  struct kvp_queue *queue = NULL;
  while ((queue = kvp_queues_first(&dispatch->queues)) != NULL) {
    struct kvp_stream *stream = stream_of(dispatch, queue);
    if (stream == NULL) {
      break; /* those behind it wait too: streams come free only when queues stop launching */
    }
    step_launch(dispatch, stream, kvp_queues_take(&dispatch->queues));
    any = true;
  }
  return any;
}

static bool stream_has_finished(const struct kvp_stream *stream) {
  return stream->launched.first->signal.params.signal.value <= kvp_timeline_read(stream->timeline);
}

/* Takes the finished steps off a stream; gives it back when none is left. True when it was given back. */
static bool stream_reap(struct kvp_dispatch *dispatch, struct kvp_stream *stream, struct kvp_step_list *finished) {
  const uint64_t value = kvp_timeline_read(stream->timeline);
  while (stream->launched.first != NULL && stream->launched.first->signal.params.signal.value <= value) {
    struct kvp_queue *queue = stream->user;
    kvp_step_list_push(finished, kvp_step_list_pop(&stream->launched));
    if (stream->launched.first == NULL) {
      queue->stream = NULL;
      stream->user = NULL;
    }
    kvp_queue_done(&dispatch->queues, queue);
  }
  if (stream->launched.first != NULL) {
    return false;
  }
  stream->next_free = dispatch->free_streams;
  dispatch->free_streams = stream;
  return true;
}

bool kvp_dispatch_poll(struct kvp_dispatch *dispatch, struct kvp_step_list *finished) {
  bool any = false;
  for (uint32_t i = 0; i < dispatch->busy_count;) {
    struct kvp_stream *stream = dispatch->busy_streams[i];
    any = stream_has_finished(stream) || any;
    if (stream_reap(dispatch, stream, finished)) {
      dispatch->busy_streams[i] = dispatch->busy_streams[--dispatch->busy_count];
    } else {
      i++;
    }
  }
  return launch_ready(dispatch) || any;
}

bool kvp_dispatch_has_finished(const struct kvp_dispatch *dispatch) {
  for (uint32_t i = 0; i < dispatch->busy_count; i++) {
    if (stream_has_finished(dispatch->busy_streams[i])) {
      return true;
    }
  }
  return false;
}
