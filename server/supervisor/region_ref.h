/* A client's RegionRef resolved: the pool, the region's geometry, the layer. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_REGION_REF_H
#define KVPOOL_SUPERVISOR_REGION_REF_H

#include "kvpool.pb-c.h"
#include "server/supervisor/pool.h"
#include "server/supervisor/step_build.h"

struct kvp_session;

struct kvp_region_ref {
  struct kvp_region_place place;
  struct kvp_geometry geometry; /* a copy: the pool may go */
  struct kvp_pool *pool;        /* for the moment only */
};

/* session NULL: an operator asks, who may see every pool. Refused: NULL, unknown_pool, permission_denied (the pool is of
 * another namespace than the session), unknown_region, unknown_layer. */
enum kvp_status kvp_region_ref_resolve(struct kvp_daemon *daemon, const struct kvp_session *session,
                                       const Kvpool__V1__RegionRef *reference, struct kvp_region_ref *out,
                                       struct kvp_error *error);

#endif
