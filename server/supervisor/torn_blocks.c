/* The blocks that stores of a lost step may have left half written. */
#include "server/supervisor/torn_blocks.h"

#include <stdlib.h>
#include <string.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/daemon.h"

struct torn_pool {
  struct kvp_pool *pool;
  uint64_t *marks; /* one bit a block */
};

struct kvp_torn_list {
  uint32_t pool_count;
  struct torn_pool marked[kvp_pools_max];
  uint32_t count;
  struct kvp_torn_blocks pools[kvp_pools_max]; /* their blocks are ours */
};

static struct torn_pool *list_pool(struct kvp_torn_list *list, struct kvp_daemon *daemon, uint64_t pool_id) {
  for (uint32_t i = 0; i < list->pool_count; i++) {
    if (list->marked[i].pool->id == pool_id) {
      return &list->marked[i];
    }
  }
  struct kvp_pool *pool = kvp_pool_find(daemon, pool_id, NULL);
  if (pool == NULL) {
    return NULL;
  }
  struct torn_pool *marked = &list->marked[list->pool_count++];
  marked->pool = pool;
  marked->marks = kvp_allocate((pool->owners.num_blocks + 63) / 64, sizeof *marked->marks);
  return marked;
}

static void pool_mark(const struct torn_pool *marked, uint32_t block, uint32_t owner) {
  const struct kvp_owner_table *owners = &marked->pool->owners;
  if (block < owners->num_blocks &&
      (owner == 0 || kvp_owner_entry_owner(kvp_owner_table_get(owners, block)) == owner)) {
    marked->marks[block / 64] |= UINT64_C(1) << (block % 64);
  }
}

static void pool_mark_slots(const struct torn_pool *marked, const struct kvp_wire_step *step, uint32_t region,
                            const struct kvp_wire_array *slots) {
  const uint8_t *bytes = (const uint8_t *)step + slots->offset_bytes;
  uint32_t tokens_per_block = marked->pool->regions[region].tokens_per_block;
  for (uint64_t i = 0; i < slots->bytes / sizeof(int32_t); i++) {
    int32_t slot = -1;
    memcpy(&slot, bytes + i * sizeof slot, sizeof slot);
    if (slot >= 0) {
      pool_mark(marked, (uint32_t)slot / tokens_per_block, step->owner);
    }
  }
}

static void list_mark_store(struct kvp_torn_list *list, struct kvp_daemon *daemon, const struct kvp_wire_step *step,
                            const struct kvp_wire_op *op, const struct kvp_wire_array *arrays) {
  const struct torn_pool *marked = list_pool(list, daemon, op->pool_id);
  if (marked == NULL || op->region >= marked->pool->spec.region_count || op->arrays[0] >= step->array_count) {
    return; /* it would have been refused: nothing of it ran */
  }
  const struct kvp_wire_array *slots = &arrays[op->arrays[0]];
  if (slots->buffer_id == 0) {
    pool_mark_slots(marked, step, op->region, slots);
    return;
  }
  for (uint32_t block = 0; block < marked->pool->owners.num_blocks; block++) {
    pool_mark(marked, block, step->owner);
  }
}

static void list_collect(struct kvp_torn_list *list, const struct torn_pool *marked) {
  uint32_t words = (marked->pool->owners.num_blocks + 63) / 64;
  uint32_t count = 0;
  for (uint32_t i = 0; i < words; i++) {
    count += (uint32_t)__builtin_popcountll(marked->marks[i]);
  }
  if (count == 0) {
    return;
  }
  int32_t *blocks = kvp_allocate(count, sizeof *blocks);
  uint32_t filled = 0;
  for (uint32_t i = 0; i < words; i++) {
    for (uint64_t left = marked->marks[i]; left != 0; left &= left - 1) {
      blocks[filled++] = (int32_t)(i * 64 + (uint32_t)__builtin_ctzll(left));
    }
  }
  list->pools[list->count++] = (struct kvp_torn_blocks){marked->pool->id, blocks, count};
}

struct kvp_torn_list *kvp_torn_list_new(struct kvp_daemon *daemon, const struct kvp_wire_step *step) {
  struct kvp_torn_list *list = kvp_allocate(1, sizeof *list);
  const struct kvp_wire_op *ops = (const struct kvp_wire_op *)(step + 1);
  const struct kvp_wire_array *arrays = (const struct kvp_wire_array *)(ops + step->op_count);
  for (uint32_t i = 0; i < step->op_count; i++) {
    if (ops[i].kind == KVP_OP_STORE) {
      list_mark_store(list, daemon, step, &ops[i], arrays);
    }
  }
  for (uint32_t i = 0; i < list->pool_count; i++) {
    list_collect(list, &list->marked[i]);
    free(list->marked[i].marks);
  }
  return list;
}

void kvp_torn_list_destroy(struct kvp_torn_list *list) {
  for (uint32_t i = 0; i < list->count; i++) {
    free((void *)list->pools[i].blocks); /* made in list_collect */
  }
  free(list);
}

const struct kvp_torn_blocks *kvp_torn_list_pools(const struct kvp_torn_list *list, uint32_t *count) {
  *count = list->count;
  return list->pools;
}
