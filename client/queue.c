/* Queues: an open Steps stream.
 *
 * One message is being sent at a time, the rest waits in `waiting`. A step is outstanding from its submit to its last
 * word, which the daemon says or, when the stream ends, the end says for all. No more than kvp_queue_steps_max are
 * outstanding, so nothing here grows. Completions run on the library's thread.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/internal.h"

struct kvpool_queue {
  atomic_uint references; /* the user's and the stream's */
  kvpool_session *session;
  struct kvp_call *call; /* under the lock: NULL once it closed */
  kvpool_completion_fn on_completion;
  void *context;
  bool want_accepted;
  kvpool_op_report *reports; /* the library thread's, kept from step to step */
  size_t report_capacity;

  pthread_mutex_t lock; /* guards the rest */
  pthread_cond_t changed;
  uint64_t last_step_id;
  bool is_named; /* the session's reference has been sent */
  bool sending;
  bool delivering; /* a completion is being told */
  bool silent;     /* closed from a callback: nothing is told any more */
  bool closed;     /* the stream is over and everything was told */
  kvpool_error end;
  uint32_t outstanding_count;
  uint64_t outstanding[kvp_queue_steps_max]; /* step ids, ascending */
  uint32_t waiting_first;
  uint32_t waiting_count;
  grpc_byte_buffer *waiting[kvp_queue_steps_max]; /* a ring */
};

static void queue_unref(kvpool_queue *queue) {
  if (atomic_fetch_sub_explicit(&queue->references, 1, memory_order_acq_rel) == 1) {
    kvp_sync_deinit(&queue->lock, &queue->changed);
    kvp_session_unref(queue->session);
    free(queue->reports);
    free(queue);
  }
}

/* The lock is held. False: it is not outstanding. */
static bool outstanding_remove(kvpool_queue *queue, uint64_t step_id) {
  for (uint32_t i = 0; i < queue->outstanding_count; i++) {
    if (queue->outstanding[i] == step_id) {
      queue->outstanding_count--;
      memmove(&queue->outstanding[i], &queue->outstanding[i + 1],
              (queue->outstanding_count - i) * sizeof queue->outstanding[0]);
      return true;
    }
  }
  return false;
}

/* Tells a completion; the last word about a step takes it off first, so that the callback may submit the next. */
static void queue_tell(kvpool_queue *queue, const kvpool_completion *completion) {
  pthread_mutex_lock(&queue->lock);
  bool is_known = completion->accepted || outstanding_remove(queue, completion->step_id);
  bool is_wanted = is_known && !queue->silent && queue->on_completion != NULL;
  queue->delivering = is_wanted;
  pthread_mutex_unlock(&queue->lock);
  if (is_wanted) {
    queue->on_completion(queue->context, completion);
  }
  pthread_mutex_lock(&queue->lock);
  queue->delivering = false;
  pthread_cond_broadcast(&queue->changed);
  pthread_mutex_unlock(&queue->lock);
}

static void queue_tell_failed(kvpool_queue *queue, uint64_t step_id, const kvpool_error *error) {
  queue_tell(queue, &(kvpool_completion){.step_id = step_id, .error = error});
}

static void queue_tell_done(kvpool_queue *queue, const Kvpool__V1__StepDone *done) {
  if (done->n_reports > queue->report_capacity) {
    kvpool_op_report *reports = realloc(queue->reports, done->n_reports * sizeof *reports);
    if (reports == NULL) {
      kvpool_error error;
      (void)kvp_fail(&error, KVPOOL_NO_MEMORY, "the step is done, but there is no memory for its %zu reports",
                     done->n_reports);
      queue_tell_failed(queue, done->step_id, &error);
      return;
    }
    queue->reports = reports;
    queue->report_capacity = done->n_reports;
  }
  for (size_t i = 0; i < done->n_reports; i++) {
    kvp_op_report_from(done->reports[i], &queue->reports[i]);
  }
  queue_tell(queue, &(kvpool_completion){
                        .step_id = done->step_id, .reports = queue->reports, .report_count = done->n_reports});
}

/* The first reason counts; no step is taken any more. */
static void queue_end(kvpool_queue *queue, const kvpool_error *why) {
  pthread_mutex_lock(&queue->lock);
  if (queue->end.status == KVPOOL_OK) {
    queue->end = *why;
  }
  pthread_mutex_unlock(&queue->lock);
}

static void queue_on_message(void *object, grpc_byte_buffer *buffer) {
  kvpool_queue *queue = object;
  Kvpool__V1__StepEvent *event =
      (Kvpool__V1__StepEvent *)kvp_message_unpack(buffer, &kvpool__v1__step_event__descriptor);
  grpc_byte_buffer_destroy(buffer);
  kvpool_error error;
  if (event == NULL) {
    (void)kvp_call_malformed(KVP_METHOD_STEPS, &error);
    queue_end(queue, &error);
    kvp_call_cancel(queue->call);
    return;
  }
  switch (event->event_case) {
  case KVPOOL__V1__STEP_EVENT__EVENT_ACCEPTED:
    if (queue->want_accepted) {
      queue_tell(queue, &(kvpool_completion){.step_id = event->accepted->step_id, .accepted = true});
    }
    break;
  case KVPOOL__V1__STEP_EVENT__EVENT_DONE:
    queue_tell_done(queue, event->done);
    break;
  case KVPOOL__V1__STEP_EVENT__EVENT_FAILED:
    if (event->failed->error != NULL) {
      (void)kvp_fail_detail(&error, event->failed->error);
    } else {
      (void)kvp_call_malformed(KVP_METHOD_STEPS, &error);
    }
    queue_tell_failed(queue, event->failed->step_id, &error);
    break;
  default:
    break; /* an event of a newer daemon */
  }
  kvpool__v1__step_event__free_unpacked(event, NULL);
  (void)kvp_call_receive(queue->call);
}

static void queue_on_sent(void *object) {
  kvpool_queue *queue = object;
  grpc_byte_buffer *next = NULL;
  pthread_mutex_lock(&queue->lock);
  if (queue->waiting_count > 0) {
    next = queue->waiting[queue->waiting_first];
    queue->waiting_first = (queue->waiting_first + 1) % kvp_queue_steps_max;
    queue->waiting_count--;
  } else {
    queue->sending = false;
    pthread_cond_broadcast(&queue->changed);
  }
  pthread_mutex_unlock(&queue->lock);
  if (next != NULL) {
    (void)kvp_call_send(queue->call, next, false); /* when the call is over, its close tells the steps */
  }
}

/* The lock is held. */
static void waiting_drop(kvpool_queue *queue) {
  for (; queue->waiting_count > 0; queue->waiting_count--) {
    grpc_byte_buffer_destroy(queue->waiting[queue->waiting_first]);
    queue->waiting_first = (queue->waiting_first + 1) % kvp_queue_steps_max;
  }
  queue->sending = false;
}

static void queue_on_closed(void *object, struct kvp_call *call) {
  kvpool_queue *queue = object;
  kvpool_error error;
  if (kvp_call_error(call, &error) == KVPOOL_OK) {
    (void)kvp_fail(&error, KVPOOL_DISCONNECTED, "the queue has been closed");
  }
  queue_end(queue, &error);
  pthread_mutex_lock(&queue->lock);
  waiting_drop(queue);
  while (queue->outstanding_count > 0) {
    uint64_t step_id = queue->outstanding[0];
    pthread_mutex_unlock(&queue->lock);
    queue_tell_failed(queue, step_id, &queue->end); /* it doesn't change any more */
    pthread_mutex_lock(&queue->lock);
  }
  queue->call = NULL;
  queue->closed = true;
  pthread_cond_broadcast(&queue->changed);
  pthread_mutex_unlock(&queue->lock);
  kvp_call_unref(call);
  queue_unref(queue);
}

static const struct kvp_call_events queue_events = {
    .on_message = queue_on_message, .on_sent = queue_on_sent, .on_closed = queue_on_closed};

kvpool_status kvpool_queue_open(kvpool_session *session, kvpool_completion_fn on_completion, void *context,
                                bool want_accepted, kvpool_queue **out, kvpool_error *error) {
  assert(session != NULL && out != NULL);
  kvpool_status status = kvp_session_check(session, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  kvpool_queue *queue = calloc(1, sizeof *queue);
  if (queue == NULL) {
    return kvp_fail_no_memory(error);
  }
  status = kvp_call_new(session->client, KVP_METHOD_STEPS, &queue_events, queue, &queue->call, error);
  if (status != KVPOOL_OK) {
    free(queue);
    return status;
  }
  kvp_session_ref(session);
  queue->session = session;
  queue->on_completion = on_completion;
  queue->context = context;
  queue->want_accepted = want_accepted;
  queue->sending = true; /* the header */
  atomic_init(&queue->references, 2);
  kvp_sync_init(&queue->lock, &queue->changed);
  kvp_call_start_stream(queue->call, NULL, false);
  *out = queue;
  return KVPOOL_OK;
}

/* The lock is held. */
static kvpool_status queue_check_room(const kvpool_queue *queue, kvpool_error *error) {
  if (queue->end.status != KVPOOL_OK) {
    if (error != NULL) {
      *error = queue->end;
    }
    return queue->end.status;
  }
  if (queue->outstanding_count == kvp_queue_steps_max) {
    return kvp_fail(error, KVPOOL_BUSY, "%d steps of this queue are not done yet", kvp_queue_steps_max);
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_queue_submit(kvpool_queue *queue, const kvpool_step *step, uint64_t *step_id,
                                  kvpool_error *error) {
  assert(queue != NULL && step != NULL);
  if (step->session != NULL && step->session != queue->session) {
    return kvp_fail(
        error, KVPOOL_INVALID_ARGUMENT, "the step was made for session %llu, the queue is of session %llu",
        (unsigned long long)kvpool_session_id(step->session), (unsigned long long)kvpool_session_id(queue->session));
  }
  grpc_byte_buffer *message;
  struct kvp_call *call = NULL;
  kvpool_status status = kvp_session_check(queue->session, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  pthread_mutex_lock(&queue->lock);
  status = queue_check_room(queue, error);
  if (status == KVPOOL_OK) {
    status = kvp_step_pack(step, queue->last_step_id + 1, !queue->is_named, &message, error);
  }
  if (status == KVPOOL_OK) {
    queue->is_named = true;
    queue->outstanding[queue->outstanding_count++] = ++queue->last_step_id;
    if (step_id != NULL) {
      *step_id = queue->last_step_id; /* before the completion can come */
    }
    if (queue->sending) {
      queue->waiting[(queue->waiting_first + queue->waiting_count++) % kvp_queue_steps_max] = message;
    } else {
      queue->sending = true;
      call = queue->call;
      kvp_call_ref(call);
    }
  }
  pthread_mutex_unlock(&queue->lock);
  if (call != NULL) {
    (void)kvp_call_send(call, message, false); /* when the call is over, its close tells the step */
    kvp_call_unref(call);
  }
  return status;
}

/* The lock is held. */
static bool queue_is_settled(const kvpool_queue *queue, uint64_t step_id) {
  return (queue->outstanding_count == 0 || queue->outstanding[0] > step_id) && !queue->delivering;
}

kvpool_status kvpool_queue_wait(kvpool_queue *queue, kvpool_error *error) {
  assert(queue != NULL);
  kvpool_status status = kvp_client_check_may_block("kvpool_queue_wait", error);
  if (status == KVPOOL_OK) {
    status = kvp_client_check_process(queue->session->client, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  uint32_t timeout_ms = kvp_client_timeout_ms(queue->session->client);
  struct timespec deadline = kvp_deadline_after(timeout_ms);
  bool in_time = true;
  pthread_mutex_lock(&queue->lock);
  uint64_t step_id = queue->last_step_id;
  while (!queue_is_settled(queue, step_id) && in_time) {
    in_time = kvp_sync_wait(&queue->changed, &queue->lock, &deadline);
  }
  if (!queue_is_settled(queue, step_id)) {
    status = kvp_fail(error, KVPOOL_DEADLINE_EXCEEDED, "%u steps of this queue are not done after %u ms",
                      queue->outstanding_count, timeout_ms);
  }
  pthread_mutex_unlock(&queue->lock);
  return status;
}

/* Steps done, then the half-close and the daemon's answer to it; past the deadline the rest is cancelled. */
static void queue_drain(kvpool_queue *queue, struct kvp_call *call) {
  struct timespec deadline = kvp_deadline_after(kvp_client_timeout_ms(queue->session->client));
  bool in_time = true;
  pthread_mutex_lock(&queue->lock);
  while (!queue->closed && in_time && (queue->sending || !queue_is_settled(queue, queue->last_step_id))) {
    in_time = kvp_sync_wait(&queue->changed, &queue->lock, &deadline);
  }
  bool may_send = !queue->closed && in_time;
  queue->sending = queue->sending || may_send;
  pthread_mutex_unlock(&queue->lock);
  if (may_send) {
    (void)kvp_call_send(call, NULL, true);
  }
  pthread_mutex_lock(&queue->lock);
  while (!queue->closed && in_time) {
    in_time = kvp_sync_wait(&queue->changed, &queue->lock, &deadline);
  }
  pthread_mutex_unlock(&queue->lock);
  kvp_call_cancel(call);
  deadline = kvp_deadline_after(kvp_client_give_up_ms);
  in_time = true;
  pthread_mutex_lock(&queue->lock);
  while (!queue->closed && in_time) {
    in_time = kvp_sync_wait(&queue->changed, &queue->lock, &deadline);
  }
  bool is_stuck = !queue->closed;
  pthread_mutex_unlock(&queue->lock);
  if (is_stuck) {
    kvp_call_abandon(call);
    pthread_mutex_lock(&queue->lock);
    while (!queue->closed) {
      pthread_cond_wait(&queue->changed, &queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
  }
}

void kvpool_queue_close(kvpool_queue *queue) {
  if (queue == NULL || !kvp_client_is_ours(queue->session->client)) {
    return;
  }
  bool may_block = !kvp_client_on_library_thread();
  pthread_mutex_lock(&queue->lock);
  queue->silent = !may_block;
  struct kvp_call *call = queue->call;
  if (call != NULL) {
    kvp_call_ref(call);
  }
  pthread_mutex_unlock(&queue->lock);
  if (call != NULL && may_block) {
    queue_drain(queue, call);
  } else if (call != NULL) {
    kvp_call_cancel(call);
  }
  kvp_call_unref(call);
  queue_unref(queue);
}
