/* copy_blocks, zero_blocks: whole blocks of one region, padding included, in every layer. OPS "copy_blocks,
 * zero_blocks".
 *
 * They run on worker threads of the executor, over a range of units: unit = layer * count + entry. Nothing here but
 * the C library's memcpy and memset, which know the machine themselves.
 */
#include <assert.h>
#include <string.h>

#include "kernels/host/layout.h"

static uint8_t *block_at(const struct kvp_blocks_params *params, uint64_t layer, int32_t block) {
  const struct kvp_geometry *geometry = params->geometry;
  assert(block >= 0 && (uint32_t)block < geometry->num_blocks);
  return params->base + layer * geometry->layer_stride_bytes + (uint64_t)block * geometry->block_stride_bytes;
}

static void check_units(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end) {
  assert(unit_begin <= unit_end && unit_end <= params->geometry->num_layers * params->count);
}

void kvp_host_copy_blocks(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                          struct kvp_op_counts *counts) {
  check_units(params, unit_begin, unit_end);
  uint64_t block_bytes = params->geometry->block_stride_bytes;
  for (uint64_t unit = unit_begin; unit < unit_end; unit++) {
    uint64_t layer = unit / params->count;
    const int32_t *pair = &params->pairs[2 * (unit % params->count)];
    const uint8_t *from = block_at(params, layer, kvp_read_once(&pair[0]));
    uint8_t *to = block_at(params, layer, kvp_read_once(&pair[1]));
    if (from != to) { /* memcpy wants two blocks */
      memcpy(to, from, block_bytes);
    }
  }
  counts->bytes_read += (unit_end - unit_begin) * block_bytes;
  counts->bytes_written += (unit_end - unit_begin) * block_bytes;
}

void kvp_host_zero_blocks(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                          struct kvp_op_counts *counts) {
  check_units(params, unit_begin, unit_end);
  uint64_t block_bytes = params->geometry->block_stride_bytes;
  for (uint64_t unit = unit_begin; unit < unit_end; unit++) {
    int32_t block = kvp_read_once(&params->pairs[unit % params->count]);
    memset(block_at(params, unit / params->count, block), 0, block_bytes);
  }
  counts->bytes_written += (unit_end - unit_begin) * block_bytes;
}
