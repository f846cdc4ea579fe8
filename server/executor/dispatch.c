/* Streams and the legs launched on them. */
#include "server/executor/dispatch.h"

#include <assert.h>
#include <string.h>

#include "proto/failpoint.h"
#include "server/executor/clock.h"
#include "server/executor/replay.h"
#include "server/executor/ring_timelines.h"

enum { dispatch_words = 2 * kvp_streams_max };

enum kvp_status kvp_dispatch_init(struct kvp_dispatch *dispatch, struct kvp_device *device, struct kvp_error *error) {
  const struct kvp_device_backend *backend = device->backend;
  memset(dispatch, 0, sizeof *dispatch);
  dispatch->device = device;
  dispatch->timelines = kvp_timelines_new(dispatch_words);
  if (dispatch->timelines == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for %d timelines", dispatch_words);
  }
  void *registered = NULL;
  enum kvp_status status = backend->host_register(
      device, dispatch->timelines, dispatch_words * sizeof *dispatch->timelines, false, &registered, error);
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
    stream->abort = &dispatch->timelines[kvp_streams_max + made];
    stream->device_abort = &dispatch->device_timelines[kvp_streams_max + made];
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
  kvp_timelines_destroy(dispatch->timelines, dispatch_words);
  return status;
}

void kvp_dispatch_deinit(struct kvp_dispatch *dispatch, void (*drop)(void *context, struct kvp_step *step),
                         void *context) {
  for (uint32_t i = 0; i < kvp_streams_max; i++) {
    struct kvp_stream *stream = &dispatch->streams[i];
    for (struct kvp_step_leg *leg = stream->launched_first; leg != NULL; leg = leg->next) {
      leg->step->ended_legs++;
    }
    struct kvp_step_leg *leg = stream->launched_first;
    while (leg != NULL) { /* a step with legs to launch is in its queue, too */
      struct kvp_step *step = leg->step;
      const bool is_last = leg == &step->legs[step->launched_legs - 1];
      leg = leg->next;
      if (is_last && kvp_step_is_over(step)) {
        drop(context, step);
      }
    }
    dispatch->device->backend->queue_destroy(dispatch->device, stream->device_queue);
  }
  kvp_queues_deinit(&dispatch->queues, drop, context);
  dispatch->device->backend->host_unregister(dispatch->device, dispatch->timelines);
  kvp_timelines_destroy(dispatch->timelines, dispatch_words);
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

static void stream_abort(struct kvp_stream *stream) {
  kvp_timeline_signal(stream->abort, stream->launched_value);
}

void kvp_dispatch_drop(struct kvp_dispatch *dispatch, uint32_t queue_id, const struct kvp_served_ring *ring,
                       struct kvp_step_list *dropped) {
  struct kvp_queue *queue = kvp_id_table_get(&dispatch->queues.table, queue_id);
  if (queue == NULL) {
    return;
  }
  if (queue->stream != NULL) {
    stream_abort(queue->stream);
  }
  kvp_queue_drop(&dispatch->queues, queue, ring, dropped);
}

void kvp_dispatch_abort(struct kvp_dispatch *dispatch) {
  for (uint32_t i = 0; i < dispatch->busy_count; i++) {
    stream_abort(dispatch->busy_streams[i]);
  }
}

/* ---- waits ---- */

enum leg_state { LEG_READY, LEG_WAITS, LEG_IN_VAIN };

/* The op that the leg waits with; NULL: with none. */
static const struct kvp_step_op *leg_wait_op(const struct kvp_step_leg *leg) {
  if (leg->first_op == leg->end_op) {
    return NULL;
  }
  const struct kvp_step_op *op = &leg->step->ops[leg->first_op];
  return op->waits ? op : NULL;
}

/* *value: what the word has. */
static enum leg_state leg_look(const struct kvp_step_leg *leg, uint64_t *value) {
  if (leg->step->error.status != KVP_OK) {
    return LEG_IN_VAIN; /* a leg before it could not be launched whole */
  }
  const struct kvp_step_op *op = leg_wait_op(leg);
  if (op == NULL) {
    return LEG_READY;
  }
  *value = kvp_ring_timelines_read(leg->step->timelines, op->wait.word);
  if (*value >= KVP_TIMELINE_POISON) {
    return LEG_IN_VAIN;
  }
  if (*value >= op->wait.value) {
    return LEG_READY;
  }
  return kvp_clock_ns() >= leg->step->deadline_ns ? LEG_IN_VAIN : LEG_WAITS;
}

static void wait_refuse(const struct kvp_step_leg *leg, uint64_t value) {
  struct kvp_step *step = leg->step;
  const struct kvp_step_point *wait = &step->ops[leg->first_op].wait;
  if (value >= KVP_TIMELINE_POISON) {
    (void)kvp_error_set_at(&step->error, KVP_CANCELLED, (int32_t)leg->first_op, "wait", wait->word, (int64_t)value,
                           "op %u: it waited for word %u to reach %llu, and the word is poisoned (0x%llx)",
                           leg->first_op, wait->word, (unsigned long long)wait->value, (unsigned long long)value);
  } else {
    (void)kvp_error_set_at(&step->error, KVP_DEADLINE_EXCEEDED, (int32_t)leg->first_op, "wait", wait->word,
                           (int64_t)value, "op %u: word %u was to reach %llu, at the deadline it had %llu",
                           leg->first_op, wait->word, (unsigned long long)wait->value, (unsigned long long)value);
  }
}

/* What the step would have signalled, from that leg on, is given up, or poisoned where nobody can write it any more. */
static void signals_end(struct kvp_step *step, uint32_t leg,
                        void (*end)(struct kvp_ring_timelines *timelines, uint32_t word)) {
  const uint32_t first = leg < step->leg_count ? step->legs[leg].first_op : step->op_count;
  for (uint32_t i = first; i < step->op_count; i++) {
    if (step->ops[i].signals) {
      end(step->timelines, step->ops[i].signal.word);
    }
  }
}

void kvp_dispatch_signals_poison(struct kvp_step *step) {
  signals_end(step, 0, kvp_ring_timelines_poison);
}

static void step_finish(struct kvp_step *step, struct kvp_step_list *finished) {
  if (step->is_failed) {
    signals_end(step, step->whole_legs, kvp_ring_timelines_poison);
  }
  kvp_step_list_push(finished, step);
}

static void stream_push(struct kvp_stream *stream, struct kvp_step_leg *leg) {
  leg->next = NULL;
  if (stream->launched_first == NULL) {
    stream->launched_first = leg;
  } else {
    stream->launched_last->next = leg;
  }
  stream->launched_last = leg;
}

/* The first queue's step won't go on. What is launched of it, and before it, runs to its end: that may signal the same
 * words, which are poisoned behind it, so the leg that failed stands behind what is launched as if it were, too. */
static void first_fail(struct kvp_dispatch *dispatch, uint64_t value, struct kvp_step_list *finished) {
  struct kvp_queue *queue = kvp_queues_first(&dispatch->queues);
  struct kvp_step_leg *leg = kvp_queue_leg(queue);
  struct kvp_step *step = leg->step;
  if (step->error.status == KVP_OK) {
    wait_refuse(leg, value);
  }
  signals_end(step, step->launched_legs, kvp_ring_timelines_give_up);
  const bool is_behind = queue->stream != NULL;
  if (is_behind) {
    leg->first = NULL;
    leg->signal.params.signal.value = queue->stream->launched_value;
    stream_push(queue->stream, leg);
  }
  kvp_queues_give_up(&dispatch->queues, is_behind);
  if (kvp_step_is_over(step)) {
    step_finish(step, finished);
  }
}

/* Parked queues whose wait has come to an end go into the line. */
static void parked_look(struct kvp_queues *queues) {
  for (uint32_t i = 0; i < queues->parked_count;) {
    struct kvp_queue *queue = queues->parked[i];
    uint64_t value = 0;
    if (leg_look(kvp_queue_leg(queue), &value) == LEG_WAITS) {
      i++;
    } else {
      kvp_queues_unpark(queues, queue);
    }
  }
}

/* ---- launches ---- */

/* The leg's device ops as the device takes them, its signal last. */
static struct kvp_device_op *leg_chain(struct kvp_step_leg *leg) {
  struct kvp_step *step = leg->step;
  struct kvp_device_op *first = &leg->signal;
  for (uint32_t i = leg->end_op; i > leg->first_op; i--) {
    struct kvp_step_op *op = &step->ops[i - 1];
    if (op->point != NULL) {
      const bool given_up = kvp_ring_timelines_is_given_up(step->timelines, op->signal.word);
      op->point->params.point = (struct kvp_point_params){.word = &step->timelines->device_words[op->signal.word],
                                                          .value = given_up ? KVP_TIMELINE_POISON : op->signal.value};
      op->point->next = first;
      first = op->point;
    }
    if (op->first != NULL) {
      op->last->next = first;
      first = op->first;
    }
  }
  return first;
}

/* False: no room, nothing has changed. */
static bool leg_launch(struct kvp_dispatch *dispatch, struct kvp_stream *stream, struct kvp_step_leg *leg) {
  leg->signal = (struct kvp_device_op){
      .kind = KVP_DEVICE_SIGNAL,
      .params.signal = {.timeline = stream->device_timeline, .value = stream->launched_value + 1},
  };
  leg->first = leg_chain(leg);
  if (leg->step->replay != NULL) {
    struct kvp_replay_params *replay = &leg->step->replay->params.replay;
    replay->deadline_ns = leg->step->deadline_ns;
    replay->abort = stream->device_abort;
    replay->abort_value = stream->launched_value + 1;
  }
  if (!dispatch->device->backend->launch(stream->device_queue, leg->first)) {
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

/* Launches the first queue's leg. False: that must wait for something that is launched. */
static bool first_launch(struct kvp_dispatch *dispatch, struct kvp_queue *queue) {
  struct kvp_stream *stream = queue->stream != NULL ? queue->stream : dispatch->free_streams;
  if (stream == NULL) {
    return false; /* those behind it wait too: streams come free only when queues stop launching */
  }
  if (!leg_launch(dispatch, stream, kvp_queue_leg(queue))) {
    /* The queue stays first, and nobody overtakes it: a large step gets its room in the end. */
    assert(dispatch->busy_count > 0);
    dispatch->is_full = true;
    return false;
  }
  if (queue->stream == NULL) {
    stream_lend(dispatch, queue);
  }
  stream_push(stream, kvp_queues_take(&dispatch->queues));
  KVP_FAILPOINT("executor.leg_launched");
  return true;
}

static bool launch_ready(struct kvp_dispatch *dispatch, struct kvp_step_list *finished) {
  bool any = false;
  struct kvp_queue *queue = NULL;
  while (!dispatch->is_full && (queue = kvp_queues_first(&dispatch->queues)) != NULL) {
    uint64_t value = 0;
    switch (leg_look(kvp_queue_leg(queue), &value)) {
    case LEG_READY:
      if (!first_launch(dispatch, queue)) {
        return any;
      }
      any = true;
      break;
    case LEG_WAITS:
      kvp_queues_park(&dispatch->queues);
      break;
    case LEG_IN_VAIN:
      first_fail(dispatch, value, finished);
      any = true;
      break;
    }
  }
  return any;
}

static bool stream_has_finished(const struct kvp_stream *stream) {
  return stream->launched_first->signal.params.signal.value <= kvp_timeline_read(stream->timeline);
}

/* A leg that was not launched whole ends its step: legs behind it are not launched. */
static void leg_collect(const struct kvp_dispatch *dispatch, const struct kvp_stream *stream,
                        struct kvp_step_leg *leg) {
  const struct kvp_device_backend *backend = dispatch->device->backend;
  struct kvp_step *step = leg->step;
  struct kvp_error error = {0};
  if (leg->first == NULL) {
    return; /* it was given up */
  }
  const bool is_whole =
      backend->collect == NULL || backend->collect(stream->device_queue, leg->first, &error) == KVP_OK;
  step->whole_legs += is_whole && step->whole_legs == step->ended_legs;
  if (!is_whole && step->error.status == KVP_OK) {
    step->error = error;
  }
  /* Otherwise it stands in its queue, which gives it up. */
  step->is_failed = step->is_failed || (step->error.status != KVP_OK && step->launched_legs == step->leg_count);
}

/* Takes the ended legs off a stream; gives it back when none is left. True when it was given back. */
static bool stream_reap(struct kvp_dispatch *dispatch, struct kvp_stream *stream, struct kvp_step_list *finished) {
  const uint64_t value = kvp_timeline_read(stream->timeline);
  while (stream->launched_first != NULL && stream->launched_first->signal.params.signal.value <= value) {
    struct kvp_queue *queue = stream->user;
    struct kvp_step_leg *leg = stream->launched_first;
    struct kvp_step *step = leg->step;
    stream->launched_first = leg->next;
    leg_collect(dispatch, stream, leg);
    if (step->replay != NULL && step->error.status == KVP_OK) {
      kvp_replay_look(step);
    }
    dispatch->is_full = false;
    dispatch->ended_legs++;
    step->ended_legs++;
    if (kvp_step_is_over(step)) {
      step_finish(step, finished);
    }
    if (stream->launched_first == NULL) {
      queue->stream = NULL;
      stream->user = NULL;
    }
    kvp_queue_done(&dispatch->queues, queue);
  }
  if (stream->launched_first != NULL) {
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
  parked_look(&dispatch->queues);
  return launch_ready(dispatch, finished) || any;
}

bool kvp_dispatch_has_finished(const struct kvp_dispatch *dispatch) {
  for (uint32_t i = 0; i < dispatch->busy_count; i++) {
    if (stream_has_finished(dispatch->busy_streams[i])) {
      return true;
    }
  }
  return false;
}
