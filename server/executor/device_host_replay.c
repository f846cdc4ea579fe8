/* Replays of the host backend: fused stores one after another, each when its word has been counted up. Under the workers'
 * lock; what decides is the deadline, the abort word and, for its own replay alone, what a worker writes.
 */
#include <assert.h>

#include "proto/timeline_wire.h"
#include "server/executor/clock.h"
#include "server/executor/device_host.h"

void kvp_host_replay_begin(struct kvp_host_replay *replay, struct kvp_device_op *op) {
  assert(replay->op == NULL && op->params.replay.op_count > 0);
  *replay = (struct kvp_host_replay){.op = op};
}

/* Never makes it smaller: poison stays. */
static void word_raise(uint64_t *address, uint64_t value) {
  _Atomic uint64_t *word = (_Atomic uint64_t *)address;
  uint64_t seen = atomic_load_explicit(word, memory_order_relaxed);
  while (seen < value &&
         !atomic_compare_exchange_weak_explicit(word, &seen, value, memory_order_release, memory_order_relaxed)) {
  }
}

static void give_up(struct kvp_host_replay *replay, enum kvp_replay_end end, uint64_t value) {
  struct kvp_replay_params *params = &replay->op->params.replay;
  params->result = (struct kvp_replay_result){.end = end, .op = replay->at, .value = value};
  for (uint32_t i = replay->at; i < params->op_count; i++) {
    if (params->points[i].signal != NULL) {
      word_raise(params->points[i].signal, KVP_TIMELINE_POISON);
    }
  }
  replay->op = NULL;
}

enum kvp_host_replay_state kvp_host_replay_look(struct kvp_host_replay *replay) {
  const struct kvp_replay_params *params = &replay->op->params.replay;
  const struct kvp_replay_points *points = &params->points[replay->at];
  const uint64_t value =
      points->wait == NULL ? 0 : atomic_load_explicit((const _Atomic uint64_t *)points->wait, memory_order_acquire);
  if (value >= KVP_TIMELINE_POISON) {
    give_up(replay, KVP_REPLAY_POISONED, value);
    return KVP_HOST_REPLAY_OVER;
  }
  if (points->wait != NULL && value >= points->wait_value) {
    return KVP_HOST_REPLAY_READY;
  }
  if (kvp_timeline_read(params->abort) >= params->abort_value) {
    give_up(replay, KVP_REPLAY_ABORTED, value);
    return KVP_HOST_REPLAY_OVER;
  }
  if (kvp_clock_ns() >= params->deadline_ns) {
    give_up(replay, KVP_REPLAY_DEADLINE, value);
    return KVP_HOST_REPLAY_OVER;
  }
  return points->wait == NULL ? KVP_HOST_REPLAY_READY : KVP_HOST_REPLAY_WAITS;
}

void kvp_host_replay_advance(struct kvp_host_replay *replay) {
  const struct kvp_replay_params *params = &replay->op->params.replay;
  const struct kvp_replay_points *points = &params->points[replay->at];
  if (points->signal != NULL) {
    word_raise(points->signal, points->signal_value);
  }
  if (++replay->at == params->op_count) {
    replay->op = NULL;
  }
}
