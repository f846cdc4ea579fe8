/* Runs of neighbouring pages out of a fixed number of them. One thread; a page is whatever the caller makes of it. */
#ifndef KVPOOL_EXECUTOR_PAGE_RUNS_H
#define KVPOOL_EXECUTOR_PAGE_RUNS_H

#include <stdbool.h>
#include <stdint.h>

struct kvp_page_runs {
  uint64_t *used; /* [page_count / 64], one bit a page */
  uint32_t page_count;
  uint32_t next; /* where the search begins: behind the run that was taken last */
};

#define KVP_NO_PAGES UINT32_MAX

/* page_count: a multiple of 64. False when the host has no memory. */
bool kvp_page_runs_init(struct kvp_page_runs *runs, uint32_t page_count);
void kvp_page_runs_deinit(struct kvp_page_runs *runs);

/* The first page of `count` > 0 pages in a row that are taken from here on; KVP_NO_PAGES: there are not that many. */
uint32_t kvp_page_runs_take(struct kvp_page_runs *runs, uint32_t count);
void kvp_page_runs_give(struct kvp_page_runs *runs, uint32_t first, uint32_t count);

#endif
