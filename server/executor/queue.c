/* Queues of steps and the line in which they wait for their turn. */
#include "server/executor/queue.h"

#include <assert.h>
#include <stdlib.h>

#include "proto/limits.h"

/* So many steps of a queue are launched ahead: the device goes on with the next one without waiting for us, and
 * a queue with many steps still leaves the line to others after each. */
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
  if (queue->is_ready || queue->waiting.first == NULL || queue->launched_count >= launched_max) {
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

void kvp_queue_push(struct kvp_queues *queues, struct kvp_queue *queue, struct kvp_step *step) {
  queue->is_closed = false;
  kvp_step_list_push(&queue->waiting, step);
  queue_line_up(queues, queue);
}

struct kvp_queue *kvp_queues_first(const struct kvp_queues *queues) {
  return queues->ready_first;
}

struct kvp_step *kvp_queues_take(struct kvp_queues *queues) {
  struct kvp_queue *queue = queues->ready_first;
  assert(queue != NULL && queue->is_ready && queue->waiting.first != NULL);
  queues->ready_first = queue->next_ready;
  queue->is_ready = false;
  queue->launched_count++;
  struct kvp_step *step = kvp_step_list_pop(&queue->waiting);
  queue_line_up(queues, queue);
  return step;
}

void kvp_queue_done(struct kvp_queues *queues, struct kvp_queue *queue) {
  assert(queue->launched_count > 0);
  queue->launched_count--;
  queue_line_up(queues, queue);
  if (queue->is_closed && queue_is_idle(queue)) {
    queue_free(queues, queue);
  }
}
