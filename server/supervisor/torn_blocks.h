/* The blocks that a lost step may have left half written. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_TORN_BLOCKS_H
#define KVPOOL_SUPERVISOR_TORN_BLOCKS_H

#include "server/supervisor/step.h"

struct kvp_torn_list;

/* Of the ops of an encoded step that write to a pool - store, fused_store, assemble with store_slots, copy_blocks,
 * zero_blocks: blocks that their arrays name and the step's owner has; for an array in a buffer, which nobody can read
 * any more, every block of that pool that the owner has. The owner of an operator's step has all. */
struct kvp_torn_list *kvp_torn_list_new(struct kvp_daemon *daemon, const struct kvp_wire_step *step);
void kvp_torn_list_destroy(struct kvp_torn_list *list);
/* One entry a pool; pools without a torn block have none. */
const struct kvp_torn_blocks *kvp_torn_list_pools(const struct kvp_torn_list *list, uint32_t *count);

#endif
