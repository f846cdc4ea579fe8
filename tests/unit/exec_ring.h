/* A worker's ring in miniature, beside exec_harness's supervisor in miniature. Fails as loudly. */
#ifndef KVPOOL_TESTS_EXEC_RING_H
#define KVPOOL_TESTS_EXEC_RING_H

#include "proto/timeline_wire.h"
#include "tests/unit/exec_harness.h"

struct exec_ring {
  uint64_t attachment_id;
  int ring_fd;
  int command_event;
  int completion_event; /* the worker's end */
  int timelines_fd;
  struct kvp_ring ring;
  struct kvp_timeline_word *words;
};

/* Makes all of it and has it attached; after an error it is to be closed all the same. */
struct kvp_error exec_ring_attach(struct exec_harness *link, struct exec_ring *ring,
                                  const struct kvp_control_ring *spec);
struct kvp_error exec_ring_detach(struct exec_harness *link, const struct exec_ring *ring);
void exec_ring_close(struct exec_ring *ring);

/* False when the command lane is full. */
bool exec_ring_post(struct exec_ring *ring, uint32_t kind, uint64_t tag, const void *payload, uint32_t bytes);
/* Waits for the next completion; its payload is the caller's. */
struct exec_completion exec_ring_take(struct exec_ring *ring);
bool exec_ring_try_take(struct exec_ring *ring, struct exec_completion *out);

#endif
