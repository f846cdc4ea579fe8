/* Who is at the other end of a unix socket, as the kernel says it. Any thread. */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/supervisor/rpc.h"

enum { line_bytes_max = 64 };

static const uid_t uid_none = (uid_t)-1;

static pthread_once_t looked = PTHREAD_ONCE_INIT;
static uid_t anybodys; /* the uid of whoever our user namespace doesn't have; uid_none: it has everybody */

/* The first line; "" when there is none. */
static void line_read(const char *path, char out[line_bytes_max]) {
  FILE *file = fopen(path, "re");
  out[0] = '\0';
  if (file != NULL) {
    if (fgets(out, line_bytes_max, file) == NULL) {
      out[0] = '\0';
    }
    (void)fclose(file);
  }
}

/* A host's first user namespace maps all uids to themselves: "0 0 4294967295". */
static bool has_everybody(void) {
  char line[line_bytes_max];
  char *rest = line;
  line_read("/proc/self/uid_map", line);
  unsigned long first = strtoul(rest, &rest, 10);
  unsigned long to = strtoul(rest, &rest, 10);
  unsigned long count = strtoul(rest, &rest, 10);
  return first == 0 && to == 0 && count == UINT32_MAX;
}

static void anybodys_look(void) {
  enum { overflow_uid_default = 65534 };
  char line[line_bytes_max];
  line_read("/proc/sys/kernel/overflowuid", line);
  anybodys = has_everybody() ? uid_none : line[0] == '\0' ? overflow_uid_default : (uid_t)strtoul(line, NULL, 10);
}

bool kvp_rpc_peer_of(int fd, struct kvp_rpc_peer *out) {
  struct ucred credentials;
  socklen_t bytes = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return false;
  }
  (void)pthread_once(&looked, anybodys_look);
  *out = (struct kvp_rpc_peer){
      .pid = credentials.pid,
      .uid = credentials.uid,
      .gid = credentials.gid,
      .is_operator = credentials.uid == 0 || (credentials.uid == geteuid() && credentials.uid != anybodys),
  };
  return true;
}
