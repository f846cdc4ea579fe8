/* The planners on batches of the size an engine has, in ns per element of the plan, beside a memcpy of its bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kvpool/kvpool.h"

enum {
  rounds_warm = 50,
  rounds = 2000,
  prefill_batch = 8, /* sequences of a prefill step */
  chunk_tokens = 1024,
  decode_batch = 256,
  history_tokens = 8976,
  window = 4096,
  ring_tokens = window + 64,
  ratio = 4,
  tokens_per_block = 16,
  table_blocks = (history_tokens + chunk_tokens) / ratio / tokens_per_block + 1,
  segments_max = prefill_batch * table_blocks,
  ranks = 8,
  prefill_rows = prefill_batch * chunk_tokens,
  out_bytes_max = prefill_rows * sizeof(kvpool_swa_pivot),
};

struct world {
  int32_t table[table_blocks];
  kvpool_sequence paged[prefill_batch];
  kvpool_swa_sequence prefill[prefill_batch];
  kvpool_swa_sequence decode[decode_batch];
  int64_t seqlens_q[prefill_batch];
  int32_t cu_seqlens[prefill_batch + 1];
  union {
    uint8_t bytes[out_bytes_max];
    kvpool_segment segments[segments_max];
    int32_t slots[2][prefill_rows];
    kvpool_swa_pivot pivots[prefill_rows];
    kvpool_swa_window windows[decode_batch];
  } out;
  uint8_t from[out_bytes_max];
  uint64_t samples[rounds];
};

static uint64_t now_ns(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int compare(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a;
  const uint64_t y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

/* ---- one call of each planner; they return how many elements it made -----------------------------------------------
 */

static size_t made(kvpool_status status, size_t count) {
  if (status != KVPOOL_OK) {
    (void)fprintf(stderr, "bench: a planner refuses its batch: %s\n", kvpool_status_name(status));
    exit(1);
  }
  return count;
}

static size_t paged_range(struct world *world) {
  size_t count = 0;
  kvpool_status status = kvpool_plan_paged_range(world->table, table_blocks, tokens_per_block, 3,
                                                 (history_tokens + chunk_tokens) / ratio, 0, world->out.segments,
                                                 table_blocks, &count, NULL);
  return made(status, count);
}

static size_t slot_mapping(struct world *world) {
  kvpool_status status =
      kvpool_plan_slot_mapping(world->table, table_blocks, tokens_per_block, history_tokens / ratio,
                               (history_tokens + chunk_tokens) / ratio, world->out.slots[0], NULL);
  return made(status, chunk_tokens / ratio);
}

static size_t compressed(struct world *world) {
  size_t count = 0;
  kvpool_status status =
      kvpool_plan_compressed(world->paged, prefill_batch, ratio, tokens_per_block, world->cu_seqlens,
                             world->out.segments, segments_max, &count, NULL, NULL);
  return made(status, count);
}

static size_t compressed_visible(struct world *world) {
  kvpool_status status = kvpool_plan_compressed_visible(world->paged, prefill_batch, ratio, world->cu_seqlens,
                                                        world->out.slots[0], world->out.slots[1], prefill_rows, NULL);
  return made(status, prefill_rows);
}

static size_t swa(struct world *world) {
  size_t count = 0;
  kvpool_status status = kvpool_plan_swa(world->prefill, prefill_batch, window, ring_tokens, world->out.segments,
                                         segments_max, &count, NULL, NULL);
  return made(status, count);
}

static size_t swa_slots(struct world *world) {
  size_t count = 0;
  kvpool_status status = kvpool_plan_swa_slots(world->prefill, prefill_batch, ring_tokens, world->out.slots[0],
                                               prefill_rows, &count, NULL);
  return made(status, count);
}

static size_t swa_pivots(struct world *world) {
  size_t count = 0;
  kvpool_status status =
      kvpool_plan_swa_pivots(world->prefill, prefill_batch, window, world->out.pivots, prefill_rows, &count, NULL);
  return made(status, count);
}

static size_t swa_decode(struct world *world) {
  size_t count = 0;
  kvpool_status status = kvpool_plan_swa_decode(world->decode, decode_batch, window, ring_tokens, world->out.windows,
                                                decode_batch, &count, NULL);
  return made(status, count);
}

static size_t mirror(struct world *world) {
  size_t count = 0;
  kvpool_status status = kvpool_plan_mirror(world->seqlens_q, prefill_batch, ranks, ranks / 2, world->out.slots[0],
                                            prefill_rows, &count, NULL);
  return made(status, count);
}

static size_t mirror_reverse(struct world *world) {
  size_t count = 0;
  kvpool_status status = kvpool_plan_mirror_reverse(world->seqlens_q, prefill_batch, ranks, world->out.slots[0],
                                                    prefill_rows, &count, NULL);
  return made(status, count);
}

/* ---- measuring --------------------------------------------------------------------------------------------------
 */

struct planner {
  const char *name;
  const char *element;
  size_t element_bytes;
  size_t (*plan)(struct world *world);
};

static const struct planner planners[] = {
    {"paged_range: 2500 tokens of 1 sequence", "segment", sizeof(kvpool_segment), paged_range},
    {"slot_mapping: 256 tokens of 1 sequence", "slot", sizeof(int32_t), slot_mapping},
    {"compressed: 8 sequences of 2500 tokens", "segment", sizeof(kvpool_segment), compressed},
    {"compressed_visible: 8 x 1024 queries", "query", 2 * sizeof(int32_t), compressed_visible},
    {"swa: 8 windows of 4096", "segment", sizeof(kvpool_segment), swa},
    {"swa_slots: 8 x 1024 rows", "slot", sizeof(int32_t), swa_slots},
    {"swa_pivots: 8 x 1024 queries", "pivot", sizeof(kvpool_swa_pivot), swa_pivots},
    {"swa_decode: 256 sequences", "window", sizeof(kvpool_swa_window), swa_decode},
    {"mirror: 8 x 1024 rows, rank 4 of 8", "row", sizeof(int32_t), mirror},
    {"mirror_reverse: 8 x 1024 rows, 8 ranks", "row", sizeof(int32_t), mirror_reverse},
};

static void world_init(struct world *world) {
  memset(world->from, 1, sizeof world->from);
  for (int32_t i = 0; i < table_blocks; i++) {
    world->table[i] = i * 197 % 4096;
  }
  for (int32_t i = 0; i < prefill_batch; i++) {
    const int64_t tokens = history_tokens + chunk_tokens;
    world->paged[i] = (kvpool_sequence){
        .seqlen_k = tokens, .seqlen_q = chunk_tokens, .block_table = world->table, .table_count = table_blocks};
    world->prefill[i] = (kvpool_swa_sequence){.state_id = i, .seqlen_k = tokens, .seqlen_q = chunk_tokens};
    world->seqlens_q[i] = chunk_tokens;
  }
  for (int32_t i = 0; i < decode_batch; i++) {
    world->decode[i] = (kvpool_swa_sequence){.state_id = i, .seqlen_k = history_tokens + 37 * i + 1, .seqlen_q = 1};
  }
}

/* The median of all rounds; *p99_ns beside it. */
static uint64_t sampled(uint64_t *samples, uint64_t *p99_ns) {
  qsort(samples, rounds, sizeof samples[0], compare);
  *p99_ns = samples[rounds - 1 - rounds / 100];
  return samples[rounds / 2];
}

static void measure(struct world *world, const struct planner *planner) {
  size_t count = 0;
  uint64_t p99_ns = 0;
  uint64_t copy_p99_ns = 0;
  for (int i = 0; i < rounds_warm + rounds; i++) {
    const uint64_t begin = now_ns();
    count = planner->plan(world);
    if (i >= rounds_warm) {
      world->samples[i - rounds_warm] = now_ns() - begin;
    }
  }
  const uint64_t median_ns = sampled(world->samples, &p99_ns);
  const size_t bytes = count * planner->element_bytes;
  for (int i = 0; i < rounds_warm + rounds; i++) {
    const uint64_t begin = now_ns();
    memcpy(world->out.bytes, world->from, bytes);
    __asm__ volatile("" ::"r"(world->out.bytes) : "memory");
    if (i >= rounds_warm) {
      world->samples[i - rounds_warm] = now_ns() - begin;
    }
  }
  const uint64_t copy_ns = sampled(world->samples, &copy_p99_ns);
  printf("%-40s %5zu %-8s p50 %7.2f us  p99 %7.2f us  %6.2f ns each  %6.2f GB/s  memcpy p50 %6.2f us\n",
         planner->name, count, planner->element, (double)median_ns / 1000, (double)p99_ns / 1000,
         (double)median_ns / (double)count, (double)bytes / (double)median_ns, (double)copy_ns / 1000);
}

int main(void) {
  static struct world world;
  world_init(&world);
  printf("planners of libkvpool %s, one thread of %ld cores, %d rounds; a clock read costs ", kvpool_version(),
         sysconf(_SC_NPROCESSORS_ONLN), rounds);
  const uint64_t begin = now_ns();
  for (int i = 0; i < rounds; i++) {
    (void)now_ns();
  }
  printf("%.0f ns\n", (double)(now_ns() - begin) / rounds);
  for (size_t i = 0; i < sizeof planners / sizeof planners[0]; i++) {
    measure(&world, &planners[i]);
  }
  return 0;
}
