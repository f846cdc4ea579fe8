/* A pool as the commands show it, to people and to programs. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_POOL_VIEW_H
#define KVPOOL_CLIENT_KVPOOLCTL_POOL_VIEW_H

#include "client/kvpoolctl/ctl.h"
#include "client/kvpoolctl/json.h"

json_t *kvp_ctl_pool_json(const kvpool_pool *pool);
/* A heading, a line of figures, a table of its regions. */
void kvp_ctl_pool_print(const struct kvp_ctl *ctl, const kvpool_pool *pool);
const char *kvp_ctl_pool_kind_name(kvpool_pool_kind kind);
/* "host:0, host:1"; the caller frees it. */
char *kvp_ctl_pool_placements(const kvpool_pool *pool);

#endif
