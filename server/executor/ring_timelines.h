/* The timelines of a worker's ring, as the executor has them.
 *
 * Which words are poisoned is kept privately: nothing here is decided by what a worker can write. Made by the control
 * thread, then the serving thread's, and of its words the device's.
 */
#ifndef KVPOOL_EXECUTOR_RING_TIMELINES_H
#define KVPOOL_EXECUTOR_RING_TIMELINES_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/timeline_wire.h"
#include "server/executor/device.h"

struct kvp_ring_timelines {
  struct kvp_device *device;
  struct kvp_timeline_word *words;            /* [kvp_timeline_words]; NULL: there are none */
  struct kvp_timeline_word *device_words;     /* the same, where the device writes them */
  uint64_t given_up[kvp_executor_words / 64]; /* a bit each of the executor's words */
};

/* fd: of the memfd, sealed; stays the caller's. */
enum kvp_status kvp_ring_timelines_init(struct kvp_ring_timelines *timelines, int fd, struct kvp_device *device,
                                        struct kvp_error *error);
void kvp_ring_timelines_deinit(struct kvp_ring_timelines *timelines);

/* Any word, now. */
static inline uint64_t kvp_ring_timelines_read(const struct kvp_ring_timelines *timelines, uint32_t word) {
  return atomic_load_explicit(&timelines->words[word].value, memory_order_acquire);
}

/* Words of the executor's. From here on nothing that is launched writes it, but to poison it once more: a worker that
 * set it back doesn't wait for good. */
void kvp_ring_timelines_give_up(struct kvp_ring_timelines *timelines, uint32_t word);
bool kvp_ring_timelines_is_given_up(const struct kvp_ring_timelines *timelines, uint32_t word);
/* Nothing that was launched writes it any more: it is given up, and everybody sees that. */
void kvp_ring_timelines_poison(struct kvp_ring_timelines *timelines, uint32_t word);
void kvp_ring_timelines_poison_all(struct kvp_ring_timelines *timelines);

#endif
