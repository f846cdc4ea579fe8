/* The world of the executor's fuzzers. */
#include "tests/fuzz/fuzz_world.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/intake_world.h"

static struct kvp_pool pools[intake_world_pools];
static struct kvp_buffer buffers[intake_world_buffers];

static void *allocate(uint64_t bytes) {
  void *memory = aligned_alloc(32, (bytes + 31) / 32 * 32);
  assert(memory != NULL);
  memset(memory, 0x3C, bytes);
  return memory;
}

void fuzz_world_build(struct kvp_objects *objects) {
  uint64_t *owners = malloc(intake_world_blocks * sizeof *owners);
  assert(owners != NULL);
  for (uint32_t i = 0; i < intake_world_blocks; i++) {
    owners[i] = intake_world_owner_entry(i);
  }
  bool added = true;
  for (uint32_t p = 0; p < intake_world_pools; p++) {
    struct kvp_pool *pool = &pools[p];
    pool->id = p == 0 ? intake_world_pool : intake_world_ring;
    pool->kind = p == 0 ? KVP_POOL_PAGED : KVP_POOL_RING;
    pool->num_blocks = intake_world_blocks;
    pool->owner_entries = (_Atomic uint64_t *)(void *)owners;
    pool->device_owner_entries = owners;
    pool->region_count = intake_world_regions;
    for (uint32_t i = 0; i < intake_world_regions; i++) {
      const struct intake_world_region *spec = &intake_world_region_specs[i];
      struct kvp_region *region = &pool->regions[i];
      enum kvp_status status = kvp_geometry_init(kvp_format_get(spec->format), spec->width, spec->tokens_per_block,
                                                 intake_world_blocks, intake_world_layers, &region->geometry, NULL);
      assert(status == KVP_OK);
      region->base = allocate(region->geometry.region_bytes);
    }
    added = kvp_id_table_add(&objects->pools, pool->id, pool) && added;
  }
  for (uint32_t i = 0; i < intake_world_buffers; i++) {
    buffers[i] = (struct kvp_buffer){
        .id = i + 1, .base = allocate(intake_world_buffer_bytes), .bytes = intake_world_buffer_bytes};
    buffers[i].owner = i == 1 ? intake_world_other_session : intake_world_session;
    added = kvp_id_table_add(&objects->buffers, buffers[i].id, &buffers[i]) && added;
  }
  assert(added);
}

uint32_t fuzz_world_uses(const struct kvp_objects *objects) {
  uint32_t uses = 0;
  for (uint32_t p = 0; p < intake_world_pools; p++) {
    uses += pools[p].uses;
  }
  for (uint32_t i = 0; i < intake_world_buffers; i++) {
    uses += buffers[i].uses;
  }
  assert(objects->pools.count == intake_world_pools && objects->buffers.count == intake_world_buffers);
  return uses;
}
