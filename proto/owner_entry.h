/* One entry of the owner table: who may use a block, and since when.
 *
 * A table is a memfd of num_blocks entries. The supervisor alone writes it, with release stores and before it
 * acknowledges an allocation; executors and kernels read it with acquire loads.
 *
 *   bits 63..24  epoch   the daemon's allocation counter when the block was assigned (0 = never)
 *   bits 23..16  state   enum kvp_block_state
 *   bits 15..0   owner   session slot, 1 .. 65535 (0 = nobody)
 */
#ifndef KVPOOL_PROTO_OWNER_ENTRY_H
#define KVPOOL_PROTO_OWNER_ENTRY_H

#include <stdint.h>

enum kvp_block_state {
  KVP_BLOCK_FREE = 0,
  KVP_BLOCK_LEASED = 1,
  KVP_BLOCK_SEALED = 2,      /* immutable: loads only */
  KVP_BLOCK_QUARANTINED = 3, /* freed, but steps accepted before may still use it */
};

#define KVP_OWNER_EPOCH_MAX ((UINT64_C(1) << 40) - 1)

static inline uint64_t kvp_owner_entry_make(uint64_t epoch, enum kvp_block_state state, uint16_t owner) {
  return epoch << 24 | (uint64_t)state << 16 | owner;
}

static inline uint64_t kvp_owner_entry_epoch(uint64_t entry) {
  return entry >> 24;
}

static inline enum kvp_block_state kvp_owner_entry_state(uint64_t entry) {
  return (enum kvp_block_state)(entry >> 16 & 0xFF);
}

static inline uint16_t kvp_owner_entry_owner(uint64_t entry) {
  return (uint16_t)(entry & 0xFFFF);
}

#endif
