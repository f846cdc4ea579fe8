/* libnvidia-ml.so.1, by dlopen, and /proc. */
#include "server/executor/device_cuda_nvml.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { processes_max = 64, comm_bytes_max = 32, version_bytes_max = 80 };

/* The library's own types, as far as they are used; 0 is success everywhere. */
typedef struct nvml_device *nvml_device_t;
struct nvml_process {
  unsigned int pid;
  unsigned long long used_bytes;
  unsigned int gpu_instance;
  unsigned int compute_instance;
};

struct nvml {
  void *library;
  int (*init)(void);
  int (*shutdown)(void);
  int (*driver_version)(char *version, unsigned int bytes);
  int (*device_by_pci)(const char *bus_id, nvml_device_t *out);
  int (*device_by_uuid)(const char *uuid, nvml_device_t *out);
  int (*processes)(nvml_device_t device, unsigned int *count, struct nvml_process *out);
  int (*mps_processes)(nvml_device_t device, unsigned int *count, struct nvml_process *out);
};

static void nvml_close(struct nvml *nvml) {
  (void)nvml->shutdown();
  (void)dlclose(nvml->library);
}

static bool nvml_open(struct nvml *nvml) {
  const struct {
    const char *symbol;
    void *place; /* of a function pointer */
  } functions[] = {
      {"nvmlInit_v2", &nvml->init},
      {"nvmlShutdown", &nvml->shutdown},
      {"nvmlSystemGetDriverVersion", &nvml->driver_version},
      {"nvmlDeviceGetHandleByPciBusId_v2", &nvml->device_by_pci},
      {"nvmlDeviceGetHandleByUUID", &nvml->device_by_uuid},
      {"nvmlDeviceGetComputeRunningProcesses_v3", &nvml->processes},
      {"nvmlDeviceGetMPSComputeRunningProcesses_v3", &nvml->mps_processes},
  };
  nvml->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (nvml->library == NULL) {
    return false;
  }
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    void *function = dlsym(nvml->library, functions[i].symbol);
    if (function == NULL) {
      goto err_library;
    }
    memcpy(functions[i].place, &function, sizeof function);
  }
  if (nvml->init() == 0) {
    return true;
  }

err_library:
  (void)dlclose(nvml->library);
  return false;
}

/* "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ...": the first word with digits and dots only. */
static void driver_version_of_kernel(char *out, size_t bytes) {
  char line[256];
  FILE *file = fopen("/proc/driver/nvidia/version", "re");
  if (file == NULL) {
    return;
  }
  if (fgets(line, sizeof line, file) != NULL) {
    char *rest = NULL;
    for (char *word = strtok_r(line, " \t\n", &rest); word != NULL; word = strtok_r(NULL, " \t\n", &rest)) {
      if (strspn(word, "0123456789.") == strlen(word) && strchr(word, '.') != NULL) {
        (void)snprintf(out, bytes, "%s", word);
        break;
      }
    }
  }
  (void)fclose(file);
}

void kvp_nvml_driver_version(char *out, size_t bytes) {
  struct nvml nvml;
  char version[version_bytes_max] = "";
  out[0] = '\0';
  driver_version_of_kernel(out, bytes);
  if (out[0] == '\0' && nvml_open(&nvml)) {
    if (nvml.driver_version(version, sizeof version) == 0) {
      (void)snprintf(out, bytes, "%s", version);
    }
    nvml_close(&nvml);
  }
}

static void comm_read(unsigned int pid, char out[comm_bytes_max]) {
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%u/comm", pid);
  (void)snprintf(out, comm_bytes_max, "?");
  FILE *file = fopen(path, "re");
  if (file != NULL) {
    if (fgets(out, comm_bytes_max, file) != NULL) {
      out[strcspn(out, "\n")] = '\0';
    }
    (void)fclose(file);
  }
}

/* Those that were told so far. */
struct process_list {
  char *text;
  size_t bytes;
  unsigned int pids[2 * processes_max];
  unsigned int count;
};

static bool is_listed(const struct process_list *list, unsigned int pid) {
  unsigned int i = 0;
  while (i < list->count && list->pids[i] != pid) {
    i++;
  }
  return i < list->count;
}

/* Appends those that are not in the list yet, nor this one. */
static void processes_append(struct process_list *list, const struct nvml_process *processes, unsigned int count) {
  for (unsigned int i = 0; i < count && i < processes_max; i++) {
    char entry[comm_bytes_max + 32];
    char comm[comm_bytes_max];
    const unsigned int pid = processes[i].pid;
    if (pid == (unsigned int)getpid() || is_listed(list, pid)) {
      continue;
    }
    list->pids[list->count++] = pid;
    comm_read(pid, comm);
    (void)snprintf(entry, sizeof entry, "%u %s", pid, comm);
    const size_t used = strlen(list->text);
    if (used + strlen(entry) + sizeof ", " <= list->bytes) {
      (void)snprintf(list->text + used, list->bytes - used, "%s%s", used == 0 ? "" : ", ", entry);
    }
  }
}

void kvp_nvml_processes(const char *gpu, char *out, size_t bytes) {
  struct nvml nvml;
  out[0] = '\0';
  if (!nvml_open(&nvml)) {
    return;
  }
  nvml_device_t device = NULL;
  const bool by_uuid = strncmp(gpu, "GPU-", sizeof "GPU-" - 1) == 0;
  if ((by_uuid ? nvml.device_by_uuid(gpu, &device) : nvml.device_by_pci(gpu, &device)) == 0) {
    struct process_list list = {.text = out, .bytes = bytes};
    struct nvml_process processes[processes_max];
    unsigned int count = processes_max;
    if (nvml.mps_processes(device, &count, processes) == 0) {
      processes_append(&list, processes, count);
    }
    count = processes_max;
    if (nvml.processes(device, &count, processes) == 0) {
      processes_append(&list, processes, count);
    }
  }
  nvml_close(&nvml);
}
