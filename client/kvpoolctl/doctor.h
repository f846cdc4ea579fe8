/* What doctor finds: one line a check, with what to do about it. Each part of the host has a file of its own. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_DOCTOR_H
#define KVPOOL_CLIENT_KVPOOLCTL_DOCTOR_H

#include "client/kvpoolctl/ctl.h"

enum kvp_ctl_finding_result { KVP_CTL_FINDING_OK, KVP_CTL_FINDING_WARNING, KVP_CTL_FINDING_PROBLEM };

enum {
  kvp_ctl_findings_max = 128,
  kvp_ctl_finding_bytes_max = 640,
  kvp_ctl_path_bytes_max = 512,
};

struct kvp_ctl_finding {
  const char *area; /* "GPU" */
  char name[24];    /* "driver" */
  enum kvp_ctl_finding_result result;
  char text[kvp_ctl_finding_bytes_max];
  char advice[kvp_ctl_finding_bytes_max]; /* "" when there is nothing to do */
};

struct kvp_ctl_doctor {
  struct kvp_ctl *ctl;
  const char *root; /* in front of every path that is looked at; "": this host */
  const char *area; /* of the findings to come */
  uint32_t count;
  struct kvp_ctl_finding findings[kvp_ctl_findings_max];
  /* Found on the way, for later checks. */
  bool has_gpu;        /* its driver or its device nodes are there */
  bool has_mps;        /* a control daemon runs */
  uint32_t daemon_uid; /* of the socket's owner; ours when there is none */
};

/* Adds a finding, whose text is the next one's to set. name is kept short: it heads a column. */
struct kvp_ctl_finding *kvp_ctl_doctor_add(struct kvp_ctl_doctor *doctor, enum kvp_ctl_finding_result result,
                                           const char *name, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* What to do about it. */
void kvp_ctl_doctor_advise(struct kvp_ctl_finding *finding, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* `path` below the root. */
void kvp_ctl_doctor_path(const struct kvp_ctl_doctor *doctor, const char *path, char out[kvp_ctl_path_bytes_max]);
bool kvp_ctl_doctor_has(const struct kvp_ctl_doctor *doctor, const char *path);
/* The first line of a file, without its end. False: there is none. */
bool kvp_ctl_doctor_line(const struct kvp_ctl_doctor *doctor, const char *path, char *out, size_t out_bytes);

enum kvp_ctl_probe { KVP_CTL_PROBE_DONE, KVP_CTL_PROBE_CRASHED, KVP_CTL_PROBE_HANGS };

/* Runs `look` in a child and gives back what it has filled *out with: a driver that crashes or hangs takes only the
 * child with it. Nothing of this process may have threads yet. */
enum kvp_ctl_probe kvp_ctl_doctor_probe(void (*look)(void *out), void *out, size_t out_bytes);

/* The checks, in this order. */
void kvp_ctl_doctor_driver(struct kvp_ctl_doctor *doctor); /* kernel module, device nodes: has_gpu */
void kvp_ctl_doctor_mps(struct kvp_ctl_doctor *doctor);    /* has_mps */
void kvp_ctl_doctor_cuda(struct kvp_ctl_doctor *doctor);   /* libcuda, and the executor's build */
void kvp_ctl_doctor_gpus(struct kvp_ctl_doctor *doctor);   /* by libnvidia-ml */
void kvp_ctl_doctor_host(struct kvp_ctl_doctor *doctor);   /* limits, memory */
void kvp_ctl_doctor_daemon(struct kvp_ctl_doctor *doctor); /* socket, lock, kvpoold itself; connects */

#endif
