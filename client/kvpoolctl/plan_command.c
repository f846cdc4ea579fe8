/* What the plan commands share: reading the line, room for the plan, telling it. */
#include "client/kvpoolctl/plan_command.h"

#include <assert.h>
#include <stdlib.h>

#include "client/kvpoolctl/hint.h"

int kvp_ctl_plan_command_run(struct kvp_ctl *ctl, int argc, char **argv, const struct kvp_ctl_plan_command *kind) {
  struct kvp_ctl_plan_arguments *plan = kvp_ctl_allocate(1, sizeof *plan);
  int exit_status = KVP_CTL_OK;
  plan->command = kind->command;
  plan->ratio = 1;
  plan->per_block = kind->per_block;
  if (kvp_ctl_parse(ctl, kind->command, argc, argv, plan, &exit_status)) {
    exit_status = kind->is_complete(plan) ? kind->run(ctl, plan) : kvp_ctl_usage(kind->command, "%s", kind->needed);
  }
  kvp_ctl_list_deinit(&plan->table);
  for (size_t i = 0; i < kvp_ctl_plan_sequences_max; i++) {
    kvp_ctl_list_deinit(&plan->tables[i]);
  }
  free(plan);
  return exit_status;
}

/* ---- rows -------------------------------------------------------------------------------------------------------
 */

int kvp_ctl_plan_rows_check(const struct kvp_ctl *ctl, size_t count) {
  return count <= kvp_ctl_plan_rows_max
             ? KVP_CTL_OK
             : kvp_ctl_refuse(ctl, "plan fewer at once", "%zu rows; this program plans for at most %d", count,
                              kvp_ctl_plan_rows_max);
}

json_t *kvp_ctl_plan_rows_json(const void *rows, size_t count, size_t width) {
  const int32_t *items = rows;
  if (width == 1) {
    return kvp_ctl_json_int32_array(items, count);
  }
  json_t *array = json_array();
  for (size_t i = 0; i < count; i++) {
    kvp_ctl_json_append(array, kvp_ctl_json_int32_array(items + i * width, width));
  }
  return array;
}

int kvp_ctl_plan_rows_tell(const struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan,
                           const struct kvp_ctl_plan_rows *kind) {
  size_t count = 0;
  kvpool_error error;
  if (kind->make(plan, NULL, 0, &count, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  int exit_status = kvp_ctl_plan_rows_check(ctl, count);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  void *rows = kvp_ctl_allocate(count, kind->width * sizeof(int32_t));
  if (kind->make(plan, rows, count, &count, &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (ctl->json) {
    json_t *document = json_object();
    if (kind->has_total_k) {
      kvp_ctl_json_integer(document, "total_k", plan->total_k);
    }
    kvp_ctl_json_set(document, kind->key, kvp_ctl_plan_rows_json(rows, count, kind->width));
    kvp_ctl_json_print(ctl, document);
  } else {
    kind->print(ctl, plan, rows, count);
  }
  free(rows);
  return exit_status;
}

/* ---- tables -----------------------------------------------------------------------------------------------------
 */

void kvp_ctl_plan_queries_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan,
                                const char *const *columns, size_t column_count,
                                void (*cells)(struct kvp_ctl_table *table, const void *rows, size_t row),
                                const void *rows) {
  enum { columns_max = 8 };
  const char *all[columns_max] = {">ROW", ">SEQUENCE", ">POSITION"};
  assert(column_count + 3 <= columns_max);
  for (size_t i = 0; i < column_count; i++) {
    all[3 + i] = columns[i];
  }
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, all, 3 + column_count);
  size_t row = 0;
  for (size_t i = 0; i < plan->sequence_count; i++) {
    const int64_t seqlen_k = plan->has_rings ? plan->rings[i].seqlen_k : plan->sequences[i].seqlen_k;
    const int64_t seqlen_q = plan->has_rings ? plan->rings[i].seqlen_q : plan->sequences[i].seqlen_q;
    for (int64_t position = seqlen_k - seqlen_q; position < seqlen_k; position++, row++) {
      kvp_ctl_table_row(table);
      kvp_ctl_table_cell(table, KVP_CTL_DIM, "%zu", row);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu", i);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)position);
      cells(table, rows, row);
    }
  }
  kvp_ctl_table_print(table);
}

void kvp_ctl_plan_runs_print(struct kvp_ctl_table *table, const int32_t *items, size_t count, const char *none,
                             void (*begin)(struct kvp_ctl_table *table, const void *context, size_t first,
                                           size_t rows),
                             const void *context) {
  for (size_t first = 0; first < count;) {
    size_t rows = kvp_ctl_plan_run(items + first, count - first);
    kvp_ctl_table_row(table);
    begin(table, context, first, rows);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu", rows);
    if (items[first] < 0) {
      kvp_ctl_table_cell(table, KVP_CTL_WARN, "%s", none);
    } else {
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d-%d", items[first], items[first + rows - 1]);
    }
    first += rows;
  }
}
