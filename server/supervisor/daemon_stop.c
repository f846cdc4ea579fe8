/* The supervisor's end: drain, then what must be gone in the order in which it can go. Loop thread only.
 *
 * Nothing here waits without a bound: steps for drain_timeout_ms, sessions' streams for a second, an executor for its
 * link's two; calls are cancelled. Progress is looked at from the loop, never from inside the event that made it. */
#include <assert.h>

#include "server/log.h"
#include "server/supervisor/daemon.h"

enum { farewell_ms = 1000 };

static uint32_t steps_left(const struct kvp_daemon *daemon) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    count += daemon->devices[i].steps.count;
  }
  return count;
}

static void drop_steps(struct kvp_device *device) {
  struct kvp_error error;
  (void)kvp_error_set(&error, KVP_SHUTTING_DOWN, "device %s: %s", device->name, kvp_status_text(KVP_SHUTTING_DOWN));
  kvp_step_drop_waiting(device, &error);
}

static void on_rpc_stopped(void *context) {
  struct kvp_daemon *daemon = context;
  assert(daemon->sessions.count == 0 && daemon->attachments.count == 0 && daemon->pools.work == 0);
  kvp_pool_table_deinit(daemon);
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    kvp_device_deinit(&daemon->devices[i]);
  }
  kvp_attach_listener_close(&daemon->attach);
  uv_close((uv_handle_t *)&daemon->patience, NULL);
  for (int i = 0; i < kvp_daemon_signals; i++) {
    uv_close((uv_handle_t *)&daemon->signals[i], NULL);
  }
}

static void stop_links(struct kvp_daemon *daemon) {
  daemon->stop_stage = KVP_STOP_LINKS;
  (void)uv_timer_stop(&daemon->patience);
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    kvp_executor_link_stop(daemon->devices[i].link);
  }
  kvp_daemon_look_again(daemon);
}

static void on_farewell_over(uv_timer_t *timer) {
  struct kvp_daemon *daemon = timer->data;
  if (daemon->stop_stage == KVP_STOP_SESSIONS) {
    stop_links(daemon);
  }
}

static void stop_goes_on(struct kvp_daemon *daemon) {
  switch (daemon->stop_stage) {
  case KVP_STOP_SESSIONS:
    if (daemon->sessions.stream_count == 0 && daemon->attachments.count == 0) {
      stop_links(daemon);
    }
    break;
  case KVP_STOP_LINKS:
    /* Attachments are over, with their executors; their rings may still be on a thread. */
    if (daemon->links_running == 0 && daemon->attachments.count == 0 && daemon->pools.work == 0) {
      daemon->stop_stage = KVP_STOP_RPC;
      kvp_rpc_server_stop(daemon->rpc, on_rpc_stopped);
    }
    break;
  case KVP_STOP_RPC:
    break;
  }
}

static void look(void *context) {
  struct kvp_daemon *daemon = context;
  daemon->check_pending = false;
  if (daemon->state == KVP_DAEMON_DRAINING && steps_left(daemon) == 0 && daemon->attachments.drains == 0 &&
      daemon->pools.work == 0) {
    kvp_daemon_stop(daemon);
  } else if (daemon->state == KVP_DAEMON_STOPPING) {
    stop_goes_on(daemon);
  }
}

void kvp_daemon_look_again(struct kvp_daemon *daemon) {
  if (daemon->state >= KVP_DAEMON_DRAINING && !daemon->check_pending) {
    daemon->check_pending = true;
    kvp_deferred_call(daemon->loop, &daemon->check, look, daemon);
  }
}

void kvp_daemon_device_stopped(struct kvp_daemon *daemon, struct kvp_device *device) {
  (void)device;
  assert(daemon->links_running > 0);
  daemon->links_running--;
  kvp_daemon_look_again(daemon);
}

static void on_drain_over(uv_timer_t *timer) {
  struct kvp_daemon *daemon = timer->data;
  if (daemon->state == KVP_DAEMON_DRAINING) {
    kvp_log(KVP_LOG_WARNING, "drain_timeout", "steps=%u rings=%u", steps_left(daemon), daemon->attachments.drains);
    kvp_daemon_stop(daemon);
  }
}

void kvp_daemon_drain(struct kvp_daemon *daemon) {
  daemon->state = KVP_DAEMON_DRAINING;
  kvp_log(KVP_LOG_INFO, "draining", "steps=%u sessions=%u workers=%u timeout_ms=%u", steps_left(daemon),
          daemon->sessions.count, daemon->attachments.count, daemon->config->drain_timeout_ms);
  kvp_rpc_server_drain(daemon->rpc);
  kvp_attach_listener_drain(&daemon->attach);
  kvp_attachment_drain_all(daemon);
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    if (kvp_executor_link_state(daemon->devices[i].link) != KVP_LINK_SERVING) {
      drop_steps(&daemon->devices[i]);
    }
  }
  (void)uv_timer_start(&daemon->patience, on_drain_over, daemon->config->drain_timeout_ms, 0);
  kvp_daemon_look_again(daemon);
}

void kvp_daemon_stop(struct kvp_daemon *daemon) {
  if (daemon->state == KVP_DAEMON_STOPPING) {
    return;
  }
  daemon->state = KVP_DAEMON_STOPPING;
  daemon->stop_stage = KVP_STOP_SESSIONS;
  kvp_log(KVP_LOG_INFO, "stopping", "steps=%u sessions=%u", steps_left(daemon), daemon->sessions.count);
  kvp_attach_listener_drain(&daemon->attach);
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    drop_steps(&daemon->devices[i]);
  }
  struct kvp_error reason;
  (void)kvp_error_set(&reason, KVP_SHUTTING_DOWN, "the daemon is shutting down");
  kvp_session_close_all(daemon, &reason);
  (void)uv_timer_start(&daemon->patience, on_farewell_over, farewell_ms, 0);
  kvp_daemon_look_again(daemon);
}
