/* Memory of one step: taken piece by piece, given back at once, kept for the next step. One thread. */
#ifndef KVPOOL_EXECUTOR_ARENA_H
#define KVPOOL_EXECUTOR_ARENA_H

#include <stdint.h>

struct kvp_arena_block;

struct kvp_arena {
  struct kvp_arena_block *newest; /* older ones behind it */
  uint64_t capacity_bytes;        /* of all blocks */
};

enum { kvp_arena_alignment_bytes = 64 };

/* Zeroed: ready to use. */
void kvp_arena_deinit(struct kvp_arena *arena);

/* Aligned to kvp_arena_alignment_bytes, not cleared; NULL when the host has no memory. bytes may be 0. */
void *kvp_arena_alloc(struct kvp_arena *arena, uint64_t bytes);

/* Everything allocated is gone. What a step of the same size needs stays, in one block, unless it is a lot. */
void kvp_arena_reset(struct kvp_arena *arena);

#endif
