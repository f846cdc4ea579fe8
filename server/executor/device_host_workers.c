/* Kernel threads of the host backend, and its queues.
 *
 * A queue is a list of launched ops; the op at its head is the one that runs, cut into units. Queues whose head has
 * units left stand in a circle; a thread takes one unit of the queue at its front and puts the queue at the end, so
 * that queues share the threads evenly. Queues whose head, an op of a replay, waits for a word are looked at between
 * units, and by one thread now and then where there are none. The lock guards lists and counters only: nobody computes,
 * allocates or makes a system call under it.
 */
#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/executor/clock.h"
#include "server/executor/device_host.h"

enum { waiting_pause_ns = 20000 };

struct kvp_device_queue {
  struct kvp_host_workers *workers;
  struct kvp_device_op *head; /* running, or about to */
  struct kvp_device_op *tail;
  uint64_t unit_count; /* of the head; 0: it has not begun */
  uint64_t units_taken;
  uint64_t units_done;
  struct kvp_host_replay replay;
  struct kvp_device_queue *next_runnable; /* or the next one that waits */
};

struct kvp_host_workers {
  pthread_mutex_t lock;
  pthread_cond_t runnable_changed;
  struct kvp_device_queue *runnable_first;
  struct kvp_device_queue *runnable_last;
  struct kvp_device_queue *waiting; /* in no order */
  bool is_watched;                  /* a thread looks at them now and then */
  uint32_t asleep;
  bool stopping;
  void (*wake)(void *context);
  void *wake_context;
  uint32_t thread_count;
  pthread_t threads[];
};

/* What is to be done when the lock has been released. */
struct afterwards {
  uint64_t threads_to_wake;
  bool signalled;
};

static void runnable_push(struct kvp_host_workers *workers, struct kvp_device_queue *queue) {
  queue->next_runnable = NULL;
  if (workers->runnable_first == NULL) {
    workers->runnable_first = queue;
  } else {
    workers->runnable_last->next_runnable = queue;
  }
  workers->runnable_last = queue;
}

static struct kvp_device_queue *runnable_pop(struct kvp_host_workers *workers) {
  struct kvp_device_queue *queue = workers->runnable_first;
  workers->runnable_first = queue->next_runnable;
  return queue;
}

static void head_pop(struct kvp_device_queue *queue) {
  queue->head = queue->head->next;
  queue->unit_count = 0;
}

/* The op at the head is done, or needn't be. */
static void head_leave(struct kvp_device_queue *queue) {
  if (queue->replay.op != NULL) {
    kvp_host_replay_advance(&queue->replay);
  }
  head_pop(queue);
}

/* True: the op at the head, one of a replay, is not to begin now, and somebody will look at it. */
static bool replay_holds(struct kvp_device_queue *queue, struct afterwards *afterwards) {
  struct kvp_host_workers *workers = queue->workers;
  switch (kvp_host_replay_look(&queue->replay)) {
  case KVP_HOST_REPLAY_READY:
    return false;
  case KVP_HOST_REPLAY_WAITS:
    queue->next_runnable = workers->waiting;
    workers->waiting = queue;
    afterwards->threads_to_wake += workers->is_watched ? 0 : 1;
    return true;
  case KVP_HOST_REPLAY_OVER:
    break;
  }
  while (queue->head->kind != KVP_DEVICE_SIGNAL) {
    head_pop(queue);
  }
  return false;
}

/* Begins the op at the head; those without work, points and signals, are done with at once. Lock held. */
static void queue_advance(struct kvp_device_queue *queue, struct afterwards *afterwards) {
  while (queue->head != NULL) {
    if (queue->replay.op != NULL && replay_holds(queue, afterwards)) {
      return;
    }
    struct kvp_device_op *op = queue->head;
    if (op->kind == KVP_DEVICE_SIGNAL) {
      /* The op's memory is its owner's again as soon as the value is seen. */
      struct kvp_signal_params signal = op->params.signal;
      head_pop(queue);
      kvp_timeline_signal(signal.timeline, signal.value);
      afterwards->signalled = true;
      continue;
    }
    if (op->kind == KVP_DEVICE_POINT) {
      atomic_store_explicit(&op->params.point.word->value, op->params.point.value, memory_order_release);
    }
    uint64_t unit_count = kvp_host_op_units(op);
    if (unit_count > 0) {
      queue->unit_count = unit_count;
      queue->units_taken = 0;
      queue->units_done = 0;
      afterwards->threads_to_wake += unit_count;
      runnable_push(queue->workers, queue);
      return;
    }
    op->started_ns = op->finished_ns = kvp_clock_ns();
    if (op->kind == KVP_DEVICE_REPLAY) {
      kvp_host_replay_begin(&queue->replay, op);
      head_pop(queue);
    } else {
      head_leave(queue);
    }
  }
}

/* Lock not held. */
static void afterwards_do(struct kvp_host_workers *workers, const struct afterwards *afterwards, uint32_t asleep) {
  for (uint64_t i = 0; i < afterwards->threads_to_wake && i < asleep; i++) {
    (void)pthread_cond_signal(&workers->runnable_changed);
  }
  if (afterwards->signalled) {
    workers->wake(workers->wake_context);
  }
}

static void counts_add(struct kvp_op_counts *sum, const struct kvp_op_counts *counts) {
  sum->rows_stored += counts->rows_stored;
  sum->rows_loaded += counts->rows_loaded;
  sum->rows_skipped += counts->rows_skipped;
  sum->rows_rejected += counts->rows_rejected;
  sum->rows_nonfinite += counts->rows_nonfinite;
  sum->groups_saturated += counts->groups_saturated;
  sum->bytes_read += counts->bytes_read;
  sum->bytes_written += counts->bytes_written;
}

/* Takes a unit, runs it, gives it back. Lock held before and after, not in between. */
static void unit_run(struct kvp_host_workers *workers) {
  struct kvp_device_queue *queue = runnable_pop(workers);
  struct kvp_device_op *op = queue->head;
  uint64_t unit = queue->units_taken++;
  if (unit == 0) {
    op->started_ns = kvp_clock_ns();
  }
  if (queue->units_taken < queue->unit_count) {
    runnable_push(workers, queue);
  }
  (void)pthread_mutex_unlock(&workers->lock);
  struct kvp_op_counts counts = {0};
  kvp_host_op_run(op, unit, &counts);
  uint64_t finished_ns = kvp_clock_ns();
  (void)pthread_mutex_lock(&workers->lock);

  counts_add(&op->counts, &counts);
  if (++queue->units_done < queue->unit_count) {
    return;
  }
  op->finished_ns = finished_ns;
  struct afterwards afterwards = {0};
  head_leave(queue);
  queue_advance(queue, &afterwards);
  uint32_t asleep = workers->asleep;
  (void)pthread_mutex_unlock(&workers->lock);
  /* This thread goes on with the next op itself. */
  afterwards.threads_to_wake -= afterwards.threads_to_wake > 0;
  afterwards_do(workers, &afterwards, asleep);
  (void)pthread_mutex_lock(&workers->lock);
}

/* Looks at every queue that waits. Lock held before and after, not in between. */
static void waiting_look(struct kvp_host_workers *workers) {
  struct afterwards afterwards = {0};
  struct kvp_device_queue *queue = workers->waiting;
  workers->waiting = NULL;
  while (queue != NULL) {
    struct kvp_device_queue *next = queue->next_runnable;
    queue_advance(queue, &afterwards);
    queue = next;
  }
  if (afterwards.threads_to_wake > 0 || afterwards.signalled) {
    const uint32_t asleep = workers->asleep;
    (void)pthread_mutex_unlock(&workers->lock);
    afterwards_do(workers, &afterwards, asleep);
    (void)pthread_mutex_lock(&workers->lock);
  }
}

/* Until there is a unit to run, or nobody waits. Lock held before and after, not in between. */
static void waiting_watch(struct kvp_host_workers *workers) {
  const struct timespec pause = {.tv_nsec = waiting_pause_ns};
  workers->is_watched = true;
  while (workers->waiting != NULL && workers->runnable_first == NULL && !workers->stopping) {
    (void)pthread_mutex_unlock(&workers->lock);
    (void)nanosleep(&pause, NULL);
    (void)pthread_mutex_lock(&workers->lock);
    waiting_look(workers);
  }
  workers->is_watched = false;
}

static void *worker_main(void *argument) {
  struct kvp_host_workers *workers = argument;
  (void)pthread_setname_np(pthread_self(), "kvp-kernel");
  (void)pthread_mutex_lock(&workers->lock);
  while (!workers->stopping) {
    if (workers->waiting != NULL) {
      waiting_look(workers);
    }
    if (workers->runnable_first != NULL) {
      unit_run(workers);
      continue;
    }
    if (workers->waiting != NULL && !workers->is_watched) {
      waiting_watch(workers);
      continue;
    }
    if (workers->stopping) {
      break; /* since waiting_look() let go of the lock: nobody would wake us again */
    }
    workers->asleep++;
    (void)pthread_cond_wait(&workers->runnable_changed, &workers->lock);
    workers->asleep--;
  }
  (void)pthread_mutex_unlock(&workers->lock);
  return NULL;
}

struct kvp_host_workers *kvp_host_workers_new(uint32_t thread_count, void (*wake)(void *context), void *wake_context,
                                              struct kvp_error *error) {
  struct kvp_host_workers *workers = calloc(1, sizeof *workers + thread_count * sizeof workers->threads[0]);
  if (workers == NULL) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for %u kernel threads", thread_count);
    return NULL;
  }
  (void)pthread_mutex_init(&workers->lock, NULL);
  (void)pthread_cond_init(&workers->runnable_changed, NULL);
  workers->wake = wake;
  workers->wake_context = wake_context;
  for (; workers->thread_count < thread_count; workers->thread_count++) {
    int result = pthread_create(&workers->threads[workers->thread_count], NULL, worker_main, workers);
    if (result != 0) {
      (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "kernel thread %u of %u can't be started: %s",
                          workers->thread_count, thread_count, strerror(result));
      kvp_host_workers_stop(workers);
      kvp_host_workers_destroy(workers);
      return NULL;
    }
  }
  return workers;
}

void kvp_host_workers_stop(struct kvp_host_workers *workers) {
  (void)pthread_mutex_lock(&workers->lock);
  workers->stopping = true;
  (void)pthread_mutex_unlock(&workers->lock);
  (void)pthread_cond_broadcast(&workers->runnable_changed);
  for (uint32_t i = 0; i < workers->thread_count; i++) {
    (void)pthread_join(workers->threads[i], NULL);
  }
  workers->thread_count = 0;
}

void kvp_host_workers_destroy(struct kvp_host_workers *workers) {
  assert(workers->thread_count == 0);
  (void)pthread_cond_destroy(&workers->runnable_changed);
  (void)pthread_mutex_destroy(&workers->lock);
  free(workers);
}

struct kvp_device_queue *kvp_host_queue_new(struct kvp_host_workers *workers) {
  struct kvp_device_queue *queue = calloc(1, sizeof *queue);
  if (queue != NULL) {
    queue->workers = workers;
  }
  return queue;
}

void kvp_host_queue_destroy(struct kvp_device_queue *queue) {
  /* Whoever wrote the last signal may still hold the lock. */
  (void)pthread_mutex_lock(&queue->workers->lock);
  assert(queue->head == NULL || queue->workers->stopping);
  (void)pthread_mutex_unlock(&queue->workers->lock);
  free(queue);
}

/* There is always room: a step's ops are links of the queue's list. */
bool kvp_host_queue_launch(struct kvp_device_queue *queue, struct kvp_device_op *first) {
  struct kvp_host_workers *workers = queue->workers;
  struct afterwards afterwards = {0};
  struct kvp_device_op *last = first;
  while (last->next != NULL) {
    last = last->next;
  }
  assert(last->kind == KVP_DEVICE_SIGNAL);
  (void)pthread_mutex_lock(&workers->lock);
  if (queue->head == NULL) {
    queue->head = first;
    queue->tail = last;
    queue_advance(queue, &afterwards);
  } else {
    queue->tail->next = first;
    queue->tail = last;
  }
  uint32_t asleep = workers->asleep;
  (void)pthread_mutex_unlock(&workers->lock);
  afterwards_do(workers, &afterwards, asleep);
  return true;
}
