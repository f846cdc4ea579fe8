/* How a plan command goes: its line, the plan in the room that it says it needs, and the document or the table. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_PLAN_COMMAND_H
#define KVPOOL_CLIENT_KVPOOLCTL_PLAN_COMMAND_H

#include "client/kvpoolctl/plan_arguments.h"
#include "client/kvpoolctl/table.h"

/* What one command does with its line. */
struct kvp_ctl_plan_command {
  const struct kvp_ctl_command *command;
  const char *needed; /* "--sequence and --ring are needed" */
  bool (*is_complete)(const struct kvp_ctl_plan_arguments *plan);
  uint64_t per_block; /* where none is given; 0: none */
  int (*run)(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan);
};

/* Reads the line, checks what is needed, runs it, and gives everything back. */
int kvp_ctl_plan_command_run(struct kvp_ctl *ctl, int argc, char **argv, const struct kvp_ctl_plan_command *plan);

/* A plan that is rows of int32 each. */
struct kvp_ctl_plan_rows {
  const char *key; /* of the document */
  size_t width;    /* numbers of a row */
  /* As the library's planners: with out NULL it only counts. May set plan->total_k. */
  kvpool_status (*make)(struct kvp_ctl_plan_arguments *plan, void *out, size_t out_max, size_t *count,
                        kvpool_error *error);
  void (*print)(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const void *rows, size_t count);
  bool has_total_k; /* in the document */
};

int kvp_ctl_plan_rows_tell(const struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan,
                           const struct kvp_ctl_plan_rows *kind);
/* Rows as an array of arrays; of width 1, of numbers. */
json_t *kvp_ctl_plan_rows_json(const void *rows, size_t count, size_t width);
/* More of them than this program plans for is refused; else KVP_CTL_OK. */
int kvp_ctl_plan_rows_check(const struct kvp_ctl *ctl, size_t count);

/* A line for each query of the batch: row, sequence, position, and what `cells` adds of its row. columns: headings of
 * the latter. */
void kvp_ctl_plan_queries_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan,
                                const char *const *columns, size_t column_count,
                                void (*cells)(struct kvp_ctl_table *table, const void *rows, size_t row),
                                const void *rows);
/* Lines for pieces of `items` that run on: `begin` starts each, what its items are follows. */
void kvp_ctl_plan_runs_print(struct kvp_ctl_table *table, const int32_t *items, size_t count, const char *none,
                             void (*begin)(struct kvp_ctl_table *table, const void *context, size_t first,
                                           size_t rows),
                             const void *context);

#endif
