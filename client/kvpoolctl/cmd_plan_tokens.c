/* plan range, plan slots: tokens of one sequence by its block table. No daemon. */
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/plan_command.h"
#include "client/kvpoolctl/text.h"

#define SLOTS_OPTIONS                                                                                                \
  {"tokens", kvp_ctl_plan_tokens, "BEGIN-END", 0, "Tokens of the sequence; END is not included", 0},                 \
      {"per-block", kvp_ctl_plan_per_block, "TOKENS", 0, "The region's tokens per block", 0}, {                      \
    "table", kvp_ctl_plan_table, "BLOCKS", 0,                                                                        \
        "The sequence's block table, as in 5,9,2 or 0-156; default: 0, 1, 2, ...", 0                                 \
  }

static const struct argp_option range_options[] = {
    SLOTS_OPTIONS,
    {"destination", kvp_ctl_plan_destination, "ROW", 0, "Where the first token goes; default: 0", 0},
    {0},
};
static const struct argp_option slots_options[] = {SLOTS_OPTIONS, {0}};

static bool is_complete(const struct kvp_ctl_plan_arguments *plan) {
  return plan->has_tokens && plan->per_block != 0;
}

/* The block table where none was given, then the plan. */
static int tokens_plan(const struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan,
                       const struct kvp_ctl_plan_rows *kind) {
  int32_t next = 0;
  if (!kvp_ctl_plan_table_default(&plan->table, plan->end, plan->per_block, &next)) {
    return kvp_ctl_refuse(ctl, "plan fewer at once", "--tokens: END %llu is more than this program plans for",
                          (unsigned long long)plan->end);
  }
  return kvp_ctl_plan_rows_tell(ctl, plan, kind);
}

/* ---- plan range -------------------------------------------------------------------------------------------------
 */

static kvpool_status range_make(struct kvp_ctl_plan_arguments *plan, void *out, size_t out_max, size_t *count,
                                kvpool_error *error) {
  return kvpool_plan_paged_range(plan->table.items, plan->table.count, (uint32_t)plan->per_block,
                                 (int64_t)plan->begin, (int64_t)plan->end, (int32_t)plan->destination, out, out_max,
                                 count, error);
}

static void range_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const void *rows,
                        size_t count) {
  kvp_ctl_plan_segments_print(ctl, rows, count);
  kvp_ctl_print("%zu segment%s, %llu rows\n", count, kvp_ctl_plural(count),
                (unsigned long long)(plan->end - plan->begin));
}

static int range_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  static const struct kvp_ctl_plan_rows kind = {
      .key = "segments", .width = 4, .make = range_make, .print = range_print};
  return tokens_plan(ctl, plan, &kind);
}

/* ---- plan slots -------------------------------------------------------------------------------------------------
 */

static kvpool_status slots_make(struct kvp_ctl_plan_arguments *plan, void *out, size_t out_max, size_t *count,
                                kvpool_error *error) {
  (void)out_max;
  *count = plan->end > plan->begin ? plan->end - plan->begin : 0;
  return out == NULL ? KVPOOL_OK
                     : kvpool_plan_slot_mapping(plan->table.items, plan->table.count, (uint32_t)plan->per_block,
                                                (int64_t)plan->begin, (int64_t)plan->end, out, error);
}

/* A line for each block. */
static void slots_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const void *rows,
                        size_t count) {
  static const char *const columns[] = {">TOKENS", ">BLOCK", ">SLOTS"};
  const int32_t *slots = rows;
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  (void)count;
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
  static const struct kvp_ctl_plan_rows kind = {.key = "slots", .width = 1, .make = slots_make, .print = slots_print};
  return tokens_plan(ctl, plan, &kind);
}

/* ---- the commands -----------------------------------------------------------------------------------------------
 */

static int tokens_run(struct kvp_ctl *ctl, int argc, char **argv, const struct kvp_ctl_command *command,
                      int (*run)(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan)) {
  const struct kvp_ctl_plan_command kind = {
      .command = command, .needed = "--tokens and --per-block are needed", .is_complete = is_complete, .run = run};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

static int range_run(struct kvp_ctl *ctl, int argc, char **argv) {
  return tokens_run(ctl, argc, argv, &kvp_ctl_plan_range, range_plan);
}

static int slots_run(struct kvp_ctl *ctl, int argc, char **argv) {
  return tokens_run(ctl, argc, argv, &kvp_ctl_plan_slots, slots_plan);
}

const struct kvp_ctl_command kvp_ctl_plan_range = {
    .name = "plan range",
    .summary = "segments that load a range of a sequence's tokens (no daemon needed)",
    .details = "Examples:\n"
               "  kvpoolctl plan range --tokens 0-40 --per-block 16 --table 5,9,2\n"
               "  kvpoolctl plan range --tokens 30-100 --per-block 16 --destination 4096 \\\n"
               "      --json",
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
