/* A unix socket that the daemon listens at, and the lock that makes it the only one. Loop thread. */
#ifndef KVPOOL_SUPERVISOR_UNIX_SOCKET_H
#define KVPOOL_SUPERVISOR_UNIX_SOCKET_H

#include <stdint.h>
#include <sys/un.h>

#include "proto/status.h"

struct kvp_unix_socket {
  int fd;      /* listening, non-blocking; -1 when closed */
  int lock_fd; /* the flock lives as long as it is open */
  const char *lock_path;
  struct sockaddr_un address;
};

/* type: SOCK_STREAM or SOCK_SEQPACKET. Takes the lock, removes a stale socket, binds with the given mode and listens.
 * in_use: another daemon holds the lock (its pid in the text), or somebody without the lock answers at the path.
 * lock_path is kept by reference. */
enum kvp_status kvp_unix_socket_open(struct kvp_unix_socket *endpoint, int type, const char *path, uint32_t mode,
                                     const char *lock_path, struct kvp_error *error);
/* From now on connecting is refused at once; path and lock stay. */
void kvp_unix_socket_refuse(struct kvp_unix_socket *endpoint);
/* Likewise, of one that listens; its descriptor is the caller's to close, when those that wait in it are refused, too. */
int kvp_unix_socket_shut(struct kvp_unix_socket *endpoint);
/* Unlinks the path, and then the lock file while it is still locked. */
void kvp_unix_socket_close(struct kvp_unix_socket *endpoint);

#endif
