/* The pools there are: finding, attaching, deleting, and what happens to all of them at once. Loop thread only. */
#include "server/supervisor/pool.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/pool_internal.h"

struct kvp_pool *kvp_pool_find(struct kvp_daemon *daemon, uint64_t pool_id, struct kvp_error *error) {
  for (int i = 0; i < kvp_pools_max; i++) {
    struct kvp_pool *pool = daemon->pools.pools[i];
    if (pool != NULL && pool->serving && pool->id == pool_id) {
      return pool;
    }
  }
  (void)kvp_error_set_at(error, KVP_UNKNOWN_POOL, -1, "pool_id", -1, (int64_t)pool_id, "there is no pool %" PRIu64,
                         pool_id);
  return NULL;
}

struct kvp_pool *kvp_pool_find_name(struct kvp_daemon *daemon, const char *name, struct kvp_error *error) {
  for (int i = 0; i < kvp_pools_max; i++) {
    struct kvp_pool *pool = daemon->pools.pools[i];
    if (pool != NULL && pool->serving && strcmp(pool->spec.name, name) == 0) {
      return pool;
    }
  }
  (void)kvp_error_set_at(error, KVP_UNKNOWN_POOL, -1, "name", -1, 0, "there is no pool named '%.*s'",
                         kvp_name_bytes_max, name);
  return NULL;
}

struct kvp_placement *kvp_pool_placement(struct kvp_pool *pool, const struct kvp_device *device) {
  for (uint32_t i = 0; i < pool->placement_count; i++) {
    if (pool->placements[i].device == device) {
      return &pool->placements[i];
    }
  }
  return NULL;
}

void kvp_pool_attach(const struct kvp_pool *pool, const struct kvp_placement *placement, kvp_link_result_fn result,
                     void *context) {
  struct kvp_control_pool body;
  memset(&body, 0, sizeof body);
  body.pool_id = pool->id;
  body.num_blocks = pool->spec.num_blocks;
  body.kind = pool->spec.kind;
  body.region_count = pool->spec.region_count;
  for (uint32_t i = 0; i < pool->spec.region_count; i++) {
    struct kvp_control_region *region = &body.regions[i];
    region->memory_id = kvp_memory_id(placement->memory[i]);
    region->format = pool->regions[i].format->id;
    region->width = pool->regions[i].sizes.elements;
    region->tokens_per_block = pool->regions[i].tokens_per_block;
    region->num_layers = pool->regions[i].num_layers;
    memcpy(region->name, pool->spec.regions[i].name, sizeof region->name);
  }
  kvp_executor_link_request(placement->device->link, KVP_CONTROL_POOL_ATTACH, &body, sizeof body, &pool->owners.fd, 1,
                            NULL, result, context);
}

/* Somebody waits until all that a pool had is given back. */
struct kvp_pool_deletion {
  kvp_pool_deleted_fn deleted;
  void *context;
  uint32_t partings; /* under way */
  struct kvp_deferred deferred;
};

/* What a pool had on one placement while steps of workers' rings may still use it. */
struct parting {
  struct kvp_daemon *daemon;
  struct kvp_pool_deletion *deletion; /* NULL: nobody waits */
  struct kvp_placement placement;
};

static void deletion_end(void *context) {
  struct kvp_pool_deletion *deletion = context;
  deletion->deleted(deletion->context);
  free(deletion);
}

static void give_back_placement(struct kvp_placement *placement) {
  for (uint32_t i = 0; i < kvp_regions_per_pool_max; i++) {
    kvp_memory_destroy(placement->memory[i]);
  }
  kvp_ledger_release(&placement->device->ledger, KVP_LEDGER_POOL, placement->charged_bytes);
}

static void on_detached(void *context, const struct kvp_error *error) {
  struct parting *parting = context;
  (void)error; /* an executor that died has no pools any more */
  give_back_placement(&parting->placement);
  if (parting->deletion != NULL && --parting->deletion->partings == 0) {
    deletion_end(parting->deletion);
  }
  parting->daemon->pools.work--;
  kvp_daemon_look_again(parting->daemon);
  free(parting);
}

static void detach_placement(const struct kvp_pool *pool, const struct kvp_placement *placement,
                             kvp_link_result_fn result, void *context) {
  struct kvp_control_pool body;
  memset(&body, 0, sizeof body);
  body.pool_id = pool->id;
  kvp_executor_link_request(placement->device->link, KVP_CONTROL_POOL_DETACH, &body, sizeof body, NULL, 0, NULL,
                            result, context);
}

/* No step of ours uses it. Workers' steps may: then the executor answers when they have ended. */
static void free_placement(struct kvp_daemon *daemon, const struct kvp_pool *pool, struct kvp_placement *placement,
                           struct kvp_pool_deletion *deletion) {
  if (placement->attached && placement->device->rings > 0) {
    struct parting *parting = kvp_allocate(1, sizeof *parting);
    *parting = (struct parting){daemon, deletion, *placement};
    if (deletion != NULL) {
      deletion->partings++;
    }
    daemon->pools.work++;
    detach_placement(pool, placement, on_detached, parting);
    return;
  }
  if (placement->attached) {
    detach_placement(pool, placement, NULL, NULL);
  }
  give_back_placement(placement);
}

void kvp_pool_free(struct kvp_daemon *daemon, struct kvp_pool *pool, struct kvp_pool_deletion *deletion) {
  for (uint32_t i = 0; i < pool->placement_count; i++) {
    free_placement(daemon, pool, &pool->placements[i], deletion);
  }
  kvp_block_namespaces_deinit(&pool->namespaces);
  if (pool->leases != NULL) {
    kvp_lease_table_destroy(pool->leases);
    kvp_owner_table_deinit(&pool->owners);
    kvp_fd_budget_release(&daemon->fds, kvp_fd_budget_owner_table(pool->placement_count));
  }
  for (int i = 0; i < kvp_pools_max; i++) {
    if (daemon->pools.pools[i] == pool) {
      daemon->pools.pools[i] = NULL;
    }
  }
  free(pool);
}

/* A forced delete takes blocks from sessions that still have them. */
static void forget_leases(struct kvp_daemon *daemon, const struct kvp_pool *pool) {
  for (uint32_t slot = 1; slot <= kvp_sessions_max; slot++) {
    struct kvp_session *session = daemon->sessions.slots[slot];
    if (session != NULL && session->state == KVP_SESSION_OPEN) {
      uint32_t owned = kvp_lease_owned_count(pool->leases, (uint16_t)slot);
      assert(owned <= session->blocks);
      session->blocks -= owned;
    }
  }
}

enum kvp_status kvp_pool_delete(struct kvp_daemon *daemon, struct kvp_pool *pool, bool force,
                                kvp_pool_deleted_fn deleted, void *context, struct kvp_error *error) {
  uint32_t leased = kvp_lease_leased_count(pool->leases);
  if (pool->steps_in_flight > 0) {
    return kvp_error_set(error, KVP_IN_USE, "pool '%s': %u steps are in flight", pool->spec.name,
                         pool->steps_in_flight);
  }
  if (leased > 0 && !force) {
    return kvp_error_set(error, KVP_IN_USE, "pool '%s': %u blocks are leased", pool->spec.name, leased);
  }
  if (pool->restores > 0) {
    return kvp_error_set(error, KVP_BUSY, "pool '%s' is being restored on a new executor", pool->spec.name);
  }
  forget_leases(daemon, pool);
  kvp_log(KVP_LOG_INFO, "pool_deleted", "pool=%" PRIu64 " name=%s leased_blocks=%u", pool->id, pool->spec.name,
          leased);
  struct kvp_pool_deletion *deletion = kvp_allocate(1, sizeof *deletion);
  deletion->deleted = deleted;
  deletion->context = context;
  kvp_pool_free(daemon, pool, deletion);
  if (deletion->partings == 0) {
    kvp_deferred_call(daemon->loop, &deletion->deferred, deletion_end, deletion);
  }
  kvp_session_settle_all(daemon);
  return KVP_OK;
}

void kvp_pool_reach_all(struct kvp_daemon *daemon) {
  for (int i = 0; i < kvp_pools_max; i++) {
    struct kvp_pool *pool = daemon->pools.pools[i];
    if (pool != NULL && pool->serving) {
      (void)kvp_lease_reach(pool->leases, kvp_step_retired_of, daemon);
    }
  }
}

uint32_t kvp_pool_free_owner_all(struct kvp_daemon *daemon, uint16_t owner, uint64_t fence) {
  uint32_t freed = 0;
  for (int i = 0; i < kvp_pools_max; i++) {
    struct kvp_pool *pool = daemon->pools.pools[i];
    if (pool != NULL && pool->serving) {
      freed += kvp_lease_free_all(pool->leases, owner, fence);
    }
  }
  return freed;
}

uint32_t kvp_pool_quarantined_by(const struct kvp_daemon *daemon, uint16_t owner) {
  uint32_t count = 0;
  for (int i = 0; i < kvp_pools_max; i++) {
    const struct kvp_pool *pool = daemon->pools.pools[i];
    if (pool != NULL && pool->serving) {
      count += kvp_lease_quarantined_by(pool->leases, owner);
    }
  }
  return count;
}

void kvp_pool_device_lost(struct kvp_daemon *daemon, const struct kvp_device *device) {
  for (int i = 0; i < kvp_pools_max; i++) {
    struct kvp_pool *pool = daemon->pools.pools[i];
    struct kvp_placement *placement = pool == NULL ? NULL : kvp_pool_placement(pool, device);
    if (placement != NULL) {
      placement->attached = false;
    }
  }
}

void kvp_pool_table_deinit(struct kvp_daemon *daemon) {
  assert(daemon->pools.work == 0);
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    kvp_pool_device_lost(daemon, &daemon->devices[i]);
  }
  for (int i = 0; i < kvp_pools_max; i++) {
    if (daemon->pools.pools[i] != NULL) {
      kvp_pool_free(daemon, daemon->pools.pools[i], NULL);
    }
  }
}
