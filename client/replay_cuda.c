/* Replays on GPUs: points are kernels of one thread, or memory-operation nodes, on the caller's stream and in its context.
 * The driver's library is loaded at run time; nothing here is CUDA's runtime's.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/kernels/replay.h"
#include "client/replay.h"

/* The kernels, client/kernels/replay.cu, as nvcc made them; none where there was no nvcc. */
extern const unsigned char kvp_replay_kernels[];
extern const size_t kvp_replay_kernels_bytes;

/* As cuda.h has them. */
typedef int cu_result;
typedef unsigned long long cu_pointer;
enum {
  cu_success = 0,
  cu_host_memory_already_registered = 712,
  cu_mem_host_portable = 1,
  cu_mem_host_device_map = 2,
  cu_wait_value_geq = 0,
};

struct driver {
  cu_result (*context_get)(void **context);
  cu_result (*error_string)(cu_result code, const char **text);
  cu_result (*module_load)(void **module, const void *image);
  cu_result (*module_unload)(void *module);
  cu_result (*function_get)(void **function, void *module, const char *name);
  cu_result (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
                      void **extra);
  cu_result (*stream_wait_value)(void *stream, cu_pointer address, uint64_t value, unsigned flags);
  cu_result (*alloc)(cu_pointer *out, size_t bytes);
  cu_result (*free)(cu_pointer memory);
  cu_result (*copy_in)(cu_pointer memory, const void *host, size_t bytes);
  cu_result (*host_alloc)(void **out, size_t bytes, unsigned flags);
  cu_result (*host_free)(void *memory);
  cu_result (*host_register)(void *memory, size_t bytes, unsigned flags);
  cu_result (*host_unregister)(void *memory);
  cu_result (*host_pointer)(cu_pointer *out, void *host, unsigned flags);
};

static struct driver driver;
static const char *driver_missing; /* NULL: all is there */
static pthread_once_t driver_once = PTHREAD_ONCE_INIT;

static void driver_load(void) {
  const struct {
    const char *name;
    void *function;
  } symbols[] = {
      {"cuCtxGetCurrent", &driver.context_get},
      {"cuGetErrorString", &driver.error_string},
      {"cuModuleLoadData", &driver.module_load},
      {"cuModuleUnload", &driver.module_unload},
      {"cuModuleGetFunction", &driver.function_get},
      {"cuLaunchKernel", &driver.launch},
      {"cuStreamWaitValue64_v2", &driver.stream_wait_value},
      {"cuMemAlloc_v2", &driver.alloc},
      {"cuMemFree_v2", &driver.free},
      {"cuMemcpyHtoD_v2", &driver.copy_in},
      {"cuMemHostAlloc", &driver.host_alloc},
      {"cuMemFreeHost", &driver.host_free},
      {"cuMemHostRegister_v2", &driver.host_register},
      {"cuMemHostUnregister", &driver.host_unregister},
      {"cuMemHostGetDevicePointer_v2", &driver.host_pointer},
  };
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  driver_missing = library == NULL ? "libcuda.so.1" : NULL;
  for (size_t i = 0; i < sizeof symbols / sizeof symbols[0] && driver_missing == NULL; i++) {
    void *found = dlsym(library, symbols[i].name);
    memcpy(symbols[i].function, &found, sizeof found);
    driver_missing = found == NULL ? symbols[i].name : NULL;
  }
}

static kvpool_status cuda_fail(kvpool_error *error, const char *call, cu_result code) {
  const char *text = NULL;
  if (driver.error_string(code, &text) != cu_success || text == NULL) {
    text = "an unknown error";
  }
  return kvp_fail(error, KVPOOL_INTERNAL, "%s: %s (%d)", call, text, code);
}

struct cuda_state {
  void *module;
  void *begin;
  void *point;
  cu_pointer base; /* BY_OP; of one launch it is a word of the buffer */
  void *problem;
  struct kvp_timeline_word *registered; /* whose registration is ours to end */
};

/* In the order in which they are made. */
static void state_free(struct cuda_state *state) {
  if (state->registered != NULL) {
    (void)driver.host_unregister(state->registered);
  }
  if (state->base != 0) {
    (void)driver.free(state->base);
  }
  if (state->problem != NULL) {
    (void)driver.host_free(state->problem);
  }
  if (state->module != NULL) {
    (void)driver.module_unload(state->module);
  }
  free(state);
}

static kvpool_status driver_check(kvpool_error *error) {
  void *context = NULL;
  if (kvp_replay_kernels_bytes == 0) {
    return kvp_fail(error, KVPOOL_UNIMPLEMENTED,
                    "this libkvpool was built without nvcc: it has no kernels for graphs");
  }
  (void)pthread_once(&driver_once, driver_load);
  if (driver_missing != NULL) {
    return kvp_fail(error, KVPOOL_UNIMPLEMENTED, "the GPU's driver has no %s that can be loaded", driver_missing);
  }
  const cu_result code = driver.context_get(&context);
  if (code != cu_success) {
    return cuda_fail(error, "cuCtxGetCurrent", code);
  }
  if (context == NULL) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "no CUDA context is current in this thread");
  }
  return KVPOOL_OK;
}

static kvpool_status kernels_load(struct cuda_state *state, kvpool_error *error) {
  cu_result code = driver.module_load(&state->module, kvp_replay_kernels);
  if (code != cu_success) {
    state->module = NULL;
    return cuda_fail(error, "cuModuleLoadData", code);
  }
  code = driver.function_get(&state->begin, state->module, "kvp_replay_begin");
  if (code == cu_success) {
    code = driver.function_get(&state->point, state->module, "kvp_replay_point");
  }
  return code == cu_success ? KVPOOL_OK : cuda_fail(error, "cuModuleGetFunction", code);
}

static kvpool_status problem_make(kvpool_replay *replay, struct cuda_state *state, kvpool_error *error) {
  const cu_result code =
      driver.host_alloc(&state->problem, sizeof(uint64_t), cu_mem_host_portable | cu_mem_host_device_map);
  if (code != cu_success) {
    state->problem = NULL;
    return cuda_fail(error, "cuMemHostAlloc", code);
  }
  memset(state->problem, 0, sizeof(uint64_t));
  replay->problem = state->problem;
  return KVPOOL_OK;
}

static uint64_t *pointer_of(cu_pointer address) {
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
  struct kvp_timeline_word *words = replay->timelines->words;
  cu_pointer seen = 0;
  cu_result code = driver.host_register(words, kvp_timeline_bytes, cu_mem_host_portable | cu_mem_host_device_map);
  if (code == cu_success) {
    state->registered = words;
  } else if (code != cu_host_memory_already_registered) {
    return cuda_fail(error, "cuMemHostRegister", code);
  }
  code = driver.host_pointer(&seen, words, 0);
  if (code != cu_success) {
    return cuda_fail(error, "cuMemHostGetDevicePointer", code);
  }
  code = driver.alloc(&state->base, sizeof(uint64_t));
  if (code != cu_success) {
    state->base = 0;
    return cuda_fail(error, "cuMemAlloc", code);
  }
  code = driver.copy_in(state->base, &replay->first_base, sizeof(uint64_t));
  if (code != cu_success) {
    return cuda_fail(error, "cuMemcpyHtoD", code);
  }
  replay->start = pointer_of(seen + replay->words.start * sizeof *words);
  replay->done = pointer_of(seen + replay->words.done * sizeof *words);
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
  const cu_result code = driver.launch(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
  return code == cu_success ? KVPOOL_OK : cuda_fail(error, "cuLaunchKernel", code);
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
    cu_pointer address = 0;
    memcpy(&address, &replay->done, sizeof address);
    const cu_result code = driver.stream_wait_value(stream, address, wait, cu_wait_value_geq);
    status = code == cu_success ? KVPOOL_OK : cuda_fail(error, "cuStreamWaitValue64", code);
  }
  return status;
}

const struct kvp_replay_backend kvp_replay_cuda = {
    .init = cuda_init, .deinit = cuda_deinit, .begin = cuda_begin, .point = cuda_point};
