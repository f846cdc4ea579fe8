/* Which namespace had a pool's blocks last. A pool that only one has ever used pays one number; loop thread only. */
#ifndef KVPOOL_SUPERVISOR_BLOCK_NAMESPACES_H
#define KVPOOL_SUPERVISOR_BLOCK_NAMESPACES_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

struct kvp_block_namespaces {
  uint64_t all;   /* of every block, where `each` is NULL; 0: no block was ever given to a session */
  uint64_t *each; /* [num_blocks]; made when a second namespace comes */
};

/* Zeroed is ready to use. */
void kvp_block_namespaces_deinit(struct kvp_block_namespaces *namespaces);

/* May a block that this namespace gets have been another's? False: all are its own from now on, there is nothing to
 * look at and nothing to note. */
bool kvp_block_namespaces_mixed(struct kvp_block_namespaces *namespaces, uint64_t number);

/* Of a mixed pool: the blocks that another namespace had last, to out [count]. Blocks nobody had count as those of the
 * pool's first namespace. Refused: out_of_memory. */
enum kvp_status kvp_block_namespaces_changed(struct kvp_block_namespaces *namespaces, uint32_t num_blocks,
                                             uint64_t number, const int32_t *blocks, uint32_t count, int32_t *out,
                                             uint32_t *out_count, struct kvp_error *error);
/* Of a mixed pool: these blocks are this namespace's, their contents too. */
void kvp_block_namespaces_set(struct kvp_block_namespaces *namespaces, uint64_t number, const int32_t *blocks,
                              uint32_t count);

#endif
