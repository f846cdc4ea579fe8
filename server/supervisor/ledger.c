/* Bytes of a device by use. Loop thread only. */
#include "server/supervisor/ledger.h"

#include <assert.h>
#include <inttypes.h>

static uint64_t used_bytes(const struct kvp_ledger *ledger) {
  uint64_t used = 0;
  for (int use = 0; use < kvp_ledger_use_count; use++) {
    used += ledger->used_bytes[use];
  }
  return used;
}

uint64_t kvp_ledger_left_bytes(const struct kvp_ledger *ledger) {
  uint64_t used = used_bytes(ledger);
  return used < ledger->limit_bytes ? ledger->limit_bytes - used : 0;
}

enum kvp_status kvp_ledger_charge(struct kvp_ledger *ledger, const char *device, enum kvp_ledger_use use,
                                  const char *what, uint64_t bytes, struct kvp_error *error) {
  uint64_t left = kvp_ledger_left_bytes(ledger);
  if (bytes > left) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY,
                         "%s asks for %" PRIu64 " bytes on %s: %" PRIu64 " of %" PRIu64 " are left (%" PRIu64
                         " in pools, %" PRIu64 " in buffers)",
                         what, bytes, device, left, ledger->limit_bytes, ledger->used_bytes[KVP_LEDGER_POOL],
                         ledger->used_bytes[KVP_LEDGER_BUFFER]);
  }
  ledger->used_bytes[use] += bytes;
  return KVP_OK;
}

void kvp_ledger_release(struct kvp_ledger *ledger, enum kvp_ledger_use use, uint64_t bytes) {
  assert(bytes <= ledger->used_bytes[use]);
  ledger->used_bytes[use] -= bytes;
}
