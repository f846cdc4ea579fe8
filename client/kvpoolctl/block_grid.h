/* The map of a pool in characters: one cell for each block, or for as many as it takes to fit. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_BLOCK_GRID_H
#define KVPOOL_CLIENT_KVPOOLCTL_BLOCK_GRID_H

#include "client/kvpoolctl/block_summary.h"
#include "client/kvpoolctl/ctl.h"

/* The letter of owner i; '+' for those that come after the alphabet. */
char kvp_ctl_block_letter(size_t owner);

/* Prints the map of blocks [first, end) and a line that says how to read it. */
void kvp_ctl_block_grid_print(const struct kvp_ctl *ctl, const kvpool_block_map *map,
                              const struct kvp_ctl_block_summary *summary, uint32_t first, uint32_t end,
                              uint32_t rows_max);

#endif
