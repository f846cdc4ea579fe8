/* Rows of memory as an area that others may touch. Any thread. */
#ifndef KVPOOL_EXECUTOR_ROW_AREA_H
#define KVPOOL_EXECUTOR_ROW_AREA_H

#include <stdbool.h>
#include <stdint.h>

/* `rows` of `row_bytes`, one every `stride_bytes` >= row_bytes. base NULL or rows 0: nothing. */
struct kvp_row_area {
  const uint8_t *base;
  uint64_t rows;
  uint64_t row_bytes;
  uint64_t stride_bytes;
};

/* Rows that interleave by columns, as those of tensors side by side do, don't touch. */
bool kvp_row_areas_overlap(const struct kvp_row_area *a, const struct kvp_row_area *b);

#endif
