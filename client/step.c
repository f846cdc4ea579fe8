/* Steps: an ordered list of ops, kept as the bytes that go on the wire.
 *
 * Arrays and ops are encoded when they are added, for both doors; a submit only puts a head in front (session, number,
 * epoch), so that sending a step costs one copy of it. A step belongs to one thread at a time.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/attach.h"
#include "client/internal.h"

/* Numbers of kvpool.proto. */
enum { step_field_arrays = 5, array_field_inline = 1 };

kvpool_status kvpool_step_new(kvpool_session *session, kvpool_step **out, kvpool_error *error) {
  assert(session != NULL && out != NULL);
  kvpool_step *step = calloc(1, sizeof *step);
  if (step == NULL) {
    return kvp_fail_no_memory(error);
  }
  kvp_session_ref(session);
  step->session = session;
  step->array_bytes_max = session->client->message_bytes_max;
  *out = step;
  return KVPOOL_OK;
}

kvpool_status kvpool_attachment_step_new(kvpool_attachment *attachment, kvpool_step **out, kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  kvpool_step *step = calloc(1, sizeof *step);
  if (step == NULL) {
    return kvp_fail_no_memory(error);
  }
  kvp_attachment_ref(attachment);
  step->attachment = attachment;
  step->array_bytes_max = kvp_attachment_step_bytes_max;
  *out = step;
  return KVPOOL_OK;
}

void kvpool_step_destroy(kvpool_step *step) {
  if (step != NULL) {
    kvp_bytes_deinit(&step->body);
    kvp_bytes_deinit(&step->wire_ops);
    kvp_bytes_deinit(&step->wire_arrays);
    if (step->session != NULL) {
      kvp_session_unref(step->session);
    }
    if (step->attachment != NULL) {
      kvp_attachment_unref(step->attachment);
    }
    free(step);
  }
}

void kvpool_step_clear(kvpool_step *step) {
  assert(step != NULL);
  step->body.size = 0;
  step->wire_ops.size = 0;
  step->wire_arrays.size = 0;
  step->inline_bytes = 0;
  step->array_count = 0;
  step->op_count = 0;
  step->point_count = 0;
  step->placement[0] = '\0';
  step->buffer_first = step->buffer_elsewhere = (struct kvp_step_buffer){.id = 0};
}

kvpool_status kvpool_step_set_placement(kvpool_step *step, const char *device, kvpool_error *error) {
  assert(step != NULL);
  const char *name = device == NULL ? "" : device;
  if (strlen(name) >= sizeof step->placement) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "a device's name has at most %zu characters, this one %zu",
                    sizeof step->placement - 1, strlen(name));
  }
  (void)snprintf(step->placement, sizeof step->placement, "%s", name);
  return KVPOOL_OK;
}

void kvp_step_name_buffer(kvpool_step *step, int32_t op, const kvpool_buffer *buffer) {
  struct kvp_step_buffer *place = NULL;
  if (step->buffer_first.id == 0) {
    place = &step->buffer_first;
  } else if (step->buffer_elsewhere.id == 0 && strcmp(step->buffer_first.device, buffer->device) != 0) {
    place = &step->buffer_elsewhere;
  }
  if (place != NULL) {
    place->id = buffer->id;
    place->op = op;
    memcpy(place->device, buffer->device, sizeof place->device);
  }
}

kvpool_status kvp_step_check_device(const kvpool_step *step, const char *device, kvpool_error *error) {
  const struct kvp_step_buffer *wrong = &step->buffer_first;
  if (wrong->id != 0 && strcmp(wrong->device, device) == 0) {
    wrong = &step->buffer_elsewhere;
  }
  if (wrong->id == 0) {
    return KVPOOL_OK;
  }
  const kvpool_status status =
      kvp_fail_at(error, KVPOOL_WRONG_DEVICE, wrong->op < 0 ? "arrays" : "", -1, (int64_t)wrong->id,
                  "buffer %llu is on %s, the step runs on %s", (unsigned long long)wrong->id, wrong->device, device);
  if (error != NULL) {
    error->op = wrong->op;
  }
  return status;
}

static kvpool_status step_check_array_room(const kvpool_step *step, kvpool_error *error) {
  if (step->array_count == kvp_arrays_per_step_max) {
    return kvp_fail_at(error, KVPOOL_TOO_LARGE, "arrays", kvp_arrays_per_step_max, 0, "a step has at most %d arrays",
                       kvp_arrays_per_step_max);
  }
  return KVPOOL_OK;
}

/* An inline array is Array{inline}: a field that holds a field. */
static bool step_append_inline(kvpool_step *step, const void *data, size_t bytes) {
  struct kvp_bytes *body = &step->body;
  size_t length_bytes = 1;
  for (size_t rest = bytes >> 7; rest > 0; rest >>= 7) {
    length_bytes++;
  }
  if (!kvp_bytes_open_field(body, step_field_arrays, 1 + length_bytes + bytes) ||
      !kvp_bytes_open_field(body, array_field_inline, bytes) || !kvp_step_wire_add_inline(step, body->size, bytes)) {
    return false;
  }
  if (bytes > 0) {
    memcpy(body->data + body->size, data, bytes);
  }
  body->size += bytes;
  return true;
}

kvpool_status kvpool_step_add_array(kvpool_step *step, const int32_t *values, size_t count, uint32_t *array,
                                    kvpool_error *error) {
  assert(step != NULL && array != NULL && (values != NULL || count == 0));
  kvpool_status status = step_check_array_room(step, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const size_t bytes_max = step->array_bytes_max;
  if (count > bytes_max / kvp_int32_bytes) {
    return kvp_fail_at(error, KVPOOL_TOO_LARGE, "values", -1, (int64_t)count,
                       "an array of %zu elements is larger than a step may be (%zu bytes); use a buffer array", count,
                       bytes_max);
  }
  size_t size_before = step->body.size;
  if (!step_append_inline(step, values, count * kvp_int32_bytes)) {
    step->body.size = size_before;
    return kvp_fail_no_memory(error);
  }
  *array = step->array_count++;
  return KVPOOL_OK;
}

kvpool_status kvpool_step_add_buffer_array(kvpool_step *step, const kvpool_buffer *buffer, uint64_t offset_bytes,
                                           uint64_t count, uint32_t *array, kvpool_error *error) {
  assert(step != NULL && buffer != NULL && array != NULL);
  kvpool_status status = step_check_array_room(step, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__BufferArray source = KVPOOL__V1__BUFFER_ARRAY__INIT;
  source.buffer_id = buffer->id;
  source.offset_bytes = offset_bytes;
  source.count = count;
  Kvpool__V1__Array message = KVPOOL__V1__ARRAY__INIT;
  message.source_case = KVPOOL__V1__ARRAY__SOURCE_BUFFER;
  message.buffer = &source;
  const size_t size_before = step->body.size;
  if (!kvp_bytes_append_message(&step->body, step_field_arrays, &message.base) ||
      !kvp_step_wire_add_buffer(step, buffer->id, offset_bytes, count)) {
    step->body.size = size_before;
    return kvp_fail_no_memory(error);
  }
  kvp_step_name_buffer(step, -1, buffer);
  *array = step->array_count++;
  return KVPOOL_OK;
}

static kvpool_status step_check_point(const kvpool_step *step, uint64_t value, kvpool_error *error) {
  if (step->op_count == 0) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "the step has no op that could wait or signal");
  }
  if (value >= KVP_TIMELINE_POISON) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "value", -1, (int64_t)value,
                       "value %llu is not below 2^62, as a timeline's values are", (unsigned long long)value);
  }
  return KVPOOL_OK;
}

static struct kvp_wire_op *step_last_op(kvpool_step *step) {
  return (struct kvp_wire_op *)(void *)step->wire_ops.data + (step->op_count - 1);
}

kvpool_status kvpool_step_set_wait(kvpool_step *step, uint32_t word, uint64_t value, kvpool_error *error) {
  assert(step != NULL);
  kvpool_status status = step_check_point(step, value, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (word >= kvp_timeline_words) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "word", -1, word, "word %u, an attachment has %d", word,
                       kvp_timeline_words);
  }
  struct kvp_wire_op *op = step_last_op(step);
  op->flags |= KVP_OP_WAITS;
  op->wait = (struct kvp_wire_point){.word = word, .value = value};
  step->point_count++;
  return KVPOOL_OK;
}

kvpool_status kvpool_step_set_signal(kvpool_step *step, uint32_t word, uint64_t value, kvpool_error *error) {
  assert(step != NULL);
  kvpool_status status = step_check_point(step, value, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (word < kvp_client_words || word >= kvp_timeline_words) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "word", -1, word,
                       "word %u is not one of the executor's, which are %d to %d", word, kvp_client_words,
                       kvp_timeline_words - 1);
  }
  struct kvp_wire_op *op = step_last_op(step);
  op->flags |= KVP_OP_SIGNALS;
  op->signal = (struct kvp_wire_point){.word = word, .value = value};
  step->point_count++;
  return KVPOOL_OK;
}

/* Whether a session's calls take it. */
static kvpool_status step_check_door(const kvpool_step *step, kvpool_error *error) {
  if (step->session == NULL) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "a step of an attachment is posted: kvpool_attachment_post");
  }
  if (step->point_count > 0) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT,
                    "the step waits for timelines or signals them: only kvpool_attachment_post takes it");
  }
  return KVPOOL_OK;
}

kvpool_status kvp_step_pack(const kvpool_step *step, uint64_t step_id, bool with_session, grpc_byte_buffer **out,
                            kvpool_error *error) {
  kvpool_status status = step_check_door(step, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__SessionRef reference = kvp_session_reference(step->session);
  Kvpool__V1__StepRequest head = KVPOOL__V1__STEP_REQUEST__INIT;
  head.session = with_session ? &reference : NULL;
  head.step_id = step_id;
  head.placement = (char *)step->placement;
  head.epoch = kvpool_session_epoch(step->session);
  size_t bytes = kvpool__v1__step_request__get_packed_size(&head) + step->body.size;
  size_t bytes_max = step->session->client->message_bytes_max;
  if (bytes > bytes_max) {
    /* The transport would end the whole queue over it. */
    return kvp_fail_at(error, KVPOOL_TOO_LARGE, "", -1, (int64_t)bytes,
                       "the step has %zu bytes, the daemon takes %zu: split it, or put arrays into buffers", bytes,
                       bytes_max);
  }
  *out = kvp_message_pack(&head.base, &step->body);
  return KVPOOL_OK;
}

void kvp_op_report_from(const Kvpool__V1__OpReport *from, kvpool_op_report *out) {
  *out = (kvpool_op_report){
      .rows_stored = from->rows_stored,
      .rows_loaded = from->rows_loaded,
      .rows_skipped = from->rows_skipped,
      .rows_rejected = from->rows_rejected,
      .rows_nonfinite = from->rows_nonfinite,
      .groups_saturated = from->groups_saturated,
      .bytes_read = from->bytes_read,
      .bytes_written = from->bytes_written,
      .queued_ns = from->queued_ns,
      .started_ns = from->started_ns,
      .finished_ns = from->finished_ns,
      .unchecked_arrays = from->unchecked_arrays,
      .hazard_unchecked = from->hazard_unchecked,
      .main_kv_offset = from->main_kv_offset,
  };
}

kvpool_status kvpool_step_run(kvpool_step *step, kvpool_op_report *reports, size_t report_count_max,
                              kvpool_error *error) {
  assert(step != NULL);
  grpc_byte_buffer *request;
  kvpool_status status = step_check_door(step, error);
  if (status == KVPOOL_OK) {
    status = kvp_session_check(step->session, error);
  }
  if (status == KVPOOL_OK) {
    status = kvp_step_pack(step, 0, true, &request, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  ProtobufCMessage *message;
  status = kvp_call_unary_packed(step->session->client, KVP_METHOD_RUN_STEP, request,
                                 &kvpool__v1__step_done__descriptor, &message, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const Kvpool__V1__StepDone *done = (const Kvpool__V1__StepDone *)message;
  for (size_t i = 0; reports != NULL && i < done->n_reports && i < report_count_max; i++) {
    kvp_op_report_from(done->reports[i], &reports[i]);
  }
  protobuf_c_message_free_unpacked(message, NULL);
  return KVPOOL_OK;
}
