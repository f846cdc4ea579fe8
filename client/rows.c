/* Rows without buffers: streams of pieces, for tools and tests. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/internal.h"

enum { load_field_rows = 1, load_field_scales = 2, load_field_report = 3, request_head_bytes_max = 1024 };

/* One of a load's outputs: filled from the front. */
struct rows_output {
  uint8_t *data;
  uint64_t bytes;
  uint64_t got;
};

/* The answer to a store, or malformed. */
static kvpool_status store_finish(struct kvp_call *call, kvpool_op_report *report, kvpool_error *error) {
  Kvpool__V1__StepDone *done = NULL;
  if (call->incoming != NULL) {
    done = (Kvpool__V1__StepDone *)kvp_message_unpack(call->incoming, &kvpool__v1__step_done__descriptor);
  }
  kvpool_status status = KVPOOL_OK;
  if (done == NULL || done->n_reports != 1) {
    status = kvp_call_malformed(KVP_METHOD_STORE_ROWS, error);
  } else if (report != NULL) {
    kvp_op_report_from(done->reports[0], report);
  }
  kvpool__v1__step_done__free_unpacked(done, NULL);
  return status;
}

/* head: the first message without rows; rows: what goes behind it, in pieces. */
static kvpool_status store_send(struct kvp_call *call, Kvpool__V1__StoreRowsRequest *head, const uint8_t *rows,
                                uint64_t bytes, kvpool_error *error) {
  size_t piece_max = call->client->chunk_bytes_max;
  bool fits_first = head->slots.len + piece_max + request_head_bytes_max <= call->client->message_bytes_max;
  size_t first = !fits_first ? 0 : bytes < piece_max ? (size_t)bytes : piece_max;
  head->rows = (ProtobufCBinaryData){.len = first, .data = (uint8_t *)rows};
  kvp_call_start_stream(call, kvp_message_pack(&head->base, NULL), first == bytes);
  bool is_open = true;
  for (uint64_t done = first; done < bytes && is_open;) {
    size_t piece = bytes - done < piece_max ? (size_t)(bytes - done) : piece_max;
    Kvpool__V1__StoreRowsRequest next = KVPOOL__V1__STORE_ROWS_REQUEST__INIT;
    next.rows = (ProtobufCBinaryData){.len = piece, .data = (uint8_t *)rows + done};
    grpc_byte_buffer *message = kvp_message_pack(&next.base, NULL);
    kvpool_status status = kvp_call_wait_sent(call, error);
    if (status != KVPOOL_OK) {
      grpc_byte_buffer_destroy(message);
      return status;
    }
    done += piece;
    is_open = kvp_call_send(call, message, done == bytes);
  }
  return kvp_call_wait_closed(call, error);
}

static kvpool_status rows_check(kvpool_session *session, const kvpool_layer *layer, const char *array, size_t bytes,
                                kvpool_error *error) {
  kvpool_status status = kvp_client_check_may_block("a call with rows", error);
  status = status == KVPOOL_OK ? kvp_session_check(session, error) : status;
  status = status == KVPOOL_OK ? kvp_layer_check(layer, error) : status;
  size_t bytes_max = session->client->message_bytes_max - request_head_bytes_max;
  if (status == KVPOOL_OK && bytes > bytes_max) {
    status = kvp_fail_at(error, KVPOOL_TOO_LARGE, array, -1, (int64_t)bytes,
                         "%s of %zu bytes: one call takes %zu; use several calls, or steps", array, bytes, bytes_max);
  }
  return status;
}

kvpool_status kvpool_rows_store(kvpool_session *session, const kvpool_layer *layer, const void *rows,
                                uint64_t row_count, uint32_t row_bytes, const int32_t *slots, size_t slot_count,
                                kvpool_op_report *report, kvpool_error *error) {
  assert(session != NULL && (rows != NULL || row_count == 0) && (slots != NULL || slot_count == 0));
  uint64_t bytes;
  if (__builtin_mul_overflow(row_count, row_bytes, &bytes)) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "row_count", -1, (int64_t)row_count,
                       "%llu rows of %u bytes don't fit into 64 bits", (unsigned long long)row_count, row_bytes);
  }
  if (slot_count > row_count) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "slots", -1, (int64_t)slot_count,
                       "%zu slots but only %llu rows", slot_count, (unsigned long long)row_count);
  }
  kvpool_status status = rows_check(session, layer, "slots", slot_count * kvp_int32_bytes, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  struct kvp_call *call;
  status = kvp_call_new(session->client, KVP_METHOD_STORE_ROWS, NULL, NULL, &call, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__SessionRef reference = kvp_session_reference(session);
  Kvpool__V1__RegionRef region = kvp_layer_reference(layer);
  Kvpool__V1__StoreRowsRequest head = KVPOOL__V1__STORE_ROWS_REQUEST__INIT;
  head.session = &reference;
  head.epoch = kvpool_session_epoch(session);
  head.region = &region;
  head.row_bytes = row_bytes;
  head.slots = (ProtobufCBinaryData){.len = slot_count * kvp_int32_bytes, .data = (uint8_t *)slots};
  status = store_send(call, &head, rows, bytes, error);
  if (status == KVPOOL_OK) {
    status = store_finish(call, report, error);
  }
  kvp_call_unref(call);
  return kvp_pool_explain(layer->pool, status, error);
}

/* Bytes of one row of a load's two outputs. */
static kvpool_status loaded_sizes(const kvpool_session *session, const kvpool_layer *layer, uint32_t *row_bytes,
                                  uint32_t *scale_bytes, kvpool_error *error) {
  const kvpool_region_info *region = &layer->pool->regions[layer->region];
  const kvpool_server_info *info = session->client->info; /* a pool of a map has no client */
  for (size_t i = 0; i < kvpool_server_info_format_count(info); i++) {
    const kvpool_format_info *format = kvpool_server_info_format(info, i);
    if (strcmp(format->name, region->format) == 0) {
      /* An unquantized record is its own row; its width is the region's. */
      *row_bytes = format->quantized_elements == 0 ? region->data_bytes : format->loaded_row_bytes;
      *scale_bytes = format->loaded_scale_bytes;
      return KVPOOL_OK;
    }
  }
  return kvp_fail(error, KVPOOL_WRONG_FORMAT, "format \"%s\" of region \"%s\" was not in the catalogue at connect",
                  region->format, region->name);
}

static bool output_take(struct rows_output *output, struct kvp_reader *reader, uint64_t bytes) {
  if (bytes > output->bytes - output->got || !kvp_reader_bytes(reader, output->data + output->got, (size_t)bytes)) {
    return false;
  }
  output->got += bytes;
  return true;
}

static bool report_take(kvpool_op_report *report, struct kvp_reader *reader, uint64_t bytes) {
  uint8_t packed[256]; /* twelve numbers of at most eleven bytes */
  if (bytes > sizeof packed || !kvp_reader_bytes(reader, packed, (size_t)bytes)) {
    return false;
  }
  Kvpool__V1__OpReport *message = kvpool__v1__op_report__unpack(NULL, (size_t)bytes, packed);
  if (message == NULL) {
    return false;
  }
  if (report != NULL) {
    kvp_op_report_from(message, report);
  }
  kvpool__v1__op_report__free_unpacked(message, NULL);
  return true;
}

static bool load_take(grpc_byte_buffer *message, struct rows_output *rows, struct rows_output *scales,
                      kvpool_op_report *report) {
  struct kvp_reader reader;
  if (!kvp_reader_init(&reader, message)) {
    return false;
  }
  bool is_whole = true;
  while (is_whole && reader.left > 0) {
    struct kvp_field field;
    is_whole = kvp_reader_next_field(&reader, &field);
    if (!is_whole || field.wire_type != KVP_WIRE_BYTES) {
      continue;
    }
    if (field.number == load_field_rows) {
      is_whole = output_take(rows, &reader, field.value);
    } else if (field.number == load_field_scales) {
      is_whole = output_take(scales, &reader, field.value);
    } else if (field.number == load_field_report) {
      is_whole = report_take(report, &reader, field.value);
    } else {
      is_whole = kvp_reader_bytes(&reader, NULL, (size_t)field.value);
    }
  }
  kvp_reader_deinit(&reader);
  return is_whole;
}

static kvpool_status load_collect(struct kvp_call *call, struct rows_output *rows, struct rows_output *scales,
                                  kvpool_op_report *report, kvpool_error *error) {
  bool is_whole = true;
  grpc_byte_buffer *message;
  kvpool_status status;
  while ((status = kvp_call_wait_message(call, &message, error)) == KVPOOL_OK && message != NULL && is_whole) {
    (void)kvp_call_receive(call); /* when the call is over the next wait gives no message */
    is_whole = load_take(message, rows, scales, report);
    grpc_byte_buffer_destroy(message);
  }
  if (!is_whole) {
    kvp_call_cancel(call);
    return kvp_call_malformed(KVP_METHOD_LOAD_ROWS, error);
  }
  if (status == KVPOOL_OK) {
    status = kvp_call_wait_closed(call, error);
  }
  if (status == KVPOOL_OK && (rows->got != rows->bytes || scales->got != scales->bytes)) {
    status = kvp_fail(error, KVPOOL_INTERNAL, "LoadRows: %llu + %llu bytes came, not %llu + %llu",
                      (unsigned long long)rows->got, (unsigned long long)scales->got, (unsigned long long)rows->bytes,
                      (unsigned long long)scales->bytes);
  }
  return status;
}

kvpool_status kvpool_rows_load(kvpool_session *session, const kvpool_layer *layer, const int32_t *segments,
                               size_t segment_count, uint64_t total_k, void *rows, void *scales,
                               kvpool_op_report *report, kvpool_error *error) {
  assert(session != NULL && (segments != NULL || segment_count == 0) && (rows != NULL || total_k == 0));
  size_t segments_bytes;
  if (__builtin_mul_overflow(segment_count, sizeof(kvpool_segment), &segments_bytes)) {
    segments_bytes = SIZE_MAX;
  }
  kvpool_status status = rows_check(session, layer, "segments", segments_bytes, error);
  uint32_t row_bytes = 0, scale_bytes = 0;
  status = status == KVPOOL_OK ? loaded_sizes(session, layer, &row_bytes, &scale_bytes, error) : status;
  if (status != KVPOOL_OK) {
    return status;
  }
  struct rows_output row_output = {.data = rows}, scale_output = {.data = scales};
  if (__builtin_mul_overflow(total_k, row_bytes, &row_output.bytes) ||
      __builtin_mul_overflow(total_k, scale_bytes, &scale_output.bytes)) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "total_k", -1, (int64_t)total_k,
                       "%llu rows of %u bytes don't fit into 64 bits", (unsigned long long)total_k, row_bytes);
  }
  if (scale_output.bytes > 0 && scales == NULL) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "a load of format \"%s\" has scales: the argument can't be NULL",
                    layer->pool->regions[layer->region].format);
  }
  struct kvp_call *call;
  status = kvp_call_new(session->client, KVP_METHOD_LOAD_ROWS, NULL, NULL, &call, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__SessionRef reference = kvp_session_reference(session);
  Kvpool__V1__RegionRef region = kvp_layer_reference(layer);
  Kvpool__V1__LoadRowsRequest request = KVPOOL__V1__LOAD_ROWS_REQUEST__INIT;
  request.session = &reference;
  request.epoch = kvpool_session_epoch(session);
  request.region = &region;
  request.segments = (ProtobufCBinaryData){.len = segments_bytes, .data = (uint8_t *)segments};
  request.total_k = total_k;
  kvp_call_start_stream(call, kvp_message_pack(&request.base, NULL), true);
  status = load_collect(call, &row_output, &scale_output, report, error);
  kvp_call_unref(call);
  return kvp_pool_explain(layer->pool, status, error);
}
