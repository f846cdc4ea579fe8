/* Blocks: leases, and the map of a pool. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/internal.h"

struct kvpool_block_map {
  size_t count;
  kvpool_block_run runs[]; /* [count] */
};

/* Both ways to allocate have the same answer. out: int32[count]. */
static kvpool_status blocks_ask(kvpool_session *session, enum kvp_method method, const ProtobufCMessage *request,
                                uint32_t count, int32_t *out, kvpool_error *error) {
  ProtobufCMessage *message;
  kvpool_status status = kvp_call_unary(session->client, method, request,
                                        &kvpool__v1__allocate_blocks_response__descriptor, &message, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const Kvpool__V1__AllocateBlocksResponse *response = (const Kvpool__V1__AllocateBlocksResponse *)message;
  kvp_session_saw_epoch(session, response->epoch);
  if (response->blocks.len != (size_t)count * kvp_int32_bytes) {
    status = kvp_call_malformed(method, error);
  } else if (out != NULL && count > 0) {
    memcpy(out, response->blocks.data, response->blocks.len);
  }
  protobuf_c_message_free_unpacked(message, NULL);
  return status;
}

kvpool_status kvpool_blocks_allocate(kvpool_session *session, const kvpool_pool *pool, uint32_t count, int32_t *out,
                                     kvpool_error *error) {
  assert(session != NULL && pool != NULL && (out != NULL || count == 0));
  kvpool_status status = kvp_session_check(session, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__SessionRef reference = kvp_session_reference(session);
  Kvpool__V1__AllocateBlocksRequest request = KVPOOL__V1__ALLOCATE_BLOCKS_REQUEST__INIT;
  request.session = &reference;
  request.pool_id = pool->message->pool_id;
  request.count = count;
  return blocks_ask(session, KVP_METHOD_ALLOCATE_BLOCKS, &request.base, count, out, error);
}

kvpool_status kvpool_blocks_allocate_range(kvpool_session *session, const kvpool_pool *pool, uint32_t first_block,
                                           uint32_t count, kvpool_error *error) {
  assert(session != NULL && pool != NULL);
  kvpool_status status = kvp_session_check(session, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__SessionRef reference = kvp_session_reference(session);
  Kvpool__V1__AllocateBlockRangeRequest request = KVPOOL__V1__ALLOCATE_BLOCK_RANGE_REQUEST__INIT;
  request.session = &reference;
  request.pool_id = pool->message->pool_id;
  request.first_block = first_block;
  request.count = count;
  return blocks_ask(session, KVP_METHOD_ALLOCATE_BLOCK_RANGE, &request.base, count, NULL, error);
}

kvpool_status kvpool_blocks_free(kvpool_session *session, const kvpool_pool *pool, const int32_t *blocks,
                                 uint32_t count, kvpool_error *error) {
  assert(session != NULL && pool != NULL && (blocks != NULL || count == 0));
  kvpool_status status = kvp_session_check(session, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__SessionRef reference = kvp_session_reference(session);
  Kvpool__V1__FreeBlocksRequest request = KVPOOL__V1__FREE_BLOCKS_REQUEST__INIT;
  request.session = &reference;
  request.pool_id = pool->message->pool_id;
  request.blocks = (ProtobufCBinaryData){.len = (size_t)count * kvp_int32_bytes, .data = (uint8_t *)blocks};
  ProtobufCMessage *message;
  status = kvp_call_unary(session->client, KVP_METHOD_FREE_BLOCKS, &request.base,
                          &kvpool__v1__free_blocks_response__descriptor, &message, error);
  if (status == KVPOOL_OK) {
    kvp_session_saw_epoch(session, ((const Kvpool__V1__FreeBlocksResponse *)message)->epoch);
    protobuf_c_message_free_unpacked(message, NULL);
  }
  return status;
}

kvpool_status kvpool_block_map_get(kvpool_client *client, const kvpool_pool *pool, kvpool_block_map **out,
                                   kvpool_error *error) {
  assert(client != NULL && pool != NULL && out != NULL);
  Kvpool__V1__ListBlocksRequest request = KVPOOL__V1__LIST_BLOCKS_REQUEST__INIT;
  request.pool_id = pool->message->pool_id;
  ProtobufCMessage *message;
  kvpool_status status = kvp_call_unary(client, KVP_METHOD_LIST_BLOCKS, &request.base,
                                        &kvpool__v1__list_blocks_response__descriptor, &message, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const Kvpool__V1__ListBlocksResponse *response = (const Kvpool__V1__ListBlocksResponse *)message;
  kvpool_block_map *map = calloc(1, sizeof *map + response->n_runs * sizeof map->runs[0]);
  if (map != NULL) {
    map->count = response->n_runs;
    for (size_t i = 0; i < map->count; i++) {
      const Kvpool__V1__BlockRun *run = response->runs[i];
      map->runs[i] = (kvpool_block_run){.first_block = run->first_block,
                                        .count = run->count,
                                        .state = (kvpool_block_state)run->state,
                                        .session_id = run->session_id,
                                        .epoch = run->epoch};
    }
    *out = map;
  } else {
    status = kvp_fail_no_memory(error);
  }
  protobuf_c_message_free_unpacked(message, NULL);
  return status;
}

void kvpool_block_map_destroy(kvpool_block_map *map) {
  free(map);
}

size_t kvpool_block_map_run_count(const kvpool_block_map *map) {
  return map->count;
}

const kvpool_block_run *kvpool_block_map_run(const kvpool_block_map *map, size_t index) {
  assert(index < map->count);
  return &map->runs[index];
}
