/* A scheduler's first forty lines: connect, lease blocks, store the rows of a sequence, load them back by a plan.
 *
 *   cc scheduler.c $(pkg-config --cflags --libs kvpool) -o scheduler
 *   ./scheduler [socket [pool]]      a pool whose first region is of format v41; "main" unless told
 */
#include <kvpool/kvpool.h>
#include <stdio.h>
#include <stdlib.h>

/* A program of its own would handle the error; an example stops at the first. */
static void check(kvpool_status status, const kvpool_error *error, const char *what) {
  if (status != KVPOOL_OK) {
    (void)fprintf(stderr, "%s: %s (%s)\n", what, error->text, kvpool_status_name(status));
    exit(1);
  }
}

int main(int argc, char **argv) {
  enum { tokens = 100, elements = 512, row_bytes = 2 * elements, blocks_max = 100 };
  static uint16_t rows[tokens][elements], loaded[tokens][elements];
  kvpool_client *client;
  kvpool_session *session;
  kvpool_pool *pool;
  kvpool_error error;
  check(kvpool_client_connect(argc > 1 ? argv[1] : NULL, NULL, &client, &error), &error, "connect");
  check(kvpool_pool_open(client, argc > 2 ? argv[2] : "main", &pool, &error), &error, "pool");
  check(kvpool_session_open(client, NULL, &session, &error), &error, "session");

  /* Blocks for a sequence of 100 compressed tokens; what the daemon gives out is the sequence's block table. */
  const uint32_t per_block = kvpool_pool_region(pool, 0)->tokens_per_block;
  const uint32_t block_count = (tokens + per_block - 1) / per_block;
  int32_t table[blocks_max], slots[tokens];
  check(kvpool_blocks_allocate(session, pool, block_count, table, &error), &error, "allocate");

  /* BF16 rows of 1.0, 2.0 or 3.0 become records of layer 0. */
  for (int i = 0; i < tokens * elements; i++) {
    rows[i / elements][i % elements] = (uint16_t[]){0x3F80, 0x4000, 0x4040}[i % 3];
  }
  const kvpool_layer layer = {.pool = pool, .region = 0, .layer = 0};
  check(kvpool_plan_slot_mapping(table, block_count, per_block, 0, tokens, slots, &error), &error, "slots");
  check(kvpool_rows_store(session, &layer, rows, tokens, row_bytes, slots, tokens, NULL, &error), &error, "store");

  /* Back through a load plan: segments of the block table, rows in logical order. */
  kvpool_segment segments[blocks_max];
  size_t segment_count;
  check(kvpool_plan_paged_range(table, block_count, per_block, 0, tokens, 0, segments, blocks_max, &segment_count,
                                &error),
        &error, "plan");
  kvpool_op_report report;
  check(
      kvpool_rows_load(session, &layer, &segments[0].src_block, segment_count, tokens, loaded, NULL, &report, &error),
      &error, "load");
  (void)printf("%d rows in %u blocks, %zu segments, %llu bytes read, first values %04x %04x %04x\n", tokens,
               block_count, segment_count, (unsigned long long)report.bytes_read, loaded[0][0], loaded[0][1],
               loaded[0][2]);

  check(kvpool_blocks_free(session, pool, table, block_count, &error), &error, "free");
  kvpool_session_close(session);
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
  return 0;
}
