/* Minimum over the last two windows of time. */
#include "server/executor/device_clock.h"

#include <assert.h>

static const uint64_t window_length_ns = UINT64_C(2000000000);

void kvp_device_clock_init(struct kvp_device_clock *clock) {
  *clock = (struct kvp_device_clock){.bound_ns = INT64_MAX, .bound_before_ns = INT64_MAX};
}

void kvp_device_clock_observe(struct kvp_device_clock *clock, uint64_t stamp_ns, uint64_t now_ns) {
  const uint64_t age_ns = now_ns - clock->window_ns;
  if (age_ns >= window_length_ns) {
    clock->bound_before_ns = age_ns < 2 * window_length_ns ? clock->bound_ns : INT64_MAX;
    clock->bound_ns = INT64_MAX;
    clock->window_ns = now_ns;
  }
  const int64_t bound_ns = (int64_t)(now_ns - stamp_ns);
  clock->bound_ns = bound_ns < clock->bound_ns ? bound_ns : clock->bound_ns;
}

static uint64_t distance_ns(const struct kvp_device_clock *clock) {
  const int64_t bound_ns = clock->bound_ns < clock->bound_before_ns ? clock->bound_ns : clock->bound_before_ns;
  assert(bound_ns != INT64_MAX);
  return (uint64_t)bound_ns;
}

uint64_t kvp_device_clock_host_ns(const struct kvp_device_clock *clock, uint64_t stamp_ns) {
  return stamp_ns + distance_ns(clock);
}

uint64_t kvp_device_clock_stamp_ns(const struct kvp_device_clock *clock, uint64_t host_ns) {
  return host_ns - distance_ns(clock);
}
