/* Rows, slots and comparisons made on the GPU, for tests with more of them than a host could make or look at.
 *
 * Rows come from a counter: row_element gives the same number on both sides. Kernels here share no code with those
 * under test; addresses are computed once more. Everything is launched on the stream given and checked there.
 */
#ifndef KVPOOL_TESTS_GPU_DEVICE_ROWS_H
#define KVPOOL_TESTS_GPU_DEVICE_ROWS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "kernels/ops.h"

#ifdef __CUDACC__
#define KVP_BOTH static inline __host__ __device__
#else
#define KVP_BOTH static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

KVP_BOTH uint64_t mix_bits(uint64_t bits) {
  bits ^= bits >> 30;
  bits *= UINT64_C(0xBF58476D1CE4E5B9);
  bits ^= bits >> 27;
  bits *= UINT64_C(0x94D049BB133111EB);
  return bits ^ bits >> 31;
}

/* BF16 element of a row: around one, a wide range, any finite number, ties between codes, sometimes any bits. */
KVP_BOTH uint16_t row_element(uint64_t seed, uint64_t row, uint32_t index) {
  uint64_t kind = mix_bits(seed * 31 + row) % 5;
  uint64_t bits = mix_bits(seed + row * 65536 + index + UINT64_C(0x9E3779B97F4A7C15));
  uint16_t sign = (uint16_t)(bits & 0x8000);
  uint64_t number = bits >> 16 & 0xFFFF;
  if (kind == 4 && bits >> 48 < 1000) {
    return (uint16_t)number;
  }
  switch (kind) {
  case 1:
    return (uint16_t)(sign | (0x3000 + number % 0x1400));
  case 2:
    return (uint16_t)(sign | number % 0x7F80);
  case 3:
    return (uint16_t)(sign | ((0x3D00 + number % 0x0400) & 0xFFF0));
  default:
    return (uint16_t)(sign | (0x3D00 + number % 0x0380));
  }
}

/* A permutation of [0, count), count <= 2^32: a Feistel network over the next power of four, walked until inside. */
KVP_BOTH uint64_t permute(uint64_t index, uint64_t count, uint64_t seed) {
  uint32_t half = 1;
  while ((UINT64_C(1) << 2 * half) < count) {
    half++;
  }
  uint64_t mask = (UINT64_C(1) << half) - 1;
  do {
    uint64_t left = index >> half;
    uint64_t right = index & mask;
    for (uint64_t round = 0; round < 4; round++) {
      uint64_t next = left ^ (mix_bits(right + seed * 4 + round + 1) & mask);
      left = right;
      right = next;
    }
    index = left << half | right;
  } while (index >= count);
  return index;
}

/* In device memory, zero before. */
struct device_difference {
  unsigned long long count;   /* 8-byte words, or rows, that differ */
  unsigned long long inverse; /* ~0 - the smallest index of one */
};

/* How the slots of a population are made: number `index` has slot permute(index, slot_count, seed). */
struct device_population {
  uint64_t slot_count; /* a multiple of tokens_per_block */
  uint64_t seed;
  uint32_t tokens_per_block;
};

/* Rows first_row, first_row + 1, ... of a seed. */
void device_rows_make(const struct kvp_rows *rows, uint64_t row_count, uint32_t elements, uint64_t seed,
                      uint64_t first_row, cudaStream_t stream);
/* Slots of numbers first .. first + count, and a segment of one row for each, to output rows 0, 1, ... */
void device_slots_make(const struct device_population *population, uint64_t first, uint64_t count, int32_t *slots,
                       struct kvp_segment *segments, cudaStream_t stream);
/* Whole blocks in another order: the first .. first + count'th of it. */
void device_blocks_make(const struct device_population *population, uint64_t first, uint64_t count,
                        struct kvp_segment *segments, cudaStream_t stream);

/* Base addresses and bytes are multiples of 8. */
void device_bytes_compare(const void *a, const void *b, uint64_t bytes, struct device_difference *difference,
                          cudaStream_t stream);
void device_bytes_expect(const void *bytes, uint8_t fill, uint64_t count, struct device_difference *difference,
                         cudaStream_t stream);

/* Records of slots, data then scales, packed. Word by word: sizes are multiples of 4. */
void device_records_gather(const struct kvp_layer *layer, const int32_t *slots, uint64_t count, uint8_t *records,
                           cudaStream_t stream);

/* Packed records against what a load of an index format gives for them: codes and scales, the latter 4 bytes each. */
void device_index_compare(const uint8_t *records, const uint8_t *codes, const uint8_t *scales, uint64_t count,
                          uint32_t data_bytes, struct device_difference *difference, cudaStream_t stream);

/* Dense rows and their scales (scale_bytes 0: none; else 4). The rows that segments name: written down by slot, or
 * held against what was written down. */
struct device_loaded {
  const uint8_t *rows;
  const uint8_t *scales;
  uint32_t row_bytes;
  uint32_t scale_bytes;
};
void device_hashes_write(const struct device_loaded *loaded, const struct kvp_segment *segments, uint64_t count,
                         uint32_t tokens_per_block, uint64_t *hashes, cudaStream_t stream);
void device_hashes_compare(const struct device_loaded *loaded, const struct kvp_segment *segments, uint64_t count,
                           uint32_t tokens_per_block, const uint64_t *hashes, struct device_difference *difference,
                           cudaStream_t stream);

/* Writes numbers picked from choices into values, again and again, until *stop (host memory) or `rounds`. */
void device_values_rewrite(int32_t *values, uint64_t count, const int32_t *choices, uint32_t choice_count,
                           uint64_t rounds, const volatile int32_t *stop, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
