/* Findings, and the files that the checks read. */
#include "client/kvpoolctl/doctor.h"

#include <assert.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct kvp_ctl_finding *kvp_ctl_doctor_add(struct kvp_ctl_doctor *doctor, enum kvp_ctl_finding_result result,
                                           const char *name, const char *format, ...) {
  assert(doctor->count < kvp_ctl_findings_max);
  struct kvp_ctl_finding *finding = &doctor->findings[doctor->count++];
  finding->area = doctor->area;
  finding->result = result;
  (void)snprintf(finding->name, sizeof finding->name, "%s", name);
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(finding->text, sizeof finding->text, format, arguments);
  va_end(arguments);
  return finding;
}

void kvp_ctl_doctor_advise(struct kvp_ctl_finding *finding, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(finding->advice, sizeof finding->advice, format, arguments);
  va_end(arguments);
}

void kvp_ctl_doctor_path(const struct kvp_ctl_doctor *doctor, const char *path, char out[kvp_ctl_path_bytes_max]) {
  (void)snprintf(out, kvp_ctl_path_bytes_max, "%s%s", doctor->root, path);
}

bool kvp_ctl_doctor_has(const struct kvp_ctl_doctor *doctor, const char *path) {
  char full[kvp_ctl_path_bytes_max];
  kvp_ctl_doctor_path(doctor, path, full);
  return access(full, F_OK) == 0;
}

/* Once, however often it is asked for. */
static void foreign_told(struct kvp_ctl_doctor *doctor, const char *path) {
  char text[kvp_ctl_finding_bytes_max];
  (void)snprintf(text, sizeof text, "%s is no regular file: it was not read", path);
  for (uint32_t i = 0; i < doctor->count; i++) {
    if (strcmp(doctor->findings[i].text, text) == 0) {
      return;
    }
  }
  kvp_ctl_doctor_advise(kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "file", "%s", text),
                        "find out who made it, and remove it");
}

/* The type is looked at first: opening a device may do something. It may be another one by then, hence once more. */
FILE *kvp_ctl_doctor_open(struct kvp_ctl_doctor *doctor, const char *path) {
  struct stat status;
  if (stat(path, &status) != 0) {
    return NULL;
  }
  int fd = S_ISREG(status.st_mode) ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
  bool is_regular = S_ISREG(status.st_mode) && (fd < 0 || (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)));
  FILE *file = fd >= 0 && is_regular ? fdopen(fd, "r") : NULL;
  if (file == NULL && fd >= 0) {
    (void)close(fd);
  }
  if (!is_regular) {
    foreign_told(doctor, path);
  }
  return file;
}

bool kvp_ctl_doctor_line(struct kvp_ctl_doctor *doctor, const char *path, char *out, size_t out_bytes) {
  char full[kvp_ctl_path_bytes_max];
  kvp_ctl_doctor_path(doctor, path, full);
  FILE *file = kvp_ctl_doctor_open(doctor, full);
  if (file == NULL) {
    return false;
  }
  bool there = fgets(out, (int)out_bytes, file) != NULL;
  (void)fclose(file);
  if (there) {
    out[strcspn(out, "\n")] = '\0';
  }
  return there;
}
