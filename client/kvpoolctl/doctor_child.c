/* Children of the doctor: each in a process group of its own, which is killed as a whole when its time is over. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"
#include "client/kvpoolctl/interrupt.h"

enum {
  timeout_default_ms = 10000, /* as of calls */
  reap_ms = 1000,             /* one that hangs inside the kernel is not waited for */
  nap_ms = 10,
};

struct child {
  pid_t pid;
  int result;       /* what it writes is read here */
  uint64_t over_ms; /* its deadline */
};

static uint64_t now_ms(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_MONOTONIC, &now); /* it can't fail for this clock */
  return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* In the child: as if nobody had waited for signals, and gone with us. */
static void child_settle(void) {
  sigset_t none;
  (void)sigemptyset(&none);
  (void)pthread_sigmask(SIG_SETMASK, &none, NULL);
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  (void)setpgid(0, 0);
  int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null >= 0) { /* libraries and programs that complain do so in words of their own */
    (void)dup2(null, STDIN_FILENO);
    (void)dup2(null, STDOUT_FILENO);
    (void)dup2(null, STDERR_FILENO);
  }
}

/* 0 in the child, whose end of the pipe is *end; -1: there is none. */
static pid_t child_start(const struct kvp_ctl_doctor *doctor, struct child *child, int *end) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return -1;
  }
  uint32_t timeout_ms = doctor->ctl->timeout_ms == 0 ? (uint32_t)timeout_default_ms : doctor->ctl->timeout_ms;
  (void)fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    child_settle();
    *end = ends[1];
    return 0;
  }
  (void)close(ends[1]);
  if (pid < 0) {
    (void)close(ends[0]);
    return -1;
  }
  (void)setpgid(pid, pid); /* it does so itself, but perhaps later than we kill it */
  kvp_ctl_interrupt_group(pid);
  *child = (struct child){.pid = pid, .result = ends[0], .over_ms = now_ms() + 2 * (uint64_t)timeout_ms};
  return pid;
}

/* All of it, or what came before its end or the deadline: then *late. */
static size_t child_read(const struct child *child, char *out, size_t out_bytes, bool *late) {
  size_t got = 0;
  *late = false;
  while (got < out_bytes) {
    uint64_t now = now_ms();
    struct pollfd wait = {.fd = child->result, .events = POLLIN};
    int ready = now < child->over_ms ? poll(&wait, 1, (int)(child->over_ms - now)) : 0;
    if (ready < 0 && errno == EINTR) {
      continue;
    }
    ssize_t count = ready > 0 ? read(child->result, out + got, out_bytes - got) : 0;
    if (count <= 0) {
      *late = ready == 0;
      break;
    }
    got += (size_t)count;
  }
  return got;
}

static void nap(void) {
  (void)nanosleep(&(struct timespec){.tv_nsec = nap_ms * 1000000L}, NULL);
}

/* Whether it has ended by its deadline. It is not reaped yet: its pid, the group's, is nobody else's. */
static bool child_ends(const struct child *child) {
  siginfo_t info = {0};
  while (waitid(P_PID, (id_t)child->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0 &&
         now_ms() < child->over_ms) {
    nap();
  }
  return info.si_pid == child->pid;
}

/* Of all that is left of the group. Returns the wait status; -1: it is not gone. */
static int child_end(const struct child *child) {
  int wait_status = -1;
  uint64_t until_ms = now_ms() + reap_ms;
  (void)kill(-child->pid, SIGKILL);
  while (waitpid(child->pid, &wait_status, WNOHANG) == 0 && now_ms() < until_ms) {
    nap();
  }
  kvp_ctl_interrupt_group(0);
  (void)close(child->result);
  return wait_status;
}

enum kvp_ctl_probe kvp_ctl_doctor_probe(const struct kvp_ctl_doctor *doctor, void (*look)(void *out), void *out,
                                        size_t out_bytes) {
  struct child child;
  int end = -1;
  pid_t pid = child_start(doctor, &child, &end);
  if (pid == 0) {
    look(out);
    size_t put = 0;
    ssize_t count = 1;
    while (put < out_bytes && count > 0) {
      count = write(end, (const char *)out + put, out_bytes - put);
      put += count > 0 ? (size_t)count : 0;
    }
    _exit(put == out_bytes ? 0 : 1);
  }
  if (pid < 0) {
    return KVP_CTL_PROBE_CRASHED;
  }
  bool late = false;
  char *copy = kvp_ctl_allocate(1, out_bytes);
  size_t got = child_read(&child, copy, out_bytes, &late);
  (void)child_end(&child); /* it has nothing more to say */
  if (got == out_bytes) {
    memcpy(out, copy, out_bytes);
  }
  free(copy);
  return got == out_bytes ? KVP_CTL_PROBE_DONE : late ? KVP_CTL_PROBE_HANGS : KVP_CTL_PROBE_CRASHED;
}

enum kvp_ctl_probe kvp_ctl_doctor_run(const struct kvp_ctl_doctor *doctor, const char *const *command, char *out,
                                      size_t out_bytes, int *exit_status) {
  enum { not_run = 127 };
  struct child child;
  int end = -1;
  assert(out_bytes > 0);
  pid_t pid = child_start(doctor, &child, &end);
  if (pid == 0) {
    (void)dup2(end, STDOUT_FILENO);
    (void)dup2(end, STDERR_FILENO);
    (void)execv(command[0], (char *const *)command);
    _exit(not_run);
  }
  if (pid < 0) {
    return KVP_CTL_PROBE_CRASHED;
  }
  bool late = false;
  size_t got = child_read(&child, out, out_bytes - 1, &late);
  out[got] = '\0';
  bool has_ended = !late && child_ends(&child);
  int wait_status = child_end(&child);
  if (!has_ended) {
    return KVP_CTL_PROBE_HANGS;
  }
  *exit_status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
  return *exit_status == not_run ? KVP_CTL_PROBE_CRASHED : KVP_CTL_PROBE_DONE;
}
