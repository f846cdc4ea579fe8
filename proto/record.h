/* A stored record as numbers, for people: inspection and dumps. Not for the path of a step. */
#ifndef KVPOOL_PROTO_RECORD_H
#define KVPOOL_PROTO_RECORD_H

#include <stdint.h>

#include "proto/format.h"

/* Byte offsets of a token's data and scales within its block. offset < tokens_per_block. */
void kvp_record_offsets(const struct kvp_geometry *geometry, uint32_t offset, uint64_t *data, uint64_t *scales);

/* data: sizes.data_bytes; scales: sizes.scale_bytes (NULL when 0).
 * out_scales: [num_scales] or NULL; ue8m0 0xFF is NaN. out_values: [elements]: code * scale in float32, or the BF16
 * value; NULL when not wanted. */
void kvp_record_decode(const struct kvp_format *format, const struct kvp_format_sizes *sizes, const uint8_t *data,
                       const uint8_t *scales, float *out_scales, float *out_values);

#endif
