/* Extents of a step's ops, merged where they overlap, one behind the other. */
#include "server/executor/step_layout.h"

#include <assert.h>
#include <string.h>

enum { no_extent = UINT16_MAX };

static uint64_t align_up(uint64_t bytes) {
  return (bytes + kvp_step_layout_alignment_bytes - 1) / kvp_step_layout_alignment_bytes *
         kvp_step_layout_alignment_bytes;
}

/* The op's host bytes that the device reads; none: begin is end. */
static struct kvp_host_extent op_extent(const struct kvp_device_op *op) {
  const void *begin = NULL;
  uint64_t bytes = 0;
  bool for_kernels = true;
  if (op->kind == KVP_DEVICE_STORE && op->params.store.check.entries == NULL) {
    begin = op->params.store.slots;
    bytes = op->params.store.row_count * sizeof *op->params.store.slots;
  } else if (op->kind == KVP_DEVICE_LOAD && op->params.load.check.entries == NULL) {
    begin = op->params.load.segments;
    bytes = op->params.load.segment_count * sizeof *op->params.load.segments;
  } else if (op->kind == KVP_DEVICE_WRITE) {
    begin = op->params.transfer.host;
    bytes = op->params.transfer.row_count * op->params.transfer.row_bytes;
    for_kernels = false;
  }
  const uint8_t *data = begin;
  return (struct kvp_host_extent){.begin = data, .end = bytes == 0 ? data : data + bytes, .for_kernels = for_kernels};
}

/* The extent of that beginning, new or found; mask: of the table. */
static uint16_t extent_add(struct kvp_step_layout *layout, const struct kvp_host_extent *extent, uint32_t mask) {
  uint64_t i = (uint64_t)(uintptr_t)extent->begin * UINT64_C(0x9E3779B97F4A7C15) >> 32;
  for (;; i++) {
    uint16_t *entry = &layout->table[i & mask];
    if (*entry == 0) {
      layout->extents[layout->extent_count++] = *extent;
      *entry = (uint16_t)layout->extent_count;
      return (uint16_t)(*entry - 1);
    }
    struct kvp_host_extent *known = &layout->extents[*entry - 1];
    if (known->begin == extent->begin) {
      known->end = extent->end > known->end ? extent->end : known->end;
      known->for_kernels = known->for_kernels || extent->for_kernels;
      return (uint16_t)(*entry - 1);
    }
  }
}

static void extents_find(struct kvp_step_layout *layout, const struct kvp_device_op *first) {
  uint32_t op_count = 0;
  for (const struct kvp_device_op *op = first; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    op_count++;
  }
  assert(op_count <= kvp_ops_per_step_max);
  uint32_t capacity = 2;
  while (capacity < 2 * op_count) {
    capacity *= 2;
  }
  memset(layout->table, 0, capacity * sizeof layout->table[0]);
  layout->op_count = op_count;
  layout->extent_count = 0;
  const struct kvp_device_op *op = first;
  for (uint32_t i = 0; i < op_count; i++, op = op->next) {
    const struct kvp_host_extent extent = op_extent(op);
    layout->extent_of[i] =
        extent.begin == extent.end ? (uint16_t)no_extent : extent_add(layout, &extent, capacity - 1);
  }
}

/* Shell's sort: quick where they are in order already, as those of one encoded step are. */
static void extents_sort(struct kvp_step_layout *layout) {
  const uint32_t count = layout->extent_count;
  uint32_t gap = 1;
  for (uint32_t i = 0; i < count; i++) {
    layout->sorted[i] = (uint16_t)i;
  }
  while (gap < count / 3) {
    gap = gap * 3 + 1;
  }
  for (; gap > 0; gap /= 3) {
    for (uint32_t i = gap; i < count; i++) {
      const uint16_t moved = layout->sorted[i];
      uint32_t k = i;
      for (; k >= gap && layout->extents[layout->sorted[k - gap]].begin > layout->extents[moved].begin; k -= gap) {
        layout->sorted[k] = layout->sorted[k - gap];
      }
      layout->sorted[k] = moved;
    }
  }
}

static void groups_find(struct kvp_step_layout *layout) {
  layout->group_count = 0;
  for (uint32_t i = 0; i < layout->extent_count; i++) {
    const struct kvp_host_extent *extent = &layout->extents[layout->sorted[i]];
    struct kvp_host_extent *last = layout->group_count == 0 ? NULL : &layout->groups[layout->group_count - 1];
    if (last != NULL && extent->begin < last->end) {
      last->end = extent->end > last->end ? extent->end : last->end;
      last->for_kernels = last->for_kernels || extent->for_kernels;
    } else {
      layout->groups[layout->group_count++] = *extent;
    }
    layout->group_of[layout->sorted[i]] = (uint16_t)(layout->group_count - 1);
  }
}

static uint64_t groups_place(struct kvp_step_layout *layout, bool for_kernels, uint64_t offset_bytes) {
  for (uint32_t i = 0; i < layout->group_count; i++) {
    struct kvp_host_extent *group = &layout->groups[i];
    if (group->for_kernels == for_kernels) {
      group->offset_bytes = offset_bytes;
      offset_bytes += align_up((uint64_t)(group->end - group->begin));
    }
  }
  return offset_bytes;
}

/* Where every op finds its bytes; bytes read lie one behind the other. Returns how many of those there are. */
static uint64_t ops_place(struct kvp_step_layout *layout, const struct kvp_device_op *first) {
  uint64_t result_bytes = 0;
  const struct kvp_device_op *op = first;
  for (uint32_t i = 0; i < layout->op_count; i++, op = op->next) {
    layout->op_offset_bytes[i] = 0;
    if (op->kind == KVP_DEVICE_READ) {
      layout->op_offset_bytes[i] = layout->results_offset_bytes + result_bytes;
      result_bytes += op->params.transfer.row_count * op->params.transfer.row_bytes;
    } else if (layout->extent_of[i] != no_extent) {
      const struct kvp_host_extent *extent = &layout->extents[layout->extent_of[i]];
      const struct kvp_host_extent *group = &layout->groups[layout->group_of[layout->extent_of[i]]];
      layout->op_offset_bytes[i] = group->offset_bytes + (uint64_t)(extent->begin - group->begin);
    }
  }
  return result_bytes;
}

void kvp_step_layout_make(struct kvp_step_layout *layout, const struct kvp_device_op *first, uint64_t found_bytes) {
  extents_find(layout, first);
  extents_sort(layout);
  groups_find(layout);
  layout->arrays_bytes = groups_place(layout, true, 0);
  layout->results_offset_bytes = groups_place(layout, false, layout->arrays_bytes);
  layout->found_offset_bytes = layout->results_offset_bytes + align_up(ops_place(layout, first));
  layout->finished_offset_bytes = layout->found_offset_bytes + align_up(layout->op_count * found_bytes);
  layout->bytes = layout->finished_offset_bytes + kvp_step_layout_alignment_bytes;
}

void kvp_step_layout_copy(const struct kvp_step_layout *layout, uint8_t *piece) {
  for (uint32_t i = 0; i < layout->group_count; i++) {
    const struct kvp_host_extent *group = &layout->groups[i];
    memcpy(piece + group->offset_bytes, group->begin, (size_t)(group->end - group->begin));
  }
}
