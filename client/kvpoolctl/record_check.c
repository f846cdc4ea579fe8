/* What a store never writes, and what it writes for bad input. The rules are those of the formats' quantization:
 *   ue8m0 is the ceiling of log2(amax / code_limit), so the largest code is more than half the limit's value, or the
 *   scale is the smallest there is; e4m3 and f32 scales are amax / code_limit itself, so the largest code is the
 * limit but for rounding. Contents that break them were written by something else, or in another format. */
#include "client/kvpoolctl/record_check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
  e4m3_nan = 0x7F,
  e4m3_limit = 0x7E,      /* 448 */
  e4m3_half_limit = 0x76, /* 224 */
  e2m1_limit = 7,         /* 6 */
  e2m1_half_limit = 5,    /* 3 */
  e2m1_near_limit = 6,    /* 4: scales below 2^-6 round coarsely */
  ue8m0_nan = 0xFF,
  ue8m0_smallest_fp8 = 105,
  ue8m0_smallest_fp4 = 112,
};

static bool is_fp8(const kvpool_format_info *format) {
  return strcmp(format->quantized_dtype, "e4m3") == 0;
}

static uint32_t scale_size(const kvpool_format_info *format) {
  return strcmp(format->scale_format, "f32") == 0 ? 4 : 1;
}

uint32_t kvp_ctl_group_count(const kvpool_format_info *format) {
  return format->quantized_elements == 0
             ? 1
             : (format->quantized_elements + format->elements_per_scale - 1) / format->elements_per_scale;
}

static void odd_add(struct kvp_ctl_group *group, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void odd_add(struct kvp_ctl_group *group, const char *format, ...) {
  size_t used = strlen(group->odd);
  if (used > 0 && used + 2 < sizeof group->odd) {
    (void)memcpy(group->odd + used, "; ", 3);
    used += 2;
  }
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(group->odd + used, sizeof group->odd - used, format, arguments);
  va_end(arguments);
}

static uint32_t code_magnitude(const kvpool_format_info *format, const kvpool_record *record, uint32_t element) {
  return is_fp8(format) ? record->raw[element] & 0x7FU : record->raw[element / 2] >> (element % 2 * 4) & 0x7U;
}

static void codes_count(struct kvp_ctl_group *group, const kvpool_format_info *format, const kvpool_record *record) {
  for (uint32_t i = group->first; i < group->first + group->count; i++) {
    uint32_t code = code_magnitude(format, record, i);
    if (is_fp8(format) && code == e4m3_nan) {
      group->nan_codes++;
    } else {
      group->code_max = code > group->code_max ? code : group->code_max;
    }
  }
}

/* <0: below the smallest a store writes, 0: the smallest, 1: above; 2: no number. */
static int scale_rank(const struct kvp_ctl_group *group, const kvpool_format_info *format) {
  float smallest = is_fp8(format) ? 1e-4F / 448.0F : 0;
  if (strcmp(format->scale_format, "ue8m0") == 0) {
    uint32_t least = is_fp8(format) ? ue8m0_smallest_fp8 : ue8m0_smallest_fp4;
    return group->scale_bits == ue8m0_nan ? 2 : group->scale_bits < least ? -1 : group->scale_bits > least;
  }
  if (strcmp(format->scale_format, "e4m3") == 0) {
    /* Codes of positive numbers are in order; 1 is 2^-9. */
    return (group->scale_bits & 0x7F) == e4m3_nan               ? 2
           : group->scale_bits > 0x7F || group->scale_bits == 0 ? -1
                                                                : group->scale_bits > 1;
  }
  return !isfinite(group->scale) ? 2 : group->scale < smallest ? -1 : group->scale > smallest;
}

static uint32_t code_least(const kvpool_format_info *format) {
  if (strcmp(format->scale_format, "ue8m0") == 0) {
    return is_fp8(format) ? e4m3_half_limit : e2m1_half_limit;
  }
  return is_fp8(format) ? e4m3_limit : e2m1_near_limit;
}

static void scale_check(struct kvp_ctl_group *group, const kvpool_format_info *format) {
  int rank = scale_rank(group, format);
  bool has_codes = group->code_max > 0 || group->nan_codes > 0;
  if (group->nan_codes > 0) {
    odd_add(group, "%u NaN code%s", group->nan_codes, group->nan_codes == 1 ? "" : "s");
  }
  if (rank == 2) {
    odd_add(group, "scale is no number%s",
            !is_fp8(format) && !has_codes ? ": the stored row held NaN or Inf here" : ", no store writes that");
  } else if (rank < 0) {
    odd_add(group, "scale %.3g is below the smallest a store writes", (double)group->scale);
  } else if (rank == 0) {
    group->is_zero = !has_codes;
  } else if (group->code_max == 0 && group->nan_codes == 0) {
    odd_add(group, "all codes are 0 under a scale that isn't the smallest");
  } else if (group->code_max < code_least(format)) {
    odd_add(group, "the scale is larger than these codes need");
  }
  if (!is_fp8(format) && strcmp(format->scale_format, "e4m3") == 0 && group->scale_bits == e4m3_limit &&
      group->code_max == e2m1_limit) {
    odd_add(group, "saturated: the scale is at its limit");
  }
}

static void values_count(struct kvp_ctl_group *group, const kvpool_format_info *format, const kvpool_record *record) {
  uint32_t nan = 0;
  uint32_t infinite = 0;
  group->min = group->max = NAN;
  for (uint32_t i = group->first; i < group->first + group->count; i++) {
    float value = record->values[i];
    nan += isnan(value);
    infinite += isinf(value) != 0;
    group->min = fminf(group->min, value); /* a NaN on one side gives the other */
    group->max = fmaxf(group->max, value);
  }
  if (format->quantized_elements == 0) {
    group->is_zero = group->min == 0 && group->max == 0 && nan == 0;
    if (nan > 0 || infinite > 0) {
      odd_add(group, "%u NaN, %u Inf", nan, infinite);
    }
  } else if (infinite > 0) {
    odd_add(group, "%u value%s larger than float32 holds", infinite, infinite == 1 ? "" : "s");
  }
}

void kvp_ctl_group_init(struct kvp_ctl_group *group, const kvpool_format_info *format, const kvpool_record *record,
                        uint32_t index) {
  *group = (struct kvp_ctl_group){.count = record->value_count, .scale = 1};
  if (format->quantized_elements > 0) {
    const uint8_t *scales = record->raw + format->data_bytes;
    uint32_t left = format->quantized_elements - index * format->elements_per_scale;
    group->first = index * format->elements_per_scale;
    group->count = left < format->elements_per_scale ? left : format->elements_per_scale;
    group->scale = record->scales[index];
    memcpy(&group->scale_bits, scales + (size_t)index * scale_size(format), scale_size(format));
    codes_count(group, format, record);
    scale_check(group, format);
  }
  values_count(group, format, record);
}

static bool is_filled(const kvpool_record *record) {
  for (uint32_t i = 1; i < record->raw_bytes; i++) {
    if (record->raw[i] != record->raw[0]) {
      return false;
    }
  }
  return record->raw_bytes > 0;
}

void kvp_ctl_record_odd(const kvpool_format_info *format, const kvpool_record *record,
                        char out[kvp_ctl_odd_bytes_max]) {
  out[0] = '\0';
  if (is_filled(record)) {
    /* Zeros of a bf16 record may have been stored; of a quantized one they can't. */
    const char *means = record->raw[0] != 0               ? ": a fill pattern, not a stored row"
                        : format->quantized_elements == 0 ? ": never stored to, or zeros"
                                                          : ": never stored to";
    (void)snprintf(out, kvp_ctl_odd_bytes_max, "every byte is 0x%02X%s", record->raw[0], means);
    return;
  }
  uint32_t odd_groups = 0;
  uint32_t group_count = kvp_ctl_group_count(format);
  struct kvp_ctl_group first = {0};
  for (uint32_t i = 0; i < group_count; i++) {
    struct kvp_ctl_group group;
    kvp_ctl_group_init(&group, format, record, i);
    if (group.odd[0] != '\0') {
      first = odd_groups == 0 ? group : first;
      odd_groups++;
    }
  }
  if (odd_groups > 0) {
    size_t used = strlen(first.odd);
    (void)memcpy(out, first.odd, used + 1);
    if (odd_groups > 1) {
      (void)snprintf(out + used, kvp_ctl_odd_bytes_max - used, " (and %u more groups)", odd_groups - 1);
    }
  }
}
