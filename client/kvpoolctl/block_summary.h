/* Who holds how much of a pool, counted over the runs of its block map. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_BLOCK_SUMMARY_H
#define KVPOOL_CLIENT_KVPOOLCTL_BLOCK_SUMMARY_H

#include "client/kvpoolctl/ctl.h"

struct kvp_ctl_block_owner {
  uint64_t session_id;
  const char *name; /* of the session list; "" when it is gone already */
  uint64_t blocks;  /* leased, sealed and quarantined */
};

struct kvp_ctl_block_summary {
  uint64_t by_state[4]; /* [kvpool_block_state] */
  uint64_t total;
  uint64_t free_runs;
  uint64_t free_run_longest;
  struct kvp_ctl_block_owner *owners; /* [owner_count], ascending session ids */
  size_t owner_count;
};

/* sessions: names; must outlive the summary. [first, end): the blocks that count. */
void kvp_ctl_block_summary_init(struct kvp_ctl_block_summary *summary, const kvpool_block_map *map,
                                const kvpool_session_list *sessions, uint32_t first, uint32_t end);
void kvp_ctl_block_summary_deinit(struct kvp_ctl_block_summary *summary);
/* Index into owners; owner_count when nobody of them. */
size_t kvp_ctl_block_summary_owner(const struct kvp_ctl_block_summary *summary, uint64_t session_id);
/* The part of a run inside [first, end); false when there is none. */
bool kvp_ctl_block_run_clip(const kvpool_block_run *run, uint32_t first, uint32_t end, kvpool_block_run *out);

#endif
