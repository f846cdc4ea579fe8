/* plan range, plan slots: tokens of one sequence by its block table. No daemon. */
#include <stdlib.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/plan_arguments.h"
#include "client/kvpoolctl/table.h"
#include "client/kvpoolctl/text.h"

static const struct argp_option range_options[] = {
    {"tokens", kvp_ctl_plan_tokens, "BEGIN-END", 0, "Tokens of the sequence; END is not included", 0},
    {"per-block", kvp_ctl_plan_per_block, "TOKENS", 0, "The region's tokens per block", 0},
    {"table", kvp_ctl_plan_table, "BLOCKS", 0,
     "The sequence's block table, as in 5,9,2 or 0-156; default: 0, 1, 2, ...", 0},
    {"destination", kvp_ctl_plan_destination, "ROW", 0, "Where the first token goes; default: 0", 0},
    {0},
};
static const struct argp_option slots_options[] = {
    {"tokens", kvp_ctl_plan_tokens, "BEGIN-END", 0, "Tokens of the sequence; END is not included", 0},
    {"per-block", kvp_ctl_plan_per_block, "TOKENS", 0, "The region's tokens per block", 0},
    {"table", kvp_ctl_plan_table, "BLOCKS", 0,
     "The sequence's block table, as in 5,9,2 or 0-156; default: 0, 1, 2, ...", 0},
    {0}};
static int range_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  kvpool_error error;
  size_t count = 0;
  if (kvpool_plan_paged_range(plan->table.items, plan->table.count, (uint32_t)plan->per_block, (int64_t)plan->begin,
                              (int64_t)plan->end, (int32_t)plan->destination, NULL, 0, &count, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  kvpool_segment *segments = kvp_ctl_allocate(count, sizeof segments[0]);
  int exit_status = KVP_CTL_OK;
  if (kvpool_plan_paged_range(plan->table.items, plan->table.count, (uint32_t)plan->per_block, (int64_t)plan->begin,
                              (int64_t)plan->end, (int32_t)plan->destination, segments, count, &count,
                              &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_set(document, "segments", kvp_ctl_plan_segments_json(segments, count));
    kvp_ctl_json_print(ctl, document);
  } else {
    kvp_ctl_plan_segments_print(ctl, segments, count);
    kvp_ctl_print("%zu segment%s, %llu rows\n", count, kvp_ctl_plural(count),
                  (unsigned long long)(plan->end - plan->begin));
  }
  free(segments);
  return exit_status;
}

static void slots_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const int32_t *slots) {
  static const char *const columns[] = {">TOKENS", ">BLOCK", ">SLOTS"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (uint64_t begin = plan->begin; begin < plan->end;) {
    uint64_t end = begin - begin % plan->per_block + plan->per_block;
    end = end < plan->end ? end : plan->end;
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%llu-%llu", (unsigned long long)begin, (unsigned long long)(end - 1));
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%llu",
                       (unsigned long long)((uint64_t)slots[begin - plan->begin] / plan->per_block));
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d-%d", slots[begin - plan->begin], slots[end - 1 - plan->begin]);
    begin = end;
  }
  kvp_ctl_table_print(table);
}

static int slots_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  uint64_t count = plan->end > plan->begin ? plan->end - plan->begin : 0;
  if (count > kvp_ctl_plan_rows_max) {
    return kvp_ctl_refuse(ctl, "plan fewer at once", "%llu tokens; this program plans for at most %d",
                          (unsigned long long)count, kvp_ctl_plan_rows_max);
  }
  int32_t *slots = kvp_ctl_allocate(count, sizeof slots[0]);
  kvpool_error error;
  int exit_status = KVP_CTL_OK;
  if (kvpool_plan_slot_mapping(plan->table.items, plan->table.count, (uint32_t)plan->per_block, (int64_t)plan->begin,
                               (int64_t)plan->end, slots, &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_set(document, "slots", kvp_ctl_json_int32_array(slots, count));
    kvp_ctl_json_print(ctl, document);
  } else {
    slots_print(ctl, plan, slots);
  }
  free(slots);
  return exit_status;
}

static int tokens_run(struct kvp_ctl *ctl, const struct kvp_ctl_command *command, int argc, char **argv,
                      int (*plan_and_tell)(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan)) {
  struct kvp_ctl_plan_arguments *plan = kvp_ctl_allocate(1, sizeof *plan);
  plan->command = command;
  int exit_status;
  int32_t next = 0;
  if (!kvp_ctl_parse(ctl, command, argc, argv, plan, &exit_status)) {
    goto out;
  }
  if (!plan->has_tokens || plan->per_block == 0) {
    exit_status = kvp_ctl_usage(command, "--tokens and --per-block are needed");
  } else if (!kvp_ctl_plan_table_default(&plan->table, plan->end, plan->per_block, &next)) {
    exit_status = kvp_ctl_refuse(ctl, "plan fewer at once", "%llu tokens are more than this program plans for",
                                 (unsigned long long)plan->end);
  } else {
    exit_status = plan_and_tell(ctl, plan);
  }
out:
  kvp_ctl_list_deinit(&plan->table);
  free(plan);
  return exit_status;
}

static int range_run(struct kvp_ctl *ctl, int argc, char **argv) {
  return tokens_run(ctl, &kvp_ctl_plan_range, argc, argv, range_plan);
}

static int slots_run(struct kvp_ctl *ctl, int argc, char **argv) {
  return tokens_run(ctl, &kvp_ctl_plan_slots, argc, argv, slots_plan);
}

const struct kvp_ctl_command kvp_ctl_plan_range = {
    .name = "plan range",
    .summary = "segments that load a range of a sequence's tokens (no daemon needed)",
    .details = "Examples:\n"
               "  kvpoolctl plan range --tokens 0-40 --per-block 16 --table 5,9,2\n"
               "  kvpoolctl plan range --tokens 30-100 --per-block 16 --destination 4096 --json",
    .options = range_options,
    .take = kvp_ctl_plan_take,
    .run = range_run,
};

const struct kvp_ctl_command kvp_ctl_plan_slots = {
    .name = "plan slots",
    .summary = "slot mapping of a range of a sequence's tokens (no daemon needed)",
    .details = "The table has a line for each block; --json gives every slot.\n\n"
               "Examples:\n"
               "  kvpoolctl plan slots --tokens 30-40 --per-block 16 --table 5,9,2",
    .options = slots_options,
    .take = kvp_ctl_plan_take,
    .run = slots_run,
};
