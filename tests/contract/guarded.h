/* Memory with an inaccessible page directly at its end or directly before its begin, so that one byte too far is a
 * fault. Test code, one thread.
 */
#ifndef KVPOOL_TESTS_CONTRACT_GUARDED_H
#define KVPOOL_TESTS_CONTRACT_GUARDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct guarded {
  uint8_t *base; /* bytes long; NULL when bytes is 0 */
  uint64_t bytes;
  void *mapping;
  size_t mapping_bytes;
};

/* at_end: the last byte is followed by the guard, whatever alignment that gives base; else base is page-aligned
 * and follows the guard. Filled with `fill`. Exits the program when there is no memory. */
struct guarded guarded_make(uint64_t bytes, bool at_end, uint8_t fill);
void guarded_free(struct guarded *memory);

#endif
