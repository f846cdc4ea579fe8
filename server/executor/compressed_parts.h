/* What assembles have last written to their compressed parts, so that the layers that share one needn't write it
 * again.
 *
 * A part is remembered from when its step was accepted, until its rows or one of its blocks are written by any other
 * op of the daemon (whatever a client writes to its own buffer nobody sees), a block of it changes hands, its buffer
 * or pool goes, or older parts make room for newer ones. Steps of other queues run when they like: one that was
 * accepted before the part's and has not finished by then may write behind it, and what it may write is never relied
 * on. Conservative: what is forgotten is assembled again. Serving thread. / */
#ifndef KVPOOL_EXECUTOR_COMPRESSED_PARTS_H
#define KVPOOL_EXECUTOR_COMPRESSED_PARTS_H

#include <stdint.h>

#include "server/executor/row_area.h"
#include "server/executor/slot_set.h"
#include "server/executor/step.h"
#include "server/executor/step_writes.h"

struct kvp_compressed_part {
  const struct kvp_pool *pool;
  struct kvp_layer layer;             /* the source layer */
  struct kvp_row_area rows;           /* [K, row_bytes] */
  const struct kvp_segment *segments; /* as they came; NULL: they lay in a buffer, nobody knows what they were */
  uint64_t segment_count;
};

struct kvp_kept_part;

enum { kvp_kept_parts_max = 2048, kvp_pending_lists = 256 };

/* Zeroed: empty. */
struct kvp_compressed_parts {
  struct kvp_kept_part *newest; /* older ones behind it */
  uint32_t count;
  uint64_t segments_bytes;
  struct kvp_step *pending[kvp_pending_lists]; /* accepted and not finished, by owner % lists */

  /* For the step at hand: */
  uint64_t looks;                    /* at ops, slots and segments */
  const struct kvp_segment *same[2]; /* segments found to be equal last, so many: */
  uint64_t same_count;
  const struct kvp_kept_part *not_passed_on; /* its blocks, as was found last */
  struct kvp_slot_set blocks;                /* that these writes name: */
  struct kvp_device_writes blocks_of;
  struct kvp_kept_part *met[kvp_kept_parts_max]; /* that the step may write */
};

enum kvp_compressed_state {
  KVP_COMPRESSED_THERE,
  KVP_COMPRESSED_UNKNOWN,
  KVP_COMPRESSED_OTHER_ROWS,
  KVP_COMPRESSED_OTHER_LAYER,
  KVP_COMPRESSED_OTHER_SEGMENTS,
  KVP_COMPRESSED_ROWS_WRITTEN,
  KVP_COMPRESSED_BLOCKS_WRITTEN,
  KVP_COMPRESSED_BLOCKS_PASSED_ON,
  KVP_COMPRESSED_IN_FLIGHT,
  KVP_COMPRESSED_WRITER_IN_FLIGHT,
  KVP_COMPRESSED_TOO_MUCH,
};

/* Steps that were accepted and have not finished are left alone. */
void kvp_compressed_parts_deinit(struct kvp_compressed_parts *parts);

/* A step comes to be checked. */
void kvp_compressed_parts_begin(struct kvp_compressed_parts *parts);
/* Is the part there when op `op` of the step runs, whose ops before it were checked? */
enum kvp_compressed_state kvp_compressed_parts_look(struct kvp_compressed_parts *parts, const struct kvp_step *step,
                                                    uint32_t op, const struct kvp_compressed_part *part);

/* The step will run: what it writes is forgotten, what it assembles remembered. It is looked at until it finishes. */
void kvp_compressed_parts_accept(struct kvp_compressed_parts *parts, struct kvp_step *step);
/* It has run: steps of other queues may rely on what it assembled. One that failed may not have: that is forgotten. */
void kvp_compressed_parts_finish(struct kvp_compressed_parts *parts, struct kvp_step *step);

void kvp_compressed_parts_forget_pool(struct kvp_compressed_parts *parts, const struct kvp_pool *pool);
void kvp_compressed_parts_forget_buffer(struct kvp_compressed_parts *parts, const struct kvp_buffer *buffer);

#endif
