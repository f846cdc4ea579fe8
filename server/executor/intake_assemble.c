/* Checks of an assemble: history from the ring, the chunk's rows, the compressed cache, one behind the other. */
#include <string.h>

#include "server/executor/compressed_parts.h"
#include "server/executor/intake_op.h"

/* What the op says, checked piece by piece. Absent pieces are zero. */
struct assembly {
  struct kvp_intake_view out;
  bool has_ring; /* its pool is named */
  struct kvp_intake_place ring;
  uint64_t history_rows; /* S */
  struct kvp_intake_array history;
  struct kvp_load_params history_load;
  uint64_t chunk_rows; /* C */
  struct kvp_intake_view source;
  struct kvp_intake_array gather;
  struct kvp_intake_array slots;
  uint64_t rows_skipped;
  uint64_t compressed_rows; /* K */
  struct kvp_intake_place compressed_place;
  struct kvp_intake_array compressed;
  struct kvp_load_params compressed_load;
};

static bool flag_is_set(const struct kvp_intake_op *op, enum kvp_wire_op_flag flag) {
  return (op->wire->flags & (uint32_t)flag) != 0;
}

static struct kvp_rows rows_from(const struct kvp_intake_view *view, uint64_t row) {
  return (struct kvp_rows){(uint8_t *)view->area.base + row * view->area.stride_bytes, view->area.stride_bytes};
}

/* ---- what is there ---- */

static enum kvp_status arrays_find(struct kvp_intake_op *op, struct assembly *it) {
  enum kvp_status status = KVP_OK;
  if ((status = kvp_intake_array_optional(op, 0, "swa.segments", sizeof(struct kvp_segment), &it->history)) !=
          KVP_OK ||
      (status = kvp_intake_array_optional(op, 1, "chunk.gather", sizeof(int32_t), &it->gather)) != KVP_OK ||
      (status = kvp_intake_array_optional(op, 2, "chunk.store_slots", sizeof(int32_t), &it->slots)) != KVP_OK ||
      (status = kvp_intake_array_optional(op, 3, "compressed.segments", sizeof(struct kvp_segment),
                                          &it->compressed)) != KVP_OK) {
    return status;
  }
  it->history_rows = op->wire->total_k;
  it->chunk_rows = op->wire->argument;
  it->compressed_rows = op->wire->numbers[0];
  if (it->history.data == NULL && it->history_rows != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "swa.segments", -1, it->history_rows,
                             "swa.segments are missing for %llu rows", (unsigned long long)it->history_rows);
  }
  if (it->compressed.data == NULL && (it->compressed_rows != 0 || flag_is_set(op, KVP_OP_KEEP_COMPRESSED))) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "compressed.segments", -1, it->compressed_rows,
                             "compressed.segments are missing for %llu rows",
                             (unsigned long long)it->compressed_rows);
  }
  return KVP_OK;
}

/* Rows that a load gives as the output has them: an index cache has two outputs, a wider one has other rows. */
static enum kvp_status format_fits(struct kvp_intake_op *op, const char *name, const struct kvp_intake_place *place,
                                   const struct kvp_intake_view *out) {
  const struct kvp_geometry *geometry = place->layer.geometry;
  if (geometry->sizes.loaded_scale_bytes != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_WRONG_FORMAT, name, -1, place->region - place->pool->regions,
                             "%s: format %s of region '%s' gives no BF16 rows", name, geometry->format->name,
                             place->region->name);
  }
  if (geometry->sizes.loaded_row_bytes != out->area.row_bytes) {
    return KVP_INTAKE_REFUSE(
        op, KVP_WRONG_FORMAT, "out", -1, out->area.row_bytes, "out.row_bytes = %llu, rows of region '%s' have %u",
        (unsigned long long)out->area.row_bytes, place->region->name, geometry->sizes.loaded_row_bytes);
  }
  return KVP_OK;
}

static enum kvp_status places_find(struct kvp_intake_op *op, struct assembly *it) {
  const struct kvp_wire_op *wire = op->wire;
  const bool needs_ring =
      it->history.data != NULL || it->slots.data != NULL || flag_is_set(op, KVP_OP_CHUNK_CAST_BACK);
  enum kvp_status status = KVP_OK;
  it->has_ring = needs_ring || wire->pool_id != 0;
  if (it->has_ring && ((status = kvp_intake_ring(op, &it->ring)) != KVP_OK ||
                       (status = format_fits(op, "region", &it->ring, &it->out)) != KVP_OK)) {
    return status;
  }
  if (it->compressed.data == NULL) {
    return KVP_OK;
  }
  status = kvp_intake_place_find(op, "compressed.", wire->second_pool_id, wire->second_region, wire->second_layer,
                                 &it->compressed_place);
  return status == KVP_OK ? format_fits(op, "compressed.region", &it->compressed_place, &it->out) : status;
}

/* S + C + K rows of the output; no sum wraps. */
static enum kvp_status rows_fit(struct kvp_intake_op *op, const struct assembly *it) {
  const struct {
    const char *name;
    uint64_t rows;
  } parts[] = {
      {"swa.total_k", it->history_rows}, {"chunk", it->chunk_rows}, {"compressed.total_k", it->compressed_rows}};
  uint64_t before = 0;
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    if (parts[i].rows > it->out.area.rows - before) {
      return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, parts[i].name, -1, parts[i].rows,
                               "%s: %llu rows behind %llu of other parts, but out has %llu rows", parts[i].name,
                               (unsigned long long)parts[i].rows, (unsigned long long)before,
                               (unsigned long long)it->out.area.rows);
    }
    before += parts[i].rows;
  }
  return KVP_OK;
}

/* ---- part 2 ---- */

/* Reserved rows, or none: nothing else of a chunk may be there. */
static enum kvp_status chunk_is_bare(struct kvp_intake_op *op, const struct assembly *it) {
  const bool is_reserved = flag_is_set(op, KVP_OP_CHUNK_RESERVED);
  const char *state = is_reserved ? "reserved" : "absent";
  const struct kvp_intake_array *arrays[] = {&it->gather, &it->slots};
  for (size_t i = 0; i < 2; i++) {
    if (arrays[i]->data != NULL) {
      return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, arrays[i]->name, -1, arrays[i]->index,
                               "%s: there is none where the chunk is %s", arrays[i]->name, state);
    }
  }
  if (flag_is_set(op, KVP_OP_CHUNK_CAST_BACK)) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "chunk.cast_back", -1, 1,
                             "chunk.cast_back: there is none where the chunk is %s", state);
  }
  if (!is_reserved && it->chunk_rows != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "chunk.source", -1, it->chunk_rows,
                             "chunk.source is missing for %llu rows", (unsigned long long)it->chunk_rows);
  }
  return is_reserved ? kvp_intake_view_absent(op, "chunk.source", &op->wire->source) : KVP_OK;
}

static enum kvp_status chunk_shape(struct kvp_intake_op *op, const struct assembly *it) {
  const uint64_t expected = it->gather.data != NULL ? it->gather.bytes / sizeof(int32_t) : it->source.area.rows;
  if (it->chunk_rows != expected) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "chunk", -1, it->chunk_rows, "chunk: %llu rows, %s %llu",
                             (unsigned long long)it->chunk_rows,
                             it->gather.data != NULL ? "chunk.gather has" : "chunk.source has",
                             (unsigned long long)expected);
  }
  const uint64_t slot_count = it->slots.bytes / sizeof(int32_t);
  if (it->slots.data != NULL && slot_count != it->chunk_rows) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "chunk.store_slots", -1, slot_count,
                             "chunk.store_slots: %llu slots for %llu rows", (unsigned long long)slot_count,
                             (unsigned long long)it->chunk_rows);
  }
  return KVP_OK;
}

/* Entries of the index, with the slots that belong to them where both can be looked at: a zero row is not stored. */
static enum kvp_status gather_look(struct kvp_intake_op *op, const struct assembly *it, bool with_slots,
                                   struct kvp_intake_memo *memo) {
  const int32_t *gather = it->gather.data;
  const int32_t *slots = it->slots.data;
  memo->least = INT64_MAX;
  memo->largest = INT64_MIN;
  for (uint64_t i = 0; i < it->gather.bytes / sizeof *gather; i++) {
    memo->least = gather[i] < memo->least ? gather[i] : memo->least;
    memo->largest = gather[i] > memo->largest ? gather[i] : memo->largest;
    if (with_slots && gather[i] == -1 && slots[i] != -1) {
      return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "chunk.store_slots", i, slots[i],
                               "chunk.store_slots[%llu] = %d, but chunk.gather[%llu] = -1 is a zero row",
                               (unsigned long long)i, slots[i], (unsigned long long)i);
    }
  }
  return KVP_OK;
}

static enum kvp_status gather_check(struct kvp_intake_op *op, const struct assembly *it) {
  if (!it->gather.is_inline) {
    op->out->report_flags |= it->gather.data != NULL ? KVP_REPORT_UNCHECKED_ARRAYS : 0;
    return KVP_OK;
  }
  const bool with_slots = it->slots.data != NULL && it->slots.is_inline;
  const struct kvp_intake_memo_key key = {
      .use = KVP_USE_GATHER, .array = it->gather.index, .other = with_slots ? it->slots.index : KVP_WIRE_NO_ARRAY};
  struct kvp_intake_memo *memo = kvp_intake_memo_find(op, &key);
  if (memo == NULL) {
    memo = kvp_intake_memo_add(op, &it->gather, &key);
    if (memo == NULL) {
      return (enum kvp_status)op->error->status;
    }
    enum kvp_status status = gather_look(op, it, with_slots, memo);
    if (status != KVP_OK) {
      return status;
    }
  }
  if (it->gather.bytes == 0 || (memo->least >= -1 && memo->largest < (int64_t)it->source.area.rows)) {
    return KVP_OK;
  }
  const int32_t *gather = it->gather.data;
  uint64_t i = 0;
  while (gather[i] >= -1 && gather[i] < (int64_t)it->source.area.rows) {
    i++;
  }
  return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, "chunk.gather", i, gather[i],
                           "chunk.gather[%llu] = %d is not in [-1, %llu), the rows of chunk.source",
                           (unsigned long long)i, gather[i], (unsigned long long)it->source.area.rows);
}

static enum kvp_status chunk_check(struct kvp_intake_op *op, struct assembly *it) {
  if (flag_is_set(op, KVP_OP_CHUNK_RESERVED) || op->wire->source.flags == 0) {
    return chunk_is_bare(op, it);
  }
  enum kvp_status status = KVP_OK;
  if ((status = kvp_intake_view_check(op, "chunk.source", &op->wire->source, it->out.area.row_bytes,
                                      KVP_INTAKE_ROW_ALIGNMENT, &it->source)) != KVP_OK ||
      (status = chunk_shape(op, it)) != KVP_OK || (status = gather_check(op, it)) != KVP_OK) {
    return status;
  }
  return it->slots.data == NULL ? KVP_OK : kvp_intake_slots(op, &it->ring, &it->slots, &it->rows_skipped);
}

static bool chunk_is_stored(const struct kvp_intake_op *op, const struct assembly *it) {
  return it->slots.data != NULL || flag_is_set(op, KVP_OP_CHUNK_CAST_BACK);
}

/* The chunk's rows of the output as they are, where nothing is stored. */
static enum kvp_status chunk_copy_add(struct kvp_intake_op *op, const struct assembly *it) {
  if (it->source.area.base == NULL || chunk_is_stored(op, it)) {
    return KVP_OK;
  }
  struct kvp_device_op *device_op = kvp_intake_device_op(op, KVP_DEVICE_COPY_ROWS);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  device_op->host_arrays = kvp_intake_host_bit(&it->gather, KVP_ARRAY_GATHER);
  device_op->params.copy_rows =
      (struct kvp_copy_rows_params){.source = kvp_intake_rows(&it->source),
                                    .out = rows_from(&it->out, it->history_rows),
                                    .gather = it->gather.data,
                                    .row_count = it->chunk_rows,
                                    .source_rows = it->gather.data != NULL ? it->source.area.rows : 0,
                                    .row_bytes = (uint32_t)it->out.area.row_bytes};
  return KVP_OK;
}

/* Does the store leave alone what the op's loads read? */
static enum kvp_status store_apart(struct kvp_intake_op *op, const struct assembly *it, bool *out) {
  const bool shares_layer = it->compressed.data != NULL && it->compressed_place.layer.base == it->ring.layer.base;
  const struct kvp_intake_array *loads[] = {&it->history, shares_layer ? &it->compressed : NULL};
  *out = true;
  for (size_t i = 0; i < sizeof loads / sizeof loads[0] && it->slots.data != NULL; i++) {
    bool is_apart = true;
    if (loads[i] != NULL && loads[i]->data != NULL) {
      enum kvp_status status = kvp_intake_slots_apart(op, &it->ring, &it->slots, loads[i], &is_apart);
      if (status != KVP_OK) {
        return status;
      }
    }
    *out = *out && is_apart;
  }
  return KVP_OK;
}

/* The chunk's records, and its rows of the output: as they are, or as the ring's format gives them back. Behind the
 * loads, whose slots it may overwrite. */
static enum kvp_status chunk_store_add(struct kvp_intake_op *op, const struct assembly *it) {
  const bool casts_back = flag_is_set(op, KVP_OP_CHUNK_CAST_BACK);
  bool is_apart = false;
  if (it->source.area.base == NULL || !chunk_is_stored(op, it)) {
    return KVP_OK;
  }
  enum kvp_status status = store_apart(op, it, &is_apart);
  struct kvp_device_op *device_op = status == KVP_OK ? kvp_intake_device_op(op, KVP_DEVICE_STORE) : NULL;
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  device_op->host_arrays =
      kvp_intake_host_bit(&it->gather, KVP_ARRAY_GATHER) | kvp_intake_host_bit(&it->slots, KVP_ARRAY_SLOTS);
  device_op->joins = is_apart && device_op != op->out->first;
  device_op->params.store =
      (struct kvp_store_params){.layer = it->ring.layer,
                                .source = kvp_intake_rows(&it->source),
                                .slots = it->slots.data,
                                .row_count = it->chunk_rows,
                                .gather = it->gather.data,
                                .source_rows = it->gather.data != NULL ? it->source.area.rows : 0,
                                .rows_skipped = it->rows_skipped,
                                .cast_back = rows_from(&it->out, it->history_rows),
                                .back_is_copy = !casts_back};
  if (it->slots.data == NULL) {
    device_op->params.store.rows_skipped = it->chunk_rows;
  } else {
    device_op->params.store.check = kvp_intake_owner_check(op, it->ring.pool, &it->slots);
  }
  return KVP_OK;
}

/* ---- part 3 ---- */

static const char *text_of(enum kvp_compressed_state state) {
  switch (state) {
  case KVP_COMPRESSED_UNKNOWN:
    return "no assemble has written them";
  case KVP_COMPRESSED_OTHER_ROWS:
    return "the last assemble there wrote other rows";
  case KVP_COMPRESSED_OTHER_LAYER:
    return "they were assembled from another region or layer";
  case KVP_COMPRESSED_OTHER_SEGMENTS:
    return "they were assembled by other segments";
  case KVP_COMPRESSED_ROWS_WRITTEN:
    return "they were written since they were assembled";
  case KVP_COMPRESSED_BLOCKS_WRITTEN:
    return "blocks that they were assembled from were written since";
  case KVP_COMPRESSED_BLOCKS_PASSED_ON:
    return "blocks that they were assembled from were freed, and assigned again since";
  case KVP_COMPRESSED_IN_FLIGHT:
    return "a step of another queue assembles them, and has not finished";
  case KVP_COMPRESSED_WRITER_IN_FLIGHT:
    return "a step of another queue, which had not finished when they were assembled, writes them or their blocks";
  case KVP_COMPRESSED_TOO_MUCH:
    return "the step has more to compare than is looked at";
  case KVP_COMPRESSED_THERE:
    break;
  }
  return "";
}

static enum kvp_status compressed_add(struct kvp_intake_op *op, struct assembly *it) {
  if (it->compressed.data == NULL || it->compressed_rows == 0) {
    return KVP_OK;
  }
  struct kvp_compressed_part *part = kvp_arena_alloc(&op->step->arena, sizeof *part);
  if (part == NULL) {
    return kvp_intake_no_memory(op);
  }
  const struct kvp_rows rows = rows_from(&it->out, it->history_rows + it->chunk_rows);
  *part = (struct kvp_compressed_part){
      .pool = it->compressed_place.pool,
      .layer = it->compressed_place.layer,
      .rows = {rows.base, it->compressed_rows, it->out.area.row_bytes, rows.stride_bytes},
      .segments = it->compressed.is_inline ? it->compressed.data : NULL,
      .segment_count = it->compressed.bytes / sizeof(struct kvp_segment),
  };
  if (!flag_is_set(op, KVP_OP_KEEP_COMPRESSED)) {
    op->out->assembled = part;
    op->step->assembles = true;
    it->compressed_load.out = rows;
    return kvp_intake_load_add(op, &it->compressed, &it->compressed_load);
  }
  if (part->segments == NULL) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "compressed.segments", -1, it->compressed.index, "%s",
                             "keep_compressed: segments in a buffer can't be compared");
  }
  const enum kvp_compressed_state state =
      kvp_compressed_parts_look(&op->intake->compressed, op->step, (uint32_t)op->index, part);
  if (state != KVP_COMPRESSED_THERE) {
    return KVP_INTAKE_REFUSE(op, KVP_INVALID_ARGUMENT, "keep_compressed", -1, it->compressed_rows,
                             "keep_compressed of %llu rows from row %llu on: %s",
                             (unsigned long long)it->compressed_rows,
                             (unsigned long long)(it->history_rows + it->chunk_rows), text_of(state));
  }
  return KVP_OK;
}

/* ---- the op ---- */

static enum kvp_status inputs_apart(struct kvp_intake_op *op, const struct assembly *it) {
  const struct kvp_intake_array *arrays[] = {&it->history, &it->gather, &it->slots, &it->compressed};
  enum kvp_status status = kvp_intake_views_apart(op, &it->out, &it->source);
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0] && status == KVP_OK; i++) {
    status = kvp_intake_array_apart(op, &it->out, arrays[i]);
  }
  return status;
}

static enum kvp_status contents_check(struct kvp_intake_op *op, struct assembly *it) {
  enum kvp_status status = KVP_OK;
  if (it->history.data != NULL &&
      ((status = kvp_intake_segments(op, &it->ring, &it->history, it->history_rows, &it->history_load)) != KVP_OK ||
       (status = kvp_intake_hazard_load(op, &it->ring, &it->history)) != KVP_OK)) {
    return status;
  }
  if (it->compressed.data != NULL &&
      ((status = kvp_intake_segments(op, &it->compressed_place, &it->compressed, it->compressed_rows,
                                     &it->compressed_load)) != KVP_OK ||
       (!flag_is_set(op, KVP_OP_KEEP_COMPRESSED) && /* it reads nothing */
        (status = kvp_intake_hazard_load(op, &it->compressed_place, &it->compressed)) != KVP_OK))) {
    return status;
  }
  return it->slots.data == NULL ? KVP_OK : kvp_intake_hazard_store(op, &it->ring, &it->slots, it->rows_skipped);
}

enum kvp_status kvp_intake_assemble(struct kvp_intake_op *op) {
  struct assembly it;
  memset(&it, 0, sizeof it);
  enum kvp_status status = kvp_intake_view_check(op, "out", &op->wire->second, 0, KVP_INTAKE_ROW_ALIGNMENT, &it.out);
  if (status != KVP_OK) {
    return status;
  }
  if (it.out.area.row_bytes % KVP_INTAKE_ROW_ALIGNMENT != 0) {
    return KVP_INTAKE_REFUSE(op, KVP_WRONG_FORMAT, "out", -1, it.out.area.row_bytes,
                             "out.row_bytes = %llu is no multiple of %d", (unsigned long long)it.out.area.row_bytes,
                             KVP_INTAKE_ROW_ALIGNMENT);
  }
  if ((status = arrays_find(op, &it)) != KVP_OK || (status = places_find(op, &it)) != KVP_OK ||
      (status = rows_fit(op, &it)) != KVP_OK || (status = chunk_check(op, &it)) != KVP_OK ||
      (status = inputs_apart(op, &it)) != KVP_OK || (status = contents_check(op, &it)) != KVP_OK) {
    return status;
  }
  op->out->main_kv_offset = it.history_rows + it.chunk_rows;
  if (it.history.data != NULL) {
    it.history_load.out = kvp_intake_rows(&it.out);
    status = kvp_intake_load_add(op, &it.history, &it.history_load);
  }
  if (status != KVP_OK || (status = chunk_copy_add(op, &it)) != KVP_OK ||
      (status = compressed_add(op, &it)) != KVP_OK) {
    return status;
  }
  for (struct kvp_device_op *part = op->out->first; part != NULL; part = kvp_step_op_next(op->out, part)) {
    part->joins = part != op->out->first; /* they write rows of their own, and read none of the output */
  }
  return chunk_store_add(op, &it);
}
