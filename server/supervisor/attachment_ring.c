/* An attachment's ring: made on a thread, given to the executor, told to the worker, and given back on a thread. Loop
 * thread only, but for what says that it isn't.
 *
 * A ring is 12 MiB of memory that the kernel clears when it is made and takes back when the last descriptor of it is
 * closed: milliseconds, in which nobody else would be served, as often as somebody likes to attach. So libuv's threads do
 * both. Meanwhile `ring_at_work` keeps the attachment, whose worker, session or executor may go; the thread sees nothing
 * of it.
 */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/failpoint.h"
#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/attachment_internal.h"
#include "server/supervisor/daemon.h"

static const uint64_t ns_per_ms = 1000000;

/* ---- threads ----------------------------------------------------------------------------------------------------
 */

struct ring_work {
  uv_work_t request;
  struct kvp_attachment *attachment; /* the loop thread's */
  uint64_t generation;
  struct kvp_attach_ring ring;
  struct kvp_error error; /* status KVP_OK: the ring is made */
};

static void work_begin(struct kvp_attachment *attachment, struct ring_work *work, uv_work_cb run,
                       uv_after_work_cb done) {
  work->attachment = attachment;
  work->request.data = work;
  attachment->ring_at_work = true;
  int result = uv_queue_work(attachment->daemon->loop, &work->request, run, done);
  assert(result == 0); /* it fails without a function to call, and only then */
  (void)result;
}

/* On a thread. */
static void make_run(uv_work_t *request) {
  struct ring_work *work = request->data;
  (void)kvp_attach_ring_init(&work->ring, work->generation, &work->error);
}

/* On a thread. */
static void unmake_run(uv_work_t *request) {
  struct ring_work *work = request->data;
  kvp_attach_ring_deinit(&work->ring);
}

/* ---- executor, worker -------------------------------------------------------------------------------------------
 */

static void fill_welcome(const struct kvp_attachment *attachment, struct kvp_attach_welcome *out) {
  const struct kvp_daemon *daemon = attachment->daemon;
  const struct kvp_device *device = attachment->device;
  const struct kvp_control_ready *ready = kvp_executor_link_info(device->link);
  memset(out, 0, sizeof *out);
  out->version = KVP_ATTACH_VERSION;
  out->flags |= (ready->flags & KVP_READY_MPS) != 0 ? (uint32_t)KVP_ATTACH_MPS : 0U;
  out->flags |= (ready->flags & KVP_READY_DEVICE_FDS) != 0 ? (uint32_t)KVP_ATTACH_DEVICE_FDS : 0U;
  out->attachment_id = attachment->id;
  out->generation = attachment->ring.status_page->generation;
  out->epoch = daemon->epoch;
  out->deadline_ns_max = daemon->config->wait_deadline_max_ms * ns_per_ms;
  out->memory_granularity_bytes = ready->memory_granularity_bytes;
  memcpy(out->device, device->name, sizeof out->device);
  memcpy(out->uuid, ready->uuid, sizeof out->uuid);
}

static void welcome(struct kvp_attachment *attachment) {
  bool first = attachment->state == KVP_ATTACHMENT_ATTACHING;
  struct kvp_attach_welcome body;
  int fds[kvp_attach_fd_count];
  fill_welcome(attachment, &body);
  kvp_attach_ring_worker_fds(&attachment->ring, fds);
  attachment->state = KVP_ATTACHMENT_SERVING;
  kvp_log(first ? KVP_LOG_INFO : KVP_LOG_DEBUG, first ? "attached" : "attached_again",
          "attachment=%" PRIu64 " session=%" PRIu64 " device=%s pid=%d uid=%u generation=%" PRIu64, attachment->id,
          attachment->session->id, attachment->device->name, (int)attachment->peer.pid,
          (unsigned)attachment->peer.uid, body.generation);
  kvp_attach_channel_send(&attachment->channel, first ? KVP_ATTACH_ATTACHED : KVP_ATTACH_DEVICE_RESTORED,
                          first ? attachment->hello_request : 0, &body, sizeof body, fds, kvp_attach_fd_count);
  kvp_attach_ring_shared(&attachment->ring);
  KVP_FAILPOINT("daemon.attach_welcomed");
  kvp_attachment_look(attachment);
}

static void on_ring_attached(void *context, const struct kvp_error *error) {
  struct kvp_attachment *attachment = context;
  attachment->answers_owed--;
  if (error->status != KVP_OK) {
    kvp_attachment_forget_ring(attachment);
  }
  if (attachment->state == KVP_ATTACHMENT_ENDING) {
    kvp_attachment_settle(attachment);
  } else if (error->status == KVP_OK) {
    welcome(attachment);
  } else if (attachment->state == KVP_ATTACHMENT_LOST && error->status == KVP_DEVICE_LOST) {
    kvp_attach_ring_deinit(&attachment->ring); /* it was never handed out; the next executor gets another */
  } else {
    kvp_attachment_end(attachment, error);
  }
}

static void give_to_executor(struct kvp_attachment *attachment) {
  struct kvp_device *device = attachment->device;
  const struct kvp_control_ring body = {.attachment_id = attachment->id,
                                        .deadline_ns_max =
                                            attachment->daemon->config->wait_deadline_max_ms * ns_per_ms,
                                        .owner = attachment->session->slot,
                                        .queue = attachment->queue};
  int fds[kvp_control_ring_fd_count];
  kvp_attach_ring_executor_fds(&attachment->ring, fds);
  attachment->ring_known = true;
  device->rings++;
  attachment->answers_owed++;
  kvp_executor_link_request(device->link, KVP_CONTROL_RING_ATTACH, &body, sizeof body, fds, kvp_control_ring_fd_count,
                            NULL, on_ring_attached, attachment);
  KVP_FAILPOINT("daemon.ring_made");
}

/* ---- made, unmade -----------------------------------------------------------------------------------------------
 */

static uint64_t generation_of(const struct kvp_device *device) {
  return kvp_executor_link_restarts(device->link) + 1;
}

/* Its executor died while it was made, or another one serves already. */
static void ring_is_late(struct kvp_attachment *attachment) {
  struct kvp_error error;
  if (kvp_device_check_serving(attachment->device, &error) == KVP_OK) {
    kvp_attachment_make_ring(attachment);
  } else if (attachment->state != KVP_ATTACHMENT_LOST || error.status == KVP_SHUTTING_DOWN) {
    kvp_attachment_end(attachment, &error);
  } /* else the next executor gets one */
}

static void make_done(uv_work_t *request, int status) {
  (void)status; /* nothing is ever cancelled */
  struct ring_work *work = request->data;
  struct kvp_attachment *attachment = work->attachment;
  const struct kvp_device *device = attachment->device;
  struct kvp_error error;
  attachment->ring_at_work = false;
  const bool is_made = work->ring.there;
  const bool is_wanted = is_made && attachment->state != KVP_ATTACHMENT_ENDING &&
                         work->generation == generation_of(device) &&
                         kvp_device_check_serving(device, &error) == KVP_OK;
  if (is_wanted || (is_made && !attachment->ring.there)) { /* one that isn't wanted goes as every other */
    kvp_attach_ring_deinit(&attachment->ring);
    attachment->ring = work->ring;
  } else if (is_made) {
    kvp_attach_ring_deinit(&work->ring);
  }
  if (attachment->state == KVP_ATTACHMENT_ENDING) {
    kvp_attachment_settle(attachment);
  } else if (!is_made) {
    kvp_attachment_end(attachment, &work->error);
  } else if (is_wanted) {
    give_to_executor(attachment);
  } else {
    ring_is_late(attachment);
  }
  free(work);
}

void kvp_attachment_make_ring(struct kvp_attachment *attachment) {
  assert(!attachment->ring_at_work);
  struct ring_work *work = kvp_allocate(1, sizeof *work);
  work->generation = generation_of(attachment->device);
  work_begin(attachment, work, make_run, make_done);
}

static void unmake_done(uv_work_t *request, int status) {
  (void)status;
  struct ring_work *work = request->data;
  struct kvp_attachment *attachment = work->attachment;
  free(work);
  attachment->ring_at_work = false;
  kvp_attachment_settle(attachment);
}

void kvp_attachment_unmake_ring(struct kvp_attachment *attachment) {
  assert(!attachment->ring_at_work && attachment->answers_owed == 0);
  struct ring_work *work = kvp_allocate(1, sizeof *work);
  work->ring = attachment->ring;
  memset(&attachment->ring, 0, sizeof attachment->ring);
  work_begin(attachment, work, unmake_run, unmake_done);
}
