/* Params of the index, block and fused-store ops over the memory of kernel_bench.h: filled for one shape at a time, as
 * many sets of it as are larger than twice the L2 cache. One thread.
 */
#ifndef KVPOOL_TESTS_BENCH_OPS_CASE_H
#define KVPOOL_TESTS_BENCH_OPS_CASE_H

#include "tests/bench/kernel_bench.h"

enum { ops_case_layers = 61, ops_case_sequences = 256 };

/* Device memory beside the benchmark's own. */
struct ops_memory {
  int32_t *small;     /* valid, pivots, offsets and lengths, pairs, block tables */
  int32_t *positions; /* [kernel_bench_rows_max] */
  uint8_t *cos_sin;
  uint16_t *norm_weight;
  struct kvp_cuda_counts *counts; /* [ops_case_layers] */
};

/* Parts of an assemble. */
struct ops_assembly {
  struct kvp_load_params history;
  struct kvp_copy_rows_params copy; /* of the chunk, or: */
  struct kvp_store_params store;    /* with a copy of its rows */
  struct kvp_load_params compressed;
  bool stores;
  bool keeps; /* the compressed rows are there */
};

struct ops_case {
  struct kernel_case timing; /* set_count and store_bytes are what the clock looks at */
  uint64_t read_bytes;       /* by one launch, metadata apart */
  uint64_t written_bytes;
  struct kvp_fused_store_params fused[kernel_bench_sets_max];
  struct kvp_convert_index_params convert[kernel_bench_sets_max];
  struct kvp_swa_index_params swa[kernel_bench_sets_max];
  struct kvp_expand_index_params expand[kernel_bench_sets_max];
  struct kvp_cat_index_params cat[kernel_bench_sets_max];
  struct kvp_blocks_params blocks[kernel_bench_sets_max];
  struct ops_assembly assembly[kernel_bench_sets_max];
};

/* A decode step: a token of every sequence in every layer. */
struct ops_decode {
  struct kvp_geometry geometry;
  struct kvp_fused_store_params layers[ops_case_layers];
  const struct kvp_fused_store_params *together[ops_case_layers];
  struct kvp_cuda_counts *counts[ops_case_layers];
  uint64_t bytes; /* read and written */
};

void ops_memory_init(const struct kernel_bench *bench, struct ops_memory *memory);
void ops_memory_deinit(struct ops_memory *memory);

/* flags: kvp_fused_flag; cast_back: main caches only. timing has the stores of the same rows. */
void ops_case_fused(const struct kernel_bench *bench, const struct ops_memory *memory,
                    const struct kvp_format *format, uint64_t rows, uint32_t flags, bool cast_back,
                    struct ops_case *out);
void ops_case_convert(const struct kernel_bench *bench, const struct ops_memory *memory, uint64_t queries,
                      uint64_t columns, bool in_place, struct ops_case *out);
void ops_case_swa(const struct kernel_bench *bench, const struct ops_memory *memory, uint64_t queries,
                  uint64_t window, struct ops_case *out);
void ops_case_expand(const struct kernel_bench *bench, const struct ops_memory *memory, uint64_t rows, uint64_t width,
                     struct ops_case *out);
void ops_case_cat(const struct kernel_bench *bench, uint64_t rows, uint64_t left, uint64_t right,
                  struct ops_case *out);
/* copies: pairs of blocks, else zeroed blocks; of a v41 region of ops_case_layers layers. */
void ops_case_blocks(const struct kernel_bench *bench, const struct ops_memory *memory, uint64_t count, bool copies,
                     struct ops_case *out);
/* Prefills of so many sequences: v41, a ring of 4096 tokens, compressed blocks of 16. Records are any bytes. */
void ops_case_assemble(const struct kernel_bench *bench, const struct ops_memory *memory, uint32_t sequences,
                       uint32_t window, bool stores, bool keeps, struct ops_case *out);
void ops_decode_init(const struct kernel_bench *bench, const struct ops_memory *memory, struct ops_decode *out);

#endif
