/* The owner table of one pool: a memfd of one atomic 64-bit entry per block (proto/owner_entry.h).
 *
 * The supervisor's loop thread is its only writer; executors map the same memfd read-only. Sealed against resizing.
 */
#ifndef KVPOOL_SUPERVISOR_OWNER_TABLE_H
#define KVPOOL_SUPERVISOR_OWNER_TABLE_H

#include <stdint.h>

#include "proto/owner_entry.h"
#include "proto/status.h"

struct kvp_owner_table {
  _Atomic uint64_t *entries; /* [num_blocks] */
  uint32_t num_blocks;
  int fd;
};

enum kvp_status kvp_owner_table_init(struct kvp_owner_table *table, const char *pool_name, uint32_t num_blocks,
                                     struct kvp_error *error);
void kvp_owner_table_deinit(struct kvp_owner_table *table);
/* block < num_blocks. A release store. */
void kvp_owner_table_set(struct kvp_owner_table *table, uint32_t block, uint64_t entry);
uint64_t kvp_owner_table_get(const struct kvp_owner_table *table, uint32_t block);

#endif
