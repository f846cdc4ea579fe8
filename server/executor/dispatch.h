/* From accepted steps to finished ones: queues of steps onto streams of the device. Serving thread.
 *
 * A step is launched leg by leg; a leg whose first op waits for a word of a timeline when that has its value, and never
 * before: the device itself waits for nobody outside, but in replays, and those can be told to end. A stream is a device
 * queue with its timeline. A step queue borrows a stream while it has legs launched. There are as many as step queues: a
 * queue that waited for another one's stream would wait for the longest step of a stranger.
 */
#ifndef KVPOOL_EXECUTOR_DISPATCH_H
#define KVPOOL_EXECUTOR_DISPATCH_H

#include "server/executor/queue.h"
#include "server/executor/timeline.h"

enum { kvp_streams_max = kvp_queues_per_executor_max };

struct kvp_stream {
  struct kvp_device_queue *device_queue;
  struct kvp_timeline *timeline;
  struct kvp_timeline *device_timeline;
  struct kvp_timeline *abort; /* replays whose signal is not above it are to end; */
  const struct kvp_timeline *device_abort;
  uint64_t launched_value; /* of the last signal launched */
  struct kvp_queue *user;
  struct kvp_step_leg *launched_first; /* in order; the device's until their signal is seen */
  struct kvp_step_leg *launched_last;
  struct kvp_stream *next_free;
};

struct kvp_dispatch {
  struct kvp_device *device;
  struct kvp_queues queues;
  struct kvp_timeline *timelines;        /* [kvp_streams_max], then as many aborts */
  struct kvp_timeline *device_timelines; /* the same, where the device writes them */
  struct kvp_stream streams[kvp_streams_max];
  struct kvp_stream *free_streams;
  struct kvp_stream *busy_streams[kvp_streams_max];
  uint32_t busy_count;
  uint64_t ended_legs; /* so far */
  bool is_full;        /* the device had no room for the next leg: it is tried again when another one has ended */
};

enum kvp_status kvp_dispatch_init(struct kvp_dispatch *dispatch, struct kvp_device *device, struct kvp_error *error);
/* The device was stopped. Steps left on streams and queues are given to drop. */
void kvp_dispatch_deinit(struct kvp_dispatch *dispatch, void (*drop)(void *context, struct kvp_step *step),
                         void *context);

/* Opens the step's queue if need be. */
enum kvp_status kvp_dispatch_open(struct kvp_dispatch *dispatch, uint32_t queue_id, struct kvp_queue **out,
                                  struct kvp_error *error);
void kvp_dispatch_submit(struct kvp_dispatch *dispatch, struct kvp_queue *queue, struct kvp_step *step);
/* At once, of a step that was not submitted. */
void kvp_dispatch_signals_poison(struct kvp_step *step);
void kvp_dispatch_close_queue(struct kvp_dispatch *dispatch, uint32_t queue_id);

/* Takes the ring's steps out of the queue. *dropped: those of which nothing runs; the others finish as failed ones, and
 * the device waits for nothing of them any more. */
void kvp_dispatch_drop(struct kvp_dispatch *dispatch, uint32_t queue_id, const struct kvp_served_ring *ring,
                       struct kvp_step_list *dropped);

/* The device waits for nothing any more, whatever was launched. */
void kvp_dispatch_abort(struct kvp_dispatch *dispatch);

/* Moves finished steps to *finished, then launches what may be launched. A step whose wait is in vain is finished, too:
 * ->is_failed, and ->error says why; words that it would have signalled are poisoned. True when anything happened. */
bool kvp_dispatch_poll(struct kvp_dispatch *dispatch, struct kvp_step_list *finished);
/* Legs are launched whose end will be seen by a later poll. */
static inline bool kvp_dispatch_is_busy(const struct kvp_dispatch *dispatch) {
  return dispatch->busy_count > 0;
}
/* Legs wait for a timeline: nobody says when it has changed. */
static inline bool kvp_dispatch_is_waiting(const struct kvp_dispatch *dispatch) {
  return dispatch->queues.parked_count > 0;
}
/* A launched leg has ended. */
bool kvp_dispatch_has_finished(const struct kvp_dispatch *dispatch);

#endif
