/* Where records lie, and who may touch a block: what store and load share.
 *
 * Indices from memory that others can write are read exactly once, into a local, before they are checked.
 */
#ifndef KVPOOL_KERNELS_HOST_LAYOUT_H
#define KVPOOL_KERNELS_HOST_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/host/convert.h"
#include "kernels/ops.h"
#include "proto/owner_entry.h"

/* data(block, o) = base + block * block_stride + o * data_step
 * scales(block, o) = base + block * block_stride + scales_begin + o * scale_step, interleaved or not */
struct kvp_layout {
  uint8_t *base;
  uint64_t block_stride;
  uint64_t data_step;
  uint64_t scales_begin;
  uint64_t scale_step;
};

KVP_INLINE struct kvp_layout kvp_layout_make(const struct kvp_layer *layer) {
  const struct kvp_geometry *geometry = layer->geometry;
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  struct kvp_layout layout = {.base = layer->base, .block_stride = geometry->block_stride_bytes};
  if (geometry->format->token_interleaved) {
    layout.data_step = sizes->bytes_per_token;
    layout.scales_begin = sizes->data_bytes;
    layout.scale_step = sizes->bytes_per_token;
  } else {
    layout.data_step = sizes->data_bytes;
    layout.scales_begin = (uint64_t)geometry->tokens_per_block * sizes->data_bytes;
    layout.scale_step = sizes->scale_bytes;
  }
  return layout;
}

KVP_INLINE uint8_t *kvp_rows_at(const struct kvp_rows *rows, uint64_t index) {
  return rows->base + index * rows->stride_bytes;
}

KVP_INLINE int32_t kvp_read_once(const int32_t *value) {
  return __atomic_load_n(value, __ATOMIC_RELAXED);
}

/* block < num_blocks; check->entries is not NULL. Sealed blocks may be read only. */
KVP_INLINE bool kvp_owner_allows(const struct kvp_owner_check *check, uint32_t block, bool write) {
  if (check->owner == 0) {
    return true;
  }
  uint64_t entry = __atomic_load_n(&check->entries[block], __ATOMIC_ACQUIRE);
  enum kvp_block_state state = kvp_owner_entry_state(entry);
  bool usable = state == KVP_BLOCK_LEASED || (!write && state == KVP_BLOCK_SEALED);
  return usable && kvp_owner_entry_owner(entry) == check->owner && kvp_owner_entry_epoch(entry) <= check->epoch;
}

KVP_INLINE void kvp_op_counts_add(struct kvp_op_counts *total, const struct kvp_op_counts *part) {
  total->rows_stored += part->rows_stored;
  total->rows_loaded += part->rows_loaded;
  total->rows_skipped += part->rows_skipped;
  total->rows_rejected += part->rows_rejected;
  total->rows_nonfinite += part->rows_nonfinite;
  total->groups_saturated += part->groups_saturated;
  total->bytes_read += part->bytes_read;
  total->bytes_written += part->bytes_written;
}

#endif
