/* Buffers: device memory of one session that sources, outputs and arrays lie in. The daemon made it, or a worker
 * brought it. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_BUFFER_H
#define KVPOOL_SUPERVISOR_BUFFER_H

#include <stdbool.h>
#include <stdint.h>

#include "server/supervisor/memory.h"

struct kvp_attachment;
struct kvp_daemon;
struct kvp_device;
struct kvp_session;

struct kvp_buffer {
  uint64_t id; /* never used twice */
  struct kvp_session *session;
  struct kvp_device *device;
  struct kvp_memory *memory;
  struct kvp_attachment *attachment; /* that made it, and whose end is its own; NULL: none did */
  uint64_t attachment_id;            /* its number, which outlives it; 0: none did */
  bool imported;                     /* a worker's memory */
  uint64_t bytes;                    /* as asked for */
  uint64_t charged_bytes; /* of the device's ledger: bytes or more; 0: a GPU's memory that a worker brought */
  uint64_t address_bytes; /* of the executor's address space, that such memory takes */
  bool creating;          /* the caller has not been told yet; can't be found */
  bool releasing;         /* hidden; goes when `release_fence` is reached */
  bool parting;           /* the executor is told that it goes; a successor isn't told of it any more */
  uint64_t release_fence;
  struct kvp_buffer *next;           /* of the session */
  struct kvp_buffer *next_releasing; /* of the daemon */
};

/* Buffers that wait for their fence, in its order. */
struct kvp_buffer_releases {
  struct kvp_buffer *first;
  struct kvp_buffer *last;
};

/* buffer NULL on an error. */
typedef void (*kvp_buffer_done_fn)(void *context, struct kvp_buffer *buffer, const struct kvp_error *error);

/* Charges ledger, quota and descriptors, has the executor make it, zero-filled. done once, later; buffer NULL on an
 * error. */
void kvp_buffer_create(struct kvp_daemon *daemon, struct kvp_session *session, struct kvp_device *device,
                       uint64_t bytes, kvp_buffer_done_fn done, void *context);
/* The same for memory that a worker brought, as *open says; takes over fd (-1: there is none). Host memory is charged
 * like the daemon's own, by the pages that are mapped of it: a hole's come when a step touches them, and are ours then. A
 * GPU's is its worker's, who has it already; what is bounded of it is the addresses that it is mapped at. */
void kvp_buffer_import(struct kvp_daemon *daemon, struct kvp_session *session, struct kvp_device *device,
                       const struct kvp_control_open *open, int fd, kvp_buffer_done_fn done, void *context);
struct kvp_buffer *kvp_buffer_find(struct kvp_session *session, uint64_t buffer_id, struct kvp_error *error);
/* Hidden at once; its memory goes when every step submitted so far has retired and no step of a worker's ring uses
 * it. */
void kvp_buffer_release(struct kvp_daemon *daemon, struct kvp_buffer *buffer);
/* The caller settles the session afterwards. Creations under way end with cancelled. */
void kvp_buffer_release_all(struct kvp_daemon *daemon, struct kvp_session *session);
/* Fences have been reached up to `fence`. */
void kvp_buffer_reach_all(struct kvp_daemon *daemon, uint64_t fence);
/* A new executor of this device: import and attach every buffer there. One whose memory can't be had again is lost, by
 * itself: steps that name it are refused, and say so. */
void kvp_buffer_restore_all(struct kvp_daemon *daemon, struct kvp_device *device, kvp_memory_done_fn done,
                            void *context);

#endif
