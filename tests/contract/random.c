/* See random.h. */
#include "tests/contract/random.h"

static uint64_t state;

void random_start(uint64_t seed) {
  state = seed + 1;
  for (int i = 0; i < 4; i++) {
    (void)random_bits();
  }
}

uint64_t random_bits(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state * UINT64_C(2685821657736338717) >> 16;
}

uint32_t random_below(uint32_t limit) {
  return (uint32_t)(random_bits() % limit);
}

bool random_chance(uint32_t one_in) {
  return random_below(one_in) == 0;
}

int32_t random_hostile(void) {
  static const int32_t values[] = {-1,         -2,         INT32_MIN, INT32_MIN + 1, INT32_MAX, INT32_MAX - 1,
                                   0x7FC00000, 0x7F800000, -0x400000, 0x40000000,    1 << 24,   0};
  uint32_t count = sizeof(values) / sizeof(values[0]);
  uint32_t index = random_below(count + 4);
  return index < count ? values[index] : (int32_t)random_bits();
}

uint16_t random_bf16(uint32_t kind) {
  static const uint16_t special[] = {0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x0001,
                                     0x807F, 0x7F7F, 0xFF7F, 0x38D1, 0x38D2, 0x0080, 0x4580, 0x3F80};
  uint16_t sign = (uint16_t)(random_below(2) << 15);
  switch (kind) {
  case 0: /* around one */
    return sign | (uint16_t)(0x3D00 + random_below(0x0380));
  case 1: /* a wide range, so that small elements meet large ones */
    return sign | (uint16_t)(0x3000 + random_below(0x1400));
  case 2: /* any finite number */
    return sign | (uint16_t)random_below(0x7F80);
  case random_bf16_special:
    return special[random_below(sizeof(special) / sizeof(special[0]))];
  case 4: /* ties: few mantissa bits */
    return sign | (uint16_t)((0x3D00 + random_below(0x0400)) & 0xFFF0);
  default: /* so small that squares are subnormal or nothing */
    return sign | (uint16_t)(0x1800 + random_below(0x0800));
  }
}
