/* What the files of `kvpoolctl walkthrough` share: its lengths, its two regions, and figures that were worked out on
 * paper. One thread.
 *
 * seqlen_k 10000, seqlen_q 1024, block size 64, ratio 4, window = ring = 4096: 2500 compressed tokens in 157 blocks,
 * and a window of 4096 tokens that begins at 784 of the ring and wraps. Every expected figure is arithmetic on these
 * lengths. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_WALKTHROUGH_H
#define KVPOOL_CLIENT_KVPOOLCTL_WALKTHROUGH_H

#include "client/kvpoolctl/ctl.h"
#include "client/kvpoolctl/latents.h"

enum kvp_walk_lengths {
  kvp_walk_elements = 512,
  kvp_walk_row_bytes = 2 * kvp_walk_elements,
  kvp_walk_record_bytes = 528,
  kvp_walk_seqlen_k = 10000,
  kvp_walk_seqlen_q = 1024,
  kvp_walk_block_size = 64,
  kvp_walk_ratio = 4,
  kvp_walk_per_block = kvp_walk_block_size / kvp_walk_ratio,
  kvp_walk_ring = 4096,
  kvp_walk_ring_layers = 2, /* the second one shares the compressed part of the first */
  kvp_walk_compressed = 2500,
  kvp_walk_blocks = 157,
  kvp_walk_history_end = kvp_walk_seqlen_k - kvp_walk_seqlen_q,
  kvp_walk_history_begin = kvp_walk_history_end - kvp_walk_ring,
  kvp_walk_ring_begin = kvp_walk_history_begin % kvp_walk_ring,
  kvp_walk_parts = 2,
  kvp_walk_figures_max = 32,
  kvp_walk_figure_values_max = 4,
};

/* One region, what is stored to it and loaded from it, in logical order. */
struct kvp_walk_part {
  const char *name;
  char pool_name[64]; /* temporary, of a name that nobody else has; "": not asked for */
  kvpool_pool *pool;  /* NULL: not made, or not known whether */
  uint32_t layers;    /* that are given the same rows; the first one's are loaded */
  uint64_t rows;
  size_t segments_max;
  kvpool_segment *segments;
  size_t segment_count;
  int32_t *slots;   /* [rows] */
  uint16_t *source; /* [rows, elements] */
  uint16_t *loaded;
  kvpool_op_report store;
  kvpool_op_report load;
  struct kvp_ctl_difference difference;
  char failure[160]; /* "" when it passed */
  bool may_appear;   /* its making was not answered */
  bool is_left;      /* the pool is still there, or may be */
};

/* A few numbers, and what they are on paper. */
struct kvp_walk_figure {
  const char *name;
  uint32_t count;
  int64_t values[kvp_walk_figure_values_max];
  int64_t expected[kvp_walk_figure_values_max];
};

struct kvp_walk {
  struct kvp_ctl *ctl;
  const char *device; /* NULL: the first */
  kvpool_session *session;
  uint64_t seed;
  uint64_t token; /* in the pools' names */
  struct kvp_walk_part parts[kvp_walk_parts];
  int32_t table[kvp_walk_blocks]; /* the sequence's blocks */
  int32_t state;                  /* its ring */
  struct kvp_walk_figure figures[kvp_walk_figures_max];
  uint32_t figure_count;
};

/* Each gives an exit status with the error told. The pools, and every row that the sequence has before this chunk,
 * stored and loaded by plans: what comes back is held against its source. */
int kvp_walk_parts_run(struct kvp_walk *walk);
/* Then a prefill step of the chunk's 1024 tokens, for both layers, and a decode step of one token. */
int kvp_walk_steps_run(struct kvp_walk *walk);

/* Behind the session's end. */
int kvp_walk_part_delete(const struct kvp_walk *walk, struct kvp_walk_part *part);
void kvp_walk_part_deinit(struct kvp_walk_part *part);

/* values, expected: [count]. */
void kvp_walk_figure_add(struct kvp_walk *walk, const char *name, uint32_t count, const int64_t *values,
                         const int64_t *expected);
bool kvp_walk_figure_holds(const struct kvp_walk_figure *figure);

#endif
