/* What libkvpool does with CUDA: memory of a GPU in a worker. The driver's library is loaded when it is first needed. */
#ifndef KVPOOL_CLIENT_WORKER_CUDA_H
#define KVPOOL_CLIENT_WORKER_CUDA_H

#include "client/attach.h"

/* Address space for mapping->bytes on the GPU of mapping->uuid. */
kvpool_status kvp_cuda_reserve(struct kvp_mapping *mapping, kvpool_error *error);
/* The next chunk, behind mapping->mapped_bytes. */
kvpool_status kvp_cuda_map_chunk(struct kvp_mapping *mapping, int fd, uint64_t bytes, kvpool_error *error);
/* Whatever is mapped, and the address space. */
void kvp_cuda_unmap(struct kvp_mapping *mapping);
/* This process's number of the GPU; -1: it doesn't see it. */
int kvp_cuda_ordinal(const char *uuid);

#endif
