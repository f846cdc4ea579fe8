/* A client's RegionRef resolved. */
#include "server/supervisor/region_ref.h"

#include "server/supervisor/session.h"

enum kvp_status kvp_region_ref_resolve(struct kvp_daemon *daemon, const struct kvp_session *session,
                                       const Kvpool__V1__RegionRef *reference, struct kvp_region_ref *out,
                                       struct kvp_error *error) {
  if (reference == NULL) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "region", -1, 0, "region is missing");
  }
  struct kvp_pool *pool = kvp_pool_find(daemon, reference->pool_id, error);
  if (pool == NULL) {
    return KVP_UNKNOWN_POOL;
  }
  if (session != NULL && kvp_pool_access_check(&pool->spec, session->namespace_name, error) != KVP_OK) {
    return KVP_PERMISSION_DENIED;
  }
  if (reference->region >= pool->spec.region_count) {
    return kvp_error_set_at(error, KVP_UNKNOWN_REGION, -1, "region", -1, reference->region,
                            "pool \"%s\" has %u regions, there is no region %u", pool->spec.name,
                            pool->spec.region_count, reference->region);
  }
  const struct kvp_geometry *geometry = &pool->regions[reference->region];
  if (reference->layer >= geometry->num_layers) {
    return kvp_error_set_at(error, KVP_UNKNOWN_LAYER, -1, "layer", -1, reference->layer,
                            "region \"%s\" of pool \"%s\" has %u layers, there is no layer %u",
                            pool->spec.regions[reference->region].name, pool->spec.name, geometry->num_layers,
                            reference->layer);
  }
  out->place = (struct kvp_region_place){reference->pool_id, reference->region, reference->layer};
  out->geometry = *geometry;
  out->pool = pool;
  return KVP_OK;
}
