/* MPS, through which processes use a GPU at the same time instead of in turn: whether its control daemon runs, whose
 * it is, and whether kvpoold can be its client. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"

static const char start_hint[] =
    "to start it, before kvpoold and as the same user: CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps "
    "nvidia-cuda-mps-control "
    "-d, and the same variable for kvpoold and the workers (a service with PrivateTmp doesn't see /tmp/nvidia-mps)";

enum mps_state { MPS_NONE, MPS_RUNS, MPS_STALE, MPS_CLOSED };

struct mps {
  const char *directory;
  char control[kvp_ctl_path_bytes_max];
  enum mps_state state;
  uint32_t uid; /* of the control daemon */
  int failure;  /* errno of MPS_CLOSED */
};

/* By its own note of its pid. A container may have the pipes of a daemon that it can't see. */
static bool runs_by_pid(struct mps *mps) {
  char path[kvp_ctl_path_bytes_max];
  (void)snprintf(path, sizeof path, "%.400s/nvidia-cuda-mps-control.pid", mps->directory);
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* anybody may have put a FIFO there */
  FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
  if (file == NULL) {
    if (fd >= 0) {
      (void)close(fd);
    }
    return false;
  }
  char text[32] = "";
  bool there = fgets(text, sizeof text, file) != NULL;
  (void)fclose(file);
  long pid = there ? strtol(text, NULL, 10) : 0;
  if (pid <= 0) {
    return false;
  }
  char name[32] = "";
  (void)snprintf(path, sizeof path, "/proc/%ld/comm", pid);
  file = fopen(path, "re");
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
  return true;
}

/* Whether somebody listens on its socket, and who. */
static enum mps_state look_at_socket(struct mps *mps) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  mps->failure = ENAMETOOLONG;
  if (strlen(mps->control) >= sizeof address.sun_path) {
    return MPS_CLOSED;
  }
  memcpy(address.sun_path, mps->control, strlen(mps->control) + 1);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    mps->failure = errno;
    return MPS_CLOSED;
  }
  enum mps_state state = MPS_STALE;
  if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) {
    struct ucred peer = {0};
    socklen_t bytes = sizeof peer;
    (void)getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
    mps->uid = peer.uid;
    state = MPS_RUNS;
  } else if (errno != ECONNREFUSED) { /* only that says that nobody is behind it */
    mps->failure = errno;
    state = MPS_CLOSED;
  }
  (void)close(fd);
  return state;
}

static void mps_look(const struct kvp_ctl_doctor *doctor, struct mps *mps, char directory[kvp_ctl_path_bytes_max]) {
  const char *named = getenv("CUDA_MPS_PIPE_DIRECTORY");
  if (named != NULL && named[0] != '\0') {
    (void)snprintf(directory, kvp_ctl_path_bytes_max, "%s", named);
  } else {
    kvp_ctl_doctor_path(doctor, "/tmp/nvidia-mps", directory);
  }
  mps->directory = directory;
  (void)snprintf(mps->control, sizeof mps->control, "%.400s/control", directory);
  struct stat status;
  if (runs_by_pid(mps)) {
    mps->state = MPS_RUNS;
  } else if (stat(mps->control, &status) != 0) {
    mps->state = errno == EACCES ? MPS_CLOSED : MPS_NONE;
    mps->failure = errno;
  } else {
    mps->state = S_ISSOCK(status.st_mode) ? look_at_socket(mps) : MPS_STALE;
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
    if (mps.uid != 0 && mps.uid != doctor->daemon_uid) {
      finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS",
                                   "the control daemon at %s is uid %u's, which serves no other user; kvpoold is uid "
                                   "%u's",
                                   mps.directory, mps.uid, doctor->daemon_uid);
      kvp_ctl_doctor_advise(finding, "run kvpoold, the workers and the control daemon as one user, or that one as "
                                     "root");
      return;
    }
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "MPS", "its control daemon runs (%s, uid %u)", mps.directory,
                       mps.uid);
    return;
  case MPS_CLOSED:
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS", "%s is closed to uid %u: %s", mps.control,
                                 (unsigned)geteuid(), strerror(mps.failure));
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
