/* What the kernels of a replay are told: client/replay_cuda.c launches them. */
#ifndef KVPOOL_CLIENT_KERNELS_REPLAY_H
#define KVPOOL_CLIENT_KERNELS_REPLAY_H

#include <stdint.h>

struct kvp_replay_begin_args {
  uint64_t *base;
  uint64_t points; /* base goes up by so many */
  uint64_t *done;  /* goes back to 0 unless it is poisoned; NULL: it doesn't */
};

/* Signals, then waits; NULL: doesn't. */
struct kvp_replay_point_args {
  const uint64_t *base;
  uint64_t *start; /* becomes base + point */
  uint64_t *done;  /* is waited for to become that; problem and deadline are for this */
  uint64_t point;
  uint64_t deadline_ns; /* from the kernel's beginning on */
  uint64_t *problem;    /* host memory: looked at while it waits, set when it waited in vain */
  uint64_t late;        /* what it is set to then: past the deadline, */
  uint64_t poisoned;    /* and because the word is poisoned */
};

#endif
