/* POOL/REGION[:LAYER]. Names may hold ':' themselves: a region of the whole name counts first. */
#include "client/kvpoolctl/target.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/number.h"

enum {
  records_per_call_max = 1024,     /* what kvpool_record_list_get takes */
  answer_bytes_per_call = 2 << 20, /* half of what the daemon answers at most */
};

static int region_unknown(const struct kvp_ctl *ctl, const kvpool_pool *pool, const char *name) {
  char hint[1024];
  size_t used = (size_t)snprintf(hint, sizeof hint, "its regions:");
  for (size_t i = 0; i < kvpool_pool_region_count(pool) && used < sizeof hint; i++) {
    const kvpool_region_info *region = kvpool_pool_region(pool, i);
    used += (size_t)snprintf(hint + used, sizeof hint - used, "%s %s (%u layer%s)", i > 0 ? "," : "", region->name,
                             region->num_layers, region->num_layers == 1 ? "" : "s");
  }
  return name == NULL ? kvp_ctl_refuse(ctl, hint, "which region of pool %s? POOL/REGION[:LAYER] is wanted",
                                       kvpool_pool_name(pool))
                      : kvp_ctl_refuse(ctl, hint, "pool %s has no region '%s'", kvpool_pool_name(pool), name);
}

/* name: cut at the layer's colon when there is one. */
static int layer_find(const struct kvp_ctl *ctl, char *name, struct kvp_ctl_target *target) {
  int region = kvpool_pool_region_find(target->pool, name);
  uint64_t layer = 0;
  char *colon = strrchr(name, ':');
  if (region < 0 && colon != NULL && kvp_ctl_number_parse(colon + 1, UINT32_MAX, &layer)) {
    *colon = '\0';
    region = kvpool_pool_region_find(target->pool, name);
  }
  if (region < 0) {
    return region_unknown(ctl, target->pool, name);
  }
  target->region = kvpool_pool_region(target->pool, (size_t)region);
  if (layer >= target->region->num_layers) {
    return kvp_ctl_refuse(ctl, "layers are counted from 0", "region %s of pool %s has layers 0 to %u, not %llu", name,
                          kvpool_pool_name(target->pool), target->region->num_layers - 1, (unsigned long long)layer);
  }
  target->layer = (kvpool_layer){.pool = target->pool, .region = (uint32_t)region, .layer = (uint32_t)layer};
  return KVP_CTL_OK;
}

static int format_find(const struct kvp_ctl *ctl, struct kvp_ctl_target *target) {
  kvpool_server_info *info;
  kvpool_error error;
  if (kvpool_server_info_get(ctl->client, &info, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  bool found = false;
  for (size_t i = 0; i < kvpool_server_info_format_count(info) && !found; i++) {
    target->format = *kvpool_server_info_format(info, i);
    found = strcmp(target->format.name, target->region->format) == 0;
  }
  kvpool_server_info_destroy(info);
  if (!found) {
    return kvp_ctl_refuse(ctl, "`kvpoolctl info` lists the formats",
                          "the daemon doesn't list the format %s of region %s", target->region->format,
                          target->region->name);
  }
  target->elements =
      target->format.quantized_elements > 0 ? target->format.quantized_elements : target->region->data_bytes / 2;
  target->slots = (uint64_t)target->region->tokens_per_block * kvpool_pool_num_blocks(target->pool);
  return KVP_CTL_OK;
}

int kvp_ctl_target_open(const struct kvp_ctl *ctl, const char *text, struct kvp_ctl_target *out) {
  struct kvp_ctl_target target = {0};
  size_t length = strlen(text);
  char *pool = kvp_ctl_allocate(length + 1, 1);
  (void)snprintf(pool, length + 1, "%s", text);
  char *slash = strchr(pool, '/');
  if (slash != NULL) {
    *slash = '\0';
  }
  kvpool_error error;
  int exit_status = KVP_CTL_OK;
  if (pool[0] == '\0') {
    exit_status = kvp_ctl_refuse(ctl, "`kvpoolctl pools --names --regions` lists them",
                                 "which pool? POOL/REGION[:LAYER] is wanted, not '%s'", text);
  } else if (kvpool_pool_open(ctl->client, pool, &target.pool, &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (slash == NULL) {
    exit_status = region_unknown(ctl, target.pool, NULL);
  } else {
    exit_status = layer_find(ctl, slash + 1, &target);
    exit_status = exit_status == KVP_CTL_OK ? format_find(ctl, &target) : exit_status;
  }
  free(pool);
  if (exit_status != KVP_CTL_OK) {
    kvpool_pool_destroy(target.pool);
    return exit_status;
  }
  *out = target;
  return KVP_CTL_OK;
}

size_t kvp_ctl_target_records_per_call(const struct kvp_ctl_target *target) {
  size_t numbers = (size_t)target->elements + target->region->scale_bytes;
  size_t count = answer_bytes_per_call / (target->region->bytes_per_token + sizeof(float) * numbers);
  return count > records_per_call_max ? records_per_call_max : count == 0 ? 1 : count;
}

void kvp_ctl_target_close(struct kvp_ctl_target *target) {
  kvpool_pool_destroy(target->pool);
}
