/* The block allocator of one pool: which block is free, leased to whom, or in quarantine.
 *
 * Truth is the owner table; this keeps the free blocks at hand and the quarantine in order. All or nothing: a call
 * that fails has changed nothing. Loop thread only.
 *
 * Quarantine: a freed block returns when every step that may touch it has retired, on every placement: those of its
 * owner, accepted before the free, and the daemon's own. The caller tells a fence at the free and later how far each
 * owner's fences have been reached.
 */
#ifndef KVPOOL_SUPERVISOR_LEASE_H
#define KVPOOL_SUPERVISOR_LEASE_H

#include <stdint.h>

#include "proto/limits.h"
#include "server/supervisor/owner_table.h"

struct kvp_lease_table;

/* An owner that is no session's slot: of blocks on their way to one, which nobody may touch yet. */
enum { kvp_lease_owner_nobody = kvp_sessions_max + 1 };

/* table outlives it. */
enum kvp_status kvp_lease_table_new(struct kvp_owner_table *table, struct kvp_lease_table **out,
                                    struct kvp_error *error);
void kvp_lease_table_destroy(struct kvp_lease_table *leases);

/* Any `count` free blocks, in ascending order where that costs nothing. out: [count]. out_of_blocks names free and
 * asked. */
enum kvp_status kvp_lease_allocate(struct kvp_lease_table *leases, uint16_t owner, uint64_t epoch, uint32_t count,
                                   int32_t *out, struct kvp_error *error);
/* The blocks [first, first + count). The error names the first block that is not free. */
enum kvp_status kvp_lease_allocate_range(struct kvp_lease_table *leases, uint16_t owner, uint64_t epoch,
                                         uint32_t first, uint32_t count, struct kvp_error *error);
/* Blocks that kvp_lease_owner_nobody has become `owner`'s, assigned at `epoch`. */
void kvp_lease_pass_on(struct kvp_lease_table *leases, uint16_t owner, uint64_t epoch, const int32_t *blocks,
                       uint32_t count);
/* Blocks of `owner`, each once, out of the table from now on; they return when its fences reach `fence`. Refused: a block
 * out of range, not owned, twice (position and value in the error). */
enum kvp_status kvp_lease_free(struct kvp_lease_table *leases, uint16_t owner, const int32_t *blocks, uint32_t count,
                               uint64_t fence, struct kvp_error *error);
/* Everything `owner` has. Returns how many. */
uint32_t kvp_lease_free_all(struct kvp_lease_table *leases, uint16_t owner, uint64_t fence);
/* Every step up to and including this number that may touch what `owner` has freed has retired. */
typedef uint64_t (*kvp_lease_retired_fn)(const void *context, uint16_t owner);
/* Asks for each owner with blocks in quarantine. An owner's fences only grow. Returns how many became free. */
uint32_t kvp_lease_reach(struct kvp_lease_table *leases, kvp_lease_retired_fn retired, const void *context);

uint32_t kvp_lease_free_count(const struct kvp_lease_table *leases);
uint32_t kvp_lease_leased_count(const struct kvp_lease_table *leases);
uint32_t kvp_lease_quarantined_count(const struct kvp_lease_table *leases);
uint32_t kvp_lease_owned_count(const struct kvp_lease_table *leases, uint16_t owner);
/* Blocks in quarantine that `owner` freed: their entries still name it, so its slot is not given to anybody else yet.
 */
uint32_t kvp_lease_quarantined_by(const struct kvp_lease_table *leases, uint16_t owner);

#endif
