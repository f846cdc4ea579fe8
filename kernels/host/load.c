/* load: records named by segments to output rows. OPS "load".
 *
 * Main caches are dequantized row by row; index caches and bf16 are copied, a whole segment at once where rows are
 * dense. It runs on a worker thread of the executor, over a range of segments, and keeps its counts to itself until
 * the end. A segment is checked here when nobody could check it before, and then takes its rows from a budget that all
 * ranges of the op share.
 */
#include <assert.h>
#include <stdbool.h>

#include "kernels/host/dequantize.h"
#include "kernels/host/layout.h"
#include "kernels/host/variant.h"

KVP_INLINE bool segment_rows_valid(const struct kvp_geometry *geometry, const struct kvp_segment *segment) {
  return segment->src_begin >= 0 && segment->src_begin <= segment->src_end &&
         (uint32_t)segment->src_end <= geometry->tokens_per_block;
}

/* Everything but who owns the block. Rows are valid. */
KVP_INLINE bool segment_bounds_valid(const struct kvp_load_params *params, const struct kvp_segment *segment) {
  if (segment->dst_offset < 0) {
    return false;
  }
  uint64_t dst_end = (uint64_t)segment->dst_offset + (uint64_t)(segment->src_end - segment->src_begin);
  return dst_end <= params->total_k &&
         (segment->src_block == -1 || (uint32_t)segment->src_block < params->layer.geometry->num_blocks);
}

/* Reads segment `index`; false, and counted, when it must not be followed. A segment that is refused counts the rows
 * it names, and one where it names none. */
KVP_INLINE bool take_segment(const struct kvp_load_params *params, uint64_t index, struct kvp_segment *segment,
                             struct kvp_op_counts *counts) {
  const struct kvp_segment *entry = &params->segments[index];
  *segment = (struct kvp_segment){.src_block = kvp_read_once(&entry->src_block),
                                  .src_begin = kvp_read_once(&entry->src_begin),
                                  .src_end = kvp_read_once(&entry->src_end),
                                  .dst_offset = kvp_read_once(&entry->dst_offset)};
  bool rows_valid = segment_rows_valid(params->layer.geometry, segment);
  bool valid = rows_valid && segment_bounds_valid(params, segment);
  if (params->check.entries == NULL) {
    assert(valid);
    return true;
  }
  if (valid && (segment->src_block == -1 || kvp_owner_allows(&params->check, (uint32_t)segment->src_block, false))) {
    return true;
  }
  bool names_rows = rows_valid && segment->src_end > segment->src_begin;
  counts->rows_rejected += names_rows ? (uint64_t)(segment->src_end - segment->src_begin) : 1;
  return false;
}

/* How many of `rows` the op's budget still has; the rest is counted. */
KVP_INLINE uint64_t take_rows(const struct kvp_load_params *params, uint64_t rows, struct kvp_op_counts *counts) {
  assert((params->rows_taken != NULL) == (params->check.entries != NULL));
  if (params->rows_taken == NULL) {
    return rows;
  }
  uint64_t before = __atomic_fetch_add(params->rows_taken, rows, __ATOMIC_RELAXED);
  uint64_t left = before < params->total_k ? params->total_k - before : 0;
  uint64_t taken = rows < left ? rows : left;
  counts->rows_rejected += rows - taken;
  return taken;
}

KVP_INLINE void zero_rows(const struct kvp_rows *rows, uint64_t first, uint64_t row_count, uint64_t row_bytes) {
  uint8_t *to = kvp_rows_at(rows, first);
  if (rows->stride_bytes == row_bytes) {
    memset(to, 0, row_count * row_bytes);
    return;
  }
  for (uint64_t row = 0; row < row_count; row++) {
    memset(to + row * rows->stride_bytes, 0, row_bytes);
  }
}

/* Source rows are dense. */
KVP_INLINE void copy_rows(const struct kvp_rows *rows, uint64_t first, uint64_t row_count, uint64_t row_bytes,
                          const uint8_t *from) {
  uint8_t *to = kvp_rows_at(rows, first);
  if (rows->stride_bytes == row_bytes) {
    memcpy(to, from, row_count * row_bytes);
    return;
  }
  for (uint64_t row = 0; row < row_count; row++) {
    memcpy(to + row * rows->stride_bytes, from + row * row_bytes, row_bytes);
  }
}

/* dequantize NULL: records are copied. The byte counts are parameters so that they are constants where the format
 * fixes them. */
KVP_INLINE void load_segments(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                              struct kvp_op_counts *counts, kvp_dequantize_fn *dequantize, uint32_t row_bytes,
                              uint32_t scale_bytes) {
  struct kvp_layout layout = kvp_layout_make(&params->layer);
  struct kvp_op_counts local = {0};
  for (uint64_t index = segment_begin; index < segment_end; index++) {
    struct kvp_segment segment;
    if (!take_segment(params, index, &segment, &local)) {
      continue;
    }
    uint64_t first = (uint64_t)segment.dst_offset;
    uint64_t row_count = take_rows(params, (uint64_t)(segment.src_end - segment.src_begin), &local);
    if (row_count == 0) {
      continue; /* an op without output rows may have no output at all */
    }
    local.rows_loaded += row_count;
    local.bytes_written += row_count * (row_bytes + scale_bytes);
    if (segment.src_block == -1) {
      zero_rows(&params->out, first, row_count, row_bytes);
      if (scale_bytes != 0) {
        zero_rows(&params->scales, first, row_count, scale_bytes);
      }
      continue;
    }
    local.bytes_read += row_count * params->layer.geometry->sizes.bytes_per_token;
    const uint8_t *block = layout.base + (uint64_t)segment.src_block * layout.block_stride;
    const uint8_t *data = block + (uint64_t)segment.src_begin * layout.data_step;
    const uint8_t *scales = block + layout.scales_begin + (uint64_t)segment.src_begin * layout.scale_step;
    if (dequantize == NULL) {
      copy_rows(&params->out, first, row_count, row_bytes, data);
      if (scale_bytes != 0) {
        copy_rows(&params->scales, first, row_count, scale_bytes, scales);
      }
      continue;
    }
    for (uint64_t row = 0; row < row_count; row++) {
      dequantize(data + row * layout.data_step, scales + row * layout.scale_step,
                 (void *)kvp_rows_at(&params->out, first + row));
    }
  }
  kvp_op_counts_add(counts, &local);
}

static void load_v41(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                     struct kvp_op_counts *counts) {
  load_segments(params, segment_begin, segment_end, counts, dequantize_v41, 1024, 0);
}

static void load_v41_fp4(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                         struct kvp_op_counts *counts) {
  load_segments(params, segment_begin, segment_end, counts, dequantize_v41_fp4, 1024, 0);
}

static void load_index_fp4(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                           struct kvp_op_counts *counts) {
  load_segments(params, segment_begin, segment_end, counts, NULL, 64, 4);
}

/* index_fp8_f32 and index_mxfp8 differ in what their bytes mean only. */
static void load_index_fp8(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                           struct kvp_op_counts *counts) {
  load_segments(params, segment_begin, segment_end, counts, NULL, 128, 4);
}

static void load_bf16(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                      struct kvp_op_counts *counts) {
  load_segments(params, segment_begin, segment_end, counts, NULL, params->layer.geometry->sizes.row_bytes, 0);
}

kvp_host_load_fn *const KVP_HOST_SYMBOL(kvp_host_load)[kvp_format_count] = {
    [KVP_FORMAT_V41] = load_v41,
    [KVP_FORMAT_V41_FP4] = load_v41_fp4,
    [KVP_FORMAT_INDEX_FP4] = load_index_fp4,
    [KVP_FORMAT_INDEX_FP8_F32] = load_index_fp8,
    [KVP_FORMAT_INDEX_MXFP8] = load_index_fp8,
    [KVP_FORMAT_BF16] = load_bf16,
};
