/* What was checked in this step already, and how much that was. */
#include "server/executor/intake_op.h"

static bool keys_equal(const struct kvp_intake_memo_key *a, const struct kvp_intake_memo_key *b) {
  return a->use == b->use && a->other == b->other && a->tokens_per_block == b->tokens_per_block && a->pool == b->pool;
}

struct kvp_intake_memo *kvp_intake_memo_find(const struct kvp_intake_op *op, const struct kvp_intake_memo_key *key) {
  for (struct kvp_intake_memo *memo = op->memos[key->array]; memo != NULL; memo = memo->next) {
    if (keys_equal(&memo->key, key)) {
      return memo;
    }
  }
  return NULL;
}

enum kvp_status kvp_intake_count_elements(struct kvp_intake_op *op, const char *array_name, uint64_t elements) {
  op->intake->elements_checked += elements;
  if (op->intake->elements_checked > kvp_step_elements_checked_max) {
    return KVP_INTAKE_REFUSE(
        op, KVP_TOO_LARGE, array_name, -1, elements,
        "%s: with these %llu elements the step's arrays have %llu to check, over all pools and block "
        "sizes they are used with; at most %d are taken",
        array_name, (unsigned long long)elements, (unsigned long long)op->intake->elements_checked,
        kvp_step_elements_checked_max);
  }
  return KVP_OK;
}

struct kvp_intake_memo *kvp_intake_memo_add(struct kvp_intake_op *op, const struct kvp_intake_array *array,
                                            const struct kvp_intake_memo_key *key) {
  if (kvp_intake_count_elements(op, array->name, array->bytes / sizeof(int32_t)) != KVP_OK) {
    return NULL;
  }
  struct kvp_intake_memo *memo = kvp_arena_alloc(&op->step->arena, sizeof *memo);
  if (memo == NULL) {
    (void)kvp_intake_no_memory(op);
    return NULL;
  }
  *memo = (struct kvp_intake_memo){.next = op->memos[array->index], .key = *key};
  op->memos[array->index] = memo;
  return memo;
}
