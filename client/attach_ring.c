/* The ring of an attachment: steps go out, completions come back.
 *
 * A step is outstanding from its post to its last word. The executor says it, or, when the executor or the attachment is
 * gone, its end says it for all: they have ids up to `lost_through`, and are told before anything of a new ring. No more
 * than kvp_attachment_steps_max are outstanding, so nothing here grows. */
#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/attach.h"
#include "proto/failpoint.h"

static const uint64_t spin_before_sleep_ns = 50000;

/* ---- the ring's coming and going --------------------------------------------------------------------------------
 */

static void epoll_watch(const kvpool_attachment *attachment, int fd) {
  struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
  (void)epoll_ctl(attachment->epoll, EPOLL_CTL_ADD, fd, &event);
}

kvpool_status kvp_attachment_set_ring(kvpool_attachment *attachment, int ring, int command_event,
                                      int completion_event, kvpool_error *error) {
  assert(attachment->ring.map == NULL);
  struct kvp_error refused;
  if (kvp_ring_init(&attachment->ring, ring, KVP_RING_CLIENT, &refused) != KVP_OK) {
    memset(&attachment->ring, 0, sizeof attachment->ring);
    return kvp_fail_wire(error, &refused);
  }
  /* A child of a fork that posts faults alone, instead of spoiling its parent's ring. */
  (void)madvise(attachment->ring.map, attachment->ring.map_bytes, MADV_DONTFORK);
  attachment->command_event = command_event;
  attachment->completion_event = completion_event;
  if (attachment->epoll >= 0) {
    epoll_watch(attachment, completion_event);
  }
  return KVPOOL_OK;
}

static bool hold_record(kvpool_attachment *attachment, const struct kvp_ring_record *record) {
  struct kvp_held *held = malloc(sizeof *held + record->payload_bytes);
  if (held == NULL) {
    return false;
  }
  held->next = NULL;
  held->record = *record;
  kvp_lane_copy_payload(&attachment->ring.completions, record, held->payload);
  *(attachment->held_last == NULL ? &attachment->held_first : &attachment->held_last->next) = held;
  attachment->held_last = held;
  return true;
}

void kvp_attachment_free_held(kvpool_attachment *attachment) {
  while (attachment->held_first != NULL) {
    struct kvp_held *held = attachment->held_first;
    attachment->held_first = held->next;
    free(held);
  }
  attachment->held_last = NULL;
}

void kvp_attachment_drop_ring(kvpool_attachment *attachment, const kvpool_error *why) {
  struct kvp_ring_record record;
  attachment->lost_through = attachment->last_step_id;
  attachment->lost = *why;
  attachment->lost.op = -1;
  if (attachment->ring.map == NULL) {
    return;
  }
  const bool is_ours = attachment->pid == getpid(); /* in a child of a fork there is no ring */
  if (is_ours) {
    kvp_timelines_poison(kvp_timelines_latest(attachment));
  }
  /* What can't be kept for want of memory ends like the rest. */
  while (is_ours && kvp_lane_peek(&attachment->ring.completions, &record) == KVP_LANE_RECORD &&
         hold_record(attachment, &record)) {
    kvp_lane_advance(&attachment->ring.completions, &record);
  }
  if (is_ours && attachment->epoll >= 0) { /* closing doesn't: the executor's end of it stays open */
    (void)epoll_ctl(attachment->epoll, EPOLL_CTL_DEL, attachment->completion_event, NULL);
  }
  if (is_ours) {
    kvp_ring_deinit(&attachment->ring);
  } else {
    memset(&attachment->ring, 0, sizeof attachment->ring); /* other memory of the child's may be there by now */
  }
  (void)close(attachment->command_event);
  (void)close(attachment->completion_event);
  attachment->command_event = attachment->completion_event = -1;
}

/* ---- outstanding steps ------------------------------------------------------------------------------------------
 */

static struct kvp_outstanding *outstanding_of(kvpool_attachment *attachment, uint64_t step_id) {
  return &attachment->outstanding[step_id % kvp_attachment_steps_max];
}

static bool is_outstanding(kvpool_attachment *attachment, uint64_t step_id) {
  return step_id >= attachment->oldest && step_id <= attachment->last_step_id &&
         outstanding_of(attachment, step_id)->is_posted;
}

static void outstanding_remove(kvpool_attachment *attachment, uint64_t step_id) {
  outstanding_of(attachment, step_id)->is_posted = false;
  attachment->outstanding_count--;
  while (attachment->oldest <= attachment->last_step_id && !is_outstanding(attachment, attachment->oldest)) {
    attachment->oldest++;
  }
}

/* ---- post -------------------------------------------------------------------------------------------------------
 */

static void executor_wake(const kvpool_attachment *attachment) {
  const uint64_t one = 1;
  ssize_t written;
  do {
    written = write(attachment->command_event, &one, sizeof one);
  } while (written < 0 && errno == EINTR);
}

static kvpool_status post_options(const kvpool_post_options *options, kvpool_post_options *out, kvpool_error *error) {
  *out = (kvpool_post_options){.size_bytes = sizeof *out};
  if (options == NULL) {
    return KVPOOL_OK;
  }
  if (options->size_bytes < sizeof *out) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "options", -1, (int64_t)options->size_bytes,
                       "kvpool_post_options.size_bytes is %zu, not sizeof(kvpool_post_options) = %zu",
                       options->size_bytes, sizeof *out);
  }
  *out = *options;
  return KVPOOL_OK;
}

static kvpool_status post_check(kvpool_attachment *attachment, const kvpool_step *step, uint64_t bytes,
                                kvpool_error *error) {
  if (step->attachment != NULL && step->attachment != attachment) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "the step was made for another attachment");
  }
  if (attachment->socket < 0) {
    return kvp_attachment_check(attachment, error);
  }
  kvp_attachment_glance(attachment);
  kvpool_status status = kvp_attachment_check(attachment, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (step->placement[0] != '\0' && strcmp(step->placement, attachment->welcome.device) != 0) {
    return kvp_fail(error, KVPOOL_WRONG_DEVICE, "the step is for %s, the attachment's device is %s", step->placement,
                    attachment->welcome.device);
  }
  status = kvp_step_check_device(step, attachment->welcome.device, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const uint64_t bytes_max = attachment->ring.commands.arena_bytes / 2;
  if (bytes > bytes_max) {
    return kvp_fail_at(error, KVPOOL_TOO_LARGE, "", -1, (int64_t)bytes,
                       "the step has %llu bytes, a ring takes %llu: split it, or put arrays into buffers",
                       (unsigned long long)bytes, (unsigned long long)bytes_max);
  }
  /* Ids between the oldest outstanding and the next one each have a place of their own. */
  if (attachment->last_step_id + 1 - attachment->oldest >= kvp_attachment_steps_max) {
    return kvp_fail(error, KVPOOL_BUSY, "%u steps of this attachment are not done yet",
                    attachment->outstanding_count);
  }
  return KVPOOL_OK;
}

static uint64_t step_epoch(const kvpool_attachment *attachment, const kvpool_step *step) {
  const uint64_t known = atomic_load_explicit(&attachment->epoch, memory_order_relaxed);
  const uint64_t session = step->session == NULL ? 0 : kvpool_session_epoch(step->session);
  return session > known ? session : known;
}

kvpool_status kvp_attachment_post_step(kvpool_attachment *attachment, const kvpool_step *step,
                                       struct kvp_step_head *head, uint64_t *step_id, kvpool_error *error) {
  const uint64_t bytes = kvp_step_wire_bytes(step);
  kvpool_status status = post_check(attachment, step, bytes, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  struct kvp_lane_end *commands = &attachment->ring.commands;
  void *place = kvp_lane_reserve(commands, (uint32_t)bytes);
  if (place == NULL) {
    return kvp_fail(error, KVPOOL_BUSY, "the ring is full: %u steps of this attachment are not done yet",
                    attachment->outstanding_count);
  }
  KVP_FAILPOINT("worker.step_reserved");
  head->epoch = step_epoch(attachment, step);
  kvp_step_wire_write(step, head, (uint32_t)bytes, place);
  const uint64_t id = ++attachment->last_step_id;
  *outstanding_of(attachment, id) = (struct kvp_outstanding){.op_count = (uint16_t)step->op_count, .is_posted = true};
  attachment->outstanding_count++;
  KVP_FAILPOINT("worker.step_written");
  const bool is_asleep = kvp_lane_publish(commands, KVP_COMMAND_STEP, id, (uint32_t)bytes);
  KVP_FAILPOINT("worker.step_published");
  if (is_asleep) {
    executor_wake(attachment);
  }
  if (step_id != NULL) {
    *step_id = id;
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_attachment_post(kvpool_attachment *attachment, const kvpool_step *step,
                                     const kvpool_post_options *options, uint64_t *step_id, kvpool_error *error) {
  assert(attachment != NULL && step != NULL);
  kvpool_post_options used;
  kvpool_status status = post_options(options, &used, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  struct kvp_step_head head = {
      .base = used.base,
      .deadline_ns = (uint64_t)used.deadline_ms * 1000000,
      .flags = used.want_accepted ? 0 : KVP_STEP_NOT_ACCEPTED_TOLD,
  };
  return kvp_attachment_post_step(attachment, step, &head, step_id, error);
}

/* ---- completions ------------------------------------------------------------------------------------------------
 */

static void report_from(const struct kvp_wire_report *from, kvpool_op_report *out) {
  *out = (kvpool_op_report){
      .rows_stored = from->rows_stored,
      .rows_loaded = from->rows_loaded,
      .rows_skipped = from->rows_skipped,
      .rows_rejected = from->rows_rejected,
      .rows_nonfinite = from->rows_nonfinite,
      .groups_saturated = from->groups_saturated,
      .bytes_read = from->bytes_read,
      .bytes_written = from->bytes_written,
      .queued_ns = from->queued_ns,
      .started_ns = from->started_ns,
      .finished_ns = from->finished_ns,
      .unchecked_arrays = (from->flags & KVP_REPORT_UNCHECKED_ARRAYS) != 0,
      .hazard_unchecked = (from->flags & KVP_REPORT_HAZARD_UNCHECKED) != 0,
      .main_kv_offset = from->main_kv_offset,
  };
}

static kvpool_status completion_malformed(const struct kvp_ring_record *record, kvpool_error *error) {
  return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold's ring has a completion of kind %u with %u bytes for step %llu",
                  record->kind, record->payload_bytes, (unsigned long long)record->tag);
}

static kvpool_status completion_done(kvpool_attachment *attachment, uint16_t op_count, kvpool_error *error) {
  struct kvp_bytes *reports = &attachment->reports;
  if ((uint64_t)op_count * sizeof(struct kvp_wire_report) > attachment->record.payload_bytes) {
    return completion_malformed(&attachment->record, error);
  }
  reports->size = 0;
  if (!kvp_bytes_reserve(reports, (size_t)op_count * sizeof(kvpool_op_report) + 1)) {
    return kvp_fail_no_memory(error);
  }
  kvpool_op_report *out = (kvpool_op_report *)(void *)reports->data;
  for (uint32_t i = 0; i < op_count; i++) {
    struct kvp_wire_report from;
    memcpy(&from, attachment->payload.data + i * sizeof from, sizeof from);
    report_from(&from, &out[i]);
  }
  attachment->completion.reports = out;
  attachment->completion.report_count = op_count;
  return KVPOOL_OK;
}

static kvpool_status completion_failed(kvpool_attachment *attachment, kvpool_error *error) {
  struct kvp_error from;
  if (attachment->record.payload_bytes != sizeof from) {
    return completion_malformed(&attachment->record, error);
  }
  memcpy(&from, attachment->payload.data, sizeof from);
  (void)kvp_fail_wire(&attachment->completion_error, &from);
  attachment->completion.error = &attachment->completion_error;
  return KVPOOL_OK;
}

/* `record` and `payload` as a completion. *out NULL: of a step that has had its last word. */
static kvpool_status completion_decode(kvpool_attachment *attachment, const kvpool_completion **out,
                                       kvpool_error *error) {
  const struct kvp_ring_record *record = &attachment->record;
  kvpool_status status = KVPOOL_OK;
  attachment->completion = (kvpool_completion){.step_id = record->tag};
  *out = NULL;
  if (!is_outstanding(attachment, record->tag)) {
    return KVPOOL_OK;
  }
  const uint16_t op_count = outstanding_of(attachment, record->tag)->op_count;
  switch (record->kind) {
  case KVP_COMPLETION_ACCEPTED:
    attachment->completion.accepted = true;
    break;
  case KVP_COMPLETION_DONE:
    status = completion_done(attachment, op_count, error);
    break;
  case KVP_COMPLETION_REFUSED:
  case KVP_COMPLETION_FAILED:
    status = completion_failed(attachment, error);
    break;
  default:
    status = completion_malformed(record, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  if (!attachment->completion.accepted) {
    outstanding_remove(attachment, record->tag);
  }
  *out = &attachment->completion;
  return KVPOOL_OK;
}

static bool payload_reserve(kvpool_attachment *attachment, uint32_t bytes) {
  attachment->payload.size = 0;
  return kvp_bytes_reserve(&attachment->payload, (size_t)bytes + 1);
}

static kvpool_status held_take(kvpool_attachment *attachment, const kvpool_completion **out, kvpool_error *error) {
  struct kvp_held *held = attachment->held_first;
  if (!payload_reserve(attachment, held->record.payload_bytes)) {
    return kvp_fail_no_memory(error);
  }
  attachment->record = held->record;
  memcpy(attachment->payload.data, held->payload, held->record.payload_bytes);
  attachment->held_first = held->next;
  if (held->next == NULL) {
    attachment->held_last = NULL;
  }
  free(held);
  return completion_decode(attachment, out, error);
}

static kvpool_status ring_take(kvpool_attachment *attachment, const kvpool_completion **out, kvpool_error *error) {
  struct kvp_lane_end *lane = &attachment->ring.completions;
  enum kvp_lane_state state = kvp_lane_peek(lane, &attachment->record);
  if (state == KVP_LANE_EMPTY) {
    return KVPOOL_OK;
  }
  if (state == KVP_LANE_CORRUPT) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold's ring holds nonsense");
  }
  if (!payload_reserve(attachment, attachment->record.payload_bytes)) {
    return kvp_fail_no_memory(error);
  }
  kvp_lane_copy_payload(lane, &attachment->record, attachment->payload.data);
  KVP_FAILPOINT("worker.completion_copied");
  kvp_lane_advance(lane, &attachment->record);
  return completion_decode(attachment, out, error);
}

static void lost_take(kvpool_attachment *attachment, const kvpool_completion **out) {
  attachment->completion = (kvpool_completion){.step_id = attachment->oldest, .error = &attachment->lost};
  outstanding_remove(attachment, attachment->oldest);
  *out = &attachment->completion;
}

static bool is_lost_waiting(const kvpool_attachment *attachment) {
  return attachment->outstanding_count > 0 && attachment->oldest <= attachment->lost_through;
}

/* What was kept, what is lost, and then the ring. Nonsense in it ends the attachment. */
static kvpool_status completion_take(kvpool_attachment *attachment, const kvpool_completion **out,
                                     kvpool_error *error) {
  kvpool_error local;
  kvpool_status status = KVPOOL_OK;
  *out = NULL;
  if (attachment->held_first != NULL) {
    status = held_take(attachment, out, &local);
  } else if (is_lost_waiting(attachment)) {
    lost_take(attachment, out);
  } else if (attachment->ring.map != NULL) {
    status = ring_take(attachment, out, &local);
  }
  if (status == KVPOOL_MALFORMED) {
    kvp_attachment_end(attachment, &local);
    return KVPOOL_OK; /* its steps are told, and then the end */
  }
  if (status != KVPOOL_OK && error != NULL) {
    *error = local;
  }
  return status;
}

static bool is_anything_there(const kvpool_attachment *attachment) {
  return attachment->held_first != NULL || is_lost_waiting(attachment);
}

kvpool_status kvpool_attachment_poll(kvpool_attachment *attachment, const kvpool_completion **out,
                                     kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  kvpool_status status = completion_take(attachment, out, error);
  if (status != KVPOOL_OK || *out != NULL) {
    return status;
  }
  kvp_attachment_glance(attachment);
  status = completion_take(attachment, out, error);
  if (status == KVPOOL_OK && *out == NULL && attachment->state == KVP_ATTACHMENT_ENDED &&
      !is_anything_there(attachment)) {
    return kvp_attachment_check(attachment, error);
  }
  return status;
}

/* ---- waiting ----------------------------------------------------------------------------------------------------
 */

static void event_clear(const kvpool_attachment *attachment) {
  uint64_t event;
  ssize_t got;
  do {
    got = recv(attachment->completion_event, &event, sizeof event, MSG_DONTWAIT);
  } while (got > 0 || (got < 0 && errno == EINTR));
}

bool kvpool_attachment_arm(kvpool_attachment *attachment) {
  assert(attachment != NULL);
  if (is_anything_there(attachment) || attachment->state == KVP_ATTACHMENT_ENDED) {
    return false;
  }
  if (attachment->ring.map == NULL) {
    return true;
  }
  event_clear(attachment);
  return kvp_lane_prepare_sleep(&attachment->ring.completions);
}

static void attachment_disarm(kvpool_attachment *attachment) {
  if (attachment->ring.map != NULL) {
    kvp_lane_awake(&attachment->ring.completions);
  }
}

int kvpool_attachment_fd(kvpool_attachment *attachment) {
  assert(attachment != NULL);
  if (attachment->epoll < 0 && attachment->socket >= 0) {
    attachment->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (attachment->epoll >= 0) {
      epoll_watch(attachment, attachment->socket);
      if (attachment->completion_event >= 0) {
        epoll_watch(attachment, attachment->completion_event);
      }
    }
  }
  return attachment->epoll;
}

/* Until something happens, or the deadline. */
static void attachment_sleep(kvpool_attachment *attachment, uint64_t deadline_ns) {
  if (kvpool_attachment_arm(attachment)) {
    KVP_FAILPOINT("worker.sleeping");
    const uint64_t now = kvp_now_ns();
    const uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    const struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000), .tv_nsec = (long)(left % 1000000000)};
    struct pollfd waited[2] = {{.fd = attachment->socket, .events = POLLIN},
                               {.fd = attachment->completion_event, .events = POLLIN}};
    if (ppoll(waited, 2, &timeout, NULL) > 0 && waited[0].revents != 0) {
      kvp_attachment_look(attachment);
    }
  }
  attachment_disarm(attachment);
}

static kvpool_status attachment_wait_until(kvpool_attachment *attachment, uint64_t deadline_ns,
                                           const kvpool_completion **out, kvpool_error *error) {
  const uint64_t spin_until_ns = kvp_now_ns() + spin_before_sleep_ns;
  for (;;) {
    kvpool_status status = kvpool_attachment_poll(attachment, out, error);
    if (status != KVPOOL_OK || *out != NULL) {
      return status;
    }
    const uint64_t now = kvp_now_ns();
    if (now >= deadline_ns) {
      return KVPOOL_DEADLINE_EXCEEDED;
    }
    if (now >= spin_until_ns) {
      attachment_sleep(attachment, deadline_ns);
    }
  }
}

kvpool_status kvpool_attachment_wait(kvpool_attachment *attachment, uint32_t timeout_ms,
                                     const kvpool_completion **out, kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  kvpool_status status = attachment_wait_until(attachment, kvp_now_ns() + (uint64_t)timeout_ms * 1000000, out, error);
  if (status == KVPOOL_DEADLINE_EXCEEDED && attachment->state != KVP_ATTACHMENT_ENDED) {
    return kvp_fail(error, status, "no step of the %u that are not done had a word to say for %u ms",
                    attachment->outstanding_count, timeout_ms);
  }
  return status;
}

/* ---- post and wait ----------------------------------------------------------------------------------------------
 */

/* Takes the last word about a step out of what was kept; false: it isn't there. */
static bool held_find(kvpool_attachment *attachment, uint64_t step_id, const kvpool_completion **out,
                      kvpool_status *status, kvpool_error *error) {
  struct kvp_held *before = NULL;
  for (struct kvp_held *held = attachment->held_first; held != NULL; before = held, held = held->next) {
    if (held->record.tag != step_id || held->record.kind == KVP_COMPLETION_ACCEPTED) {
      continue;
    }
    /* To the front, from where it is taken like any other. */
    if (before != NULL) {
      before->next = held->next;
      if (attachment->held_last == held) {
        attachment->held_last = before;
      }
      held->next = attachment->held_first;
      attachment->held_first = held;
    }
    *status = held_take(attachment, out, error);
    return true;
  }
  return false;
}

/* The last word about one step; those about others are kept. */
static kvpool_status run_take(kvpool_attachment *attachment, uint64_t step_id, const kvpool_completion **out,
                              kvpool_error *error) {
  struct kvp_ring_record record;
  kvpool_status status = KVPOOL_OK;
  *out = NULL;
  if (held_find(attachment, step_id, out, &status, error)) {
    return status;
  }
  if (step_id <= attachment->lost_through) {
    attachment->completion = (kvpool_completion){.step_id = step_id, .error = &attachment->lost};
    outstanding_remove(attachment, step_id);
    *out = &attachment->completion;
    return KVPOOL_OK;
  }
  while (attachment->ring.map != NULL && *out == NULL && status == KVPOOL_OK) {
    enum kvp_lane_state state = kvp_lane_peek(&attachment->ring.completions, &record);
    if (state == KVP_LANE_EMPTY) {
      break;
    }
    if (state == KVP_LANE_RECORD && (record.tag != step_id || record.kind == KVP_COMPLETION_ACCEPTED)) {
      if (!hold_record(attachment, &record)) {
        return kvp_fail_no_memory(error);
      }
      kvp_lane_advance(&attachment->ring.completions, &record);
      continue;
    }
    kvpool_error local;
    status = ring_take(attachment, out, &local);
    if (status == KVPOOL_MALFORMED) {
      kvp_attachment_end(attachment, &local);
      status = KVPOOL_OK;
    } else if (status != KVPOOL_OK && error != NULL) {
      *error = local;
    }
  }
  return status;
}

static kvpool_status run_wait(kvpool_attachment *attachment, uint64_t step_id, uint64_t deadline_ns,
                              const kvpool_completion **out, kvpool_error *error) {
  const uint64_t spin_until_ns = kvp_now_ns() + spin_before_sleep_ns;
  for (;;) {
    kvpool_status status = run_take(attachment, step_id, out, error);
    if (status != KVPOOL_OK || *out != NULL) {
      return status;
    }
    const uint64_t now = kvp_now_ns();
    if (now >= deadline_ns) {
      return kvp_fail(error, KVPOOL_DEADLINE_EXCEEDED, "step %llu is not done after %u ms",
                      (unsigned long long)step_id, attachment->timeout_ms);
    }
    kvp_attachment_glance(attachment);
    if (now >= spin_until_ns && step_id > attachment->lost_through) {
      attachment_sleep(attachment, deadline_ns);
    }
  }
}

kvpool_status kvpool_attachment_run(kvpool_attachment *attachment, const kvpool_step *step,
                                    const kvpool_post_options *options, kvpool_op_report *reports,
                                    size_t report_count_max, kvpool_error *error) {
  uint64_t step_id;
  kvpool_status status = kvpool_attachment_post(attachment, step, options, &step_id, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const uint64_t patience_ms = (uint64_t)attachment->timeout_ms + (options == NULL ? 0 : options->deadline_ms);
  const kvpool_completion *completion;
  status = run_wait(attachment, step_id, kvp_now_ns() + patience_ms * 1000000, &completion, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (completion->error != NULL) {
    if (error != NULL) {
      *error = *completion->error;
    }
    return completion->error->status;
  }
  for (size_t i = 0; reports != NULL && i < completion->report_count && i < report_count_max; i++) {
    reports[i] = completion->reports[i];
  }
  return KVPOOL_OK;
}
