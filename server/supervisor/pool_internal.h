/* What the files of a pool's life share. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_POOL_INTERNAL_H
#define KVPOOL_SUPERVISOR_POOL_INTERNAL_H

#include "server/supervisor/pool.h"

/* Tells the placement's executor what the pool is. Its memory is there already. */
void kvp_pool_attach(const struct kvp_pool *pool, const struct kvp_placement *placement, kvp_link_result_fn result,
                     void *context);
struct kvp_pool_deletion;

/* Takes the pool out of the table and gives back all it has: attached placements are detached, memory goes, ledgers
 * are credited; where workers' rings are, once their executor says that no step of theirs uses it. deletion: who waits
 * for that; NULL: nobody. */
void kvp_pool_free(struct kvp_daemon *daemon, struct kvp_pool *pool, struct kvp_pool_deletion *deletion);

#endif
