/* Where the host bytes of a step lie in one piece of staging memory: what kernels read, what is written, what is read
 * back, what the device found out.
 *
 *   [arrays that kernels read][bytes to write][bytes read][found, a record an op][finished_ns]
 *
 * Host bytes that ops share, or that overlap, are there once: the piece is never much larger than the step. Serving
 * thread; a layout is scratch for one launch.
 */
#ifndef KVPOOL_EXECUTOR_STEP_LAYOUT_H
#define KVPOOL_EXECUTOR_STEP_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/limits.h"
#include "server/executor/device.h"

enum { kvp_step_layout_alignment_bytes = 64 };

/* Where a device op has the address of an array that came with the step, and how long that is. */
struct kvp_host_array {
  uint32_t field_offset; /* of a pointer within struct kvp_device_op */
  uint64_t bytes;
};

enum {
  kvp_host_arrays_per_op_max = 3,
  kvp_host_arrays_per_step_max = kvp_host_arrays_per_op_max * kvp_device_ops_per_step_max,
};

/* Arrays that kernels read, in a fixed order; none of 0 bytes. Returns how many. */
uint32_t kvp_device_op_host_arrays(const struct kvp_device_op *op, struct kvp_host_array *out);

/* Host bytes of one address; several ops may name them. */
struct kvp_host_extent {
  const uint8_t *begin;
  const uint8_t *end;
  bool for_kernels; /* not only for a copy */
  uint64_t offset_bytes;
};

struct kvp_step_layout {
  uint32_t op_count;
  uint64_t arrays_bytes; /* of the first part */
  uint64_t results_offset_bytes;
  uint64_t found_offset_bytes;
  uint64_t finished_offset_bytes;
  uint64_t bytes; /* of the whole piece */

  uint64_t op_offset_bytes[kvp_device_ops_per_step_max]; /* of bytes written or read; without meaning elsewhere */
  uint16_t op_first_array[kvp_device_ops_per_step_max];
  uint64_t array_offset_bytes[kvp_host_arrays_per_step_max]; /* of an op's arrays, in their order */

  /* How it is found. */
  uint32_t array_count;
  uint32_t extent_count;
  uint32_t group_count;
  struct kvp_host_extent extents[kvp_host_arrays_per_step_max]; /* distinct beginnings, in the order they are met */
  struct kvp_host_extent groups[kvp_host_arrays_per_step_max];  /* without overlaps, in the order of addresses */
  uint16_t group_of[kvp_host_arrays_per_step_max];              /* of an extent */
  uint16_t extent_of[kvp_host_arrays_per_step_max];             /* of an array, or of bytes to write */
  uint16_t sorted[kvp_host_arrays_per_step_max];                /* extents by address */
  uint16_t table[1 << 15];                                      /* hash of beginnings: extent + 1 */
};

_Static_assert(2 * kvp_host_arrays_per_step_max <= 1 << 15, "the table is at most half full");

/* first: a step as it is launched. found_bytes: of the record of one op. */
void kvp_step_layout_make(struct kvp_step_layout *layout, const struct kvp_device_op *first, uint64_t found_bytes);
/* Copies arrays and bytes to write to where they belong. */
void kvp_step_layout_copy(const struct kvp_step_layout *layout, uint8_t *piece);

#endif
