/* Descriptors of the process that memory may take. What this refuses can never be asked for, so that a message with
 * descriptors, a connection or an executor's start never finds none left. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_FD_BUDGET_H
#define KVPOOL_SUPERVISOR_FD_BUDGET_H

#include <stdint.h>

#include "proto/status.h"

struct kvp_fd_budget {
  uint64_t limit;
  uint64_t used; /* at most limit */
};

/* What connections, executors and the process itself need is taken from `descriptors`, all there may be; refused
 * with invalid_argument, with the numbers, when that leaves nothing. */
enum kvp_status kvp_fd_budget_init(struct kvp_fd_budget *budget, uint64_t descriptors, uint32_t connections_max,
                                   uint32_t device_count, struct kvp_error *error);
/* What one memory takes: each chunk is open once, and once more in a message to the executor that waits. */
uint64_t kvp_fd_budget_memory(uint64_t bytes);
/* What an owner table takes: open once, and in a message to each placement's executor. */
uint64_t kvp_fd_budget_owner_table(uint32_t placement_count);
/* Refused with `refusal`, naming what, asked, used and limit. */
enum kvp_status kvp_fd_budget_charge(struct kvp_fd_budget *budget, const char *what, uint64_t count,
                                     enum kvp_status refusal, struct kvp_error *error);
/* At most what was charged (asserted). */
void kvp_fd_budget_release(struct kvp_fd_budget *budget, uint64_t count);

#endif
