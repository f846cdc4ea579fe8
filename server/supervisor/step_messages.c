/* What became of a step, as protobuf messages. */
#include "server/supervisor/step_messages.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/limits.h"
#include "server/supervisor/rpc_status.h"
#include "server/supervisor/session.h"

enum { torn_blocks_in_text_max = 16 };

void kvp_op_report_init(Kvpool__V1__OpReport *out, const struct kvp_wire_report *report) {
  kvpool__v1__op_report__init(out);
  out->rows_stored = report->rows_stored;
  out->rows_loaded = report->rows_loaded;
  out->rows_skipped = report->rows_skipped;
  out->rows_rejected = report->rows_rejected;
  out->rows_nonfinite = report->rows_nonfinite;
  out->groups_saturated = report->groups_saturated;
  out->bytes_read = report->bytes_read;
  out->bytes_written = report->bytes_written;
  out->queued_ns = report->queued_ns;
  out->started_ns = report->started_ns;
  out->finished_ns = report->finished_ns;
  out->unchecked_arrays = (report->flags & KVP_REPORT_UNCHECKED_ARRAYS) != 0;
  out->hazard_unchecked = (report->flags & KVP_REPORT_HAZARD_UNCHECKED) != 0;
  out->main_kv_offset = report->main_kv_offset;
}

/* A step's reports are too many for the stack and needed until the message is packed, which is at once. */
static void done_init(Kvpool__V1__StepDone *done, uint64_t step_id, const struct kvp_step_result *result) {
  static Kvpool__V1__OpReport reports[kvp_ops_per_step_max];
  static Kvpool__V1__OpReport *pointers[kvp_ops_per_step_max];
  assert(result->report_count <= kvp_ops_per_step_max);
  for (uint32_t i = 0; i < result->report_count; i++) {
    kvp_op_report_init(&reports[i], &result->reports[i]);
    pointers[i] = &reports[i];
  }
  kvpool__v1__step_done__init(done);
  done->step_id = step_id;
  done->reports = pointers;
  done->n_reports = result->report_count;
}

struct torn_messages {
  Kvpool__V1__TornBlocks bodies[kvp_pools_max];
  Kvpool__V1__TornBlocks *pointers[kvp_pools_max];
};

static void torn_init(struct torn_messages *messages, const struct kvp_torn_blocks *torn, uint32_t torn_count) {
  assert(torn_count <= kvp_pools_max);
  for (uint32_t i = 0; i < torn_count; i++) {
    Kvpool__V1__TornBlocks *body = &messages->bodies[i];
    kvpool__v1__torn_blocks__init(body);
    body->pool_id = torn[i].pool_id;
    body->blocks.data = (uint8_t *)torn[i].blocks; /* packing only reads it */
    body->blocks.len = torn[i].count * sizeof *torn[i].blocks;
    messages->pointers[i] = body;
  }
}

/* ---- events -----------------------------------------------------------------------------------------------------
 */

void kvp_step_send_accepted(struct kvp_rpc_call *call, uint64_t step_id) {
  Kvpool__V1__StepAccepted accepted = KVPOOL__V1__STEP_ACCEPTED__INIT;
  accepted.step_id = step_id;
  Kvpool__V1__StepEvent event = KVPOOL__V1__STEP_EVENT__INIT;
  event.event_case = KVPOOL__V1__STEP_EVENT__EVENT_ACCEPTED;
  event.accepted = &accepted;
  (void)kvp_rpc_call_send(call, &event.base);
}

static void send_failed(struct kvp_rpc_call *call, uint64_t step_id, const struct kvp_error *error,
                        const struct kvp_torn_blocks *torn, uint32_t torn_count) {
  struct kvp_rpc_error_detail detail;
  struct torn_messages messages;
  kvp_rpc_error_detail_init(&detail, error);
  torn_init(&messages, torn, torn_count);
  Kvpool__V1__StepFailed failed = KVPOOL__V1__STEP_FAILED__INIT;
  failed.step_id = step_id;
  failed.error = &detail.body;
  failed.torn = messages.pointers;
  failed.n_torn = torn_count;
  Kvpool__V1__StepEvent event = KVPOOL__V1__STEP_EVENT__INIT;
  event.event_case = KVPOOL__V1__STEP_EVENT__EVENT_FAILED;
  event.failed = &failed;
  (void)kvp_rpc_call_send(call, &event.base);
}

void kvp_step_send_finished(struct kvp_rpc_call *call, uint64_t step_id, const struct kvp_step_result *result) {
  if (result->error != NULL) {
    send_failed(call, step_id, result->error, result->torn, result->torn_count);
    return;
  }
  Kvpool__V1__StepDone done;
  done_init(&done, step_id, result);
  Kvpool__V1__StepEvent event = KVPOOL__V1__STEP_EVENT__INIT;
  event.event_case = KVPOOL__V1__STEP_EVENT__EVENT_DONE;
  event.done = &done;
  (void)kvp_rpc_call_send(call, &event.base);
}

void kvp_step_send_refused(struct kvp_rpc_call *call, uint64_t step_id, const struct kvp_error *error) {
  send_failed(call, step_id, error, NULL, 0);
}

/* ---- answers ----------------------------------------------------------------------------------------------------
 */

/* Cut where the text is full. */
static void text_append(struct kvp_error *error, const char *before, uint64_t value, const char *after) {
  size_t used = strlen(error->text);
  (void)snprintf(error->text + used, sizeof error->text - used, "%s%" PRIu64 "%s", before, value, after);
}

static void text_append_torn(struct kvp_error *error, const struct kvp_torn_blocks *torn) {
  text_append(error, "; blocks of pool ", torn->pool_id, " that may be torn:");
  uint32_t named = torn->count < torn_blocks_in_text_max ? torn->count : torn_blocks_in_text_max;
  for (uint32_t i = 0; i < named; i++) {
    text_append(error, " ", (uint64_t)torn->blocks[i], "");
  }
  if (torn->count > named) {
    text_append(error, " and ", torn->count - named, " more");
  }
}

void kvp_step_finish_call(struct kvp_rpc_call *call, uint64_t step_id, const struct kvp_step_result *result) {
  if (result->error != NULL) {
    struct kvp_error error = *result->error;
    for (uint32_t i = 0; i < result->torn_count; i++) {
      text_append_torn(&error, &result->torn[i]);
    }
    kvp_rpc_call_fail(call, &error);
    return;
  }
  Kvpool__V1__StepDone done;
  done_init(&done, step_id, result);
  kvp_rpc_call_finish(call, &done.base);
}
