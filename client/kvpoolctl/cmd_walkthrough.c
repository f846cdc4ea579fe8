/* walkthrough: one long sequence through a compressed paged pool and a ring pool, from random latents and back.
 *
 * seqlen_k 10000, seqlen_q 1024, block size 64, ratio 4, window = ring = 4096: 2500 compressed tokens in 157 blocks,
 * and a window of 4096 tokens that begins at 784 of the ring and wraps. Every expected figure below is arithmetic on
 * these lengths. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/latents.h"
#include "client/kvpoolctl/number.h"
#include "client/kvpoolctl/table.h"
#include "client/kvpoolctl/text.h"

enum {
  option_seed = 0x100,
  option_device,
  elements = 512,
  row_bytes = 2 * elements,
  record_bytes = 528,
  seqlen_k = 10000,
  seqlen_q = 1024,
  block_size = 64,
  ratio = 4,
  ring = 4096,
  compressed_tokens = 2500,
  compressed_blocks = 157,
  pool_blocks = 200,
  ring_blocks = 2,
  history_end = seqlen_k - seqlen_q,
  history_begin = history_end - ring,
  ring_begin = history_begin % ring,
  parts_max = 2,
  polls = 40,
  poll_ms = 50,
  clean_up_call_ms = 2000,
};

_Static_assert(ring_begin == 784, "the window's first token");

struct walkthrough_arguments {
  const char *device;
  uint64_t seed;
  bool has_seed;
};

/* One region, what is stored to it and loaded from it, in logical order. */
struct part {
  const char *name;
  char pool_name[64]; /* temporary, of a name that nobody else has; "": not asked for */
  kvpool_pool *pool;  /* NULL: not made, or not known whether */
  uint64_t rows;
  size_t segments_expected;
  kvpool_segment *segments;
  size_t segment_count;
  int32_t *slots;   /* [rows] */
  uint16_t *source; /* [rows, elements] */
  uint16_t *loaded;
  kvpool_op_report store;
  kvpool_op_report load;
  struct kvp_ctl_difference difference;
  char failure[160]; /* "" when it passed */
  bool may_appear;   /* its making was not answered */
  bool is_left;      /* the pool is still there, or may be */
};

struct walkthrough {
  struct kvp_ctl *ctl;
  const struct walkthrough_arguments *arguments;
  kvpool_session *session;
  uint64_t seed;
  uint64_t token; /* in the pools' names */
  struct part parts[parts_max];
};

static const struct argp_option options[] = {
    {"device", option_device, "DEVICE", 0, "Where; default: the first device", 0},
    {"seed", option_seed, "N", 0, "Of the random latents; default: from the clock", 0},
    {0},
};

static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct walkthrough_arguments *walkthrough = arguments;
  (void)state;
  switch (key) {
  case option_device:
    walkthrough->device = value;
    return 0;
  case option_seed:
    walkthrough->has_seed = true;
    return kvp_ctl_take_number(&kvp_ctl_walkthrough, "seed", value, INT64_MAX, &walkthrough->seed);
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

/* ---- pools, blocks, plans ---------------------------------------------------------------------------------------
 */

static int pool_make(struct walkthrough *walkthrough, struct part *part, kvpool_pool_kind kind, uint32_t block_tokens,
                     uint32_t blocks, uint32_t compression_ratio) {
  (void)snprintf(part->pool_name, sizeof part->pool_name, "walkthrough-%016llx-%s",
                 (unsigned long long)walkthrough->token, part->name);
  const kvpool_region_spec region = {
      .name = "kv", .format = "v41", .num_layers = 1, .compression_ratio = compression_ratio};
  const kvpool_pool_spec spec = {
      .name = part->pool_name,
      .kind = kind,
      .block_size = block_tokens,
      .num_blocks = blocks,
      .placements = &walkthrough->arguments->device,
      .placement_count = walkthrough->arguments->device == NULL ? 0 : 1,
      .regions = &region,
      .region_count = 1,
  };
  kvpool_error error;
  kvpool_status status = kvpool_pool_create(walkthrough->ctl->client, &spec, &part->pool, &error);
  if (status != KVPOOL_OK) {
    part->pool = NULL;
    part->may_appear = status == KVPOOL_DEADLINE_EXCEEDED || status == KVPOOL_CANCELLED;
    return kvp_ctl_fail(walkthrough->ctl, &error);
  }
  return KVP_CTL_OK;
}

static void part_allocate(struct part *part) {
  part->slots = kvp_ctl_allocate(part->rows, sizeof part->slots[0]);
  part->source = kvp_ctl_allocate(part->rows, row_bytes);
  part->loaded = kvp_ctl_allocate(part->rows, row_bytes);
  part->segments = kvp_ctl_allocate(part->segments_expected, sizeof part->segments[0]);
}

/* The order of a block table is the scheduler's: a shuffled one shows that nothing relies on it. */
static void shuffle(int32_t *items, uint32_t count, uint64_t seed) {
  for (uint32_t i = count - 1; i > 0; i--) {
    seed = seed * 6364136223846793005U + 1442695040888963407U;
    uint32_t j = (uint32_t)(seed >> 33) % (i + 1);
    int32_t item = items[i];
    items[i] = items[j];
    items[j] = item;
  }
}

static int compressed_prepare(struct walkthrough *walkthrough, struct part *part) {
  *part = (struct part){.name = "compressed", .rows = compressed_tokens, .segments_expected = compressed_blocks};
  int exit_status = pool_make(walkthrough, part, KVPOOL_POOL_PAGED, block_size, pool_blocks, ratio);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  part_allocate(part);
  uint32_t per_block = kvpool_pool_region(part->pool, 0)->tokens_per_block;
  int32_t table[compressed_blocks];
  int32_t cu_seqlens[2];
  int64_t total_k = 0;
  kvpool_error error;
  kvpool_status status = kvpool_blocks_allocate(walkthrough->session, part->pool, compressed_blocks, table, &error);
  if (status == KVPOOL_OK) {
    shuffle(table, compressed_blocks, walkthrough->seed);
    const kvpool_sequence sequence = {
        .seqlen_k = seqlen_k, .seqlen_q = seqlen_q, .block_table = table, .table_count = compressed_blocks};
    status = kvpool_plan_compressed(&sequence, 1, ratio, per_block, cu_seqlens, part->segments,
                                    part->segments_expected, &part->segment_count, &total_k, &error);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_plan_slot_mapping(table, compressed_blocks, per_block, 0, compressed_tokens, part->slots, &error);
  }
  if (status == KVPOOL_OK && total_k != compressed_tokens) {
    (void)snprintf(part->failure, sizeof part->failure, "the plan has %lld rows", (long long)total_k);
  }
  return status == KVPOOL_OK ? KVP_CTL_OK : kvp_ctl_fail_session(walkthrough->ctl, walkthrough->session, &error);
}

static int window_prepare(struct walkthrough *walkthrough, struct part *part) {
  *part = (struct part){.name = "window", .rows = ring, .segments_expected = 2, .segment_count = 2};
  int exit_status = pool_make(walkthrough, part, KVPOOL_POOL_RING, ring, ring_blocks, 1);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  part_allocate(part);
  int32_t states[ring_blocks];
  kvpool_error error;
  if (kvpool_blocks_allocate(walkthrough->session, part->pool, ring_blocks, states, &error) != KVPOOL_OK) {
    return kvp_ctl_fail_session(walkthrough->ctl, walkthrough->session, &error);
  }
  int32_t state = states[ring_blocks - 1];
  for (int32_t i = 0; i < ring; i++) {
    part->slots[i] = state * ring + (history_begin + i) % ring;
  }
  part->segments[0] = (kvpool_segment){.src_block = state, .src_begin = ring_begin, .src_end = ring, .dst_offset = 0};
  part->segments[1] =
      (kvpool_segment){.src_block = state, .src_begin = 0, .src_end = ring_begin, .dst_offset = ring - ring_begin};
  return KVP_CTL_OK;
}

/* ---- store, load, compare ---------------------------------------------------------------------------------------
 */

static int part_run(struct walkthrough *walkthrough, struct part *part) {
  const kvpool_layer layer = {.pool = part->pool, .region = 0, .layer = 0};
  kvpool_error error;
  kvp_ctl_latents_fill(part->source, part->rows * elements, &walkthrough->seed);
  if (kvpool_rows_store(walkthrough->session, &layer, part->source, part->rows, row_bytes, part->slots, part->rows,
                        &part->store, &error) != KVPOOL_OK ||
      kvpool_rows_load(walkthrough->session, &layer, &part->segments[0].src_block, part->segment_count, part->rows,
                       part->loaded, NULL, &part->load, &error) != KVPOOL_OK) {
    return kvp_ctl_fail_session(walkthrough->ctl, walkthrough->session, &error);
  }
  kvp_ctl_latents_compare(part->source, part->loaded, part->rows * elements, &part->difference);
  return KVP_CTL_OK;
}

static void part_expect(struct part *part, const char *what, uint64_t is, uint64_t expected) {
  if (is != expected && part->failure[0] == '\0') {
    (void)snprintf(part->failure, sizeof part->failure, "%s: %llu, not %llu", what, (unsigned long long)is,
                   (unsigned long long)expected);
  }
}

static void part_check(struct part *part) {
  part_expect(part, "segments", part->segment_count, part->segments_expected);
  part_expect(part, "rows stored", part->store.rows_stored, part->rows);
  part_expect(part, "rows with NaN or Inf", part->store.rows_nonfinite, 0);
  part_expect(part, "rows loaded", part->load.rows_loaded, part->rows);
  part_expect(part, "bytes read", part->load.bytes_read, part->rows * record_bytes);
  part_expect(part, "bytes written", part->load.bytes_written, part->rows * row_bytes);
  if (!(part->difference.bound_used_max <= 1) && part->failure[0] == '\0') {
    size_t element = part->difference.element;
    (void)snprintf(part->failure, sizeof part->failure,
                   "row %zu element %zu: bits 0x%04x came back as 0x%04x, %.3g times the error that v41 allows",
                   element / elements, element % elements, part->source[element], part->loaded[element],
                   part->difference.bound_used_max);
  }
}

/* ---- what it says -----------------------------------------------------------------------------------------------
 */

static void heading_print(const struct walkthrough *walkthrough) {
  kvp_ctl_print("%s tokens, %s of them new; block size %d, ratio %d, window %s\n", kvp_ctl_count(seqlen_k).text,
                kvp_ctl_count(seqlen_q).text, block_size, ratio, kvp_ctl_count(ring).text);
  kvp_ctl_print("random latents (seed %llu) -> two temporary v41 pools -> loaded back\n\n",
                (unsigned long long)walkthrough->arguments->seed);
}

static void parts_print(const struct walkthrough *walkthrough) {
  static const char *const columns[] = {"PART",     ">ROWS",       ">SEGMENTS",     "?>STORED", ">READ",
                                        ">WRITTEN", ">ERROR (L2)", "?>WORST/BOUND", "RESULT"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(walkthrough->ctl, columns, sizeof columns / sizeof columns[0]);
  for (int i = 0; i < parts_max; i++) {
    const struct part *part = &walkthrough->parts[i];
    bool passed = part->failure[0] == '\0';
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%s", part->name);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(part->load.rows_loaded).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu", part->segment_count);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s B", kvp_ctl_count(part->store.bytes_written).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s B", kvp_ctl_count(part->load.bytes_read).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s B", kvp_ctl_count(part->load.bytes_written).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%.4f", part->difference.relative_l2);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%.1f %%", 100 * part->difference.bound_used_max);
    kvp_ctl_table_cell(table, passed ? KVP_CTL_GOOD : KVP_CTL_BAD, "%s", passed ? "pass" : "FAIL");
  }
  kvp_ctl_table_print(table);
  kvp_ctl_print("\nfirst and last segment (tokens of a block -> row of the output)\n");
  for (int i = 0; i < parts_max; i++) {
    const struct part *part = &walkthrough->parts[i];
    const kvpool_segment *first = &part->segments[0];
    const kvpool_segment *last = &part->segments[part->segment_count - 1];
    kvp_ctl_print("%-10s  %d..%d of block %d -> row %d;  %d..%d of block %d -> row %d\n", part->name,
                  first->src_begin, first->src_end, first->src_block, first->dst_offset, last->src_begin,
                  last->src_end, last->src_block, last->dst_offset);
  }
}

static json_t *part_json(const struct part *part) {
  json_t *object = json_object();
  kvp_ctl_json_string(object, "name", part->name);
  kvp_ctl_json_integer(object, "rows", (int64_t)part->load.rows_loaded);
  kvp_ctl_json_integer(object, "segment_count", (int64_t)part->segment_count);
  json_t *segments = json_array();
  for (size_t i = 0; i < part->segment_count; i++) {
    const kvpool_segment *segment = &part->segments[i];
    const int32_t numbers[4] = {segment->src_block, segment->src_begin, segment->src_end, segment->dst_offset};
    kvp_ctl_json_append(segments, kvp_ctl_json_int32_array(numbers, 4));
  }
  kvp_ctl_json_set(object, "segments", segments);
  kvp_ctl_json_integer(object, "bytes_stored", (int64_t)part->store.bytes_written);
  kvp_ctl_json_integer(object, "bytes_read", (int64_t)part->load.bytes_read);
  kvp_ctl_json_integer(object, "bytes_written", (int64_t)part->load.bytes_written);
  kvp_ctl_json_real(object, "relative_l2", part->difference.relative_l2);
  kvp_ctl_json_real(object, "bound_used_max", part->difference.bound_used_max);
  kvp_ctl_json_bool(object, "passed", part->failure[0] == '\0');
  kvp_ctl_json_string(object, "failure", part->failure);
  return object;
}

static int result_tell(const struct walkthrough *walkthrough) {
  const struct kvp_ctl_terminal *terminal = &walkthrough->ctl->terminal;
  bool passed = true;
  for (int i = 0; i < parts_max; i++) {
    passed = passed && walkthrough->parts[i].failure[0] == '\0';
  }
  if (walkthrough->ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_bool(document, "passed", passed);
    kvp_ctl_json_integer(document, "seed", (int64_t)walkthrough->arguments->seed);
    json_t *parts = json_array();
    for (int i = 0; i < parts_max; i++) {
      kvp_ctl_json_append(parts, part_json(&walkthrough->parts[i]));
    }
    kvp_ctl_json_set(document, "parts", parts);
    kvp_ctl_json_print(walkthrough->ctl, document);
  } else {
    heading_print(walkthrough);
    parts_print(walkthrough);
    kvp_ctl_print("\n%s%s%s: every element is%s within the error of e4m3 under its group's scale\n",
                  kvp_ctl_terminal_role(terminal, passed ? KVP_CTL_GOOD : KVP_CTL_BAD), passed ? "PASS" : "FAIL",
                  kvp_ctl_terminal_reset(terminal), passed ? "" : " not");
  }
  for (int i = 0; i < parts_max && !passed; i++) {
    if (walkthrough->parts[i].failure[0] != '\0') {
      kvp_ctl_warn("%s: %s", walkthrough->parts[i].name, walkthrough->parts[i].failure);
    }
  }
  return passed ? KVP_CTL_OK : KVP_CTL_CHECK_FAILED;
}

/* ---- life -------------------------------------------------------------------------------------------------------
 */

static int steps_run(struct walkthrough *walkthrough) {
  const kvpool_session_options session = {.size_bytes = sizeof session, .name = "kvpoolctl-walkthrough"};
  kvpool_error error;
  if (kvpool_session_open(walkthrough->ctl->client, &session, &walkthrough->session, &error) != KVPOOL_OK) {
    walkthrough->session = NULL;
    return kvp_ctl_fail(walkthrough->ctl, &error);
  }
  int (*const prepare[parts_max])(struct walkthrough *, struct part *) = {compressed_prepare, window_prepare};
  for (int i = 0; i < parts_max; i++) {
    int exit_status = kvp_ctl_interrupted() ? KVP_CTL_INTERRUPTED : prepare[i](walkthrough, &walkthrough->parts[i]);
    if (exit_status == KVP_CTL_OK) {
      exit_status = kvp_ctl_interrupted() ? KVP_CTL_INTERRUPTED : part_run(walkthrough, &walkthrough->parts[i]);
    }
    if (exit_status != KVP_CTL_OK) {
      return exit_status;
    }
    part_check(&walkthrough->parts[i]);
  }
  return KVP_CTL_OK;
}

/* A pool whose making was not answered in time may be made a moment later: its name is nobody else's. */
static void pool_await(const struct walkthrough *walkthrough, struct part *part) {
  for (int i = 0; i < polls && part->pool == NULL && part->may_appear; i++) {
    kvpool_error error;
    kvpool_status status = kvpool_pool_open(walkthrough->ctl->client, part->pool_name, &part->pool, &error);
    if (status != KVPOOL_OK) {
      part->pool = NULL;
    }
    if (status == KVPOOL_UNKNOWN_POOL) {
      (void)nanosleep(&(struct timespec){.tv_nsec = poll_ms * 1000000L}, NULL);
    } else if (status != KVPOOL_OK) {
      break; /* nothing is to be had of this daemon */
    }
  }
}

/* The session is over, so that nobody holds blocks of the pool any more. */
static int part_delete(const struct walkthrough *walkthrough, struct part *part) {
  int exit_status = KVP_CTL_OK;
  kvpool_error error;
  char hint[160];
  (void)snprintf(hint, sizeof hint, "kvpoolctl pool delete --force %s", part->pool_name);
  pool_await(walkthrough, part);
  if (part->pool != NULL) {
    kvpool_status status = KVPOOL_IN_USE; /* a step that was cut off runs to its end */
    for (int i = 0; i < polls && status == KVPOOL_IN_USE; i++) {
      (void)nanosleep(&(struct timespec){.tv_nsec = i == 0 ? 0 : poll_ms * 1000000L}, NULL);
      status = kvpool_pool_delete(part->pool, true, &error);
    }
    /* Gone with its daemon, or deleted by somebody: either way it is not there. */
    part->is_left = status != KVPOOL_OK && status != KVPOOL_UNKNOWN_POOL && status != KVPOOL_DISCONNECTED;
    exit_status = part->is_left ? kvp_ctl_fail_hint(walkthrough->ctl, &error, hint) : KVP_CTL_OK;
  } else if (part->may_appear) {
    part->is_left = true;
    kvp_ctl_warn("pool %s may still be made: `%s`", part->pool_name, hint);
  }
  return exit_status;
}

static void part_deinit(struct part *part) {
  kvpool_pool_destroy(part->pool);
  free(part->segments);
  free(part->slots);
  free(part->source);
  free(part->loaded);
}

/* Before anything is said of the result: what is said may find nobody who reads it. has_failed: calls get a time of
 * their own, as one that was too short may be what has failed. */
static int clean_up(struct walkthrough *walkthrough, bool has_failed) {
  int exit_status = KVP_CTL_OK;
  if (has_failed && !kvp_ctl_interrupted()) {
    kvpool_client_interrupt(walkthrough->ctl->client, clean_up_call_ms);
  }
  kvpool_session_close(walkthrough->session);
  for (int i = 0; i < parts_max; i++) {
    int deleted = part_delete(walkthrough, &walkthrough->parts[i]);
    exit_status = exit_status == KVP_CTL_OK ? deleted : exit_status;
  }
  return exit_status;
}

/* What one of these left that was killed: pools of its names that nobody holds blocks of. */
static void left_tell(const struct walkthrough *walkthrough) {
  static const char prefix[] = "walkthrough-";
  kvpool_pool_list *list;
  if (kvpool_pool_list_get(walkthrough->ctl->client, &list, NULL) != KVPOOL_OK) {
    return;
  }
  for (size_t i = 0; i < kvpool_pool_list_count(list); i++) {
    const kvpool_pool *pool = kvpool_pool_list_item(list, i);
    if (strncmp(kvpool_pool_name(pool), prefix, sizeof prefix - 1) == 0 && kvpool_pool_leased_blocks(pool) == 0) {
      kvp_ctl_warn("pool %s looks like one that a killed walkthrough has left: `kvpoolctl pool delete %s`",
                   kvpool_pool_name(pool), kvpool_pool_name(pool));
    }
  }
  kvpool_pool_list_destroy(list);
}

static int walkthrough_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct walkthrough_arguments arguments = {0};
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_walkthrough, argc, argv, &arguments, &exit_status)) {
    return exit_status;
  }
  if (!arguments.has_seed) {
    arguments.seed = (uint64_t)time(NULL);
  }
  kvp_ctl_interrupt_init(ctl);
  exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  struct walkthrough walkthrough = {.ctl = ctl, .arguments = &arguments, .seed = arguments.seed};
  if (getrandom(&walkthrough.token, sizeof walkthrough.token, 0) != (ssize_t)sizeof walkthrough.token) {
    return kvp_ctl_refuse(ctl, "try again", "no random bytes for the pools' names: %s", strerror(errno));
  }
  left_tell(&walkthrough);
  exit_status = steps_run(&walkthrough);
  int cleaned = clean_up(&walkthrough, exit_status != KVP_CTL_OK);
  if (exit_status == KVP_CTL_OK) {
    exit_status = result_tell(&walkthrough);
    exit_status = exit_status == KVP_CTL_OK ? cleaned : exit_status;
  } else if (exit_status == KVP_CTL_INTERRUPTED) {
    bool is_left = walkthrough.parts[0].is_left || walkthrough.parts[1].is_left;
    (void)kvp_ctl_tell_interrupted(is_left ? "interrupted" : "interrupted; the temporary pools are deleted");
  }
  for (int i = 0; i < parts_max; i++) {
    part_deinit(&walkthrough.parts[i]);
  }
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_walkthrough = {
    .name = "walkthrough",
    .summary = "store and load one long sequence, and check what comes back",
    .details =
        "Makes two temporary pools (8 MiB), stores random latents of a sequence of 10,000 tokens in both, loads "
        "them by their plans - 2500 compressed tokens from 157 blocks, and a window of 4096 that wraps in its "
        "ring - and holds every element against the source. The pools are deleted at the end, also after "
        "Ctrl-C. Making pools is an operator's right (root, and the daemon's own user). Exit status 4: something "
        "came back wrong.\n\n"
        "Examples:\n"
        "  kvpoolctl walkthrough\n"
        "  kvpoolctl walkthrough --device host:0 --seed 7 --json",
    .options = options,
    .take = take,
    .run = walkthrough_run,
};
