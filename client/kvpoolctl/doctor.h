/* What doctor finds: one line a check, with what to do about it. Each part of the host has a file of its own.
 *
 * Nothing that is looked at can hold the doctor: files are read without waiting and only where they are files,
 * libraries and programs run in children with a deadline. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_DOCTOR_H
#define KVPOOL_CLIENT_KVPOOLCTL_DOCTOR_H

#include <stdio.h>

#include "client/kvpoolctl/ctl.h"

enum kvp_ctl_finding_result { KVP_CTL_FINDING_OK, KVP_CTL_FINDING_WARNING, KVP_CTL_FINDING_PROBLEM };

enum {
  kvp_ctl_findings_max = 128,
  kvp_ctl_finding_bytes_max = 640,
  kvp_ctl_path_bytes_max = 512,
  kvp_ctl_gpus_max = 32,
  kvp_ctl_uuid_bytes_max = 48, /* "GPU-" and 36 characters */
  kvp_ctl_device_bytes_max = 16,
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
  const char *root;     /* in front of every path that is looked at; "": this host */
  const char *config;   /* the daemon's configuration file; NULL: the installed one where it is there */
  const char *executor; /* the daemon's flag; NULL: not given */
  const char *area;     /* of the findings to come */
  uint32_t count;
  struct kvp_ctl_finding findings[kvp_ctl_findings_max];
  /* Found on the way, for later checks. */
  bool has_gpu;        /* its driver or its device nodes are there */
  bool has_mps;        /* a control daemon runs */
  bool has_backend;    /* kvpool-exec is there and built for GPUs */
  uint32_t daemon_uid; /* of the socket's owner; ours when there is none */
  int cuda_count;      /* GPUs of CUDA in this environment; -1: it doesn't work */
  char cuda_uuids[kvp_ctl_gpus_max][kvp_ctl_uuid_bytes_max];
  /* What kvpoold could serve here, and why that. */
  char device[kvp_ctl_device_bytes_max]; /* "cuda:0", "host:0" */
  bool device_is_doubtful;               /* a GPU with a warning */
  char device_reason[kvp_ctl_finding_bytes_max];
};

/* Adds a finding, whose text is the next one's to set. name is kept short: it heads a column. */
struct kvp_ctl_finding *kvp_ctl_doctor_add(struct kvp_ctl_doctor *doctor, enum kvp_ctl_finding_result result,
                                           const char *name, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* What to do about it. */
void kvp_ctl_doctor_advise(struct kvp_ctl_finding *finding, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- files ------------------------------------------------------------------------------------------------------
 */

/* `path` below the root. */
void kvp_ctl_doctor_path(const struct kvp_ctl_doctor *doctor, const char *path, char out[kvp_ctl_path_bytes_max]);
bool kvp_ctl_doctor_has(const struct kvp_ctl_doctor *doctor, const char *path);
/* A file of that very path, for reading; NULL: there is none. What is something else is told as a finding. */
FILE *kvp_ctl_doctor_open(struct kvp_ctl_doctor *doctor, const char *path);
/* CUDA_MPS_PIPE_DIRECTORY of this environment, or where MPS has it by default. */
void kvp_ctl_doctor_pipes(const struct kvp_ctl_doctor *doctor, char out[kvp_ctl_path_bytes_max]);
/* The first line of a file below the root, without its end. False: there is none. */
bool kvp_ctl_doctor_line(struct kvp_ctl_doctor *doctor, const char *path, char *out, size_t out_bytes);

/* ---- children: doctor_child.c -----------------------------------------------------------------------------------
 */

enum kvp_ctl_probe { KVP_CTL_PROBE_DONE, KVP_CTL_PROBE_CRASHED, KVP_CTL_PROBE_HANGS };

/* Runs `look` in a child and gives back what it has filled *out with: a driver that crashes or hangs takes only the
 * child with it. */
enum kvp_ctl_probe kvp_ctl_doctor_probe(const struct kvp_ctl_doctor *doctor, void (*look)(void *out), void *out,
                                        size_t out_bytes);
/* Runs a program and gives back what it says, as much as there is room for, and its exit status (-1: a signal).
 * KVP_CTL_PROBE_CRASHED: it could not be run. */
enum kvp_ctl_probe kvp_ctl_doctor_run(const struct kvp_ctl_doctor *doctor, const char *const *command, char *out,
                                      size_t out_bytes, int *exit_status);

/* ---- sockets: doctor_socket.c -----------------------------------------------------------------------------------
 */

enum kvp_ctl_socket_state {
  KVP_CTL_SOCKET_NONE,     /* nothing is there */
  KVP_CTL_SOCKET_ANSWERS,  /* somebody accepts, or will */
  KVP_CTL_SOCKET_FULL,     /* somebody listens, who doesn't get round to it */
  KVP_CTL_SOCKET_STALE,    /* nobody is behind it any more */
  KVP_CTL_SOCKET_CLOSED,   /* to us */
  KVP_CTL_SOCKET_FOREIGN,  /* no socket at all, or of another kind */
  KVP_CTL_SOCKET_TOO_LONG, /* no path of a socket */
};

struct kvp_ctl_socket_look {
  enum kvp_ctl_socket_state state;
  const char *kind;        /* FOREIGN: "file", "directory" ... */
  int failure;             /* errno of CLOSED */
  uint32_t uid, gid, mode; /* of the file; of `directory`, where there is one */
  /* CLOSED, and what is there is out of sight: the last of the path's directories that is not. Else "". */
  char directory[kvp_ctl_path_bytes_max];
  long peer_pid;     /* of ANSWERS, 0 where it is out of sight: who listens */
  uint32_t peer_uid; /* of ANSWERS and, by the file's owner, of FULL */
};

enum { kvp_ctl_socket_path_max = 107 };

/* type: SOCK_STREAM or SOCK_SEQPACKET. Never waits. */
void kvp_ctl_doctor_socket(const char *path, int type, struct kvp_ctl_socket_look *out);

/* ---- the checks, in this order ----------------------------------------------------------------------------------
 */

void kvp_ctl_doctor_driver(struct kvp_ctl_doctor *doctor);   /* kernel module, device nodes: has_gpu */
void kvp_ctl_doctor_mps(struct kvp_ctl_doctor *doctor);      /* has_mps */
void kvp_ctl_doctor_cuda(struct kvp_ctl_doctor *doctor);     /* libcuda: cuda_count, cuda_uuids */
void kvp_ctl_doctor_programs(struct kvp_ctl_doctor *doctor); /* configuration, executor: has_backend */
void kvp_ctl_doctor_gpus(struct kvp_ctl_doctor *doctor);     /* by libnvidia-ml: device, where a GPU can be served */
void kvp_ctl_doctor_device(struct kvp_ctl_doctor *doctor);   /* device and its reason, of what was found until then */
void kvp_ctl_doctor_host(struct kvp_ctl_doctor *doctor);     /* limits, memory */
void kvp_ctl_doctor_daemon(struct kvp_ctl_doctor *doctor);   /* socket, lock, kvpoold itself; connects */
/* Of a daemon that answers, for a worker of this user and environment: who it would be, attaching, namespaces, MPS. */
void kvp_ctl_doctor_workers(struct kvp_ctl_doctor *doctor, const kvpool_server_info *info);
/* doctor_mps_directory.c: the pipes of one of its GPUs' executors. */
void kvp_ctl_doctor_mps_directory(struct kvp_ctl_doctor *doctor, const kvpool_device_info *device);

#endif
