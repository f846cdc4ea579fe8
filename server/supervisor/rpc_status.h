/* A kvp_error as clients see it. Any thread; no state. */
#ifndef KVPOOL_SUPERVISOR_RPC_STATUS_H
#define KVPOOL_SUPERVISOR_RPC_STATUS_H

#include "kvpool.pb-c.h"
#include "proto/status.h"

/* body points into the two texts: do not copy the struct. */
struct kvp_rpc_error_detail {
  Kvpool__V1__ErrorDetail body;
  char message[kvp_error_text_bytes_max];
  char array[kvp_error_array_bytes_max];
};

/* Texts come out as valid UTF-8, whatever they were. */
void kvp_rpc_error_detail_init(struct kvp_rpc_error_detail *detail, const struct kvp_error *error);

#endif
