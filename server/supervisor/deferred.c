/* A handle's close callback is what libuv calls later, once, without any timing. Loop thread only. */
#include "server/supervisor/deferred.h"

#include <assert.h>

static void on_closed(uv_handle_t *handle) {
  struct kvp_deferred *deferred = handle->data;
  deferred->call(deferred->context);
}

void kvp_deferred_call(uv_loop_t *loop, struct kvp_deferred *deferred, kvp_deferred_fn call, void *context) {
  int result = uv_timer_init(loop, &deferred->handle);
  assert(result == 0);
  (void)result;
  deferred->handle.data = deferred;
  deferred->call = call;
  deferred->context = context;
  uv_close((uv_handle_t *)&deferred->handle, on_closed);
}
