/* Replays on host devices: points are signalled and waited for by the caller, at once. */
#include <stdlib.h>
#include <time.h>

#include "client/replay.h"
#include "proto/failpoint.h"

static const long pause_ns = 20000;

static _Atomic uint64_t *word_of(uint64_t *word) {
  return (_Atomic uint64_t *)word;
}

static uint64_t *buffer_word(const kvpool_replay *replay, uint32_t word) {
  return (uint64_t *)kvpool_buffer_data(replay->buffer) + (size_t)word * 8;
}

/* What lies in no memory that is shared. */
struct cpu_state {
  uint64_t base;
  _Atomic uint64_t problem;
};

static kvpool_status cpu_init(kvpool_replay *replay, kvpool_error *error) {
  struct cpu_state *state = calloc(1, sizeof *state);
  if (state == NULL) {
    return kvp_fail_no_memory(error);
  }
  replay->state = state;
  state->base = replay->first_base;
  replay->base = &state->base;
  replay->problem = &state->problem;
  if (replay->buffer != NULL) {
    replay->start = buffer_word(replay, replay->words.start);
    replay->done = buffer_word(replay, replay->words.done);
  } else {
    replay->start = (uint64_t *)&replay->timelines->words[replay->words.start].value;
    replay->done = (uint64_t *)&replay->timelines->words[replay->words.done].value;
  }
  return KVPOOL_OK;
}

static void cpu_deinit(kvpool_replay *replay) {
  free(replay->state);
}

static kvpool_status cpu_begin(kvpool_replay *replay, void *stream, kvpool_error *error) {
  (void)stream;
  (void)error;
  *replay->base += replay->points;
  if (replay->mode == KVPOOL_REPLAY_BY_OP) {
    uint64_t done = atomic_load(word_of(replay->done));
    while (done < KVP_TIMELINE_POISON && !atomic_compare_exchange_weak(word_of(replay->done), &done, 0)) {
    }
  }
  return KVPOOL_OK;
}

static void problem_set(kvpool_replay *replay, uint32_t point, enum kvp_replay_problem problem) {
  uint64_t none = 0;
  (void)atomic_compare_exchange_strong(replay->problem, &none,
                                       (uint64_t)point << kvp_replay_problem_bits | (uint64_t)problem);
}

/* As kernels wait: whatever ends it, the caller goes on, and finds out by kvpool_replay_check. */
static void point_wait(kvpool_replay *replay, uint32_t point) {
  const uint64_t value = point + (replay->mode == KVPOOL_REPLAY_BY_OP ? 0 : *replay->base);
  const uint64_t deadline_ns = kvp_now_ns() + replay->deadline_ns;
  for (;;) {
    const uint64_t found = atomic_load_explicit(word_of(replay->done), memory_order_acquire);
    if (found >= KVP_TIMELINE_POISON) {
      problem_set(replay, point, KVP_REPLAY_POISONED);
      return;
    }
    if (found >= value || atomic_load(replay->problem) != 0) {
      return;
    }
    if (kvp_now_ns() >= deadline_ns) {
      problem_set(replay, point, KVP_REPLAY_LATE);
      return;
    }
    (void)nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
  }
}

static kvpool_status cpu_point(kvpool_replay *replay, void *stream, uint32_t signal, uint32_t wait,
                               kvpool_error *error) {
  (void)stream;
  (void)error;
  if (signal != 0) {
    KVP_FAILPOINT("worker.replay_begun");
    atomic_store_explicit(word_of(replay->start), *replay->base + signal, memory_order_release);
  }
  if (wait != 0) {
    KVP_FAILPOINT("worker.replay_waits");
    point_wait(replay, wait);
  }
  return KVPOOL_OK;
}

const struct kvp_replay_backend kvp_replay_cpu = {
    .init = cpu_init, .deinit = cpu_deinit, .begin = cpu_begin, .point = cpu_point};
