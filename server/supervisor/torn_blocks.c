/* The blocks that a lost step may have left half written. */
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

static int32_t inline_element(const struct kvp_wire_step *step, const struct kvp_wire_array *array, uint64_t index) {
  int32_t element = 0;
  memcpy(&element, (const uint8_t *)step + array->offset_bytes + index * sizeof element, sizeof element);
  return element;
}

/* What an op writes: block ids, or slots of so many a block, which one array names. */
struct torn_target {
  uint32_t array; /* KVP_WIRE_NO_ARRAY: nothing */
  uint32_t first; /* element of the array, then every `stride` */
  uint32_t stride;
  bool is_slots;
};

static struct torn_target op_target(const struct kvp_wire_op *op) {
  switch (op->kind) {
  case KVP_OP_STORE:
  case KVP_OP_FUSED_STORE:
    return (struct torn_target){.array = op->arrays[0], .stride = 1, .is_slots = true};
  case KVP_OP_ASSEMBLE:
    return (struct torn_target){.array = op->arrays[2], .stride = 1, .is_slots = true};
  case KVP_OP_COPY_BLOCKS: /* pairs of from and to */
    return (struct torn_target){.array = op->arrays[0], .first = 1, .stride = 2};
  case KVP_OP_ZERO_BLOCKS:
    return (struct torn_target){.array = op->arrays[0], .stride = 1};
  default:
    return (struct torn_target){.array = KVP_WIRE_NO_ARRAY};
  }
}

static void pool_mark_target(const struct torn_pool *marked, const struct kvp_wire_step *step, uint32_t region,
                             const struct torn_target *target, const struct kvp_wire_array *array) {
  uint32_t tokens_per_block = target->is_slots ? marked->pool->regions[region].tokens_per_block : 1;
  for (uint64_t i = target->first; i < array->bytes / sizeof(int32_t); i += target->stride) {
    int32_t element = inline_element(step, array, i);
    if (element >= 0) {
      pool_mark(marked, (uint32_t)element / tokens_per_block, step->owner);
    }
  }
}

static void list_mark_op(struct kvp_torn_list *list, struct kvp_daemon *daemon, const struct kvp_wire_step *step,
                         const struct kvp_wire_op *op, const struct kvp_wire_array *arrays) {
  const struct torn_target target = op_target(op);
  if (target.array >= step->array_count) {
    return; /* none, or it would have been refused: nothing of it ran */
  }
  const struct torn_pool *marked = list_pool(list, daemon, op->pool_id);
  if (marked == NULL || (target.is_slots && op->region >= marked->pool->spec.region_count)) {
    return;
  }
  const struct kvp_wire_array *array = &arrays[target.array];
  if (array->buffer_id == 0) {
    pool_mark_target(marked, step, op->region, &target, array);
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
    list_mark_op(list, daemon, step, &ops[i], arrays);
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
