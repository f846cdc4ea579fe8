/* The temporary pools of `kvpoolctl walkthrough`, and its first half: the rows that the sequence has already, stored
 * and loaded by plans, each element held against its source. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/walkthrough.h"

enum { pool_blocks = 200, ring_blocks = 2, polls = 40, poll_ms = 50 };

_Static_assert(kvp_walk_ring_begin == 784, "the window's first token");

/* ---- pools, blocks, plans ---------------------------------------------------------------------------------------
 */

static int pool_make(struct kvp_walk *walk, struct kvp_walk_part *part, kvpool_pool_kind kind, uint32_t block_tokens,
                     uint32_t blocks, uint32_t compression_ratio) {
  (void)snprintf(part->pool_name, sizeof part->pool_name, "walkthrough-%016llx-%s", (unsigned long long)walk->token,
                 part->name);
  const kvpool_region_spec region = {
      .name = "kv", .format = "v41", .num_layers = part->layers, .compression_ratio = compression_ratio};
  const kvpool_pool_spec spec = {
      .name = part->pool_name,
      .kind = kind,
      .block_size = block_tokens,
      .num_blocks = blocks,
      .placements = &walk->device,
      .placement_count = walk->device == NULL ? 0 : 1,
      .regions = &region,
      .region_count = 1,
  };
  kvpool_error error;
  kvpool_status status = kvpool_pool_create(walk->ctl->client, &spec, &part->pool, &error);
  if (status != KVPOOL_OK) {
    part->pool = NULL;
    part->may_appear = status == KVPOOL_DEADLINE_EXCEEDED || status == KVPOOL_CANCELLED;
    return kvp_ctl_fail(walk->ctl, &error);
  }
  return KVP_CTL_OK;
}

static void part_allocate(struct kvp_walk_part *part) {
  part->slots = kvp_ctl_allocate(part->rows, sizeof part->slots[0]);
  part->source = kvp_ctl_allocate(part->rows, kvp_walk_row_bytes);
  part->loaded = kvp_ctl_allocate(part->rows, kvp_walk_row_bytes);
  part->segments = kvp_ctl_allocate(part->segments_max, sizeof part->segments[0]);
}

/* The order of a block table is the scheduler's: a shuffled one shows that nothing relies on it. */
static void shuffle(int32_t *items, uint32_t count, uint64_t seed) {
  for (uint32_t i = count - 1; i > 0; i--) {
    seed = seed * 6364136223846793005U + 1442695040888963407U;
    uint32_t j = (uint32_t)(seed >> 33) % (i + 1);
    int32_t item = items[i];
    items[i] = items[j];
    items[j] = item;
  }
}

static int compressed_prepare(struct kvp_walk *walk, struct kvp_walk_part *part) {
  *part = (struct kvp_walk_part){
      .name = "compressed", .layers = 1, .rows = kvp_walk_compressed, .segments_max = kvp_walk_blocks};
  int exit_status = pool_make(walk, part, KVPOOL_POOL_PAGED, kvp_walk_block_size, pool_blocks, kvp_walk_ratio);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  part_allocate(part);
  int32_t *table = walk->table;
  int64_t total_k = 0;
  kvpool_error error;
  kvpool_status status = kvpool_blocks_allocate(walk->session, part->pool, kvp_walk_blocks, table, &error);
  if (status == KVPOOL_OK) {
    shuffle(table, kvp_walk_blocks, walk->seed);
    const kvpool_sequence sequence = {kvp_walk_seqlen_k, kvp_walk_seqlen_q, table, kvp_walk_blocks};
    status = kvpool_plan_compressed(&sequence, 1, kvp_walk_ratio, kvp_walk_per_block, NULL, part->segments,
                                    part->segments_max, &part->segment_count, &total_k, &error);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_plan_slot_mapping(table, kvp_walk_blocks, kvp_walk_per_block, 0, kvp_walk_compressed, part->slots,
                                      &error);
  }
  if (status != KVPOOL_OK) {
    return kvp_ctl_fail_session(walk->ctl, walk->session, &error);
  }
  const kvpool_segment *last = &part->segments[part->segment_count - 1];
  kvp_walk_figure_add(walk, "compressed tokens, segments", 2, (int64_t[]){total_k, (int64_t)part->segment_count},
                      (int64_t[]){kvp_walk_compressed, kvp_walk_blocks});
  kvp_walk_figure_add(walk, "last segment: begin, end, row", 3,
                      (int64_t[]){last->src_begin, last->src_end, last->dst_offset}, (int64_t[]){0, 4, 2496});
  return KVP_CTL_OK;
}

static int window_prepare(struct kvp_walk *walk, struct kvp_walk_part *part) {
  *part = (struct kvp_walk_part){
      .name = "window", .layers = kvp_walk_ring_layers, .rows = kvp_walk_ring, .segments_max = 3};
  int exit_status = pool_make(walk, part, KVPOOL_POOL_RING, kvp_walk_ring, ring_blocks, 1);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  part_allocate(part);
  int32_t states[ring_blocks];
  int64_t total_k = 0;
  kvpool_error error;
  kvpool_status status = kvpool_blocks_allocate(walk->session, part->pool, ring_blocks, states, &error);
  if (status == KVPOOL_OK) {
    walk->state = states[ring_blocks - 1];
    const kvpool_swa_sequence sequence = {walk->state, kvp_walk_seqlen_k, kvp_walk_seqlen_q, 0};
    status = kvpool_plan_swa(&sequence, 1, kvp_walk_ring, kvp_walk_ring, part->segments, part->segments_max,
                             &part->segment_count, &total_k, &error);
  }
  if (status != KVPOOL_OK) {
    return kvp_ctl_fail_session(walk->ctl, walk->session, &error);
  }
  for (int32_t i = 0; i < kvp_walk_ring; i++) {
    part->slots[i] = walk->state * kvp_walk_ring + (kvp_walk_history_begin + i) % kvp_walk_ring;
  }
  const kvpool_segment *segments = part->segments;
  kvp_walk_figure_add(walk, "window tokens, segments", 2, (int64_t[]){total_k, (int64_t)part->segment_count},
                      (int64_t[]){kvp_walk_ring, 2});
  kvp_walk_figure_add(walk, "first segment: begin, end, row", 3,
                      (int64_t[]){segments[0].src_begin, segments[0].src_end, segments[0].dst_offset},
                      (int64_t[]){kvp_walk_ring_begin, kvp_walk_ring, 0});
  kvp_walk_figure_add(walk, "second segment: begin, end, row", 3,
                      (int64_t[]){segments[1].src_begin, segments[1].src_end, segments[1].dst_offset},
                      (int64_t[]){0, kvp_walk_ring_begin, 3312});
  return KVP_CTL_OK;
}

/* ---- store, load, compare ---------------------------------------------------------------------------------------
 */

static int part_run(struct kvp_walk *walk, struct kvp_walk_part *part) {
  kvpool_layer layer = {.pool = part->pool, .region = 0, .layer = 0};
  kvpool_error error;
  kvpool_status status = KVPOOL_OK;
  kvp_ctl_latents_fill(part->source, part->rows * kvp_walk_elements, &walk->seed);
  for (uint32_t i = part->layers; i > 0 && status == KVPOOL_OK; i--) { /* the first layer's report is the last one */
    layer.layer = i - 1;
    status = kvpool_rows_store(walk->session, &layer, part->source, part->rows, kvp_walk_row_bytes, part->slots,
                               part->rows, &part->store, &error);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_rows_load(walk->session, &layer, &part->segments[0].src_block, part->segment_count, part->rows,
                              part->loaded, NULL, &part->load, &error);
  }
  if (status != KVPOOL_OK) {
    return kvp_ctl_fail_session(walk->ctl, walk->session, &error);
  }
  kvp_ctl_latents_compare(part->source, part->loaded, part->rows * kvp_walk_elements, &part->difference);
  return KVP_CTL_OK;
}

static void part_expect(struct kvp_walk_part *part, const char *what, uint64_t is, uint64_t expected) {
  if (is != expected && part->failure[0] == '\0') {
    (void)snprintf(part->failure, sizeof part->failure, "%s: %llu, not %llu", what, (unsigned long long)is,
                   (unsigned long long)expected);
  }
}

static void part_check(struct kvp_walk_part *part) {
  part_expect(part, "rows stored", part->store.rows_stored, part->rows);
  part_expect(part, "rows with NaN or Inf", part->store.rows_nonfinite, 0);
  part_expect(part, "rows loaded", part->load.rows_loaded, part->rows);
  part_expect(part, "bytes read", part->load.bytes_read, part->rows * kvp_walk_record_bytes);
  part_expect(part, "bytes written", part->load.bytes_written, part->rows * kvp_walk_row_bytes);
  if (!(part->difference.bound_used_max <= 1) && part->failure[0] == '\0') {
    size_t element = part->difference.element;
    (void)snprintf(part->failure, sizeof part->failure,
                   "row %zu element %zu: bits 0x%04x came back as 0x%04x, %.3g times the error that v41 allows",
                   element / kvp_walk_elements, element % kvp_walk_elements, part->source[element],
                   part->loaded[element], part->difference.bound_used_max);
  }
}

int kvp_walk_parts_run(struct kvp_walk *walk) {
  int (*const prepare[kvp_walk_parts])(struct kvp_walk *, struct kvp_walk_part *) = {compressed_prepare,
                                                                                     window_prepare};
  for (int i = 0; i < kvp_walk_parts; i++) {
    int exit_status = kvp_ctl_interrupted() ? KVP_CTL_INTERRUPTED : prepare[i](walk, &walk->parts[i]);
    if (exit_status == KVP_CTL_OK) {
      exit_status = kvp_ctl_interrupted() ? KVP_CTL_INTERRUPTED : part_run(walk, &walk->parts[i]);
    }
    if (exit_status != KVP_CTL_OK) {
      return exit_status;
    }
    part_check(&walk->parts[i]);
  }
  return KVP_CTL_OK;
}

/* ---- the end ----------------------------------------------------------------------------------------------------
 */

/* A pool whose making was not answered in time may be made a moment later: its name is nobody else's. */
static void pool_await(const struct kvp_walk *walk, struct kvp_walk_part *part) {
  for (int i = 0; i < polls && part->pool == NULL && part->may_appear; i++) {
    kvpool_error error;
    kvpool_status status = kvpool_pool_open(walk->ctl->client, part->pool_name, &part->pool, &error);
    if (status != KVPOOL_OK) {
      part->pool = NULL;
    }
    if (status == KVPOOL_UNKNOWN_POOL) {
      (void)nanosleep(&(struct timespec){.tv_nsec = poll_ms * 1000000L}, NULL);
    } else if (status != KVPOOL_OK) {
      break; /* nothing is to be had of this daemon */
    }
  }
}

int kvp_walk_part_delete(const struct kvp_walk *walk, struct kvp_walk_part *part) {
  int exit_status = KVP_CTL_OK;
  kvpool_error error;
  char hint[160];
  (void)snprintf(hint, sizeof hint, "kvpoolctl pool delete --force %s", part->pool_name);
  pool_await(walk, part);
  if (part->pool != NULL) {
    kvpool_status status = KVPOOL_IN_USE; /* a step that was cut off runs to its end */
    for (int i = 0; i < polls && status == KVPOOL_IN_USE; i++) {
      (void)nanosleep(&(struct timespec){.tv_nsec = i == 0 ? 0 : poll_ms * 1000000L}, NULL);
      status = kvpool_pool_delete(part->pool, true, &error);
    }
    /* Gone with its daemon, or deleted by somebody: either way it is not there. */
    part->is_left = status != KVPOOL_OK && status != KVPOOL_UNKNOWN_POOL && status != KVPOOL_DISCONNECTED;
    exit_status = part->is_left ? kvp_ctl_fail_hint(walk->ctl, &error, hint) : KVP_CTL_OK;
  } else if (part->may_appear) {
    part->is_left = true;
    kvp_ctl_warn("pool %s may still be made: `%s`", part->pool_name, hint);
  }
  return exit_status;
}

void kvp_walk_part_deinit(struct kvp_walk_part *part) {
  kvpool_pool_destroy(part->pool);
  free(part->segments);
  free(part->slots);
  free(part->source);
  free(part->loaded);
}
