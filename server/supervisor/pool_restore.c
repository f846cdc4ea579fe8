/* A new executor learns the pools of its device: import of the memory, then attach. Loop thread only.
 *
 * One pool that can't be restored is logged and stays unattached, its steps are refused by the executor; the others
 * go on. A pool with a restore under way is not deleted. */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/pool.h"
#include "server/supervisor/pool_internal.h"

struct restore;

struct restore_pool {
  struct restore *restore;
  struct kvp_pool *pool;
  uint32_t pending; /* answers to come */
  struct kvp_error error;
};

struct restore {
  struct kvp_daemon *daemon;
  struct kvp_device *device;
  kvp_memory_done_fn done;
  void *context;
  uint32_t pending;       /* pools, and the call itself */
  struct kvp_error error; /* the first; KVP_OK: none */
  struct kvp_deferred deferred;
  struct restore_pool pools[kvp_pools_max];
};

static void finish(void *context) {
  struct restore *restore = context;
  restore->daemon->pools.work--;
  restore->done(restore->context, &restore->error);
  kvp_daemon_look_again(restore->daemon);
  free(restore);
}

static void pool_restored(struct restore_pool *item) {
  struct restore *restore = item->restore;
  struct kvp_pool *pool = item->pool;
  pool->restores--;
  if (item->error.status == KVP_OK) {
    kvp_pool_placement(pool, restore->device)->attached = true;
    kvp_log(KVP_LOG_INFO, "pool_restored", "pool=%" PRIu64 " name=%s device=%s", pool->id, pool->spec.name,
            restore->device->name);
  } else if (item->error.status != KVP_DEVICE_LOST) { /* that the next executor makes good */
    kvp_log(KVP_LOG_ERROR, "pool_lost", "pool=%" PRIu64 " name=%s device=%s status=%s text=\"%s\"", pool->id,
            pool->spec.name, restore->device->name, kvp_status_name((enum kvp_status)item->error.status),
            item->error.text);
  }
  if (item->error.status != KVP_OK && restore->error.status == KVP_OK) {
    restore->error = item->error;
  }
  restore->pending--;
  if (restore->pending == 0) {
    finish(restore);
  }
}

static void on_attached(void *context, const struct kvp_error *error) {
  struct restore_pool *item = context;
  item->error = *error;
  pool_restored(item);
}

static void on_memory(void *context, const struct kvp_error *error) {
  struct restore_pool *item = context;
  if (error->status != KVP_OK && item->error.status == KVP_OK) {
    item->error = *error;
  }
  assert(item->pending > 0);
  item->pending--;
  if (item->pending > 0) {
    return;
  }
  if (item->error.status != KVP_OK) {
    pool_restored(item);
    return;
  }
  kvp_pool_attach(item->pool, kvp_pool_placement(item->pool, item->restore->device), on_attached, item);
}

void kvp_pool_restore_all(struct kvp_daemon *daemon, struct kvp_device *device, kvp_memory_done_fn done,
                          void *context) {
  struct restore *restore = kvp_allocate(1, sizeof *restore);
  restore->daemon = daemon;
  restore->device = device;
  restore->done = done;
  restore->context = context;
  daemon->pools.work++;
  for (uint32_t i = 0; i < kvp_pools_max; i++) {
    struct kvp_pool *pool = daemon->pools.pools[i];
    struct kvp_placement *placement = pool == NULL || !pool->serving ? NULL : kvp_pool_placement(pool, device);
    if (placement == NULL) {
      continue;
    }
    struct restore_pool *item = &restore->pools[i];
    item->restore = restore;
    item->pool = pool;
    item->pending = pool->spec.region_count;
    pool->restores++;
    restore->pending++;
    for (uint32_t r = 0; r < pool->spec.region_count; r++) {
      kvp_memory_restore(placement->memory[r], on_memory, item);
    }
  }
  if (restore->pending == 0) {
    kvp_deferred_call(daemon->loop, &restore->deferred, finish, restore);
  }
}
