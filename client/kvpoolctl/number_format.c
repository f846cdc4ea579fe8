/* BF16, float16 and float32. Pure functions; the rounding mode is the default one. */
#include "client/kvpoolctl/number_format.h"

#include <math.h>
#include <string.h>

enum { half_step_min = -24, half_nan = 0x7E00, half_infinity = 0x7C00, half_sign = 0x8000, bf16_quiet = 0x40 };

static uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

uint16_t kvp_ctl_bf16_from_float(float value) {
  uint32_t bits = float_bits(value);
  if (isnan(value)) {
    return (uint16_t)(bits >> 16 | bf16_quiet); /* rounding could carry a NaN into infinity */
  }
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float kvp_ctl_bf16_to_float(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t kvp_ctl_half_from_float(float value) {
  uint16_t sign = signbit(value) ? half_sign : 0;
  float magnitude = fabsf(value);
  if (isnan(value)) {
    return sign | half_nan;
  }
  if (magnitude >= 65520.0F) { /* halfway to 2^16: rounds up, out of range */
    return sign | half_infinity;
  }
  if (magnitude == 0) {
    return sign;
  }
  int exponent = 0;
  (void)frexpf(magnitude, &exponent);
  /* One unit of the last place is 2^step; 1024 units and more are normal numbers. A round up into the next binade
   * carries into the exponent field by itself. */
  int step = exponent - 11 > half_step_min ? exponent - 11 : half_step_min;
  uint32_t units = (uint32_t)nearbyintf(ldexpf(magnitude, -step));
  return (uint16_t)(sign | (((uint32_t)(step - half_step_min) << 10) + units));
}

float kvp_ctl_half_to_float(uint16_t half) {
  uint32_t exponent = half >> 10 & 0x1F;
  uint32_t mantissa = half & 0x3FF;
  float magnitude = exponent == 0x1F ? (mantissa != 0 ? NAN : INFINITY)
                    : exponent == 0  ? ldexpf((float)mantissa, half_step_min)
                                     : ldexpf((float)(mantissa | 0x400), (int)exponent - 1 + half_step_min);
  return (half & half_sign) != 0 ? -magnitude : magnitude;
}
