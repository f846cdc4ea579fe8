/* Steps in the supervisor: from acceptance of the request to the last word about it. Loop thread only.
 *
 * A step is encoded (step_encode.h) into memory of its own, given a number of the daemon's step_sequence and put at
 * the end of its device's list; it is posted into the ring as soon as the executor serves and the lane has room, in
 * the order of arrival. The encoded copy stays until the step retires, so that the blocks a lost step may have torn
 * can be told. Retired: refused, done, failed, lost or dropped. Steps of one queue run in order.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_H
#define KVPOOL_SUPERVISOR_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/ring.h"
#include "proto/step_wire.h"
#include "server/supervisor/step_fence.h"

struct kvp_daemon;
struct kvp_device;
struct kvp_session;
struct kvp_pool;
struct kvp_step;
struct kvp_step_slots;
struct kvp_step_queues;

struct kvp_torn_blocks {
  uint64_t pool_id;
  const int32_t *blocks; /* ascending, each once */
  uint32_t count;
};

struct kvp_step_result {
  const struct kvp_error *error;         /* NULL: done */
  bool refused;                          /* with an error: nothing ran */
  const struct kvp_wire_report *reports; /* [report_count], done only */
  uint32_t report_count;
  const uint8_t *bytes; /* result bytes of a reading op */
  size_t byte_count;
  const struct kvp_torn_blocks *torn; /* [torn_count], with device_lost only */
  uint32_t torn_count;
};

struct kvp_step_events {
  void (*accepted)(void *context, uint64_t tag);                                       /* NULL: not wanted */
  void (*finished)(void *context, uint64_t tag, const struct kvp_step_result *result); /* once, last */
};

/* The steps of one device, in order of arrival. */
struct kvp_step_table {
  struct kvp_step *first; /* the oldest that has not retired; those in the ring, then those waiting */
  struct kvp_step *last;
  struct kvp_step *next_to_post; /* the first that waits */
  uint32_t count;
  uint64_t done_count;
  bool retired; /* some have, since the daemon was told */
  struct kvp_step_fences fences;
  struct kvp_step_slots *slots;   /* who is in the ring; made with the first step */
  struct kvp_step_queues *queues; /* made with the first queue */
};

/* Memory for a step of so many encoded bytes, uninitialized; NULL when there is none. Goes to kvp_step_submit or
 * kvp_step_free. */
struct kvp_wire_step *kvp_step_alloc(uint32_t bytes);
void kvp_step_free(struct kvp_wire_step *encoded); /* NULL is allowed */

/* Takes over `encoded` (of kvp_step_alloc; complete, its queue and owner set). session NULL: the daemon's own. pools:
 * the pools its ops use, each once, for their in-flight counts. Refused at once (encoded is freed, no callback): busy
 * - limits of the session; unknown_session - it is closing; shutting_down. Otherwise finished is called once, later.
 */
enum kvp_status kvp_step_submit(struct kvp_device *device, struct kvp_session *session, struct kvp_wire_step *encoded,
                                struct kvp_pool *const *pools, uint32_t pool_count,
                                const struct kvp_step_events *events, void *context, uint64_t tag,
                                struct kvp_error *error);
/* The caller of these steps is gone: their events are not called any more; steps not posted yet are dropped. */
void kvp_step_abandon(struct kvp_device *device, void *context);

/* Drops the steps of a closing session that have not been posted; they end with cancelled. The caller settles it. */
void kvp_step_drop_session(struct kvp_daemon *daemon, struct kvp_session *session);

/* From the device's link events. A burst of completions, and device_lost too, ends with kvp_step_post_waiting (the
 * link's `progress`): it posts what waits and tells the daemon what has retired. */
void kvp_step_completion(struct kvp_device *device, const struct kvp_ring_record *record, const uint8_t *payload);
void kvp_step_device_lost(struct kvp_device *device);
void kvp_step_post_waiting(struct kvp_device *device);

/* The largest number such that every step of every device up to it has retired. */
uint64_t kvp_step_retired_fence(const struct kvp_daemon *daemon);
/* And every fence of this owner, a session's slot or kvp_lease_owner_nobody. context: the daemon; a
 * kvp_lease_retired_fn. */
uint64_t kvp_step_retired_of(const void *context, uint16_t owner);
/* Ends everything not posted with *error: at shutdown, and when its device waits for too long. */
void kvp_step_drop_waiting(struct kvp_device *device, const struct kvp_error *error);
/* Frees the table's memory. Only when it is empty. */
void kvp_step_table_deinit(struct kvp_step_table *steps);

#endif
