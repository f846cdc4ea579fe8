/* Which blocks an op may touch. */
#include "proto/owner_entry.h"
#include "server/executor/intake_op.h"

static const char *block_state_name(enum kvp_block_state state) {
  switch (state) {
  case KVP_BLOCK_FREE:
    return "free";
  case KVP_BLOCK_LEASED:
    return "leased";
  case KVP_BLOCK_SEALED:
    return "sealed";
  case KVP_BLOCK_QUARANTINED:
    return "being freed";
  }
  return "in no known state";
}

/* "op 3 store: slots[7] = 130: " and what follows. */
#define ELEMENT_REFUSE(op, status, element, format, ...)                                                             \
  KVP_INTAKE_REFUSE(op, status, (element)->array, (element)->position, (element)->value,                             \
                    "%s[%llu]%s = %lld: " format, (element)->array, (unsigned long long)(element)->index,            \
                    (element)->field, (long long)(element)->value, __VA_ARGS__)

enum kvp_status kvp_intake_block_check(struct kvp_intake_op *op, const struct kvp_pool *pool,
                                       const struct kvp_intake_element *element, uint32_t block, bool is_write) {
  if (op->header->owner == 0) {
    return KVP_OK;
  }
  const uint64_t entry = atomic_load_explicit(&pool->owner_entries[block], memory_order_acquire);
  const enum kvp_block_state state = kvp_owner_entry_state(entry);
  const bool is_held = state == KVP_BLOCK_LEASED || state == KVP_BLOCK_SEALED;
  if (!is_held || kvp_owner_entry_owner(entry) != op->header->owner) {
    return ELEMENT_REFUSE(op, KVP_NOT_OWNER, element, "block %u is not this session's (%s)", block,
                          is_held ? "another session's" : block_state_name(state));
  }
  if (is_write && state == KVP_BLOCK_SEALED) {
    return ELEMENT_REFUSE(op, KVP_SEALED_BLOCK, element, "block %u is sealed", block);
  }
  if (kvp_owner_entry_epoch(entry) > op->header->epoch) {
    return ELEMENT_REFUSE(op, KVP_STALE_BLOCK, element, "block %u was assigned at epoch %llu, the step's is %llu",
                          block, (unsigned long long)kvp_owner_entry_epoch(entry),
                          (unsigned long long)op->header->epoch);
  }
  return KVP_OK;
}

struct kvp_owner_check kvp_intake_owner_check(struct kvp_intake_op *op, const struct kvp_pool *pool,
                                              const struct kvp_intake_array *array) {
  if (array->is_inline) {
    return (struct kvp_owner_check){0};
  }
  op->out->report_flags |= KVP_REPORT_UNCHECKED_ARRAYS;
  return (struct kvp_owner_check){
      .entries = pool->device_owner_entries,
      .epoch = op->header->epoch,
      .owner = op->header->owner,
  };
}
