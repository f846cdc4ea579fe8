/* Host store and load against memcpy of the same bytes (read + written) in the same run, on one thread.
 *
 * Rows go to blocks in random order, tokens of a block in a row, as a scheduler hands them out. Prints median and p99
 * of the repeats; a case that needs more than a quarter of the free memory is left out and said so.
 *
 *   bench_host_kernels [format | all] [most rows]
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/host/variant.h"
#include "kernels/ops.h"

enum { tokens_per_block = 64, repeats_max = 1001, repeats_min = 7 };

static const uint64_t case_rows[] = {64, 4096, 65536, 1048576};
static const uint64_t case_budget_ns = UINT64_C(400000000);

struct sample {
  double median_ns;
  double p99_ns;
};

struct bench {
  struct kvp_store_params store;
  struct kvp_load_params load;
  struct kvp_geometry geometry;
  int32_t *slots;
  struct kvp_segment *segments;
  uint8_t *source;
  uint8_t *region;
  uint8_t *out;
  uint8_t *scales;
  uint64_t copy_bytes;
};

static uint64_t now_ns(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

static uint64_t random_next(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static void *allocate(uint64_t bytes) {
  void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == NULL) {
    (void)fprintf(stderr, "out of memory: %llu bytes\n", (unsigned long long)bytes);
    exit(1);
  }
  memset(memory, 0, bytes);
  return memory;
}

/* Sums of uniform numbers: bell-shaped values around 0, as latents are. */
static void fill_rows(uint8_t *rows, uint64_t elements) {
  uint64_t state = 88172645463325252U;
  for (uint64_t i = 0; i < elements; i++) {
    uint64_t bits = random_next(&state);
    float value = 0.0F;
    for (int part = 0; part < 4; part++) {
      value += (float)(int16_t)(bits >> (16 * part)) / 32768.0F;
    }
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    uint16_t bf16 = (uint16_t)(word >> 16);
    memcpy(rows + 2 * i, &bf16, sizeof(bf16));
  }
}

static int compare_doubles(const void *a, const void *b) {
  double left = *(const double *)a;
  double right = *(const double *)b;
  return (left > right) - (left < right);
}

typedef void action_fn(struct bench *bench, const struct kvp_host_variant *variant);

static void do_store(struct bench *bench, const struct kvp_host_variant *variant) {
  struct kvp_op_counts counts = {0};
  variant->store[bench->geometry.format->id](&bench->store, 0, bench->store.row_count, &counts);
}

static void do_load(struct bench *bench, const struct kvp_host_variant *variant) {
  struct kvp_op_counts counts = {0};
  variant->load[bench->geometry.format->id](&bench->load, 0, bench->load.segment_count, &counts);
}

static void do_copy(struct bench *bench, const struct kvp_host_variant *variant) {
  (void)variant;
  memcpy(bench->out, bench->source, bench->copy_bytes);
  __asm__ volatile("" ::: "memory");
}

static struct sample measure(struct bench *bench, const struct kvp_host_variant *variant, action_fn *action) {
  static double times[repeats_max];
  int count = 0;
  action(bench, variant);
  uint64_t deadline = now_ns() + case_budget_ns;
  while (count < repeats_max && (count < repeats_min || now_ns() < deadline)) {
    uint64_t begin = now_ns();
    action(bench, variant);
    times[count++] = (double)(now_ns() - begin);
  }
  qsort(times, (size_t)count, sizeof(times[0]), compare_doubles);
  return (struct sample){.median_ns = times[count / 2], .p99_ns = times[(count - 1) * 99 / 100]};
}

static void bench_init(struct bench *bench, const struct kvp_format *format, uint64_t rows) {
  uint32_t blocks = (uint32_t)(rows / tokens_per_block);
  struct kvp_error error;
  if (kvp_geometry_init(format, 0, tokens_per_block, blocks, 1, &bench->geometry, &error) != KVP_OK) {
    (void)fprintf(stderr, "%s\n", error.text);
    exit(1);
  }
  const struct kvp_format_sizes *sizes = &bench->geometry.sizes;
  bench->slots = allocate(rows * sizeof(int32_t));
  bench->segments = allocate(blocks * sizeof(struct kvp_segment));
  bench->source = allocate(rows * sizes->row_bytes);
  bench->region = allocate(bench->geometry.region_bytes);
  bench->out = allocate(rows * sizes->row_bytes);
  bench->scales = allocate(rows * 4);
  fill_rows(bench->source, rows * sizes->elements);
  uint64_t state = 42;
  for (uint32_t i = 0; i < blocks; i++) {
    bench->segments[i] = (struct kvp_segment){(int32_t)i, 0, tokens_per_block, (int32_t)(i * tokens_per_block)};
    uint32_t other = (uint32_t)(random_next(&state) % (i + 1));
    bench->segments[i].src_block = bench->segments[other].src_block;
    bench->segments[other].src_block = (int32_t)i;
  }
  for (uint64_t i = 0; i < rows; i++) {
    bench->slots[i] =
        bench->segments[i / tokens_per_block].src_block * tokens_per_block + (int)(i % tokens_per_block);
  }
  struct kvp_layer layer = {.base = bench->region, .geometry = &bench->geometry};
  bench->store = (struct kvp_store_params){
      .layer = layer, .source = {bench->source, sizes->row_bytes}, .slots = bench->slots, .row_count = rows};
  bench->load = (struct kvp_load_params){.layer = layer,
                                         .segments = bench->segments,
                                         .segment_count = blocks,
                                         .total_k = rows,
                                         .out = {bench->out, sizes->loaded_row_bytes},
                                         .scales = {bench->scales, sizes->loaded_scale_bytes}};
}

static void bench_deinit(struct bench *bench) {
  free(bench->slots);
  free(bench->segments);
  free(bench->source);
  free(bench->region);
  free(bench->out);
  free(bench->scales);
}

static void report(const struct bench *bench, const char *op, const char *isa, struct sample sample, uint64_t bytes,
                   struct sample copy) {
  printf("%-14s %-6s %-9s %9llu %12.1f %12.1f %8.2f %12.1f %7.2f\n", bench->geometry.format->name, op, isa,
         (unsigned long long)bench->store.row_count, sample.median_ns / 1e3, sample.p99_ns / 1e3,
         (double)bytes / sample.median_ns, copy.median_ns / 1e3, copy.median_ns / sample.median_ns);
}

static void run_case(const struct kvp_format *format, uint64_t rows) {
  struct bench bench = {0};
  struct kvp_format_sizes sizes;
  (void)kvp_format_sizes_init(format, 0, &sizes, NULL);
  uint64_t need = rows * (2 * (uint64_t)sizes.row_bytes + sizes.bytes_per_token + 16);
  if (need > (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 4) {
    printf("%-14s %llu rows left out: %llu bytes\n", format->name, (unsigned long long)rows,
           (unsigned long long)need);
    return;
  }
  bench_init(&bench, format, rows);
  uint64_t store_bytes = rows * ((uint64_t)sizes.row_bytes + sizes.bytes_per_token);
  uint64_t load_bytes = rows * ((uint64_t)sizes.bytes_per_token + sizes.loaded_row_bytes + sizes.loaded_scale_bytes);
  bench.copy_bytes = store_bytes / 2;
  struct sample store_copy = measure(&bench, NULL, do_copy);
  bench.copy_bytes = load_bytes / 2;
  struct sample load_copy = measure(&bench, NULL, do_copy);
  const struct kvp_host_variant *variant;
  for (size_t i = 0; (variant = kvp_host_variant_get(i)) != NULL; i++) {
    report(&bench, "store", variant->isa, measure(&bench, variant, do_store), store_bytes, store_copy);
    report(&bench, "load", variant->isa, measure(&bench, variant, do_load), load_bytes, load_copy);
  }
  bench_deinit(&bench);
}

static void print_hardware(void) {
  char line[256];
  FILE *file = fopen("/proc/cpuinfo", "r");
  while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
    if (strncmp(line, "model name", 10) == 0) {
      printf("%s", line);
      break;
    }
  }
  if (file != NULL) {
    (void)fclose(file);
  }
}

int main(int argc, char **argv) {
  uint64_t rows_max = argc > 2 ? strtoull(argv[2], NULL, 10) : UINT64_MAX;
  print_hardware();
  printf("%-14s %-6s %-9s %9s %12s %12s %8s %12s %7s\n", "format", "op", "isa", "rows", "median_us", "p99_us", "GB/s",
         "memcpy_us", "ratio");
  for (int id = 0; id < kvp_format_count; id++) {
    const struct kvp_format *format = kvp_format_get((enum kvp_format_id)id);
    if (argc > 1 && strcmp(argv[1], "all") != 0 && strcmp(argv[1], format->name) != 0) {
      continue;
    }
    for (size_t i = 0; i < sizeof(case_rows) / sizeof(case_rows[0]); i++) {
      if (case_rows[i] <= rows_max) {
        run_case(format, case_rows[i]);
      }
    }
  }
  return 0;
}
