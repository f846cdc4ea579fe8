/* Pools and buffers of the numbers in intake_world.h, in allocations of their exact sizes: a byte touched outside of them is
 * seen.
 */
#ifndef KVPOOL_TESTS_FUZZ_WORLD_H
#define KVPOOL_TESTS_FUZZ_WORLD_H

#include "server/executor/objects.h"

/* Once in a process. */
void fuzz_world_build(struct kvp_objects *objects);
/* How often steps hold one of the objects. */
uint32_t fuzz_world_uses(const struct kvp_objects *objects);

#endif
