/* Planners of the compressed cache of a prefill batch. Pure functions: any thread, no allocation. */
#include <assert.h>
#include <stdio.h>

#include "client/internal.h"

enum { label_bytes_max = 32 };

static void label_of(size_t sequence, char out[label_bytes_max]) {
  (void)snprintf(out, label_bytes_max, "sequence %zu: ", sequence);
}

static kvpool_status lengths_check(int64_t seqlen_k, int64_t seqlen_q, uint32_t ratio, const char *label,
                                   kvpool_error *error) {
  if (ratio == 0) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "ratio", -1, 0, "the compression ratio is 0");
  }
  if (seqlen_q < 0 || seqlen_q > seqlen_k) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "seqlen_q", -1, seqlen_q,
                       "%sseqlen_q = %lld is not in [0, seqlen_k = %lld]", label, (long long)seqlen_q,
                       (long long)seqlen_k);
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_plan_new_compressed(int64_t seqlen_k, int64_t seqlen_q, uint32_t ratio, int64_t *token_begin,
                                         int64_t *token_end, kvpool_error *error) {
  assert(token_begin != NULL && token_end != NULL);
  kvpool_status status = lengths_check(seqlen_k, seqlen_q, ratio, "", error);
  if (status == KVPOOL_OK) {
    *token_begin = (seqlen_k - seqlen_q) / ratio;
    *token_end = seqlen_k / ratio;
  }
  return status;
}

/* Rows of a sequence in the plan: its compressed tokens, or one zero row. */
static int64_t sequence_rows(const kvpool_sequence *sequence, uint32_t ratio) {
  int64_t tokens = sequence->seqlen_k / ratio;
  return tokens == 0 ? 1 : tokens;
}

/* Everything that can be wrong, so that nothing is written when something is. */
static kvpool_status batch_check(const kvpool_sequence *sequences, size_t sequence_count, uint32_t ratio,
                                 uint32_t tokens_per_block, size_t *segment_count, int64_t *row_count,
                                 kvpool_error *error) {
  size_t segments = 0;
  int64_t rows = 0;
  for (size_t i = 0; i < sequence_count; i++) {
    const kvpool_sequence *sequence = &sequences[i];
    char label[label_bytes_max];
    label_of(i, label);
    assert(sequence->block_table != NULL || sequence->table_count == 0);
    kvpool_status status = lengths_check(sequence->seqlen_k, sequence->seqlen_q, ratio, label, error);
    if (status == KVPOOL_OK) {
      status = kvp_plan_check_range(sequence->block_table, sequence->table_count, tokens_per_block, 0,
                                    sequence->seqlen_k / ratio, label, error);
    }
    if (status != KVPOOL_OK) {
      return status;
    }
    int64_t tokens = sequence->seqlen_k / ratio;
    segments += tokens == 0 ? 1 : kvp_plan_range_segments(tokens_per_block, 0, tokens);
    if (__builtin_add_overflow(rows, sequence_rows(sequence, ratio), &rows) || rows > INT32_MAX) {
      return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "seqlen_k", (int64_t)i, sequence->seqlen_k,
                         "%sseqlen_k = %lld at ratio %u: the plan's rows pass 2^31 - 1", label,
                         (long long)sequence->seqlen_k, ratio);
    }
  }
  *segment_count = segments;
  *row_count = rows;
  return KVPOOL_OK;
}

kvpool_status kvpool_plan_compressed(const kvpool_sequence *sequences, size_t sequence_count, uint32_t ratio,
                                     uint32_t tokens_per_block, int32_t *cu_seqlens, kvpool_segment *out,
                                     size_t out_max, size_t *count, int64_t *total_k, kvpool_error *error) {
  assert((sequences != NULL || sequence_count == 0) && count != NULL);
  size_t needed = 0;
  int64_t rows = 0;
  kvpool_status status = batch_check(sequences, sequence_count, ratio, tokens_per_block, &needed, &rows, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (out != NULL && needed > out_max) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "out", -1, (int64_t)needed, "%zu segments, room for %zu", needed,
                       out_max);
  }
  int32_t dst = 0;
  for (size_t i = 0; i < sequence_count; i++) {
    const kvpool_sequence *sequence = &sequences[i];
    int64_t tokens = sequence->seqlen_k / ratio;
    if (cu_seqlens != NULL) {
      cu_seqlens[i] = dst;
    }
    if (out != NULL && tokens == 0) {
      *out++ = (kvpool_segment){.src_block = -1, .src_begin = 0, .src_end = 1, .dst_offset = dst};
    } else if (out != NULL) {
      kvp_plan_fill_range(sequence->block_table, tokens_per_block, 0, tokens, dst, out);
      out += kvp_plan_range_segments(tokens_per_block, 0, tokens);
    }
    dst = (int32_t)(dst + sequence_rows(sequence, ratio)); /* <= rows, which fits */
  }
  if (cu_seqlens != NULL) {
    cu_seqlens[sequence_count] = dst;
  }
  if (total_k != NULL) {
    *total_k = rows;
  }
  *count = needed;
  return KVPOOL_OK;
}

/* cu_seqlens is that of this batch, and the queries fit into the outputs. */
static kvpool_status visible_check(const kvpool_sequence *sequences, size_t sequence_count, uint32_t ratio,
                                   const int32_t *cu_seqlens, size_t out_max, kvpool_error *error) {
  int64_t expected = 0, queries = 0;
  for (size_t i = 0; i < sequence_count; i++) {
    char label[label_bytes_max];
    label_of(i, label);
    kvpool_status status = lengths_check(sequences[i].seqlen_k, sequences[i].seqlen_q, ratio, label, error);
    if (status != KVPOOL_OK) {
      return status;
    }
    if (cu_seqlens[i] != expected) {
      return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "cu_seqlens", (int64_t)i, cu_seqlens[i],
                         "cu_seqlens[%zu] = %d, this batch gives %lld", i, cu_seqlens[i], (long long)expected);
    }
    if (__builtin_add_overflow(expected, sequence_rows(&sequences[i], ratio), &expected) || expected > INT32_MAX) {
      return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "seqlen_k", (int64_t)i, sequences[i].seqlen_k,
                         "%sseqlen_k = %lld at ratio %u: the plan's rows pass 2^31 - 1", label,
                         (long long)sequences[i].seqlen_k, ratio);
    }
    if (__builtin_add_overflow(queries, sequences[i].seqlen_q, &queries) || (uint64_t)queries > out_max) {
      return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "out_max", (int64_t)i, (int64_t)out_max,
                         "%sthe queries up to here don't fit into %zu", label, out_max);
    }
  }
  if (sequence_count > 0 && cu_seqlens[sequence_count] != expected) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "cu_seqlens", (int64_t)sequence_count,
                       cu_seqlens[sequence_count], "cu_seqlens[%zu] = %d, this batch gives %lld", sequence_count,
                       cu_seqlens[sequence_count], (long long)expected);
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_plan_compressed_visible(const kvpool_sequence *sequences, size_t sequence_count, uint32_t ratio,
                                             const int32_t *cu_seqlens, int32_t *ks, int32_t *ke, size_t out_max,
                                             kvpool_error *error) {
  assert((sequences != NULL && cu_seqlens != NULL) || sequence_count == 0);
  assert((ks != NULL && ke != NULL) || out_max == 0);
  kvpool_status status = visible_check(sequences, sequence_count, ratio, cu_seqlens, out_max, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  for (size_t i = 0; i < sequence_count; i++) {
    int64_t tokens = sequences[i].seqlen_k / ratio;
    int64_t first = sequences[i].seqlen_k - sequences[i].seqlen_q;
    for (int64_t position = first; position < sequences[i].seqlen_k; position++) {
      int64_t complete = position / ratio + (position % ratio == ratio - 1); /* (position + 1) / ratio */
      *ks++ = cu_seqlens[i];
      *ke++ = (int32_t)(cu_seqlens[i] + (complete < tokens ? complete : tokens));
    }
  }
  return KVPOOL_OK;
}
