/* Extents of a step's ops, merged where they overlap, one behind the other. */
#include "server/executor/step_layout.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

static uint64_t align_up(uint64_t bytes) {
  return (bytes + kvp_step_layout_alignment_bytes - 1) / kvp_step_layout_alignment_bytes *
         kvp_step_layout_alignment_bytes;
}

/* ---- what an op has ---- */

struct array_list {
  const struct kvp_device_op *op;
  struct kvp_host_array *arrays;
  uint32_t count;
};

static void array_add(struct array_list *list, enum kvp_device_array bit, size_t field_offset, uint64_t bytes) {
  if ((list->op->host_arrays & (uint32_t)bit) != 0 && bytes > 0) {
    assert(list->count < kvp_host_arrays_per_op_max);
    list->arrays[list->count++] = (struct kvp_host_array){.field_offset = (uint32_t)field_offset, .bytes = bytes};
  }
}

#define FIELD(path) offsetof(struct kvp_device_op, params.path)

static void index_arrays(struct array_list *list) {
  const struct kvp_device_op *op = list->op;
  const struct kvp_convert_index_params *convert = &op->params.convert_index;
  const struct kvp_cat_index_params *cat = &op->params.cat_index;
  switch (op->kind) {
  case KVP_DEVICE_CONVERT_INDEX:
    array_add(list, KVP_ARRAY_TABLES, FIELD(convert_index.tables.base),
              convert->batch * convert->tables.stride_bytes);
    array_add(list, KVP_ARRAY_VALID, FIELD(convert_index.valid),
              convert->batch * convert->queries * sizeof *convert->valid);
    array_add(list, KVP_ARRAY_TOPK, FIELD(convert_index.topk.base),
              convert->batch * convert->queries * convert->topk.stride_bytes);
    break;
  case KVP_DEVICE_SWA_INDEX:
    array_add(list, KVP_ARRAY_OFFSET_LEN, FIELD(swa_index.offset_len),
              op->params.swa_index.queries * 2 * sizeof(int32_t));
    break;
  case KVP_DEVICE_EXPAND_INDEX:
    array_add(list, KVP_ARRAY_PIVOTS, FIELD(expand_index.pivots),
              op->params.expand_index.row_count * 4 * sizeof(int32_t));
    break;
  case KVP_DEVICE_CAT_INDEX:
    array_add(list, KVP_ARRAY_LEFT, FIELD(cat_index.left.base), cat->row_count * cat->left.stride_bytes);
    array_add(list, KVP_ARRAY_RIGHT, FIELD(cat_index.right.base), cat->row_count * cat->right.stride_bytes);
    break;
  default:
    break;
  }
}

uint32_t kvp_device_op_host_arrays(const struct kvp_device_op *op, struct kvp_host_array *out) {
  struct array_list list = {.op = op, .arrays = out};
  const uint64_t rows = op->kind == KVP_DEVICE_FUSED_STORE ? op->params.fused_store.store.row_count
                        : op->kind == KVP_DEVICE_STORE     ? op->params.store.row_count
                                                           : 0;
  switch (op->kind) {
  case KVP_DEVICE_STORE:
    array_add(&list, KVP_ARRAY_SLOTS, FIELD(store.slots), rows * sizeof(int32_t));
    array_add(&list, KVP_ARRAY_GATHER, FIELD(store.gather), rows * sizeof(int32_t));
    break;
  case KVP_DEVICE_FUSED_STORE:
    array_add(&list, KVP_ARRAY_SLOTS, FIELD(fused_store.store.slots), rows * sizeof(int32_t));
    array_add(&list, KVP_ARRAY_POSITIONS, FIELD(fused_store.positions), rows * sizeof(int32_t));
    break;
  case KVP_DEVICE_LOAD:
    array_add(&list, KVP_ARRAY_SEGMENTS, FIELD(load.segments),
              op->params.load.segment_count * sizeof(struct kvp_segment));
    break;
  case KVP_DEVICE_COPY_ROWS:
    array_add(&list, KVP_ARRAY_GATHER, FIELD(copy_rows.gather), op->params.copy_rows.row_count * sizeof(int32_t));
    break;
  case KVP_DEVICE_COPY_BLOCKS:
    array_add(&list, KVP_ARRAY_BLOCKS, FIELD(blocks.pairs), op->params.blocks.count * 2 * sizeof(int32_t));
    break;
  case KVP_DEVICE_ZERO_BLOCKS:
    array_add(&list, KVP_ARRAY_BLOCKS, FIELD(blocks.pairs), op->params.blocks.count * sizeof(int32_t));
    break;
  default:
    index_arrays(&list);
    break;
  }
  return list.count;
}

/* ---- where it lies ---- */

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

static uint32_t table_capacity(const struct kvp_device_op *first) {
  uint32_t op_count = 0;
  for (const struct kvp_device_op *op = first; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    op_count++;
  }
  assert(op_count <= kvp_device_ops_per_step_max);
  uint32_t capacity = 2;
  while (capacity < 2 * kvp_host_arrays_per_op_max * op_count) {
    capacity *= 2;
  }
  return capacity;
}

static void reference_add(struct kvp_step_layout *layout, const uint8_t *begin, uint64_t bytes, bool for_kernels,
                          uint32_t mask) {
  const struct kvp_host_extent extent = {.begin = begin, .end = begin + bytes, .for_kernels = for_kernels};
  layout->extent_of[layout->array_count++] = extent_add(layout, &extent, mask);
}

/* Every array, and bytes to write as if they were one. */
static void extents_find(struct kvp_step_layout *layout, const struct kvp_device_op *first) {
  const uint32_t capacity = table_capacity(first);
  memset(layout->table, 0, capacity * sizeof layout->table[0]);
  layout->op_count = 0;
  layout->array_count = 0;
  layout->extent_count = 0;
  for (const struct kvp_device_op *op = first; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    const struct kvp_transfer_params *transfer = &op->params.transfer;
    struct kvp_host_array arrays[kvp_host_arrays_per_op_max];
    const uint32_t count = kvp_device_op_host_arrays(op, arrays);
    layout->op_first_array[layout->op_count++] = (uint16_t)layout->array_count;
    for (uint32_t i = 0; i < count; i++) {
      const uint8_t *begin = NULL;
      memcpy(&begin, (const uint8_t *)op + arrays[i].field_offset, sizeof begin);
      reference_add(layout, begin, arrays[i].bytes, true, capacity - 1);
    }
    if (op->kind == KVP_DEVICE_WRITE && transfer->row_count * transfer->row_bytes > 0) {
      reference_add(layout, transfer->host, transfer->row_count * transfer->row_bytes, false, capacity - 1);
    }
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

static void arrays_place(struct kvp_step_layout *layout) {
  for (uint32_t i = 0; i < layout->array_count; i++) {
    const struct kvp_host_extent *extent = &layout->extents[layout->extent_of[i]];
    const struct kvp_host_extent *group = &layout->groups[layout->group_of[layout->extent_of[i]]];
    layout->array_offset_bytes[i] = group->offset_bytes + (uint64_t)(extent->begin - group->begin);
  }
}

/* Where transfers find their bytes; bytes read lie one behind the other. Returns how many of those there are. */
static uint64_t transfers_place(struct kvp_step_layout *layout, const struct kvp_device_op *first) {
  uint64_t result_bytes = 0;
  const struct kvp_device_op *op = first;
  for (uint32_t i = 0; i < layout->op_count; i++, op = op->next) {
    const uint64_t bytes = op->params.transfer.row_count * op->params.transfer.row_bytes;
    layout->op_offset_bytes[i] = 0;
    if (op->kind == KVP_DEVICE_READ) {
      layout->op_offset_bytes[i] = layout->results_offset_bytes + result_bytes;
      result_bytes += bytes;
    } else if (op->kind == KVP_DEVICE_WRITE && bytes > 0) {
      layout->op_offset_bytes[i] = layout->array_offset_bytes[layout->op_first_array[i]];
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
  arrays_place(layout);
  layout->found_offset_bytes = layout->results_offset_bytes + align_up(transfers_place(layout, first));
  layout->finished_offset_bytes = layout->found_offset_bytes + align_up(layout->op_count * found_bytes);
  layout->bytes = layout->finished_offset_bytes + kvp_step_layout_alignment_bytes;
}

void kvp_step_layout_copy(const struct kvp_step_layout *layout, uint8_t *piece) {
  for (uint32_t i = 0; i < layout->group_count; i++) {
    const struct kvp_host_extent *group = &layout->groups[i];
    memcpy(piece + group->offset_bytes, group->begin, (size_t)(group->end - group->begin));
  }
}
