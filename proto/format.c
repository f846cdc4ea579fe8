/* The catalogue and its geometry. Constant data and pure functions: any thread. */
#include "proto/format.h"

#include <assert.h>
#include <string.h>

#include "proto/limits.h"

enum { data_multiple_bytes = 16, base_alignment_bytes = 32, slots_max = INT32_MAX };

static const struct kvp_format catalogue[kvp_format_count] = {
    [KVP_FORMAT_V41] = {.id = KVP_FORMAT_V41,
                        .name = "v41",
                        .quantized_dtype = KVP_QUANTIZED_E4M3,
                        .quantized_elements = 512,
                        .elements_per_scale = 32,
                        .scale_format = KVP_SCALE_UE8M0,
                        .dequantize_on_load = true,
                        .token_interleaved = true,
                        .note = "MLA main cache and SWA ring, FP8"},
    [KVP_FORMAT_V41_FP4] = {.id = KVP_FORMAT_V41_FP4,
                            .name = "v41_fp4",
                            .quantized_dtype = KVP_QUANTIZED_E2M1,
                            .quantized_elements = 512,
                            .elements_per_scale = 16,
                            .scale_format = KVP_SCALE_E4M3,
                            .dequantize_on_load = true,
                            .token_interleaved = true,
                            .note = "MLA main cache, FP4"},
    [KVP_FORMAT_INDEX_FP4] = {.id = KVP_FORMAT_INDEX_FP4,
                              .name = "index_fp4",
                              .quantized_dtype = KVP_QUANTIZED_E2M1,
                              .quantized_elements = 128,
                              .elements_per_scale = 32,
                              .scale_format = KVP_SCALE_UE8M0,
                              .note = "index keys, FP4"},
    [KVP_FORMAT_INDEX_FP8_F32] = {.id = KVP_FORMAT_INDEX_FP8_F32,
                                  .name = "index_fp8_f32",
                                  .quantized_dtype = KVP_QUANTIZED_E4M3,
                                  .quantized_elements = 128,
                                  .elements_per_scale = 128,
                                  .scale_format = KVP_SCALE_F32,
                                  .note = "index keys, FP8, one float32 scale"},
    [KVP_FORMAT_INDEX_MXFP8] = {.id = KVP_FORMAT_INDEX_MXFP8,
                                .name = "index_mxfp8",
                                .quantized_dtype = KVP_QUANTIZED_E4M3,
                                .quantized_elements = 128,
                                .elements_per_scale = 32,
                                .scale_format = KVP_SCALE_UE8M0,
                                .note = "index keys, MXFP8"},
    [KVP_FORMAT_BF16] = {.id = KVP_FORMAT_BF16,
                         .name = "bf16",
                         .bf16_elements = 512,
                         .note = "unquantized; the width is a parameter"},
};

const struct kvp_format *kvp_format_get(enum kvp_format_id id) {
  assert((unsigned)id < kvp_format_count);
  return &catalogue[id];
}

const struct kvp_format *kvp_format_find(const char *name) {
  for (int id = 0; id < kvp_format_count; id++) {
    if (strcmp(catalogue[id].name, name) == 0) {
      return &catalogue[id];
    }
  }
  return NULL;
}

static uint32_t scale_format_bytes(enum kvp_scale_format format) {
  switch (format) {
  case KVP_SCALE_NONE:
    return 0;
  case KVP_SCALE_UE8M0:
  case KVP_SCALE_E4M3:
    return 1;
  case KVP_SCALE_F32:
    return 4;
  }
  return 0;
}

static uint64_t data_bytes(const struct kvp_format *format, uint32_t elements) {
  switch (format->quantized_dtype) {
  case KVP_QUANTIZED_NONE:
    return 2 * (uint64_t)elements;
  case KVP_QUANTIZED_E4M3:
    return elements;
  case KVP_QUANTIZED_E2M1:
    return ((uint64_t)elements + 1) / 2;
  }
  return 0;
}

static enum kvp_status check_unquantized(const struct kvp_format *format, struct kvp_error *error) {
  if (format->quantized_elements != 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "format %s: quantized_elements = %u but quantized_dtype is none", format->name,
                         format->quantized_elements);
  }
  if (format->elements_per_scale != 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "format %s: elements_per_scale = %u but quantized_dtype is none", format->name,
                         format->elements_per_scale);
  }
  if (format->scale_format != KVP_SCALE_NONE) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "format %s: scale_format = %s but quantized_dtype is none",
                         format->name, kvp_scale_format_name(format->scale_format));
  }
  if (format->bf16_elements == 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "format %s: bf16_elements = 0 and nothing is quantized",
                         format->name);
  }
  return KVP_OK;
}

static enum kvp_status check_quantized(const struct kvp_format *format, struct kvp_error *error) {
  if (format->quantized_elements == 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "format %s: quantized_elements = 0 but quantized_dtype is %s",
                         format->name, kvp_quantized_dtype_name(format->quantized_dtype));
  }
  if (format->elements_per_scale == 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "format %s: elements_per_scale = 0 but quantized_dtype is %s",
                         format->name, kvp_quantized_dtype_name(format->quantized_dtype));
  }
  if (scale_format_bytes(format->scale_format) == 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "format %s: scale_format = %s but quantized_dtype is %s",
                         format->name, kvp_scale_format_name(format->scale_format),
                         kvp_quantized_dtype_name(format->quantized_dtype));
  }
  if (format->bf16_elements != 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "format %s: bf16_elements = %u beside quantized elements (mixed records are not supported)",
                         format->name, format->bf16_elements);
  }
  return KVP_OK;
}

enum kvp_status kvp_format_check(const struct kvp_format *format, struct kvp_error *error) {
  if ((unsigned)format->quantized_dtype > KVP_QUANTIZED_E2M1) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "format %s: quantized_dtype = %d is unknown", format->name,
                         (int)format->quantized_dtype);
  }
  if ((unsigned)format->scale_format > KVP_SCALE_F32) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "format %s: scale_format = %d is unknown", format->name,
                         (int)format->scale_format);
  }
  bool quantized = format->quantized_dtype != KVP_QUANTIZED_NONE;
  enum kvp_status status = quantized ? check_quantized(format, error) : check_unquantized(format, error);
  if (status != KVP_OK) {
    return status;
  }
  if (format->dequantize_on_load && !format->token_interleaved) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "format %s: token_interleaved = false but dequantize_on_load is true", format->name);
  }
  uint64_t bytes = data_bytes(format, quantized ? format->quantized_elements : format->bf16_elements);
  if (bytes % data_multiple_bytes != 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "format %s: data_bytes = %llu is not a multiple of %d",
                         format->name, (unsigned long long)bytes, data_multiple_bytes);
  }
  return KVP_OK;
}

static uint32_t gcd(uint32_t a, uint32_t b) {
  while (b != 0) {
    uint32_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

static enum kvp_status check_width(const struct kvp_format *format, uint32_t width, struct kvp_error *error) {
  if (format->quantized_dtype != KVP_QUANTIZED_NONE) {
    if (width != format->quantized_elements) {
      return kvp_error_set(error, KVP_INVALID_ARGUMENT, "width = %u: format %s has %u elements", width, format->name,
                           format->quantized_elements);
    }
    return KVP_OK;
  }
  if (width > kvp_format_width_max) {
    return kvp_error_set(error, KVP_TOO_LARGE, "width = %u > %d elements", width, kvp_format_width_max);
  }
  if (data_bytes(format, width) % data_multiple_bytes != 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "width = %u: data_bytes = %llu is not a multiple of %d", width,
                         (unsigned long long)data_bytes(format, width), data_multiple_bytes);
  }
  return KVP_OK;
}

enum kvp_status kvp_format_sizes_init(const struct kvp_format *format, uint32_t width, struct kvp_format_sizes *out,
                                      struct kvp_error *error) {
  bool quantized = format->quantized_dtype != KVP_QUANTIZED_NONE;
  if (width == 0) {
    width = quantized ? format->quantized_elements : format->bf16_elements;
  }
  enum kvp_status status = check_width(format, width, error);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_format_sizes sizes = {.elements = width, .data_bytes = (uint32_t)data_bytes(format, width)};
  if (quantized) {
    sizes.num_scales = (width + format->elements_per_scale - 1) / format->elements_per_scale;
    sizes.scale_bytes = sizes.num_scales * scale_format_bytes(format->scale_format);
  }
  sizes.bytes_per_token = sizes.data_bytes + sizes.scale_bytes;
  sizes.row_bytes = 2 * width;
  bool as_stored = quantized && !format->dequantize_on_load;
  sizes.loaded_row_bytes = as_stored ? sizes.data_bytes : sizes.row_bytes;
  sizes.loaded_scale_bytes = as_stored ? sizes.scale_bytes : 0;
  uint32_t unit = format->token_interleaved ? sizes.bytes_per_token : sizes.data_bytes;
  sizes.token_alignment_bytes = gcd(base_alignment_bytes, unit);
  sizes.block_alignment_bytes = format->token_interleaved
                                    ? base_alignment_bytes / sizes.token_alignment_bytes * sizes.bytes_per_token
                                    : base_alignment_bytes;
  *out = sizes;
  return KVP_OK;
}

static enum kvp_status check_counts(uint32_t tokens_per_block, uint32_t num_blocks, uint32_t num_layers,
                                    struct kvp_error *error) {
  if (tokens_per_block == 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "tokens_per_block = 0");
  }
  if (num_blocks == 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "num_blocks = 0");
  }
  if (num_layers == 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "num_layers = 0");
  }
  if (num_layers > kvp_layers_per_region_max) {
    return kvp_error_set(error, KVP_TOO_LARGE, "num_layers = %u > %d", num_layers, kvp_layers_per_region_max);
  }
  uint64_t slots = (uint64_t)num_blocks * tokens_per_block;
  if (slots > slots_max) {
    return kvp_error_set(error, KVP_TOO_LARGE, "num_blocks %u * tokens_per_block %u = %llu slots > %d", num_blocks,
                         tokens_per_block, (unsigned long long)slots, slots_max);
  }
  return KVP_OK;
}

enum kvp_status kvp_geometry_init(const struct kvp_format *format, uint32_t width, uint32_t tokens_per_block,
                                  uint32_t num_blocks, uint32_t num_layers, struct kvp_geometry *out,
                                  struct kvp_error *error) {
  struct kvp_geometry geometry = {
      .format = format, .tokens_per_block = tokens_per_block, .num_blocks = num_blocks, .num_layers = num_layers};
  enum kvp_status status = kvp_format_sizes_init(format, width, &geometry.sizes, error);
  if (status != KVP_OK) {
    return status;
  }
  status = check_counts(tokens_per_block, num_blocks, num_layers, error);
  if (status != KVP_OK) {
    return status;
  }
  uint64_t alignment = geometry.sizes.block_alignment_bytes;
  assert(alignment != 0);
  uint64_t stride;
  if (__builtin_mul_overflow((uint64_t)tokens_per_block, geometry.sizes.bytes_per_token, &stride) ||
      __builtin_add_overflow(stride, alignment - 1, &stride)) {
    goto err_overflow;
  }
  geometry.block_stride_bytes = stride / alignment * alignment;
  if (__builtin_mul_overflow(geometry.block_stride_bytes, num_blocks, &geometry.layer_stride_bytes) ||
      __builtin_mul_overflow(geometry.layer_stride_bytes, num_layers, &geometry.region_bytes)) {
    goto err_overflow;
  }
  *out = geometry;
  return KVP_OK;

err_overflow:
  return kvp_error_set(error, KVP_TOO_LARGE, "a region of %u layers x %u blocks x %u tokens x %u bytes overflows",
                       num_layers, num_blocks, tokens_per_block, geometry.sizes.bytes_per_token);
}

const char *kvp_quantized_dtype_name(enum kvp_quantized_dtype dtype) {
  switch (dtype) {
  case KVP_QUANTIZED_NONE:
    return "none";
  case KVP_QUANTIZED_E4M3:
    return "e4m3";
  case KVP_QUANTIZED_E2M1:
    return "e2m1";
  }
  return "unknown";
}

const char *kvp_scale_format_name(enum kvp_scale_format format) {
  switch (format) {
  case KVP_SCALE_NONE:
    return "none";
  case KVP_SCALE_UE8M0:
    return "ue8m0";
  case KVP_SCALE_E4M3:
    return "e4m3";
  case KVP_SCALE_F32:
    return "f32";
  }
  return "unknown";
}
