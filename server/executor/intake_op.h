/* One op on its way through intake: what its checks share. */
#ifndef KVPOOL_EXECUTOR_INTAKE_OP_H
#define KVPOOL_EXECUTOR_INTAKE_OP_H

#include "server/executor/intake.h"

/* What an array was checked for already in this step: sixty layers don't check the same slots sixty times. */
struct kvp_intake_memo {
  struct kvp_intake_memo *next;
  const struct kvp_pool *pool;
  uint32_t op_kind;
  uint32_t tokens_per_block;
  const struct kvp_segment *segments; /* load: what the op gets */
  uint64_t segment_count;
  uint64_t dst_end;          /* load: behind the last row that any of them writes */
  uint64_t rows;             /* load: of all segments */
  uint64_t rows_zeroed;      /* load: of those without a block */
  uint64_t segment_rows_max; /* load: of one of `segments` */
  uint64_t rows_skipped;     /* store: slots that are -1 */
};

struct kvp_intake_op {
  struct kvp_intake *intake;
  struct kvp_step *step;
  const struct kvp_wire_step *header;
  const struct kvp_wire_array *arrays; /* [header->array_count] */
  struct kvp_intake_memo **memos;      /* [header->array_count], heads of lists */
  int32_t index;
  const char *name;
  const struct kvp_wire_op *wire;
  struct kvp_step_op *out; /* zeroed */
  struct kvp_error *error;
};

/* A view that was checked. */
struct kvp_intake_view {
  const char *name;
  uint8_t *base; /* NULL: absent */
  uint64_t rows;
  uint64_t row_bytes;
  uint64_t stride_bytes;
};

/* An array whose extent was checked, not its contents. */
struct kvp_intake_array {
  const char *name;
  uint32_t index;
  const void *data;
  uint64_t bytes;
  bool is_inline; /* in the step: the contents can be checked now */
};

/* The beginning of every error about an op: "op 3 store: " and what follows. */
#define KVP_INTAKE_REFUSE(op, status, array, position, value, format, ...)                                           \
  kvp_error_set_at((op)->error, (status), (op)->index, (array), (int64_t)(position), (int64_t)(value),               \
                   "op %d %s: " format, (op)->index, (op)->name, __VA_ARGS__)

/* ---- intake_access.c ---- */

/* Pool, region and layer of the op; the pool goes into op->out. */
enum kvp_status kvp_intake_layer(struct kvp_intake_op *op, struct kvp_layer *out);

enum { KVP_INTAKE_ANY_ALIGNMENT = 1, KVP_INTAKE_ROW_ALIGNMENT = 16, KVP_INTAKE_SCALE_ALIGNMENT = 4 };

/* row_bytes: what the format says, 0 = any. stride_alignment as above; bases of aligned views are multiples of 16. */
enum kvp_status kvp_intake_view_check(struct kvp_intake_op *op, const char *name, const struct kvp_wire_view *wire,
                                      uint64_t row_bytes, uint64_t stride_alignment, struct kvp_intake_view *out);
/* For a view this op, or this format, doesn't have. */
enum kvp_status kvp_intake_view_absent(struct kvp_intake_op *op, const char *name, const struct kvp_wire_view *wire);

/* `output` is written: it must not touch `other`, an output or an input. Absent views touch nothing. */
enum kvp_status kvp_intake_views_apart(struct kvp_intake_op *op, const struct kvp_intake_view *output,
                                       const struct kvp_intake_view *other);

/* The op's only array. element_bytes: its size is a multiple of that. */
enum kvp_status kvp_intake_array_check(struct kvp_intake_op *op, const char *name, uint64_t element_bytes,
                                       struct kvp_intake_array *out);
/* Likewise for an array that lies in a buffer and an output view. */
enum kvp_status kvp_intake_array_apart(struct kvp_intake_op *op, const struct kvp_intake_view *output,
                                       const struct kvp_intake_array *array);

/* Where a block is named, for errors: "slots[7] = 130", "segments[3].src_block = 8". */
struct kvp_intake_element {
  const char *array;
  const char *field; /* ".src_block", or "" */
  uint64_t index;    /* of the record that `field` belongs to */
  uint64_t position; /* in int32 elements of the array */
  int64_t value;
};

/* May the step's owner use this block? is_write: a sealed block is refused. */
enum kvp_status kvp_intake_block_check(struct kvp_intake_op *op, const struct kvp_intake_element *element,
                                       uint32_t block, bool is_write);

/* What a kernel needs to check an array that could not be checked here, and the report's flag; nothing if it could.
 */
struct kvp_owner_check kvp_intake_owner_check(struct kvp_intake_op *op, const struct kvp_intake_array *array);

/* NULL: the array was not checked like this before. */
struct kvp_intake_memo *kvp_intake_memo_find(const struct kvp_intake_op *op, uint32_t array,
                                             const struct kvp_layer *layer);
/* Before an array is checked: counts its elements against what one step may have checked. NULL with the error set:
 * too many of them, or no memory. */
struct kvp_intake_memo *kvp_intake_memo_add(struct kvp_intake_op *op, const struct kvp_intake_array *array,
                                            const struct kvp_layer *layer);

enum kvp_status kvp_intake_no_memory(struct kvp_intake_op *op);

/* ---- one file an op: fill op->out ---- */

enum kvp_status kvp_intake_store(struct kvp_intake_op *op);
enum kvp_status kvp_intake_load(struct kvp_intake_op *op);
enum kvp_status kvp_intake_transfer(struct kvp_intake_op *op); /* buffer write, read, fill; region read */

#endif
