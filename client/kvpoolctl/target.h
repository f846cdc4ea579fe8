/* POOL/REGION[:LAYER] of the command line, found in the daemon. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_TARGET_H
#define KVPOOL_CLIENT_KVPOOLCTL_TARGET_H

#include "client/kvpoolctl/ctl.h"

struct kvp_ctl_target {
  kvpool_pool *pool;
  kvpool_layer layer;
  const kvpool_region_info *region;
  kvpool_format_info format;
  uint32_t elements; /* of a row */
  uint64_t slots;    /* of the region */
};

/* KVP_CTL_OK, or the exit status with the error told. */
int kvp_ctl_target_open(const struct kvp_ctl *ctl, const char *text, struct kvp_ctl_target *out);
/* As many records as one inspection may ask for. */
size_t kvp_ctl_target_records_per_call(const struct kvp_ctl_target *target);
void kvp_ctl_target_close(struct kvp_ctl_target *target);

#endif
