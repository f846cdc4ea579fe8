/* The supervisor's start and run. Its loop thread is the thread that calls kvp_daemon_run. */
#include "server/supervisor/daemon.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/buffer.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/name.h"
#include "server/supervisor/restart_policy.h"

enum {
  start_look_ms = 50,   /* how often a start looks whether executors keep dying */
  start_deaths_max = 5, /* of one device before it has served at all */
  exit_failed = 1,
  exit_refused = 2,      /* as with a wrong configuration: the next start would end the same way */
  impatient_signals = 2, /* one to drain, one not to wait; after more nothing is cleaned up any more */
};

struct kvp_device *kvp_daemon_find_device(struct kvp_daemon *daemon, const char *name, struct kvp_error *error) {
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    if (kvp_device_names_equal(daemon->devices[i].name, name)) {
      return &daemon->devices[i];
    }
  }
  (void)kvp_error_set_at(error, KVP_WRONG_DEVICE, -1, "device", -1, 0, "there is no device '%.*s'",
                         kvp_name_bytes_max, name);
  return NULL;
}

void kvp_daemon_steps_retired(struct kvp_daemon *daemon) {
  kvp_pool_reach_all(daemon);
  kvp_buffer_reach_all(daemon, kvp_step_retired_fence(daemon)); /* workers' steps: the executor waits for them */
  kvp_session_settle_all(daemon);
  kvp_daemon_look_again(daemon);
}

/* ---- start ------------------------------------------------------------------------------------------------------
 */

static void become_serving(struct kvp_daemon *daemon) {
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    if (!daemon->devices[i].served) {
      return;
    }
  }
  if (daemon->state != KVP_DAEMON_STARTING || daemon->pools_made < daemon->config->pool_count) {
    return;
  }
  daemon->state = KVP_DAEMON_SERVING;
  (void)uv_timer_stop(&daemon->patience);
  kvp_log(KVP_LOG_INFO, "serving", "socket=%s devices=%u pools=%u", daemon->config->socket_path, daemon->device_count,
          daemon->pools_made);
}

/* One pool of the configuration being made. */
struct configured_pool {
  struct kvp_daemon *daemon;
  uint32_t index;
};

static void make_pools(struct kvp_daemon *daemon);

static void on_pool_made(void *context, struct kvp_pool *pool, const struct kvp_error *error) {
  struct configured_pool *configured = context;
  struct kvp_daemon *daemon = configured->daemon;
  uint32_t index = configured->index;
  free(configured);
  if (daemon->state != KVP_DAEMON_STARTING) {
    return;
  }
  if (pool != NULL) {
    daemon->pools_made++;
    become_serving(daemon);
  } else if (error->status == KVP_DEVICE_LOST) {
    daemon->pools_started &= ~(UINT64_C(1) << index); /* its device's next executor gets another try */
    make_pools(daemon);
  } else {
    kvp_daemon_fail_start(daemon, error);
  }
}

static bool placements_serve(struct kvp_daemon *daemon, const struct kvp_pool_spec *spec) {
  for (uint32_t i = 0; i < spec->placement_count; i++) {
    const struct kvp_device *device = kvp_daemon_find_device(daemon, spec->placements[i], NULL);
    assert(device != NULL); /* the configuration was checked */
    if (kvp_device_check_serving(device, NULL) != KVP_OK) {
      return false;
    }
  }
  return spec->placement_count > 0 || kvp_device_check_serving(&daemon->devices[0], NULL) == KVP_OK;
}

static void make_pools(struct kvp_daemon *daemon) {
  _Static_assert(kvp_pools_max <= 64, "a bit of pools_started each");
  for (uint32_t i = 0; i < daemon->config->pool_count; i++) {
    uint64_t bit = UINT64_C(1) << i;
    if ((daemon->pools_started & bit) == 0 && placements_serve(daemon, &daemon->config->pools[i])) {
      daemon->pools_started |= bit;
      struct configured_pool *configured = kvp_allocate(1, sizeof *configured);
      *configured = (struct configured_pool){daemon, i};
      kvp_pool_create(daemon, &daemon->config->pools[i], on_pool_made, configured);
    }
  }
}

void kvp_daemon_device_serving(struct kvp_daemon *daemon, struct kvp_device *device) {
  (void)device;
  if (daemon->state == KVP_DAEMON_STARTING) {
    make_pools(daemon);
    become_serving(daemon);
  }
}

void kvp_daemon_fail_start(struct kvp_daemon *daemon, const struct kvp_error *error) {
  if (daemon->state != KVP_DAEMON_STARTING) {
    return; /* it has been told to end meanwhile */
  }
  kvp_log(KVP_LOG_ERROR, "start_failed", "status=%s text=\"%s\"", kvp_status_name((enum kvp_status)error->status),
          error->text);
  daemon->exit_status = kvp_restart_policy_is_final(error->status) ? exit_refused : exit_failed;
  kvp_daemon_stop(daemon);
}

static void on_start_look(uv_timer_t *timer) {
  struct kvp_daemon *daemon = timer->data;
  for (uint32_t i = 0; i < daemon->device_count && daemon->state == KVP_DAEMON_STARTING; i++) {
    const struct kvp_device *device = &daemon->devices[i];
    if (kvp_executor_link_restarts(device->link) >= start_deaths_max) {
      struct kvp_error error;
      enum kvp_status status = KVP_OK;
      const char *refusal = kvp_executor_link_refusal(device->link, &status);
      (void)kvp_error_set(&error, status == KVP_OK ? KVP_DEVICE_LOST : status,
                          "%d executors of device %s (%s) %s before %s served%s%s", start_deaths_max, device->name,
                          daemon->config->executor_path, status != KVP_OK ? "gave up" : "died",
                          device->served ? "the daemon" : "one", status != KVP_OK ? ": " : "", refusal);
      kvp_daemon_fail_start(daemon, &error);
    }
  }
}

/* Connections and memory chunks are descriptors. The RPC server has raised the soft limit to the hard one. */
static enum kvp_status share_descriptors(struct kvp_daemon *daemon, struct kvp_error *error) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "getrlimit: %s", strerror(errno));
  }
  uint64_t descriptors = limit.rlim_cur < kvp_rpc_descriptors_max ? limit.rlim_cur : kvp_rpc_descriptors_max;
  return kvp_fd_budget_init(&daemon->fds, descriptors, daemon->config->connections_max, daemon->config->device_count,
                            error);
}

static void start_devices(struct kvp_daemon *daemon) {
  struct kvp_error error;
  if (share_descriptors(daemon, &error) != KVP_OK) {
    kvp_daemon_fail_start(daemon, &error);
    return;
  }
  for (uint32_t i = 0; i < daemon->config->device_count; i++) {
    if (kvp_device_init(daemon, i, daemon->config->devices[i], &error) != KVP_OK) {
      kvp_daemon_fail_start(daemon, &error);
      return;
    }
    daemon->device_count++;
    daemon->links_running++;
    if (kvp_executor_link_start(daemon->devices[i].link, &error) != KVP_OK) {
      kvp_daemon_fail_start(daemon, &error);
      return;
    }
  }
  (void)uv_timer_start(&daemon->patience, on_start_look, start_look_ms, start_look_ms);
}

/* ---- run --------------------------------------------------------------------------------------------------------
 */

static void on_signal(uv_signal_t *handle, int number) {
  struct kvp_daemon *daemon = handle->data;
  daemon->signals_seen++;
  kvp_log(KVP_LOG_INFO, "signal", "signal=%d", number);
  switch (daemon->state) {
  case KVP_DAEMON_STARTING:
  case KVP_DAEMON_SERVING:
    kvp_daemon_drain(daemon);
    break;
  case KVP_DAEMON_DRAINING:
    kvp_daemon_stop(daemon);
    break;
  case KVP_DAEMON_STOPPING:
    if (daemon->signals_seen > impatient_signals) {
      _exit(1); /* executors see the closed socket, exit, and remove what is left */
    }
    break;
  }
}

/* As nohup leaves SIGHUP. */
static bool is_ignored(int number) {
  struct sigaction action = {0};
  return sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
}

static void init_handles(struct kvp_daemon *daemon) {
  static const int numbers[kvp_daemon_signals] = {SIGTERM, SIGINT, SIGHUP};
  int result = uv_timer_init(daemon->loop, &daemon->patience);
  assert(result == 0);
  daemon->patience.data = daemon;
  for (int i = 0; i < kvp_daemon_signals; i++) {
    result = uv_signal_init(daemon->loop, &daemon->signals[i]);
    assert(result == 0);
    daemon->signals[i].data = daemon;
    if (numbers[i] != SIGHUP || !is_ignored(SIGHUP)) {
      result = uv_signal_start(&daemon->signals[i], on_signal, numbers[i]);
      assert(result == 0);
    }
  }
}

static bool is_ready(const void *context) {
  const struct kvp_daemon *daemon = context;
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    if (kvp_executor_link_waiting(daemon->devices[i].link) != NULL) {
      return false;
    }
  }
  return true;
}

static enum kvp_status start_rpc(struct kvp_daemon *daemon, struct kvp_error *error) {
  const struct kvp_config *config = daemon->config;
  size_t method_count = 0;
  const struct kvp_rpc_method *methods = kvp_methods_all(&method_count);
  const struct kvp_rpc_server_options options = {
      .socket_path = config->socket_path,
      .socket_mode = config->socket_mode,
      .lock_path = config->lock_path,
      .package_service = "kvpool.v1.Kvpool",
      .methods = methods,
      .method_count = method_count,
      .context = daemon,
      .connections_max = config->connections_max,
      .is_ready = is_ready,
  };
  return kvp_rpc_server_start(daemon->loop, &options, &daemon->rpc, error);
}

/* The attach socket first: when the other one is there, both are. */
static enum kvp_status start_listening(struct kvp_daemon *daemon, struct kvp_error *error) {
  enum kvp_status status = kvp_attach_listener_init(&daemon->attach, daemon, error);
  if (status != KVP_OK) {
    return status;
  }
  status = start_rpc(daemon, error);
  if (status != KVP_OK) {
    kvp_attach_listener_drain(&daemon->attach);
    kvp_attach_listener_close(&daemon->attach);
  }
  return status;
}

static void nothing_to_run(uv_work_t *request) {
  (void)request;
}

static void nothing_has_run(uv_work_t *request, int status) {
  (void)request;
  (void)status;
}

/* libuv starts its threads with the first work: now, while signals are blocked. A process that may have no threads ends
 * here, and not when the first worker attaches. */
static void start_threads(struct kvp_daemon *daemon) {
  int result = uv_queue_work(daemon->loop, &daemon->threads_start, nothing_to_run, nothing_has_run);
  assert(result == 0);
  (void)result;
}

/* main has blocked the signals before any thread was there; this thread alone takes them. */
static void unblock_signals(void) {
  sigset_t set;
  (void)sigemptyset(&set);
  (void)sigaddset(&set, SIGTERM);
  (void)sigaddset(&set, SIGINT);
  (void)sigaddset(&set, SIGHUP);
  (void)pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}

static uint64_t now_unix_ns(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_REALTIME, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

int kvp_daemon_run(const struct kvp_config *config) {
  uv_loop_t loop;
  if (uv_loop_init(&loop) != 0) {
    kvp_log(KVP_LOG_ERROR, "start_failed", "text=\"no event loop\"");
    return 1;
  }
  struct kvp_daemon *daemon = kvp_allocate(1, sizeof *daemon);
  daemon->loop = &loop;
  daemon->config = config;
  daemon->started_unix_ns = now_unix_ns();
  kvp_log(KVP_LOG_INFO, "starting", "version=%s pid=%d socket=%s attach_socket=%s executor=%s devices=%u pools=%u",
          KVPOOL_VERSION, (int)getpid(), config->socket_path, config->attach_socket_path, config->executor_path,
          config->device_count, config->pool_count);
  struct kvp_error error;
  if (start_listening(daemon, &error) != KVP_OK) {
    kvp_log(KVP_LOG_ERROR, "start_failed", "status=%s text=\"%s\"", kvp_status_name((enum kvp_status)error.status),
            error.text);
    daemon->exit_status = exit_failed;
  } else {
    init_handles(daemon);
    start_threads(daemon);
    start_devices(daemon);
    unblock_signals();
  }
  (void)uv_run(&loop, UV_RUN_DEFAULT);
  int exit_status = daemon->exit_status;
  free(daemon);
  int result = uv_loop_close(&loop);
  assert(result == 0); /* every handle has been closed */
  (void)result;
  kvp_log(KVP_LOG_INFO, "stopped", "exit_status=%d", exit_status);
  return exit_status;
}
