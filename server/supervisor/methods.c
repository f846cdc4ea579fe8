/* All gRPC methods in one table, and what their handlers share. Loop thread only. */
#include "server/supervisor/methods.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "server/supervisor/name.h"

enum { methods_max = 32 };

const struct kvp_rpc_method *kvp_methods_all(size_t *count) {
  static struct kvp_rpc_method all[methods_max]; /* filled once, by the loop thread before the server starts */
  const struct kvp_method_table *const tables[] = {
      &kvp_methods_info,   &kvp_methods_pool, &kvp_methods_session, &kvp_methods_block,
      &kvp_methods_buffer, &kvp_methods_step, &kvp_methods_rows,    &kvp_methods_inspect,
  };
  size_t filled = 0;
  for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
    assert(filled + tables[i]->count <= methods_max);
    memcpy(&all[filled], tables[i]->methods, tables[i]->count * sizeof all[0]);
    filled += tables[i]->count;
  }
  *count = filled;
  return all;
}

struct kvp_session *kvp_method_session(struct kvp_daemon *daemon, const Kvpool__V1__SessionRef *reference,
                                       struct kvp_error *error) {
  if (reference == NULL) {
    (void)kvp_error_set_at(error, KVP_UNKNOWN_SESSION, -1, "session", -1, 0, "the request names no session");
    return NULL;
  }
  return kvp_session_authenticate(daemon, reference->session_id, reference->secret.data, reference->secret.len,
                                  error);
}

enum kvp_status kvp_method_name(const char *value, const char *what, bool empty_allowed, char *out, size_t out_bytes,
                                struct kvp_error *error) {
  assert(out_bytes >= kvp_name_bytes_max);
  enum kvp_status status = kvp_name_check(value, what, empty_allowed, error);
  if (status == KVP_OK) {
    memcpy(out, value, strlen(value) + 1);
  }
  return status;
}
