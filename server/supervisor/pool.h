/* Pools: their regions, placements, memory and blocks. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_POOL_H
#define KVPOOL_SUPERVISOR_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/format.h"
#include "server/supervisor/block_namespaces.h"
#include "server/supervisor/lease.h"
#include "server/supervisor/memory.h"
#include "server/supervisor/pool_access.h"
#include "server/supervisor/pool_spec.h"

struct kvp_daemon;
struct kvp_device;

struct kvp_placement {
  struct kvp_device *device;
  struct kvp_memory *memory[kvp_regions_per_pool_max]; /* one a region */
  uint64_t charged_bytes;                              /* of the device's ledger: bytes_per_placement or more */
  bool attached;                                       /* its executor knows the pool */
};

struct kvp_pool {
  uint64_t id;                                           /* never used twice, by no other daemon either */
  struct kvp_pool_spec spec;                             /* as asked, defaults filled in */
  struct kvp_geometry regions[kvp_regions_per_pool_max]; /* [spec.region_count] */
  uint32_t placement_count;
  struct kvp_placement placements[kvp_devices_max];
  struct kvp_owner_table owners;
  struct kvp_lease_table *leases;
  struct kvp_block_namespaces namespaces;
  uint64_t bytes_per_placement;
  uint32_t steps_in_flight; /* kept by step.c: a pool in use is not deleted */
  uint32_t restores;        /* under way: not deleted meanwhile */
  bool serving;             /* created completely; only then can it be found */
  struct kvp_pool_access access;
};

struct kvp_pool_table {
  struct kvp_pool *pools[kvp_pools_max]; /* NULL: free slot */
  uint64_t next_id;                      /* 0: none given yet */
  uint32_t work;                         /* creations and restores under way */
};

typedef void (*kvp_pool_done_fn)(void *context, struct kvp_pool *pool, const struct kvp_error *error);

/* Checks the spec completely (names unique and sane, geometry, placements, memory), charges the ledgers, has the
 * executors make and attach the memory. done once, later or, for a spec refused at once, from the loop too. On an
 * error nothing is left: pool NULL. */
void kvp_pool_create(struct kvp_daemon *daemon, const struct kvp_pool_spec *spec, kvp_pool_done_fn done,
                     void *context);
typedef void (*kvp_pool_deleted_fn)(void *context);

/* Refused with in_use while steps of it are in flight or, without force, while blocks are leased. Otherwise the pool
 * can't be found any more, and deleted is called once, later: when no step of a worker's ring uses its memory either,
 * and the ledgers have it back. */
enum kvp_status kvp_pool_delete(struct kvp_daemon *daemon, struct kvp_pool *pool, bool force,
                                kvp_pool_deleted_fn deleted, void *context, struct kvp_error *error);

/* NULL and unknown_pool when there is none that serves. */
struct kvp_pool *kvp_pool_find(struct kvp_daemon *daemon, uint64_t pool_id, struct kvp_error *error);
struct kvp_pool *kvp_pool_find_name(struct kvp_daemon *daemon, const char *name, struct kvp_error *error);
/* The pool's placement on a device; NULL when it has none there. */
struct kvp_placement *kvp_pool_placement(struct kvp_pool *pool, const struct kvp_device *device);

/* A new executor of this device: import memory and attach every pool placed there. done when all are. */
void kvp_pool_restore_all(struct kvp_daemon *daemon, struct kvp_device *device, kvp_memory_done_fn done,
                          void *context);
/* Steps have retired: quarantined blocks may return. */
void kvp_pool_reach_all(struct kvp_daemon *daemon);
/* Everything a session has leased, to quarantine. Returns how many blocks. */
uint32_t kvp_pool_free_owner_all(struct kvp_daemon *daemon, uint16_t owner, uint64_t fence);
/* Blocks of all pools that still name this owner, in quarantine. */
uint32_t kvp_pool_quarantined_by(const struct kvp_daemon *daemon, uint16_t owner);
/* The device's executor is gone: nothing is attached there any more. */
void kvp_pool_device_lost(struct kvp_daemon *daemon, const struct kvp_device *device);
/* At the daemon's end: closes everything, tells no executor. */
void kvp_pool_table_deinit(struct kvp_daemon *daemon);

#endif
