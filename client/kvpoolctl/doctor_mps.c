/* MPS, through which processes use a GPU at the same time instead of in turn: whether its control daemon runs, whose
 * it is, and whether kvpoold can be its client. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"

static const char start_hint[] =
    "to start it, before kvpoold and as the same user: CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps "
    "nvidia-cuda-mps-control "
    "-d, and the same variable for kvpoold and the workers (a service with PrivateTmp doesn't see /tmp/nvidia-mps)";

enum { mps_cmdline_bytes_max = 1024 };

/* Whose processes it serves at the same time. */
enum mps_users { MPS_USERS_UNKNOWN, MPS_USERS_ONE, MPS_USERS_MANY };

enum mps_state { MPS_NONE, MPS_RUNS, MPS_STALE, MPS_CLOSED };

struct mps {
  const char *directory;
  char control[kvp_ctl_path_bytes_max];
  enum mps_state state;
  uint32_t uid; /* of the control daemon */
  long pid;     /* of it; 0 where it is out of sight */
  int failure;  /* errno of MPS_CLOSED */
};

/* By its own note of its pid. A container may have the pipes of a daemon that it can't see. */
static bool runs_by_pid(struct kvp_ctl_doctor *doctor, struct mps *mps) {
  char path[kvp_ctl_path_bytes_max];
  (void)snprintf(path, sizeof path, "%.400s/nvidia-cuda-mps-control.pid", mps->directory);
  FILE *file = kvp_ctl_doctor_open(doctor, path); /* anybody may have put a FIFO there */
  char text[32] = "";
  bool there = file != NULL && fgets(text, sizeof text, file) != NULL;
  if (file != NULL) {
    (void)fclose(file);
  }
  long pid = there ? strtol(text, NULL, 10) : 0;
  if (pid <= 0) {
    return false;
  }
  char name[32] = "";
  (void)snprintf(path, sizeof path, "/proc/%ld/comm", pid);
  file = kvp_ctl_doctor_open(doctor, path);
  there = file != NULL && fgets(name, sizeof name, file) != NULL;
  if (file != NULL) {
    (void)fclose(file);
  }
  struct stat status;
  (void)snprintf(path, sizeof path, "/proc/%ld", pid);
  if (!there || strncmp(name, "nvidia-cuda-mps", sizeof "nvidia-cuda-mps" - 1) != 0 || stat(path, &status) != 0) {
    return false;
  }
  mps->uid = status.st_uid;
  mps->pid = pid;
  return true;
}

/* Whether somebody listens on its socket, and who. */
static enum mps_state look_at_socket(struct mps *mps) {
  struct kvp_ctl_socket_look look;
  kvp_ctl_doctor_socket(mps->control, SOCK_STREAM, &look);
  mps->uid = look.peer_uid;
  mps->pid = look.peer_pid;
  mps->failure = look.state == KVP_CTL_SOCKET_TOO_LONG ? ENAMETOOLONG : look.failure;
  switch (look.state) {
  case KVP_CTL_SOCKET_NONE:
    return MPS_NONE;
  case KVP_CTL_SOCKET_ANSWERS:
  case KVP_CTL_SOCKET_FULL:
    return MPS_RUNS;
  case KVP_CTL_SOCKET_STALE:
    return MPS_STALE;
  case KVP_CTL_SOCKET_CLOSED:
  case KVP_CTL_SOCKET_TOO_LONG:
    return MPS_CLOSED;
  case KVP_CTL_SOCKET_FOREIGN:
    return look.failure == 0 ? MPS_STALE : MPS_CLOSED; /* no socket at all: nobody serves with that */
  }
  return MPS_NONE;
}

void kvp_ctl_doctor_pipes(const struct kvp_ctl_doctor *doctor, char out[kvp_ctl_path_bytes_max]) {
  const char *named = getenv("CUDA_MPS_PIPE_DIRECTORY");
  if (named != NULL && named[0] != '\0') {
    (void)snprintf(out, kvp_ctl_path_bytes_max, "%s", named);
  } else {
    kvp_ctl_doctor_path(doctor, "/tmp/nvidia-mps", out);
  }
}

/* By the arguments it was started with. */
static enum mps_users users_look(struct kvp_ctl_doctor *doctor, long pid) {
  static const char flag[] = "-multiuser-server";
  char path[kvp_ctl_path_bytes_max];
  char arguments[mps_cmdline_bytes_max];
  (void)snprintf(path, sizeof path, "/proc/%ld/cmdline", pid);
  FILE *file = pid > 0 ? kvp_ctl_doctor_open(doctor, path) : NULL;
  if (file == NULL) {
    return MPS_USERS_UNKNOWN;
  }
  size_t bytes = fread(arguments, 1, sizeof arguments - 1, file);
  (void)fclose(file);
  arguments[bytes] = '\0';
  for (size_t at = 0; at < bytes; at += strlen(&arguments[at]) + 1) {
    if (strcmp(&arguments[at], flag) == 0) {
      return MPS_USERS_MANY;
    }
  }
  return bytes == 0 ? MPS_USERS_UNKNOWN : MPS_USERS_ONE;
}

static void mps_look(struct kvp_ctl_doctor *doctor, struct mps *mps, char directory[kvp_ctl_path_bytes_max]) {
  kvp_ctl_doctor_pipes(doctor, directory);
  mps->directory = directory;
  (void)snprintf(mps->control, sizeof mps->control, "%.400s/control", directory);
  mps->state = runs_by_pid(doctor, mps) ? MPS_RUNS : look_at_socket(mps);
}

/* Who may be its client: kvpoold, and a worker of this user. */
static void running_told(struct kvp_ctl_doctor *doctor, const struct mps *mps) {
  const uint32_t uid = (uint32_t)geteuid();
  const enum mps_users users = users_look(doctor, mps->pid);
  struct kvp_ctl_finding *finding = NULL;
  if (mps->uid != 0 && mps->uid != doctor->daemon_uid) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS",
                                 "the control daemon at %s is uid %u's, which serves no other user; kvpoold is uid "
                                 "%u's",
                                 mps->directory, mps->uid, doctor->daemon_uid);
    kvp_ctl_doctor_advise(finding,
                          "run kvpoold, the workers and the control daemon as one user, or that one as root");
  } else if (users == MPS_USERS_ONE && uid != doctor->daemon_uid) {
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS",
                           "the control daemon at %s (uid %u) serves one user at a time: kvpoold is uid %u's, and "
                           "a worker of uid %u would not get onto the GPU beside it",
                           mps->directory, mps->uid, doctor->daemon_uid, uid);
    kvp_ctl_doctor_advise(finding,
                          "run the workers as kvpoold's user, or start it as root with -multiuser-server; "
                          "nothing where uid %u runs no workers",
                          uid);
  } else {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "MPS", "its control daemon runs (%s, uid %u%s)", mps->directory,
                       mps->uid, users == MPS_USERS_MANY ? ", for all users" : "");
  }
}

void kvp_ctl_doctor_mps(struct kvp_ctl_doctor *doctor) {
  if (!doctor->has_gpu) {
    return;
  }
  struct mps mps = {0};
  char directory[kvp_ctl_path_bytes_max];
  struct kvp_ctl_finding *finding = NULL;
  mps_look(doctor, &mps, directory);
  switch (mps.state) {
  case MPS_RUNS:
    doctor->has_mps = true;
    running_told(doctor, &mps);
    return;
  case MPS_CLOSED:
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS", "%s can't be reached by uid %u: %s",
                                 mps.control, (unsigned)geteuid(), strerror(mps.failure));
    kvp_ctl_doctor_advise(finding, "look again as kvpoold's user, or as root");
    return;
  case MPS_STALE:
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS",
                                 "%s is there, but no control daemon behind it: programs may fail to start on the "
                                 "GPU",
                                 mps.control);
    kvp_ctl_doctor_advise(finding, "remove %s; %s", mps.directory, start_hint);
    return;
  case MPS_NONE:
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS",
                                 "no control daemon at %s: processes use a GPU in turn, and each hand-over between "
                                 "kvpoold and a worker on the same GPU costs a switch",
                                 mps.directory);
    kvp_ctl_doctor_advise(finding, "nothing where kvpoold has the GPU for itself; else %s", start_hint);
    return;
  }
}
