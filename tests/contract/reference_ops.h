/* The ops beside store and load as OPS.md says them, one element at a time, written to be read. A float operation is
 * the double one rounded once, which for these operations is the float32 result by definition; sums are trees by
 * recursion; the record of a transformed row is reference_store's. Shares nothing with the kernels but the params
 * structs. Test code, one thread, after reference_init.
 */
#ifndef KVPOOL_TESTS_CONTRACT_REFERENCE_OPS_H
#define KVPOOL_TESTS_CONTRACT_REFERENCE_OPS_H

#include "kernels/ops.h"

/* The whole op, counted like the kernel's. */
void reference_convert_index(const struct kvp_convert_index_params *params, struct kvp_op_counts *counts);
void reference_swa_index(const struct kvp_swa_index_params *params, struct kvp_op_counts *counts);
void reference_expand_index(const struct kvp_expand_index_params *params, struct kvp_op_counts *counts);
void reference_cat_index(const struct kvp_cat_index_params *params, struct kvp_op_counts *counts);
void reference_fused_store(const struct kvp_fused_store_params *params, struct kvp_op_counts *counts);
void reference_copy_rows(const struct kvp_copy_rows_params *params, struct kvp_op_counts *counts);
void reference_copy_blocks(const struct kvp_blocks_params *params, struct kvp_op_counts *counts);
void reference_zero_blocks(const struct kvp_blocks_params *params, struct kvp_op_counts *counts);

#endif
