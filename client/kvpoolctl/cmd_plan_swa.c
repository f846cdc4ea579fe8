/* plan swa, plan store, plan pivots, plan decode: the sliding windows of a batch. No daemon. */
#include "client/kvpoolctl/plan_command.h"
#include "client/kvpoolctl/text.h"

#define SEQUENCE_OPTION                                                                                              \
  {                                                                                                                  \
    "sequence", kvp_ctl_plan_ring_sequence, "K,Q[,STATE[,START]]", 0,                                                \
        "seqlen_k (tokens after this chunk), seqlen_q (tokens of this chunk), the sequence's block of the ring "     \
        "pool "                                                                                                      \
        "(default: 0, 1, 2, ...), and the first token whose row the ring has (default: 0); several are allowed",     \
        0                                                                                                            \
  }
#define WINDOW_OPTION                                                                                                \
  { "window", kvp_ctl_plan_window, "TOKENS", 0, "Tokens that a query sees, its own included", 0 }
#define RING_OPTION                                                                                                  \
  { "ring", kvp_ctl_plan_ring, "TOKENS", 0, "The ring region's tokens per block", 0 }

static const struct argp_option ring_options[] = {SEQUENCE_OPTION, WINDOW_OPTION, RING_OPTION, {0}};
static const struct argp_option store_options[] = {SEQUENCE_OPTION, RING_OPTION, {0}};
static const struct argp_option pivots_options[] = {SEQUENCE_OPTION, WINDOW_OPTION, {0}};

/* ---- plan swa ---------------------------------------------------------------------------------------------------
 */

static kvpool_status swa_make(struct kvp_ctl_plan_arguments *plan, void *out, size_t out_max, size_t *count,
                              kvpool_error *error) {
  return kvpool_plan_swa(plan->rings, plan->sequence_count, (uint32_t)plan->window, (uint32_t)plan->ring, out,
                         out_max, count, &plan->total_k, error);
}

static void swa_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const void *rows,
                      size_t count) {
  kvp_ctl_plan_segments_print(ctl, rows, count);
  kvp_ctl_print("%zu segment%s, total_k %lld\n", count, kvp_ctl_plural(count), (long long)plan->total_k);
}

static int swa_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  static const struct kvp_ctl_plan_rows kind = {
      .key = "segments", .width = 4, .make = swa_make, .print = swa_print, .has_total_k = true};
  return kvp_ctl_plan_rows_tell(ctl, plan, &kind);
}

/* ---- plan store -------------------------------------------------------------------------------------------------
 */

static kvpool_status store_make(struct kvp_ctl_plan_arguments *plan, void *out, size_t out_max, size_t *count,
                                kvpool_error *error) {
  return kvpool_plan_swa_slots(plan->rings, plan->sequence_count, (uint32_t)plan->ring, out, out_max, count, error);
}

struct chunk {
  size_t index;
  const kvpool_swa_sequence *sequence;
};

static void chunk_cells(struct kvp_ctl_table *table, const void *context, size_t first, size_t rows) {
  const struct chunk *chunk = context;
  const int64_t token = chunk->sequence->seqlen_k - chunk->sequence->seqlen_q + (int64_t)first;
  kvp_ctl_table_cell(table, KVP_CTL_DIM, "%zu", chunk->index);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", chunk->sequence->state_id);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld-%lld", (long long)token, (long long)token + (long long)rows - 1);
}

/* A line for every piece of a chunk whose slots run on. */
static void store_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const void *rows,
                        size_t count) {
  static const char *const columns[] = {">SEQUENCE", ">BLOCK", ">TOKENS", ">ROWS", ">SLOTS"};
  const int32_t *slots = rows;
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  (void)count;
  for (size_t i = 0; i < plan->sequence_count; i++) {
    const struct chunk chunk = {i, &plan->rings[i]};
    kvp_ctl_plan_runs_print(table, slots, (size_t)plan->rings[i].seqlen_q, "not stored", chunk_cells, &chunk);
    slots += plan->rings[i].seqlen_q;
  }
  kvp_ctl_table_print(table);
}

static int store_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  static const struct kvp_ctl_plan_rows kind = {.key = "slots", .width = 1, .make = store_make, .print = store_print};
  return kvp_ctl_plan_rows_tell(ctl, plan, &kind);
}

/* ---- plan pivots ------------------------------------------------------------------------------------------------
 */

static kvpool_status pivots_make(struct kvp_ctl_plan_arguments *plan, void *out, size_t out_max, size_t *count,
                                 kvpool_error *error) {
  return kvpool_plan_swa_pivots(plan->rings, plan->sequence_count, (uint32_t)plan->window, out, out_max, count,
                                error);
}

static void columns_cell(struct kvp_ctl_table *table, int32_t begin, int32_t count) {
  if (count == 0) {
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "-");
  } else {
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d-%d", begin, begin + count - 1);
  }
}

static void pivot_cells(struct kvp_ctl_table *table, const void *rows, size_t row) {
  const kvpool_swa_pivot *pivot = (const kvpool_swa_pivot *)rows + row;
  columns_cell(table, pivot->offset1, pivot->len1);
  columns_cell(table, pivot->offset2, pivot->len2);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", pivot->len1 + pivot->len2);
}

static void pivots_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const void *rows,
                         size_t count) {
  static const char *const columns[] = {">HISTORY COLUMNS", ">CHUNK COLUMNS", ">KEYS"};
  (void)count;
  kvp_ctl_plan_queries_print(ctl, plan, columns, sizeof columns / sizeof columns[0], pivot_cells, rows);
}

static int pivots_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  static const struct kvp_ctl_plan_rows kind = {
      .key = "pivots", .width = 4, .make = pivots_make, .print = pivots_print};
  return kvp_ctl_plan_rows_tell(ctl, plan, &kind);
}

/* ---- plan decode ------------------------------------------------------------------------------------------------
 */

static kvpool_status decode_make(struct kvp_ctl_plan_arguments *plan, void *out, size_t out_max, size_t *count,
                                 kvpool_error *error) {
  return kvpool_plan_swa_decode(plan->rings, plan->sequence_count, (uint32_t)plan->window, (uint32_t)plan->ring, out,
                                out_max, count, error);
}

static void window_cells(struct kvp_ctl_table *table, const void *rows, size_t row) {
  const kvpool_swa_window *window = (const kvpool_swa_window *)rows + row;
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", window->start_slot);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", window->valid_length);
}

static void decode_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const void *rows,
                         size_t count) {
  static const char *const columns[] = {">START SLOT", ">VALID LENGTH"};
  (void)count;
  kvp_ctl_plan_queries_print(ctl, plan, columns, sizeof columns / sizeof columns[0], window_cells, rows);
}

static int decode_plan(struct kvp_ctl *ctl, struct kvp_ctl_plan_arguments *plan) {
  static const struct kvp_ctl_plan_rows kind = {
      .key = "offset_len", .width = 2, .make = decode_make, .print = decode_print};
  return kvp_ctl_plan_rows_tell(ctl, plan, &kind);
}

/* ---- the commands -----------------------------------------------------------------------------------------------
 */

static bool has_window(const struct kvp_ctl_plan_arguments *plan) {
  return plan->sequence_count > 0 && plan->window > 0;
}

static bool has_ring(const struct kvp_ctl_plan_arguments *plan) {
  return plan->sequence_count > 0 && plan->ring > 0;
}

static bool has_both(const struct kvp_ctl_plan_arguments *plan) {
  return has_window(plan) && has_ring(plan);
}

static const char both_needed[] = "--sequence, --window and --ring are needed";

static int swa_run(struct kvp_ctl *ctl, int argc, char **argv) {
  const struct kvp_ctl_plan_command kind = {
      .command = &kvp_ctl_plan_swa, .needed = both_needed, .is_complete = has_both, .run = swa_plan};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

static int store_run(struct kvp_ctl *ctl, int argc, char **argv) {
  const struct kvp_ctl_plan_command kind = {.command = &kvp_ctl_plan_store,
                                            .needed = "--sequence and --ring are needed",
                                            .is_complete = has_ring,
                                            .run = store_plan};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

static int pivots_run(struct kvp_ctl *ctl, int argc, char **argv) {
  const struct kvp_ctl_plan_command kind = {.command = &kvp_ctl_plan_pivots,
                                            .needed = "--sequence and --window are needed",
                                            .is_complete = has_window,
                                            .run = pivots_plan};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

static int decode_run(struct kvp_ctl *ctl, int argc, char **argv) {
  const struct kvp_ctl_plan_command kind = {
      .command = &kvp_ctl_plan_decode, .needed = both_needed, .is_complete = has_both, .run = decode_plan};
  return kvp_ctl_plan_command_run(ctl, argc, argv, &kind);
}

const struct kvp_ctl_command kvp_ctl_plan_swa = {
    .name = "plan swa",
    .summary = "load plan of the sliding windows before a chunk (no daemon needed)",
    .details = "Every sequence has WINDOW rows; what lies before its first token, or before START, is zero rows.\n\n"
               "Examples:\n"
               "  kvpoolctl plan swa --sequence 10000,1024 --window 4096 --ring 4096\n"
               "  kvpoolctl plan swa --sequence 200,7,3,150 --sequence 5,5,4 --window 64 \\\n"
               "      --ring 96 --json",
    .options = ring_options,
    .take = kvp_ctl_plan_take,
    .run = swa_run,
};

const struct kvp_ctl_command kvp_ctl_plan_store = {
    .name = "plan store",
    .summary = "ring slots that a chunk's new rows go to (no daemon needed)",
    .details = "Rows that the chunk itself would overwrite are not stored: slot -1. The table has a line for each "
               "run of slots; --json gives every slot.\n\n"
               "Examples:\n"
               "  kvpoolctl plan store --sequence 10000,1024,5 --ring 4096\n"
               "  kvpoolctl plan store --sequence 1000,300 --ring 64 --json",
    .options = store_options,
    .take = kvp_ctl_plan_take,
    .run = store_run,
};

const struct kvp_ctl_command kvp_ctl_plan_pivots = {
    .name = "plan pivots",
    .summary = "columns of the assembled buffer that each query sees (no daemon needed)",
    .details = "The columns: WINDOW of history for each sequence, then the chunks. --json gives [offset1, len1, "
               "offset2, len2] of each query, as expand_swa_index takes them.\n\n"
               "Examples:\n"
               "  kvpoolctl plan pivots --sequence 200,7 --window 40\n"
               "  kvpoolctl plan pivots --sequence 9,1 --sequence 200,7,1,150 --window 40 \\\n"
               "      --json",
    .options = pivots_options,
    .take = kvp_ctl_plan_take,
    .run = pivots_run,
};

const struct kvp_ctl_command kvp_ctl_plan_decode = {
    .name = "plan decode",
    .summary = "window in the ring of each new token of a decode step (no daemon needed)",
    .details = "The new tokens are in the ring already, which has to have window + seqlen_q - 1 tokens. --json gives "
               "[start_slot, valid_length] of each, as swa_index_decode takes them.\n\n"
               "Examples:\n"
               "  kvpoolctl plan decode --sequence 10001,1,5 --window 4096 --ring 4096\n"
               "  kvpoolctl plan decode --sequence 41,2 --sequence 65,2 --window 40 \\\n"
               "      --ring 64 --json",
    .options = ring_options,
    .take = kvp_ctl_plan_take,
    .run = decode_run,
};
