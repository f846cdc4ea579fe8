/* The memory of one case: which rows go to which records. See kernel_bench.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/kernel_bench.h"

static uint64_t random_next(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static void *host_allocate(uint64_t count, uint64_t bytes) {
  void *memory = calloc(count, bytes);
  if (memory == NULL) {
    (void)fprintf(stderr, "out of memory: %llu elements of %llu bytes\n", (unsigned long long)count,
                  (unsigned long long)bytes);
    exit(1);
  }
  return memory;
}

/* Set s has the blocks order[s * blocks] ...; its last one may be cut short. */
static void fill_metadata(const struct kernel_bench *bench, const struct kernel_case *bench_case, uint32_t blocks) {
  uint32_t sets = bench_case->set_count;
  uint32_t tokens = bench_case->tokens_per_block;
  uint64_t rows = bench_case->rows;
  int32_t *order = host_allocate((uint64_t)sets * blocks, sizeof(int32_t));
  int32_t *slots = host_allocate(sets * rows, sizeof(int32_t));
  struct kvp_segment *segments = host_allocate((uint64_t)sets * blocks, sizeof(struct kvp_segment));
  uint64_t state = 88172645463325252U;
  for (uint32_t i = 0; i < sets * blocks; i++) {
    uint32_t other = (uint32_t)(random_next(&state) % (i + 1));
    order[i] = order[other];
    order[other] = (int32_t)i;
  }
  for (uint32_t i = 0; i < sets * blocks; i++) {
    uint64_t first = (uint64_t)(i % blocks) * tokens;
    uint64_t count = rows - first < tokens ? rows - first : tokens;
    segments[i] = (struct kvp_segment){order[i], 0, (int32_t)count, (int32_t)first};
    for (uint64_t token = 0; token < count; token++) {
      slots[i / blocks * rows + first + token] = order[i] * (int32_t)tokens + (int32_t)token;
    }
  }
  KERNEL_BENCH_CHECK(cudaMemcpy(bench->slots, slots, sets * rows * sizeof(int32_t), cudaMemcpyHostToDevice));
  KERNEL_BENCH_CHECK(cudaMemcpy(bench->segments, segments, (uint64_t)sets * blocks * sizeof(struct kvp_segment),
                                cudaMemcpyHostToDevice));
  free(order);
  free(slots);
  free(segments);
}

static void make_params(const struct kernel_bench *bench, struct kernel_case *bench_case, uint32_t blocks) {
  const struct kvp_format_sizes *sizes = &bench_case->geometry.sizes;
  struct kvp_layer layer = {bench->region, &bench_case->geometry};
  uint64_t rows = bench_case->rows;
  for (uint32_t set = 0; set < bench_case->set_count; set++) {
    uint64_t first = set * rows;
    bench_case->store[set] =
        (struct kvp_store_params){.layer = layer,
                                  .source = {bench->source + first * sizes->row_bytes, sizes->row_bytes},
                                  .slots = bench->slots + first,
                                  .row_count = rows};
    bench_case->load[set] = (struct kvp_load_params){
        .layer = layer,
        .segments = bench->segments + (uint64_t)set * blocks,
        .segment_count = blocks,
        .total_k = rows,
        .out = {bench->out + first * sizes->loaded_row_bytes, sizes->loaded_row_bytes},
        .scales = {bench->scales + first * 4, sizes->loaded_scale_bytes},
        .rows = rows,
        .segment_rows_max = rows < bench_case->tokens_per_block ? rows : bench_case->tokens_per_block};
  }
}

void kernel_case_init(const struct kernel_bench *bench, const struct kvp_format *format, uint64_t rows,
                      uint32_t tokens_per_block, struct kernel_case *out) {
  struct kvp_error error;
  *out = (struct kernel_case){.format = format, .rows = rows, .tokens_per_block = tokens_per_block};
  struct kvp_format_sizes sizes;
  if (kvp_format_sizes_init(format, 0, &sizes, &error) != KVP_OK) {
    (void)fprintf(stderr, "%s\n", error.text);
    exit(1);
  }
  out->store_bytes = rows * ((uint64_t)sizes.row_bytes + sizes.bytes_per_token);
  out->load_bytes = rows * ((uint64_t)sizes.bytes_per_token + sizes.loaded_row_bytes + sizes.loaded_scale_bytes);
  uint64_t least = out->load_bytes < out->store_bytes ? out->load_bytes : out->store_bytes;
  uint64_t sets = 1 + 2 * (uint64_t)bench->device.l2CacheSize / least;
  uint64_t room = kernel_bench_rows_max / rows;
  sets = sets < room ? sets : room;
  out->set_count = (uint32_t)(sets < kernel_bench_sets_max ? sets : kernel_bench_sets_max);
  uint32_t blocks = (uint32_t)((rows + tokens_per_block - 1) / tokens_per_block);
  if (kvp_geometry_init(format, 0, tokens_per_block, out->set_count * blocks, 1, &out->geometry, &error) != KVP_OK) {
    (void)fprintf(stderr, "%s\n", error.text);
    exit(1);
  }
  fill_metadata(bench, out, blocks);
  make_params(bench, out, blocks);
  for (uint32_t set = 0; set < out->set_count; set++) {
    KERNEL_BENCH_CHECK(kernel_action_store(bench, out, set, NULL));
  }
  KERNEL_BENCH_CHECK(cudaStreamSynchronize(bench->stream));
}
