/* The GPUs of the host, by NVIDIA's management library, and which of CUDA's numbers each of them has here. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/doctor.h"
#include "client/kvpoolctl/text.h"

enum { text_bytes_max = 96, number_bytes_max = 192, compute_major_least = 8, nvml_not_supported = 3 };

/* The library's numbers. */
enum compute_mode { MODE_DEFAULT, MODE_EXCLUSIVE_THREAD, MODE_PROHIBITED, MODE_EXCLUSIVE_PROCESS };

struct nvml_memory {
  unsigned long long total_bytes;
  unsigned long long free_bytes;
  unsigned long long used_bytes;
};

struct gpu {
  char name[text_bytes_max];
  char uuid[text_bytes_max];
  struct nvml_memory memory;
  int mode; /* -1: not told, like the rest */
  int major, minor;
  unsigned mig;
  char failed[text_bytes_max];  /* what the library was asked for in vain; "": nothing */
  char failure[text_bytes_max]; /* its words for it */
};

struct gpus_look {
  bool is_loaded;
  char failure[256]; /* "" when it worked */
  unsigned count;    /* of the host, also those that don't fit */
  struct gpu gpus[kvp_ctl_gpus_max];
};

struct nvml {
  int (*init)(void);
  const char *(*error_string)(int);
  int (*count)(unsigned *);
  int (*handle)(unsigned, void **);
  int (*name)(void *, char *, unsigned);
  int (*uuid)(void *, char *, unsigned);
  int (*memory)(void *, struct nvml_memory *);
  int (*mode)(void *, int *);
  int (*capability)(void *, int *, int *);
  int (*mig)(void *, unsigned *, unsigned *);
};

static bool nvml_load(struct nvml *nvml, char failure[256]) {
  const struct {
    const char *symbol;
    void *place; /* of a function pointer */
  } functions[] = {
      {"nvmlInit_v2", &nvml->init},
      {"nvmlErrorString", &nvml->error_string},
      {"nvmlDeviceGetCount_v2", &nvml->count},
      {"nvmlDeviceGetHandleByIndex_v2", &nvml->handle},
      {"nvmlDeviceGetName", &nvml->name},
      {"nvmlDeviceGetUUID", &nvml->uuid},
      {"nvmlDeviceGetMemoryInfo", &nvml->memory},
      {"nvmlDeviceGetComputeMode", &nvml->mode},
      {"nvmlDeviceGetCudaComputeCapability", &nvml->capability},
      {"nvmlDeviceGetMigMode", &nvml->mig},
  };
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    const char *why = dlerror();
    (void)snprintf(failure, 256, "%s", why == NULL ? "?" : why);
    return false;
  }
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    void *function = dlsym(library, functions[i].symbol);
    if (function == NULL) {
      (void)snprintf(failure, 256, "libnvidia-ml.so.1 has no %s", functions[i].symbol);
      return false;
    }
    memcpy(functions[i].place, &function, sizeof function);
  }
  return true;
}

/* The first failure is kept. What a GPU doesn't have is none. */
static bool gpu_ask(const struct nvml *nvml, struct gpu *gpu, const char *what, int failed) {
  if (failed != 0 && failed != nvml_not_supported && gpu->failed[0] == '\0') {
    (void)snprintf(gpu->failed, sizeof gpu->failed, "%s", what);
    (void)snprintf(gpu->failure, sizeof gpu->failure, "%s", nvml->error_string(failed));
  }
  return failed == 0;
}

static void gpu_look(const struct nvml *nvml, unsigned index, struct gpu *gpu) {
  void *device = NULL;
  unsigned pending = 0;
  gpu->mode = -1;
  (void)snprintf(gpu->name, sizeof gpu->name, "unknown");
  int failed = nvml->handle(index, &device);
  if (failed != 0) {
    (void)snprintf(gpu->failed, sizeof gpu->failed, "it");
    (void)snprintf(gpu->failure, sizeof gpu->failure, "%s", nvml->error_string(failed));
    return;
  }
  (void)gpu_ask(nvml, gpu, "its name", nvml->name(device, gpu->name, sizeof gpu->name));
  (void)gpu_ask(nvml, gpu, "its UUID", nvml->uuid(device, gpu->uuid, sizeof gpu->uuid));
  (void)gpu_ask(nvml, gpu, "its memory", nvml->memory(device, &gpu->memory));
  (void)gpu_ask(nvml, gpu, "its compute capability", nvml->capability(device, &gpu->major, &gpu->minor));
  if (!gpu_ask(nvml, gpu, "its compute mode", nvml->mode(device, &gpu->mode))) {
    gpu->mode = -1;
  }
  if (!gpu_ask(nvml, gpu, "its MIG mode", nvml->mig(device, &gpu->mig, &pending))) {
    gpu->mig = 0;
  }
}

static void gpus_look(void *out) {
  struct gpus_look *look = out;
  struct nvml nvml;
  if (!nvml_load(&nvml, look->failure)) {
    return;
  }
  look->is_loaded = true;
  int failed = nvml.init();
  failed = failed != 0 ? failed : nvml.count(&look->count);
  if (failed != 0) {
    (void)snprintf(look->failure, sizeof look->failure, "%s", nvml.error_string(failed));
    return;
  }
  for (unsigned i = 0; i < look->count && i < kvp_ctl_gpus_max; i++) {
    gpu_look(&nvml, i, &look->gpus[i]);
  }
}

static const char *mode_name(int mode) {
  static const char *const names[] = {"default", "exclusive_thread", "prohibited", "exclusive_process"};
  return mode >= 0 && mode < (int)(sizeof names / sizeof names[0]) ? names[mode] : "unknown";
}

static bool is_new_enough(const struct gpu *gpu) {
  return gpu->major == 0 || gpu->major >= compute_major_least; /* 0: not told */
}

/* -1: CUDA has no number for it here. */
static int cuda_index(const struct kvp_ctl_doctor *doctor, const struct gpu *gpu) {
  for (int i = 0; i < doctor->cuda_count; i++) {
    if (strcmp(doctor->cuda_uuids[i], gpu->uuid) == 0) {
      return i;
    }
  }
  return -1;
}

/* The first thing that is in the way. index: NVIDIA's tools' number for it. */
static enum kvp_ctl_finding_result gpu_judge(const struct kvp_ctl_doctor *doctor, unsigned index,
                                             const struct gpu *gpu, char advice[kvp_ctl_finding_bytes_max]) {
  enum { bytes = kvp_ctl_finding_bytes_max };
  if (gpu->mode == MODE_PROHIBITED) {
    (void)snprintf(advice, bytes, "nobody may compute on it: nvidia-smi -i %u -c DEFAULT", index);
    return KVP_CTL_FINDING_PROBLEM;
  }
  if ((gpu->mode == MODE_EXCLUSIVE_PROCESS || gpu->mode == MODE_EXCLUSIVE_THREAD) && !doctor->has_mps) {
    (void)snprintf(
        advice, bytes,
        "one process at a time may use it, and kvpoold's executor would be it: start MPS, or nvidia-smi -i "
        "%u -c DEFAULT",
        index);
    return KVP_CTL_FINDING_WARNING;
  }
  if (!is_new_enough(gpu)) {
    (void)snprintf(advice, bytes, "kvpool-exec needs compute capability 8.0; use another device");
    return KVP_CTL_FINDING_WARNING;
  }
  if (gpu->mig != 0) {
    (void)snprintf(advice, bytes, "MIG is on: kvpoold has not been made for slices; nvidia-smi -i %u -mig 0", index);
    return KVP_CTL_FINDING_WARNING;
  }
  if (gpu->memory.total_bytes > 0 && gpu->memory.free_bytes < gpu->memory.total_bytes / 10) {
    (void)snprintf(advice, bytes, "most of its memory is in use (nvidia-smi says by whom): little is left for pools");
    return KVP_CTL_FINDING_WARNING;
  }
  return KVP_CTL_FINDING_OK;
}

/* What programs of this environment call it. */
static void number_format(const struct kvp_ctl_doctor *doctor, unsigned index, int cuda, char out[number_bytes_max]) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  out[0] = '\0';
  if (cuda < 0 && doctor->cuda_count >= 0) {
    (void)snprintf(out, number_bytes_max, "; CUDA does not show it here (CUDA_VISIBLE_DEVICES is %.96s)",
                   visible == NULL ? "not set" : visible);
  } else if (cuda >= 0 && (unsigned)cuda != index) {
    (void)snprintf(out, number_bytes_max, "; nvidia-smi's GPU %u (CUDA_VISIBLE_DEVICES is %.96s)", index,
                   visible == NULL ? "not set" : visible);
  }
}

/* The first that nothing is in the way of; one with a warning only where there is no better one. */
static void gpu_choose(struct kvp_ctl_doctor *doctor, int cuda, const struct gpu *gpu,
                       enum kvp_ctl_finding_result result) {
  bool is_usable = cuda >= 0 && result != KVP_CTL_FINDING_PROBLEM && is_new_enough(gpu) && gpu->mig == 0;
  bool is_better = doctor->device[0] == '\0' || (result == KVP_CTL_FINDING_OK && doctor->device_is_doubtful);
  if (is_usable && is_better) {
    (void)snprintf(doctor->device, sizeof doctor->device, "cuda:%d", cuda);
    (void)snprintf(doctor->device_reason, sizeof doctor->device_reason, "%s", gpu->name);
    doctor->device_is_doubtful = result != KVP_CTL_FINDING_OK;
  }
}

static void gpu_told(struct kvp_ctl_doctor *doctor, unsigned index, const struct gpu *gpu) {
  char name[24];
  char number[number_bytes_max];
  char advice[kvp_ctl_finding_bytes_max] = "";
  struct kvp_ctl_finding *finding = NULL;
  const int cuda = cuda_index(doctor, gpu);
  (void)snprintf(name, sizeof name, cuda < 0 ? "GPU %u" : "cuda:%u", cuda < 0 ? index : (unsigned)cuda);
  if (gpu->failed[0] != '\0') {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, name,
                                 "the management library can't say %s: %s (nvidia-smi's GPU %u)", gpu->failed,
                                 gpu->failure, index);
    kvp_ctl_doctor_advise(finding,
                          "nvidia-smi -i %u and the kernel's log (dmesg | grep NVRM) say more; a GPU that is "
                          "lost comes back with a reset (nvidia-smi -i %u -r) or a reboot",
                          index, index);
    return;
  }
  enum kvp_ctl_finding_result result = gpu_judge(doctor, index, gpu, advice);
  number_format(doctor, index, cuda, number);
  finding = kvp_ctl_doctor_add(
      doctor, result, name, "%s, %s of %s free, compute capability %d.%d, compute mode %s; also cuda:%s%s", gpu->name,
      kvp_ctl_bytes(gpu->memory.free_bytes).text, kvp_ctl_bytes(gpu->memory.total_bytes).text, gpu->major, gpu->minor,
      mode_name(gpu->mode), gpu->uuid, number);
  kvp_ctl_doctor_advise(finding, "%s", advice);
  gpu_choose(doctor, cuda, gpu, result);
}

void kvp_ctl_doctor_gpus(struct kvp_ctl_doctor *doctor) {
  if (!doctor->has_gpu) {
    return;
  }
  struct gpus_look look = {0};
  struct kvp_ctl_finding *finding = NULL;
  enum kvp_ctl_probe probe = kvp_ctl_doctor_probe(doctor, gpus_look, &look, sizeof look);
  if (probe != KVP_CTL_PROBE_DONE) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "GPUs", "asking for them %s",
                                 probe == KVP_CTL_PROBE_HANGS ? "does not end" : "ends the process");
    kvp_ctl_doctor_advise(finding, "nvidia-smi and the kernel's log (dmesg | grep NVRM) say more");
  } else if (!look.is_loaded) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "GPUs", "can't be listed: %s", look.failure);
    kvp_ctl_doctor_advise(finding, "install it with the driver's libraries; in a container: "
                                   "NVIDIA_DRIVER_CAPABILITIES=compute,utility");
    if (doctor->cuda_count > 0) { /* kvpool-exec does without it */
      (void)snprintf(doctor->device, sizeof doctor->device, "cuda:0");
      (void)snprintf(doctor->device_reason, sizeof doctor->device_reason, "a GPU");
    }
  } else if (look.failure[0] != '\0') {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "GPUs", "can't be listed: %s", look.failure);
    kvp_ctl_doctor_advise(finding, "after an update of the driver: reboot, or load the new kernel module");
  }
  for (unsigned i = 0; i < look.count && i < kvp_ctl_gpus_max; i++) {
    gpu_told(doctor, i, &look.gpus[i]);
  }
}
