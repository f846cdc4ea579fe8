/* A scheduler and a worker, here in one process: the scheduler leases blocks over gRPC, the worker attaches to its session,
 * and stores and loads rows through a ring in shared memory. Between processes the session's id, secret and epoch and the
 * block table would go through a pipe; whoever has them may act for the session.
 *
 *   cc worker.c $(pkg-config --cflags --libs kvpool) -o worker
 *   ./worker [socket [pool]]      a pool of a host device whose first region is of format v41; "main" unless told
 */
#include <kvpool/kvpool.h>
#include <kvpool/worker.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  tokens = 100,
  elements = 512,
  values = tokens * elements,
  row_bytes = 2 * elements,
  rows_bytes = tokens * row_bytes,
  buffer_bytes = 2 * rows_bytes, /* to store, and loaded */
  table_max = tokens,
};

/* What a worker is told by its scheduler. */
struct ticket {
  kvpool_attach_options attach;
  uint64_t epoch; /* of the lease */
  const char *pool;
  int32_t table[table_max];
  uint32_t table_count;
};

/* Whatever has failed: says what and why, and the caller goes back the way it came. */
static bool holds(kvpool_status status, const kvpool_error *error, const char *what) {
  if (status != KVPOOL_OK) {
    (void)fprintf(stderr, "%s: %s (%s)\n", what, error->text, kvpool_status_name(status));
  }
  return status == KVPOOL_OK;
}

/* ---- worker ------------------------------------------------------------------------------------------------------- */

/* Rows of the buffer's first half into the leased blocks, and out of them into its second half. */
static kvpool_status step_fill(kvpool_step *step, const kvpool_layer *layer, uint32_t per_block,
                               const struct ticket *ticket, const kvpool_buffer *buffer, kvpool_error *error) {
  int32_t slots[tokens];
  kvpool_segment segments[table_max];
  size_t segment_count;
  uint32_t slot_array, segment_array;
  const kvpool_view source = {.buffer = buffer, .offset_bytes = 0, .rows = tokens, .row_bytes = row_bytes};
  const kvpool_view out = {.buffer = buffer, .offset_bytes = rows_bytes, .rows = tokens, .row_bytes = row_bytes};
  kvpool_status status =
      kvpool_plan_slot_mapping(ticket->table, ticket->table_count, per_block, 0, tokens, slots, error);
  if (status == KVPOOL_OK) {
    status = kvpool_plan_paged_range(ticket->table, ticket->table_count, per_block, 0, tokens, 0, segments, table_max,
                                     &segment_count, error);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_step_add_array(step, slots, tokens, &slot_array, error);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_step_add_array(step, &segments[0].src_block, 4 * segment_count, &segment_array, error);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_step_add_store(step, layer, &source, slot_array, NULL, error);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_step_add_load(step, layer, segment_array, tokens, &out, NULL, error);
  }
  return status;
}

/* The pool and the buffer are mapped: no byte of a row goes through a socket. */
static bool worker_run(kvpool_attachment *attachment, const struct ticket *ticket, kvpool_pool_map *map,
                       kvpool_buffer *buffer, kvpool_step *step) {
  const kvpool_mapped_region *region = kvpool_pool_map_region(map, 0);
  const kvpool_layer layer = {.pool = kvpool_pool_map_pool(map), .region = 0, .layer = 0};
  kvpool_error error;
  kvpool_op_report reports[2];
  uint16_t *rows = kvpool_buffer_data(buffer);
  for (int i = 0; i < values; i++) { /* 1.0, 2.0 or 3.0 as BF16: numbers that v41 keeps exactly */
    rows[i] = (uint16_t[]){0x3F80, 0x4000, 0x4040}[(i + i / elements) % 3];
  }
  if (!holds(step_fill(step, &layer, region->tokens_per_block, ticket, buffer, &error), &error, "plan") ||
      !holds(kvpool_attachment_run(attachment, step, NULL, reports, 2, &error), &error, "run")) {
    return false;
  }
  if (memcmp(rows, rows + values, rows_bytes) != 0) {
    (void)fprintf(stderr, "the rows that were loaded are not those that were stored\n");
    return false;
  }
  const uint8_t *record = (const uint8_t *)region->base + (uint64_t)ticket->table[0] * region->block_stride_bytes;
  (void)printf("%llu rows stored, %llu loaded back, all as they were; the first record begins with %02x %02x %02x\n",
               (unsigned long long)reports[0].rows_stored, (unsigned long long)reports[1].rows_loaded, record[0],
               record[1], record[2]);
  return true;
}

static bool worker(const struct ticket *ticket) {
  kvpool_attachment *attachment = NULL;
  kvpool_pool_map *map = NULL;
  kvpool_buffer *buffer = NULL;
  kvpool_step *step = NULL;
  kvpool_error error;
  bool done = holds(kvpool_attach(&ticket->attach, &attachment, &error), &error, "attach");
  if (done) {
    kvpool_attachment_saw_epoch(attachment, ticket->epoch);
  }
  done = done &&
         holds(kvpool_attachment_map_pool(attachment, ticket->pool, KVPOOL_MAP_READ, &map, &error), &error, "map") &&
         holds(kvpool_attachment_create_buffer(attachment, buffer_bytes, &buffer, &error), &error, "buffer") &&
         holds(kvpool_attachment_step_new(attachment, &step, &error), &error, "step") &&
         worker_run(attachment, ticket, map, buffer, step);
  kvpool_step_destroy(step);
  done = holds(kvpool_buffer_release(buffer, &error), &error, "release") && done;
  kvpool_pool_map_destroy(map);
  kvpool_detach(attachment);
  return done;
}

/* ---- scheduler ---------------------------------------------------------------------------------------------------- */

static bool lease_and_work(kvpool_client *client, kvpool_session *session, const kvpool_pool *pool) {
  struct ticket ticket = {.attach = {.size_bytes = sizeof ticket.attach,
                                     .session_id = kvpool_session_id(session),
                                     .device = kvpool_pool_placement(pool, 0)},
                          .pool = kvpool_pool_name(pool)};
  const uint32_t per_block = kvpool_pool_region(pool, 0)->tokens_per_block;
  kvpool_server_info *info;
  kvpool_error error;
  ticket.table_count = (tokens + per_block - 1) / per_block;
  if (!holds(kvpool_server_info_get(client, &info, &error), &error, "info")) {
    return false;
  }
  ticket.attach.socket = kvpool_server_info_attach_socket(info);
  kvpool_session_secret(session, ticket.attach.secret);
  bool done =
      holds(kvpool_blocks_allocate(session, pool, ticket.table_count, ticket.table, &error), &error, "allocate");
  if (done) {
    ticket.epoch = kvpool_session_epoch(session);
    done = worker(&ticket);
    done = holds(kvpool_blocks_free(session, pool, ticket.table, ticket.table_count, &error), &error, "free") && done;
  }
  kvpool_server_info_destroy(info);
  return done;
}

int main(int argc, char **argv) {
  kvpool_client *client = NULL;
  kvpool_pool *pool = NULL;
  kvpool_session *session = NULL;
  kvpool_error error;
  const bool done =
      holds(kvpool_client_connect(argc > 1 ? argv[1] : NULL, NULL, &client, &error), &error, "connect") &&
      holds(kvpool_pool_open(client, argc > 2 ? argv[2] : "main", &pool, &error), &error, "pool") &&
      holds(kvpool_session_open(client, NULL, &session, &error), &error, "session") &&
      lease_and_work(client, session, pool);
  kvpool_session_close(session);
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
  return done ? 0 : 1;
}
