/* Between control thread and serving thread: changes one way, answered at once, and news the other way, which nobody
 * waits for. No locks: the serving thread must not wait.
 */
#ifndef KVPOOL_EXECUTOR_MAILBOX_H
#define KVPOOL_EXECUTOR_MAILBOX_H

#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "server/executor/object_change.h"

struct kvp_mailbox {
  int serving_event;  /* eventfd that wakes the serving thread, the caller's */
  int control_event;  /* eventfd that wakes the control thread */
  atomic_bool closed; /* no change is taken any more */
  _Atomic(struct kvp_object_change *) change;
  sem_t change_done;
  _Atomic(struct kvp_news *) news; /* the newest first */
};

/* False with errno. */
bool kvp_mailbox_init(struct kvp_mailbox *mailbox, int serving_event);
void kvp_mailbox_deinit(struct kvp_mailbox *mailbox);

/* ---- control thread ---- */

/* Returns when the serving thread has answered; KVP_CANCELLED when it has stopped. */
enum kvp_status kvp_mailbox_change(struct kvp_mailbox *mailbox, struct kvp_object_change *change);
/* All there are, in the order in which they were told; NULL: none. */
struct kvp_news *kvp_mailbox_read(struct kvp_mailbox *mailbox);

/* ---- serving thread ---- */

/* A change that wants an answer, to be answered at once; NULL: none. */
struct kvp_object_change *kvp_mailbox_take(struct kvp_mailbox *mailbox);
void kvp_mailbox_answer(struct kvp_mailbox *mailbox);
bool kvp_mailbox_has_change(struct kvp_mailbox *mailbox);
void kvp_mailbox_tell(struct kvp_mailbox *mailbox, struct kvp_news *news, enum kvp_news_kind kind);
/* Changes are cancelled from here on. */
void kvp_mailbox_close(struct kvp_mailbox *mailbox);

#endif
