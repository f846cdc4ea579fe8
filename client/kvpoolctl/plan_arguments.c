/* The command lines of the plan commands. */
#include "client/kvpoolctl/plan_arguments.h"

#include <string.h>

#include "client/kvpoolctl/table.h"

/* A number inside an option's value: its name, and how large it may be. */
struct part {
  const char *name;
  uint64_t max;
};

static error_t too_many(const struct kvp_ctl_plan_arguments *plan, const char *option, const char *value) {
  return kvp_ctl_take_failed(plan->command, "--%s %s: more than %d %ss", option, value, kvp_ctl_plan_sequences_max,
                             option);
}

/* Numbers with a separator between them, up to `count`; *rest: behind the last one, NULL at the value's end. *taken: how
 * many there were. */
static error_t parts_take(const struct kvp_ctl_plan_arguments *plan, const char *option, const char *value,
                          char separator, const struct part *parts, size_t count, uint64_t *out, size_t *taken,
                          const char **rest) {
  const char *text = value;
  *taken = 0;
  while (text != NULL && *taken < count) {
    const struct part *part = &parts[*taken];
    const char *end = strchrnul(text, separator);
    if (!kvp_ctl_digits_parse(text, end, part->max, &out[*taken])) {
      return kvp_ctl_take_failed(plan->command, "--%s %s: %s '%.*s': a number of at most %llu is wanted", option,
                                 value, part->name, (int)(end - text), text, (unsigned long long)part->max);
    }
    (*taken)++;
    text = *end == '\0' ? NULL : end + 1;
  }
  *rest = text;
  return 0;
}

/* BEGIN-END. */
static error_t tokens_take(struct kvp_ctl_plan_arguments *plan, const char *value) {
  static const struct part parts[] = {{"BEGIN", INT64_MAX}, {"END", INT64_MAX}};
  uint64_t numbers[2] = {0};
  size_t count = 0;
  const char *rest = NULL;
  error_t failed =
      strchr(value, '-') == NULL ? 0 : parts_take(plan, "tokens", value, '-', parts, 2, numbers, &count, &rest);
  if (failed == 0 && (count < 2 || rest != NULL)) {
    failed = kvp_ctl_take_failed(plan->command, "--tokens %s: BEGIN-END is wanted, as in 0-100", value);
  }
  plan->begin = numbers[0];
  plan->end = numbers[1];
  plan->has_tokens = failed == 0;
  return failed;
}

static error_t sequence_take(struct kvp_ctl_plan_arguments *plan, const char *value) {
  static const struct part parts[] = {{"seqlen_k", INT64_MAX}, {"seqlen_q", INT64_MAX}};
  uint64_t numbers[2] = {0};
  size_t count = 0;
  const char *table = NULL;
  if (plan->sequence_count == kvp_ctl_plan_sequences_max) {
    return too_many(plan, "sequence", value);
  }
  error_t failed = parts_take(plan, "sequence", value, ',', parts, 2, numbers, &count, &table);
  if (failed != 0) {
    return failed;
  }
  if (count < 2) {
    return kvp_ctl_take_failed(plan->command, "--sequence %s: seqlen_k,seqlen_q or seqlen_k,seqlen_q,0-156 is wanted",
                               value);
  }
  if (table != NULL && !kvp_ctl_list_parse(&plan->tables[plan->sequence_count], table)) {
    return kvp_ctl_take_failed(plan->command, "--sequence %s: block table '%s': %s", value, table,
                               kvp_ctl_list_fault(table));
  }
  plan->sequences[plan->sequence_count++] =
      (kvpool_sequence){.seqlen_k = (int64_t)numbers[0], .seqlen_q = (int64_t)numbers[1]};
  return 0;
}

/* "K,Q", "K,Q,STATE" or "K,Q,STATE,START". */
static error_t ring_sequence_take(struct kvp_ctl_plan_arguments *plan, const char *value) {
  static const struct part parts[] = {
      {"seqlen_k", INT64_MAX}, {"seqlen_q", INT64_MAX}, {"state_id", INT32_MAX}, {"swa_valid_start", INT64_MAX}};
  const size_t index = plan->sequence_count;
  uint64_t numbers[4] = {0, 0, index, 0};
  size_t count = 0;
  const char *rest = NULL;
  if (index == kvp_ctl_plan_sequences_max) {
    return too_many(plan, "sequence", value);
  }
  error_t failed = parts_take(plan, "sequence", value, ',', parts, 4, numbers, &count, &rest);
  if (failed != 0) {
    return failed;
  }
  if (count < 2 || rest != NULL) {
    return kvp_ctl_take_failed(plan->command,
                               "--sequence %s: seqlen_k,seqlen_q[,state_id[,swa_valid_start]] is wanted", value);
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
    return too_many(plan, "chunk", value);
  }
  error_t failed = kvp_ctl_take_number(plan->command, "chunk", value, INT64_MAX, &tokens);
  if (failed == 0) {
    plan->chunks[plan->sequence_count++] = (int64_t)tokens;
  }
  return failed;
}

error_t kvp_ctl_plan_take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct kvp_ctl_plan_arguments *plan = arguments;
  (void)state;
  switch (key) {
  case kvp_ctl_plan_tokens:
    return tokens_take(plan, value);
  case kvp_ctl_plan_table:
    return kvp_ctl_list_parse(&plan->table, value)
               ? 0
               : kvp_ctl_take_failed(plan->command, "--table %s: %s", value, kvp_ctl_list_fault(value));
  case kvp_ctl_plan_per_block:
    return kvp_ctl_take_count(plan->command, "per-block", value, INT32_MAX, &plan->per_block);
  case kvp_ctl_plan_destination:
    return kvp_ctl_take_number(plan->command, "destination", value, INT32_MAX, &plan->destination);
  case kvp_ctl_plan_ratio:
    return kvp_ctl_take_count(plan->command, "ratio", value, INT32_MAX, &plan->ratio);
  case kvp_ctl_plan_sequence:
    return sequence_take(plan, value);
  case kvp_ctl_plan_ring_sequence:
    return ring_sequence_take(plan, value);
  case kvp_ctl_plan_window:
    return kvp_ctl_take_count(plan->command, "window", value, INT32_MAX, &plan->window);
  case kvp_ctl_plan_ring:
    return kvp_ctl_take_count(plan->command, "ring", value, INT32_MAX, &plan->ring);
  case kvp_ctl_plan_chunk:
    return chunk_take(plan, value);
  case kvp_ctl_plan_ranks:
    return kvp_ctl_take_count(plan->command, "ranks", value, INT32_MAX, &plan->ranks);
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
