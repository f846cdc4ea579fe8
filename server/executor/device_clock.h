/* A device's clock on the executor's: the smallest delay with which its stamps were ever seen, lately.
 *
 * A stamp can't have been written after it was seen, so that every look at one bounds the distance of the clocks from
 * above. Bounds are forgotten after a while: clocks drift. One thread.
 */
#ifndef KVPOOL_EXECUTOR_DEVICE_CLOCK_H
#define KVPOOL_EXECUTOR_DEVICE_CLOCK_H

#include <stdint.h>

struct kvp_device_clock {
  int64_t bound_ns;        /* of this window of time; INT64_MAX: none */
  int64_t bound_before_ns; /* of the one before */
  uint64_t window_ns;      /* when this one began */
};

void kvp_device_clock_init(struct kvp_device_clock *clock);
/* now_ns: of the executor's clock, after the stamp was seen. */
void kvp_device_clock_observe(struct kvp_device_clock *clock, uint64_t stamp_ns, uint64_t now_ns);
/* The executor's time of a stamp; something was observed before. */
uint64_t kvp_device_clock_host_ns(const struct kvp_device_clock *clock, uint64_t stamp_ns);
/* The other way. */
uint64_t kvp_device_clock_stamp_ns(const struct kvp_device_clock *clock, uint64_t host_ns);

#endif
