/* One op of protobuf's as an op of an encoded step.
 *
 * Each op's function names its fields one after the other; what is wrong with the first bad one stays in the encoder,
 * and what comes behind it is not looked at any more. */
#include "proto/step_op_encode.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

struct op_encoder {
  const struct kvp_step_arrays *arrays;
  int32_t index;
  const char *name;
  struct kvp_wire_op *out;
  enum kvp_status status; /* of the first field that is wrong */
  struct kvp_error *error;
};

/* "op 3 store: " and what follows. */
#define REFUSE(encoder, code, field, value, format, ...)                                                             \
  ((encoder)->status = kvp_error_set_at((encoder)->error, (code), (encoder)->index, (field), -1, (int64_t)(value),   \
                                        "op %d %s: " format, (encoder)->index, (encoder)->name, __VA_ARGS__))

/* ---- fields -----------------------------------------------------------------------------------------------------
 */

static bool have(struct op_encoder *encoder, const char *field, const void *message) {
  if (encoder->status != KVP_OK) {
    return false;
  }
  if (message == NULL) {
    REFUSE(encoder, KVP_INVALID_ARGUMENT, field, 0, "%s is missing", field);
    return false;
  }
  return true;
}

static void put_region(struct op_encoder *encoder, const char *field, const Kvpool__V1__RegionRef *region) {
  if (have(encoder, field, region)) {
    encoder->out->pool_id = region->pool_id;
    encoder->out->region = region->region;
    encoder->out->layer = region->layer;
  }
}

static void put_optional_view(struct op_encoder *encoder, const Kvpool__V1__View *view, struct kvp_wire_view *out) {
  if (encoder->status == KVP_OK && view != NULL) {
    out->buffer_id = view->buffer_id;
    out->offset_bytes = view->offset_bytes;
    out->rows = view->rows;
    out->row_stride_bytes = view->row_stride_bytes;
    out->row_bytes = view->row_bytes;
    out->flags = KVP_WIRE_VIEW_PRESENT;
  }
}

static void put_view(struct op_encoder *encoder, const char *field, const Kvpool__V1__View *view,
                     struct kvp_wire_view *out) {
  if (have(encoder, field, view)) {
    put_optional_view(encoder, view, out);
  }
}

static void put_array(struct op_encoder *encoder, const char *field, uint32_t place, uint32_t number) {
  if (encoder->status != KVP_OK) {
    return;
  }
  if (number >= encoder->arrays->count) {
    REFUSE(encoder, KVP_OUT_OF_RANGE, field, number, "%s = array %u, the step has %zu arrays", field, number,
           encoder->arrays->count);
    return;
  }
  encoder->out->arrays[place] = number;
}

/* Neither: absent, which an op may or may not allow. */
static void put_matrix(struct op_encoder *encoder, const char *field, const Kvpool__V1__Matrix *matrix,
                       struct kvp_wire_view *view, uint32_t place) {
  if (matrix == NULL) {
    return;
  }
  if (matrix->source_case == KVPOOL__V1__MATRIX__SOURCE_ARRAY) {
    put_array(encoder, field, place, matrix->array);
  } else {
    put_view(encoder, field, matrix->source_case == KVPOOL__V1__MATRIX__SOURCE_VIEW ? matrix->view : NULL, view);
  }
}

static void put_flag(struct op_encoder *encoder, bool is_set, enum kvp_wire_op_flag flag) {
  encoder->out->flags |= is_set ? (uint32_t)flag : 0;
}

/* ---- ops --------------------------------------------------------------------------------------------------------
 */

static void encode_store(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  const Kvpool__V1__StoreOp *store = op->store;
  put_region(encoder, "region", store->region);
  put_view(encoder, "source", store->source, &encoder->out->source);
  put_array(encoder, "slots", 0, store->slots);
  put_optional_view(encoder, store->cast_back, &encoder->out->second);
}

static void encode_load(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  const Kvpool__V1__LoadOp *load = op->load;
  put_region(encoder, "region", load->region);
  put_view(encoder, "out", load->out, &encoder->out->source);
  put_array(encoder, "segments", 0, load->segments);
  put_optional_view(encoder, load->out_scales, &encoder->out->second);
  put_flag(encoder, load->allow_store_before_load, KVP_OP_ALLOW_STORE_BEFORE_LOAD);
  encoder->out->total_k = load->total_k;
}

/* An encoded assemble has one ring region, the history's and the chunk's. */
static void put_chunk_region(struct op_encoder *encoder, const Kvpool__V1__RegionRef *swa,
                             const Kvpool__V1__AssembleChunk *chunk, bool is_needed) {
  const Kvpool__V1__RegionRef *region = chunk->region;
  if (swa == NULL) {
    if (region != NULL || is_needed) {
      put_region(encoder, "chunk.region", region);
    }
  } else if (encoder->status == KVP_OK && region != NULL &&
             (region->pool_id != swa->pool_id || region->region != swa->region || region->layer != swa->layer)) {
    REFUSE(encoder, KVP_INVALID_ARGUMENT, "chunk.region", region->region,
           "chunk.region = pool %" PRIu64 " region %u layer %u, swa.region is pool %" PRIu64 " region %u layer %u",
           region->pool_id, region->region, region->layer, swa->pool_id, swa->region, swa->layer);
  }
}

static void encode_chunk(struct op_encoder *encoder, const Kvpool__V1__RegionRef *swa,
                         const Kvpool__V1__AssembleChunk *chunk) {
  bool has_gather = chunk->optional_gather_case == KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_GATHER_GATHER;
  bool has_slots = chunk->optional_store_slots_case == KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_STORE_SLOTS_STORE_SLOTS;
  put_chunk_region(encoder, swa, chunk, has_slots || chunk->cast_back);
  if (chunk->rows_case == KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_RESERVED) {
    put_flag(encoder, true, KVP_OP_CHUNK_RESERVED);
    encoder->out->argument = chunk->reserved;
  } else {
    put_view(encoder, "chunk.source",
             chunk->rows_case == KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_SOURCE ? chunk->source : NULL,
             &encoder->out->source);
    encoder->out->argument = encoder->out->source.rows;
  }
  if (has_gather) {
    put_array(encoder, "chunk.gather", 1, chunk->gather);
  }
  if (has_gather && encoder->status == KVP_OK && chunk->rows_case == KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_SOURCE) {
    encoder->out->argument = encoder->arrays->elements(encoder->arrays->context, chunk->gather);
  }
  if (has_slots) {
    put_array(encoder, "chunk.store_slots", 2, chunk->store_slots);
  }
  put_flag(encoder, chunk->cast_back, KVP_OP_CHUNK_CAST_BACK);
}

static void encode_assemble(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  const Kvpool__V1__AssembleOp *assemble = op->assemble;
  struct kvp_wire_op *out = encoder->out;
  put_view(encoder, "out", assemble->out, &out->second);
  if (assemble->swa != NULL) {
    put_region(encoder, "swa.region", assemble->swa->region);
    put_array(encoder, "swa.segments", 0, assemble->swa->segments);
    out->total_k = assemble->swa->total_k;
  }
  if (assemble->chunk != NULL) {
    encode_chunk(encoder, assemble->swa == NULL ? NULL : assemble->swa->region, assemble->chunk);
  }
  const Kvpool__V1__AssembleCompressed *compressed = assemble->compressed;
  if (compressed != NULL && have(encoder, "compressed.region", compressed->region)) {
    out->second_pool_id = compressed->region->pool_id;
    out->second_region = compressed->region->region;
    out->second_layer = compressed->region->layer;
    out->numbers[0] = compressed->total_k;
    put_array(encoder, "compressed.segments", 3, compressed->segments);
    put_flag(encoder, compressed->keep_compressed, KVP_OP_KEEP_COMPRESSED);
  }
  put_flag(encoder, assemble->allow_store_before_load, KVP_OP_ALLOW_STORE_BEFORE_LOAD);
}

static void encode_fused_store(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  const Kvpool__V1__FusedStoreOp *fused = op->fused_store;
  struct kvp_wire_op *out = encoder->out;
  put_region(encoder, "region", fused->region);
  put_view(encoder, "source", fused->source, &out->source);
  put_view(encoder, "norm_weight", fused->norm_weight, &out->third);
  put_array(encoder, "slots", 0, fused->slots);
  put_array(encoder, "positions", 1, fused->positions);
  put_optional_view(encoder, fused->cast_back, &out->second);
  put_optional_view(encoder, fused->cos_sin, &out->fourth);
  uint32_t eps_bits = 0;
  memcpy(&eps_bits, &fused->eps, sizeof eps_bits);
  out->numbers[0] = eps_bits;
  out->argument = fused->optional_rope_offset_case == KVPOOL__V1__FUSED_STORE_OP__OPTIONAL_ROPE_OFFSET_ROPE_OFFSET
                      ? fused->rope_offset
                      : KVP_STEP_ROPE_OFFSET_DEFAULT;
  put_flag(encoder, fused->neox, KVP_OP_NEOX);
  put_flag(encoder, fused->hadamard, KVP_OP_HADAMARD);
  put_flag(encoder, !fused->keep_float32, KVP_OP_ROUND_TO_BF16);
}

static void encode_convert_kv_index(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  const Kvpool__V1__ConvertKvIndexOp *convert = op->convert_kv_index;
  struct kvp_wire_op *out = encoder->out;
  put_region(encoder, "region", convert->region);
  if (have(encoder, "topk", convert->topk)) {
    put_matrix(encoder, "topk", convert->topk, &out->source, 2);
  }
  put_array(encoder, "block_tables", 0, convert->block_tables);
  put_array(encoder, "valid", 1, convert->valid);
  put_optional_view(encoder, convert->out, &out->second);
  out->argument = convert->queries;
  out->numbers[0] = convert->table_columns;
}

static void encode_swa_index_decode(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  const Kvpool__V1__SwaIndexDecodeOp *decode = op->swa_index_decode;
  put_region(encoder, "region", decode->region);
  put_view(encoder, "out", decode->out, &encoder->out->second);
  put_array(encoder, "offset_len", 0, decode->offset_len);
  encoder->out->argument = decode->window;
}

static void encode_expand_swa_index(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  const Kvpool__V1__ExpandSwaIndexOp *expand = op->expand_swa_index;
  put_view(encoder, "out", expand->out, &encoder->out->second);
  put_array(encoder, "pivots", 0, expand->pivots);
  encoder->out->argument = expand->width;
}

static void encode_kv_index_cat(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  const Kvpool__V1__KvIndexCatOp *cat = op->kv_index_cat;
  struct kvp_wire_op *out = encoder->out;
  put_view(encoder, "out", cat->out, &out->second);
  put_matrix(encoder, "left", cat->left, &out->source, 0);
  put_matrix(encoder, "right", cat->right, &out->third, 1);
  if (encoder->status == KVP_OK && cat->right_base < 0) {
    REFUSE(encoder, KVP_OUT_OF_RANGE, "right_base", cat->right_base, "right_base = %d is negative", cat->right_base);
    return;
  }
  out->argument = (uint64_t)cat->right_base;
  out->numbers[0] = cat->left_columns;
  out->numbers[1] = cat->right_columns;
}

static void encode_copy_blocks(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  encoder->out->pool_id = op->copy_blocks->pool_id;
  put_array(encoder, "pairs", 0, op->copy_blocks->pairs);
}

static void encode_zero_blocks(struct op_encoder *encoder, const Kvpool__V1__Op *op) {
  encoder->out->pool_id = op->zero_blocks->pool_id;
  put_array(encoder, "blocks", 0, op->zero_blocks->blocks);
}

/* ---- the table --------------------------------------------------------------------------------------------------
 */

static const struct op_row {
  const char *name;
  enum kvp_op_kind kind;
  void (*encode)(struct op_encoder *encoder, const Kvpool__V1__Op *op);
} op_rows[] = {
    [KVPOOL__V1__OP__OP_STORE] = {"store", KVP_OP_STORE, encode_store},
    [KVPOOL__V1__OP__OP_LOAD] = {"load", KVP_OP_LOAD, encode_load},
    [KVPOOL__V1__OP__OP_ASSEMBLE] = {"assemble", KVP_OP_ASSEMBLE, encode_assemble},
    [KVPOOL__V1__OP__OP_FUSED_STORE] = {"fused_store", KVP_OP_FUSED_STORE, encode_fused_store},
    [KVPOOL__V1__OP__OP_CONVERT_KV_INDEX] = {"convert_kv_index", KVP_OP_CONVERT_KV_INDEX, encode_convert_kv_index},
    [KVPOOL__V1__OP__OP_SWA_INDEX_DECODE] = {"swa_index_decode", KVP_OP_SWA_INDEX_DECODE, encode_swa_index_decode},
    [KVPOOL__V1__OP__OP_EXPAND_SWA_INDEX] = {"expand_swa_index", KVP_OP_EXPAND_SWA_INDEX, encode_expand_swa_index},
    [KVPOOL__V1__OP__OP_KV_INDEX_CAT] = {"kv_index_cat", KVP_OP_KV_INDEX_CAT, encode_kv_index_cat},
    [KVPOOL__V1__OP__OP_COPY_BLOCKS] = {"copy_blocks", KVP_OP_COPY_BLOCKS, encode_copy_blocks},
    [KVPOOL__V1__OP__OP_ZERO_BLOCKS] = {"zero_blocks", KVP_OP_ZERO_BLOCKS, encode_zero_blocks},
};

/* NULL: it says nothing, or what this daemon doesn't know. */
static const struct op_row *row_of(const Kvpool__V1__Op *op) {
  size_t number = (size_t)op->op_case;
  return number < sizeof op_rows / sizeof op_rows[0] && op_rows[number].encode != NULL ? &op_rows[number] : NULL;
}

const char *kvp_step_op_name(const Kvpool__V1__Op *op) {
  const struct op_row *row = row_of(op);
  return row == NULL ? "" : row->name;
}

uint64_t kvp_step_rope_offset(const struct kvp_wire_op *op, uint32_t elements) {
  uint32_t rotary_dims = op->fourth.row_bytes / (uint32_t)sizeof(float);
  return rotary_dims > 0 && elements > rotary_dims ? elements - rotary_dims : 0;
}

enum kvp_status kvp_step_op_encode(const Kvpool__V1__Op *op, int32_t index, const struct kvp_step_arrays *arrays,
                                   struct kvp_wire_op *out, struct kvp_error *error) {
  const struct op_row *row = row_of(op);
  if (row == NULL) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, index, "ops", index, op->op_case,
                            "op %d says nothing that this daemon knows", index);
  }
  struct op_encoder encoder = {
      .arrays = arrays, .index = index, .name = row->name, .out = out, .status = KVP_OK, .error = error};
  out->kind = row->kind;
  row->encode(&encoder, op);
  return encoder.status;
}
