/* libkvpool: the C interface to kvpoold, a daemon that owns the paged KV pool of one host.
 *
 * A scheduler connects, opens a session, leases blocks of a pool and sends steps: lists of store and load operations
 * on records addressed by slots. The planners (plan.h) turn block tables and sequence lengths into the
 * slots and segments that steps take; they need no daemon.
 *
 * Conventions
 *
 *   Ownership   kvpool_*_new, _open, _create and _connect give an object that the matching _destroy, _close or _release
 *               takes back; both accept NULL. Pointers that an accessor returns live as long as their object.
 *   Errors      Calls that can fail return a kvpool_status and fill the kvpool_error they are given (NULL: not wanted).
 *               Outputs are set on success only. There is no global state. What comes from outside - sizes, slots,
 *               names, answers - is checked and refused; NULL for a handle, or where a pointer isn't said to take it,
 *               is the program's own bug and ends it (assert).
 *   Threads     One kvpool_client may be used by any number of threads at once. A kvpool_step or kvpool_queue belongs
 *               to one thread at a time. Callbacks run on the library's own thread, one at a time, in order of
 *               occurrence; a blocking call from inside a callback is refused (KVPOOL_INVALID_ARGUMENT).
 *   Blocking    A call that talks to the daemon blocks until the answer, at most the client's timeout
 *               (KVPOOL_DEADLINE_EXCEEDED: it may or may not have happened); one that moves data in pieces, at most the
 *               timeout for each piece, and one that asks in parts (kvpool_block_map_get), for each part. What closes
 *               or destroys never fails: it waits for the daemon at most the timeout, kvpool_client_destroy not at
 *               all, and a moment (0.2 s) more for what it cancels; what a daemon that hangs still holds on to is taken
 *               down behind its back, when that ends or goes on. A callback that is running is waited for however long
 *               it takes. Asynchronous calls say so.
 *   Fork        Handles don't survive a fork: in the child calls that would ask the daemon are refused
 *               (KVPOOL_INVALID_ARGUMENT), and what closes or destroys tells nobody. A child may exec, _exit, or attach
 *               (worker.h) for itself; it may connect only where its parent never had.
 *   Arrays      int32 slots, block ids and segments in host byte order (little-endian hosts only).
 */
#ifndef KVPOOL_KVPOOL_H
#define KVPOOL_KVPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVPOOL_API __attribute__((visibility("default")))
#else
#define KVPOOL_API
#endif

/* The version of this header; kvpool_version() is that of the library in use. */
#define KVPOOL_VERSION_MAJOR 0
#define KVPOOL_VERSION_MINOR 1
#define KVPOOL_VERSION_PATCH 0

/* "0.1.0". Static. */
KVPOOL_API const char *kvpool_version(void);

/* ---- errors -------------------------------------------------------------------------------------------------------
 */

/* The codes of the protocol, and what a client adds to them (from 100 on). */
typedef enum kvpool_status {
  KVPOOL_OK = 0,
  KVPOOL_INVALID_ARGUMENT = 1,
  KVPOOL_OUT_OF_RANGE = 2,
  KVPOOL_NOT_OWNER = 3,
  KVPOOL_STALE_BLOCK = 4,
  KVPOOL_SEALED_BLOCK = 5,
  KVPOOL_HAZARD_STORE_BEFORE_LOAD = 6,
  KVPOOL_WRONG_FORMAT = 7,
  KVPOOL_WRONG_DEVICE = 8,
  KVPOOL_TOO_LARGE = 9,
  KVPOOL_BUSY = 10,
  KVPOOL_UNKNOWN_SESSION = 11,
  KVPOOL_DEVICE_LOST = 12,
  KVPOOL_UNKNOWN_POOL = 13,
  KVPOOL_UNKNOWN_REGION = 14,
  KVPOOL_UNKNOWN_LAYER = 15,
  KVPOOL_UNKNOWN_BUFFER = 16,
  KVPOOL_WRONG_SECRET = 17,
  KVPOOL_PERMISSION_DENIED = 18,
  KVPOOL_OUT_OF_MEMORY = 19,
  KVPOOL_OUT_OF_BLOCKS = 20,
  KVPOOL_ALREADY_EXISTS = 21,
  KVPOOL_MALFORMED = 22,
  KVPOOL_QUOTA_EXCEEDED = 23,
  KVPOOL_DEADLINE_EXCEEDED = 24,
  KVPOOL_CANCELLED = 25,
  KVPOOL_SHUTTING_DOWN = 26,
  KVPOOL_UNIMPLEMENTED = 27,
  KVPOOL_IN_USE = 28,
  KVPOOL_VERSION_MISMATCH = 29,
  KVPOOL_INTERNAL = 30,
  KVPOOL_DISCONNECTED = 100, /* the daemon is not there, or went away during the call */
  KVPOOL_NO_MEMORY = 101     /* this process is out of memory */
} kvpool_status;

/* "out_of_range". Static; "unknown" for a number that is no status. */
KVPOOL_API const char *kvpool_status_name(kvpool_status status);

/* What went wrong, where, and the value found there. */
typedef struct kvpool_error {
  kvpool_status status;
  int32_t op;       /* index of the op within its step; -1: not about an op */
  int64_t position; /* element of `array`; -1: none */
  int64_t value;    /* what stood there */
  char array[32];   /* array or field, "" when none */
  char text[384];   /* one line for a person */
} kvpool_error;

/* ---- connection ---------------------------------------------------------------------------------------------------
 */

typedef struct kvpool_client kvpool_client;

typedef struct kvpool_connect_options {
  size_t size_bytes;       /* sizeof(kvpool_connect_options), so that the struct can grow */
  uint32_t timeout_ms;     /* of every blocking call; 0 = 10,000 */
  bool wait_until_serving; /* connect returns when every device of the daemon serves, or at the timeout; a daemon that
                              is not there yet is waited for as well */
} kvpool_connect_options;

/* target: a unix socket's path, or "unix:PATH"; NULL: $KVPOOLD_SOCKET, else /run/kvpoold/kvpoold.sock. options NULL:
 * the defaults. Refused: KVPOOL_DISCONNECTED (nobody listens there), KVPOOL_PERMISSION_DENIED (the socket may not be
 * opened by this user), KVPOOL_INVALID_ARGUMENT (not a unix socket's path, or options of another size),
 * KVPOOL_VERSION_MISMATCH, KVPOOL_MALFORMED (no kvpoold), KVPOOL_DEADLINE_EXCEEDED.
 *
 * A client reconnects by itself: a call after the daemon came back is served. Nothing else comes back with it.
 * Sessions are over: their calls end with KVPOOL_UNKNOWN_SESSION, and their event callback has told what was lost. Pool
 * handles name pools of the daemon before: whatever takes one ends with KVPOOL_UNKNOWN_POOL, also when the new daemon
 * has a pool of that name, which kvpool_pool_open finds. A pool's id is never given twice, by no other daemon either.
 */
KVPOOL_API kvpool_status kvpool_client_connect(const char *target, const kvpool_connect_options *options,
                                               kvpool_client **out, kvpool_error *error);
/* Sessions and queues of this client must be closed before (a session still open is closed with it, by force; steps
 * still under way end with KVPOOL_CANCELLED). Handles left over stay valid, to be given back in any order. Not from
 * inside a callback. */
KVPOOL_API void kvpool_client_destroy(kvpool_client *client);
/* For a program that was told to stop: every call under way, of whatever thread, ends at once (KVPOOL_CANCELLED; it
 * may or may not have happened), sessions and queues end with theirs. Calls made after it are served, and wait
 * timeout_ms at most (0: they don't wait), so that there is time to clean up. From any thread, callbacks included. */
KVPOOL_API void kvpool_client_interrupt(kvpool_client *client, uint32_t timeout_ms);

/* ---- the daemon ---------------------------------------------------------------------------------------------------
 */

typedef enum kvpool_device_state {
  KVPOOL_DEVICE_STARTING = 0,
  KVPOOL_DEVICE_SERVING = 1,
  KVPOOL_DEVICE_RESTARTING = 2,
  KVPOOL_DEVICE_STOPPED = 3,
  KVPOOL_DEVICE_WAITING = 4, /* others have to go before it can serve: waiting_for */
  KVPOOL_DEVICE_REFUSED = 5  /* it can't be served as its host is now: waiting_for */
} kvpool_device_state;

typedef struct kvpool_device_info {
  char name[64]; /* "host:0", "cuda:0" */
  kvpool_device_state state;
  uint64_t executor_pid;
  uint64_t restarts;           /* executors lost since the daemon started */
  uint64_t memory_limit_bytes; /* what pools and buffers may take together */
  uint64_t pool_bytes;         /* taken by pools: each region a multiple of memory_granularity_bytes */
  uint64_t buffer_bytes;       /* taken by buffers: each a multiple of memory_granularity_bytes */
  uint64_t steps_in_flight;    /* over gRPC, like the next one; of rings, kvpool_attached_info.steps_taken tells */
  uint64_t steps_done;
  char description[256];
  char driver[64];              /* "580.95.05, CUDA 13.0"; "" for a host */
  bool mps;                     /* its contexts are clients of an MPS server */
  uint64_t memory_bytes;        /* what the device has in all; 0 before its first executor was ready */
  uint64_t memory_left_bytes;   /* of memory_limit_bytes */
  uint64_t memory_others_bytes; /* in use by contexts and other processes, as of some seconds ago */
  uint64_t memory_granularity_bytes;
  char waiting_for[384]; /* KVPOOL_DEVICE_WAITING, _REFUSED: why, in its executor's words; "" otherwise */
  uint64_t ring_bytes;   /* host memory of workers' rings; of a host device, part of memory_limit_bytes */
} kvpool_device_info;

/* One entry of the format catalogue. Field by field FORMATS.md's descriptor and the sizes that follow from it. */
typedef struct kvpool_format_info {
  char name[64];
  char quantized_dtype[16]; /* "none", "e4m3", "e2m1" */
  char scale_format[16];    /* "none", "ue8m0", "e4m3", "f32" */
  uint32_t quantized_elements;
  uint32_t elements_per_scale;
  uint32_t bf16_elements;
  bool dequantize_on_load;
  bool token_interleaved;
  uint32_t data_bytes;
  uint32_t scale_bytes;
  uint32_t bytes_per_token;
  uint32_t row_bytes;          /* of a BF16 source row */
  uint32_t loaded_row_bytes;   /* of a row of a load's output */
  uint32_t loaded_scale_bytes; /* of a row of its second output; 0 when it has none */
  char note[256];
} kvpool_format_info;

/* This process as the daemon sees it: what it goes by for rights. */
typedef struct kvpool_caller_info {
  uint32_t uid;     /* of a user that the daemon's user namespace doesn't have: the overflow uid, as a rule 65534 */
  uint32_t pid;     /* 0: the daemon's pid namespace doesn't have this process */
  bool is_operator; /* root, or the daemon's own user */
} kvpool_caller_info;

/* A snapshot of what the daemon says of itself. */
typedef struct kvpool_server_info kvpool_server_info;

KVPOOL_API kvpool_status kvpool_server_info_get(kvpool_client *client, kvpool_server_info **out, kvpool_error *error);
KVPOOL_API void kvpool_server_info_destroy(kvpool_server_info *info);
KVPOOL_API const char *kvpool_server_info_version(const kvpool_server_info *info);
KVPOOL_API uint32_t kvpool_server_info_protocol_version(const kvpool_server_info *info);
KVPOOL_API uint64_t kvpool_server_info_pid(const kvpool_server_info *info);
KVPOOL_API uint64_t kvpool_server_info_started_unix_ns(const kvpool_server_info *info);
/* Where workers on the daemon's host attach (kvpool_attach). "": this daemon takes none. */
KVPOOL_API const char *kvpool_server_info_attach_socket(const kvpool_server_info *info);
/* False: an older daemon doesn't say. */
KVPOOL_API bool kvpool_server_info_caller(const kvpool_server_info *info, kvpool_caller_info *out);
KVPOOL_API size_t kvpool_server_info_device_count(const kvpool_server_info *info);
KVPOOL_API const kvpool_device_info *kvpool_server_info_device(const kvpool_server_info *info, size_t index);
KVPOOL_API size_t kvpool_server_info_format_count(const kvpool_server_info *info);
KVPOOL_API const kvpool_format_info *kvpool_server_info_format(const kvpool_server_info *info, size_t index);

/* ---- pools --------------------------------------------------------------------------------------------------------
 */

typedef enum kvpool_pool_kind {
  KVPOOL_POOL_PAGED = 0, /* a block holds consecutive tokens of a sequence */
  KVPOOL_POOL_RING = 1   /* a block is one sequence's sliding-window ring */
} kvpool_pool_kind;

typedef struct kvpool_region_spec {
  const char *name;
  const char *format;         /* a catalogue name */
  uint32_t width;             /* elements; bf16 only, 0 = its default */
  uint32_t compression_ratio; /* tokens_per_block = block_size / ratio; 0 = 1 */
  uint32_t num_layers;
  const char *note; /* NULL: none */
} kvpool_region_spec;

typedef struct kvpool_pool_spec {
  const char *name;
  kvpool_pool_kind kind;
  uint32_t block_size; /* tokens of the sequence that a block covers */
  uint32_t num_blocks;
  const char *const *placements; /* [placement_count] device names; none = the first device */
  size_t placement_count;
  const kvpool_region_spec *regions; /* [region_count] */
  size_t region_count;
  const char *namespace_name; /* whose sessions alone may have its blocks and map it; NULL: anybody's (worker.h) */
} kvpool_pool_spec;

typedef struct kvpool_region_info {
  char name[64];
  char format[64];
  char note[256];
  uint32_t width;
  uint32_t compression_ratio;
  uint32_t num_layers;
  uint32_t tokens_per_block;
  uint32_t bytes_per_token;
  uint32_t data_bytes;
  uint32_t scale_bytes;
  uint64_t block_stride_bytes;
  uint64_t layer_stride_bytes;
  uint64_t region_bytes;
} kvpool_region_info;

/* A pool as it was when it was asked for; kvpool_pool_refresh asks again. Of a pool that was deleted since, or whose
 * daemon is gone, every call with it is KVPOOL_UNKNOWN_POOL. */
typedef struct kvpool_pool kvpool_pool;

/* An operator's right. The daemon makes and reserves the memory before it answers. Refused: KVPOOL_ALREADY_EXISTS,
 * KVPOOL_OUT_OF_MEMORY (the numbers in the text), KVPOOL_PERMISSION_DENIED, KVPOOL_INVALID_ARGUMENT (the field). */
KVPOOL_API kvpool_status kvpool_pool_create(kvpool_client *client, const kvpool_pool_spec *spec, kvpool_pool **out,
                                            kvpool_error *error);
/* KVPOOL_UNKNOWN_POOL when there is none of this name. */
KVPOOL_API kvpool_status kvpool_pool_open(kvpool_client *client, const char *name, kvpool_pool **out,
                                          kvpool_error *error);
KVPOOL_API kvpool_status kvpool_pool_refresh(kvpool_pool *pool, kvpool_error *error);
/* Forgets the handle; the pool itself stays. */
KVPOOL_API void kvpool_pool_destroy(kvpool_pool *pool);
/* Deletes the pool in the daemon; an operator's right. force: also while blocks are leased. KVPOOL_IN_USE otherwise.
 * Its memory is free when this returns; KVPOOL_DEADLINE_EXCEEDED: not yet, as steps of workers' rings still use it. */
KVPOOL_API kvpool_status kvpool_pool_delete(kvpool_pool *pool, bool force, kvpool_error *error);

KVPOOL_API uint64_t kvpool_pool_id(const kvpool_pool *pool);
KVPOOL_API const char *kvpool_pool_name(const kvpool_pool *pool);
/* "": none, or of a map, which isn't told. */
KVPOOL_API const char *kvpool_pool_namespace(const kvpool_pool *pool);
KVPOOL_API kvpool_pool_kind kvpool_pool_get_kind(const kvpool_pool *pool);
KVPOOL_API uint32_t kvpool_pool_block_size(const kvpool_pool *pool);
KVPOOL_API uint32_t kvpool_pool_num_blocks(const kvpool_pool *pool);
KVPOOL_API uint32_t kvpool_pool_free_blocks(const kvpool_pool *pool);
KVPOOL_API uint32_t kvpool_pool_leased_blocks(const kvpool_pool *pool);
KVPOOL_API uint32_t kvpool_pool_quarantined_blocks(const kvpool_pool *pool);
KVPOOL_API uint64_t kvpool_pool_bytes_per_placement(const kvpool_pool *pool);
KVPOOL_API size_t kvpool_pool_placement_count(const kvpool_pool *pool);
KVPOOL_API const char *kvpool_pool_placement(const kvpool_pool *pool, size_t index);
KVPOOL_API size_t kvpool_pool_region_count(const kvpool_pool *pool);
KVPOOL_API const kvpool_region_info *kvpool_pool_region(const kvpool_pool *pool, size_t index);
/* Index of the region of this name, or -1. */
KVPOOL_API int kvpool_pool_region_find(const kvpool_pool *pool, const char *name);

typedef struct kvpool_pool_list kvpool_pool_list;
KVPOOL_API kvpool_status kvpool_pool_list_get(kvpool_client *client, kvpool_pool_list **out, kvpool_error *error);
KVPOOL_API void kvpool_pool_list_destroy(kvpool_pool_list *list);
KVPOOL_API size_t kvpool_pool_list_count(const kvpool_pool_list *list);
/* Owned by the list. */
KVPOOL_API const kvpool_pool *kvpool_pool_list_item(const kvpool_pool_list *list, size_t index);

/* ---- sessions -----------------------------------------------------------------------------------------------------
 */

typedef struct kvpool_session kvpool_session;

typedef enum kvpool_session_event_kind {
  KVPOOL_SESSION_DEVICE_LOST = 1,     /* an executor died; contents are intact but for `blocks` */
  KVPOOL_SESSION_DEVICE_RESTORED = 2, /* it serves again */
  KVPOOL_SESSION_ENDED = 3            /* the session is over: blocks and buffers are gone; `error` says why */
} kvpool_session_event_kind;

typedef struct kvpool_session_event {
  kvpool_session_event_kind kind;
  const char *device;    /* DEVICE_*; else "" */
  uint64_t pool_id;      /* DEVICE_LOST: pool of `blocks`; one event per pool, or one with block_count 0 */
  const int32_t *blocks; /* blocks that a store was writing to */
  size_t block_count;
  const kvpool_error *error; /* ENDED */
} kvpool_session_event;

/* On the library's thread. The event and all it points to are valid during the call only. */
typedef void (*kvpool_session_event_fn)(void *context, const kvpool_session_event *event);

typedef struct kvpool_session_options {
  size_t size_bytes;                /* sizeof(kvpool_session_options) */
  const char *name;                 /* for people: "scheduler-0"; NULL: the program's name */
  const char *namespace_name;       /* tenant; NULL: "default". Blocks that were another tenant's come zeroed */
  uint32_t blocks_max;              /* quota over all pools; 0 = none */
  kvpool_session_event_fn on_event; /* NULL: not wanted */
  void *context;
} kvpool_session_options;

/* The session lives as long as this process holds it: when the process dies the daemon ends it and frees its blocks.
 */
KVPOOL_API kvpool_status kvpool_session_open(kvpool_client *client, const kvpool_session_options *options,
                                             kvpool_session **out, kvpool_error *error);
/* Ends it: blocks are freed, buffers released. Queues of the session must be closed before. No event is sent, and
 * none is being told when it returns. From inside a callback: allowed, and doesn't wait for the daemon. */
KVPOOL_API void kvpool_session_close(kvpool_session *session);
KVPOOL_API uint64_t kvpool_session_id(const kvpool_session *session);
/* The secret that other programs need to act for this session (the attach protocol, tools): 16 bytes. */
KVPOOL_API void kvpool_session_secret(const kvpool_session *session, uint8_t out[16]);
/* The latest epoch this session has seen; steps carry it by themselves. */
KVPOOL_API uint64_t kvpool_session_epoch(const kvpool_session *session);
/* KVPOOL_OK while it lives; else why it ended. */
KVPOOL_API kvpool_status kvpool_session_state(const kvpool_session *session, kvpool_error *error);

typedef struct kvpool_session_info {
  uint64_t session_id;
  char name[64];
  char namespace_name[64];
  uint32_t peer_pid;
  uint32_t peer_uid;
  uint64_t opened_unix_ns;
  uint32_t blocks;
  uint32_t buffers;
  uint64_t buffer_bytes;
  uint32_t queues;
  uint32_t steps_in_flight; /* over gRPC, like the next two */
  uint64_t steps_done;
  uint64_t steps_refused;
  size_t attachment_count;
} kvpool_session_info;

typedef enum kvpool_attached_state {
  KVPOOL_ATTACHED_STARTING = 0,
  KVPOOL_ATTACHED_SERVING = 1,
  KVPOOL_ATTACHED_LOST = 2,  /* its executor died, the next one is not ready yet */
  KVPOOL_ATTACHED_ENDING = 3 /* steps of it that run, or buffers, are not gone yet */
} kvpool_attached_state;

/* A worker that is attached to a session. */
typedef struct kvpool_attached_info {
  uint64_t attachment_id;
  char device[64];
  uint32_t peer_pid;
  uint32_t peer_uid;
  uint64_t attached_unix_ns;
  kvpool_attached_state state;
  uint64_t steps_taken; /* out of its ring, since that was made */
  uint32_t buffers;     /* made or imported by it */
} kvpool_attached_info;

typedef struct kvpool_session_list kvpool_session_list;
KVPOOL_API kvpool_status kvpool_session_list_get(kvpool_client *client, kvpool_session_list **out,
                                                 kvpool_error *error);
KVPOOL_API void kvpool_session_list_destroy(kvpool_session_list *list);
KVPOOL_API size_t kvpool_session_list_count(const kvpool_session_list *list);
KVPOOL_API const kvpool_session_info *kvpool_session_list_item(const kvpool_session_list *list, size_t index);
/* attachment < attachment_count of the session at index. */
KVPOOL_API const kvpool_attached_info *kvpool_session_list_attachment(const kvpool_session_list *list, size_t index,
                                                                      size_t attachment);

/* ---- blocks -------------------------------------------------------------------------------------------------------
 */

/* All or nothing. out: int32[count], caller's. KVPOOL_OUT_OF_BLOCKS and KVPOOL_QUOTA_EXCEEDED name the numbers.
 * count 0: KVPOOL_INVALID_ARGUMENT. More than one answer holds (about a million): KVPOOL_TOO_LARGE. */
KVPOOL_API kvpool_status kvpool_blocks_allocate(kvpool_session *session, const kvpool_pool *pool, uint32_t count,
                                                int32_t *out, kvpool_error *error);
/* Exactly [first, first + count), for a scheduler with an allocator of its own. KVPOOL_IN_USE names the first block
 * that is not free. count as above. */
KVPOOL_API kvpool_status kvpool_blocks_allocate_range(kvpool_session *session, const kvpool_pool *pool,
                                                      uint32_t first_block, uint32_t count, kvpool_error *error);
/* The blocks return to the pool when every step accepted before has retired. All or nothing: a block that is not this
 * session's, or is named twice, is refused with its position. */
KVPOOL_API kvpool_status kvpool_blocks_free(kvpool_session *session, const kvpool_pool *pool, const int32_t *blocks,
                                            uint32_t count, kvpool_error *error);

typedef enum kvpool_block_state {
  KVPOOL_BLOCK_FREE = 0,
  KVPOOL_BLOCK_LEASED = 1,
  KVPOOL_BLOCK_SEALED = 2,
  KVPOOL_BLOCK_QUARANTINED = 3
} kvpool_block_state;

/* Consecutive blocks of one state, owner and epoch. */
typedef struct kvpool_block_run {
  uint32_t first_block;
  uint32_t count;
  kvpool_block_state state;
  uint64_t session_id; /* 0: nobody */
  uint64_t epoch;
} kvpool_block_run;

/* Of a large pool it is asked for in parts, between which blocks may change hands. */
typedef struct kvpool_block_map kvpool_block_map;
KVPOOL_API kvpool_status kvpool_block_map_get(kvpool_client *client, const kvpool_pool *pool, kvpool_block_map **out,
                                              kvpool_error *error);
KVPOOL_API void kvpool_block_map_destroy(kvpool_block_map *map);
KVPOOL_API size_t kvpool_block_map_run_count(const kvpool_block_map *map);
KVPOOL_API const kvpool_block_run *kvpool_block_map_run(const kvpool_block_map *map, size_t index);

/* ---- buffers ------------------------------------------------------------------------------------------------------
 */

/* Device memory of one session, zero-filled when new: sources, outputs and arrays of steps. */
typedef struct kvpool_buffer kvpool_buffer;

/* device NULL: the first. */
KVPOOL_API kvpool_status kvpool_buffer_create(kvpool_session *session, const char *device, uint64_t bytes,
                                              kvpool_buffer **out, kvpool_error *error);
/* Any size; sent in pieces. KVPOOL_OUT_OF_RANGE: not inside the buffer, nothing written. An error on the way (device
 * lost) may leave a part written. */
KVPOOL_API kvpool_status kvpool_buffer_write(kvpool_buffer *buffer, uint64_t offset_bytes, const void *data,
                                             uint64_t bytes, kvpool_error *error);
KVPOOL_API kvpool_status kvpool_buffer_read(kvpool_buffer *buffer, uint64_t offset_bytes, void *out, uint64_t bytes,
                                            kvpool_error *error);
/* Its memory goes when the steps that use it have retired, those of a ring among them that were posted before. The
 * handle is gone whatever is returned; where that is an error, from inside a callback for one (KVPOOL_INVALID_ARGUMENT),
 * the memory stays until the session ends. */
KVPOOL_API kvpool_status kvpool_buffer_release(kvpool_buffer *buffer, kvpool_error *error);
KVPOOL_API uint64_t kvpool_buffer_id(const kvpool_buffer *buffer);
KVPOOL_API uint64_t kvpool_buffer_bytes(const kvpool_buffer *buffer);

/* ---- steps --------------------------------------------------------------------------------------------------------
 */

/* One layer of one region. */
typedef struct kvpool_layer {
  const kvpool_pool *pool;
  uint32_t region; /* index */
  uint32_t layer;
} kvpool_layer;

/* rows of row_bytes, one every row_stride_bytes, from offset_bytes of a buffer on, all inside it. Offset and stride:
 * multiples of 16 (scales of an index format, and matrices of int32: offset of 16, stride of 4); stride >=
 * row_bytes. */
typedef struct kvpool_view {
  const kvpool_buffer *buffer;
  uint64_t offset_bytes;
  uint64_t rows;
  uint64_t row_stride_bytes; /* 0 = row_bytes */
  uint32_t row_bytes;        /* what the region's format says */
} kvpool_view;

/* An ordered list of ops, built once and submitted any number of times.
 *
 * Of every kvpool_step_add_*: it sends nothing, and what it is given is copied; buffers and pools that are named
 * have to be there when the step is submitted. It refuses, with error->op the op's number and nothing added, what it
 * can see: a region or layer that the pool hasn't (KVPOOL_UNKNOWN_REGION, _LAYER), an array that the step hasn't
 * (KVPOOL_INVALID_ARGUMENT), more than 1024 ops or arrays (KVPOOL_TOO_LARGE), no memory (KVPOOL_NO_MEMORY).
 *
 * All else the daemon checks, the whole step before any of it runs, and refuses with op, array, position and value:
 * KVPOOL_INVALID_ARGUMENT (shapes, slots named twice, outputs that overlap), KVPOOL_OUT_OF_RANGE (slots, blocks,
 * segments, positions, views), KVPOOL_WRONG_FORMAT (row_bytes, formats), KVPOOL_NOT_OWNER, KVPOOL_STALE_BLOCK,
 * KVPOOL_SEALED_BLOCK, KVPOOL_HAZARD_STORE_BEFORE_LOAD, KVPOOL_WRONG_DEVICE, KVPOOL_UNKNOWN_BUFFER,
 * KVPOOL_TOO_LARGE. Arrays in buffers can't be checked then: what is wrong in them is skipped when the op runs, and
 * counted in its report's rows_rejected. No rows at all: nothing to do, which succeeds. What each op computes is
 * section 2 of OPS. */
typedef struct kvpool_step kvpool_step;

KVPOOL_API kvpool_status kvpool_step_new(kvpool_session *session, kvpool_step **out, kvpool_error *error);
KVPOOL_API void kvpool_step_destroy(kvpool_step *step);
/* Empties it for reuse; keeps its memory. */
KVPOOL_API void kvpool_step_clear(kvpool_step *step);
/* Device; NULL = the first placement of the first op's pool. */
KVPOOL_API kvpool_status kvpool_step_set_placement(kvpool_step *step, const char *device, kvpool_error *error);

/* Arrays are given once and named by the number *array in any op of the step. values are copied. */
KVPOOL_API kvpool_status kvpool_step_add_array(kvpool_step *step, const int32_t *values, size_t count,
                                               uint32_t *array, kvpool_error *error);
/* int32[count] at offset_bytes of a buffer, read and checked when the op runs. */
KVPOOL_API kvpool_status kvpool_step_add_buffer_array(kvpool_step *step, const kvpool_buffer *buffer,
                                                      uint64_t offset_bytes, uint64_t count, uint32_t *array,
                                                      kvpool_error *error);

/* Quantize source row i into the record of slots[i]; -1 skips. source: BF16 [>= n, elements of the region]; rows
 * behind the slots are not looked at. slots: array of int32[n], none of them twice. cast_back NULL, or BF16 [>= n,
 * elements] (main caches and bf16 only): what a load would return, of rows with slot -1, too. */
KVPOOL_API kvpool_status kvpool_step_add_store(kvpool_step *step, const kvpool_layer *layer,
                                               const kvpool_view *source, uint32_t slots,
                                               const kvpool_view *cast_back, kvpool_error *error);
/* segments: array of int32[m, 4] = block (-1: zero rows), begin, end (tokens of the block, 0 <= begin <= end <=
 * tokens_per_block), destination row; destinations lie in [0, total_k), apart. out: [>= total_k, loaded_row_bytes],
 * BF16 rows or an index format's codes; out_scales: [>= total_k, loaded_scale_bytes], an index format's scales, else
 * NULL. Rows that no segment covers keep what was there. */
KVPOOL_API kvpool_status kvpool_step_add_load(kvpool_step *step, const kvpool_layer *layer, uint32_t segments,
                                              uint64_t total_k, const kvpool_view *out, const kvpool_view *out_scales,
                                              kvpool_error *error);

enum { KVPOOL_ALLOW_STORE_BEFORE_LOAD = 1 };

/* As kvpool_step_add_load. flags: KVPOOL_ALLOW_STORE_BEFORE_LOAD, or 0: then a load from a ring's layer that an op
 * before it in the step stores to, in a slot that is read, is refused with KVPOOL_HAZARD_STORE_BEFORE_LOAD. Where
 * one of the arrays lies in a buffer nobody can tell, and the report says hazard_unchecked. */
KVPOOL_API kvpool_status kvpool_step_add_load_flags(kvpool_step *step, const kvpool_layer *layer, uint32_t segments,
                                                    uint64_t total_k, const kvpool_view *out,
                                                    const kvpool_view *out_scales, uint32_t flags,
                                                    kvpool_error *error);

/* ---- prefill: the contiguous key buffer of attention ----
 *
 *   rows [0, S)              history of the sliding window, loaded from a ring
 *   rows [S, S + C)          this chunk's new rows
 *   rows [S + C, S + C + K)  compressed cache, loaded
 *
 * Each part may be absent. Destinations of segments count from the begin of their part. The report tells S + C as
 * main_kv_offset, and counts copied rows as loaded ones. A row whose entry of a gather in a buffer is wrong is a zero
 * row, not stored, and counts once. */

typedef struct kvpool_assemble_swa {
  kvpool_layer layer; /* of a ring pool */
  uint32_t segments;  /* array: int32[m, 4], as of a load */
  uint64_t total_k;   /* S */
} kvpool_assemble_swa;

typedef struct kvpool_assemble_chunk {
  const kvpool_view *source;   /* BF16 rows, copied; NULL: `reserved` */
  uint64_t reserved;           /* C rows, left alone: a fused_store later in the step fills them by its cast_back */
  const uint32_t *gather;      /* NULL, or array: int32[C], row i is source row gather[i], -1 a zero row; without it
                                 * C = source->rows */
  const uint32_t *store_slots; /* NULL, or array: int32[C], where in the ring the rows go to after it was loaded */
  bool cast_back;              /* rows as the ring's format would give them back */
  const kvpool_layer *layer;   /* the ring's; NULL: the swa part's, or, for rows that are copied only, none */
} kvpool_assemble_chunk;

typedef struct kvpool_assemble_compressed {
  kvpool_layer layer;
  uint32_t segments; /* array: int32[m, 4] */
  uint64_t total_k;  /* K */
  /* An assemble before this one, of the same layer, segments and rows, wrote them: they are not written again.
   * Refused (KVPOOL_INVALID_ARGUMENT) where the daemon doesn't remember that, where a step that it accepted since may
   * have written these rows or their blocks, or one of another queue that had not finished by then, and where the step
   * that assembles them is another queue's and has not finished. Assemble them again then.
   *
   * Arrays that are buffers are not read at acceptance, so the worst is assumed of them: a store whose slots lie in one
   * may have written every block of its layer, and after an assemble whose segments here lie in one nothing is kept.
   * Who stores to the compressed cache between the layers that share it sends those slots with the step. */
  bool keep_compressed;
} kvpool_assemble_compressed;

/* out: BF16 [>= S + C + K, elements], apart from every input. All regions load rows of out's row_bytes; swa and chunk
 * are of one layer. swa, chunk, compressed: NULL = absent. flags: as of a load. */
KVPOOL_API kvpool_status kvpool_step_add_assemble(kvpool_step *step, const kvpool_view *out,
                                                  const kvpool_assemble_swa *swa, const kvpool_assemble_chunk *chunk,
                                                  const kvpool_assemble_compressed *compressed, uint32_t flags,
                                                  kvpool_error *error);

/* ---- decode: norm, rotate, store ----
 *
 * RMSNorm, RoPE, Hadamard (if asked for), quantize, store, in float32 and in an order that gives the same bytes on
 * every device and for every number of rows. */
typedef struct kvpool_fused_store {
  kvpool_layer layer;
  kvpool_view source;          /* BF16 [>= n, D], D = the region's elements, a power of two, at most 16384 */
  kvpool_view norm_weight;     /* BF16 [1, D] */
  float eps;                   /* finite, > 0 */
  uint32_t slots;              /* array: int32[n], as of a store */
  uint32_t positions;          /* array: int32[n], rows of cos_sin; not looked at where the slot is -1 and there is no
                                * cast_back */
  const kvpool_view *cos_sin;  /* float32 [max_position, rotary_dims]: cosines, then sines; NULL: no rotation */
  const uint32_t *rope_offset; /* first rotated element; NULL: D - rotary_dims */
  bool neox;                   /* pairs (i, i + rotary_dims / 2); else (2i, 2i + 1) */
  bool hadamard;
  bool keep_float32;            /* no rounding to BF16 between the stages */
  const kvpool_view *cast_back; /* NULL, or BF16 [>= n, D]: what a load would return */
} kvpool_fused_store;

KVPOOL_API kvpool_status kvpool_step_add_fused_store(kvpool_step *step, const kvpool_fused_store *fused,
                                                     kvpool_error *error);

/* ---- indices ----
 *
 * Matrices of int32: views have row_bytes = 4 * columns, and strides that are multiples of 4. Entries that are wrong
 * become -1 and are counted in the report's rows_rejected; nothing follows them. */

typedef struct kvpool_matrix {
  const kvpool_view *view; /* NULL: the array, without gaps */
  uint32_t array;
} kvpool_matrix;

/* Logical token indices to slots: x -> table[b, x / tpb] * tpb + x % tpb, tpb = the region's tokens_per_block; -1
 * stays -1. topk: [batch * queries, columns]. out: the same shape; NULL = in place, topk is a view. block_tables:
 * array of int32[batch, table_columns]. valid: array of int32[batch * queries], how many entries of each list count,
 * clamped to [0, columns]; the rest becomes -1. */
KVPOOL_API kvpool_status kvpool_step_add_convert_kv_index(kvpool_step *step, const kvpool_layer *layer,
                                                          const kvpool_matrix *topk, uint32_t block_tables,
                                                          uint32_t table_columns, uint32_t valid, uint32_t queries,
                                                          const kvpool_view *out, kvpool_error *error);
/* offset_len: array of int32[q, 2], kvpool_swa_window of each query. out: [>= q, window] slots of the ring, -1 behind
 * each query's length. A length outside [0, min(window, ring)], or a start outside the region, makes the row -1. */
KVPOOL_API kvpool_status kvpool_step_add_swa_index_decode(kvpool_step *step, const kvpool_layer *layer,
                                                          uint32_t offset_len, uint32_t window,
                                                          const kvpool_view *out, kvpool_error *error);
/* pivots: array of int32[r, 4], kvpool_swa_pivot of each query. out: [>= r, width] columns of the assembled buffer,
 * -1 behind both runs; what exceeds the width is cut off. A negative length, or a column past int32, makes the row
 * -1. */
KVPOOL_API kvpool_status kvpool_step_add_expand_swa_index(kvpool_step *step, uint32_t pivots, uint32_t width,
                                                          const kvpool_view *out, kvpool_error *error);
/* out: [>= r, left_columns + right_columns] = left as it is, then right + right_base where it isn't -1. left: [r,
 * left_columns], right: [r, right_columns]; NULL: that side has no columns. right_base >= 0: the assembled buffer's
 * main_kv_offset. */
KVPOOL_API kvpool_status kvpool_step_add_kv_index_cat(kvpool_step *step, const kvpool_matrix *left,
                                                      uint32_t left_columns, const kvpool_matrix *right,
                                                      uint32_t right_columns, int32_t right_base,
                                                      const kvpool_view *out, kvpool_error *error);

/* ---- whole blocks: every region and layer of a pool, on the step's placement; arrays come with the step ---- */

/* pairs: array of int32[n, 2] = from, to. No block is written twice, or read by one pair and written by another. */
KVPOOL_API kvpool_status kvpool_step_add_copy_blocks(kvpool_step *step, const kvpool_pool *pool, uint32_t pairs,
                                                     kvpool_error *error);
/* blocks: array of int32[n], none of them twice. */
KVPOOL_API kvpool_status kvpool_step_add_zero_blocks(kvpool_step *step, const kvpool_pool *pool, uint32_t blocks,
                                                     kvpool_error *error);

typedef struct kvpool_op_report {
  uint64_t rows_stored;
  uint64_t rows_loaded; /* zero-filled rows, and those an assemble copied, among them */
  uint64_t rows_skipped;
  uint64_t rows_rejected;
  uint64_t rows_nonfinite;
  uint64_t groups_saturated;
  uint64_t bytes_read;
  uint64_t bytes_written;
  uint64_t queued_ns; /* CLOCK_MONOTONIC, as the others */
  uint64_t started_ns;
  uint64_t finished_ns;
  bool unchecked_arrays;   /* an array lay in device memory */
  bool hazard_unchecked;   /* for that reason nobody looked for a store before this load */
  uint64_t main_kv_offset; /* assemble: S + C */
} kvpool_op_report;

/* Blocking: submits and waits until it is done. reports: kvpool_op_report[report_count_max] or NULL. A refused step
 * ran nothing; KVPOOL_DEVICE_LOST: what it was writing may be torn (see the session's events). */
KVPOOL_API kvpool_status kvpool_step_run(kvpool_step *step, kvpool_op_report *reports, size_t report_count_max,
                                         kvpool_error *error);

/* ---- queues: asynchronous steps -----------------------------------------------------------------------------------
 */

/* Steps of a queue run in order; queues run independently. */
typedef struct kvpool_queue kvpool_queue;

typedef struct kvpool_completion {
  uint64_t step_id;                /* as kvpool_queue_submit gave it */
  bool accepted;                   /* only checked and accepted; the last word is still to come */
  const kvpool_error *error;       /* NULL: accepted, or done */
  const kvpool_op_report *reports; /* [report_count], when done */
  size_t report_count;
} kvpool_completion;

/* On the library's thread; valid during the call only. */
typedef void (*kvpool_completion_fn)(void *context, const kvpool_completion *completion);

/* want_accepted: also tell when a step was accepted. */
KVPOOL_API kvpool_status kvpool_queue_open(kvpool_session *session, kvpool_completion_fn on_completion, void *context,
                                           bool want_accepted, kvpool_queue **out, kvpool_error *error);
/* Asynchronous: returns when the step has been handed to the transport. The step may be cleared or changed at once.
 * KVPOOL_BUSY: more than the queue's limit of steps wait; KVPOOL_INVALID_ARGUMENT: the step is of another session, or of
 * an attachment; KVPOOL_DISCONNECTED, KVPOOL_UNKNOWN_SESSION. */
KVPOOL_API kvpool_status kvpool_queue_submit(kvpool_queue *queue, const kvpool_step *step, uint64_t *step_id,
                                             kvpool_error *error);
/* Blocking: until every step submitted so far has had its last word, failed ones included, and its callback has
 * returned. */
KVPOOL_API kvpool_status kvpool_queue_wait(kvpool_queue *queue, kvpool_error *error);
/* Waits for its steps (at most the timeout; the rest ends with KVPOOL_CANCELLED), then closes. From inside a
 * callback: allowed, waits for nothing, and nothing is told any more. */
KVPOOL_API void kvpool_queue_close(kvpool_queue *queue);

/* ---- rows without buffers, inspection -----------------------------------------------------------------------------
 */

/* Blocking store of rows from this process: rows [row_count, row_bytes], contiguous; slot_count <= row_count, rows
 * without a slot are ignored. report NULL: not wanted. KVPOOL_TOO_LARGE: more slots than one message holds (about a
 * million). */
KVPOOL_API kvpool_status kvpool_rows_store(kvpool_session *session, const kvpool_layer *layer, const void *rows,
                                           uint64_t row_count, uint32_t row_bytes, const int32_t *slots,
                                           size_t slot_count, kvpool_op_report *report, kvpool_error *error);
/* Blocking load into this process. segments: int32[m, 4]. rows: [total_k, loaded_row_bytes]; scales: [total_k,
 * loaded_scale_bytes] or NULL when the format has none. Uncovered rows become zero. KVPOOL_TOO_LARGE: outputs of more
 * than 1 GiB, or more segments than one message holds (about 260,000); use several calls, or steps. */
KVPOOL_API kvpool_status kvpool_rows_load(kvpool_session *session, const kvpool_layer *layer, const int32_t *segments,
                                          size_t segment_count, uint64_t total_k, void *rows, void *scales,
                                          kvpool_op_report *report, kvpool_error *error);

/* One stored record, for people. */
typedef struct kvpool_record {
  int32_t slot;
  uint32_t raw_bytes;
  const uint8_t *raw; /* data, then scales */
  uint32_t scale_count;
  const float *scales; /* one per group; ue8m0 0xFF is NaN */
  uint32_t value_count;
  const float *values;
} kvpool_record;

typedef struct kvpool_record_list kvpool_record_list;
/* An operator's right. count <= 1024. placement NULL: the first. */
KVPOOL_API kvpool_status kvpool_record_list_get(kvpool_client *client, const kvpool_layer *layer,
                                                const char *placement, const int32_t *slots, size_t count,
                                                kvpool_record_list **out, kvpool_error *error);
KVPOOL_API void kvpool_record_list_destroy(kvpool_record_list *list);
KVPOOL_API size_t kvpool_record_list_count(const kvpool_record_list *list);
KVPOOL_API const kvpool_record *kvpool_record_list_item(const kvpool_record_list *list, size_t index);

/* Whole blocks, padding included: out takes count * block_stride_bytes. An operator's right. */
KVPOOL_API kvpool_status kvpool_blocks_dump(kvpool_client *client, const kvpool_layer *layer, const char *placement,
                                            uint32_t first_block, uint32_t count, void *out, uint64_t out_bytes,
                                            kvpool_error *error);

#ifdef __cplusplus
}
#endif

#include "plan.h"   /* planners: from block tables and lengths to slots and segments */
#include "worker.h" /* attachments: workers on the daemon's host */

#endif
