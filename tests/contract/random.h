/* Random numbers that a seed repeats, for contract tests. One thread. */
#ifndef KVPOOL_TESTS_CONTRACT_RANDOM_H
#define KVPOOL_TESTS_CONTRACT_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

void random_start(uint64_t seed);
uint64_t random_bits(void);            /* 48 of them */
uint32_t random_below(uint32_t limit); /* limit > 0 */
bool random_chance(uint32_t one_in);
int32_t random_hostile(void);        /* an int32 that looks like no index: -1, NaN's bits, the ends, any */
uint16_t random_bf16(uint32_t kind); /* kind < random_bf16_kinds */

enum { random_bf16_special = 3, random_bf16_kinds = 6 };

#endif
