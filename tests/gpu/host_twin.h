/* One row through the host kernels: what its record and its load must be on the GPU. Test code, one thread. */
#ifndef KVPOOL_TESTS_GPU_HOST_TWIN_H
#define KVPOOL_TESTS_GPU_HOST_TWIN_H

#include <stdint.h>

#include "proto/format.h"

enum { twin_bytes_max = 2048 };

struct host_twin {
  uint8_t row[twin_bytes_max];    /* the BF16 source */
  uint8_t record[twin_bytes_max]; /* data, then scales */
  uint8_t loaded[twin_bytes_max];
  uint8_t scales[16]; /* loaded beside it; index formats */
};

/* The row device_rows_make makes. width: elements; 0 = the format's own. */
void host_twin_make(const struct kvp_format *format, uint32_t width, uint64_t seed, uint64_t row,
                    struct host_twin *out);

#endif
