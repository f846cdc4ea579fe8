/* What an executor's coming and going means for the objects of its device. Loop thread only.
 *
 * ready -> limit of the ledger (once) -> pools restored -> buffers restored -> serve -> waiting steps posted. Should
 * the executor die in between, the answers that are still to come say so and the next one begins anew. */
#include "server/supervisor/device.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/attachment.h"
#include "server/supervisor/buffer.h"
#include "server/supervisor/daemon.h"

enum {
  default_reserve_bytes = 1 << 30,
  waiting_steps_ms = 10000, /* steps of a device that waits for others */
  look_ms = 2000,           /* at what is free of its memory */
};

/* A restore of everything on one executor. */
struct device_restore {
  struct kvp_device *device;
  uint64_t restarts; /* tells its executor from a later one */
};

static bool still_there(const struct device_restore *restore) {
  const struct kvp_executor_link *link = restore->device->link;
  return kvp_executor_link_state(link) == KVP_LINK_RESTORING && kvp_executor_link_restarts(link) == restore->restarts;
}

static void on_buffers_restored(void *context, const struct kvp_error *error) {
  struct device_restore *restore = context;
  struct kvp_device *device = restore->device;
  (void)error; /* what could not be restored has been logged by name; the rest serves */
  if (still_there(restore)) {
    kvp_executor_link_serve(device->link);
    kvp_log(KVP_LOG_INFO, "device_serving", "device=%s restarts=%" PRIu64 " waiting_steps=%u", device->name,
            restore->restarts, device->steps.count);
    kvp_step_post_waiting(device);
    kvp_attachment_device_serving(device);
    if (device->served) {
      kvp_session_tell_device(device->daemon, device->name, false);
    }
    device->served = true;
    kvp_daemon_device_serving(device->daemon, device);
  }
  free(restore);
}

static void on_pools_restored(void *context, const struct kvp_error *error) {
  struct device_restore *restore = context;
  (void)error;
  if (!still_there(restore)) {
    free(restore);
    return;
  }
  kvp_buffer_restore_all(restore->device->daemon, restore->device, on_buffers_restored, restore);
}

/* ---- memory -----------------------------------------------------------------------------------------------------
 */

static bool is_host(const char *name) {
  return strncmp(name, "host:", sizeof "host:" - 1) == 0;
}

static uint64_t less(uint64_t bytes, uint64_t reserve) {
  return bytes > reserve ? bytes - reserve : 0;
}

/* Host devices share one machine's memory; something of it is left to everybody else. */
static uint64_t host_limit(const struct kvp_device *device, uint64_t memory_bytes) {
  const struct kvp_config *config = device->daemon->config;
  uint64_t tenth = memory_bytes / 10;
  uint64_t quarter = memory_bytes / 4;
  uint64_t reserve = quarter < default_reserve_bytes ? quarter : default_reserve_bytes;
  reserve = reserve < tenth ? tenth : reserve;
  if (config->device_reserve_bytes != KVP_RESERVE_DEFAULT) {
    reserve = config->device_reserve_bytes;
  }
  uint32_t sharing = 1;
  for (uint32_t i = 0; i < config->device_count; i++) {
    sharing += i != device->index && is_host(config->devices[i]) ? 1 : 0;
  }
  return less(memory_bytes, reserve) / sharing;
}

/* A GPU has other users, whose memory is not there to be given away. */
static uint64_t gpu_limit(const struct kvp_device *device, uint64_t free_bytes) {
  uint64_t reserve = device->daemon->config->device_reserve_bytes;
  return less(free_bytes, reserve == KVP_RESERVE_DEFAULT ? default_reserve_bytes : reserve);
}

/* What is kept back leaves nothing: said, with the numbers, instead of serving a device that refuses everything. */
static void refuse_limit(const struct kvp_device *device, const struct kvp_control_ready *ready) {
  struct kvp_error error;
  char reserve[32] = "of its kind";
  if (device->daemon->config->device_reserve_bytes != KVP_RESERVE_DEFAULT) {
    (void)snprintf(reserve, sizeof reserve, "%" PRIu64, device->daemon->config->device_reserve_bytes);
  }
  (void)kvp_error_set(&error, KVP_OUT_OF_MEMORY,
                      "device %s: device_reserve %s leaves nothing of its %" PRIu64 " bytes, of which %" PRIu64
                      " are free; device_memory or a smaller device_reserve would",
                      device->name, reserve, ready->memory_bytes, ready->memory_free_bytes);
  kvp_daemon_fail_start(device->daemon, &error);
}

/* False: there is nothing to serve, and the daemon stops. */
static bool decide_limit(struct kvp_device *device, const struct kvp_control_ready *ready) {
  uint64_t asked = device->daemon->config->device_memory_bytes;
  uint64_t there = is_host(device->name) ? ready->memory_bytes : ready->memory_free_bytes;
  uint64_t own =
      is_host(device->name) ? host_limit(device, ready->memory_bytes) : gpu_limit(device, ready->memory_free_bytes);
  device->ledger.limit_bytes = asked != 0 ? asked : own;
  device->limit_known = true;
  if (device->ledger.limit_bytes == 0) {
    refuse_limit(device, ready);
    return false;
  }
  kvp_log(device->ledger.limit_bytes > there ? KVP_LOG_WARNING : KVP_LOG_INFO, "device_memory",
          "device=%s limit_bytes=%" PRIu64 " device_bytes=%" PRIu64 " free_bytes=%" PRIu64
          " granularity_bytes=%" PRIu64 " decided_by=%s",
          device->name, device->ledger.limit_bytes, ready->memory_bytes, ready->memory_free_bytes,
          ready->memory_granularity_bytes, asked != 0 ? "configuration" : "device");
  return true;
}

/* What was in use when free_bytes were free is ours, used_bytes of it, and everybody else's. */
static void find_others(struct kvp_device *device, uint64_t free_bytes, uint64_t used_bytes) {
  device->others_bytes = less(less(device->memory_bytes, free_bytes), used_bytes);
}

/* Our pools and buffers outlive executors: what one finds in use is theirs and everybody else's. */
static bool look_at_memory(struct kvp_device *device, const struct kvp_control_ready *ready) {
  device->ledger.granularity_bytes = ready->memory_granularity_bytes;
  device->memory_bytes = ready->memory_bytes;
  find_others(device, ready->memory_free_bytes, kvp_ledger_used_bytes(&device->ledger));
  return device->limit_known || decide_limit(device, ready);
}

/* The executor answers behind all that it was asked for until now: so the ledger's figure is of now. */
static void on_look(uv_timer_t *timer) {
  struct kvp_device *device = timer->data;
  if (kvp_executor_link_look(device->link)) {
    device->looked_used_bytes = kvp_ledger_used_bytes(&device->ledger);
  }
}

static void on_memory_free(void *context, struct kvp_executor_link *link, uint64_t free_bytes) {
  (void)link;
  struct kvp_device *device = context;
  if (free_bytes > 0) { /* else nobody knows, and what was known stays */
    find_others(device, free_bytes, device->looked_used_bytes);
  }
}

enum kvp_status kvp_device_charge_ring(struct kvp_device *device, uint64_t bytes, struct kvp_error *error) {
  if (is_host(device->name) && kvp_ledger_charge(&device->ledger, device->name, KVP_LEDGER_RING, "a worker's ring",
                                                 bytes, bytes, error) != KVP_OK) {
    error->status = KVP_QUOTA_EXCEEDED; /* the host has the memory: it is promised to pools and buffers */
    return KVP_QUOTA_EXCEEDED;
  }
  device->ring_bytes += bytes;
  return KVP_OK;
}

void kvp_device_release_ring(struct kvp_device *device, uint64_t bytes) {
  if (is_host(device->name)) {
    kvp_ledger_release(&device->ledger, KVP_LEDGER_RING, bytes);
  }
  device->ring_bytes -= bytes;
}

void kvp_device_explain_memory(const struct kvp_device *device, struct kvp_error *error) {
  const struct kvp_ledger *ledger = &device->ledger;
  if (error->status != KVP_OUT_OF_MEMORY) {
    return;
  }
  const size_t used = strlen(error->text);
  (void)snprintf(
      error->text + used, sizeof error->text - used,
      "; %s has %" PRIu64 " bytes in pools, %" PRIu64 " in buffers, this one counted, and %" PRIu64
      " in workers' rings, %" PRIu64 " in contexts and other processes, and %" PRIu64 " of %" PRIu64 " left",
      device->name, ledger->used_bytes[KVP_LEDGER_POOL], ledger->used_bytes[KVP_LEDGER_BUFFER],
      ledger->used_bytes[KVP_LEDGER_RING], device->others_bytes, kvp_ledger_left_bytes(ledger), ledger->limit_bytes);
}

/* ---- events -----------------------------------------------------------------------------------------------------
 */

static void on_ready(void *context, struct kvp_executor_link *link, const struct kvp_control_ready *ready) {
  struct kvp_device *device = context;
  if (!look_at_memory(device, ready)) {
    return;
  }
  struct device_restore *restore = kvp_allocate(1, sizeof *restore);
  restore->device = device;
  restore->restarts = kvp_executor_link_restarts(link);
  kvp_pool_restore_all(device->daemon, device, on_pools_restored, restore);
}

static void on_lost(void *context, struct kvp_executor_link *link) {
  struct kvp_device *device = context;
  bool stopping = kvp_executor_link_state(link) == KVP_LINK_STOPPED;
  if (!stopping) {
    kvp_log(KVP_LOG_ERROR, "device_lost", "device=%s restarts=%" PRIu64 " steps=%u sessions=%u", device->name,
            kvp_executor_link_restarts(link), device->steps.count, device->daemon->sessions.count);
  }
  kvp_pool_device_lost(device->daemon, device);
  kvp_attachment_device_lost(device);
  kvp_step_device_lost(device);
  if (!stopping) {
    kvp_session_tell_device(device->daemon, device->name, true);
  }
  kvp_daemon_look_again(device->daemon);
}

static void on_completion(void *context, struct kvp_executor_link *link, const struct kvp_ring_record *record,
                          const uint8_t *payload) {
  (void)link;
  kvp_step_completion(context, record, payload);
}

static void on_progress(void *context, struct kvp_executor_link *link) {
  (void)link;
  kvp_step_post_waiting(context);
}

/* Nobody waits without a bound: what was asked of it meanwhile is told, and may be asked again. A device that is
 * refused before it has served is the end of the start. */
static void on_waiting(void *context, struct kvp_executor_link *link) {
  struct kvp_device *device = context;
  struct kvp_error error;
  const enum kvp_status refused = kvp_executor_link_refused(link);
  if (refused != KVP_OK && device->daemon->state == KVP_DAEMON_STARTING) {
    (void)kvp_error_set(&error, refused, "%s", kvp_executor_link_waiting(link));
    kvp_daemon_fail_start(device->daemon, &error);
    return;
  }
  if (device->steps.count > 0 && (refused != KVP_OK || kvp_executor_link_waiting_ms(link) >= waiting_steps_ms)) {
    (void)kvp_device_check_serving(device, &error);
    kvp_step_drop_waiting(device, &error);
  }
}

static void on_ring_failed(void *context, const struct kvp_control_ring_failed *failed) {
  kvp_attachment_ring_failed(context, failed);
}

static void on_stopped(void *context, struct kvp_executor_link *link) {
  (void)link;
  struct kvp_device *device = context;
  kvp_daemon_device_stopped(device->daemon, device);
}

static const struct kvp_link_events link_events = {
    .ready = on_ready,
    .lost = on_lost,
    .completion = on_completion,
    .progress = on_progress,
    .ring_failed = on_ring_failed,
    .waiting = on_waiting,
    .memory_free = on_memory_free,
    .stopped = on_stopped,
};

enum kvp_status kvp_device_init(struct kvp_daemon *daemon, uint32_t index, const char *name,
                                struct kvp_error *error) {
  struct kvp_device *device = &daemon->devices[index];
  memset(device, 0, sizeof *device);
  device->daemon = daemon;
  device->index = index;
  memcpy(device->name, name, strlen(name) + 1);
  const struct kvp_link_options options = {
      .device = device->name,
      .executor_path = daemon->config->executor_path,
      .socket_path = daemon->config->socket_path,
      .lock_path = daemon->config->lock_path,
      .attach_socket_path = daemon->config->attach_socket_path,
      .attach_lock_path = daemon->config->attach_lock_path,
      .thread_count = daemon->config->device_thread_count,
  };
  if (kvp_executor_link_new(daemon->loop, &options, &link_events, device, &device->link, error) != KVP_OK) {
    return (enum kvp_status)error->status;
  }
  (void)uv_timer_init(daemon->loop, &device->look); /* can't fail, nor can its start */
  device->look.data = device;
  (void)uv_timer_start(&device->look, on_look, look_ms, look_ms);
  return KVP_OK;
}

void kvp_device_deinit(struct kvp_device *device) {
  kvp_step_table_deinit(&device->steps);
  kvp_executor_link_destroy(device->link);
  device->link = NULL;
  uv_close((uv_handle_t *)&device->look, NULL);
}

enum kvp_status kvp_device_check_serving(const struct kvp_device *device, struct kvp_error *error) {
  if (device->daemon->state >= KVP_DAEMON_DRAINING) {
    return kvp_error_set(error, KVP_SHUTTING_DOWN, "the daemon is draining");
  }
  if (kvp_executor_link_state(device->link) == KVP_LINK_SERVING) {
    return KVP_OK;
  }
  const char *waiting = kvp_executor_link_waiting(device->link);
  if (waiting != NULL && kvp_executor_link_refused(device->link) != KVP_OK) {
    return kvp_error_set(error, KVP_DEVICE_LOST,
                         "device %s can't be served; its executor says: %s; it is tried again from time to time",
                         device->name, waiting);
  }
  if (waiting != NULL) {
    return kvp_error_set(error, device->served ? KVP_DEVICE_LOST : KVP_BUSY,
                         "device %s waits for others to go before it can serve: %s", device->name, waiting);
  }
  if (!device->served) {
    return kvp_error_set(error, KVP_BUSY, "device %s is starting; try again", device->name);
  }
  return kvp_error_set(error, KVP_DEVICE_LOST, "the executor of device %s died and is being restarted; try again",
                       device->name);
}
