/* The daemon's configuration: defaults, then the file, then the flags. Read once at start, constant afterwards. */
#ifndef KVPOOL_SUPERVISOR_CONFIG_H
#define KVPOOL_SUPERVISOR_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "server/log.h"
#include "server/supervisor/pool_spec.h"

enum { kvp_config_path_bytes_max = 256, kvp_ipc_uids_max = 64 };

/* device_reserve where the configuration has none. */
#define KVP_RESERVE_DEFAULT UINT64_MAX

struct kvp_config {
  char socket_path[kvp_config_path_bytes_max];
  char lock_path[kvp_config_path_bytes_max];          /* socket_path + ".lock" */
  char attach_socket_path[kvp_config_path_bytes_max]; /* default: socket_path, its ".sock" now ".attach.sock" */
  char attach_lock_path[kvp_config_path_bytes_max];   /* attach_socket_path + ".lock" */
  char executor_path[kvp_config_path_bytes_max];      /* kvpool-exec; default: beside kvpoold, else libexec */
  uint32_t socket_mode;
  uint32_t device_count;
  char devices[kvp_devices_max][kvp_name_bytes_max]; /* default: host:0 */
  uint64_t device_memory_bytes;  /* limit per device; 0 = what the device says, less what is kept back */
  uint64_t device_reserve_bytes; /* what that keeps back; KVP_RESERVE_DEFAULT: by the kind of device */
  uint32_t device_thread_count;  /* host backend; 0 = one per core */
  uint32_t sessions_max;
  uint32_t steps_in_flight_max; /* per session */
  uint32_t connections_max;
  uint32_t drain_timeout_ms;
  uint32_t wait_deadline_max_ms; /* of a wait for a timeline */
  uint32_t ipc_uid_count;
  uint32_t ipc_uids[kvp_ipc_uids_max]; /* who may bring memory by an IPC handle, besides root and our own uid */
  enum kvp_log_level log_level;
  uint32_t pool_count;
  struct kvp_pool_spec pools[kvp_pools_max];
};

enum kvp_config_outcome {
  KVP_CONFIG_RUN,   /* start the daemon */
  KVP_CONFIG_DONE,  /* --help, --version or --check-config was answered: exit 0 */
  KVP_CONFIG_ERROR, /* told on standard error, with file and line: exit 2 */
};

/* Fills *config (large: not for the stack). */
enum kvp_config_outcome kvp_config_read(int argc, char **argv, struct kvp_config *config);

#endif
