/* Step queues: steps of one queue run in order, queues run side by side and take turns.
 *
 * A queue holds the steps that wait for their turn and those that are launched. Queues with a step to launch stand in
 * a line; who has launched one goes to its end. Serving thread.
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
  bool is_ready;  /* it stands in the line */
  bool is_closed; /* to be freed when its last step is done */
  uint32_t launched_count;
  struct kvp_step_list waiting;
  struct kvp_stream *stream; /* where its steps are launched; NULL while none is */
  struct kvp_queue *next_ready;
};

struct kvp_queues {
  struct kvp_id_table table;
  struct kvp_queue *ready_first;
  struct kvp_queue *ready_last;
  struct kvp_queue *free;
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
/* The queue whose turn it is; NULL: none has a step that may be launched. It stays first. */
struct kvp_queue *kvp_queues_first(const struct kvp_queues *queues);
/* Takes the first queue's next step as launched, and sends the queue to the end of the line. */
struct kvp_step *kvp_queues_take(struct kvp_queues *queues);
/* A launched step of the queue is done. The queue may be gone afterwards. */
void kvp_queue_done(struct kvp_queues *queues, struct kvp_queue *queue);

#endif
