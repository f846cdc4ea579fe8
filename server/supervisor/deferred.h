/* A call made later from the loop: how an API keeps "callbacks never run inside the call" when it knows the answer at
 * once. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_DEFERRED_H
#define KVPOOL_SUPERVISOR_DEFERRED_H

#include <uv.h>

typedef void (*kvp_deferred_fn)(void *context);

struct kvp_deferred {
  uv_timer_t handle;
  kvp_deferred_fn call;
  void *context;
};

/* The caller keeps *deferred alive until call runs, once; from then on it may be reused or freed. */
void kvp_deferred_call(uv_loop_t *loop, struct kvp_deferred *deferred, kvp_deferred_fn call, void *context);

#endif
