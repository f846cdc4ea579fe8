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
};

struct kvp_step {
  struct kvp_arena arena;
  uint64_t tag;
  uint8_t *wire; /* the private copy */
  uint32_t wire_bytes;
  bool accepted;
  bool acceptance_posted;
  bool finished;
  bool posting; /* a message of it waits for room in the completion lane */
  uint64_t charged_bytes;

  /* Set by intake. */
  uint32_t queue;
  uint32_t owner;
  uint32_t op_count;
  uint32_t device_op_count;
  bool assembles; /* an op of it has `assembled` */
  struct kvp_step_op *ops;
  uint8_t *results;
  uint64_t result_bytes;

  /* Set by whom it is running with. */
  uint64_t queued_ns;
  struct kvp_device_op signal;
  struct kvp_error error; /* refused, or accepted and failed: why */
  struct kvp_step *next;  /* in the one list it is in: a queue's, or the finished */
  struct kvp_step *next_posting;
  struct kvp_step *next_pending; /* compressed_parts.h */
  struct kvp_step **pending_link;
};

struct kvp_step_list {
  struct kvp_step *first;
  struct kvp_step *last;
};

void kvp_step_list_push(struct kvp_step_list *list, struct kvp_step *step);
/* NULL when it is empty. */
struct kvp_step *kvp_step_list_pop(struct kvp_step_list *list);

/* Steps in use and steps kept for reuse. Zeroed: empty. */
struct kvp_step_pool {
  struct kvp_step *free;
  uint32_t free_count;
  uint64_t free_bytes;
  uint32_t used_count;
  uint64_t used_bytes; /* of the steps' arenas, as far as they are charged */
};

/* With room for wire_bytes at ->wire. NULL when the host has no memory. */
struct kvp_step *kvp_step_new(struct kvp_step_pool *pool, uint32_t wire_bytes);
void kvp_step_destroy(struct kvp_step_pool *pool, struct kvp_step *step);
/* Charges what the step takes by now. */
void kvp_step_charge(struct kvp_step_pool *pool, struct kvp_step *step);
void kvp_step_pool_deinit(struct kvp_step_pool *pool);

/* The device op behind `op` among those of one step op; NULL at the end. */
static inline struct kvp_device_op *kvp_step_op_next(const struct kvp_step_op *step_op,
                                                     const struct kvp_device_op *op) {
  return op == step_op->last ? NULL : op->next;
}

/* Counts the step's pools and buffers as used, or no longer. */
void kvp_step_hold_objects(struct kvp_step *step);
void kvp_step_release_objects(struct kvp_step *step);

/* Bytes of the payload of its DONE completion, and the payload itself. */
uint32_t kvp_step_report_bytes(const struct kvp_step *step);
void kvp_step_report_write(const struct kvp_step *step, uint8_t *out);

#endif
