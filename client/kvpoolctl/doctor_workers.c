/* What a worker of this user would find who runs where the doctor runs, in a container perhaps: who it is to kvpoold,
 * whether it can attach, which namespaces are between them, and whether both are clients of one MPS. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"
#include "client/kvpoolctl/hint.h"

enum { link_bytes_max = 64, names_bytes_max = 64 };

static const char nobody[] = "65534";

/* ---- who it is --------------------------------------------------------------------------------------------------
 */

static uint32_t overflow_uid(struct kvp_ctl_doctor *doctor) {
  char line[32];
  bool is_told = kvp_ctl_doctor_line(doctor, "/proc/sys/kernel/overflowuid", line, sizeof line);
  return (uint32_t)strtoul(is_told ? line : nobody, NULL, 10);
}

static void identity_check(struct kvp_ctl_doctor *doctor, const kvpool_caller_info *caller) {
  const uint32_t uid = (uint32_t)geteuid();
  const char *pid = caller->pid == 0                    ? ", and its pid out of sight: logs and sessions have 0"
                    : caller->pid != (uint32_t)getpid() ? ", and its pid as another one"
                                                        : "";
  struct kvp_ctl_finding *finding = NULL;
  if (caller->uid == uid) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "identity", "kvpoold sees uid %u as it is here%s%s", uid,
                       caller->is_operator ? ", an operator" : "", pid);
  } else if (caller->uid == overflow_uid(doctor)) {
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "identity",
                           "kvpoold sees uid %u as %u, which is everybody whom its user namespace doesn't have%s",
                           uid, caller->uid, pid);
    kvp_ctl_doctor_advise(finding,
                          "attaching works; rights by uid (operators, ipc_uids) don't, and %u in ipc_uids would give "
                          "them to all of these: let kvpoold and its workers share a user namespace",
                          caller->uid);
  } else {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "identity", "kvpoold sees uid %u as %u%s%s", uid,
                                 caller->uid, caller->is_operator ? ", an operator" : "", pid);
    kvp_ctl_doctor_advise(
        finding, "ipc_uids and the socket's group mean %u and its groups, as kvpoold's host has them", caller->uid);
  }
}

/* ---- attaching --------------------------------------------------------------------------------------------------
 */

/* As a worker would, to a session that there never is: a daemon that says so has understood everything else. */
static kvpool_status attach_try(const struct kvp_ctl_doctor *doctor, const char *path, kvpool_error *error) {
  const kvpool_attach_options options = {
      .size_bytes = sizeof options, .socket = path, .timeout_ms = doctor->ctl->timeout_ms};
  kvpool_attachment *attachment = NULL;
  kvpool_status status = kvpool_attach(&options, &attachment, error);
  if (status == KVPOOL_OK) {
    kvpool_detach(attachment);
  }
  return status;
}

static void attach_failed(struct kvp_ctl_doctor *doctor, const struct kvp_ctl_socket_look *look,
                          const kvpool_error *error) {
  struct kvp_ctl_finding *finding =
      kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "attach socket", "no worker can attach: %s", error->text);
  switch (look->state) {
  case KVP_CTL_SOCKET_CLOSED:
    if (look->directory[0] != '\0') {
      kvp_ctl_doctor_advise(finding, "%s is uid %u's, group %u, mode %04o: this user may not enter it",
                            look->directory, look->uid, look->gid, look->mode);
      return;
    }
    kvp_ctl_doctor_advise(finding,
                          "it is uid %u's, group %u, mode %04o: the worker joins that group (--group-add %u, "
                          "supplementalGroups), or socket_mode lets others in",
                          look->uid, look->gid, look->mode, look->gid);
    return;
  case KVP_CTL_SOCKET_STALE:
    kvp_ctl_doctor_advise(finding,
                          "nobody is behind it: a container that mounts the socket itself keeps the one of a "
                          "daemon that has ended; mount its directory");
    return;
  case KVP_CTL_SOCKET_FOREIGN:
    kvp_ctl_doctor_advise(finding, "%s: it is a %s; `kvpoolctl info --json` says where kvpoold takes workers",
                          getenv("KVPOOLD_ATTACH_SOCKET") != NULL ? "$KVPOOLD_ATTACH_SOCKET names the wrong path"
                                                                  : "somebody replaced it",
                          look->kind);
    return;
  default:
    kvp_ctl_doctor_advise(finding, "kvpoold's log says more (journalctl -u kvpoold, attach_refused with --log-level "
                                   "debug)");
    return;
  }
}

static void attach_check(struct kvp_ctl_doctor *doctor, const kvpool_server_info *info) {
  const char *told = kvpool_server_info_attach_socket(info);
  const char *named = getenv("KVPOOLD_ATTACH_SOCKET");
  const char *path = named != NULL && named[0] != '\0' ? named : told;
  struct kvp_ctl_socket_look look;
  kvpool_error error = {0};
  if (path[0] == '\0') {
    return; /* a daemon that takes none */
  }
  kvp_ctl_doctor_socket(path, SOCK_SEQPACKET, &look);
  if (look.state == KVP_CTL_SOCKET_NONE) {
    struct kvp_ctl_finding *finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "attach socket",
                           "kvpoold takes workers at %s, but %s is not there", told, path);
    kvp_ctl_doctor_advise(finding,
                          "in a container: mount its directory, at the same path as it is in tickets, or let "
                          "$KVPOOLD_ATTACH_SOCKET name it; nothing where no worker is to run");
  } else if (attach_try(doctor, path, &error) == KVPOOL_UNKNOWN_SESSION) {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "attach socket", "%s answers: a worker of uid %u can attach", path,
                       (unsigned)geteuid());
  } else {
    attach_failed(doctor, &look, &error);
  }
}

/* ---- namespaces -------------------------------------------------------------------------------------------------
 */

static bool namespace_read(const char *process, const char *kind, char out[link_bytes_max]) {
  char path[link_bytes_max];
  (void)snprintf(path, sizeof path, "/proc/%.24s/ns/%s", process, kind);
  ssize_t length = readlink(path, out, link_bytes_max - 1);
  out[length > 0 ? length : 0] = '\0';
  return length > 0;
}

static void name_add(char names[names_bytes_max], const char *name) {
  const size_t used = strlen(names);
  (void)snprintf(names + used, names_bytes_max - used, "%s%s", used == 0 ? "" : ", ", name);
}

/* Those of the ones that CUDA shares by that are not the host's first, whose numbers never change (linux/nsfs.h). */
static void namespaces_own(char out[names_bytes_max]) {
  char link[link_bytes_max];
  out[0] = '\0';
  if (namespace_read("self", "user", link) && strcmp(link, "user:[4026531837]") != 0) {
    name_add(out, "user");
  }
  if (namespace_read("self", "ipc", link) && strcmp(link, "ipc:[4026531839]") != 0) {
    name_add(out, "ipc");
  }
}

/* Those of ours that are not kvpoold's: "user, pid". False: this user may not look. */
static bool namespaces_compare(long pid, char out[names_bytes_max]) {
  static const char *const kinds[] = {"user", "pid", "ipc", "mnt", "net"};
  char process[24];
  (void)snprintf(process, sizeof process, "%ld", pid);
  out[0] = '\0';
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    char here[link_bytes_max];
    char there[link_bytes_max];
    if (!namespace_read("self", kinds[i], here) || !namespace_read(process, kinds[i], there)) {
      return false;
    }
    if (strcmp(here, there) != 0) {
      name_add(out, kinds[i]);
    }
  }
  return true;
}

/* Attaching needs none in common; CUDA's own ways of sharing do. */
static void namespaces_advise(const struct kvp_ctl_doctor *doctor, struct kvp_ctl_finding *finding,
                              const char *names) {
  if (doctor->has_gpu && (strstr(names, "ipc") != NULL || strstr(names, "user") != NULL)) {
    finding->result = KVP_CTL_FINDING_WARNING;
    kvp_ctl_doctor_advise(finding,
                          "MPS and memory that a worker brings by an IPC handle want one IPC namespace "
                          "(--ipc=host, hostIPC) and one user namespace; buffers that kvpoold makes want none");
  }
}

static void namespaces_check(struct kvp_ctl_doctor *doctor) {
  struct kvp_ctl_socket_look look;
  char names[names_bytes_max];
  kvp_ctl_doctor_socket(kvp_ctl_socket_path(doctor->ctl), SOCK_STREAM, &look);
  struct kvp_ctl_finding *finding = NULL;
  if (look.state != KVP_CTL_SOCKET_ANSWERS) {
    return; /* it went in the meantime */
  }
  if (look.peer_pid == 0) {
    namespaces_own(names);
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "namespaces",
                                 "kvpoold is out of sight from this pid namespace; attaching works all the same%s%s",
                                 names[0] == '\0' ? "" : "; not the host's: ", names);
    namespaces_advise(doctor, finding, names);
  } else if (!namespaces_compare(look.peer_pid, names)) {
    namespaces_own(names);
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "namespaces",
                           "those of kvpoold (pid %ld) are not known: uid %u may not look at them%s%s", look.peer_pid,
                           (unsigned)geteuid(), names[0] == '\0' ? "" : "; not the host's: ", names);
    kvp_ctl_doctor_advise(finding, "look again as kvpoold's user, or as root");
    namespaces_advise(doctor, finding, names);
  } else if (names[0] == '\0') {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "namespaces", "user, pid, ipc, mnt and net are kvpoold's");
  } else {
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "namespaces",
                           "%s: others than kvpoold's (pid %ld); attaching works all the same", names, look.peer_pid);
    namespaces_advise(doctor, finding, names);
  }
}

/* ---- MPS --------------------------------------------------------------------------------------------------------
 */

/* Pids that kvpoold tells are good here only where it sees ours as it is. */
static void pipes_check(struct kvp_ctl_doctor *doctor, const kvpool_server_info *info,
                        const kvpool_caller_info *caller) {
  for (size_t i = 0; i < kvpool_server_info_device_count(info) && caller->pid == (uint32_t)getpid(); i++) {
    const kvpool_device_info *device = kvpool_server_info_device(info, i);
    if (device->driver[0] != '\0' && device->executor_pid != 0 && (device->mps || doctor->has_mps)) {
      kvp_ctl_doctor_mps_directory(doctor, device);
    }
  }
}

void kvp_ctl_doctor_workers(struct kvp_ctl_doctor *doctor, const kvpool_server_info *info) {
  kvpool_caller_info caller = {0};
  bool is_told = kvpool_server_info_caller(info, &caller);
  if (is_told) {
    identity_check(doctor, &caller);
  }
  attach_check(doctor, info);
  namespaces_check(doctor);
  if (is_told) {
    pipes_check(doctor, info, &caller);
  }
}
