/* What every command of kvpoolctl is given: the global options, the terminal, the connection. One thread. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_CTL_H
#define KVPOOL_CLIENT_KVPOOLCTL_CTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/include/kvpool/kvpool.h"
#include "client/kvpoolctl/terminal.h"

/* Exit statuses; they are part of the interface. */
enum kvp_ctl_exit {
  KVP_CTL_OK = 0,
  KVP_CTL_FAILED = 1,      /* refused by the daemon, or failed here */
  KVP_CTL_USAGE = 2,       /* the command line is wrong */
  KVP_CTL_UNREACHABLE = 3, /* no daemon answers on the socket */
  KVP_CTL_CHECK_FAILED = 4,
  KVP_CTL_INTERRUPTED = 130,
};

struct kvp_ctl {
  const char *socket; /* NULL: the library's choice */
  uint32_t timeout_ms;
  bool json;
  struct kvp_ctl_terminal terminal;
  kvpool_client *client; /* after kvp_ctl_connect */
};

/* The one of this process, for what has no other way to it; main sets it before anything else. */
extern const struct kvp_ctl *kvp_ctl_this;

/* KVP_CTL_OK, or the exit status with the error told. */
int kvp_ctl_connect(struct kvp_ctl *ctl);

/* calloc and realloc that end the program with a message when there is no memory. */
void *kvp_ctl_allocate(size_t count, size_t size);
void *kvp_ctl_reallocate(void *memory, size_t count, size_t size);

/* To standard output, cleaned of what is not for a terminal; main looks once, at the end, whether all of it could be
 * written. */
void kvp_ctl_print(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same to standard error, as a line that begins with the program's name. */
void kvp_ctl_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
