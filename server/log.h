/* Structured log lines on standard error: one line an event, `time level event key=value ...`.
 *
 *   2026-01-31T12:00:00.123456Z info executor_started device=host:0 pid=4711
 *
 * Any thread. A line is written with one write(2), so that lines of several processes don't mix.
 */
#ifndef KVPOOL_SERVER_LOG_H
#define KVPOOL_SERVER_LOG_H

#include <stdbool.h>

enum kvp_log_level { KVP_LOG_DEBUG, KVP_LOG_INFO, KVP_LOG_WARNING, KVP_LOG_ERROR };

enum { kvp_log_line_bytes_max = 2048 }; /* a longer line is cut and ends in "..." */

void kvp_log_set_level(enum kvp_log_level level);
/* "debug", "info", "warning", "error"; false when it is none of them. */
bool kvp_log_level_parse(const char *name, enum kvp_log_level *out);

/* event: snake_case. format: "key=%u key=%s ..."; values with spaces are the caller's to quote (see KVP_LOG_TEXT).
 * Control characters of the finished line become '?', so that no client can forge lines. */
void kvp_log(enum kvp_log_level level, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* For free text: kvp_log(KVP_LOG_INFO, "x", "text=\"%s\"", text) */

#endif
