/* Planners of a paged sequence: token ranges through a block table. Pure functions: any thread, no allocation. */
#include <assert.h>

#include "client/internal.h"

kvpool_status kvp_plan_check_range(const int32_t *block_table, size_t table_count, uint32_t tokens_per_block,
                                   int64_t token_begin, int64_t token_end, const char *label, kvpool_error *error) {
  if (tokens_per_block == 0 || tokens_per_block > INT32_MAX) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "tokens_per_block", -1, tokens_per_block,
                       "tokens_per_block = %u, not in [1, 2^31)", tokens_per_block);
  }
  if (token_begin < 0 || token_begin > token_end) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "token_begin", -1, token_begin,
                       "%stokens [%lld, %lld) are no range", label, (long long)token_begin, (long long)token_end);
  }
  if (token_begin == token_end) {
    return KVPOOL_OK;
  }
  uint64_t last = (uint64_t)(token_end - 1) / tokens_per_block;
  if (last >= table_count) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "block_table", (int64_t)last, (int64_t)table_count,
                       "%stokens [%lld, %lld) of %u a block end in block_table[%llu], the table has %zu entries",
                       label, (long long)token_begin, (long long)token_end, tokens_per_block,
                       (unsigned long long)last, table_count);
  }
  for (uint64_t i = (uint64_t)token_begin / tokens_per_block; i <= last; i++) {
    if (block_table[i] < 0) {
      return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "block_table", (int64_t)i, block_table[i],
                         "%sblock_table[%llu] = %d is no block", label, (unsigned long long)i, block_table[i]);
    }
  }
  return KVPOOL_OK;
}

size_t kvp_plan_range_segments(uint32_t tokens_per_block, int64_t token_begin, int64_t token_end) {
  if (token_begin == token_end) {
    return 0;
  }
  return (size_t)((token_end - 1) / tokens_per_block - token_begin / tokens_per_block + 1);
}

void kvp_plan_fill_range(const int32_t *block_table, uint32_t tokens_per_block, int64_t token_begin,
                         int64_t token_end, int32_t dst_begin, kvpool_segment *out) {
  int64_t block = token_begin / tokens_per_block;
  int64_t begin = token_begin % tokens_per_block;
  int64_t left = token_end - token_begin;
  int32_t dst = dst_begin;
  for (; left > 0; block++, out++) {
    int64_t room = tokens_per_block - begin;
    int64_t tokens = left < room ? left : room;
    *out = (kvpool_segment){.src_block = block_table[block],
                            .src_begin = (int32_t)begin,
                            .src_end = (int32_t)(begin + tokens),
                            .dst_offset = dst};
    left -= tokens;
    /* The range was checked to end inside int32; past its last segment dst is not used. */
    dst = (int32_t)(dst + tokens);
    begin = 0;
  }
}

kvpool_status kvpool_plan_paged_range(const int32_t *block_table, size_t table_count, uint32_t tokens_per_block,
                                      int64_t token_begin, int64_t token_end, int32_t dst_begin, kvpool_segment *out,
                                      size_t out_max, size_t *count, kvpool_error *error) {
  assert((block_table != NULL || table_count == 0) && count != NULL);
  kvpool_status status =
      kvp_plan_check_range(block_table, table_count, tokens_per_block, token_begin, token_end, "", error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (dst_begin < 0) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "dst_begin", -1, dst_begin, "dst_begin = %d is negative",
                       dst_begin);
  }
  if (token_end - token_begin > INT32_MAX - dst_begin) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "dst_begin", -1, dst_begin,
                       "tokens [%lld, %lld) to rows from %d on pass 2^31 - 1", (long long)token_begin,
                       (long long)token_end, dst_begin);
  }
  size_t needed = kvp_plan_range_segments(tokens_per_block, token_begin, token_end);
  if (out != NULL) {
    if (needed > out_max) {
      return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "out", -1, (int64_t)needed, "%zu segments, room for %zu", needed,
                         out_max);
    }
    kvp_plan_fill_range(block_table, tokens_per_block, token_begin, token_end, dst_begin, out);
  }
  *count = needed;
  return KVPOOL_OK;
}

/* No slot of the range passes int32. */
static kvpool_status plan_check_slots(const int32_t *block_table, uint32_t tokens_per_block, int64_t token_begin,
                                      int64_t token_end, kvpool_error *error) {
  for (int64_t token = token_begin; token < token_end;) {
    int64_t block = token / tokens_per_block;
    int64_t last = token_end - 1 < block * tokens_per_block + (tokens_per_block - 1)
                       ? token_end - 1
                       : block * tokens_per_block + (tokens_per_block - 1);
    int64_t slot = (int64_t)block_table[block] * tokens_per_block + last % tokens_per_block; /* < 2^62 + 2^31 */
    if (slot > INT32_MAX) {
      return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "block_table", block, block_table[block],
                         "block_table[%lld] = %d with %u tokens a block: slot %lld of token %lld passes 2^31 - 1",
                         (long long)block, block_table[block], tokens_per_block, (long long)slot, (long long)last);
    }
    token = last + 1;
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_plan_slot_mapping(const int32_t *block_table, size_t table_count, uint32_t tokens_per_block,
                                       int64_t token_begin, int64_t token_end, int32_t *out, kvpool_error *error) {
  assert((block_table != NULL || table_count == 0) && (out != NULL || token_begin >= token_end));
  kvpool_status status =
      kvp_plan_check_range(block_table, table_count, tokens_per_block, token_begin, token_end, "", error);
  if (status == KVPOOL_OK) {
    status = plan_check_slots(block_table, tokens_per_block, token_begin, token_end, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  for (int64_t token = token_begin; token < token_end; token++) {
    int64_t block = token / tokens_per_block;
    *out++ = (int32_t)((int64_t)block_table[block] * tokens_per_block + token % tokens_per_block);
  }
  return KVPOOL_OK;
}
