/* A bitmap searched from behind the last run on, so that short-lived runs are found at the first look. */
#include "server/executor/page_runs.h"

#include <assert.h>
#include <stdlib.h>

enum { word_pages = 64 };

bool kvp_page_runs_init(struct kvp_page_runs *runs, uint32_t page_count) {
  assert(page_count > 0 && page_count % word_pages == 0);
  *runs = (struct kvp_page_runs){.page_count = page_count};
  runs->used = calloc(page_count / word_pages, sizeof *runs->used);
  return runs->used != NULL;
}

void kvp_page_runs_deinit(struct kvp_page_runs *runs) {
  free(runs->used);
  *runs = (struct kvp_page_runs){0};
}

static bool is_used(const struct kvp_page_runs *runs, uint32_t page) {
  return (runs->used[page / word_pages] >> page % word_pages & 1) != 0;
}

/* The first run of free pages from `begin` on. */
static uint32_t run_find(const struct kvp_page_runs *runs, uint32_t begin, uint32_t count) {
  uint32_t length = 0;
  for (uint32_t page = begin; page < runs->page_count;) {
    if (page % word_pages == 0 && runs->used[page / word_pages] == UINT64_MAX) {
      length = 0;
      page += word_pages;
      continue;
    }
    length = is_used(runs, page) ? 0 : length + 1;
    page++;
    if (length == count) {
      return page - count;
    }
  }
  return KVP_NO_PAGES;
}

static void run_flip(struct kvp_page_runs *runs, uint32_t first, uint32_t count) {
  for (uint32_t page = first; page < first + count; page++) {
    runs->used[page / word_pages] ^= UINT64_C(1) << page % word_pages;
  }
}

uint32_t kvp_page_runs_take(struct kvp_page_runs *runs, uint32_t count) {
  assert(count > 0);
  uint32_t first = run_find(runs, runs->next, count);
  if (first == KVP_NO_PAGES) {
    first = run_find(runs, 0, count);
  }
  if (first != KVP_NO_PAGES) {
    run_flip(runs, first, count);
    runs->next = first + count;
  }
  return first;
}

void kvp_page_runs_give(struct kvp_page_runs *runs, uint32_t first, uint32_t count) {
  assert(count > 0 && count <= runs->page_count && first <= runs->page_count - count);
  assert(is_used(runs, first) && is_used(runs, first + count - 1));
  run_flip(runs, first, count);
}
