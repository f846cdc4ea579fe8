/* walkthrough: one long sequence through a compressed paged pool and a ring pool, from random latents and back, and
 * through a prefill and a decode step; every figure is the one that was worked out on paper, or it says which is not. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/table.h"
#include "client/kvpoolctl/text.h"
#include "client/kvpoolctl/walkthrough.h"

enum { option_seed = 0x100, option_device, clean_up_call_ms = 2000 };

struct walkthrough_arguments {
  const char *device;
  uint64_t seed;
  bool has_seed;
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

/* ---- figures ----------------------------------------------------------------------------------------------------
 */

void kvp_walk_figure_add(struct kvp_walk *walk, const char *name, uint32_t count, const int64_t *values,
                         const int64_t *expected) {
  assert(walk->figure_count < kvp_walk_figures_max && count <= kvp_walk_figure_values_max);
  struct kvp_walk_figure *figure = &walk->figures[walk->figure_count++];
  *figure = (struct kvp_walk_figure){.name = name, .count = count};
  memcpy(figure->values, values, count * sizeof values[0]);
  memcpy(figure->expected, expected, count * sizeof expected[0]);
}

bool kvp_walk_figure_holds(const struct kvp_walk_figure *figure) {
  return memcmp(figure->values, figure->expected, sizeof figure->values) == 0;
}

static struct kvp_ctl_text numbers_text(const int64_t *numbers, uint32_t count) {
  struct kvp_ctl_text text = {""};
  for (uint32_t i = 0; i < count; i++) {
    size_t used = strlen(text.text);
    uint64_t size = numbers[i] < 0 ? 0 - (uint64_t)numbers[i] : (uint64_t)numbers[i];
    (void)snprintf(text.text + used, sizeof text.text - used, "%s%s%.20s", i == 0 ? "" : "  ",
                   numbers[i] < 0 ? "-" : "", kvp_ctl_count(size).text);
  }
  return text;
}

/* ---- what it says -----------------------------------------------------------------------------------------------
 */

static void heading_print(uint64_t seed) {
  kvp_ctl_print("%s tokens, %s of them new; block size %d, ratio %d, window %s\n",
                kvp_ctl_count(kvp_walk_seqlen_k).text, kvp_ctl_count(kvp_walk_seqlen_q).text, kvp_walk_block_size,
                kvp_walk_ratio, kvp_ctl_count(kvp_walk_ring).text);
  kvp_ctl_print("random latents (seed %llu) -> two temporary v41 pools -> loaded back\n\n", (unsigned long long)seed);
}

static void parts_print(const struct kvp_walk *walk) {
  static const char *const columns[] = {"PART",     ">ROWS",       ">SEGMENTS",     "?>STORED", ">READ",
                                        ">WRITTEN", ">ERROR (L2)", "?>WORST/BOUND", "RESULT"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(walk->ctl, columns, sizeof columns / sizeof columns[0]);
  for (int i = 0; i < kvp_walk_parts; i++) {
    const struct kvp_walk_part *part = &walk->parts[i];
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
  for (int i = 0; i < kvp_walk_parts; i++) {
    const struct kvp_walk_part *part = &walk->parts[i];
    const kvpool_segment *first = &part->segments[0];
    const kvpool_segment *last = &part->segments[part->segment_count - 1];
    kvp_ctl_print("%-10s  %d..%d of block %d -> row %d;  %d..%d of block %d -> row %d\n", part->name,
                  first->src_begin, first->src_end, first->src_block, first->dst_offset, last->src_begin,
                  last->src_end, last->src_block, last->dst_offset);
  }
}

static void figures_print(const struct kvp_walk *walk) {
  static const char *const columns[] = {"PREFILL AND DECODE", ">IS", "?>ON PAPER", "RESULT"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(walk->ctl, columns, sizeof columns / sizeof columns[0]);
  for (uint32_t i = 0; i < walk->figure_count; i++) {
    const struct kvp_walk_figure *figure = &walk->figures[i];
    bool passed = kvp_walk_figure_holds(figure);
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", figure->name);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", numbers_text(figure->values, figure->count).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", numbers_text(figure->expected, figure->count).text);
    kvp_ctl_table_cell(table, passed ? KVP_CTL_GOOD : KVP_CTL_BAD, "%s", passed ? "pass" : "FAIL");
  }
  kvp_ctl_print("\n");
  kvp_ctl_table_print(table);
}

static json_t *part_json(const struct kvp_walk_part *part) {
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

static json_t *numbers_json(const int64_t *numbers, uint32_t count) {
  json_t *array = json_array();
  for (uint32_t i = 0; i < count; i++) {
    kvp_ctl_json_append(array, json_integer(numbers[i]));
  }
  return array;
}

static json_t *figures_json(const struct kvp_walk *walk) {
  json_t *array = json_array();
  for (uint32_t i = 0; i < walk->figure_count; i++) {
    const struct kvp_walk_figure *figure = &walk->figures[i];
    json_t *object = json_object();
    kvp_ctl_json_string(object, "name", figure->name);
    kvp_ctl_json_set(object, "values", numbers_json(figure->values, figure->count));
    kvp_ctl_json_set(object, "expected", numbers_json(figure->expected, figure->count));
    kvp_ctl_json_bool(object, "passed", kvp_walk_figure_holds(figure));
    kvp_ctl_json_append(array, object);
  }
  return array;
}

static void failures_warn(const struct kvp_walk *walk) {
  for (int i = 0; i < kvp_walk_parts; i++) {
    if (walk->parts[i].failure[0] != '\0') {
      kvp_ctl_warn("%s: %s", walk->parts[i].name, walk->parts[i].failure);
    }
  }
  for (uint32_t i = 0; i < walk->figure_count; i++) {
    const struct kvp_walk_figure *figure = &walk->figures[i];
    if (!kvp_walk_figure_holds(figure)) {
      kvp_ctl_warn("%s: %s, not %s", figure->name, numbers_text(figure->values, figure->count).text,
                   numbers_text(figure->expected, figure->count).text);
    }
  }
}

static int result_tell(const struct kvp_walk *walk, uint64_t seed) {
  const struct kvp_ctl_terminal *terminal = &walk->ctl->terminal;
  bool passed = true;
  for (int i = 0; i < kvp_walk_parts; i++) {
    passed = passed && walk->parts[i].failure[0] == '\0';
  }
  for (uint32_t i = 0; i < walk->figure_count; i++) {
    passed = passed && kvp_walk_figure_holds(&walk->figures[i]);
  }
  if (walk->ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_bool(document, "passed", passed);
    kvp_ctl_json_integer(document, "seed", (int64_t)seed);
    json_t *parts = json_array();
    for (int i = 0; i < kvp_walk_parts; i++) {
      kvp_ctl_json_append(parts, part_json(&walk->parts[i]));
    }
    kvp_ctl_json_set(document, "parts", parts);
    kvp_ctl_json_set(document, "figures", figures_json(walk));
    kvp_ctl_json_print(walk->ctl, document);
  } else {
    heading_print(seed);
    parts_print(walk);
    figures_print(walk);
    kvp_ctl_print("\n%s%s%s: %s\n", kvp_ctl_terminal_role(terminal, passed ? KVP_CTL_GOOD : KVP_CTL_BAD),
                  passed ? "PASS" : "FAIL", kvp_ctl_terminal_reset(terminal),
                  passed ? "every element is within the error of e4m3 under its group's scale,\n"
                           "      every figure is the one on paper"
                         : "not every element and figure is what it should be");
  }
  if (!passed) {
    failures_warn(walk);
  }
  return passed ? KVP_CTL_OK : KVP_CTL_CHECK_FAILED;
}

/* ---- life -------------------------------------------------------------------------------------------------------
 */

static int steps_run(struct kvp_walk *walk) {
  const kvpool_session_options session = {.size_bytes = sizeof session, .name = "kvpoolctl-walkthrough"};
  kvpool_error error;
  if (kvpool_session_open(walk->ctl->client, &session, &walk->session, &error) != KVPOOL_OK) {
    walk->session = NULL;
    return kvp_ctl_fail(walk->ctl, &error);
  }
  int exit_status = kvp_walk_parts_run(walk);
  return exit_status == KVP_CTL_OK ? kvp_walk_steps_run(walk) : exit_status;
}

/* Before anything is said of the result: what is said may find nobody who reads it. has_failed: calls get a time of
 * their own, as one that was too short may be what has failed. */
static int clean_up(struct kvp_walk *walk, bool has_failed) {
  int exit_status = KVP_CTL_OK;
  if (has_failed && !kvp_ctl_interrupted()) {
    kvpool_client_interrupt(walk->ctl->client, clean_up_call_ms);
  }
  kvpool_session_close(walk->session);
  for (int i = 0; i < kvp_walk_parts; i++) {
    int deleted = kvp_walk_part_delete(walk, &walk->parts[i]);
    exit_status = exit_status == KVP_CTL_OK ? deleted : exit_status;
  }
  return exit_status;
}

/* What one of these left that was killed: pools of its names that nobody holds blocks of. */
static void left_tell(const struct kvp_walk *walk) {
  static const char prefix[] = "walkthrough-";
  kvpool_pool_list *list;
  if (kvpool_pool_list_get(walk->ctl->client, &list, NULL) != KVPOOL_OK) {
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

/* What a signal that ended it has left of the pools. */
static const char *interruption(const struct kvp_walk *walk) {
  bool is_asked = false;
  bool is_left = false;
  for (int i = 0; i < kvp_walk_parts; i++) {
    is_asked = is_asked || walk->parts[i].pool_name[0] != '\0';
    is_left = is_left || walk->parts[i].is_left;
  }
  if (is_left) {
    return "interrupted";
  }
  return is_asked ? "interrupted; the temporary pools are deleted" : "interrupted before it made a pool";
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
  struct kvp_walk walk = {.ctl = ctl, .device = arguments.device, .seed = arguments.seed};
  if (getrandom(&walk.token, sizeof walk.token, 0) != (ssize_t)sizeof walk.token) {
    return kvp_ctl_refuse(ctl, "try again", "no random bytes for the pools' names: %s", strerror(errno));
  }
  left_tell(&walk);
  exit_status = steps_run(&walk);
  int cleaned = clean_up(&walk, exit_status != KVP_CTL_OK);
  if (exit_status == KVP_CTL_OK) {
    exit_status = result_tell(&walk, arguments.seed);
    exit_status = exit_status == KVP_CTL_OK ? cleaned : exit_status;
  } else if (exit_status == KVP_CTL_INTERRUPTED) {
    (void)kvp_ctl_tell_interrupted("%s", interruption(&walk));
  }
  for (int i = 0; i < kvp_walk_parts; i++) {
    kvp_walk_part_deinit(&walk.parts[i]);
  }
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_walkthrough = {
    .name = "walkthrough",
    .summary = "one long sequence: store, load, prefill, decode, and check what comes back",
    .details =
        "Makes two temporary pools and two buffers (19 MiB), stores random latents of a sequence of 10,000 tokens, "
        "loads them by their plans - 2500 compressed tokens from 157 blocks, and a window of 4096 that wraps in its "
        "ring - and holds every element against the source. Then it sends the prefill step of the last 1024 tokens, "
        "for two layers that share their compressed part, and a decode step, and holds rows, indices and bytes "
        "against figures from paper. The pools are deleted at the end, also after Ctrl-C. Making pools is an "
        "operator's right (root, and the daemon's own user). Exit status 4: something "
        "came back wrong.\n\n"
        "Examples:\n"
        "  kvpoolctl walkthrough\n"
        "  kvpoolctl walkthrough --device host:0 --seed 7 --json",
    .options = options,
    .take = take,
    .run = walkthrough_run,
};
