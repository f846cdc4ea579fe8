/* Steps in the supervisor: submitted, posted, retired.
 *
 * Always holds, for every device: its list is in order of arrival, the steps in the ring first, then from
 * next_to_post on those that wait; a step in the ring has a slot, whose number is in its tag; `count` is the length
 * of the list.
 */
#include "server/supervisor/step.h"

#include <assert.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/step_messages.h"
#include "server/supervisor/step_queue.h"
#include "server/supervisor/torn_blocks.h"

struct kvp_step {
  struct kvp_step *next;
  struct kvp_step *previous;
  struct kvp_session *session;          /* NULL: the daemon's own */
  const struct kvp_step_events *events; /* NULL: nobody wants to know any more */
  void *context;
  uint64_t tag;
  uint64_t sequence;   /* of the daemon */
  uint64_t pools_mask; /* bit i: daemon->pools.pools[i] */
  uint32_t bytes;
  uint16_t slot;
  bool posted;
  bool accepted;
  alignas(16) struct kvp_wire_step encoded; /* and the rest of its bytes */
};

_Static_assert(kvp_pools_max <= 64, "one bit a pool");

/* As many as have room for all that is said of them, so that an executor never finds the completion lane full. */
enum { steps_posted_max = (kvp_ring_completions - kvp_fences_posted_max) / 2 };

/* Tags: the slot in the low bits, the step's sequence above them, so that a tag made up by the executor finds
 * nothing. */
enum { tag_slot_bits = 16 };
_Static_assert(steps_posted_max < 1 << tag_slot_bits, "a tag holds a slot, or a fence's mark");

struct kvp_step_slots {
  struct kvp_step *steps[steps_posted_max];
  uint16_t free[steps_posted_max];
  uint32_t free_count;
  uint32_t used; /* slots ever used */
};

/* ---- memory -----------------------------------------------------------------------------------------------------
 */

static struct kvp_step *step_of(struct kvp_wire_step *encoded) {
  return (struct kvp_step *)(void *)((char *)encoded - offsetof(struct kvp_step, encoded));
}

struct kvp_wire_step *kvp_step_alloc(uint32_t bytes) {
  assert(bytes >= sizeof(struct kvp_wire_step));
  struct kvp_step *step = malloc(offsetof(struct kvp_step, encoded) + bytes);
  if (step == NULL) {
    return NULL;
  }
  memset(step, 0, offsetof(struct kvp_step, encoded));
  return &step->encoded;
}

void kvp_step_free(struct kvp_wire_step *encoded) {
  if (encoded != NULL) {
    free(step_of(encoded));
  }
}

/* ---- slots of the ring ------------------------------------------------------------------------------------------
 */

static bool slot_take(struct kvp_step_table *steps, struct kvp_step *step) {
  if (steps->slots == NULL) {
    steps->slots = kvp_allocate(1, sizeof *steps->slots);
  }
  struct kvp_step_slots *slots = steps->slots;
  if (slots->free_count > 0) {
    step->slot = slots->free[--slots->free_count];
  } else if (slots->used < steps_posted_max) {
    step->slot = (uint16_t)slots->used++;
  } else {
    return false;
  }
  slots->steps[step->slot] = step;
  return true;
}

static void slot_give_back(struct kvp_step_table *steps, const struct kvp_step *step) {
  steps->slots->steps[step->slot] = NULL;
  steps->slots->free[steps->slots->free_count++] = step->slot;
}

static uint64_t step_ring_tag(const struct kvp_step *step) {
  return step->sequence << tag_slot_bits | step->slot;
}

static struct kvp_step *step_find(const struct kvp_step_table *steps, uint64_t tag) {
  uint64_t slot = tag & ((UINT64_C(1) << tag_slot_bits) - 1);
  if (steps->slots == NULL || slot >= steps_posted_max) {
    return NULL;
  }
  struct kvp_step *step = steps->slots->steps[slot];
  return step != NULL && step_ring_tag(step) == tag ? step : NULL;
}

/* ---- retirement -------------------------------------------------------------------------------------------------
 */

static void list_append(struct kvp_step_table *steps, struct kvp_step *step) {
  step->previous = steps->last;
  if (steps->last == NULL) {
    steps->first = step;
  } else {
    steps->last->next = step;
  }
  steps->last = step;
  if (steps->next_to_post == NULL) {
    steps->next_to_post = step;
  }
  steps->count++;
}

static void list_remove(struct kvp_step_table *steps, const struct kvp_step *step) {
  if (steps->next_to_post == step) {
    steps->next_to_post = step->next;
  }
  if (step->previous == NULL) {
    steps->first = step->next;
  } else {
    step->previous->next = step->next;
  }
  if (step->next == NULL) {
    steps->last = step->previous;
  } else {
    step->next->previous = step->previous;
  }
  steps->count--;
}

static void pools_count(struct kvp_daemon *daemon, uint64_t mask, bool up) {
  for (; mask != 0; mask &= mask - 1) {
    struct kvp_pool *pool = daemon->pools.pools[__builtin_ctzll(mask)];
    pool->steps_in_flight += up ? 1U : UINT32_MAX;
  }
}

static void session_count(struct kvp_session *session, const struct kvp_step *step,
                          const struct kvp_step_result *result) {
  assert(session->steps_in_flight > 0 && session->step_bytes_in_flight >= step->bytes);
  session->steps_in_flight--;
  session->step_bytes_in_flight -= step->bytes;
  session->steps_done += result->error == NULL;
  session->steps_refused += result->refused;
}

/* The end of a step, and of *step. Its callback may submit, abandon, close the session or end the call. */
static void step_retire(struct kvp_device *device, struct kvp_step *step, const struct kvp_step_result *result) {
  struct kvp_daemon *daemon = device->daemon;
  struct kvp_step_table *steps = &device->steps;
  list_remove(steps, step);
  if (step->posted) {
    slot_give_back(steps, step);
  }
  steps->done_count += result->error == NULL;
  steps->retired = true;
  pools_count(daemon, step->pools_mask, false);
  uint16_t session_slot = 0;
  uint64_t session_id = 0;
  if (step->session != NULL) {
    session_slot = step->session->slot;
    session_id = step->session->id;
    session_count(step->session, step, result);
  }
  kvp_step_queue_drop(device, step->encoded.queue);
  if (step->events != NULL) {
    step->events->finished(step->context, step->tag, result);
  }
  free(step);
  struct kvp_session *session = daemon->sessions.slots[session_slot];
  if (session != NULL && session->id == session_id) {
    kvp_session_settle(daemon, session);
  }
}

static void step_end(struct kvp_device *device, struct kvp_step *step, enum kvp_status status, const char *why) {
  struct kvp_error error;
  (void)kvp_error_set(&error, status, "device %s: %s", device->name, why);
  const struct kvp_step_result result = {.error = &error};
  step_retire(device, step, &result);
}

static void steps_tell_retired(struct kvp_device *device) {
  if (device->steps.retired) {
    device->steps.retired = false;
    kvp_daemon_steps_retired(device->daemon);
  }
}

/* ---- submission -------------------------------------------------------------------------------------------------
 */

static enum kvp_status session_admit(const struct kvp_daemon *daemon, const struct kvp_session *session,
                                     uint32_t bytes, struct kvp_error *error) {
  if (session->state != KVP_SESSION_OPEN) {
    return kvp_error_set(error, KVP_UNKNOWN_SESSION, "session %llu is closing", (unsigned long long)session->id);
  }
  uint32_t steps_max = daemon->config->steps_in_flight_max;
  if (session->steps_in_flight >= steps_max) {
    return kvp_error_set(error, KVP_BUSY, "session %llu has %u steps in flight, %u are allowed",
                         (unsigned long long)session->id, session->steps_in_flight, steps_max);
  }
  const uint64_t bytes_max = kvp_step_bytes_in_flight_per_session_max;
  if (session->step_bytes_in_flight + bytes > bytes_max) {
    return kvp_error_set(error, KVP_BUSY,
                         "session %llu has steps of %llu bytes in flight, %llu are allowed, this one has %u",
                         (unsigned long long)session->id, (unsigned long long)session->step_bytes_in_flight,
                         (unsigned long long)bytes_max, bytes);
  }
  return KVP_OK;
}

static uint64_t pools_mask(const struct kvp_daemon *daemon, struct kvp_pool *const *pools, uint32_t pool_count) {
  uint64_t mask = 0;
  for (uint32_t i = 0; i < pool_count; i++) {
    uint32_t slot = 0;
    while (daemon->pools.pools[slot] != pools[i]) {
      slot++;
      assert(slot < kvp_pools_max);
    }
    mask |= UINT64_C(1) << slot;
  }
  return mask;
}

/* False: it has to wait. */
static bool step_post(struct kvp_device *device, struct kvp_step *step) {
  struct kvp_step_table *steps = &device->steps;
  if (!slot_take(steps, step)) {
    return false;
  }
  enum kvp_status status = kvp_executor_link_post(device->link, KVP_COMMAND_STEP, step_ring_tag(step), &step->encoded,
                                                  step->encoded.bytes);
  if (status != KVP_OK) {
    slot_give_back(steps, step);
    return false;
  }
  step->posted = true;
  steps->next_to_post = step->next;
  return true;
}

enum kvp_status kvp_step_submit(struct kvp_device *device, struct kvp_session *session, struct kvp_wire_step *encoded,
                                struct kvp_pool *const *pools, uint32_t pool_count,
                                const struct kvp_step_events *events, void *context, uint64_t tag,
                                struct kvp_error *error) {
  struct kvp_daemon *daemon = device->daemon;
  struct kvp_step *step = step_of(encoded);
  enum kvp_status status = KVP_OK;
  if (daemon->state == KVP_DAEMON_STOPPING) {
    status = kvp_error_set(error, KVP_SHUTTING_DOWN, "the daemon is stopping");
  } else if (session != NULL) {
    status = session_admit(daemon, session, encoded->bytes, error);
  }
  if (status != KVP_OK) {
    free(step);
    return status;
  }
  step->session = session;
  step->events = events;
  step->context = context;
  step->tag = tag;
  step->bytes = encoded->bytes;
  step->sequence = ++daemon->step_sequence;
  step->pools_mask = pools_mask(daemon, pools, pool_count);
  pools_count(daemon, step->pools_mask, true);
  if (session != NULL) {
    session->steps_in_flight++;
    session->step_bytes_in_flight += step->bytes;
  }
  kvp_step_queue_hold(device, encoded->queue);
  list_append(&device->steps, step);
  if (device->steps.next_to_post == step) {
    (void)step_post(device, step);
  }
  return KVP_OK;
}

/* ---- what becomes of them ---------------------------------------------------------------------------------------
 */

static void step_done(struct kvp_device *device, struct kvp_step *step, const uint8_t *payload,
                      uint32_t payload_bytes) {
  uint64_t report_bytes = (uint64_t)step->encoded.op_count * sizeof(struct kvp_wire_report);
  if (payload_bytes < report_bytes) {
    kvp_log(KVP_LOG_ERROR, "completion_malformed", "device=%s bytes=%u expected=%llu", device->name, payload_bytes,
            (unsigned long long)report_bytes);
    step_end(device, step, KVP_INTERNAL, "its executor sent no reports");
    return;
  }
  const struct kvp_step_result result = {
      .reports = (const struct kvp_wire_report *)(const void *)payload, /* malloc'ed: aligned */
      .report_count = step->encoded.op_count,
      .bytes = payload_bytes > report_bytes ? payload + report_bytes : NULL,
      .byte_count = payload_bytes - report_bytes,
  };
  step_retire(device, step, &result);
}

/* An executor knows the buffers of its own device alone. One that the session has on another is not unknown. */
static void error_place_buffer(const struct kvp_device *device, struct kvp_session *session,
                               struct kvp_error *error) {
  if (error->status != KVP_UNKNOWN_BUFFER || session == NULL) {
    return;
  }
  const struct kvp_error refused = *error;
  const struct kvp_buffer *buffer = kvp_buffer_find(session, (uint64_t)refused.value, NULL);
  if (buffer != NULL && buffer->device != device) {
    (void)kvp_error_set_at(error, KVP_WRONG_DEVICE, refused.op, refused.array, refused.position, refused.value,
                           "op %d: %s: buffer %llu is on %s, the step runs on %s", refused.op, refused.array,
                           (unsigned long long)buffer->id, buffer->device->name, device->name);
  }
}

static void step_failed(struct kvp_device *device, struct kvp_step *step, const uint8_t *payload,
                        uint32_t payload_bytes, bool refused) {
  struct kvp_error error;
  if (payload_bytes != sizeof error) {
    kvp_log(KVP_LOG_ERROR, "completion_malformed", "device=%s bytes=%u expected=%zu", device->name, payload_bytes,
            sizeof error);
    step_end(device, step, KVP_INTERNAL, "its executor sent no error");
    return;
  }
  memcpy(&error, payload, sizeof error);
  error.array[sizeof error.array - 1] = error.text[sizeof error.text - 1] = '\0';
  if (error.status <= KVP_OK || error.status >= kvp_status_count) {
    error.status = KVP_INTERNAL;
  }
  if (refused) {
    error_place_buffer(device, step->session, &error);
  }
  const struct kvp_step_result result = {.error = &error, .refused = refused};
  step_retire(device, step, &result);
}

void kvp_step_completion(struct kvp_device *device, const struct kvp_ring_record *record, const uint8_t *payload) {
  struct kvp_step *step = step_find(&device->steps, record->tag);
  if (step == NULL && kvp_step_fence_completion(device, record)) {
    return;
  }
  if (step == NULL) {
    kvp_log(KVP_LOG_ERROR, "completion_unknown", "device=%s kind=%u tag=%llu", device->name, record->kind,
            (unsigned long long)record->tag);
    return;
  }
  switch (record->kind) {
  case KVP_COMPLETION_ACCEPTED:
    if (!step->accepted) {
      step->accepted = true;
      if (step->events != NULL && step->events->accepted != NULL) {
        step->events->accepted(step->context, step->tag);
      }
    }
    break;
  case KVP_COMPLETION_REFUSED:
  case KVP_COMPLETION_FAILED:
    step_failed(device, step, payload, record->payload_bytes, record->kind == KVP_COMPLETION_REFUSED);
    break;
  case KVP_COMPLETION_DONE:
    step_done(device, step, payload, record->payload_bytes);
    break;
  default:
    kvp_log(KVP_LOG_ERROR, "completion_malformed", "device=%s kind=%u", device->name, record->kind);
  }
}

static void step_lost(struct kvp_device *device, struct kvp_step *step) {
  struct kvp_torn_list *torn = kvp_torn_list_new(device->daemon, &step->encoded);
  struct kvp_error error;
  (void)kvp_error_set(&error, KVP_DEVICE_LOST, "device %s: its executor died while the step was in flight",
                      device->name);
  struct kvp_step_result result = {.error = &error};
  result.torn = kvp_torn_list_pools(torn, &result.torn_count);
  if (step->session != NULL) {
    kvp_session_torn_add(step->session, result.torn, result.torn_count);
  }
  step_retire(device, step, &result);
  kvp_torn_list_destroy(torn);
}

void kvp_step_device_lost(struct kvp_device *device) {
  struct kvp_step_table *steps = &device->steps;
  while (steps->first != NULL && steps->first->posted) {
    step_lost(device, steps->first);
  }
  kvp_step_queue_device_lost(device);
  kvp_step_fence_device_lost(device);
  steps_tell_retired(device);
}

void kvp_step_post_waiting(struct kvp_device *device) {
  struct kvp_step_table *steps = &device->steps;
  kvp_step_queue_post_closed(device);
  kvp_step_fence_post_waiting(device);
  while (steps->next_to_post != NULL && step_post(device, steps->next_to_post)) {
  }
  steps_tell_retired(device);
}

void kvp_step_abandon(struct kvp_device *device, void *context) {
  struct kvp_step *next = NULL;
  for (struct kvp_step *step = device->steps.first; step != NULL; step = next) {
    next = step->next;
    if (step->events == NULL || step->context != context) {
      continue;
    }
    step->events = NULL;
    if (!step->posted) {
      step_end(device, step, KVP_CANCELLED, "the call is over"); /* no callback: `next` stays */
    }
  }
  steps_tell_retired(device);
}

/* The first step that waits, of this session or (NULL) of any. */
static struct kvp_step *step_waiting(const struct kvp_device *device, const struct kvp_session *session) {
  struct kvp_step *step = device->steps.next_to_post;
  while (step != NULL && session != NULL && step->session != session) {
    step = step->next;
  }
  return step;
}

void kvp_step_drop_session(struct kvp_daemon *daemon, struct kvp_session *session) {
  /* The session must outlive the loops below: it may be settled with its last step. */
  session->steps_in_flight++;
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    struct kvp_device *device = &daemon->devices[i];
    struct kvp_step *step = NULL;
    while ((step = step_waiting(device, session)) != NULL) {
      step_end(device, step, KVP_CANCELLED, "the session is closed");
    }
    steps_tell_retired(device);
  }
  session->steps_in_flight--;
}

void kvp_step_drop_waiting(struct kvp_device *device, const struct kvp_error *error) {
  const struct kvp_step_result result = {.error = error};
  struct kvp_step *step = NULL;
  while ((step = step_waiting(device, NULL)) != NULL) {
    step_retire(device, step, &result);
  }
  steps_tell_retired(device);
}

uint64_t kvp_step_retired_fence(const struct kvp_daemon *daemon) {
  uint64_t fence = daemon->step_sequence;
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    const struct kvp_step *first = daemon->devices[i].steps.first;
    if (first != NULL && first->sequence - 1 < fence) {
      fence = first->sequence - 1;
    }
  }
  return fence;
}

uint64_t kvp_step_retired_of(const void *context, uint16_t owner) {
  const struct kvp_daemon *daemon = context;
  uint64_t fence = kvp_step_retired_fence(daemon);
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    uint64_t oldest = kvp_step_fence_oldest(&daemon->devices[i].steps.fences, owner);
    if (oldest - 1 < fence) {
      fence = oldest - 1;
    }
  }
  return fence;
}

void kvp_step_table_deinit(struct kvp_step_table *steps) {
  assert(steps->count == 0);
  free(steps->slots);
  free(steps->queues);
}
