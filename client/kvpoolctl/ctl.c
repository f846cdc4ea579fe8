/* Connection, memory and output: what the commands have in common. */
#include "client/kvpoolctl/ctl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/text.h"

const struct kvp_ctl *kvp_ctl_this;

int kvp_ctl_connect(struct kvp_ctl *ctl) {
  const kvpool_connect_options options = {.size_bytes = sizeof options, .timeout_ms = ctl->timeout_ms};
  kvpool_error error;
  kvp_ctl_interrupt_watch(ctl);
  if (kvpool_client_connect(ctl->socket, &options, &ctl->client, &error) == KVPOOL_OK) {
    kvp_ctl_interrupt_client(ctl->client);
    return KVP_CTL_OK;
  }
  ctl->client = NULL;
  if (error.status == KVPOOL_INVALID_ARGUMENT) {
    (void)kvp_ctl_fail_hint(ctl, &error, "--socket PATH or $KVPOOLD_SOCKET: the path of the daemon's unix socket");
    return KVP_CTL_USAGE;
  }
  int exit_status = kvp_ctl_fail(ctl, &error);
  /* A socket that this user may not open, or where nobody answers, is as unreachable as none. */
  return error.status == KVPOOL_PERMISSION_DENIED || error.status == KVPOOL_DEADLINE_EXCEEDED ? KVP_CTL_UNREACHABLE
                                                                                              : exit_status;
}

static void *check(void *memory) {
  if (memory == NULL) {
    (void)fputs("kvpoolctl: out of memory\n", stderr);
    exit(KVP_CTL_FAILED);
  }
  return memory;
}

void *kvp_ctl_allocate(size_t count, size_t size) {
  return check(calloc(count == 0 ? 1 : count, size));
}

void *kvp_ctl_reallocate(void *memory, size_t count, size_t size) {
  return check(reallocarray(memory, count, size));
}

static char *format_clean(const char *format, va_list arguments, const struct kvp_ctl_terminal *keep) {
  char *text = NULL;
  (void)check(vasprintf(&text, format, arguments) < 0 ? NULL : text);
  char *clean = kvp_ctl_clean(text, keep);
  free(text);
  return clean;
}

void kvp_ctl_print(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char *text = format_clean(format, arguments, &kvp_ctl_this->terminal);
  va_end(arguments);
  (void)fputs(text, stdout);
  free(text);
}

void kvp_ctl_warn(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char *text = format_clean(format, arguments, NULL);
  va_end(arguments);
  (void)fprintf(stderr, "kvpoolctl: %s\n", text);
  free(text);
}
