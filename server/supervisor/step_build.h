/* The steps that the daemon makes by itself: bytes of buffers and regions, rows over gRPC. Loop thread only.
 *
 * Each returns memory of kvp_step_alloc, queue and owner 0; NULL and *error when there is none or it is too large.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_BUILD_H
#define KVPOOL_SUPERVISOR_STEP_BUILD_H

#include <stdint.h>

#include "proto/format.h"
#include "proto/step_wire.h"

/* One layer of a region. */
struct kvp_region_place {
  uint64_t pool_id;
  uint32_t region;
  uint32_t layer;
};

/* bytes <= kvp_chunk_bytes_max, inside the buffer. */
struct kvp_wire_step *kvp_step_build_write(uint64_t buffer_id, uint64_t offset_bytes, const void *data,
                                           uint32_t bytes, struct kvp_error *error);
struct kvp_wire_step *kvp_step_build_read(uint64_t buffer_id, uint64_t offset_bytes, uint32_t bytes,
                                          struct kvp_error *error);
/* Zeroes the bytes from 0 on. */
struct kvp_wire_step *kvp_step_build_zero(uint64_t buffer_id, uint32_t bytes, struct kvp_error *error);

/* count: what fits into a step. */
struct kvp_wire_step *kvp_step_build_zero_blocks(uint64_t pool_id, const int32_t *blocks, uint32_t count,
                                                 struct kvp_error *error);

struct kvp_byte_range {
  uint64_t offset_bytes;
  uint32_t bytes;
};

/* Bytes of a layer, one range behind the other in the result; ranges: [count <= kvp_ops_per_step_max],
 * kvp_chunk_bytes_max together. */
struct kvp_wire_step *kvp_step_build_region_read(const struct kvp_region_place *place,
                                                 const struct kvp_byte_range *ranges, uint32_t count,
                                                 struct kvp_error *error);

/* Stores rows [0, slot_count) of a buffer, row_bytes each, without a gap. */
struct kvp_wire_step *kvp_step_build_store_rows(const struct kvp_region_place *place, uint64_t epoch,
                                                const uint8_t *slots, uint64_t slot_count, uint64_t buffer_id,
                                                uint32_t row_bytes, struct kvp_error *error);

enum { kvp_view_alignment_bytes = 16 }; /* of the bases of views */

/* Where LoadRows puts its rows and, behind them, its scales; both without gaps. */
struct kvp_rows_layout {
  uint64_t rows;
  uint32_t row_bytes;
  uint32_t scale_bytes;  /* of a row; 0: none */
  uint64_t scales_begin; /* aligned */
  uint64_t bytes;        /* of the buffer; not 0, below 2^32 */
};

struct kvp_wire_step *kvp_step_build_load_rows(const struct kvp_region_place *place, uint64_t epoch,
                                               const uint8_t *segments, uint64_t segments_bytes, uint64_t buffer_id,
                                               const struct kvp_rows_layout *layout, struct kvp_error *error);

#endif
