/* Steps and their recycled memory. */
#include "server/executor/step.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
  free_steps_max = 256,
  free_bytes_max = 32 << 20,
};

void kvp_step_list_push(struct kvp_step_list *list, struct kvp_step *step) {
  step->next = NULL;
  if (list->first == NULL) {
    list->first = step;
  } else {
    list->last->next = step;
  }
  list->last = step;
}

struct kvp_step *kvp_step_list_pop(struct kvp_step_list *list) {
  struct kvp_step *step = list->first;
  if (step != NULL) {
    list->first = step->next;
  }
  return step;
}

void kvp_step_list_remove(struct kvp_step_list *list, struct kvp_step *before, struct kvp_step *step) {
  if (before != NULL) {
    before->next = step->next;
  } else {
    list->first = step->next;
  }
  if (list->last == step) {
    list->last = before;
  }
}

static void step_free(struct kvp_step *step) {
  kvp_arena_deinit(&step->arena);
  free(step);
}

struct kvp_step *kvp_step_new(struct kvp_step_pool *pool, uint32_t wire_bytes) {
  struct kvp_step *step = pool->free;
  if (step != NULL) {
    pool->free = step->next;
    pool->free_count--;
    pool->free_bytes -= step->arena.capacity_bytes;
    struct kvp_arena arena = step->arena;
    *step = (struct kvp_step){.arena = arena};
  } else {
    step = calloc(1, sizeof *step);
    if (step == NULL) {
      return NULL;
    }
  }
  step->wire = kvp_arena_alloc(&step->arena, wire_bytes);
  if (step->wire == NULL) {
    step_free(step);
    return NULL;
  }
  step->wire_bytes = wire_bytes;
  pool->use.count++;
  kvp_step_charge(pool, step);
  return step;
}

void kvp_step_charge(struct kvp_step_pool *pool, struct kvp_step *step) {
  const uint64_t more_bytes = step->arena.capacity_bytes - step->charged_bytes;
  pool->use.bytes += more_bytes;
  if (step->use != NULL) {
    step->use->bytes += more_bytes;
  }
  step->charged_bytes = step->arena.capacity_bytes;
}

void kvp_step_count_as(struct kvp_step *step, struct kvp_step_use *use) {
  assert(step->use == NULL);
  step->use = use;
  use->count++;
  use->bytes += step->charged_bytes;
}

static void use_end(struct kvp_step_use *use, const struct kvp_step *step) {
  assert(use->count > 0 && use->bytes >= step->charged_bytes);
  use->count--;
  use->bytes -= step->charged_bytes;
}

void kvp_step_destroy(struct kvp_step_pool *pool, struct kvp_step *step) {
  use_end(&pool->use, step);
  if (step->use != NULL) {
    use_end(step->use, step);
  }
  kvp_arena_reset(&step->arena);
  if (pool->free_count >= free_steps_max || pool->free_bytes + step->arena.capacity_bytes > free_bytes_max) {
    step_free(step);
    return;
  }
  step->next = pool->free;
  pool->free = step;
  pool->free_count++;
  pool->free_bytes += step->arena.capacity_bytes;
}

void kvp_step_pool_deinit(struct kvp_step_pool *pool) {
  while (pool->free != NULL) {
    struct kvp_step *next = pool->free->next;
    step_free(pool->free);
    pool->free = next;
  }
  *pool = (struct kvp_step_pool){0};
}

enum kvp_status kvp_step_cut(struct kvp_step *step, struct kvp_error *error) {
  uint32_t leg_count = 1;
  for (uint32_t i = 1; i < step->op_count; i++) {
    leg_count += step->ops[i].waits;
  }
  step->legs = &step->whole;
  if (leg_count > 1) {
    step->legs = kvp_arena_alloc(&step->arena, leg_count * sizeof *step->legs);
  }
  if (step->legs == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "step: no memory for %u waits", leg_count);
  }
  step->leg_count = leg_count;
  uint32_t begin = 0;
  for (uint32_t i = 0; i < leg_count; i++) {
    uint32_t end = begin + (begin < step->op_count);
    while (end < step->op_count && !step->ops[end].waits) {
      end++;
    }
    step->legs[i] = (struct kvp_step_leg){.step = step, .first_op = begin, .end_op = end};
    begin = end;
  }
  assert(begin == step->op_count);
  return KVP_OK;
}

void kvp_step_hold_objects(struct kvp_step *step) {
  for (uint32_t i = 0; i < step->op_count; i++) {
    struct kvp_step_op *op = &step->ops[i];
    for (uint32_t k = 0; k < op->pool_count; k++) {
      op->pools[k]->uses++;
    }
    for (uint32_t k = 0; k < op->buffer_count; k++) {
      op->buffers[k]->uses++;
    }
  }
}

void kvp_step_release_objects(struct kvp_step *step) {
  for (uint32_t i = 0; i < step->op_count; i++) {
    struct kvp_step_op *op = &step->ops[i];
    for (uint32_t k = 0; k < op->pool_count; k++) {
      assert(op->pools[k]->uses > 0);
      op->pools[k]->uses--;
    }
    for (uint32_t k = 0; k < op->buffer_count; k++) {
      assert(op->buffers[k]->uses > 0);
      op->buffers[k]->uses--;
    }
  }
}

uint32_t kvp_step_report_bytes(const struct kvp_step *step) {
  return (uint32_t)(step->op_count * sizeof(struct kvp_wire_report) + step->result_bytes);
}

static void report_add(struct kvp_wire_report *report, const struct kvp_device_op *op) {
  /* A store without slots only casts back: it skips nothing. */
  const bool has_slots = op->kind != KVP_DEVICE_STORE || op->params.store.slots != NULL;
  report->rows_stored += op->counts.rows_stored;
  report->rows_loaded += op->counts.rows_loaded;
  report->rows_skipped += has_slots ? op->counts.rows_skipped : 0;
  report->rows_rejected += op->counts.rows_rejected;
  report->rows_nonfinite += op->counts.rows_nonfinite;
  report->groups_saturated += op->counts.groups_saturated;
  report->bytes_read += op->counts.bytes_read;
  report->bytes_written += op->counts.bytes_written;
}

void kvp_step_report_write(const struct kvp_step *step, uint8_t *out) {
  uint64_t reached_ns = step->queued_ns; /* an op that runs nothing takes no time */
  for (uint32_t i = 0; i < step->op_count; i++) {
    const struct kvp_step_op *op = &step->ops[i];
    struct kvp_wire_report report = {
        .queued_ns = step->queued_ns,
        .started_ns = op->first != NULL ? op->first->started_ns : reached_ns,
        .finished_ns = op->last != NULL ? op->last->finished_ns : reached_ns,
        .flags = op->report_flags,
        .main_kv_offset = op->main_kv_offset,
    };
    for (const struct kvp_device_op *part = op->first; part != NULL; part = kvp_step_op_next(op, part)) {
      report_add(&report, part);
    }
    reached_ns = report.finished_ns;
    memcpy(out, &report, sizeof report);
    out += sizeof report;
  }
  if (step->result_bytes > 0) {
    memcpy(out, step->results, step->result_bytes);
  }
}
