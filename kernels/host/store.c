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

/* What a row is made of: a row of the source, or nothing. */
struct row_origin {
  const uint8_t *source; /* NULL: a zero row */
  bool entry_is_wrong;
  bool is_wrong; /* for what its gather entry, or its slot with that entry, is */
};

KVP_INLINE struct row_origin row_origin_of(const struct kvp_store_params *params, uint64_t row,
                                           const struct slot_place *place) {
  if (params->gather == NULL) {
    return (struct row_origin){.source = kvp_rows_at(&params->source, row)};
  }
  int32_t from = kvp_read_once(&params->gather[row]);
  if (from >= 0 && (uint64_t)from < params->source_rows) {
    return (struct row_origin){.source = kvp_rows_at(&params->source, (uint64_t)from)};
  }
  return (struct row_origin){.entry_is_wrong = from != -1, .is_wrong = from != -1 || place->use != SLOT_SKIP};
}

/* A row that is made of nothing: no record, and zeros cast back. */
KVP_INLINE void zero_row(const struct kvp_store_params *params, uint64_t row, bool is_wrong, bool cast_back,
                         struct kvp_op_counts *counts) {
  counts->rows_rejected += is_wrong;
  counts->rows_skipped += !is_wrong;
  if (cast_back) {
    memset(kvp_rows_at(&params->cast_back, row), 0, params->layer.geometry->sizes.row_bytes);
    counts->bytes_written += params->layer.geometry->sizes.row_bytes;
  }
}

/* The row as it is, whatever becomes of its record. */
KVP_INLINE void copy_row(const struct kvp_store_params *params, uint64_t row, const struct row_origin *origin,
                         struct kvp_op_counts *counts) {
  const uint32_t row_bytes = params->layer.geometry->sizes.row_bytes;
  uint8_t *out = kvp_rows_at(&params->cast_back, row);
  if (origin->source == NULL) {
    memset(out, 0, row_bytes);
  } else {
    memcpy(out, origin->source, row_bytes);
    counts->bytes_read += row_bytes;
  }
  counts->rows_loaded += !origin->entry_is_wrong;
  counts->bytes_written += row_bytes;
}

/* dequantize NULL: a format that has no cast-back. */
KVP_INLINE void store_rows(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                           struct kvp_op_counts *counts, kvp_quantize_fn *quantize, kvp_dequantize_fn *dequantize) {
  const struct kvp_format_sizes *sizes = &params->layer.geometry->sizes;
  struct kvp_layout layout = kvp_layout_make(&params->layer);
  bool copies = dequantize != NULL && params->cast_back.base != NULL && params->back_is_copy;
  bool cast_back = dequantize != NULL && params->cast_back.base != NULL && !copies;
  struct kvp_op_counts local = {0};
  for (uint64_t row = row_begin; row < row_end; row++) {
    uint8_t aside_data[kvp_main_elements];
    uint8_t aside_scales[kvp_main_elements / 16];
    uint8_t *data = aside_data;
    uint8_t *scales = aside_scales;
    struct slot_place place = place_slot(params, row);
    struct row_origin origin = row_origin_of(params, row, &place);
    if (copies) {
      copy_row(params, row, &origin, &local);
    }
    if (origin.source == NULL) {
      zero_row(params, row, origin.is_wrong, cast_back, &local);
      continue;
    }
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
    struct kvp_quantize_result result = quantize((const void *)origin.source, data, scales);
    local.rows_nonfinite += result.nonfinite;
    local.groups_saturated += result.groups_saturated;
    local.bytes_read += copies ? 0 : sizes->row_bytes;
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
  bool copies = params->cast_back.base != NULL && params->back_is_copy;
  bool cast_back = params->cast_back.base != NULL && !copies;
  struct kvp_op_counts local = {0};
  for (uint64_t row = row_begin; row < row_end; row++) {
    struct slot_place place = place_slot(params, row);
    struct row_origin origin = row_origin_of(params, row, &place);
    if (copies) {
      copy_row(params, row, &origin, &local);
    }
    if (origin.source == NULL) {
      zero_row(params, row, origin.is_wrong, cast_back, &local);
      continue;
    }
    if (place.use == SLOT_REJECT) {
      local.rows_rejected++;
      continue;
    }
    local.rows_skipped += place.use == SLOT_SKIP;
    if (place.use == SLOT_SKIP && !cast_back) {
      continue;
    }
    if (place.use == SLOT_STORE) {
      memcpy(layout.base + place.block * layout.block_stride + place.offset * layout.data_step, origin.source,
             sizes->data_bytes);
      local.rows_stored++;
      local.bytes_written += sizes->data_bytes;
    }
    if (cast_back) {
      memcpy(kvp_rows_at(&params->cast_back, row), origin.source, sizes->row_bytes);
      local.bytes_written += sizes->row_bytes;
    }
    local.rows_nonfinite += row_is_nonfinite((const void *)origin.source, sizes->elements);
    local.bytes_read += copies ? 0 : sizes->row_bytes;
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
