/* Multipliers for hashes of numbers that clients choose: nobody outside knows which of them meet. Any thread. */
#ifndef KVPOOL_EXECUTOR_HASH_MULTIPLIER_H
#define KVPOOL_EXECUTOR_HASH_MULTIPLIER_H

#include <stdint.h>

/* Odd, another one each time. */
uint64_t kvp_hash_multiplier(void);

#endif
