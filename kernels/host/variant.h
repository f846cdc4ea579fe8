/* The host kernels of one instruction set. store.c, load.c, fused_store.c and
 * index.c are compiled once for each; KVP_HOST_SUFFIX tells the
 * symbols apart.
 */
#ifndef KVPOOL_KERNELS_HOST_VARIANT_H
#define KVPOOL_KERNELS_HOST_VARIANT_H

#include <stddef.h>

#include "kernels/ops.h"

typedef void kvp_host_store_fn(const struct kvp_store_params *params, uint64_t row_begin, uint64_t row_end,
                               struct kvp_op_counts *counts);
typedef void kvp_host_load_fn(const struct kvp_load_params *params, uint64_t segment_begin, uint64_t segment_end,
                              struct kvp_op_counts *counts);
typedef void kvp_host_fused_store_fn(const struct kvp_fused_store_params *params, uint64_t row_begin,
                                     uint64_t row_end, struct kvp_op_counts *counts);

/* Kernels without a format. */
struct kvp_host_index {
  void (*convert)(const struct kvp_convert_index_params *params, uint64_t row_begin, uint64_t row_end,
                  struct kvp_op_counts *counts);
  void (*swa)(const struct kvp_swa_index_params *params, uint64_t row_begin, uint64_t row_end,
              struct kvp_op_counts *counts);
  void (*expand)(const struct kvp_expand_index_params *params, uint64_t row_begin, uint64_t row_end,
                 struct kvp_op_counts *counts);
  void (*cat)(const struct kvp_cat_index_params *params, uint64_t row_begin, uint64_t row_end,
              struct kvp_op_counts *counts);
};

/* The same for every instruction set: rows and blocks as they are. */
struct kvp_host_moves {
  void (*copy_rows)(const struct kvp_copy_rows_params *params, uint64_t row_begin, uint64_t row_end,
                    struct kvp_op_counts *counts);
  void (*copy_blocks)(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                      struct kvp_op_counts *counts);
  void (*zero_blocks)(const struct kvp_blocks_params *params, uint64_t unit_begin, uint64_t unit_end,
                      struct kvp_op_counts *counts);
};

/* Arrays by enum kvp_format_id. */
struct kvp_host_variant {
  const char *isa;
  kvp_host_store_fn *const *store;
  kvp_host_load_fn *const *load;
  kvp_host_fused_store_fn *const *fused_store;
  const struct kvp_host_index *index;
  const struct kvp_host_moves *moves;
  uint32_t fused_elements_max; /* of a row of fused_store */
};

/* What this machine can run, the plainest first; NULL past the last. The kernels of kernels/ops.h use the last. */
const struct kvp_host_variant *kvp_host_variant_get(size_t index);

#define KVP_HOST_CONCAT_(name, suffix) name##suffix
#define KVP_HOST_CONCAT(name, suffix)  KVP_HOST_CONCAT_(name, suffix)
#define KVP_HOST_SYMBOL(name)          KVP_HOST_CONCAT(name, KVP_HOST_SUFFIX)

extern kvp_host_store_fn *const kvp_host_store_baseline[kvp_format_count];
extern kvp_host_load_fn *const kvp_host_load_baseline[kvp_format_count];
extern kvp_host_fused_store_fn *const kvp_host_fused_store_baseline[kvp_format_count];
extern const struct kvp_host_index kvp_host_index_baseline;
extern kvp_host_store_fn *const kvp_host_store_avx2[kvp_format_count];
extern kvp_host_load_fn *const kvp_host_load_avx2[kvp_format_count];
extern kvp_host_fused_store_fn *const kvp_host_fused_store_avx2[kvp_format_count];
extern const struct kvp_host_index kvp_host_index_avx2;

#endif
