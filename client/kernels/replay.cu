/* What stands in a captured graph: its beginning, signals and waits, a kernel of one thread each.
 *
 * A kernel sees what kernels before it on the stream have written, and its release passes that on; what comes behind a
 * wait sees what its acquire saw. A wait ends by its word, by poison, by the deadline, or because another one has found a
 * problem or the CPU has set one.
 */
#include "client/kernels/replay.h"

#include "proto/timeline_wire.h"

static __device__ __forceinline__ uint64_t load_acquire(const uint64_t *from) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

static __device__ __forceinline__ void store_release(uint64_t *to, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(v) : "memory");
}

static __device__ __forceinline__ uint64_t timer_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v) : : "memory");
  return v;
}

extern "C" __global__ void __launch_bounds__(1) kvp_replay_begin(const __grid_constant__ kvp_replay_begin_args args) {
  *args.base += args.points;
  if (args.done != nullptr && load_acquire(args.done) < KVP_TIMELINE_POISON) {
    store_release(args.done, 0);
  }
}

static constexpr uint32_t looks_before_problem = 64; /* that one is far away, beyond the bus */

/* 0: the point was reached, or there is a problem already. */
static __device__ __forceinline__ uint64_t wait_for(const kvp_replay_point_args &args, uint64_t value) {
  uint64_t begin_ns = timer_ns();
  for (uint32_t looks = 1;; looks++) {
    uint64_t found = load_acquire(args.done);
    if (found >= KVP_TIMELINE_POISON) {
      return args.poisoned;
    }
    if (found >= value) {
      return 0;
    }
    if (looks % looks_before_problem == 0) {
      if (load_acquire(args.problem) != 0) {
        return 0;
      }
      if (timer_ns() - begin_ns >= args.deadline_ns) {
        return args.late;
      }
    }
    __nanosleep(32);
  }
}

extern "C" __global__ void __launch_bounds__(1) kvp_replay_point(const __grid_constant__ kvp_replay_point_args args) {
  uint64_t value = *args.base + args.point;
  if (args.start != nullptr) {
    store_release(args.start, value);
  }
  if (args.done != nullptr) {
    uint64_t problem = wait_for(args, value);
    if (problem != 0 && load_acquire(args.problem) == 0) {
      store_release(args.problem, problem);
    }
  }
}
