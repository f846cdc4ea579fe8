/* Queues of steps and the line in which they wait for their turn. */
#include "server/executor/queue.h"

#include <assert.h>
#include <stdlib.h>

#include "proto/limits.h"

/* So many legs of a queue are launched ahead: the device goes on with the next one without waiting for us, and
 * a queue with many still leaves the line to others after each. */
enum { launched_max = 4 };

void kvp_queues_deinit(struct kvp_queues *queues, void (*drop)(void *context, struct kvp_step *step), void *context) {
  struct kvp_queue *queue = NULL;
  while ((queue = kvp_id_table_take_any(&queues->table)) != NULL) {
    struct kvp_step *step = NULL;
    while ((step = kvp_step_list_pop(&queue->waiting)) != NULL) {
      drop(context, step);
    }
    free(queue);
  }
  while (queues->free != NULL) {
    queue = queues->free;
    queues->free = queue->next_ready;
    free(queue);
  }
  kvp_id_table_deinit(&queues->table);
  *queues = (struct kvp_queues){0};
}

enum kvp_status kvp_queues_get(struct kvp_queues *queues, uint32_t id, struct kvp_queue **out,
                               struct kvp_error *error) {
  struct kvp_queue *queue = kvp_id_table_get(&queues->table, id);
  if (queue != NULL) {
    *out = queue;
    return KVP_OK;
  }
  if (queues->table.count >= kvp_queues_per_executor_max) {
    return kvp_error_set(error, KVP_BUSY, "queue %u: %d queues of this device are open", id,
                         kvp_queues_per_executor_max);
  }
  queue = queues->free;
  if (queue != NULL) {
    queues->free = queue->next_ready;
  } else {
    queue = malloc(sizeof *queue);
  }
  if (queue == NULL || !kvp_id_table_add(&queues->table, id, queue)) {
    free(queue);
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for queue %u", id);
  }
  *queue = (struct kvp_queue){.id = id};
  *out = queue;
  return KVP_OK;
}

static bool queue_is_idle(const struct kvp_queue *queue) {
  return queue->launched_count == 0 && queue->waiting.first == NULL;
}

static void queue_free(struct kvp_queues *queues, struct kvp_queue *queue) {
  (void)kvp_id_table_remove(&queues->table, queue->id);
  queue->next_ready = queues->free;
  queues->free = queue;
}

void kvp_queues_close(struct kvp_queues *queues, uint32_t id) {
  struct kvp_queue *queue = kvp_id_table_get(&queues->table, id);
  if (queue == NULL) {
    return;
  }
  queue->is_closed = true;
  if (queue_is_idle(queue)) {
    queue_free(queues, queue);
  }
}

/* Into the line, if it belongs there and isn't. */
static void queue_line_up(struct kvp_queues *queues, struct kvp_queue *queue) {
  if (queue->is_ready || queue->parked_place != 0 || queue->waiting.first == NULL ||
      queue->launched_count >= launched_max) {
    return;
  }
  queue->is_ready = true;
  queue->next_ready = NULL;
  if (queues->ready_first == NULL) {
    queues->ready_first = queue;
  } else {
    queues->ready_last->next_ready = queue;
  }
  queues->ready_last = queue;
}

static struct kvp_queue *line_pop(struct kvp_queues *queues) {
  struct kvp_queue *queue = queues->ready_first;
  assert(queue != NULL && queue->is_ready && queue->waiting.first != NULL);
  queues->ready_first = queue->next_ready;
  queue->is_ready = false;
  return queue;
}

/* From anywhere in the line. */
static void line_leave(struct kvp_queues *queues, struct kvp_queue *queue) {
  struct kvp_queue *before = NULL;
  struct kvp_queue **link = &queues->ready_first;
  while (*link != queue) {
    before = *link;
    link = &before->next_ready;
  }
  *link = queue->next_ready;
  if (queues->ready_last == queue) {
    queues->ready_last = before;
  }
  queue->is_ready = false;
}

/* Something was taken out of the queue. */
static void queue_settle(struct kvp_queues *queues, struct kvp_queue *queue) {
  queue_line_up(queues, queue);
  if (queue->is_closed && queue_is_idle(queue)) {
    queue_free(queues, queue);
  }
}

void kvp_queue_push(struct kvp_queues *queues, struct kvp_queue *queue, struct kvp_step *step) {
  queue->is_closed = false;
  kvp_step_list_push(&queue->waiting, step);
  queue_line_up(queues, queue);
}

struct kvp_queue *kvp_queues_first(const struct kvp_queues *queues) {
  return queues->ready_first;
}

struct kvp_step_leg *kvp_queue_leg(const struct kvp_queue *queue) {
  struct kvp_step *step = queue->waiting.first;
  assert(step != NULL && step->launched_legs < step->leg_count);
  return &step->legs[step->launched_legs];
}

struct kvp_step_leg *kvp_queues_take(struct kvp_queues *queues) {
  struct kvp_queue *queue = line_pop(queues);
  struct kvp_step_leg *leg = kvp_queue_leg(queue);
  queue->launched_count++;
  if (++leg->step->launched_legs == leg->step->leg_count) {
    (void)kvp_step_list_pop(&queue->waiting);
  }
  queue_line_up(queues, queue);
  return leg;
}

void kvp_queues_park(struct kvp_queues *queues) {
  struct kvp_queue *queue = line_pop(queues);
  queues->parked[queues->parked_count] = queue;
  queue->parked_place = ++queues->parked_count;
}

/* Out of the parked, and not in the line yet. */
static void parked_leave(struct kvp_queues *queues, struct kvp_queue *queue) {
  struct kvp_queue *last = queues->parked[--queues->parked_count];
  queues->parked[queue->parked_place - 1] = last;
  last->parked_place = queue->parked_place;
  queue->parked_place = 0;
}

void kvp_queues_unpark(struct kvp_queues *queues, struct kvp_queue *queue) {
  parked_leave(queues, queue);
  queue_line_up(queues, queue);
}

void kvp_queues_give_up(struct kvp_queues *queues, bool is_behind) {
  struct kvp_queue *queue = line_pop(queues);
  struct kvp_step *step = kvp_step_list_pop(&queue->waiting);
  step->is_failed = true;
  step->launched_legs += is_behind;
  queue->launched_count += is_behind;
  queue_settle(queues, queue);
}

void kvp_queue_drop(struct kvp_queues *queues, struct kvp_queue *queue, const struct kvp_served_ring *ring,
                    struct kvp_step_list *dropped) {
  struct kvp_step_list all = queue->waiting;
  struct kvp_step *step = NULL;
  queue->waiting = (struct kvp_step_list){0};
  while ((step = kvp_step_list_pop(&all)) != NULL) {
    if (step->ring != ring) {
      kvp_step_list_push(&queue->waiting, step);
      continue;
    }
    step->is_failed = true;
    if (kvp_step_is_over(step)) {
      kvp_step_list_push(dropped, step);
    }
  }
  if (queue->parked_place != 0) {
    parked_leave(queues, queue);
  } else if (queue->is_ready && queue->waiting.first == NULL) {
    line_leave(queues, queue);
  }
  queue_settle(queues, queue);
}

void kvp_queue_done(struct kvp_queues *queues, struct kvp_queue *queue) {
  assert(queue->launched_count > 0);
  queue->launched_count--;
  queue_settle(queues, queue);
}
