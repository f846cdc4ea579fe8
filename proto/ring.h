/* A ring between two processes: one memfd with two lanes, commands one way and completions the other.
 *
 * A lane is a single-producer single-consumer queue of 64-byte records, each with an optional payload in the
 * lane's arena. Producer and consumer may be any two threads, of one process or of two.
 *
 * The other side is not trusted. Each end keeps its own position in private memory, takes the other's published
 * position for a hint and checks it; a consumer copies a record and its payload out before it looks at them, and
 * never uses a size it has not checked against the lane's own geometry, which it keeps privately too.
 *
 * Wake-up: a consumer about to sleep sets its lane's `sleeping` flag and looks once more; a producer that sees
 * the flag after publishing clears it and writes the eventfd. Nobody makes a system call while the other is awake.
 */
#ifndef KVPOOL_PROTO_RING_H
#define KVPOOL_PROTO_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

#define KVP_RING_MAGIC   UINT32_C(0x6772766b) /* "kvrg" */
#define KVP_RING_VERSION UINT32_C(1)

enum { kvp_ring_inline_bytes = 24 };

/* 64 bytes in shared memory. */
struct kvp_ring_record {
  uint64_t sequence; /* 1, 2, 3, ... of its lane; a torn or replayed record shows */
  uint64_t tag;      /* the producer's own */
  uint32_t kind;     /* enum kvp_command_kind or kvp_completion_kind */
  uint32_t payload_bytes;
  uint64_t payload_begin; /* monotone byte count of the arena; its place is payload_begin % arena_bytes */
  uint8_t reserved[8];
  uint8_t inline_data[kvp_ring_inline_bytes];
};
_Static_assert(sizeof(struct kvp_ring_record) == 64, "wire layout");

/* Sizes both ends agree on when the ring is made; a ring never changes them. */
struct kvp_ring_sizes {
  uint32_t commands;               /* power of two */
  uint32_t completions;            /* power of two */
  uint64_t command_arena_bytes;    /* multiple of 4096 */
  uint64_t completion_arena_bytes; /* multiple of 4096 */
};

/* One end of one lane. Private to its thread; plain memory, no ownership of the mapping. */
struct kvp_lane_end {
  struct kvp_lane_shared *shared;
  struct kvp_ring_record *records;
  uint8_t *arena;
  uint32_t record_count;
  uint64_t arena_bytes;
  uint64_t position;       /* records produced or consumed so far */
  uint64_t arena_position; /* arena bytes produced or consumed so far */
  uint64_t reserved_begin; /* producer: start of the payload being written */
  uint32_t reserved_bytes;
  bool reserved;
  bool is_producer;
};

/* A mapped ring. */
struct kvp_ring {
  void *map;
  size_t map_bytes;
  struct kvp_lane_end commands;    /* producer or consumer end, by role */
  struct kvp_lane_end completions; /* the opposite end */
};

enum kvp_ring_role { KVP_RING_CLIENT, KVP_RING_EXECUTOR };

/* Bytes of the memfd of a ring of these sizes; 0 when they are not valid. */
size_t kvp_ring_bytes(const struct kvp_ring_sizes *sizes);

/* Makes a sealed memfd (SHRINK | GROW | SEAL) and writes the header. Returns the fd, or -1 with *error. */
int kvp_ring_create(const char *name, const struct kvp_ring_sizes *sizes, struct kvp_error *error);

/* Maps a ring. Checks seals, size, header. fd stays the caller's. deinit unmaps. */
enum kvp_status kvp_ring_init(struct kvp_ring *ring, int fd, enum kvp_ring_role role, struct kvp_error *error);
void kvp_ring_deinit(struct kvp_ring *ring);
/* Records that the command lane's consumer says to have taken. For display: both sides can write there. fd: of
 * kvp_ring_create; needs no map. */
uint64_t kvp_ring_commands_consumed(int fd);

/* Producer: room for one record with payload_bytes of payload, contiguous; NULL when the lane is full (or the
 * size can never fit). Write the payload through the pointer, then publish. With payload_bytes 0 the pointer is
 * not to be written to. A second reserve before publish replaces the first. */
void *kvp_lane_reserve(struct kvp_lane_end *end, uint32_t payload_bytes);
/* Publishes the reserved record. payload_bytes may be less than reserved. True: the consumer sleeps, wake it. */
bool kvp_lane_publish(struct kvp_lane_end *end, uint32_t kind, uint64_t tag, uint32_t payload_bytes);
/* Records and arena bytes that are free now. */
uint32_t kvp_lane_free_records(struct kvp_lane_end *end);

enum kvp_lane_state { KVP_LANE_EMPTY, KVP_LANE_RECORD, KVP_LANE_CORRUPT };

/* Consumer: copies the next record, checked, without its payload. CORRUPT: the producer wrote nonsense; the lane
 * is to be given up. The record stays current until advance. */
enum kvp_lane_state kvp_lane_peek(struct kvp_lane_end *end, struct kvp_ring_record *out);
/* The word in shared memory that is the end's ->position while there is nothing, for who looks at many lanes. What else it
 * says is the peer's affair: peek tells what it means. */
const _Atomic uint64_t *kvp_lane_produced(const struct kvp_lane_end *end);
/* Copies the current record's payload (record->payload_bytes bytes, as peek gave it). */
void kvp_lane_copy_payload(const struct kvp_lane_end *end, const struct kvp_ring_record *record, void *out);
/* Gives record and payload back to the producer. */
void kvp_lane_advance(struct kvp_lane_end *end, const struct kvp_ring_record *record);

/* Consumer: true when it may sleep on its eventfd (flag set, nothing there). awake() clears the flag. */
bool kvp_lane_prepare_sleep(struct kvp_lane_end *end);
void kvp_lane_awake(struct kvp_lane_end *end);

#endif
