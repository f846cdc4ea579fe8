/* CUDA store and load against cudaMemcpyAsync of the same bytes (read + written), and small launches against a kernel
 * that does nothing; all of it cold and interleaved in one run. See kernel_bench.h. Variants are held against the
 * default kernel's output first; exit 1: one differs.
 *
 *   bench_kernels [--quick] [--format NAME] [--variants] [--counters]
 */
#include <cuda_profiler_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/kernel_bench.h"
#include "tests/bench/kernel_bench_device.h"

static const uint64_t all_rows[] = {1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576};
static const uint64_t quick_rows[] = {256, 65536, 1048576};
static const uint32_t all_blocks[] = {16, 64, 133};
static const uint32_t quick_blocks[] = {64};

enum {
  summary_block = 64,
  summary_rows = 65536,
  small_rows_max = 256,
  floor_rows_max = 4096,
  repeats = 11,
  sync_repeats = 200
};

struct options {
  bool quick;
  bool variants;
  bool counters;
  const char *format;
};

/* What the closing table says about one format and op. */
struct summary {
  double ratio_64k;
  double ratio_1m;
  double over_floor_us; /* the most of 1 .. 256 rows */
  double sync_ratio;    /* likewise */
  bool small;
};

enum { OP_STORE, OP_LOAD, op_count };
static const char *const op_names[op_count] = {"store", "load"};
static struct summary summaries[kvp_format_count][op_count];

static void usage(FILE *to) {
  (void)fprintf(to, "usage: bench_kernels [--quick] [--format NAME] [--variants] [--counters]\n"
                    "  --quick        256, 65536 and 1048576 rows, blocks of 64\n"
                    "  --format NAME  only this record format\n"
                    "  --variants     instead: ways to build the kernels beside each other, best first\n"
                    "  --counters     instead: one launch each of some kernels, for a profiler that waits for it\n");
}

static void note_summary(const struct kernel_case *bench_case, int op, double us, double copy_us, double floor_us) {
  struct summary *summary = &summaries[bench_case->format->id][op];
  if (bench_case->tokens_per_block == summary_block && bench_case->rows == summary_rows) {
    summary->ratio_64k = copy_us / us;
  }
  if (bench_case->tokens_per_block == summary_block && bench_case->rows == kernel_bench_rows_max) {
    summary->ratio_1m = copy_us / us;
  }
  if (bench_case->rows <= small_rows_max && (!summary->small || us - floor_us > summary->over_floor_us)) {
    summary->small = true;
    summary->over_floor_us = us - floor_us;
  }
}

static void run_case(const struct kernel_bench *bench, const struct kvp_format *format, uint64_t rows,
                     uint32_t tokens_per_block) {
  static struct kernel_case bench_case;
  kernel_case_init(bench, format, rows, tokens_per_block, &bench_case);
  bool small = rows <= floor_rows_max;
  struct kernel_action actions[] = {{.launch = kernel_action_store},
                                    {.launch = kernel_action_copy, .context = &bench_case.store_bytes},
                                    {.launch = kernel_action_load},
                                    {.launch = kernel_action_copy, .context = &bench_case.load_bytes},
                                    {.launch = kernel_action_empty}};
  kernel_bench_time(bench, &bench_case, actions, small ? 5 : 4, repeats);
  for (int op = 0; op < op_count; op++) {
    const struct kernel_action *own = op == OP_STORE ? &actions[0] : &actions[2];
    double us = own[0].median_us;
    double copy_us = own[1].median_us;
    uint64_t bytes = op == OP_STORE ? bench_case.store_bytes : bench_case.load_bytes;
    printf("%-14s %-5s %5u %8llu %10.2f %8.1f %10.2f %6.3f", format->name, op_names[op], tokens_per_block,
           (unsigned long long)rows, us, (double)bytes / us / 1e3, copy_us, copy_us / us);
    if (small) {
      printf(" %8.2f %8.2f", actions[4].median_us, us - actions[4].median_us);
    }
    printf("\n");
    note_summary(&bench_case, op, us, copy_us, actions[4].median_us);
  }
}

/* CPU time from launch to end, small sizes. */
static void run_sync_case(const struct kernel_bench *bench, const struct kvp_format *format, uint64_t rows) {
  static struct kernel_case bench_case;
  kernel_case_init(bench, format, rows, summary_block, &bench_case);
  struct kernel_action actions[] = {
      {.launch = kernel_action_store}, {.launch = kernel_action_load}, {.launch = kernel_action_empty}};
  kernel_bench_time_sync(bench, &bench_case, actions, 3, sync_repeats);
  double empty_us = actions[2].median_us;
  printf("%-14s %8llu %10.2f %10.2f %10.2f %8.2f %8.2f\n", format->name, (unsigned long long)rows,
         actions[0].median_us, actions[1].median_us, empty_us, actions[0].median_us / empty_us,
         actions[1].median_us / empty_us);
  for (int op = 0; op < op_count; op++) {
    struct summary *summary = &summaries[format->id][op];
    double ratio = actions[op].median_us / empty_us;
    summary->sync_ratio = ratio > summary->sync_ratio ? ratio : summary->sync_ratio;
  }
}

static bool format_is_wanted(const struct options *options, const struct kvp_format *format) {
  return options->format == NULL || strcmp(options->format, format->name) == 0;
}

static void run_all(const struct kernel_bench *bench, const struct options *options) {
  const uint64_t *rows = options->quick ? quick_rows : all_rows;
  size_t rows_count = options->quick ? sizeof(quick_rows) / sizeof(rows[0]) : sizeof(all_rows) / sizeof(rows[0]);
  const uint32_t *blocks = options->quick ? quick_blocks : all_blocks;
  size_t blocks_count = options->quick ? 1 : sizeof(all_blocks) / sizeof(blocks[0]);
  printf("\nGPU time of one launch\n%-14s %-5s %5s %8s %10s %8s %10s %6s %8s %8s\n", "format", "op", "block", "rows",
         "us", "GB/s", "memcpy_us", "ratio", "empty_us", "above");
  for (int id = 0; id < kvp_format_count; id++) {
    const struct kvp_format *format = kvp_format_get((enum kvp_format_id)id);
    for (size_t b = 0; b < blocks_count && format_is_wanted(options, format); b++) {
      for (size_t r = 0; r < rows_count; r++) {
        run_case(bench, format, rows[r], blocks[b]);
      }
    }
  }
  printf("\nCPU time, launch to synchronised, blocks of %d\n%-14s %8s %10s %10s %10s %8s %8s\n", summary_block,
         "format", "rows", "store_us", "load_us", "empty_us", "store/e", "load/e");
  for (int id = 0; id < kvp_format_count; id++) {
    const struct kvp_format *format = kvp_format_get((enum kvp_format_id)id);
    for (size_t r = 0; r < rows_count && format_is_wanted(options, format); r++) {
      if (rows[r] <= small_rows_max) {
        run_sync_case(bench, format, rows[r]);
      }
    }
  }
}

static void print_summary(const struct options *options) {
  printf(
      "\nblocks of %d: ratio to memcpy (1.000 = as fast); 1 .. %d rows: most GPU time above an empty kernel, most\n"
      "CPU time launch to synchronised over an empty kernel's\n",
      summary_block, small_rows_max);
  printf("%-14s %-5s %9s %9s %9s %9s\n", "format", "op", "64Ki", "1Mi", "above_us", "sync");
  for (int id = 0; id < kvp_format_count; id++) {
    const struct kvp_format *format = kvp_format_get((enum kvp_format_id)id);
    for (int op = 0; op < op_count && format_is_wanted(options, format); op++) {
      const struct summary *summary = &summaries[id][op];
      printf("%-14s %-5s %9.3f %9.3f %9.2f %9.2f\n", format->name, op_names[op], summary->ratio_64k,
             summary->ratio_1m, summary->over_floor_us, summary->sync_ratio);
    }
  }
}

static cudaError_t launch_variant(const struct kernel_bench *bench, const struct kernel_case *bench_case,
                                  uint32_t set, const void *context) {
  const struct kernel_variant *variant = context;
  return variant->store != NULL ? variant->store(&bench_case->store[set], bench->counts, bench->stream)
                                : variant->load(&bench_case->load[set], bench->counts, bench->stream);
}

static int compare_actions(const void *a, const void *b) {
  double left = ((const struct kernel_action *)a)->median_us;
  double right = ((const struct kernel_action *)b)->median_us;
  return (left > right) - (left < right);
}

/* The copy, the default kernel, and every variant that does what that one does; how many. Others count as wrong. */
static uint32_t take_variants(const struct kernel_bench *bench, const struct kernel_case *bench_case, int op,
                              struct kernel_action *actions, uint32_t *wrong) {
  uint32_t count = 0;
  uint64_t expected = 0;
  actions[count++] = (struct kernel_action){
      .launch = kernel_action_copy, .context = op == OP_STORE ? &bench_case->store_bytes : &bench_case->load_bytes};
  actions[count++] = (struct kernel_action){.launch = op == OP_STORE ? kernel_action_store : kernel_action_load};
  (void)kernel_bench_output(bench, bench_case, &actions[1], op == OP_STORE, &expected);
  const struct kernel_variant *variant;
  for (uint32_t i = 0; (variant = kernel_variant_get(i)) != NULL && count < kernel_bench_actions_max; i++) {
    if (variant->format != bench_case->format->id || (variant->store != NULL) != (op == OP_STORE)) {
      continue;
    }
    struct kernel_action action = {.launch = launch_variant, .context = variant};
    uint64_t found = 0;
    if (!kernel_bench_output(bench, bench_case, &action, op == OP_STORE, &found)) {
      continue;
    }
    if (found != expected) {
      printf("WRONG OUTPUT: %s %s: %s\n", bench_case->format->name, op_names[op], variant->text);
      *wrong += 1;
      continue;
    }
    actions[count++] = action;
  }
  return count;
}

/* All variants of one format and op beside each other. */
static void run_variants_of(const struct kernel_bench *bench, const struct kvp_format *format, int op, uint64_t rows,
                            uint32_t *wrong) {
  static struct kernel_case bench_case;
  struct kernel_action actions[kernel_bench_actions_max];
  kernel_case_init(bench, format, rows, summary_block, &bench_case);
  uint32_t count = take_variants(bench, &bench_case, op, actions, wrong);
  kernel_bench_time(bench, &bench_case, actions, count, repeats);
  uint64_t bytes = op == OP_STORE ? bench_case.store_bytes : bench_case.load_bytes;
  double copy_us = actions[0].median_us;
  printf("\n%s %s, %llu rows, blocks of %d: memcpy %.2f us\n", format->name, op_names[op], (unsigned long long)rows,
         summary_block, copy_us);
  qsort(&actions[1], count - 1, sizeof(actions[0]), compare_actions);
  for (uint32_t i = 1; i < count; i++) {
    const struct kernel_variant *variant = actions[i].context;
    printf("%6.3f %9.2f us %8.1f GB/s  %s\n", copy_us / actions[i].median_us, actions[i].median_us,
           (double)bytes / actions[i].median_us / 1e3, variant == NULL ? "the default" : variant->text);
  }
}

/* How many variants are wrong. */
static uint32_t run_variants(const struct kernel_bench *bench, const struct options *options) {
  static const enum kvp_format_id formats[] = {KVP_FORMAT_V41, KVP_FORMAT_V41_FP4, KVP_FORMAT_BF16,
                                               KVP_FORMAT_INDEX_FP4, KVP_FORMAT_INDEX_FP8_F32};
  uint32_t wrong = 0;
  for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
    const struct kvp_format *format = kvp_format_get(formats[i]);
    for (int op = op_count - 1; op >= 0 && format_is_wanted(options, format); op--) {
      run_variants_of(bench, format, op, kernel_bench_rows_max, &wrong);
      run_variants_of(bench, format, op, summary_rows, &wrong);
    }
  }
  return wrong;
}

/* One launch each, in this order and nothing else while the profiler looks. tests/gpu/counters.py reads what it prints. */
static void run_counters(const struct kernel_bench *bench) {
  static const struct {
    enum kvp_format_id format;
    uint32_t tokens_per_block;
    int op;
  } kernels[] = {
      {KVP_FORMAT_V41, 64, OP_LOAD}, {KVP_FORMAT_INDEX_FP4, 16, OP_STORE}, {KVP_FORMAT_INDEX_FP4, 16, OP_LOAD}};
  static struct kernel_case bench_case;
  for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
    const struct kvp_format *format = kvp_format_get(kernels[i].format);
    kernel_case_init(bench, format, kernel_bench_rows_max, kernels[i].tokens_per_block, &bench_case);
    KERNEL_BENCH_CHECK(cudaDeviceSynchronize());
    KERNEL_BENCH_CHECK(cudaProfilerStart());
    KERNEL_BENCH_CHECK(kernels[i].op == OP_STORE ? kernel_action_store(bench, &bench_case, 0, NULL)
                                                 : kernel_action_load(bench, &bench_case, 0, NULL));
    KERNEL_BENCH_CHECK(cudaDeviceSynchronize());
    KERNEL_BENCH_CHECK(cudaProfilerStop());
    (void)fprintf(stderr, "launched: %s %s, blocks of %u, %d rows\n", format->name, op_names[kernels[i].op],
                  kernels[i].tokens_per_block, kernel_bench_rows_max);
  }
}

/* False: not understood. */
static bool parse(int argc, char **argv, struct options *out) {
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--quick") == 0) {
      out->quick = true;
    } else if (strcmp(argv[i], "--variants") == 0) {
      out->variants = true;
    } else if (strcmp(argv[i], "--counters") == 0) {
      out->counters = true;
    } else if (strcmp(argv[i], "--format") == 0 && i + 1 < argc && kvp_format_find(argv[i + 1]) != NULL) {
      out->format = argv[++i];
    } else {
      (void)fprintf(stderr, "bench_kernels: not understood: %s\n", argv[i]);
      return false;
    }
  }
  return true;
}

int main(int argc, char **argv) {
  struct options options = {0};
  if (argc == 2 && strcmp(argv[1], "--help") == 0) {
    usage(stdout);
    return 0;
  }
  if (!parse(argc, argv, &options)) {
    usage(stderr);
    return 2;
  }
  static struct kernel_bench bench;
  (void)setvbuf(stdout, NULL, _IOLBF, 0);
  kernel_bench_init(&bench);
  uint32_t wrong = 0;
  if (options.counters) {
    run_counters(&bench);
  } else if (options.variants) {
    wrong = run_variants(&bench, &options);
  } else {
    run_all(&bench, &options);
    print_summary(&options);
  }
  kernel_bench_deinit(&bench);
  return wrong == 0 ? 0 : 1;
}
