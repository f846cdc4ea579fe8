/* The ring of proto/ring.h.
 *
 * Layout of the memfd: one header page (magic, sizes, the two lanes' shared words), the records of both lanes, the
 * arenas of both lanes, each starting on a page. After init nothing is read from the header but the shared words, and
 * those only as hints: a producer's idea of what is free and a consumer's idea of what is there are bounded by their
 * private positions, so a peer that lies can spoil its own lane and nothing else.
 */
#include "proto/ring.h"

#include <assert.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/fd_socket.h"

enum {
  page_bytes = 4096,
  payload_alignment_bytes = 64,
  records_min = 2,
  records_max = 1 << 20,
};
static const uint64_t arena_bytes_max = UINT64_C(1) << 30;

/* Each word is written by one side and read by the other: a cache line of its own, so that polling costs nothing. */
struct kvp_lane_shared {
  _Alignas(64) _Atomic uint64_t produced;
  _Alignas(64) _Atomic uint64_t arena_consumed;
  _Atomic uint64_t consumed;
  _Alignas(64) _Atomic uint32_t sleeping;
};

struct ring_header {
  uint32_t magic;
  uint32_t version;
  struct kvp_ring_sizes sizes;
  struct kvp_lane_shared lanes[2]; /* commands, completions */
};
_Static_assert(sizeof(struct ring_header) <= page_bytes, "the header is one page");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "lanes work between processes");

struct ring_layout {
  size_t commands;
  size_t completions;
  size_t command_arena;
  size_t completion_arena;
  size_t total;
};

static uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

static bool record_count_valid(uint32_t count) {
  return count >= records_min && count <= records_max && (count & (count - 1)) == 0;
}

static bool arena_bytes_valid(uint64_t bytes) {
  return bytes >= page_bytes && bytes <= arena_bytes_max && bytes % page_bytes == 0;
}

/* sizes were checked: no sum overflows. */
static struct ring_layout ring_layout_of(const struct kvp_ring_sizes *sizes) {
  struct ring_layout layout;
  layout.commands = page_bytes;
  layout.completions =
      layout.commands + round_up((uint64_t)sizes->commands * sizeof(struct kvp_ring_record), page_bytes);
  layout.command_arena =
      layout.completions + round_up((uint64_t)sizes->completions * sizeof(struct kvp_ring_record), page_bytes);
  layout.completion_arena = layout.command_arena + sizes->command_arena_bytes;
  layout.total = layout.completion_arena + sizes->completion_arena_bytes;
  return layout;
}

size_t kvp_ring_bytes(const struct kvp_ring_sizes *sizes) {
  if (!record_count_valid(sizes->commands) || !record_count_valid(sizes->completions) ||
      !arena_bytes_valid(sizes->command_arena_bytes) || !arena_bytes_valid(sizes->completion_arena_bytes)) {
    return 0;
  }
  return ring_layout_of(sizes).total;
}

int kvp_ring_create(const char *name, const struct kvp_ring_sizes *sizes, struct kvp_error *error) {
  size_t bytes = kvp_ring_bytes(sizes);
  if (bytes == 0) {
    (void)kvp_error_set(error, KVP_INVALID_ARGUMENT,
                        "ring: sizes are not valid (%u commands, %u completions, arenas of %llu and %llu bytes)",
                        sizes->commands, sizes->completions, (unsigned long long)sizes->command_arena_bytes,
                        (unsigned long long)sizes->completion_arena_bytes);
    return -1;
  }
  int fd = kvp_memory_fd_create(name, bytes, error);
  if (fd < 0) {
    return -1;
  }
  struct ring_header *header = mmap(NULL, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (header == MAP_FAILED) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "ring: its header can't be mapped");
    (void)close(fd);
    return -1;
  }
  header->magic = KVP_RING_MAGIC;
  header->version = KVP_RING_VERSION;
  header->sizes = *sizes;
  (void)munmap(header, page_bytes);
  return fd;
}

static void lane_end_init(struct kvp_lane_end *end, struct kvp_lane_shared *shared, uint8_t *records,
                          uint32_t record_count, uint8_t *arena, uint64_t arena_bytes, bool is_producer) {
  memset(end, 0, sizeof *end);
  end->shared = shared;
  end->records = (struct kvp_ring_record *)(void *)records;
  end->record_count = record_count;
  end->arena = arena;
  end->arena_bytes = arena_bytes;
  end->is_producer = is_producer;
}

/* Copies the header's fixed part out before looking at it: the peer may write to it at any time. */
static enum kvp_status ring_sizes_read(int fd, struct kvp_ring_sizes *out, struct kvp_error *error) {
  struct {
    uint32_t magic;
    uint32_t version;
    struct kvp_ring_sizes sizes;
  } header;
  if (pread(fd, &header, sizeof header, 0) != (ssize_t)sizeof header) {
    return kvp_error_set(error, KVP_MALFORMED, "ring: its header can't be read");
  }
  if (header.magic != KVP_RING_MAGIC) {
    return kvp_error_set(error, KVP_MALFORMED, "ring: magic is 0x%08x", header.magic);
  }
  if (header.version != KVP_RING_VERSION) {
    return kvp_error_set(error, KVP_VERSION_MISMATCH, "ring: version is %u, this side speaks %u", header.version,
                         KVP_RING_VERSION);
  }
  *out = header.sizes;
  return KVP_OK;
}

enum kvp_status kvp_ring_init(struct kvp_ring *ring, int fd, enum kvp_ring_role role, struct kvp_error *error) {
  struct kvp_ring_sizes sizes = {0};
  enum kvp_status status = ring_sizes_read(fd, &sizes, error);
  if (status != KVP_OK) {
    return status;
  }
  size_t bytes = kvp_ring_bytes(&sizes);
  if (bytes == 0) {
    return kvp_error_set(error, KVP_MALFORMED, "ring: its header's sizes are not valid");
  }
  status = kvp_memory_fd_check(fd, bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  uint8_t *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "ring: %zu bytes can't be mapped", bytes);
  }
  struct ring_layout layout = ring_layout_of(&sizes);
  struct ring_header *header = (struct ring_header *)(void *)map;
  ring->map = map;
  ring->map_bytes = bytes;
  lane_end_init(&ring->commands, &header->lanes[0], map + layout.commands, sizes.commands, map + layout.command_arena,
                sizes.command_arena_bytes, role == KVP_RING_CLIENT);
  lane_end_init(&ring->completions, &header->lanes[1], map + layout.completions, sizes.completions,
                map + layout.completion_arena, sizes.completion_arena_bytes, role == KVP_RING_EXECUTOR);
  return KVP_OK;
}

void kvp_ring_deinit(struct kvp_ring *ring) {
  (void)munmap(ring->map, ring->map_bytes);
  memset(ring, 0, sizeof *ring);
}

uint64_t kvp_ring_commands_consumed(int fd) {
  const size_t place = offsetof(struct ring_header, lanes) + offsetof(struct kvp_lane_shared, consumed);
  uint64_t consumed = 0;
  ssize_t got = pread(fd, &consumed, sizeof consumed, (off_t)place);
  return got == (ssize_t)sizeof consumed ? consumed : 0;
}

/* Where a payload of that size would start: here, or at the arena's next beginning when it would not be contiguous.
 */
static uint64_t payload_place(const struct kvp_lane_end *end, uint32_t payload_bytes) {
  uint64_t offset = end->arena_position % end->arena_bytes;
  if (offset + payload_bytes <= end->arena_bytes) {
    return end->arena_position;
  }
  return end->arena_position + (end->arena_bytes - offset);
}

static uint64_t payload_end(uint64_t begin, uint32_t payload_bytes) {
  return begin + round_up(payload_bytes, payload_alignment_bytes);
}

void *kvp_lane_reserve(struct kvp_lane_end *end, uint32_t payload_bytes) {
  assert(end->is_producer);
  end->reserved = false;
  uint64_t consumed = atomic_load_explicit(&end->shared->consumed, memory_order_acquire);
  uint64_t used = end->position - consumed; /* a hint past our position wraps to a huge number: full */
  if (used >= end->record_count || payload_bytes > end->arena_bytes) {
    return NULL;
  }
  uint64_t begin = payload_place(end, payload_bytes);
  /* An empty lane has its whole arena free, whatever was skipped at its end. */
  if (payload_bytes > 0 && used > 0) {
    uint64_t arena_consumed = atomic_load_explicit(&end->shared->arena_consumed, memory_order_acquire);
    if (payload_end(begin, payload_bytes) - arena_consumed > end->arena_bytes) {
      return NULL;
    }
  }
  end->reserved = true;
  end->reserved_begin = begin;
  end->reserved_bytes = payload_bytes;
  return end->arena + begin % end->arena_bytes;
}

bool kvp_lane_publish(struct kvp_lane_end *end, uint32_t kind, uint64_t tag, uint32_t payload_bytes) {
  assert(end->reserved && payload_bytes <= end->reserved_bytes);
  end->reserved = false;
  struct kvp_ring_record record = {
      .sequence = end->position + 1,
      .tag = tag,
      .kind = kind,
      .payload_bytes = payload_bytes,
      .payload_begin = payload_bytes > 0 ? end->reserved_begin : end->arena_position,
  };
  memcpy(&end->records[end->position % end->record_count], &record, sizeof record);
  end->arena_position = payload_end(record.payload_begin, payload_bytes);
  end->position++;
  /* Sequentially consistent with the flag: either we see it, or the consumer's second look sees the record. */
  atomic_store(&end->shared->produced, end->position);
  return atomic_load(&end->shared->sleeping) != 0 && atomic_exchange(&end->shared->sleeping, 0) != 0;
}

uint32_t kvp_lane_free_records(struct kvp_lane_end *end) {
  uint64_t used = end->position - atomic_load_explicit(&end->shared->consumed, memory_order_acquire);
  return used >= end->record_count ? 0 : end->record_count - (uint32_t)used;
}

static bool record_valid(const struct kvp_lane_end *end, const struct kvp_ring_record *record) {
  if (record->sequence != end->position + 1) {
    return false;
  }
  if (record->payload_bytes == 0) {
    return record->payload_begin == end->arena_position;
  }
  if (record->payload_begin != end->arena_position &&
      record->payload_begin != round_up(end->arena_position, end->arena_bytes)) {
    return false;
  }
  return record->payload_begin % end->arena_bytes + record->payload_bytes <= end->arena_bytes;
}

const _Atomic uint64_t *kvp_lane_produced(const struct kvp_lane_end *end) {
  return &end->shared->produced;
}

enum kvp_lane_state kvp_lane_peek(struct kvp_lane_end *end, struct kvp_ring_record *out) {
  assert(!end->is_producer);
  uint64_t there = atomic_load_explicit(&end->shared->produced, memory_order_acquire) - end->position;
  if (there == 0) {
    return KVP_LANE_EMPTY;
  }
  if (there > end->record_count) {
    return KVP_LANE_CORRUPT;
  }
  memcpy(out, &end->records[end->position % end->record_count], sizeof *out);
  /* What was copied is what is used: no load may be repeated from the shared record behind this line. */
  atomic_signal_fence(memory_order_acq_rel);
  return record_valid(end, out) ? KVP_LANE_RECORD : KVP_LANE_CORRUPT;
}

void kvp_lane_copy_payload(const struct kvp_lane_end *end, const struct kvp_ring_record *record, void *out) {
  if (record->payload_bytes > 0) {
    memcpy(out, end->arena + record->payload_begin % end->arena_bytes, record->payload_bytes);
    atomic_signal_fence(memory_order_acq_rel);
  }
}

void kvp_lane_advance(struct kvp_lane_end *end, const struct kvp_ring_record *record) {
  end->arena_position = payload_end(record->payload_begin, record->payload_bytes);
  end->position++;
  /* A release of its own: the producer may see it before it sees `consumed`. */
  atomic_store_explicit(&end->shared->arena_consumed, end->arena_position, memory_order_release);
  atomic_store_explicit(&end->shared->consumed, end->position, memory_order_release);
}

bool kvp_lane_prepare_sleep(struct kvp_lane_end *end) {
  atomic_store(&end->shared->sleeping, 1);
  if (atomic_load(&end->shared->produced) != end->position) {
    kvp_lane_awake(end);
    return false;
  }
  return true;
}

void kvp_lane_awake(struct kvp_lane_end *end) {
  atomic_store(&end->shared->sleeping, 0);
}
