/* A change of what the serving thread knows: pools, buffers and rings that come and go. Asked for by the control
 * thread. */
#ifndef KVPOOL_EXECUTOR_OBJECT_CHANGE_H
#define KVPOOL_EXECUTOR_OBJECT_CHANGE_H

#include "server/executor/news.h"
#include "server/executor/objects.h"
#include "server/executor/served_ring.h"

enum kvp_object_change_kind {
  KVP_ADD_POOL,
  KVP_ADD_BUFFER,
  KVP_ADD_RING,
  KVP_REMOVE_POOL,
  KVP_REMOVE_BUFFER,
  KVP_REMOVE_RING,
  KVP_DRAIN_RING, /* not removed: it accepts no step any more */
};

/* What is removed is gone for new steps at once; a buffer, when what its session's rings held before has been taken.
 * While old ones use it the change is pending: it is the serving thread's until it comes back as news. */
struct kvp_object_change {
  struct kvp_news news;         /* the first field */
  uint64_t id;                  /* of what is removed */
  struct kvp_pool *pool;        /* in: added; out: removed */
  struct kvp_buffer *buffer;    /* likewise */
  struct kvp_served_ring *ring; /* likewise */
  enum kvp_object_change_kind kind;
  uint64_t attachment_id;         /* of a buffer's removal: the worker that made it; 0: none */
  uint64_t number;                /* of a buffer's removal, ascending: the serving thread's */
  enum kvp_status status;         /* out */
  struct kvp_error error;         /* out */
  struct kvp_object_change *next; /* of those pending: the serving thread's */

  /* The control thread's own. */
  struct kvp_object_change *next_asked;
  uint32_t request;

  bool is_pending; /* out: it isn't done yet, but will be */
};

#endif
