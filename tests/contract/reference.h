/* Store and load as FORMATS.md and OPS.md say them, written to be read: numbers as double and ldexp, codes found by
 * trying all of them. Shares nothing with the kernels but the params structs. Test code, any thread after
 * reference_init.
 */
#ifndef KVPOOL_TESTS_CONTRACT_REFERENCE_H
#define KVPOOL_TESTS_CONTRACT_REFERENCE_H

#include <stdint.h>

#include "kernels/ops.h"

void reference_init(void);

/* Code 0 .. 0x7E (e4m3) or 0 .. 7 (e2m1) nearest to a magnitude, ties to the even code, saturating. */
uint8_t reference_e4m3(double magnitude);
uint8_t reference_e2m1(double magnitude);
double reference_e4m3_value(uint8_t code); /* 0 .. 0x7E */
double reference_e2m1_value(uint8_t code); /* 0 .. 7 */
float reference_bf16_value(uint16_t bits);
uint16_t reference_bf16(float value);

/* The whole op, counted like the kernel's. */
void reference_store(const struct kvp_store_params *params, struct kvp_op_counts *counts);
void reference_load(const struct kvp_load_params *params, struct kvp_op_counts *counts);

#endif
