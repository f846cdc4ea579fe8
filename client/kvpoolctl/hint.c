/* What to do next, for every error that has an answer to that. May ask the daemon for what it knows. */
#include "client/kvpoolctl/hint.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/text.h"

enum { hint_bytes_max = 1024 };

const char *kvp_ctl_socket_path(const struct kvp_ctl *ctl) {
  static const char scheme[] = "unix:";
  const char *path = ctl->socket != NULL ? ctl->socket : getenv("KVPOOLD_SOCKET");
  if (path == NULL || path[0] == '\0') {
    return "/run/kvpoold/kvpoold.sock";
  }
  return strncmp(path, scheme, sizeof scheme - 1) == 0 ? path + sizeof scheme - 1 : path;
}

static void hint_disconnected(const struct kvp_ctl *ctl, char *out) {
  const char *path = kvp_ctl_socket_path(ctl);
  struct stat status;
  if (stat(path, &status) != 0) {
    (void)snprintf(out, hint_bytes_max,
                   "start it (systemctl start kvpoold, or kvpoold --socket %s), or name the socket of a running one "
                   "with --socket PATH or $KVPOOLD_SOCKET",
                   path);
  } else if (!S_ISSOCK(status.st_mode)) {
    (void)snprintf(out, hint_bytes_max,
                   "%s is a %s, not a socket: --socket PATH or $KVPOOLD_SOCKET names the daemon's", path,
                   S_ISDIR(status.st_mode) ? "directory" : "file");
  } else {
    (void)snprintf(out, hint_bytes_max,
                   "the socket is there but nobody answers: the daemon died or is being stopped; see its log "
                   "(journalctl -u kvpoold) and start it again");
  }
}

/* The socket's owner is the daemon's uid. */
static void hint_permission(const struct kvp_ctl *ctl, char *out) {
  struct stat status;
  unsigned uid = (unsigned)geteuid();
  if (stat(kvp_ctl_socket_path(ctl), &status) != 0) {
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

/* Of the statuses that mean the same whatever was asked for. */
static const char *const hints[] = {
    [KVPOOL_OUT_OF_MEMORY] =
        "`kvpoolctl info` shows what is left; fewer blocks or layers, another device, or a larger device_memory",
    [KVPOOL_OUT_OF_BLOCKS] = "`kvpoolctl blocks POOL` shows who holds the blocks",
    [KVPOOL_QUOTA_EXCEEDED] = "`kvpoolctl blocks POOL` shows who holds the blocks",
    [KVPOOL_IN_USE] = "`kvpoolctl blocks POOL` shows who holds them",
    [KVPOOL_ALREADY_EXISTS] = "take another name, or delete that one with `kvpoolctl pool delete`",
    [KVPOOL_DEADLINE_EXCEEDED] =
        "it may or may not have happened; `kvpoolctl info` shows how the devices are, --timeout MS waits longer",
    [KVPOOL_DEVICE_LOST] =
        "the executor is restarted by itself and contents stay; try again, `kvpoolctl info` shows the state",
    [KVPOOL_VERSION_MISMATCH] = "use the kvpoolctl that was installed with this daemon",
    [KVPOOL_UNIMPLEMENTED] = "use the kvpoolctl that was installed with this daemon",
    [KVPOOL_MALFORMED] = "use the kvpoolctl that was installed with this daemon",
    [KVPOOL_SHUTTING_DOWN] = "the daemon is being stopped; try again when it is back",
    [KVPOOL_WRONG_DEVICE] = "`kvpoolctl info` lists the devices, `kvpoolctl pool describe POOL` those of a pool",
    [KVPOOL_WRONG_FORMAT] = "`kvpoolctl info` lists the formats",
    [KVPOOL_UNKNOWN_REGION] = "`kvpoolctl pool describe POOL` lists its regions",
    [KVPOOL_UNKNOWN_LAYER] = "`kvpoolctl pool describe POOL` lists its regions and their layers",
    [KVPOOL_UNKNOWN_SESSION] =
        "the blocks went with the session; start again, `kvpoolctl sessions` lists those there are",
    [KVPOOL_NOT_OWNER] = "`kvpoolctl blocks POOL` shows who holds the blocks",
    [KVPOOL_STALE_BLOCK] = "the block has changed hands; start again",
    [KVPOOL_SEALED_BLOCK] = "`kvpoolctl blocks POOL` shows which blocks are sealed",
    [KVPOOL_OUT_OF_RANGE] = "`kvpoolctl pool describe POOL` shows how many blocks and tokens there are",
    [KVPOOL_TOO_LARGE] = "ask for less at once",
    [KVPOOL_INTERNAL] = "the daemon's log says more (journalctl -u kvpoold)",
    [KVPOOL_BUSY] = "try again in a moment",
    [KVPOOL_CANCELLED] = "try again",
    [KVPOOL_NO_MEMORY] = "ask for less at once, or give this process more memory",
};

static const char *hint_fixed(const struct kvp_ctl *ctl, const kvpool_error *error) {
  /* What no daemon was asked for is about the command line's own numbers. */
  if (ctl->client == NULL && (error->status == KVPOOL_OUT_OF_RANGE || error->status == KVPOOL_INVALID_ARGUMENT)) {
    return "`kvpoolctl plan ... --help` says what the lengths and the table mean";
  }
  if (error->status == KVPOOL_INVALID_ARGUMENT) {
    return strcmp(error->array, "format") == 0 ? "`kvpoolctl info` lists the formats"
                                               : "--help of the command says what it takes";
  }
  return (size_t)error->status < sizeof hints / sizeof hints[0] ? hints[error->status] : NULL;
}

static void error_print(const kvpool_error *error, const char *status, const char *text, const char *hint) {
  (void)fflush(stdout);
  kvp_ctl_warn("%s", text);
  bool has_hint = hint != NULL && hint[0] != '\0';
  if (has_hint) {
    char *clean = kvp_ctl_clean(hint, NULL);
    (void)fprintf(stderr, "hint: %s\n", clean);
    free(clean);
  }
  if (!kvp_ctl_this->json) {
    return;
  }
  json_t *detail = json_object();
  kvp_ctl_json_string(detail, "status", status);
  kvp_ctl_json_string(detail, "text", text);
  if (has_hint) {
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
  kvp_ctl_json_print(kvp_ctl_this, document);
}

int kvp_ctl_fail_hint(const struct kvp_ctl *ctl, const kvpool_error *error, const char *hint) {
  (void)ctl;
  /* What a signal has ended is no failure to tell of. */
  if (kvp_ctl_interrupted() && (error->status == KVPOOL_CANCELLED || error->status == KVPOOL_UNKNOWN_SESSION)) {
    return KVP_CTL_INTERRUPTED;
  }
  error_print(error, kvpool_status_name(error->status), error->text, hint);
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
    return kvp_ctl_fail_hint(ctl, error, hint_fixed(ctl, error));
  }
  return kvp_ctl_fail_hint(ctl, error, hint);
}

int kvp_ctl_fail_session(const struct kvp_ctl *ctl, const kvpool_session *session, const kvpool_error *error) {
  kvpool_error end;
  bool went_away = error->status == KVPOOL_UNKNOWN_SESSION && session != NULL &&
                   kvpool_session_state(session, &end) == KVPOOL_DISCONNECTED;
  return kvp_ctl_fail(ctl, went_away ? &end : error);
}

int kvp_ctl_refuse(const struct kvp_ctl *ctl, const char *hint, const char *format, ...) {
  (void)ctl;
  char text[hint_bytes_max];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (kvp_ctl_interrupted()) {
    return KVP_CTL_INTERRUPTED;
  }
  error_print(NULL, "failed", text, hint);
  return KVP_CTL_FAILED;
}

int kvp_ctl_tell_usage(const char *hint, const char *format, ...) {
  char text[hint_bytes_max];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  error_print(NULL, "usage", text, hint);
  return KVP_CTL_USAGE;
}

int kvp_ctl_tell_interrupted(const char *format, ...) {
  static bool is_told;
  char text[hint_bytes_max];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (!is_told) {
    error_print(NULL, kvpool_status_name(KVPOOL_CANCELLED), text, NULL);
  }
  is_told = true;
  return KVP_CTL_INTERRUPTED;
}
