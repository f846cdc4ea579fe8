/* The CUDA driver's library, and whether this build's executor has a use for it. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"

enum {
  driver_version_least = 12000, /* CUDA 12.0; an executor of a later toolkit wants its major version */
  cuda_system_not_ready = 802,
  cuda_no_device = 100,
};

struct cuda_look {
  bool is_loaded;
  int version; /* 12040: CUDA 12.4; 0: not told */
  int init;    /* CUresult of cuInit */
  int count;   /* of GPUs */
  char text[256];
};

static bool find(void *library, const char *symbol, void *place) {
  void *function = dlsym(library, symbol);
  memcpy(place, &function, sizeof function);
  return function != NULL;
}

/* No context is made: nothing of a GPU is taken. */
static void cuda_look(void *out) {
  struct cuda_look *look = out;
  int (*version)(int *) = NULL;
  int (*init)(unsigned) = NULL;
  int (*count)(int *) = NULL;
  int (*error_name)(int, const char **) = NULL;
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
  look->init = find(library, "cuInit", &init) ? init(0) : -1;
  const char *name = NULL;
  if (look->init != 0 && find(library, "cuGetErrorName", &error_name) && error_name(look->init, &name) == 0) {
    (void)snprintf(look->text, sizeof look->text, "%s", name);
  }
  if (look->init == 0 && find(library, "cuDeviceGetCount", &count)) {
    (void)count(&look->count);
  }
}

static int version_needed(void) {
  int needed = atoi(KVPOOL_CUDA_VERSION) * 1000; /* NOLINT(cert-err34-c): "" is 0 */
  return needed > driver_version_least ? needed : driver_version_least;
}

static void init_failed(struct kvp_ctl_doctor *doctor, const struct cuda_look *look) {
  struct kvp_ctl_finding *finding =
      kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "libcuda", "cuInit fails: %s (%d)",
                         look->text[0] != '\0' ? look->text : "an unknown error", look->init);
  if (look->init == cuda_system_not_ready) {
    kvp_ctl_doctor_advise(finding, "GPUs behind NVSwitches need their fabric manager: systemctl start "
                                   "nvidia-fabricmanager (of the driver's version)");
  } else if (look->init == cuda_no_device) {
    kvp_ctl_doctor_advise(finding, "CUDA_VISIBLE_DEVICES is %s; nvidia-smi -L lists what the driver sees",
                          getenv("CUDA_VISIBLE_DEVICES") == NULL ? "not set" : getenv("CUDA_VISIBLE_DEVICES"));
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
  } else if (look->init != 0) {
    init_failed(doctor, look);
  } else if (look->version < needed) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "libcuda",
                                 "the driver knows CUDA %d.%d, kvpool-exec needs %d.%d", look->version / 1000,
                                 look->version % 1000 / 10, needed / 1000, needed % 1000 / 10);
    kvp_ctl_doctor_advise(finding, "update the driver, or build kvpoold with an older CUDA toolkit");
  } else {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "libcuda", "CUDA %d.%d, %d GPU%s", look->version / 1000,
                       look->version % 1000 / 10, look->count, look->count == 1 ? "" : "s");
  }
}

/* ---- kvpool-exec ------------------------------------------------------------------------------------------------
 */

static bool executor_find(char out[kvp_ctl_path_bytes_max]) {
  static const char *const relative[] = {"../libexec/kvpool/kvpool-exec", "../../server/executor/kvpool-exec",
                                         "kvpool-exec"};
  char self[256];
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length <= 0) {
    return false;
  }
  self[length] = '\0';
  *strrchr(self, '/') = '\0';
  for (size_t i = 0; i < sizeof relative / sizeof relative[0]; i++) {
    (void)snprintf(out, kvp_ctl_path_bytes_max, "%s/%s", self, relative[i]);
    if (access(out, X_OK) == 0) {
      return true;
    }
  }
  return false;
}

/* Its --help ends with the devices it was built for. */
static bool help_has_cuda(FILE *help) {
  static const char heading[] = "Devices of this build:";
  char line[256];
  bool has_cuda = false;
  while (fgets(line, sizeof line, help) != NULL) {
    has_cuda = has_cuda || (strncmp(line, heading, sizeof heading - 1) == 0 && strstr(line, "cuda:") != NULL);
  }
  return has_cuda;
}

static bool executor_has_cuda(const char *path) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return false;
  }
  pid_t child = fork();
  if (child == 0) {
    (void)dup2(ends[1], STDOUT_FILENO);
    (void)execl(path, path, "--help", (char *)NULL);
    _exit(1);
  }
  (void)close(ends[1]);
  FILE *help = fdopen(ends[0], "r");
  bool has_cuda = help != NULL && help_has_cuda(help);
  if (help != NULL) {
    (void)fclose(help);
  }
  if (child > 0) {
    (void)waitpid(child, NULL, 0);
  }
  return has_cuda;
}

static void executor_check(struct kvp_ctl_doctor *doctor) {
  char path[kvp_ctl_path_bytes_max];
  if (!executor_find(path)) {
    return; /* this program may have been copied here alone */
  }
  if (executor_has_cuda(path)) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "kvpool-exec", "built with the CUDA backend (%s)", path);
    return;
  }
  struct kvp_ctl_finding *finding =
      kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "kvpool-exec",
                         "built without the CUDA backend: it serves host:N only (%s)", path);
  kvp_ctl_doctor_advise(finding, "build again where nvcc is on the PATH (README, GPU)");
}

void kvp_ctl_doctor_cuda(struct kvp_ctl_doctor *doctor) {
  if (!doctor->has_gpu) {
    return;
  }
  struct cuda_look look = {0};
  enum kvp_ctl_probe probe = kvp_ctl_doctor_probe(cuda_look, &look, sizeof look);
  if (probe == KVP_CTL_PROBE_DONE) {
    look_told(doctor, &look);
  } else {
    struct kvp_ctl_finding *finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "libcuda", "starting CUDA %s",
                           probe == KVP_CTL_PROBE_HANGS ? "does not end" : "ends the process");
    kvp_ctl_doctor_advise(finding, doctor->has_mps ? "an MPS server that recovers from a fault waits for the "
                                                     "processes of that fault to end: nvidia-smi lists them"
                                                   : "nvidia-smi and the kernel's log (dmesg | grep NVRM) say more");
  }
  executor_check(doctor);
}
