/* Device memory whose descriptors the supervisor keeps.
 *
 * Always holds: chunks [0, chunk_count) are open fds of ours, a worker's memory has one at most; `busy` means that one
 * request of this memory is without an answer, which is the one thing that keeps the struct alive after
 * kvp_memory_destroy.
 */
#include "server/supervisor/memory.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/fd_socket.h"
#include "server/log.h"
#include "server/supervisor/allocate.h"

struct memory_chunk {
  int fd;
  uint64_t bytes;
};

struct kvp_memory {
  struct kvp_executor_link *link;
  struct kvp_fd_budget *fds;
  uint64_t charged_fds;
  uint64_t id;
  uint64_t bytes;
  struct kvp_control_open *open; /* a worker's memory; else NULL */
  char name[kvp_name_bytes_max];
  struct memory_chunk *chunks;
  uint32_t chunk_count;    /* so far */
  uint32_t chunk_expected; /* 0: not told yet */
  uint64_t chunks_bytes;   /* sum */
  bool known;              /* an executor has made or opened it */
  bool busy;
  bool destroyed;
  char *failure;                /* what the latest executor said that could not have it; NULL: it has */
  struct kvp_error chunk_error; /* the first thing wrong with the chunks; status KVP_OK: nothing */
  kvp_memory_done_fn done;
  void *context;
};

static void memory_close_chunks(struct kvp_memory *memory) {
  for (uint32_t i = 0; i < memory->chunk_count; i++) {
    (void)close(memory->chunks[i].fd);
  }
  free(memory->chunks);
  memory->chunks = NULL;
  memory->chunk_count = 0;
}

static void memory_free(struct kvp_memory *memory) {
  memory_close_chunks(memory);
  kvp_fd_budget_release(memory->fds, memory->charged_fds);
  free(memory->failure);
  free(memory->open);
  free(memory);
}

static void memory_ask_destroy(const struct kvp_memory *memory, kvp_link_result_fn result, void *context) {
  struct kvp_control_memory body = {.memory_id = memory->id, .bytes = memory->bytes};
  memcpy(body.name, memory->name, sizeof body.name);
  kvp_executor_link_request(memory->link, KVP_CONTROL_MEMORY_DESTROY, &body, sizeof body, NULL, 0, NULL, result,
                            context);
}

static void memory_tell_destroy(const struct kvp_memory *memory) {
  memory_ask_destroy(memory, NULL, NULL);
}

/* ---- create -----------------------------------------------------------------------------------------------------
 */

static enum kvp_status memory_check_chunks(const struct kvp_memory *memory, const struct kvp_control_chunks *chunks,
                                           uint32_t fd_count, struct kvp_error *error) {
  if (chunks->memory_id != memory->id || chunks->memory_bytes != memory->bytes) {
    return kvp_error_set(error, KVP_INTERNAL, "memory '%s': the executor sent chunks of memory %llu of %llu bytes",
                         memory->name, (unsigned long long)chunks->memory_id,
                         (unsigned long long)chunks->memory_bytes);
  }
  uint32_t expected = memory->chunk_expected != 0 ? memory->chunk_expected : chunks->chunk_count;
  if (chunks->chunk_count == 0 || chunks->chunk_count > kvp_chunks_per_memory_max ||
      chunks->chunk_count != expected || chunks->first_chunk != memory->chunk_count || fd_count == 0 ||
      fd_count > expected - memory->chunk_count) {
    return kvp_error_set(error, KVP_INTERNAL, "memory '%s': the executor sent chunks [%u, +%u) of %u after %u of %u",
                         memory->name, chunks->first_chunk, fd_count, chunks->chunk_count, memory->chunk_count,
                         expected);
  }
  return KVP_OK;
}

static enum kvp_status memory_keep_chunk(struct kvp_memory *memory, int fd, uint64_t bytes, struct kvp_error *error) {
  if (bytes == 0 || bytes > UINT64_MAX - memory->chunks_bytes) {
    return kvp_error_set(error, KVP_INTERNAL, "memory '%s': chunk %u of %llu bytes", memory->name,
                         memory->chunk_count, (unsigned long long)bytes);
  }
  if ((kvp_executor_link_info(memory->link)->flags & KVP_READY_DEVICE_FDS) == 0) {
    enum kvp_status status = kvp_memory_fd_check(fd, bytes, error);
    if (status != KVP_OK) {
      return status;
    }
  }
  memory->chunks[memory->chunk_count++] = (struct memory_chunk){fd, bytes};
  memory->chunks_bytes += bytes;
  return KVP_OK;
}

static void memory_take_chunks(void *context, const struct kvp_control_chunks *chunks, const int *fds,
                               uint32_t fd_count) {
  struct kvp_memory *memory = context;
  uint32_t kept = 0;
  if (memory->chunk_error.status == KVP_OK && !memory->destroyed &&
      memory_check_chunks(memory, chunks, fd_count, &memory->chunk_error) == KVP_OK) {
    if (memory->chunk_expected == 0) {
      memory->chunk_expected = chunks->chunk_count;
      memory->chunks = kvp_allocate(chunks->chunk_count, sizeof *memory->chunks);
    }
    while (kept < fd_count &&
           memory_keep_chunk(memory, fds[kept], chunks->chunk_bytes[kept], &memory->chunk_error) == KVP_OK) {
      kept++;
    }
  }
  for (uint32_t i = kept; i < fd_count; i++) {
    (void)close(fds[i]);
  }
}

/* What the executor said about the whole, or what is wrong with the chunks it sent. */
static void memory_judge(const struct kvp_memory *memory, const struct kvp_error *answer, struct kvp_error *out) {
  *out = *answer;
  if (answer->status != KVP_OK) {
    return;
  }
  if (memory->chunk_error.status != KVP_OK) {
    *out = memory->chunk_error;
  } else if (memory->chunk_count == 0 || memory->chunk_count != memory->chunk_expected ||
             memory->chunks_bytes < memory->bytes) {
    (void)kvp_error_set(out, KVP_INTERNAL, "memory '%s': the executor made %u of %u chunks, %llu of %llu bytes",
                        memory->name, memory->chunk_count, memory->chunk_expected,
                        (unsigned long long)memory->chunks_bytes, (unsigned long long)memory->bytes);
  }
}

static void memory_created(void *context, const struct kvp_error *answer) {
  struct kvp_memory *memory = context;
  struct kvp_error error;
  memory_judge(memory, answer, &error);
  memory->busy = false;
  if (error.status != KVP_OK || memory->destroyed) {
    if (answer->status == KVP_OK) {
      memory_tell_destroy(memory);
    }
    memory_close_chunks(memory);
  }
  if (memory->destroyed) {
    memory_free(memory);
    return;
  }
  memory->known = error.status == KVP_OK;
  memory->done(memory->context, &error);
}

void kvp_memory_create(struct kvp_executor_link *link, struct kvp_fd_budget *fds, uint64_t memory_id,
                       const char *name, uint64_t bytes, kvp_memory_done_fn done, void *context,
                       struct kvp_memory **out) {
  struct kvp_memory *memory = kvp_allocate(1, sizeof *memory);
  memory->link = link;
  memory->fds = fds;
  memory->charged_fds = kvp_fd_budget_memory(bytes);
  memory->id = memory_id;
  memory->bytes = bytes;
  memory->done = done;
  memory->context = context;
  memory->busy = true;
  struct kvp_control_memory body = {.memory_id = memory_id, .bytes = bytes};
  size_t name_bytes = strnlen(name, sizeof body.name - 1);
  memcpy(body.name, name, name_bytes);
  memcpy(memory->name, body.name, sizeof memory->name);
  *out = memory;
  kvp_executor_link_request(link, KVP_CONTROL_MEMORY_CREATE, &body, sizeof body, NULL, 0, memory_take_chunks,
                            memory_created, memory);
}

/* ---- open -------------------------------------------------------------------------------------------------------
 */

static void memory_opened(void *context, const struct kvp_error *answer) {
  struct kvp_memory *memory = context;
  memory->busy = false;
  if (memory->destroyed) {
    if (answer->status == KVP_OK) {
      memory_tell_destroy(memory);
    }
    memory_free(memory);
    return;
  }
  memory->known = answer->status == KVP_OK;
  memory->done(memory->context, answer);
}

static void memory_ask_open(struct kvp_memory *memory, kvp_link_result_fn result) {
  int fd = memory->chunk_count > 0 ? memory->chunks[0].fd : -1;
  kvp_executor_link_request(memory->link, KVP_CONTROL_MEMORY_OPEN, memory->open, sizeof *memory->open, &fd,
                            memory->chunk_count, NULL, result, memory);
}

void kvp_memory_open(struct kvp_executor_link *link, struct kvp_fd_budget *fds, uint64_t memory_id,
                     const struct kvp_control_open *open, int fd, kvp_memory_done_fn done, void *context,
                     struct kvp_memory **out) {
  struct kvp_memory *memory = kvp_allocate(1, sizeof *memory);
  memory->link = link;
  memory->fds = fds;
  memory->charged_fds = kvp_memory_open_fds;
  memory->id = memory_id;
  memory->bytes = open->bytes;
  memory->done = done;
  memory->context = context;
  memory->busy = true;
  memory->open = kvp_allocate(1, sizeof *memory->open);
  *memory->open = *open;
  memory->open->memory_id = memory_id;
  (void)snprintf(memory->name, sizeof memory->name, "memory %llu of a worker", (unsigned long long)memory_id);
  if (fd >= 0) {
    memory->chunks = kvp_allocate(1, sizeof *memory->chunks);
    memory->chunks[0] = (struct memory_chunk){fd, open->allocation_bytes};
    memory->chunk_count = 1;
    memory->chunks_bytes = open->allocation_bytes;
  }
  *out = memory;
  memory_ask_open(memory, memory_opened);
}

/* ---- restore, destroy -------------------------------------------------------------------------------------------
 */

static void memory_restored(void *context, const struct kvp_error *answer) {
  struct kvp_memory *memory = context;
  memory->busy = false;
  if (memory->destroyed) {
    if (answer->status == KVP_OK) {
      memory_tell_destroy(memory);
    }
    memory_free(memory);
    return;
  }
  free(memory->failure);
  memory->failure = NULL;
  if (answer->status != KVP_OK) {
    memory->failure = kvp_allocate(1, sizeof answer->text);
    memcpy(memory->failure, answer->text, sizeof answer->text);
  }
  if (memory->done != NULL) {
    memory->done(memory->context, answer);
  }
}

void kvp_memory_restore(struct kvp_memory *memory, kvp_memory_done_fn done, void *context) {
  assert(!memory->busy && memory->known);
  memory->done = done;
  memory->context = context;
  memory->busy = true;
  if (memory->open != NULL) {
    memory_ask_open(memory, memory_restored);
    return;
  }
  for (uint32_t first = 0; first < memory->chunk_count; first += kvp_control_fds_max) {
    uint32_t left = memory->chunk_count - first;
    uint32_t count = left < kvp_control_fds_max ? left : kvp_control_fds_max;
    struct kvp_control_chunks body = {.memory_id = memory->id,
                                      .memory_bytes = memory->bytes,
                                      .first_chunk = first,
                                      .chunk_count = memory->chunk_count};
    int fds[kvp_control_fds_max];
    for (uint32_t i = 0; i < count; i++) {
      body.chunk_bytes[i] = memory->chunks[first + i].bytes;
      fds[i] = memory->chunks[first + i].fd;
    }
    kvp_executor_link_request_part(memory->link, KVP_CONTROL_MEMORY_IMPORT, &body, sizeof body, fds, count,
                                   count < left, memory_restored, memory);
  }
}

void kvp_memory_close(struct kvp_memory *memory, kvp_link_result_fn closed, void *context) {
  memory->known = false;
  memory_ask_destroy(memory, closed, context);
}

void kvp_memory_destroy(struct kvp_memory *memory) {
  if (memory == NULL) {
    return;
  }
  assert(!memory->destroyed);
  if (memory->busy) {
    memory->destroyed = true;
    return;
  }
  if (memory->known) {
    memory_tell_destroy(memory);
  }
  memory_free(memory);
}

uint64_t kvp_memory_chunks_bytes(const struct kvp_memory *memory) {
  return memory->chunks_bytes;
}

uint32_t kvp_memory_chunk_count(const struct kvp_memory *memory) {
  return memory->chunk_count;
}

int kvp_memory_chunk(const struct kvp_memory *memory, uint32_t index, uint64_t *bytes) {
  assert(index < memory->chunk_count);
  *bytes = memory->chunks[index].bytes;
  return memory->chunks[index].fd;
}

const char *kvp_memory_failure(const struct kvp_memory *memory) {
  return memory->failure;
}

uint64_t kvp_memory_id(const struct kvp_memory *memory) {
  return memory->id;
}

uint64_t kvp_memory_bytes(const struct kvp_memory *memory) {
  return memory->bytes;
}
