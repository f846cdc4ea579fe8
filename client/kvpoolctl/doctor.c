/* Findings, and what the checks share. */
#include "client/kvpoolctl/doctor.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { probe_ms = 20000 };

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

bool kvp_ctl_doctor_line(const struct kvp_ctl_doctor *doctor, const char *path, char *out, size_t out_bytes) {
  char full[kvp_ctl_path_bytes_max];
  kvp_ctl_doctor_path(doctor, path, full);
  FILE *file = fopen(full, "re");
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

/* ---- probes -----------------------------------------------------------------------------------------------------
 */

static void child_run(void (*look)(void *out), void *out, size_t out_bytes, int result) {
  int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (null >= 0) { /* libraries that complain do so in words of their own */
    (void)dup2(null, STDOUT_FILENO);
    (void)dup2(null, STDERR_FILENO);
  }
  look(out);
  ssize_t written = write(result, out, out_bytes);
  _exit(written == (ssize_t)out_bytes ? 0 : 1);
}

/* All of it, or what came before the end or the deadline. */
static size_t result_read(int result, uint8_t *out, size_t out_bytes, bool *late) {
  size_t got = 0;
  *late = false;
  while (got < out_bytes) {
    struct pollfd wait = {.fd = result, .events = POLLIN};
    int ready = poll(&wait, 1, probe_ms);
    if (ready < 0 && errno == EINTR) {
      continue;
    }
    if (ready <= 0) {
      *late = ready == 0;
      break;
    }
    ssize_t count = read(result, out + got, out_bytes - got);
    if (count <= 0) {
      break;
    }
    got += (size_t)count;
  }
  return got;
}

enum kvp_ctl_probe kvp_ctl_doctor_probe(void (*look)(void *out), void *out, size_t out_bytes) {
  int ends[2];
  uint8_t *copy = kvp_ctl_allocate(1, out_bytes);
  enum kvp_ctl_probe probe = KVP_CTL_PROBE_CRASHED;
  if (pipe2(ends, O_CLOEXEC) != 0) {
    goto err_copy;
  }
  (void)fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    child_run(look, out, out_bytes, ends[1]);
  }
  (void)close(ends[1]);
  if (child > 0) {
    bool late = false;
    size_t got = result_read(ends[0], copy, out_bytes, &late);
    (void)kill(child, SIGKILL);                     /* it has nothing more to say */
    (void)waitpid(child, NULL, late ? WNOHANG : 0); /* one that hangs inside the kernel is not waited for */
    probe = got == out_bytes ? KVP_CTL_PROBE_DONE : late ? KVP_CTL_PROBE_HANGS : KVP_CTL_PROBE_CRASHED;
    if (probe == KVP_CTL_PROBE_DONE) {
      memcpy(out, copy, out_bytes);
    }
  }
  (void)close(ends[0]);

err_copy:
  free(copy);
  return probe;
}
