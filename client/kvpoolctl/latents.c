/* Random latents, and the error bound of v41 from arithmetic alone: no code of the daemon's is asked.
 *
 * A group's scale is s = 2^ceil(log2(max(amax, 1e-4) / 448)). An e4m3 code has three bits behind the leading one, so
 * rounding to nearest is off by at most 1/16 of the value; below 2^-6 the spacing is 2^-9, off by at most 2^-10 * s.
 * Four significant bits are exact in BF16, so a load adds nothing. */
#include "client/kvpoolctl/latents.h"

#include <math.h>

#include "client/kvpoolctl/number_format.h"

enum { group_elements = 32 };

/* splitmix64 */
static uint64_t next(uint64_t *seed) {
  uint64_t z = *seed += 0x9E3779B97F4A7C15U;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
  z = (z ^ z >> 27) * 0x94D049BB133111EBU;
  return z ^ z >> 31;
}

/* In (0, 1]. */
static double uniform(uint64_t *seed) {
  return ((double)(next(seed) >> 11) + 1) / 9007199254740992.0;
}

void kvp_ctl_latents_fill(uint16_t *out, size_t count, uint64_t *seed) {
  static const double two_pi = 6.283185307179586;
  double spread = 1;
  for (size_t i = 0; i < count; i++) {
    if (i % group_elements == 0) {
      spread = exp2(4 * uniform(seed) - 2);
    }
    double normal = sqrt(-2 * log(uniform(seed))) * cos(two_pi * uniform(seed));
    out[i] = kvp_ctl_bf16_from_float((float)(spread * normal));
  }
}

static double group_scale(const uint16_t *source) {
  double amax = 1e-4;
  for (int i = 0; i < group_elements; i++) {
    amax = fmax(amax, fabs((double)kvp_ctl_bf16_to_float(source[i])));
  }
  int exponent = 0;
  double mantissa = frexp(amax / 448, &exponent); /* in [0.5, 1): a power of two has just 0.5 */
  return ldexp(1, mantissa == 0.5 ? exponent - 1 : exponent);
}

void kvp_ctl_latents_compare(const uint16_t *source, const uint16_t *loaded, size_t count,
                             struct kvp_ctl_difference *out) {
  double difference_sum = 0;
  double source_sum = 0;
  double scale = 1;
  *out = (struct kvp_ctl_difference){0};
  for (size_t i = 0; i < count; i++) {
    if (i % group_elements == 0) {
      scale = group_scale(source + i);
    }
    double value = (double)kvp_ctl_bf16_to_float(source[i]);
    double difference = fabs((double)kvp_ctl_bf16_to_float(loaded[i]) - value);
    double used = difference / fmax(fabs(value) / 16, ldexp(scale, -10));
    if (!(used <= out->bound_used_max)) { /* a NaN is more than anything */
      out->bound_used_max = isnan(used) ? INFINITY : used;
      out->element = i;
    }
    difference_sum += difference * difference;
    source_sum += value * value;
  }
  out->relative_l2 = sqrt(difference_sum / source_sum);
}
