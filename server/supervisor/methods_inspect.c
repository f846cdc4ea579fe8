/* InspectRecords, DumpBlocks: what is in the pool, for operators. Steps are the daemon's own: they see every block.
 * Loop thread only. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/record.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/byte_stream.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/region_ref.h"
#include "server/supervisor/step_build.h"
#include "server/supervisor/step_caller.h"
#include "server/supervisor/step_encode.h"

/* ---- inspect ----------------------------------------------------------------------------------------------------
 */

struct inspect_call {
  struct kvp_step_caller caller;
  struct kvp_region_place place;
  struct kvp_geometry geometry;
  struct kvp_rpc_message *request; /* the slots live in it */
  uint32_t slot_count;
  uint32_t come; /* records */
  uint8_t *raw;  /* [slot_count, bytes_per_token]: data then scales */
};

static int32_t inspect_slot(const struct inspect_call *inspect, uint32_t index) {
  const Kvpool__V1__InspectRecordsRequest *request =
      (const Kvpool__V1__InspectRecordsRequest *)inspect->request->body;
  int32_t slot = 0;
  memcpy(&slot, request->slots.data + (size_t)index * sizeof slot, sizeof slot);
  return slot;
}

static void record_init(Kvpool__V1__Record *record, const struct inspect_call *inspect, uint32_t index,
                        float *numbers) {
  const struct kvp_format_sizes *sizes = &inspect->geometry.sizes;
  uint8_t *raw = inspect->raw + (size_t)index * sizes->bytes_per_token;
  kvp_record_decode(inspect->geometry.format, sizes, raw, sizes->scale_bytes > 0 ? raw + sizes->data_bytes : NULL,
                    numbers, numbers + sizes->num_scales);
  kvpool__v1__record__init(record);
  record->slot = inspect_slot(inspect, index);
  record->raw.data = raw;
  record->raw.len = sizes->bytes_per_token;
  record->scales = numbers;
  record->n_scales = sizes->num_scales;
  record->values = numbers + sizes->num_scales;
  record->n_values = sizes->elements;
}

static void inspect_answer(const struct inspect_call *inspect) {
  uint32_t count = inspect->slot_count;
  size_t numbers_per_record = inspect->geometry.sizes.num_scales + inspect->geometry.sizes.elements;
  float *numbers = kvp_allocate((size_t)count * numbers_per_record + 1, sizeof *numbers);
  Kvpool__V1__Record *records = kvp_allocate((size_t)count + 1, sizeof *records);
  Kvpool__V1__Record **pointers = kvp_allocate((size_t)count + 1, sizeof(void *));
  for (uint32_t i = 0; i < count; i++) {
    record_init(&records[i], inspect, i, numbers + i * numbers_per_record);
    pointers[i] = &records[i];
  }
  Kvpool__V1__InspectRecordsResponse reply = KVPOOL__V1__INSPECT_RECORDS_RESPONSE__INIT;
  reply.records = pointers;
  reply.n_records = count;
  kvp_rpc_call_finish(inspect->caller.call, &reply.base);
  free(pointers);
  free(records);
  free(numbers);
}

static void inspect_step_finished(void *context, uint64_t tag, const struct kvp_step_result *result);

static const struct kvp_step_events inspect_events = {.finished = inspect_step_finished};

/* As many of the records left as one chunk holds; two reads a record where data and scales lie apart. */
static uint32_t inspect_batch(const struct inspect_call *inspect) {
  uint32_t left = inspect->slot_count - inspect->come;
  uint32_t fit = kvp_chunk_bytes_max / inspect->geometry.sizes.bytes_per_token;
  fit = fit < kvp_ops_per_step_max / 2 ? fit : kvp_ops_per_step_max / 2;
  return left < fit ? left : fit;
}

static enum kvp_status inspect_ask(struct inspect_call *inspect, struct kvp_error *error) {
  struct kvp_pool *pool = kvp_pool_find(inspect->caller.daemon, inspect->place.pool_id, error);
  if (pool == NULL) {
    return KVP_UNKNOWN_POOL;
  }
  uint32_t count = inspect_batch(inspect);
  struct kvp_byte_range ranges[kvp_ops_per_step_max];
  uint32_t range_count = 0;
  for (uint32_t i = 0; i < count; i++) {
    const struct kvp_geometry *geometry = &inspect->geometry;
    uint32_t slot = (uint32_t)inspect_slot(inspect, inspect->come + i);
    uint64_t block = slot / geometry->tokens_per_block * geometry->block_stride_bytes;
    uint64_t data = 0;
    uint64_t scales = 0;
    kvp_record_offsets(geometry, slot % geometry->tokens_per_block, &data, &scales);
    ranges[range_count++] = (struct kvp_byte_range){block + data, geometry->sizes.data_bytes};
    if (geometry->sizes.scale_bytes > 0) {
      ranges[range_count++] = (struct kvp_byte_range){block + scales, geometry->sizes.scale_bytes};
    }
  }
  struct kvp_wire_step *step = kvp_step_build_region_read(&inspect->place, ranges, range_count, error);
  if (step == NULL) {
    return (enum kvp_status)error->status;
  }
  return kvp_step_caller_submit(&inspect->caller, step, &pool, 1, &inspect_events, inspect, count, error);
}

static void inspect_go_on(struct inspect_call *inspect) {
  struct kvp_error error;
  if (inspect->come == inspect->slot_count) {
    inspect_answer(inspect);
  } else if (inspect_ask(inspect, &error) != KVP_OK) {
    kvp_rpc_call_fail(inspect->caller.call, &error);
  }
}

static void inspect_step_finished(void *context, uint64_t tag, const struct kvp_step_result *result) {
  struct inspect_call *inspect = context;
  size_t record_bytes = inspect->geometry.sizes.bytes_per_token;
  struct kvp_error error;
  if (result->error != NULL) {
    kvp_rpc_call_fail(inspect->caller.call, result->error);
  } else if (result->byte_count != tag * record_bytes) {
    (void)kvp_error_set(&error, KVP_INTERNAL, "device %s: %zu bytes came for %" PRIu64 " records",
                        inspect->caller.device->name, result->byte_count, tag);
    kvp_rpc_call_fail(inspect->caller.call, &error);
  } else {
    memcpy(inspect->raw + inspect->come * record_bytes, result->bytes, result->byte_count);
    inspect->come += (uint32_t)tag;
    inspect_go_on(inspect);
  }
}

static enum kvp_status inspect_check_slots(struct inspect_call *inspect,
                                           const Kvpool__V1__InspectRecordsRequest *request,
                                           struct kvp_error *error) {
  const struct kvp_format_sizes *sizes = &inspect->geometry.sizes;
  size_t count = request->slots.len / sizeof(int32_t);
  if (request->slots.len % sizeof(int32_t) != 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "slots", -1, (int64_t)request->slots.len,
                            "slots: %zu bytes are not a whole number of int32", request->slots.len);
  }
  uint64_t record_bytes = sizes->bytes_per_token + sizeof(float) * ((uint64_t)sizes->elements + sizes->num_scales);
  if (count > kvp_inspect_records_max || count * record_bytes > kvp_message_bytes_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, "slots", -1, (int64_t)count,
                            "%zu records of %" PRIu64 " bytes asked for, %d records and %d bytes are allowed", count,
                            record_bytes, kvp_inspect_records_max, kvp_message_bytes_max);
  }
  inspect->slot_count = (uint32_t)count;
  int64_t slots = (int64_t)inspect->geometry.num_blocks * inspect->geometry.tokens_per_block;
  for (uint32_t i = 0; i < inspect->slot_count; i++) {
    int32_t slot = inspect_slot(inspect, i);
    if (slot < 0 || slot >= slots) {
      return kvp_error_set_at(error, KVP_OUT_OF_RANGE, -1, "slots", i, slot,
                              "slots[%u] = %d, the region has %" PRId64 " slots", i, slot, slots);
    }
  }
  return KVP_OK;
}

/* The operator's counterpart of a session's begin: region, device, queue. */
static enum kvp_status caller_begin(struct kvp_step_caller *caller, const Kvpool__V1__RegionRef *reference,
                                    const char *placement, struct kvp_region_ref *region, struct kvp_error *error) {
  enum kvp_status status = kvp_region_ref_resolve(caller->daemon, NULL, reference, region, error);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_device *device = kvp_step_place(caller->daemon, region->pool, placement, error);
  return device == NULL ? KVP_WRONG_DEVICE : kvp_step_caller_place(caller, device, error);
}

static void on_inspect_records(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__InspectRecordsRequest *request = (const Kvpool__V1__InspectRecordsRequest *)message->body;
  struct inspect_call *inspect = kvp_allocate(1, sizeof *inspect);
  kvp_step_caller_init(&inspect->caller, context, call, NULL);
  inspect->request = kvp_rpc_message_ref(message);
  kvp_rpc_call_set_state(call, inspect);
  struct kvp_error error;
  struct kvp_region_ref region;
  enum kvp_status status = caller_begin(&inspect->caller, request->region, request->placement, &region, &error);
  if (status == KVP_OK) {
    inspect->place = region.place;
    inspect->geometry = region.geometry;
    status = inspect_check_slots(inspect, request, &error);
  }
  if (status != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  inspect->raw = kvp_allocate((size_t)inspect->slot_count + 1, region.geometry.sizes.bytes_per_token);
  inspect_go_on(inspect);
}

static void on_inspect_records_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct inspect_call *inspect = kvp_rpc_call_state(call);
  if (inspect != NULL) {
    kvp_step_caller_abandon(&inspect->caller, inspect);
    kvp_step_caller_deinit(&inspect->caller);
    kvp_rpc_message_unref(inspect->request);
    free(inspect->raw);
    free(inspect);
  }
}

/* ---- dump -------------------------------------------------------------------------------------------------------
 */

struct dump_call {
  struct kvp_step_caller caller;
  struct kvp_byte_stream stream;
  struct kvp_region_place place;
  uint64_t begin_bytes; /* within the layer */
};

static struct kvp_wire_step *dump_build(void *context, uint64_t offset, uint32_t bytes, struct kvp_pool **pool,
                                        struct kvp_error *error) {
  const struct dump_call *dump = context;
  *pool = kvp_pool_find(dump->caller.daemon, dump->place.pool_id, error);
  if (*pool == NULL) {
    return NULL;
  }
  const struct kvp_byte_range range = {dump->begin_bytes + offset, bytes};
  return kvp_step_build_region_read(&dump->place, &range, 1, error);
}

static void dump_deliver(void *context, uint64_t offset, const uint8_t *data, size_t bytes) {
  const struct dump_call *dump = context;
  Kvpool__V1__BytesChunk chunk = KVPOOL__V1__BYTES_CHUNK__INIT;
  chunk.offset_bytes = offset;
  chunk.data.data = (uint8_t *)data; /* packing only reads it */
  chunk.data.len = bytes;
  (void)kvp_rpc_call_send(dump->caller.call, &chunk.base);
}

static void dump_end(void *context, const struct kvp_error *error) {
  const struct dump_call *dump = context;
  if (error != NULL) {
    kvp_rpc_call_fail(dump->caller.call, error);
  } else {
    kvp_rpc_call_finish(dump->caller.call, NULL);
  }
}

static const struct kvp_byte_source dump_source = {.build = dump_build, .deliver = dump_deliver, .end = dump_end};

static enum kvp_status dump_check_blocks(const struct kvp_geometry *geometry,
                                         const Kvpool__V1__DumpBlocksRequest *request, struct kvp_error *error) {
  if (request->first_block > geometry->num_blocks || request->count > geometry->num_blocks - request->first_block) {
    return kvp_error_set_at(error, KVP_OUT_OF_RANGE, -1, "first_block", -1, request->first_block,
                            "%u blocks from block %u are not inside the region's %u", request->count,
                            request->first_block, geometry->num_blocks);
  }
  return KVP_OK;
}

static void on_dump_blocks(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__DumpBlocksRequest *request = (const Kvpool__V1__DumpBlocksRequest *)message->body;
  struct dump_call *dump = kvp_allocate(1, sizeof *dump);
  kvp_step_caller_init(&dump->caller, context, call, NULL);
  dump->stream.over = true; /* not begun */
  kvp_rpc_call_set_state(call, dump);
  struct kvp_error error;
  struct kvp_region_ref region;
  enum kvp_status status = caller_begin(&dump->caller, request->region, request->placement, &region, &error);
  if (status == KVP_OK) {
    status = dump_check_blocks(&region.geometry, request, &error);
  }
  if (status != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  uint64_t stride = region.geometry.block_stride_bytes;
  dump->place = region.place;
  dump->begin_bytes = request->first_block * stride;
  kvp_byte_stream_start(&dump->stream, &dump->caller, &dump_source, dump, request->count * stride);
}

static void on_dump_blocks_writable(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct dump_call *dump = kvp_rpc_call_state(call);
  if (dump != NULL) {
    kvp_byte_stream_go_on(&dump->stream);
  }
}

static void on_dump_blocks_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct dump_call *dump = kvp_rpc_call_state(call);
  if (dump != NULL) {
    kvp_step_caller_abandon(&dump->caller, &dump->stream);
    kvp_step_caller_deinit(&dump->caller);
    free(dump);
  }
}

static const struct kvp_rpc_method methods[] = {
    {.name = "InspectRecords",
     .shape = KVP_RPC_UNARY,
     .operator_only = true,
     .request = &kvpool__v1__inspect_records_request__descriptor,
     .on_message = on_inspect_records,
     .on_closed = on_inspect_records_closed},
    {.name = "DumpBlocks",
     .shape = KVP_RPC_SERVER_STREAM,
     .operator_only = true,
     .request = &kvpool__v1__dump_blocks_request__descriptor,
     .on_message = on_dump_blocks,
     .on_closed = on_dump_blocks_closed,
     .on_writable = on_dump_blocks_writable},
};

const struct kvp_method_table kvp_methods_inspect = {methods, sizeof methods / sizeof methods[0]};
