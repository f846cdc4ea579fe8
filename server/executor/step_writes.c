/* Device ops by what they write. */
#include "server/executor/step_writes.h"

#include <stddef.h>

static void area_add(struct kvp_device_writes *out, const struct kvp_rows *rows, uint64_t row_count,
                     uint64_t row_bytes) {
  if (rows->base != NULL && row_count > 0 && row_bytes > 0) {
    out->areas[out->area_count++] = (struct kvp_row_area){rows->base, row_count, row_bytes, rows->stride_bytes};
  }
}

static void store_writes(const struct kvp_store_params *store, bool slots_are_known, struct kvp_device_writes *out) {
  const struct kvp_geometry *geometry = store->layer.geometry;
  area_add(out, &store->cast_back, store->row_count, geometry->sizes.row_bytes);
  if (store->slots == NULL || store->row_count == 0) {
    return;
  }
  out->kind = KVP_WRITES_SLOTS;
  out->begin = store->layer.base;
  out->end = store->layer.base + geometry->layer_stride_bytes;
  out->entries = slots_are_known ? store->slots : NULL;
  out->entry_count = store->row_count;
  out->tokens_per_block = geometry->tokens_per_block;
}

static void blocks_writes(const struct kvp_blocks_params *blocks, enum kvp_written_kind kind,
                          struct kvp_device_writes *out) {
  out->kind = blocks->count == 0 ? KVP_WRITES_NOTHING : kind;
  out->begin = blocks->base;
  out->end = blocks->base + blocks->geometry->region_bytes;
  out->entries = blocks->pairs;
  out->entry_count = blocks->count;
}

static void load_writes(const struct kvp_load_params *load, struct kvp_device_writes *out) {
  area_add(out, &load->out, load->total_k, load->layer.geometry->sizes.loaded_row_bytes);
  area_add(out, &load->scales, load->total_k, load->layer.geometry->sizes.loaded_scale_bytes);
}

void kvp_device_op_writes(const struct kvp_device_op *op, struct kvp_device_writes *out) {
  const bool slots_are_known = (op->host_arrays & KVP_ARRAY_SLOTS) != 0;
  *out = (struct kvp_device_writes){.kind = KVP_WRITES_NOTHING};
  switch (op->kind) {
  case KVP_DEVICE_STORE:
    store_writes(&op->params.store, slots_are_known, out);
    break;
  case KVP_DEVICE_FUSED_STORE:
    store_writes(&op->params.fused_store.store, slots_are_known, out);
    break;
  case KVP_DEVICE_LOAD:
    load_writes(&op->params.load, out);
    break;
  case KVP_DEVICE_WRITE:
  case KVP_DEVICE_FILL:
    area_add(out, &op->params.transfer.rows, op->params.transfer.row_count, op->params.transfer.row_bytes);
    break;
  case KVP_DEVICE_COPY_ROWS:
    area_add(out, &op->params.copy_rows.out, op->params.copy_rows.row_count, op->params.copy_rows.row_bytes);
    break;
  case KVP_DEVICE_CONVERT_INDEX: {
    const struct kvp_convert_index_params *convert = &op->params.convert_index;
    area_add(out, &convert->out, convert->batch * convert->queries, convert->columns * sizeof(int32_t));
    break;
  }
  case KVP_DEVICE_SWA_INDEX:
    area_add(out, &op->params.swa_index.out, op->params.swa_index.queries,
             op->params.swa_index.window * sizeof(int32_t));
    break;
  case KVP_DEVICE_EXPAND_INDEX:
    area_add(out, &op->params.expand_index.out, op->params.expand_index.row_count,
             op->params.expand_index.width * sizeof(int32_t));
    break;
  case KVP_DEVICE_CAT_INDEX: {
    const struct kvp_cat_index_params *cat = &op->params.cat_index;
    area_add(out, &cat->out, cat->row_count, (cat->left_columns + cat->right_columns) * sizeof(int32_t));
    break;
  }
  case KVP_DEVICE_COPY_BLOCKS:
    blocks_writes(&op->params.blocks, KVP_WRITES_PAIRS, out);
    break;
  case KVP_DEVICE_ZERO_BLOCKS:
    blocks_writes(&op->params.blocks, KVP_WRITES_BLOCKS, out);
    break;
  case KVP_DEVICE_READ:
  case KVP_DEVICE_REPLAY:
  case KVP_DEVICE_POINT:
  case KVP_DEVICE_SIGNAL:
    break;
  }
}
