/* What assembles have last written to their compressed parts, so that the layers that share one needn't write it again.
 *
 * A part is remembered from when its step was accepted, until its rows or one of its blocks are written by any other op
 * of the daemon (whatever a client writes to its own buffer nobody sees), its buffer or pool goes, or older parts make
 * room for newer ones. Conservative: what is forgotten is assembled again. Serving thread.
 */
#ifndef KVPOOL_EXECUTOR_COMPRESSED_PARTS_H
#define KVPOOL_EXECUTOR_COMPRESSED_PARTS_H

#include <stdint.h>

#include "server/executor/row_area.h"
#include "server/executor/step.h"

struct kvp_compressed_part {
  const struct kvp_pool *pool;
  struct kvp_layer layer;             /* the source layer */
  struct kvp_row_area rows;           /* [K, row_bytes] */
  const struct kvp_segment *segments; /* as they came; NULL: they lay in a buffer, nobody knows what they were */
  uint64_t segment_count;
};

struct kvp_kept_part;

/* Zeroed: empty. */
struct kvp_compressed_parts {
  struct kvp_kept_part *newest; /* older ones behind it */
  uint32_t count;
  uint64_t segments_bytes;
  uint64_t looks; /* at slots, for the step at hand */
};

enum kvp_compressed_state {
  KVP_COMPRESSED_THERE,
  KVP_COMPRESSED_UNKNOWN,
  KVP_COMPRESSED_OTHER_ROWS,
  KVP_COMPRESSED_OTHER_LAYER,
  KVP_COMPRESSED_OTHER_SEGMENTS,
  KVP_COMPRESSED_ROWS_WRITTEN,
  KVP_COMPRESSED_BLOCKS_WRITTEN,
  KVP_COMPRESSED_IN_FLIGHT,
};

void kvp_compressed_parts_deinit(struct kvp_compressed_parts *parts);

/* Is the part there when op `op` of the step runs, whose ops before it were checked? */
enum kvp_compressed_state kvp_compressed_parts_look(struct kvp_compressed_parts *parts, const struct kvp_step *step,
                                                    uint32_t op, const struct kvp_compressed_part *part);

/* The step will run: what it writes is forgotten, what it assembles remembered. */
void kvp_compressed_parts_accept(struct kvp_compressed_parts *parts, const struct kvp_step *step);
/* It has run: steps of other queues may rely on what it assembled. One that failed may not have: that is forgotten. */
void kvp_compressed_parts_finish(struct kvp_compressed_parts *parts, const struct kvp_step *step);

void kvp_compressed_parts_forget_pool(struct kvp_compressed_parts *parts, const struct kvp_pool *pool);
void kvp_compressed_parts_forget_buffer(struct kvp_compressed_parts *parts, const struct kvp_buffer *buffer);

#endif
