/* What a worker and the supervisor say on the attach socket: SOCK_SEQPACKET, messages of proto/fd_socket.h.
 *
 * The first message is ATTACH. The answer is ATTACHED, or RESULT with an error and the end; a connection that there is
 * no place for gets ENDED and the end, whatever it sends. From then on the worker may ask, one request or several at a
 * time, each answered by its own number with RESULT last; the supervisor tells what happens to the attachment with
 * request 0. The socket is the attachment's liveness: when it closes, the ring, its steps and the buffers that were made
 * on it are gone, and nothing else of the session.
 *
 * Nothing of a worker's is trusted; descriptors of it are checked for kind, size and seals.
 */
#ifndef KVPOOL_PROTO_ATTACH_WIRE_H
#define KVPOOL_PROTO_ATTACH_WIRE_H

#include <stdint.h>

#include "proto/control_wire.h"
#include "proto/limits.h"
#include "proto/status.h"

#define KVP_ATTACH_VERSION UINT32_C(1)

enum { kvp_ipc_handle_bytes = 64, kvp_import_alignment_bytes = 16 };

enum kvp_attach_kind {
  /* worker -> supervisor */
  KVP_ATTACH_ATTACH = 1,   /* kvp_attach_hello; answer: ATTACHED */
  KVP_ATTACH_MAP_POOL = 2, /* kvp_attach_pool_name; answer: POOL, MEMORY_CHUNKS of each region in order, RESULT */
  KVP_ATTACH_CREATE_BUFFER = 3,  /* kvp_attach_buffer (bytes); answer: BUFFER, MEMORY_CHUNKS..., RESULT */
  KVP_ATTACH_MAP_BUFFER = 4,     /* kvp_attach_buffer (buffer_id): a daemon-made one of the session; likewise */
  KVP_ATTACH_IMPORT_BUFFER = 5,  /* kvp_attach_import, one fd unless it is an IPC handle; answer: BUFFER, RESULT */
  KVP_ATTACH_RELEASE_BUFFER = 6, /* kvp_attach_buffer (buffer_id): made or imported here; RESULT when it is gone */
  /* supervisor -> worker */
  KVP_ATTACH_ATTACHED = 32,        /* kvp_attach_welcome; fds: enum kvp_attach_fd */
  KVP_ATTACH_POOL = 33,            /* kvp_attach_pool */
  KVP_ATTACH_BUFFER = 34,          /* kvp_attach_buffer */
  KVP_ATTACH_MEMORY_CHUNKS = 35,   /* kvp_control_chunks + fds; memory_id is the region's index, 0 of a buffer */
  KVP_ATTACH_RESULT = 36,          /* struct kvp_error */
  KVP_ATTACH_DEVICE_LOST = 37,     /* struct kvp_error: ring and timelines are dead, steps of it have ended so */
  KVP_ATTACH_DEVICE_RESTORED = 38, /* kvp_attach_welcome; fds: a new ring, new timelines. Maps stay as they are */
  KVP_ATTACH_ENDED = 39,           /* struct kvp_error; the socket closes behind it */
};

/* Descriptors of ATTACHED and DEVICE_RESTORED, in this order. */
enum kvp_attach_fd {
  KVP_ATTACH_FD_RING = 0,          /* proto/ring.h; the worker is KVP_RING_CLIENT */
  KVP_ATTACH_FD_COMMAND_EVENT = 1, /* eventfd: wakes the executor */
  KVP_ATTACH_FD_COMPLETION_EVENT =
      2,                       /* wakes the worker: the other end of a SOCK_SEQPACKET pair (control_wire.h); read
                                         it like an eventfd, 8 bytes at a time, until there are none */
  KVP_ATTACH_FD_TIMELINES = 3, /* proto/timeline_wire.h */
  KVP_ATTACH_FD_STATUS = 4,    /* struct kvp_attach_status, can be mapped read-only alone */
  kvp_attach_fd_count = 5,
};

struct kvp_attach_hello {
  uint32_t version;
  uint32_t reserved;
  uint64_t session_id;
  uint8_t secret[kvp_secret_bytes];
  char device[kvp_name_bytes_max]; /* "" : the only one */
};

enum kvp_attach_welcome_flag {
  KVP_ATTACH_MPS = 1,        /* KVP_READY_* of the device */
  KVP_ATTACH_DEVICE_FDS = 2, /* chunks are the driver's descriptors, else memfds */
};

struct kvp_attach_welcome {
  uint32_t version;
  uint32_t flags;
  uint64_t attachment_id; /* never used twice */
  uint64_t generation;    /* of the executor: one more for each successor */
  uint64_t epoch;         /* the session's at this moment */
  uint64_t deadline_ns_max;
  uint64_t memory_granularity_bytes;
  char device[kvp_name_bytes_max];
  char uuid[kvp_name_bytes_max]; /* of a GPU: "GPU-..."; "" for a host */
};

/* What became of the attachment, written by the supervisor alone. `state` last, with a release store. */
enum kvp_attach_state { KVP_ATTACH_STATE_SERVING = 1, KVP_ATTACH_STATE_LOST = 2, KVP_ATTACH_STATE_ENDED = 3 };

struct kvp_attach_status {
  uint64_t generation;
  uint32_t state;
  uint32_t reserved;
  struct kvp_error reason;
};

struct kvp_attach_pool_name {
  char name[kvp_name_bytes_max];
};

struct kvp_attach_region {
  char name[kvp_name_bytes_max];
  uint32_t format; /* enum kvp_format_id */
  uint32_t width;
  uint32_t tokens_per_block;
  uint32_t num_layers;
  uint64_t memory_bytes; /* what its chunks add up to */
};

struct kvp_attach_pool {
  uint64_t pool_id;
  uint32_t num_blocks;
  uint32_t block_size;
  uint32_t kind; /* enum kvp_pool_kind */
  uint32_t region_count;
  struct kvp_attach_region regions[kvp_regions_per_pool_max];
};

struct kvp_attach_buffer {
  uint64_t buffer_id;
  uint64_t bytes;
  uint64_t memory_bytes; /* what its chunks add up to; 0: imported */
};

enum kvp_import_kind {
  KVP_IMPORT_MEMFD = 1,      /* host devices: a memfd with SHRINK | GROW | SEAL */
  KVP_IMPORT_VMM = 2,        /* a POSIX descriptor of cuMemExportToShareableHandle */
  KVP_IMPORT_IPC_HANDLE = 3, /* a cudaIpcMemHandle_t; only of uids that are allowed to */
};

/* Bytes [offset, offset + bytes) of an allocation of allocation_bytes become a buffer; offset is a multiple of
 * kvp_import_alignment_bytes. */
struct kvp_attach_import {
  uint32_t kind;
  uint32_t reserved;
  uint64_t allocation_bytes;
  uint64_t offset_bytes;
  uint64_t bytes;
  uint8_t ipc_handle[kvp_ipc_handle_bytes];
};

_Static_assert(sizeof(struct kvp_attach_pool) <= kvp_control_body_bytes_max, "a message holds it");

#endif
