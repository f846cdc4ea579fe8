/* The supervisor: everything it knows, owned by the loop thread; start, drain, stop.
 *
 *   STARTING (executors come up, configured pools are made) -> SERVING -> DRAINING (SIGTERM: nothing new, steps in flight
 *   finish or the timeout passes) -> STOPPING (calls cancelled, executors stopped) -> the loop ends
 */
#ifndef KVPOOL_SUPERVISOR_DAEMON_H
#define KVPOOL_SUPERVISOR_DAEMON_H

#include <stdint.h>
#include <uv.h>

#include "server/supervisor/config.h"
#include "server/supervisor/device.h"
#include "server/supervisor/pool.h"
#include "server/supervisor/rpc.h"
#include "server/supervisor/session.h"

enum kvp_daemon_state { KVP_DAEMON_STARTING, KVP_DAEMON_SERVING, KVP_DAEMON_DRAINING, KVP_DAEMON_STOPPING };

struct kvp_daemon {
  uv_loop_t *loop;
  const struct kvp_config *config;
  enum kvp_daemon_state state;
  struct kvp_rpc_server *rpc;
  uint32_t device_count;
  struct kvp_device devices[kvp_devices_max];
  struct kvp_pool_table pools;
  struct kvp_session_table sessions;
  uint64_t epoch;         /* allocations so far, over all pools */
  uint64_t step_sequence; /* steps so far, over all devices; fences are values of it */
  uint64_t next_memory_id;
  uint64_t next_buffer_id;
  uint64_t started_unix_ns;
};

/* Runs until SIGTERM or SIGINT has been handled. Returns the exit status. */
int kvp_daemon_run(const struct kvp_config *config);

/* NULL and wrong_device (naming the name) when there is none. */
struct kvp_device *kvp_daemon_find_device(struct kvp_daemon *daemon, const char *name, struct kvp_error *error);
/* Steps retired somewhere: returns blocks and buffers whose fence is reached. Called by step.c. */
void kvp_daemon_steps_retired(struct kvp_daemon *daemon);

#endif
