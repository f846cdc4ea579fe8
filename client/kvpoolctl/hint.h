/* Errors: what is wrong on the first line of standard error, what to do next on the second. With --json the same goes
 * to standard output as {"error": {...}}, so that a program always finds one document there. What a signal has ended
 * is not told as an error: KVP_CTL_INTERRUPTED. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_HINT_H
#define KVPOOL_CLIENT_KVPOOLCTL_HINT_H

#include "client/kvpoolctl/ctl.h"

/* Where the daemon's socket is looked for. */
const char *kvp_ctl_socket_path(const struct kvp_ctl *ctl);

/* Of the library. Returns the exit status that goes with it. */
int kvp_ctl_fail(const struct kvp_ctl *ctl, const kvpool_error *error);
/* The same with a hint of the caller's. */
int kvp_ctl_fail_hint(const struct kvp_ctl *ctl, const kvpool_error *error, const char *hint);
/* Of a call of a session: when that ended because the daemon went away, so it is told. */
int kvp_ctl_fail_session(const struct kvp_ctl *ctl, const kvpool_session *session, const kvpool_error *error);
/* Of the command line, KVP_CTL_USAGE. */
int kvp_ctl_tell_usage(const char *hint, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* That a signal came, and what that means; the first to tell is heard. KVP_CTL_INTERRUPTED. */
int kvp_ctl_tell_interrupted(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Of our own, KVP_CTL_FAILED. hint NULL: there is nothing to advise. */
int kvp_ctl_refuse(const struct kvp_ctl *ctl, const char *hint, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
