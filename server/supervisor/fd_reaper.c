/* The queue of what is to be closed, and the thread that closes it.
 *
 * Always holds: what waits is at most what is reserved; an entry leaves the queue when its close has returned. */
#include "server/supervisor/fd_reaper.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/supervisor/allocate.h"

enum { messages_dropped_max = 1024 }; /* of a socket, before it is left to the thread */

struct reaper_entry {
  int fd;
  uid_t uid;
};

struct kvp_fd_reaper {
  uv_async_t some_closed;
  struct kvp_fd_budget *fds;
  uint32_t reserved; /* places in use or promised; the budget is charged for them */

  pthread_t thread;
  pthread_mutex_t lock; /* of all that follows */
  pthread_cond_t wake;
  struct reaper_entry entries[kvp_reaper_fds_max]; /* a circle; the first one is what is being closed */
  uint32_t first;
  uint32_t count;
  uint32_t closed; /* and not yet given back to the budget */
  bool closing;    /* the thread is in close() */
  bool stopping;
  bool abandoned; /* the thread has hung for good, as far as anybody knows: it frees all this if it comes back */
};

/* ---- the thread -------------------------------------------------------------------------------------------------
 */

static void reaper_free(struct kvp_fd_reaper *reaper) {
  (void)pthread_mutex_destroy(&reaper->lock);
  (void)pthread_cond_destroy(&reaper->wake);
  free(reaper);
}

/* Under the lock, which is given up while something is closed. */
static void reaper_close_first(struct kvp_fd_reaper *reaper) {
  const int fd = reaper->entries[reaper->first].fd;
  reaper->closing = true;
  (void)pthread_mutex_unlock(&reaper->lock);
  (void)close(fd);
  (void)pthread_mutex_lock(&reaper->lock);
  reaper->closing = false;
  reaper->first = (reaper->first + 1) % kvp_reaper_fds_max;
  reaper->count--;
  reaper->closed++;
  if (!reaper->stopping) {
    (void)uv_async_send(&reaper->some_closed);
  }
}

static void *reaper_run(void *context) {
  struct kvp_fd_reaper *reaper = context;
  (void)pthread_mutex_lock(&reaper->lock);
  while (!reaper->stopping) {
    if (reaper->count > 0) {
      reaper_close_first(reaper);
    } else {
      (void)pthread_cond_wait(&reaper->wake, &reaper->lock);
    }
  }
  const bool abandoned = reaper->abandoned;
  (void)pthread_mutex_unlock(&reaper->lock);
  if (abandoned) {
    reaper_free(reaper);
  }
  return NULL;
}

/* ---- the loop thread --------------------------------------------------------------------------------------------
 */

static void reaper_collect(struct kvp_fd_reaper *reaper) {
  (void)pthread_mutex_lock(&reaper->lock);
  const uint32_t closed = reaper->closed;
  reaper->closed = 0;
  (void)pthread_mutex_unlock(&reaper->lock);
  kvp_fd_reaper_release(reaper, closed);
}

static void on_some_closed(uv_async_t *handle) {
  reaper_collect(handle->data);
}

static void on_unused_handle_closed(uv_handle_t *handle) {
  reaper_free(handle->data);
}

enum kvp_status kvp_fd_reaper_new(uv_loop_t *loop, struct kvp_fd_budget *fds, struct kvp_fd_reaper **out,
                                  struct kvp_error *error) {
  struct kvp_fd_reaper *reaper = kvp_allocate(1, sizeof *reaper);
  reaper->fds = fds;
  (void)pthread_mutex_init(&reaper->lock, NULL);
  (void)pthread_cond_init(&reaper->wake, NULL);
  int failed = uv_async_init(loop, &reaper->some_closed, on_some_closed);
  if (failed != 0) {
    reaper_free(reaper);
    return kvp_error_set(error, KVP_INTERNAL, "nobody would be told of closed descriptors: %s", uv_strerror(failed));
  }
  reaper->some_closed.data = reaper;
  sigset_t all, before;
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  failed = pthread_create(&reaper->thread, NULL, reaper_run, reaper);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed != 0) {
    uv_close((uv_handle_t *)&reaper->some_closed, on_unused_handle_closed);
    return kvp_error_set(error, KVP_INTERNAL, "no thread to close workers' descriptors: %s", strerror(failed));
  }
  *out = reaper;
  return KVP_OK;
}

/* A thread that is in close() may stay there: it isn't waited for. */
static void on_handle_closed(uv_handle_t *handle) {
  struct kvp_fd_reaper *reaper = handle->data;
  (void)pthread_mutex_lock(&reaper->lock);
  reaper->abandoned = reaper->closing;
  const bool abandoned = reaper->abandoned;
  const pthread_t thread = reaper->thread;
  (void)pthread_mutex_unlock(&reaper->lock);
  if (abandoned) {
    (void)pthread_detach(thread);
    return;
  }
  (void)pthread_join(thread, NULL);
  reaper_free(reaper);
}

void kvp_fd_reaper_destroy(struct kvp_fd_reaper *reaper) {
  if (reaper == NULL) {
    return;
  }
  (void)pthread_mutex_lock(&reaper->lock);
  reaper->stopping = true;
  (void)pthread_cond_signal(&reaper->wake);
  (void)pthread_mutex_unlock(&reaper->lock);
  uv_close((uv_handle_t *)&reaper->some_closed, on_handle_closed);
}

enum kvp_status kvp_fd_reaper_reserve(struct kvp_fd_reaper *reaper, uint32_t count, struct kvp_error *error) {
  reaper_collect(reaper);
  if (count > kvp_reaper_fds_max - reaper->reserved) {
    return kvp_error_set(error, KVP_BUSY,
                         "%u descriptors of workers are open or wait to be closed, %u more than %d are too many",
                         reaper->reserved, count, kvp_reaper_fds_max);
  }
  enum kvp_status status = kvp_fd_budget_charge(reaper->fds, "what a worker may send", count, KVP_BUSY, error);
  if (status == KVP_OK) {
    reaper->reserved += count;
  }
  return status;
}

void kvp_fd_reaper_release(struct kvp_fd_reaper *reaper, uint32_t count) {
  assert(count <= reaper->reserved);
  reaper->reserved -= count;
  kvp_fd_budget_release(reaper->fds, count);
}

enum kvp_status kvp_fd_reaper_check_uid(struct kvp_fd_reaper *reaper, uid_t uid, uint32_t count,
                                        struct kvp_error *error) {
  uint32_t waiting = 0;
  (void)pthread_mutex_lock(&reaper->lock);
  for (uint32_t i = 0; i < reaper->count; i++) {
    waiting += reaper->entries[(reaper->first + i) % kvp_reaper_fds_max].uid == uid;
  }
  (void)pthread_mutex_unlock(&reaper->lock);
  if (waiting + count > kvp_reaper_fds_per_uid_max) {
    return kvp_error_set(
        error, KVP_BUSY,
        "%u descriptors that uid %u has sent wait to be closed: with %u more they could be more than "
        "%d",
        waiting, (unsigned)uid, count, kvp_reaper_fds_per_uid_max);
  }
  return KVP_OK;
}

void kvp_fd_reaper_close(struct kvp_fd_reaper *reaper, uid_t uid, int fd) {
  (void)pthread_mutex_lock(&reaper->lock);
  assert(reaper->count + reaper->closed < reaper->reserved);
  reaper->entries[(reaper->first + reaper->count) % kvp_reaper_fds_max] = (struct reaper_entry){fd, uid};
  reaper->count++;
  (void)pthread_cond_signal(&reaper->wake);
  (void)pthread_mutex_unlock(&reaper->lock);
}

enum socket_head { HEAD_NONE, HEAD_PLAIN, HEAD_WITH_FDS };

/* What the next message is. With SO_PASSCRED each comes with credentials, for which there is room here: that tells an
 * empty message from the end, and then there is room for nothing more. */
static enum socket_head socket_look(int socket) {
  union {
    struct cmsghdr align;
    uint8_t bytes[CMSG_SPACE(sizeof(struct ucred))];
  } control;
  struct msghdr message = {.msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
  ssize_t received = 0;
  do {
    received = recvmsg(socket, &message, MSG_PEEK | MSG_DONTWAIT);
  } while (received < 0 && (errno == EINTR || errno == ECONNRESET)); /* the latter is told once */
  if (received < 0) {
    return errno == EAGAIN ? HEAD_NONE : HEAD_WITH_FDS; /* nobody knows */
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return HEAD_WITH_FDS;
  }
  return message.msg_controllen > 0 ? HEAD_PLAIN : HEAD_NONE;
}

/* Drops messages as far as none has descriptors: a socket that is closed with some unread looks like an error to the
 * other side. True: there are none. */
static bool socket_is_emptied(int socket) {
  const int yes = 1;
  enum socket_head head = HEAD_WITH_FDS;
  if (setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes) != 0) {
    return false;
  }
  for (int i = 0; i < messages_dropped_max && (head = socket_look(socket)) == HEAD_PLAIN; i++) {
    char byte = 0;
    (void)recv(socket, &byte, sizeof byte, MSG_DONTWAIT);
  }
  return head == HEAD_NONE;
}

void kvp_fd_reaper_close_socket(struct kvp_fd_reaper *reaper, uid_t uid, int socket) {
  (void)shutdown(socket, SHUT_RDWR); /* from here on nothing comes any more */
  if (socket_is_emptied(socket)) {
    (void)close(socket);
    kvp_fd_reaper_release(reaper, 1);
  } else {
    kvp_fd_reaper_close(reaper, uid, socket);
  }
}
