/* What steps name: pools with their regions, and buffers. Built by the control thread, then the serving thread's
 * alone until it gives them back.
 */
#ifndef KVPOOL_EXECUTOR_OBJECTS_H
#define KVPOOL_EXECUTOR_OBJECTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/control_wire.h"
#include "proto/format.h"
#include "server/executor/device.h"
#include "server/executor/id_table.h"

struct kvp_region {
  struct kvp_geometry geometry;
  uint8_t *base;
  uint64_t memory_id;
  char name[kvp_name_bytes_max];
};

struct kvp_pool {
  uint64_t id;
  enum kvp_pool_kind kind;
  uint32_t num_blocks;
  uint32_t uses; /* ops of accepted steps that name it */
  uint32_t region_count;
  struct kvp_device *device;
  const _Atomic uint64_t *owner_entries; /* [num_blocks], see proto/owner_entry.h */
  const uint64_t *device_owner_entries;  /* the same, where the device reads them */
  struct kvp_region regions[kvp_regions_per_pool_max];
};

struct kvp_buffer {
  uint64_t id;
  uint64_t memory_id;
  uint8_t *base;
  uint64_t bytes;
  uint32_t owner;  /* session slot */
  uint32_t uses;   /* views and arrays of accepted steps that name it */
  bool is_lost;    /* it has no memory, and no step gets it */
  bool is_leaving; /* its removal has been asked for, and waits for steps that still may name it */
};

/* Zeroed: empty. */
struct kvp_objects {
  struct kvp_id_table pools;   /* struct kvp_pool */
  struct kvp_id_table buffers; /* struct kvp_buffer */
};

static inline struct kvp_pool *kvp_objects_pool(const struct kvp_objects *objects, uint64_t id) {
  return kvp_id_table_get(&objects->pools, id);
}

static inline struct kvp_buffer *kvp_objects_buffer(const struct kvp_objects *objects, uint64_t id) {
  return kvp_id_table_get(&objects->buffers, id);
}

/* Adding takes the object over. Refused: an id that is there (already_exists), no memory. */
enum kvp_status kvp_objects_add_pool(struct kvp_objects *objects, struct kvp_pool *pool, struct kvp_error *error);
enum kvp_status kvp_objects_add_buffer(struct kvp_objects *objects, struct kvp_buffer *buffer,
                                       struct kvp_error *error);
/* Removing gives it back; while ->uses is not 0 accepted steps still name it. Refused: no such id. */
enum kvp_status kvp_objects_remove_pool(struct kvp_objects *objects, uint64_t id, struct kvp_pool **out,
                                        struct kvp_error *error);
enum kvp_status kvp_objects_remove_buffer(struct kvp_objects *objects, uint64_t id, struct kvp_buffer **out,
                                          struct kvp_error *error);

/* ---- construction, any thread ---- */

/* Maps the owner table, for the device too, and works out the geometries; the regions' bases are the caller's to set.
 * fd stays the caller's. NULL with *error. */
struct kvp_pool *kvp_pool_new(const struct kvp_control_pool *spec, int owner_table_fd, struct kvp_device *device,
                              struct kvp_error *error);
void kvp_pool_destroy(struct kvp_pool *pool);

#endif
