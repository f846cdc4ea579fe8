/* Structured log lines. Any thread: a line is built on the caller's stack and written with one write(2). */
#include "server/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {"debug", "info", "warning", "error"};
enum { level_count = sizeof level_names / sizeof level_names[0] };

static _Atomic int level_least = KVP_LOG_INFO;

void kvp_log_set_level(enum kvp_log_level level) {
  atomic_store_explicit(&level_least, (int)level, memory_order_relaxed);
}

bool kvp_log_level_parse(const char *name, enum kvp_log_level *out) {
  for (int i = 0; i < level_count; i++) {
    if (strcmp(name, level_names[i]) == 0) {
      *out = (enum kvp_log_level)i;
      return true;
    }
  }
  return false;
}

/* "2026-01-31T12:00:00.123456Z level event" and what there was room for. */
static size_t line_begin(char *line, size_t capacity, enum kvp_log_level level, const char *event) {
  struct timespec now = {0};
  struct tm utc = {0};
  (void)clock_gettime(CLOCK_REALTIME, &now);
  (void)gmtime_r(&now.tv_sec, &utc);
  int length =
      snprintf(line, capacity, "%04d-%02d-%02dT%02d:%02d:%02d.%06ldZ %s %s", utc.tm_year + 1900, utc.tm_mon + 1,
               utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, now.tv_nsec / 1000, level_names[level], event);
  if (length < 0) {
    return 0;
  }
  return (size_t)length < capacity ? (size_t)length : capacity - 1;
}

void kvp_log(enum kvp_log_level level, const char *event, const char *format, ...) {
  if ((int)level < atomic_load_explicit(&level_least, memory_order_relaxed)) {
    return;
  }
  char line[kvp_log_line_bytes_max];
  const size_t capacity = sizeof line; /* the newline takes the NUL's place at most */
  size_t length = line_begin(line, capacity, level, event);
  if (length + 2 < capacity) {
    line[length++] = ' ';
    va_list arguments;
    va_start(arguments, format);
    int added = vsnprintf(line + length, capacity - length, format, arguments);
    va_end(arguments);
    if (added >= 0 && (size_t)added >= capacity - length) {
      length = capacity - 1;
      (void)snprintf(line + length - 3, 4, "...");
    } else if (added >= 0) {
      length += (size_t)added;
    }
  }
  for (size_t i = 0; i < length; i++) {
    if ((unsigned char)line[i] < 0x20 || line[i] == 0x7F) {
      line[i] = '?';
    }
  }
  line[length++] = '\n';
  /* Nobody is left to tell when standard error is gone. */
  ssize_t ignored = write(STDERR_FILENO, line, length);
  (void)ignored;
}
