/* Turns of rings, and steps on their way. */
#include "server/executor/service.h"

#include <assert.h>

#include "proto/failpoint.h"
#include "server/executor/clock.h"
#include "server/executor/refusal.h"
#include "server/log.h"

enum { bytes_per_turn = 64 << 10 }; /* to be checked; its last command is taken as a whole */

/* Of all workers together, beside what the supervisor's ring has. A ring with nothing under way may always have one.
 */
static const uint32_t worker_steps_max = kvp_executor_steps_max / 2;
static const uint64_t worker_step_bytes_max = kvp_executor_step_bytes_max / 2;

enum kvp_status kvp_service_init(struct kvp_service *service, struct kvp_error *error) {
  service->intake.objects = &service->objects;
  service->supervisors.outbox.steps = &service->steps;
  return kvp_ring_set_add(&service->rings, &service->supervisors, error);
}

void kvp_service_step_drop(void *context, struct kvp_step *step) {
  struct kvp_service *service = context;
  if (!step->posting) { /* the outbox has it otherwise */
    kvp_step_destroy(&service->steps, step);
  }
}

void kvp_service_deinit(struct kvp_service *service) {
  struct kvp_step *fence = NULL;
  struct kvp_served_ring *ring = NULL;
  while ((fence = kvp_step_list_pop(&service->fences.waiting)) != NULL) {
    kvp_step_destroy(&service->steps, fence);
  }
  kvp_outbox_drop(&service->supervisors.outbox);
  while ((ring = kvp_ring_set_take_any(&service->rings)) != NULL) {
    kvp_outbox_drop(&ring->outbox);
    kvp_served_ring_destroy(ring);
  }
  kvp_step_pool_deinit(&service->steps);
  kvp_intake_deinit(&service->intake);
  kvp_id_table_deinit(&service->objects.pools);
  kvp_id_table_deinit(&service->objects.buffers);
}

/* ---- ends of steps ---- */

/* The step, or fence, is gone afterwards. */
static void finished_post(struct kvp_service *service, struct kvp_step *step) {
  struct kvp_served_ring *ring = step->ring;
  kvp_outbox_finished(&ring->outbox, step);
  if (kvp_outbox_is_blocked(&ring->outbox)) {
    kvp_ring_set_turned(&service->rings, ring);
  }
}

/* An accepted step has ended, or will never run. */
static void step_end(struct kvp_service *service, struct kvp_step *step) {
  if (step->is_refusal) {
    step->ring->accepted_count--;
    kvp_step_destroy(&service->steps, step);
    return;
  }
  kvp_step_release_objects(step);
  kvp_compressed_parts_finish(&service->intake.compressed, step);
  kvp_fences_step_ended(&service->fences, step);
  step->ring->accepted_count--;
  KVP_FAILPOINT("executor.step_ended");
  finished_post(service, step);
  KVP_FAILPOINT("executor.completion_posted");
}

static void fences_look(struct kvp_service *service) {
  struct kvp_step *fence = NULL;
  while ((fence = kvp_fences_pop(&service->fences)) != NULL) {
    finished_post(service, fence);
  }
}

/* A worker that posts a step and then releases a buffer of it has its step: what is in its ring is taken first. Others of
 * its session aren't waited for: one that takes no completions would hold up all. */
static bool buffer_is_awaited(const struct kvp_service *service, const struct kvp_object_change *change) {
  struct kvp_served_ring *ring =
      change->attachment_id == 0 ? NULL : kvp_ring_set_find(&service->rings, change->attachment_id);
  return ring != NULL && !ring->outbox.is_closed &&
         !kvp_served_ring_has_taken(ring, change->number, service->buffer_removals);
}

static void buffer_remove(struct kvp_service *service, struct kvp_object_change *change) {
  const enum kvp_status status =
      kvp_objects_remove_buffer(&service->objects, change->id, &change->buffer, &change->error);
  assert(status == KVP_OK);
  (void)status;
  kvp_compressed_parts_forget_buffer(&service->intake.compressed, change->buffer);
  KVP_FAILPOINT("executor.buffer_removed");
}

static bool removal_is_awaiting(const struct kvp_object_change *change) {
  return change->kind == KVP_REMOVE_BUFFER && change->buffer == NULL;
}

/* Nobody uses what is to be removed. */
static bool removal_is_due(const struct kvp_object_change *change) {
  if (removal_is_awaiting(change)) {
    return false;
  }
  switch (change->kind) {
  case KVP_REMOVE_POOL:
    return change->pool->uses == 0;
  case KVP_REMOVE_BUFFER:
    return change->buffer->uses == 0;
  case KVP_DRAIN_RING:
    return change->ring->accepted_count == 0;
  default:
    return change->ring->use.count == 0;
  }
}

static void removal_finish(struct kvp_service *service, struct kvp_object_change *change) {
  if (change->kind == KVP_REMOVE_RING) {
    kvp_ring_timelines_poison_all(&change->ring->timelines); /* nobody waits for what won't come */
    KVP_FAILPOINT("executor.ring_poisoned");
    kvp_ring_set_remove(&service->rings, change->ring);
  }
}

/* Removals that waited for steps which are gone now. */
static void removals_look(struct kvp_service *service) {
  for (struct kvp_object_change **link = &service->removals; *link != NULL;) {
    struct kvp_object_change *change = *link;
    if (removal_is_awaiting(change) && !buffer_is_awaited(service, change)) {
      buffer_remove(service, change);
      service->awaiting_removals--;
    }
    if (!removal_is_due(change)) {
      link = &change->next;
      continue;
    }
    *link = change->next;
    removal_finish(service, change);
    kvp_mailbox_tell(service->mailbox, &change->news, KVP_NEWS_CHANGE_DONE);
  }
}

bool kvp_service_finished_take(struct kvp_service *service) {
  struct kvp_step_list finished = {0};
  const bool any = kvp_dispatch_poll(&service->dispatch, &finished);
  if (finished.first == NULL) {
    return any;
  }
  struct kvp_step *step = NULL;
  while ((step = kvp_step_list_pop(&finished)) != NULL) {
    step_end(service, step);
  }
  fences_look(service);
  removals_look(service);
  return true;
}

/* ---- rings that come and go ---- */

/* No turn any more; steps of which nothing runs are gone at once. */
static void ring_suspend(struct kvp_service *service, struct kvp_served_ring *ring) {
  struct kvp_step_list dropped = {0};
  struct kvp_step *step = NULL;
  kvp_ring_set_suspend(&service->rings, ring);
  kvp_outbox_close(&ring->outbox);
  kvp_dispatch_drop(&service->dispatch, ring->queue, ring, &dropped);
  kvp_dispatch_close_queue(&service->dispatch, ring->queue);
  while ((step = kvp_step_list_pop(&dropped)) != NULL) {
    step_end(service, step);
  }
  fences_look(service);
}

static void ring_fail(struct kvp_service *service, struct kvp_served_ring *ring, const char *what, uint64_t value) {
  const unsigned long long position = ring->ring->commands.position;
  kvp_log(KVP_LOG_ERROR, "command_lane_corrupt", "attachment=%llu what=\"%s\" value=%llu position=%llu",
          (unsigned long long)ring->attachment_id, what, (unsigned long long)value, position);
  if (ring->is_supervisors) {
    service->failed = true;
    return;
  }
  ring->is_failed = true;
  (void)kvp_error_set(&ring->error, KVP_MALFORMED, "ring: command %llu: %s %llu makes no sense", position, what,
                      (unsigned long long)value);
  ring_suspend(service, ring);
  removals_look(service);
  kvp_mailbox_tell(service->mailbox, &ring->failed, KVP_NEWS_RING_FAILED);
}

/* Of a ring that is removed: its removal waits for the same steps, and nobody can look at the ring after that. */
static void drains_finish(struct kvp_service *service, const struct kvp_served_ring *ring) {
  for (struct kvp_object_change **link = &service->removals; *link != NULL;) {
    struct kvp_object_change *change = *link;
    if (change->kind != KVP_DRAIN_RING || change->ring != ring) {
      link = &change->next;
      continue;
    }
    *link = change->next;
    kvp_mailbox_tell(service->mailbox, &change->news, KVP_NEWS_CHANGE_DONE);
  }
}

static enum kvp_status ring_find(struct kvp_service *service, struct kvp_object_change *change) {
  change->ring = kvp_ring_set_find(&service->rings, change->id);
  if (change->ring == NULL || change->ring->is_leaving) {
    return kvp_error_set(&change->error, KVP_INVALID_ARGUMENT, "attachment %llu has no ring",
                         (unsigned long long)change->id);
  }
  return KVP_OK;
}

static enum kvp_status ring_remove(struct kvp_service *service, struct kvp_object_change *change) {
  enum kvp_status status = ring_find(service, change);
  if (status != KVP_OK) {
    return status;
  }
  if (!change->ring->is_failed) {
    ring_suspend(service, change->ring);
  }
  change->ring->is_leaving = true;
  drains_finish(service, change->ring);
  return KVP_OK;
}

static enum kvp_status ring_drain(struct kvp_service *service, struct kvp_object_change *change) {
  enum kvp_status status = ring_find(service, change);
  if (status == KVP_OK) {
    change->ring->is_draining = true;
  }
  return status;
}

static enum kvp_status buffer_removal_begin(struct kvp_service *service, struct kvp_object_change *change) {
  struct kvp_buffer *buffer = kvp_objects_buffer(&service->objects, change->id);
  if (buffer == NULL || buffer->is_leaving) {
    return kvp_error_set(&change->error, KVP_UNKNOWN_BUFFER, "buffer %llu is not attached",
                         (unsigned long long)change->id);
  }
  buffer->is_leaving = true;
  change->number = ++service->buffer_removals;
  if (buffer_is_awaited(service, change)) {
    service->awaiting_removals++;
  } else {
    buffer_remove(service, change);
  }
  return KVP_OK;
}

static enum kvp_status removal_begin(struct kvp_service *service, struct kvp_object_change *change) {
  struct kvp_objects *objects = &service->objects;
  enum kvp_status status = KVP_OK;
  switch (change->kind) {
  case KVP_REMOVE_POOL:
    status = kvp_objects_remove_pool(objects, change->id, &change->pool, &change->error);
    if (status == KVP_OK) {
      kvp_compressed_parts_forget_pool(&service->intake.compressed, change->pool);
    }
    break;
  case KVP_REMOVE_BUFFER:
    status = buffer_removal_begin(service, change);
    break;
  case KVP_DRAIN_RING:
    status = ring_drain(service, change);
    break;
  default:
    status = ring_remove(service, change);
    break;
  }
  if (status != KVP_OK) {
    return status;
  }
  if (removal_is_due(change)) {
    removal_finish(service, change);
    return KVP_OK;
  }
  change->is_pending = true;
  change->next = service->removals;
  service->removals = change;
  return KVP_OK;
}

enum kvp_status kvp_service_change(struct kvp_service *service, struct kvp_object_change *change) {
  enum kvp_status status = KVP_OK;
  switch (change->kind) {
  case KVP_ADD_POOL:
    return kvp_objects_add_pool(&service->objects, change->pool, &change->error);
  case KVP_ADD_BUFFER:
    return kvp_objects_add_buffer(&service->objects, change->buffer, &change->error);
  case KVP_ADD_RING:
    change->ring->outbox.steps = &service->steps;
    return kvp_ring_set_add(&service->rings, change->ring, &change->error);
  case KVP_REMOVE_POOL:
  case KVP_REMOVE_BUFFER:
  case KVP_REMOVE_RING:
  case KVP_DRAIN_RING:
    status = removal_begin(service, change);
    removals_look(service); /* a ring that went may have been the last to use something else */
    return status;
  }
  return status;
}

/* ---- steps ---- */

/* The record's payload as a private copy, its place in the ring given back. NULL: no memory at all. */
static struct kvp_step *step_copy(struct kvp_service *service, struct kvp_served_ring *ring,
                                  const struct kvp_ring_record *record) {
  struct kvp_lane_end *lane = &ring->ring->commands;
  struct kvp_step *step = NULL;
  if (record->payload_bytes <= kvp_step_bytes_max) {
    step = kvp_step_new(&service->steps, record->payload_bytes);
  }
  if (step != NULL) {
    kvp_lane_copy_payload(lane, record, step->wire);
  } else if ((step = kvp_step_new(&service->steps, 0)) != NULL) {
    step->error.status = record->payload_bytes > kvp_step_bytes_max ? KVP_TOO_LARGE : KVP_OUT_OF_MEMORY;
    (void)kvp_error_set(&step->error, (enum kvp_status)step->error.status,
                        "step: %u bytes, at most %d are allowed and memory must be there", record->payload_bytes,
                        kvp_step_bytes_max);
  }
  kvp_lane_advance(lane, record);
  return step;
}

/* A worker's steps are its session's and in its queue, whatever they say. */
static void step_sign(const struct kvp_served_ring *ring, struct kvp_step *step) {
  struct kvp_wire_step *header = (struct kvp_wire_step *)(void *)step->wire;
  if (!ring->is_supervisors && step->wire_bytes >= sizeof *header) {
    header->owner = ring->owner;
    header->queue = ring->queue;
  }
}

static enum kvp_status step_check(struct kvp_service *service, struct kvp_served_ring *ring, struct kvp_step *step) {
  struct kvp_intake *intake = &service->intake;
  intake->allows_daemon_ops = ring->is_supervisors;
  intake->allows_points = !ring->is_supervisors;
  intake->completion_bytes_max = ring->completion_bytes_max;
  return kvp_intake_check(intake, step, &step->error);
}

static void step_accept(struct kvp_service *service, struct kvp_served_ring *ring, struct kvp_step *step) {
  const uint64_t asked_ns = ((const struct kvp_wire_step *)(const void *)step->wire)->deadline_ns;
  step->accepted = true;
  step->queued_ns = kvp_clock_ns();
  step->deadline_ns =
      step->queued_ns + (asked_ns == 0 || asked_ns > ring->deadline_ns_max ? ring->deadline_ns_max : asked_ns);
  kvp_step_charge(&service->steps, step);
  kvp_step_hold_objects(step);
  kvp_compressed_parts_accept(&service->intake.compressed, step);
  kvp_fences_step_accepted(&service->fences, step);
  ring->accepted_count++;
}

static void no_memory(struct kvp_service *service, const char *what, uint64_t value) {
  kvp_log(KVP_LOG_ERROR, "out_of_memory", "%s=%llu", what, (unsigned long long)value);
  service->failed = true;
}

/* A worker's step won't run: what it would have signalled is poisoned when its turn would have come. */
static void step_refuse(struct kvp_service *service, struct kvp_served_ring *ring, struct kvp_step *step) {
  struct kvp_step *refusal = NULL;
  struct kvp_queue *queue = NULL;
  if (!ring->is_supervisors && kvp_refusal_new(&service->steps, step, &refusal) != KVP_OK) {
    no_memory(service, "refusal", step->tag);
  }
  kvp_outbox_checked(&ring->outbox, step);
  if (refusal == NULL) {
    return;
  }
  kvp_step_count_as(refusal, &ring->use);
  if (kvp_dispatch_open(&service->dispatch, ring->queue, &queue, &refusal->error) != KVP_OK) {
    /* There is no queue for it: nothing of this ring is under way. */
    kvp_dispatch_signals_poison(refusal);
    kvp_step_destroy(&service->steps, refusal);
    return;
  }
  ring->accepted_count++;
  kvp_dispatch_submit(&service->dispatch, queue, refusal);
}

/* *bytes: counts what was looked at. */
static void step_take(struct kvp_service *service, struct kvp_served_ring *ring, const struct kvp_ring_record *record,
                      uint64_t *bytes) {
  struct kvp_step *step = step_copy(service, ring, record);
  if (step == NULL) {
    no_memory(service, "step_bytes", record->payload_bytes);
    return;
  }
  KVP_FAILPOINT("executor.step_taken");
  step->tag = record->tag;
  step->ring = ring;
  step->timelines = &ring->timelines;
  kvp_step_count_as(step, &ring->use);
  step_sign(ring, step);
  struct kvp_queue *queue = NULL;
  enum kvp_status status = (enum kvp_status)step->error.status;
  service->intake.elements_checked = 0;
  if (status == KVP_OK && ring->is_draining) {
    status = kvp_error_set(&step->error, KVP_SHUTTING_DOWN, "step: the daemon is draining");
  }
  if (status == KVP_OK) {
    status = step_check(service, ring, step);
  }
  *bytes += record->payload_bytes + service->intake.elements_checked * sizeof(int32_t);
  if (status == KVP_OK) {
    status = kvp_dispatch_open(&service->dispatch, step->queue, &queue, &step->error);
  }
  if (status != KVP_OK) {
    step_refuse(service, ring, step);
    return;
  }
  step_accept(service, ring, step);
  KVP_FAILPOINT("executor.step_accepted");
  kvp_outbox_checked(&ring->outbox, step);
  kvp_dispatch_submit(&service->dispatch, queue, step);
}

/* False: it makes no sense. */
static bool fence_take(struct kvp_service *service, struct kvp_served_ring *ring,
                       const struct kvp_ring_record *record) {
  struct kvp_wire_fence wire;
  if (record->payload_bytes != sizeof wire) {
    return false;
  }
  kvp_lane_copy_payload(&ring->ring->commands, record, &wire);
  struct kvp_step *fence = kvp_step_new(&service->steps, 0);
  if (fence == NULL) {
    no_memory(service, "fence", record->tag);
    return true;
  }
  fence->tag = record->tag;
  fence->owner = wire.owner;
  fence->ring = ring;
  kvp_step_count_as(fence, &ring->use);
  kvp_fences_add(&service->fences, fence);
  kvp_lane_advance(&ring->ring->commands, record);
  fences_look(service);
  return true;
}

/* A record's kind; workers have only steps. False: it makes no sense. */
static bool record_take(struct kvp_service *service, struct kvp_served_ring *ring,
                        const struct kvp_ring_record *record, uint64_t *bytes) {
  if (record->kind == KVP_COMMAND_STEP) {
    step_take(service, ring, record, bytes);
    return true;
  }
  if (!ring->is_supervisors) {
    return false;
  }
  switch (record->kind) {
  case KVP_COMMAND_QUEUE_CLOSE:
    kvp_dispatch_close_queue(&service->dispatch, (uint32_t)record->tag);
    kvp_lane_advance(&ring->ring->commands, record);
    return true;
  case KVP_COMMAND_FENCE:
    return fence_take(service, ring, record);
  default:
    return false;
  }
}

static bool command_take(struct kvp_service *service, struct kvp_served_ring *ring, uint64_t *bytes) {
  struct kvp_ring_record record = {0};
  switch (kvp_lane_peek(&ring->ring->commands, &record)) {
  case KVP_LANE_EMPTY:
    return false;
  case KVP_LANE_CORRUPT:
    ring_fail(service, ring, "record", record.sequence);
    return false;
  case KVP_LANE_RECORD:
    break;
  }
  if (!record_take(service, ring, &record, bytes)) {
    ring_fail(service, ring, "kind", record.kind);
    return false;
  }
  return true;
}

/* While the other side doesn't take its completions, or too much is under way, its commands stay where they are. */
static bool ring_is_open(const struct kvp_service *service, const struct kvp_served_ring *ring) {
  const struct kvp_step_use *all = &service->steps.use;
  const struct kvp_step_use *supervisors = &service->supervisors.use;
  if (ring->outbox.is_closed || kvp_outbox_is_blocked(&ring->outbox)) {
    return false;
  }
  if (ring->use.count == 0) {
    return true;
  }
  if (ring->use.count >= ring->steps_max || ring->use.bytes >= ring->step_bytes_max) {
    return false;
  }
  return ring->is_supervisors || (all->count - supervisors->count < worker_steps_max &&
                                  all->bytes - supervisors->bytes < worker_step_bytes_max);
}

static bool turn_take(struct kvp_service *service, struct kvp_served_ring *ring) {
  bool any = kvp_outbox_is_blocked(&ring->outbox) && kvp_outbox_flush(&ring->outbox);
  uint32_t commands = 0;
  uint64_t bytes = 0;
  while (commands < ring->turn_commands && bytes < bytes_per_turn && !service->failed &&
         ring_is_open(service, ring) && command_take(service, ring, &bytes)) {
    commands++;
    any = true;
  }
  if (!ring->is_failed) {
    kvp_ring_set_turned(&service->rings, ring);
  }
  return any;
}

bool kvp_service_commands_take(struct kvp_service *service) {
  const uint32_t ring_count = service->rings.served_count;
  for (uint32_t i = 0; i < ring_count && !service->failed; i++) {
    struct kvp_served_ring *ring = kvp_ring_set_next(&service->rings);
    if (ring == NULL) {
      return false;
    }
    if (turn_take(service, ring)) {
      if (service->awaiting_removals > 0) {
        removals_look(service);
      }
      return true;
    }
  }
  return false;
}

/* ---- sleep ---- */

bool kvp_service_is_blocked(const struct kvp_service *service) {
  for (uint32_t i = 0; i < service->rings.served_count; i++) {
    if (kvp_outbox_is_blocked(&service->rings.served[i]->outbox)) {
      return true;
    }
  }
  return false;
}

bool kvp_service_prepare_sleep(struct kvp_service *service) {
  for (uint32_t i = 0; i < service->rings.served_count; i++) {
    struct kvp_served_ring *ring = service->rings.served[i];
    if (!ring_is_open(service, ring)) {
      continue;
    }
    if (!kvp_lane_prepare_sleep(&ring->ring->commands)) {
      kvp_service_awake(service);
      return false;
    }
    ring->is_prepared = true;
  }
  return true;
}

void kvp_service_awake(struct kvp_service *service) {
  for (uint32_t i = 0; i < service->rings.served_count; i++) {
    struct kvp_served_ring *ring = service->rings.served[i];
    if (ring->is_prepared) {
      kvp_lane_awake(&ring->ring->commands);
      ring->is_prepared = false;
    }
  }
}
