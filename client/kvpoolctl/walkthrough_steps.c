/* The second half of `kvpoolctl walkthrough`: a prefill step of the chunk's 1024 tokens and a decode step, as an engine
 * would send them; what the daemon says of them is held against figures from paper. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/walkthrough.h"

enum {
  ring = kvp_walk_ring,
  chunk = kvp_walk_seqlen_q,
  compressed = kvp_walk_compressed,
  assembled = ring + chunk + compressed,
  main_kv_offset = ring + chunk,
  topk = 2048,
  column_queries = 2, /* the first and the last of the chunk */
  row_bytes = kvp_walk_row_bytes,
  record_bytes = kvp_walk_record_bytes,
  compressed_read_bytes = compressed * record_bytes,
  compressed_written_bytes = compressed * row_bytes,
  assembled_read_bytes = compressed_read_bytes + ring * record_bytes + chunk * row_bytes,
  assembled_bytes = assembled * row_bytes,
  /* the input buffer: the chunk's rows; the output buffer: assembled rows, then int32 matrices */
  columns_at = assembled_bytes,
  shifted_at = columns_at + column_queries * ring * 4,
  window_at = shifted_at + column_queries * (ring + 2) * 4,
  slots_at = window_at + ring * 4,
  output_bytes = slots_at + topk * 4,
  compressed_part = 0,
  window_part = 1,
};

/* What the two steps share. The first error stays, and nothing is sent after it. */
struct steps {
  struct kvp_walk *walk;
  kvpool_buffer *input;
  kvpool_buffer *output;
  kvpool_step *step;
  uint16_t *rows;  /* [chunk, elements], the chunk's */
  uint16_t *found; /* [assembled, elements] */
  int32_t store_slots[chunk];
  kvpool_swa_pivot pivots[chunk];
  kvpool_status status;
  kvpool_error error;
};

/* For calls in a row: each is made while nothing has failed. */
#define TRY(steps, call)                                                                                             \
  do {                                                                                                               \
    if ((steps)->status == KVPOOL_OK) {                                                                              \
      (steps)->status = (call);                                                                                      \
    }                                                                                                                \
  } while (0)

static uint32_t array_add(struct steps *steps, const void *values, size_t count) {
  uint32_t array = 0;
  TRY(steps, kvpool_step_add_array(steps->step, values, count, &array, &steps->error));
  return array;
}

static kvpool_view view_of(const kvpool_buffer *buffer, uint64_t offset_bytes, uint64_t rows,
                           uint32_t view_row_bytes) {
  return (kvpool_view){.buffer = buffer, .offset_bytes = offset_bytes, .rows = rows, .row_bytes = view_row_bytes};
}

static void step_run(struct steps *steps, kvpool_op_report *reports, size_t count) {
  if (steps->status == KVPOOL_OK && kvp_ctl_interrupted()) {
    steps->status = KVPOOL_CANCELLED;
  }
  TRY(steps, kvpool_step_run(steps->step, reports, count, &steps->error));
  kvpool_step_clear(steps->step);
}

static void output_read(struct steps *steps, uint64_t offset_bytes, void *out, uint64_t bytes) {
  TRY(steps, kvpool_buffer_read(steps->output, offset_bytes, out, bytes, &steps->error));
}

static void one_figure(struct steps *steps, const char *name, int64_t value, int64_t expected) {
  if (steps->status == KVPOOL_OK) {
    kvp_walk_figure_add(steps->walk, name, 1, &value, &expected);
  }
}

static void figures(struct steps *steps, const char *name, uint32_t count, const int64_t *values,
                    const int64_t *expected) {
  if (steps->status == KVPOOL_OK) {
    kvp_walk_figure_add(steps->walk, name, count, values, expected);
  }
}

/* ---- prefill ----------------------------------------------------------------------------------------------------
 */

static void chunk_plan(struct steps *steps) {
  const struct kvp_walk *walk = steps->walk;
  const kvpool_swa_sequence sequence = {walk->state, kvp_walk_seqlen_k, kvp_walk_seqlen_q, 0};
  size_t count = 0;
  TRY(steps, kvpool_plan_swa_slots(&sequence, 1, ring, steps->store_slots, chunk, &count, &steps->error));
  TRY(steps, kvpool_plan_swa_pivots(&sequence, 1, ring, steps->pivots, chunk, &count, &steps->error));
  if (steps->status != KVPOOL_OK) {
    return;
  }
  const int64_t base = (int64_t)walk->state * ring;
  int64_t overlap = 0;
  for (int i = 0; i < chunk; i++) {
    int64_t offset = steps->store_slots[i] - base;
    overlap += offset >= walk->parts[window_part].segments[0].src_begin && offset < ring ? 1 : 0;
  }
  figures(steps, "store slots in the ring: first, last", 2,
          (int64_t[]){steps->store_slots[0] - base, steps->store_slots[chunk - 1] - base}, (int64_t[]){784, 1807});
  one_figure(steps, "of them read by the first segment", overlap, chunk);
  const kvpool_swa_pivot *first = &steps->pivots[0];
  const kvpool_swa_pivot *last = &steps->pivots[chunk - 1];
  figures(steps, "pivots of query 0", 4, (int64_t[]){first->offset1, first->len1, first->offset2, first->len2},
          (int64_t[]){1, 4095, 4096, 1});
  figures(steps, "pivots of query 1023", 4, (int64_t[]){last->offset1, last->len1, last->offset2, last->len2},
          (int64_t[]){1024, 3072, 4096, 1024});
}

/* A layer's [history | chunk | compressed]; the second one finds the compressed part where the first one left it. */
static kvpool_op_report layer_assemble(struct steps *steps, uint32_t layer, bool store) {
  const struct kvp_walk_part *pages = &steps->walk->parts[compressed_part];
  const struct kvp_walk_part *window = &steps->walk->parts[window_part];
  const kvpool_view out = view_of(steps->output, 0, assembled, row_bytes);
  const kvpool_view rows = view_of(steps->input, 0, chunk, row_bytes);
  const kvpool_assemble_swa swa = {.layer = {window->pool, 0, layer},
                                   .segments = array_add(steps, window->segments, 4 * window->segment_count),
                                   .total_k = ring};
  const uint32_t slots = store ? array_add(steps, steps->store_slots, chunk) : 0;
  const kvpool_assemble_chunk new_rows = {.source = &rows, .store_slots = store ? &slots : NULL};
  const kvpool_assemble_compressed shared = {.layer = {pages->pool, 0, 0},
                                             .segments = array_add(steps, pages->segments, 4 * pages->segment_count),
                                             .total_k = compressed,
                                             .keep_compressed = layer > 0};
  kvpool_op_report report = {0};
  TRY(steps, kvpool_step_add_assemble(steps->step, &out, &swa, &new_rows, &shared, 0, &steps->error));
  step_run(steps, &report, 1);
  return report;
}

/* Rows that are not what loads of the parts gave, and the chunk. */
static int64_t assembled_compare(struct steps *steps) {
  const struct kvp_walk *walk = steps->walk;
  const uint16_t *const expected[] = {walk->parts[window_part].loaded, steps->rows,
                                      walk->parts[compressed_part].loaded};
  const int counts[] = {ring, chunk, compressed};
  const uint16_t *found = steps->found;
  int64_t different = 0;
  output_read(steps, 0, steps->found, assembled_bytes);
  for (int part = 0; part < 3; part++) {
    for (int i = 0; i < counts[part]; i++, found += kvp_walk_elements) {
      different += memcmp(found, expected[part] + (size_t)i * kvp_walk_elements, row_bytes) != 0 ? 1 : 0;
    }
  }
  return different;
}

/* What is in the ring where the chunk's rows went: how many are within v41's error of them. */
static int64_t ring_compare(struct steps *steps) {
  const struct kvp_walk *walk = steps->walk;
  const kvpool_layer layer = {walk->parts[window_part].pool, 0, 1};
  const kvpool_segment segment = {walk->state, kvp_walk_ring_begin, kvp_walk_ring_begin + chunk, 0};
  TRY(steps,
      kvpool_rows_load(walk->session, &layer, &segment.src_block, 1, chunk, steps->found, NULL, NULL, &steps->error));
  int64_t near = 0;
  for (size_t i = 0; i < chunk; i++) {
    struct kvp_ctl_difference difference;
    const size_t at = i * kvp_walk_elements;
    kvp_ctl_latents_compare(steps->rows + at, steps->found + at, kvp_walk_elements, &difference);
    near += difference.bound_used_max <= 1 ? 1 : 0;
  }
  return near;
}

static void assembled_figures(struct steps *steps) {
  const kvpool_op_report *load = &steps->walk->parts[window_part].load;
  const kvpool_op_report first = layer_assemble(steps, 0, false);
  int64_t different = assembled_compare(steps);
  const kvpool_op_report second = layer_assemble(steps, 1, false);
  different += assembled_compare(steps);
  figures(steps, "main_kv_offset, rows", 2,
          (int64_t[]){(int64_t)first.main_kv_offset, (int64_t)first.main_kv_offset + compressed},
          (int64_t[]){5120, 7620});
  one_figure(steps, "rows of two layers that differ", different, 0);
  figures(steps, "assemble: bytes read, written", 2,
          (int64_t[]){(int64_t)first.bytes_read, (int64_t)first.bytes_written},
          (int64_t[]){assembled_read_bytes, assembled_bytes});
  figures(steps, "saved where the compressed part is shared", 2,
          (int64_t[]){(int64_t)(first.bytes_read - second.bytes_read),
                      (int64_t)(first.bytes_written - second.bytes_written)},
          (int64_t[]){compressed_read_bytes, compressed_written_bytes});
  one_figure(steps, "moved by the chunk's copy",
             (int64_t)(second.bytes_read + second.bytes_written - load->bytes_read - load->bytes_written),
             (int64_t)2 * chunk * row_bytes);
}

/* The same rows once more, with the store that overwrites what the first segment reads. */
static void load_before_store_figures(struct steps *steps) {
  const kvpool_op_report report = layer_assemble(steps, 1, true);
  one_figure(steps, "load before store: rows that differ", assembled_compare(steps), 0);
  one_figure(steps, "load before store: rows stored", (int64_t)report.rows_stored, chunk);
  one_figure(steps, "of them in the ring afterwards", ring_compare(steps), chunk);
}

/* Columns of the chunk's first and last query: the window's, then the first and the last compressed token, shifted. */
static void column_figures(struct steps *steps) {
  static int32_t columns[column_queries][ring + 2];
  const int32_t choice[column_queries][2] = {{0, compressed - 1}, {0, compressed - 1}};
  const kvpool_swa_pivot pivots[column_queries] = {steps->pivots[0], steps->pivots[chunk - 1]};
  const kvpool_view expanded = view_of(steps->output, columns_at, column_queries, ring * 4);
  const kvpool_view out = view_of(steps->output, shifted_at, column_queries, sizeof columns[0]);
  const kvpool_matrix left = {.view = &expanded};
  const kvpool_matrix right = {.array = array_add(steps, choice, sizeof choice / sizeof choice[0][0])};
  const uint32_t pivot_array = array_add(steps, pivots, (size_t)4 * column_queries);
  TRY(steps, kvpool_step_add_expand_swa_index(steps->step, pivot_array, ring, &expanded, &steps->error));
  TRY(steps, kvpool_step_add_kv_index_cat(steps->step, &left, ring, &right, 2, main_kv_offset, &out, &steps->error));
  step_run(steps, NULL, 0);
  output_read(steps, shifted_at, columns, sizeof columns);
  figures(steps, "columns of query 0: first, last", 2, (int64_t[]){columns[0][0], columns[0][ring - 1]},
          (int64_t[]){1, 4096});
  figures(steps, "columns of query 1023: first, last", 2, (int64_t[]){columns[1][0], columns[1][ring - 1]},
          (int64_t[]){1024, 5119});
  figures(steps, "compressed columns: first, last", 2, (int64_t[]){columns[1][ring], columns[1][ring + 1]},
          (int64_t[]){5120, 7619});
}

/* ---- decode -----------------------------------------------------------------------------------------------------
 */

/* Every compressed token whose number is odd, and as many even ones as the list has room for. */
static void topk_choose(int32_t *list) {
  for (int i = 0; i < topk; i++) {
    list[i] = i < compressed / 2 ? 2 * i + 1 : 2 * (i - compressed / 2);
  }
}

static void decode_figures(struct steps *steps) {
  static int32_t list[topk];
  static int32_t slots[topk];
  static int32_t window[ring];
  const struct kvp_walk *walk = steps->walk;
  const kvpool_layer ring_layer = {walk->parts[window_part].pool, 0, 1};
  const kvpool_layer pages = {walk->parts[compressed_part].pool, 0, 0};
  const kvpool_swa_sequence sequence = {walk->state, kvp_walk_seqlen_k + 1, 1, 0};
  const int64_t base = (int64_t)walk->state * ring;
  kvpool_swa_window start = {0};
  int32_t slot = 0;
  size_t count = 0;
  topk_choose(list);
  TRY(steps, kvpool_plan_swa_slots(&sequence, 1, ring, &slot, 1, &count, &steps->error));
  TRY(steps, kvpool_plan_swa_decode(&sequence, 1, ring, ring, &start, 1, &count, &steps->error));
  const kvpool_view row = view_of(steps->input, 0, 1, row_bytes);
  const kvpool_view window_out = view_of(steps->output, window_at, 1, sizeof window);
  const kvpool_view slots_out = view_of(steps->output, slots_at, 1, sizeof slots);
  const kvpool_matrix chosen = {.array = array_add(steps, list, topk)};
  const uint32_t tables = array_add(steps, walk->table, kvp_walk_blocks);
  const uint32_t valid = array_add(steps, &(int32_t){topk}, 1);
  const uint32_t slot_array = array_add(steps, &slot, 1);
  const uint32_t start_array = array_add(steps, &start, 2);
  TRY(steps, kvpool_step_add_store(steps->step, &ring_layer, &row, slot_array, NULL, &steps->error));
  TRY(steps,
      kvpool_step_add_swa_index_decode(steps->step, &ring_layer, start_array, ring, &window_out, &steps->error));
  TRY(steps, kvpool_step_add_convert_kv_index(steps->step, &pages, &chosen, tables, kvp_walk_blocks, valid, 1,
                                              &slots_out, &steps->error));
  step_run(steps, NULL, 0);
  output_read(steps, window_at, window, sizeof window);
  output_read(steps, slots_at, slots, sizeof slots);
  int64_t wrong = 0;
  for (int i = 0; i < topk; i++) {
    wrong +=
        slots[i] != walk->table[list[i] / kvp_walk_per_block] * kvp_walk_per_block + list[i] % kvp_walk_per_block;
  }
  figures(steps, "decode window in the ring: start, length", 2,
          (int64_t[]){start.start_slot - base, start.valid_length}, (int64_t[]){1809, 4096});
  figures(steps, "its slots: first, last, new token's", 3,
          (int64_t[]){window[0] - base, window[ring - 1] - base, slot - base}, (int64_t[]){1809, 1808, 1808});
  one_figure(steps, "bytes of a list of 2,048 compressed tokens", (int64_t)sizeof list, 8192);
  one_figure(steps, "of them looked up wrong", wrong, 0);
}

/* ---- both -------------------------------------------------------------------------------------------------------
 */

int kvp_walk_steps_run(struct kvp_walk *walk) {
  struct steps *steps = kvp_ctl_allocate(1, sizeof *steps);
  steps->walk = walk;
  steps->rows = kvp_ctl_allocate(chunk, row_bytes);
  steps->found = kvp_ctl_allocate(assembled, row_bytes);
  kvp_ctl_latents_fill(steps->rows, (size_t)chunk * kvp_walk_elements, &walk->seed);
  TRY(steps,
      kvpool_buffer_create(walk->session, walk->device, (uint64_t)chunk * row_bytes, &steps->input, &steps->error));
  TRY(steps, kvpool_buffer_create(walk->session, walk->device, output_bytes, &steps->output, &steps->error));
  TRY(steps, kvpool_buffer_write(steps->input, 0, steps->rows, (uint64_t)chunk * row_bytes, &steps->error));
  TRY(steps, kvpool_step_new(walk->session, &steps->step, &steps->error));
  if (steps->status == KVPOOL_OK) {
    chunk_plan(steps);
    assembled_figures(steps);
    load_before_store_figures(steps);
    column_figures(steps);
    decode_figures(steps);
  }
  int exit_status = KVP_CTL_OK;
  if (kvp_ctl_interrupted()) {
    exit_status = KVP_CTL_INTERRUPTED;
  } else if (steps->status != KVPOOL_OK) {
    exit_status = kvp_ctl_fail_session(walk->ctl, walk->session, &steps->error);
  }
  kvpool_step_destroy(steps->step);
  (void)kvpool_buffer_release(steps->input, NULL); /* the session's end releases what this could not */
  (void)kvpool_buffer_release(steps->output, NULL);
  free(steps->rows);
  free(steps->found);
  free(steps);
  return exit_status;
}
