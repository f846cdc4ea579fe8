/* Who holds how many bytes of each device. Nothing is over-committed: memory is charged before it is asked for, and
 * charged as the device counts: every memory takes a multiple of its granularity. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_LEDGER_H
#define KVPOOL_SUPERVISOR_LEDGER_H

#include <stdint.h>

#include "proto/status.h"

enum kvp_ledger_use { KVP_LEDGER_POOL, KVP_LEDGER_BUFFER, KVP_LEDGER_RING, kvp_ledger_use_count };

struct kvp_ledger {
  uint64_t limit_bytes;       /* 0: not known yet, everything is refused */
  uint64_t granularity_bytes; /* 0 or 1: a memory takes as many bytes as it has */
  uint64_t used_bytes[kvp_ledger_use_count];
};

/* What one memory of so many bytes takes. UINT64_MAX when that is no number. */
uint64_t kvp_ledger_memory_bytes(const struct kvp_ledger *ledger, uint64_t bytes);
/* bytes: what all memories together take. asked_bytes: what they hold, for the refusal, which is out_of_memory and
 * names what, asked, taken, used, left and limit in bytes. */
enum kvp_status kvp_ledger_charge(struct kvp_ledger *ledger, const char *device, enum kvp_ledger_use use,
                                  const char *what, uint64_t asked_bytes, uint64_t bytes, struct kvp_error *error);
/* At most what was charged (asserted). */
void kvp_ledger_release(struct kvp_ledger *ledger, enum kvp_ledger_use use, uint64_t bytes);
uint64_t kvp_ledger_used_bytes(const struct kvp_ledger *ledger);
uint64_t kvp_ledger_left_bytes(const struct kvp_ledger *ledger);

#endif
