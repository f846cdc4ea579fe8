/* What to do next, for every error that has an answer to that. May ask the daemon for what it knows. */
#include "client/kvpoolctl/hint.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/json.h"

enum { hint_bytes_max = 1024 };

static const char *socket_path(const struct kvp_ctl *ctl) {
  static const char scheme[] = "unix:";
  const char *path = ctl->socket != NULL ? ctl->socket : getenv("KVPOOLD_SOCKET");
  if (path == NULL || path[0] == '\0') {
    return "/run/kvpoold/kvpoold.sock";
  }
  return strncmp(path, scheme, sizeof scheme - 1) == 0 ? path + sizeof scheme - 1 : path;
}

static void hint_disconnected(const struct kvp_ctl *ctl, char *out) {
  const char *path = socket_path(ctl);
  if (access(path, F_OK) == 0) {
    (void)snprintf(out, hint_bytes_max,
                   "the socket is there but nobody answers: the daemon died or is being stopped; see its log "
                   "(journalctl -u kvpoold) and start it again");
  } else {
    (void)snprintf(out, hint_bytes_max,
                   "start it (systemctl start kvpoold, or kvpoold --socket %s), or name the socket of a running one "
                   "with --socket PATH or $KVPOOLD_SOCKET",
                   path);
  }
}

/* The socket's owner is the daemon's uid. */
static void hint_permission(const struct kvp_ctl *ctl, char *out) {
  struct stat status;
  unsigned uid = (unsigned)geteuid();
  if (stat(socket_path(ctl), &status) != 0) {
    (void)snprintf(out, hint_bytes_max, "you are uid %u; the daemon's own uid and root may do this", uid);
  } else if (ctl->client == NULL) {
    (void)snprintf(out, hint_bytes_max,
                   "you are uid %u; the socket is uid %u's, group %u, mode %04o: join the group, or use sudo", uid,
                   (unsigned)status.st_uid, (unsigned)status.st_gid, (unsigned)status.st_mode & 07777U);
  } else {
    (void)snprintf(out, hint_bytes_max, "you are uid %u; only root and the daemon's uid %u may do this: use sudo",
                   uid, (unsigned)status.st_uid);
  }
}

static void hint_unknown_pool(const struct kvp_ctl *ctl, char *out) {
  kvpool_pool_list *list;
  if (kvpool_pool_list_get(ctl->client, &list, NULL) != KVPOOL_OK) {
    return;
  }
  size_t count = kvpool_pool_list_count(list);
  size_t used = (size_t)snprintf(out, hint_bytes_max, "%s",
                                 count == 0 ? "this daemon has no pools; make one with `kvpoolctl pool create`"
                                            : "pools of this daemon:");
  for (size_t i = 0; i < count && used < hint_bytes_max; i++) {
    used += (size_t)snprintf(out + used, hint_bytes_max - used, "%s %s", i > 0 ? "," : "",
                             kvpool_pool_name(kvpool_pool_list_item(list, i)));
  }
  kvpool_pool_list_destroy(list);
}

static const char *hint_fixed(const kvpool_error *error) {
  switch (error->status) {
  case KVPOOL_OUT_OF_MEMORY:
    return "`kvpoolctl info` shows what is left; fewer blocks or layers, another device, or a larger device_memory";
  case KVPOOL_OUT_OF_BLOCKS:
  case KVPOOL_QUOTA_EXCEEDED:
    return "`kvpoolctl blocks POOL` shows who holds the blocks";
  case KVPOOL_IN_USE:
    return "`kvpoolctl blocks POOL` shows who holds them";
  case KVPOOL_ALREADY_EXISTS:
    return "take another name, or delete that one with `kvpoolctl pool delete`";
  case KVPOOL_DEADLINE_EXCEEDED:
    return "it may or may not have happened; `kvpoolctl info` shows how the devices are, --timeout MS waits longer";
  case KVPOOL_DEVICE_LOST:
    return "the executor is restarted by itself and contents stay; try again, `kvpoolctl info` shows the state";
  case KVPOOL_VERSION_MISMATCH:
    return "use the kvpoolctl that was installed with this daemon";
  case KVPOOL_SHUTTING_DOWN:
    return "the daemon is being stopped; try again when it is back";
  case KVPOOL_WRONG_DEVICE:
    return "`kvpoolctl info` lists the devices, `kvpoolctl pool describe POOL` those of a pool";
  case KVPOOL_WRONG_FORMAT:
    return "`kvpoolctl info` lists the formats";
  case KVPOOL_INTERNAL:
    return "the daemon's log says more (journalctl -u kvpoold)";
  case KVPOOL_BUSY:
    return "try again in a moment";
  case KVPOOL_INVALID_ARGUMENT:
    return strcmp(error->array, "format") == 0 ? "`kvpoolctl info` lists the formats" : NULL;
  default:
    return NULL;
  }
}

static void error_print(const struct kvp_ctl *ctl, const kvpool_error *error, const char *status, const char *text,
                        const char *hint) {
  (void)fflush(stdout);
  (void)fprintf(stderr, "kvpoolctl: %s\n", text);
  if (hint != NULL && hint[0] != '\0') {
    (void)fprintf(stderr, "hint: %s\n", hint);
  }
  if (!ctl->json) {
    return;
  }
  json_t *detail = json_object();
  kvp_ctl_json_string(detail, "status", status);
  kvp_ctl_json_string(detail, "text", text);
  if (hint != NULL && hint[0] != '\0') {
    kvp_ctl_json_string(detail, "hint", hint);
  }
  if (error != NULL && error->op >= 0) {
    kvp_ctl_json_integer(detail, "op", error->op);
  }
  if (error != NULL && error->array[0] != '\0') {
    kvp_ctl_json_string(detail, "array", error->array);
    kvp_ctl_json_integer(detail, "position", error->position);
    kvp_ctl_json_integer(detail, "value", error->value);
  }
  json_t *document = json_object();
  kvp_ctl_json_set(document, "error", detail);
  kvp_ctl_json_print(ctl, document);
}

int kvp_ctl_fail_hint(const struct kvp_ctl *ctl, const kvpool_error *error, const char *hint) {
  error_print(ctl, error, kvpool_status_name(error->status), error->text, hint);
  return error->status == KVPOOL_DISCONNECTED ? KVP_CTL_UNREACHABLE : KVP_CTL_FAILED;
}

int kvp_ctl_fail(const struct kvp_ctl *ctl, const kvpool_error *error) {
  char hint[hint_bytes_max] = "";
  if (error->status == KVPOOL_DISCONNECTED) {
    hint_disconnected(ctl, hint);
  } else if (error->status == KVPOOL_PERMISSION_DENIED) {
    hint_permission(ctl, hint);
  } else if (error->status == KVPOOL_UNKNOWN_POOL && ctl->client != NULL) {
    hint_unknown_pool(ctl, hint);
  } else {
    return kvp_ctl_fail_hint(ctl, error, hint_fixed(error));
  }
  return kvp_ctl_fail_hint(ctl, error, hint);
}

int kvp_ctl_refuse(const struct kvp_ctl *ctl, const char *hint, const char *format, ...) {
  char text[hint_bytes_max];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  error_print(ctl, NULL, "failed", text, hint);
  return KVP_CTL_FAILED;
}
