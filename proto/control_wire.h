/* What supervisor and executor say on their control socket. One struct is one message body.
 *
 * The supervisor numbers objects; the executor keeps what it was told and nothing else, so that a successor can
 * be told the same. The supervisor holds a duplicate of every fd of every memory.
 *
 * An executor that can't serve answers HELLO with RESULT, the reason, and exits with status 2. By the status of the
 * reason: busy, others have to go first; invalid_argument, wrong_device, too_large, unimplemented, version_mismatch,
 * permission_denied: the next attempt would end the same way, unless somebody changes the host; anything else is an
 * executor that died.
 *
 * Order: HELLO, READY; then MEMORY_* before the POOL or BUFFER that uses it. The supervisor detaches an object only
 * when no step that uses it is in flight.
 */
#ifndef KVPOOL_PROTO_CONTROL_WIRE_H
#define KVPOOL_PROTO_CONTROL_WIRE_H

#include <stdint.h>

#include "proto/limits.h"
#include "proto/status.h"

enum kvp_control_kind {
  /* supervisor -> executor */
  KVP_CONTROL_HELLO = 1,          /* kvp_control_hello; fds: ring, eventfd to executor, eventfd to supervisor */
  KVP_CONTROL_MEMORY_CREATE = 2,  /* kvp_control_memory; reply: MEMORY_CHUNKS..., then RESULT */
  KVP_CONTROL_MEMORY_IMPORT = 3,  /* kvp_control_chunks + fds; several messages, RESULT after the last chunk */
  KVP_CONTROL_MEMORY_DESTROY = 4, /* kvp_control_memory */
  KVP_CONTROL_POOL_ATTACH = 5,    /* kvp_control_pool; fd: owner table */
  KVP_CONTROL_POOL_DETACH = 6,    /* kvp_control_pool (pool_id) */
  KVP_CONTROL_BUFFER_ATTACH = 7,  /* kvp_control_buffer */
  KVP_CONTROL_BUFFER_DETACH = 8,  /* kvp_control_buffer (buffer_id, attachment_id) */
  KVP_CONTROL_RING_ATTACH = 9,    /* kvp_control_ring; fds: enum kvp_control_ring_fd */
  KVP_CONTROL_RING_DETACH = 10,   /* kvp_control_ring (attachment_id); RESULT when none of its steps is left */
  KVP_CONTROL_MEMORY_OPEN = 11,   /* kvp_control_open + fd unless it is an IPC handle: memory of a worker's */
  KVP_CONTROL_MEMORY_LOOK = 12,   /* kvp_control_free (nothing of it counts); reply: MEMORY_FREE alone */
  KVP_CONTROL_RING_DRAIN = 13,    /* kvp_control_ring (attachment_id): commands it takes from now on are refused as
                                     shutting_down; RESULT when none of the steps accepted before is left */
  KVP_CONTROL_STOP = 14,          /* nothing, no reply: the supervisor closes the socket next, and lives on */
  /* executor -> supervisor */
  KVP_CONTROL_READY = 32,         /* kvp_control_ready */
  KVP_CONTROL_MEMORY_CHUNKS = 33, /* kvp_control_chunks + fds */
  KVP_CONTROL_RESULT = 34,        /* struct kvp_error (status ok: done), to the request of that number */
  KVP_CONTROL_RING_FAILED = 35,   /* kvp_control_ring_failed: nonsense in a worker's ring; it isn't served any more */
  KVP_CONTROL_MEMORY_FREE = 36,   /* kvp_control_free */
};

struct kvp_control_hello {
  uint32_t version;
  uint32_t thread_count; /* host backend: kernel threads; 0 = one per core */
  char device[kvp_name_bytes_max];
  char socket_path[256];        /* unlinked by the executor when it finds its supervisor dead; "" = none */
  char lock_path[256];          /* whose lock the supervisor holds as long as it lives */
  char attach_socket_path[256]; /* the same of the socket that workers attach to */
  char attach_lock_path[256];
};

struct kvp_control_memory {
  uint64_t memory_id;
  uint64_t bytes;
  char name[kvp_name_bytes_max]; /* shows in /proc/PID/maps */
};

struct kvp_control_chunks {
  uint64_t memory_id;
  uint64_t memory_bytes;
  uint32_t first_chunk;
  uint32_t chunk_count; /* of the whole memory; this message has fd_count of them */
  uint64_t chunk_bytes[kvp_control_fds_max];
};

struct kvp_control_region {
  uint64_t memory_id;
  uint32_t format; /* enum kvp_format_id */
  uint32_t width;  /* elements */
  uint32_t tokens_per_block;
  uint32_t num_layers;
  char name[kvp_name_bytes_max];
};

struct kvp_control_pool {
  uint64_t pool_id;
  uint32_t num_blocks;
  uint32_t kind; /* enum kvp_pool_kind */
  uint32_t region_count;
  uint32_t reserved;
  struct kvp_control_region regions[kvp_regions_per_pool_max];
};

struct kvp_control_buffer {
  uint64_t buffer_id;
  uint64_t memory_id;
  uint64_t bytes;
  uint64_t attachment_id; /* to detach: what this worker's ring holds is taken first; 0: no worker's */
  uint32_t owner;         /* session slot */
  uint32_t flags;         /* enum kvp_control_buffer_flag */
};

enum kvp_control_buffer_flag {
  KVP_BUFFER_LOST = 1, /* it has no memory any more: steps that name it are told so */
};

struct kvp_control_free {
  uint64_t memory_free_bytes; /* of the device, now; 0: it can't be told */
};

/* A worker's ring. Its steps belong to session slot `owner` and run in queue `queue`, whatever they say themselves.
 */
struct kvp_control_ring {
  uint64_t attachment_id;
  uint64_t deadline_ns_max; /* of a wait */
  uint32_t owner;
  uint32_t queue;
};

/* Whoever else has a descriptor can make it block, whatever this side has set it to. So the executor never reads the
 * command event, an eventfd whose edges it is told of, and the completion event is no eventfd: a write to one that the
 * worker has filled up would wait for it. */
enum kvp_control_ring_fd {
  KVP_CONTROL_RING_FD_RING = 0,
  KVP_CONTROL_RING_FD_COMMAND_EVENT = 1,    /* eventfd */
  KVP_CONTROL_RING_FD_COMPLETION_EVENT = 2, /* one end of a pair of SOCK_SEQPACKET sockets; 8 bytes are sent */
  KVP_CONTROL_RING_FD_TIMELINES = 3,
  kvp_control_ring_fd_count = 4,
};

struct kvp_control_ring_failed {
  uint64_t attachment_id;
  struct kvp_error error;
};

/* Memory that a worker brought: [offset, offset + bytes) of an allocation. Destroyed like any other. */
struct kvp_control_open {
  uint64_t memory_id;
  uint32_t kind; /* enum kvp_import_kind */
  uint32_t reserved;
  uint64_t allocation_bytes;
  uint64_t offset_bytes;
  uint64_t bytes;
  uint8_t ipc_handle[64];
};

enum kvp_control_ready_flag {
  KVP_READY_MPS = 1,        /* the device's contexts are clients of an MPS server */
  KVP_READY_DEVICE_FDS = 2, /* chunks are descriptors of a driver: no memfds, nothing about them can be checked */
};

struct kvp_control_ready {
  uint32_t version;
  uint32_t pid;
  uint64_t memory_bytes;             /* the device's own figure; host: what the machine has */
  uint64_t memory_free_bytes;        /* of them, before this executor has any memory of a pool or buffer */
  uint64_t memory_granularity_bytes; /* a memory takes a multiple of it; 1: as many bytes as it has */
  uint32_t flags;
  uint32_t reserved;
  char uuid[kvp_name_bytes_max];   /* of a GPU: "GPU-..."; "" for the host */
  char driver[kvp_name_bytes_max]; /* "580.95.05, CUDA 13.0"; "" for the host */
  char description[kvp_note_bytes_max];
};

enum kvp_pool_kind { KVP_POOL_PAGED = 0, KVP_POOL_RING = 1 };

_Static_assert(sizeof(struct kvp_control_pool) <= kvp_control_body_bytes_max, "a message holds it");
_Static_assert(sizeof(struct kvp_control_chunks) <= kvp_control_body_bytes_max, "a message holds it");

#endif
