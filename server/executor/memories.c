/* The table of memories, and how they are made and taken over. */
#include "server/executor/memories.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/attach_wire.h"

static void import_reset(struct kvp_memory_import *import) {
  for (uint32_t i = 0; i < import->arrived; i++) {
    (void)close(import->fds[i]);
  }
  free(import->fds);
  free(import->chunk_bytes);
  *import = (struct kvp_memory_import){0};
}

void kvp_memories_deinit(struct kvp_memories *memories) {
  struct kvp_memory_entry *entry = NULL;
  import_reset(&memories->import);
  while ((entry = kvp_id_table_take_any(&memories->table)) != NULL) {
    memories->device->backend->memory_destroy(memories->device, entry->memory);
    free(entry);
  }
  kvp_id_table_deinit(&memories->table);
}

static enum kvp_status new_id_check(const struct kvp_memories *memories, uint64_t id, uint64_t bytes,
                                    struct kvp_error *error) {
  if (bytes == 0 || bytes > (uint64_t)kvp_chunks_per_memory_max * kvp_chunk_memory_bytes) {
    return kvp_error_set(error, KVP_TOO_LARGE, "memory %llu: %llu bytes, allowed are 1 to %llu",
                         (unsigned long long)id, (unsigned long long)bytes,
                         (unsigned long long)kvp_chunks_per_memory_max * kvp_chunk_memory_bytes);
  }
  if (kvp_id_table_get(&memories->table, id) != NULL) {
    return kvp_error_set(error, KVP_ALREADY_EXISTS, "memory %llu exists", (unsigned long long)id);
  }
  return KVP_OK;
}

/* Takes the memory over, or destroys it. */
static enum kvp_status entry_add(struct kvp_memories *memories, uint64_t id, struct kvp_memory *memory,
                                 struct kvp_error *error) {
  struct kvp_memory_entry *entry = calloc(1, sizeof *entry);
  if (entry == NULL || !kvp_id_table_add(&memories->table, id, entry)) {
    free(entry);
    memories->device->backend->memory_destroy(memories->device, memory);
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the table of memories");
  }
  entry->id = id;
  entry->memory = memory;
  return KVP_OK;
}

enum kvp_status kvp_memories_create(struct kvp_memories *memories, const struct kvp_control_memory *request,
                                    int **fds, struct kvp_error *error) {
  enum kvp_status status = new_id_check(memories, request->memory_id, request->bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  if (memchr(request->name, '\0', sizeof request->name) == NULL) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory %llu: its name has no end",
                         (unsigned long long)request->memory_id);
  }
  const uint32_t chunk_count = kvp_memory_chunk_count(request->bytes);
  int *made = calloc(chunk_count, sizeof *made);
  struct kvp_memory *memory = NULL;
  if (made == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for %u descriptors", chunk_count);
  }
  status =
      memories->device->backend->memory_create(memories->device, request->name, request->bytes, made, &memory, error);
  if (status != KVP_OK) {
    free(made);
    return status;
  }
  status = entry_add(memories, request->memory_id, memory, error);
  if (status != KVP_OK) {
    for (uint32_t i = 0; i < chunk_count; i++) {
      (void)close(made[i]);
    }
    free(made);
    return status;
  }
  *fds = made;
  return KVP_OK;
}

static enum kvp_status import_begin(struct kvp_memories *memories, const struct kvp_control_chunks *chunks,
                                    struct kvp_error *error) {
  struct kvp_memory_import *import = &memories->import;
  enum kvp_status status = new_id_check(memories, chunks->memory_id, chunks->memory_bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  if (chunks->chunk_count == 0 || chunks->chunk_count > kvp_chunks_per_memory_max) {
    return kvp_error_set(error, KVP_TOO_LARGE, "memory %llu: %u chunks, allowed are 1 to %d",
                         (unsigned long long)chunks->memory_id, chunks->chunk_count, kvp_chunks_per_memory_max);
  }
  import->memory_id = chunks->memory_id;
  import->bytes = chunks->memory_bytes;
  import->fds = calloc(chunks->chunk_count, sizeof *import->fds);
  import->chunk_bytes = calloc(chunks->chunk_count, sizeof *import->chunk_bytes);
  import->chunk_count = chunks->chunk_count;
  if (import->fds == NULL || import->chunk_bytes == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for %u chunks", chunks->chunk_count);
  }
  return KVP_OK;
}

static enum kvp_status import_append(struct kvp_memory_import *import, const struct kvp_control_chunks *chunks,
                                     struct kvp_fd_message *message, struct kvp_error *error) {
  if (chunks->memory_id != import->memory_id || chunks->memory_bytes != import->bytes ||
      chunks->chunk_count != import->chunk_count || chunks->first_chunk != import->arrived ||
      message->fd_count == 0 || message->fd_count > import->chunk_count - import->arrived) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "memory %llu: %u chunks from %u of %u on do not follow %u chunks of memory %llu",
                         (unsigned long long)chunks->memory_id, message->fd_count, chunks->first_chunk,
                         chunks->chunk_count, import->arrived, (unsigned long long)import->memory_id);
  }
  for (uint32_t i = 0; i < message->fd_count; i++) {
    import->fds[import->arrived] = message->fds[i];
    import->chunk_bytes[import->arrived++] = chunks->chunk_bytes[i];
  }
  message->fd_count = 0;
  return KVP_OK;
}

/* All chunks are there: together they are the memory. */
static enum kvp_status import_finish(struct kvp_memories *memories, struct kvp_error *error) {
  const struct kvp_memory_import *import = &memories->import;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < import->chunk_count; i++) {
    if (import->chunk_bytes[i] == 0 || import->chunk_bytes[i] > import->bytes - sum) {
      return kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory %llu: chunk %u of %llu bytes, %llu of %llu are left",
                           (unsigned long long)import->memory_id, i, (unsigned long long)import->chunk_bytes[i],
                           (unsigned long long)(import->bytes - sum), (unsigned long long)import->bytes);
    }
    sum += import->chunk_bytes[i];
  }
  if (sum != import->bytes) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory %llu: its chunks are %llu bytes, not %llu",
                         (unsigned long long)import->memory_id, (unsigned long long)sum,
                         (unsigned long long)import->bytes);
  }
  struct kvp_memory *memory = NULL;
  enum kvp_status status = memories->device->backend->memory_import(
      memories->device, import->bytes, import->fds, import->chunk_bytes, import->chunk_count, &memory, error);
  return status == KVP_OK ? entry_add(memories, import->memory_id, memory, error) : status;
}

enum kvp_status kvp_memories_import(struct kvp_memories *memories, struct kvp_fd_message *message, bool *done,
                                    struct kvp_error *error) {
  struct kvp_memory_import *import = &memories->import;
  struct kvp_control_chunks chunks;
  memcpy(&chunks, message->body, sizeof chunks); /* its size was checked */
  enum kvp_status status = KVP_OK;
  *done = false;
  if (import->chunk_count == 0) {
    status = import_begin(memories, &chunks, error);
  }
  if (status == KVP_OK) {
    status = import_append(import, &chunks, message, error);
  }
  if (status == KVP_OK && import->arrived < import->chunk_count) {
    return KVP_OK;
  }
  if (status == KVP_OK) {
    status = import_finish(memories, error);
  }
  import_reset(import);
  *done = status == KVP_OK;
  return status;
}

static enum kvp_status open_check(const struct kvp_control_open *request, struct kvp_error *error) {
  if (request->bytes == 0 || request->offset_bytes > request->allocation_bytes ||
      request->bytes > request->allocation_bytes - request->offset_bytes) {
    return kvp_error_set(error, KVP_OUT_OF_RANGE,
                         "memory %llu: %llu bytes from %llu on are not inside an allocation of %llu",
                         (unsigned long long)request->memory_id, (unsigned long long)request->bytes,
                         (unsigned long long)request->offset_bytes, (unsigned long long)request->allocation_bytes);
  }
  if (request->offset_bytes % kvp_import_alignment_bytes != 0) { /* views count from there */
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory %llu: it begins at %llu, which is no multiple of %d",
                         (unsigned long long)request->memory_id, (unsigned long long)request->offset_bytes,
                         kvp_import_alignment_bytes);
  }
  return KVP_OK;
}

enum kvp_status kvp_memories_open(struct kvp_memories *memories, const struct kvp_control_open *request, int fd,
                                  struct kvp_error *error) {
  enum kvp_status status = new_id_check(memories, request->memory_id, request->allocation_bytes, error);
  if (status == KVP_OK) {
    status = open_check(request, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  if ((request->kind == KVP_IMPORT_IPC_HANDLE) != (fd < 0)) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory %llu: import kind %u comes with%s descriptor",
                         (unsigned long long)request->memory_id, request->kind, fd < 0 ? "out a" : " a");
  }
  if (memories->device->backend->memory_open == NULL) {
    return kvp_error_set(error, KVP_UNIMPLEMENTED, "memory %llu: this device takes no memory of others",
                         (unsigned long long)request->memory_id);
  }
  struct kvp_memory *memory = NULL;
  status = memories->device->backend->memory_open(memories->device, request, fd, &memory, error);
  return status == KVP_OK ? entry_add(memories, request->memory_id, memory, error) : status;
}

static struct kvp_memory_entry *entry_get(const struct kvp_memories *memories, uint64_t id) {
  return kvp_id_table_get(&memories->table, id);
}

enum kvp_status kvp_memories_destroy(struct kvp_memories *memories, uint64_t id, struct kvp_error *error) {
  struct kvp_memory_entry *entry = entry_get(memories, id);
  if (entry == NULL) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory %llu does not exist", (unsigned long long)id);
  }
  if (entry->region_uses + entry->buffer_uses > 0) {
    return kvp_error_set(error, KVP_IN_USE, "memory %llu: %u regions and %u buffers use it", (unsigned long long)id,
                         entry->region_uses, entry->buffer_uses);
  }
  (void)kvp_id_table_remove(&memories->table, id);
  memories->device->backend->memory_destroy(memories->device, entry->memory);
  free(entry);
  return KVP_OK;
}

/* NULL with *error: no such memory, or it is too small. */
static struct kvp_memory_entry *entry_for_use(const struct kvp_memories *memories, uint64_t id, uint64_t bytes,
                                              struct kvp_error *error) {
  struct kvp_memory_entry *entry = entry_get(memories, id);
  if (entry == NULL) {
    (void)kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory %llu does not exist", (unsigned long long)id);
    return NULL;
  }
  if (bytes > entry->memory->bytes) {
    (void)kvp_error_set(error, KVP_OUT_OF_RANGE, "memory %llu has %llu bytes, %llu are needed",
                        (unsigned long long)id, (unsigned long long)entry->memory->bytes, (unsigned long long)bytes);
    return NULL;
  }
  return entry;
}

enum kvp_status kvp_memories_use_for_region(struct kvp_memories *memories, uint64_t id, uint64_t bytes,
                                            uint8_t **base, struct kvp_error *error) {
  struct kvp_memory_entry *entry = entry_for_use(memories, id, bytes, error);
  if (entry == NULL) {
    return (enum kvp_status)error->status;
  }
  if (entry->region_uses + entry->buffer_uses > 0) {
    return kvp_error_set(error, KVP_IN_USE, "memory %llu is a region or a buffer already", (unsigned long long)id);
  }
  entry->region_uses++;
  *base = entry->memory->base;
  return KVP_OK;
}

enum kvp_status kvp_memories_use_for_buffer(struct kvp_memories *memories, uint64_t id, uint64_t bytes,
                                            uint8_t **base, struct kvp_error *error) {
  struct kvp_memory_entry *entry = entry_for_use(memories, id, bytes, error);
  if (entry == NULL) {
    return (enum kvp_status)error->status;
  }
  if (entry->region_uses > 0) {
    return kvp_error_set(error, KVP_IN_USE, "memory %llu is a region of a pool", (unsigned long long)id);
  }
  entry->buffer_uses++;
  *base = entry->memory->base;
  return KVP_OK;
}

void kvp_memories_unuse_for_region(struct kvp_memories *memories, uint64_t id) {
  struct kvp_memory_entry *entry = entry_get(memories, id);
  assert(entry != NULL && entry->region_uses > 0);
  entry->region_uses--;
}

void kvp_memories_unuse_for_buffer(struct kvp_memories *memories, uint64_t id) {
  struct kvp_memory_entry *entry = entry_get(memories, id);
  assert(entry != NULL && entry->buffer_uses > 0);
  entry->buffer_uses--;
}
