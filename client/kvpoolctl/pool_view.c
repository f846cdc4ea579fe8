/* A pool as the commands show it. Reads a snapshot; asks the daemon nothing. */
#include "client/kvpoolctl/pool_view.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/table.h"
#include "client/kvpoolctl/text.h"

const char *kvp_ctl_pool_kind_name(kvpool_pool_kind kind) {
  return kind == KVPOOL_POOL_RING ? "ring" : "paged";
}

char *kvp_ctl_pool_placements(const kvpool_pool *pool) {
  size_t bytes = 1;
  for (size_t i = 0; i < kvpool_pool_placement_count(pool); i++) {
    bytes += strlen(kvpool_pool_placement(pool, i)) + 2;
  }
  char *text = kvp_ctl_allocate(bytes, 1);
  size_t used = 0;
  for (size_t i = 0; i < kvpool_pool_placement_count(pool); i++) {
    used += (size_t)snprintf(text + used, bytes - used, "%s%s", i > 0 ? ", " : "", kvpool_pool_placement(pool, i));
  }
  return text;
}

static json_t *region_json(const kvpool_region_info *region) {
  json_t *object = json_object();
  kvp_ctl_json_string(object, "name", region->name);
  kvp_ctl_json_string(object, "format", region->format);
  kvp_ctl_json_integer(object, "width", region->width);
  kvp_ctl_json_integer(object, "compression_ratio", region->compression_ratio);
  kvp_ctl_json_integer(object, "num_layers", region->num_layers);
  kvp_ctl_json_integer(object, "tokens_per_block", region->tokens_per_block);
  kvp_ctl_json_integer(object, "bytes_per_token", region->bytes_per_token);
  kvp_ctl_json_integer(object, "data_bytes", region->data_bytes);
  kvp_ctl_json_integer(object, "scale_bytes", region->scale_bytes);
  kvp_ctl_json_integer(object, "block_stride_bytes", (int64_t)region->block_stride_bytes);
  kvp_ctl_json_integer(object, "layer_stride_bytes", (int64_t)region->layer_stride_bytes);
  kvp_ctl_json_integer(object, "region_bytes", (int64_t)region->region_bytes);
  kvp_ctl_json_string(object, "note", region->note);
  return object;
}

json_t *kvp_ctl_pool_json(const kvpool_pool *pool) {
  json_t *object = json_object();
  kvp_ctl_json_integer(object, "pool_id", (int64_t)kvpool_pool_id(pool));
  kvp_ctl_json_string(object, "name", kvpool_pool_name(pool));
  kvp_ctl_json_string(object, "namespace", kvpool_pool_namespace(pool));
  kvp_ctl_json_string(object, "kind", kvp_ctl_pool_kind_name(kvpool_pool_get_kind(pool)));
  kvp_ctl_json_integer(object, "block_size", kvpool_pool_block_size(pool));
  kvp_ctl_json_integer(object, "num_blocks", kvpool_pool_num_blocks(pool));
  kvp_ctl_json_integer(object, "free_blocks", kvpool_pool_free_blocks(pool));
  kvp_ctl_json_integer(object, "leased_blocks", kvpool_pool_leased_blocks(pool));
  kvp_ctl_json_integer(object, "quarantined_blocks", kvpool_pool_quarantined_blocks(pool));
  kvp_ctl_json_integer(object, "bytes_per_placement", (int64_t)kvpool_pool_bytes_per_placement(pool));
  json_t *placements = json_array();
  for (size_t i = 0; i < kvpool_pool_placement_count(pool); i++) {
    kvp_ctl_json_append(placements, json_string(kvpool_pool_placement(pool, i)));
  }
  kvp_ctl_json_set(object, "placements", placements);
  json_t *regions = json_array();
  for (size_t i = 0; i < kvpool_pool_region_count(pool); i++) {
    kvp_ctl_json_append(regions, region_json(kvpool_pool_region(pool, i)));
  }
  kvp_ctl_json_set(object, "regions", regions);
  return object;
}

static void regions_print(const struct kvp_ctl *ctl, const kvpool_pool *pool) {
  static const char *const columns[] = {"REGION",  "FORMAT",         ">LAYERS",   "?>RATIO", ">TOKENS/BLOCK",
                                        ">RECORD", "?>BLOCK STRIDE", "?>A LAYER", ">ALL",    "~NOTE"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < kvpool_pool_region_count(pool); i++) {
    const kvpool_region_info *region = kvpool_pool_region(pool, i);
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%s", region->name);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", region->format);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", region->num_layers);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", region->compression_ratio);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", region->tokens_per_block);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u B", region->bytes_per_token);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s B", kvp_ctl_count(region->block_stride_bytes).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(region->layer_stride_bytes).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(region->region_bytes).text);
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s", region->note);
  }
  kvp_ctl_table_print(table);
}

void kvp_ctl_pool_print(const struct kvp_ctl *ctl, const kvpool_pool *pool) {
  char *placements = kvp_ctl_pool_placements(pool);
  kvp_ctl_print("%s%s%s (id %llu), a %s pool on %s%s%s\n", kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_BOLD),
                kvpool_pool_name(pool), kvp_ctl_terminal_reset(&ctl->terminal),
                (unsigned long long)kvpool_pool_id(pool), kvp_ctl_pool_kind_name(kvpool_pool_get_kind(pool)),
                placements, kvpool_pool_namespace(pool)[0] == '\0' ? "" : ", of namespace ",
                kvpool_pool_namespace(pool));
  kvp_ctl_print("%s blocks of %u tokens, %s on each device\n", kvp_ctl_count(kvpool_pool_num_blocks(pool)).text,
                kvpool_pool_block_size(pool), kvp_ctl_bytes(kvpool_pool_bytes_per_placement(pool)).text);
  kvp_ctl_print("%s free, %s leased, %s quarantined\n\n", kvp_ctl_count(kvpool_pool_free_blocks(pool)).text,
                kvp_ctl_count(kvpool_pool_leased_blocks(pool)).text,
                kvp_ctl_count(kvpool_pool_quarantined_blocks(pool)).text);
  regions_print(ctl, pool);
  free(placements);
}
