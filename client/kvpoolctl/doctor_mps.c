/* MPS, through which processes use a GPU at the same time instead of in turn: whether its control daemon runs, whose
 * it is, and whether kvpoold can be its client. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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
  return true;
}

/* Whether somebody listens on its socket, and who. */
static enum mps_state look_at_socket(struct mps *mps) {
  struct kvp_ctl_socket_look look;
  kvp_ctl_doctor_socket(mps->control, &look);
  mps->uid = look.peer_uid;
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

static void mps_look(struct kvp_ctl_doctor *doctor, struct mps *mps, char directory[kvp_ctl_path_bytes_max]) {
  const char *named = getenv("CUDA_MPS_PIPE_DIRECTORY");
  if (named != NULL && named[0] != '\0') {
    (void)snprintf(directory, kvp_ctl_path_bytes_max, "%s", named);
  } else {
    kvp_ctl_doctor_path(doctor, "/tmp/nvidia-mps", directory);
  }
  mps->directory = directory;
  (void)snprintf(mps->control, sizeof mps->control, "%.400s/control", directory);
  mps->state = runs_by_pid(doctor, mps) ? MPS_RUNS : look_at_socket(mps);
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
