/* Rows copied as they are, or through an index that undoes an order. OPS "assemble", part 2.
 *
 * It runs on worker threads of the executor, over a range of rows. Nothing here but the C library's memcpy and memset,
 * which know the machine themselves; entries of the index are read once and bounded here, whoever checked them before.
 */
#include <assert.h>
#include <string.h>

#include "kernels/host/layout.h"

/* Rows in the order of the source: one long row where both sides are dense. */
static void copy_in_order(const struct kvp_copy_rows_params *params, uint64_t row_begin, uint64_t row_end) {
  const uint64_t row_bytes = params->row_bytes;
  if (params->source.stride_bytes == row_bytes && params->out.stride_bytes == row_bytes) {
    memcpy(kvp_rows_at(&params->out, row_begin), kvp_rows_at(&params->source, row_begin),
           (row_end - row_begin) * row_bytes);
    return;
  }
  for (uint64_t row = row_begin; row < row_end; row++) {
    memcpy(kvp_rows_at(&params->out, row), kvp_rows_at(&params->source, row), row_bytes);
  }
}

void kvp_host_copy_rows(const struct kvp_copy_rows_params *params, uint64_t row_begin, uint64_t row_end,
                        struct kvp_op_counts *counts) {
  assert(row_begin <= row_end && row_end <= params->row_count);
  uint64_t zeroed = 0;
  uint64_t rejected = 0;
  if (row_begin == row_end) {
    return; /* an op without rows may have no memory at all */
  }
  if (params->gather == NULL) {
    copy_in_order(params, row_begin, row_end);
  }
  for (uint64_t row = row_begin; params->gather != NULL && row < row_end; row++) {
    int32_t from = kvp_read_once(&params->gather[row]);
    if (from >= 0 && (uint64_t)from < params->source_rows) {
      memcpy(kvp_rows_at(&params->out, row), kvp_rows_at(&params->source, (uint64_t)from), params->row_bytes);
    } else {
      memset(kvp_rows_at(&params->out, row), 0, params->row_bytes);
      zeroed += from == -1;
      rejected += from != -1;
    }
  }
  counts->rows_loaded += row_end - row_begin - rejected;
  counts->rows_rejected += rejected;
  counts->bytes_read += (row_end - row_begin - zeroed - rejected) * params->row_bytes;
  counts->bytes_written += (row_end - row_begin) * params->row_bytes;
}
