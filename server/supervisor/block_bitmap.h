/* A set of block numbers that finds its next member in a handful of steps, however large it is: a bitmap, above it a
 * bitmap of its words that are not zero, and so on up to a single word. One thread. */
#ifndef KVPOOL_SUPERVISOR_BLOCK_BITMAP_H
#define KVPOOL_SUPERVISOR_BLOCK_BITMAP_H

#include <stdbool.h>
#include <stdint.h>

enum { kvp_block_bitmap_levels_max = 6 /* 64^6 > 2^32 */ };

#define KVP_BLOCK_NONE UINT32_MAX

struct kvp_block_bitmap {
  uint32_t block_count;
  uint32_t level_count;
  uint64_t *levels[kvp_block_bitmap_levels_max]; /* [0]: the blocks; the last has one word */
};

/* Empty; block_count > 0. False: out of memory. */
bool kvp_block_bitmap_init(struct kvp_block_bitmap *bitmap, uint32_t block_count);
void kvp_block_bitmap_deinit(struct kvp_block_bitmap *bitmap);

/* block < block_count. */
bool kvp_block_bitmap_has(const struct kvp_block_bitmap *bitmap, uint32_t block);
void kvp_block_bitmap_add(struct kvp_block_bitmap *bitmap, uint32_t block);
void kvp_block_bitmap_remove(struct kvp_block_bitmap *bitmap, uint32_t block);
/* The least member >= from (from <= block_count); KVP_BLOCK_NONE when there is none. */
uint32_t kvp_block_bitmap_next(const struct kvp_block_bitmap *bitmap, uint32_t from);

#endif
