/* Completion words: what a device writes when everything launched on a queue before has been done.
 *
 * One writer a word (the device, in the order of its queue), one reader (the serving thread). Each word has a cache
 * line of its own. Values only grow.
 */
#ifndef KVPOOL_EXECUTOR_TIMELINE_H
#define KVPOOL_EXECUTOR_TIMELINE_H

#include <stdatomic.h>
#include <stdint.h>

struct kvp_timeline {
  _Alignas(64) _Atomic uint64_t value;
};

/* count words, zero, page-aligned and shared, as a device that registers them needs. NULL when there is no memory. */
struct kvp_timeline *kvp_timelines_new(uint32_t count);
void kvp_timelines_destroy(struct kvp_timeline *timelines, uint32_t count);

/* Device: everything it wrote before is seen by who sees the value. */
static inline void kvp_timeline_signal(struct kvp_timeline *timeline, uint64_t value) {
  atomic_store_explicit(&timeline->value, value, memory_order_release);
}

static inline uint64_t kvp_timeline_read(const struct kvp_timeline *timeline) {
  return atomic_load_explicit(&timeline->value, memory_order_acquire);
}

#endif
