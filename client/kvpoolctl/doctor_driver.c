/* NVIDIA's kernel driver and its device nodes, as this user sees them. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"

static const char version_path[] = "/proc/driver/nvidia/version";
static const char container_hint[] = "in a container: start it with the GPUs (docker run --gpus all)";

enum { line_bytes_max = 256, nodes_max = 64 };

/* "nvidia7" and not "nvidia-uvm" */
static bool is_gpu_node(const char *name) {
  static const char prefix[] = "nvidia";
  const char *number = name + sizeof prefix - 1;
  return strncmp(name, prefix, sizeof prefix - 1) == 0 && *number != '\0' &&
         strspn(number, "0123456789") == strlen(number);
}

static size_t gpu_nodes(const struct kvp_ctl_doctor *doctor, char out[nodes_max][32]) {
  char path[kvp_ctl_path_bytes_max];
  kvp_ctl_doctor_path(doctor, "/dev", path);
  DIR *directory = opendir(path);
  size_t count = 0;
  const struct dirent *entry = NULL;
  while (directory != NULL && count < nodes_max && (entry = readdir(directory)) != NULL) {
    if (is_gpu_node(entry->d_name)) {
      (void)snprintf(out[count++], sizeof out[0], "/dev/%.24s", entry->d_name);
    }
  }
  if (directory != NULL) {
    (void)closedir(directory);
  }
  return count;
}

/* Display and 3D controllers of NVIDIA, with a driver or without. */
static size_t pci_gpus(struct kvp_ctl_doctor *doctor) {
  char path[kvp_ctl_path_bytes_max];
  kvp_ctl_doctor_path(doctor, "/sys/bus/pci/devices", path);
  DIR *directory = opendir(path);
  size_t count = 0;
  const struct dirent *entry = NULL;
  while (directory != NULL && (entry = readdir(directory)) != NULL) {
    char file[kvp_ctl_path_bytes_max];
    char vendor[32];
    char class[32];
    (void)snprintf(file, sizeof file, "/sys/bus/pci/devices/%.64s/vendor", entry->d_name);
    if (!kvp_ctl_doctor_line(doctor, file, vendor, sizeof vendor) || strcmp(vendor, "0x10de") != 0) {
      continue;
    }
    (void)snprintf(file, sizeof file, "/sys/bus/pci/devices/%.64s/class", entry->d_name);
    count += kvp_ctl_doctor_line(doctor, file, class, sizeof class) && strncmp(class, "0x03", 4) == 0 ? 1 : 0;
  }
  if (directory != NULL) {
    (void)closedir(directory);
  }
  return count;
}

/* "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue ..." -> "580.95.05" */
static const char *version_in(char *line) {
  char *rest = NULL;
  for (char *word = strtok_r(line, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
    if (isdigit((unsigned char)word[0]) != 0 && strchr(word, '.') != NULL) {
      return word;
    }
  }
  return "of an unknown version";
}

/* Opening is what counts: a container's device rules don't show in the mode. */
static bool node_check(struct kvp_ctl_doctor *doctor, const char *node) {
  char path[kvp_ctl_path_bytes_max];
  kvp_ctl_doctor_path(doctor, node, path);
  int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd >= 0) {
    (void)close(fd);
    return true;
  }
  int failure = errno;
  struct stat status = {0};
  (void)stat(path, &status);
  struct kvp_ctl_finding *finding = kvp_ctl_doctor_add(
      doctor, KVP_CTL_FINDING_PROBLEM, "device nodes", "uid %u may not use %s: %s (uid %u, group %u, mode %04o)",
      (unsigned)geteuid(), node, strerror(failure), (unsigned)status.st_uid, (unsigned)status.st_gid,
      (unsigned)status.st_mode & 07777U);
  kvp_ctl_doctor_advise(finding,
                        "let kvpoold's user read and write it (a group, or the module option "
                        "NVreg_DeviceFileMode); %s",
                        container_hint);
  return false;
}

static void nodes_check(struct kvp_ctl_doctor *doctor) {
  char nodes[nodes_max][32];
  size_t count = gpu_nodes(doctor, nodes);
  bool has_control = kvp_ctl_doctor_has(doctor, "/dev/nvidiactl");
  bool has_memory = kvp_ctl_doctor_has(doctor, "/dev/nvidia-uvm");
  if (count == 0 || !has_control || !has_memory) {
    const char *missing = count == 0 ? "/dev/nvidia0" : !has_control ? "/dev/nvidiactl" : "/dev/nvidia-uvm";
    struct kvp_ctl_finding *finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "device nodes", "%s is not there", missing);
    kvp_ctl_doctor_advise(finding,
                          "as root: nvidia-modprobe -c 0 -u (a service that may gain no privileges can't do it "
                          "itself; nvidia-persistenced does at boot); %s",
                          container_hint);
    return;
  }
  bool good = node_check(doctor, "/dev/nvidiactl") && node_check(doctor, "/dev/nvidia-uvm");
  for (size_t i = 0; i < count && good; i++) {
    good = node_check(doctor, nodes[i]);
  }
  if (good) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "device nodes",
                       "/dev/nvidiactl, /dev/nvidia-uvm and %zu of GPUs open for uid %u", count, (unsigned)geteuid());
  }
}

void kvp_ctl_doctor_driver(struct kvp_ctl_doctor *doctor) {
  char line[line_bytes_max];
  char nodes[nodes_max][32];
  bool is_loaded = kvp_ctl_doctor_line(doctor, version_path, line, sizeof line);
  doctor->has_gpu = is_loaded || gpu_nodes(doctor, nodes) > 0 || kvp_ctl_doctor_has(doctor, "/dev/nvidiactl");
  if (!doctor->has_gpu) {
    size_t on_bus = pci_gpus(doctor);
    struct kvp_ctl_finding *finding = NULL;
    if (on_bus == 0) {
      kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "driver",
                         "no NVIDIA GPU and no driver of one: the host backend (host:0) serves");
      return;
    }
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "driver",
                                 "%zu NVIDIA GPU%s on the PCI bus, but no driver is loaded: only the host backend "
                                 "(host:0) serves",
                                 on_bus, on_bus == 1 ? "" : "s");
    kvp_ctl_doctor_advise(finding, "install NVIDIA's driver, or load it (modprobe nvidia); %s", container_hint);
    return;
  }
  if (!is_loaded) {
    struct kvp_ctl_finding *finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "driver",
                           "there are device nodes of GPUs, but no kernel module (%s)", version_path);
    kvp_ctl_doctor_advise(finding, "modprobe nvidia, or install the driver anew for this kernel");
    return;
  }
  kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "driver", "NVIDIA kernel driver %s", version_in(line));
  nodes_check(doctor);
}
