/* How much memory this host (or the control group this process lives in) has, in all and to give now. */
#ifndef KVPOOL_PROTO_HOST_MEMORY_H
#define KVPOOL_PROTO_HOST_MEMORY_H

#include <stdint.h>

struct kvp_host_memory {
  uint64_t total_bytes;
  uint64_t available_bytes; /* could be taken now without swapping or killing anybody */
};

/* Any thread. A figure that can't be read is UINT64_MAX: nothing is refused for want of /proc. */
void kvp_host_memory_read(struct kvp_host_memory *out);

#endif
