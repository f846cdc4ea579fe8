/* Signals by signalfd. One per process; main thread only. */
#include "client/kvpoolctl/interrupt.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <sys/signalfd.h>
#include <unistd.h>

static int signals = -1;
static bool seen;

void kvp_ctl_interrupt_init(void) {
  sigset_t set;
  int failed = sigemptyset(&set);
  failed |= sigaddset(&set, SIGINT);
  failed |= sigaddset(&set, SIGTERM);
  failed |= sigaddset(&set, SIGHUP);
  failed |= sigprocmask(SIG_BLOCK, &set, NULL);
  assert(failed == 0);
  signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  assert(signals >= 0);
}

bool kvp_ctl_interrupted(void) {
  struct signalfd_siginfo info;
  seen = seen || read(signals, &info, sizeof info) == (ssize_t)sizeof info;
  return seen;
}

void kvp_ctl_interrupt_wait(int fd) {
  struct pollfd fds[2] = {{.fd = signals, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
  while (!seen && poll(fds, 2, -1) < 0 && errno == EINTR) {
  }
}
