/* See ops_case.h. */
#include "tests/bench/ops_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/kernel_bench_device.h"

enum {
  rotary_dims = 64,
  position_count = 4096,
  table_columns = 1024,
  compressed_tokens = 16,
  ring_tokens = 4096,
  main_tokens = 64,
  small_count = 1 << 20,
  elements_max = 512,
};

static uint64_t random_next(void) {
  static uint64_t state = 88172645463325252U;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static void *host_memory(uint64_t bytes) {
  void *memory = calloc(1, bytes);
  if (memory == NULL) {
    (void)fprintf(stderr, "out of memory: %llu bytes\n", (unsigned long long)bytes);
    exit(1);
  }
  return memory;
}

static void geometry_init(const struct kvp_format *format, uint32_t tokens, uint32_t blocks, uint32_t layers,
                          struct kvp_geometry *out) {
  struct kvp_error error;
  if (kvp_geometry_init(format, 0, tokens, blocks, layers, out, &error) != KVP_OK) {
    (void)fprintf(stderr, "%s\n", error.text);
    exit(1);
  }
}

/* count numbers below limit, to the device. */
static void put_random(int32_t *to, uint64_t count, uint64_t limit) {
  int32_t *numbers = host_memory(count * sizeof(*numbers));
  for (uint64_t i = 0; i < count; i++) {
    numbers[i] = (int32_t)(random_next() % limit);
  }
  KERNEL_BENCH_CHECK(cudaMemcpy(to, numbers, count * sizeof(*numbers), cudaMemcpyHostToDevice));
  free(numbers);
}

/* Groups of numbers, over and over. */
static void put_groups(int32_t *to, uint64_t groups, const int32_t *group, uint64_t group_count) {
  int32_t *numbers = host_memory(groups * group_count * sizeof(*numbers));
  for (uint64_t i = 0; i < groups; i++) {
    memcpy(numbers + i * group_count, group, group_count * sizeof(*numbers));
  }
  KERNEL_BENCH_CHECK(cudaMemcpy(to, numbers, groups * group_count * sizeof(*numbers), cudaMemcpyHostToDevice));
  free(numbers);
}

void ops_memory_init(const struct kernel_bench *bench, struct ops_memory *memory) {
  KERNEL_BENCH_CHECK(cudaMalloc((void **)&memory->small, small_count * sizeof(int32_t)));
  KERNEL_BENCH_CHECK(cudaMalloc((void **)&memory->positions, kernel_bench_rows_max * sizeof(int32_t)));
  KERNEL_BENCH_CHECK(cudaMalloc((void **)&memory->cos_sin, (uint64_t)position_count * rotary_dims * sizeof(float)));
  KERNEL_BENCH_CHECK(cudaMalloc((void **)&memory->norm_weight, elements_max * sizeof(uint16_t)));
  KERNEL_BENCH_CHECK(cudaMalloc((void **)&memory->counts, ops_case_layers * sizeof(struct kvp_cuda_counts)));
  KERNEL_BENCH_CHECK(cudaMemset(memory->counts, 0, ops_case_layers * sizeof(struct kvp_cuda_counts)));
  KERNEL_BENCH_CHECK(
      cudaMemcpy(memory->norm_weight, bench->source, elements_max * sizeof(uint16_t), cudaMemcpyDeviceToDevice));
  put_random(memory->positions, kernel_bench_rows_max, position_count);
  float *angles = host_memory((uint64_t)position_count * rotary_dims * sizeof(float));
  for (uint32_t position = 0; position < position_count; position++) {
    for (uint32_t i = 0; i < rotary_dims / 2; i++) {
      double angle = position * pow(10000.0, -2.0 * i / rotary_dims);
      angles[position * rotary_dims + i] = (float)cos(angle);
      angles[position * rotary_dims + rotary_dims / 2 + i] = (float)sin(angle);
    }
  }
  KERNEL_BENCH_CHECK(cudaMemcpy(memory->cos_sin, angles, (uint64_t)position_count * rotary_dims * sizeof(float),
                                cudaMemcpyHostToDevice));
  free(angles);
}

void ops_memory_deinit(struct ops_memory *memory) {
  KERNEL_BENCH_CHECK(cudaFree(memory->small));
  KERNEL_BENCH_CHECK(cudaFree(memory->positions));
  KERNEL_BENCH_CHECK(cudaFree(memory->cos_sin));
  KERNEL_BENCH_CHECK(cudaFree(memory->norm_weight));
  KERNEL_BENCH_CHECK(cudaFree(memory->counts));
}

static struct kvp_fused_store_params fused_params(const struct ops_memory *memory,
                                                  const struct kvp_store_params *store, uint64_t first_row,
                                                  uint32_t flags) {
  return (struct kvp_fused_store_params){
      .store = *store,
      .norm_weight = memory->norm_weight,
      .positions = memory->positions + first_row,
      .cos_sin = {memory->cos_sin, rotary_dims * sizeof(float)},
      .position_count = position_count,
      .rotary_dims = rotary_dims,
      .rope_offset = store->layer.geometry->sizes.elements - rotary_dims,
      .eps = 1e-6F,
      .flags = flags | KVP_FUSED_ROUND_TO_BF16,
      .positions_checked = true,
  };
}

void ops_case_fused(const struct kernel_bench *bench, const struct ops_memory *memory,
                    const struct kvp_format *format, uint64_t rows, uint32_t flags, bool cast_back,
                    struct ops_case *out) {
  kernel_case_init(bench, format, rows, main_tokens, &out->timing);
  const struct kvp_format_sizes *sizes = &out->timing.geometry.sizes;
  for (uint32_t set = 0; set < out->timing.set_count; set++) {
    struct kvp_store_params *store = &out->timing.store[set];
    if (cast_back) {
      store->cast_back = (struct kvp_rows){bench->out + set * rows * sizes->row_bytes, sizes->row_bytes};
    }
    out->fused[set] = fused_params(memory, store, set * rows, flags);
  }
  out->read_bytes = rows * sizes->row_bytes;
  out->written_bytes = rows * ((uint64_t)sizes->bytes_per_token + (cast_back ? sizes->row_bytes : 0));
}

/* Sets so many that they don't fit the cache, of matrices that begin at multiples of 256. */
static void sets_init(const struct kernel_bench *bench, uint64_t read_bytes, uint64_t written_bytes,
                      struct ops_case *out) {
  uint64_t bytes = read_bytes + written_bytes;
  uint64_t sets = 1 + 2 * (uint64_t)bench->device.l2CacheSize / bytes;
  out->read_bytes = read_bytes;
  out->written_bytes = written_bytes;
  out->timing.set_count = (uint32_t)(sets < kernel_bench_sets_max ? sets : kernel_bench_sets_max);
  out->timing.store_bytes = bytes;
}

static struct kvp_rows matrix(uint8_t *base, uint32_t set, uint64_t rows, uint64_t columns) {
  uint64_t bytes = (rows * columns * sizeof(int32_t) + 255) / 256 * 256;
  return (struct kvp_rows){base + set * bytes, columns * sizeof(int32_t)};
}

/* A sequence for every query. Top-k lists in bench->region, tables in memory->small behind the valid counts. */
void ops_case_convert(const struct kernel_bench *bench, const struct ops_memory *memory, uint64_t queries,
                      uint64_t columns, bool in_place, struct ops_case *out) {
  uint64_t bytes = queries * columns * sizeof(int32_t);
  const int32_t all = (int32_t)columns;
  sets_init(bench, bytes, bytes, out);
  int32_t *tables = memory->small + queries;
  put_groups(memory->small, queries, &all, 1);
  put_random(tables, queries * table_columns, table_columns);
  for (uint32_t set = 0; set < out->timing.set_count; set++) {
    struct kvp_rows topk = matrix(bench->region, set, queries, columns);
    put_random((int32_t *)(void *)topk.base, queries * columns, (uint64_t)table_columns * compressed_tokens);
    out->convert[set] =
        (struct kvp_convert_index_params){.topk = topk,
                                          .out = in_place ? topk : matrix(bench->out, set, queries, columns),
                                          .tables = {(uint8_t *)tables, table_columns * sizeof(int32_t)},
                                          .valid = memory->small,
                                          .batch = queries,
                                          .queries = 1,
                                          .columns = columns,
                                          .table_columns = table_columns,
                                          .tokens_per_block = compressed_tokens,
                                          .num_blocks = table_columns};
  }
}

void ops_case_swa(const struct kernel_bench *bench, const struct ops_memory *memory, uint64_t queries,
                  uint64_t window, struct ops_case *out) {
  const int32_t wrapped[] = {3 * ring_tokens + 1809, (int32_t)window};
  sets_init(bench, 0, queries * window * sizeof(int32_t), out);
  put_groups(memory->small, queries, wrapped, 2);
  for (uint32_t set = 0; set < out->timing.set_count; set++) {
    out->swa[set] = (struct kvp_swa_index_params){.offset_len = memory->small,
                                                  .out = matrix(bench->out, set, queries, window),
                                                  .queries = queries,
                                                  .window = window,
                                                  .ring_tokens = ring_tokens,
                                                  .num_blocks = 16};
  }
}

void ops_case_expand(const struct kernel_bench *bench, const struct ops_memory *memory, uint64_t rows, uint64_t width,
                     struct ops_case *out) {
  const int32_t pivots[] = {1024, (int32_t)(width - width / 4), ring_tokens, (int32_t)(width / 4)};
  sets_init(bench, 0, rows * width * sizeof(int32_t), out);
  put_groups(memory->small, rows, pivots, 4);
  for (uint32_t set = 0; set < out->timing.set_count; set++) {
    out->expand[set] = (struct kvp_expand_index_params){
        .pivots = memory->small, .out = matrix(bench->out, set, rows, width), .row_count = rows, .width = width};
  }
}

void ops_case_cat(const struct kernel_bench *bench, uint64_t rows, uint64_t left, uint64_t right,
                  struct ops_case *out) {
  uint64_t bytes = rows * (left + right) * sizeof(int32_t);
  sets_init(bench, bytes, bytes, out);
  for (uint32_t set = 0; set < out->timing.set_count; set++) {
    struct kvp_rows both = matrix(bench->region, set, rows, left + right);
    struct kvp_cat_index_params cat = {.left = {both.base, left * sizeof(int32_t)},
                                       .right = {both.base + rows * left * sizeof(int32_t), right * sizeof(int32_t)},
                                       .out = matrix(bench->out, set, rows, left + right),
                                       .row_count = rows,
                                       .left_columns = left,
                                       .right_columns = right,
                                       .base = 5120};
    put_random((int32_t *)(void *)both.base, rows * (left + right), 1 << 20);
    out->cat[set] = cat;
  }
}

/* The first half of the blocks to the second, in random order. */
void ops_case_blocks(const struct kernel_bench *bench, const struct ops_memory *memory, uint64_t count, bool copies,
                     struct ops_case *out) {
  const uint64_t unit_bytes = count * ops_case_layers;
  uint32_t blocks = 0;
  struct kvp_geometry *geometry = &out->timing.geometry;
  geometry_init(kvp_format_get(KVP_FORMAT_V41), main_tokens, 1, 1, geometry);
  uint64_t bytes = unit_bytes * geometry->block_stride_bytes;
  sets_init(bench, copies ? bytes : 0, bytes, out);
  uint64_t room = (uint64_t)kernel_bench_rows_max * 1024 / ops_case_layers / geometry->block_stride_bytes;
  uint64_t sets = room / (2 * count);
  out->timing.set_count = (uint32_t)(out->timing.set_count < sets ? out->timing.set_count : sets);
  blocks = (uint32_t)(2 * count * out->timing.set_count);
  geometry_init(kvp_format_get(KVP_FORMAT_V41), main_tokens, blocks, ops_case_layers, geometry);
  int32_t *pairs = host_memory(blocks * sizeof(*pairs));
  for (uint32_t i = 0; i < blocks; i++) {
    uint32_t other = (uint32_t)(random_next() % (i + 1));
    pairs[i] = pairs[other];
    pairs[other] = (int32_t)i;
  }
  KERNEL_BENCH_CHECK(cudaMemcpy(memory->small, pairs, blocks * sizeof(*pairs), cudaMemcpyHostToDevice));
  free(pairs);
  for (uint32_t set = 0; set < out->timing.set_count; set++) {
    out->blocks[set] = (struct kvp_blocks_params){.base = bench->region,
                                                  .geometry = geometry,
                                                  .pairs = memory->small + 2 * count * (uint64_t)set,
                                                  .count = count};
  }
}

/* ---- assemble ---- */

enum { chunk_tokens = 1024, history_begin = 784, compressed_rows = 2500 };

/* What sequences of all sets have: records in bench->region, rings before compressed blocks; arrays in memory->small. */
struct prefill {
  uint64_t sequences; /* of a set */
  uint64_t window;
  uint64_t history_segments; /* of a sequence */
  uint64_t compressed_segments;
  struct kvp_geometry ring;
  struct kvp_geometry compressed;
  int32_t *arrays; /* of a set: history, compressed, slots */
  uint64_t arrays_count;
};

static uint64_t prefill_segments(struct kvp_segment *to, uint64_t block, uint64_t window, uint64_t dst) {
  const uint64_t first = ring_tokens - history_begin < window ? ring_tokens - history_begin : window;
  to[0] = (struct kvp_segment){(int32_t)block, history_begin, (int32_t)(history_begin + first), (int32_t)dst};
  if (first == window) {
    return 1;
  }
  to[1] = (struct kvp_segment){(int32_t)block, 0, (int32_t)(window - first), (int32_t)(dst + first)};
  return 2;
}

/* The arrays of one set. order: of all compressed blocks. */
static void prefill_fill(const struct prefill *prefill, uint32_t set, const uint32_t *order) {
  int32_t *arrays = host_memory(prefill->arrays_count * sizeof(*arrays));
  struct kvp_segment *history = (void *)arrays;
  struct kvp_segment *compressed = history + prefill->sequences * prefill->history_segments;
  int32_t *slots = (int32_t *)(void *)(compressed + prefill->sequences * prefill->compressed_segments);
  for (uint64_t i = 0; i < prefill->sequences; i++) {
    const uint64_t block = set * prefill->sequences + i;
    history += prefill_segments(history, block, prefill->window, i * prefill->window);
    for (uint64_t k = 0; k < prefill->compressed_segments; k++) {
      const uint64_t begin = k * compressed_tokens;
      const uint64_t end = begin + compressed_tokens < compressed_rows ? begin + compressed_tokens : compressed_rows;
      *compressed++ = (struct kvp_segment){(int32_t)order[block * prefill->compressed_segments + k], 0,
                                           (int32_t)(end - begin), (int32_t)(i * compressed_rows + begin)};
    }
    for (uint32_t k = 0; k < chunk_tokens; k++) {
      *slots++ = (int32_t)(block * ring_tokens + (history_begin + k) % ring_tokens);
    }
  }
  KERNEL_BENCH_CHECK(cudaMemcpy(prefill->arrays + set * prefill->arrays_count, arrays,
                                prefill->arrays_count * sizeof(*arrays), cudaMemcpyHostToDevice));
  free(arrays);
}

static struct ops_assembly prefill_assembly(const struct kernel_bench *bench, const struct prefill *prefill,
                                            uint32_t set) {
  const uint32_t row_bytes = prefill->ring.sizes.row_bytes;
  const uint64_t history_rows = prefill->sequences * prefill->window;
  const uint64_t chunk_rows = prefill->sequences * chunk_tokens;
  const uint64_t part_3_rows = prefill->sequences * compressed_rows;
  uint8_t *out = bench->out + set * (history_rows + chunk_rows + part_3_rows) * row_bytes;
  const struct kvp_rows chunk = {out + history_rows * row_bytes, row_bytes};
  const struct kvp_rows source = {bench->source + set * chunk_rows * row_bytes, row_bytes};
  const struct kvp_segment *history = (const void *)(prefill->arrays + set * prefill->arrays_count);
  const struct kvp_segment *compressed = history + prefill->sequences * prefill->history_segments;
  const uint64_t compressed_count = prefill->sequences * prefill->compressed_segments;
  return (struct ops_assembly){
      .history = {.layer = {bench->region, &prefill->ring},
                  .segments = history,
                  .segment_count = prefill->sequences * prefill->history_segments,
                  .total_k = history_rows,
                  .out = {out, row_bytes},
                  .rows = history_rows,
                  .segment_rows_max = prefill->window},
      .copy = {.source = source, .out = chunk, .row_count = chunk_rows, .row_bytes = row_bytes},
      .store = {.layer = {bench->region, &prefill->ring},
                .source = source,
                .slots = (const int32_t *)(const void *)(compressed + compressed_count),
                .row_count = chunk_rows,
                .cast_back = chunk,
                .back_is_copy = true},
      .compressed = {.layer = {bench->region + prefill->ring.region_bytes, &prefill->compressed},
                     .segments = compressed,
                     .segment_count = compressed_count,
                     .total_k = part_3_rows,
                     .out = {chunk.base + chunk_rows * row_bytes, row_bytes},
                     .rows = part_3_rows,
                     .segment_rows_max = compressed_tokens}};
}

static uint32_t *prefill_order(uint32_t blocks) {
  uint32_t *order = host_memory(blocks * sizeof(*order));
  for (uint32_t i = 0; i < blocks; i++) {
    const uint32_t other = (uint32_t)(random_next() % (i + 1));
    order[i] = order[other];
    order[other] = i;
  }
  return order;
}

void ops_case_assemble(const struct kernel_bench *bench, const struct ops_memory *memory, uint32_t sequences,
                       uint32_t window, bool stores, bool keeps, struct ops_case *out) {
  static struct prefill prefill; /* its geometries stay */
  const struct kvp_format *format = kvp_format_get(KVP_FORMAT_V41);
  prefill = (struct prefill){.sequences = sequences,
                             .window = window,
                             .history_segments = ring_tokens - history_begin < window ? 2 : 1,
                             .compressed_segments = (compressed_rows + compressed_tokens - 1) / compressed_tokens,
                             .arrays = memory->small};
  prefill.arrays_count =
      (uint64_t)sequences * (4 * (prefill.history_segments + prefill.compressed_segments) + chunk_tokens);
  geometry_init(format, ring_tokens, 1, 1, &prefill.ring);
  const uint64_t record_bytes = prefill.ring.sizes.bytes_per_token;
  const uint64_t row_bytes = prefill.ring.sizes.row_bytes;
  const uint64_t part_3_rows = keeps ? 0 : compressed_rows;
  sets_init(bench, sequences * ((window + part_3_rows) * record_bytes + chunk_tokens * row_bytes),
            sequences *
                ((window + chunk_tokens + part_3_rows) * row_bytes + (stores ? chunk_tokens * record_bytes : 0)),
            out);
  const uint32_t sets = out->timing.set_count;
  const uint32_t blocks = (uint32_t)((uint64_t)sets * sequences * prefill.compressed_segments);
  geometry_init(format, ring_tokens, sets * sequences, 1, &prefill.ring);
  geometry_init(format, compressed_tokens, blocks, 1, &prefill.compressed);
  uint32_t *order = prefill_order(blocks);
  for (uint32_t set = 0; set < sets; set++) {
    prefill_fill(&prefill, set, order);
    out->assembly[set] = prefill_assembly(bench, &prefill, set);
    out->assembly[set].stores = stores;
    out->assembly[set].keeps = keeps;
  }
  free(order);
  KERNEL_BENCH_CHECK(kernel_bench_fill_rows(
      bench->region, (prefill.ring.region_bytes + prefill.compressed.region_bytes) / 2, bench->stream));
  KERNEL_BENCH_CHECK(cudaStreamSynchronize(bench->stream));
}

void ops_decode_init(const struct kernel_bench *bench, const struct ops_memory *memory, struct ops_decode *out) {
  geometry_init(kvp_format_get(KVP_FORMAT_V41), main_tokens, ops_case_sequences, ops_case_layers, &out->geometry);
  int32_t slots[ops_case_sequences];
  for (uint32_t i = 0; i < ops_case_sequences; i++) { /* each sequence has a block */
    slots[i] = (int32_t)((uint64_t)i * main_tokens + random_next() % main_tokens);
  }
  KERNEL_BENCH_CHECK(cudaMemcpy(memory->small, slots, sizeof(slots), cudaMemcpyHostToDevice));
  const uint32_t row_bytes = out->geometry.sizes.row_bytes;
  for (uint64_t layer = 0; layer < ops_case_layers; layer++) {
    const struct kvp_store_params store = {
        .layer = {bench->region + layer * out->geometry.layer_stride_bytes, &out->geometry},
        .source = {bench->source + layer * ops_case_sequences * row_bytes, row_bytes},
        .slots = memory->small,
        .row_count = ops_case_sequences};
    out->layers[layer] = fused_params(memory, &store, 0, 0);
    out->together[layer] = &out->layers[layer];
    out->counts[layer] = &memory->counts[layer];
  }
  out->bytes = (uint64_t)ops_case_layers * ops_case_sequences * (row_bytes + out->geometry.sizes.bytes_per_token);
}
