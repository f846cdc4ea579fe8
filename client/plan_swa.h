/* What the planners of a sliding window share: the checks of a batch, and how much history a sequence has. */
#ifndef KVPOOL_CLIENT_PLAN_SWA_H
#define KVPOOL_CLIENT_PLAN_SWA_H

#include "client/internal.h"

/* A length of the batch, in [1, 2^31). */
kvpool_status kvp_plan_check_length(const char *name, uint32_t tokens, kvpool_error *error);
/* Window and ring fit together; both are in [1, 2^31). */
kvpool_status kvp_plan_check_window(uint32_t window, uint32_t ring_tokens, kvpool_error *error);
/* Lengths and swa_valid_start of sequence `index`. */
kvpool_status kvp_plan_check_chunk(const kvpool_swa_sequence *sequences, size_t index, kvpool_error *error);
/* The ring of sequence `index` has no slot past int32. */
kvpool_status kvp_plan_check_ring(const kvpool_swa_sequence *sequences, size_t index, uint32_t ring_tokens,
                                  kvpool_error *error);
/* Adds the queries of sequence `index`, which is checked, to *rows: at most rows_max, which is at most 2^31 - 1. */
kvpool_status kvp_plan_add_queries(const kvpool_swa_sequence *sequences, size_t index, int64_t rows_max,
                                   int64_t *rows, kvpool_error *error);
/* `needed` elements of what `what` names fit into out. */
kvpool_status kvp_plan_check_room(const char *what, size_t needed, size_t out_max, kvpool_error *error);

/* Tokens before the chunk that the window reaches and the ring was given. */
static inline int32_t kvp_plan_history_rows(const kvpool_swa_sequence *sequence, uint32_t window) {
  int64_t history_end = sequence->seqlen_k - sequence->seqlen_q;
  if (sequence->swa_valid_start >= history_end) {
    return 0;
  }
  int64_t valid = history_end - sequence->swa_valid_start;
  return (int32_t)(valid < window ? valid : window);
}

#endif
