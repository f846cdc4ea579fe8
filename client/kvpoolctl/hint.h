/* Errors: what is wrong on the first line of standard error, what to do next on the second. With --json the same goes
 * to standard output as {"error": {...}}, so that a program always finds one document there. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_HINT_H
#define KVPOOL_CLIENT_KVPOOLCTL_HINT_H

#include "client/kvpoolctl/ctl.h"

/* Of the library. Returns the exit status that goes with it. */
int kvp_ctl_fail(const struct kvp_ctl *ctl, const kvpool_error *error);
/* The same with a hint of the caller's. */
int kvp_ctl_fail_hint(const struct kvp_ctl *ctl, const kvpool_error *error, const char *hint);
/* Of our own, KVP_CTL_FAILED. hint NULL: there is nothing to advise. */
int kvp_ctl_refuse(const struct kvp_ctl *ctl, const char *hint, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
