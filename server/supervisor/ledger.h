/* Who holds how many bytes of each device. Nothing is over-committed: memory is charged before it is asked for.
 * Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_LEDGER_H
#define KVPOOL_SUPERVISOR_LEDGER_H

#include <stdint.h>

#include "proto/status.h"

enum kvp_ledger_use { KVP_LEDGER_POOL, KVP_LEDGER_BUFFER, kvp_ledger_use_count };

struct kvp_ledger {
  uint64_t limit_bytes; /* 0: not known yet, everything is refused */
  uint64_t used_bytes[kvp_ledger_use_count];
};

/* Refused with out_of_memory, naming what, asked, used, left and limit in bytes. */
enum kvp_status kvp_ledger_charge(struct kvp_ledger *ledger, const char *device, enum kvp_ledger_use use,
                                  const char *what, uint64_t bytes, struct kvp_error *error);
/* At most what was charged (asserted). */
void kvp_ledger_release(struct kvp_ledger *ledger, enum kvp_ledger_use use, uint64_t bytes);
uint64_t kvp_ledger_left_bytes(const struct kvp_ledger *ledger);

#endif
