/* Do two areas share a byte? */
#include "server/executor/row_area.h"

#include <stddef.h>

/* The rows lie at columns [begin, begin + row_bytes) of a grid as wide as the stride: those of two areas of one stride
 * don't touch when their columns don't. */
static bool columns_apart(const struct kvp_row_area *a, const struct kvp_row_area *b) {
  if (a->stride_bytes != b->stride_bytes || a->base == b->base) {
    return false;
  }
  uint64_t stride = a->stride_bytes;
  uint64_t distance = (uint64_t)((uintptr_t)b->base % stride + stride - (uintptr_t)a->base % stride) % stride;
  return distance >= a->row_bytes && stride - distance >= b->row_bytes;
}

static uintptr_t area_end(const struct kvp_row_area *area) {
  return (uintptr_t)area->base + (area->rows - 1) * area->stride_bytes + area->row_bytes;
}

bool kvp_row_areas_overlap(const struct kvp_row_area *a, const struct kvp_row_area *b) {
  if (a->base == NULL || b->base == NULL || a->rows == 0 || b->rows == 0) {
    return false;
  }
  if (area_end(a) <= (uintptr_t)b->base || area_end(b) <= (uintptr_t)a->base) {
    return false;
  }
  return !columns_apart(a, b);
}
