/* HELLO: versions, device, paths, ring and eventfds. */
#include "server/executor/hello.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/fd_socket.h"
#include "server/executor/control.h"
#include "server/log.h"

enum { hello_fds = 3, lock_tries_max = 50 /* half a second */ };

static enum kvp_status hello_check(const struct kvp_fd_message *message, const char *device,
                                   struct kvp_control_hello *out, struct kvp_error *error) {
  if (message->kind != KVP_CONTROL_HELLO || message->body_bytes != sizeof *out) {
    return kvp_error_set(error, KVP_MALFORMED, "message %u of %u bytes is no HELLO", message->kind,
                         message->body_bytes);
  }
  memcpy(out, message->body, sizeof *out);
  if (out->version != KVP_CONTROL_VERSION) {
    return kvp_error_set(error, KVP_VERSION_MISMATCH, "the supervisor speaks version %u, this executor %u",
                         out->version, KVP_CONTROL_VERSION);
  }
  if (message->fd_count != hello_fds) {
    return kvp_error_set(error, KVP_MALFORMED, "HELLO came with %u descriptors, not %d", message->fd_count,
                         hello_fds);
  }
  if (memchr(out->device, '\0', sizeof out->device) == NULL ||
      memchr(out->socket_path, '\0', sizeof out->socket_path) == NULL ||
      memchr(out->lock_path, '\0', sizeof out->lock_path) == NULL ||
      memchr(out->attach_socket_path, '\0', sizeof out->attach_socket_path) == NULL ||
      memchr(out->attach_lock_path, '\0', sizeof out->attach_lock_path) == NULL) {
    return kvp_error_set(error, KVP_MALFORMED, "a name in HELLO has no end");
  }
  if (strcmp(out->device, device) != 0) {
    return kvp_error_set(error, KVP_WRONG_DEVICE, "HELLO is for device '%s', this executor was started for '%s'",
                         out->device, device);
  }
  return KVP_OK;
}

enum kvp_status kvp_hello_receive(int socket, const char *device, struct kvp_hello *out, struct kvp_error *error) {
  struct kvp_fd_message *message = calloc(1, sizeof *message);
  if (message == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a message");
  }
  enum kvp_status status = kvp_fd_socket_receive(socket, message);
  if (status != KVP_OK) {
    free(message);
    return kvp_error_set(error, status, "no HELLO: %s", kvp_status_text(status));
  }
  status = hello_check(message, device, &out->body, error);
  if (status != KVP_OK) {
    kvp_control_result_send(socket, message->request, error);
    kvp_fd_message_close_fds(message);
  } else {
    out->request = message->request;
    out->ring = message->fds[0];
    out->command_event = message->fds[1];
    out->completion_event = message->fds[2];
  }
  free(message);
  return status;
}

void kvp_hello_close_fds(const struct kvp_hello *hello) {
  (void)close(hello->ring);
  (void)close(hello->command_event);
  (void)close(hello->completion_event);
}

/* A supervisor that ends as it should takes the file away, and the next one makes another: then this is nobody's. */
static bool lock_is_there(int lock, const char *path) {
  struct stat opened, there;
  return fstat(lock, &opened) == 0 && lstat(path, &there) == 0 && opened.st_dev == there.st_dev &&
         opened.st_ino == there.st_ino;
}

/* A dying process's descriptors close in no order: its end of the control socket may be gone before its lock is. */
static bool lock_take(int lock, int tries_max) {
  const struct timespec pause = {.tv_nsec = 10000000};
  bool locked = flock(lock, LOCK_EX | LOCK_NB) == 0;
  for (int tries = 0; !locked && tries < tries_max; tries++) {
    (void)nanosleep(&pause, NULL);
    locked = flock(lock, LOCK_EX | LOCK_NB) == 0;
  }
  return locked;
}

static void remove_stale(const char *socket_path, const char *lock_path, int tries_max) {
  if (lock_path[0] == '\0' || socket_path[0] == '\0') {
    return;
  }
  int lock = open(lock_path, O_RDWR | O_CLOEXEC);
  if (lock < 0) {
    return;
  }
  /* A successor takes the lock before it makes its socket: while we hold it, the socket there is the dead one's. */
  if (lock_take(lock, tries_max) && lock_is_there(lock, lock_path) && unlink(socket_path) == 0) {
    kvp_log(KVP_LOG_WARNING, "stale_socket_removed", "path=\"%s\"", socket_path);
  }
  (void)close(lock);
}

void kvp_hello_clean_up(const struct kvp_hello *hello, bool may_be_dying) {
  const int tries_max = may_be_dying ? lock_tries_max : 0;
  remove_stale(hello->body.socket_path, hello->body.lock_path, tries_max);
  remove_stale(hello->body.attach_socket_path, hello->body.attach_lock_path, tries_max);
}
