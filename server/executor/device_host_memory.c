/* Host memory: sealed memfds side by side in one reserved range of addresses. Control thread.
 *
 * The range keeps an inaccessible page in front and at least one behind, so that what runs past a memory's ends
 * faults instead of hitting its neighbour.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/attach_wire.h"
#include "proto/fd_socket.h"
#include "proto/host_memory.h"
#include "server/executor/device_host.h"

enum { guard_bytes = 64 << 10 }; /* a multiple of every page size in use */

struct mapped_memory {
  struct kvp_memory base;
  uint8_t *reserved;
  size_t reserved_bytes;
};

/* Reserves the range; nothing in it is accessible yet. */
static struct mapped_memory *range_reserve(uint64_t bytes, struct kvp_error *error) {
  struct mapped_memory *memory = calloc(1, sizeof *memory);
  if (memory == NULL || bytes > INT64_MAX / 2) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "%llu bytes of addresses can't be reserved",
                        (unsigned long long)bytes);
    free(memory);
    return NULL;
  }
  memory->reserved_bytes = (size_t)((bytes + guard_bytes - 1) / guard_bytes * guard_bytes + 2 * (size_t)guard_bytes);
  void *map = mmap(NULL, memory->reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "%zu bytes of addresses can't be reserved: %s",
                        memory->reserved_bytes, strerror(errno));
    free(memory);
    return NULL;
  }
  memory->reserved = map;
  memory->base.base = memory->reserved + guard_bytes;
  memory->base.bytes = bytes;
  return memory;
}

/* bytes of the descriptor from `from` on, which is a page's beginning, at `offset` of the memory. */
static enum kvp_status chunk_map(struct mapped_memory *memory, uint64_t offset, int fd, uint64_t from, uint64_t bytes,
                                 int flags, struct kvp_error *error) {
  void *map = mmap(memory->base.base + offset, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | flags, fd,
                   (off_t)from);
  if (map == MAP_FAILED) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "a chunk of %llu bytes can't be mapped: %s",
                         (unsigned long long)bytes, strerror(errno));
  }
  return KVP_OK;
}

static void memory_free(struct mapped_memory *memory) {
  (void)munmap(memory->reserved, memory->reserved_bytes);
  free(memory);
}

/* Before anything is taken: a memory that can't fit as a whole is refused with its own number, not a chunk's. */
static enum kvp_status memory_fits(const char *name, uint64_t bytes, struct kvp_error *error) {
  struct kvp_host_memory host;
  kvp_host_memory_read(&host);
  if (bytes <= host.available_bytes) {
    return KVP_OK;
  }
  return kvp_error_set(error, KVP_OUT_OF_MEMORY, "memory '%s': %llu bytes asked for, %llu of %llu are available",
                       name, (unsigned long long)bytes, (unsigned long long)host.available_bytes,
                       (unsigned long long)host.total_bytes);
}

enum kvp_status kvp_device_host_memory_create(struct kvp_device *device, const char *name, uint64_t bytes, int *fds,
                                              struct kvp_memory **out, struct kvp_error *error) {
  enum kvp_status status = memory_fits(name, bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  struct mapped_memory *memory = range_reserve(bytes, error);
  if (memory == NULL) {
    return KVP_OUT_OF_MEMORY;
  }
  const uint32_t chunk_count = kvp_memory_chunk_count(bytes);
  uint32_t made = 0;
  for (; made < chunk_count; made++) {
    if (atomic_load_explicit(&device->closing, memory_order_relaxed)) {
      status = kvp_error_set(error, KVP_CANCELLED, "memory '%s': the executor stops", name);
      goto err_chunks;
    }
    uint64_t chunk_bytes = kvp_memory_chunk_bytes(bytes, made);
    fds[made] = kvp_memory_fd_create(name, chunk_bytes, error);
    if (fds[made] < 0) {
      status = error == NULL ? KVP_OUT_OF_MEMORY : (enum kvp_status)error->status;
      goto err_chunks;
    }
    /* New memory is slow anyway: its page tables are made here and not one by one in the first steps. */
    status =
        chunk_map(memory, (uint64_t)made * kvp_chunk_memory_bytes, fds[made], 0, chunk_bytes, MAP_POPULATE, error);
    if (status != KVP_OK) {
      (void)close(fds[made]);
      goto err_chunks;
    }
  }
  *out = &memory->base;
  return KVP_OK;

err_chunks:
  while (made > 0) {
    (void)close(fds[--made]);
  }
  memory_free(memory);
  return status;
}

enum kvp_status kvp_device_host_memory_import(struct kvp_device *device, uint64_t bytes, const int *fds,
                                              const uint64_t *chunk_bytes, uint32_t chunk_count,
                                              struct kvp_memory **out, struct kvp_error *error) {
  (void)device;
  const uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
  struct mapped_memory *memory = range_reserve(bytes, error);
  if (memory == NULL) {
    return KVP_OUT_OF_MEMORY;
  }
  enum kvp_status status = KVP_OK;
  uint64_t offset = 0;
  for (uint32_t i = 0; i < chunk_count && status == KVP_OK; i++) {
    if (i + 1 < chunk_count && chunk_bytes[i] % page_bytes != 0) {
      status = kvp_error_set(error, KVP_INVALID_ARGUMENT, "chunk %u of %u: %llu bytes are no whole number of pages",
                             i, chunk_count, (unsigned long long)chunk_bytes[i]);
      break;
    }
    status = kvp_memory_fd_check(fds[i], chunk_bytes[i], error);
    if (status == KVP_OK) {
      status = chunk_map(memory, offset, fds[i], 0, chunk_bytes[i], 0, error);
    }
    offset += chunk_bytes[i];
  }
  if (status != KVP_OK) {
    memory_free(memory);
    return status;
  }
  *out = &memory->base;
  return KVP_OK;
}

static const char *import_kind_name(uint32_t kind) {
  switch (kind) {
  case KVP_IMPORT_VMM:
    return "a GPU's memory";
  case KVP_IMPORT_IPC_HANDLE:
    return "an IPC handle of a GPU's memory";
  default:
    return "an unknown kind of memory";
  }
}

/* The pages that the buffer needs, as the supervisor has charged them, and no other: an allocation may be any number of
 * bytes, most of them holes. */
static enum kvp_status memfd_open(const struct kvp_control_open *request, int fd, struct kvp_memory **out,
                                  struct kvp_error *error) {
  const uint64_t head_bytes = request->offset_bytes % (uint64_t)sysconf(_SC_PAGESIZE);
  enum kvp_status status = kvp_memory_fd_check(fd, request->allocation_bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  struct mapped_memory *memory = range_reserve(head_bytes + request->bytes, error);
  if (memory == NULL) {
    return KVP_OUT_OF_MEMORY;
  }
  status = chunk_map(memory, 0, fd, request->offset_bytes - head_bytes, head_bytes + request->bytes, 0, error);
  if (status != KVP_OK) {
    memory_free(memory);
    return status;
  }
  memory->base.base += head_bytes;
  memory->base.bytes = request->bytes;
  *out = &memory->base;
  return KVP_OK;
}

enum kvp_status kvp_device_host_memory_open(struct kvp_device *device, const struct kvp_control_open *request, int fd,
                                            struct kvp_memory **out, struct kvp_error *error) {
  (void)device;
  if (request->kind != KVP_IMPORT_MEMFD) {
    return kvp_error_set(error, KVP_UNIMPLEMENTED, "memory %llu: kind %u is %s, a host device takes memfds",
                         (unsigned long long)request->memory_id, request->kind, import_kind_name(request->kind));
  }
  return memfd_open(request, fd, out, error);
}

void kvp_device_host_memory_destroy(struct kvp_device *device, struct kvp_memory *memory) {
  (void)device;
  memory_free((struct mapped_memory *)memory);
}
