/* Bytes of a device by use. Loop thread only. */
#include "server/supervisor/ledger.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

enum { taken_bytes_max = 96 };

uint64_t kvp_ledger_memory_bytes(const struct kvp_ledger *ledger, uint64_t bytes) {
  uint64_t over = ledger->granularity_bytes > 1 ? bytes % ledger->granularity_bytes : 0;
  uint64_t missing = over > 0 ? ledger->granularity_bytes - over : 0;
  return bytes > UINT64_MAX - missing ? UINT64_MAX : bytes + missing;
}

uint64_t kvp_ledger_used_bytes(const struct kvp_ledger *ledger) {
  uint64_t used = 0;
  for (int use = 0; use < kvp_ledger_use_count; use++) {
    used += ledger->used_bytes[use];
  }
  return used;
}

uint64_t kvp_ledger_left_bytes(const struct kvp_ledger *ledger) {
  uint64_t used = kvp_ledger_used_bytes(ledger);
  return used < ledger->limit_bytes ? ledger->limit_bytes - used : 0;
}

enum kvp_status kvp_ledger_charge(struct kvp_ledger *ledger, const char *device, enum kvp_ledger_use use,
                                  const char *what, uint64_t asked_bytes, uint64_t bytes, struct kvp_error *error) {
  assert(asked_bytes <= bytes);
  uint64_t left = kvp_ledger_left_bytes(ledger);
  if (bytes > left) {
    char taken[taken_bytes_max] = "";
    if (bytes != asked_bytes) {
      (void)snprintf(taken, sizeof taken, ", which takes %" PRIu64 " in multiples of %" PRIu64, bytes,
                     ledger->granularity_bytes);
    }
    return kvp_error_set(error, KVP_OUT_OF_MEMORY,
                         "%s asks for %" PRIu64 " bytes on %s%s: %" PRIu64 " of %" PRIu64 " are left (%" PRIu64
                         " in pools, %" PRIu64 " in buffers, %" PRIu64 " in workers' rings)",
                         what, asked_bytes, device, taken, left, ledger->limit_bytes,
                         ledger->used_bytes[KVP_LEDGER_POOL], ledger->used_bytes[KVP_LEDGER_BUFFER],
                         ledger->used_bytes[KVP_LEDGER_RING]);
  }
  ledger->used_bytes[use] += bytes;
  return KVP_OK;
}

void kvp_ledger_release(struct kvp_ledger *ledger, enum kvp_ledger_use use, uint64_t bytes) {
  assert(bytes <= ledger->used_bytes[use]);
  ledger->used_bytes[use] -= bytes;
}
