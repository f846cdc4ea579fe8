/* What the serving thread does between two sleeps: takes steps from rings, has them checked and run, and posts what
 * became of them. It alone owns pools, buffers, steps, queues and rings while they are here.
 *
 * Rings take turns: so many commands, or bytes to be checked, and it is the next one's. A ring whose reader doesn't
 * take its completions, or that has its share of steps under way, keeps its commands. Nothing here waits.
 */
#ifndef KVPOOL_EXECUTOR_SERVICE_H
#define KVPOOL_EXECUTOR_SERVICE_H

#include "server/executor/dispatch.h"
#include "server/executor/fence.h"
#include "server/executor/intake.h"
#include "server/executor/mailbox.h"
#include "server/executor/ring_set.h"

struct kvp_service {
  struct kvp_objects objects;
  struct kvp_intake intake;
  struct kvp_step_pool steps;
  struct kvp_dispatch dispatch; /* with a device; the caller's to init and deinit */
  struct kvp_fences fences;
  struct kvp_ring_set rings;
  struct kvp_served_ring supervisors;
  struct kvp_mailbox *mailbox;
  struct kvp_object_change *removals; /* that are pending */
  uint64_t buffer_removals;           /* asked for so far */
  uint32_t awaiting_removals;         /* of those pending: steps may still come to use what is to be removed */
  bool failed;                        /* for good: the supervisor's ring holds nonsense, or there is no memory */
};

/* Zeroed but for ->mailbox, ->rings.epoll and ->supervisors, which is served from here on. */
enum kvp_status kvp_service_init(struct kvp_service *service, struct kvp_error *error);
/* ->dispatch has given its steps back. Workers' rings that are left are destroyed. */
void kvp_service_deinit(struct kvp_service *service);
/* A step that will never run. */
void kvp_service_step_drop(void *context, struct kvp_step *step);

enum kvp_status kvp_service_change(struct kvp_service *service, struct kvp_object_change *change);

/* The turn of the next ring that has something to do. True when anything happened. */
bool kvp_service_commands_take(struct kvp_service *service);
/* Takes what has finished, and launches. Likewise. */
bool kvp_service_finished_take(struct kvp_service *service);

/* Somebody's completions find no room, and nobody says when there is some. */
bool kvp_service_is_blocked(const struct kvp_service *service);
/* Before a sleep: whoever posts a command from here on wakes us. False: one is there already. */
bool kvp_service_prepare_sleep(struct kvp_service *service);
void kvp_service_awake(struct kvp_service *service);

#endif
