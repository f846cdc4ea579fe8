/* Inspection: records decoded to numbers, and whole blocks. */
#include <assert.h>
#include <stdlib.h>

#include "client/internal.h"

struct kvpool_record_list {
  Kvpool__V1__InspectRecordsResponse *message; /* what the items point into */
  size_t count;
  kvpool_record items[]; /* [count] */
};

static void record_from(const Kvpool__V1__Record *from, kvpool_record *out) {
  *out = (kvpool_record){
      .slot = from->slot,
      .raw_bytes = (uint32_t)from->raw.len,
      .raw = from->raw.data,
      .scale_count = (uint32_t)from->n_scales,
      .scales = from->scales,
      .value_count = (uint32_t)from->n_values,
      .values = from->values,
  };
}

kvpool_status kvpool_record_list_get(kvpool_client *client, const kvpool_layer *layer, const char *placement,
                                     const int32_t *slots, size_t count, kvpool_record_list **out,
                                     kvpool_error *error) {
  assert(client != NULL && out != NULL && (slots != NULL || count == 0));
  kvpool_status status = kvp_layer_check(layer, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (count > kvp_inspect_records_max) {
    return kvp_fail_at(error, KVPOOL_TOO_LARGE, "slots", -1, (int64_t)count, "%zu slots; one call takes %d", count,
                       kvp_inspect_records_max);
  }
  Kvpool__V1__RegionRef region = kvp_layer_reference(layer);
  Kvpool__V1__InspectRecordsRequest request = KVPOOL__V1__INSPECT_RECORDS_REQUEST__INIT;
  request.region = &region;
  request.placement = placement == NULL ? (char *)"" : (char *)placement;
  request.slots = (ProtobufCBinaryData){.len = count * kvp_int32_bytes, .data = (uint8_t *)slots};
  ProtobufCMessage *message;
  status = kvp_call_unary(client, KVP_METHOD_INSPECT_RECORDS, &request.base,
                          &kvpool__v1__inspect_records_response__descriptor, &message, error);
  if (status != KVPOOL_OK) {
    return kvp_pool_explain(layer->pool, status, error);
  }
  Kvpool__V1__InspectRecordsResponse *response = (Kvpool__V1__InspectRecordsResponse *)message;
  kvpool_record_list *list = calloc(1, sizeof *list + response->n_records * sizeof list->items[0]);
  if (list == NULL) {
    protobuf_c_message_free_unpacked(message, NULL);
    return kvp_fail_no_memory(error);
  }
  list->message = response;
  list->count = response->n_records;
  for (size_t i = 0; i < list->count; i++) {
    record_from(response->records[i], &list->items[i]);
  }
  *out = list;
  return KVPOOL_OK;
}

void kvpool_record_list_destroy(kvpool_record_list *list) {
  if (list != NULL) {
    kvpool__v1__inspect_records_response__free_unpacked(list->message, NULL);
    free(list);
  }
}

size_t kvpool_record_list_count(const kvpool_record_list *list) {
  return list->count;
}

const kvpool_record *kvpool_record_list_item(const kvpool_record_list *list, size_t index) {
  assert(index < list->count);
  return &list->items[index];
}

kvpool_status kvpool_blocks_dump(kvpool_client *client, const kvpool_layer *layer, const char *placement,
                                 uint32_t first_block, uint32_t count, void *out, uint64_t out_bytes,
                                 kvpool_error *error) {
  assert(client != NULL && (out != NULL || count == 0));
  kvpool_status status = kvp_layer_check(layer, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  uint64_t stride_bytes = layer->pool->regions[layer->region].block_stride_bytes;
  uint64_t bytes;
  if (__builtin_mul_overflow(stride_bytes, count, &bytes) || bytes > out_bytes) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "out_bytes", -1, (int64_t)out_bytes,
                       "%u blocks of %llu bytes don't fit into %llu bytes", count, (unsigned long long)stride_bytes,
                       (unsigned long long)out_bytes);
  }
  Kvpool__V1__RegionRef region = kvp_layer_reference(layer);
  Kvpool__V1__DumpBlocksRequest request = KVPOOL__V1__DUMP_BLOCKS_REQUEST__INIT;
  request.region = &region;
  request.placement = placement == NULL ? (char *)"" : (char *)placement;
  request.first_block = first_block;
  request.count = count;
  status = kvp_call_collect(client, KVP_METHOD_DUMP_BLOCKS, &request.base, out, bytes, error);
  return kvp_pool_explain(layer->pool, status, error);
}
