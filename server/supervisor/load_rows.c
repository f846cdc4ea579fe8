/* A LoadRows call: checks -> buffer -> zeroes, then the load, in one queue -> rows -> scales -> report. */
#include "server/supervisor/load_rows.h"

#include <inttypes.h>
#include <stdlib.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/byte_stream.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/region_ref.h"
#include "server/supervisor/row_buffer.h"
#include "server/supervisor/step_build.h"
#include "server/supervisor/step_caller.h"
#include "server/supervisor/step_encode.h"
#include "server/supervisor/step_messages.h"

struct load_rows {
  struct kvp_step_caller caller;
  struct kvp_byte_stream stream;
  struct kvp_row_buffer buffer;
  struct kvp_rpc_message *request; /* until the load is submitted; the segments live in it */
  struct kvp_region_place place;
  struct kvp_rows_layout layout;
  struct kvp_wire_report report;
  uint32_t steps_left; /* zeroing and load: the call is answered when neither is in flight any more */
  bool failed;
  struct kvp_error failure; /* the first one, while steps are left */
};

static void load_fail(struct load_rows *load, const struct kvp_error *error) {
  load->stream.over = true;
  kvp_row_buffer_release(&load->buffer);
  kvp_rpc_call_fail(load->caller.call, error);
}

/* ---- stream -----------------------------------------------------------------------------------------------------
 */

static struct kvp_wire_step *rows_build(void *context, uint64_t offset, uint32_t bytes, struct kvp_pool **pool,
                                        struct kvp_error *error) {
  const struct load_rows *load = context;
  (void)pool;
  return kvp_step_build_read(load->buffer.id, offset, bytes, error);
}

static void rows_deliver(void *context, uint64_t offset, const uint8_t *data, size_t bytes) {
  const struct load_rows *load = context;
  (void)offset;
  Kvpool__V1__LoadRowsResponse response = KVPOOL__V1__LOAD_ROWS_RESPONSE__INIT;
  response.rows.data = (uint8_t *)data; /* packing only reads it */
  response.rows.len = bytes;
  (void)kvp_rpc_call_send(load->caller.call, &response.base);
}

static struct kvp_wire_step *scales_build(void *context, uint64_t offset, uint32_t bytes, struct kvp_pool **pool,
                                          struct kvp_error *error) {
  const struct load_rows *load = context;
  (void)pool;
  return kvp_step_build_read(load->buffer.id, load->layout.scales_begin + offset, bytes, error);
}

static void scales_deliver(void *context, uint64_t offset, const uint8_t *data, size_t bytes) {
  const struct load_rows *load = context;
  (void)offset;
  Kvpool__V1__LoadRowsResponse response = KVPOOL__V1__LOAD_ROWS_RESPONSE__INIT;
  response.scales.data = (uint8_t *)data; /* packing only reads it */
  response.scales.len = bytes;
  (void)kvp_rpc_call_send(load->caller.call, &response.base);
}

static void scales_end(void *context, const struct kvp_error *error) {
  struct load_rows *load = context;
  if (error != NULL) {
    load_fail(load, error);
    return;
  }
  Kvpool__V1__OpReport report;
  kvp_op_report_init(&report, &load->report);
  Kvpool__V1__LoadRowsResponse response = KVPOOL__V1__LOAD_ROWS_RESPONSE__INIT;
  response.report = &report;
  kvp_row_buffer_release(&load->buffer);
  (void)kvp_rpc_call_send(load->caller.call, &response.base);
  kvp_rpc_call_finish(load->caller.call, NULL);
}

static const struct kvp_byte_source scales_source = {
    .build = scales_build, .deliver = scales_deliver, .end = scales_end};

static void rows_end(void *context, const struct kvp_error *error) {
  struct load_rows *load = context;
  if (error != NULL) {
    load_fail(load, error);
    return;
  }
  kvp_byte_stream_start(&load->stream, &load->caller, &scales_source, load,
                        load->layout.rows * load->layout.scale_bytes);
}

static const struct kvp_byte_source rows_source = {.build = rows_build, .deliver = rows_deliver, .end = rows_end};

/* ---- load -------------------------------------------------------------------------------------------------------
 */

static void load_note(struct load_rows *load, const struct kvp_error *error) {
  if (!load->failed) {
    load->failed = true;
    load->failure = *error;
  }
}

static void load_step_over(struct load_rows *load, const struct kvp_step_result *result) {
  if (result->error != NULL) {
    load_note(load, result->error);
  }
  if (--load->steps_left > 0) {
    return;
  }
  if (load->failed) {
    load_fail(load, &load->failure);
    return;
  }
  kvp_byte_stream_start(&load->stream, &load->caller, &rows_source, load, load->layout.rows * load->layout.row_bytes);
}

static void load_zeroed(void *context, uint64_t tag, const struct kvp_step_result *result) {
  (void)tag;
  load_step_over(context, result);
}

static void load_finished(void *context, uint64_t tag, const struct kvp_step_result *result) {
  struct load_rows *load = context;
  (void)tag;
  if (result->error == NULL) {
    load->report = result->reports[0];
  }
  load_step_over(load, result);
}

static const struct kvp_step_events zero_events = {.finished = load_zeroed};
static const struct kvp_step_events load_events = {.finished = load_finished};

static enum kvp_status zero_submit(struct load_rows *load, struct kvp_error *error) {
  struct kvp_wire_step *step = kvp_step_build_zero(load->buffer.id, (uint32_t)load->layout.bytes, error);
  return step == NULL ? (enum kvp_status)error->status
                      : kvp_step_caller_submit(&load->caller, step, NULL, 0, &zero_events, load, 0, error);
}

static enum kvp_status load_submit(struct load_rows *load, struct kvp_error *error) {
  const Kvpool__V1__LoadRowsRequest *request = (const Kvpool__V1__LoadRowsRequest *)load->request->body;
  struct kvp_pool *pool = kvp_pool_find(load->caller.daemon, load->place.pool_id, error);
  if (pool == NULL) {
    return KVP_UNKNOWN_POOL;
  }
  struct kvp_wire_step *step = kvp_step_build_load_rows(&load->place, request->epoch, request->segments.data,
                                                        request->segments.len, load->buffer.id, &load->layout, error);
  return step == NULL ? (enum kvp_status)error->status
                      : kvp_step_caller_submit(&load->caller, step, &pool, 1, &load_events, load, 0, error);
}

static void load_buffer_ready(void *context, const struct kvp_error *error) {
  struct load_rows *load = context;
  struct kvp_error refusal;
  if (error != NULL) {
    load_fail(load, error);
    return;
  }
  if (zero_submit(load, &refusal) != KVP_OK) {
    load_fail(load, &refusal);
    return;
  }
  load->steps_left = 1;
  if (load_submit(load, &refusal) == KVP_OK) {
    load->steps_left = 2;
  } else {
    load_note(load, &refusal);
  }
}

/* ---- begin ------------------------------------------------------------------------------------------------------
 */

static void load_free(struct load_rows *load) {
  kvp_step_caller_deinit(&load->caller);
  kvp_rpc_message_unref(load->request);
  free(load);
}

static void load_buffer_orphaned(void *context) {
  load_free(context);
}

static uint64_t round_up(uint64_t bytes) {
  return (bytes + kvp_view_alignment_bytes - 1) / kvp_view_alignment_bytes * kvp_view_alignment_bytes;
}

static enum kvp_status layout_init(struct kvp_rows_layout *layout, const struct kvp_geometry *geometry, uint64_t rows,
                                   struct kvp_error *error) {
  const struct kvp_format_sizes *sizes = &geometry->sizes;
  uint64_t place_bytes = (uint64_t)sizes->loaded_row_bytes + sizes->loaded_scale_bytes;
  if (rows > kvp_row_buffer_bytes_max / place_bytes) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "total_k", -1, (int64_t)rows,
                            "%" PRIu64 " rows of %" PRIu64 " bytes, one call takes %d bytes", rows, place_bytes,
                            kvp_row_buffer_bytes_max);
  }
  layout->rows = rows;
  layout->row_bytes = sizes->loaded_row_bytes;
  layout->scale_bytes = sizes->loaded_scale_bytes;
  layout->scales_begin = round_up(rows * layout->row_bytes);
  layout->bytes = layout->scales_begin + rows * layout->scale_bytes;
  if (layout->bytes == 0) {
    layout->bytes = kvp_view_alignment_bytes;
  }
  return KVP_OK;
}

static enum kvp_status load_begin(struct load_rows *load, struct kvp_session *session,
                                  const Kvpool__V1__LoadRowsRequest *request, struct kvp_error *error) {
  struct kvp_daemon *daemon = load->caller.daemon;
  struct kvp_region_ref region;
  if (request->segments.len % sizeof(int32_t[4]) != 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "segments", -1, (int64_t)request->segments.len,
                            "segments: %zu bytes are not a whole number of int32[4]", request->segments.len);
  }
  enum kvp_status status = kvp_region_ref_resolve(daemon, session, request->region, &region, error);
  if (status == KVP_OK) {
    status = layout_init(&load->layout, &region.geometry, request->total_k, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_device *device = kvp_step_place(daemon, region.pool, request->placement, error);
  if (device == NULL) {
    return KVP_WRONG_DEVICE;
  }
  status = kvp_step_caller_place(&load->caller, device, error);
  if (status != KVP_OK) {
    return status;
  }
  load->place = region.place;
  kvp_row_buffer_create(&load->buffer, &load->caller, load->layout.bytes, load_buffer_ready, load_buffer_orphaned,
                        load, session);
  return KVP_OK;
}

void kvp_load_rows_on_message(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__LoadRowsRequest *request = (const Kvpool__V1__LoadRowsRequest *)message->body;
  struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  if (session == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  struct load_rows *load = kvp_allocate(1, sizeof *load);
  kvp_step_caller_init(&load->caller, daemon, call, session);
  load->request = kvp_rpc_message_ref(message);
  load->stream.over = true; /* not begun */
  kvp_rpc_call_set_state(call, load);
  if (load_begin(load, session, request, &error) != KVP_OK) {
    load_fail(load, &error);
  }
}

void kvp_load_rows_on_writable(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct load_rows *load = kvp_rpc_call_state(call);
  if (load != NULL) {
    kvp_byte_stream_go_on(&load->stream);
  }
}

void kvp_load_rows_on_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct load_rows *load = kvp_rpc_call_state(call);
  if (load != NULL) {
    kvp_step_caller_abandon(&load->caller, load);
    kvp_step_caller_abandon(&load->caller, &load->stream);
    if (kvp_row_buffer_close(&load->buffer)) {
      load_free(load);
    }
  }
}
