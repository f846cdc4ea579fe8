/* kvpoold's configuration and the executor that it names, in the daemon's own words: kvpoold --check-config says both,
 * so that nobody else reads its file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"

enum { output_bytes_max = 1 << 16 };

static const char config_default[] = KVPOOL_SYSCONFDIR "/kvpoold/kvpoold.conf";

/* A program beside this one, where a build tree or an installation puts it. */
static bool beside(const char *const *relative, size_t count, char out[kvp_ctl_path_bytes_max]) {
  char self[256];
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length <= 0) {
    return false;
  }
  self[length] = '\0';
  *strrchr(self, '/') = '\0';
  for (size_t i = 0; i < count; i++) {
    (void)snprintf(out, kvp_ctl_path_bytes_max, "%s/%s", self, relative[i]);
    if (access(out, X_OK) == 0) {
      return true;
    }
  }
  return false;
}

static bool kvpoold_find(char out[kvp_ctl_path_bytes_max]) {
  static const char *const relative[] = {"kvpoold", "../../server/supervisor/kvpoold"};
  return beside(relative, sizeof relative / sizeof relative[0], out);
}

static bool executor_find(char out[kvp_ctl_path_bytes_max]) {
  static const char *const relative[] = {"../libexec/kvpool/kvpool-exec", "../../server/executor/kvpool-exec",
                                         "kvpool-exec"};
  return beside(relative, sizeof relative / sizeof relative[0], out);
}

/* The rest of the line that begins so. */
static bool line_find(const char *text, const char *begin, char out[kvp_ctl_path_bytes_max]) {
  size_t length = strlen(begin);
  for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
    line += *line == '\n' ? 1 : 0;
    if (strncmp(line, begin, length) == 0) {
      (void)snprintf(out, kvp_ctl_path_bytes_max, "%.*s", (int)strcspn(line + length, "\n"), line + length);
      return true;
    }
  }
  return false;
}

/* ---- the configuration ------------------------------------------------------------------------------------------
 */

static void config_failed(struct kvp_ctl_doctor *doctor, const char *config, enum kvp_ctl_probe probe, char *output) {
  struct kvp_ctl_finding *finding = NULL;
  output[strcspn(output, "\n")] = '\0';
  if (probe == KVP_CTL_PROBE_DONE) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "configuration", "%s",
                                 output[0] == '\0' ? "kvpoold refuses it without a word" : output);
    kvp_ctl_doctor_advise(finding, "kvpoold --config %s --check-config says it, too", config);
  } else {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "configuration", "kvpoold --check-config %s",
                                 probe == KVP_CTL_PROBE_HANGS ? "does not end" : "can't be run");
    kvp_ctl_doctor_advise(finding, "install kvpoold anew; it was to read %s", config);
  }
}

/* The executor of the daemon's configuration. False: nobody says. */
static bool config_check(struct kvp_ctl_doctor *doctor, char executor[kvp_ctl_path_bytes_max]) {
  char kvpoold[kvp_ctl_path_bytes_max];
  const char *config = doctor->config != NULL              ? doctor->config
                       : access(config_default, F_OK) == 0 ? config_default
                                                           : NULL;
  if (!kvpoold_find(kvpoold)) {
    if (doctor->config != NULL) {
      kvp_ctl_doctor_advise(kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "configuration",
                                               "%s is not looked at: there is no kvpoold beside this program",
                                               config),
                            "use the kvpoolctl that was installed with the daemon");
    }
    return false;
  }
  const char *command[] = {kvpoold, "--check-config", NULL, NULL, NULL};
  if (config != NULL) {
    command[2] = "--config";
    command[3] = config;
  }
  char *output = kvp_ctl_allocate(1, output_bytes_max);
  int exit_status = -1;
  enum kvp_ctl_probe probe = kvp_ctl_doctor_run(doctor, command, output, output_bytes_max, &exit_status);
  bool is_good = probe == KVP_CTL_PROBE_DONE && exit_status == 0;
  if (!is_good) {
    config_failed(doctor, config == NULL ? "no file" : config, probe, output);
  } else if (config != NULL) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "configuration", "%s is valid", config);
  }
  is_good = is_good && line_find(output, "executor: ", executor);
  free(output);
  return is_good;
}

/* ---- the executor -----------------------------------------------------------------------------------------------
 */

static void executor_failed(struct kvp_ctl_doctor *doctor, const char *path, const char *what) {
  struct kvp_ctl_finding *finding =
      kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "kvpool-exec", "%s %s", path, what);
  kvp_ctl_doctor_advise(finding, "kvpoold can't serve without it: name the right one with `executor` in its "
                                 "configuration or --executor, or install it anew");
}

/* Its --help ends with the devices it was built for. */
static void executor_check(struct kvp_ctl_doctor *doctor, const char *path) {
  const char *const command[] = {path, "--help", NULL};
  char devices[kvp_ctl_path_bytes_max];
  int exit_status = -1;
  if (access(path, X_OK) != 0) {
    executor_failed(doctor, path, "is not there, or not to be run by this user");
    return;
  }
  char *help = kvp_ctl_allocate(1, output_bytes_max);
  enum kvp_ctl_probe probe = kvp_ctl_doctor_run(doctor, command, help, output_bytes_max, &exit_status);
  bool is_known = line_find(help, "Devices of this build: ", devices);
  free(help);
  if (probe != KVP_CTL_PROBE_DONE) {
    executor_failed(doctor, path, probe == KVP_CTL_PROBE_HANGS ? "--help does not end" : "can't be run");
  } else if (!is_known) {
    executor_failed(doctor, path, "is no kvpool-exec: its --help doesn't say which devices it was built for");
  } else if (strstr(devices, "cuda:") != NULL) {
    doctor->has_backend = true;
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "kvpool-exec", "built with the CUDA backend (%s)", path);
  } else if (doctor->has_gpu) {
    struct kvp_ctl_finding *finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "kvpool-exec",
                           "built without the CUDA backend: it serves host:N only (%s)", path);
    kvp_ctl_doctor_advise(finding, "build again where nvcc is on the PATH (README, GPU)");
  } else {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "kvpool-exec", "built for %s (%s)", devices, path);
  }
}

void kvp_ctl_doctor_programs(struct kvp_ctl_doctor *doctor) {
  char executor[kvp_ctl_path_bytes_max] = "";
  bool is_found = config_check(doctor, executor);
  if (doctor->executor != NULL) {
    (void)snprintf(executor, sizeof executor, "%s", doctor->executor);
    is_found = true;
  }
  /* Neither need be there: this program may have been copied here alone. */
  if (is_found || executor_find(executor)) {
    executor_check(doctor, executor);
  }
}
