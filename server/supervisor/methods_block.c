/* AllocateBlocks, AllocateBlockRange, FreeBlocks, ListBlocks. Loop thread only. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/block_grant.h"
#include "server/supervisor/methods.h"

enum {
  blocks_per_call_max = (kvp_message_bytes_max - 4096) / 4, /* their ids fit in one answer */
  listed_blocks_max = 1 << 20,                              /* looked at by one ListBlocks */
  listed_runs_max = 1 << 16,                                /* at most 36 bytes each in the answer */
};

_Static_assert(listed_runs_max * 36 < kvp_message_bytes_max, "a client that takes no more must be able to read it");

/* ---- allocate ---------------------------------------------------------------------------------------------------
 */

/* What both ways of allocating check first. A count that passes is at most blocks_per_call_max, or more than the pool
 * has, which the allocator refuses with the better words. */
static enum kvp_status check_asked(const struct kvp_session *session, const struct kvp_pool *pool, uint32_t count,
                                   struct kvp_error *error) {
  enum kvp_status status = kvp_pool_access_check_blocks(&pool->access, &pool->spec, session->namespace_name, error);
  if (status != KVP_OK) {
    return status;
  }
  if (count == 0 || (count > blocks_per_call_max && count <= pool->spec.num_blocks)) {
    return kvp_error_set_at(error, count == 0 ? KVP_INVALID_ARGUMENT : KVP_TOO_LARGE, -1, "count", -1, count,
                            "%u blocks asked for, a call takes 1 to %d", count, blocks_per_call_max);
  }
  if (session->blocks_max != 0 && (uint64_t)session->blocks + session->blocks_coming + count > session->blocks_max) {
    return kvp_error_set_at(error, KVP_QUOTA_EXCEEDED, -1, "count", -1, count,
                            "session %llu has %u blocks and asks for %u more, its quota is %u",
                            (unsigned long long)session->id, session->blocks + session->blocks_coming, count,
                            session->blocks_max);
  }
  return KVP_OK;
}

/* Entries carry the epoch that the answer tells; a refused call takes none. */
static uint64_t next_epoch(const struct kvp_daemon *daemon) {
  assert(daemon->epoch < KVP_OWNER_EPOCH_MAX);
  return daemon->epoch + 1;
}

static void on_allocate_blocks(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__AllocateBlocksRequest *request = (const Kvpool__V1__AllocateBlocksRequest *)message->body;
  struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  struct kvp_pool *pool = session == NULL ? NULL : kvp_pool_find(daemon, request->pool_id, &error);
  if (pool == NULL || check_asked(session, pool, request->count, &error) != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  int32_t *blocks =
      kvp_allocate(request->count < blocks_per_call_max ? request->count : blocks_per_call_max, sizeof *blocks);
  uint16_t owner = kvp_block_grant_owner(session, pool);
  if (kvp_lease_allocate(pool->leases, owner, next_epoch(daemon), request->count, blocks, &error) == KVP_OK) {
    kvp_block_grant(daemon, session, pool, call, owner, blocks, request->count);
  } else {
    kvp_rpc_call_fail(call, &error);
    free(blocks);
  }
}

static void on_allocate_block_range(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__AllocateBlockRangeRequest *request = (const Kvpool__V1__AllocateBlockRangeRequest *)message->body;
  struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  struct kvp_pool *pool = session == NULL ? NULL : kvp_pool_find(daemon, request->pool_id, &error);
  if (pool == NULL || check_asked(session, pool, request->count, &error) != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  uint16_t owner = kvp_block_grant_owner(session, pool);
  if (kvp_lease_allocate_range(pool->leases, owner, next_epoch(daemon), request->first_block, request->count,
                               &error) != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  int32_t *blocks = kvp_allocate(request->count, sizeof *blocks);
  for (uint32_t i = 0; i < request->count; i++) {
    blocks[i] = (int32_t)(request->first_block + i);
  }
  kvp_block_grant(daemon, session, pool, call, owner, blocks, request->count);
}

/* ---- free -------------------------------------------------------------------------------------------------------
 */

/* Copied: bytes of a message have no alignment. */
static enum kvp_status read_blocks(const ProtobufCBinaryData *bytes, int32_t **out, uint32_t *count,
                                   struct kvp_error *error) {
  if (bytes->len % sizeof(int32_t) != 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "blocks", -1, (int64_t)bytes->len,
                            "blocks has %zu bytes, not a multiple of 4: int32 ids are wanted", bytes->len);
  }
  int32_t *blocks = malloc(bytes->len + sizeof *blocks); /* none is fine */
  if (blocks == NULL) {
    return kvp_error_set(error, KVP_TOO_LARGE, "no memory for %zu bytes of block ids", bytes->len);
  }
  if (bytes->len > 0) {
    memcpy(blocks, bytes->data, bytes->len);
  }
  *out = blocks;
  *count = (uint32_t)(bytes->len / sizeof *blocks);
  return KVP_OK;
}

static void on_free_blocks(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__FreeBlocksRequest *request = (const Kvpool__V1__FreeBlocksRequest *)message->body;
  struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  struct kvp_pool *pool = session == NULL ? NULL : kvp_pool_find(daemon, request->pool_id, &error);
  int32_t *blocks = NULL;
  uint32_t count = 0;
  if (pool == NULL || read_blocks(&request->blocks, &blocks, &count, &error) != KVP_OK) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  uint64_t fence = kvp_step_fence(daemon, session->slot);
  if (kvp_lease_free(pool->leases, session->slot, blocks, count, fence, &error) == KVP_OK) {
    session->blocks -= count;
    kvp_step_fence_post(daemon);
    (void)kvp_lease_reach(pool->leases, kvp_step_retired_of, daemon);
    Kvpool__V1__FreeBlocksResponse reply = KVPOOL__V1__FREE_BLOCKS_RESPONSE__INIT;
    reply.epoch = daemon->epoch;
    kvp_rpc_call_finish(call, &reply.base);
  } else {
    kvp_rpc_call_fail(call, &error);
  }
  free(blocks);
}

/* ---- list -------------------------------------------------------------------------------------------------------
 */

static Kvpool__V1__BlockState state_message(enum kvp_block_state state) {
  switch (state) {
  case KVP_BLOCK_LEASED:
    return KVPOOL__V1__BLOCK_STATE__BLOCK_LEASED;
  case KVP_BLOCK_SEALED:
    return KVPOOL__V1__BLOCK_STATE__BLOCK_SEALED;
  case KVP_BLOCK_QUARANTINED:
    return KVPOOL__V1__BLOCK_STATE__BLOCK_QUARANTINED;
  case KVP_BLOCK_FREE:
    break;
  }
  return KVPOOL__V1__BLOCK_STATE__BLOCK_FREE;
}

static void fill_run(Kvpool__V1__BlockRun *out, const struct kvp_daemon *daemon, uint32_t first, uint64_t entry) {
  kvpool__v1__block_run__init(out);
  out->first_block = first;
  out->state = state_message(kvp_owner_entry_state(entry));
  out->epoch = kvp_owner_entry_epoch(entry);
  uint16_t owner = kvp_owner_entry_owner(entry);
  const struct kvp_session *session = owner > kvp_sessions_max ? NULL : daemon->sessions.slots[owner];
  out->session_id = session == NULL ? 0 : session->id;
}

struct runs {
  Kvpool__V1__BlockRun *runs;
  size_t count;
  size_t capacity;
};

static Kvpool__V1__BlockRun *add_run(struct runs *runs) {
  if (runs->count == runs->capacity) {
    size_t capacity = runs->capacity == 0 ? 64 : 2 * runs->capacity;
    Kvpool__V1__BlockRun *larger = kvp_allocate(capacity, sizeof *larger);
    if (runs->count > 0) {
      memcpy(larger, runs->runs, runs->count * sizeof *larger);
    }
    free(runs->runs);
    runs->runs = larger;
    runs->capacity = capacity;
  }
  return &runs->runs[runs->count++];
}

/* Runs of equal entries from `first` on. Returns the first block that was not told. */
static uint32_t collect_runs(const struct kvp_daemon *daemon, const struct kvp_owner_table *owners, uint32_t first,
                             struct runs *out) {
  uint32_t end = owners->num_blocks - first > listed_blocks_max ? first + listed_blocks_max : owners->num_blocks;
  uint64_t last_entry = 0;
  Kvpool__V1__BlockRun *run = NULL;
  for (uint32_t block = first; block < end; block++) {
    uint64_t entry = kvp_owner_table_get(owners, block);
    if (run == NULL || entry != last_entry) {
      if (out->count == listed_runs_max) {
        return block;
      }
      run = add_run(out);
      fill_run(run, daemon, block, entry);
      last_entry = entry;
    }
    run->count++;
  }
  return end;
}

static void on_list_blocks(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__ListBlocksRequest *request = (const Kvpool__V1__ListBlocksRequest *)message->body;
  const struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_pool *pool = kvp_pool_find(context, request->pool_id, &error);
  if (pool != NULL && request->first_block >= pool->spec.num_blocks) {
    (void)kvp_error_set_at(&error, KVP_OUT_OF_RANGE, -1, "first_block", -1, request->first_block,
                           "first_block %u is not inside the pool's [0, %u)", request->first_block,
                           pool->spec.num_blocks);
    pool = NULL;
  }
  if (pool == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  struct runs runs = {0};
  uint32_t next = collect_runs(daemon, &pool->owners, request->first_block, &runs);
  Kvpool__V1__BlockRun **pointers = kvp_allocate(runs.count + 1, sizeof(Kvpool__V1__BlockRun *));
  for (size_t i = 0; i < runs.count; i++) {
    pointers[i] = &runs.runs[i];
  }
  Kvpool__V1__ListBlocksResponse reply = KVPOOL__V1__LIST_BLOCKS_RESPONSE__INIT;
  reply.n_runs = runs.count;
  reply.runs = pointers;
  reply.epoch = daemon->epoch;
  reply.next_block = next < pool->spec.num_blocks ? next : 0;
  kvp_rpc_call_finish(call, &reply.base);
  free(pointers);
  free(runs.runs);
}

static const struct kvp_rpc_method methods[] = {
    {.name = "AllocateBlocks",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__allocate_blocks_request__descriptor,
     .on_message = on_allocate_blocks,
     .on_closed = kvp_block_grant_on_closed},
    {.name = "AllocateBlockRange",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__allocate_block_range_request__descriptor,
     .on_message = on_allocate_block_range,
     .on_closed = kvp_block_grant_on_closed},
    {.name = "FreeBlocks",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__free_blocks_request__descriptor,
     .on_message = on_free_blocks},
    {.name = "ListBlocks",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__list_blocks_request__descriptor,
     .on_message = on_list_blocks},
};

const struct kvp_method_table kvp_methods_block = {methods, sizeof methods / sizeof methods[0]};
