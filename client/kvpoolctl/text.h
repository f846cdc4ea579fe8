/* Numbers as a person reads them. The result lives until the end of the expression: kvp_ctl_bytes(n).text. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_TEXT_H
#define KVPOOL_CLIENT_KVPOOLCTL_TEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "client/kvpoolctl/terminal.h"

struct kvp_ctl_text {
  char text[96];
};

/* "16.5 MiB" */
struct kvp_ctl_text kvp_ctl_bytes(uint64_t bytes);
/* "10,000" */
struct kvp_ctl_text kvp_ctl_count(uint64_t count);
/* "3 h 12 min"; of less than a minute "12 s" */
struct kvp_ctl_text kvp_ctl_duration(uint64_t ns);
/* Since a time of the wall clock; 0 when that lies ahead. */
uint64_t kvp_ctl_age_ns(uint64_t unix_ns);
/* "62.1 %"; of nothing "-" */
struct kvp_ctl_text kvp_ctl_percent(uint64_t part, uint64_t whole);
/* A bar of 10 cells; a part that is not zero is seen. */
struct kvp_ctl_text kvp_ctl_bar(const struct kvp_ctl_terminal *terminal, uint64_t part, uint64_t whole);
/* A text of somebody else's as it may go to a terminal: what can't be printed, but for newlines and tabs, stands there
 * as \xNN. keep: a terminal whose own escape sequences stay; NULL: none. Caller frees. */
char *kvp_ctl_clean(const char *text, const struct kvp_ctl_terminal *keep);
/* What "block" wants behind it: "s", or "" for one. */
const char *kvp_ctl_plural(uint64_t count);

#endif
