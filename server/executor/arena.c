/* A bump allocator over a list of blocks that becomes one block when it is reset. */
#include "server/executor/arena.h"

#include <stddef.h>
#include <stdlib.h>

enum {
  block_bytes_min = 16 << 10,
  kept_bytes_max = 2 << 20, /* a write or read of the largest chunk, twice; larger steps pay for their memory */
};

struct kvp_arena_block {
  _Alignas(kvp_arena_alignment_bytes) struct kvp_arena_block *older;
  uint64_t capacity_bytes;
  uint64_t used_bytes;
  _Alignas(kvp_arena_alignment_bytes) uint8_t data[];
};

static struct kvp_arena_block *block_new(uint64_t bytes) {
  uint64_t total = (bytes + sizeof(struct kvp_arena_block) + kvp_arena_alignment_bytes - 1) /
                   kvp_arena_alignment_bytes * kvp_arena_alignment_bytes;
  struct kvp_arena_block *block = aligned_alloc(kvp_arena_alignment_bytes, total);
  if (block != NULL) {
    block->older = NULL;
    block->capacity_bytes = total - sizeof *block;
    block->used_bytes = 0;
  }
  return block;
}

void kvp_arena_deinit(struct kvp_arena *arena) {
  while (arena->newest != NULL) {
    struct kvp_arena_block *older = arena->newest->older;
    free(arena->newest);
    arena->newest = older;
  }
  arena->capacity_bytes = 0;
}

void *kvp_arena_alloc(struct kvp_arena *arena, uint64_t bytes) {
  uint64_t rounded = (bytes + kvp_arena_alignment_bytes - 1) / kvp_arena_alignment_bytes * kvp_arena_alignment_bytes;
  if (rounded < bytes || rounded > PTRDIFF_MAX / 2) {
    return NULL;
  }
  struct kvp_arena_block *block = arena->newest;
  if (block == NULL || block->capacity_bytes - block->used_bytes < rounded) {
    block = block_new(rounded > block_bytes_min ? rounded : block_bytes_min);
    if (block == NULL) {
      return NULL;
    }
    block->older = arena->newest;
    arena->newest = block;
    arena->capacity_bytes += block->capacity_bytes;
  }
  void *data = block->data + block->used_bytes;
  block->used_bytes += rounded;
  return data;
}

void kvp_arena_reset(struct kvp_arena *arena) {
  struct kvp_arena_block *block = arena->newest;
  if (block == NULL) {
    return;
  }
  uint64_t capacity = arena->capacity_bytes;
  if (block->older == NULL && capacity <= kept_bytes_max) {
    block->used_bytes = 0;
    return;
  }
  kvp_arena_deinit(arena);
  if (capacity > kept_bytes_max) {
    return;
  }
  arena->newest = block_new(capacity);
  arena->capacity_bytes = arena->newest == NULL ? 0 : arena->newest->capacity_bytes;
}
