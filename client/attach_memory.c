/* Memory that came as chunks: memfds or descriptors of a driver, one behind the other at one address. */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/attach.h"
#include "client/worker_cuda.h"

enum { page_bytes = 4096 };

static kvpool_status mapping_begin(struct kvp_mapping *mapping, const struct kvp_control_chunks *chunks,
                                   kvpool_error *error) {
  if (chunks->memory_bytes == 0 || chunks->chunk_count == 0 || chunks->chunk_count > kvp_chunks_per_memory_max ||
      chunks->first_chunk != 0) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold sent memory of %llu bytes in %u chunks, from chunk %u on",
                    (unsigned long long)chunks->memory_bytes, chunks->chunk_count, chunks->first_chunk);
  }
  mapping->bytes = chunks->memory_bytes;
  mapping->chunk_count = chunks->chunk_count;
  if (mapping->access == KVPOOL_MAP_NOTHING) {
    return KVPOOL_OK;
  }
  if (mapping->on_device) {
    return kvp_cuda_reserve(mapping, error);
  }
  void *base = mmap(NULL, mapping->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return kvp_fail(error, KVPOOL_NO_MEMORY, "no room for %llu bytes in this process: %s",
                    (unsigned long long)mapping->bytes, strerror(errno));
  }
  mapping->base = base;
  return KVPOOL_OK;
}

static kvpool_status chunk_map_host(struct kvp_mapping *mapping, int fd, uint64_t bytes, kvpool_error *error) {
  struct kvp_error refused;
  if (kvp_memory_fd_check(fd, bytes, &refused) != KVP_OK) {
    return kvp_fail(error, KVPOOL_MALFORMED, "memory that kvpoold sent: %s", refused.text);
  }
  if (mapping->mapped_bytes % page_bytes != 0) {
    return kvp_fail(error, KVPOOL_MALFORMED, "a chunk of memory that kvpoold sent begins at byte %llu",
                    (unsigned long long)mapping->mapped_bytes);
  }
  const int protection = mapping->access == KVPOOL_MAP_READ_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
  void *place = (uint8_t *)mapping->base + mapping->mapped_bytes;
  if (mmap(place, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    return kvp_fail(error, KVPOOL_NO_MEMORY, "%llu bytes of shared memory can't be mapped: %s",
                    (unsigned long long)bytes, strerror(errno));
  }
  return KVPOOL_OK;
}

static kvpool_status chunk_map(struct kvp_mapping *mapping, int fd, uint64_t bytes, kvpool_error *error) {
  if (bytes == 0 || bytes > mapping->bytes - mapping->mapped_bytes) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold sent a chunk of %llu bytes where %llu of %llu are left",
                    (unsigned long long)bytes, (unsigned long long)(mapping->bytes - mapping->mapped_bytes),
                    (unsigned long long)mapping->bytes);
  }
  kvpool_status status = KVPOOL_OK;
  if (mapping->access != KVPOOL_MAP_NOTHING) {
    status = mapping->on_device ? kvp_cuda_map_chunk(mapping, fd, bytes, error)
                                : chunk_map_host(mapping, fd, bytes, error);
  }
  if (status == KVPOOL_OK) {
    mapping->mapped_bytes += bytes;
    mapping->chunks_mapped++;
  }
  return status;
}

kvpool_status kvp_mapping_add(struct kvp_mapping *mapping, const struct kvp_fd_message *message,
                              kvpool_error *error) {
  struct kvp_control_chunks chunks;
  kvpool_status status = kvp_attach_check_body(message, sizeof chunks, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  memcpy(&chunks, message->body, sizeof chunks);
  if (mapping->chunk_count == 0) {
    status = mapping_begin(mapping, &chunks, error);
  } else if (chunks.memory_bytes != mapping->bytes || chunks.chunk_count != mapping->chunk_count ||
             chunks.first_chunk != mapping->chunks_mapped) {
    status = kvp_fail(error, KVPOOL_MALFORMED, "kvpoold sent chunk %u of %u where %u of %u was next",
                      chunks.first_chunk, chunks.chunk_count, mapping->chunks_mapped, mapping->chunk_count);
  }
  for (uint32_t i = 0; i < message->fd_count && status == KVPOOL_OK; i++) {
    status = chunk_map(mapping, message->fds[i], chunks.chunk_bytes[i], error);
  }
  return status;
}

bool kvp_mapping_is_whole(const struct kvp_mapping *mapping) {
  return mapping->chunk_count > 0 && mapping->mapped_bytes == mapping->bytes &&
         mapping->chunks_mapped == mapping->chunk_count;
}

void kvp_mapping_deinit(struct kvp_mapping *mapping) {
  if (mapping->base == NULL) {
    return;
  }
  if (mapping->on_device) {
    kvp_cuda_unmap(mapping);
  } else {
    (void)munmap(mapping->base, mapping->bytes);
  }
  mapping->base = NULL;
}
