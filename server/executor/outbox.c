/* Posting of completions. */
#include "server/executor/outbox.h"

#include <assert.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

/* Never waits: a socket that is full has something to read. */
static void reader_wake(const struct kvp_outbox *outbox) {
  const uint64_t one = 1;
  if (outbox->wakes_by_socket) {
    (void)send(outbox->wake_fd, &one, sizeof one, MSG_DONTWAIT | MSG_NOSIGNAL);
  } else {
    (void)eventfd_write(outbox->wake_fd, one);
  }
}

static void publish(struct kvp_outbox *outbox, uint32_t kind, uint64_t tag, uint32_t payload_bytes) {
  if (kvp_lane_publish(outbox->lane, kind, tag, payload_bytes)) {
    reader_wake(outbox);
  }
}

static bool error_post(struct kvp_outbox *outbox, uint32_t kind, const struct kvp_step *step) {
  void *payload = kvp_lane_reserve(outbox->lane, sizeof step->error);
  if (payload == NULL) {
    return false;
  }
  memcpy(payload, &step->error, sizeof step->error);
  publish(outbox, kind, step->tag, sizeof step->error);
  return true;
}

static bool empty_post(struct kvp_outbox *outbox, uint32_t kind, const struct kvp_step *step) {
  if (kvp_lane_reserve(outbox->lane, 0) == NULL) {
    return false;
  }
  publish(outbox, kind, step->tag, 0);
  return true;
}

static bool done_post(struct kvp_outbox *outbox, const struct kvp_step *step) {
  const uint32_t bytes = kvp_step_report_bytes(step);
  uint8_t *payload = kvp_lane_reserve(outbox->lane, bytes);
  if (payload == NULL) {
    return false;
  }
  kvp_step_report_write(step, payload);
  publish(outbox, KVP_COMPLETION_DONE, step->tag, bytes);
  return true;
}

static void keep(struct kvp_outbox *outbox, struct kvp_step *step) {
  step->posting = true;
  step->next_posting = NULL;
  if (outbox->first == NULL) {
    outbox->first = step;
  } else {
    outbox->last->next_posting = step;
  }
  outbox->last = step;
}

static bool last_post(struct kvp_outbox *outbox, struct kvp_step *step) {
  if (step->is_fence) {
    return empty_post(outbox, KVP_COMPLETION_FENCED, step);
  }
  if (!step->accepted) {
    return error_post(outbox, KVP_COMPLETION_REFUSED, step);
  }
  return step->is_failed ? error_post(outbox, KVP_COMPLETION_FAILED, step) : done_post(outbox, step);
}

/* The step's next message. False: no room. True: it is posted, and the step is destroyed if it was the last. */
static bool step_post(struct kvp_outbox *outbox, struct kvp_step *step) {
  if (step->accepted && !step->acceptance_posted) {
    step->acceptance_posted = empty_post(outbox, KVP_COMPLETION_ACCEPTED, step);
    return step->acceptance_posted;
  }
  if (!last_post(outbox, step)) {
    return false;
  }
  kvp_step_destroy(outbox->steps, step);
  return true;
}

void kvp_outbox_checked(struct kvp_outbox *outbox, struct kvp_step *step) {
  assert(!outbox->is_closed); /* nothing is taken either */
  if (step->accepted && !step->tells_acceptance) {
    step->acceptance_posted = true;
    return;
  }
  if (outbox->first != NULL || !step_post(outbox, step)) {
    keep(outbox, step);
  }
}

void kvp_outbox_finished(struct kvp_outbox *outbox, struct kvp_step *step) {
  step->finished = true;
  if (outbox->is_closed) {
    kvp_step_destroy(outbox->steps, step);
    return;
  }
  if (step->posting) {
    return; /* its ACCEPTED comes first; flush goes on with it */
  }
  assert(step->acceptance_posted || step->is_fence);
  if (outbox->first != NULL || !step_post(outbox, step)) {
    keep(outbox, step);
  }
}

bool kvp_outbox_flush(struct kvp_outbox *outbox) {
  bool any = false;
  while (outbox->first != NULL) {
    struct kvp_step *step = outbox->first;
    struct kvp_step *next = step->next_posting;
    const bool was_acceptance = step->accepted && !step->acceptance_posted;
    if (!step_post(outbox, step)) {
      break;
    }
    any = true;
    outbox->first = next;
    if (was_acceptance) {
      step->posting = false;
      if (step->finished) {
        keep(outbox, step);
      }
    }
  }
  return any;
}

void kvp_outbox_close(struct kvp_outbox *outbox) {
  outbox->is_closed = true;
  while (outbox->first != NULL) {
    struct kvp_step *step = outbox->first;
    outbox->first = step->next_posting;
    step->posting = false;
    if (step->finished || !step->accepted) {
      kvp_step_destroy(outbox->steps, step);
    }
  }
}

void kvp_outbox_drop(struct kvp_outbox *outbox) {
  while (outbox->first != NULL) {
    struct kvp_step *step = outbox->first;
    outbox->first = step->next_posting;
    kvp_step_destroy(outbox->steps, step);
  }
}
