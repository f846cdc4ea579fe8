/* What is at the path of a unix socket. */
#include <assert.h>
#include <errno.h>
#include <libgen.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"

_Static_assert(sizeof((struct sockaddr_un){0}).sun_path == kvp_ctl_socket_path_max + 1, "an end is part of it");

static const char *kind_name(mode_t mode) {
  return S_ISREG(mode)    ? "file"
         : S_ISDIR(mode)  ? "directory"
         : S_ISFIFO(mode) ? "FIFO"
         : S_ISSOCK(mode) ? "socket of another kind"
                          : "device";
}

static enum kvp_ctl_socket_state state_of(int failure) {
  switch (failure) {
  case 0:
    return KVP_CTL_SOCKET_ANSWERS;
  case EAGAIN:
    return KVP_CTL_SOCKET_FULL;
  case ECONNREFUSED: /* only that says that nobody is behind it */
    return KVP_CTL_SOCKET_STALE;
  case ENOENT:
    return KVP_CTL_SOCKET_NONE;
  case EPROTOTYPE:
    return KVP_CTL_SOCKET_FOREIGN;
  default:
    return KVP_CTL_SOCKET_CLOSED;
  }
}

static void peer_look(int fd, struct kvp_ctl_socket_look *look) {
  struct ucred peer = {.uid = look->uid};
  socklen_t bytes = sizeof peer;
  (void)getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
  look->peer_pid = peer.pid;
  look->peer_uid = peer.uid;
}

/* The directory that lets nobody of ours in: of its own directories everything can be seen. */
static void directory_look(const char *path, struct kvp_ctl_socket_look *look) {
  char copy[kvp_ctl_path_bytes_max];
  struct stat status = {0};
  char *directory = copy;
  (void)snprintf(copy, sizeof copy, "%s", path);
  do {
    directory = dirname(directory);
  } while (stat(directory, &status) != 0 && strcmp(directory, "/") != 0 && strcmp(directory, ".") != 0);
  (void)snprintf(look->directory, sizeof look->directory, "%s", directory);
  look->uid = status.st_uid;
  look->gid = status.st_gid;
  look->mode = status.st_mode & 07777U;
}

void kvp_ctl_doctor_socket(const char *path, int type, struct kvp_ctl_socket_look *out) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  struct stat status = {0};
  *out = (struct kvp_ctl_socket_look){.state = KVP_CTL_SOCKET_TOO_LONG};
  if (strlen(path) > kvp_ctl_socket_path_max) {
    return;
  }
  memcpy(address.sun_path, path, strlen(path) + 1);
  if (stat(path, &status) != 0) {
    out->state = errno == ENOENT || errno == ENOTDIR ? KVP_CTL_SOCKET_NONE : KVP_CTL_SOCKET_CLOSED;
    out->failure = errno;
    if (out->failure == EACCES) {
      directory_look(path, out);
    }
    return;
  }
  out->uid = out->peer_uid = status.st_uid;
  out->gid = status.st_gid;
  out->mode = status.st_mode & 07777U;
  out->kind = kind_name(status.st_mode);
  if (!S_ISSOCK(status.st_mode)) {
    out->state = KVP_CTL_SOCKET_FOREIGN;
    return;
  }
  int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  int failure = fd < 0 || connect(fd, (const struct sockaddr *)&address, sizeof address) != 0 ? errno : 0;
  out->state = state_of(failure);
  out->failure = failure;
  if (fd >= 0) {
    if (failure == 0) {
      peer_look(fd, out);
    }
    (void)close(fd);
  }
}
