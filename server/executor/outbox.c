/* Posting of completions. */
#include "server/executor/outbox.h"

#include <assert.h>
#include <string.h>
#include <sys/eventfd.h>

static void publish(struct kvp_outbox *outbox, uint32_t kind, uint64_t tag, uint32_t payload_bytes) {
  if (kvp_lane_publish(outbox->lane, kind, tag, payload_bytes)) {
    (void)eventfd_write(outbox->wake_fd, 1);
  }
}

/* REFUSED, or FAILED. */
static bool error_post(struct kvp_outbox *outbox, const struct kvp_step *step, uint32_t kind) {
  void *payload = kvp_lane_reserve(outbox->lane, sizeof step->error);
  if (payload == NULL) {
    return false;
  }
  memcpy(payload, &step->error, sizeof step->error);
  publish(outbox, kind, step->tag, sizeof step->error);
  return true;
}

static bool accepted_post(struct kvp_outbox *outbox, const struct kvp_step *step) {
  if (kvp_lane_reserve(outbox->lane, 0) == NULL) {
    return false;
  }
  publish(outbox, KVP_COMPLETION_ACCEPTED, step->tag, 0);
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

/* The step's next message. False: no room. True: it is posted, and the step is destroyed if it was the last. */
static bool step_post(struct kvp_outbox *outbox, struct kvp_step *step) {
  if (step->accepted && !step->acceptance_posted) {
    step->acceptance_posted = accepted_post(outbox, step);
    return step->acceptance_posted;
  }
  bool posted = false;
  if (!step->accepted) {
    posted = error_post(outbox, step, KVP_COMPLETION_REFUSED);
  } else if (step->error.status != KVP_OK) {
    posted = error_post(outbox, step, KVP_COMPLETION_FAILED);
  } else {
    posted = done_post(outbox, step);
  }
  if (!posted) {
    return false;
  }
  kvp_step_destroy(outbox->steps, step);
  return true;
}

void kvp_outbox_checked(struct kvp_outbox *outbox, struct kvp_step *step) {
  if (outbox->first != NULL || !step_post(outbox, step)) {
    keep(outbox, step);
  }
}

void kvp_outbox_finished(struct kvp_outbox *outbox, struct kvp_step *step) {
  step->finished = true;
  if (step->posting) {
    return; /* its ACCEPTED comes first; flush goes on with it */
  }
  assert(step->acceptance_posted);
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

void kvp_outbox_drop(struct kvp_outbox *outbox) {
  while (outbox->first != NULL) {
    struct kvp_step *step = outbox->first;
    outbox->first = step->next_posting;
    kvp_step_destroy(outbox->steps, step);
  }
}
