/* One chain, a step or a leg of one, onto a stream: its arrays, its ops; the signal behind them is the queue's. Serving
 * thread.
 *
 * The first error ends it: what was launched before runs, nothing behind it is launched.
 */
#include <assert.h>
#include <string.h>

#include "server/executor/device_cuda.h"
#include "server/executor/device_cuda_failpoint.h"

_Static_assert((int)kvp_fused_elements_max <= (int)kvp_cuda_fused_elements_max, "what intake lets through");

enum copy_direction { TO_ROWS, FROM_ROWS, FILL_ROWS };

/* Where a step's parts lie while it is launched. */
struct step_place {
  const uint8_t *arrays;          /* of the run, as kernels read it */
  uint8_t *host;                  /* of the run */
  struct kvp_cuda_counts *counts; /* [op_count] */
  cudaStream_t stream;
};

static cudaError_t rows_copy(enum copy_direction direction, uint8_t *rows, uint64_t stride_bytes, uint8_t *host,
                             int fill, uint64_t row_bytes, uint64_t row_count, cudaStream_t stream) {
  switch (direction) {
  case TO_ROWS:
    return row_count == 1 ? cudaMemcpyAsync(rows, host, row_bytes, cudaMemcpyHostToDevice, stream)
                          : cudaMemcpy2DAsync(rows, stride_bytes, host, row_bytes, row_bytes, row_count,
                                              cudaMemcpyHostToDevice, stream);
  case FROM_ROWS:
    return row_count == 1 ? cudaMemcpyAsync(host, rows, row_bytes, cudaMemcpyDeviceToHost, stream)
                          : cudaMemcpy2DAsync(host, row_bytes, rows, stride_bytes, row_bytes, row_count,
                                              cudaMemcpyDeviceToHost, stream);
  case FILL_ROWS:
    break;
  }
  return row_count == 1 ? cudaMemsetAsync(rows, fill, row_bytes, stream)
                        : cudaMemset2DAsync(rows, stride_bytes, fill, row_bytes, row_count, stream);
}

static cudaError_t transfer_launch(const struct kvp_cuda_device *device, enum copy_direction direction,
                                   const struct kvp_transfer_params *transfer, uint8_t *host, cudaStream_t stream) {
  uint64_t row_count = transfer->row_count;
  uint64_t row_bytes = transfer->row_bytes;
  const uint64_t stride_bytes = transfer->rows.stride_bytes;
  if (stride_bytes == row_bytes) { /* one long row */
    row_bytes *= row_count;
    row_count = 1;
  }
  if (row_count <= 1 || stride_bytes <= device->pitch_bytes_max) {
    return row_count * row_bytes == 0 ? cudaSuccess
                                      : rows_copy(direction, transfer->rows.base, stride_bytes, host, transfer->fill,
                                                  row_bytes, row_count, stream);
  }
  /* Rows further apart than a copy can have them: there are not many of those in a buffer. */
  cudaError_t code = cudaSuccess;
  for (uint64_t row = 0; row < row_count && code == cudaSuccess; row++) {
    code = rows_copy(direction, transfer->rows.base + row * stride_bytes, stride_bytes,
                     host == NULL ? NULL : host + row * row_bytes, transfer->fill, row_bytes, 1, stream);
  }
  return code;
}

static cudaError_t transfer_op_launch(const struct kvp_cuda_device *device, const struct step_place *place,
                                      const struct kvp_device_op *op, uint32_t index) {
  const enum copy_direction direction = op->kind == KVP_DEVICE_WRITE  ? TO_ROWS
                                        : op->kind == KVP_DEVICE_READ ? FROM_ROWS
                                                                      : FILL_ROWS;
  uint8_t *host = direction == FILL_ROWS ? NULL : place->host + device->layout.op_offset_bytes[index];
  return transfer_launch(device, direction, &op->params.transfer, host, place->stream);
}

/* The op with the addresses of its arrays where kernels read them. */
static struct kvp_device_op op_staged(const struct kvp_cuda_device *device, const struct step_place *place,
                                      const struct kvp_device_op *op, uint32_t index) {
  struct kvp_device_op staged = *op;
  struct kvp_host_array arrays[kvp_host_arrays_per_op_max];
  const uint32_t count = kvp_device_op_host_arrays(op, arrays);
  for (uint32_t i = 0; i < count; i++) {
    const uint8_t *array =
        place->arrays + device->layout.array_offset_bytes[device->layout.op_first_array[index] + i];
    memcpy((uint8_t *)&staged + arrays[i].field_offset, &array, sizeof array);
  }
  if (op->kind == KVP_DEVICE_LOAD && op->params.load.check.entries != NULL) {
    staged.params.load.rows_taken = &place->counts[index].rows_taken;
  }
  return staged;
}

static cudaError_t index_op_launch(const struct kvp_device_op *op, struct kvp_cuda_counts *counts,
                                   cudaStream_t stream) {
  switch (op->kind) {
  case KVP_DEVICE_CONVERT_INDEX:
    return kvp_cuda_convert_index_launch(&op->params.convert_index, counts, stream);
  case KVP_DEVICE_SWA_INDEX:
    return kvp_cuda_swa_index_launch(&op->params.swa_index, counts, stream);
  case KVP_DEVICE_EXPAND_INDEX:
    return kvp_cuda_expand_index_launch(&op->params.expand_index, counts, stream);
  default:
    return kvp_cuda_cat_index_launch(&op->params.cat_index, counts, stream);
  }
}

static cudaError_t point_op_launch(const struct kvp_point_params *params, cudaStream_t stream) {
  const struct kvp_cuda_point point = {.word = (uint64_t *)(void *)params->word, .value = params->value};
  return kvp_cuda_point_launch(&point, stream);
}

static cudaError_t op_launch(struct kvp_cuda_device *device, const struct step_place *place,
                             const struct kvp_device_op *op, uint32_t index) {
  struct kvp_cuda_counts *counts = &place->counts[index];
  const struct kvp_device_op staged = op_staged(device, place, op, index);
  cudaError_t code = cudaSuccess;
  switch (op->kind) {
  case KVP_DEVICE_STORE:
    return kvp_cuda_store_launch(&staged.params.store, counts, place->stream);
  case KVP_DEVICE_LOAD:
    return kvp_cuda_load_launch(&staged.params.load, counts, place->stream);
  case KVP_DEVICE_COPY_ROWS:
    return kvp_cuda_copy_rows_launch(&staged.params.copy_rows, counts, place->stream);
  case KVP_DEVICE_COPY_BLOCKS:
    return kvp_cuda_copy_blocks_launch(&staged.params.blocks, counts, place->stream);
  case KVP_DEVICE_ZERO_BLOCKS:
    return kvp_cuda_zero_blocks_launch(&staged.params.blocks, counts, place->stream);
  case KVP_DEVICE_WRITE:
  case KVP_DEVICE_READ:
  case KVP_DEVICE_FILL:
    /* Copies leave no stamp of their own. */
    code = kvp_cuda_empty_launch(&counts->started_ns, place->stream);
    return code == cudaSuccess ? transfer_op_launch(device, place, op, index) : code;
  case KVP_DEVICE_POINT:
    return point_op_launch(&op->params.point, place->stream);
  default:
    return index_op_launch(&staged, counts, place->stream);
  }
}

/* Fused stores from this op on that may run at once; *launched: how many. */
static cudaError_t fused_ops_launch(struct kvp_cuda_device *device, const struct step_place *place,
                                    const struct kvp_device_op *first, uint32_t index, uint32_t *launched) {
  const struct kvp_fused_store_params *params[kvp_cuda_fused_ops_max];
  struct kvp_cuda_counts *counts[kvp_cuda_fused_ops_max];
  const uint32_t count = kvp_cuda_fused_count(device, first);
  const struct kvp_device_op *op = first;
  for (uint32_t i = 0; i < count; i++, op = op->next) {
    device->fused_ops[i] = op_staged(device, place, op, index + i);
    params[i] = &device->fused_ops[i].params.fused_store;
    counts[i] = &place->counts[index + i];
  }
  *launched = count;
  return count == 1 ? kvp_cuda_fused_store_launch(params[0], counts[0], place->stream)
                    : kvp_cuda_fused_stores_launch(params, counts, count, place->stream);
}

/* A replay and its fused stores, *launched together, in as many launches as they need. */
static cudaError_t replay_launch(struct kvp_cuda_device *device, const struct step_place *place,
                                 const struct kvp_device_op *first, uint32_t index, uint32_t *launched) {
  const struct kvp_replay_params *params = &first->params.replay;
  struct kvp_cuda_replay replay = {
      .ops = device->replay_ops,
      .state = &place->counts[index],
      .abort = (const uint64_t *)(const void *)params->abort,
      .abort_value = params->abort_value,
      .deadline_ns = kvp_device_clock_stamp_ns(&device->clock, params->deadline_ns),
  };
  const struct kvp_device_op *op = first->next;
  cudaError_t code = cudaSuccess;
  *launched = 1 + params->op_count;
  for (uint32_t done = 0; done < params->op_count && code == cudaSuccess; done += replay.op_count) {
    const uint32_t left = params->op_count - done;
    replay.op_count = left < kvp_cuda_replay_ops_max ? left : (uint32_t)kvp_cuda_replay_ops_max;
    replay.first_op = done;
    replay.points = params->points + done;
    replay.counts = replay.state + 1 + done;
    for (uint32_t i = 0; i < replay.op_count; i++, op = op->next) {
      assert(op->kind == KVP_DEVICE_FUSED_STORE);
      device->replay_ops[i] = op_staged(device, place, op, index + 1 + done + i).params.fused_store;
    }
    code = kvp_cuda_replay_launch(&replay, place->stream);
  }
  return code;
}

/* The op and those that join it; *launched: how many. */
static cudaError_t parts_launch(struct kvp_cuda_device *device, const struct step_place *place,
                                const struct kvp_device_op *first, uint32_t index, uint32_t *launched) {
  struct kvp_cuda_assembly assembly;
  uint32_t load_count = 0;
  uint32_t count = 0;
  memset(&assembly, 0, sizeof assembly);
  for (const struct kvp_device_op *op = first; op == first || op->joins; op = op->next, count++) {
    struct kvp_cuda_counts *counts = &place->counts[index + count];
    assert(count < kvp_cuda_parts_max);
    device->fused_ops[count] = op_staged(device, place, op, index + count);
    const struct kvp_device_op *staged = &device->fused_ops[count];
    if (op->kind == KVP_DEVICE_LOAD) {
      assert(load_count < 2);
      assembly.loads[load_count] = &staged->params.load;
      assembly.load_counts[load_count++] = counts;
    } else if (op->kind == KVP_DEVICE_COPY_ROWS) {
      assembly.copy = &staged->params.copy_rows;
      assembly.copy_counts = counts;
    } else {
      assert(op->kind == KVP_DEVICE_STORE && assembly.store == NULL);
      assembly.store = &staged->params.store;
      assembly.store_counts = counts;
    }
  }
  *launched = count;
  return kvp_cuda_assemble_launch(&assembly, place->stream);
}

/* What is launched at once from this op on; *launched: how many ops. */
static cudaError_t group_launch(struct kvp_cuda_device *device, const struct step_place *place,
                                const struct kvp_device_op *first, uint32_t index, uint32_t *launched) {
  if (first->kind == KVP_DEVICE_FUSED_STORE) {
    return fused_ops_launch(device, place, first, index, launched);
  }
  if (first->kind == KVP_DEVICE_REPLAY) {
    return replay_launch(device, place, first, index, launched);
  }
  if (first->next->joins) {
    return parts_launch(device, place, first, index, launched);
  }
  *launched = 1;
  return op_launch(device, place, first, index);
}

/* Every op of the step; *reached: how many were launched. */
static cudaError_t ops_launch(struct kvp_cuda_device *device, const struct step_place *place,
                              const struct kvp_device_op *first, uint32_t *reached) {
  const struct kvp_device_op *op = first;
  cudaError_t code = cudaSuccess;
  uint32_t index = 0;
  while (code == cudaSuccess && op->kind != KVP_DEVICE_SIGNAL) {
    uint32_t launched = 0;
    code = group_launch(device, place, op, index, &launched);
    for (; code == cudaSuccess && launched > 0; launched--, index++) {
      op = op->next;
    }
  }
  *reached = index;
  return code;
}

/* Few small arrays are read where they are: a copy of its own would take longer. What a replay reads, it reads while
 * somebody waits. */
static bool arrays_are_read_in_place(const struct kvp_step_layout *layout, const struct kvp_device_op *first) {
  return first->kind != KVP_DEVICE_REPLAY && layout->op_count <= kvp_cuda_direct_ops_max &&
         layout->arrays_bytes <= kvp_cuda_direct_bytes_max;
}

/* The end of the step, whatever became of its ops. */
static void signal_make(const struct step_place *place, const uint8_t *host_on_device,
                        const struct kvp_step_layout *layout, const struct kvp_device_op *first,
                        struct kvp_cuda_run *run) {
  const struct kvp_device_op *op = first;
  while (op->kind != KVP_DEVICE_SIGNAL) {
    op = op->next;
  }
  run->signal = (struct kvp_cuda_signal){
      .counts = place->counts,
      .found = (struct kvp_cuda_counts *)(void *)(host_on_device + run->found_offset_bytes),
      .finished_ns = (uint64_t *)(void *)(host_on_device + run->finished_offset_bytes),
      .timeline = (uint64_t *)(void *)op->params.signal.timeline,
      .value = op->params.signal.value,
      .op_count = layout->op_count,
  };
}

cudaError_t kvp_cuda_step_launch(struct kvp_cuda_device *device, struct kvp_cuda_run *run,
                                 struct kvp_device_op *first, cudaStream_t stream) {
  const struct kvp_cuda_staging *staging = &device->staging;
  const struct kvp_step_layout *layout = &device->layout;
  uint8_t *host_on_device = kvp_cuda_run_host_on_device(staging, run);
  struct step_place place = {
      .arrays = host_on_device,
      .host = kvp_cuda_run_host(staging, run),
      .counts = kvp_cuda_run_counts(staging, run),
      .stream = stream,
  };
  signal_make(&place, host_on_device, layout, first, run);
  kvp_step_layout_copy(layout, place.host);
  cudaError_t code = kvp_cuda_failpoint_pass(stream);
  if (code == cudaSuccess && !arrays_are_read_in_place(layout, first)) {
    uint8_t *arrays = kvp_cuda_run_device(staging, run);
    place.arrays = arrays;
    code = layout->arrays_bytes == 0
               ? cudaSuccess
               : cudaMemcpyAsync(arrays, place.host, layout->arrays_bytes, cudaMemcpyHostToDevice, stream);
  }
  return code == cudaSuccess ? ops_launch(device, &place, first, &run->failed_op) : code;
}
