/* CUDA in a worker. */
#include "client/worker_cuda.h"

kvpool_status kvp_cuda_reserve(struct kvp_mapping *mapping, kvpool_error *error) {
  (void)mapping;
  return kvp_fail(error, KVPOOL_UNIMPLEMENTED, "memory of a GPU");
}
kvpool_status kvp_cuda_map_chunk(struct kvp_mapping *mapping, int fd, uint64_t bytes, kvpool_error *error) {
  (void)mapping, (void)fd, (void)bytes;
  return kvp_fail(error, KVPOOL_UNIMPLEMENTED, "memory of a GPU");
}
void kvp_cuda_unmap(struct kvp_mapping *mapping) {
  (void)mapping;
}
int kvp_cuda_ordinal(const char *uuid) {
  (void)uuid;
  return -1;
}
