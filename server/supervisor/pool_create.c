/* Making a pool: check, charge, memory on every placement, attach on every placement. Loop thread only.
 *
 * Until all of it is done the pool holds its name and its place in the table but can't be found; whatever fails, an
 * executor's death in the middle included, undoes all of it. */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/types.h>

#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/pool.h"
#include "server/supervisor/pool_internal.h"

struct creation;

struct creation_placement {
  struct creation *creation;
  uint64_t restarts; /* of the executor that was there when we began */
  bool attached;
};

struct creation {
  struct kvp_daemon *daemon;
  struct kvp_pool *pool; /* NULL: refused at once */
  kvp_pool_done_fn done;
  void *context;
  uint32_t pending;       /* answers to come */
  struct kvp_error error; /* the first; status KVP_OK: none */
  struct creation_placement placements[kvp_devices_max];
  struct kvp_deferred deferred;
};

static bool same_executor(const struct creation *creation, uint32_t index) {
  const struct kvp_executor_link *link = creation->pool->placements[index].device->link;
  return kvp_executor_link_state(link) == KVP_LINK_SERVING &&
         kvp_executor_link_restarts(link) == creation->placements[index].restarts;
}

static void finish(struct creation *creation, struct kvp_pool *pool) {
  creation->daemon->pools.work--;
  creation->done(creation->context, pool, pool == NULL ? &creation->error : NULL);
  kvp_daemon_look_again(creation->daemon);
  free(creation);
}

static void fail(struct creation *creation) {
  struct kvp_pool *pool = creation->pool;
  kvp_log(KVP_LOG_WARNING, "pool_refused", "pool=%" PRIu64 " name=%s status=%s text=\"%s\"", pool->id,
          pool->spec.name, kvp_status_name((enum kvp_status)creation->error.status), creation->error.text);
  for (uint32_t i = 0; i < pool->placement_count; i++) {
    pool->placements[i].attached = creation->placements[i].attached && same_executor(creation, i);
  }
  kvp_pool_free(creation->daemon, pool, NULL);
  finish(creation, NULL);
}

/* An executor that was restarted meanwhile knows nothing of what its predecessor answered. */
static bool still_good(struct creation *creation) {
  for (uint32_t i = 0; i < creation->pool->placement_count && creation->error.status == KVP_OK; i++) {
    if (!same_executor(creation, i)) {
      (void)kvp_error_set(&creation->error, KVP_DEVICE_LOST, "the executor of %s died while pool '%s' was made",
                          creation->pool->placements[i].device->name, creation->pool->spec.name);
    }
  }
  return creation->error.status == KVP_OK;
}

static void take_answer(struct creation *creation, const struct kvp_error *error) {
  if (error->status != KVP_OK && creation->error.status == KVP_OK) {
    creation->error = *error;
  }
  assert(creation->pending > 0);
  creation->pending--;
}

static void on_attached(void *context, const struct kvp_error *error) {
  struct creation_placement *placement = context;
  struct creation *creation = placement->creation;
  placement->attached = error->status == KVP_OK;
  take_answer(creation, error);
  if (creation->pending > 0) {
    return;
  }
  if (!still_good(creation)) {
    fail(creation);
    return;
  }
  struct kvp_pool *pool = creation->pool;
  for (uint32_t i = 0; i < pool->placement_count; i++) {
    pool->placements[i].attached = true;
  }
  pool->serving = true;
  kvp_log(KVP_LOG_INFO, "pool_created",
          "pool=%" PRIu64
          " name=%s num_blocks=%u block_size=%u regions=%u placements=%u bytes_per_placement=%" PRIu64,
          pool->id, pool->spec.name, pool->spec.num_blocks, pool->spec.block_size, pool->spec.region_count,
          pool->placement_count, pool->bytes_per_placement);
  finish(creation, pool);
}

static void on_memory(void *context, const struct kvp_error *error) {
  struct creation_placement *placement = context;
  struct creation *creation = placement->creation;
  struct kvp_error told = *error;
  kvp_device_explain_memory(creation->pool->placements[placement - creation->placements].device, &told);
  take_answer(creation, &told);
  if (creation->pending > 0) {
    return;
  }
  if (!still_good(creation)) {
    fail(creation);
    return;
  }
  creation->pending = creation->pool->placement_count;
  for (uint32_t i = 0; i < creation->pool->placement_count; i++) {
    kvp_pool_attach(creation->pool, &creation->pool->placements[i], on_attached, &creation->placements[i]);
  }
}

static void make_memory(struct creation *creation) {
  struct kvp_pool *pool = creation->pool;
  creation->pending = pool->placement_count * pool->spec.region_count;
  for (uint32_t i = 0; i < pool->placement_count; i++) {
    for (uint32_t r = 0; r < pool->spec.region_count; r++) {
      char name[sizeof "kvpool::" + kvp_name_bytes_max + kvp_name_bytes_max];
      (void)snprintf(name, sizeof name, "kvpool:%s:%s", pool->spec.name, pool->spec.regions[r].name);
      kvp_memory_create(pool->placements[i].device->link, &creation->daemon->fds, ++creation->daemon->next_memory_id,
                        name, pool->regions[r].region_bytes, on_memory, &creation->placements[i],
                        &pool->placements[i].memory[r]);
    }
  }
}

static enum kvp_status check_table(struct kvp_pool_table *table, const char *name, uint32_t *slot,
                                   struct kvp_error *error) {
  *slot = kvp_pools_max;
  for (uint32_t i = 0; i < kvp_pools_max; i++) {
    if (table->pools[i] == NULL) {
      *slot = *slot == kvp_pools_max ? i : *slot;
    } else if (strcmp(table->pools[i]->spec.name, name) == 0) {
      return kvp_error_set_at(error, KVP_ALREADY_EXISTS, -1, "name", -1, (int64_t)table->pools[i]->id,
                              "pool '%s' is there already (%" PRIu64 ")", name, table->pools[i]->id);
    }
  }
  if (*slot == kvp_pools_max) {
    return kvp_error_set(error, KVP_TOO_LARGE, "%d pools are there already, no more are allowed", kvp_pools_max);
  }
  return KVP_OK;
}

static void fill_defaults(struct kvp_pool *pool, const struct kvp_daemon *daemon) {
  if (pool->spec.placement_count == 0) {
    pool->spec.placement_count = 1;
    memcpy(pool->spec.placements[0], daemon->devices[0].name, sizeof pool->spec.placements[0]);
  }
  for (uint32_t i = 0; i < pool->spec.region_count; i++) {
    struct kvp_region_spec *region = &pool->spec.regions[i];
    region->width = pool->regions[i].sizes.elements;
    region->compression_ratio = region->compression_ratio == 0 ? 1 : region->compression_ratio;
  }
}

/* A region is a memory of its own on every placement. */
static enum kvp_status charge_placement(const struct kvp_pool *pool, struct kvp_device *device, uint64_t *charged,
                                        struct kvp_error *error) {
  char what[kvp_name_bytes_max + sizeof "pool ''"];
  (void)snprintf(what, sizeof what, "pool '%s'", pool->spec.name);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < pool->spec.region_count; i++) {
    if (__builtin_add_overflow(bytes, kvp_ledger_memory_bytes(&device->ledger, pool->regions[i].region_bytes),
                               &bytes)) {
      bytes = UINT64_MAX;
      break;
    }
  }
  *charged = bytes;
  return kvp_ledger_charge(&device->ledger, device->name, KVP_LEDGER_POOL, what, pool->bytes_per_placement, bytes,
                           error);
}

/* Finds and charges the devices; placement_count says how many have been. */
static enum kvp_status charge_placements(struct creation *creation, struct kvp_error *error) {
  struct kvp_pool *pool = creation->pool;
  for (uint32_t i = 0; i < pool->spec.placement_count; i++) {
    struct kvp_device *device = kvp_daemon_find_device(creation->daemon, pool->spec.placements[i], error);
    if (device == NULL) {
      return KVP_WRONG_DEVICE;
    }
    enum kvp_status status = kvp_device_check_serving(device, error);
    if (status == KVP_OK) {
      status = charge_placement(pool, device, &pool->placements[i].charged_bytes, error);
    }
    if (status != KVP_OK) {
      return status;
    }
    pool->placements[i].device = device;
    creation->placements[i] =
        (struct creation_placement){.creation = creation, .restarts = kvp_executor_link_restarts(device->link)};
    pool->placement_count++;
  }
  return KVP_OK;
}

/* The memories take over their part of the charge, kvp_pool_free gives back the rest. */
static uint64_t pool_descriptors(const struct kvp_pool *pool) {
  uint64_t one_placement = 0;
  for (uint32_t i = 0; i < pool->spec.region_count; i++) {
    one_placement += kvp_fd_budget_memory(pool->regions[i].region_bytes);
  }
  return pool->placement_count * one_placement + kvp_fd_budget_owner_table(pool->placement_count);
}

static enum kvp_status make_tables(struct kvp_pool *pool, struct kvp_error *error) {
  enum kvp_status status = kvp_owner_table_init(&pool->owners, pool->spec.name, pool->spec.num_blocks, error);
  if (status == KVP_OK) {
    status = kvp_lease_table_new(&pool->owners, &pool->leases, error);
    if (status != KVP_OK) {
      kvp_owner_table_deinit(&pool->owners);
    }
  }
  return status;
}

/* Charges descriptors for all of the pool, then makes its tables. */
static enum kvp_status charge_and_make_tables(struct kvp_daemon *daemon, struct kvp_pool *pool,
                                              struct kvp_error *error) {
  uint64_t descriptors = pool_descriptors(pool);
  char what[kvp_name_bytes_max + sizeof "pool ''"];
  (void)snprintf(what, sizeof what, "pool '%s'", pool->spec.name);
  enum kvp_status status = kvp_fd_budget_charge(&daemon->fds, what, descriptors, KVP_TOO_LARGE, error);
  if (status != KVP_OK) {
    return status;
  }
  status = make_tables(pool, error);
  if (status != KVP_OK) {
    kvp_fd_budget_release(&daemon->fds, descriptors);
  }
  return status;
}

/* Ids count up from a random begin, so that one that a client kept from an earlier daemon names no pool of this one.
 * A JSON number holds them all. */
static enum kvp_status give_id(struct kvp_pool_table *table, struct kvp_pool *pool, struct kvp_error *error) {
  const uint64_t begin_max = (UINT64_C(1) << 52) - 1;
  while (table->next_id == 0) {
    ssize_t got = getrandom(&table->next_id, sizeof table->next_id, 0);
    if (got < 0 && errno != EINTR) {
      return kvp_error_set(error, KVP_INTERNAL, "no random bytes for a pool's id: %s", strerror(errno));
    }
    table->next_id = got == (ssize_t)sizeof table->next_id ? table->next_id & begin_max : 0;
  }
  pool->id = table->next_id++;
  return KVP_OK;
}

/* Everything that can be said at once. On an error creation->pool is NULL and nothing is left. */
static enum kvp_status begin(struct creation *creation, const struct kvp_pool_spec *spec, struct kvp_error *error) {
  struct kvp_daemon *daemon = creation->daemon;
  struct kvp_pool *pool = kvp_allocate(1, sizeof *pool);
  creation->pool = pool;
  pool->spec = *spec;
  uint32_t slot = 0;
  enum kvp_status status = kvp_pool_spec_check(spec, pool->regions, &pool->bytes_per_placement, error);
  if (status == KVP_OK) {
    fill_defaults(pool, daemon);
    status = check_table(&daemon->pools, spec->name, &slot, error);
  }
  if (status == KVP_OK) {
    status = charge_placements(creation, error);
  }
  if (status == KVP_OK) {
    status = charge_and_make_tables(daemon, pool, error);
  }
  if (status == KVP_OK) {
    status = give_id(&daemon->pools, pool, error);
  }
  if (status != KVP_OK) {
    kvp_pool_free(daemon, pool, NULL);
    creation->pool = NULL;
    return status;
  }
  daemon->pools.pools[slot] = pool;
  return KVP_OK;
}

static void refuse(void *context) {
  struct creation *creation = context;
  kvp_log(KVP_LOG_WARNING, "pool_refused", "status=%s text=\"%s\"",
          kvp_status_name((enum kvp_status)creation->error.status), creation->error.text);
  finish(creation, NULL);
}

void kvp_pool_create(struct kvp_daemon *daemon, const struct kvp_pool_spec *spec, kvp_pool_done_fn done,
                     void *context) {
  struct creation *creation = kvp_allocate(1, sizeof *creation);
  creation->daemon = daemon;
  creation->done = done;
  creation->context = context;
  daemon->pools.work++;
  if (begin(creation, spec, &creation->error) == KVP_OK) {
    make_memory(creation);
  } else {
    kvp_deferred_call(daemon->loop, &creation->deferred, refuse, creation);
  }
}
