/* Segments [m,4] of a load plan: checked once in a step, long ones cut, and the device's load made of them. */
#include "server/executor/intake_op.h"

enum {
  segment_ints = 4,
  piece_rows_min = 256,       /* longer segments are cut, so that one of them spreads over threads */
  pieces_of_a_load = 1 << 14, /* about as many cuts at most */
  pieces_of_a_step = 1 << 19, /* 8 MiB; what comes after them stays whole, so that a step's arrays have a bound */
};
_Static_assert(sizeof(struct kvp_segment) == segment_ints * sizeof(int32_t), "segments lie in arrays as they are");

static int64_t segment_rows(const struct kvp_segment *segment) {
  return (int64_t)segment->src_end - segment->src_begin;
}

/* Behind the last row it writes; of an empty one where it begins. */
static uint64_t segment_dst_end(const struct kvp_segment *segment) {
  return (uint64_t)segment->dst_offset + (uint64_t)segment_rows(segment);
}

/* Segments on their way through a check. */
struct segment_list {
  const struct kvp_intake_place *place;
  const char *name;
  const struct kvp_segment *segments;
  uint64_t count;
};

static enum kvp_status segment_refuse(struct kvp_intake_op *op, const struct segment_list *list, uint64_t i,
                                      uint32_t field, const char *field_name, int64_t value, const char *relation,
                                      uint64_t bound, const char *bound_name) {
  return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, list->name, i * segment_ints + field, value,
                           "%s[%llu].%s = %lld %s %s%s%llu", list->name, (unsigned long long)i, field_name,
                           (long long)value, relation, bound_name, bound_name[0] == '\0' ? "" : " ",
                           (unsigned long long)bound);
}

static enum kvp_status segment_check(struct kvp_intake_op *op, const struct segment_list *list, uint64_t i) {
  const struct kvp_segment *segment = &list->segments[i];
  const struct kvp_geometry *geometry = list->place->layer.geometry;
  if (segment->src_block < -1) {
    return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, list->name, i * segment_ints, segment->src_block,
                             "%s[%llu].src_block = %d < -1", list->name, (unsigned long long)i, segment->src_block);
  }
  if (segment->src_block >= (int64_t)geometry->num_blocks) {
    return segment_refuse(op, list, i, 0, "src_block", segment->src_block, ">=", geometry->num_blocks, "num_blocks");
  }
  if (segment->src_begin < 0) {
    return segment_refuse(op, list, i, 1, "src_begin", segment->src_begin, "<", 0, "");
  }
  if (segment->src_end < segment->src_begin) {
    return segment_refuse(op, list, i, 2, "src_end", segment->src_end, "<", (uint64_t)segment->src_begin,
                          "src_begin");
  }
  if (segment->src_end > (int64_t)geometry->tokens_per_block) {
    return segment_refuse(op, list, i, 2, "src_end", segment->src_end, ">", geometry->tokens_per_block,
                          "tokens_per_block");
  }
  if (segment->dst_offset < 0) {
    return segment_refuse(op, list, i, 3, "dst_offset", segment->dst_offset, "<", 0, "");
  }
  if (segment->src_block == -1) {
    return KVP_OK;
  }
  const struct kvp_intake_element element = {
      .array = list->name,
      .field = ".src_block",
      .index = i,
      .position = i * segment_ints,
      .value = segment->src_block,
  };
  return kvp_intake_block_check(op, list->place->pool, &element, (uint32_t)segment->src_block, false);
}

/* Sorts keys by their upper 32 bits (below 2^31), 11 bits a pass. */
static void keys_sort(uint64_t *keys, uint64_t *scratch, uint64_t count) {
  enum { bits = 11, buckets = 1 << bits };
  for (int shift = 32; shift < 63; shift += bits) {
    uint64_t begins[buckets + 1] = {0};
    for (uint64_t i = 0; i < count; i++) {
      begins[(keys[i] >> shift & (buckets - 1)) + 1]++;
    }
    for (uint32_t b = 0; b < buckets; b++) {
      begins[b + 1] += begins[b];
    }
    for (uint64_t i = 0; i < count; i++) {
      scratch[begins[keys[i] >> shift & (buckets - 1)]++] = keys[i];
    }
    uint64_t *sorted = scratch;
    scratch = keys;
    keys = sorted;
  }
}

/* Destinations that came out of order: sorted, then compared with their neighbours. */
static enum kvp_status destinations_check_sorted(struct kvp_intake_op *op, const struct segment_list *list) {
  const struct kvp_segment *segments = list->segments;
  const uint64_t count = list->count;
  uint64_t *keys = kvp_arena_alloc(&op->step->arena, 2 * count * sizeof *keys);
  if (keys == NULL) {
    return kvp_intake_no_memory(op);
  }
  uint64_t used = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (segment_rows(&segments[i]) > 0) {
      keys[used++] = (uint64_t)segments[i].dst_offset << 32 | i;
    }
  }
  uint64_t *sorted = keys + used; /* three passes end in the other half */
  keys_sort(keys, sorted, used);
  for (uint64_t k = 1; k < used; k++) {
    const uint64_t before = sorted[k - 1] & UINT32_MAX;
    const uint64_t i = sorted[k] & UINT32_MAX;
    if (segments[before].dst_offset + segment_rows(&segments[before]) > segments[i].dst_offset) {
      const uint64_t later = i > before ? i : before;
      return KVP_INTAKE_REFUSE(
          op, KVP_INVALID_ARGUMENT, list->name, later * segment_ints + 3, segments[later].dst_offset,
          "%s[%llu].dst_offset = %d: its rows overlap those of %s[%llu]", list->name, (unsigned long long)later,
          segments[later].dst_offset, list->name, (unsigned long long)(i > before ? before : i));
    }
  }
  return KVP_OK;
}

/* What a check of segments finds out. */
struct segment_totals {
  uint64_t rows;
  uint64_t rows_zeroed;
  uint64_t longest;
  uint64_t dst_end;
};

/* Everything about the segments but total_k, which may differ between ops that share them. */
static enum kvp_status segments_check(struct kvp_intake_op *op, const struct segment_list *list,
                                      struct segment_totals *totals) {
  const struct kvp_segment *segments = list->segments;
  bool in_order = true;
  int64_t dst_end = 0;
  *totals = (struct segment_totals){0};
  for (uint64_t i = 0; i < list->count; i++) {
    enum kvp_status status = segment_check(op, list, i);
    if (status != KVP_OK) {
      return status;
    }
    const int64_t length = segment_rows(&segments[i]);
    const uint64_t end = segment_dst_end(&segments[i]);
    totals->dst_end = end > totals->dst_end ? end : totals->dst_end;
    if (length > 0) {
      in_order = in_order && segments[i].dst_offset >= dst_end;
      dst_end = segments[i].dst_offset + length;
      totals->rows += (uint64_t)length;
      totals->rows_zeroed += segments[i].src_block == -1 ? (uint64_t)length : 0;
      totals->longest = (uint64_t)length > totals->longest ? (uint64_t)length : totals->longest;
    }
  }
  return in_order ? KVP_OK : destinations_check_sorted(op, list);
}

/* Names the first segment that writes behind total_k; there is one. */
static enum kvp_status total_k_refuse(struct kvp_intake_op *op, const struct segment_list *list, uint64_t total_k) {
  const struct kvp_segment *segments = list->segments;
  uint64_t i = 0;
  while (segment_dst_end(&segments[i]) <= total_k) {
    i++;
  }
  return KVP_INTAKE_REFUSE(op, KVP_OUT_OF_RANGE, list->name, i * segment_ints + 3, segments[i].dst_offset,
                           "%s[%llu].dst_offset = %d: rows up to %llu > total_k %llu", list->name,
                           (unsigned long long)i, segments[i].dst_offset,
                           (unsigned long long)segment_dst_end(&segments[i]), (unsigned long long)total_k);
}

/* The same rows in segments no longer than piece_rows. */
static enum kvp_status segments_cut(struct kvp_intake_op *op, const struct kvp_segment *segments, uint64_t count,
                                    struct kvp_intake_memo *memo) {
  const int64_t piece_rows =
      memo->rows / pieces_of_a_load > piece_rows_min ? (int64_t)(memo->rows / pieces_of_a_load) : piece_rows_min;
  uint64_t piece_count = 0;
  for (uint64_t i = 0; i < count; i++) {
    piece_count += (uint64_t)((segment_rows(&segments[i]) + piece_rows - 1) / piece_rows);
  }
  if (piece_count > pieces_of_a_step - op->intake->pieces_cut) {
    return KVP_OK;
  }
  op->intake->pieces_cut += piece_count;
  struct kvp_segment *pieces = kvp_arena_alloc(&op->step->arena, piece_count * sizeof *pieces);
  if (pieces == NULL) {
    return kvp_intake_no_memory(op);
  }
  uint64_t filled = 0;
  for (uint64_t i = 0; i < count; i++) {
    const struct kvp_segment *whole = &segments[i];
    for (int64_t done = 0; done < segment_rows(whole); done += piece_rows) {
      const int64_t left = segment_rows(whole) - done;
      const int64_t begin = whole->src_begin + done;
      pieces[filled++] = (struct kvp_segment){.src_block = whole->src_block,
                                              .src_begin = (int32_t)begin,
                                              .src_end = (int32_t)(begin + (left < piece_rows ? left : piece_rows)),
                                              .dst_offset = (int32_t)(whole->dst_offset + done)};
    }
  }
  memo->segments = pieces;
  memo->segment_count = filled;
  memo->segment_rows_max =
      (uint64_t)piece_rows < memo->segment_rows_max ? (uint64_t)piece_rows : memo->segment_rows_max;
  return KVP_OK;
}

/* The segments as this region's geometry takes them, checked once in a step. */
static enum kvp_status segments_memo(struct kvp_intake_op *op, const struct kvp_intake_array *array,
                                     const struct segment_list *list, struct kvp_intake_memo **out) {
  const struct kvp_intake_memo_key key = {
      .use = KVP_USE_SEGMENTS,
      .array = array->index,
      .other = KVP_WIRE_NO_ARRAY,
      .pool = list->place->pool,
      .tokens_per_block = list->place->layer.geometry->tokens_per_block,
  };
  *out = kvp_intake_memo_find(op, &key);
  if (*out != NULL) {
    return KVP_OK;
  }
  *out = kvp_intake_memo_add(op, array, &key);
  if (*out == NULL) {
    return (enum kvp_status)op->error->status;
  }
  struct segment_totals totals;
  enum kvp_status status = segments_check(op, list, &totals);
  if (status != KVP_OK) {
    return status;
  }
  (*out)->segments = list->segments;
  (*out)->segment_count = list->count;
  (*out)->dst_end = totals.dst_end;
  (*out)->rows = totals.rows;
  (*out)->rows_zeroed = totals.rows_zeroed;
  (*out)->segment_rows_max = totals.longest;
  return totals.longest > piece_rows_min ? segments_cut(op, list->segments, list->count, *out) : KVP_OK;
}

/* Counts on its own: nobody knows yet how many rows the segments name. */
static enum kvp_status rows_taken_begin(struct kvp_intake_op *op, struct kvp_load_params *load) {
  load->rows_taken = kvp_arena_alloc(&op->step->arena, sizeof *load->rows_taken);
  if (load->rows_taken == NULL) {
    return kvp_intake_no_memory(op);
  }
  *load->rows_taken = 0;
  return KVP_OK;
}

enum kvp_status kvp_intake_segments(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                    const struct kvp_intake_array *array, uint64_t total_k,
                                    struct kvp_load_params *out) {
  const struct segment_list list = {.place = place,
                                    .name = array->name,
                                    .segments = array->data,
                                    .count = array->bytes / sizeof(struct kvp_segment)};
  *out = (struct kvp_load_params){
      .layer = place->layer, .segments = list.segments, .segment_count = list.count, .total_k = total_k};
  out->check = kvp_intake_owner_check(op, place->pool, array);
  if (!array->is_inline) {
    return rows_taken_begin(op, out);
  }
  struct kvp_intake_memo *memo = NULL;
  enum kvp_status status = segments_memo(op, array, &list, &memo);
  if (status != KVP_OK) {
    return status;
  }
  if (memo->dst_end > total_k) {
    return total_k_refuse(op, &list, total_k);
  }
  out->segments = memo->segments;
  out->segment_count = memo->segment_count;
  out->rows = memo->rows;
  out->rows_zeroed = memo->rows_zeroed;
  out->segment_rows_max = memo->segment_rows_max;
  return KVP_OK;
}

enum kvp_status kvp_intake_load_add(struct kvp_intake_op *op, const struct kvp_intake_array *segments,
                                    const struct kvp_load_params *load) {
  struct kvp_device_op *device_op = kvp_intake_device_op(op, KVP_DEVICE_LOAD);
  if (device_op == NULL) {
    return (enum kvp_status)op->error->status;
  }
  device_op->params.load = *load;
  device_op->host_arrays = kvp_intake_host_bit(segments, KVP_ARRAY_SEGMENTS);
  return KVP_OK;
}
