/* The supervisor: everything it knows, owned by the loop thread; start, drain, stop.
 *
 *   STARTING (executors come up, configured pools are made) -> SERVING -> DRAINING (SIGTERM: nothing new, steps in
 * flight finish or the timeout passes) -> STOPPING (calls cancelled, executors stopped) -> the loop ends
 */
#ifndef KVPOOL_SUPERVISOR_DAEMON_H
#define KVPOOL_SUPERVISOR_DAEMON_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "server/supervisor/attach_listener.h"
#include "server/supervisor/attachment.h"
#include "server/supervisor/buffer.h"
#include "server/supervisor/config.h"
#include "server/supervisor/deferred.h"
#include "server/supervisor/device.h"
#include "server/supervisor/fd_budget.h"
#include "server/supervisor/pool.h"
#include "server/supervisor/rpc.h"
#include "server/supervisor/session.h"

/* What STOPPING waits for, in this order. */
enum kvp_daemon_stop_stage {
  KVP_STOP_SESSIONS, /* their streams take the last event, their workers' steps end */
  KVP_STOP_LINKS,    /* executors exit */
  KVP_STOP_RPC,      /* every call is closed */
};

enum kvp_daemon_state { KVP_DAEMON_STARTING, KVP_DAEMON_SERVING, KVP_DAEMON_DRAINING, KVP_DAEMON_STOPPING };

enum { kvp_daemon_signals = 3 }; /* SIGTERM, SIGINT, SIGHUP: each drains */

struct kvp_daemon {
  uv_loop_t *loop;
  const struct kvp_config *config;
  enum kvp_daemon_state state;
  struct kvp_rpc_server *rpc;
  uint32_t device_count;
  struct kvp_device devices[kvp_devices_max];
  struct kvp_fd_budget fds; /* what memory may take of them */
  struct kvp_pool_table pools;
  struct kvp_session_table sessions;
  struct kvp_attach_listener attach;
  struct kvp_attachment_table attachments;
  uv_work_t threads_start;
  uint64_t epoch;         /* allocations so far, over all pools */
  uint64_t step_sequence; /* steps so far, over all devices; fences are values of it */
  uint64_t next_memory_id;
  uint64_t next_buffer_id;
  struct kvp_buffer_releases buffer_releases; /* by buffer.c */
  uint64_t started_unix_ns;
  int exit_status;
  uint64_t pools_started; /* bit i: the configuration's pool i is being made or is there */
  uint32_t pools_made;    /* of the configuration's */
  uint32_t links_running; /* not STOPPED */
  enum kvp_daemon_stop_stage stop_stage;
  bool check_pending;
  struct kvp_deferred check; /* draining or stopping may go on */
  uv_timer_t patience; /* STARTING: looks at the executors; later: how long draining and telling sessions may take */
  uv_signal_t signals[kvp_daemon_signals];
  uint32_t signals_seen;
};

/* Runs until SIGTERM, SIGINT or SIGHUP has been handled. Returns the exit status. */
int kvp_daemon_run(const struct kvp_config *config);

/* NULL and wrong_device (naming the name) when there is none. */
struct kvp_device *kvp_daemon_find_device(struct kvp_daemon *daemon, const char *name, struct kvp_error *error);
/* Steps retired somewhere: returns blocks and buffers whose fence is reached. Called by step.c. */
void kvp_daemon_steps_retired(struct kvp_daemon *daemon);

/* A device serves, for the first time or again. Called by device.c, like the next two. */
void kvp_daemon_device_serving(struct kvp_daemon *daemon, struct kvp_device *device);
void kvp_daemon_device_stopped(struct kvp_daemon *daemon, struct kvp_device *device);
/* The daemon can't come up: logs why and stops with exit status 1, or 2 where the next start would end the same way. */
void kvp_daemon_fail_start(struct kvp_daemon *daemon, const struct kvp_error *error);
/* Something that draining or stopping may wait for has ended: looks again, from the loop. */
void kvp_daemon_look_again(struct kvp_daemon *daemon);

/* Nothing new from now on; ends in the daemon's stop. Called on a signal. */
void kvp_daemon_drain(struct kvp_daemon *daemon);
/* Stops without waiting for steps. */
void kvp_daemon_stop(struct kvp_daemon *daemon);

#endif
