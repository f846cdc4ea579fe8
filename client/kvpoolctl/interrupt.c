/* Signals by a thread that waits for them. One per process; but for that thread, the main thread only. */
#include "client/kvpoolctl/interrupt.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client/kvpoolctl/json.h"

enum {
  nudge_ms = 50,
  clean_up_ms = 3000,
  clean_up_call_ms = 500,
  repeat_ms = 500, /* so soon after the first one a signal is the same: timeout(1) tells the child and its group */
};

static atomic_bool seen;
static const struct kvp_ctl *of; /* NULL: nobody waits for signals yet */
static int wake = -1;            /* eventfd */
static pthread_t main_thread;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the rest */
static kvpool_client *client;
static bool cleans_up;
static bool is_waiting;
static const char *file;
static pid_t group; /* of children; 0: none */

/* Only so that a system call of the main thread returns. */
static void nothing(int signal) {
  (void)signal;
}

/* The lock is held: the main thread can't take the file away meanwhile. */
static _Noreturn void leave(void) {
  static const char text[] = "kvpoolctl: interrupted\n";
  if (file != NULL) {
    (void)unlink(file);
  }
  if (group > 0) {
    (void)kill(-group, SIGKILL);
  }
  ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
  (void)written; /* nothing is left to be done about it */
  if (of->json) {
    kvp_ctl_json_interrupted();
  }
  _exit(KVP_CTL_INTERRUPTED);
}

/* True: another signal has come within the time. */
static bool signal_within(const sigset_t *set, int ms) {
  return sigtimedwait(set, NULL, &(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}) > 0;
}

/* Those under way; later ones have little time. */
static void calls_end(void) {
  pthread_mutex_lock(&lock);
  if (client != NULL) {
    kvpool_client_interrupt(client, clean_up_call_ms);
  }
  pthread_mutex_unlock(&lock);
}

static void *watch(void *argument) {
  const sigset_t *set = argument;
  int signal;
  int failed = sigwait(set, &signal);
  assert(failed == 0);
  pthread_mutex_lock(&lock);
  if (client == NULL) {
    leave();
  }
  atomic_store(&seen, true);
  const uint64_t one = 1;
  ssize_t written = write(wake, &one, sizeof one);
  assert(written == (ssize_t)sizeof one);
  int interrupt_ms = is_waiting ? clean_up_call_ms : 0; /* a call after the wait has the time that any has */
  pthread_mutex_unlock(&lock);
  for (int waited = 0; waited < clean_up_ms; waited += nudge_ms) {
    if (waited == interrupt_ms) {
      calls_end();
    }
    if (signal_within(set, nudge_ms) && waited >= repeat_ms) {
      break;
    }
    failed = pthread_kill(main_thread, SIGUSR1); /* it may be about to enter a system call */
    assert(failed == 0);
  }
  pthread_mutex_lock(&lock);
  leave();
}

void kvp_ctl_interrupt_watch(const struct kvp_ctl *ctl) {
  static sigset_t set;
  pthread_t thread;
  if (of != NULL) {
    return;
  }
  of = ctl;
  main_thread = pthread_self();
  wake = eventfd(0, EFD_CLOEXEC);
  assert(wake >= 0);
  int failed = sigemptyset(&set);
  failed |= sigaddset(&set, SIGINT);
  failed |= sigaddset(&set, SIGTERM);
  failed |= sigaddset(&set, SIGHUP);
  failed |= pthread_sigmask(SIG_BLOCK, &set, NULL);
  failed |= sigaction(SIGUSR1, &(struct sigaction){.sa_handler = nothing}, NULL);
  failed |= pthread_create(&thread, NULL, watch, &set);
  failed |= pthread_detach(thread);
  assert(failed == 0);
}

void kvp_ctl_interrupt_init(const struct kvp_ctl *ctl) {
  kvp_ctl_interrupt_watch(ctl);
  int failed = sigaction(SIGPIPE, &(struct sigaction){.sa_handler = SIG_IGN}, NULL);
  failed |= sigaction(SIGXFSZ, &(struct sigaction){.sa_handler = SIG_IGN}, NULL);
  assert(failed == 0);
  pthread_mutex_lock(&lock);
  cleans_up = true;
  pthread_mutex_unlock(&lock);
}

void kvp_ctl_interrupt_client(kvpool_client *of_calls) {
  pthread_mutex_lock(&lock);
  client = cleans_up ? of_calls : NULL;
  pthread_mutex_unlock(&lock);
}

void kvp_ctl_interrupt_file(const char *path) {
  pthread_mutex_lock(&lock);
  file = path;
  pthread_mutex_unlock(&lock);
}

void kvp_ctl_interrupt_group(pid_t of_children) {
  pthread_mutex_lock(&lock);
  group = of_children;
  pthread_mutex_unlock(&lock);
}

bool kvp_ctl_interrupted(void) {
  return atomic_load(&seen);
}

void kvp_ctl_interrupt_wait(int fd) {
  struct pollfd fds[2] = {{.fd = wake, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
  pthread_mutex_lock(&lock);
  is_waiting = true;
  pthread_mutex_unlock(&lock);
  while (poll(fds, 2, -1) < 0 && errno == EINTR) {
  }
  pthread_mutex_lock(&lock);
  is_waiting = kvp_ctl_interrupted(); /* one signal was this wait's; the close that follows takes its time */
  pthread_mutex_unlock(&lock);
}
