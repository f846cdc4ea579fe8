/* Memory of completion words. */
#include "server/executor/timeline.h"

#include <stddef.h>
#include <sys/mman.h>

struct kvp_timeline *kvp_timelines_new(uint32_t count) {
  void *map =
      mmap(NULL, count * sizeof(struct kvp_timeline), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return map == MAP_FAILED ? NULL : map;
}

void kvp_timelines_destroy(struct kvp_timeline *timelines, uint32_t count) {
  (void)munmap(timelines, count * sizeof(struct kvp_timeline));
}
