/* Tables of pools and buffers. */
#include "server/executor/objects.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum kvp_status kvp_objects_add_pool(struct kvp_objects *objects, struct kvp_pool *pool, struct kvp_error *error) {
  if (kvp_objects_pool(objects, pool->id) != NULL) {
    return kvp_error_set(error, KVP_ALREADY_EXISTS, "pool %llu is attached already", (unsigned long long)pool->id);
  }
  if (!kvp_id_table_add(&objects->pools, pool->id, pool)) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the table of pools");
  }
  return KVP_OK;
}

enum kvp_status kvp_objects_add_buffer(struct kvp_objects *objects, struct kvp_buffer *buffer,
                                       struct kvp_error *error) {
  if (kvp_objects_buffer(objects, buffer->id) != NULL) {
    return kvp_error_set(error, KVP_ALREADY_EXISTS, "buffer %llu is attached already",
                         (unsigned long long)buffer->id);
  }
  if (!kvp_id_table_add(&objects->buffers, buffer->id, buffer)) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the table of buffers");
  }
  return KVP_OK;
}

enum kvp_status kvp_objects_remove_pool(struct kvp_objects *objects, uint64_t id, struct kvp_pool **out,
                                        struct kvp_error *error) {
  struct kvp_pool *pool = kvp_objects_pool(objects, id);
  if (pool == NULL) {
    return kvp_error_set(error, KVP_UNKNOWN_POOL, "pool %llu is not attached", (unsigned long long)id);
  }
  (void)kvp_id_table_remove(&objects->pools, id);
  *out = pool;
  return KVP_OK;
}

enum kvp_status kvp_objects_remove_buffer(struct kvp_objects *objects, uint64_t id, struct kvp_buffer **out,
                                          struct kvp_error *error) {
  struct kvp_buffer *buffer = kvp_objects_buffer(objects, id);
  if (buffer == NULL) {
    return kvp_error_set(error, KVP_UNKNOWN_BUFFER, "buffer %llu is not attached", (unsigned long long)id);
  }
  (void)kvp_id_table_remove(&objects->buffers, id);
  *out = buffer;
  return KVP_OK;
}

static bool name_valid(const char *name) {
  return memchr(name, '\0', kvp_name_bytes_max) != NULL;
}

static size_t owner_table_bytes(const struct kvp_pool *pool) {
  return pool->num_blocks * sizeof(uint64_t);
}

/* What mapping it takes. */
static size_t owner_table_pages_bytes(const struct kvp_pool *pool) {
  const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  return (owner_table_bytes(pool) + page_bytes - 1) / page_bytes * page_bytes;
}

/* The table may be longer than it needs to be (whole pages), never shorter, and must not shrink under us. */
static enum kvp_status owner_table_map(struct kvp_pool *pool, int fd, struct kvp_error *error) {
  struct stat stat;
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || fstat(fd, &stat) != 0 || (seals & F_SEAL_SHRINK) == 0 ||
      (uint64_t)stat.st_size < owner_table_bytes(pool)) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "pool %llu: its owner table is no memfd sealed against shrinking with room for %u blocks",
                         (unsigned long long)pool->id, pool->num_blocks);
  }
  void *map = mmap(NULL, owner_table_bytes(pool), PROT_READ, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "pool %llu: its owner table can't be mapped: %s",
                         (unsigned long long)pool->id, strerror(errno));
  }
  void *registered = NULL;
  enum kvp_status status = pool->device->backend->host_register(pool->device, map, owner_table_pages_bytes(pool),
                                                                true, &registered, error);
  if (status != KVP_OK) {
    (void)munmap(map, owner_table_bytes(pool));
    return status;
  }
  pool->owner_entries = map;
  pool->device_owner_entries = registered;
  return KVP_OK;
}

static enum kvp_status region_init(struct kvp_region *region, const struct kvp_control_region *spec,
                                   uint32_t num_blocks, struct kvp_error *error) {
  if (spec->format >= kvp_format_count || !name_valid(spec->name)) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "region: format %u or its name is not valid", spec->format);
  }
  region->memory_id = spec->memory_id;
  (void)snprintf(region->name, sizeof region->name, "%s", spec->name);
  return kvp_geometry_init(kvp_format_get((enum kvp_format_id)spec->format), spec->width, spec->tokens_per_block,
                           num_blocks, spec->num_layers, &region->geometry, error);
}

struct kvp_pool *kvp_pool_new(const struct kvp_control_pool *spec, int owner_table_fd, struct kvp_device *device,
                              struct kvp_error *error) {
  if (spec->region_count == 0 || spec->region_count > kvp_regions_per_pool_max || spec->num_blocks == 0 ||
      spec->kind > KVP_POOL_RING) {
    (void)kvp_error_set(error, KVP_INVALID_ARGUMENT, "pool %llu: kind %u, %u blocks, %u regions",
                        (unsigned long long)spec->pool_id, spec->kind, spec->num_blocks, spec->region_count);
    return NULL;
  }
  struct kvp_pool *pool = calloc(1, sizeof *pool);
  if (pool == NULL) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a pool");
    return NULL;
  }
  pool->device = device;
  pool->id = spec->pool_id;
  pool->kind = (enum kvp_pool_kind)spec->kind;
  pool->num_blocks = spec->num_blocks;
  pool->region_count = spec->region_count;
  for (uint32_t i = 0; i < spec->region_count; i++) {
    if (region_init(&pool->regions[i], &spec->regions[i], spec->num_blocks, error) != KVP_OK) {
      goto err_free;
    }
  }
  if (owner_table_map(pool, owner_table_fd, error) != KVP_OK) {
    goto err_free;
  }
  return pool;

err_free:
  free(pool);
  return NULL;
}

void kvp_pool_destroy(struct kvp_pool *pool) {
  pool->device->backend->host_unregister(pool->device, (void *)pool->owner_entries);
  (void)munmap((void *)pool->owner_entries, owner_table_bytes(pool));
  free(pool);
}
