#include "tests/client/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static struct process *running; /* of this program; so that its end takes it along */

static void die(const char *what) {
  (void)fprintf(stderr, "process: %s: %s\n", what, strerror(errno));
  process_cleanup();
  exit(1);
}

void process_init(struct process *process) {
  *process = (struct process){.pid = 0};
  (void)snprintf(process->directory, sizeof process->directory, "/tmp/kvpool-client-XXXXXX");
  if (mkdtemp(process->directory) == NULL) {
    die("mkdtemp");
  }
  (void)snprintf(process->socket, sizeof process->socket, "%s/kvpoold.sock", process->directory);
}

void process_deinit(struct process *process) {
  static const char *const files[] = {"kvpoold.sock", "kvpoold.sock.lock", "kvpoold.attach.sock",
                                      "kvpoold.attach.sock.lock", "log"};
  for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
    char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", process->directory, files[i]);
    (void)unlink(path);
  }
  if (rmdir(process->directory) != 0) {
    die(process->directory);
  }
}

/* argv[0] is a path. Its output goes to the directory's log. */
static void process_start(struct process *process, char *const argv[]) {
  char log[96];
  (void)snprintf(log, sizeof log, "%s/log", process->directory);
  pid_t parent = getpid();
  pid_t pid = fork();
  if (pid < 0) {
    die("fork");
  }
  if (pid == 0) {
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 ||
        getppid() != parent) {
      _exit(126);
    }
    (void)execv(argv[0], argv);
    _exit(127);
  }
  process->pid = pid;
  running = process;
}

void process_start_daemon(struct process *process) {
  char program[] = KVPOOLD_PATH, executor[] = KVPOOL_EXEC_PATH;
  char pool[] = "{ name=\"main\"; kind=\"paged\"; block_size=64; num_blocks=100; placements=[\"host:0\"]; regions=("
                "{ name=\"kv\"; format=\"v41\"; num_layers=2; compression_ratio=4; note=\"main cache\"; },"
                "{ name=\"index\"; format=\"index_mxfp8\"; num_layers=2; compression_ratio=4; },"
                "{ name=\"plain\"; format=\"bf16\"; width=64; num_layers=1; }); }";
  char *argv[] = {program,           "--socket", process->socket,    "--executor", executor, "--device", "host:0",
                  "--device-memory", "1G",       "--device-threads", "2",          "--pool", pool,       NULL};
  process_start(process, argv);
}

static bool is_listening(void *context) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", (const char *)context);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    die("socket");
  }
  bool is = connect(fd, (const struct sockaddr *)&address, sizeof address) == 0;
  (void)close(fd);
  return is;
}

void process_start_fake(struct process *process, const char *mode) {
  char python[] = "/usr/bin/python3", script[] = FAKE_SERVER_PATH, chosen[32];
  (void)snprintf(chosen, sizeof chosen, "%s", mode);
  char *argv[] = {python, script, process->socket, chosen, NULL};
  process_start(process, argv);
  if (!eventually(is_listening, process->socket)) {
    die("the fake server doesn't listen");
  }
}

void process_signal(const struct process *process, int signal) {
  if (kill(process->pid, signal) != 0) {
    die("kill");
  }
}

static int process_wait(struct process *process) {
  int status = 0;
  while (waitpid(process->pid, &status, 0) < 0) {
    if (errno != EINTR) {
      die("waitpid");
    }
  }
  process->pid = 0;
  running = NULL;
  return status;
}

void process_kill(struct process *process) {
  process_signal(process, SIGKILL);
  (void)process_wait(process);
}

void process_stop(struct process *process) {
  process_signal(process, SIGTERM);
  int status = process_wait(process);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    (void)fprintf(stderr, "process: ended with status 0x%x, log in %s\n", (unsigned)status, process->directory);
    exit(1);
  }
}

bool eventually(bool (*condition)(void *context), void *context) {
  for (int i = 0; i < 6000; i++) {
    if (condition(context)) {
      return true;
    }
    (void)nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  }
  return false;
}

void process_cleanup(void) {
  if (running != NULL && running->pid > 0) {
    process_kill(running);
  }
}
