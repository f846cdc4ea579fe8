/* One op on its way through intake: what its checks share. */
#ifndef KVPOOL_EXECUTOR_INTAKE_OP_H
#define KVPOOL_EXECUTOR_INTAKE_OP_H

#include "server/executor/intake.h"
#include "server/executor/row_area.h"

struct kvp_hazard_layer;

/* Words in a buffer that the device waits for; count 0: the step's are those of timelines. */
struct kvp_intake_words {
  uint8_t *base;
  uint64_t count;
  struct kvp_replay_points *points; /* [op_count], of the device's */
};

struct kvp_intake_op {
  struct kvp_intake *intake;
  struct kvp_step *step;
  const struct kvp_wire_step *header;
  const struct kvp_wire_array *arrays; /* [header->array_count] */
  struct kvp_intake_memo **memos;      /* [header->array_count], heads of lists */
  struct kvp_hazard_layer *hazards;    /* ring layers that ops before stored to */
  int32_t index;
  const char *name;
  const struct kvp_wire_op *wire;
  struct kvp_step_op *out;       /* zeroed */
  struct kvp_intake_words words; /* of a replay */
  struct kvp_error *error;
};

/* A layer of a pool that the op may use. */
struct kvp_intake_place {
  struct kvp_pool *pool;
  const struct kvp_region *region;
  struct kvp_layer layer;
};

/* A view that was checked. */
struct kvp_intake_view {
  const char *name;
  uint64_t offset_bytes; /* for errors */
  struct kvp_row_area area;
};

/* An array whose extent was checked, not its contents. */
struct kvp_intake_array {
  const char *name;
  uint32_t index;   /* KVP_WIRE_NO_ARRAY: absent */
  const void *data; /* NULL: absent */
  uint64_t bytes;
  bool is_inline; /* in the step: the contents can be checked now */
};

/* The beginning of every error about an op: "op 3 store: " and what follows. */
#define KVP_INTAKE_REFUSE(op, status, array, position, value, format, ...)                                           \
  kvp_error_set_at((op)->error, (status), (op)->index, (array), (int64_t)(position), (int64_t)(value),               \
                   "op %d %s: " format, (op)->index, (op)->name, __VA_ARGS__)

static inline struct kvp_rows kvp_intake_rows(const struct kvp_intake_view *view) {
  return (struct kvp_rows){(uint8_t *)view->area.base, view->area.stride_bytes};
}

/* Which of a device op's arrays came with the step: `bit` if this one did. */
static inline uint32_t kvp_intake_host_bit(const struct kvp_intake_array *array, enum kvp_device_array bit) {
  return array->is_inline ? (uint32_t)bit : 0;
}

enum kvp_status kvp_intake_no_memory(struct kvp_intake_op *op);

/* One more op for the device, zeroed, behind those the op has. NULL with the error set: no memory, too many. */
struct kvp_device_op *kvp_intake_device_op(struct kvp_intake_op *op, enum kvp_device_op_kind kind);

/* ---- intake_access.c ---- */

/* The op holds the pool from here on. prefix: of names in errors, "" or "compressed.". */
enum kvp_status kvp_intake_pool(struct kvp_intake_op *op, const char *prefix, uint64_t pool_id,
                                struct kvp_pool **out);
enum kvp_status kvp_intake_place_find(struct kvp_intake_op *op, const char *prefix, uint64_t pool_id, uint32_t region,
                                      uint32_t layer, struct kvp_intake_place *out);
/* The op's own pool, region and layer. */
enum kvp_status kvp_intake_place(struct kvp_intake_op *op, struct kvp_intake_place *out);
/* The same, of a ring pool. */
enum kvp_status kvp_intake_ring(struct kvp_intake_op *op, struct kvp_intake_place *out);

enum { KVP_INTAKE_ANY_ALIGNMENT = 1, KVP_INTAKE_ROW_ALIGNMENT = 16, KVP_INTAKE_INT_ALIGNMENT = 4 };

/* row_bytes: what they must be, 0 = any. stride_alignment as above; bases of aligned views are multiples of 16. */
enum kvp_status kvp_intake_view_check(struct kvp_intake_op *op, const char *name, const struct kvp_wire_view *wire,
                                      uint64_t row_bytes, uint64_t stride_alignment, struct kvp_intake_view *out);
/* For a view this op, or this format, doesn't have. */
enum kvp_status kvp_intake_view_absent(struct kvp_intake_op *op, const char *name, const struct kvp_wire_view *wire);
/* Has the view, if it is there, so many rows? `what`: of which they are, for the error. */
enum kvp_status kvp_intake_rows_enough(struct kvp_intake_op *op, const char *what, uint64_t count,
                                       const struct kvp_intake_view *view);

/* `output` is written: it must not touch `other`, an output or an input. Absent views touch nothing. */
enum kvp_status kvp_intake_views_apart(struct kvp_intake_op *op, const struct kvp_intake_view *output,
                                       const struct kvp_intake_view *other);

/* The op's array of that number (of op->wire->arrays). element_bytes: its size is a multiple of that. */
enum kvp_status kvp_intake_array_check(struct kvp_intake_op *op, uint32_t number, const char *name,
                                       uint64_t element_bytes, struct kvp_intake_array *out);
/* The same; one that isn't there gives data NULL. */
enum kvp_status kvp_intake_array_optional(struct kvp_intake_op *op, uint32_t number, const char *name,
                                          uint64_t element_bytes, struct kvp_intake_array *out);
/* An array that lies in a buffer and an output view. Absent ones touch nothing. */
enum kvp_status kvp_intake_array_apart(struct kvp_intake_op *op, const struct kvp_intake_view *output,
                                       const struct kvp_intake_array *array);

/* ---- intake_owner.c ---- */

/* Where a block is named, for errors: "slots[7] = 130", "segments[3].src_block = 8". */
struct kvp_intake_element {
  const char *array;
  const char *field; /* ".src_block", or "" */
  uint64_t index;    /* of the record that `field` belongs to */
  uint64_t position; /* in int32 elements of the array */
  int64_t value;
};

/* May the step's owner use this block of the pool? is_write: a sealed block is refused. */
enum kvp_status kvp_intake_block_check(struct kvp_intake_op *op, const struct kvp_pool *pool,
                                       const struct kvp_intake_element *element, uint32_t block, bool is_write);

/* What a kernel needs to check an array that could not be checked here, and the report's flag; nothing if it could.
 */
struct kvp_owner_check kvp_intake_owner_check(struct kvp_intake_op *op, const struct kvp_pool *pool,
                                              const struct kvp_intake_array *array);

/* ---- intake_memo.c ---- */

enum kvp_intake_use {
  KVP_USE_SLOTS,
  KVP_USE_SEGMENTS,
  KVP_USE_GATHER,
  KVP_USE_POSITIONS,
  KVP_USE_PAIRS,
  KVP_USE_BLOCKS,
  KVP_USE_MARKS,
  KVP_USE_APART,
};

/* What an array was checked for already in this step: sixty layers don't check the same slots sixty times. */
struct kvp_intake_memo_key {
  enum kvp_intake_use use;
  uint32_t array;
  uint32_t other; /* gather, positions: the slots they were checked with; apart: the segments; or KVP_WIRE_NO_ARRAY */
  uint32_t tokens_per_block;   /* 0 where it doesn't matter */
  const struct kvp_pool *pool; /* NULL likewise */
};

struct kvp_intake_memo {
  struct kvp_intake_memo *next;
  struct kvp_intake_memo_key key;
  const struct kvp_segment *segments; /* what the device gets */
  uint64_t segment_count;
  uint64_t dst_end;          /* segments: behind the last row that any of them writes */
  uint64_t rows;             /* segments: of all of them */
  uint64_t rows_zeroed;      /* segments: of those without a block */
  uint64_t segment_rows_max; /* segments: of one of `segments` */
  uint64_t rows_skipped;     /* slots: that are -1 */
  bool apart;                /* apart: no slot is one that the segments read */
  int64_t least;             /* gather, positions: of those that count; above largest where none does */
  int64_t largest;
};

/* NULL: the array was not checked like this before. */
struct kvp_intake_memo *kvp_intake_memo_find(const struct kvp_intake_op *op, const struct kvp_intake_memo_key *key);
/* Before an array is checked: counts its elements against what one step may have checked. NULL with the error set:
 * too many of them, or no memory. */
struct kvp_intake_memo *kvp_intake_memo_add(struct kvp_intake_op *op, const struct kvp_intake_array *array,
                                            const struct kvp_intake_memo_key *key);
/* Counts elements that are looked at for this array. */
enum kvp_status kvp_intake_count_elements(struct kvp_intake_op *op, const char *array_name, uint64_t elements);

/* ---- intake_slots.c, intake_segments.c: contents of arrays, checked once in a step ---- */

/* Inline: in range, in blocks the owner may write, none twice. *rows_skipped: slots that are -1; 0 in a buffer. */
enum kvp_status kvp_intake_slots(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                 const struct kvp_intake_array *array, uint64_t *rows_skipped);
/* Optional, and only where a load gives BF16 rows. */
enum kvp_status kvp_intake_cast_back(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                     const struct kvp_wire_view *wire, struct kvp_intake_view *out);

/* Inline: in range, in blocks the owner may read, destinations inside [0, total_k) and apart. What a load needs but for
 * its output. */
enum kvp_status kvp_intake_segments(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                    const struct kvp_intake_array *array, uint64_t total_k,
                                    struct kvp_load_params *out);
enum kvp_status kvp_intake_load_add(struct kvp_intake_op *op, const struct kvp_intake_array *segments,
                                    const struct kvp_load_params *load);

/* ---- intake_hazard.c: a store before a load of the same slots, in rings ---- */

/* Before the op's own stores. */
enum kvp_status kvp_intake_hazard_load(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                       const struct kvp_intake_array *segments);
enum kvp_status kvp_intake_hazard_store(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                        const struct kvp_intake_array *slots, uint64_t rows_skipped);

/* Does no segment read a slot of the array, both being of that place's layer? What can't be looked at, or would take more
 * looks than a step has, counts as one that does. */
enum kvp_status kvp_intake_slots_apart(struct kvp_intake_op *op, const struct kvp_intake_place *place,
                                       const struct kvp_intake_array *slots, const struct kvp_intake_array *segments,
                                       bool *out);
/* ---- intake_points.c: waits and signals, behind all else of the op ---- */

enum kvp_status kvp_intake_points(struct kvp_intake_op *op);
/* A point that isn't there; `name` for errors. */
enum kvp_status kvp_intake_point_absent(struct kvp_intake_op *op, const char *name,
                                        const struct kvp_wire_point *wire);
/* What its word is to reach, or gets. */
enum kvp_status kvp_intake_point_value(struct kvp_intake_op *op, const char *name, const struct kvp_wire_point *wire,
                                       uint64_t *out);

/* ---- intake_replay.c: a step whose points are words in a buffer ---- */

/* Before its first op is checked, which holds the buffer. */
enum kvp_status kvp_intake_replay_begin(struct kvp_intake_op *op);
/* Before an op is checked: is it one that a replay may have? */
enum kvp_status kvp_intake_replay_kind(struct kvp_intake_op *op);
/* Its points, behind all else of the op. */
enum kvp_status kvp_intake_replay_points(struct kvp_intake_op *op);

/* ---- one file an op: what the device runs for it ---- */

enum kvp_status kvp_intake_store(struct kvp_intake_op *op);
enum kvp_status kvp_intake_load(struct kvp_intake_op *op);
enum kvp_status kvp_intake_assemble(struct kvp_intake_op *op);
enum kvp_status kvp_intake_fused_store(struct kvp_intake_op *op);
enum kvp_status kvp_intake_convert_kv_index(struct kvp_intake_op *op); /* intake_index.c, these four */
enum kvp_status kvp_intake_swa_index_decode(struct kvp_intake_op *op);
enum kvp_status kvp_intake_expand_swa_index(struct kvp_intake_op *op);
enum kvp_status kvp_intake_kv_index_cat(struct kvp_intake_op *op);
enum kvp_status kvp_intake_copy_blocks(struct kvp_intake_op *op); /* intake_blocks.c, these two */
enum kvp_status kvp_intake_zero_blocks(struct kvp_intake_op *op);
enum kvp_status kvp_intake_transfer(struct kvp_intake_op *op); /* buffer write, read, fill; region read */

#endif
