/* Step queues: steps of one queue run in order, queues run side by side and take turns.
 *
 * A queue holds the steps that have legs to launch. Queues with a leg to launch stand in a line; who has launched one
 * goes to its end. One whose next leg waits for a timeline is parked instead. Serving thread.
 */
#ifndef KVPOOL_EXECUTOR_QUEUE_H
#define KVPOOL_EXECUTOR_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "server/executor/id_table.h"
#include "server/executor/step.h"

struct kvp_stream;

struct kvp_queue {
  uint32_t id;
  bool is_ready;                /* it stands in the line */
  bool is_closed;               /* to be freed when its last step is done */
  uint32_t parked_place;        /* among the parked, from 1 on; 0: it isn't */
  uint32_t launched_count;      /* legs */
  struct kvp_step_list waiting; /* some legs of the first one may be launched */
  struct kvp_stream *stream;    /* where its legs are launched; NULL while none is */
  struct kvp_queue *next_ready;
};

struct kvp_queues {
  struct kvp_id_table table;
  struct kvp_queue *ready_first;
  struct kvp_queue *ready_last;
  struct kvp_queue *free;
  struct kvp_queue *parked[kvp_queues_per_executor_max]; /* in no order */
  uint32_t parked_count;
};

/* Zeroed: empty. Steps that still wait are given to drop. */
void kvp_queues_deinit(struct kvp_queues *queues, void (*drop)(void *context, struct kvp_step *step), void *context);

/* Finds or opens a queue. Refused: too many are open (busy), no memory. */
enum kvp_status kvp_queues_get(struct kvp_queues *queues, uint32_t id, struct kvp_queue **out,
                               struct kvp_error *error);
/* The producer promises no more steps. Unknown ids are ignored: a queue whose steps were all refused was never
 * opened. */
void kvp_queues_close(struct kvp_queues *queues, uint32_t id);

void kvp_queue_push(struct kvp_queues *queues, struct kvp_queue *queue, struct kvp_step *step);
/* The queue whose turn it is; NULL: none has a leg that may be launched. It stays first. */
struct kvp_queue *kvp_queues_first(const struct kvp_queues *queues);
/* The leg whose turn it is in the queue. */
struct kvp_step_leg *kvp_queue_leg(const struct kvp_queue *queue);
/* Takes the first queue's leg as launched, and sends the queue to the end of the line. */
struct kvp_step_leg *kvp_queues_take(struct kvp_queues *queues);
/* The first queue's leg must wait: out of the line with it. */
void kvp_queues_park(struct kvp_queues *queues);
/* It needn't any more: the queue stands in the line again. */
void kvp_queues_unpark(struct kvp_queues *queues, struct kvp_queue *queue);
/* Takes the first queue's step out, though not all of it was launched: it is marked as failed. is_behind: its next leg
 * counts as launched, as it stands on the queue's stream behind those that are. The queue may be gone afterwards. */
void kvp_queues_give_up(struct kvp_queues *queues, bool is_behind);
/* Takes all steps of the ring out: those with legs under way are marked as failed, the others put in the list. The
 * queue may be gone afterwards. */
void kvp_queue_drop(struct kvp_queues *queues, struct kvp_queue *queue, const struct kvp_served_ring *ring,
                    struct kvp_step_list *dropped);
/* A launched leg of the queue is done. The queue may be gone afterwards. */
void kvp_queue_done(struct kvp_queues *queues, struct kvp_queue *queue);

#endif
