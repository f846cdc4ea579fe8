/* blocks: a map of a pool, and who holds what of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/block_grid.h"
#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/pool_view.h"
#include "client/kvpoolctl/text.h"

enum {
  option_first_block = 0x100,
  option_count,
  option_rows,
  rows_max = 1000,
  rows_default = 20, /* where there is no terminal to fill */
  rows_least = 12,
  lines_around = 8, /* of the screen: heading, key, prompt */
};

struct blocks_arguments {
  const char *pool;
  uint64_t first_block;
  uint64_t count; /* 0: to the end */
  uint64_t rows;  /* 0: as the terminal has */
};

static const struct argp_option options[] = {
    {"first-block", option_first_block, "N", 0, "Begin here", 0},
    {"count", option_count, "N", 0, "This many blocks; default: to the end", 0},
    {"rows", option_rows, "N", 0, "At most this many rows of the map; default: what the terminal has", 0},
    {0},
};

static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct blocks_arguments *blocks = arguments;
  switch (key) {
  case option_first_block:
    return kvp_ctl_take_number(&kvp_ctl_blocks, "first-block", value, INT32_MAX, &blocks->first_block);
  case option_count:
    return kvp_ctl_take_count(&kvp_ctl_blocks, "count", value, INT32_MAX, &blocks->count);
  case option_rows:
    return kvp_ctl_take_count(&kvp_ctl_blocks, "rows", value, rows_max, &blocks->rows);
  case ARGP_KEY_ARG:
    return kvp_ctl_take_word(value, state, (const char **[]){&blocks->pool}, 1);
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

/* ---- for programs -----------------------------------------------------------------------------------------------
 */

static const char *state_name(kvpool_block_state state) {
  static const char *const names[] = {"free", "leased", "sealed", "quarantined"};
  return names[state & 3];
}

static void blocks_json(const struct kvp_ctl *ctl, const kvpool_pool *pool, const kvpool_block_map *map,
                        const struct kvp_ctl_block_summary *summary, uint32_t first, uint32_t end) {
  json_t *document = json_object();
  kvp_ctl_json_string(document, "pool", kvpool_pool_name(pool));
  kvp_ctl_json_integer(document, "first_block", first);
  kvp_ctl_json_integer(document, "count", end - first);
  for (int state = 0; state < 4; state++) {
    kvp_ctl_json_integer(document, state_name((kvpool_block_state)state), (int64_t)summary->by_state[state]);
  }
  kvp_ctl_json_integer(document, "free_runs", (int64_t)summary->free_runs);
  kvp_ctl_json_integer(document, "free_run_longest", (int64_t)summary->free_run_longest);
  json_t *sessions = json_array();
  for (size_t i = 0; i < summary->owner_count; i++) {
    json_t *owner = json_object();
    kvp_ctl_json_integer(owner, "session_id", (int64_t)summary->owners[i].session_id);
    kvp_ctl_json_string(owner, "name", summary->owners[i].name);
    kvp_ctl_json_integer(owner, "blocks", (int64_t)summary->owners[i].blocks);
    kvp_ctl_json_append(sessions, owner);
  }
  kvp_ctl_json_set(document, "sessions", sessions);
  json_t *runs = json_array();
  for (size_t i = 0; i < kvpool_block_map_run_count(map); i++) {
    kvpool_block_run run;
    if (kvp_ctl_block_run_clip(kvpool_block_map_run(map, i), first, end, &run)) {
      json_t *object = json_object();
      kvp_ctl_json_integer(object, "first_block", run.first_block);
      kvp_ctl_json_integer(object, "count", run.count);
      kvp_ctl_json_string(object, "state", state_name(run.state));
      kvp_ctl_json_integer(object, "session_id", (int64_t)run.session_id);
      kvp_ctl_json_integer(object, "epoch", (int64_t)run.epoch);
      kvp_ctl_json_append(runs, object);
    }
  }
  kvp_ctl_json_set(document, "runs", runs);
  kvp_ctl_json_print(ctl, document);
}

/* ---- for people -------------------------------------------------------------------------------------------------
 */

static void heading_print(const struct kvp_ctl *ctl, const kvpool_pool *pool,
                          const struct kvp_ctl_block_summary *summary, uint32_t first, uint32_t end) {
  uint64_t held = summary->total - summary->by_state[KVPOOL_BLOCK_FREE];
  kvp_ctl_print("%s%s%s: ", kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_BOLD), kvpool_pool_name(pool),
                kvp_ctl_terminal_reset(&ctl->terminal));
  if (end - first == kvpool_pool_num_blocks(pool)) {
    kvp_ctl_print("%s blocks", kvp_ctl_count(summary->total).text);
  } else {
    kvp_ctl_print("blocks %s to %s of %s", kvp_ctl_count(first).text, kvp_ctl_count(end - 1).text,
                  kvp_ctl_count(kvpool_pool_num_blocks(pool)).text);
  }
  kvp_ctl_print(", %s %s held\n", kvp_ctl_bar(&ctl->terminal, held, summary->total).text,
                kvp_ctl_percent(held, summary->total).text);
  kvp_ctl_print("%s leased by %zu session%s", kvp_ctl_count(summary->by_state[KVPOOL_BLOCK_LEASED]).text,
                summary->owner_count, kvp_ctl_plural(summary->owner_count));
  if (summary->by_state[KVPOOL_BLOCK_SEALED] > 0) {
    kvp_ctl_print(", %s sealed", kvp_ctl_count(summary->by_state[KVPOOL_BLOCK_SEALED]).text);
  }
  if (summary->by_state[KVPOOL_BLOCK_QUARANTINED] > 0) {
    kvp_ctl_print(", %s%s quarantined%s", kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_BAD),
                  kvp_ctl_count(summary->by_state[KVPOOL_BLOCK_QUARANTINED]).text,
                  kvp_ctl_terminal_reset(&ctl->terminal));
  }
  kvp_ctl_print(", %s free", kvp_ctl_count(summary->by_state[KVPOOL_BLOCK_FREE]).text);
  if (summary->free_runs > 0) {
    kvp_ctl_print(" in %s piece%s, the longest %s", kvp_ctl_count(summary->free_runs).text,
                  kvp_ctl_plural(summary->free_runs), kvp_ctl_count(summary->free_run_longest).text);
  }
  kvp_ctl_print("\n\n");
}

/* "a #12 vllm-0  412" in as many columns as fit. */
struct legend {
  int id_width;
  int name_width;
  int count_width;
  size_t rows;
};

static void legend_init(struct legend *legend, const struct kvp_ctl *ctl,
                        const struct kvp_ctl_block_summary *summary) {
  enum { gaps = 6, between = 3 };
  *legend = (struct legend){.id_width = 1, .name_width = 1, .count_width = 1};
  for (size_t i = 0; i < summary->owner_count; i++) {
    int id = snprintf(NULL, 0, "%llu", (unsigned long long)summary->owners[i].session_id);
    int name = (int)strlen(summary->owners[i].name);
    int count = (int)strlen(kvp_ctl_count(summary->owners[i].blocks).text);
    legend->id_width = id > legend->id_width ? id : legend->id_width;
    legend->name_width = name > legend->name_width ? name : legend->name_width;
    legend->count_width = count > legend->count_width ? count : legend->count_width;
  }
  size_t entry = (size_t)legend->id_width + (size_t)legend->name_width + (size_t)legend->count_width + gaps;
  size_t columns = (ctl->terminal.width + between) / (entry + between);
  columns = columns == 0 ? 1 : columns;
  legend->rows = (summary->owner_count + columns - 1) / columns;
}

static void legend_print(const struct kvp_ctl *ctl, const struct kvp_ctl_block_summary *summary,
                         const struct legend *legend) {
  for (size_t row = 0; row < legend->rows; row++) {
    for (size_t i = row; i < summary->owner_count; i += legend->rows) {
      const struct kvp_ctl_block_owner *owner = &summary->owners[i];
      kvp_ctl_print("%s%s%c%s #%-*llu %-*s  %*s", i == row ? "" : "   ", kvp_ctl_terminal_owner(&ctl->terminal, i),
                    kvp_ctl_block_letter(i), kvp_ctl_terminal_reset(&ctl->terminal), legend->id_width,
                    (unsigned long long)owner->session_id, legend->name_width, owner->name, legend->count_width,
                    kvp_ctl_count(owner->blocks).text);
    }
    kvp_ctl_print("\n");
  }
}

/* Of the map: what the screen has beside the rest, so that all of it is seen at once. */
static uint32_t rows_of(const struct kvp_ctl *ctl, const struct blocks_arguments *arguments, size_t legend_rows) {
  if (arguments->rows > 0) {
    return (uint32_t)arguments->rows;
  }
  if (!ctl->terminal.is_tty) {
    return rows_default;
  }
  size_t rest = legend_rows + lines_around;
  return ctl->terminal.height > rest + rows_least ? ctl->terminal.height - (uint32_t)rest : (uint32_t)rows_least;
}

static void blocks_print(const struct kvp_ctl *ctl, const struct blocks_arguments *arguments, const kvpool_pool *pool,
                         const kvpool_block_map *map, const struct kvp_ctl_block_summary *summary, uint32_t first,
                         uint32_t end) {
  struct legend legend;
  legend_init(&legend, ctl, summary);
  heading_print(ctl, pool, summary, first, end);
  kvp_ctl_block_grid_print(ctl, map, summary, first, end, rows_of(ctl, arguments, legend.rows));
  if (summary->owner_count > 0) {
    kvp_ctl_print("\n");
    legend_print(ctl, summary, &legend);
  }
}

static int blocks_show(const struct kvp_ctl *ctl, const struct blocks_arguments *arguments, const kvpool_pool *pool) {
  uint32_t total = kvpool_pool_num_blocks(pool);
  if (arguments->first_block >= total) {
    return kvp_ctl_refuse(ctl, "blocks are counted from 0", "pool %s has %u blocks, there is no block %llu",
                          kvpool_pool_name(pool), total, (unsigned long long)arguments->first_block);
  }
  uint32_t first = (uint32_t)arguments->first_block;
  uint64_t count = arguments->count == 0 ? total : arguments->count;
  uint32_t end = count < total - first ? first + (uint32_t)count : total;
  kvpool_error error;
  kvpool_block_map *map;
  if (kvpool_block_map_get(ctl->client, pool, &map, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  kvpool_session_list *sessions;
  if (kvpool_session_list_get(ctl->client, &sessions, &error) != KVPOOL_OK) {
    kvpool_block_map_destroy(map);
    return kvp_ctl_fail(ctl, &error);
  }
  struct kvp_ctl_block_summary summary;
  kvp_ctl_block_summary_init(&summary, map, sessions, first, end);
  if (ctl->json) {
    blocks_json(ctl, pool, map, &summary, first, end);
  } else {
    blocks_print(ctl, arguments, pool, map, &summary, first, end);
  }
  kvp_ctl_block_summary_deinit(&summary);
  kvpool_session_list_destroy(sessions);
  kvpool_block_map_destroy(map);
  return KVP_CTL_OK;
}

static int blocks_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct blocks_arguments arguments = {0};
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_blocks, argc, argv, &arguments, &exit_status)) {
    return exit_status;
  }
  if (arguments.pool == NULL) {
    return kvp_ctl_usage(&kvp_ctl_blocks, "which pool?");
  }
  exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_pool *pool;
  kvpool_error error;
  if (kvpool_pool_open(ctl->client, arguments.pool, &pool, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  exit_status = blocks_show(ctl, &arguments, pool);
  kvpool_pool_destroy(pool);
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_blocks = {
    .name = "blocks",
    .summary = "a map of a pool: who holds which blocks",
    .synopsis = "POOL",
    .details = "The map scales to the terminal: a character stands for one block, or for many. Every session has a "
               "letter and a colour; the list below the map says which, and how many blocks each holds. A large pool "
               "is asked for in parts, between which blocks may change hands.\n\n"
               "Examples:\n"
               "  kvpoolctl blocks main\n"
               "  kvpoolctl blocks main --first-block 4000 --count 200\n"
               "  kvpoolctl blocks main --json | jq '.sessions | sort_by(-.blocks)[:5]'",
    .options = options,
    .take = take,
    .run = blocks_run,
};
