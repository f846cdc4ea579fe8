/* Blocks on their way to a session: what another namespace has left in them is zeroed first, on every placement, and
 * the AllocateBlocks call is answered only then. Loop thread only.
 *
 * Until that nobody owns them: their entries in the owner table name kvp_lease_owner_nobody. A session that ends, or a
 * call that does, meanwhile gets nothing; the blocks go back.
 */
#ifndef KVPOOL_SUPERVISOR_BLOCK_GRANT_H
#define KVPOOL_SUPERVISOR_BLOCK_GRANT_H

#include <stdint.h>

#include "server/supervisor/daemon.h"

/* Whom the lease table is to give the blocks to that this session asks for: the session, or nobody where they have to
 * be looked at first. */
uint16_t kvp_block_grant_owner(const struct kvp_session *session, struct kvp_pool *pool);

/* Answers the call, now or later. blocks: [count], malloc'ed, the grant's from here on; leased to `owner`, which
 * kvp_block_grant_owner said, with the next epoch. */
void kvp_block_grant(struct kvp_daemon *daemon, struct kvp_session *session, struct kvp_pool *pool,
                     struct kvp_rpc_call *call, uint16_t owner, int32_t *blocks, uint32_t count);
/* The call is over, whoever ended it. */
void kvp_block_grant_on_closed(void *context, struct kvp_rpc_call *call);

#endif
