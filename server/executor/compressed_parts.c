/* Parts that are kept, and what makes an end of them. */
#include "server/executor/compressed_parts.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "server/executor/slot_set.h"
#include "server/executor/step_writes.h"

enum {
  parts_max = 2048,
  parts_of_an_owner_max = 64,
  segments_bytes_of_an_owner_max = 8 << 20,
  segments_bytes_max = 256 << 20,
  looks_max = 4 << 20, /* of one step; what comes behind them is taken for a write */
};

struct kvp_kept_part {
  struct kvp_kept_part *next;
  struct kvp_compressed_part part; /* its segments are ours */
  uint32_t owner;
  uint32_t queue;
  const struct kvp_step *step;     /* that assembles it; NULL: it has finished */
  enum kvp_compressed_state state; /* THERE, or what became of it */
};

static uint64_t segments_bytes(const struct kvp_compressed_part *part) {
  return part->segment_count * sizeof *part->segments;
}

/* Takes *link out of the list. */
static void part_remove(struct kvp_compressed_parts *parts, struct kvp_kept_part **link) {
  struct kvp_kept_part *kept = *link;
  *link = kept->next;
  parts->count--;
  parts->segments_bytes -= segments_bytes(&kept->part);
  free(kept);
}

void kvp_compressed_parts_deinit(struct kvp_compressed_parts *parts) {
  while (parts->newest != NULL) {
    part_remove(parts, &parts->newest);
  }
}

/* ---- writes ---- */

static uint32_t block_of(const struct kvp_device_writes *writes, uint64_t i) {
  switch (writes->kind) {
  case KVP_WRITES_SLOTS:
    return (uint32_t)writes->entries[i] / writes->tokens_per_block;
  case KVP_WRITES_PAIRS:
    return (uint32_t)writes->entries[2 * i + 1];
  default:
    return (uint32_t)writes->entries[i];
  }
}

/* Is a block that the part was made of among those that are written? Entries were checked, those of both. */
static bool blocks_meet(const struct kvp_compressed_part *part, const struct kvp_device_writes *writes) {
  struct kvp_slot_set blocks = {0};
  bool meet = false;
  if (!kvp_slot_set_begin(&blocks, part->segment_count)) {
    return true;
  }
  for (uint64_t i = 0; i < part->segment_count; i++) {
    if (part->segments[i].src_block >= 0) {
      (void)kvp_slot_set_add(&blocks, part->segments[i].src_block);
    }
  }
  uint32_t last = UINT32_MAX; /* neighbours are looked up once */
  for (uint64_t i = 0; i < writes->entry_count && !meet; i++) {
    const bool is_none = writes->kind == KVP_WRITES_SLOTS && writes->entries[i] < 0;
    const uint32_t block = is_none ? last : block_of(writes, i);
    if (block != last) {
      meet = kvp_slot_set_has(&blocks, (int32_t)block);
      last = block;
    }
  }
  kvp_slot_set_deinit(&blocks);
  return meet;
}

/* What the op makes of the part: THERE, if it leaves it alone. */
static enum kvp_compressed_state writes_touch(struct kvp_compressed_parts *parts,
                                              const struct kvp_device_writes *writes,
                                              const struct kvp_compressed_part *part) {
  for (uint32_t i = 0; i < writes->area_count; i++) {
    if (kvp_row_areas_overlap(&writes->areas[i], &part->rows)) {
      return KVP_COMPRESSED_ROWS_WRITTEN;
    }
  }
  if (writes->kind == KVP_WRITES_NOTHING || part->layer.base < writes->begin || part->layer.base >= writes->end) {
    return KVP_COMPRESSED_THERE;
  }
  parts->looks += writes->entry_count + part->segment_count;
  if (writes->entries == NULL || part->segments == NULL || parts->looks > looks_max || blocks_meet(part, writes)) {
    return KVP_COMPRESSED_BLOCKS_WRITTEN;
  }
  return KVP_COMPRESSED_THERE;
}

static enum kvp_compressed_state op_touches(struct kvp_compressed_parts *parts, const struct kvp_step_op *op,
                                            const struct kvp_compressed_part *part) {
  for (const struct kvp_device_op *it = op->first; it != NULL; it = kvp_step_op_next(op, it)) {
    struct kvp_device_writes writes;
    kvp_device_op_writes(it, &writes);
    const enum kvp_compressed_state state = writes_touch(parts, &writes, part);
    if (state != KVP_COMPRESSED_THERE) {
      return state;
    }
  }
  return KVP_COMPRESSED_THERE;
}

/* ---- looking ---- */

/* Is what was assembled what is wanted? */
static enum kvp_compressed_state parts_compare(const struct kvp_compressed_part *found,
                                               const struct kvp_compressed_part *wanted) {
  if (found->rows.base != wanted->rows.base || found->rows.rows != wanted->rows.rows ||
      found->rows.stride_bytes != wanted->rows.stride_bytes || found->rows.row_bytes != wanted->rows.row_bytes) {
    return KVP_COMPRESSED_OTHER_ROWS;
  }
  if (found->pool != wanted->pool || found->layer.base != wanted->layer.base) {
    return KVP_COMPRESSED_OTHER_LAYER;
  }
  if (found->segments == NULL || found->segment_count != wanted->segment_count ||
      memcmp(found->segments, wanted->segments, segments_bytes(wanted)) != 0) {
    return KVP_COMPRESSED_OTHER_SEGMENTS;
  }
  return KVP_COMPRESSED_THERE;
}

static enum kvp_compressed_state kept_look(const struct kvp_compressed_parts *parts, const struct kvp_step *step,
                                           const struct kvp_compressed_part *part) {
  enum kvp_compressed_state found = KVP_COMPRESSED_UNKNOWN;
  for (const struct kvp_kept_part *kept = parts->newest; kept != NULL; kept = kept->next) {
    if (!kvp_row_areas_overlap(&kept->part.rows, &part->rows)) {
      continue;
    }
    enum kvp_compressed_state state = parts_compare(&kept->part, part);
    if (state == KVP_COMPRESSED_THERE) {
      state = kept->state;
      return state == KVP_COMPRESSED_THERE && kept->step != NULL && kept->queue != step->queue
                 ? KVP_COMPRESSED_IN_FLIGHT
                 : state;
    }
    if (found == KVP_COMPRESSED_UNKNOWN) {
      found = state;
    }
  }
  return found;
}

enum kvp_compressed_state kvp_compressed_parts_look(struct kvp_compressed_parts *parts, const struct kvp_step *step,
                                                    uint32_t op, const struct kvp_compressed_part *part) {
  for (uint32_t i = op; i > 0; i--) {
    const struct kvp_step_op *before = &step->ops[i - 1];
    if (before->assembled != NULL && kvp_row_areas_overlap(&before->assembled->rows, &part->rows)) {
      return parts_compare(before->assembled, part); /* it writes its part last */
    }
    const enum kvp_compressed_state state = op_touches(parts, before, part);
    if (state != KVP_COMPRESSED_THERE) {
      return state;
    }
  }
  return kept_look(parts, step, part);
}

/* ---- keeping ---- */

/* Whatever overlaps is overwritten. */
static void overlapped_remove(struct kvp_compressed_parts *parts, const struct kvp_row_area *rows) {
  for (struct kvp_kept_part **link = &parts->newest; *link != NULL;) {
    if (kvp_row_areas_overlap(&(*link)->part.rows, rows)) {
      part_remove(parts, link);
    } else {
      link = &(*link)->next;
    }
  }
}

static void oldest_remove(struct kvp_compressed_parts *parts) {
  struct kvp_kept_part **link = &parts->newest;
  assert(*link != NULL);
  while ((*link)->next != NULL) {
    link = &(*link)->next;
  }
  part_remove(parts, link);
}

/* Nobody's many parts push out those of others: an owner's own oldest ones go first. */
static void room_make(struct kvp_compressed_parts *parts, uint32_t owner, uint64_t bytes) {
  uint64_t owner_bytes = bytes;
  uint32_t owner_count = 1;
  for (struct kvp_kept_part **link = &parts->newest; *link != NULL;) {
    const struct kvp_kept_part *kept = *link;
    if (kept->owner == owner) {
      owner_bytes += segments_bytes(&kept->part);
      owner_count++;
    }
    if (kept->owner == owner &&
        (owner_bytes > segments_bytes_of_an_owner_max || owner_count > parts_of_an_owner_max)) {
      part_remove(parts, link);
    } else {
      link = &(*link)->next;
    }
  }
  while (parts->count >= parts_max || parts->segments_bytes + bytes > segments_bytes_max) {
    oldest_remove(parts);
  }
}

/* A part that there is no memory for is not kept. */
static void part_keep(struct kvp_compressed_parts *parts, const struct kvp_step *step, uint32_t owner,
                      const struct kvp_compressed_part *part) {
  const uint64_t bytes = segments_bytes(part);
  overlapped_remove(parts, &part->rows);
  if (part->segments == NULL) {
    return;
  }
  room_make(parts, owner, bytes);
  struct kvp_kept_part *kept = malloc(sizeof *kept + bytes);
  if (kept == NULL) {
    return;
  }
  *kept = (struct kvp_kept_part){.next = parts->newest,
                                 .part = *part,
                                 .owner = owner,
                                 .queue = step->queue,
                                 .step = step,
                                 .state = KVP_COMPRESSED_THERE};
  struct kvp_segment *segments = (struct kvp_segment *)(void *)(kept + 1);
  memcpy(segments, part->segments, bytes);
  kept->part.segments = segments;
  parts->newest = kept;
  parts->count++;
  parts->segments_bytes += bytes;
}

static void device_op_accept(struct kvp_compressed_parts *parts, const struct kvp_device_op *op) {
  struct kvp_device_writes writes;
  kvp_device_op_writes(op, &writes);
  for (struct kvp_kept_part *kept = parts->newest; kept != NULL; kept = kept->next) {
    if (kept->state == KVP_COMPRESSED_THERE) {
      kept->state = writes_touch(parts, &writes, &kept->part);
    }
  }
}

void kvp_compressed_parts_accept(struct kvp_compressed_parts *parts, const struct kvp_step *step) {
  if (parts->count == 0 && !step->assembles) {
    return;
  }
  const uint32_t owner = ((const struct kvp_wire_step *)(const void *)step->wire)->owner;
  parts->looks = 0;
  for (uint32_t i = 0; i < step->op_count; i++) {
    const struct kvp_step_op *op = &step->ops[i];
    for (const struct kvp_device_op *it = op->first; it != NULL; it = kvp_step_op_next(op, it)) {
      device_op_accept(parts, it);
    }
    if (op->assembled != NULL) {
      part_keep(parts, step, owner, op->assembled);
    }
  }
}

void kvp_compressed_parts_finish(struct kvp_compressed_parts *parts, const struct kvp_step *step) {
  for (struct kvp_kept_part **link = &parts->newest; step->assembles && *link != NULL;) {
    struct kvp_kept_part *kept = *link;
    if (kept->step == step && step->error.status != KVP_OK) {
      part_remove(parts, link);
      continue;
    }
    kept->step = kept->step == step ? NULL : kept->step;
    link = &kept->next;
  }
}

/* ---- forgetting ---- */

void kvp_compressed_parts_forget_pool(struct kvp_compressed_parts *parts, const struct kvp_pool *pool) {
  for (struct kvp_kept_part **link = &parts->newest; *link != NULL;) {
    if ((*link)->part.pool == pool) {
      part_remove(parts, link);
    } else {
      link = &(*link)->next;
    }
  }
}

void kvp_compressed_parts_forget_buffer(struct kvp_compressed_parts *parts, const struct kvp_buffer *buffer) {
  const struct kvp_row_area bytes = {buffer->base, 1, buffer->bytes, buffer->bytes};
  overlapped_remove(parts, &bytes);
}
