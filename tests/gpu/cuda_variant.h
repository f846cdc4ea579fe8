/* Parts of the variant that cuda_variant.c puts together. */
#ifndef KVPOOL_TESTS_GPU_CUDA_VARIANT_H
#define KVPOOL_TESTS_GPU_CUDA_VARIANT_H

#include "kernels/host/variant.h"

extern const struct kvp_host_index cuda_variant_index;

#endif
