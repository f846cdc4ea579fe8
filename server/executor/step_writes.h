/* What a device op writes: rows, records of a layer, blocks of a region. Any thread. */
#ifndef KVPOOL_EXECUTOR_STEP_WRITES_H
#define KVPOOL_EXECUTOR_STEP_WRITES_H

#include <stdbool.h>
#include <stdint.h>

#include "server/executor/device.h"
#include "server/executor/row_area.h"

enum { kvp_written_areas_max = 2 };

/* How the entries name blocks. */
enum kvp_written_kind {
  KVP_WRITES_NOTHING, /* to regions */
  KVP_WRITES_SLOTS,   /* tokens_per_block slots are a block; -1 is none */
  KVP_WRITES_PAIRS,   /* [from, to] */
  KVP_WRITES_BLOCKS,
};

struct kvp_device_writes {
  uint32_t area_count;
  struct kvp_row_area areas[kvp_written_areas_max];
  enum kvp_written_kind kind;
  const uint8_t *begin; /* the layer, or the whole region */
  const uint8_t *end;
  const int32_t *entries; /* NULL: nobody knows which blocks */
  uint64_t entry_count;
  uint32_t tokens_per_block;
};

void kvp_device_op_writes(const struct kvp_device_op *op, struct kvp_device_writes *out);

#endif
