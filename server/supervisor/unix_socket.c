/* A unix socket that the daemon listens at. Loop thread. What always holds: the path is touched only while the lock
 * is held. */
#include "server/supervisor/unix_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { pid_text_bytes_max = 32 };

static long lock_holder(int lock_fd) {
  char text[pid_text_bytes_max];
  const ssize_t bytes = pread(lock_fd, text, sizeof text - 1, 0);
  if (bytes <= 0) {
    return 0;
  }
  text[bytes] = '\0';
  return strtol(text, NULL, 10);
}

/* A daemon that ends takes the file away: what was opened before that is nobody's lock any more. */
static bool lock_is_there(int fd, const char *path) {
  struct stat opened, there;
  return fstat(fd, &opened) == 0 && lstat(path, &there) == 0 && opened.st_dev == there.st_dev &&
         opened.st_ino == there.st_ino;
}

static enum kvp_status lock_take(const char *path, int *out, struct kvp_error *error) {
  int fd = -1;
  bool is_locked = false;
  do {
    if (fd >= 0) {
      close(fd);
    }
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0) {
      return kvp_error_set(error, KVP_INVALID_ARGUMENT, "lock file \"%s\": %s", path, strerror(errno));
    }
    is_locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
  } while (is_locked && !lock_is_there(fd, path)); /* each turn is another daemon's end */
  if (!is_locked) {
    enum kvp_status status = KVP_OK;
    if (errno == EWOULDBLOCK) {
      status = kvp_error_set(error, KVP_IN_USE, "another daemon, pid %ld, holds \"%s\"", lock_holder(fd), path);
    } else {
      status = kvp_error_set(error, KVP_INVALID_ARGUMENT, "locking \"%s\": %s", path, strerror(errno));
    }
    close(fd);
    return status;
  }
  char text[pid_text_bytes_max];
  const int text_bytes = snprintf(text, sizeof text, "%ld\n", (long)getpid());
  if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)text_bytes, 0) != text_bytes) {
    const enum kvp_status status =
        kvp_error_set(error, KVP_INVALID_ARGUMENT, "writing the pid into \"%s\": %s", path, strerror(errno));
    close(fd);
    return status;
  }
  *out = fd;
  return KVP_OK;
}

static void lock_release(const char *path, int fd) {
  (void)unlink(path); /* while it is held: whoever waits for it looks whether it is still there */
  close(fd);
}

/* A daemon with another lock file may be listening here; binding over it would steal its clients silently. */
static enum kvp_status remove_stale(int fd, const struct sockaddr_un *address, struct kvp_error *error) {
  struct stat found;
  if (lstat(address->sun_path, &found) != 0) {
    return KVP_OK; /* nothing there, or bind will say what is wrong */
  }
  if (!S_ISSOCK(found.st_mode)) {
    return kvp_error_set(error, KVP_ALREADY_EXISTS, "\"%s\" exists and is not a socket", address->sun_path);
  }
  /* EPROTOTYPE: it listens, with a socket of another type. */
  if (connect(fd, (const struct sockaddr *)address, sizeof *address) == 0 || errno == EAGAIN || errno == EPROTOTYPE) {
    return kvp_error_set(error, KVP_IN_USE, "another process listens at \"%s\"", address->sun_path);
  }
  if (unlink(address->sun_path) != 0 && errno != ENOENT) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "removing stale socket \"%s\": %s", address->sun_path,
                         strerror(errno));
  }
  return KVP_OK;
}

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

/* Who reads bytes has no room for descriptors: the kernel closes them while it reads, and somebody else's file may take
 * as long as they like for that (proto/fd_socket.h). From Linux 6.16 on they can't be sent in the first place; accepted
 * sockets inherit it. */
static void take_no_descriptors(int fd) {
  const int no = 0;
  (void)setsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &no, sizeof no);
}

static int socket_new(int type) {
  return socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

static enum kvp_status probe(int type, const struct sockaddr_un *address, struct kvp_error *error) {
  const int fd = socket_new(type);
  if (fd < 0) {
    return kvp_error_set(error, KVP_INTERNAL, "socket: %s", strerror(errno));
  }
  const enum kvp_status status = remove_stale(fd, address, error);
  close(fd);
  return status;
}

/* Nobody can connect before listen, so the mode is right from the first connection on, whatever the umask. */
static enum kvp_status bind_and_listen(int type, const struct sockaddr_un *address, uint32_t mode, int *out,
                                       struct kvp_error *error) {
  const int fd = socket_new(type);
  if (fd < 0) {
    return kvp_error_set(error, KVP_INTERNAL, "socket: %s", strerror(errno));
  }
  if (type == SOCK_STREAM) {
    take_no_descriptors(fd);
  }
  if (bind(fd, (const struct sockaddr *)address, sizeof *address) != 0) {
    const enum kvp_status status =
        kvp_error_set(error, KVP_INVALID_ARGUMENT, "binding \"%s\": %s", address->sun_path, strerror(errno));
    close(fd);
    return status;
  }
  if (chmod(address->sun_path, (mode_t)mode) != 0 || listen(fd, SOMAXCONN) != 0) {
    const enum kvp_status status =
        kvp_error_set(error, KVP_INVALID_ARGUMENT, "listening at \"%s\": %s", address->sun_path, strerror(errno));
    (void)unlink(address->sun_path);
    close(fd);
    return status;
  }
  *out = fd;
  return KVP_OK;
}

enum kvp_status kvp_unix_socket_open(struct kvp_unix_socket *endpoint, int type, const char *path, uint32_t mode,
                                     const char *lock_path, struct kvp_error *error) {
  struct kvp_unix_socket opened = {.fd = -1, .lock_fd = -1, .lock_path = lock_path, .address.sun_family = AF_UNIX};
  const size_t path_bytes = strlen(path);
  if (path_bytes == 0 || path_bytes >= sizeof opened.address.sun_path) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "socket path \"%s\" has %zu bytes, allowed are 1 to %zu", path,
                         path_bytes, sizeof opened.address.sun_path - 1);
  }
  memcpy(opened.address.sun_path, path, path_bytes + 1);
  enum kvp_status status = lock_take(lock_path, &opened.lock_fd, error);
  if (status != KVP_OK) {
    return status;
  }
  status = probe(type, &opened.address, error);
  if (status != KVP_OK) {
    goto err_lock;
  }
  status = bind_and_listen(type, &opened.address, mode, &opened.fd, error);
  if (status != KVP_OK) {
    goto err_lock;
  }
  *endpoint = opened;
  return KVP_OK;

err_lock:
  lock_release(lock_path, opened.lock_fd);
  return status;
}

void kvp_unix_socket_refuse(struct kvp_unix_socket *endpoint) {
  if (endpoint->fd >= 0) {
    close(endpoint->fd);
    endpoint->fd = -1;
  }
}

int kvp_unix_socket_shut(struct kvp_unix_socket *endpoint) {
  const int fd = endpoint->fd;
  (void)shutdown(fd, SHUT_RDWR);
  endpoint->fd = -1;
  return fd;
}

void kvp_unix_socket_close(struct kvp_unix_socket *endpoint) {
  kvp_unix_socket_refuse(endpoint);
  (void)unlink(endpoint->address.sun_path);
  lock_release(endpoint->lock_path, endpoint->lock_fd);
}
