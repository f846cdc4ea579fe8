/* When the next executor of a device may start. */
#include "server/supervisor/restart_policy.h"

#include <stdio.h>
#include <string.h>

#include "server/log.h"

enum {
  pause_first_ms = 100,
  pause_max_ms = 5000,
  pause_doublings_max = 6,
  pause_waiting_ms = 200,
  quick_death_ms = 10000,
};

void kvp_restart_policy_init(struct kvp_restart_policy *policy, const char *device) {
  *policy = (struct kvp_restart_policy){.device = device};
}

void kvp_restart_policy_started(struct kvp_restart_policy *policy, uint64_t now_ms) {
  policy->started_ms = now_ms;
  policy->has_served = false;
}

void kvp_restart_policy_served(struct kvp_restart_policy *policy) {
  policy->has_served = true;
}

uint64_t kvp_restart_policy_died(struct kvp_restart_policy *policy, uint64_t now_ms) {
  uint64_t pause_ms = 0;
  kvp_restart_policy_wait_over(policy, now_ms, "failed");
  if (now_ms - policy->started_ms >= quick_death_ms) {
    policy->quick_deaths = 0;
  } else if (policy->has_served && policy->quick_deaths > 1) {
    policy->quick_deaths = 1; /* it works: whatever kills it, sessions don't wait long for the next */
  }
  if (policy->quick_deaths > 0) {
    uint32_t doublings = policy->quick_deaths - 1;
    doublings = doublings < pause_doublings_max ? doublings : pause_doublings_max;
    pause_ms = (uint64_t)pause_first_ms << doublings;
    pause_ms = pause_ms < pause_max_ms ? pause_ms : pause_max_ms;
  }
  policy->quick_deaths++;
  return pause_ms;
}

bool kvp_restart_policy_is_final(int32_t status) {
  switch (status) {
  case KVP_INVALID_ARGUMENT:
  case KVP_WRONG_DEVICE:
  case KVP_TOO_LARGE:
  case KVP_UNIMPLEMENTED:
  case KVP_VERSION_MISMATCH:
  case KVP_PERMISSION_DENIED:
    return true;
  default:
    return false;
  }
}

uint64_t kvp_restart_policy_refused(struct kvp_restart_policy *policy, uint64_t now_ms, int32_t status,
                                    const char *text) {
  const bool is_final = kvp_restart_policy_is_final(status);
  const int32_t refused_as = is_final ? status : KVP_OK;
  const bool is_news =
      !policy->is_waiting || policy->refused_as != refused_as || strcmp(policy->waiting_for, text) != 0;
  if (!policy->is_waiting) {
    policy->is_waiting = true;
    policy->waiting_since_ms = now_ms;
  }
  policy->refused_as = refused_as;
  if (is_news) {
    (void)snprintf(policy->waiting_for, sizeof policy->waiting_for, "%s", text);
    kvp_log(is_final ? KVP_LOG_ERROR : KVP_LOG_WARNING, is_final ? "device_refused" : "device_waiting",
            "device=%s waited_ms=%llu text=\"%s\"", policy->device,
            (unsigned long long)(now_ms - policy->waiting_since_ms), policy->waiting_for);
  }
  return is_final ? pause_max_ms : pause_waiting_ms;
}

void kvp_restart_policy_wait_over(struct kvp_restart_policy *policy, uint64_t now_ms, const char *how) {
  if (policy->is_waiting) {
    policy->is_waiting = false;
    policy->refused_as = KVP_OK;
    kvp_log(KVP_LOG_INFO, "device_waited", "device=%s waited_ms=%llu end=%s", policy->device,
            (unsigned long long)(now_ms - policy->waiting_since_ms), how);
  }
}
