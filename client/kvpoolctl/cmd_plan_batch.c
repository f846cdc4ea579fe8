/* plan new, plan compressed, plan visible: the compressed cache of a batch. No daemon. */
#include <stdlib.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/plan_command.h"
#include "client/kvpoolctl/text.h"

#define NEW_OPTIONS                                                                                                  \
  {"sequence",                                                                                                       \
   kvp_ctl_plan_sequence,                                                                                            \
   "K,Q[,BLOCKS]",                                                                                                   \
   0,                                                                                                                \
   "seqlen_k (tokens after this chunk), seqlen_q (tokens of this chunk), and the block table; several are "          \
   "allowed. Default of the tables: consecutive blocks from 0 on, over all sequences",                               \
   0},                                                                                                               \
  {                                                                                                                  \
    "ratio", kvp_ctl_plan_ratio, "R", 0, "Compression ratio; default: 1", 0                                          \
  }

static const struct argp_option new_options[] = {NEW_OPTIONS, {0}};
static const struct argp_option batch_options[] = {
    NEW_OPTIONS, {"per-block", kvp_ctl_plan_per_block, "TOKENS", 0, "The region's tokens per block", 0}, {0}};

static int tables_complete(const struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  int32_t next = 0;
  for (size_t i = 0; i < plan->sequence_count; i++) {
    uint64_t tokens = (uint64_t)plan->sequences[i].seqlen_k / plan->ratio;
    if (!kvp_ctl_plan_table_default(&plan->tables[i], tokens, plan->per_block, &next)) {
      return kvp_ctl_refuse(ctl, "plan fewer at once",
                            "sequence %zu: seqlen_k = %lld: %llu tokens are more than this program plans for", i,
                            (long long)plan->sequences[i].seqlen_k, (unsigned long long)tokens);
    }
    plan->sequences[i].block_table = plan->tables[i].items;
    plan->sequences[i].table_count = plan->tables[i].count;
  }
  return KVP_CTL_OK;
}

static int new_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  static const char *const columns[] = {">SEQUENCE", ">SEQLEN_K", ">SEQLEN_Q", ">BEGIN", ">END", ">NEW TOKENS"};
  json_t *array = json_array();
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  int exit_status = KVP_CTL_OK;
  for (size_t i = 0; i < plan->sequence_count && exit_status == KVP_CTL_OK; i++) {
    const kvpool_sequence *sequence = &plan->sequences[i];
    int64_t begin;
    int64_t end;
    kvpool_error error;
    if (kvpool_plan_new_compressed(sequence->seqlen_k, sequence->seqlen_q, (uint32_t)plan->ratio, &begin, &end,
                                   &error) != KVPOOL_OK) {
      exit_status = kvp_ctl_fail(ctl, &error);
      continue;
    }
    json_t *range = json_object();
    kvp_ctl_json_integer(range, "token_begin", begin);
    kvp_ctl_json_integer(range, "token_end", end);
    kvp_ctl_json_append(array, range);
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "%zu", i);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)sequence->seqlen_k);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)sequence->seqlen_q);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)begin);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)end);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)(end - begin));
  }
  if (exit_status == KVP_CTL_OK && ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_set(document, "sequences", json_incref(array));
    kvp_ctl_json_print(ctl, document);
  }
  if (exit_status == KVP_CTL_OK && !ctl->json) {
    kvp_ctl_table_print(table);
  } else {
    kvp_ctl_table_destroy(table);
  }
  json_decref(array);
  return exit_status;
}

struct batch_plan {
  int32_t *cu_seqlens; /* [sequence_count + 1] */
  kvpool_segment *segments;
  size_t segment_count;
  int64_t total_k;
};

static int batch_plan_init(const struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan, struct batch_plan *out) {
  kvpool_error error;
  int exit_status = tables_complete(ctl, plan);
  *out = (struct batch_plan){.cu_seqlens = kvp_ctl_allocate(plan->sequence_count + 1, sizeof out->cu_seqlens[0])};
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_status status =
      kvpool_plan_compressed(plan->sequences, plan->sequence_count, (uint32_t)plan->ratio, (uint32_t)plan->per_block,
                             out->cu_seqlens, NULL, 0, &out->segment_count, &out->total_k, &error);
  if (status == KVPOOL_OK) {
    out->segments = kvp_ctl_allocate(out->segment_count, sizeof out->segments[0]);
    status = kvpool_plan_compressed(plan->sequences, plan->sequence_count, (uint32_t)plan->ratio,
                                    (uint32_t)plan->per_block, out->cu_seqlens, out->segments, out->segment_count,
                                    &out->segment_count, &out->total_k, &error);
  }
  return status == KVPOOL_OK ? KVP_CTL_OK : kvp_ctl_fail(ctl, &error);
}

static void batch_plan_deinit(struct batch_plan *batch) {
  free(batch->segments);
  free(batch->cu_seqlens);
}

static int compressed_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  struct batch_plan batch;
  int exit_status = batch_plan_init(ctl, plan, &batch);
  if (exit_status == KVP_CTL_OK && ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_set(document, "cu_seqlens", kvp_ctl_json_int32_array(batch.cu_seqlens, plan->sequence_count + 1));
    kvp_ctl_json_integer(document, "total_k", batch.total_k);
    kvp_ctl_json_set(document, "segments", kvp_ctl_plan_rows_json(batch.segments, batch.segment_count, 4));
    kvp_ctl_json_print(ctl, document);
  } else if (exit_status == KVP_CTL_OK) {
    static const char *const columns[] = {">SEQUENCE", ">SEQLEN_K", ">COMPRESSED", ">ROWS"};
    struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
    for (size_t i = 0; i < plan->sequence_count; i++) {
      kvp_ctl_table_row(table);
      kvp_ctl_table_cell(table, KVP_CTL_DIM, "%zu", i);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)plan->sequences[i].seqlen_k);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld",
                         (long long)(plan->sequences[i].seqlen_k / (int64_t)plan->ratio));
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d-%d", batch.cu_seqlens[i], batch.cu_seqlens[i + 1] - 1);
    }
    kvp_ctl_table_print(table);
    kvp_ctl_print("\n");
    kvp_ctl_plan_segments_print(ctl, batch.segments, batch.segment_count);
    kvp_ctl_print("%zu segment%s, total_k %lld\n", batch.segment_count, kvp_ctl_plural(batch.segment_count),
                  (long long)batch.total_k);
  }
  batch_plan_deinit(&batch);
  return exit_status;
}

struct visible {
  int32_t *ks;
  int32_t *ke;
};

static void visible_cells(struct kvp_ctl_table *table, const void *rows, size_t row) {
  const struct visible *visible = rows;
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", visible->ks[row]);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", visible->ke[row]);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", visible->ke[row] - visible->ks[row]);
}

static int visible_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  uint64_t rows = 0;
  for (size_t i = 0; i < plan->sequence_count; i++) {
    const uint64_t seqlen_q = (uint64_t)plan->sequences[i].seqlen_q;
    if (seqlen_q > kvp_ctl_plan_rows_max - rows) {
      return kvp_ctl_refuse(ctl, "plan fewer at once",
                            "sequence %zu: seqlen_q = %llu: more query rows than the %d this program plans for", i,
                            (unsigned long long)seqlen_q, kvp_ctl_plan_rows_max);
    }
    rows += seqlen_q;
  }
  struct batch_plan batch;
  static const char *const columns[] = {">KS", ">KE", ">VISIBLE"};
  const struct visible visible = {.ks = kvp_ctl_allocate(rows, sizeof visible.ks[0]),
                                  .ke = kvp_ctl_allocate(rows, sizeof visible.ke[0])};
  int exit_status = batch_plan_init(ctl, plan, &batch);
  kvpool_error error;
  if (exit_status == KVP_CTL_OK &&
      kvpool_plan_compressed_visible(plan->sequences, plan->sequence_count, (uint32_t)plan->ratio, batch.cu_seqlens,
                                     visible.ks, visible.ke, rows, &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (exit_status == KVP_CTL_OK && ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_set(document, "ks", kvp_ctl_json_int32_array(visible.ks, rows));
    kvp_ctl_json_set(document, "ke", kvp_ctl_json_int32_array(visible.ke, rows));
    kvp_ctl_json_print(ctl, document);
  } else if (exit_status == KVP_CTL_OK) {
    kvp_ctl_plan_queries_print(ctl, plan, columns, sizeof columns / sizeof columns[0], visible_cells, &visible);
  }
  batch_plan_deinit(&batch);
  free(visible.ke);
  free(visible.ks);
  return exit_status;
}

static bool has_sequences(const struct kvp_ctl_plan_arguments *plan) {
  return plan->sequence_count > 0;
}

static bool has_blocks(const struct kvp_ctl_plan_arguments *plan) {
  return plan->sequence_count > 0 && plan->per_block > 0;
}

static int new_run(struct kvp_ctl *ctl, int argc, char **argv) {
  const struct kvp_ctl_plan_command kind = {
      .command = &kvp_ctl_plan_new, .needed = "--sequence is needed", .is_complete = has_sequences, .run = new_plan};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

static int compressed_run(struct kvp_ctl *ctl, int argc, char **argv) {
  const struct kvp_ctl_plan_command kind = {.command = &kvp_ctl_plan_compressed,
                                            .needed = "--sequence and --per-block are needed",
                                            .is_complete = has_blocks,
                                            .run = compressed_plan};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

static int visible_run(struct kvp_ctl *ctl, int argc, char **argv) {
  /* The columns don't depend on how tokens lie in blocks: one block a sequence is as good as any. */
  const struct kvp_ctl_plan_command kind = {.command = &kvp_ctl_plan_visible,
                                            .needed = "--sequence and --per-block are needed",
                                            .is_complete = has_blocks,
                                            .per_block = INT32_MAX,
                                            .run = visible_plan};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

const struct kvp_ctl_command kvp_ctl_plan_new = {
    .name = "plan new",
    .summary = "the compressed tokens that a chunk completes (no daemon needed)",
    .details = "Examples:\n"
               "  kvpoolctl plan new --sequence 10000,1024 --ratio 4",
    .options = new_options,
    .take = kvp_ctl_plan_take,
    .run = new_run,
};

const struct kvp_ctl_command kvp_ctl_plan_compressed = {
    .name = "plan compressed",
    .summary = "load plan of the compressed cache of a batch (no daemon needed)",
    .details = "A sequence without a compressed token yet gets one zero row.\n\n"
               "Examples:\n"
               "  kvpoolctl plan compressed --sequence 10000,1024 --ratio 4 --per-block 16\n"
               "  kvpoolctl plan compressed --sequence 100,100,7-8 --sequence 3,3 --ratio 4 \\\n"
               "      --per-block 16 --json",
    .options = batch_options,
    .take = kvp_ctl_plan_take,
    .run = compressed_run,
};

const struct kvp_ctl_command kvp_ctl_plan_visible = {
    .name = "plan visible",
    .summary = "the compressed columns [ks, ke) that each query row sees (no daemon needed)",
    .details = "Examples:\n"
               "  kvpoolctl plan visible --sequence 20,8 --ratio 4",
    .options = batch_options,
    .take = kvp_ctl_plan_take,
    .run = visible_run,
};
