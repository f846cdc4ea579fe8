/* The catalogue of record formats and the geometry derived from it.
 *
 * One descriptor says what the bytes of one token are; a region is created with a catalogue format and never
 * with anything else. All sizes are in bytes and 64-bit where a product is involved.
 */
#ifndef KVPOOL_PROTO_FORMAT_H
#define KVPOOL_PROTO_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

enum kvp_quantized_dtype { KVP_QUANTIZED_NONE, KVP_QUANTIZED_E4M3, KVP_QUANTIZED_E2M1 };
enum kvp_scale_format { KVP_SCALE_NONE, KVP_SCALE_UE8M0, KVP_SCALE_E4M3, KVP_SCALE_F32 };

/* Catalogue order; the number is part of the step wire format. */
enum kvp_format_id {
  KVP_FORMAT_V41,
  KVP_FORMAT_V41_FP4,
  KVP_FORMAT_INDEX_FP4,
  KVP_FORMAT_INDEX_FP8_F32,
  KVP_FORMAT_INDEX_MXFP8,
  KVP_FORMAT_BF16,
  kvp_format_count
};

struct kvp_format {
  enum kvp_format_id id;
  const char *name;
  enum kvp_quantized_dtype quantized_dtype;
  uint32_t quantized_elements; /* logical elements, not bytes */
  uint32_t elements_per_scale;
  uint32_t bf16_elements; /* bf16: the default width */
  enum kvp_scale_format scale_format;
  bool dequantize_on_load;
  bool token_interleaved; /* record = [data | scales]; else block = [data of all tokens][scales of all] */
  const char *note;
};

/* Sizes of one token in a format of a given width. */
struct kvp_format_sizes {
  uint32_t elements;
  uint32_t num_scales;
  uint32_t data_bytes;
  uint32_t scale_bytes;
  uint32_t bytes_per_token;    /* data_bytes + scale_bytes */
  uint32_t row_bytes;          /* BF16 source row: 2 * elements */
  uint32_t loaded_row_bytes;   /* first output of a load: BF16 row, or the codes of an index format */
  uint32_t loaded_scale_bytes; /* second output of a load (4); 0 when there is none */
  uint32_t block_alignment_bytes;
  uint32_t token_alignment_bytes;
};

/* A region: one cache of a pool. record address = base + layer * layer_stride + block * block_stride + ... */
struct kvp_geometry {
  const struct kvp_format *format;
  struct kvp_format_sizes sizes;
  uint32_t tokens_per_block;
  uint32_t num_blocks;
  uint32_t num_layers;
  uint64_t block_stride_bytes;
  uint64_t layer_stride_bytes; /* num_blocks * block_stride */
  uint64_t region_bytes;       /* num_layers * layer_stride */
};

/* id < kvp_format_count. */
const struct kvp_format *kvp_format_get(enum kvp_format_id id);
/* NULL when the catalogue has no such name. */
const struct kvp_format *kvp_format_find(const char *name);

/* Checks a descriptor against the rules every format obeys; the error names the field. */
enum kvp_status kvp_format_check(const struct kvp_format *format, struct kvp_error *error);

/* width: elements; 0 = the format's own. Refused: any other width of a format other than bf16, and widths
 * whose data_bytes are not a multiple of 16. */
enum kvp_status kvp_format_sizes_init(const struct kvp_format *format, uint32_t width, struct kvp_format_sizes *out,
                                      struct kvp_error *error);

/* Refused: zero sizes, num_blocks * tokens_per_block > 2^31 - 1, overflow of 64 bits, too many layers. */
enum kvp_status kvp_geometry_init(const struct kvp_format *format, uint32_t width, uint32_t tokens_per_block,
                                  uint32_t num_blocks, uint32_t num_layers, struct kvp_geometry *out,
                                  struct kvp_error *error);

const char *kvp_quantized_dtype_name(enum kvp_quantized_dtype dtype);
const char *kvp_scale_format_name(enum kvp_scale_format format);

#endif
