/* Connection, memory and output: what the commands have in common. */
#include "client/kvpoolctl/ctl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/kvpoolctl/hint.h"

int kvp_ctl_connect(struct kvp_ctl *ctl) {
  const kvpool_connect_options options = {.size_bytes = sizeof options, .timeout_ms = ctl->timeout_ms};
  kvpool_error error;
  if (kvpool_client_connect(ctl->socket, &options, &ctl->client, &error) == KVPOOL_OK) {
    return KVP_CTL_OK;
  }
  ctl->client = NULL;
  int exit_status = kvp_ctl_fail(ctl, &error);
  /* A socket that this user may not open is as unreachable as none. */
  return error.status == KVPOOL_PERMISSION_DENIED ? KVP_CTL_UNREACHABLE : exit_status;
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

void kvp_ctl_print(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vprintf(format, arguments);
  va_end(arguments);
}
