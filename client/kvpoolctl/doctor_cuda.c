/* The CUDA driver's library, and the GPUs it has for programs of this environment. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/doctor.h"

enum {
  driver_version_least = 12000, /* CUDA 12.0; an executor of a later toolkit wants its major version */
  cuda_system_not_ready = 802,
  cuda_driver_mismatch = 803,
  cuda_no_device = 100,
  uuid_bytes = 16,
};

/* The library's own, as cuDeviceGetUuid fills it. */
struct uuid {
  unsigned char bytes[uuid_bytes];
};

struct cuda_look {
  bool is_loaded;
  int version;      /* 12040: CUDA 12.4; 0: not told */
  const char *call; /* that failed, a literal of this program; NULL: none */
  int failure;      /* CUresult of it */
  int count;        /* of GPUs */
  char text[256];
  struct uuid uuids[kvp_ctl_gpus_max];
};

static bool find(void *library, const char *symbol, void *place) {
  void *function = dlsym(library, symbol);
  memcpy(place, &function, sizeof function);
  return function != NULL;
}

static void devices_look(void *library, struct cuda_look *look) {
  int (*count)(int *) = NULL;
  int (*get)(int *, int) = NULL;
  int (*uuid)(struct uuid *, int) = NULL;
  look->call = "cuDeviceGetCount";
  look->failure = find(library, look->call, &count) ? count(&look->count) : -1;
  if (look->failure != 0) {
    return;
  }
  look->call = NULL;
  if (!find(library, "cuDeviceGet", &get) ||
      (!find(library, "cuDeviceGetUuid", &uuid) && !find(library, "cuDeviceGetUuid_v2", &uuid))) {
    return;
  }
  for (int i = 0; i < look->count && i < kvp_ctl_gpus_max; i++) {
    int device = 0;
    if (get(&device, i) != 0 || uuid(&look->uuids[i], device) != 0) {
      look->uuids[i] = (struct uuid){0};
    }
  }
}

/* No context is made: nothing of a GPU is taken. */
static void cuda_look(void *out) {
  struct cuda_look *look = out;
  int (*version)(int *) = NULL;
  int (*init)(unsigned) = NULL;
  int (*error_name)(int, const char **) = NULL;
  (void)setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1); /* as kvpool-exec counts */
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    const char *why = dlerror();
    (void)snprintf(look->text, sizeof look->text, "%s", why == NULL ? "?" : why);
    return;
  }
  look->is_loaded = true;
  if (find(library, "cuDriverGetVersion", &version)) {
    (void)version(&look->version);
  }
  look->call = "cuInit";
  look->failure = find(library, look->call, &init) ? init(0) : -1;
  if (look->failure == 0) {
    devices_look(library, look);
  }
  const char *name = NULL;
  if (look->failure != 0 && find(library, "cuGetErrorName", &error_name) && error_name(look->failure, &name) == 0) {
    (void)snprintf(look->text, sizeof look->text, "%s", name);
  }
}

/* ---- what it means ----------------------------------------------------------------------------------------------
 */

static int version_needed(void) {
  int needed = atoi(KVPOOL_CUDA_VERSION) * 1000; /* NOLINT(cert-err34-c): "" is 0 */
  return needed > driver_version_least ? needed : driver_version_least;
}

/* The driver works, but has no GPU to give. */
static void no_gpu_advise(const struct kvp_ctl_doctor *doctor, struct kvp_ctl_finding *finding) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible != NULL) {
    kvp_ctl_doctor_advise(
        finding,
        "CUDA_VISIBLE_DEVICES is '%s', which hides every GPU: unset it for kvpoold, or name one that "
        "nvidia-smi -L lists",
        visible);
  } else if (!kvp_ctl_doctor_has(doctor, "/dev/nvidia0")) {
    kvp_ctl_doctor_advise(finding,
                          "CUDA_VISIBLE_DEVICES is not set, but there is no /dev/nvidia0: a container without "
                          "GPUs? start it with them (docker run --gpus all)");
  } else {
    kvp_ctl_doctor_advise(finding,
                          "CUDA_VISIBLE_DEVICES is not set: the driver's library and its kernel module may be "
                          "of different versions (nvidia-smi says so; reboot after an update), or the GPU has "
                          "failed (dmesg | grep NVRM)");
  }
}

static void failure_told(struct kvp_ctl_doctor *doctor, const struct cuda_look *look) {
  struct kvp_ctl_finding *finding =
      kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "libcuda", "%s fails: %s (%d)", look->call,
                         look->text[0] != '\0' ? look->text : "an unknown error", look->failure);
  if (look->failure == cuda_system_not_ready) {
    kvp_ctl_doctor_advise(finding, "GPUs behind NVSwitches need their fabric manager: systemctl start "
                                   "nvidia-fabricmanager (of the driver's version)");
  } else if (look->failure == cuda_driver_mismatch) {
    kvp_ctl_doctor_advise(finding, "libcuda and the kernel module are of different versions: after an update of the "
                                   "driver reboot; in a container take the host's libraries, not the image's");
  } else if (look->failure == cuda_no_device) {
    no_gpu_advise(doctor, finding);
  } else {
    kvp_ctl_doctor_advise(finding, "nvidia-smi and the kernel's log (dmesg | grep NVRM) say more; after an update of "
                                   "the driver: reboot");
  }
}

static void look_told(struct kvp_ctl_doctor *doctor, const struct cuda_look *look) {
  struct kvp_ctl_finding *finding = NULL;
  int needed = version_needed();
  if (!look->is_loaded) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "libcuda", "%s", look->text);
    kvp_ctl_doctor_advise(finding, "install the libraries of the driver's version (Debian: libcuda1, Ubuntu: "
                                   "libnvidia-compute-VERSION); in a container: "
                                   "NVIDIA_DRIVER_CAPABILITIES=compute,utility");
  } else if (look->failure != 0) {
    failure_told(doctor, look);
  } else if (look->version < needed) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "libcuda",
                                 "the driver knows CUDA %d.%d, kvpool-exec needs %d.%d", look->version / 1000,
                                 look->version % 1000 / 10, needed / 1000, needed % 1000 / 10);
    kvp_ctl_doctor_advise(finding, "update the driver, or build kvpoold with an older CUDA toolkit");
  } else if (look->count <= 0) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "libcuda", "CUDA %d.%d starts, but has no GPU",
                                 look->version / 1000, look->version % 1000 / 10);
    no_gpu_advise(doctor, finding);
  } else {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "libcuda", "CUDA %d.%d, %d GPU%s", look->version / 1000,
                       look->version % 1000 / 10, look->count, look->count == 1 ? "" : "s");
  }
}

/* As NVIDIA's tools write it: 8-4-4-4-12 digits. */
static void uuid_format(const struct uuid *uuid, char out[kvp_ctl_uuid_bytes_max]) {
  size_t used = (size_t)snprintf(out, kvp_ctl_uuid_bytes_max, "GPU");
  for (int i = 0; i < uuid_bytes; i++) {
    bool begins = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    used += (size_t)snprintf(out + used, kvp_ctl_uuid_bytes_max - used, "%s%02x", begins ? "-" : "", uuid->bytes[i]);
  }
}

void kvp_ctl_doctor_cuda(struct kvp_ctl_doctor *doctor) {
  doctor->cuda_count = -1;
  if (!doctor->has_gpu) {
    return;
  }
  struct cuda_look look = {0};
  enum kvp_ctl_probe probe = kvp_ctl_doctor_probe(doctor, cuda_look, &look, sizeof look);
  if (probe != KVP_CTL_PROBE_DONE) {
    struct kvp_ctl_finding *finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "libcuda", "starting CUDA %s",
                           probe == KVP_CTL_PROBE_HANGS ? "does not end" : "ends the process");
    kvp_ctl_doctor_advise(finding, doctor->has_mps ? "an MPS server that recovers from a fault waits for the "
                                                     "processes of that fault to end: nvidia-smi lists them"
                                                   : "nvidia-smi and the kernel's log (dmesg | grep NVRM) say more");
    return;
  }
  look_told(doctor, &look);
  if (look.is_loaded && look.failure == 0) {
    doctor->cuda_count = look.count < 0 ? 0 : look.count > kvp_ctl_gpus_max ? kvp_ctl_gpus_max : look.count;
  }
  for (int i = 0; i < doctor->cuda_count; i++) {
    uuid_format(&look.uuids[i], doctor->cuda_uuids[i]);
  }
}
