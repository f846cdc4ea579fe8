/* CreatePool, ListPools, DescribePool, DeletePool. Loop thread only. */
#include <stdlib.h>
#include <string.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/name.h"

/* ---- a pool as a message ----------------------------------------------------------------------------------------
 */

/* Its texts are those of the pool. */
struct pool_message {
  Kvpool__V1__Pool body;
  Kvpool__V1__PoolSpec spec;
  char *placements[kvp_devices_max];
  Kvpool__V1__RegionSpec region_specs[kvp_regions_per_pool_max];
  Kvpool__V1__RegionSpec *region_spec_pointers[kvp_regions_per_pool_max];
  Kvpool__V1__Region regions[kvp_regions_per_pool_max];
  Kvpool__V1__Region *region_pointers[kvp_regions_per_pool_max];
};

static void fill_region(struct pool_message *out, struct kvp_pool *pool, uint32_t index) {
  struct kvp_region_spec *from = &pool->spec.regions[index];
  const struct kvp_geometry *geometry = &pool->regions[index];
  Kvpool__V1__RegionSpec *spec = &out->region_specs[index];
  kvpool__v1__region_spec__init(spec);
  spec->name = from->name;
  spec->format = from->format;
  spec->width = from->width;
  spec->compression_ratio = from->compression_ratio;
  spec->num_layers = from->num_layers;
  spec->note = from->note;
  out->region_spec_pointers[index] = spec;
  Kvpool__V1__Region *region = &out->regions[index];
  kvpool__v1__region__init(region);
  region->spec = spec;
  region->tokens_per_block = geometry->tokens_per_block;
  region->bytes_per_token = geometry->sizes.bytes_per_token;
  region->data_bytes = geometry->sizes.data_bytes;
  region->scale_bytes = geometry->sizes.scale_bytes;
  region->block_stride_bytes = geometry->block_stride_bytes;
  region->layer_stride_bytes = geometry->layer_stride_bytes;
  region->region_bytes = geometry->region_bytes;
  out->region_pointers[index] = region;
}

static void fill_pool(struct pool_message *out, struct kvp_pool *pool) {
  kvpool__v1__pool_spec__init(&out->spec);
  out->spec.name = pool->spec.name;
  out->spec.namespace_ = pool->spec.namespace_name;
  out->spec.kind =
      pool->spec.kind == KVP_POOL_RING ? KVPOOL__V1__POOL_KIND__POOL_RING : KVPOOL__V1__POOL_KIND__POOL_PAGED;
  out->spec.block_size = pool->spec.block_size;
  out->spec.num_blocks = pool->spec.num_blocks;
  for (uint32_t i = 0; i < pool->spec.placement_count; i++) {
    out->placements[i] = pool->spec.placements[i];
  }
  out->spec.n_placements = pool->spec.placement_count;
  out->spec.placements = out->placements;
  for (uint32_t i = 0; i < pool->spec.region_count; i++) {
    fill_region(out, pool, i);
  }
  out->spec.n_regions = pool->spec.region_count;
  out->spec.regions = out->region_spec_pointers;
  kvpool__v1__pool__init(&out->body);
  out->body.pool_id = pool->id;
  out->body.spec = &out->spec;
  out->body.n_regions = pool->spec.region_count;
  out->body.regions = out->region_pointers;
  out->body.free_blocks = kvp_lease_free_count(pool->leases);
  out->body.leased_blocks = kvp_lease_leased_count(pool->leases);
  out->body.quarantined_blocks = kvp_lease_quarantined_count(pool->leases);
  out->body.bytes_per_placement = pool->bytes_per_placement;
}

static void reply_pool(struct kvp_rpc_call *call, struct kvp_pool *pool) {
  struct pool_message message;
  fill_pool(&message, pool);
  kvp_rpc_call_finish(call, &message.body.base);
}

/* ---- a spec from a message --------------------------------------------------------------------------------------
 */

static enum kvp_status read_region(const Kvpool__V1__RegionSpec *from, struct kvp_region_spec *out,
                                   struct kvp_error *error) {
  enum kvp_status status = kvp_method_name(from->name, "region name", false, out->name, sizeof out->name, error);
  if (status == KVP_OK) {
    status = kvp_method_name(from->format, "format", false, out->format, sizeof out->format, error);
  }
  if (status == KVP_OK) {
    status = kvp_note_check(from->note, "note", sizeof out->note, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  memcpy(out->note, from->note, strlen(from->note) + 1);
  out->width = from->width;
  out->compression_ratio = from->compression_ratio;
  out->num_layers = from->num_layers;
  return KVP_OK;
}

static enum kvp_status read_counts(const Kvpool__V1__PoolSpec *from, struct kvp_error *error) {
  if (from->n_regions > kvp_regions_per_pool_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "regions", -1, (int64_t)from->n_regions,
                            "%zu regions, at most %d are allowed", from->n_regions, kvp_regions_per_pool_max);
  }
  if (from->n_placements > kvp_devices_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "placements", -1, (int64_t)from->n_placements,
                            "%zu placements, at most %d are allowed", from->n_placements, kvp_devices_max);
  }
  if (from->kind != KVPOOL__V1__POOL_KIND__POOL_PAGED && from->kind != KVPOOL__V1__POOL_KIND__POOL_RING) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "kind", -1, (int64_t)from->kind, "kind %d is unknown",
                            (int)from->kind);
  }
  return KVP_OK;
}

static enum kvp_status read_spec(const Kvpool__V1__PoolSpec *from, struct kvp_pool_spec *out,
                                 struct kvp_error *error) {
  if (from == NULL) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "spec", -1, 0, "the request has no spec");
  }
  enum kvp_status status = read_counts(from, error);
  if (status == KVP_OK) {
    status = kvp_method_name(from->name, "pool name", false, out->name, sizeof out->name, error);
  }
  if (status == KVP_OK) {
    status = kvp_method_name(from->namespace_, "pool namespace", true, out->namespace_name,
                             sizeof out->namespace_name, error);
  }
  out->kind = from->kind == KVPOOL__V1__POOL_KIND__POOL_RING ? KVP_POOL_RING : KVP_POOL_PAGED;
  out->block_size = from->block_size;
  out->num_blocks = from->num_blocks;
  for (size_t i = 0; i < from->n_placements && status == KVP_OK; i++) {
    status = kvp_method_name(from->placements[i], "placement", false, out->placements[i], sizeof out->placements[i],
                             error);
    out->placement_count = (uint32_t)i + 1;
  }
  for (size_t i = 0; i < from->n_regions && status == KVP_OK; i++) {
    status = read_region(from->regions[i], &out->regions[i], error);
    out->region_count = (uint32_t)i + 1;
  }
  return status;
}

/* ---- methods ----------------------------------------------------------------------------------------------------
 */

static void on_pool_created(void *context, struct kvp_pool *pool, const struct kvp_error *error) {
  struct kvp_rpc_call *call = context;
  if (pool == NULL) {
    kvp_rpc_call_fail(call, error);
  } else {
    reply_pool(call, pool);
  }
  kvp_rpc_call_unref(call);
}

static void on_create_pool(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__CreatePoolRequest *request = (const Kvpool__V1__CreatePoolRequest *)message->body;
  struct kvp_pool_spec *spec = kvp_allocate(1, sizeof *spec);
  struct kvp_error error;
  if (read_spec(request->spec, spec, &error) == KVP_OK) {
    kvp_pool_create(context, spec, on_pool_created, kvp_rpc_call_ref(call));
  } else {
    kvp_rpc_call_fail(call, &error);
  }
  free(spec);
}

static void on_list_pools(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)message;
  struct kvp_daemon *daemon = context;
  struct pool_message *pools = kvp_allocate(kvp_pools_max, sizeof *pools);
  Kvpool__V1__Pool *pointers[kvp_pools_max];
  Kvpool__V1__ListPoolsResponse reply = KVPOOL__V1__LIST_POOLS_RESPONSE__INIT;
  reply.pools = pointers;
  for (int i = 0; i < kvp_pools_max; i++) {
    struct kvp_pool *pool = daemon->pools.pools[i];
    if (pool != NULL && pool->serving) {
      fill_pool(&pools[reply.n_pools], pool);
      pointers[reply.n_pools] = &pools[reply.n_pools].body;
      reply.n_pools++;
    }
  }
  kvp_rpc_call_finish(call, &reply.base);
  free(pools);
}

static void on_describe_pool(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__DescribePoolRequest *request = (const Kvpool__V1__DescribePoolRequest *)message->body;
  struct kvp_error error;
  struct kvp_pool *pool = NULL;
  if ((request->pool_id != 0) == (request->name[0] != '\0')) {
    (void)kvp_error_set_at(&error, KVP_INVALID_ARGUMENT, -1, "pool_id", -1, (int64_t)request->pool_id,
                           "exactly one of pool_id and name is wanted");
  } else if (request->pool_id != 0) {
    pool = kvp_pool_find(context, request->pool_id, &error);
  } else {
    pool = kvp_pool_find_name(context, request->name, &error);
  }
  if (pool == NULL) {
    kvp_rpc_call_fail(call, &error);
  } else {
    reply_pool(call, pool);
  }
}

static void on_pool_deleted(void *context) {
  struct kvp_rpc_call *call = context;
  Kvpool__V1__DeletePoolResponse reply = KVPOOL__V1__DELETE_POOL_RESPONSE__INIT;
  kvp_rpc_call_finish(call, &reply.base);
  kvp_rpc_call_unref(call);
}

static void on_delete_pool(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__DeletePoolRequest *request = (const Kvpool__V1__DeletePoolRequest *)message->body;
  struct kvp_error error;
  struct kvp_pool *pool = kvp_pool_find(context, request->pool_id, &error);
  if (pool == NULL || kvp_pool_delete(context, pool, request->force, on_pool_deleted, call, &error) != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
  } else {
    (void)kvp_rpc_call_ref(call); /* on_pool_deleted comes later */
  }
}

static const struct kvp_rpc_method methods[] = {
    {.name = "CreatePool",
     .shape = KVP_RPC_UNARY,
     .operator_only = true,
     .request = &kvpool__v1__create_pool_request__descriptor,
     .on_message = on_create_pool},
    {.name = "ListPools",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__list_pools_request__descriptor,
     .on_message = on_list_pools},
    {.name = "DescribePool",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__describe_pool_request__descriptor,
     .on_message = on_describe_pool},
    {.name = "DeletePool",
     .shape = KVP_RPC_UNARY,
     .operator_only = true,
     .request = &kvpool__v1__delete_pool_request__descriptor,
     .on_message = on_delete_pool},
};

const struct kvp_method_table kvp_methods_pool = {methods, sizeof methods / sizeof methods[0]};
