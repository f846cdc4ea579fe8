/* Memory and descriptors that one attachment and its executor share. One thread at a time. */
#include "server/supervisor/attach_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/fd_socket.h"
#include "proto/ring.h"

/* ---- status -----------------------------------------------------------------------------------------------------
 */

/* Mapped by us first, then sealed against everybody else's writing. */
static enum kvp_status status_page_init(struct kvp_attach_ring *ring, struct kvp_error *error) {
  const size_t bytes = sizeof *ring->status_page;
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  ring->status = memfd_create("kvpool-status", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (ring->status < 0 || ftruncate(ring->status, (off_t)bytes) != 0) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "an attachment's status page: %s", strerror(errno));
  }
  void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->status, 0);
  if (map == MAP_FAILED) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "an attachment's status page can't be mapped: %s",
                         strerror(errno));
  }
  ring->status_page = map;
  if (fcntl(ring->status, F_ADD_SEALS, seals) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "an attachment's status page can't be sealed: %s", strerror(errno));
  }
  return KVP_OK;
}

/* The state is the last thing written: who has seen it may read the rest. */
static void status_write(struct kvp_attach_status *page, enum kvp_attach_state state) {
  __atomic_store_n(&page->state, (uint32_t)state, __ATOMIC_RELEASE);
}

void kvp_attach_ring_tell(struct kvp_attach_ring *ring, enum kvp_attach_state state, const struct kvp_error *reason) {
  if (ring->there) {
    ring->status_page->reason = *reason;
    status_write(ring->status_page, state);
  }
}

/* ---- timelines --------------------------------------------------------------------------------------------------
 */

static enum kvp_status timelines_init(struct kvp_attach_ring *ring, struct kvp_error *error) {
  ring->timelines = kvp_memory_fd_create("kvpool-timelines", kvp_timeline_bytes, error);
  if (ring->timelines < 0) {
    return (enum kvp_status)error->status;
  }
  void *map = mmap(NULL, kvp_timeline_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->timelines, 0);
  if (map == MAP_FAILED) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "an attachment's timelines can't be mapped: %s", strerror(errno));
  }
  ring->words = map;
  return KVP_OK;
}

void kvp_attach_ring_poison(struct kvp_attach_ring *ring) {
  for (uint32_t i = kvp_client_words; ring->there && i < kvp_timeline_words; i++) {
    atomic_store_explicit(&ring->words[i].value, KVP_TIMELINE_POISON, memory_order_release);
  }
}

/* ---- ring -------------------------------------------------------------------------------------------------------
 */

static const struct kvp_ring_sizes sizes = {kvp_worker_ring_commands, kvp_worker_ring_completions,
                                            kvp_worker_ring_command_arena_bytes,
                                            kvp_worker_ring_completion_arena_bytes};

uint64_t kvp_attach_ring_bytes(void) {
  const uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
  const uint64_t status_pages = (sizeof(struct kvp_attach_status) + page_bytes - 1) / page_bytes;
  return kvp_ring_bytes(&sizes) + kvp_timeline_bytes + status_pages * page_bytes;
}

static enum kvp_status lanes_init(struct kvp_attach_ring *ring, struct kvp_error *error) {
  ring->ring = kvp_ring_create("kvpool-worker-ring", &sizes, error);
  if (ring->ring < 0) {
    return (enum kvp_status)error->status;
  }
  ring->command_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  int ends[2];
  if (ring->command_event < 0 || kvp_fd_socket_pair(ends) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "no events for an attachment's ring: %s", strerror(errno));
  }
  ring->executor_completions = ends[0];
  ring->worker_completions = ends[1];
  /* The executor only writes. What the worker could send it would be closed with it, and may be descriptors. */
  if (shutdown(ends[0], SHUT_RD) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "no events for an attachment's ring: %s", strerror(errno));
  }
  for (int i = 0; i < 2; i++) {
    if (fcntl(ends[i], F_SETFL, O_NONBLOCK) != 0) {
      return kvp_error_set(error, KVP_INTERNAL, "no events for an attachment's ring: %s", strerror(errno));
    }
  }
  return KVP_OK;
}

uint64_t kvp_attach_ring_commands(const struct kvp_attach_ring *ring) {
  return ring->there ? kvp_ring_commands_consumed(ring->ring) : 0;
}

/* ---- all of it --------------------------------------------------------------------------------------------------
 */

static void fd_close(int *fd) {
  if (*fd >= 0) {
    (void)close(*fd);
    *fd = -1;
  }
}

enum kvp_status kvp_attach_ring_init(struct kvp_attach_ring *ring, uint64_t generation, struct kvp_error *error) {
  *ring = (struct kvp_attach_ring){.there = true,
                                   .ring = -1,
                                   .command_event = -1,
                                   .executor_completions = -1,
                                   .worker_completions = -1,
                                   .timelines = -1,
                                   .status = -1};
  enum kvp_status status = lanes_init(ring, error);
  if (status == KVP_OK) {
    status = timelines_init(ring, error);
  }
  if (status == KVP_OK) {
    status = status_page_init(ring, error);
  }
  if (status != KVP_OK) {
    kvp_attach_ring_deinit(ring);
    return status;
  }
  ring->status_page->generation = generation;
  status_write(ring->status_page, KVP_ATTACH_STATE_SERVING);
  return KVP_OK;
}

void kvp_attach_ring_shared(struct kvp_attach_ring *ring) {
  if (ring->there) {
    fd_close(&ring->command_event);
    fd_close(&ring->executor_completions);
    fd_close(&ring->worker_completions);
    fd_close(&ring->timelines);
    fd_close(&ring->status);
  }
}

void kvp_attach_ring_deinit(struct kvp_attach_ring *ring) {
  if (!ring->there) {
    return;
  }
  kvp_attach_ring_shared(ring);
  fd_close(&ring->ring);
  if (ring->words != NULL) {
    (void)munmap(ring->words, kvp_timeline_bytes);
  }
  if (ring->status_page != NULL) {
    (void)munmap(ring->status_page, sizeof *ring->status_page);
  }
  memset(ring, 0, sizeof *ring);
}

void kvp_attach_ring_executor_fds(const struct kvp_attach_ring *ring, int out[kvp_control_ring_fd_count]) {
  out[KVP_CONTROL_RING_FD_RING] = ring->ring;
  out[KVP_CONTROL_RING_FD_COMMAND_EVENT] = ring->command_event;
  out[KVP_CONTROL_RING_FD_COMPLETION_EVENT] = ring->executor_completions;
  out[KVP_CONTROL_RING_FD_TIMELINES] = ring->timelines;
}

void kvp_attach_ring_worker_fds(const struct kvp_attach_ring *ring, int out[kvp_attach_fd_count]) {
  out[KVP_ATTACH_FD_RING] = ring->ring;
  out[KVP_ATTACH_FD_COMMAND_EVENT] = ring->command_event;
  out[KVP_ATTACH_FD_COMPLETION_EVENT] = ring->worker_completions;
  out[KVP_ATTACH_FD_TIMELINES] = ring->timelines;
  out[KVP_ATTACH_FD_STATUS] = ring->status;
}
