/* CUDA index ops, block ops, assembles and fused stores against a cudaMemcpyAsync of the same bytes and a kernel that
 * does nothing, cold and interleaved in one run; fused stores also against the store of the same rows and the unfused
 * chain, assembles against a launch a part; and the fused stores of a decode step. See kernel_bench.h, ops_case.h.
 *
 *   bench_ops_cuda
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "tests/bench/kernel_bench.h"
#include "tests/bench/kernel_bench_device.h"
#include "tests/bench/ops_case.h"

enum { repeats = 11, sync_repeats = 100, sync_rows = 256 };

static struct ops_case ops;

typedef cudaError_t launch_fn(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                              const void *context);

#define OP_ACTION(name, launcher, field)                                                                             \
  static cudaError_t name(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,      \
                          const void *context) {                                                                     \
    (void)bench_case;                                                                                                \
    (void)context;                                                                                                   \
    return launcher(&ops.field[set], bench->counts, bench->stream);                                                  \
  }
OP_ACTION(do_fused, kvp_cuda_fused_store_launch, fused)
OP_ACTION(do_convert, kvp_cuda_convert_index_launch, convert)
OP_ACTION(do_swa, kvp_cuda_swa_index_launch, swa)
OP_ACTION(do_expand, kvp_cuda_expand_index_launch, expand)
OP_ACTION(do_cat, kvp_cuda_cat_index_launch, cat)
OP_ACTION(do_copy_blocks, kvp_cuda_copy_blocks_launch, blocks)
OP_ACTION(do_zero_blocks, kvp_cuda_zero_blocks_launch, blocks)

/* context: how many bytes, a uint64_t. */
static cudaError_t do_memset(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                             const void *context) {
  uint64_t bytes = *(const uint64_t *)context;
  (void)bench_case;
  return cudaMemsetAsync(bench->out + set * ((bytes + 255) / 256 * 256), 1, bytes, bench->stream);
}

/* ---- fused stores ---- */

/* Norm and RoPE to BF16 rows, which are then stored. */
static cudaError_t do_chain(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                            const void *context) {
  struct kvp_store_params store = bench_case->store[set];
  const uint64_t row_bytes = bench_case->geometry.sizes.row_bytes;
  const struct kvp_rows rows = {bench->out + set * store.row_count * row_bytes, row_bytes};
  (void)context;
  store.source = rows;
  cudaError_t error = kernel_bench_norm_rope(&ops.fused[set], &rows, bench->stream);
  return error == cudaSuccess ? kvp_cuda_store_launch(&store, bench->counts, bench->stream) : error;
}

static void run_fused(const struct kernel_bench *bench, const struct ops_memory *memory, enum kvp_format_id id,
                      uint64_t rows, uint32_t flags, bool cast_back) {
  ops_case_fused(bench, memory, kvp_format_get(id), rows, flags, cast_back, &ops);
  uint64_t bytes = ops.read_bytes + ops.written_bytes;
  struct kernel_action actions[] = {{.launch = do_fused},
                                    {.launch = kernel_action_store},
                                    {.launch = kernel_action_copy, .context = &bytes},
                                    {.launch = kernel_action_empty},
                                    {.launch = do_chain}};
  bool with_chain = !cast_back && (flags & KVP_FUSED_HADAMARD) == 0;
  kernel_bench_time(bench, &ops.timing, actions, with_chain ? 5 : 4, repeats);
  printf("%-14s %-9s %-9s %8llu %9.2f %8.1f %9.2f %6.3f %9.2f %9.2f", kvp_format_get(id)->name,
         (flags & KVP_FUSED_HADAMARD) != 0 ? "hadamard"
         : (flags & KVP_FUSED_NEOX) != 0   ? "neox"
                                           : "-",
         cast_back ? "cast-back" : "-", (unsigned long long)rows, actions[0].median_us,
         (double)bytes / actions[0].median_us / 1e3, actions[1].median_us,
         actions[0].median_us / actions[1].median_us, actions[2].median_us, actions[3].median_us);
  if (with_chain) {
    printf(" %9.2f", actions[4].median_us);
  }
  printf("\n");
}

static void run_all_fused(const struct kernel_bench *bench, const struct ops_memory *memory) {
  static const uint64_t rows[] = {1, 64, 256, 4096, 65536, 262144};
  printf("\nfused_store, blocks of 64; the store of the same rows; norm and RoPE as a kernel of their own, then a "
         "store\n%-14s %-9s %-9s %8s %9s %8s %9s %6s %9s %9s %9s\n",
         "format", "with", "", "rows", "us", "GB/s", "store_us", "times", "memcpy_us", "empty_us", "chain_us");
  for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    run_fused(bench, memory, KVP_FORMAT_V41, rows[i], 0, false);
    run_fused(bench, memory, KVP_FORMAT_V41, rows[i], 0, true);
    run_fused(bench, memory, KVP_FORMAT_V41, rows[i], KVP_FUSED_NEOX, false);
    run_fused(bench, memory, KVP_FORMAT_V41, rows[i], KVP_FUSED_HADAMARD, false);
    run_fused(bench, memory, KVP_FORMAT_V41_FP4, rows[i], 0, false);
    run_fused(bench, memory, KVP_FORMAT_INDEX_MXFP8, rows[i], KVP_FUSED_HADAMARD, false);
    run_fused(bench, memory, KVP_FORMAT_INDEX_FP4, rows[i], KVP_FUSED_HADAMARD, false);
    run_fused(bench, memory, KVP_FORMAT_BF16, rows[i], 0, false);
  }
}

/* ---- assemble ---- */

/* All parts at once, and the store, which overwrites what is loaded, behind them. */
static cudaError_t do_assemble(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                               const void *context) {
  const struct ops_assembly *assembly = &ops.assembly[set];
  const struct kvp_cuda_assembly parts = {
      .loads = {&assembly->history, assembly->keeps ? NULL : &assembly->compressed},
      .load_counts = {bench->counts, bench->counts},
      .copy = assembly->stores ? NULL : &assembly->copy,
      .copy_counts = bench->counts};
  (void)bench_case;
  (void)context;
  cudaError_t error = kvp_cuda_assemble_launch(&parts, bench->stream);
  return error == cudaSuccess && assembly->stores
             ? kvp_cuda_store_launch(&assembly->store, bench->counts, bench->stream)
             : error;
}

/* One launch a part. */
static cudaError_t do_parts(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                            const void *context) {
  const struct ops_assembly *assembly = &ops.assembly[set];
  (void)bench_case;
  (void)context;
  cudaError_t error = kvp_cuda_load_launch(&assembly->history, bench->counts, bench->stream);
  if (error == cudaSuccess && !assembly->keeps) {
    error = kvp_cuda_load_launch(&assembly->compressed, bench->counts, bench->stream);
  }
  if (error != cudaSuccess) {
    return error;
  }
  return assembly->stores ? kvp_cuda_store_launch(&assembly->store, bench->counts, bench->stream)
                          : kvp_cuda_copy_rows_launch(&assembly->copy, bench->counts, bench->stream);
}

static void run_assemble(const struct kernel_bench *bench, const struct ops_memory *memory, uint32_t sequences,
                         uint32_t window, bool stores, bool keeps) {
  ops_case_assemble(bench, memory, sequences, window, stores, keeps, &ops);
  uint64_t bytes = ops.read_bytes + ops.written_bytes;
  struct kernel_action actions[] = {{.launch = do_assemble},
                                    {.launch = do_parts},
                                    {.launch = kernel_action_copy, .context = &bytes},
                                    {.launch = kernel_action_empty}};
  kernel_bench_time(bench, &ops.timing, actions, 4, repeats);
  printf("%9u %7u %-6s %-6s %9.2f %9.2f %8.1f %9.2f %9.2f %6.3f %9.2f\n", sequences, window, stores ? "stored" : "-",
         keeps ? "kept" : "-", (double)bytes / 1e6, actions[0].median_us, (double)bytes / actions[0].median_us / 1e3,
         actions[1].median_us, actions[2].median_us, actions[2].median_us / actions[0].median_us,
         actions[3].median_us);
}

static void run_all_assembles(const struct kernel_bench *bench, const struct ops_memory *memory) {
  printf("\nassemble, v41: a window of history, 1024 new rows, 2500 compressed rows a sequence\n%9s %7s %-6s %-6s "
         "%9s %9s "
         "%8s %9s %9s %6s %9s\n",
         "sequences", "window", "chunk", "part 3", "MB", "us", "GB/s", "parts_us", "memcpy_us", "ratio", "empty_us");
  for (uint32_t sequences = 1; sequences <= 8; sequences *= 8) {
    for (int way = 0; way < 4; way++) {
      run_assemble(bench, memory, sequences, 4096, way % 2 != 0, way >= 2);
    }
    run_assemble(bench, memory, sequences, 128, true, false);
  }
}

/* ---- index and block ops ---- */

/* The case is in `ops`. A copy moves what the op reads and writes; one that only writes is held against a memset, too. */
static void run_op(const struct kernel_bench *bench, const char *name, uint64_t rows, uint64_t columns,
                   launch_fn *launch) {
  uint64_t copied = 2 * ops.written_bytes;
  uint64_t set = ops.written_bytes;
  struct kernel_action actions[] = {{.launch = launch},
                                    {.launch = kernel_action_copy, .context = &copied},
                                    {.launch = kernel_action_empty},
                                    {.launch = do_memset, .context = &set}};
  kernel_bench_time(bench, &ops.timing, actions, 4, repeats);
  double us = actions[0].median_us;
  printf("%-22s %7llu %7llu %9.2f %8.1f %9.2f %6.3f %9.2f %9.2f %8.2f\n", name, (unsigned long long)rows,
         (unsigned long long)columns, us, (double)(ops.read_bytes + ops.written_bytes) / us / 1e3,
         actions[1].median_us, actions[1].median_us / us, actions[3].median_us, actions[2].median_us,
         us - actions[2].median_us);
}

static void run_index_ops(const struct kernel_bench *bench, const struct ops_memory *memory) {
  static const uint64_t queries[] = {1, 64, 512};
  printf("\nindex and block ops; a copy of the output\n%-22s %7s %7s %9s %8s %9s %6s %9s %9s %8s\n", "op", "rows",
         "columns", "us", "GB/s", "memcpy_us", "ratio", "memset_us", "empty_us", "above");
  for (size_t i = 0; i < sizeof(queries) / sizeof(queries[0]); i++) {
    ops_case_convert(bench, memory, queries[i], 2048, false, &ops);
    run_op(bench, "convert_kv_index", queries[i], 2048, do_convert);
    ops_case_convert(bench, memory, queries[i], 2048, true, &ops);
    run_op(bench, "convert_kv_index same", queries[i], 2048, do_convert);
  }
  ops_case_swa(bench, memory, 256, 4096, &ops);
  run_op(bench, "swa_index_decode", 256, 4096, do_swa);
  ops_case_swa(bench, memory, 1024, 4096, &ops);
  run_op(bench, "swa_index_decode", 1024, 4096, do_swa);
  ops_case_expand(bench, memory, 1024, 4096, &ops);
  run_op(bench, "expand_swa_index", 1024, 4096, do_expand);
  ops_case_cat(bench, 1024, 128, 64, &ops);
  run_op(bench, "kv_index_cat 128|64", 1024, 192, do_cat);
  ops_case_cat(bench, 1024, 4096, 2048, &ops);
  run_op(bench, "kv_index_cat 4096|2048", 1024, 6144, do_cat);
  ops_case_cat(bench, 1024, 4095, 2047, &ops);
  run_op(bench, "kv_index_cat 4095|2047", 1024, 6142, do_cat);
}

static void run_block_ops(const struct kernel_bench *bench, const struct ops_memory *memory) {
  static const uint64_t counts[] = {1, 16, 64};
  for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
    ops_case_blocks(bench, memory, counts[i], true, &ops);
    run_op(bench, "copy_blocks v41 x 61", counts[i], 64, do_copy_blocks);
    ops_case_blocks(bench, memory, counts[i], false, &ops);
    run_op(bench, "zero_blocks v41 x 61", counts[i], 64, do_zero_blocks);
  }
}

/* ---- a decode step ---- */

static struct ops_decode decode;

static cudaError_t do_layers(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                             const void *context) {
  cudaError_t error = cudaSuccess;
  (void)bench_case;
  (void)set;
  (void)context;
  for (uint32_t layer = 0; layer < ops_case_layers && error == cudaSuccess; layer++) {
    error = kvp_cuda_fused_store_launch(&decode.layers[layer], decode.counts[layer], bench->stream);
  }
  return error;
}

static cudaError_t do_stores(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                             const void *context) {
  cudaError_t error = cudaSuccess;
  (void)bench_case;
  (void)set;
  (void)context;
  for (uint32_t layer = 0; layer < ops_case_layers && error == cudaSuccess; layer++) {
    error = kvp_cuda_store_launch(&decode.layers[layer].store, decode.counts[layer], bench->stream);
  }
  return error;
}

static cudaError_t do_together(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                               const void *context) {
  (void)bench_case;
  (void)set;
  (void)context;
  return kvp_cuda_fused_stores_launch(decode.together, decode.counts, ops_case_layers, bench->stream);
}

static cudaError_t do_nothing(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t set,
                              const void *context) {
  cudaError_t error = cudaSuccess;
  (void)bench_case;
  (void)set;
  (void)context;
  for (uint32_t layer = 0; layer < ops_case_layers && error == cudaSuccess; layer++) {
    error = kvp_cuda_empty_launch(NULL, bench->stream);
  }
  return error;
}

static void run_decode(const struct kernel_bench *bench, const struct ops_memory *memory) {
  ops_decode_init(bench, memory, &decode);
  struct kernel_action actions[] = {{.launch = do_layers},
                                    {.launch = do_together},
                                    {.launch = do_stores},
                                    {.launch = do_nothing},
                                    {.launch = kernel_action_copy, .context = &decode.bytes}};
  static const char *const names[] = {"fused_store, 61 launches", "fused_stores, 1 launch", "store, 61 launches",
                                      "nothing, 61 launches", "memcpy of the bytes"};
  const uint32_t count = sizeof(actions) / sizeof(actions[0]);
  struct kernel_case timing = {.set_count = 1};
  printf("\ndecode step, %d sequences x %d layers, v41, %.2f MB read and written\n%-26s %10s %10s\n",
         ops_case_sequences, ops_case_layers, (double)decode.bytes / 1e6, "", "gpu_us", "cpu_us");
  kernel_bench_time(bench, &timing, actions, count, repeats);
  double gpu_us[sizeof(actions) / sizeof(actions[0])];
  for (uint32_t i = 0; i < count; i++) {
    gpu_us[i] = actions[i].median_us;
  }
  kernel_bench_time_sync(bench, &timing, actions, count, sync_repeats);
  for (uint32_t i = 0; i < count; i++) {
    printf("%-26s %10.2f %10.2f\n", names[i], gpu_us[i], actions[i].median_us);
  }
}

int main(void) {
  static struct kernel_bench bench;
  static struct ops_memory memory;
  (void)setvbuf(stdout, NULL, _IOLBF, 0);
  kernel_bench_init(&bench);
  ops_memory_init(&bench, &memory);
  run_decode(&bench, &memory);
  run_index_ops(&bench, &memory);
  run_block_ops(&bench, &memory);
  run_all_assembles(&bench, &memory);
  run_all_fused(&bench, &memory);
  ops_memory_deinit(&memory);
  kernel_bench_deinit(&bench);
  return 0;
}
