/* Time as reports have it, and the breath between two looks of a spinning thread. */
#ifndef KVPOOL_EXECUTOR_CLOCK_H
#define KVPOOL_EXECUTOR_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t kvp_clock_ns(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static inline void kvp_cpu_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

#endif
