/* plan swa, plan store, plan pivots, plan decode: the sliding windows of a batch. No daemon. */
#include <stdlib.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/plan_arguments.h"
#include "client/kvpoolctl/table.h"
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

/* What the sizing call has given is as much as this program plans for. */
static int rows_check(const struct kvp_ctl *ctl, size_t rows) {
  return rows <= kvp_ctl_plan_rows_max
             ? KVP_CTL_OK
             : kvp_ctl_refuse(ctl, NULL, "%zu rows; this program plans for at most %d", rows, kvp_ctl_plan_rows_max);
}

/* ---- plan swa ---------------------------------------------------------------------------------------------------
 */

static int swa_plan(struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan) {
  kvpool_segment *segments = kvp_ctl_allocate(3 * plan->sequence_count, sizeof segments[0]);
  size_t count = 0;
  int64_t total_k = 0;
  kvpool_error error;
  int exit_status = KVP_CTL_OK;
  if (kvpool_plan_swa(plan->rings, plan->sequence_count, (uint32_t)plan->window, (uint32_t)plan->ring, segments,
                      3 * plan->sequence_count, &count, &total_k, &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_integer(document, "total_k", total_k);
    kvp_ctl_json_set(document, "segments", kvp_ctl_plan_segments_json(segments, count));
    kvp_ctl_json_print(ctl, document);
  } else {
    kvp_ctl_plan_segments_print(ctl, segments, count);
    kvp_ctl_print("%zu segment%s, total_k %lld\n", count, kvp_ctl_plural(count), (long long)total_k);
  }
  free(segments);
  return exit_status;
}

/* ---- plan store -------------------------------------------------------------------------------------------------
 */

/* A line for every piece of a chunk whose slots run on. */
static void store_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan, const int32_t *slots) {
  static const char *const columns[] = {">SEQUENCE", ">BLOCK", ">TOKENS", ">ROWS", ">SLOTS"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < plan->sequence_count; i++) {
    const kvpool_swa_sequence *sequence = &plan->rings[i];
    for (int64_t begin = 0; begin < sequence->seqlen_q;) {
      int64_t token = sequence->seqlen_k - sequence->seqlen_q + begin;
      size_t rows = kvp_ctl_plan_run(slots + begin, (size_t)(sequence->seqlen_q - begin));
      kvp_ctl_table_row(table);
      kvp_ctl_table_cell(table, KVP_CTL_DIM, "%zu", i);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", sequence->state_id);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld-%lld", (long long)token, (long long)token + (long long)rows - 1);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu", rows);
      if (slots[begin] < 0) {
        kvp_ctl_table_cell(table, KVP_CTL_WARN, "not stored");
      } else {
        kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d-%d", slots[begin], slots[begin + (int64_t)rows - 1]);
      }
      begin += (int64_t)rows;
    }
    slots += sequence->seqlen_q;
  }
  kvp_ctl_table_print(table);
}

static int store_plan(struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan) {
  const uint32_t ring = (uint32_t)plan->ring;
  size_t count = 0;
  kvpool_error error;
  if (kvpool_plan_swa_slots(plan->rings, plan->sequence_count, ring, NULL, 0, &count, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  int exit_status = rows_check(ctl, count);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  int32_t *slots = kvp_ctl_allocate(count, sizeof slots[0]);
  if (kvpool_plan_swa_slots(plan->rings, plan->sequence_count, ring, slots, count, &count, &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_set(document, "slots", kvp_ctl_json_int32_array(slots, count));
    kvp_ctl_json_print(ctl, document);
  } else {
    store_print(ctl, plan, slots);
  }
  free(slots);
  return exit_status;
}

/* ---- plan pivots ------------------------------------------------------------------------------------------------
 */

static void columns_cell(struct kvp_ctl_table *table, int32_t begin, int32_t count) {
  if (count == 0) {
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "-");
  } else {
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d-%d", begin, begin + count - 1);
  }
}

static void pivots_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan,
                         const kvpool_swa_pivot *pivots) {
  static const char *const columns[] = {">ROW",           ">SEQUENCE", ">POSITION", ">HISTORY COLUMNS",
                                        ">CHUNK COLUMNS", ">KEYS"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  size_t row = 0;
  for (size_t i = 0; i < plan->sequence_count; i++) {
    const kvpool_swa_sequence *sequence = &plan->rings[i];
    for (int64_t position = sequence->seqlen_k - sequence->seqlen_q; position < sequence->seqlen_k;
         position++, row++) {
      kvp_ctl_table_row(table);
      kvp_ctl_table_cell(table, KVP_CTL_DIM, "%zu", row);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu", i);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)position);
      columns_cell(table, pivots[row].offset1, pivots[row].len1);
      columns_cell(table, pivots[row].offset2, pivots[row].len2);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", pivots[row].len1 + pivots[row].len2);
    }
  }
  kvp_ctl_table_print(table);
}

static json_t *pivots_json(const kvpool_swa_pivot *pivots, size_t count) {
  json_t *array = json_array();
  for (size_t i = 0; i < count; i++) {
    const int32_t pivot[4] = {pivots[i].offset1, pivots[i].len1, pivots[i].offset2, pivots[i].len2};
    kvp_ctl_json_append(array, kvp_ctl_json_int32_array(pivot, 4));
  }
  return array;
}

static int pivots_plan(struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan) {
  const uint32_t window = (uint32_t)plan->window;
  size_t count = 0;
  kvpool_error error;
  if (kvpool_plan_swa_pivots(plan->rings, plan->sequence_count, window, NULL, 0, &count, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  int exit_status = rows_check(ctl, count);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_swa_pivot *pivots = kvp_ctl_allocate(count, sizeof pivots[0]);
  if (kvpool_plan_swa_pivots(plan->rings, plan->sequence_count, window, pivots, count, &count, &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_set(document, "pivots", pivots_json(pivots, count));
    kvp_ctl_json_print(ctl, document);
  } else {
    pivots_print(ctl, plan, pivots);
  }
  free(pivots);
  return exit_status;
}

/* ---- plan decode ------------------------------------------------------------------------------------------------
 */

static void windows_print(const struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan,
                          const kvpool_swa_window *windows) {
  static const char *const columns[] = {">ROW", ">SEQUENCE", ">POSITION", ">START SLOT", ">VALID LENGTH"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  size_t row = 0;
  for (size_t i = 0; i < plan->sequence_count; i++) {
    const kvpool_swa_sequence *sequence = &plan->rings[i];
    for (int64_t position = sequence->seqlen_k - sequence->seqlen_q; position < sequence->seqlen_k;
         position++, row++) {
      kvp_ctl_table_row(table);
      kvp_ctl_table_cell(table, KVP_CTL_DIM, "%zu", row);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu", i);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%lld", (long long)position);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", windows[row].start_slot);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%d", windows[row].valid_length);
    }
  }
  kvp_ctl_table_print(table);
}

static json_t *windows_json(const kvpool_swa_window *windows, size_t count) {
  json_t *array = json_array();
  for (size_t i = 0; i < count; i++) {
    const int32_t window[2] = {windows[i].start_slot, windows[i].valid_length};
    kvp_ctl_json_append(array, kvp_ctl_json_int32_array(window, 2));
  }
  return array;
}

static int decode_plan(struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan) {
  const uint32_t window = (uint32_t)plan->window, ring = (uint32_t)plan->ring;
  size_t count = 0;
  kvpool_error error;
  if (kvpool_plan_swa_decode(plan->rings, plan->sequence_count, window, ring, NULL, 0, &count, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  int exit_status = rows_check(ctl, count);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_swa_window *windows = kvp_ctl_allocate(count, sizeof windows[0]);
  if (kvpool_plan_swa_decode(plan->rings, plan->sequence_count, window, ring, windows, count, &count, &error) !=
      KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_set(document, "offset_len", windows_json(windows, count));
    kvp_ctl_json_print(ctl, document);
  } else {
    windows_print(ctl, plan, windows);
  }
  free(windows);
  return exit_status;
}

/* ---- the commands -----------------------------------------------------------------------------------------------
 */

/* needed: for the text; window and ring where the command has them. */
static int ring_run(struct kvp_ctl *ctl, const struct kvp_ctl_command *command, int argc, char **argv,
                    const char *needed,
                    int (*plan_and_tell)(struct kvp_ctl *ctl, const struct kvp_ctl_plan_arguments *plan)) {
  struct kvp_ctl_plan_arguments *plan = kvp_ctl_allocate(1, sizeof *plan);
  plan->command = command;
  int exit_status;
  if (kvp_ctl_parse(ctl, command, argc, argv, plan, &exit_status)) {
    bool lacks_window = plan->window == 0 && command != &kvp_ctl_plan_store;
    bool lacks_ring = plan->ring == 0 && command != &kvp_ctl_plan_pivots;
    exit_status = plan->sequence_count == 0 || lacks_window || lacks_ring
                      ? kvp_ctl_usage(command, "%s are needed", needed)
                      : plan_and_tell(ctl, plan);
  }
  free(plan);
  return exit_status;
}

static int swa_run(struct kvp_ctl *ctl, int argc, char **argv) {
  return ring_run(ctl, &kvp_ctl_plan_swa, argc, argv, "--sequence, --window and --ring", swa_plan);
}

static int store_run(struct kvp_ctl *ctl, int argc, char **argv) {
  return ring_run(ctl, &kvp_ctl_plan_store, argc, argv, "--sequence and --ring", store_plan);
}

static int pivots_run(struct kvp_ctl *ctl, int argc, char **argv) {
  return ring_run(ctl, &kvp_ctl_plan_pivots, argc, argv, "--sequence and --window", pivots_plan);
}

static int decode_run(struct kvp_ctl *ctl, int argc, char **argv) {
  return ring_run(ctl, &kvp_ctl_plan_decode, argc, argv, "--sequence, --window and --ring", decode_plan);
}

const struct kvp_ctl_command kvp_ctl_plan_swa = {
    .name = "plan swa",
    .summary = "load plan of the sliding windows before a chunk (no daemon needed)",
    .details = "Every sequence has WINDOW rows; what lies before its first token, or before START, is zero rows.\n\n"
               "Examples:\n"
               "  kvpoolctl plan swa --sequence 10000,1024 --window 4096 --ring 4096\n"
               "  kvpoolctl plan swa --sequence 200,7,3,150 --sequence 5,5,4 --window 64 --ring 96 --json",
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
               "  kvpoolctl plan pivots --sequence 9,1 --sequence 200,7,1,150 --window 40 --json",
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
               "  kvpoolctl plan decode --sequence 41,2 --sequence 65,2 --window 40 --ring 64 --json",
    .options = ring_options,
    .take = kvp_ctl_plan_take,
    .run = decode_run,
};
