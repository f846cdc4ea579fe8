/* Replays on GPUs: points are kernels of one thread, or memory-operation nodes, on the caller's stream and in its context.
 * The driver's library is loaded at run time; nothing here is CUDA's runtime's.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/kernels/replay.h"
#include "client/replay.h"
#include "client/worker_cuda_driver.h"

/* The kernels, client/kernels/replay.cu, as nvcc made them; none where there was no nvcc. */
extern const unsigned char kvp_replay_kernels[];
extern const size_t kvp_replay_kernels_bytes;

enum { CU_HOST_ALLOC_PORTABLE = 1, CU_HOST_ALLOC_DEVICEMAP = 2 };

/* What graphs need of the driver beside worker_cuda_driver.h. */
struct graph_driver {
  int (*context_get)(void **context);
  int (*module_load)(void **module, const void *image);
  int (*module_unload)(void *module);
  int (*function_get)(void **function, void *module, const char *name);
  int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void *stream, void **arguments, void **extra);
  int (*alloc)(uint64_t *out, size_t bytes);
  int (*free)(uint64_t memory);
  int (*copy_in)(uint64_t memory, const void *host, size_t bytes);
  int (*host_alloc)(void **out, size_t bytes, unsigned flags);
  int (*host_free)(void *memory);
};

static const struct kvp_cuda_driver *driver;
static struct graph_driver graphs;
static kvpool_error load_problem; /* status KVPOOL_OK: all is there */
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

static void load(void) {
  const struct kvp_cuda_symbol symbols[] = {
      {"cuCtxGetCurrent", &graphs.context_get},
      {"cuModuleLoadData", &graphs.module_load},
      {"cuModuleUnload", &graphs.module_unload},
      {"cuModuleGetFunction", &graphs.function_get},
      {"cuLaunchKernel", &graphs.launch},
      {"cuMemAlloc_v2", &graphs.alloc},
      {"cuMemFree_v2", &graphs.free},
      {"cuMemcpyHtoD_v2", &graphs.copy_in},
      {"cuMemHostAlloc", &graphs.host_alloc},
      {"cuMemFreeHost", &graphs.host_free},
  };
  if (kvp_cuda_load(&driver, &load_problem) == KVPOOL_OK) {
    (void)kvp_cuda_symbols_load(symbols, sizeof symbols / sizeof symbols[0], &load_problem);
  }
}

static kvpool_status cuda_fail(kvpool_error *error, const char *call, int code) {
  return kvp_cuda_fail(driver, code, call, "a replay", error);
}

struct cuda_state {
  void *module;
  void *begin;
  void *point;
  void *problem; /* host memory */
  uint64_t base; /* BY_OP; of one launch it is a word of the buffer */
};

static void state_free(struct cuda_state *state) {
  if (state->base != 0) {
    (void)graphs.free(state->base);
  }
  if (state->problem != NULL) {
    (void)graphs.host_free(state->problem);
  }
  if (state->module != NULL) {
    (void)graphs.module_unload(state->module);
  }
  free(state);
}

static kvpool_status driver_check(kvpool_error *error) {
  void *context = NULL;
  if (kvp_replay_kernels_bytes == 0) {
    return kvp_fail(error, KVPOOL_UNIMPLEMENTED,
                    "this libkvpool was built without nvcc: it has no kernels for graphs");
  }
  (void)pthread_once(&load_once, load);
  if (load_problem.status != KVPOOL_OK) {
    if (error != NULL) {
      *error = load_problem;
    }
    return load_problem.status;
  }
  const int code = graphs.context_get(&context);
  if (code != CUDA_OK) {
    return cuda_fail(error, "cuCtxGetCurrent", code);
  }
  if (context == NULL) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "no CUDA context is current in this thread");
  }
  return KVPOOL_OK;
}

static kvpool_status kernels_load(struct cuda_state *state, kvpool_error *error) {
  int code = graphs.module_load(&state->module, kvp_replay_kernels);
  if (code != CUDA_OK) {
    state->module = NULL;
    return cuda_fail(error, "cuModuleLoadData", code);
  }
  code = graphs.function_get(&state->begin, state->module, "kvp_replay_begin");
  if (code == CUDA_OK) {
    code = graphs.function_get(&state->point, state->module, "kvp_replay_point");
  }
  return code == CUDA_OK ? KVPOOL_OK : cuda_fail(error, "cuModuleGetFunction", code);
}

static kvpool_status problem_make(kvpool_replay *replay, struct cuda_state *state, kvpool_error *error) {
  const int code =
      graphs.host_alloc(&state->problem, sizeof(uint64_t), CU_HOST_ALLOC_PORTABLE | CU_HOST_ALLOC_DEVICEMAP);
  if (code != CUDA_OK) {
    state->problem = NULL;
    return cuda_fail(error, "cuMemHostAlloc", code);
  }
  memset(state->problem, 0, sizeof(uint64_t));
  replay->problem = state->problem;
  return KVPOOL_OK;
}

static uint64_t *pointer_of(uint64_t address) {
  uint64_t *pointer = NULL;
  _Static_assert(sizeof pointer == sizeof address, "an address is a pointer");
  memcpy(&pointer, &address, sizeof pointer);
  return pointer;
}

static void buffer_words(kvpool_replay *replay) {
  uint64_t *words = kvpool_buffer_data(replay->buffer);
  replay->start = words + (size_t)kvp_replay_start_word * 8;
  replay->done = words + (size_t)kvp_replay_done_word * 8;
  replay->base = words + (size_t)kvp_replay_base_word * 8;
}

/* Words of the timelines as the GPU sees them, and a base in its memory. */
static kvpool_status timeline_words(kvpool_replay *replay, struct cuda_state *state, kvpool_error *error) {
  uint64_t start = 0, done = 0;
  kvpool_status status = kvpool_timeline_device_address(replay->attachment, replay->words.start, &start, error);
  if (status == KVPOOL_OK) {
    status = kvpool_timeline_device_address(replay->attachment, replay->words.done, &done, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  int code = graphs.alloc(&state->base, sizeof(uint64_t));
  if (code != CUDA_OK) {
    state->base = 0;
    return cuda_fail(error, "cuMemAlloc", code);
  }
  code = graphs.copy_in(state->base, &replay->first_base, sizeof(uint64_t));
  if (code != CUDA_OK) {
    return cuda_fail(error, "cuMemcpyHtoD", code);
  }
  replay->start = pointer_of(start);
  replay->done = pointer_of(done);
  replay->base = pointer_of(state->base);
  return KVPOOL_OK;
}

static kvpool_status cuda_init(kvpool_replay *replay, kvpool_error *error) {
  kvpool_status status = driver_check(error);
  if (status != KVPOOL_OK) {
    return status;
  }
  struct cuda_state *state = calloc(1, sizeof *state);
  if (state == NULL) {
    return kvp_fail_no_memory(error);
  }
  status = kernels_load(state, error);
  if (status == KVPOOL_OK) {
    status = problem_make(replay, state, error);
  }
  if (status == KVPOOL_OK && replay->buffer == NULL) {
    status = timeline_words(replay, state, error);
  } else if (status == KVPOOL_OK) {
    buffer_words(replay);
  }
  if (status != KVPOOL_OK) {
    state_free(state);
    return status;
  }
  replay->state = state;
  return KVPOOL_OK;
}

static void cuda_deinit(kvpool_replay *replay) {
  state_free(replay->state);
}

static kvpool_status kernel_launch(void *function, void *arguments, void *stream, kvpool_error *error) {
  void *parameters[] = {arguments};
  const int code = graphs.launch(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
  return code == CUDA_OK ? KVPOOL_OK : cuda_fail(error, "cuLaunchKernel", code);
}

static kvpool_status cuda_begin(kvpool_replay *replay, void *stream, kvpool_error *error) {
  const struct cuda_state *state = replay->state;
  struct kvp_replay_begin_args args = {
      .base = replay->base,
      .points = replay->points,
      .done = replay->mode == KVPOOL_REPLAY_BY_OP ? replay->done : NULL,
  };
  return kernel_launch(state->begin, &args, stream, error);
}

static kvpool_status point_launch(kvpool_replay *replay, void *stream, uint32_t point, bool signals, bool waits,
                                  kvpool_error *error) {
  const struct cuda_state *state = replay->state;
  struct kvp_replay_point_args args = {
      .base = replay->base,
      .start = signals ? replay->start : NULL,
      .done = waits ? replay->done : NULL,
      .point = point,
      .deadline_ns = replay->deadline_ns,
      .problem = state->problem,
      .late = (uint64_t)point << kvp_replay_problem_bits | (uint64_t)KVP_REPLAY_LATE,
      .poisoned = (uint64_t)point << kvp_replay_problem_bits | (uint64_t)KVP_REPLAY_POISONED,
  };
  return kernel_launch(state->point, &args, stream, error);
}

static kvpool_status cuda_point(kvpool_replay *replay, void *stream, uint32_t signal, uint32_t wait,
                                kvpool_error *error) {
  if (replay->mode == KVPOOL_REPLAY_ONE_LAUNCH) {
    return point_launch(replay, stream, signal != 0 ? signal : wait, signal != 0, wait != 0, error);
  }
  kvpool_status status = KVPOOL_OK;
  if (signal != 0) {
    status = point_launch(replay, stream, signal, true, false, error);
  }
  if (status == KVPOOL_OK && wait != 0) {
    uint64_t address = 0;
    memcpy(&address, &replay->done, sizeof address);
    const int code = driver->stream_wait(stream, address, wait, CU_STREAM_WAIT_GEQ);
    status = code == CUDA_OK ? KVPOOL_OK : cuda_fail(error, "cuStreamWaitValue64", code);
  }
  return status;
}

const struct kvp_replay_backend kvp_replay_cuda = {
    .init = cuda_init, .deinit = cuda_deinit, .begin = cuda_begin, .point = cuda_point};
