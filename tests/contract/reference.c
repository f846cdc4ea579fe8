/* See reference.h. */
#include "tests/contract/reference.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "proto/owner_entry.h"

static double e4m3_values[0x7F];
static double e2m1_values[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};

void reference_init(void) {
  for (int code = 0; code < 0x7F; code++) {
    int exponent = code / 8;
    double fraction = code % 8 / 8.0;
    e4m3_values[code] = exponent == 0 ? ldexp(fraction, -6) : ldexp(1.0 + fraction, exponent - 7);
  }
}

double reference_e4m3_value(uint8_t code) {
  return e4m3_values[code];
}
double reference_e2m1_value(uint8_t code) {
  return e2m1_values[code];
}

/* A distance to a far larger number would not be exact, hence the first line. */
static uint8_t nearest(const double *values, int count, double magnitude) {
  magnitude = fmin(magnitude, values[count - 1]);
  int best = 0;
  for (int code = 1; code < count; code++) {
    double distance = fabs(values[code] - magnitude);
    double best_distance = fabs(values[best] - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
    }
  }
  return (uint8_t)best;
}

uint8_t reference_e4m3(double magnitude) {
  return nearest(e4m3_values, 0x7F, magnitude);
}
uint8_t reference_e2m1(double magnitude) {
  return nearest(e2m1_values, 8, magnitude);
}

float reference_bf16_value(uint16_t bits) {
  int exponent = bits >> 7 & 0xFF;
  double fraction = (bits & 0x7F) / 128.0;
  double value;
  if (exponent == 0xFF) {
    value = fraction == 0.0 ? (double)INFINITY : (double)NAN;
  } else {
    value = exponent == 0 ? ldexp(fraction, -126) : ldexp(1.0 + fraction, exponent - 127);
  }
  return (float)(bits >> 15 != 0 ? -value : value);
}

uint16_t reference_bf16(float value) {
  if (isnan(value)) {
    return 0x7FFF;
  }
  uint16_t sign = signbit(value) != 0 ? 0x8000 : 0;
  double magnitude = fabs((double)value);
  if (isinf(value)) {
    return sign | 0x7F80;
  }
  int exponent = -126;
  if (magnitude >= 0x1p-126) {
    exponent = ilogb(magnitude);
  }
  double steps = rint(ldexp(magnitude, 7 - exponent));
  if (steps >= 256.0) {
    steps = 128.0;
    exponent++;
  }
  if (exponent > 127) {
    return sign | 0x7F80;
  }
  if (steps < 128.0) {
    return (uint16_t)(sign | (uint16_t)steps);
  }
  return (uint16_t)(sign | (uint16_t)((exponent + 127) * 128 + ((int)steps - 128)));
}

static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

struct group {
  float values[128];
  bool nonfinite;
  float amax;
};

static struct group read_group(const uint8_t *row, uint32_t first, uint32_t count) {
  struct group group = {0};
  for (uint32_t i = 0; i < count; i++) {
    uint16_t bits;
    memcpy(&bits, row + 2 * (size_t)(first + i), sizeof(bits));
    group.values[i] = reference_bf16_value(bits);
    if (!isfinite(group.values[i])) {
      group.nonfinite = true;
    } else if (fabsf(group.values[i]) > group.amax) {
      group.amax = fabsf(group.values[i]);
    }
  }
  return group;
}

static int ceil_log2(float value) {
  int exponent;
  return frexpf(value, &exponent) == 0.5F ? exponent - 1 : exponent;
}

static void put_nibble(uint8_t *data, uint32_t index, uint8_t code) {
  int shift = index % 2 == 0 ? 0 : 4;
  data[index / 2] = (uint8_t)((data[index / 2] & ~(0xF << shift)) | code << shift);
}

/* Scale of a group; *factor is what its elements are multiplied by. True: saturated. */
static bool put_scale(enum kvp_format_id id, const struct group *group, uint32_t index, uint8_t *scales,
                      float *factor) {
  float floored = group->amax > 1e-4F ? group->amax : 1e-4F;
  if (id == KVP_FORMAT_INDEX_FP8_F32) {
    float scale = floored / 448.0F;
    memcpy(scales + 4 * (size_t)index, &scale, sizeof(scale));
    *factor = 1.0F / scale;
    return false;
  }
  if (id == KVP_FORMAT_V41_FP4) {
    float least = ldexpf(6.0F, -9);
    float m = (group->amax > least ? group->amax : least) * (1.0F / 6.0F);
    uint8_t byte = reference_e4m3(m > 448.0F ? 448.0 : (double)m);
    scales[index] = group->nonfinite ? 0x7F : byte;
    *factor = 1.0F / (float)reference_e4m3_value(byte);
    return !group->nonfinite && m > 448.0F;
  }
  int exponent = ceil_log2(floored / (id == KVP_FORMAT_INDEX_FP4 ? 6.0F : 448.0F));
  scales[index] = (uint8_t)(id == KVP_FORMAT_INDEX_FP4 && group->nonfinite ? 0xFF : exponent + 127);
  *factor = ldexpf(1.0F, -exponent);
  return false;
}

struct row_result {
  bool nonfinite;
  uint64_t saturated;
};

static struct row_result quantize(const struct kvp_geometry *geometry, const uint8_t *row, uint8_t *data,
                                  uint8_t *scales) {
  const struct kvp_format *format = geometry->format;
  struct row_result result = {0};
  if (format->quantized_dtype == KVP_QUANTIZED_NONE) {
    for (uint32_t i = 0; i < geometry->sizes.elements; i++) {
      result.nonfinite |= read_group(row, i, 1).nonfinite;
    }
    memcpy(data, row, geometry->sizes.row_bytes);
    return result;
  }
  bool fp4 = format->quantized_dtype == KVP_QUANTIZED_E2M1;
  uint32_t group_elements = format->elements_per_scale;
  for (uint32_t g = 0; g < format->quantized_elements / group_elements; g++) {
    struct group group = read_group(row, g * group_elements, group_elements);
    float factor;
    result.saturated += put_scale(format->id, &group, g, scales, &factor);
    result.nonfinite |= group.nonfinite;
    for (uint32_t i = 0; i < group_elements; i++) {
      float scaled = group.values[i] * factor;
      uint32_t index = g * group_elements + i;
      uint8_t sign = signbit(group.values[i]) != 0 ? 1 : 0;
      if (fp4) {
        uint8_t code = group.nonfinite ? 0 : (uint8_t)(reference_e2m1(fabs((double)scaled)) | sign << 3);
        put_nibble(data, index, code);
      } else {
        bool finite = isfinite(group.values[i]);
        data[index] = finite ? (uint8_t)(reference_e4m3(fabs((double)scaled)) | sign << 7) : 0x7F;
      }
    }
  }
  return result;
}

static float signed_value(bool negative, double magnitude) {
  return (float)(negative ? -magnitude : magnitude);
}

static void dequantize(const struct kvp_geometry *geometry, const uint8_t *data, const uint8_t *scales,
                       uint8_t *row) {
  for (uint32_t i = 0; i < geometry->sizes.elements; i++) {
    float value;
    if (geometry->format->id == KVP_FORMAT_V41) {
      uint8_t code = data[i];
      float scale = float_of_bits((uint32_t)scales[i / 32] << 23);
      value = (code & 0x7F) == 0x7F ? NAN : signed_value(code >> 7 != 0, reference_e4m3_value(code & 0x7F)) * scale;
    } else {
      uint8_t code = i % 2 == 0 ? data[i / 2] & 0xF : data[i / 2] >> 4;
      uint8_t byte = scales[i / 16];
      float scale = (byte & 0x7F) == 0x7F ? NAN : signed_value(byte >> 7 != 0, reference_e4m3_value(byte & 0x7F));
      value = signed_value(code >> 3 != 0, reference_e2m1_value(code & 7)) * scale;
    }
    uint16_t bits = reference_bf16(value);
    memcpy(row + 2 * (size_t)i, &bits, sizeof(bits));
  }
}

static bool owner_allows(const struct kvp_owner_check *check, int64_t block, bool write) {
  if (check->entries == NULL || check->owner == 0) {
    return true;
  }
  uint64_t entry = check->entries[block];
  uint64_t state = entry >> 16 & 0xFF;
  if (state != KVP_BLOCK_LEASED && !(state == KVP_BLOCK_SEALED && !write)) {
    return false;
  }
  return (entry & 0xFFFF) == check->owner && entry >> 24 <= check->epoch;
}

static void addresses(const struct kvp_layer *layer, uint64_t block, uint64_t offset, uint8_t **data,
                      uint8_t **scales) {
  const struct kvp_geometry *geometry = layer->geometry;
  uint8_t *base = layer->base + block * geometry->block_stride_bytes;
  uint64_t data_bytes = geometry->sizes.data_bytes;
  uint64_t scale_bytes = geometry->sizes.scale_bytes;
  if (geometry->format->token_interleaved) {
    *data = base + offset * (data_bytes + scale_bytes);
    *scales = *data + data_bytes;
  } else {
    *data = base + offset * data_bytes;
    *scales = base + geometry->tokens_per_block * data_bytes + offset * scale_bytes;
  }
}

/* A row that is made of nothing. */
static void store_zero_row(const struct kvp_store_params *params, uint64_t row, bool right,
                           struct kvp_op_counts *counts) {
  if (right) {
    counts->rows_skipped++;
  } else {
    counts->rows_rejected++;
  }
  if (params->cast_back.base != NULL) {
    uint64_t row_bytes = params->layer.geometry->sizes.row_bytes;
    memset(params->cast_back.base + row * params->cast_back.stride_bytes, 0, row_bytes);
    counts->bytes_written += row_bytes;
  }
}

void reference_store(const struct kvp_store_params *params, struct kvp_op_counts *counts) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  int64_t tokens = geometry->tokens_per_block;
  for (uint64_t i = 0; i < params->row_count; i++) {
    int64_t slot = params->slots == NULL ? -1 : params->slots[i];
    int64_t from = params->gather == NULL ? (int64_t)i : params->gather[i];
    if (params->gather != NULL && (from < 0 || from >= (int64_t)params->source_rows)) {
      store_zero_row(params, i, from == -1 && slot == -1, counts);
      continue;
    }
    static uint8_t record[2 * 65536 + 64];
    uint8_t *data = record;
    uint8_t *scales = record + sizes->data_bytes;
    if (slot != -1) {
      if (slot < 0 || slot >= tokens * geometry->num_blocks || !owner_allows(&params->check, slot / tokens, true)) {
        counts->rows_rejected++;
        continue;
      }
      addresses(&params->layer, (uint64_t)(slot / tokens), (uint64_t)(slot % tokens), &data, &scales);
      counts->rows_stored++;
      counts->bytes_written += sizes->bytes_per_token;
    } else {
      counts->rows_skipped++;
      if (params->cast_back.base == NULL) {
        continue;
      }
    }
    const uint8_t *row = params->source.base + (uint64_t)from * params->source.stride_bytes;
    struct row_result result = quantize(geometry, row, data, scales);
    counts->rows_nonfinite += result.nonfinite ? 1 : 0;
    counts->groups_saturated += result.saturated;
    counts->bytes_read += sizes->row_bytes;
    if (params->cast_back.base != NULL) {
      uint8_t *back = params->cast_back.base + i * params->cast_back.stride_bytes;
      if (geometry->format->id == KVP_FORMAT_BF16) {
        memcpy(back, row, sizes->row_bytes);
      } else {
        dequantize(geometry, data, scales, back);
      }
      counts->bytes_written += sizes->row_bytes;
    }
  }
}

static bool segment_valid(const struct kvp_load_params *params, const struct kvp_segment *segment) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  int64_t rows = (int64_t)segment->src_end - segment->src_begin;
  return segment->src_begin >= 0 && rows >= 0 && segment->src_end <= (int64_t)geometry->tokens_per_block &&
         segment->dst_offset >= 0 && segment->dst_offset + rows <= (int64_t)params->total_k &&
         segment->src_block >= -1 && segment->src_block < (int64_t)geometry->num_blocks &&
         (segment->src_block == -1 || owner_allows(&params->check, segment->src_block, false));
}

static void load_row(const struct kvp_load_params *params, int64_t block, uint64_t offset, uint64_t to) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  uint8_t *row = params->out.base + to * params->out.stride_bytes;
  uint8_t *scale = params->scales.base == NULL ? NULL : params->scales.base + to * params->scales.stride_bytes;
  if (block == -1) {
    memset(row, 0, sizes->loaded_row_bytes);
    if (scale != NULL) {
      memset(scale, 0, 4);
    }
    return;
  }
  uint8_t *data;
  uint8_t *scales;
  addresses(&params->layer, (uint64_t)block, offset, &data, &scales);
  if (geometry->format->dequantize_on_load) {
    dequantize(geometry, data, scales, row);
    return;
  }
  memcpy(row, data, sizes->data_bytes);
  if (scale != NULL) {
    memcpy(scale, scales, 4);
  }
}

void reference_load(const struct kvp_load_params *params, struct kvp_op_counts *counts) {
  const struct kvp_geometry *geometry = params->layer.geometry;
  for (uint64_t i = 0; i < params->segment_count; i++) {
    const struct kvp_segment *segment = &params->segments[i];
    int64_t rows = (int64_t)segment->src_end - segment->src_begin;
    if (!segment_valid(params, segment)) {
      bool names_rows =
          segment->src_begin >= 0 && segment->src_end <= (int64_t)geometry->tokens_per_block && rows > 0;
      counts->rows_rejected += names_rows ? (uint64_t)rows : 1;
      continue;
    }
    for (int64_t row = 0; row < rows; row++) {
      if (params->rows_taken != NULL && (*params->rows_taken)++ >= params->total_k) {
        counts->rows_rejected++;
        continue;
      }
      load_row(params, segment->src_block, (uint64_t)(segment->src_begin + row),
               (uint64_t)(segment->dst_offset + row));
      counts->rows_loaded++;
      counts->bytes_read += segment->src_block == -1 ? 0 : geometry->sizes.bytes_per_token;
      counts->bytes_written += geometry->sizes.loaded_row_bytes + (uint64_t)geometry->sizes.loaded_scale_bytes;
    }
  }
}
