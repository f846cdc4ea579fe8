/* Descriptors that memory may take. Loop thread only. */
#include "server/supervisor/fd_budget.h"

#include <assert.h>
#include <inttypes.h>

#include "proto/limits.h"

enum {
  process_fds = 128, /* loop, gRPC, log, socket, and the descriptors of a message just received */
  device_fds = 8,    /* control socket, ring, eventfds, and those of a spawn */
  connection_fds = 2,
};

enum kvp_status kvp_fd_budget_init(struct kvp_fd_budget *budget, uint64_t descriptors, uint32_t connections_max,
                                   uint32_t device_count, struct kvp_error *error) {
  uint64_t taken = process_fds + (uint64_t)device_fds * device_count + (uint64_t)connection_fds * connections_max;
  if (descriptors <= taken) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "connections_max %" PRIu32 " and %" PRIu32 " devices take %" PRIu64
                         " descriptors, RLIMIT_NOFILE allows %" PRIu64,
                         connections_max, device_count, taken, descriptors);
  }
  *budget = (struct kvp_fd_budget){.limit = descriptors - taken};
  return KVP_OK;
}

uint64_t kvp_fd_budget_memory(uint64_t bytes) {
  uint64_t chunks = bytes / kvp_chunk_memory_bytes + (bytes % kvp_chunk_memory_bytes != 0);
  return 2 * chunks;
}

uint64_t kvp_fd_budget_owner_table(uint32_t placement_count) {
  return 1 + (uint64_t)placement_count;
}

enum kvp_status kvp_fd_budget_charge(struct kvp_fd_budget *budget, const char *what, uint64_t count,
                                     enum kvp_status refusal, struct kvp_error *error) {
  if (count > budget->limit - budget->used) {
    return kvp_error_set(error, refusal,
                         "%s asks for %" PRIu64 " descriptors: %" PRIu64 " of %" PRIu64 " are used (RLIMIT_NOFILE)",
                         what, count, budget->used, budget->limit);
  }
  budget->used += count;
  return KVP_OK;
}

void kvp_fd_budget_release(struct kvp_fd_budget *budget, uint64_t count) {
  assert(count <= budget->used);
  budget->used -= count;
}
