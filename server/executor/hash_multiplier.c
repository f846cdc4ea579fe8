/* Random multipliers. */
#include "server/executor/hash_multiplier.h"

#include <sys/random.h>

#include "server/executor/clock.h"

uint64_t kvp_hash_multiplier(void) {
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, GRND_NONBLOCK) != (ssize_t)sizeof random) {
    random = kvp_clock_ns() * UINT64_C(0x9E3779B97F4A7C15); /* early after the host's start */
  }
  return random | 1;
}
