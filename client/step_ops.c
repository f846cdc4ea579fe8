/* The ops of a step, each encoded when it is added.
 *
 * A function puts the parts of its op on the stack - an op_draft has room for the most that any op has - and appends
 * them. What it can see to be wrong here - a region, a layer, an array of the step that isn't there - is told with the
 * op's number; everything else the daemon checks. */
#include <assert.h>

#include "client/attach.h"
#include "client/internal.h"

enum { step_field_ops = 6 }; /* of kvpool.proto */

/* An op under way. The first thing that is wrong stays in `status`; nothing behind it is looked at. */
struct op_draft {
  kvpool_step *step;
  kvpool_error *error;
  kvpool_status status;
  Kvpool__V1__Op op;
  Kvpool__V1__RegionRef regions[3];
  uint32_t region_count;
  Kvpool__V1__View views[5];
  const kvpool_buffer *buffers[5]; /* of the views */
  uint32_t view_count;
  uint32_t elements; /* fused_store: of a row of the region */
};

static void draft_fail(struct op_draft *draft) {
  if (draft->error != NULL) {
    draft->error->op = (int32_t)draft->step->op_count;
  }
}

static struct op_draft draft_begin(kvpool_step *step, Kvpool__V1__Op__OpCase op_case, kvpool_error *error) {
  assert(step != NULL);
  struct op_draft draft = {.step = step, .error = error, .status = KVPOOL_OK, .op = KVPOOL__V1__OP__INIT};
  draft.op.op_case = op_case;
  if (step->op_count == kvp_ops_per_step_max) {
    draft.status = kvp_fail(error, KVPOOL_TOO_LARGE, "a step has at most %d ops", kvp_ops_per_step_max);
    draft_fail(&draft);
  }
  return draft;
}

static Kvpool__V1__RegionRef *draft_layer(struct op_draft *draft, const kvpool_layer *layer) {
  if (draft->status == KVPOOL_OK) {
    draft->status = kvp_layer_check(layer, draft->error);
    if (draft->status != KVPOOL_OK) {
      draft_fail(draft);
    }
  }
  assert(draft->region_count < sizeof draft->regions / sizeof draft->regions[0]);
  Kvpool__V1__RegionRef *message = &draft->regions[draft->region_count++];
  *message = kvp_layer_reference(layer);
  return message;
}

static uint32_t draft_array(struct op_draft *draft, const char *name, uint32_t array) {
  if (draft->status == KVPOOL_OK && array >= draft->step->array_count) {
    draft->status = kvp_fail_at(draft->error, KVPOOL_INVALID_ARGUMENT, name, -1, array,
                                "op %u: %s is array %u of a step that has %u", draft->step->op_count, name, array,
                                draft->step->array_count);
    draft_fail(draft);
  }
  return array;
}

/* NULL: absent. */
static Kvpool__V1__View *draft_view(struct op_draft *draft, const kvpool_view *view) {
  if (view == NULL) {
    return NULL;
  }
  assert(view->buffer != NULL && draft->view_count < sizeof draft->views / sizeof draft->views[0]);
  draft->buffers[draft->view_count] = view->buffer;
  Kvpool__V1__View *message = &draft->views[draft->view_count++];
  kvpool__v1__view__init(message);
  message->buffer_id = view->buffer->id;
  message->offset_bytes = view->offset_bytes;
  message->rows = view->rows;
  message->row_stride_bytes = view->row_stride_bytes == 0 ? view->row_bytes : view->row_stride_bytes;
  message->row_bytes = view->row_bytes;
  return message;
}

/* NULL: absent, *message is not used. */
static Kvpool__V1__Matrix *draft_matrix(struct op_draft *draft, const char *name, const kvpool_matrix *matrix,
                                        Kvpool__V1__Matrix *message) {
  if (matrix == NULL) {
    return NULL;
  }
  kvpool__v1__matrix__init(message);
  if (matrix->view != NULL) {
    message->source_case = KVPOOL__V1__MATRIX__SOURCE_VIEW;
    message->view = draft_view(draft, matrix->view);
  } else {
    message->source_case = KVPOOL__V1__MATRIX__SOURCE_ARRAY;
    message->array = draft_array(draft, name, matrix->array);
  }
  return message;
}

static kvpool_status draft_append(struct op_draft *draft) {
  if (draft->status != KVPOOL_OK) {
    return draft->status;
  }
  kvpool_step *step = draft->step;
  const size_t size_before = step->body.size;
  if (!kvp_bytes_append_message(&step->body, step_field_ops, &draft->op.base)) {
    return kvp_fail_no_memory(draft->error);
  }
  kvpool_status status = kvp_step_wire_add_op(step, &draft->op, draft->elements, draft->error);
  if (status != KVPOOL_OK) {
    step->body.size = size_before;
    return status;
  }
  for (uint32_t i = 0; i < draft->view_count; i++) {
    kvp_step_name_buffer(step, (int32_t)step->op_count, draft->buffers[i]);
  }
  step->op_count++;
  return KVPOOL_OK;
}

/* ---- store and load ---------------------------------------------------------------------------------------------
 */

kvpool_status kvpool_step_add_store(kvpool_step *step, const kvpool_layer *layer, const kvpool_view *source,
                                    uint32_t slots, const kvpool_view *cast_back, kvpool_error *error) {
  assert(source != NULL);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_STORE, error);
  Kvpool__V1__StoreOp store = KVPOOL__V1__STORE_OP__INIT;
  store.region = draft_layer(&draft, layer);
  store.source = draft_view(&draft, source);
  store.slots = draft_array(&draft, "slots", slots);
  store.cast_back = draft_view(&draft, cast_back);
  draft.op.store = &store;
  return draft_append(&draft);
}

kvpool_status kvpool_step_add_load(kvpool_step *step, const kvpool_layer *layer, uint32_t segments, uint64_t total_k,
                                   const kvpool_view *out, const kvpool_view *out_scales, kvpool_error *error) {
  return kvpool_step_add_load_flags(step, layer, segments, total_k, out, out_scales, 0, error);
}

kvpool_status kvpool_step_add_load_flags(kvpool_step *step, const kvpool_layer *layer, uint32_t segments,
                                         uint64_t total_k, const kvpool_view *out, const kvpool_view *out_scales,
                                         uint32_t flags, kvpool_error *error) {
  assert(out != NULL && (flags & ~(uint32_t)KVPOOL_ALLOW_STORE_BEFORE_LOAD) == 0);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_LOAD, error);
  Kvpool__V1__LoadOp load = KVPOOL__V1__LOAD_OP__INIT;
  load.region = draft_layer(&draft, layer);
  load.segments = draft_array(&draft, "segments", segments);
  load.total_k = total_k;
  load.out = draft_view(&draft, out);
  load.out_scales = draft_view(&draft, out_scales);
  load.allow_store_before_load = (flags & KVPOOL_ALLOW_STORE_BEFORE_LOAD) != 0;
  draft.op.load = &load;
  return draft_append(&draft);
}

/* ---- assemble ---------------------------------------------------------------------------------------------------
 */

static Kvpool__V1__AssembleSwa *draft_swa(struct op_draft *draft, const kvpool_assemble_swa *swa,
                                          Kvpool__V1__AssembleSwa *message) {
  if (swa == NULL) {
    return NULL;
  }
  kvpool__v1__assemble_swa__init(message);
  message->region = draft_layer(draft, &swa->layer);
  message->segments = draft_array(draft, "swa.segments", swa->segments);
  message->total_k = swa->total_k;
  return message;
}

static Kvpool__V1__AssembleChunk *draft_chunk(struct op_draft *draft, const kvpool_assemble_chunk *chunk,
                                              Kvpool__V1__AssembleChunk *message) {
  if (chunk == NULL) {
    return NULL;
  }
  kvpool__v1__assemble_chunk__init(message);
  if (chunk->source != NULL) {
    message->rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_SOURCE;
    message->source = draft_view(draft, chunk->source);
  } else {
    message->rows_case = KVPOOL__V1__ASSEMBLE_CHUNK__ROWS_RESERVED;
    message->reserved = chunk->reserved;
  }
  if (chunk->gather != NULL) {
    message->optional_gather_case = KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_GATHER_GATHER;
    message->gather = draft_array(draft, "chunk.gather", *chunk->gather);
  }
  if (chunk->store_slots != NULL) {
    message->optional_store_slots_case = KVPOOL__V1__ASSEMBLE_CHUNK__OPTIONAL_STORE_SLOTS_STORE_SLOTS;
    message->store_slots = draft_array(draft, "chunk.store_slots", *chunk->store_slots);
  }
  message->cast_back = chunk->cast_back;
  message->region = chunk->layer == NULL ? NULL : draft_layer(draft, chunk->layer);
  return message;
}

static Kvpool__V1__AssembleCompressed *draft_compressed(struct op_draft *draft,
                                                        const kvpool_assemble_compressed *compressed,
                                                        Kvpool__V1__AssembleCompressed *message) {
  if (compressed == NULL) {
    return NULL;
  }
  kvpool__v1__assemble_compressed__init(message);
  message->region = draft_layer(draft, &compressed->layer);
  message->segments = draft_array(draft, "compressed.segments", compressed->segments);
  message->total_k = compressed->total_k;
  message->keep_compressed = compressed->keep_compressed;
  return message;
}

kvpool_status kvpool_step_add_assemble(kvpool_step *step, const kvpool_view *out, const kvpool_assemble_swa *swa,
                                       const kvpool_assemble_chunk *chunk,
                                       const kvpool_assemble_compressed *compressed, uint32_t flags,
                                       kvpool_error *error) {
  assert(out != NULL && (flags & ~(uint32_t)KVPOOL_ALLOW_STORE_BEFORE_LOAD) == 0);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_ASSEMBLE, error);
  Kvpool__V1__AssembleOp assemble = KVPOOL__V1__ASSEMBLE_OP__INIT;
  Kvpool__V1__AssembleSwa swa_message;
  Kvpool__V1__AssembleChunk chunk_message;
  Kvpool__V1__AssembleCompressed compressed_message;
  assemble.out = draft_view(&draft, out);
  assemble.swa = draft_swa(&draft, swa, &swa_message);
  assemble.chunk = draft_chunk(&draft, chunk, &chunk_message);
  assemble.compressed = draft_compressed(&draft, compressed, &compressed_message);
  assemble.allow_store_before_load = (flags & KVPOOL_ALLOW_STORE_BEFORE_LOAD) != 0;
  draft.op.assemble = &assemble;
  return draft_append(&draft);
}

/* ---- fused store ------------------------------------------------------------------------------------------------
 */

kvpool_status kvpool_step_add_fused_store(kvpool_step *step, const kvpool_fused_store *fused, kvpool_error *error) {
  assert(fused != NULL);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_FUSED_STORE, error);
  Kvpool__V1__FusedStoreOp message = KVPOOL__V1__FUSED_STORE_OP__INIT;
  message.region = draft_layer(&draft, &fused->layer);
  draft.elements = draft.status == KVPOOL_OK ? kvp_layer_elements(&fused->layer) : 0;
  message.source = draft_view(&draft, &fused->source);
  message.norm_weight = draft_view(&draft, &fused->norm_weight);
  message.eps = fused->eps;
  message.slots = draft_array(&draft, "slots", fused->slots);
  message.positions = draft_array(&draft, "positions", fused->positions);
  message.cos_sin = draft_view(&draft, fused->cos_sin);
  if (fused->rope_offset != NULL) {
    message.optional_rope_offset_case = KVPOOL__V1__FUSED_STORE_OP__OPTIONAL_ROPE_OFFSET_ROPE_OFFSET;
    message.rope_offset = *fused->rope_offset;
  }
  message.neox = fused->neox;
  message.hadamard = fused->hadamard;
  message.keep_float32 = fused->keep_float32;
  message.cast_back = draft_view(&draft, fused->cast_back);
  draft.op.fused_store = &message;
  return draft_append(&draft);
}

/* ---- indices ----------------------------------------------------------------------------------------------------
 */

kvpool_status kvpool_step_add_convert_kv_index(kvpool_step *step, const kvpool_layer *layer,
                                               const kvpool_matrix *topk, uint32_t block_tables,
                                               uint32_t table_columns, uint32_t valid, uint32_t queries,
                                               const kvpool_view *out, kvpool_error *error) {
  assert(topk != NULL);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_CONVERT_KV_INDEX, error);
  Kvpool__V1__ConvertKvIndexOp convert = KVPOOL__V1__CONVERT_KV_INDEX_OP__INIT;
  Kvpool__V1__Matrix topk_message;
  convert.region = draft_layer(&draft, layer);
  convert.topk = draft_matrix(&draft, "topk", topk, &topk_message);
  convert.block_tables = draft_array(&draft, "block_tables", block_tables);
  convert.valid = draft_array(&draft, "valid", valid);
  convert.queries = queries;
  convert.table_columns = table_columns;
  convert.out = draft_view(&draft, out);
  draft.op.convert_kv_index = &convert;
  return draft_append(&draft);
}

kvpool_status kvpool_step_add_swa_index_decode(kvpool_step *step, const kvpool_layer *layer, uint32_t offset_len,
                                               uint32_t window, const kvpool_view *out, kvpool_error *error) {
  assert(out != NULL);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_SWA_INDEX_DECODE, error);
  Kvpool__V1__SwaIndexDecodeOp decode = KVPOOL__V1__SWA_INDEX_DECODE_OP__INIT;
  decode.region = draft_layer(&draft, layer);
  decode.offset_len = draft_array(&draft, "offset_len", offset_len);
  decode.window = window;
  decode.out = draft_view(&draft, out);
  draft.op.swa_index_decode = &decode;
  return draft_append(&draft);
}

kvpool_status kvpool_step_add_expand_swa_index(kvpool_step *step, uint32_t pivots, uint32_t width,
                                               const kvpool_view *out, kvpool_error *error) {
  assert(out != NULL);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_EXPAND_SWA_INDEX, error);
  Kvpool__V1__ExpandSwaIndexOp expand = KVPOOL__V1__EXPAND_SWA_INDEX_OP__INIT;
  expand.pivots = draft_array(&draft, "pivots", pivots);
  expand.width = width;
  expand.out = draft_view(&draft, out);
  draft.op.expand_swa_index = &expand;
  return draft_append(&draft);
}

kvpool_status kvpool_step_add_kv_index_cat(kvpool_step *step, const kvpool_matrix *left, uint32_t left_columns,
                                           const kvpool_matrix *right, uint32_t right_columns, int32_t right_base,
                                           const kvpool_view *out, kvpool_error *error) {
  assert(out != NULL);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_KV_INDEX_CAT, error);
  Kvpool__V1__KvIndexCatOp cat = KVPOOL__V1__KV_INDEX_CAT_OP__INIT;
  Kvpool__V1__Matrix left_message;
  Kvpool__V1__Matrix right_message;
  cat.left = draft_matrix(&draft, "left", left, &left_message);
  cat.right = draft_matrix(&draft, "right", right, &right_message);
  cat.left_columns = left_columns;
  cat.right_columns = right_columns;
  cat.right_base = right_base;
  cat.out = draft_view(&draft, out);
  draft.op.kv_index_cat = &cat;
  return draft_append(&draft);
}

/* ---- blocks -----------------------------------------------------------------------------------------------------
 */

kvpool_status kvpool_step_add_copy_blocks(kvpool_step *step, const kvpool_pool *pool, uint32_t pairs,
                                          kvpool_error *error) {
  assert(pool != NULL);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_COPY_BLOCKS, error);
  Kvpool__V1__CopyBlocksOp copy = KVPOOL__V1__COPY_BLOCKS_OP__INIT;
  copy.pool_id = kvpool_pool_id(pool);
  copy.pairs = draft_array(&draft, "pairs", pairs);
  draft.op.copy_blocks = &copy;
  return draft_append(&draft);
}

kvpool_status kvpool_step_add_zero_blocks(kvpool_step *step, const kvpool_pool *pool, uint32_t blocks,
                                          kvpool_error *error) {
  assert(pool != NULL);
  struct op_draft draft = draft_begin(step, KVPOOL__V1__OP__OP_ZERO_BLOCKS, error);
  Kvpool__V1__ZeroBlocksOp zero = KVPOOL__V1__ZERO_BLOCKS_OP__INIT;
  zero.pool_id = kvpool_pool_id(pool);
  zero.blocks = draft_array(&draft, "blocks", blocks);
  draft.op.zero_blocks = &zero;
  return draft_append(&draft);
}
