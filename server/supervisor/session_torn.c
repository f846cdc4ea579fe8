/* The blocks of a session that a lost device may have torn, over all its steps: told in one event. Loop thread only.
 *
 * Collected while the device's steps are failed one by one; a pool's list is sorted and made unique whenever it has
 * doubled, so that many steps on the same blocks cost no more than the blocks. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "kvpool.pb-c.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/daemon.h"

/* More are told in further events: a client may take no larger messages than the daemon does. */
enum { torn_blocks_per_event_max = kvp_message_bytes_max / 8 };

struct torn_pool {
  uint64_t pool_id;
  int32_t *blocks; /* [capacity] */
  uint32_t count;
  uint32_t unique; /* of them, at the begin: sorted, each once */
  uint32_t capacity;
};

struct kvp_session_torn {
  uint32_t pool_count;
  struct torn_pool pools[kvp_pools_max];
};

static int compare_blocks(const void *left, const void *right) {
  int32_t a = *(const int32_t *)left;
  int32_t b = *(const int32_t *)right;
  return (a > b) - (a < b);
}

static void make_unique(struct torn_pool *pool) {
  if (pool->unique == pool->count) {
    return;
  }
  qsort(pool->blocks, pool->count, sizeof *pool->blocks, compare_blocks);
  uint32_t kept = 0;
  for (uint32_t i = 0; i < pool->count; i++) {
    if (kept == 0 || pool->blocks[kept - 1] != pool->blocks[i]) {
      pool->blocks[kept++] = pool->blocks[i];
    }
  }
  pool->count = pool->unique = kept;
}

static void reserve(struct torn_pool *pool, uint32_t more) {
  if (pool->capacity - pool->count < more) {
    make_unique(pool);
  }
  if (pool->capacity - pool->count < more) {
    uint32_t capacity = 2 * (pool->count + more);
    int32_t *larger = kvp_allocate(capacity, sizeof *larger);
    if (pool->count > 0) {
      memcpy(larger, pool->blocks, pool->count * sizeof *larger);
    }
    free(pool->blocks);
    pool->blocks = larger;
    pool->capacity = capacity;
  }
}

static struct torn_pool *find_pool(struct kvp_session_torn *torn, uint64_t pool_id) {
  for (uint32_t i = 0; i < torn->pool_count; i++) {
    if (torn->pools[i].pool_id == pool_id) {
      return &torn->pools[i];
    }
  }
  struct torn_pool *pool =
      &torn->pools[torn->pool_count++]; /* a pool is not deleted while steps of it are in flight */
  pool->pool_id = pool_id;
  return pool;
}

void kvp_session_torn_add(struct kvp_session *session, const struct kvp_torn_blocks *torn, uint32_t torn_count) {
  if (session->stream == NULL || torn_count == 0) {
    return;
  }
  if (session->torn == NULL) {
    session->torn = kvp_allocate(1, sizeof *session->torn);
  }
  for (uint32_t i = 0; i < torn_count; i++) {
    assert(torn[i].count > 0 && torn[i].blocks != NULL);
    struct torn_pool *pool = find_pool(session->torn, torn[i].pool_id);
    reserve(pool, torn[i].count);
    memcpy(&pool->blocks[pool->count], torn[i].blocks, torn[i].count * sizeof *pool->blocks);
    pool->count += torn[i].count;
  }
}

void kvp_session_torn_drop(struct kvp_session *session) {
  for (uint32_t i = 0; session->torn != NULL && i < session->torn->pool_count; i++) {
    free(session->torn->pools[i].blocks);
  }
  free(session->torn);
  session->torn = NULL;
}

static void send_lost(const struct kvp_session *session, const char *device, Kvpool__V1__TornBlocks **torn,
                      size_t torn_count) {
  Kvpool__V1__DeviceLost lost = KVPOOL__V1__DEVICE_LOST__INIT;
  lost.device = (char *)device;
  lost.torn = torn;
  lost.n_torn = torn_count;
  Kvpool__V1__SessionEvent event = KVPOOL__V1__SESSION_EVENT__INIT;
  event.event_case = KVPOOL__V1__SESSION_EVENT__EVENT_DEVICE_LOST;
  event.device_lost = &lost;
  (void)kvp_rpc_call_send(session->stream, &event.base);
}

void kvp_session_torn_tell(struct kvp_session *session, const char *device) {
  const struct kvp_session_torn *torn = session->torn;
  Kvpool__V1__TornBlocks bodies[kvp_pools_max];
  Kvpool__V1__TornBlocks *pointers[kvp_pools_max];
  size_t filled = 0;
  bool told_any = false;
  uint32_t room = torn_blocks_per_event_max;
  for (uint32_t i = 0; torn != NULL && i < torn->pool_count; i++) {
    make_unique(&session->torn->pools[i]);
    const struct torn_pool *pool = &torn->pools[i];
    for (uint32_t told = 0; told < pool->count;) {
      uint32_t count = pool->count - told < room ? pool->count - told : room;
      pointers[filled] = &bodies[filled];
      kvpool__v1__torn_blocks__init(&bodies[filled]);
      bodies[filled].pool_id = pool->pool_id;
      bodies[filled].blocks.data = (uint8_t *)&pool->blocks[told];
      bodies[filled].blocks.len = count * sizeof *pool->blocks;
      filled++;
      told += count;
      room -= count;
      if (room == 0) {
        send_lost(session, device, pointers, filled);
        filled = 0;
        told_any = true;
        room = torn_blocks_per_event_max;
      }
    }
  }
  if (filled > 0 || !told_any) {
    send_lost(session, device, pointers, filled);
  }
  kvp_session_torn_drop(session);
}
