/* Parts of the CUDA backend that its files share.
 *
 * One device, its primary context, is current in both threads of the executor. An error after which nothing works any
 * more is kept in the device; from then on nobody calls CUDA, and the process ends.
 */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_H

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"
#include "server/executor/device.h"
#include "server/executor/device_clock.h"
#include "server/executor/device_cuda_driver.h"
#include "server/executor/device_cuda_staging.h"
#include "server/executor/step_layout.h"
#include "server/executor/step_writes.h"

enum {
  kvp_cuda_streams_max = 64,   /* more would not run side by side anyway */
  kvp_cuda_fused_ops_max = 64, /* layers of a model */
  kvp_cuda_parts_max = 4,      /* of an assemble */
  kvp_cuda_direct_ops_max = 2,
  kvp_cuda_direct_bytes_max = 16 << 10, /* of a step's arrays that kernels read from host memory themselves */
};

struct kvp_cuda_ipc_allocation;

struct kvp_cuda_device {
  struct kvp_device base;
  int ordinal;
  struct kvp_cuda_driver driver;
  struct kvp_device_description description; /* but for what is free now */
  uint64_t granularity_bytes;
  uint64_t pitch_bytes_max;
  bool registers_read_only;

  atomic_int lost_code; /* cudaError_t; 0: it works */
  _Atomic(const char *) lost_call;
  atomic_bool is_stuck;     /* what was launched didn't end in time: nothing of it may be freed */
  atomic_int told_bug_code; /* the last one that was logged */

  /* Control thread; any thread may ask it whether the context still works. */
  cudaStream_t control_stream;

  /* Control thread. */
  struct kvp_cuda_ipc_allocation *ipc_allocations; /* see device_cuda_ipc.h */

  /* Serving thread. */
  struct kvp_cuda_staging staging;
  struct kvp_device_clock clock;
  struct kvp_step_layout layout;
  struct kvp_device_op *ops[kvp_device_ops_per_step_max];            /* scratch */
  struct kvp_device_op fused_ops[kvp_cuda_fused_ops_max];            /* scratch: ops that go together */
  struct kvp_fused_store_params replay_ops[kvp_cuda_replay_ops_max]; /* scratch: of a replay's launch */
  struct kvp_device_writes fused_writes[kvp_cuda_fused_ops_max];     /* scratch: what they write */
  cudaStream_t streams[kvp_cuda_streams_max];
  cudaStream_t last_stream; /* NULL: nothing was launched yet */
  uint32_t queue_count;
  struct kvp_device_queue *unsignalled; /* queues whose last step waits for its signal to be launched */
};

static inline struct kvp_cuda_device *kvp_cuda_device_of(struct kvp_device *device) {
  return (struct kvp_cuda_device *)device;
}

static inline bool kvp_cuda_is_lost(const struct kvp_cuda_device *device) {
  return atomic_load_explicit(&device->lost_code, memory_order_acquire) != 0;
}

static inline bool kvp_cuda_frees_memory(const struct kvp_cuda_device *device) {
  return !kvp_cuda_is_lost(device) && !atomic_load(&device->is_stuck);
}

/* ---- device_cuda_memory.c: control thread ---- */

enum kvp_status kvp_cuda_memory_create(struct kvp_device *device, const char *name, uint64_t bytes, int *fds,
                                       struct kvp_memory **out, struct kvp_error *error);
enum kvp_status kvp_cuda_memory_import(struct kvp_device *device, uint64_t bytes, const int *fds,
                                       const uint64_t *chunk_bytes, uint32_t chunk_count, struct kvp_memory **out,
                                       struct kvp_error *error);
void kvp_cuda_memory_destroy(struct kvp_device *device, struct kvp_memory *memory);
/* The least memory takes, and what it is a multiple of. */
enum kvp_status kvp_cuda_memory_granularity(struct kvp_cuda_device *device, struct kvp_error *error);

/* ---- device_cuda_foreign.c: control thread ---- */

enum kvp_status kvp_cuda_memory_open(struct kvp_device *device, const struct kvp_control_open *request, int fd,
                                     struct kvp_memory **out, struct kvp_error *error);

/* ---- device_cuda_register.c: any thread ---- */

enum kvp_status kvp_cuda_host_register(struct kvp_device *device, void *host, uint64_t bytes, bool read_only,
                                       void **out, struct kvp_error *error);
void kvp_cuda_host_unregister(struct kvp_device *device, void *host);

/* ---- device_cuda_queue.c: serving thread ---- */

enum kvp_status kvp_cuda_queue_create(struct kvp_device *device, struct kvp_device_queue **out,
                                      struct kvp_error *error);
void kvp_cuda_queue_destroy(struct kvp_device *device, struct kvp_device_queue *queue);
bool kvp_cuda_queue_launch(struct kvp_device_queue *queue, struct kvp_device_op *first);
enum kvp_status kvp_cuda_queue_collect(struct kvp_device_queue *queue, struct kvp_device_op *first,
                                       struct kvp_error *error);
/* Launches the signals that there was no memory for. */
void kvp_cuda_queues_signal(struct kvp_cuda_device *device);

/* ---- device_cuda_launch.c: serving thread ---- */

/* Everything of one step onto the stream but its signal, which is put into the run. layout and run: the step's. */
cudaError_t kvp_cuda_step_launch(struct kvp_cuda_device *device, struct kvp_cuda_run *run,
                                 struct kvp_device_op *first, cudaStream_t stream);

/* ---- device_cuda_fused.c: serving thread ---- */

/* How many fused stores, from the first op on, may run at once: none writes what another one reads or writes. Their
 * number is at most kvp_cuda_fused_ops_max. */
uint32_t kvp_cuda_fused_count(struct kvp_cuda_device *device, const struct kvp_device_op *first);

/* ---- device_cuda_open.c ---- */

/* Finds and prepares the GPU of that name; staging, clock and streams are the caller's. */
enum kvp_status kvp_cuda_gpu_open(struct kvp_cuda_device *device, const char *name, struct kvp_error *error);

#endif
