/* Buffers.
 *
 * Always holds: every buffer is in its session's list and charged to it (and to the ledger, unless it is a worker's GPU
 * memory) from the begin of its creation until its memory is given back. */
#include "server/supervisor/buffer.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/attach_wire.h"
#include "proto/failpoint.h"
#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/attachment.h"
#include "server/supervisor/daemon.h"

/* ---- the end ----------------------------------------------------------------------------------------------------
 */

static void session_unlink(struct kvp_buffer *buffer) {
  struct kvp_session *session = buffer->session;
  struct kvp_buffer **place = &session->buffers;
  while (*place != buffer) {
    place = &(*place)->next;
  }
  *place = buffer->next;
  session->buffer_count--;
  session->buffer_bytes -= buffer->charged_bytes > 0 ? buffer->bytes : 0;
  session->import_address_bytes -= buffer->address_bytes;
  buffer->device->import_address_bytes -= buffer->address_bytes;
}

static void buffer_free(struct kvp_buffer *buffer) {
  session_unlink(buffer);
  kvp_memory_destroy(buffer->memory);
  kvp_ledger_release(&buffer->device->ledger, KVP_LEDGER_BUFFER, buffer->charged_bytes);
  free(buffer);
}

static void buffer_detach(const struct kvp_buffer *buffer, kvp_link_result_fn result, void *context) {
  struct kvp_control_buffer body = {.buffer_id = buffer->id, .attachment_id = buffer->attachment_id};
  kvp_executor_link_request(buffer->device->link, KVP_CONTROL_BUFFER_DETACH, &body, sizeof body, NULL, 0, NULL,
                            result, context);
}

static void buffer_attach(const struct kvp_buffer *buffer, uint32_t flags, kvp_link_result_fn result, void *context) {
  struct kvp_control_buffer body = {.buffer_id = buffer->id,
                                    .memory_id = kvp_memory_id(buffer->memory),
                                    .bytes = buffer->bytes,
                                    .owner = buffer->session->slot,
                                    .flags = flags};
  kvp_executor_link_request(buffer->device->link, KVP_CONTROL_BUFFER_ATTACH, &body, sizeof body, NULL, 0, NULL,
                            result, context);
}

/* ---- create -----------------------------------------------------------------------------------------------------
 */

struct buffer_creation {
  struct kvp_daemon *daemon;
  struct kvp_buffer *buffer; /* NULL: refused at once */
  kvp_buffer_done_fn done;
  void *context;
  struct kvp_error error;
  struct kvp_deferred deferred;
};

static void creation_end(struct buffer_creation *creation, struct kvp_buffer *buffer, const struct kvp_error *error) {
  creation->done(creation->context, buffer, error);
  free(creation);
}

static void creation_fail(struct buffer_creation *creation, const struct kvp_error *error) {
  struct kvp_daemon *daemon = creation->daemon;
  struct kvp_session *session = creation->buffer->session;
  buffer_free(creation->buffer);
  uint16_t slot = session->slot;
  uint64_t id = session->id;
  creation_end(creation, NULL, error);
  if (daemon->sessions.slots[slot] == session && session->id == id) { /* else the callback has ended it */
    kvp_session_settle(daemon, session);
  }
}

/* False: it was released, with its session, before it was there. */
static bool creation_wanted(struct buffer_creation *creation) {
  if (!creation->buffer->releasing) {
    return true;
  }
  struct kvp_error error;
  (void)kvp_error_set(&error, KVP_CANCELLED, "the session was closed while its buffer was made");
  creation_fail(creation, &error);
  return false;
}

static void creation_attached(void *context, const struct kvp_error *error) {
  struct buffer_creation *creation = context;
  struct kvp_buffer *buffer = creation->buffer;
  if (error->status != KVP_OK) {
    creation_fail(creation, error);
    return;
  }
  if (buffer->releasing) {
    buffer_detach(buffer, NULL, NULL);
  }
  if (creation_wanted(creation)) {
    buffer->creating = false;
    creation_end(creation, buffer, NULL);
  }
}

static void creation_has_memory(void *context, const struct kvp_error *error) {
  struct buffer_creation *creation = context;
  struct kvp_error told = *error;
  if (error->status != KVP_OK) {
    kvp_device_explain_memory(creation->buffer->device, &told);
    creation_fail(creation, &told);
  } else if (creation_wanted(creation)) {
    buffer_attach(creation->buffer, 0, creation_attached, creation);
  }
}

static void creation_refused(void *context) {
  struct buffer_creation *creation = context;
  creation_end(creation, NULL, &creation->error);
}

/* What a buffer takes of its device. */
struct buffer_cost {
  uint64_t charged_bytes; /* of the ledger */
  uint64_t address_bytes;
};

static enum kvp_status session_check(const struct kvp_session *session, uint64_t bytes, struct kvp_error *error) {
  if (session->state != KVP_SESSION_OPEN) {
    return kvp_error_set(error, KVP_UNKNOWN_SESSION, "session %" PRIu64 " is closing", session->id);
  }
  if (bytes == 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "bytes", -1, 0, "a buffer of 0 bytes");
  }
  if (session->buffer_count >= kvp_buffers_per_session_max) {
    return kvp_error_set(error, KVP_QUOTA_EXCEEDED, "session %" PRIu64 " has %u buffers, %d are allowed", session->id,
                         session->buffer_count, kvp_buffers_per_session_max);
  }
  return KVP_OK;
}

/* *cost: what was taken, on success. */
static enum kvp_status buffer_charge(struct kvp_session *session, struct kvp_device *device, uint64_t bytes,
                                     struct buffer_cost *cost, struct kvp_error *error) {
  enum kvp_status status = session_check(session, bytes, error);
  if (status == KVP_OK) {
    status = kvp_device_check_serving(device, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  uint64_t taken = kvp_ledger_memory_bytes(&device->ledger, bytes);
  status = kvp_ledger_charge(&device->ledger, device->name, KVP_LEDGER_BUFFER, "a buffer", bytes, taken, error);
  if (status != KVP_OK) {
    return status;
  }
  status =
      kvp_fd_budget_charge(&device->daemon->fds, "a buffer", kvp_fd_budget_memory(bytes), KVP_QUOTA_EXCEEDED, error);
  if (status != KVP_OK) {
    kvp_ledger_release(&device->ledger, KVP_LEDGER_BUFFER, taken);
    return status;
  }
  *cost = (struct buffer_cost){.charged_bytes = taken};
  return KVP_OK;
}

/* The executor maps pages of a memfd that hold the buffer, and all of a GPU's allocation, each time; the driver maps what
 * an IPC handle stands for, once, so that there is no more of it than the GPU has. */
static struct buffer_cost import_cost_of(const struct kvp_device *device, const struct kvp_control_open *open) {
  const uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
  const bool on_gpu = (kvp_executor_link_info(device->link)->flags & KVP_READY_DEVICE_FDS) != 0;
  if (on_gpu) {
    return (struct buffer_cost){.address_bytes = open->kind == KVP_IMPORT_VMM ? open->allocation_bytes : 0};
  }
  if (open->kind != KVP_IMPORT_MEMFD) {
    return (struct buffer_cost){0}; /* which the executor refuses */
  }
  const uint64_t first = open->offset_bytes / page_bytes;
  const uint64_t last = (open->offset_bytes + open->bytes - 1) / page_bytes;
  return (struct buffer_cost){.charged_bytes = (last - first + 1) * page_bytes};
}

static enum kvp_status addresses_check(const struct kvp_session *session, const struct kvp_device *device,
                                       uint64_t bytes, struct kvp_error *error) {
  const uint64_t per_session = (uint64_t)kvp_import_address_gib_per_session_max << 30;
  const uint64_t per_device = (uint64_t)kvp_import_address_gib_per_device_max << 30;
  if (bytes > per_session - session->import_address_bytes) {
    return kvp_error_set(error, KVP_QUOTA_EXCEEDED,
                         "session %" PRIu64 " has workers' allocations of %" PRIu64 " bytes mapped, %" PRIu64
                         " more than %" PRIu64 " are too many",
                         session->id, session->import_address_bytes, bytes, per_session);
  }
  if (bytes > per_device - device->import_address_bytes) {
    return kvp_error_set(error, KVP_BUSY,
                         "%s has workers' allocations of %" PRIu64 " bytes mapped, %" PRIu64 " more than %" PRIu64
                         " are too many",
                         device->name, device->import_address_bytes, bytes, per_device);
  }
  return KVP_OK;
}

static enum kvp_status import_charge(struct kvp_session *session, struct kvp_device *device,
                                     const struct kvp_control_open *open, struct buffer_cost *cost,
                                     struct kvp_error *error) {
  enum kvp_status status = session_check(session, open->bytes, error);
  if (status == KVP_OK) {
    status = kvp_device_check_serving(device, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  const struct buffer_cost asked = import_cost_of(device, open);
  status = addresses_check(session, device, asked.address_bytes, error);
  if (status == KVP_OK) {
    status = kvp_ledger_charge(&device->ledger, device->name, KVP_LEDGER_BUFFER, "a worker's memory",
                               asked.charged_bytes, asked.charged_bytes, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  status =
      kvp_fd_budget_charge(&device->daemon->fds, "a worker's memory", kvp_memory_open_fds, KVP_QUOTA_EXCEEDED, error);
  if (status != KVP_OK) {
    kvp_ledger_release(&device->ledger, KVP_LEDGER_BUFFER, asked.charged_bytes);
    return status;
  }
  *cost = asked;
  return KVP_OK;
}

static struct buffer_creation *creation_new(struct kvp_daemon *daemon, kvp_buffer_done_fn done, void *context) {
  struct buffer_creation *creation = kvp_allocate(1, sizeof *creation);
  creation->daemon = daemon;
  creation->done = done;
  creation->context = context;
  return creation;
}

static struct kvp_buffer *buffer_new(struct kvp_daemon *daemon, struct kvp_session *session,
                                     struct kvp_device *device, uint64_t bytes, const struct buffer_cost *cost) {
  struct kvp_buffer *buffer = kvp_allocate(1, sizeof *buffer);
  buffer->id = ++daemon->next_buffer_id;
  buffer->session = session;
  buffer->device = device;
  buffer->bytes = bytes;
  buffer->charged_bytes = cost->charged_bytes;
  buffer->address_bytes = cost->address_bytes;
  buffer->creating = true;
  buffer->next = session->buffers;
  session->buffers = buffer;
  session->buffer_count++;
  session->buffer_bytes += cost->charged_bytes > 0 ? bytes : 0;
  session->import_address_bytes += cost->address_bytes;
  device->import_address_bytes += cost->address_bytes;
  return buffer;
}

void kvp_buffer_create(struct kvp_daemon *daemon, struct kvp_session *session, struct kvp_device *device,
                       uint64_t bytes, kvp_buffer_done_fn done, void *context) {
  struct buffer_creation *creation = creation_new(daemon, done, context);
  struct buffer_cost cost;
  if (buffer_charge(session, device, bytes, &cost, &creation->error) != KVP_OK) {
    kvp_deferred_call(daemon->loop, &creation->deferred, creation_refused, creation);
    return;
  }
  struct kvp_buffer *buffer = buffer_new(daemon, session, device, bytes, &cost);
  creation->buffer = buffer;
  char name[kvp_name_bytes_max];
  (void)snprintf(name, sizeof name, "kvpool-buffer:%" PRIu64, buffer->id);
  kvp_memory_create(device->link, &daemon->fds, ++daemon->next_memory_id, name, bytes, creation_has_memory, creation,
                    &buffer->memory);
}

void kvp_buffer_import(struct kvp_daemon *daemon, struct kvp_session *session, struct kvp_device *device,
                       const struct kvp_control_open *open, int fd, kvp_buffer_done_fn done, void *context) {
  struct buffer_creation *creation = creation_new(daemon, done, context);
  struct buffer_cost cost;
  if (import_charge(session, device, open, &cost, &creation->error) != KVP_OK) {
    if (fd >= 0) {
      (void)close(fd);
    }
    kvp_deferred_call(daemon->loop, &creation->deferred, creation_refused, creation);
    return;
  }
  struct kvp_buffer *buffer = buffer_new(daemon, session, device, open->bytes, &cost);
  buffer->imported = true;
  creation->buffer = buffer;
  kvp_memory_open(device->link, &daemon->fds, ++daemon->next_memory_id, open, fd, creation_has_memory, creation,
                  &buffer->memory);
}

struct kvp_buffer *kvp_buffer_find(struct kvp_session *session, uint64_t buffer_id, struct kvp_error *error) {
  for (struct kvp_buffer *buffer = session->buffers; buffer != NULL; buffer = buffer->next) {
    if (buffer->id == buffer_id && !buffer->creating && !buffer->releasing) {
      return buffer;
    }
  }
  (void)kvp_error_set_at(error, KVP_UNKNOWN_BUFFER, -1, "buffer_id", -1, (int64_t)buffer_id,
                         "session %" PRIu64 " has no buffer %" PRIu64, session->id, buffer_id);
  return NULL;
}

/* ---- release ----------------------------------------------------------------------------------------------------
 */

/* Its session may be gone afterwards. */
static void buffer_gone(struct kvp_buffer *buffer) {
  struct kvp_attachment *attachment = buffer->attachment;
  struct kvp_session *session = buffer->session;
  struct kvp_daemon *daemon = buffer->device->daemon;
  uint64_t id = buffer->id;
  buffer_free(buffer);
  if (attachment != NULL) {
    kvp_attachment_buffer_gone(attachment, id); /* whose own end settles the session */
  } else {
    kvp_session_settle(daemon, session);
  }
}

static void buffer_closed(void *context, const struct kvp_error *error) {
  (void)error;
  buffer_gone(context);
}

static void buffer_detached(void *context, const struct kvp_error *error) {
  (void)error; /* an executor that died has none any more */
  struct kvp_buffer *buffer = context;
  if (buffer->imported) {
    kvp_memory_close(buffer->memory, buffer_closed, buffer);
  } else {
    buffer_gone(buffer);
  }
}

/* No step of ours uses it. Workers' steps may: then the executor answers when they have ended. A worker's memory is its
 * own again, to be freed, when it is told that the buffer is gone: so the executor has let go of it before. */
static void buffer_part(struct kvp_buffer *buffer) {
  buffer->parting = true;
  KVP_FAILPOINT("daemon.buffer_parting");
  if (buffer->imported || buffer->device->rings > 0) {
    buffer_detach(buffer, buffer_detached, buffer);
  } else {
    buffer_detach(buffer, NULL, NULL);
    buffer_gone(buffer);
  }
}

void kvp_buffer_release(struct kvp_daemon *daemon, struct kvp_buffer *buffer) {
  assert(!buffer->releasing);
  buffer->releasing = true;
  buffer->release_fence = daemon->step_sequence;
  if (buffer->creating) {
    return; /* the end of its creation sees it */
  }
  if (kvp_step_retired_fence(daemon) >= buffer->release_fence) {
    buffer_part(buffer);
    return;
  }
  struct kvp_buffer_releases *releases = &daemon->buffer_releases;
  if (releases->last == NULL) {
    releases->first = buffer;
  } else {
    releases->last->next_releasing = buffer;
  }
  releases->last = buffer;
}

void kvp_buffer_release_all(struct kvp_daemon *daemon, struct kvp_session *session) {
  struct kvp_buffer *next = NULL;
  for (struct kvp_buffer *buffer = session->buffers; buffer != NULL; buffer = next) {
    next = buffer->next;
    if (!buffer->releasing) {
      kvp_buffer_release(daemon, buffer);
    }
  }
}

void kvp_buffer_reach_all(struct kvp_daemon *daemon, uint64_t fence) {
  struct kvp_buffer_releases *releases = &daemon->buffer_releases;
  while (releases->first != NULL && releases->first->release_fence <= fence) {
    struct kvp_buffer *buffer = releases->first;
    releases->first = buffer->next_releasing;
    if (releases->first == NULL) {
      releases->last = NULL;
    }
    buffer_part(buffer);
  }
}

/* ---- restore ----------------------------------------------------------------------------------------------------
 */

struct buffer_restore {
  kvp_memory_done_fn done;
  void *context;
  struct kvp_daemon *daemon;
  const char *device;
  uint32_t pending;
  struct kvp_error error; /* device_lost, or OK: a buffer that can't be imported is lost by itself */
  struct kvp_deferred deferred;
};

struct buffer_restore_item {
  struct buffer_restore *restore;
  uint64_t buffer_id;
};

static void restore_end(void *context) {
  struct buffer_restore *restore = context;
  restore->done(restore->context, &restore->error);
  free(restore);
}

/* It may have gone while the executor was asked. */
static struct kvp_buffer *buffer_of_any_session(struct kvp_daemon *daemon, uint64_t id) {
  for (uint32_t slot = 1; slot <= kvp_sessions_max; slot++) {
    const struct kvp_session *session = daemon->sessions.slots[slot];
    for (struct kvp_buffer *buffer = session == NULL ? NULL : session->buffers; buffer != NULL;
         buffer = buffer->next) {
      if (buffer->id == id) {
        return buffer;
      }
    }
  }
  return NULL;
}

static void buffer_lose(struct buffer_restore *restore, uint64_t id, const struct kvp_error *error) {
  struct kvp_buffer *buffer = buffer_of_any_session(restore->daemon, id);
  if (buffer == NULL || buffer->releasing) {
    return;
  }
  const char *failure = kvp_memory_failure(buffer->memory);
  kvp_log(KVP_LOG_ERROR, "buffer_lost",
          "device=%s session=%" PRIu64 " buffer=%" PRIu64 " bytes=%" PRIu64 " text=\"%s\"", restore->device,
          buffer->session->id, id, buffer->bytes, failure == NULL ? error->text : failure);
  buffer_attach(buffer, KVP_BUFFER_LOST, NULL, NULL);
}

static void restore_attached(void *context, const struct kvp_error *error) {
  struct buffer_restore_item *item = context;
  struct buffer_restore *restore = item->restore;
  if (error->status == KVP_DEVICE_LOST) {
    restore->error = *error;
  } else if (error->status != KVP_OK) {
    buffer_lose(restore, item->buffer_id, error);
  }
  free(item);
  if (--restore->pending == 0) {
    restore_end(restore);
  }
}

/* Import and attach go out together: the executor handles them in order, and a failed import fails the attach. */
static void buffer_restore(struct kvp_buffer *buffer, struct buffer_restore *restore) {
  struct buffer_restore_item *item = kvp_allocate(1, sizeof *item);
  item->restore = restore;
  item->buffer_id = buffer->id;
  restore->pending++;
  kvp_memory_restore(buffer->memory, NULL, NULL);
  buffer_attach(buffer, 0, restore_attached, item);
}

void kvp_buffer_restore_all(struct kvp_daemon *daemon, struct kvp_device *device, kvp_memory_done_fn done,
                            void *context) {
  struct buffer_restore *restore = kvp_allocate(1, sizeof *restore);
  restore->done = done;
  restore->context = context;
  restore->daemon = daemon;
  restore->device = device->name;
  for (uint32_t slot = 1; slot <= kvp_sessions_max; slot++) {
    const struct kvp_session *session = daemon->sessions.slots[slot];
    for (struct kvp_buffer *buffer = session == NULL ? NULL : session->buffers; buffer != NULL;
         buffer = buffer->next) {
      if (buffer->device == device && !buffer->creating && !buffer->parting) {
        buffer_restore(buffer, restore);
      }
    }
  }
  if (restore->pending == 0) {
    kvp_deferred_call(daemon->loop, &restore->deferred, restore_end, restore);
  }
}
