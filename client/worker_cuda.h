/* What libkvpool does with CUDA: a worker's view of a GPU's memory, and timelines that its streams can use. */
#ifndef KVPOOL_CLIENT_WORKER_CUDA_H
#define KVPOOL_CLIENT_WORKER_CUDA_H

#include "client/attach.h"

/* Address space for mapping->bytes on the GPU of mapping->uuid, whose primary context is held until kvp_cuda_unmap. */
kvpool_status kvp_cuda_reserve(struct kvp_mapping *mapping, kvpool_error *error);
/* The next chunk, behind mapping->mapped_bytes. */
kvpool_status kvp_cuda_map_chunk(struct kvp_mapping *mapping, int fd, uint64_t bytes, kvpool_error *error);
/* Whatever is mapped, and the address space. */
void kvp_cuda_unmap(struct kvp_mapping *mapping);
/* This process's number of the GPU; -1: it doesn't see it. */
int kvp_cuda_ordinal(const char *uuid);
/* Takes back what kvpool_timeline_device_address did. */
void kvp_cuda_timelines_deinit(struct kvp_timelines *timelines);

#endif
