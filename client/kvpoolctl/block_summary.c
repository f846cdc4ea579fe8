/* Who holds how much of a pool. Linear in the runs, and a sort of the owners. */
#include "client/kvpoolctl/block_summary.h"

#include <stdlib.h>

bool kvp_ctl_block_run_clip(const kvpool_block_run *run, uint32_t first, uint32_t end, kvpool_block_run *out) {
  uint64_t run_end = (uint64_t)run->first_block + run->count;
  uint32_t begin = run->first_block > first ? run->first_block : first;
  uint32_t stop = run_end < end ? (uint32_t)run_end : end;
  if (begin >= stop) {
    return false;
  }
  *out = *run;
  out->first_block = begin;
  out->count = stop - begin;
  return true;
}

static int owner_compare(const void *left, const void *right) {
  const struct kvp_ctl_block_owner *a = left;
  const struct kvp_ctl_block_owner *b = right;
  return a->session_id < b->session_id ? -1 : a->session_id > b->session_id ? 1 : 0;
}

size_t kvp_ctl_block_summary_owner(const struct kvp_ctl_block_summary *summary, uint64_t session_id) {
  const struct kvp_ctl_block_owner key = {.session_id = session_id};
  const struct kvp_ctl_block_owner *found =
      summary->owner_count == 0 ? NULL
                                : bsearch(&key, summary->owners, summary->owner_count, sizeof key, owner_compare);
  return found == NULL ? summary->owner_count : (size_t)(found - summary->owners);
}

/* One entry a session, from entries in any order. */
static void owners_merge(struct kvp_ctl_block_summary *summary) {
  if (summary->owner_count == 0) {
    return;
  }
  qsort(summary->owners, summary->owner_count, sizeof summary->owners[0], owner_compare);
  size_t kept = 0;
  for (size_t i = 1; i < summary->owner_count; i++) {
    if (summary->owners[i].session_id == summary->owners[kept].session_id) {
      summary->owners[kept].blocks += summary->owners[i].blocks;
    } else {
      summary->owners[++kept] = summary->owners[i];
    }
  }
  summary->owner_count = kept + 1;
}

void kvp_ctl_block_summary_init(struct kvp_ctl_block_summary *summary, const kvpool_block_map *map,
                                const kvpool_session_list *sessions, uint32_t first, uint32_t end) {
  size_t run_count = kvpool_block_map_run_count(map);
  *summary = (struct kvp_ctl_block_summary){.owners = kvp_ctl_allocate(run_count, sizeof summary->owners[0])};
  uint64_t free_run = 0;
  for (size_t i = 0; i < run_count; i++) {
    kvpool_block_run run;
    if (!kvp_ctl_block_run_clip(kvpool_block_map_run(map, i), first, end, &run)) {
      continue;
    }
    summary->total += run.count;
    summary->by_state[run.state & 3] += run.count;
    /* Free blocks that were last given out at different times come as runs of their own. */
    bool is_free = run.state == KVPOOL_BLOCK_FREE;
    summary->free_runs += is_free && free_run == 0;
    free_run = is_free ? free_run + run.count : 0;
    summary->free_run_longest = free_run > summary->free_run_longest ? free_run : summary->free_run_longest;
    if (!is_free && run.session_id != 0) {
      summary->owners[summary->owner_count++] =
          (struct kvp_ctl_block_owner){.session_id = run.session_id, .name = "", .blocks = run.count};
    }
  }
  owners_merge(summary);
  for (size_t i = 0; i < kvpool_session_list_count(sessions); i++) {
    const kvpool_session_info *session = kvpool_session_list_item(sessions, i);
    size_t owner = kvp_ctl_block_summary_owner(summary, session->session_id);
    if (owner < summary->owner_count) {
      summary->owners[owner].name = session->name;
    }
  }
}

void kvp_ctl_block_summary_deinit(struct kvp_ctl_block_summary *summary) {
  free(summary->owners);
}
