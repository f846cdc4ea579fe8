/* Which backends there are, and what all of them share. */
#include "server/executor/device.h"

#include <string.h>

#ifdef KVP_HAVE_CUDA
extern const struct kvp_device_backend kvp_device_cuda;
#define CUDA_BACKEND  &kvp_device_cuda
#define BACKEND_KINDS "host:N, cuda:N"
#else
#define CUDA_BACKEND  NULL
#define BACKEND_KINDS "host:N"
#endif

/* A backend that is not built in is told apart from one that does not exist. */
static const struct {
  const char *prefix;
  const struct kvp_device_backend *backend;
} backends[] = {
    {"host:", &kvp_device_host},
    {"cuda:", CUDA_BACKEND},
};

const char *kvp_device_kinds(void) {
  return BACKEND_KINDS;
}

enum kvp_status kvp_device_open(const char *name, const struct kvp_device_options *options, struct kvp_device **out,
                                struct kvp_error *error) {
  for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++) {
    if (strncmp(name, backends[i].prefix, strlen(backends[i].prefix)) != 0) {
      continue;
    }
    if (backends[i].backend == NULL) {
      return kvp_error_set(error, KVP_UNIMPLEMENTED, "device '%s': this kvpool-exec has no backend for '%s', only %s",
                           name, backends[i].prefix, kvp_device_kinds());
    }
    return backends[i].backend->open(name, options, out, error);
  }
  return kvp_error_set(error, KVP_INVALID_ARGUMENT, "device '%s': a device is host:N or cuda:N", name);
}

uint32_t kvp_memory_chunk_count(uint64_t bytes) {
  return (uint32_t)((bytes + kvp_chunk_memory_bytes - 1) / kvp_chunk_memory_bytes);
}

uint64_t kvp_memory_chunk_bytes(uint64_t bytes, uint32_t chunk) {
  uint64_t left = bytes - (uint64_t)chunk * kvp_chunk_memory_bytes;
  return left < kvp_chunk_memory_bytes ? left : kvp_chunk_memory_bytes;
}
