/* Whether an executor and a worker of this environment would be clients of one MPS: the names of the directory of its
 * pipes may differ, and one name may be two directories (PrivateTmp, a container's mount). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"

static const char default_directory[] = "/tmp/nvidia-mps";

/* The value of a variable in what /proc/PID/environ has. False: it isn't there, or empty. */
static bool variable_find(FILE *environ, const char *name, char out[kvp_ctl_path_bytes_max]) {
  char *entry = NULL;
  size_t capacity = 0;
  const size_t length = strlen(name);
  bool found = false;
  while (!found && getdelim(&entry, &capacity, '\0', environ) > 0) {
    if (strncmp(entry, name, length) == 0 && entry[length] == '=') {
      (void)snprintf(out, kvp_ctl_path_bytes_max, "%s", entry + length + 1);
      found = true;
    }
  }
  free(entry);
  return found && out[0] != '\0';
}

/* What the executor was started with. False: this user may not look. */
static bool executor_directory(struct kvp_ctl_doctor *doctor, unsigned long long pid,
                               char out[kvp_ctl_path_bytes_max]) {
  char path[kvp_ctl_path_bytes_max];
  (void)snprintf(path, sizeof path, "/proc/%llu/environ", pid);
  FILE *file = kvp_ctl_doctor_open(doctor, path);
  if (file == NULL) {
    return false;
  }
  if (!variable_find(file, "CUDA_MPS_PIPE_DIRECTORY", out)) {
    (void)snprintf(out, kvp_ctl_path_bytes_max, "%s", default_directory);
  }
  (void)fclose(file);
  return true;
}

/* As the executor finds it below its root, and we below ours. */
static bool is_one_directory(unsigned long long pid, const char *theirs, const char *ours) {
  char path[kvp_ctl_path_bytes_max + 64];
  struct stat there;
  struct stat here;
  (void)snprintf(path, sizeof path, "/proc/%llu/root%s", pid, theirs);
  const bool is_there = stat(path, &there) == 0;
  const bool is_here = stat(ours, &here) == 0;
  return is_there && is_here ? there.st_dev == here.st_dev && there.st_ino == here.st_ino
                             : is_there == is_here && strcmp(theirs, ours) == 0;
}

void kvp_ctl_doctor_mps_directory(struct kvp_ctl_doctor *doctor, const kvpool_device_info *device) {
  char theirs[kvp_ctl_path_bytes_max];
  char ours[kvp_ctl_path_bytes_max];
  const unsigned long long pid = device->executor_pid;
  struct kvp_ctl_finding *finding = NULL;
  if (!executor_directory(doctor, pid, theirs)) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "MPS directory",
                                 "that of %s is not known: uid %u may not read /proc/%llu/environ", device->name,
                                 (unsigned)geteuid(), pid);
    kvp_ctl_doctor_advise(finding, "look again as kvpoold's user, or as root");
    return;
  }
  kvp_ctl_doctor_pipes(doctor, ours);
  if (is_one_directory(pid, theirs, ours)) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "MPS directory", "%s is that of %s, too", ours, device->name);
    return;
  }
  if (strcmp(theirs, ours) == 0) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS directory",
                                 "%s of %s's executor (pid %llu) is another directory of that name than the one here",
                                 theirs, device->name, pid);
  } else {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "MPS directory",
                                 "%s's executor (pid %llu) has %s, a worker of this environment would have %s",
                                 device->name, pid, theirs, ours);
  }
  kvp_ctl_doctor_advise(finding, "one CUDA_MPS_PIPE_DIRECTORY for the control daemon, kvpoold and its workers, that "
                                 "neither PrivateTmp nor a container's mounts hide; then start kvpoold again");
}
