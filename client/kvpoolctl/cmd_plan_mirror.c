/* plan mirror: which rows of a batch each rank of a context-parallel prefill holds, and the way back. No daemon. */
#include <stdlib.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/plan_command.h"
#include "client/kvpoolctl/text.h"

static const struct argp_option mirror_options[] = {
    {"chunk", kvp_ctl_plan_chunk, "TOKENS", 0, "Tokens of a sequence's chunk (seqlen_q); several are allowed", 0},
    {"ranks", kvp_ctl_plan_ranks, "R", 0, "How many ranks share the batch", 0},
    {0},
};

struct mirror {
  size_t local_rows;
  int32_t *local; /* [ranks, local_rows] */
  size_t chunk_rows;
  int32_t *reverse; /* [chunk_rows] */
};

static int mirror_init(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, struct mirror *out) {
  const uint32_t ranks = (uint32_t)plan->ranks;
  size_t count = 0;
  kvpool_error error;
  *out = (struct mirror){0};
  if (kvpool_plan_mirror(plan->chunks, plan->sequence_count, ranks, 0, NULL, 0, &out->local_rows, &error) !=
          KVPOOL_OK ||
      kvpool_plan_mirror_reverse(plan->chunks, plan->sequence_count, ranks, NULL, 0, &out->chunk_rows, &error) !=
          KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  if (out->local_rows * ranks > kvp_ctl_plan_rows_max || ranks > kvp_ctl_plan_rows_max) {
    return kvp_ctl_refuse(ctl, NULL, "%zu rows on each of %u ranks; this program plans for at most %d in all",
                          out->local_rows, ranks, kvp_ctl_plan_rows_max);
  }
  out->local = kvp_ctl_allocate(out->local_rows * ranks, sizeof out->local[0]);
  out->reverse = kvp_ctl_allocate(out->chunk_rows, sizeof out->reverse[0]);
  kvpool_status status = kvpool_plan_mirror_reverse(plan->chunks, plan->sequence_count, ranks, out->reverse,
                                                    out->chunk_rows, &count, &error);
  for (uint32_t rank = 0; rank < ranks && status == KVPOOL_OK; rank++) {
    status = kvpool_plan_mirror(plan->chunks, plan->sequence_count, ranks, rank, out->local + rank * out->local_rows,
                                out->local_rows, &count, &error);
  }
  return status == KVPOOL_OK ? KVP_CTL_OK : kvp_ctl_fail(ctl, &error);
}

static void mirror_deinit(struct mirror *mirror) {
  free(mirror->reverse);
  free(mirror->local);
}

static void mirror_json(const struct kvp_ctl *ctl, const struct mirror *mirror, uint64_t ranks) {
  json_t *document = json_object();
  json_t *local = json_array();
  for (uint64_t rank = 0; rank < ranks; rank++) {
    kvp_ctl_json_append(local,
                        kvp_ctl_json_int32_array(mirror->local + rank * mirror->local_rows, mirror->local_rows));
  }
  kvp_ctl_json_set(document, "local", local);
  kvp_ctl_json_set(document, "reverse", kvp_ctl_json_int32_array(mirror->reverse, mirror->chunk_rows));
  kvp_ctl_json_print(ctl, document);
}

static void local_cells(struct kvp_ctl_table *table, const void *context, size_t first, size_t rows) {
  const uint64_t *rank = context;
  kvp_ctl_table_cell(table, KVP_CTL_DIM, "%llu", (unsigned long long)*rank);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu-%zu", first, first + rows - 1);
}

static void local_print(const struct kvp_ctl *ctl, const struct mirror *mirror, uint64_t ranks) {
  static const char *const columns[] = {">RANK", ">LOCAL ROWS", ">ROWS", ">CHUNK ROWS"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (uint64_t rank = 0; rank < ranks; rank++) {
    kvp_ctl_plan_runs_print(table, mirror->local + rank * mirror->local_rows, mirror->local_rows, "padding",
                            local_cells, &rank);
  }
  kvp_ctl_table_print(table);
}

static void reverse_cells(struct kvp_ctl_table *table, const void *context, size_t first, size_t rows) {
  (void)context;
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu-%zu", first, first + rows - 1);
}

static void reverse_print(const struct kvp_ctl *ctl, const struct mirror *mirror) {
  static const char *const columns[] = {">CHUNK ROWS", ">ROWS", ">GATHERED ROWS"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  kvp_ctl_plan_runs_print(table, mirror->reverse, mirror->chunk_rows, "", reverse_cells, NULL); /* none is negative */
  kvp_ctl_table_print(table);
}

static int mirror_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  struct mirror mirror;
  int exit_status = mirror_init(ctl, plan, &mirror);
  if (exit_status == KVP_CTL_OK && ctl->json) {
    mirror_json(ctl, &mirror, plan->ranks);
  } else if (exit_status == KVP_CTL_OK) {
    local_print(ctl, &mirror, plan->ranks);
    kvp_ctl_print("\n");
    reverse_print(ctl, &mirror);
    kvp_ctl_print("%zu row%s, %zu on each of %llu rank%s\n", mirror.chunk_rows, kvp_ctl_plural(mirror.chunk_rows),
                  mirror.local_rows, (unsigned long long)plan->ranks, kvp_ctl_plural(plan->ranks));
  }
  mirror_deinit(&mirror);
  return exit_status;
}

static bool is_complete(const struct kvp_ctl_plan_arguments *plan) {
  return plan->sequence_count > 0 && plan->ranks > 0;
}

static int mirror_run(struct kvp_ctl *ctl, int argc, char **argv) {
  const struct kvp_ctl_plan_command kind = {.command = &kvp_ctl_plan_mirror,
                                            .needed = "--chunk and --ranks are needed",
                                            .is_complete = is_complete,
                                            .run = mirror_plan};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

const struct kvp_ctl_command kvp_ctl_plan_mirror = {
    .name = "plan mirror",
    .summary = "context-parallel mirror order of a prefill batch (no daemon needed)",
    .details = "Each chunk is cut into 2R equal pieces, the last ones filled up; rank r holds pieces r and 2R-1-r. "
               "The first table has what each rank holds, the second where the rows are found when the ranks' rows "
               "are gathered, rank 0 first; --json gives every row.\n\n"
               "Examples:\n"
               "  kvpoolctl plan mirror --chunk 1024 --ranks 4\n"
               "  kvpoolctl plan mirror --chunk 10 --chunk 3 --ranks 2 --json",
    .options = mirror_options,
    .take = kvp_ctl_plan_take,
    .run = mirror_run,
};
