/* A bar on standard error while something takes long; nothing at all where that is no terminal. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_PROGRESS_H
#define KVPOOL_CLIENT_KVPOOLCTL_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct kvp_ctl_progress {
  const char *what; /* "storing" */
  uint64_t total_bytes;
  uint64_t started_ns;
  uint64_t drawn_ns; /* 0: never */
  uint32_t width;
  bool is_shown;
};

/* quiet: never shown. */
void kvp_ctl_progress_init(struct kvp_ctl_progress *progress, const char *what, uint64_t total_bytes, bool quiet);
void kvp_ctl_progress_set(struct kvp_ctl_progress *progress, uint64_t done_bytes);
/* Takes the bar away. */
void kvp_ctl_progress_end(struct kvp_ctl_progress *progress);

#endif
