/* The steps that the daemon makes by itself. */
#include "server/supervisor/step_build.h"

#include <stddef.h>

#include "server/supervisor/step_writer.h"

/* Rows without gaps. */
static struct kvp_wire_view view_rows(uint64_t buffer_id, uint64_t offset_bytes, uint64_t rows, uint32_t row_bytes) {
  return (struct kvp_wire_view){.buffer_id = buffer_id,
                                .offset_bytes = offset_bytes,
                                .rows = rows,
                                .row_stride_bytes = row_bytes,
                                .row_bytes = row_bytes,
                                .flags = KVP_WIRE_VIEW_PRESENT};
}

/* Plain bytes are one row. */
static struct kvp_wire_view view_bytes(uint64_t buffer_id, uint64_t offset_bytes, uint32_t bytes) {
  return view_rows(buffer_id, offset_bytes, 1, bytes);
}

static void op_set_place(struct kvp_wire_op *op, const struct kvp_region_place *place) {
  op->pool_id = place->pool_id;
  op->region = place->region;
  op->layer = place->layer;
}

struct kvp_wire_step *kvp_step_build_write(uint64_t buffer_id, uint64_t offset_bytes, const void *data,
                                           uint32_t bytes, struct kvp_error *error) {
  struct kvp_step_writer writer;
  if (kvp_step_writer_init(&writer, 1, 1, kvp_step_inline_bytes(bytes), error) != KVP_OK) {
    return NULL;
  }
  writer.ops[0].kind = KVP_OP_BUFFER_WRITE;
  writer.ops[0].arrays[0] = kvp_step_writer_add_inline(&writer, data, bytes);
  writer.ops[0].source = view_bytes(buffer_id, offset_bytes, bytes);
  return writer.step;
}

struct kvp_wire_step *kvp_step_build_read(uint64_t buffer_id, uint64_t offset_bytes, uint32_t bytes,
                                          struct kvp_error *error) {
  struct kvp_step_writer writer;
  if (kvp_step_writer_init(&writer, 1, 0, 0, error) != KVP_OK) {
    return NULL;
  }
  writer.ops[0].kind = KVP_OP_BUFFER_READ;
  writer.ops[0].source = view_bytes(buffer_id, offset_bytes, bytes);
  return writer.step;
}

struct kvp_wire_step *kvp_step_build_zero(uint64_t buffer_id, uint32_t bytes, struct kvp_error *error) {
  struct kvp_step_writer writer;
  if (kvp_step_writer_init(&writer, 1, 0, 0, error) != KVP_OK) {
    return NULL;
  }
  writer.ops[0].kind = KVP_OP_BUFFER_FILL;
  writer.ops[0].source = view_bytes(buffer_id, 0, bytes);
  return writer.step;
}

struct kvp_wire_step *kvp_step_build_zero_blocks(uint64_t pool_id, const int32_t *blocks, uint32_t count,
                                                 struct kvp_error *error) {
  struct kvp_step_writer writer;
  uint64_t blocks_bytes = count * sizeof *blocks;
  if (kvp_step_writer_init(&writer, 1, 1, kvp_step_inline_bytes(blocks_bytes), error) != KVP_OK) {
    return NULL;
  }
  writer.ops[0].kind = KVP_OP_ZERO_BLOCKS;
  writer.ops[0].pool_id = pool_id;
  writer.ops[0].arrays[0] = kvp_step_writer_add_inline(&writer, blocks, blocks_bytes);
  return writer.step;
}

struct kvp_wire_step *kvp_step_build_region_read(const struct kvp_region_place *place,
                                                 const struct kvp_byte_range *ranges, uint32_t count,
                                                 struct kvp_error *error) {
  struct kvp_step_writer writer;
  if (kvp_step_writer_init(&writer, count, 0, 0, error) != KVP_OK) {
    return NULL;
  }
  for (uint32_t i = 0; i < count; i++) {
    writer.ops[i].kind = KVP_OP_REGION_READ;
    op_set_place(&writer.ops[i], place);
    writer.ops[i].argument = ranges[i].offset_bytes;
    writer.ops[i].total_k = ranges[i].bytes;
  }
  return writer.step;
}

struct kvp_wire_step *kvp_step_build_store_rows(const struct kvp_region_place *place, uint64_t epoch,
                                                const uint8_t *slots, uint64_t slot_count, uint64_t buffer_id,
                                                uint32_t row_bytes, struct kvp_error *error) {
  struct kvp_step_writer writer;
  uint64_t slots_bytes = slot_count * sizeof(int32_t);
  if (kvp_step_writer_init(&writer, 1, 1, kvp_step_inline_bytes(slots_bytes), error) != KVP_OK) {
    return NULL;
  }
  writer.step->epoch = epoch;
  writer.ops[0].kind = KVP_OP_STORE;
  op_set_place(&writer.ops[0], place);
  writer.ops[0].arrays[0] = kvp_step_writer_add_inline(&writer, slots, slots_bytes);
  writer.ops[0].source = view_rows(buffer_id, 0, slot_count, row_bytes);
  return writer.step;
}

struct kvp_wire_step *kvp_step_build_load_rows(const struct kvp_region_place *place, uint64_t epoch,
                                               const uint8_t *segments, uint64_t segments_bytes, uint64_t buffer_id,
                                               const struct kvp_rows_layout *layout, struct kvp_error *error) {
  struct kvp_step_writer writer;
  if (kvp_step_writer_init(&writer, 1, 1, kvp_step_inline_bytes(segments_bytes), error) != KVP_OK) {
    return NULL;
  }
  writer.step->epoch = epoch;
  struct kvp_wire_op *load = &writer.ops[0];
  load->kind = KVP_OP_LOAD;
  op_set_place(load, place);
  load->arrays[0] = kvp_step_writer_add_inline(&writer, segments, segments_bytes);
  load->total_k = layout->rows;
  load->source = view_rows(buffer_id, 0, layout->rows, layout->row_bytes);
  if (layout->scale_bytes > 0) {
    load->second = view_rows(buffer_id, layout->scales_begin, layout->rows, layout->scale_bytes);
  }
  return writer.step;
}
