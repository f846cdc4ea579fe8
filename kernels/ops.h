/* The parameters of every kernel, one struct per op, the same for every backend.
 *
 * By the time a kernel sees one, everything host-side was checked; what a kernel checks itself is said at the field.
 * Pointers are in the backend's memory. Launchers and host kernels never allocate, never fail, never synchronise.
 */
#ifndef KVPOOL_KERNELS_OPS_H
#define KVPOOL_KERNELS_OPS_H

#include <stdint.h>

#include "proto/format.h"

/* One layer of a region. */
struct kvp_layer {
  uint8_t *base; /* first byte of the layer */
  const struct kvp_geometry *geometry;
};

/* rows every stride_bytes; base and stride are multiples of 16. */
struct kvp_rows {
  uint8_t *base;
  uint64_t stride_bytes;
};

/* Counters of one op; a kernel adds to them. */
struct kvp_op_counts {
  uint64_t rows_stored;
  uint64_t rows_loaded; /* zero-filled rows among them */
  uint64_t rows_skipped;
  uint64_t rows_rejected;
  uint64_t rows_nonfinite;
  uint64_t groups_saturated;
  uint64_t bytes_read;
  uint64_t bytes_written;
};

/* Who may touch which block; only for arrays that lie in device memory and could not be checked before. */
struct kvp_owner_check {
  const uint64_t *entries; /* the owner table, num_blocks; NULL: the array was checked, nothing to do here */
  uint64_t epoch;          /* the step's */
  uint32_t owner;          /* the step's session slot; 0 owns everything */
};

/* Quantize source rows [0, row_count) into the records their slots name. OPS.md "store". */
struct kvp_store_params {
  struct kvp_layer layer;
  struct kvp_rows source; /* [>= row_count, elements] BF16 */
  const int32_t *slots;   /* [row_count] */
  uint64_t row_count;
  struct kvp_rows cast_back; /* [row_count, elements] BF16; base NULL: none */
  struct kvp_owner_check check;
};

/* One int32 quadruple of a load plan. */
struct kvp_segment {
  int32_t src_block; /* -1: zero rows */
  int32_t src_begin;
  int32_t src_end;
  int32_t dst_offset;
};

/* Records named by segments to output rows. OPS.md "load". */
struct kvp_load_params {
  struct kvp_layer layer;
  const struct kvp_segment *segments; /* [segment_count] */
  uint64_t segment_count;
  uint64_t total_k;       /* rows of out */
  struct kvp_rows out;    /* [total_k, loaded_row_bytes] */
  struct kvp_rows scales; /* [total_k, loaded_scale_bytes]; base NULL when the format has none */
  struct kvp_owner_check check;
};

/* ---- host backend: kernels/host/ ---- */

/* Rows [row_begin, row_end) of the op; ranges of one op may run on several threads, each with its own counts.
 * bytes_read / bytes_written count rows and records, not metadata. */
void kvp_host_store(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                    struct kvp_op_counts *counts);
/* Output work of segments [segment_begin, segment_end). */
void kvp_host_load(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                   struct kvp_op_counts *counts);

/* Name of the instruction set the host kernels use on this machine: "avx2", "baseline". */
const char *kvp_host_isa(void);

#endif
