/* Pools: a handle is the daemon's description as it was when it was asked for. Read only but for refresh.
 *
 * It names the pool by its id, which no other pool ever has, one of a later daemon included. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/attach.h"
#include "client/internal.h"
#include "proto/format.h"

struct kvpool_pool_list {
  size_t count;
  kvpool_pool pools[]; /* [count] */
};

static void region_from(const Kvpool__V1__Region *from, kvpool_region_info *out) {
  *out = (kvpool_region_info){
      .tokens_per_block = from->tokens_per_block,
      .bytes_per_token = from->bytes_per_token,
      .data_bytes = from->data_bytes,
      .scale_bytes = from->scale_bytes,
      .block_stride_bytes = from->block_stride_bytes,
      .layer_stride_bytes = from->layer_stride_bytes,
      .region_bytes = from->region_bytes,
  };
  const Kvpool__V1__RegionSpec *spec = from->spec;
  if (spec != NULL) {
    out->width = spec->width;
    out->compression_ratio = spec->compression_ratio;
    out->num_layers = spec->num_layers;
    (void)snprintf(out->name, sizeof out->name, "%s", spec->name);
    (void)snprintf(out->format, sizeof out->format, "%s", spec->format);
    (void)snprintf(out->note, sizeof out->note, "%s", spec->note);
  }
}

/* Takes message, on success only. */
static kvpool_status pool_init(kvpool_pool *pool, kvpool_client *client, Kvpool__V1__Pool *message,
                               enum kvp_method method, kvpool_error *error) {
  if (message->spec == NULL) {
    return kvp_call_malformed(method, error);
  }
  kvpool_region_info *regions = calloc(message->n_regions + 1, sizeof *regions);
  if (regions == NULL) {
    return kvp_fail_no_memory(error);
  }
  for (size_t i = 0; i < message->n_regions; i++) {
    region_from(message->regions[i], &regions[i]);
  }
  if (client != NULL) {
    kvp_client_ref(client);
  }
  *pool = (kvpool_pool){.client = client, .message = message, .regions = regions};
  return KVPOOL_OK;
}

static void pool_deinit(kvpool_pool *pool) {
  kvpool__v1__pool__free_unpacked(pool->message, NULL);
  free(pool->regions);
  if (pool->client != NULL) {
    kvp_client_unref(pool->client);
  }
}

kvpool_status kvp_pool_new_detached(Kvpool__V1__Pool *message, kvpool_pool **out, kvpool_error *error) {
  kvpool_pool *pool = calloc(1, sizeof *pool);
  if (pool == NULL) {
    return kvp_fail_no_memory(error);
  }
  kvpool_status status = pool_init(pool, NULL, message, KVP_METHOD_DESCRIBE_POOL, error);
  if (status != KVPOOL_OK) {
    free(pool);
    return status;
  }
  *out = pool;
  return KVPOOL_OK;
}

/* A call that answers with a Pool. */
static kvpool_status pool_ask(kvpool_client *client, enum kvp_method method, const ProtobufCMessage *request,
                              kvpool_pool *out, kvpool_error *error) {
  ProtobufCMessage *response;
  kvpool_status status = kvp_call_unary(client, method, request, &kvpool__v1__pool__descriptor, &response, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  status = pool_init(out, client, (Kvpool__V1__Pool *)response, method, error);
  if (status != KVPOOL_OK) {
    protobuf_c_message_free_unpacked(response, NULL);
  }
  return status;
}

static kvpool_status pool_new(kvpool_client *client, enum kvp_method method, const ProtobufCMessage *request,
                              kvpool_pool **out, kvpool_error *error) {
  kvpool_pool *pool = calloc(1, sizeof *pool);
  if (pool == NULL) {
    return kvp_fail_no_memory(error);
  }
  kvpool_status status = pool_ask(client, method, request, pool, error);
  if (status != KVPOOL_OK) {
    free(pool);
    return status;
  }
  *out = pool;
  return KVPOOL_OK;
}

/* Protobuf's structs want pointers to mutable strings; nothing writes to a message that is packed. */
static char *borrow(const char *string) {
  return string == NULL ? (char *)"" : (char *)string;
}

static void region_spec_fill(const kvpool_region_spec *from, Kvpool__V1__RegionSpec *out) {
  kvpool__v1__region_spec__init(out);
  out->name = borrow(from->name);
  out->format = borrow(from->format);
  out->width = from->width;
  out->compression_ratio = from->compression_ratio;
  out->num_layers = from->num_layers;
  out->note = borrow(from->note);
}

static kvpool_status pool_spec_check(const kvpool_pool_spec *spec, kvpool_error *error) {
  if (spec->region_count > kvp_regions_per_pool_max) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "regions", -1, (int64_t)spec->region_count,
                       "%zu regions; a pool has at most %d", spec->region_count, kvp_regions_per_pool_max);
  }
  if (spec->placement_count > kvp_devices_max) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "placements", -1, (int64_t)spec->placement_count,
                       "%zu placements; a daemon has at most %d devices", spec->placement_count, kvp_devices_max);
  }
  for (size_t i = 0; i < spec->placement_count; i++) {
    if (spec->placements[i] == NULL) {
      return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "placements", (int64_t)i, 0, "placements[%zu] is NULL", i);
    }
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_pool_create(kvpool_client *client, const kvpool_pool_spec *spec, kvpool_pool **out,
                                 kvpool_error *error) {
  assert(client != NULL && spec != NULL && out != NULL);
  kvpool_status status = pool_spec_check(spec, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__RegionSpec regions[kvp_regions_per_pool_max];
  Kvpool__V1__RegionSpec *region_pointers[kvp_regions_per_pool_max];
  char *placements[kvp_devices_max];
  for (size_t i = 0; i < spec->region_count; i++) {
    region_spec_fill(&spec->regions[i], &regions[i]);
    region_pointers[i] = &regions[i];
  }
  for (size_t i = 0; i < spec->placement_count; i++) {
    placements[i] = borrow(spec->placements[i]);
  }
  Kvpool__V1__PoolSpec wire = KVPOOL__V1__POOL_SPEC__INIT;
  wire.name = borrow(spec->name);
  wire.namespace_ = borrow(spec->namespace_name);
  wire.kind = (Kvpool__V1__PoolKind)spec->kind;
  wire.block_size = spec->block_size;
  wire.num_blocks = spec->num_blocks;
  wire.n_placements = spec->placement_count;
  wire.placements = placements;
  wire.n_regions = spec->region_count;
  wire.regions = region_pointers;
  Kvpool__V1__CreatePoolRequest request = KVPOOL__V1__CREATE_POOL_REQUEST__INIT;
  request.spec = &wire;
  return pool_new(client, KVP_METHOD_CREATE_POOL, &request.base, out, error);
}

kvpool_status kvpool_pool_open(kvpool_client *client, const char *name, kvpool_pool **out, kvpool_error *error) {
  assert(client != NULL && name != NULL && out != NULL);
  Kvpool__V1__DescribePoolRequest request = KVPOOL__V1__DESCRIBE_POOL_REQUEST__INIT;
  request.name = borrow(name);
  return pool_new(client, KVP_METHOD_DESCRIBE_POOL, &request.base, out, error);
}

kvpool_status kvpool_pool_refresh(kvpool_pool *pool, kvpool_error *error) {
  assert(pool != NULL);
  Kvpool__V1__DescribePoolRequest request = KVPOOL__V1__DESCRIBE_POOL_REQUEST__INIT;
  request.pool_id = pool->message->pool_id;
  kvpool_pool fresh;
  kvpool_status status = pool_ask(pool->client, KVP_METHOD_DESCRIBE_POOL, &request.base, &fresh, error);
  status = kvp_pool_explain(pool, status, error);
  if (status == KVPOOL_OK) {
    pool_deinit(pool);
    *pool = fresh;
  }
  return status;
}

void kvpool_pool_destroy(kvpool_pool *pool) {
  if (pool != NULL) {
    pool_deinit(pool);
    free(pool);
  }
}

kvpool_status kvpool_pool_delete(kvpool_pool *pool, bool force, kvpool_error *error) {
  assert(pool != NULL);
  Kvpool__V1__DeletePoolRequest request = KVPOOL__V1__DELETE_POOL_REQUEST__INIT;
  request.pool_id = pool->message->pool_id;
  request.force = force;
  ProtobufCMessage *response;
  kvpool_status status = kvp_call_unary(pool->client, KVP_METHOD_DELETE_POOL, &request.base,
                                        &kvpool__v1__delete_pool_response__descriptor, &response, error);
  if (status == KVPOOL_OK) {
    protobuf_c_message_free_unpacked(response, NULL);
  }
  return kvp_pool_explain(pool, status, error);
}

kvpool_status kvp_pool_explain(const kvpool_pool *pool, kvpool_status status, kvpool_error *error) {
  if (status != KVPOOL_UNKNOWN_POOL) {
    return status;
  }
  const uint64_t id = pool->message->pool_id;
  return kvp_fail_at(
      error, status, "pool_id", -1, (int64_t)id,
      "pool \"%s\" (id %llu) is gone: it was deleted, or kvpoold was started anew; one of that name that "
      "is there now is another pool, to be opened anew",
      kvpool_pool_name(pool), (unsigned long long)id);
}

uint64_t kvpool_pool_id(const kvpool_pool *pool) {
  return pool->message->pool_id;
}

const char *kvpool_pool_name(const kvpool_pool *pool) {
  return pool->message->spec->name;
}

const char *kvpool_pool_namespace(const kvpool_pool *pool) {
  return pool->message->spec->namespace_;
}

kvpool_pool_kind kvpool_pool_get_kind(const kvpool_pool *pool) {
  return (kvpool_pool_kind)pool->message->spec->kind;
}

uint32_t kvpool_pool_block_size(const kvpool_pool *pool) {
  return pool->message->spec->block_size;
}

uint32_t kvpool_pool_num_blocks(const kvpool_pool *pool) {
  return pool->message->spec->num_blocks;
}

uint32_t kvpool_pool_free_blocks(const kvpool_pool *pool) {
  return pool->message->free_blocks;
}

uint32_t kvpool_pool_leased_blocks(const kvpool_pool *pool) {
  return pool->message->leased_blocks;
}

uint32_t kvpool_pool_quarantined_blocks(const kvpool_pool *pool) {
  return pool->message->quarantined_blocks;
}

uint64_t kvpool_pool_bytes_per_placement(const kvpool_pool *pool) {
  return pool->message->bytes_per_placement;
}

size_t kvpool_pool_placement_count(const kvpool_pool *pool) {
  return pool->message->spec->n_placements;
}

const char *kvpool_pool_placement(const kvpool_pool *pool, size_t index) {
  assert(index < pool->message->spec->n_placements);
  return pool->message->spec->placements[index];
}

size_t kvpool_pool_region_count(const kvpool_pool *pool) {
  return pool->message->n_regions;
}

const kvpool_region_info *kvpool_pool_region(const kvpool_pool *pool, size_t index) {
  assert(index < pool->message->n_regions);
  return &pool->regions[index];
}

int kvpool_pool_region_find(const kvpool_pool *pool, const char *name) {
  for (size_t i = 0; i < pool->message->n_regions; i++) {
    if (strcmp(pool->regions[i].name, name) == 0) {
      return (int)i;
    }
  }
  return -1;
}

kvpool_status kvp_layer_check(const kvpool_layer *layer, kvpool_error *error) {
  assert(layer != NULL && layer->pool != NULL);
  const kvpool_pool *pool = layer->pool;
  if (layer->region >= pool->message->n_regions) {
    return kvp_fail_at(error, KVPOOL_UNKNOWN_REGION, "region", -1, layer->region,
                       "region %u of pool \"%s\", which has %zu", layer->region, kvpool_pool_name(pool),
                       pool->message->n_regions);
  }
  const kvpool_region_info *region = &pool->regions[layer->region];
  if (layer->layer >= region->num_layers) {
    return kvp_fail_at(error, KVPOOL_UNKNOWN_LAYER, "layer", -1, layer->layer,
                       "layer %u of region \"%s\" of pool \"%s\", which has %u", layer->layer, region->name,
                       kvpool_pool_name(pool), region->num_layers);
  }
  return KVPOOL_OK;
}

uint32_t kvp_layer_elements(const kvpool_layer *layer) {
  const kvpool_region_info *region = &layer->pool->regions[layer->region];
  const struct kvp_format *format = kvp_format_find(region->format);
  struct kvp_format_sizes sizes;
  /* A format of a newer daemon has no row that this library knows: the executor says what it thinks of the op. */
  return format != NULL && kvp_format_sizes_init(format, region->width, &sizes, NULL) == KVP_OK ? sizes.elements : 0;
}

Kvpool__V1__RegionRef kvp_layer_reference(const kvpool_layer *layer) {
  Kvpool__V1__RegionRef reference = KVPOOL__V1__REGION_REF__INIT;
  reference.pool_id = layer->pool->message->pool_id;
  reference.region = layer->region;
  reference.layer = layer->layer;
  return reference;
}

/* Moves response->pools[i] into list->pools[i]. */
static kvpool_status pool_list_fill(kvpool_pool_list *list, kvpool_client *client,
                                    Kvpool__V1__ListPoolsResponse *response, kvpool_error *error) {
  for (size_t i = 0; i < response->n_pools; i++) {
    kvpool_status status = pool_init(&list->pools[i], client, response->pools[i], KVP_METHOD_LIST_POOLS, error);
    if (status != KVPOOL_OK) {
      return status;
    }
    response->pools[i] = NULL; /* the list's now; freeing a message skips NULL */
    list->count++;
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_pool_list_get(kvpool_client *client, kvpool_pool_list **out, kvpool_error *error) {
  assert(client != NULL && out != NULL);
  const Kvpool__V1__ListPoolsRequest request = KVPOOL__V1__LIST_POOLS_REQUEST__INIT;
  ProtobufCMessage *message;
  kvpool_status status = kvp_call_unary(client, KVP_METHOD_LIST_POOLS, &request.base,
                                        &kvpool__v1__list_pools_response__descriptor, &message, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__ListPoolsResponse *response = (Kvpool__V1__ListPoolsResponse *)message;
  kvpool_pool_list *list = calloc(1, sizeof *list + response->n_pools * sizeof list->pools[0]);
  status = list == NULL ? kvp_fail_no_memory(error) : pool_list_fill(list, client, response, error);
  protobuf_c_message_free_unpacked(message, NULL);
  if (status != KVPOOL_OK) {
    kvpool_pool_list_destroy(list);
    return status;
  }
  *out = list;
  return KVPOOL_OK;
}

void kvpool_pool_list_destroy(kvpool_pool_list *list) {
  for (size_t i = 0; list != NULL && i < list->count; i++) {
    pool_deinit(&list->pools[i]);
  }
  free(list);
}

size_t kvpool_pool_list_count(const kvpool_pool_list *list) {
  return list->count;
}

const kvpool_pool *kvpool_pool_list_item(const kvpool_pool_list *list, size_t index) {
  assert(index < list->count);
  return &list->pools[index];
}
