/* One step, from its bytes to its reports. The serving thread's; its ops are the device's while launched. */
#ifndef KVPOOL_EXECUTOR_STEP_H
#define KVPOOL_EXECUTOR_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/step_wire.h"
#include "server/executor/arena.h"
#include "server/executor/device.h"
#include "server/executor/objects.h"

enum {
  kvp_step_op_pools_max = 2,
  kvp_step_op_buffers_max = 4 + 4, /* views, arrays */
};

struct kvp_compressed_part;
struct kvp_ring_timelines;
struct kvp_served_ring;

/* A word of the ring's timelines, and the value that it is to reach or gets. */
struct kvp_step_point {
  uint32_t word;
  uint64_t value;
};

/* A checked op: what the device gets, and what must stay attached until it is done. */
struct kvp_step_op {
  struct kvp_device_op *first; /* what the device runs for it, linked by `next` as far as `last`; NULL: nothing */
  struct kvp_device_op *last;
  struct kvp_pool *pools[kvp_step_op_pools_max];
  uint32_t pool_count;
  uint32_t buffer_count;
  struct kvp_buffer *buffers[kvp_step_op_buffers_max];
  uint64_t result_offset_bytes; /* of a read, within the step's results */
  uint64_t report_flags;
  uint64_t main_kv_offset;
  const struct kvp_compressed_part *assembled; /* part 3 of an assemble that writes it; else NULL */
  struct kvp_device_op *point;                 /* writes `signal` behind `last`; NULL: it signals nothing */
  bool signals;
  bool waits;
  struct kvp_step_point wait;
  struct kvp_step_point signal;
};

/* What is launched at once: ops [first_op, end_op) of a step, of which only the first may wait. */
struct kvp_step_leg {
  struct kvp_step *step;
  uint32_t first_op;
  uint32_t end_op;
  struct kvp_device_op *first; /* of the chain, once launched; NULL: nothing was, it only stands on the stream */
  struct kvp_device_op signal; /* the chain's end */
  struct kvp_step_leg *next;   /* on its stream */
};

/* Steps in use by somebody: a ring, or all of them. */
struct kvp_step_use {
  uint32_t count;
  uint64_t bytes; /* of the steps' arenas, as far as they are charged */
};

struct kvp_step {
  struct kvp_arena arena;
  uint64_t tag;
  uint8_t *wire; /* the private copy */
  uint32_t wire_bytes;
  bool is_fence;   /* no step: a command that is answered when all steps before it have ended */
  bool is_refusal; /* no step: what a refused one would have signalled (refusal.h) */
  bool accepted;
  bool acceptance_posted;
  bool finished;
  bool is_failed;        /* accepted, and ->error tells why it didn't finish */
  bool posting;          /* a message of it waits for room in the completion lane */
  bool tells_acceptance; /* by intake */
  bool assembles;        /* by intake: an op of it has `assembled` */
  uint64_t charged_bytes;
  struct kvp_step_use *use;             /* whose it is counted as, too; NULL: nobody's */
  struct kvp_served_ring *ring;         /* where it came from */
  struct kvp_ring_timelines *timelines; /* that its points are about */

  /* Set by intake. */
  uint32_t queue;
  uint32_t owner;
  uint32_t op_count;
  uint32_t device_op_count;
  struct kvp_device_op *replay; /* its first device op, if it is one */
  struct kvp_step_op *ops;
  uint8_t *results;
  uint64_t result_bytes;
  struct kvp_step_leg *legs; /* [leg_count], in order; at least one */
  struct kvp_step_leg whole; /* the only leg of a step that never waits in the middle */

  /* Set by whom it is running with. */
  uint64_t queued_ns;
  uint64_t deadline_ns; /* of its waits, on the clock */
  uint32_t leg_count;   /* by intake */
  uint32_t launched_legs;
  uint32_t ended_legs;    /* of those launched */
  uint32_t whole_legs;    /* of those ended, before the first that could not be launched whole */
  uint64_t serial;        /* accepted steps are counted; a fence: the last one before it */
  struct kvp_error error; /* refused, or accepted and failed: why */
  struct kvp_step *next;  /* in the one list it is in: a queue's, or the finished */
  struct kvp_step *next_posting;
  struct kvp_step *older, *newer; /* of its owner's that were accepted and have not ended */
  struct kvp_step *next_pending;  /* compressed_parts.h */
  struct kvp_step **pending_link;
};

struct kvp_step_list {
  struct kvp_step *first;
  struct kvp_step *last;
};

void kvp_step_list_push(struct kvp_step_list *list, struct kvp_step *step);
/* NULL when it is empty. */
struct kvp_step *kvp_step_list_pop(struct kvp_step_list *list);
/* before: the one before it; NULL: it is the first. */
void kvp_step_list_remove(struct kvp_step_list *list, struct kvp_step *before, struct kvp_step *step);

/* Steps in use and steps kept for reuse. Zeroed: empty. */
struct kvp_step_pool {
  struct kvp_step *free;
  uint32_t free_count;
  uint64_t free_bytes;
  struct kvp_step_use use;
};

/* With room for wire_bytes at ->wire. NULL when the host has no memory. */
struct kvp_step *kvp_step_new(struct kvp_step_pool *pool, uint32_t wire_bytes);
void kvp_step_destroy(struct kvp_step_pool *pool, struct kvp_step *step);
/* From here on it is counted there, too. */
void kvp_step_count_as(struct kvp_step *step, struct kvp_step_use *use);
/* Charges what the step takes by now. */
void kvp_step_charge(struct kvp_step_pool *pool, struct kvp_step *step);
void kvp_step_pool_deinit(struct kvp_step_pool *pool);

/* The device op behind `op` among those of one step op; NULL at the end. */
static inline struct kvp_device_op *kvp_step_op_next(const struct kvp_step_op *step_op,
                                                     const struct kvp_device_op *op) {
  return op == step_op->last ? NULL : op->next;
}

/* Cuts the step into legs: a wait begins a new one. ->ops are set. */
enum kvp_status kvp_step_cut(struct kvp_step *step, struct kvp_error *error);
/* All that was launched of it has ended, and nothing more will be launched. */
static inline bool kvp_step_is_over(const struct kvp_step *step) {
  return step->ended_legs == step->launched_legs && (step->is_failed || step->launched_legs == step->leg_count);
}

/* Counts the step's pools and buffers as used, or no longer. */
void kvp_step_hold_objects(struct kvp_step *step);
void kvp_step_release_objects(struct kvp_step *step);

/* Bytes of the payload of its DONE completion, and the payload itself. */
uint32_t kvp_step_report_bytes(const struct kvp_step *step);
void kvp_step_report_write(const struct kvp_step *step, uint8_t *out);

#endif
