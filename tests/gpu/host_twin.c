/* See host_twin.h. */
#include "tests/gpu/host_twin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "tests/gpu/device_rows.h"

void host_twin_make(const struct kvp_format *format, uint32_t width, uint64_t seed, uint64_t row,
                    struct host_twin *out) {
  struct kvp_geometry one; /* a block of one token: its data begins the block, its scales follow */
  struct kvp_error error;
  if (kvp_geometry_init(format, width, 1, 1, 1, &one, &error) != KVP_OK) {
    (void)fprintf(stderr, "%s\n", error.text);
    exit(1);
  }
  for (uint32_t i = 0; i < one.sizes.elements; i++) {
    uint16_t bits = row_element(seed, row, i);
    memcpy(out->row + 2 * (size_t)i, &bits, sizeof(bits));
  }
  const int32_t slot = 0;
  const struct kvp_segment segment = {0, 0, 1, 0};
  const struct kvp_layer layer = {out->record, &one};
  const struct kvp_store_params store = {
      .layer = layer, .source = {out->row, one.sizes.row_bytes}, .slots = &slot, .row_count = 1};
  const struct kvp_load_params load = {
      .layer = layer,
      .segments = &segment,
      .segment_count = 1,
      .total_k = 1,
      .out = {out->loaded, one.sizes.loaded_row_bytes},
      .scales = {one.sizes.loaded_scale_bytes == 0 ? NULL : out->scales, one.sizes.loaded_scale_bytes},
      .rows = 1,
      .segment_rows_max = 1,
  };
  struct kvp_op_counts counts = {0};
  kvp_host_store(&store, 0, 1, &counts);
  kvp_host_load(&load, 0, 1, &counts);
}
