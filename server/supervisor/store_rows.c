/* A StoreRows call.
 *
 * first message: checked, buffer made -> rows written as they come -> half-close: enough rows? -> store -> answer.
 * What the executor checks (slots, blocks) it checks before the store runs, so nothing of a refused call reaches the
 * pool.
 */
#include "server/supervisor/store_rows.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/byte_writer.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/region_ref.h"
#include "server/supervisor/row_buffer.h"
#include "server/supervisor/step_build.h"
#include "server/supervisor/step_caller.h"
#include "server/supervisor/step_encode.h"
#include "server/supervisor/step_messages.h"

struct store_rows {
  struct kvp_step_caller caller;
  struct kvp_byte_writer writer;
  struct kvp_row_buffer buffer;
  struct kvp_rpc_message *first; /* until its rows are written; NULL then */
  uint8_t *slots;                /* [slot_count] int32 of the first message; NULL: none */
  uint64_t epoch;
  struct kvp_region_place place;
  uint32_t row_bytes;
  uint64_t slot_count;
  uint64_t wanted_bytes; /* slot_count rows */
  uint64_t come_bytes;   /* of them */
  bool read_owed;
  bool half_closed;
  bool storing;
  bool over; /* failed or answered */
};

static void store_drop_first(struct store_rows *store) {
  kvp_rpc_message_unref(store->first);
  store->first = NULL;
}

static void store_fail(struct store_rows *store, const struct kvp_error *error) {
  store->over = true;
  store_drop_first(store);
  kvp_row_buffer_release(&store->buffer);
  kvp_rpc_call_fail(store->caller.call, error);
}

/* ---- store ------------------------------------------------------------------------------------------------------
 */

static void store_finished(void *context, uint64_t tag, const struct kvp_step_result *result) {
  struct store_rows *store = context;
  store->over = true;
  kvp_row_buffer_release(&store->buffer);
  kvp_step_finish_call(store->caller.call, tag, result);
}

static const struct kvp_step_events store_events = {.finished = store_finished};

static enum kvp_status store_submit(struct store_rows *store, struct kvp_error *error) {
  struct kvp_pool *pool = kvp_pool_find(store->caller.daemon, store->place.pool_id, error);
  if (pool == NULL) {
    return KVP_UNKNOWN_POOL;
  }
  struct kvp_wire_step *step = kvp_step_build_store_rows(&store->place, store->epoch, store->slots, store->slot_count,
                                                         store->buffer.id, store->row_bytes, error);
  if (step == NULL) {
    return (enum kvp_status)error->status;
  }
  return kvp_step_caller_submit(&store->caller, step, &pool, 1, &store_events, store, 0, error);
}

/* ---- rows -------------------------------------------------------------------------------------------------------
 */

static enum kvp_status store_check_come(const struct store_rows *store, struct kvp_error *error) {
  if (store->come_bytes < store->wanted_bytes) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "rows", -1, (int64_t)store->come_bytes,
                            "%" PRIu64 " bytes of rows came, %" PRIu64 " slots of %u bytes want %" PRIu64,
                            store->come_bytes, store->slot_count, store->row_bytes, store->wanted_bytes);
  }
  return KVP_OK;
}

static void store_go_on(struct store_rows *store) {
  if (store->over || store->storing || store->buffer.creating) {
    return;
  }
  if (!store->half_closed) {
    if (store->read_owed && !kvp_byte_writer_is_full(&store->writer)) {
      store->read_owed = false;
      kvp_rpc_call_read_next(store->caller.call);
    }
    return;
  }
  struct kvp_error error;
  if (store_check_come(store, &error) != KVP_OK) {
    store_fail(store, &error);
  } else if (store->writer.steps == 0) {
    store->storing = true;
    if (store_submit(store, &error) != KVP_OK) {
      store_fail(store, &error);
    }
  }
}

static void store_written(void *context, const struct kvp_error *error) {
  struct store_rows *store = context;
  if (store->over) {
    return;
  }
  if (error != NULL) {
    store_fail(store, error);
  } else {
    store_go_on(store);
  }
}

/* Rows past the last slot are padding of the client's: read and dropped. */
static void store_take_rows(struct store_rows *store, const ProtobufCBinaryData *rows) {
  uint64_t left = store->wanted_bytes - store->come_bytes;
  uint64_t bytes = rows->len < left ? rows->len : left;
  struct kvp_error error;
  if (kvp_byte_writer_write(&store->writer, store->buffer.id, store->come_bytes, rows->data, bytes, &error) !=
      KVP_OK) {
    store_fail(store, &error);
    return;
  }
  store->come_bytes += bytes;
  store->read_owed = true;
  store_go_on(store);
}

/* ---- begin ------------------------------------------------------------------------------------------------------
 */

static void store_free(struct store_rows *store) {
  kvp_step_caller_deinit(&store->caller);
  store_drop_first(store);
  free(store->slots);
  free(store);
}

static void store_buffer_ready(void *context, const struct kvp_error *error) {
  struct store_rows *store = context;
  if (error != NULL) {
    store_fail(store, error);
  } else {
    struct kvp_rpc_message *first = store->first;
    store->first = NULL;
    store_take_rows(store, &((const Kvpool__V1__StoreRowsRequest *)first->body)->rows);
    kvp_rpc_message_unref(first);
  }
}

static void store_buffer_orphaned(void *context) {
  store_free(context);
}

static enum kvp_status store_check_sizes(struct store_rows *store, const Kvpool__V1__StoreRowsRequest *request,
                                         const struct kvp_geometry *geometry, struct kvp_error *error) {
  if (request->row_bytes != geometry->sizes.row_bytes) {
    return kvp_error_set_at(error, KVP_WRONG_FORMAT, -1, "row_bytes", -1, request->row_bytes,
                            "row_bytes = %u, a row of format %s has %u", request->row_bytes, geometry->format->name,
                            geometry->sizes.row_bytes);
  }
  if (request->slots.len % sizeof(int32_t) != 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "slots", -1, (int64_t)request->slots.len,
                            "slots: %zu bytes are not a whole number of int32", request->slots.len);
  }
  store->row_bytes = request->row_bytes;
  store->slot_count = request->slots.len / sizeof(int32_t);
  store->wanted_bytes = store->slot_count * store->row_bytes; /* a message's slots times 2^17 at most */
  if (store->wanted_bytes > kvp_row_buffer_bytes_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "slots", -1, (int64_t)store->slot_count,
                            "%" PRIu64 " rows of %u bytes, one call takes %d bytes", store->slot_count,
                            store->row_bytes, kvp_row_buffer_bytes_max);
  }
  return KVP_OK;
}

static enum kvp_status store_copy_slots(struct store_rows *store, const Kvpool__V1__StoreRowsRequest *request,
                                        struct kvp_error *error) {
  store->epoch = request->epoch;
  if (request->slots.len == 0) {
    return KVP_OK;
  }
  store->slots = malloc(request->slots.len);
  if (store->slots == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for %zu bytes of slots", request->slots.len);
  }
  memcpy(store->slots, request->slots.data, request->slots.len);
  return KVP_OK;
}

static enum kvp_status store_begin(struct store_rows *store, struct kvp_session *session,
                                   const Kvpool__V1__StoreRowsRequest *request, struct kvp_error *error) {
  struct kvp_daemon *daemon = store->caller.daemon;
  struct kvp_region_ref region;
  enum kvp_status status = kvp_region_ref_resolve(daemon, session, request->region, &region, error);
  if (status == KVP_OK) {
    status = store_check_sizes(store, request, &region.geometry, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_device *device = kvp_step_place(daemon, region.pool, request->placement, error);
  if (device == NULL) {
    return KVP_WRONG_DEVICE;
  }
  status = kvp_step_caller_place(&store->caller, device, error);
  if (status == KVP_OK) {
    status = store_copy_slots(store, request, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  store->place = region.place;
  uint64_t bytes = store->wanted_bytes > 0 ? store->wanted_bytes : kvp_view_alignment_bytes;
  kvp_row_buffer_create(&store->buffer, &store->caller, bytes, store_buffer_ready, store_buffer_orphaned, store,
                        session);
  return KVP_OK;
}

static void store_first(struct kvp_daemon *daemon, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__StoreRowsRequest *request = (const Kvpool__V1__StoreRowsRequest *)message->body;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  if (session == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  struct store_rows *store = kvp_allocate(1, sizeof *store);
  kvp_step_caller_init(&store->caller, daemon, call, session);
  kvp_byte_writer_init(&store->writer, &store->caller, store_written, store);
  store->first = kvp_rpc_message_ref(message);
  kvp_rpc_call_set_state(call, store);
  if (store_begin(store, session, request, &error) != KVP_OK) {
    store_fail(store, &error);
  }
}

void kvp_store_rows_on_message(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  struct store_rows *store = kvp_rpc_call_state(call);
  if (store == NULL && message == NULL) {
    struct kvp_error error;
    (void)kvp_error_set(&error, KVP_INVALID_ARGUMENT, "the call ended before it named a region");
    kvp_rpc_call_fail(call, &error);
  } else if (store == NULL) {
    store_first(context, call, message);
  } else if (message == NULL) {
    store->half_closed = true;
    store_go_on(store);
  } else if (!store->over) {
    store_take_rows(store, &((const Kvpool__V1__StoreRowsRequest *)message->body)->rows);
  }
}

void kvp_store_rows_on_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct store_rows *store = kvp_rpc_call_state(call);
  if (store != NULL) {
    kvp_step_caller_abandon(&store->caller, store);
    kvp_step_caller_abandon(&store->caller, &store->writer);
    if (kvp_row_buffer_close(&store->buffer)) {
      store_free(store);
    }
  }
}
