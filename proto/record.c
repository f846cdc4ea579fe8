/* Decoding of stored records for inspection: plain and slow, no code shared with the kernels. Any thread. */
#include "proto/record.h"

#include <assert.h>
#include <math.h>
#include <string.h>

void kvp_record_offsets(const struct kvp_geometry *geometry, uint32_t offset, uint64_t *data, uint64_t *scales) {
  assert(offset < geometry->tokens_per_block);
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  if (geometry->format->token_interleaved) {
    *data = (uint64_t)offset * sizes->bytes_per_token;
    *scales = *data + sizes->data_bytes;
    return;
  }
  *data = (uint64_t)offset * sizes->data_bytes;
  *scales = (uint64_t)geometry->tokens_per_block * sizes->data_bytes + (uint64_t)offset * sizes->scale_bytes;
}

static float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/* A sign, exponent and mantissa field to a number; exponent field 0 is subnormal. No infinities, no NaN. */
static float small_float(uint32_t code, int mantissa_bits, int exponent_bits, int bias) {
  uint32_t mantissa = code & ((1U << mantissa_bits) - 1);
  int exponent = (int)(code >> mantissa_bits & ((1U << exponent_bits) - 1));
  uint32_t sign = code >> (mantissa_bits + exponent_bits) & 1;
  if (exponent != 0) {
    mantissa |= 1U << mantissa_bits;
  } else {
    exponent = 1;
  }
  float magnitude = ldexpf((float)mantissa, exponent - bias - mantissa_bits);
  return sign != 0 ? -magnitude : magnitude;
}

static float e4m3_to_float(uint8_t code) {
  return (code & 0x7F) == 0x7F ? NAN : small_float(code, 3, 4, 7);
}

static float e2m1_to_float(uint8_t code) {
  return small_float(code, 1, 2, 1);
}

static float scale_to_float(enum kvp_scale_format format, const uint8_t *scales, uint32_t index) {
  switch (format) {
  case KVP_SCALE_NONE:
    return 1.0F;
  case KVP_SCALE_UE8M0:
    return scales[index] == 0xFF ? NAN : bits_to_float((uint32_t)scales[index] << 23);
  case KVP_SCALE_E4M3:
    return e4m3_to_float(scales[index]);
  case KVP_SCALE_F32: {
    float value;
    memcpy(&value, scales + 4 * (size_t)index, sizeof(value));
    return value;
  }
  }
  return NAN;
}

static float element_to_float(enum kvp_quantized_dtype dtype, const uint8_t *data, uint32_t index) {
  switch (dtype) {
  case KVP_QUANTIZED_NONE: {
    uint16_t bits;
    memcpy(&bits, data + 2 * (size_t)index, sizeof(bits));
    return bits_to_float((uint32_t)bits << 16);
  }
  case KVP_QUANTIZED_E4M3:
    return e4m3_to_float(data[index]);
  case KVP_QUANTIZED_E2M1:
    return e2m1_to_float(data[index / 2] >> (index % 2 * 4) & 0xF);
  }
  return NAN;
}

void kvp_record_decode(const struct kvp_format *format, const struct kvp_format_sizes *sizes, const uint8_t *data,
                       const uint8_t *scales, float *out_scales, float *out_values) {
  if (out_scales != NULL) {
    for (uint32_t i = 0; i < sizes->num_scales; i++) {
      out_scales[i] = scale_to_float(format->scale_format, scales, i);
    }
  }
  if (out_values == NULL) {
    return;
  }
  for (uint32_t i = 0; i < sizes->elements; i++) {
    float value = element_to_float(format->quantized_dtype, data, i);
    if (sizes->num_scales != 0) {
      value *= scale_to_float(format->scale_format, scales, i / format->elements_per_scale);
    }
    out_values[i] = value;
  }
}
