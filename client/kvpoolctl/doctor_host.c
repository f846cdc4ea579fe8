/* Limits and memory of the host, for this user. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"
#include "client/kvpoolctl/text.h"

enum {
  /* What kvpoold takes with its defaults before it has any memory: itself, 4096 connections of two, a device. */
  descriptors_least = 128 + 2 * 4096 + 8,
  descriptors_per_gib = 2,
  descriptors_per_worker = 43,
  /* What a host may well have: so much in pools, beside as many workers as a session may have. */
  descriptors_wanted = 256 * descriptors_per_gib + 64 * descriptors_per_worker,
};

static const uint64_t gib = UINT64_C(1) << 30;
static const uint64_t locked_wanted_bytes = UINT64_C(64) << 20;

static void descriptors_check(struct kvp_ctl_doctor *doctor) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return;
  }
  uint64_t hard = limit.rlim_max;
  struct kvp_ctl_finding *finding = NULL;
  if (hard <= descriptors_least) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "descriptors",
                                 "RLIMIT_NOFILE is %s, kvpoold takes %s before it has any memory",
                                 kvp_ctl_count(hard).text, kvp_ctl_count(descriptors_least).text);
  } else if (hard - descriptors_least < descriptors_wanted) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "descriptors",
                                 "RLIMIT_NOFILE is %s: enough for %s GiB of pools, or for %s attached workers",
                                 kvp_ctl_count(hard).text,
                                 kvp_ctl_count((hard - descriptors_least) / descriptors_per_gib).text,
                                 kvp_ctl_count((hard - descriptors_least) / descriptors_per_worker).text);
  } else {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "descriptors", "RLIMIT_NOFILE is %s", kvp_ctl_count(hard).text);
    return;
  }
  kvp_ctl_doctor_advise(finding, "raise the hard limit (LimitNOFILE=65536 in a unit, --ulimit nofile=65536 of a "
                                 "container), or lower connections_max");
}

static void locked_check(struct kvp_ctl_doctor *doctor) {
  struct rlimit limit;
  if (!doctor->has_gpu || getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    return; /* nothing is pinned for a host device */
  }
  if (limit.rlim_max == RLIM_INFINITY) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "locked memory", "RLIMIT_MEMLOCK is unlimited");
  } else if (limit.rlim_max >= locked_wanted_bytes) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "locked memory", "RLIMIT_MEMLOCK is %s",
                       kvp_ctl_bytes(limit.rlim_max).text);
  } else {
    struct kvp_ctl_finding *finding = kvp_ctl_doctor_add(
        doctor, KVP_CTL_FINDING_WARNING, "locked memory",
        "RLIMIT_MEMLOCK is %s; a driver may count pinned memory against it", kvp_ctl_bytes(limit.rlim_max).text);
    kvp_ctl_doctor_advise(finding, "LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 of a container");
  }
}

static const char *memfd_failure(int *failure) {
  const char *call = "memfd_create";
  int fd = memfd_create("kvpoolctl-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    *failure = errno;
    return call;
  }
  call = ftruncate(fd, 4096) != 0 ? "ftruncate" : NULL;
  if (call == NULL && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    call = "sealing";
  }
  *failure = errno;
  (void)close(fd);
  return call;
}

static void memfd_check(struct kvp_ctl_doctor *doctor) {
  int failure = 0;
  const char *call = memfd_failure(&failure);
  if (call == NULL) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "memfd", "shared memory can be made and sealed");
    return;
  }
  struct kvp_ctl_finding *finding =
      kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "memfd", "shared memory can't be made and sealed: %s: %s",
                         call, strerror(failure));
  kvp_ctl_doctor_advise(finding, "kvpoold lives of it: look for a seccomp profile that forbids memfd_create, and at "
                                 "sysctl vm.memfd_noexec (2 forbids it)");
}

static void shm_check(struct kvp_ctl_doctor *doctor) {
  char path[kvp_ctl_path_bytes_max];
  kvp_ctl_doctor_path(doctor, "/dev/shm", path);
  struct statvfs status;
  struct kvp_ctl_finding *finding = NULL;
  if (statvfs(path, &status) != 0) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "/dev/shm", "is not there: %s", strerror(errno));
  } else {
    uint64_t size = (uint64_t)status.f_blocks * status.f_frsize;
    uint64_t free = (uint64_t)status.f_bavail * status.f_frsize;
    bool is_small = size < gib;
    finding = kvp_ctl_doctor_add(doctor, is_small ? KVP_CTL_FINDING_WARNING : KVP_CTL_FINDING_OK, "/dev/shm",
                                 "%s of %s free", kvp_ctl_bytes(free).text, kvp_ctl_bytes(size).text);
    if (!is_small) {
      return;
    }
  }
  kvp_ctl_doctor_advise(finding, "kvpoold needs none of it, but the engines' workers do (NCCL, PyTorch): 1 GiB at "
                                 "least (--shm-size of a container)");
}

/* A line like "MemAvailable:   1234 kB", in bytes; 0 when it is not there. */
static uint64_t meminfo(struct kvp_ctl_doctor *doctor, const char *key) {
  char path[kvp_ctl_path_bytes_max];
  kvp_ctl_doctor_path(doctor, "/proc/meminfo", path);
  FILE *file = kvp_ctl_doctor_open(doctor, path);
  char line[128];
  uint64_t kib = 0;
  size_t length = strlen(key);
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, key, length) == 0 && line[length] == ':') {
      kib = strtoull(line + length + 1, NULL, 10);
      break;
    }
  }
  if (file != NULL) {
    (void)fclose(file);
  }
  return kib * 1024;
}

static void memory_check(struct kvp_ctl_doctor *doctor) {
  uint64_t total = meminfo(doctor, "MemTotal");
  uint64_t available = meminfo(doctor, "MemAvailable");
  bool is_little = available < 2 * gib;
  if (total == 0) {
    kvp_ctl_doctor_advise(kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "memory", "/proc/meminfo says nothing"),
                          "mount /proc: kvpoold reads from it what a host device may take");
    return;
  }
  struct kvp_ctl_finding *finding =
      kvp_ctl_doctor_add(doctor, is_little ? KVP_CTL_FINDING_WARNING : KVP_CTL_FINDING_OK, "memory",
                         "%s of %s available to pools of host devices and everybody else",
                         kvp_ctl_bytes(available).text, kvp_ctl_bytes(total).text);
  if (is_little) {
    kvp_ctl_doctor_advise(finding, "a host device may take what device_memory says: set it lower than what is "
                                   "available");
  }
}

void kvp_ctl_doctor_host(struct kvp_ctl_doctor *doctor) {
  descriptors_check(doctor);
  locked_check(doctor);
  memfd_check(doctor);
  shm_check(doctor);
  memory_check(doctor);
}
