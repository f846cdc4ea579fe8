/* Queues of one device. A number is its place in the table and how often that place was used, so that an executor
 * never sees one twice. */
#include "server/supervisor/step_queue.h"

#include <assert.h>
#include <stdlib.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/device.h"

struct step_queue {
  uint32_t number; /* 0: the place is free */
  uint32_t uses;
  uint32_t steps; /* not retired */
  bool closing;   /* its caller is through */
  bool for_operator;
  uint16_t next_link; /* free list, or list of closed ones; index + 1, 0 = end */
};

struct kvp_step_queues {
  uint16_t first_free;
  uint16_t first_closed; /* over, the executor does not know yet */
  uint16_t used;         /* places ever used */
  uint16_t of_sessions;  /* not free, and not an operator's */
  struct step_queue places[kvp_queues_per_executor_max];
};

_Static_assert(kvp_queues_per_executor_max <= UINT16_MAX, "links are 16 bits");

static struct step_queue *queue_get(const struct kvp_device *device, uint32_t number) {
  struct step_queue *queue = &device->steps.queues->places[number % kvp_queues_per_executor_max];
  assert(queue->number == number);
  return queue;
}

uint32_t kvp_step_queue_open(struct kvp_device *device, bool for_operator, struct kvp_error *error) {
  if (device->steps.queues == NULL) {
    device->steps.queues = kvp_allocate(1, sizeof *device->steps.queues);
  }
  struct kvp_step_queues *queues = device->steps.queues;
  const uint32_t of_sessions_max = kvp_queues_per_executor_max - kvp_queues_for_operators;
  if (!for_operator && queues->of_sessions == of_sessions_max) {
    (void)kvp_error_set(error, KVP_BUSY, "sessions have %u queues of device %s open, %u are allowed",
                        queues->of_sessions, device->name, of_sessions_max);
    return 0;
  }
  uint32_t index = queues->used;
  if (queues->first_free != 0) {
    index = queues->first_free - 1U;
    queues->first_free = queues->places[index].next_link;
  } else if (index == kvp_queues_per_executor_max) {
    (void)kvp_error_set(error, KVP_BUSY, "device %s has %d queues open, no more are allowed", device->name,
                        kvp_queues_per_executor_max);
    return 0;
  } else {
    queues->used++;
  }
  struct step_queue *queue = &queues->places[index];
  const uint32_t uses_max = UINT32_MAX / kvp_queues_per_executor_max - 1;
  queue->uses = queue->uses % uses_max + 1;
  queue->number = queue->uses * kvp_queues_per_executor_max + index;
  queue->closing = false;
  queue->for_operator = for_operator;
  queues->of_sessions += !for_operator;
  return queue->number;
}

static void queue_free(struct kvp_step_queues *queues, struct step_queue *queue) {
  queue->number = 0;
  queues->of_sessions -= !queue->for_operator;
  queue->next_link = queues->first_free;
  queues->first_free = (uint16_t)(queue - queues->places + 1);
}

static bool queue_tell(struct kvp_device *device, const struct step_queue *queue) {
  enum kvp_status status = kvp_executor_link_post(device->link, KVP_COMMAND_QUEUE_CLOSE, queue->number, NULL, 0);
  return status != KVP_BUSY; /* an executor that is gone needs to know nothing */
}

static void queue_settle(struct kvp_device *device, struct step_queue *queue) {
  if (!queue->closing || queue->steps > 0) {
    return;
  }
  struct kvp_step_queues *queues = device->steps.queues;
  if (queue_tell(device, queue)) {
    queue_free(queues, queue);
  } else {
    queue->next_link = queues->first_closed;
    queues->first_closed = (uint16_t)(queue - queues->places + 1);
  }
}

void kvp_step_queue_close(struct kvp_device *device, uint32_t queue) {
  if (queue != 0) {
    struct step_queue *place = queue_get(device, queue);
    assert(!place->closing);
    place->closing = true;
    queue_settle(device, place);
  }
}

void kvp_step_queue_hold(struct kvp_device *device, uint32_t queue) {
  queue_get(device, queue)->steps++;
}

void kvp_step_queue_drop(struct kvp_device *device, uint32_t queue) {
  struct step_queue *place = queue_get(device, queue);
  assert(place->steps > 0);
  place->steps--;
  queue_settle(device, place);
}

void kvp_step_queue_post_closed(struct kvp_device *device) {
  struct kvp_step_queues *queues = device->steps.queues;
  while (queues != NULL && queues->first_closed != 0) {
    struct step_queue *queue = &queues->places[queues->first_closed - 1];
    if (!queue_tell(device, queue)) {
      return;
    }
    queues->first_closed = queue->next_link;
    queue_free(queues, queue);
  }
}

void kvp_step_queue_device_lost(struct kvp_device *device) {
  struct kvp_step_queues *queues = device->steps.queues;
  while (queues != NULL && queues->first_closed != 0) {
    struct step_queue *queue = &queues->places[queues->first_closed - 1];
    queues->first_closed = queue->next_link;
    queue_free(queues, queue);
  }
}
