/* Streams and the steps launched on them. */
#include "server/executor/dispatch.h"

#include <assert.h>
#include <string.h>

enum kvp_status kvp_dispatch_init(struct kvp_dispatch *dispatch, struct kvp_device *device, struct kvp_error *error) {
  const struct kvp_device_backend *backend = device->backend;
  memset(dispatch, 0, sizeof *dispatch);
  dispatch->device = device;
  dispatch->timelines = kvp_timelines_new(kvp_streams_max);
  if (dispatch->timelines == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for %d timelines", kvp_streams_max);
  }
  void *registered = NULL;
  enum kvp_status status = backend->host_register(
      device, dispatch->timelines, kvp_streams_max * sizeof *dispatch->timelines, false, &registered, error);
  if (status != KVP_OK) {
    goto err_timelines;
  }
  dispatch->device_timelines = registered;
  uint32_t made = 0;
  for (; made < kvp_streams_max; made++) {
    struct kvp_stream *stream = &dispatch->streams[made];
    status = backend->queue_create(device, &stream->device_queue, error);
    if (status != KVP_OK) {
      goto err_queues;
    }
    stream->timeline = &dispatch->timelines[made];
    stream->device_timeline = &dispatch->device_timelines[made];
    stream->next_free = dispatch->free_streams;
    dispatch->free_streams = stream;
  }
  return KVP_OK;

err_queues:
  while (made > 0) {
    backend->queue_destroy(device, dispatch->streams[--made].device_queue);
  }
  backend->host_unregister(device, dispatch->timelines);

err_timelines:
  kvp_timelines_destroy(dispatch->timelines, kvp_streams_max);
  return status;
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
  dispatch->device->backend->host_unregister(dispatch->device, dispatch->timelines);
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

/* The step's device ops as the device takes them, its signal last. */
static struct kvp_device_op *step_chain(struct kvp_step *step) {
  struct kvp_device_op *first = &step->signal;
  for (uint32_t i = step->op_count; i > 0; i--) {
    struct kvp_step_op *op = &step->ops[i - 1];
    if (op->first != NULL) {
      op->last->next = first;
      first = op->first;
    }
  }
  return first;
}

static struct kvp_device_op *step_first(struct kvp_step *step) {
  for (uint32_t i = 0; i < step->op_count; i++) {
    if (step->ops[i].first != NULL) {
      return step->ops[i].first;
    }
  }
  return &step->signal;
}

/* False: no room, nothing has changed. */
static bool step_launch(struct kvp_dispatch *dispatch, struct kvp_stream *stream, struct kvp_step *step) {
  step->signal = (struct kvp_device_op){
      .kind = KVP_DEVICE_SIGNAL,
      .params.signal = {.timeline = stream->device_timeline, .value = stream->launched_value + 1},
  };
  if (!dispatch->device->backend->launch(stream->device_queue, step_chain(step))) {
    return false;
  }
  stream->launched_value++;
  return true;
}

/* The queue borrows the first free stream. */
static void stream_lend(struct kvp_dispatch *dispatch, struct kvp_queue *queue) {
  struct kvp_stream *stream = dispatch->free_streams;
  dispatch->free_streams = stream->next_free;
  dispatch->busy_streams[dispatch->busy_count++] = stream;
  stream->user = queue;
  queue->stream = stream;
}

static bool launch_ready(struct kvp_dispatch *dispatch) {
  bool any = false;
  struct kvp_queue *queue = NULL;
  while (!dispatch->is_full && (queue = kvp_queues_first(&dispatch->queues)) != NULL) {
    struct kvp_stream *stream = queue->stream != NULL ? queue->stream : dispatch->free_streams;
    if (stream == NULL) {
      break; /* those behind it wait too: streams come free only when queues stop launching */
    }
    if (!step_launch(dispatch, stream, queue->waiting.first)) {
      /* The queue stays first, and nobody overtakes it: a large step gets its room in the end. */
      assert(dispatch->busy_count > 0);
      dispatch->is_full = true;
      break;
    }
    if (queue->stream == NULL) {
      stream_lend(dispatch, queue);
    }
    kvp_step_list_push(&stream->launched, kvp_queues_take(&dispatch->queues));
    any = true;
  }
  return any;
}

static bool stream_has_finished(const struct kvp_stream *stream) {
  return stream->launched.first->signal.params.signal.value <= kvp_timeline_read(stream->timeline);
}

/* Takes the finished steps off a stream; gives it back when none is left. True when it was given back. */
static bool stream_reap(struct kvp_dispatch *dispatch, struct kvp_stream *stream, struct kvp_step_list *finished) {
  const struct kvp_device_backend *backend = dispatch->device->backend;
  const uint64_t value = kvp_timeline_read(stream->timeline);
  while (stream->launched.first != NULL && stream->launched.first->signal.params.signal.value <= value) {
    struct kvp_queue *queue = stream->user;
    struct kvp_step *step = kvp_step_list_pop(&stream->launched);
    if (backend->collect != NULL) {
      (void)backend->collect(stream->device_queue, step_first(step), &step->error); /* not KVP_OK: it has failed */
    }
    dispatch->is_full = false;
    kvp_step_list_push(finished, step);
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
