/* Which namespace had a pool's blocks last. */
#include "server/supervisor/block_namespaces.h"

#include <assert.h>
#include <stdlib.h>

void kvp_block_namespaces_deinit(struct kvp_block_namespaces *namespaces) {
  free(namespaces->each);
  namespaces->each = NULL;
}

bool kvp_block_namespaces_mixed(struct kvp_block_namespaces *namespaces, uint64_t number) {
  assert(number != 0);
  if (namespaces->all == 0) {
    namespaces->all = number;
  }
  return namespaces->each != NULL || namespaces->all != number;
}

enum kvp_status kvp_block_namespaces_changed(struct kvp_block_namespaces *namespaces, uint32_t num_blocks,
                                             uint64_t number, const int32_t *blocks, uint32_t count, int32_t *out,
                                             uint32_t *out_count, struct kvp_error *error) {
  if (namespaces->each == NULL) {
    uint64_t *each = malloc(num_blocks * sizeof *each);
    if (each == NULL) {
      return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory to note the namespaces of %u blocks", num_blocks);
    }
    for (uint32_t block = 0; block < num_blocks; block++) {
      each[block] = namespaces->all;
    }
    namespaces->each = each;
  }
  *out_count = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (namespaces->each[blocks[i]] != number) {
      out[(*out_count)++] = blocks[i];
    }
  }
  return KVP_OK;
}

void kvp_block_namespaces_set(struct kvp_block_namespaces *namespaces, uint64_t number, const int32_t *blocks,
                              uint32_t count) {
  assert(namespaces->each != NULL);
  for (uint32_t i = 0; i < count; i++) {
    namespaces->each[blocks[i]] = number;
  }
}
