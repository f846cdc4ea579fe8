/* Names of CUDA devices: cuda:N, N counting GPUs in the order of their PCI addresses, and cuda:GPU-<uuid>. */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_NAME_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_NAME_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

enum { kvp_cuda_uuid_bytes = 16, kvp_cuda_uuid_text_bytes = sizeof "GPU-00000000-0000-0000-0000-000000000000" };

struct kvp_cuda_name {
  bool by_uuid;
  uint32_t index;
  uint8_t uuid[kvp_cuda_uuid_bytes];
};

/* name: as the user gave it, "cuda:" in front; digits of a UUID in upper or lower case. */
enum kvp_status kvp_cuda_name_parse(const char *name, struct kvp_cuda_name *out, struct kvp_error *error);

/* "GPU-01234567-89ab-cdef-0123-456789abcdef", as nvidia-smi -L has it. */
void kvp_cuda_uuid_format(const uint8_t *uuid, char out[kvp_cuda_uuid_text_bytes]);

#endif
