/* A device as the executor sees it: memory, queues, ops. One vtable a backend.
 *
 * Memory functions are slow and belong to the control thread; queues and launches belong to the serving thread.
 * Both may run at once. A launch never waits: a step runs behind those launched on its queue before, steps of
 * different queues run side by side.
 */
#ifndef KVPOOL_EXECUTOR_DEVICE_H
#define KVPOOL_EXECUTOR_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "proto/control_wire.h"
#include "proto/limits.h"
#include "proto/status.h"
#include "proto/timeline_wire.h"
#include "server/executor/timeline.h"

enum kvp_device_op_kind {
  KVP_DEVICE_STORE,
  KVP_DEVICE_LOAD,
  KVP_DEVICE_WRITE, /* host bytes -> rows */
  KVP_DEVICE_READ,  /* rows -> host bytes */
  KVP_DEVICE_FILL,  /* one byte -> rows */
  KVP_DEVICE_COPY_ROWS,
  KVP_DEVICE_FUSED_STORE,
  KVP_DEVICE_CONVERT_INDEX,
  KVP_DEVICE_SWA_INDEX,
  KVP_DEVICE_EXPAND_INDEX,
  KVP_DEVICE_CAT_INDEX,
  KVP_DEVICE_COPY_BLOCKS, /* of one region; blocks.pairs was checked */
  KVP_DEVICE_ZERO_BLOCKS,
  KVP_DEVICE_REPLAY, /* the fused stores behind it, each when its word has been counted up: see may_wait */
  KVP_DEVICE_POINT,  /* a value -> a word of a worker's timelines, when everything before is done */
  KVP_DEVICE_SIGNAL, /* the same to a timeline of ours: the end of a chain, and only that */
};

struct kvp_transfer_params {
  struct kvp_rows rows;
  uint64_t row_count;
  uint64_t row_bytes;
  uint8_t *host; /* [row_count * row_bytes], packed; NULL for a fill */
  uint8_t fill;
};

struct kvp_signal_params {
  struct kvp_timeline *timeline; /* at the address where host_register put it */
  uint64_t value;
};

struct kvp_point_params {
  struct kvp_timeline_word *word; /* likewise */
  uint64_t value;
};

/* In a chain of its own: op_count fused stores follow, then the signal. */
struct kvp_replay_params {
  const struct kvp_replay_points *points; /* [op_count] */
  uint32_t op_count;
  uint64_t deadline_ns;             /* on the executor's clock */
  const struct kvp_timeline *abort; /* at the address where host_register put it: it ends when this reaches */
  uint64_t abort_value;
  struct kvp_replay_result result; /* filled by the device, like counts */
};

/* Arrays of an op, bit by bit. Rows of int32 that came as an array are one, too: [rows, stride / 4]. */
enum kvp_device_array {
  KVP_ARRAY_SLOTS = 1,
  KVP_ARRAY_GATHER = 2,
  KVP_ARRAY_SEGMENTS = 4,
  KVP_ARRAY_POSITIONS = 8,
  KVP_ARRAY_TABLES = 16, /* convert_index; */
  KVP_ARRAY_VALID = 32,
  KVP_ARRAY_TOPK = 64,
  KVP_ARRAY_OFFSET_LEN = 128,
  KVP_ARRAY_PIVOTS = 256,
  KVP_ARRAY_LEFT = 512, /* cat_index; */
  KVP_ARRAY_RIGHT = 1024,
  KVP_ARRAY_BLOCKS = 2048,
};

/* One launched op: the caller's, untouched by him until the signal of its step is seen and the step collected.
 * Arrays that came with the step, and host bytes of transfers, lie in its own memory; ops may share them. */
struct kvp_device_op {
  enum kvp_device_op_kind kind;
  uint32_t host_arrays; /* kvp_device_array: those that came with the step; all others are in device memory */
  /* It may run at once with the ops before it, back to the first one that doesn't join: none of them writes what another
   * one reads or writes. Of parts of one assemble: at most two loads, one copy and one store. */
  bool joins;
  union {
    struct kvp_store_params store;
    struct kvp_load_params load;
    struct kvp_transfer_params transfer;
    struct kvp_copy_rows_params copy_rows;
    struct kvp_fused_store_params fused_store;
    struct kvp_convert_index_params convert_index;
    struct kvp_swa_index_params swa_index;
    struct kvp_expand_index_params expand_index;
    struct kvp_cat_index_params cat_index;
    struct kvp_blocks_params blocks;
    struct kvp_replay_params replay;
    struct kvp_point_params point;
    struct kvp_signal_params signal;
  } params;
  struct kvp_op_counts counts; /* zeroed by the caller, filled by the device */
  uint64_t started_ns;
  uint64_t finished_ns;
  struct kvp_device_op *next; /* of the same step; that of its signal is the device's after the launch */
};

/* Memory of the device, mapped into one range of addresses with something unmapped on both sides. */
struct kvp_memory {
  uint8_t *base;
  uint64_t bytes;
};

struct kvp_device_options {
  uint32_t thread_count;       /* host: kernel threads; 0 = one per core */
  void (*wake)(void *context); /* a timeline was written; called from any thread, no lock held; see `polled` */
  void *wake_context;
};

struct kvp_device_description {
  uint64_t memory_bytes;
  uint64_t memory_free_bytes;        /* now */
  uint64_t memory_granularity_bytes; /* a memory takes a multiple of it; 1: as many bytes as were asked for */
  uint32_t ready_flags;              /* enum kvp_control_ready_flag */
  char uuid[kvp_name_bytes_max];     /* of a GPU: "GPU-..."; "" for the host */
  char driver[kvp_name_bytes_max];   /* likewise */
  char text[kvp_note_bytes_max];
};

struct kvp_device_backend;

/* What every backend's device begins with. */
struct kvp_device {
  const struct kvp_device_backend *backend;
  bool may_wait;       /* for words in its memory, while what counts them up runs beside it: it takes replays */
  atomic_bool closing; /* set to make a memory_create in progress give up */
};

struct kvp_device_queue;

struct kvp_device_backend {
  const char *prefix; /* of device names, colon included */
  bool polled;        /* nobody calls `wake`: who waits for a timeline looks at it from time to time */

  enum kvp_status (*open)(const char *name, const struct kvp_device_options *options, struct kvp_device **out,
                          struct kvp_error *error);
  /* For good: no op begins any more. Returns when none is running; what is left on queues is dropped. */
  void (*stop)(struct kvp_device *device);
  /* Stopped; queues and memories are gone. */
  void (*close)(struct kvp_device *device);
  void (*describe)(const struct kvp_device *device, struct kvp_device_description *out);
  /* First call of a thread that uses the device; NULL: nothing to do. */
  void (*thread_begin)(struct kvp_device *device);
  /* Does it still work? Anything but KVP_OK: it is lost, and with it the process. NULL: it always does. */
  enum kvp_status (*check)(struct kvp_device *device, struct kvp_error *error);

  /* Reserves and maps memory; fds[kvp_memory_chunk_count(bytes)] become the caller's. */
  enum kvp_status (*memory_create)(struct kvp_device *device, const char *name, uint64_t bytes, int *fds,
                                   struct kvp_memory **out, struct kvp_error *error);
  /* Maps memory made before; fds stay the caller's. The chunks' sizes were checked to add up to bytes. */
  enum kvp_status (*memory_import)(struct kvp_device *device, uint64_t bytes, const int *fds,
                                   const uint64_t *chunk_bytes, uint32_t chunk_count, struct kvp_memory **out,
                                   struct kvp_error *error);
  /* Maps [offset, offset + bytes) of an allocation that a worker brought. The extent was checked to lie in what the
   * worker says of it; whether there is as much is checked here. Nonsense is refused, and costs the device nothing. fd
   * stays the caller's; -1 for an IPC handle. NULL: no memory of others. */
  enum kvp_status (*memory_open)(struct kvp_device *device, const struct kvp_control_open *request, int fd,
                                 struct kvp_memory **out, struct kvp_error *error);
  void (*memory_destroy)(struct kvp_device *device, struct kvp_memory *memory);
  /* Lets ops use page-aligned host memory, timelines and owner tables, at the address *out. Any of the two threads.
   */
  enum kvp_status (*host_register)(struct kvp_device *device, void *host, uint64_t bytes, bool read_only, void **out,
                                   struct kvp_error *error);
  void (*host_unregister)(struct kvp_device *device, void *host);

  enum kvp_status (*queue_create)(struct kvp_device *device, struct kvp_device_queue **out, struct kvp_error *error);
  /* Nothing is left on it, or the device was stopped. */
  void (*queue_destroy)(struct kvp_device *device, struct kvp_device_queue *queue);
  /* A chain, a step or a leg of one: ops linked by `next`, the last one and only that a signal. False: there is no
   * room for it at the moment and nothing was launched; there will be when something that was launched has ended. */
  bool (*launch)(struct kvp_device_queue *queue, struct kvp_device_op *first);
  /* The chain's signal was seen: counts, times and bytes read are put where the ops say. Anything but KVP_OK: one of
   * its ops could not be launched; those before it have run, those behind it have not, and nothing was put anywhere.
   * NULL: never that, and they are there. */
  enum kvp_status (*collect)(struct kvp_device_queue *queue, struct kvp_device_op *first, struct kvp_error *error);
};

/* The one place that knows which backends this program has: "host:N, cuda:N". */
const char *kvp_device_kinds(void);
enum kvp_status kvp_device_open(const char *name, const struct kvp_device_options *options, struct kvp_device **out,
                                struct kvp_error *error);

extern const struct kvp_device_backend kvp_device_host;

/* How a memory is cut into chunks. */
uint32_t kvp_memory_chunk_count(uint64_t bytes);
uint64_t kvp_memory_chunk_bytes(uint64_t bytes, uint32_t chunk);

#endif
