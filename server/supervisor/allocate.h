/* Memory for bookkeeping: small, and never of a size that a client chooses. A daemon that can't have it can't keep
 * what it promised either, so it aborts; sizes that clients choose are allocated with malloc and checked. Any thread.
 */
#ifndef KVPOOL_SUPERVISOR_ALLOCATE_H
#define KVPOOL_SUPERVISOR_ALLOCATE_H

#include <stddef.h>
#include <stdlib.h>

/* [count] of element_bytes, zeroed; freed with free(). Never NULL. */
static inline void *kvp_allocate(size_t count, size_t element_bytes) {
  void *memory = calloc(count, element_bytes);
  if (memory == NULL) {
    abort();
  }
  return memory;
}

#endif
