/* BF16, float16 and float32: the conversions that files need. Round to nearest even. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_NUMBER_FORMAT_H
#define KVPOOL_CLIENT_KVPOOLCTL_NUMBER_FORMAT_H

#include <stdint.h>

uint16_t kvp_ctl_bf16_from_float(float value);
float kvp_ctl_bf16_to_float(uint16_t bits);
uint16_t kvp_ctl_half_from_float(float value);
float kvp_ctl_half_to_float(uint16_t bits);

#endif
