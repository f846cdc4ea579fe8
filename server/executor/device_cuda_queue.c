/* Queues of the CUDA backend: steps in order on one of a few streams, each with a run of staging memory until it is
 * collected. Serving thread.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "server/executor/clock.h"
#include "server/executor/device_cuda_error.h"

struct kvp_device_queue {
  struct kvp_cuda_device *device;
  uint32_t number;
  struct kvp_cuda_run *first; /* of steps launched and not collected, in order */
  struct kvp_cuda_run *last;
  bool is_signalled; /* the signal of `last` was launched, or nothing was */
  struct kvp_device_queue *next_unsignalled;
};

enum kvp_status kvp_cuda_queue_create(struct kvp_device *device, struct kvp_device_queue **out,
                                      struct kvp_error *error) {
  struct kvp_device_queue *queue = calloc(1, sizeof *queue);
  if (queue == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a device queue");
  }
  queue->device = kvp_cuda_device_of(device);
  queue->number = queue->device->queue_count++;
  queue->is_signalled = true;
  *out = queue;
  return KVP_OK;
}

void kvp_cuda_queue_destroy(struct kvp_device *device, struct kvp_device_queue *queue) {
  (void)device;
  free(queue);
}

static cudaStream_t stream_of(const struct kvp_device_queue *queue) {
  return queue->device->streams[queue->number % kvp_cuda_streams_max];
}

/* A step ends even if an op of it could not be launched. False: there is no memory for that now. */
static bool signal_launch(struct kvp_device_queue *queue) {
  struct kvp_cuda_device *device = queue->device;
  const char *call = "the launch of a step's end";
  const cudaError_t code = kvp_cuda_signal_launch(&queue->last->signal, stream_of(queue));
  if (code != cudaSuccess && kvp_cuda_settle(device, (int)code, call) == KVP_CUDA_BUG) {
    kvp_cuda_lose(device, (int)code, call); /* the step would never end */
  }
  return code == cudaSuccess;
}

void kvp_cuda_queues_signal(struct kvp_cuda_device *device) {
  struct kvp_device_queue **link = &device->unsignalled;
  while (*link != NULL && !kvp_cuda_is_lost(device)) {
    struct kvp_device_queue *queue = *link;
    queue->is_signalled = signal_launch(queue);
    if (queue->is_signalled) {
      *link = queue->next_unsignalled;
    } else {
      link = &queue->next_unsignalled;
    }
  }
}

/* What has become of the step will be told when it is collected. */
static void run_fail(struct kvp_cuda_device *device, struct kvp_cuda_run *run, cudaError_t code) {
  size_t free_bytes = 0, total_bytes = 0;
  if (kvp_cuda_settle(device, (int)code, "a launch") == KVP_CUDA_LOST) {
    return;
  }
  run->failed_code = (int)code;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
    run->free_bytes = free_bytes;
  }
}

bool kvp_cuda_queue_launch(struct kvp_device_queue *queue, struct kvp_device_op *first) {
  struct kvp_cuda_device *device = queue->device;
  if (kvp_cuda_is_lost(device)) {
    return true; /* it never ends, but the process does */
  }
  kvp_cuda_queues_signal(device);
  if (!queue->is_signalled) {
    return kvp_cuda_is_lost(device); /* this step's signal would be that of the one before, too */
  }
  kvp_step_layout_make(&device->layout, first, sizeof(struct kvp_cuda_counts));
  struct kvp_cuda_run *run = kvp_cuda_run_take(&device->staging, &device->layout);
  if (run == NULL) {
    return false;
  }
  if (queue->first == NULL) {
    queue->first = run;
  } else {
    queue->last->next = run;
  }
  queue->last = run;
  cudaStream_t stream = stream_of(queue);
  device->last_stream = stream;
  run->launched_ns = kvp_clock_ns();
  if (queue->first == run) {
    kvp_cuda_launch_alone();
  }
  const cudaError_t code = kvp_cuda_step_launch(device, run, first, stream);
  if (code != cudaSuccess) {
    run_fail(device, run, code);
  }
  queue->is_signalled = kvp_cuda_is_lost(device) || signal_launch(queue);
  if (!queue->is_signalled) {
    queue->next_unsignalled = device->unsignalled;
    device->unsignalled = queue;
  }
  return true;
}

static uint64_t min_u64(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

/* An op ends where the next one starts; one that ran nothing takes no time. Backwards, so that nothing starts later
 * than it ends, whatever the clocks say. */
static void times_set(const struct kvp_cuda_device *device, const struct kvp_cuda_run *run,
                      const struct kvp_cuda_counts *found, uint32_t op_count, uint64_t end_ns) {
  for (uint32_t i = op_count; i > 0; i--) {
    struct kvp_device_op *op = device->ops[i - 1];
    op->finished_ns = end_ns;
    if (found[i - 1].started_ns != 0) {
      const uint64_t started_ns = kvp_device_clock_host_ns(&device->clock, found[i - 1].started_ns);
      end_ns = min_u64(max_u64(started_ns, run->launched_ns), end_ns);
    }
    op->started_ns = end_ns;
  }
}

static void transfer_collect(struct kvp_device_op *op, const uint8_t **results) {
  const struct kvp_transfer_params *transfer = &op->params.transfer;
  const uint64_t bytes = transfer->row_count * transfer->row_bytes;
  if (op->kind != KVP_DEVICE_READ) {
    op->counts.bytes_written = bytes;
    return;
  }
  op->counts.bytes_read = bytes;
  memcpy(transfer->host, *results, bytes);
  *results += bytes;
}

static void op_collect(struct kvp_device_op *op, const struct kvp_cuda_counts *found, const uint8_t **results) {
  switch (op->kind) {
  case KVP_DEVICE_STORE:
    kvp_cuda_store_counts(&op->params.store, found, &op->counts);
    break;
  case KVP_DEVICE_LOAD:
    kvp_cuda_load_counts(&op->params.load, found, &op->counts);
    break;
  case KVP_DEVICE_READ:
  case KVP_DEVICE_WRITE:
  case KVP_DEVICE_FILL:
    transfer_collect(op, results);
    break;
  case KVP_DEVICE_COPY_ROWS:
    kvp_cuda_copy_rows_counts(&op->params.copy_rows, found, &op->counts);
    break;
  case KVP_DEVICE_FUSED_STORE:
    kvp_cuda_fused_store_counts(&op->params.fused_store, found, &op->counts);
    break;
  case KVP_DEVICE_REPLAY:
    kvp_cuda_replay_result(found, &op->params.replay.result);
    break;
  case KVP_DEVICE_CONVERT_INDEX:
    kvp_cuda_convert_index_counts(&op->params.convert_index, found, &op->counts);
    break;
  case KVP_DEVICE_SWA_INDEX:
    kvp_cuda_swa_index_counts(&op->params.swa_index, found, &op->counts);
    break;
  case KVP_DEVICE_EXPAND_INDEX:
    kvp_cuda_expand_index_counts(&op->params.expand_index, found, &op->counts);
    break;
  case KVP_DEVICE_CAT_INDEX:
    kvp_cuda_cat_index_counts(&op->params.cat_index, found, &op->counts);
    break;
  case KVP_DEVICE_COPY_BLOCKS:
    kvp_cuda_copy_blocks_counts(&op->params.blocks, found, &op->counts);
    break;
  case KVP_DEVICE_ZERO_BLOCKS:
    kvp_cuda_zero_blocks_counts(&op->params.blocks, found, &op->counts);
    break;
  case KVP_DEVICE_POINT:
  case KVP_DEVICE_SIGNAL:
    break;
  }
}

static enum kvp_status failure_tell(const struct kvp_cuda_device *device, const struct kvp_cuda_run *run,
                                    struct kvp_error *error) {
  const char *name = cudaGetErrorName((cudaError_t)run->failed_code);
  if (kvp_cuda_error_classify(run->failed_code) == KVP_CUDA_REFUSED) {
    return kvp_error_set(
        error, KVP_OUT_OF_MEMORY,
        "device op %u of %u could not be launched: %s; %llu of %llu bytes of the device are free; ops "
        "before it have run",
        run->failed_op, run->signal.op_count, name, (unsigned long long)run->free_bytes,
        (unsigned long long)device->description.memory_bytes);
  }
  return kvp_error_set(
      error, KVP_INTERNAL,
      "a bug of the daemon: device op %u of %u could not be launched: %s (%d); ops before it have run",
      run->failed_op, run->signal.op_count, name, run->failed_code);
}

enum kvp_status kvp_cuda_queue_collect(struct kvp_device_queue *queue, struct kvp_device_op *first,
                                       struct kvp_error *error) {
  struct kvp_cuda_device *device = queue->device;
  struct kvp_cuda_run *run = queue->first;
  assert(run != NULL);
  queue->first = run->next;
  const uint8_t *memory = kvp_cuda_run_host(&device->staging, run);
  const struct kvp_cuda_counts *found = (const void *)(memory + run->found_offset_bytes);
  const uint8_t *results = memory + run->results_offset_bytes;
  uint64_t finished_ns = 0;
  memcpy(&finished_ns, memory + run->finished_offset_bytes, sizeof finished_ns);
  const uint64_t now_ns = kvp_clock_ns();
  kvp_device_clock_observe(&device->clock, finished_ns, now_ns);
  if (run->failed_code != 0) {
    const enum kvp_status status = failure_tell(device, run, error);
    kvp_cuda_run_give(&device->staging, run);
    return status;
  }
  uint32_t op_count = 0;
  for (struct kvp_device_op *op = first; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    op_collect(op, &found[op_count], &results);
    device->ops[op_count++] = op;
  }
  const uint64_t end_ns = kvp_device_clock_host_ns(&device->clock, finished_ns);
  times_set(device, run, found, op_count, max_u64(min_u64(end_ns, now_ns), run->launched_ns));
  kvp_cuda_run_give(&device->staging, run);
  return KVP_OK;
}
