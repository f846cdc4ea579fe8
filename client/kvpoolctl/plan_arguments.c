/* The command lines of the plan commands. */
#include "client/kvpoolctl/plan_arguments.h"

#include <stdio.h>
#include <string.h>

#include "client/kvpoolctl/table.h"

/* "BEGIN-END" or "K,Q": two numbers around the separator; what is left behind a second separator stays in *rest. */
static bool two_numbers(char *value, char separator, uint64_t *first, uint64_t *second, char **rest) {
  char *cut = strchr(value, separator);
  if (cut == NULL) {
    return false;
  }
  *cut = '\0';
  *rest = strchr(cut + 1, ',');
  if (*rest != NULL) {
    *(*rest)++ = '\0';
  }
  return kvp_ctl_number_parse(value, INT64_MAX, first) && kvp_ctl_number_parse(cut + 1, INT64_MAX, second);
}

static error_t sequence_take(struct kvp_ctl_plan_arguments *plan, char *value) {
  uint64_t seqlen_k = 0;
  uint64_t seqlen_q = 0;
  char *table = NULL;
  if (plan->sequence_count == kvp_ctl_plan_sequences_max) {
    return kvp_ctl_take_failed(plan->command, "more than %d sequences", kvp_ctl_plan_sequences_max);
  }
  struct kvp_ctl_list *list = &plan->tables[plan->sequence_count];
  if (!two_numbers(value, ',', &seqlen_k, &seqlen_q, &table) || (table != NULL && !kvp_ctl_list_parse(list, table))) {
    return kvp_ctl_take_failed(plan->command, "--sequence: seqlen_k,seqlen_q or seqlen_k,seqlen_q,0-156 is wanted");
  }
  plan->sequences[plan->sequence_count++] =
      (kvpool_sequence){.seqlen_k = (int64_t)seqlen_k, .seqlen_q = (int64_t)seqlen_q};
  return 0;
}

/* "K,Q", "K,Q,STATE" or "K,Q,STATE,START". */
static error_t ring_sequence_take(struct kvp_ctl_plan_arguments *plan, char *value) {
  const size_t index = plan->sequence_count;
  uint64_t numbers[4] = {0, 0, index, 0};
  size_t count = 0;
  bool is_good = true;
  if (index == kvp_ctl_plan_sequences_max) {
    return kvp_ctl_take_failed(plan->command, "more than %d sequences", kvp_ctl_plan_sequences_max);
  }
  for (char *piece = strsep(&value, ","); piece != NULL && is_good; piece = strsep(&value, ",")) {
    is_good = count < 4 && kvp_ctl_number_parse(piece, count == 2 ? INT32_MAX : INT64_MAX, &numbers[count]);
    count++;
  }
  if (!is_good || count < 2) {
    return kvp_ctl_take_failed(plan->command, "--sequence: seqlen_k,seqlen_q[,state_id[,swa_valid_start]] is wanted");
  }
  plan->has_rings = true;
  plan->rings[plan->sequence_count++] = (kvpool_swa_sequence){.state_id = (int32_t)numbers[2],
                                                              .seqlen_k = (int64_t)numbers[0],
                                                              .seqlen_q = (int64_t)numbers[1],
                                                              .swa_valid_start = (int64_t)numbers[3]};
  return 0;
}

static error_t chunk_take(struct kvp_ctl_plan_arguments *plan, const char *value) {
  uint64_t tokens = 0;
  if (plan->sequence_count == kvp_ctl_plan_sequences_max) {
    return kvp_ctl_take_failed(plan->command, "more than %d chunks", kvp_ctl_plan_sequences_max);
  }
  error_t failed = kvp_ctl_take_number(plan->command, "chunk", value, INT64_MAX, &tokens);
  if (failed == 0) {
    plan->chunks[plan->sequence_count++] = (int64_t)tokens;
  }
  return failed;
}

error_t kvp_ctl_plan_take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct kvp_ctl_plan_arguments *plan = arguments;
  char *rest = NULL;
  (void)state;
  switch (key) {
  case kvp_ctl_plan_tokens:
    plan->has_tokens = two_numbers(value, '-', &plan->begin, &plan->end, &rest) && rest == NULL;
    return plan->has_tokens ? 0 : kvp_ctl_take_failed(plan->command, "--tokens: BEGIN-END is wanted, as in 0-100");
  case kvp_ctl_plan_table:
    return kvp_ctl_list_parse(&plan->table, value)
               ? 0
               : kvp_ctl_take_failed(plan->command, "--table %s: %s", value, kvp_ctl_list_fault(value));
  case kvp_ctl_plan_per_block:
    return kvp_ctl_take_count(plan->command, "per-block", value, INT32_MAX, &plan->per_block);
  case kvp_ctl_plan_destination:
    return kvp_ctl_take_number(plan->command, "destination", value, INT32_MAX, &plan->destination);
  case kvp_ctl_plan_ratio:
    return kvp_ctl_take_number(plan->command, "ratio", value, INT32_MAX, &plan->ratio);
  case kvp_ctl_plan_sequence:
    return sequence_take(plan, value);
  case kvp_ctl_plan_ring_sequence:
    return ring_sequence_take(plan, value);
  case kvp_ctl_plan_window:
    return kvp_ctl_take_number(plan->command, "window", value, INT32_MAX, &plan->window);
  case kvp_ctl_plan_ring:
    return kvp_ctl_take_number(plan->command, "ring", value, INT32_MAX, &plan->ring);
  case kvp_ctl_plan_chunk:
    return chunk_take(plan, value);
  case kvp_ctl_plan_ranks:
    return kvp_ctl_take_number(plan->command, "ranks", value, INT32_MAX, &plan->ranks);
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

bool kvp_ctl_plan_table_default(struct kvp_ctl_list *table, uint64_t tokens, uint64_t per_block, int32_t *next) {
  uint64_t blocks = tokens / per_block + (tokens % per_block != 0);
  if (table->count > 0) {
    return true;
  }
  if (blocks > kvp_ctl_list_max || blocks > (uint64_t)(INT32_MAX - *next)) {
    return false;
  }
  for (uint64_t i = 0; i < blocks; i++) {
    kvp_ctl_list_append(table, (*next)++);
  }
  return true;
}

size_t kvp_ctl_plan_run(const int32_t *items, size_t count) {
  size_t rows = 1;
  while (rows < count && items[rows] == (items[0] < 0 ? items[0] : items[rows - 1] + 1)) {
    rows++;
  }
  return rows;
}

void kvp_ctl_plan_segments_print(const struct kvp_ctl *ctl, const kvpool_segment *segments, size_t count) {
  static const char *const columns[] = {">SEGMENT", ">BLOCK", ">BEGIN", ">END", ">ROWS", ">DESTINATION"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < count; i++) {
    const kvpool_segment *segment = &segments[i];
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "%zu", i);
    if (segment->src_block < 0) {
      kvp_ctl_table_cell(table, KVP_CTL_WARN, "zero rows");
    } else {
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", segment->src_block);
    }
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", segment->src_begin);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", segment->src_end);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", segment->src_end - segment->src_begin);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d-%d", segment->dst_offset,
                       segment->dst_offset + (segment->src_end - segment->src_begin) - 1);
  }
  kvp_ctl_table_print(table);
}
