/* The owner table of one pool. Loop thread only; executors read the same memory. */
#include "server/supervisor/owner_table.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/fd_socket.h"

enum kvp_status kvp_owner_table_init(struct kvp_owner_table *table, const char *pool_name, uint32_t num_blocks,
                                     struct kvp_error *error) {
  assert(num_blocks > 0);
  char name[kvp_name_bytes_max + sizeof "kvpool-owner:"];
  (void)snprintf(name, sizeof name, "kvpool-owner:%s", pool_name);
  size_t bytes = num_blocks * sizeof(uint64_t);
  int fd = kvp_memory_fd_create(name, bytes, error);
  if (fd < 0) {
    return KVP_OUT_OF_MEMORY;
  }
  void *entries = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (entries == MAP_FAILED) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "owner table of %u blocks can't be mapped: %s", num_blocks,
                        strerror(errno));
    goto err_close;
  }
  table->entries = entries;
  table->num_blocks = num_blocks;
  table->fd = fd;
  return KVP_OK;

err_close:
  (void)close(fd);
  return KVP_OUT_OF_MEMORY;
}

void kvp_owner_table_deinit(struct kvp_owner_table *table) {
  int result = munmap((void *)table->entries, table->num_blocks * sizeof(uint64_t));
  assert(result == 0);
  (void)result;
  (void)close(table->fd);
  table->entries = NULL;
  table->num_blocks = 0;
  table->fd = -1;
}

void kvp_owner_table_set(struct kvp_owner_table *table, uint32_t block, uint64_t entry) {
  assert(block < table->num_blocks);
  atomic_store_explicit(&table->entries[block], entry, memory_order_release);
}

uint64_t kvp_owner_table_get(const struct kvp_owner_table *table, uint32_t block) {
  assert(block < table->num_blocks);
  return atomic_load_explicit(&table->entries[block], memory_order_relaxed);
}
