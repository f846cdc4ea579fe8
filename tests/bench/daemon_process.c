/* See daemon_process.h. */
#include "tests/bench/daemon_process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static void show_log(const struct bench_daemon *daemon) {
  FILE *log = fopen(daemon->log_path, "r");
  char line[512];
  while (log && fgets(line, sizeof line, log)) {
    (void)fputs(line, stderr);
  }
  if (log) {
    (void)fclose(log);
  }
}

static _Noreturn void run_daemon(const struct bench_daemon *daemon, const char *kvpoold_path,
                                 const char *executor_path, const char *device) {
  /* A benchmark that is killed takes its daemon with it. */
  (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
  int log = open(daemon->log_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (log < 0 || dup2(log, STDOUT_FILENO) < 0 || dup2(log, STDERR_FILENO) < 0) {
    fail(daemon->log_path);
  }
  (void)execl(kvpoold_path, kvpoold_path, "--socket", daemon->socket_path, "--executor", executor_path, "--device",
              device, "--log-level", "warning", (char *)NULL);
  fail(kvpoold_path);
  _exit(127);
}

void bench_daemon_start(struct bench_daemon *daemon, const char *kvpoold_path, const char *executor_path) {
  bench_daemon_start_on(daemon, kvpoold_path, executor_path, "host:0");
}

void bench_daemon_start_on(struct bench_daemon *daemon, const char *kvpoold_path, const char *executor_path,
                           const char *device) {
  (void)snprintf(daemon->directory, sizeof daemon->directory, "/tmp/kvpoold-bench-XXXXXX");
  if (!mkdtemp(daemon->directory)) {
    fail(daemon->directory);
  }
  (void)snprintf(daemon->socket_path, sizeof daemon->socket_path, "%s/kvpoold.sock", daemon->directory);
  (void)snprintf(daemon->attach_path, sizeof daemon->attach_path, "%s/kvpoold.attach.sock", daemon->directory);
  (void)snprintf(daemon->log_path, sizeof daemon->log_path, "%s/kvpoold.log", daemon->directory);
  daemon->pid = fork();
  if (daemon->pid < 0) {
    fail("fork");
  }
  if (daemon->pid == 0) {
    run_daemon(daemon, kvpoold_path, executor_path, device);
  }
}

void bench_daemon_check(const struct bench_daemon *daemon) {
  int status = 0;
  if (waitpid(daemon->pid, &status, WNOHANG) != daemon->pid) {
    return;
  }
  show_log(daemon);
  (void)fprintf(stderr, "bench: kvpoold has ended with status 0x%x\n", (unsigned)status);
  exit(1);
}

void bench_daemon_stop(struct bench_daemon *daemon) {
  int status = 0;
  (void)kill(daemon->pid, SIGTERM);
  if (waitpid(daemon->pid, &status, 0) != daemon->pid || status != 0) {
    show_log(daemon);
    (void)fprintf(stderr, "bench: kvpoold ended with status 0x%x\n", (unsigned)status);
    exit(1);
  }
  (void)unlink(daemon->log_path);
  (void)rmdir(daemon->directory);
}
