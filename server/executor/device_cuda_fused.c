/* Fused stores of a step that may run at once: several layers whose inputs are ready together. Serving thread.
 *
 * Each is compared with those before it: what one writes, records of a layer or rows cast back, no other one may read
 * or write. Regions and buffers never share memory.
 */
#include "server/executor/device_cuda.h"

enum { inputs_max = 5 };

static struct kvp_row_area area_of(const struct kvp_rows *rows, uint64_t row_count, uint64_t row_bytes) {
  return (struct kvp_row_area){rows->base, row_count, row_bytes, rows->stride_bytes};
}

static struct kvp_row_area bytes_of(const void *begin, uint64_t bytes) {
  return (struct kvp_row_area){bytes == 0 ? NULL : begin, 1, bytes, bytes};
}

/* What the op reads of buffers. */
static void inputs_of(const struct kvp_device_op *op, struct kvp_row_area *out) {
  const struct kvp_fused_store_params *fused = &op->params.fused_store;
  const struct kvp_format_sizes *sizes = &fused->store.layer.geometry->sizes;
  const uint64_t rows = fused->store.row_count;
  out[0] = area_of(&fused->store.source, rows, sizes->row_bytes);
  out[1] = bytes_of(fused->norm_weight, sizes->row_bytes);
  out[2] = area_of(&fused->cos_sin, fused->position_count, fused->rotary_dims * sizeof(float));
  out[3] = bytes_of(fused->store.slots, (op->host_arrays & KVP_ARRAY_SLOTS) != 0 ? 0 : rows * sizeof(int32_t));
  out[4] = bytes_of(fused->positions, (op->host_arrays & KVP_ARRAY_POSITIONS) != 0 ? 0 : rows * sizeof(int32_t));
}

static bool areas_meet(const struct kvp_device_writes *writes, const struct kvp_row_area *areas, uint32_t count) {
  for (uint32_t i = 0; i < writes->area_count; i++) {
    for (uint32_t k = 0; k < count; k++) {
      if (kvp_row_areas_overlap(&writes->areas[i], &areas[k])) {
        return true;
      }
    }
  }
  return false;
}

/* May the op, which writes that, run at once with an earlier one? */
static bool ops_apart(const struct kvp_device_op *earlier, const struct kvp_device_writes *earlier_writes,
                      const struct kvp_device_op *op, const struct kvp_device_writes *writes) {
  struct kvp_row_area inputs[inputs_max];
  if (earlier_writes->kind != KVP_WRITES_NOTHING && writes->kind != KVP_WRITES_NOTHING &&
      earlier_writes->begin == writes->begin) {
    return false;
  }
  if (areas_meet(writes, earlier_writes->areas, earlier_writes->area_count)) {
    return false;
  }
  inputs_of(op, inputs);
  if (areas_meet(earlier_writes, inputs, inputs_max)) {
    return false;
  }
  inputs_of(earlier, inputs);
  return !areas_meet(writes, inputs, inputs_max);
}

uint32_t kvp_cuda_fused_count(struct kvp_cuda_device *device, const struct kvp_device_op *first) {
  const struct kvp_device_op *op = first;
  uint32_t count = 0;
  for (; count < kvp_cuda_fused_ops_max && op->kind == KVP_DEVICE_FUSED_STORE; op = op->next) {
    kvp_device_op_writes(op, &device->fused_writes[count]);
    const struct kvp_device_op *earlier = first;
    for (uint32_t i = 0; i < count; i++, earlier = earlier->next) {
      if (!ops_apart(earlier, &device->fused_writes[i], op, &device->fused_writes[count])) {
        return count;
      }
    }
    count++;
  }
  return count;
}
