/* The socket, its lock, and the daemon where one answers. */
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/doctor.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/text.h"

/* Who holds the lock beside the socket; 0: nobody. It is looked up, not tried: a daemon that starts must not find it
 * taken by us. */
static long lock_holder(struct kvp_ctl_doctor *doctor, const char *socket) {
  char path[kvp_ctl_path_bytes_max];
  struct stat status;
  (void)snprintf(path, sizeof path, "%.500s.lock", socket);
  FILE *locks = stat(path, &status) == 0 ? kvp_ctl_doctor_open(doctor, "/proc/locks") : NULL;
  if (locks == NULL) {
    return 0;
  }
  char inode[32];
  (void)snprintf(inode, sizeof inode, ":%llu ", (unsigned long long)status.st_ino);
  char line[256];
  long holder = 0;
  /* "3: FLOCK  ADVISORY  WRITE 4711 00:19:123456 0 EOF" */
  while (holder == 0 && fgets(line, sizeof line, locks) != NULL) {
    const char *kind = strstr(line, "WRITE ");
    if (strstr(line, " FLOCK ") != NULL && kind != NULL && strstr(line, inode) != NULL) {
      holder = strtol(kind + sizeof "WRITE " - 1, NULL, 10);
      holder = holder == 0 ? -1 : holder; /* of another pid namespace */
    }
  }
  (void)fclose(locks);
  return holder;
}

static void directory_check(struct kvp_ctl_doctor *doctor, const char *socket) {
  char copy[kvp_ctl_path_bytes_max];
  (void)snprintf(copy, sizeof copy, "%s", socket);
  const char *directory = dirname(copy);
  struct stat status;
  struct kvp_ctl_finding *finding = NULL;
  bool is_there = stat(directory, &status) == 0;
  if (is_there && status.st_nlink == 0) {
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "socket",
                           "%s is mounted here, but was removed where it comes from: no socket will ever appear "
                           "in it",
                           directory);
    kvp_ctl_doctor_advise(finding, "start the container again, and let the service keep its directory "
                                   "(RuntimeDirectoryPreserve=yes)");
  } else if (!is_there) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "socket",
                                 "%s, where kvpoold would put its socket: %s", directory, strerror(errno));
    kvp_ctl_doctor_advise(finding,
                          "the service makes it itself (RuntimeDirectory=); by hand: mkdir %s, or name "
                          "another place with --socket",
                          directory);
  } else if (access(directory, W_OK | X_OK) != 0) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "socket",
                                 "%s is not writable for uid %u: a kvpoold of this user can't serve there", directory,
                                 (unsigned)geteuid());
    kvp_ctl_doctor_advise(finding, "nothing where the service does it; else name another place with --socket");
  } else {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "socket", "%s can be made", socket);
  }
}

/* What is behind a directory that this user may not enter, nobody knows. */
static void directory_closed(struct kvp_ctl_doctor *doctor, const char *socket,
                             const struct kvp_ctl_socket_look *look) {
  struct kvp_ctl_finding *finding = kvp_ctl_doctor_add(
      doctor, KVP_CTL_FINDING_PROBLEM, "socket",
      "uid %u can't see whether %s is there: %s (%s is uid %u's, group %u, mode %04o)", (unsigned)geteuid(), socket,
      strerror(look->failure), look->directory, look->uid, look->gid, look->mode);
  if ((look->mode & S_IXOTH) != 0) {
    kvp_ctl_doctor_advise(finding, "see to what else guards %s: access control lists, a security module",
                          look->directory);
  } else if ((look->mode & S_IXGRP) != 0) {
    kvp_ctl_doctor_advise(finding, "join group %u, or use sudo", look->gid);
  } else {
    kvp_ctl_doctor_advise(
        finding, "its mode lets in its owner alone: let kvpoold put its socket into a directory that its users "
                 "may enter (the unit's RuntimeDirectory), chmod this one, or use sudo");
  }
}

/* Somebody has it who is no kvpoold of ours, or there is no socket to be had. */
static void path_taken(struct kvp_ctl_doctor *doctor, const char *socket, const struct kvp_ctl_socket_look *look) {
  struct kvp_ctl_finding *finding = NULL;
  if (look->state == KVP_CTL_SOCKET_TOO_LONG) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "socket",
                                 "%s has %zu bytes, the path of a unix socket has %d at most", socket, strlen(socket),
                                 kvp_ctl_socket_path_max);
    kvp_ctl_doctor_advise(finding, "name a shorter one: `socket` in the configuration or --socket, and "
                                   "$KVPOOLD_SOCKET or --socket for clients");
  } else if (look->state == KVP_CTL_SOCKET_FOREIGN) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "socket",
                                 "%s is a %s, no socket: kvpoold does not start there", socket, look->kind);
    kvp_ctl_doctor_advise(finding,
                          "move it away, or name another path with --socket (`socket` in the configuration)");
  } else if (look->directory[0] != '\0') {
    directory_closed(doctor, socket, look);
  } else {
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "socket",
                           "%s can't be reached by uid %u: %s (it is uid %u's, group %u, mode "
                           "%04o)",
                           socket, (unsigned)geteuid(), strerror(look->failure), look->uid, look->gid, look->mode);
    kvp_ctl_doctor_advise(finding, look->failure == EACCES || look->failure == EPERM
                                       ? "join that group, or use sudo"
                                       : "see to the permissions of its directories");
  }
}

/* Somebody listens, and the lock says that it is a kvpoold; else it is somebody else. */
static void listener_told(struct kvp_ctl_doctor *doctor, const char *socket, const struct kvp_ctl_socket_look *look,
                          long holder, const kvpool_error *error) {
  struct kvp_ctl_finding *finding = NULL;
  if (error->status == KVPOOL_VERSION_MISMATCH) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "kvpoold", "%s", error->text);
    kvp_ctl_doctor_advise(finding, "use the kvpoolctl that was installed with this daemon");
  } else if (holder != 0 && look->state == KVP_CTL_SOCKET_FULL) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "kvpoold",
                                 "a daemon holds %s.lock (pid %ld), but takes no connection: its backlog is full",
                                 socket, holder);
    kvp_ctl_doctor_advise(finding, "it is stopped, hangs, or more clients connect than it can take: its log says "
                                   "which (journalctl -u kvpoold), ss -xlp shows the backlog");
  } else if (holder != 0) {
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "kvpoold",
                           "a daemon holds %s.lock (pid %ld), but does not answer: %s", socket, holder, error->text);
    kvp_ctl_doctor_advise(finding,
                          "it starts, is being stopped, or hangs: its log says which (journalctl -u kvpoold)");
  } else if (look->state == KVP_CTL_SOCKET_FULL) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "socket",
                                 "somebody (uid %u) listens at %s and takes no connection: its backlog is full; no "
                                 "kvpoold holds its lock",
                                 look->peer_uid, socket);
    kvp_ctl_doctor_advise(finding, "ss -xlp says who; end it, or name another path with --socket");
  } else {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "socket",
                                 "another program (pid %ld, uid %u) listens at %s, no kvpoold: %s", look->peer_pid,
                                 look->peer_uid, socket, error->text);
    kvp_ctl_doctor_advise(finding, "kvpoold does not start there: end that program, or name another path with "
                                   "--socket");
  }
}

/* Nobody listens. */
static void silence_told(struct kvp_ctl_doctor *doctor, const char *socket, const struct kvp_ctl_socket_look *look,
                         long holder, const kvpool_error *error) {
  struct kvp_ctl_finding *finding = NULL;
  if (holder != 0) {
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "kvpoold",
                           "a daemon holds %s.lock (pid %ld), but does not answer: %s", socket, holder, error->text);
    kvp_ctl_doctor_advise(finding,
                          "it starts, is being stopped, or hangs: its log says which (journalctl -u kvpoold)");
  } else if (look->state == KVP_CTL_SOCKET_STALE) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "kvpoold",
                                 "%s is there, but nobody holds its lock: left behind by a daemon that died", socket);
    kvp_ctl_doctor_advise(finding, "start kvpoold: it takes the socket over");
  } else {
    directory_check(doctor, socket);
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "kvpoold", "none runs at %s", socket);
    kvp_ctl_doctor_advise(finding, "systemctl start kvpoold, or kvpoold --socket %s", socket);
  }
}

/* ---- what it says of its devices --------------------------------------------------------------------------------
 */

static void device_told(struct kvp_ctl_doctor *doctor, const kvpool_device_info *device) {
  struct kvp_ctl_finding *finding = NULL;
  if (device->state == KVPOOL_DEVICE_WAITING) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "device", "%s waits before it can serve: %s",
                                 device->name, device->waiting_for);
    kvp_ctl_doctor_advise(finding,
                          "end the processes it names; kvpoold tries again by itself, and its contents stay");
  } else if (device->state == KVPOOL_DEVICE_REFUSED) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "device", "%s can't be served: %s", device->name,
                                 device->waiting_for);
    kvp_ctl_doctor_advise(finding, "mend that; kvpoold tries again every 5 s, and its contents stay");
  } else if (device->state != KVPOOL_DEVICE_SERVING) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "device", "%s does not serve; %llu executors died",
                                 device->name, (unsigned long long)device->restarts);
    kvp_ctl_doctor_advise(finding, "kvpoold's log says why (journalctl -u kvpoold)");
  } else if (doctor->has_mps && device->driver[0] != '\0' && !device->mps) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "device",
                                 "%s serves, but outside the MPS that runs here", device->name);
    kvp_ctl_doctor_advise(finding,
                          "give kvpoold the same CUDA_MPS_PIPE_DIRECTORY, a place that its unit's PrivateTmp "
                          "doesn't hide, and start it again");
  } else if (device->restarts > 0) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "device",
                                 "%s serves; %llu of its executors died since the daemon started", device->name,
                                 (unsigned long long)device->restarts);
    kvp_ctl_doctor_advise(finding, "kvpoold's log says why (grep executor_died)");
  } else {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "device", "%s serves: %s; %s left of %s", device->name,
                       device->description, kvp_ctl_bytes(device->memory_left_bytes).text,
                       kvp_ctl_bytes(device->memory_limit_bytes).text);
  }
}

static void answer_told(struct kvp_ctl_doctor *doctor, const kvpool_server_info *info) {
  const char *version = kvpool_server_info_version(info);
  struct kvp_ctl_finding *finding = NULL;
  if (strcmp(version, kvpool_version()) != 0) {
    finding = kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "kvpoold", "is version %s, this kvpoolctl is %s",
                                 version, kvpool_version());
    kvp_ctl_doctor_advise(finding, "restart it after an update; a program and a daemon of one release fit for sure");
  } else {
    kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_OK, "kvpoold", "%s answers, pid %llu, up %s", version,
                       (unsigned long long)kvpool_server_info_pid(info),
                       kvp_ctl_duration(kvp_ctl_age_ns(kvpool_server_info_started_unix_ns(info))).text);
  }
  bool serves_gpu = false;
  for (size_t i = 0; i < kvpool_server_info_device_count(info); i++) {
    const kvpool_device_info *device = kvpool_server_info_device(info, i);
    device_told(doctor, device);
    serves_gpu = serves_gpu || strncmp(device->name, "cuda:", sizeof "cuda:" - 1) == 0;
  }
  if (doctor->has_gpu && !serves_gpu) {
    finding =
        kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_WARNING, "device", "there is a GPU, but kvpoold serves none");
    kvp_ctl_doctor_advise(finding, "devices = [ \"cuda:0\" ] in its configuration, or --device cuda:0");
  }
}

/* What is there decides about the words; the library's error is of the connection that followed. */
static void failure_told(struct kvp_ctl_doctor *doctor, const char *socket, const struct kvp_ctl_socket_look *look,
                         const kvpool_error *error) {
  if (error->status == KVPOOL_INVALID_ARGUMENT && look->state != KVP_CTL_SOCKET_TOO_LONG) { /* "tcp:..." */
    kvp_ctl_doctor_advise(kvp_ctl_doctor_add(doctor, KVP_CTL_FINDING_PROBLEM, "socket", "%s", error->text),
                          "--socket PATH or $KVPOOLD_SOCKET: the path of the daemon's unix socket");
    return;
  }
  switch (look->state) {
  case KVP_CTL_SOCKET_TOO_LONG:
  case KVP_CTL_SOCKET_FOREIGN:
  case KVP_CTL_SOCKET_CLOSED:
    path_taken(doctor, socket, look);
    return;
  case KVP_CTL_SOCKET_ANSWERS:
  case KVP_CTL_SOCKET_FULL:
    listener_told(doctor, socket, look, lock_holder(doctor, socket), error);
    return;
  case KVP_CTL_SOCKET_NONE:
  case KVP_CTL_SOCKET_STALE:
    silence_told(doctor, socket, look, lock_holder(doctor, socket), error);
    return;
  }
}

void kvp_ctl_doctor_daemon(struct kvp_ctl_doctor *doctor) {
  struct kvp_ctl *ctl = doctor->ctl;
  const char *socket = kvp_ctl_socket_path(ctl);
  const kvpool_connect_options options = {.size_bytes = sizeof options, .timeout_ms = ctl->timeout_ms};
  struct kvp_ctl_socket_look look;
  kvpool_server_info *info = NULL;
  kvpool_error error = {0};
  kvpool_status status = kvpool_client_connect(ctl->socket, &options, &ctl->client, &error);
  if (status != KVPOOL_OK) {
    ctl->client = NULL;
  } else {
    status = kvpool_server_info_get(ctl->client, &info, &error);
  }
  if (status == KVPOOL_OK) {
    answer_told(doctor, info);
    doctor->area = "workers";
    kvp_ctl_doctor_workers(doctor, info);
    kvpool_server_info_destroy(info);
    return;
  }
  kvp_ctl_doctor_socket(socket, SOCK_STREAM, &look);
  failure_told(doctor, socket, &look, &error);
}
