/* NVIDIA's management library, as libnvidia-ml.so.1, with two GPUs: 0000:3C:00.0 has processes, others have not. Nobody
 * can ask for a GPU by its number.
 */
#include <stdio.h>
#include <string.h>

struct nvml_process {
  unsigned int pid;
  unsigned long long used_bytes;
  unsigned int gpu_instance;
  unsigned int compute_instance;
};

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlSystemGetDriverVersion(char *version, unsigned int bytes);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out);
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, struct nvml_process *out);
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned int *count, struct nvml_process *out);

static const int not_found = 6; /* NVML_ERROR_NOT_FOUND */
static int busy_gpu;

int nvmlInit_v2(void) {
  return 0;
}

int nvmlShutdown(void) {
  return 0;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int bytes) {
  (void)snprintf(version, bytes, "1.2.3");
  return 0;
}

static int find(const char *name, const char *busy, void **out) {
  *out = &busy_gpu;
  return strcmp(name, busy) == 0 ? 0 : not_found;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out) {
  return find(bus_id, "0000:3C:00.0", out);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
  return find(uuid, "GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1", out);
}

/* Under MPS one, without it the same one and another, whose number is in the first one's. No process has such numbers. */
static int tell(unsigned int first, unsigned int *count, struct nvml_process *out) {
  const unsigned int pids[] = {91234567, 1234567};
  unsigned int told = 0;
  for (; told < first && told < *count; told++) {
    out[told] = (struct nvml_process){.pid = pids[told]};
  }
  *count = told;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, struct nvml_process *out) {
  return device == &busy_gpu ? tell(2, count, out) : not_found;
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned int *count, struct nvml_process *out) {
  return device == &busy_gpu ? tell(1, count, out) : not_found;
}
