/* When the next executor of a device may start, and what the device waits for meanwhile. Loop thread only.
 *
 * After a death: no pause for one that lived 10 s, nor the first time; 100 ms for one that had served; doubling from
 * 100 ms to 5 s while executors die before they serve. An executor that is refused as busy has not died: others have
 * to go first, and it is tried again every 200 ms however long that takes. One that is refused for a reason that stays
 * (there is no such GPU any more) has not died either: every 5 s. Each wait has one line in the log when it begins, one
 * whenever its reason changes, and one when it is over.
 *
 * Times are milliseconds of one clock, the caller's.
 */
#ifndef KVPOOL_SUPERVISOR_RESTART_POLICY_H
#define KVPOOL_SUPERVISOR_RESTART_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

struct kvp_restart_policy {
  const char *device; /* for the log */
  uint64_t started_ms;
  bool has_served;       /* the latest */
  uint32_t quick_deaths; /* in a row */
  bool is_waiting;
  int32_t refused_as; /* while it waits for a reason that stays: its status; else KVP_OK */
  uint64_t waiting_since_ms;
  char waiting_for[kvp_error_text_bytes_max]; /* in the executor's words */
};

/* device is kept by reference. */
void kvp_restart_policy_init(struct kvp_restart_policy *policy, const char *device);
void kvp_restart_policy_started(struct kvp_restart_policy *policy, uint64_t now_ms);
void kvp_restart_policy_served(struct kvp_restart_policy *policy);

/* Would the next attempt be refused the same way? Of an executor's answer to HELLO. */
bool kvp_restart_policy_is_final(int32_t status);

/* Each of the two returns the pause before the next start. refused: busy, or is_final. */
uint64_t kvp_restart_policy_died(struct kvp_restart_policy *policy, uint64_t now_ms);
uint64_t kvp_restart_policy_refused(struct kvp_restart_policy *policy, uint64_t now_ms, int32_t status,
                                    const char *text);
/* how: "ready", "failed", "stopped". Does nothing where nobody waits. */
void kvp_restart_policy_wait_over(struct kvp_restart_policy *policy, uint64_t now_ms, const char *how);

#endif
