/* A scheduler in miniature: sequences of random length arrive, are prefilled in chunks, decoded together token by token,
 * and finish.
 *
 *   kvpoolctl pool create engine --block-size 64 --blocks 16 --region name=kv,format=v41,layers=1,ratio=4
 *   kvpoolctl pool create engine-window --kind ring --block-size 128 --blocks 4 --region name=swa,format=v41,layers=2
 *   ./engine [socket [pool [ring pool [sequences]]]]
 *
 * Both layers have a sliding window, which lives in rings, and share one compressed cache, which lives in pages: layer 0
 * stores and assembles it, layer 1 finds it where layer 0 left it. A model would compute the rows; these are made up, of
 * numbers that v41 keeps exactly, so that what comes back can be compared with what went in.
 */
#include <kvpool/kvpool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGED_SHAPE "--block-size 64 --blocks 16 --region name=kv,format=v41,layers=1,ratio=4"
#define RING_SHAPE  "--kind ring --block-size 128 --blocks 4 --region name=swa,format=v41,layers=2"

enum {
  layers = 2,
  shared = layers, /* for made-up rows: those of the compressed cache */
  elements = 512,
  row_bytes = 2 * elements,
  live_max = 4,
  chunk_max = 96, /* tokens of a prefill step */
  tokens_max = 600,
  ring_max = 256,
  blocks_max = 64,
  topk = 32, /* compressed tokens that a decode query attends to */
  assembled_rows_max = ring_max + chunk_max + tokens_max,
  index_offset = assembled_rows_max * row_bytes, /* in the output buffer, behind the assembled rows */
  topk_offset = index_offset + chunk_max * ring_max * 4,
  output_bytes = topk_offset + live_max * topk * 4,
  new_rows_offset = chunk_max * row_bytes, /* in the input buffer, behind the window's rows */
  input_bytes = 2 * chunk_max * row_bytes,
};

struct sequence {
  int number;
  int64_t length; /* tokens whose rows are in the caches */
  int64_t prompt;
  int64_t final;
  int32_t state; /* its ring */
  int32_t table[blocks_max];
  uint32_t table_count;
  int chunks;
};

struct engine {
  kvpool_session *session;
  kvpool_pool *paged;
  kvpool_pool *ring;
  kvpool_layer compressed;
  uint32_t ratio;
  uint32_t per_block; /* compressed tokens */
  uint32_t window;    /* as long as a ring */
  kvpool_buffer *input;
  kvpool_buffer *output;
  kvpool_step *step;
  struct sequence *live[live_max];
  int live_count;
  int arrived;
  int finished;
  uint64_t random;
  uint64_t steps;
  uint64_t bytes; /* read and written by ops */
  uint64_t checked;
};

/* What a prefill chunk does to the caches, the same for every layer. */
struct plan {
  int64_t tokens;    /* of the chunk */
  int64_t new_begin; /* compressed tokens that it completes */
  int64_t new_end;
  int32_t new_slots[chunk_max];
  kvpool_segment compressed[blocks_max]; /* all of the sequence's, these included */
  size_t compressed_count;
  int64_t compressed_rows;
  kvpool_segment history[3]; /* the window before the chunk */
  size_t history_count;
  int64_t history_rows;
  int32_t slots[chunk_max]; /* where in the ring the chunk's rows go */
  kvpool_swa_pivot pivots[chunk_max];
};

/* A program of its own would handle the error; an example stops at the first. */
static void check(kvpool_status status, const kvpool_error *error, const char *what) {
  if (status != KVPOOL_OK) {
    (void)fprintf(stderr, "%s: %s (%s)\n", what, error->text, kvpool_status_name(status));
    exit(1);
  }
}

static void expect(bool holds, const char *what, const struct sequence *sequence, int64_t token) {
  if (!holds) {
    (void)fprintf(stderr, "sequence %d, token %lld: %s\n", sequence->number, (long long)token, what);
    exit(1);
  }
}

static int64_t random_below(struct engine *engine, int64_t bound) {
  engine->random = engine->random * 6364136223846793005U + 1442695040888963407U;
  return (int64_t)(engine->random >> 33) % bound;
}

/* (8 .. 15) * 2^k, BF16: four bits, as many as e4m3 has. cache: a layer, or `shared`. */
static void row_make(uint16_t *row, const struct sequence *sequence, int cache, int64_t token) {
  uint32_t bits = ((uint32_t)token * 8 + (uint32_t)cache) * 2654435761U + (uint32_t)sequence->number * 40503U;
  for (uint32_t i = 0; i < elements; i++) {
    row[i] = (uint16_t)((130 + i / 128) << 7 | (bits >> i % 24 & 7) << 4);
  }
}

static uint32_t array_add(struct engine *engine, const void *values, size_t count) {
  kvpool_error error;
  uint32_t array;
  check(kvpool_step_add_array(engine->step, values, count, &array, &error), &error, "array");
  return array;
}

static kvpool_view rows_view(const kvpool_buffer *buffer, uint64_t offset_bytes, int64_t rows) {
  return (kvpool_view){
      .buffer = buffer, .offset_bytes = offset_bytes, .rows = (uint64_t)rows, .row_bytes = row_bytes};
}

static kvpool_view matrix_view(const kvpool_buffer *buffer, uint64_t offset_bytes, int64_t rows, uint32_t columns) {
  return (kvpool_view){
      .buffer = buffer, .offset_bytes = offset_bytes, .rows = (uint64_t)rows, .row_bytes = columns * 4};
}

static kvpool_layer window_layer(const struct engine *engine, int layer) {
  return (kvpool_layer){.pool = engine->ring, .region = 0, .layer = (uint32_t)layer};
}

static void step_run(struct engine *engine) {
  kvpool_op_report reports[layers + 4] = {0};
  kvpool_error error;
  check(kvpool_step_run(engine->step, reports, layers + 4, &error), &error, "step");
  for (int i = 0; i < layers + 4; i++) {
    engine->bytes += reports[i].bytes_read + reports[i].bytes_written;
  }
  engine->steps++;
  kvpool_step_clear(engine->step);
}

/* ---- prefill: one chunk of one sequence -------------------------------------------------------------------------
 */

static void plan_make(const struct engine *engine, const struct sequence *sequence, struct plan *plan) {
  int64_t left = sequence->prompt - sequence->length;
  plan->tokens = left < chunk_max ? left : chunk_max;
  int64_t seqlen_k = sequence->length + plan->tokens;
  kvpool_sequence pages = {seqlen_k, plan->tokens, sequence->table, sequence->table_count};
  kvpool_swa_sequence ring = {sequence->state, seqlen_k, plan->tokens, 0};
  kvpool_error error;
  size_t count;
  check(kvpool_plan_new_compressed(seqlen_k, plan->tokens, engine->ratio, &plan->new_begin, &plan->new_end, &error),
        &error, "new compressed tokens");
  check(kvpool_plan_slot_mapping(sequence->table, sequence->table_count, engine->per_block, plan->new_begin,
                                 plan->new_end, plan->new_slots, &error),
        &error, "slots");
  check(kvpool_plan_compressed(&pages, 1, engine->ratio, engine->per_block, NULL, plan->compressed, blocks_max,
                               &plan->compressed_count, &plan->compressed_rows, &error),
        &error, "compressed plan");
  check(kvpool_plan_swa(&ring, 1, engine->window, engine->window, plan->history, 3, &plan->history_count,
                        &plan->history_rows, &error),
        &error, "window plan");
  check(kvpool_plan_swa_slots(&ring, 1, engine->window, plan->slots, chunk_max, &count, &error), &error,
        "ring slots");
  check(kvpool_plan_swa_pivots(&ring, 1, engine->window, plan->pivots, chunk_max, &count, &error), &error, "pivots");
}

/* The rows that the model computed for the chunk. */
static void chunk_write(struct engine *engine, const struct sequence *sequence, const struct plan *plan, int layer) {
  static uint16_t rows[2 * chunk_max][elements];
  for (int64_t i = 0; i < plan->tokens; i++) {
    row_make(rows[i], sequence, layer, sequence->length + i);
  }
  for (int64_t t = plan->new_begin; t < plan->new_end; t++) {
    row_make(rows[chunk_max + t - plan->new_begin], sequence, shared, t);
  }
  kvpool_error error;
  check(kvpool_buffer_write(engine->input, 0, rows, sizeof rows, &error), &error, "rows");
}

/* [history | chunk | compressed] are what attention of this layer reads: here they are compared with what was made. */
static void chunk_check(struct engine *engine, const struct sequence *sequence, const struct plan *plan, int layer) {
  static uint16_t found[assembled_rows_max][elements];
  uint16_t made[elements];
  int64_t window_rows = plan->history_rows + plan->tokens;
  int64_t row_count = window_rows + plan->compressed_rows;
  kvpool_error error;
  check(kvpool_buffer_read(engine->output, 0, found, (uint64_t)row_count * row_bytes, &error), &error, "read");
  for (int64_t i = 0; i < row_count; i++) {
    bool in_window = i < window_rows;
    int64_t token = in_window ? sequence->length - plan->history_rows + i : i - window_rows;
    memset(made, 0, sizeof made); /* before the first token */
    if (in_window ? token >= 0 : token < plan->new_end) {
      row_make(made, sequence, in_window ? layer : shared, token);
    }
    expect(memcmp(found[i], made, row_bytes) == 0, "an assembled row is wrong", sequence, token);
    engine->checked++;
  }
}

/* The columns of each query's window: all tokens up to its own, as many as the window has. */
static void columns_check(struct engine *engine, const struct sequence *sequence, const struct plan *plan) {
  static int32_t columns[chunk_max * ring_max];
  kvpool_error error;
  check(
      kvpool_buffer_read(engine->output, index_offset, columns, (uint64_t)plan->tokens * engine->window * 4, &error),
      &error, "read");
  for (int64_t j = 0; j < plan->tokens; j++) {
    int64_t position = sequence->length + j;
    int64_t keys = position + 1 < engine->window ? position + 1 : engine->window;
    for (int64_t i = 0; i < engine->window; i++) {
      int64_t expected = i < keys ? plan->history_rows + j - keys + 1 + i : -1;
      expect(columns[j * engine->window + i] == expected, "a column of its window is wrong", sequence, position);
    }
  }
}

static void layer_prefill(struct engine *engine, const struct sequence *sequence, const struct plan *plan,
                          int layer) {
  kvpool_error error;
  const kvpool_layer window = window_layer(engine, layer);
  const kvpool_view rows = rows_view(engine->input, 0, plan->tokens);
  const kvpool_view out = rows_view(engine->output, 0, plan->history_rows + plan->tokens + plan->compressed_rows);
  chunk_write(engine, sequence, plan, layer);
  int64_t new_count = plan->new_end - plan->new_begin;
  if (layer == 0 && new_count > 0) {
    const kvpool_view new_rows = rows_view(engine->input, new_rows_offset, new_count);
    uint32_t new_slots = array_add(engine, plan->new_slots, (size_t)new_count);
    check(kvpool_step_add_store(engine->step, &engine->compressed, &new_rows, new_slots, NULL, &error), &error,
          "store");
  }
  /* The chunk's rows go to ring slots that the history still lies in: it is read before they are stored. */
  const uint32_t slots = array_add(engine, plan->slots, (size_t)plan->tokens);
  const kvpool_assemble_swa swa = {window, array_add(engine, plan->history, 4 * plan->history_count),
                                   (uint64_t)plan->history_rows};
  const kvpool_assemble_chunk chunk = {.source = &rows, .store_slots = &slots};
  const kvpool_assemble_compressed compressed = {.layer = engine->compressed,
                                                 .segments =
                                                     array_add(engine, plan->compressed, 4 * plan->compressed_count),
                                                 .total_k = (uint64_t)plan->compressed_rows,
                                                 .keep_compressed = layer > 0};
  check(kvpool_step_add_assemble(engine->step, &out, &swa, &chunk, &compressed, 0, &error), &error, "assemble");
  if (layer == 0) {
    const kvpool_view columns = matrix_view(engine->output, index_offset, plan->tokens, engine->window);
    uint32_t pivots = array_add(engine, plan->pivots, 4 * (size_t)plan->tokens);
    check(kvpool_step_add_expand_swa_index(engine->step, pivots, engine->window, &columns, &error), &error,
          "expand_swa_index");
  }
  step_run(engine);
  chunk_check(engine, sequence, plan, layer);
}

static void prefill(struct engine *engine, struct sequence *sequence) {
  struct plan plan;
  plan_make(engine, sequence, &plan);
  for (int layer = 0; layer < layers; layer++) { /* attention of the layer before is over: it read the same buffer */
    layer_prefill(engine, sequence, &plan, layer);
  }
  columns_check(engine, sequence, &plan);
  sequence->length += plan.tokens;
  sequence->chunks++;
}

/* ---- decode: one token of every sequence that is past its prompt ------------------------------------------------
 */

struct batch {
  struct sequence *sequences[live_max];
  int count;
  kvpool_swa_sequence ring[live_max];
  int32_t slots[live_max];             /* of the new tokens in their rings */
  kvpool_swa_window windows[live_max]; /* what they see there */
  int32_t tables[live_max][blocks_max];
  int32_t topk[live_max][topk]; /* compressed tokens that they see: an indexer would choose */
  int32_t valid[live_max];
  int32_t new_slots[live_max]; /* of the compressed tokens that are complete now */
  int new_count;
};

static void batch_plan(const struct engine *engine, struct batch *batch) {
  size_t count;
  kvpool_error error;
  for (int i = 0; i < batch->count; i++) {
    const struct sequence *sequence = batch->sequences[i];
    int64_t seqlen_k = sequence->length + 1;
    int64_t begin;
    int64_t end;
    batch->ring[i] = (kvpool_swa_sequence){sequence->state, seqlen_k, 1, 0};
    check(kvpool_plan_new_compressed(seqlen_k, 1, engine->ratio, &begin, &end, &error), &error, "new compressed");
    check(kvpool_plan_slot_mapping(sequence->table, sequence->table_count, engine->per_block, begin, end,
                                   batch->new_slots + batch->new_count, &error),
          &error, "slots");
    batch->new_count += (int)(end - begin);
    memset(batch->tables[i], 0xff, sizeof batch->tables[i]); /* -1 behind the last block */
    memcpy(batch->tables[i], sequence->table, sequence->table_count * sizeof sequence->table[0]);
    batch->valid[i] = end < topk ? (int32_t)end : topk;
    for (int32_t k = 0; k < topk; k++) {
      batch->topk[i][k] = k < batch->valid[i] ? (int32_t)end - 1 - k : -1;
    }
  }
  check(kvpool_plan_swa_slots(batch->ring, (size_t)batch->count, engine->window, batch->slots, live_max, &count,
                              &error),
        &error, "ring slots");
  check(kvpool_plan_swa_decode(batch->ring, (size_t)batch->count, engine->window, engine->window, batch->windows,
                               live_max, &count, &error),
        &error, "windows");
}

/* Rows of each layer, then those of the compressed tokens that are complete, in the order of the slots. */
static void batch_write(struct engine *engine, const struct batch *batch) {
  static uint16_t rows[(layers + 1) * live_max][elements];
  int at = layers * batch->count;
  for (int i = 0; i < batch->count; i++) {
    const struct sequence *sequence = batch->sequences[i];
    for (int layer = 0; layer < layers; layer++) {
      row_make(rows[layer * batch->count + i], sequence, layer, sequence->length);
    }
    if ((sequence->length + 1) % engine->ratio == 0) {
      row_make(rows[at++], sequence, shared, sequence->length / engine->ratio);
    }
  }
  kvpool_error error;
  check(kvpool_buffer_write(engine->input, 0, rows, sizeof rows, &error), &error, "rows");
}

/* Attention reads the pages by these slots. */
static void batch_check(struct engine *engine, const struct batch *batch) {
  static int32_t windows[live_max * ring_max];
  int32_t slots[live_max][topk];
  kvpool_error error;
  check(
      kvpool_buffer_read(engine->output, index_offset, windows, (uint64_t)batch->count * engine->window * 4, &error),
      &error, "read");
  check(kvpool_buffer_read(engine->output, topk_offset, slots, (uint64_t)batch->count * sizeof slots[0], &error),
        &error, "read");
  for (int i = 0; i < batch->count; i++) {
    const struct sequence *sequence = batch->sequences[i];
    int32_t newest = windows[i * (int64_t)engine->window + batch->windows[i].valid_length - 1];
    expect(newest == batch->slots[i], "its own row is not the last of its window", sequence, sequence->length);
    for (int32_t k = 0; k < topk; k++) {
      uint32_t token = (uint32_t)batch->topk[i][k];
      int64_t slot = (int64_t)sequence->table[token / engine->per_block % blocks_max] * engine->per_block +
                     token % engine->per_block;
      expect(slots[i][k] == (k < batch->valid[i] ? slot : -1), "a slot is wrong", sequence, sequence->length);
    }
  }
}

static void decode(struct engine *engine, struct batch *batch) {
  kvpool_error error;
  batch_plan(engine, batch);
  batch_write(engine, batch);
  size_t count = (size_t)batch->count;
  uint32_t slots = array_add(engine, batch->slots, count);
  for (int layer = 0; layer < layers; layer++) { /* a model that has rows before their norm uses a fused_store */
    const kvpool_layer window = window_layer(engine, layer);
    const kvpool_view rows = rows_view(engine->input, (uint64_t)layer * count * row_bytes, batch->count);
    check(kvpool_step_add_store(engine->step, &window, &rows, slots, NULL, &error), &error, "store");
  }
  if (batch->new_count > 0) {
    const kvpool_view rows = rows_view(engine->input, layers * count * row_bytes, batch->new_count);
    uint32_t new_slots = array_add(engine, batch->new_slots, (size_t)batch->new_count);
    check(kvpool_step_add_store(engine->step, &engine->compressed, &rows, new_slots, NULL, &error), &error, "store");
  }
  const kvpool_layer first = window_layer(engine, 0);
  const kvpool_view windows = matrix_view(engine->output, index_offset, batch->count, engine->window);
  uint32_t offsets = array_add(engine, batch->windows, 2 * count);
  check(kvpool_step_add_swa_index_decode(engine->step, &first, offsets, engine->window, &windows, &error), &error,
        "swa_index_decode");
  const kvpool_matrix chosen = {.array = array_add(engine, batch->topk, topk * count)};
  const kvpool_view converted = matrix_view(engine->output, topk_offset, batch->count, topk);
  uint32_t tables = array_add(engine, batch->tables, blocks_max * count);
  uint32_t valid = array_add(engine, batch->valid, count);
  check(kvpool_step_add_convert_kv_index(engine->step, &engine->compressed, &chosen, tables, blocks_max, valid, 1,
                                         &converted, &error),
        &error, "convert_kv_index");
  step_run(engine);
  batch_check(engine, batch);
  for (int i = 0; i < batch->count; i++) {
    batch->sequences[i]->length++;
  }
}

/* ---- sequences come and go --------------------------------------------------------------------------------------
 */

/* A ring, and blocks for all of its tokens; false: they are in use, it has to wait. */
static bool arrive(struct engine *engine) {
  kvpool_error error;
  struct sequence *sequence = calloc(1, sizeof *sequence);
  if (sequence == NULL) {
    return false;
  }
  sequence->number = engine->arrived;
  sequence->prompt = 1 + random_below(engine, tokens_max - 100);
  sequence->final = sequence->prompt + 1 + random_below(engine, 100);
  uint32_t block_size = kvpool_pool_block_size(engine->paged);
  sequence->table_count = ((uint32_t)sequence->final + block_size - 1) / block_size;
  kvpool_status status = kvpool_blocks_allocate(engine->session, engine->ring, 1, &sequence->state, &error);
  if (status == KVPOOL_OK) {
    status = kvpool_blocks_allocate(engine->session, engine->paged, sequence->table_count, sequence->table, &error);
    if (status != KVPOOL_OK) {
      check(kvpool_blocks_free(engine->session, engine->ring, &sequence->state, 1, NULL), &error, "free");
    }
  }
  if (status == KVPOOL_OUT_OF_BLOCKS && engine->live_count > 0) {
    free(sequence);
    return false;
  }
  check(status, &error, "allocate");
  engine->live[engine->live_count++] = sequence;
  engine->arrived++;
  return true;
}

static void finish(struct engine *engine, int index) {
  struct sequence *sequence = engine->live[index];
  kvpool_error error;
  (void)printf("sequence %2d: prompt %3lld in %d chunks, %3lld tokens decoded, %2u blocks, ring %d\n",
               sequence->number, (long long)sequence->prompt, sequence->chunks,
               (long long)(sequence->final - sequence->prompt), sequence->table_count, sequence->state);
  check(kvpool_blocks_free(engine->session, engine->paged, sequence->table, sequence->table_count, &error), &error,
        "free");
  check(kvpool_blocks_free(engine->session, engine->ring, &sequence->state, 1, &error), &error, "free");
  free(sequence);
  engine->live[index] = engine->live[--engine->live_count];
  engine->finished++;
}

static void iterate(struct engine *engine, int sequences) {
  while (engine->live_count < live_max && engine->arrived < sequences && arrive(engine)) {
  }
  struct batch batch = {0};
  for (int i = 0; i < engine->live_count; i++) {
    struct sequence *sequence = engine->live[i];
    if (sequence->length < sequence->prompt) {
      prefill(engine, sequence);
    } else {
      batch.sequences[batch.count++] = sequence;
    }
  }
  if (batch.count > 0) {
    decode(engine, &batch);
  }
  for (int i = engine->live_count - 1; i >= 0; i--) {
    if (engine->live[i]->length == engine->live[i]->final) {
      finish(engine, i);
    }
  }
}

/* ---- the pools --------------------------------------------------------------------------------------------------
 */

static bool paged_fits(const kvpool_pool *pool) {
  const uint32_t block_size = kvpool_pool_block_size(pool);
  return kvpool_pool_get_kind(pool) == KVPOOL_POOL_PAGED && strcmp(kvpool_pool_region(pool, 0)->format, "v41") == 0 &&
         tokens_max / block_size < blocks_max && (uint64_t)kvpool_pool_num_blocks(pool) * block_size >= tokens_max;
}

static bool ring_fits(const kvpool_pool *pool) {
  const kvpool_region_info *region = kvpool_pool_region(pool, 0);
  return kvpool_pool_get_kind(pool) == KVPOOL_POOL_RING && strcmp(region->format, "v41") == 0 &&
         region->num_layers >= layers && region->tokens_per_block <= ring_max;
}

/* False: there is none of this name, or it is of another shape; the command that makes one has been told. */
static bool pool_take(kvpool_client *client, const char *socket, const char *name, const char *shape,
                      bool (*fits)(const kvpool_pool *pool), kvpool_pool **out) {
  kvpool_error error;
  kvpool_status status = kvpool_pool_open(client, name, out, &error);
  if (status == KVPOOL_OK && fits(*out)) {
    return true;
  }
  if (status != KVPOOL_OK && status != KVPOOL_UNKNOWN_POOL) {
    check(status, &error, "pool");
  }
  const bool is_there = status == KVPOOL_OK;
  (void)fprintf(stderr,
                is_there ? "pool \"%s\" is not as this example needs it; one that is, to be named instead:\n"
                         : "there is no pool \"%s\"; this makes it:\n",
                name);
  (void)fprintf(stderr, "  kvpoolctl pool create %s%s %s%s%s\n", name, is_there ? "-fit" : "", shape,
                socket == NULL ? "" : " --socket ", socket == NULL ? "" : socket);
  return false;
}

static void geometry_take(struct engine *engine) {
  const kvpool_region_info *pages = kvpool_pool_region(engine->paged, 0);
  engine->compressed = (kvpool_layer){.pool = engine->paged, .region = 0, .layer = 0};
  engine->ratio = pages->compression_ratio;
  engine->per_block = pages->tokens_per_block;
  engine->window = kvpool_pool_region(engine->ring, 0)->tokens_per_block;
}

int main(int argc, char **argv) {
  struct engine engine = {.random = 11};
  int sequences = argc > 4 ? atoi(argv[4]) : 12;
  kvpool_client *client;
  kvpool_error error;
  const char *socket = argc > 1 ? argv[1] : NULL;
  check(kvpool_client_connect(socket, NULL, &client, &error), &error, "connect");
  bool has_pools = pool_take(client, socket, argc > 2 ? argv[2] : "engine", PAGED_SHAPE, paged_fits, &engine.paged);
  has_pools = pool_take(client, socket, argc > 3 ? argv[3] : "engine-window", RING_SHAPE, ring_fits, &engine.ring) &&
              has_pools;
  if (!has_pools) {
    exit(1);
  }
  geometry_take(&engine);
  check(kvpool_session_open(client, NULL, &engine.session, &error), &error, "session");
  check(kvpool_buffer_create(engine.session, NULL, input_bytes, &engine.input, &error), &error, "buffer");
  check(kvpool_buffer_create(engine.session, NULL, output_bytes, &engine.output, &error), &error, "buffer");
  check(kvpool_step_new(engine.session, &engine.step, &error), &error, "step");
  while (engine.finished < sequences) {
    iterate(&engine, sequences);
  }
  (void)printf("%d sequences, %llu steps, %llu assembled rows as they were made, %.1f MB read and written\n",
               engine.finished, (unsigned long long)engine.steps, (unsigned long long)engine.checked,
               (double)engine.bytes / 1e6);
  kvpool_step_destroy(engine.step);
  check(kvpool_buffer_release(engine.input, &error), &error, "release");
  check(kvpool_buffer_release(engine.output, &error), &error, "release");
  kvpool_session_close(engine.session);
  kvpool_pool_destroy(engine.paged);
  kvpool_pool_destroy(engine.ring);
  kvpool_client_destroy(client);
  return 0;
}
