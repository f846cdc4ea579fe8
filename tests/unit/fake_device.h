/* A device that does nothing until it is told to: what the executor's own logic is tested with. */
#ifndef KVPOOL_TESTS_FAKE_DEVICE_H
#define KVPOOL_TESTS_FAKE_DEVICE_H

#include "server/executor/device.h"

enum { fake_launches_max = 1024 };

struct fake_device {
  struct kvp_device base; /* ->backend is fake_backend */
  uint32_t capacity_ops;
  uint32_t used_ops;
  uint32_t attempts;
  uint32_t launched; /* chains */
  uint32_t collected;
  uint32_t registered;
  struct kvp_device_op *signals[fake_launches_max];
  struct kvp_device_op *firsts[fake_launches_max];
  uint32_t ops[fake_launches_max];
  bool ended[fake_launches_max]; /* by fake_device_end */
  bool fails[fake_launches_max]; /* set before its end: nothing of the chain could be launched but its signal */
  atomic_bool is_lost;
  bool ends_later; /* a thread writes the timeline some time after the launch, and wakes nobody */
};

extern const struct kvp_device_backend fake_backend;

/* The op is its owner's again as soon as the value is seen. */
void fake_signal_write(const struct kvp_device_op *signal);
/* Ends a chain, as if all of it had run: its points and its signal are written. index: in the order of launches. */
void fake_device_end(struct fake_device *device, uint32_t index);
void fake_device_end_all(struct fake_device *device);

#endif
