/* A step as bytes: what a producer (supervisor, later a worker) writes into a ring and the executor copies out
 * and checks. Little-endian, fixed layout, no pointers. Both doors, gRPC and rings, end in this.
 *
 *   [struct kvp_wire_step][struct kvp_wire_op x op_count][struct kvp_wire_array x array_count][inline data]
 *
 * Inline data of arrays starts at any multiple of 8 behind the tables; its offset counts from the start of the
 * step. Nothing here is trusted: every number is checked by the executor's intake, on its own copy.
 */
#ifndef KVPOOL_PROTO_STEP_WIRE_H
#define KVPOOL_PROTO_STEP_WIRE_H

#include <stdint.h>

#include "proto/status.h"

#define KVP_WIRE_STEP_MAGIC UINT32_C(0x7073766b) /* "kvsp" */
#define KVP_WIRE_VERSION    UINT32_C(3)

#define KVP_WIRE_NO_ARRAY UINT32_C(0xFFFFFFFF)

/* Ops. Those from KVP_OP_BUFFER_WRITE on are the daemon's own: refused on rings that are not the supervisor's. */
enum kvp_op_kind {
  KVP_OP_STORE = 1,
  KVP_OP_LOAD = 2,
  KVP_OP_ASSEMBLE = 3,
  KVP_OP_FUSED_STORE = 4,
  KVP_OP_CONVERT_KV_INDEX = 5,
  KVP_OP_SWA_INDEX_DECODE = 6,
  KVP_OP_EXPAND_SWA_INDEX = 7,
  KVP_OP_KV_INDEX_CAT = 8,
  KVP_OP_COPY_BLOCKS = 9,
  KVP_OP_ZERO_BLOCKS = 10,
  KVP_OP_BUFFER_WRITE = 64, /* inline bytes (array 0, counted in bytes) -> view `source` */
  KVP_OP_BUFFER_READ = 65,  /* view `source` -> result bytes of the completion */
  KVP_OP_BUFFER_FILL = 66,  /* view `source` filled with the low byte of `argument` */
  KVP_OP_REGION_READ = 67,  /* `argument` = offset within the layer, `total_k` = bytes -> result bytes */
};

enum kvp_wire_view_flag { KVP_WIRE_VIEW_PRESENT = 1 };

/* rows of row_bytes each, one every row_stride_bytes, from offset_bytes of a buffer on. 48 bytes. */
struct kvp_wire_view {
  uint64_t buffer_id;
  uint64_t offset_bytes;
  uint64_t rows;
  uint64_t row_stride_bytes;
  uint32_t row_bytes;
  uint32_t flags; /* 0: the view is absent, all other fields are 0 */
  uint64_t reserved;
};

/* An int32 array (or, for KVP_OP_BUFFER_WRITE, bytes). 40 bytes. */
struct kvp_wire_array {
  uint64_t buffer_id; /* 0: inline */
  uint64_t offset_bytes;
  uint64_t bytes;
  uint64_t reserved[2];
};

/* What the fields of an op mean, by kind. Views of int32 have row_bytes = 4 * columns, strides that are multiples of 4.
 *
 *                    arrays                                source       second      third     fourth
 *   store            slots                                 rows         cast_back
 *   load             segments                              out          out_scales
 *   assemble         swa segments, gather, store_slots,    chunk rows   out
 *                    compressed segments
 *   fused_store      slots, positions                      rows         cast_back   weight    cos_sin
 *   convert_kv_index block_tables, valid, topk or none     topk         out
 *   swa_index_decode offset_len                                         out
 *   expand_swa_index pivots                                             out
 *   kv_index_cat     left or none, right or none           left         out         right
 *   copy_blocks      pairs [n, 2] = from, to
 *   zero_blocks      blocks
 *
 * assemble: region and layer are the ring's, second_region's the compressed cache's; total_k = S, argument = C,
 * numbers[0] = K; an array that is absent is KVP_WIRE_NO_ARRAY.
 * fused_store: argument = rope_offset, numbers[0] = the bits of eps; weight is one row, cos_sin float32
 * [positions, rotary_dims]; absent when there are no rotary dims.
 * convert_kv_index: argument = queries a sequence, numbers[0] = columns of the block tables; topk comes as a view or
 * as an array, out absent = in place (a view only).
 * kv_index_cat: argument = base, numbers = columns left, right; an empty side has neither view nor array.
 * swa_index_decode, expand_swa_index: argument = window, width. */
enum kvp_wire_op_flag {
  KVP_OP_ALLOW_STORE_BEFORE_LOAD = 1, /* load, assemble */
  KVP_OP_KEEP_COMPRESSED = 2,         /* assemble: part 3 is there already */
  KVP_OP_CHUNK_RESERVED = 4,          /* assemble: part 2 is filled by a later fused_store */
  KVP_OP_CHUNK_CAST_BACK = 8,         /* assemble: part 2 as the ring region's format gives it back */
  KVP_OP_NEOX = 16,                   /* fused_store */
  KVP_OP_HADAMARD = 32,
  KVP_OP_ROUND_TO_BF16 = 64,
  KVP_OP_WAITS = 128,   /* begins when the word of `wait` has reached its value; on a worker's ring only */
  KVP_OP_SIGNALS = 256, /* when it and all before it are done, `signal`'s word gets its value; likewise */
};

enum kvp_wire_point_flag {
  KVP_POINT_ABSOLUTE = 1, /* the step's base isn't added: for waits with constants, of memory-operation nodes */
};

/* A word of the ring's timelines (proto/timeline_wire.h) and a value, to which the step's `base` is added. */
struct kvp_wire_point {
  uint32_t word;  /* wait: any; signal: one of the executor's */
  uint32_t flags; /* enum kvp_wire_point_flag */
  uint64_t value;
};

/* 320 bytes. */
struct kvp_wire_op {
  uint32_t kind;
  uint32_t flags;
  uint64_t pool_id;
  uint32_t region;
  uint32_t layer;
  uint32_t arrays[4]; /* KVP_WIRE_NO_ARRAY: none */
  struct kvp_wire_view source;
  struct kvp_wire_view second;
  uint64_t total_k;
  uint64_t argument;
  struct kvp_wire_view third;
  struct kvp_wire_view fourth;
  uint64_t second_pool_id;
  uint32_t second_region;
  uint32_t second_layer;
  uint64_t numbers[3];
  struct kvp_wire_point wait;   /* 0 without KVP_OP_WAITS */
  struct kvp_wire_point signal; /* 0 without KVP_OP_SIGNALS */
};

enum kvp_wire_step_flag {
  KVP_STEP_NOT_ACCEPTED_TOLD = 1, /* no ACCEPTED completion: only DONE, REFUSED or FAILED; on a worker's ring only */
  /* Words of its points are not the timelines', but every 64 bytes of buffer `words_buffer_id`: the device itself waits
   * for them. Fused stores only, each of which waits or signals; on a worker's ring only, and only where kernels may wait
   * for others (KVP_READY_MPS of a GPU; any host). Signals never make a word smaller, so a poisoned one stays so. */
  KVP_STEP_DEVICE_WORDS = 2,
};

/* 64 bytes. */
struct kvp_wire_step {
  uint32_t magic;
  uint32_t version;
  uint32_t op_count;
  uint32_t array_count;
  uint32_t bytes; /* of the whole step */
  uint32_t queue; /* steps of one queue run in order */
  uint32_t owner; /* session slot, as in the owner table; 0 = the daemon itself (an operator): owns every block */
  uint32_t flags; /* enum kvp_wire_step_flag */
  uint64_t epoch; /* the latest the client has seen */
  uint64_t base;  /* added to the values of all points */
  uint64_t deadline_ns;     /* for its waits, from its acceptance on; 0, or more than the ring's: the ring's */
  uint64_t words_buffer_id; /* 0 without KVP_STEP_DEVICE_WORDS */
};

/* One op's report, 104 bytes. */
struct kvp_wire_report {
  uint64_t rows_stored;
  uint64_t rows_loaded;
  uint64_t rows_skipped;
  uint64_t rows_rejected;
  uint64_t rows_nonfinite;
  uint64_t groups_saturated;
  uint64_t bytes_read;
  uint64_t bytes_written;
  uint64_t queued_ns;
  uint64_t started_ns;
  uint64_t finished_ns;
  uint64_t flags;          /* enum kvp_wire_report_flag */
  uint64_t main_kv_offset; /* assemble: S + C */
};

enum kvp_wire_report_flag {
  KVP_REPORT_UNCHECKED_ARRAYS = 1, /* an array lay in a buffer and was checked while the op ran */
  KVP_REPORT_HAZARD_UNCHECKED = 2, /* for that reason nobody looked for a store before this load */
};

/* What a ring carries. Records towards the executor: */
enum kvp_command_kind {
  KVP_COMMAND_STEP = 1,        /* payload: a step; tag: the producer's */
  KVP_COMMAND_QUEUE_CLOSE = 2, /* tag: the queue; all its steps have been completed */
  KVP_COMMAND_FENCE = 3,       /* the supervisor's; payload: kvp_wire_fence */
};

/* FENCED when every step of this owner, of any ring, accepted by now has ended. */
struct kvp_wire_fence {
  uint32_t owner; /* session slot */
  uint32_t reserved;
};

/* Records from the executor; tag: that of the command. */
enum kvp_completion_kind {
  KVP_COMPLETION_ACCEPTED = 1, /* checked: it will run */
  KVP_COMPLETION_REFUSED = 2,  /* payload: struct kvp_error; nothing ran */
  KVP_COMPLETION_DONE = 3,     /* payload: reports[op_count], then result bytes of the op that has any */
  KVP_COMPLETION_FAILED = 4,   /* payload: struct kvp_error; it was accepted and did not finish */
  KVP_COMPLETION_FENCED = 5,
};

_Static_assert(sizeof(struct kvp_wire_view) == 48, "wire layout");
_Static_assert(sizeof(struct kvp_wire_array) == 40, "wire layout");
_Static_assert(sizeof(struct kvp_wire_op) == 320, "wire layout");
_Static_assert(sizeof(struct kvp_wire_step) == 64, "wire layout");
_Static_assert(sizeof(struct kvp_wire_report) == 104, "wire layout");
_Static_assert(sizeof(struct kvp_error) == 24 + kvp_error_array_bytes_max + kvp_error_text_bytes_max, "wire layout");

#endif
