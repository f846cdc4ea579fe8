/* Blocks: leases, and the map of a pool. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/internal.h"

struct kvpool_block_map {
  size_t count;
  kvpool_block_run *runs; /* [count] */
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
  status = blocks_ask(session, KVP_METHOD_ALLOCATE_BLOCKS, &request.base, count, out, error);
  return kvp_pool_explain(pool, status, error);
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
  status = blocks_ask(session, KVP_METHOD_ALLOCATE_BLOCK_RANGE, &request.base, count, NULL, error);
  return kvp_pool_explain(pool, status, error);
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
  return kvp_pool_explain(pool, status, error);
}

/* Room for `more` runs behind those that are there. */
static bool map_reserve(kvpool_block_map *map, size_t more) {
  size_t bytes;
  if (__builtin_add_overflow(map->count, more, &bytes) || __builtin_mul_overflow(bytes, sizeof *map->runs, &bytes)) {
    return false;
  }
  kvpool_block_run *runs = realloc(map->runs, bytes + sizeof *runs);
  if (runs == NULL) {
    return false;
  }
  map->runs = runs;
  return true;
}

/* A run that an answer's end has cut goes on in the next. */
static void map_append(kvpool_block_map *map, const Kvpool__V1__BlockRun *from) {
  kvpool_block_run *last = map->count == 0 ? NULL : &map->runs[map->count - 1];
  kvpool_block_run run = {.first_block = from->first_block,
                          .count = from->count,
                          .state = (kvpool_block_state)from->state,
                          .session_id = from->session_id,
                          .epoch = from->epoch};
  if (last != NULL && last->first_block + last->count == run.first_block && last->state == run.state &&
      last->session_id == run.session_id && last->epoch == run.epoch) {
    last->count += run.count;
  } else {
    map->runs[map->count++] = run;
  }
}

/* One answer's worth from *first_block on, which becomes where to go on; 0: that was all. */
static kvpool_status map_extend(kvpool_block_map *map, kvpool_client *client, const kvpool_pool *pool,
                                uint32_t *first_block, kvpool_error *error) {
  Kvpool__V1__ListBlocksRequest request = KVPOOL__V1__LIST_BLOCKS_REQUEST__INIT;
  request.pool_id = pool->message->pool_id;
  request.first_block = *first_block;
  ProtobufCMessage *message;
  kvpool_status status = kvp_call_unary(client, KVP_METHOD_LIST_BLOCKS, &request.base,
                                        &kvpool__v1__list_blocks_response__descriptor, &message, error);
  if (status != KVPOOL_OK) {
    return kvp_pool_explain(pool, status, error);
  }
  const Kvpool__V1__ListBlocksResponse *response = (const Kvpool__V1__ListBlocksResponse *)message;
  if (response->next_block != 0 && response->next_block <= *first_block) {
    status = kvp_call_malformed(KVP_METHOD_LIST_BLOCKS, error);
  } else if (!map_reserve(map, response->n_runs)) {
    status = kvp_fail_no_memory(error);
  } else {
    for (size_t i = 0; i < response->n_runs; i++) {
      map_append(map, response->runs[i]);
    }
    *first_block = response->next_block;
  }
  protobuf_c_message_free_unpacked(message, NULL);
  return status;
}

kvpool_status kvpool_block_map_get(kvpool_client *client, const kvpool_pool *pool, kvpool_block_map **out,
                                   kvpool_error *error) {
  assert(client != NULL && pool != NULL && out != NULL);
  kvpool_block_map *map = calloc(1, sizeof *map);
  if (map == NULL) {
    return kvp_fail_no_memory(error);
  }
  uint32_t first_block = 0;
  do {
    kvpool_status status = map_extend(map, client, pool, &first_block, error);
    if (status != KVPOOL_OK) {
      kvpool_block_map_destroy(map);
      return status;
    }
  } while (first_block != 0);
  *out = map;
  return KVPOOL_OK;
}

void kvpool_block_map_destroy(kvpool_block_map *map) {
  if (map != NULL) {
    free(map->runs);
    free(map);
  }
}

size_t kvpool_block_map_run_count(const kvpool_block_map *map) {
  return map->count;
}

const kvpool_block_run *kvpool_block_map_run(const kvpool_block_map *map, size_t index) {
  assert(index < map->count);
  return &map->runs[index];
}
