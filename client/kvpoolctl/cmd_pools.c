/* pools: all of them, a line each. */
#include <stdlib.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/pool_view.h"
#include "client/kvpoolctl/table.h"
#include "client/kvpoolctl/text.h"

enum { option_names = 'q', option_regions = 0x100 };

struct pools_arguments {
  bool names;
  bool regions;
};

static const struct argp_option options[] = {
    {"names", option_names, NULL, 0, "Names only, one a line", 0},
    {"regions", option_regions, NULL, 0, "With --names: POOL/REGION for every region", 0},
    {0},
};

/* NOLINTNEXTLINE(readability-non-const-parameter): the type is that of every command's. */
static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct pools_arguments *pools = arguments;
  (void)value;
  (void)state;
  switch (key) {
  case option_names:
    pools->names = true;
    return 0;
  case option_regions:
    pools->regions = true;
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

static void names_print(const kvpool_pool *pool, bool regions) {
  if (!regions) {
    kvp_ctl_print("%s\n", kvpool_pool_name(pool));
    return;
  }
  for (size_t i = 0; i < kvpool_pool_region_count(pool); i++) {
    kvp_ctl_print("%s/%s\n", kvpool_pool_name(pool), kvpool_pool_region(pool, i)->name);
  }
}

static void pool_row(const struct kvp_ctl *ctl, struct kvp_ctl_table *table, const kvpool_pool *pool) {
  uint32_t total = kvpool_pool_num_blocks(pool);
  uint32_t used = total - kvpool_pool_free_blocks(pool);
  char *placements = kvp_ctl_pool_placements(pool);
  kvp_ctl_table_row(table);
  kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%s", kvpool_pool_name(pool));
  kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s",
                     kvpool_pool_namespace(pool)[0] == '\0' ? "-" : kvpool_pool_namespace(pool));
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_pool_kind_name(kvpool_pool_get_kind(pool)));
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(total).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_percent(used, total).text);
  kvp_ctl_table_cell(table, used > total - total / 20 ? KVP_CTL_WARN : KVP_CTL_GOOD, "%s",
                     kvp_ctl_bar(&ctl->terminal, used, total).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(kvpool_pool_free_blocks(pool)).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(kvpool_pool_leased_blocks(pool)).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(kvpool_pool_quarantined_blocks(pool)).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", kvpool_pool_block_size(pool));
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%zu", kvpool_pool_region_count(pool));
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(kvpool_pool_bytes_per_placement(pool)).text);
  kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s", placements);
  free(placements);
}

/* Pools of the configuration are made when their devices serve. */
static bool is_starting(const struct kvp_ctl *ctl) {
  kvpool_server_info *info;
  if (kvpool_server_info_get(ctl->client, &info, NULL) != KVPOOL_OK) {
    return false;
  }
  bool is_starting = false;
  for (size_t i = 0; i < kvpool_server_info_device_count(info); i++) {
    is_starting = is_starting || kvpool_server_info_device(info, i)->state == KVPOOL_DEVICE_STARTING;
  }
  kvpool_server_info_destroy(info);
  return is_starting;
}

static void pools_print(const struct kvp_ctl *ctl, const kvpool_pool_list *list) {
  static const char *const columns[] = {"POOL",      "?NAMESPACE", "KIND",     ">BLOCKS",       ">USED",
                                        "",          ">FREE",      "?>LEASED", "?>QUARANTINED", "?>BLOCK SIZE",
                                        "?>REGIONS", ">MEMORY",    "~ON"};
  if (kvpool_pool_list_count(list) == 0) {
    kvp_ctl_print("%s\n", is_starting(ctl) ? "no pools yet: the daemon is starting"
                                           : "no pools; make one with `kvpoolctl pool create`");
    return;
  }
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < kvpool_pool_list_count(list); i++) {
    pool_row(ctl, table, kvpool_pool_list_item(list, i));
  }
  kvp_ctl_table_print(table);
}

static void pools_json(const struct kvp_ctl *ctl, const kvpool_pool_list *list) {
  json_t *pools = json_array();
  for (size_t i = 0; i < kvpool_pool_list_count(list); i++) {
    kvp_ctl_json_append(pools, kvp_ctl_pool_json(kvpool_pool_list_item(list, i)));
  }
  json_t *document = json_object();
  kvp_ctl_json_set(document, "pools", pools);
  kvp_ctl_json_print(ctl, document);
}

static int pools_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct pools_arguments arguments = {0};
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_pools, argc, argv, &arguments, &exit_status)) {
    return exit_status;
  }
  exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_pool_list *list;
  kvpool_error error;
  if (kvpool_pool_list_get(ctl->client, &list, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  if (ctl->json) {
    pools_json(ctl, list);
  } else if (arguments.names || arguments.regions) {
    for (size_t i = 0; i < kvpool_pool_list_count(list); i++) {
      names_print(kvpool_pool_list_item(list, i), arguments.regions);
    }
  } else {
    pools_print(ctl, list);
  }
  kvpool_pool_list_destroy(list);
  return KVP_CTL_OK;
}

const struct kvp_ctl_command kvp_ctl_pools = {
    .name = "pools",
    .summary = "all pools, how full they are",
    .details =
        "USED counts blocks that are not free: leased, and quarantined (freed, but steps accepted before still "
        "use them).\n\n"
        "Examples:\n"
        "  kvpoolctl pools\n"
        "  kvpoolctl pools --names --regions\n"
        "  kvpoolctl pools --json | jq '.pools[] | {name, free_blocks}'",
    .options = options,
    .take = take,
    .run = pools_run,
};
