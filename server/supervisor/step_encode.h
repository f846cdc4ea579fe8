/* A StepRequest of protobuf as an encoded step.
 *
 * Checked here: what a message can get wrong by itself - fields that are missing, array numbers, sizes of arrays, the
 * limits of one step, pools of other namespaces - and where the step runs. Pools' regions, blocks, slots, views and
 * buffers are checked by the executor. Loop thread only; looks at pools and devices, changes nothing.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_ENCODE_H
#define KVPOOL_SUPERVISOR_STEP_ENCODE_H

#include "kvpool.pb-c.h"
#include "proto/limits.h"
#include "proto/step_wire.h"

struct kvp_daemon;
struct kvp_device;
struct kvp_pool;
struct kvp_session;

struct kvp_encoded_step {
  struct kvp_wire_step *wire;            /* of kvp_step_alloc; queue and owner are 0 */
  struct kvp_device *device;             /* where it runs */
  struct kvp_pool *pools[kvp_pools_max]; /* those its ops use, each once */
  uint32_t pool_count;
};

/* The error names op, array, position and value. */
enum kvp_status kvp_step_encode(struct kvp_daemon *daemon, const struct kvp_session *session,
                                const Kvpool__V1__StepRequest *request, struct kvp_encoded_step *out,
                                struct kvp_error *error);

/* The device that `placement` names (the pool's first when it is empty). NULL and wrong_device: unknown, or the pool
 * is not placed there. */
struct kvp_device *kvp_step_place(struct kvp_daemon *daemon, struct kvp_pool *pool, const char *placement,
                                  struct kvp_error *error);

#endif
