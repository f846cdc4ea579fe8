/* Picks the host kernels of the best instruction set this machine has. No state: any thread. */
#include "kernels/host/variant.h"

#include <assert.h>

#include "proto/limits.h"

static const struct kvp_host_moves moves = {
    .copy_rows = kvp_host_copy_rows, .copy_blocks = kvp_host_copy_blocks, .zero_blocks = kvp_host_zero_blocks};

static const struct kvp_host_variant baseline = {.isa = "baseline",
                                                 .store = kvp_host_store_baseline,
                                                 .load = kvp_host_load_baseline,
                                                 .fused_store = kvp_host_fused_store_baseline,
                                                 .index = &kvp_host_index_baseline,
                                                 .moves = &moves,
                                                 .fused_elements_max = kvp_format_width_max};

#ifdef KVP_HOST_HAVE_AVX2
static const struct kvp_host_variant avx2 = {.isa = "avx2",
                                             .store = kvp_host_store_avx2,
                                             .load = kvp_host_load_avx2,
                                             .fused_store = kvp_host_fused_store_avx2,
                                             .index = &kvp_host_index_avx2,
                                             .moves = &moves,
                                             .fused_elements_max = kvp_format_width_max};

static const struct kvp_host_variant *better(void) {
  return __builtin_cpu_supports("avx2") ? &avx2 : NULL;
}
#else
static const struct kvp_host_variant *better(void) {
  return NULL;
}
#endif

static const struct kvp_host_variant *best(void) {
  const struct kvp_host_variant *variant = better();
  return variant != NULL ? variant : &baseline;
}

const struct kvp_host_variant *kvp_host_variant_get(size_t index) {
  switch (index) {
  case 0:
    return &baseline;
  case 1:
    return better();
  default:
    return NULL;
  }
}

const char *kvp_host_isa(void) {
  return best()->isa;
}

void kvp_host_store(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                    struct kvp_op_counts *counts) {
  assert(row_begin <= row_end && row_end <= params->row_count);
  best()->store[params->layer.geometry->format->id](params, row_begin, row_end, counts);
}

void kvp_host_load(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                   struct kvp_op_counts *counts) {
  assert(segment_begin <= segment_end && segment_end <= params->segment_count);
  best()->load[params->layer.geometry->format->id](params, segment_begin, segment_end, counts);
}

void kvp_host_fused_store(const struct kvp_fused_store_params *params, uint64_t row_begin, uint64_t row_end,
                          struct kvp_op_counts *counts) {
  assert(row_begin <= row_end && row_end <= params->store.row_count);
  const struct kvp_geometry *geometry = params->store.layer.geometry;
  assert((geometry->sizes.elements & (geometry->sizes.elements - 1)) == 0);
  best()->fused_store[geometry->format->id](params, row_begin, row_end, counts);
}

void kvp_host_convert_index(const struct kvp_convert_index_params *params, uint64_t row_begin, uint64_t row_end,
                            struct kvp_op_counts *counts) {
  assert(row_begin <= row_end && row_end <= params->batch * params->queries);
  best()->index->convert(params, row_begin, row_end, counts);
}

void kvp_host_swa_index(const struct kvp_swa_index_params *params, uint64_t row_begin, uint64_t row_end,
                        struct kvp_op_counts *counts) {
  assert(row_begin <= row_end && row_end <= params->queries);
  best()->index->swa(params, row_begin, row_end, counts);
}

void kvp_host_expand_index(const struct kvp_expand_index_params *params, uint64_t row_begin, uint64_t row_end,
                           struct kvp_op_counts *counts) {
  assert(row_begin <= row_end && row_end <= params->row_count);
  best()->index->expand(params, row_begin, row_end, counts);
}

void kvp_host_cat_index(const struct kvp_cat_index_params *params, uint64_t row_begin, uint64_t row_end,
                        struct kvp_op_counts *counts) {
  assert(row_begin <= row_end && row_end <= params->row_count);
  best()->index->cat(params, row_begin, row_end, counts);
}
