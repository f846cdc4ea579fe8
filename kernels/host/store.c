/* store: BF16 rows quantized into the records their slots name. OPS "store".
 *
 * One row loop, specialised for each format by inlining; it runs on a worker thread of the executor, over a range of
 * rows, and keeps its counts to itself until the end.
 */
#include <stdbool.h>

#include "kernels/host/dequantize.h"
#include "kernels/host/layout.h"
#include "kernels/host/quantize.h"
#include "kernels/host/slot.h"
#include "kernels/host/variant.h"

/* dequantize NULL: a format that has no cast-back. */
KVP_INLINE void store_rows(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                           struct kvp_op_counts *counts, kvp_quantize_fn *quantize, kvp_dequantize_fn *dequantize) {
  const struct kvp_format_sizes *sizes = &params->layer.geometry->sizes;
  struct kvp_layout layout = kvp_layout_make(&params->layer);
  bool cast_back = dequantize != NULL && params->cast_back.base != NULL;
  struct kvp_op_counts local = {0};
  for (uint64_t row = row_begin; row < row_end; row++) {
    uint8_t aside_data[kvp_main_elements];
    uint8_t aside_scales[kvp_main_elements / 16];
    uint8_t *data = aside_data;
    uint8_t *scales = aside_scales;
    struct slot_place place = place_slot(params, row);
    if (place.use == SLOT_STORE) {
      uint8_t *block = layout.base + place.block * layout.block_stride;
      data = block + place.offset * layout.data_step;
      scales = block + layout.scales_begin + place.offset * layout.scale_step;
      local.rows_stored++;
      local.bytes_written += sizes->bytes_per_token;
    } else if (place.use == SLOT_REJECT) {
      local.rows_rejected++;
      continue;
    } else {
      local.rows_skipped++;
      if (!cast_back) {
        continue;
      }
    }
    const uint16_t *source = (const void *)kvp_rows_at(&params->source, row);
    struct kvp_quantize_result result = quantize(source, data, scales);
    local.rows_nonfinite += result.nonfinite;
    local.groups_saturated += result.groups_saturated;
    local.bytes_read += sizes->row_bytes;
    if (cast_back) {
      dequantize(data, scales, (void *)kvp_rows_at(&params->cast_back, row));
      local.bytes_written += sizes->row_bytes;
    }
  }
  kvp_op_counts_add(counts, &local);
}

static void store_v41(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                      struct kvp_op_counts *counts) {
  store_rows(params, row_begin, row_end, counts, quantize_v41, dequantize_v41);
}

static void store_v41_fp4(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                          struct kvp_op_counts *counts) {
  store_rows(params, row_begin, row_end, counts, quantize_v41_fp4, dequantize_v41_fp4);
}

static void store_index_fp4(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                            struct kvp_op_counts *counts) {
  store_rows(params, row_begin, row_end, counts, quantize_index_fp4, NULL);
}

static void store_index_fp8_f32(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                                struct kvp_op_counts *counts) {
  store_rows(params, row_begin, row_end, counts, quantize_index_fp8_f32, NULL);
}

static void store_index_mxfp8(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                              struct kvp_op_counts *counts) {
  store_rows(params, row_begin, row_end, counts, quantize_index_mxfp8, NULL);
}

/* Rows of any width, copied as they are. */
static void store_bf16(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                       struct kvp_op_counts *counts) {
  const struct kvp_format_sizes *sizes = &params->layer.geometry->sizes;
  struct kvp_layout layout = kvp_layout_make(&params->layer);
  bool cast_back = params->cast_back.base != NULL;
  struct kvp_op_counts local = {0};
  for (uint64_t row = row_begin; row < row_end; row++) {
    struct slot_place place = place_slot(params, row);
    if (place.use == SLOT_REJECT) {
      local.rows_rejected++;
      continue;
    }
    local.rows_skipped += place.use == SLOT_SKIP;
    if (place.use == SLOT_SKIP && !cast_back) {
      continue;
    }
    const uint8_t *source = kvp_rows_at(&params->source, row);
    if (place.use == SLOT_STORE) {
      memcpy(layout.base + place.block * layout.block_stride + place.offset * layout.data_step, source,
             sizes->data_bytes);
      local.rows_stored++;
      local.bytes_written += sizes->data_bytes;
    }
    if (cast_back) {
      memcpy(kvp_rows_at(&params->cast_back, row), source, sizes->row_bytes);
      local.bytes_written += sizes->row_bytes;
    }
    local.rows_nonfinite += row_is_nonfinite((const void *)source, sizes->elements);
    local.bytes_read += sizes->row_bytes;
  }
  kvp_op_counts_add(counts, &local);
}

kvp_host_store_fn *const KVP_HOST_SYMBOL(kvp_host_store)[kvp_format_count] = {
    [KVP_FORMAT_V41] = store_v41,
    [KVP_FORMAT_V41_FP4] = store_v41_fp4,
    [KVP_FORMAT_INDEX_FP4] = store_index_fp4,
    [KVP_FORMAT_INDEX_FP8_F32] = store_index_fp8_f32,
    [KVP_FORMAT_INDEX_MXFP8] = store_index_mxfp8,
    [KVP_FORMAT_BF16] = store_bf16,
};
