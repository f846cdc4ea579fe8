/* Which namespaces' sessions may have blocks of a pool, and whose workers may map it. Loop thread only.
 *
 * A map shows all of a pool, and a worker can keep its memory when its attachment has ended. So no pool is ever both
 * mapped and used by two namespaces: one with a namespace is that one's, and one without is the mapping namespace's
 * from its first map on, until it is deleted. Namespaces are known by their names here: a number may be forgotten.
 */
#ifndef KVPOOL_SUPERVISOR_POOL_ACCESS_H
#define KVPOOL_SUPERVISOR_POOL_ACCESS_H

#include <stdbool.h>

#include "server/supervisor/pool_spec.h"

/* Zeroed is ready to use. */
struct kvp_pool_access {
  char user[kvp_name_bytes_max]; /* the first namespace that got blocks of the pool or mapped it; "": none yet */
  bool is_mixed;                 /* another one got blocks, too */
  bool is_mapped;                /* by workers of `user`: then it isn't mixed, and will not be */
};

/* Steps, rows: is the pool the session's to use? permission_denied: it has another namespace. */
enum kvp_status kvp_pool_access_check(const struct kvp_pool_spec *spec, const char *session_namespace,
                                      struct kvp_error *error);

/* May the session get blocks? permission_denied also where another namespace's workers have mapped the pool. */
enum kvp_status kvp_pool_access_check_blocks(const struct kvp_pool_access *access, const struct kvp_pool_spec *spec,
                                             const char *session_namespace, struct kvp_error *error);
/* It gets some, now or when they are zeroed. It was checked. */
void kvp_pool_access_add_blocks(struct kvp_pool_access *access, const char *session_namespace);

/* May a worker of the session map the pool? Then it has from now on. permission_denied also where another namespace has
 * got blocks, or mapped it. */
enum kvp_status kvp_pool_access_map(struct kvp_pool_access *access, const struct kvp_pool_spec *spec,
                                    const char *session_namespace, struct kvp_error *error);

#endif
