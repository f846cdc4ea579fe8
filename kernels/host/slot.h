/* Where a row of a store goes, and where it comes from: one slot and one gather entry, read once and checked. Shared by
 * the kernels that store; a slot is checked here when nobody could check it before.
 */
#ifndef KVPOOL_KERNELS_HOST_SLOT_H
#define KVPOOL_KERNELS_HOST_SLOT_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/host/layout.h"

enum slot_use { SLOT_STORE, SLOT_SKIP, SLOT_REJECT };

struct slot_place {
  enum slot_use use;
  uint32_t block;
  uint32_t offset;
};

KVP_INLINE struct slot_place place_slot(const struct kvp_store_params *params, uint64_t row) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  int32_t slot = params->slots == NULL ? -1 : kvp_read_once(&params->slots[row]);
  if (slot == -1) {
    return (struct slot_place){.use = SLOT_SKIP};
  }
  bool inside = slot >= 0 && (uint64_t)slot < (uint64_t)geometry->num_blocks * geometry->tokens_per_block;
  if (params->check.entries == NULL) {
    assert(inside);
  } else if (!inside) {
    return (struct slot_place){.use = SLOT_REJECT};
  }
  uint32_t block = (uint32_t)slot / geometry->tokens_per_block;
  uint32_t offset = (uint32_t)slot % geometry->tokens_per_block;
  if (params->check.entries != NULL && !kvp_owner_allows(&params->check, block, true)) {
    return (struct slot_place){.use = SLOT_REJECT};
  }
  return (struct slot_place){.use = SLOT_STORE, .block = block, .offset = offset};
}

KVP_INLINE bool row_is_nonfinite(const uint16_t *row, uint32_t elements) {
  int16_t largest = 0;
  for (uint32_t i = 0; i < elements; i++) {
    largest = kvp_max_i16(largest, (int16_t)(row[i] & KVP_BF16_ABS));
  }
  return largest >= KVP_BF16_INF;
}

#endif
