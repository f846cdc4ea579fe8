/* Which namespaces may use a pool, and which may map it. */
#include "server/supervisor/pool_access.h"

#include <assert.h>
#include <string.h>

static bool is_of(const char *name, const char *other) {
  return strcmp(name, other) == 0;
}

static void set_user(struct kvp_pool_access *access, const char *session_namespace) {
  assert(session_namespace[0] != '\0' && strlen(session_namespace) < sizeof access->user);
  memcpy(access->user, session_namespace, strlen(session_namespace) + 1);
}

enum kvp_status kvp_pool_access_check(const struct kvp_pool_spec *spec, const char *session_namespace,
                                      struct kvp_error *error) {
  if (spec->namespace_name[0] == '\0' || is_of(spec->namespace_name, session_namespace)) {
    return KVP_OK;
  }
  return kvp_error_set(error, KVP_PERMISSION_DENIED, "pool '%s' is of namespace '%s', the session is of '%s'",
                       spec->name, spec->namespace_name, session_namespace);
}

enum kvp_status kvp_pool_access_check_blocks(const struct kvp_pool_access *access, const struct kvp_pool_spec *spec,
                                             const char *session_namespace, struct kvp_error *error) {
  enum kvp_status status = kvp_pool_access_check(spec, session_namespace, error);
  if (status == KVP_OK && access->is_mapped && !is_of(access->user, session_namespace)) {
    return kvp_error_set(error, KVP_PERMISSION_DENIED,
                         "pool '%s' has no namespace, and workers of namespace '%s' have mapped it: they would see "
                         "the blocks of a session of '%s', which needs another pool, best one of its own namespace",
                         spec->name, access->user, session_namespace);
  }
  return status;
}

void kvp_pool_access_add_blocks(struct kvp_pool_access *access, const char *session_namespace) {
  if (access->user[0] == '\0') {
    set_user(access, session_namespace);
  } else if (!is_of(access->user, session_namespace)) {
    assert(!access->is_mapped);
    access->is_mixed = true;
  }
}

enum kvp_status kvp_pool_access_map(struct kvp_pool_access *access, const struct kvp_pool_spec *spec,
                                    const char *session_namespace, struct kvp_error *error) {
  enum kvp_status status = kvp_pool_access_check(spec, session_namespace, error);
  if (status != KVP_OK) {
    return status;
  }
  bool has_user = access->user[0] != '\0';
  if (access->is_mixed || (has_user && !is_of(access->user, session_namespace))) {
    return kvp_error_set(
        error, KVP_PERMISSION_DENIED,
        "pool '%s' has no namespace, and '%s'%s used it before: a worker of namespace '%s' would see "
        "blocks of others, and needs another pool, best one of its own namespace",
        spec->name, access->user, access->is_mixed ? " and others" : "", session_namespace);
  }
  if (!has_user) {
    set_user(access, session_namespace);
  }
  access->is_mapped = true;
  return KVP_OK;
}
