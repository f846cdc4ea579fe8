/* The command lines of the plan commands, and the segments they print. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_PLAN_ARGUMENTS_H
#define KVPOOL_CLIENT_KVPOOLCTL_PLAN_ARGUMENTS_H

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/number.h"

enum {
  kvp_ctl_plan_tokens = 0x100,
  kvp_ctl_plan_table,
  kvp_ctl_plan_per_block,
  kvp_ctl_plan_destination,
  kvp_ctl_plan_sequence,
  kvp_ctl_plan_ratio,
  kvp_ctl_plan_ring_sequence,
  kvp_ctl_plan_window,
  kvp_ctl_plan_ring,
  kvp_ctl_plan_chunk,
  kvp_ctl_plan_ranks,
  kvp_ctl_plan_sequences_max = 1024,
  kvp_ctl_plan_rows_max = 1 << 24, /* a table of that many lines is nobody's to read */
};

struct kvp_ctl_plan_arguments {
  const struct kvp_ctl_command *command;
  struct kvp_ctl_list table;
  uint64_t begin, end; /* tokens */
  bool has_tokens;
  uint64_t per_block;
  uint64_t destination;
  uint64_t ratio;
  kvpool_sequence sequences[kvp_ctl_plan_sequences_max];
  struct kvp_ctl_list tables[kvp_ctl_plan_sequences_max];
  kvpool_swa_sequence rings[kvp_ctl_plan_sequences_max];
  int64_t chunks[kvp_ctl_plan_sequences_max];
  size_t sequence_count; /* of whichever of these the command takes */
  bool has_rings;        /* that is rings */
  uint64_t window;
  uint64_t ring;
  uint64_t ranks;
  int64_t total_k; /* of the plan that was made */
};

error_t kvp_ctl_plan_take(int key, char *value, void *arguments, const struct argp_state *state);
/* The block table of `tokens` tokens where none was given: consecutive blocks from *next on, which it moves on.
 * False: more than a list holds. */
bool kvp_ctl_plan_table_default(struct kvp_ctl_list *table, uint64_t tokens, uint64_t per_block, int32_t *next);

/* How many of the first items run on, each one more than the one before it, or are all -1. count > 0. */
size_t kvp_ctl_plan_run(const int32_t *items, size_t count);

void kvp_ctl_plan_segments_print(const struct kvp_ctl *ctl, const kvpool_segment *segments, size_t count);

#endif
