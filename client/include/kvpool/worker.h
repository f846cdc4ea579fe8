/* libkvpool: workers on the daemon's own host. Part of kvpool.h, which includes it.
 *
 * A scheduler opens a session and leases blocks (kvpool.h). A worker, a process of its own as a rule, attaches to that
 * session with its id and secret: it maps the pool's memory, shares buffers, and posts steps through a ring in shared
 * memory, without gRPC. Steps are built by the same kvpool_step_* calls. Timelines order its steps with its own work.
 *
 *   Threads    An attachment, its pool maps, buffers and steps belong to one thread at a time; there is no thread of the
 *              library's. kvpool_timeline_* are for any number of threads at once, until kvpool_detach.
 *   Blocking   Calls that ask the daemon - attach, map, create, import, release - wait at most the attachment's timeout.
 *              Posting and polling never wait and, but for waking an executor that sleeps, make no system call.
 *   Death      The attachment lives as long as its socket: when the process dies, its ring, its steps and the buffers
 *              that it made are gone, and nothing else of the session. When the session ends, so do its attachments.
 *   Fork       Only the process that attached may use an attachment: in a child of fork calls that ask the daemon are
 *              refused (KVPOOL_INVALID_ARGUMENT), every other but kvpool_detach faults or is undefined. A child that
 *              lives on without exec keeps the socket open, so that the daemon doesn't notice its parent's death: it
 *              should call kvpool_detach, which there gives back the child's copies alone. CUDA's own rule is stricter:
 *              no CUDA in a child of fork.
 */
#ifndef KVPOOL_WORKER_H
#define KVPOOL_WORKER_H

#include "kvpool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- attachments --------------------------------------------------------------------------------------------------
 */

typedef struct kvpool_attachment kvpool_attachment;

typedef struct kvpool_attach_options {
  size_t size_bytes;   /* sizeof(kvpool_attach_options) */
  const char *socket;  /* what kvpool_server_info_attach_socket tells; NULL: $KVPOOLD_ATTACH_SOCKET, else
                          /run/kvpoold/kvpoold.attach.sock */
  uint64_t session_id; /* the scheduler's session, and its secret */
  uint8_t secret[16];
  const char *device;  /* "cuda:0"; NULL: the daemon's only one */
  uint32_t timeout_ms; /* of every call that asks the daemon; 0 = 10,000 */
} kvpool_attach_options;

/* Refused: KVPOOL_DISCONNECTED (nobody listens there), KVPOOL_PERMISSION_DENIED, KVPOOL_UNKNOWN_SESSION,
 * KVPOOL_WRONG_SECRET, KVPOOL_WRONG_DEVICE, KVPOOL_BUSY or KVPOOL_QUOTA_EXCEEDED (too many attachments),
 * KVPOOL_DEVICE_LOST (its executor is being started), KVPOOL_VERSION_MISMATCH, KVPOOL_DEADLINE_EXCEEDED,
 * KVPOOL_NO_MEMORY (this process has no descriptor left: RLIMIT_NOFILE). */
KVPOOL_API kvpool_status kvpool_attach(const kvpool_attach_options *options, kvpool_attachment **out,
                                       kvpool_error *error);
/* Steps not done are dropped or run to their end, nothing is told of them any more. Never blocks. NULL is allowed.
 * Steps, buffers and maps of it that are left over stay valid handles, to be given back in any order. */
KVPOOL_API void kvpool_detach(kvpool_attachment *attachment);

typedef struct kvpool_attachment_info {
  uint64_t attachment_id;
  uint64_t generation;      /* of the device's executor: one more for each successor */
  uint64_t epoch;           /* what its steps carry */
  uint64_t deadline_ns_max; /* of a step's waits */
  uint32_t steps_in_flight;
  bool mps;           /* the device's contexts are clients of an MPS server */
  bool device_memory; /* pools and buffers are memory of a GPU: addresses are device addresses */
  char device[64];
  char uuid[64]; /* of a GPU; "" of a host */
} kvpool_attachment_info;

KVPOOL_API void kvpool_attachment_info_get(const kvpool_attachment *attachment, kvpool_attachment_info *out);
/* KVPOOL_OK: it serves. KVPOOL_DEVICE_LOST: its executor died, and a successor will serve it again, with the same
 * memory. Anything else: it has ended, and why; kvpool_detach is all that is left to do. */
KVPOOL_API kvpool_status kvpool_attachment_state(kvpool_attachment *attachment, kvpool_error *error);
/* Blocks that the scheduler leased after the attachment was made have a later epoch: a worker that was told of them is
 * told kvpool_session_epoch as well, else its steps on them are refused (KVPOOL_STALE_BLOCK). Never goes down. */
KVPOOL_API void kvpool_attachment_saw_epoch(kvpool_attachment *attachment, uint64_t epoch);

/* ---- the pool's memory --------------------------------------------------------------------------------------------
 */

typedef enum kvpool_map_access {
  KVPOOL_MAP_READ = 0,       /* a write faults the writer */
  KVPOOL_MAP_READ_WRITE = 1, /* for kernels of the worker's own: nothing checks what they write */
  KVPOOL_MAP_NOTHING = 2     /* geometry alone: enough for steps */
} kvpool_map_access;

/* A region's memory. Byte b of token t's data in block k of layer l is at
 * base + l * layer_stride_bytes + k * block_stride_bytes + t * token_stride_bytes + b, its scales at
 * base + l * layer_stride_bytes + k * block_stride_bytes + scales_offset_bytes + t * scale_stride_bytes. */
typedef struct kvpool_mapped_region {
  void *base;            /* NULL of KVPOOL_MAP_NOTHING */
  uint64_t memory_bytes; /* at base; at least num_layers * layer_stride_bytes */
  uint32_t num_layers;
  uint32_t num_blocks;
  uint32_t tokens_per_block;
  uint32_t bytes_per_token; /* data_bytes + scale_bytes */
  uint32_t data_bytes;
  uint32_t scale_bytes;
  uint64_t layer_stride_bytes;
  uint64_t block_stride_bytes;
  bool token_interleaved; /* scales behind each token's data; else behind the data of all tokens of the block */
  uint32_t token_stride_bytes;
  uint32_t scale_stride_bytes;
  uint64_t scales_offset_bytes;
} kvpool_mapped_region;

typedef struct kvpool_pool_map kvpool_pool_map;

/* All of the pool, whoever's blocks are in it. So a pool that has a namespace is mapped by workers of that namespace's
 * sessions alone, and one that has none where no other namespace than the session's ever got blocks of it or mapped it;
 * from then on no other one gets blocks, until the pool is deleted. KVPOOL_PERMISSION_DENIED (whose it is),
 * KVPOOL_UNKNOWN_POOL, KVPOOL_WRONG_DEVICE (not placed on the attachment's). A map stays valid while executors come and
 * go. Of a GPU: see the CUDA section. */
KVPOOL_API kvpool_status kvpool_attachment_map_pool(kvpool_attachment *attachment, const char *name,
                                                    kvpool_map_access access, kvpool_pool_map **out,
                                                    kvpool_error *error);
/* Unmaps. NULL is allowed. */
KVPOOL_API void kvpool_pool_map_destroy(kvpool_pool_map *map);
/* For kvpool_layer, and for what kvpool_pool_* tell; lives as long as the map. Counts of blocks are 0. */
KVPOOL_API const kvpool_pool *kvpool_pool_map_pool(const kvpool_pool_map *map);
KVPOOL_API const kvpool_mapped_region *kvpool_pool_map_region(const kvpool_pool_map *map, size_t index);

/* ---- buffers ------------------------------------------------------------------------------------------------------
 *
 * They are buffers of the session, for views and arrays of steps on either door. kvpool_buffer_release gives them back,
 * and unmaps; what was made or imported here goes with the attachment at the latest. kvpool_buffer_write and _read are
 * for those of kvpool_buffer_create.
 *
 * The release of one that was made or imported here waits for the steps that use it and were accepted before, also for
 * those that wait for a word: what their words depend on must not wait for the release. KVPOOL_DEADLINE_EXCEEDED: after
 * the attachment's timeout such a step is still there. The handle is gone all the same, and the release goes on: until
 * the last of these steps is done, the executor reads and writes the memory - memory of the program's own must stay -
 * and other calls that ask the daemon wait behind the release.
 *
 * KVPOOL_DEADLINE_EXCEEDED of a call that makes or imports one: there is no handle, and what the daemon makes of it
 * later is given back by the library, when it next looks at what the daemon says. KVPOOL_BUSY: 64 such are to come.
 * KVPOOL_NO_MEMORY, here and of maps: this process has no memory or no descriptor left; the attachment goes on. */

/* Memory of the attachment's device, made by the daemon, zero-filled, mapped here to be written. */
KVPOOL_API kvpool_status kvpool_attachment_create_buffer(kvpool_attachment *attachment, uint64_t bytes,
                                                         kvpool_buffer **out, kvpool_error *error);
/* One that the scheduler made (kvpool_buffer_create), by kvpool_buffer_id; releasing it here only unmaps it. */
KVPOOL_API kvpool_status kvpool_attachment_map_buffer(kvpool_attachment *attachment, uint64_t buffer_id,
                                                      kvpool_buffer **out, kvpool_error *error);
/* Host devices: [offset_bytes, offset_bytes + bytes) of a memfd of memfd_bytes, sealed with SHRINK, GROW and SEAL,
 * not with WRITE or FUTURE_WRITE, of ordinary pages, and open for reading and writing; offset_bytes: a multiple of 16.
 * The pages that hold it count as memory of the device (out_of_memory). fd stays the caller's. */
KVPOOL_API kvpool_status kvpool_attachment_import_memfd(kvpool_attachment *attachment, int fd, uint64_t memfd_bytes,
                                                        uint64_t offset_bytes, uint64_t bytes, kvpool_buffer **out,
                                                        kvpool_error *error);
/* A memfd as import takes it. name: for /proc/PID/maps. *fd is the caller's. */
KVPOOL_API kvpool_status kvpool_memfd_create(const char *name, uint64_t bytes, int *fd, kvpool_error *error);
/* Where it is mapped in this process: a device address of a GPU. NULL: it isn't. */
KVPOOL_API void *kvpool_buffer_data(const kvpool_buffer *buffer);

/* ---- arrays for other libraries -----------------------------------------------------------------------------------
 */

/* An array over mapped memory, as DLPack has it. */
typedef struct kvpool_array {
  void *data;             /* inside the region, or the buffer */
  int32_t ndim;           /* [0, 8] */
  const int64_t *shape;   /* [ndim] */
  const int64_t *strides; /* [ndim], in elements, not negative */
  uint8_t type_code;      /* DLDataTypeCode: 0 int, 1 unsigned int, 2 float, 4 bfloat, ... */
  uint8_t type_bits;      /* a multiple of 8 */
} kvpool_array;

/* *managed: a DLManagedTensor, or with is_versioned a DLManagedTensorVersioned of DLPack 1.0, which says so when the
 * memory is mapped read-only. Its `deleter` gives it back; the memory stays mapped until then, also when the map was
 * destroyed or the buffer released (which still ends its use in steps). Any thread may call the deleter.
 * KVPOOL_OUT_OF_RANGE: it is not inside the memory. */
KVPOOL_API kvpool_status kvpool_pool_map_export(kvpool_pool_map *map, const kvpool_array *array, bool is_versioned,
                                                void **managed, kvpool_error *error);
KVPOOL_API kvpool_status kvpool_buffer_export(kvpool_buffer *buffer, const kvpool_array *array, bool is_versioned,
                                              void **managed, kvpool_error *error);
/* The same memory's DLDevice: 1, 0 of a host; 2 and the ordinal of a GPU. */
KVPOOL_API void kvpool_attachment_dl_device(const kvpool_attachment *attachment, int32_t *type, int32_t *ordinal);

/* ---- steps --------------------------------------------------------------------------------------------------------
 */

/* A step for this attachment; kvpool_step_run and kvpool_queue_submit refuse it. A step of kvpool_step_new can be posted
 * too. */
KVPOOL_API kvpool_status kvpool_attachment_step_new(kvpool_attachment *attachment, kvpool_step **out,
                                                    kvpool_error *error);
/* About the op added last. It begins when `word` (below) has reached the post's base + value; the ops behind it wait with
 * it. A step that waits or signals can be posted only. */
KVPOOL_API kvpool_status kvpool_step_set_wait(kvpool_step *step, uint32_t word, uint64_t value, kvpool_error *error);
/* About the op added last. When it and all before it are done, `word`, one of the executor's, becomes base + value. Of
 * a step that is refused, fails, or is dropped, signals not given are poisoned when their turn would have come. One
 * word's values must not go down. */
KVPOOL_API kvpool_status kvpool_step_set_signal(kvpool_step *step, uint32_t word, uint64_t value,
                                                kvpool_error *error);

typedef struct kvpool_post_options {
  size_t size_bytes;    /* sizeof(kvpool_post_options) */
  uint64_t base;        /* added to the values of the step's waits and signals */
  uint32_t deadline_ms; /* of its waits, from its acceptance on; 0, or more than the daemon's: the daemon's */
  bool want_accepted;   /* also tell when it was accepted */
} kvpool_post_options;

/* Asynchronous; steps run in the order in which they were posted. options NULL: the defaults. The step may be changed at
 * once. KVPOOL_BUSY: the ring is full, or 1024 steps are not done. KVPOOL_DEVICE_LOST: until a successor serves.
 * KVPOOL_INVALID_ARGUMENT: a step of another attachment.
 * KVPOOL_TOO_LARGE: more than 4 MiB, use buffer arrays. KVPOOL_WRONG_DEVICE: kvpool_step_set_placement named another,
 * or a buffer is on another. */
KVPOOL_API kvpool_status kvpool_attachment_post(kvpool_attachment *attachment, const kvpool_step *step,
                                                const kvpool_post_options *options, uint64_t *step_id,
                                                kvpool_error *error);
/* The next completion, or NULL when none is there. Never waits. *out is valid until the next call with this attachment.
 * A step's last word comes exactly once: that of a step in flight when its executor dies is KVPOOL_DEVICE_LOST, and what
 * it was writing may be torn. Once the attachment has ended and all was told, returns why it ended. A successor's
 * ring is taken into use in here, in kvpool_attachment_post and in kvpool_attachment_state. */
KVPOOL_API kvpool_status kvpool_attachment_poll(kvpool_attachment *attachment, const kvpool_completion **out,
                                                kvpool_error *error);
/* The same, waiting for one: spins for a moment, then sleeps. KVPOOL_DEADLINE_EXCEEDED after timeout_ms. */
KVPOOL_API kvpool_status kvpool_attachment_wait(kvpool_attachment *attachment, uint32_t timeout_ms,
                                                const kvpool_completion **out, kvpool_error *error);
/* Blocking: posts, and waits for this step's last word at most the attachment's timeout and its deadline; other steps'
 * completions are kept for kvpool_attachment_poll. As kvpool_step_run otherwise. */
KVPOOL_API kvpool_status kvpool_attachment_run(kvpool_attachment *attachment, const kvpool_step *step,
                                               const kvpool_post_options *options, kvpool_op_report *reports,
                                               size_t report_count_max, kvpool_error *error);

/* For event loops: a descriptor, the attachment's own, that becomes readable when there may be a completion - after
 * kvpool_attachment_arm said true, and until kvpool_attachment_poll was called. -1: none can be made. */
KVPOOL_API int kvpool_attachment_fd(kvpool_attachment *attachment);
/* Before a sleep on the descriptor. False: something is there already, poll instead. */
KVPOOL_API bool kvpool_attachment_arm(kvpool_attachment *attachment);

/* ---- timelines ----------------------------------------------------------------------------------------------------
 *
 * Words in memory that worker and executor share, which count up. A word has one writer: 512 are the worker's, which
 * its steps wait for; 512 are the executor's, which its steps signal. Values are in (0, 2^62). A word that is poisoned -
 * because what should have counted it up has failed - ends every wait for it with an error, and stays so.
 *
 * An executor's successor has new words: they start at 0, what was given out stays given out, and threads that wait for
 * the old ones, the worker's or the executor's, see them poisoned (KVPOOL_DEVICE_LOST), as soon as any call has taken
 * the loss. Until the successor serves, words take no value. */

typedef enum kvpool_timeline_writer {
  KVPOOL_TIMELINE_WORKER = 0,  /* written by kvpool_timeline_signal */
  KVPOOL_TIMELINE_EXECUTOR = 1 /* written by kvpool_step_set_signal */
} kvpool_timeline_writer;

/* A word that nobody uses. *value: what stands in it, from where its user goes on counting; NULL: not wanted.
 * KVPOOL_QUOTA_EXCEEDED: all are in use, or poisoned. KVPOOL_DEVICE_LOST: until a successor serves.
 * KVPOOL_DISCONNECTED: the attachment has ended. */
KVPOOL_API kvpool_status kvpool_timeline_new(kvpool_attachment *attachment, kvpool_timeline_writer writer,
                                             uint32_t *word, uint64_t *value, kvpool_error *error);
/* A number that no word has is nobody's: nothing happens. */
KVPOOL_API void kvpool_timeline_free(kvpool_attachment *attachment, uint32_t word);
/* A release store: whoever sees the value sees what was written before. A word of the worker's, a value not below the
 * word's. One thread at a time a word. KVPOOL_DEVICE_LOST: until a successor serves. */
KVPOOL_API kvpool_status kvpool_timeline_signal(kvpool_attachment *attachment, uint32_t word, uint64_t value,
                                                kvpool_error *error);
/* Of the worker's: steps that wait for it fail. */
KVPOOL_API kvpool_status kvpool_timeline_poison(kvpool_attachment *attachment, uint32_t word, kvpool_error *error);
/* An acquire load. Poisoned: KVPOOL_DEVICE_LOST when its executor has died, KVPOOL_DISCONNECTED when the attachment has
 * ended, else KVPOOL_CANCELLED. */
KVPOOL_API kvpool_status kvpool_timeline_read(kvpool_attachment *attachment, uint32_t word, uint64_t *value,
                                              kvpool_error *error);
/* Until the word is at least value: spins for a moment, then looks every 50 us, later every ms. As
 * kvpool_timeline_read; KVPOOL_DEADLINE_EXCEEDED after timeout_ms; KVPOOL_DISCONNECTED when the daemon is gone. */
KVPOOL_API kvpool_status kvpool_timeline_wait(kvpool_attachment *attachment, uint32_t word, uint64_t value,
                                              uint32_t timeout_ms, kvpool_error *error);

/* ---- CUDA ---------------------------------------------------------------------------------------------------------
 *
 * Of an attachment whose device is a GPU. NVIDIA's driver is loaded when it is first needed; nothing is linked. Maps of
 * pools and buffers are addresses of the GPU, for any context of it in this process; its primary context is held as long
 * as something is mapped, and made where the process has none. KVPOOL_UNIMPLEMENTED: there is no driver here, or it is too
 * old. KVPOOL_WRONG_DEVICE: CUDA_VISIBLE_DEVICES hides the GPU. */

/* Memory of this process's own as buffers. It stays the program's, and its address is kvpool_buffer_data.
 *
 *   What      Memory of cudaMalloc or cuMemAlloc (PyTorch's tensors are pieces of it), by its IPC handle, which the
 *             daemon takes of its own user, root and ipc_uids; and virtual memory of cuMemCreate that was made to be
 *             exported as a POSIX descriptor. No other memory has a handle: that of cudaMallocAsync and memory pools,
 *             expandable segments made without one, managed memory.
 *   Bounds    Each buffer is a part of one allocation. The driver says where that ends, the executor checks it: an IPC
 *             handle maps the whole allocation, whatever part of it is wanted; virtual memory is mapped as large as it is
 *             said to be, which the driver refuses where there is less. Buffers may overlap; of one allocation there may
 *             be any number, which share one mapping.
 *   Order     Steps see what the program has written when they begin: let the stream signal a word, or wait for it.
 *   Life      The memory must not be freed before the buffer is released: kvpool_buffer_release returns when the executor
 *             has let go of it. When this process dies, the GPU's memory is free again once its steps have ended.
 *   Restart   An executor's successor opens the memory again, contents and buffer ids as they were. Memory that it can't
 *             open is lost by itself: steps with that buffer are refused (KVPOOL_UNKNOWN_BUFFER, "is lost"), the daemon's
 *             log says why, and all that is left to do is to release it.
 *
 * Refused: KVPOOL_UNIMPLEMENTED (it has no handle: use kvpool_attachment_create_buffer), KVPOOL_OUT_OF_RANGE (it isn't
 * inside one allocation), KVPOOL_WRONG_DEVICE (another GPU's), KVPOOL_PERMISSION_DENIED (the daemon takes no IPC handle of
 * this user), KVPOOL_INVALID_ARGUMENT (no memory of a GPU; or the daemon's driver knows no such memory). */

/* [address, address + bytes) of an allocation, by whichever handle it has. address: a multiple of 16 behind the
 * allocation's begin. */
KVPOOL_API kvpool_status kvpool_attachment_import_device(kvpool_attachment *attachment, void *address, uint64_t bytes,
                                                         kvpool_buffer **out, kvpool_error *error);
/* The same of virtual memory that the program has exported itself: fd of cuMemExportToShareableHandle, which stays the
 * caller's; allocation_bytes: as cuMemCreate was told, a multiple of the device's granularity. address: where the buffer
 * begins here, for kvpool_buffer_data; NULL: nowhere. */
KVPOOL_API kvpool_status kvpool_attachment_import_vmm(kvpool_attachment *attachment, int fd,
                                                      uint64_t allocation_bytes, uint64_t offset_bytes,
                                                      uint64_t bytes, void *address, kvpool_buffer **out,
                                                      kvpool_error *error);

/* A word as the GPU sees it, for kernels and memory operations of the program's own: 64 bits, written by release stores
 * of system scope. It is that of the executor that serves now; a successor has other words, and the old ones stay
 * poisoned. */
KVPOOL_API kvpool_status kvpool_timeline_device_address(kvpool_attachment *attachment, uint32_t word,
                                                        uint64_t *address, kvpool_error *error);
/* When what the stream (a CUstream; NULL: the current context's default one) had to do before is done, the word, one of
 * the worker's, becomes value. Nothing checks that values of a word go up. */
KVPOOL_API kvpool_status kvpool_timeline_stream_signal(kvpool_attachment *attachment, uint32_t word, uint64_t value,
                                                       void *stream, kvpool_error *error);
/* The stream goes on when the word is at least value, or poisoned: look with kvpool_timeline_read behind it. */
KVPOOL_API kvpool_status kvpool_timeline_stream_wait(kvpool_attachment *attachment, uint32_t word, uint64_t value,
                                                     void *stream, kvpool_error *error);

/* ---- captured CUDA graphs -----------------------------------------------------------------------------------------
 *
 * A decode step of a model is a CUDA graph that is captured once and launched again and again; a replay is what the
 * daemon does during one launch of it. In the graph stand points, numbered from 1 on: the graph signals point k when what
 * op k needs is there, and waits for point k where it needs what op k has done. Each launch takes one post of a step whose
 * ops begin and end at these points; the step may be another one each time, with other slots.
 *
 *   capture:     kvpool_replay_begin(replay, stream)
 *                for each layer: ... kvpool_replay_signal(replay, stream, k) ... kvpool_replay_wait(replay, stream, k) ...
 *                kvpool_replay_end(replay, stream, last_point)
 *   each time:   kvpool_replay_post(replay, step), launch the graph; in either order, and without waiting in between
 *                - cheapest posted ahead, while the launch before still runs: slots of the next token are known then
 *
 * Under MPS the executor serves a whole replay with one launch, which waits for each point on the GPU. Time-sliced, a
 * kernel that waits would hold up what it waits for: the graph waits by memory-operation nodes, and the executor launches
 * op by op. What the library calls on a stream is the same; it works outside a capture, too.
 *
 * One replay serves any number of graphs that are launched one after another on a device.
 *
 * All waits are bounded under MPS, by the deadline; memory-operation nodes wait as long as the executor lives, or until
 * kvpool_replay_abort. On a host device there are no streams: begin, signal, wait and end act at once, in the caller. */

typedef struct kvpool_replay kvpool_replay;

typedef enum kvpool_replay_mode {
  KVPOOL_REPLAY_AUTOMATIC = 0,
  KVPOOL_REPLAY_ONE_LAUNCH = 1, /* words in the device's memory; under MPS, and on a host */
  KVPOOL_REPLAY_BY_OP = 2       /* words in the timelines; a launch an op */
} kvpool_replay_mode;

typedef struct kvpool_replay_options {
  size_t size_bytes;       /* sizeof(kvpool_replay_options) */
  kvpool_replay_mode mode; /* for tests and benchmarks */
  uint32_t
      deadline_ms; /* of each wait of the graph's, and of a step's waits together; 0, or more than the daemon's: its */
} kvpool_replay_options;

/* points: how many a graph has. Blocking, as kvpool_attachment_create_buffer; of a GPU: the context in which the graph
 * is captured is current, and no capture is under way. options NULL: the defaults. KVPOOL_UNIMPLEMENTED: the library was
 * built without nvcc, the driver is too old, or ONE_LAUNCH without MPS. */
KVPOOL_API kvpool_status kvpool_replay_new(kvpool_attachment *attachment, uint32_t points,
                                           const kvpool_replay_options *options, kvpool_replay **out,
                                           kvpool_error *error);
/* No graph with its points is launched any more, and none runs. NULL is allowed. ONE_LAUNCH has a buffer, whose release
 * (see there) waits for the replay's steps that are not done, at most the attachment's timeout, and goes on behind it;
 * nothing tells of that. Of steps for which no graph is launched call kvpool_replay_abort before. */
KVPOOL_API void kvpool_replay_destroy(kvpool_replay *replay);
KVPOOL_API kvpool_replay_mode kvpool_replay_mode_get(const kvpool_replay *replay);

/* About the op added last, a fused_store: it begins when the graph has signalled point `begins` (0: behind the op before),
 * and with it and all before it done, point `ends` is reached (0: it isn't told). One of them at least. From op to op
 * `ends` go up and `begins` don't go down. */
KVPOOL_API kvpool_status kvpool_step_set_replay_points(kvpool_step *step, uint32_t begins, uint32_t ends,
                                                       kvpool_error *error);
/* As kvpool_attachment_post. A step all of whose ops have points. Its last op ends at one; its first op begins at one,
 * in every mode: a launch that begins sets back the word in which BY_OP an op that waited for nothing has ended already.
 *
 * A replay is over when one of its steps was refused or has failed, and the library was told so (kvpool_attachment_poll,
 * _wait, _run): waits of its graphs end, steps that were posted behind that one are cancelled where an abort would end
 * them, and every later post is refused as kvpool_replay_check says. There is no second try with the same replay. A step
 * that is refused with KVPOOL_STALE_BLOCK has blocks that were leased after the attachment was made: tell it by
 * kvpool_attachment_saw_epoch before the post. */
KVPOOL_API kvpool_status kvpool_replay_post(kvpool_replay *replay, const kvpool_step *step, uint64_t *step_id,
                                            kvpool_error *error);

/* stream: a CUstream or cudaStream_t. Once a launch each, first and last: begin counts the launch, end waits for the
 * step's last point. */
KVPOOL_API kvpool_status kvpool_replay_begin(kvpool_replay *replay, void *stream, kvpool_error *error);
KVPOOL_API kvpool_status kvpool_replay_end(kvpool_replay *replay, void *stream, uint32_t last_point,
                                           kvpool_error *error);
KVPOOL_API kvpool_status kvpool_replay_signal(kvpool_replay *replay, void *stream, uint32_t point,
                                              kvpool_error *error);
KVPOOL_API kvpool_status kvpool_replay_wait(kvpool_replay *replay, void *stream, uint32_t point, kvpool_error *error);
/* Both, by one kernel where that is possible. */
KVPOOL_API kvpool_status kvpool_replay_signal_and_wait(kvpool_replay *replay, void *stream, uint32_t point,
                                                       kvpool_error *error);

/* KVPOOL_OK, or why the replay is over: KVPOOL_CANCELLED (a step of it was refused or has failed, with that step's text
 * once its completion was taken; or it was aborted), KVPOOL_DEADLINE_EXCEEDED (a wait of a graph's ended without its
 * point), KVPOOL_DEVICE_LOST (the executor died that it was made with), KVPOOL_DISCONNECTED (the attachment has ended).
 * What the graph has computed since is worth nothing; the replay stays so: destroy it, make another one, and capture
 * anew. No CUDA call. Any thread. */
KVPOOL_API kvpool_status kvpool_replay_check(kvpool_replay *replay, kvpool_error *error);
/* Waits of graphs that run, or will be launched, end at once, and so do the steps that were posted, with
 * KVPOOL_CANCELLED - but ONE_LAUNCH on a GPU, where no CUDA call is made: there a step for which nobody launches a graph
 * ends at its deadline. Any thread. */
KVPOOL_API void kvpool_replay_abort(kvpool_replay *replay);

#ifdef __cplusplus
}
#endif

#endif
