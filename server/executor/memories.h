/* The memories of a device, by the supervisor's numbers. Control thread.
 *
 * A memory serves one region of one pool, or any number of buffers, and can't go while it does.
 */
#ifndef KVPOOL_EXECUTOR_MEMORIES_H
#define KVPOOL_EXECUTOR_MEMORIES_H

#include <stdint.h>

#include "proto/control_wire.h"
#include "proto/fd_socket.h"
#include "server/executor/device.h"
#include "server/executor/id_table.h"

struct kvp_memory_entry {
  uint64_t id;
  struct kvp_memory *memory;
  uint32_t region_uses; /* 0 or 1 */
  uint32_t buffer_uses;
};

/* A memory whose chunks are still arriving. */
struct kvp_memory_import {
  uint64_t memory_id;
  uint64_t bytes;
  uint32_t chunk_count; /* 0: none is under way */
  uint32_t arrived;
  int *fds;              /* [chunk_count] */
  uint64_t *chunk_bytes; /* [chunk_count] */
};

struct kvp_memories {
  struct kvp_device *device;
  struct kvp_id_table table; /* struct kvp_memory_entry */
  struct kvp_memory_import import;
};

/* Unused memories and all others: destroyed. */
void kvp_memories_deinit(struct kvp_memories *memories);

/* fds [kvp_memory_chunk_count(bytes)] are allocated here and become the caller's, as do the descriptors in it. */
enum kvp_status kvp_memories_create(struct kvp_memories *memories, const struct kvp_control_memory *request,
                                    int **fds, struct kvp_error *error);

/* Takes the message's chunks over. *done: that was the last, the memory is there. After an error nothing is under
 * way.
 */
enum kvp_status kvp_memories_import(struct kvp_memories *memories, struct kvp_fd_message *message, bool *done,
                                    struct kvp_error *error);

/* Memory that a worker brought. fd: -1 with an IPC handle; stays the caller's. */
enum kvp_status kvp_memories_open(struct kvp_memories *memories, const struct kvp_control_open *request, int fd,
                                  struct kvp_error *error);

enum kvp_status kvp_memories_destroy(struct kvp_memories *memories, uint64_t id, struct kvp_error *error);

/* Counts one more use of at least `bytes` of a memory. */
enum kvp_status kvp_memories_use_for_region(struct kvp_memories *memories, uint64_t id, uint64_t bytes,
                                            uint8_t **base, struct kvp_error *error);
enum kvp_status kvp_memories_use_for_buffer(struct kvp_memories *memories, uint64_t id, uint64_t bytes,
                                            uint8_t **base, struct kvp_error *error);
void kvp_memories_unuse_for_region(struct kvp_memories *memories, uint64_t id);
void kvp_memories_unuse_for_buffer(struct kvp_memories *memories, uint64_t id);

#endif
