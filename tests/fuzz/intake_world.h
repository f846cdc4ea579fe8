/* What the steps of the intake fuzzer may name; its seeds are built from the same numbers. */
#ifndef KVPOOL_TESTS_INTAKE_WORLD_H
#define KVPOOL_TESTS_INTAKE_WORLD_H

#include <stdint.h>

#include "proto/format.h"
#include "proto/owner_entry.h"

enum {
  intake_world_pool = 1,
  intake_world_ring = 2, /* a ring pool of the same regions and blocks */
  intake_world_pools = 2,
  intake_world_blocks = 6,
  intake_world_layers = 2,
  intake_world_regions = 4,
  intake_world_buffers = 3, /* ids 1 .. 3; the second is another session's */
  intake_world_buffer_bytes = 32768,
  intake_world_session = 5,
  intake_world_other_session = 9,
  intake_world_epoch = 15,
};

struct intake_world_region {
  enum kvp_format_id format;
  uint32_t width;
  uint32_t tokens_per_block;
};

static const struct intake_world_region intake_world_region_specs[intake_world_regions] = {
    {KVP_FORMAT_V41, 512, 17},
    {KVP_FORMAT_INDEX_FP4, 128, 16},
    {KVP_FORMAT_BF16, 8, 600}, /* segments longer than a piece */
    {KVP_FORMAT_V41_FP4, 512, 1},
};

static inline uint64_t intake_world_owner_entry(uint32_t block) {
  switch (block) {
  case 3:
    return kvp_owner_entry_make(intake_world_epoch + 1, KVP_BLOCK_LEASED, intake_world_session);
  case 4:
    return kvp_owner_entry_make(1, KVP_BLOCK_SEALED, intake_world_session);
  case 5:
    return kvp_owner_entry_make(1, KVP_BLOCK_LEASED, intake_world_other_session);
  default:
    return kvp_owner_entry_make(1, KVP_BLOCK_LEASED, intake_world_session);
  }
}

#endif
