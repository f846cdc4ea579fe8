/* Blocks on their way to a session. */
#include "server/supervisor/block_grant.h"

#include <assert.h>
#include <stdlib.h>

#include "kvpool.pb-c.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/step_build.h"
#include "server/supervisor/step_queue.h"

struct kvp_block_grant {
  struct kvp_daemon *daemon;
  struct kvp_rpc_call *call; /* referenced; NULL: it is over */
  uint16_t session_slot;
  uint64_t session_id;
  uint64_t pool_id;
  int32_t *blocks; /* [count] */
  uint32_t count;
  uint32_t steps;                   /* not finished */
  uint32_t queues[kvp_devices_max]; /* of the steps, by device; 0: none */
  struct kvp_error error;           /* of the first step that failed */
};

uint16_t kvp_block_grant_owner(const struct kvp_session *session, struct kvp_pool *pool) {
  bool is_mixed = kvp_block_namespaces_mixed(&pool->namespaces, session->namespace_number);
  return is_mixed ? kvp_lease_owner_nobody : session->slot;
}

static void reply(struct kvp_daemon *daemon, struct kvp_session *session, struct kvp_rpc_call *call, int32_t *blocks,
                  uint32_t count) {
  daemon->epoch++; /* the one that their entries carry */
  session->blocks += count;
  Kvpool__V1__AllocateBlocksResponse message = KVPOOL__V1__ALLOCATE_BLOCKS_RESPONSE__INIT;
  message.blocks.data = (uint8_t *)blocks;
  message.blocks.len = count * sizeof *blocks;
  message.epoch = daemon->epoch;
  kvp_rpc_call_finish(call, &message.base);
}

/* ---- the end ----------------------------------------------------------------------------------------------------
 */

static void pass_on(struct kvp_daemon *daemon, struct kvp_session *session, struct kvp_pool *pool,
                    struct kvp_rpc_call *call, int32_t *blocks, uint32_t count) {
  assert(daemon->epoch < KVP_OWNER_EPOCH_MAX);
  kvp_lease_pass_on(pool->leases, session->slot, daemon->epoch + 1, blocks, count);
  kvp_block_namespaces_set(&pool->namespaces, session->namespace_number, blocks, count);
  reply(daemon, session, call, blocks, count);
}

static void give_back(struct kvp_daemon *daemon, struct kvp_pool *pool, const int32_t *blocks, uint32_t count) {
  struct kvp_error error;
  enum kvp_status status =
      kvp_lease_free(pool->leases, kvp_lease_owner_nobody, blocks, count, daemon->step_sequence, &error);
  assert(status == KVP_OK);
  (void)status;
  (void)kvp_lease_reach(pool->leases, kvp_step_retired_of, daemon);
}

/* NULL: it has ended, and its slot may be another's. */
static struct kvp_session *grant_session(const struct kvp_block_grant *grant) {
  struct kvp_session *session = grant->daemon->sessions.slots[grant->session_slot];
  bool is_same = session != NULL && session->id == grant->session_id && session->state == KVP_SESSION_OPEN;
  return is_same ? session : NULL;
}

static void grant_finish(struct kvp_block_grant *grant) {
  struct kvp_pool *pool = kvp_pool_find(grant->daemon, grant->pool_id, NULL);
  struct kvp_session *session = grant_session(grant);
  assert(pool != NULL); /* steps of it were in flight until now */
  if (session != NULL) {
    session->blocks_coming -= grant->count;
  } else if (grant->error.status == KVP_OK) {
    (void)kvp_error_set(&grant->error, KVP_UNKNOWN_SESSION, "session %llu was closed",
                        (unsigned long long)grant->session_id);
  }
  if (grant->call != NULL) {
    kvp_rpc_call_set_state(grant->call, NULL);
  }
  if (grant->call != NULL && grant->error.status == KVP_OK) {
    pass_on(grant->daemon, session, pool, grant->call, grant->blocks, grant->count);
  } else {
    give_back(grant->daemon, pool, grant->blocks, grant->count);
    if (grant->call != NULL) {
      kvp_rpc_call_fail(grant->call, &grant->error);
    }
  }
  if (grant->call != NULL) {
    kvp_rpc_call_unref(grant->call);
  }
  free(grant->blocks);
  free(grant);
}

void kvp_block_grant_on_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct kvp_block_grant *grant = kvp_rpc_call_state(call);
  if (grant != NULL) {
    grant->call = NULL;
    kvp_rpc_call_unref(call);
  }
}

/* ---- zeroing ----------------------------------------------------------------------------------------------------
 */

/* tag: the device. */
static void grant_step_finished(void *context, uint64_t tag, const struct kvp_step_result *result) {
  struct kvp_block_grant *grant = context;
  kvp_step_queue_close(&grant->daemon->devices[tag], grant->queues[tag]);
  if (result->error != NULL && grant->error.status == KVP_OK) {
    grant->error = *result->error;
  }
  if (--grant->steps == 0) {
    grant_finish(grant);
  }
}

static const struct kvp_step_events grant_events = {.finished = grant_step_finished};

static enum kvp_status grant_zero_on(struct kvp_block_grant *grant, struct kvp_pool *pool, struct kvp_device *device,
                                     const int32_t *blocks, uint32_t count, struct kvp_error *error) {
  struct kvp_wire_step *step = kvp_step_build_zero_blocks(pool->id, blocks, count, error);
  if (step == NULL) {
    return (enum kvp_status)error->status;
  }
  step->queue = kvp_step_queue_open(device, true, error);
  if (step->queue == 0) {
    kvp_step_free(step);
    return KVP_BUSY;
  }
  grant->queues[device->index] = step->queue;
  enum kvp_status status = kvp_step_submit(device, NULL, step, &pool, 1, &grant_events, grant, device->index, error);
  if (status != KVP_OK) {
    kvp_step_queue_close(device, grant->queues[device->index]);
  }
  return status;
}

/* The last of its steps, or this function where none was submitted, ends the grant. */
static void grant_zero(struct kvp_block_grant *grant, struct kvp_pool *pool, const int32_t *blocks, uint32_t count) {
  grant->steps = 1; /* ours, so that it doesn't end below */
  for (uint32_t i = 0; i < pool->placement_count && grant->error.status == KVP_OK; i++) {
    struct kvp_error error;
    if (grant_zero_on(grant, pool, pool->placements[i].device, blocks, count, &error) == KVP_OK) {
      grant->steps++;
    } else {
      grant->error = error;
    }
  }
  if (--grant->steps == 0) {
    grant_finish(grant);
  }
}

void kvp_block_grant(struct kvp_daemon *daemon, struct kvp_session *session, struct kvp_pool *pool,
                     struct kvp_rpc_call *call, uint16_t owner, int32_t *blocks, uint32_t count) {
  kvp_pool_access_add_blocks(&pool->access, session->namespace_name);
  if (owner == session->slot) {
    reply(daemon, session, call, blocks, count);
    free(blocks);
    return;
  }
  struct kvp_error error;
  uint32_t changed_count = 0;
  int32_t *changed = kvp_allocate(count, sizeof *changed);
  if (kvp_block_namespaces_changed(&pool->namespaces, pool->spec.num_blocks, session->namespace_number, blocks, count,
                                   changed, &changed_count, &error) != KVP_OK) {
    give_back(daemon, pool, blocks, count);
    kvp_rpc_call_fail(call, &error);
    free(blocks);
  } else if (changed_count == 0) {
    pass_on(daemon, session, pool, call, blocks, count);
    free(blocks);
  } else {
    struct kvp_block_grant *grant = kvp_allocate(1, sizeof *grant);
    grant->daemon = daemon;
    grant->call = kvp_rpc_call_ref(call);
    grant->session_slot = session->slot;
    grant->session_id = session->id;
    grant->pool_id = pool->id;
    grant->blocks = blocks;
    grant->count = count;
    session->blocks_coming += count;
    kvp_rpc_call_set_state(call, grant);
    grant_zero(grant, pool, changed, changed_count);
  }
  free(changed);
}
