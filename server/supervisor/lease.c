/* The block allocator of one pool. Loop thread only.
 *
 * A block is in exactly one of three places: the set of free blocks, the owner table as leased, or the quarantine of
 * the owner that freed it, a linked list in the order of the frees. */
#include "server/supervisor/lease.h"

#include <assert.h>
#include <stdlib.h>

#include "server/supervisor/block_bitmap.h"

struct quarantine {
  uint32_t first; /* while there are any */
  uint32_t last;
  uint32_t count;
};

struct kvp_lease_table {
  struct kvp_owner_table *table;
  struct kvp_block_bitmap free;
  struct kvp_block_bitmap seen; /* of the free call under way; empty between calls */
  uint32_t *next;               /* [num_blocks], of a quarantine's list */
  uint64_t *fences;             /* [num_blocks], of those in quarantine */
  uint32_t free_count;
  uint32_t leased_count;
  uint32_t quarantined_count;
  uint32_t owned[kvp_lease_owner_nobody + 1]; /* leased, by owner */
  struct quarantine quarantines[kvp_lease_owner_nobody + 1];
  uint16_t waiting[kvp_lease_owner_nobody + 1]; /* owners with blocks in quarantine, in no order */
  uint32_t waiting_count;
};

enum kvp_status kvp_lease_table_new(struct kvp_owner_table *table, struct kvp_lease_table **out,
                                    struct kvp_error *error) {
  uint32_t count = table->num_blocks;
  struct kvp_lease_table *leases = calloc(1, sizeof *leases);
  if (leases == NULL) {
    goto err_memory;
  }
  leases->table = table;
  leases->next = calloc(count, sizeof *leases->next);
  leases->fences = calloc(count, sizeof *leases->fences);
  if (leases->next == NULL || leases->fences == NULL) {
    goto err_next;
  }
  if (!kvp_block_bitmap_init(&leases->free, count)) {
    goto err_next;
  }
  if (!kvp_block_bitmap_init(&leases->seen, count)) {
    goto err_free;
  }
  for (uint32_t block = 0; block < count; block++) {
    assert(kvp_owner_table_get(table, block) == 0);
    kvp_block_bitmap_add(&leases->free, block);
  }
  leases->free_count = count;
  *out = leases;
  return KVP_OK;

err_free:
  kvp_block_bitmap_deinit(&leases->free);
err_next:
  free(leases->fences);
  free(leases->next);
  free(leases);
err_memory:
  return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the block allocator of %u blocks", count);
}

void kvp_lease_table_destroy(struct kvp_lease_table *leases) {
  kvp_block_bitmap_deinit(&leases->seen);
  kvp_block_bitmap_deinit(&leases->free);
  free(leases->fences);
  free(leases->next);
  free(leases);
}

static void lease_block(struct kvp_lease_table *leases, uint16_t owner, uint64_t epoch, uint32_t block) {
  kvp_block_bitmap_remove(&leases->free, block);
  kvp_owner_table_set(leases->table, block, kvp_owner_entry_make(epoch, KVP_BLOCK_LEASED, owner));
}

static void count_leased(struct kvp_lease_table *leases, uint16_t owner, uint32_t count) {
  leases->free_count -= count;
  leases->leased_count += count;
  leases->owned[owner] += count;
}

enum kvp_status kvp_lease_allocate(struct kvp_lease_table *leases, uint16_t owner, uint64_t epoch, uint32_t count,
                                   int32_t *out, struct kvp_error *error) {
  assert(owner > 0 && owner <= kvp_lease_owner_nobody && epoch > 0 && epoch <= KVP_OWNER_EPOCH_MAX);
  if (count > leases->free_count) {
    return kvp_error_set(error, KVP_OUT_OF_BLOCKS,
                         "%u blocks asked for, %u of %u are free (%u leased, %u waiting for steps in flight)", count,
                         leases->free_count, leases->table->num_blocks, leases->leased_count,
                         leases->quarantined_count);
  }
  uint32_t block = 0;
  for (uint32_t i = 0; i < count; i++) {
    block = kvp_block_bitmap_next(&leases->free, block);
    assert(block != KVP_BLOCK_NONE);
    lease_block(leases, owner, epoch, block);
    out[i] = (int32_t)block;
  }
  count_leased(leases, owner, count);
  return KVP_OK;
}

static const char *state_name(enum kvp_block_state state) {
  switch (state) {
  case KVP_BLOCK_FREE:
    return "free";
  case KVP_BLOCK_LEASED:
    return "leased";
  case KVP_BLOCK_SEALED:
    return "sealed";
  case KVP_BLOCK_QUARANTINED:
    return "freed, but steps in flight may still use it";
  }
  return "in no known state";
}

static enum kvp_block_state state_of(const struct kvp_lease_table *leases, uint32_t block) {
  return kvp_owner_entry_state(kvp_owner_table_get(leases->table, block));
}

enum kvp_status kvp_lease_allocate_range(struct kvp_lease_table *leases, uint16_t owner, uint64_t epoch,
                                         uint32_t first, uint32_t count, struct kvp_error *error) {
  assert(owner > 0 && owner <= kvp_lease_owner_nobody && epoch > 0 && epoch <= KVP_OWNER_EPOCH_MAX);
  uint32_t num_blocks = leases->table->num_blocks;
  if (first >= num_blocks || count > num_blocks - first) {
    return kvp_error_set_at(error, KVP_OUT_OF_RANGE, -1, "first_block", -1, first,
                            "blocks [%u, %llu) are not inside the pool's [0, %u)", first,
                            (unsigned long long)first + count, num_blocks);
  }
  for (uint32_t block = first; block < first + count; block++) {
    if (!kvp_block_bitmap_has(&leases->free, block)) {
      return kvp_error_set_at(error, KVP_IN_USE, -1, "first_block", block - first, block,
                              "block %u of the range [%u, %u) is %s", block, first, first + count,
                              state_name(state_of(leases, block)));
    }
  }
  for (uint32_t block = first; block < first + count; block++) {
    lease_block(leases, owner, epoch, block);
  }
  count_leased(leases, owner, count);
  return KVP_OK;
}

void kvp_lease_pass_on(struct kvp_lease_table *leases, uint16_t owner, uint64_t epoch, const int32_t *blocks,
                       uint32_t count) {
  assert(owner > 0 && owner <= kvp_sessions_max && epoch > 0 && epoch <= KVP_OWNER_EPOCH_MAX);
  assert(leases->owned[kvp_lease_owner_nobody] >= count);
  for (uint32_t i = 0; i < count; i++) {
    uint32_t block = (uint32_t)blocks[i];
    assert(kvp_owner_entry_owner(kvp_owner_table_get(leases->table, block)) == kvp_lease_owner_nobody);
    kvp_owner_table_set(leases->table, block, kvp_owner_entry_make(epoch, KVP_BLOCK_LEASED, owner));
  }
  leases->owned[kvp_lease_owner_nobody] -= count;
  leases->owned[owner] += count;
}

/* The entry keeps owner and epoch. */
static void quarantine_block(struct kvp_lease_table *leases, uint16_t owner, uint32_t block, uint64_t fence) {
  struct quarantine *quarantine = &leases->quarantines[owner];
  uint64_t entry = kvp_owner_table_get(leases->table, block);
  kvp_owner_table_set(leases->table, block,
                      kvp_owner_entry_make(kvp_owner_entry_epoch(entry), KVP_BLOCK_QUARANTINED, owner));
  if (quarantine->count == 0) {
    quarantine->first = block;
    leases->waiting[leases->waiting_count++] = owner;
  } else {
    assert(fence >= leases->fences[quarantine->last]);
    leases->next[quarantine->last] = block;
  }
  quarantine->last = block;
  quarantine->count++;
  leases->fences[block] = fence;
}

static void count_quarantined(struct kvp_lease_table *leases, uint16_t owner, uint32_t count) {
  leases->leased_count -= count;
  leases->owned[owner] -= count;
  leases->quarantined_count += count;
}

static bool may_free(uint64_t entry, uint16_t owner) {
  enum kvp_block_state state = kvp_owner_entry_state(entry);
  return (state == KVP_BLOCK_LEASED || state == KVP_BLOCK_SEALED) && kvp_owner_entry_owner(entry) == owner;
}

static enum kvp_status check_freed(const struct kvp_lease_table *leases, uint16_t owner, int64_t position,
                                   int32_t block, struct kvp_error *error) {
  if (block < 0 || (uint32_t)block >= leases->table->num_blocks) {
    return kvp_error_set_at(error, KVP_OUT_OF_RANGE, -1, "blocks", position, block,
                            "blocks[%lld] = %d is not inside the pool's [0, %u)", (long long)position, block,
                            leases->table->num_blocks);
  }
  if (!may_free(kvp_owner_table_get(leases->table, (uint32_t)block), owner)) {
    return kvp_error_set_at(error, KVP_NOT_OWNER, -1, "blocks", position, block,
                            "blocks[%lld] = %d is not this session's", (long long)position, block);
  }
  if (kvp_block_bitmap_has(&leases->seen, (uint32_t)block)) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "blocks", position, block,
                            "blocks[%lld] = %d is there twice", (long long)position, block);
  }
  return KVP_OK;
}

enum kvp_status kvp_lease_free(struct kvp_lease_table *leases, uint16_t owner, const int32_t *blocks, uint32_t count,
                               uint64_t fence, struct kvp_error *error) {
  assert(owner > 0 && owner <= kvp_lease_owner_nobody);
  enum kvp_status status = KVP_OK;
  uint32_t checked = 0;
  while (checked < count) {
    status = check_freed(leases, owner, checked, blocks[checked], error);
    if (status != KVP_OK) {
      break;
    }
    kvp_block_bitmap_add(&leases->seen, (uint32_t)blocks[checked]);
    checked++;
  }
  for (uint32_t i = 0; i < checked; i++) {
    kvp_block_bitmap_remove(&leases->seen, (uint32_t)blocks[i]);
  }
  if (status != KVP_OK || count == 0) {
    return status;
  }
  for (uint32_t i = 0; i < count; i++) {
    quarantine_block(leases, owner, (uint32_t)blocks[i], fence);
  }
  count_quarantined(leases, owner, count);
  return KVP_OK;
}

uint32_t kvp_lease_free_all(struct kvp_lease_table *leases, uint16_t owner, uint64_t fence) {
  assert(owner > 0 && owner <= kvp_lease_owner_nobody);
  uint32_t count = leases->owned[owner];
  if (count == 0) {
    return 0;
  }
  uint32_t left = count;
  for (uint32_t block = 0; left > 0; block++) {
    if (may_free(kvp_owner_table_get(leases->table, block), owner)) {
      quarantine_block(leases, owner, block, fence);
      left--;
    }
  }
  count_quarantined(leases, owner, count);
  return count;
}

static void return_first(struct kvp_lease_table *leases, struct quarantine *quarantine) {
  uint32_t block = quarantine->first;
  quarantine->first = leases->next[block];
  quarantine->count--;
  leases->quarantined_count--;
  kvp_owner_table_set(leases->table, block, kvp_owner_entry_make(0, KVP_BLOCK_FREE, 0));
  kvp_block_bitmap_add(&leases->free, block);
  leases->free_count++;
}

uint32_t kvp_lease_reach(struct kvp_lease_table *leases, kvp_lease_retired_fn retired, const void *context) {
  uint32_t before = leases->free_count;
  for (uint32_t i = 0; i < leases->waiting_count;) {
    uint16_t owner = leases->waiting[i];
    struct quarantine *quarantine = &leases->quarantines[owner];
    uint64_t fence = retired(context, owner);
    while (quarantine->count > 0 && leases->fences[quarantine->first] <= fence) {
      return_first(leases, quarantine);
    }
    if (quarantine->count == 0) {
      leases->waiting[i] = leases->waiting[--leases->waiting_count];
    } else {
      i++;
    }
  }
  return leases->free_count - before;
}

uint32_t kvp_lease_free_count(const struct kvp_lease_table *leases) {
  return leases->free_count;
}

uint32_t kvp_lease_leased_count(const struct kvp_lease_table *leases) {
  return leases->leased_count;
}

uint32_t kvp_lease_quarantined_count(const struct kvp_lease_table *leases) {
  return leases->quarantined_count;
}

uint32_t kvp_lease_owned_count(const struct kvp_lease_table *leases, uint16_t owner) {
  return leases->owned[owner];
}

uint32_t kvp_lease_quarantined_by(const struct kvp_lease_table *leases, uint16_t owner) {
  return leases->quarantines[owner].count;
}
