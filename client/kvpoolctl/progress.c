/* A bar on standard error. What is over in a blink shows none. */
#include "client/kvpoolctl/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "client/kvpoolctl/text.h"

enum { first_after_ms = 300, again_after_ms = 100, bar_cells_max = 40, text_width = 50, width_default = 80 };

static uint64_t now_ns(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_MONOTONIC, &now); /* it can't fail for this clock */
  return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

void kvp_ctl_progress_init(struct kvp_ctl_progress *progress, const char *what, uint64_t total_bytes, bool quiet) {
  *progress = (struct kvp_ctl_progress){.what = what, .total_bytes = total_bytes, .started_ns = now_ns()};
  const char *term = getenv("TERM");
  progress->is_shown = !quiet && isatty(STDERR_FILENO) == 1 && term != NULL && strcmp(term, "dumb") != 0;
  struct winsize size = {0};
  (void)ioctl(STDERR_FILENO, TIOCGWINSZ, &size);
  progress->width = size.ws_col > 0 ? size.ws_col : (uint32_t)width_default;
}

void kvp_ctl_progress_set(struct kvp_ctl_progress *progress, uint64_t done_bytes) {
  if (!progress->is_shown || progress->total_bytes == 0) {
    return;
  }
  uint64_t now = now_ns();
  uint64_t since = progress->drawn_ns == 0 ? progress->started_ns : progress->drawn_ns;
  uint64_t wait_ms = progress->drawn_ns == 0 ? first_after_ms : again_after_ms;
  if (now - since < wait_ms * 1000000) {
    return;
  }
  progress->drawn_ns = now;
  char bar[bar_cells_max + 1];
  uint32_t cells = progress->width > text_width + bar_cells_max ? (uint32_t)bar_cells_max
                   : progress->width > text_width               ? progress->width - text_width
                                                                : 0;
  double share = (double)done_bytes / (double)progress->total_bytes;
  for (uint32_t i = 0; i < cells; i++) {
    bar[i] = i < (uint32_t)(share * cells) ? '#' : '.';
  }
  bar[cells] = '\0';
  double seconds = (double)(now - progress->started_ns) / 1e9;
  uint64_t left_ns = share > 0 ? (uint64_t)((seconds / share - seconds) * 1e9) : 0;
  (void)fprintf(stderr, "\r%s [%s] %3.0f %%  %s/s  %s left \033[K", progress->what, bar, 100 * share,
                kvp_ctl_bytes((uint64_t)((double)done_bytes / seconds)).text, kvp_ctl_duration(left_ns).text);
  (void)fflush(stderr);
}

void kvp_ctl_progress_end(struct kvp_ctl_progress *progress) {
  if (progress->drawn_ns != 0) {
    (void)fputs("\r\033[K", stderr);
    (void)fflush(stderr);
  }
}
