/* Writes an encoded step: tables first, inline data behind them. Sizes are counted before, so that nothing can run
 * over. Any thread; the writer is the caller's. */
#ifndef KVPOOL_SUPERVISOR_STEP_WRITER_H
#define KVPOOL_SUPERVISOR_STEP_WRITER_H

#include <stdint.h>

#include "proto/step_wire.h"

struct kvp_step_writer {
  struct kvp_wire_step *step;
  struct kvp_wire_op *ops;       /* [op_count], zeroed but for their arrays: none */
  struct kvp_wire_array *arrays; /* [array_count] */
  uint32_t arrays_used;
  uint64_t inline_begin; /* of the next inline data, from the start of the step */
};

/* What inline data of so many bytes takes in a step. bytes <= 2^62. */
uint64_t kvp_step_inline_bytes(uint64_t bytes);

/* Memory of kvp_step_alloc with its header and empty tables. inline_bytes: the sum of kvp_step_inline_bytes. Refused:
 * too_large, over kvp_step_bytes_max; out_of_memory. */
enum kvp_status kvp_step_writer_init(struct kvp_step_writer *writer, uint32_t op_count, uint32_t array_count,
                                     uint64_t inline_bytes, struct kvp_error *error);
/* The next array. Returns its index. */
uint32_t kvp_step_writer_add_inline(struct kvp_step_writer *writer, const void *data, uint64_t bytes);
uint32_t kvp_step_writer_add_buffer(struct kvp_step_writer *writer, uint64_t buffer_id, uint64_t offset_bytes,
                                    uint64_t bytes);

#endif
