/* Checks of copy_blocks and zero_blocks: whole blocks, in every region and layer of a pool. Kernels take the blocks as
 * checked, so they come with the step.
 */
#include "server/executor/intake_op.h"

static enum kvp_status block_find(struct kvp_intake_op *op, const struct kvp_pool *pool,
                                  const struct kvp_intake_element *element, bool is_write) {
  if (element->value < 0 || element->value >= (int64_t)pool->num_blocks) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, element->array, element->position, element->value,
                             "%s[%llu]%s = %lld is not in [0, %u), the pool's blocks", element->array,
                             (unsigned long long)element->index, element->field, (long long)element->value,
                             pool->num_blocks);
  }
  return kvp_intake_block_check(op, pool, element, (uint32_t)element->value, is_write);
}

static enum kvp_status target_add(struct kvp_intake_op *op, const struct kvp_intake_element *element) {
  if (kvp_slot_set_add(&op->intake->slots, (int32_t)element->value)) {
    return KVP_OK;
  }
  return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, element->array, element->position, element->value,
                           "%s[%llu]%s = %lld: that block is written already", element->array,
                           (unsigned long long)element->index, element->field, (long long)element->value);
}

/* Pairs run side by side: no block that one of them writes is in another. */
static enum kvp_status pairs_check(struct kvp_intake_op *op, const struct kvp_pool *pool, const int32_t *pairs,
                                   uint64_t count) {
  enum kvp_status status = KVP_OK;
  for (uint64_t i = 0; i < count; i++) {
    const struct kvp_intake_element from = {"pairs", ".from", i, 2 * i, pairs[2 * i]};
    const struct kvp_intake_element to = {"pairs", ".to", i, 2 * i + 1, pairs[2 * i + 1]};
    if ((status = block_find(op, pool, &from, false)) != KVP_OK ||
        (status = block_find(op, pool, &to, true)) != KVP_OK || (status = target_add(op, &to)) != KVP_OK) {
      return status;
    }
  }
  for (uint64_t i = 0; i < count; i++) {
    if (pairs[2 * i] != pairs[2 * i + 1] && kvp_slot_set_has(&op->intake->slots, pairs[2 * i])) {
      return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "pairs", 2 * i, pairs[2 * i],
                               "pairs[%llu].from = %d: another pair writes that block", (unsigned long long)i,
                               pairs[2 * i]);
    }
  }
  return KVP_OK;
}

static enum kvp_status blocks_check(struct kvp_intake_op *op, const struct kvp_pool *pool, const int32_t *blocks,
                                    uint64_t count) {
  enum kvp_status status = KVP_OK;
  for (uint64_t i = 0; i < count && status == KVP_OK; i++) {
    const struct kvp_intake_element element = {"blocks", "", i, i, blocks[i]};
    status = block_find(op, pool, &element, true);
    status = status == KVP_OK ? target_add(op, &element) : status;
  }
  return status;
}

static enum kvp_status contents_check(struct kvp_intake_op *op, const struct kvp_pool *pool,
                                      const struct kvp_intake_array *array, enum kvp_intake_use use) {
  const struct kvp_intake_memo_key key = {
      .use = use, .array = array->index, .other = KVP_WIRE_NO_ARRAY, .pool = pool};
  if (kvp_intake_memo_find(op, &key) != NULL) {
    return KVP_OK;
  }
  if (kvp_intake_memo_add(op, array, &key) == NULL) {
    return (enum kvp_status)op->error->status;
  }
  const uint64_t ints = array->bytes / sizeof(int32_t);
  if (!kvp_slot_set_begin(&op->intake->slots, ints)) {
    return kvp_intake_no_memory(op);
  }
  return use == KVP_USE_PAIRS ? pairs_check(op, pool, array->data, ints / 2)
                              : blocks_check(op, pool, array->data, ints);
}

static enum kvp_status blocks_op(struct kvp_intake_op *op, const char *name, enum kvp_intake_use use,
                                 enum kvp_device_op_kind kind) {
  const uint64_t entry_bytes = (use == KVP_USE_PAIRS ? 2 : 1) * sizeof(int32_t);
  struct kvp_intake_array array = {0};
  struct kvp_pool *pool = NULL;
  enum kvp_status status = kvp_intake_pool(op, "", op->wire->pool_id, &pool);
  if (status != KVP_OK || (status = kvp_intake_array_check(op, 0, name, entry_bytes, &array)) != KVP_OK) {
    return status;
  }
  if (!array.is_inline) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, name, -1, array.index,
                             "%s lie in a buffer: they are checked before the step runs, and must come with it",
                             name);
  }
  if ((status = contents_check(op, pool, &array, use)) != KVP_OK) {
    return status;
  }
  for (uint32_t i = 0; i < pool->region_count && array.bytes > 0; i++) {
    struct kvp_device_op *device_op = kvp_intake_device_op(op, kind);
    if (device_op == NULL) {
      return (enum kvp_status)op->error->status;
    }
    device_op->host_arrays = KVP_ARRAY_BLOCKS;
    device_op->params.blocks = (struct kvp_blocks_params){.base = pool->regions[i].base,
                                                          .geometry = &pool->regions[i].geometry,
                                                          .pairs = array.data,
                                                          .count = array.bytes / entry_bytes};
  }
  return KVP_OK;
}

enum kvp_status kvp_intake_copy_blocks(struct kvp_intake_op *op) {
  return blocks_op(op, "pairs", KVP_USE_PAIRS, KVP_DEVICE_COPY_BLOCKS);
}

enum kvp_status kvp_intake_zero_blocks(struct kvp_intake_op *op) {
  return blocks_op(op, "blocks", KVP_USE_BLOCKS, KVP_DEVICE_ZERO_BLOCKS);
}
