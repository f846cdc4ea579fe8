/* A pool as an attachment sees it: the handle that steps name, and its regions' memory. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/attach.h"
#include "proto/failpoint.h"
#include "proto/format.h"

struct kvpool_pool_map {
  atomic_uint references; /* the user's, and each array's */
  kvpool_attachment *attachment;
  kvpool_pool *pool;
  uint32_t region_count;
  kvpool_mapped_region regions[kvp_regions_per_pool_max];
  struct kvp_mapping mappings[kvp_regions_per_pool_max];
};

/* What the daemon said of the pool, checked. */
struct described {
  struct kvp_attach_pool pool;
  struct kvp_geometry geometry[kvp_regions_per_pool_max];
};

struct pool_request {
  kvpool_pool_map *map;
  struct described described;
  const char *name;
  bool is_described;
};

static kvpool_status described_init(struct described *described, const struct kvp_fd_message *message,
                                    kvpool_error *error) {
  struct kvp_attach_pool *pool = &described->pool;
  kvpool_status status = kvp_attach_check_body(message, sizeof *pool, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  memcpy(pool, message->body, sizeof *pool);
  if (pool->region_count > kvp_regions_per_pool_max) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold describes a pool of %u regions", pool->region_count);
  }
  for (uint32_t i = 0; i < pool->region_count; i++) {
    struct kvp_attach_region *region = &pool->regions[i];
    struct kvp_error refused;
    region->name[sizeof region->name - 1] = '\0';
    if (region->format >= kvp_format_count) {
      return kvp_fail(error, KVPOOL_WRONG_FORMAT, "region \"%s\" has format %u, of a newer kvpoold", region->name,
                      region->format);
    }
    if (kvp_geometry_init(kvp_format_get((enum kvp_format_id)region->format), region->width, region->tokens_per_block,
                          pool->num_blocks, region->num_layers, &described->geometry[i], &refused) != KVP_OK) {
      return kvp_fail(error, KVPOOL_MALFORMED, "region \"%s\": %s", region->name, refused.text);
    }
    if (described->geometry[i].region_bytes > region->memory_bytes) {
      return kvp_fail(error, KVPOOL_MALFORMED, "region \"%s\" of %llu bytes has memory of %llu", region->name,
                      (unsigned long long)described->geometry[i].region_bytes,
                      (unsigned long long)region->memory_bytes);
    }
  }
  return KVPOOL_OK;
}

/* ---- the handle -------------------------------------------------------------------------------------------------
 */

static void region_message(const struct described *described, uint32_t index, Kvpool__V1__RegionSpec *spec,
                           Kvpool__V1__Region *out) {
  const struct kvp_attach_region *region = &described->pool.regions[index];
  const struct kvp_geometry *geometry = &described->geometry[index];
  kvpool__v1__region_spec__init(spec);
  spec->name = (char *)region->name;
  spec->format = (char *)geometry->format->name;
  spec->width = region->width;
  spec->compression_ratio = described->pool.block_size / region->tokens_per_block;
  spec->num_layers = region->num_layers;
  kvpool__v1__region__init(out);
  out->spec = spec;
  out->tokens_per_block = region->tokens_per_block;
  out->bytes_per_token = geometry->sizes.bytes_per_token;
  out->data_bytes = geometry->sizes.data_bytes;
  out->scale_bytes = geometry->sizes.scale_bytes;
  out->block_stride_bytes = geometry->block_stride_bytes;
  out->layer_stride_bytes = geometry->layer_stride_bytes;
  out->region_bytes = geometry->region_bytes;
}

/* The message that gRPC would have brought, with memory of its own. NULL: no memory. */
static Kvpool__V1__Pool *pool_message(const struct described *described, const char *name, const char *device) {
  Kvpool__V1__RegionSpec specs[kvp_regions_per_pool_max];
  Kvpool__V1__Region regions[kvp_regions_per_pool_max];
  Kvpool__V1__Region *pointers[kvp_regions_per_pool_max];
  Kvpool__V1__PoolSpec spec = KVPOOL__V1__POOL_SPEC__INIT;
  Kvpool__V1__Pool pool = KVPOOL__V1__POOL__INIT;
  char *placement = (char *)device;
  for (uint32_t i = 0; i < described->pool.region_count; i++) {
    region_message(described, i, &specs[i], &regions[i]);
    pointers[i] = &regions[i];
    pool.bytes_per_placement += described->pool.regions[i].memory_bytes;
  }
  spec.name = (char *)name;
  spec.kind = (Kvpool__V1__PoolKind)described->pool.kind;
  spec.block_size = described->pool.block_size;
  spec.num_blocks = described->pool.num_blocks;
  spec.n_placements = 1;
  spec.placements = &placement;
  pool.pool_id = described->pool.pool_id;
  pool.spec = &spec;
  pool.n_regions = described->pool.region_count;
  pool.regions = pointers;
  const size_t bytes = kvpool__v1__pool__get_packed_size(&pool);
  uint8_t *packed = malloc(bytes + 1);
  if (packed == NULL) {
    return NULL;
  }
  (void)kvpool__v1__pool__pack(&pool, packed);
  Kvpool__V1__Pool *message = kvpool__v1__pool__unpack(NULL, bytes, packed);
  free(packed);
  return message;
}

static kvpool_status map_make_pool(kvpool_pool_map *map, const struct pool_request *request, kvpool_error *error) {
  Kvpool__V1__Pool *message = pool_message(&request->described, request->name, map->attachment->welcome.device);
  if (message == NULL) {
    return kvp_fail_no_memory(error);
  }
  kvpool_status status = kvp_pool_new_detached(message, &map->pool, error);
  if (status != KVPOOL_OK) {
    kvpool__v1__pool__free_unpacked(message, NULL);
  }
  return status;
}

/* ---- the memory -------------------------------------------------------------------------------------------------
 */

static void mapped_region_fill(const struct described *described, uint32_t index, kvpool_mapped_region *out) {
  const struct kvp_geometry *geometry = &described->geometry[index];
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  const bool interleaved = geometry->format->token_interleaved;
  *out = (kvpool_mapped_region){
      .memory_bytes = described->pool.regions[index].memory_bytes,
      .num_layers = geometry->num_layers,
      .num_blocks = geometry->num_blocks,
      .tokens_per_block = geometry->tokens_per_block,
      .bytes_per_token = sizes->bytes_per_token,
      .data_bytes = sizes->data_bytes,
      .scale_bytes = sizes->scale_bytes,
      .layer_stride_bytes = geometry->layer_stride_bytes,
      .block_stride_bytes = geometry->block_stride_bytes,
      .token_interleaved = interleaved,
      .token_stride_bytes = interleaved ? sizes->bytes_per_token : sizes->data_bytes,
      .scale_stride_bytes = interleaved ? sizes->bytes_per_token : sizes->scale_bytes,
      .scales_offset_bytes =
          interleaved ? sizes->data_bytes : (uint64_t)geometry->tokens_per_block * sizes->data_bytes,
  };
}

static kvpool_status map_take_chunks(struct pool_request *request, const struct kvp_fd_message *message,
                                     kvpool_error *error) {
  struct kvp_control_chunks chunks;
  kvpool_status status = kvp_attach_check_body(message, sizeof chunks, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  memcpy(&chunks, message->body, sizeof chunks);
  const struct kvp_attach_pool *pool = &request->described.pool;
  if (!request->is_described || chunks.memory_id >= pool->region_count ||
      chunks.memory_bytes != pool->regions[chunks.memory_id].memory_bytes) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold sent %llu bytes of memory of region %llu",
                    (unsigned long long)chunks.memory_bytes, (unsigned long long)chunks.memory_id);
  }
  KVP_FAILPOINT("worker.pool_memory_received");
  return kvp_mapping_add(&request->map->mappings[chunks.memory_id], message, error);
}

static kvpool_status map_on_part(void *context, struct kvp_fd_message *message, kvpool_error *error) {
  struct pool_request *request = context;
  if (message->kind == KVP_ATTACH_MEMORY_CHUNKS) {
    return map_take_chunks(request, message, error);
  }
  if (message->kind != KVP_ATTACH_POOL || request->is_described) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold answers with a message of kind %u", message->kind);
  }
  request->is_described = true;
  return described_init(&request->described, message, error);
}

static kvpool_status map_finish(struct pool_request *request, kvpool_error *error) {
  kvpool_pool_map *map = request->map;
  if (!request->is_described) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold described no pool \"%s\"", request->name);
  }
  map->region_count = request->described.pool.region_count;
  for (uint32_t i = 0; i < map->region_count; i++) {
    if (!kvp_mapping_is_whole(&map->mappings[i])) {
      return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold sent only %llu of %llu bytes of region %u",
                      (unsigned long long)map->mappings[i].mapped_bytes,
                      (unsigned long long)request->described.pool.regions[i].memory_bytes, i);
    }
    mapped_region_fill(&request->described, i, &map->regions[i]);
    map->regions[i].base = map->mappings[i].base;
  }
  return map_make_pool(map, request, error);
}

kvpool_status kvpool_attachment_map_pool(kvpool_attachment *attachment, const char *name, kvpool_map_access access,
                                         kvpool_pool_map **out, kvpool_error *error) {
  assert(attachment != NULL && name != NULL && out != NULL);
  if ((uint32_t)access > KVPOOL_MAP_NOTHING) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "access", -1, access, "access %d is no kvpool_map_access",
                       (int)access);
  }
  struct kvp_attach_pool_name body = {.name = ""};
  if (strlen(name) >= sizeof body.name) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "a pool's name has at most %zu characters, this one %zu",
                    sizeof body.name - 1, strlen(name));
  }
  (void)snprintf(body.name, sizeof body.name, "%s", name);
  kvpool_pool_map *map = calloc(1, sizeof *map);
  struct pool_request *request = calloc(1, sizeof *request);
  if (map == NULL || request == NULL) {
    free(request);
    free(map);
    return kvp_fail_no_memory(error);
  }
  kvp_attachment_ref(attachment);
  map->attachment = attachment;
  atomic_init(&map->references, 1);
  request->map = map;
  request->name = name;
  for (uint32_t i = 0; i < kvp_regions_per_pool_max; i++) {
    map->mappings[i].access = access;
    map->mappings[i].on_device = (attachment->welcome.flags & KVP_ATTACH_DEVICE_FDS) != 0;
    map->mappings[i].granularity_bytes = attachment->welcome.memory_granularity_bytes;
    memcpy(map->mappings[i].uuid, attachment->welcome.uuid, sizeof map->mappings[i].uuid);
  }
  const struct kvp_attach_request asked = {
      .kind = KVP_ATTACH_MAP_POOL, .body = &body, .body_bytes = sizeof body, .fd = -1};
  kvpool_status status = kvp_attachment_ask(attachment, &asked, map_on_part, request, error);
  if (status == KVPOOL_OK) {
    status = map_finish(request, error);
  }
  free(request);
  if (status != KVPOOL_OK) {
    kvpool_pool_map_destroy(map);
    return status;
  }
  *out = map;
  return KVPOOL_OK;
}

static void map_unref(void *object) {
  kvpool_pool_map *map = object;
  if (atomic_fetch_sub_explicit(&map->references, 1, memory_order_acq_rel) != 1) {
    return;
  }
  for (uint32_t i = 0; i < kvp_regions_per_pool_max; i++) {
    kvp_mapping_deinit(&map->mappings[i]);
  }
  kvpool_pool_destroy(map->pool);
  kvp_attachment_unref(map->attachment);
  free(map);
}

void kvpool_pool_map_destroy(kvpool_pool_map *map) {
  if (map != NULL) {
    map_unref(map);
  }
}

/* The region that an address lies in; NULL: none. */
static const struct kvp_mapping *map_find(const kvpool_pool_map *map, const void *data) {
  for (uint32_t i = 0; i < map->region_count; i++) {
    const struct kvp_mapping *mapping = &map->mappings[i];
    if (mapping->base != NULL && (uintptr_t)data - (uintptr_t)mapping->base < mapping->bytes) {
      return mapping;
    }
  }
  return NULL;
}

kvpool_status kvpool_pool_map_export(kvpool_pool_map *map, const kvpool_array *array, bool is_versioned,
                                     void **managed, kvpool_error *error) {
  assert(map != NULL && array != NULL && managed != NULL);
  const struct kvp_mapping *mapping = map_find(map, array->data);
  if (mapping == NULL) {
    return kvp_fail(error, KVPOOL_OUT_OF_RANGE, "address %p is in no region of the map", array->data);
  }
  atomic_fetch_add_explicit(&map->references, 1, memory_order_relaxed);
  const struct kvp_array_owner owner = {.object = map, .release = map_unref};
  kvpool_status status = kvp_array_export(mapping, array, is_versioned, owner, managed, error);
  if (status != KVPOOL_OK) {
    map_unref(map);
  }
  return status;
}

const kvpool_pool *kvpool_pool_map_pool(const kvpool_pool_map *map) {
  assert(map != NULL);
  return map->pool;
}

const kvpool_mapped_region *kvpool_pool_map_region(const kvpool_pool_map *map, size_t index) {
  assert(map != NULL && index < map->region_count);
  return &map->regions[index];
}
