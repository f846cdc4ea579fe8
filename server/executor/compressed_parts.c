/* Parts that are kept, and what makes an end of them. */
#include "server/executor/compressed_parts.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/owner_entry.h"

enum {
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
  uint64_t epoch;                  /* of the step that assembled it */
  const struct kvp_step *step;     /* the same; NULL: it has finished */
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
  kvp_slot_set_deinit(&parts->blocks);
}

void kvp_compressed_parts_begin(struct kvp_compressed_parts *parts) {
  parts->looks = 0;
  parts->same_count = 0;
  parts->not_passed_on = NULL;
  parts->blocks_of.entries = NULL;
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

/* Blocks that are written, as a set: parts of many are compared with it. False: no memory. Entries were checked. */
static bool blocks_take(struct kvp_compressed_parts *parts, const struct kvp_device_writes *writes) {
  struct kvp_device_writes *held = &parts->blocks_of;
  if (held->entries == writes->entries && held->entry_count == writes->entry_count && held->kind == writes->kind &&
      held->tokens_per_block == writes->tokens_per_block) {
    return true;
  }
  parts->looks += writes->entry_count;
  held->entries = NULL;
  if (!kvp_slot_set_begin(&parts->blocks, writes->entry_count)) {
    return false;
  }
  uint32_t last = UINT32_MAX; /* neighbours are added once */
  for (uint64_t i = 0; i < writes->entry_count; i++) {
    if (writes->kind == KVP_WRITES_SLOTS && writes->entries[i] < 0) {
      continue;
    }
    const uint32_t block = block_of(writes, i);
    if (block != last) {
      (void)kvp_slot_set_add(&parts->blocks, (int32_t)block);
    }
    last = block;
  }
  *held = *writes;
  return true;
}

/* Is a block that the part was made of among those that are written? */
static bool blocks_meet(struct kvp_compressed_parts *parts, const struct kvp_device_writes *writes,
                        const struct kvp_compressed_part *part) {
  if (!blocks_take(parts, writes)) {
    return true;
  }
  parts->looks += part->segment_count;
  if (parts->looks > looks_max) {
    return true;
  }
  for (uint64_t i = 0; i < part->segment_count; i++) {
    const int32_t block = part->segments[i].src_block;
    if (block >= 0 && kvp_slot_set_has(&parts->blocks, block)) {
      return true;
    }
  }
  return false;
}

/* What becomes of the part: THERE, if the writes leave it alone. */
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
  const bool is_known = writes->entries != NULL && part->segments != NULL;
  return is_known && !blocks_meet(parts, writes, part) ? KVP_COMPRESSED_THERE : KVP_COMPRESSED_BLOCKS_WRITTEN;
}

static enum kvp_compressed_state op_touches(struct kvp_compressed_parts *parts, const struct kvp_step_op *op,
                                            const struct kvp_compressed_part *part) {
  for (const struct kvp_device_op *it = op->first; it != NULL; it = kvp_step_op_next(op, it)) {
    struct kvp_device_writes writes;
    kvp_device_op_writes(it, &writes);
    parts->looks++;
    const enum kvp_compressed_state state = writes_touch(parts, &writes, part);
    if (state != KVP_COMPRESSED_THERE) {
      return state;
    }
  }
  return KVP_COMPRESSED_THERE;
}

/* The op that assembles the part: its store runs behind the load. */
static enum kvp_compressed_state own_store_touches(struct kvp_compressed_parts *parts, const struct kvp_step_op *op,
                                                   const struct kvp_compressed_part *part) {
  struct kvp_device_writes writes;
  if (op->last->kind != KVP_DEVICE_STORE) {
    return KVP_COMPRESSED_THERE;
  }
  kvp_device_op_writes(op->last, &writes);
  return writes_touch(parts, &writes, part);
}

/* The ops of the step from `first` on. */
static enum kvp_compressed_state step_touches(struct kvp_compressed_parts *parts, const struct kvp_step *step,
                                              uint32_t first, const struct kvp_compressed_part *part) {
  enum kvp_compressed_state state = KVP_COMPRESSED_THERE;
  for (uint32_t i = first; i < step->op_count && state == KVP_COMPRESSED_THERE; i++) {
    state = parts->looks > looks_max ? KVP_COMPRESSED_BLOCKS_WRITTEN : op_touches(parts, &step->ops[i], part);
  }
  return state;
}

/* ---- steps that have not finished ---- */

/* May a step of the one write what a step of the other was given? Buffers have one owner. So has a block, and it
 * changes hands when all steps that were accepted before have ended: those of its first owner are seen by its epoch.
 * The daemon itself (0) writes everywhere. */
static bool owners_meet(uint32_t one, uint32_t other) {
  return one == other || one == 0 || other == 0;
}

static bool pending_list_writes(struct kvp_compressed_parts *parts, const struct kvp_step *pending,
                                const struct kvp_kept_part *kept) {
  for (; pending != NULL; pending = pending->next_pending) {
    parts->looks++;
    if (pending->queue != kept->queue && owners_meet(pending->owner, kept->owner) &&
        step_touches(parts, pending, 0, &kept->part) != KVP_COMPRESSED_THERE) {
      return true;
    }
  }
  return false;
}

/* Does a step of another queue, which may still run behind the one that assembles the part, write it? */
static bool pending_write(struct kvp_compressed_parts *parts, const struct kvp_kept_part *kept) {
  const uint32_t own = kept->owner % kvp_pending_lists;
  for (uint32_t i = 0; i < kvp_pending_lists; i++) {
    if ((kept->owner == 0 || i == 0 || i == own) && pending_list_writes(parts, parts->pending[i], kept)) {
      return true;
    }
  }
  return false;
}

static void pending_add(struct kvp_compressed_parts *parts, struct kvp_step *step) {
  struct kvp_step **list = &parts->pending[step->owner % kvp_pending_lists];
  step->next_pending = *list;
  step->pending_link = list;
  if (*list != NULL) {
    (*list)->pending_link = &step->next_pending;
  }
  *list = step;
}

static void pending_remove(struct kvp_step *step) {
  *step->pending_link = step->next_pending;
  if (step->next_pending != NULL) {
    step->next_pending->pending_link = step->pending_link;
  }
}

/* ---- looking ---- */

/* Segments that many layers share are compared once. */
static enum kvp_compressed_state segments_compare(struct kvp_compressed_parts *parts,
                                                  const struct kvp_compressed_part *found,
                                                  const struct kvp_compressed_part *wanted) {
  const bool is_known = parts->same_count == wanted->segment_count && parts->same[0] == found->segments &&
                        parts->same[1] == wanted->segments;
  if (is_known || found->segments == wanted->segments) {
    return KVP_COMPRESSED_THERE;
  }
  parts->looks += wanted->segment_count;
  if (parts->looks > looks_max) {
    return KVP_COMPRESSED_TOO_MUCH;
  }
  if (memcmp(found->segments, wanted->segments, segments_bytes(wanted)) != 0) {
    return KVP_COMPRESSED_OTHER_SEGMENTS;
  }
  parts->same[0] = found->segments;
  parts->same[1] = wanted->segments;
  parts->same_count = wanted->segment_count;
  return KVP_COMPRESSED_THERE;
}

/* Is what was assembled what is wanted? */
static enum kvp_compressed_state parts_compare(struct kvp_compressed_parts *parts,
                                               const struct kvp_compressed_part *found,
                                               const struct kvp_compressed_part *wanted) {
  if (found->rows.base != wanted->rows.base || found->rows.rows != wanted->rows.rows ||
      found->rows.stride_bytes != wanted->rows.stride_bytes || found->rows.row_bytes != wanted->rows.row_bytes) {
    return KVP_COMPRESSED_OTHER_ROWS;
  }
  if (found->pool != wanted->pool || found->layer.base != wanted->layer.base) {
    return KVP_COMPRESSED_OTHER_LAYER;
  }
  if (found->segments == NULL || found->segment_count != wanted->segment_count) {
    return KVP_COMPRESSED_OTHER_SEGMENTS;
  }
  return segments_compare(parts, found, wanted);
}

/* Does a block belong to somebody else by now, or to the same one anew? What others stored to it then nobody told. */
static bool blocks_passed_on(struct kvp_compressed_parts *parts, const struct kvp_kept_part *kept) {
  const struct kvp_compressed_part *part = &kept->part;
  if (parts->not_passed_on == kept) {
    return false;
  }
  parts->looks += part->segment_count;
  for (uint64_t i = 0; i < part->segment_count && kept->owner != 0; i++) {
    if (part->segments[i].src_block < 0) {
      continue;
    }
    const uint64_t entry =
        atomic_load_explicit(&part->pool->owner_entries[part->segments[i].src_block], memory_order_acquire);
    if (kvp_owner_entry_owner(entry) != kept->owner || kvp_owner_entry_epoch(entry) > kept->epoch) {
      return true;
    }
  }
  parts->not_passed_on = kept;
  return false;
}

/* What is remembered is what is wanted: is it still there? */
static enum kvp_compressed_state kept_check(struct kvp_compressed_parts *parts, const struct kvp_kept_part *kept,
                                            const struct kvp_step *step) {
  if (kept->state != KVP_COMPRESSED_THERE) {
    return kept->state;
  }
  if (kept->step != NULL && kept->queue != step->queue) {
    return KVP_COMPRESSED_IN_FLIGHT;
  }
  return blocks_passed_on(parts, kept) ? KVP_COMPRESSED_BLOCKS_PASSED_ON : KVP_COMPRESSED_THERE;
}

static enum kvp_compressed_state kept_look(struct kvp_compressed_parts *parts, const struct kvp_step *step,
                                           const struct kvp_compressed_part *part) {
  enum kvp_compressed_state found = KVP_COMPRESSED_UNKNOWN;
  for (const struct kvp_kept_part *kept = parts->newest; kept != NULL; kept = kept->next) {
    if (!kvp_row_areas_overlap(&kept->part.rows, &part->rows)) {
      continue;
    }
    const enum kvp_compressed_state state = parts_compare(parts, &kept->part, part);
    if (state == KVP_COMPRESSED_THERE) {
      return kept_check(parts, kept, step);
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
    if (parts->looks > looks_max) {
      return KVP_COMPRESSED_TOO_MUCH;
    }
    if (before->assembled != NULL && kvp_row_areas_overlap(&before->assembled->rows, &part->rows)) {
      const enum kvp_compressed_state found = parts_compare(parts, before->assembled, part);
      return found == KVP_COMPRESSED_THERE ? own_store_touches(parts, before, part) : found;
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
  while (parts->count >= kvp_kept_parts_max || parts->segments_bytes + bytes > segments_bytes_max) {
    oldest_remove(parts);
  }
}

/* The part that op `op` assembles. One that there is no memory for is not kept. */
static void part_keep(struct kvp_compressed_parts *parts, const struct kvp_step *step, uint32_t op) {
  const struct kvp_compressed_part *part = step->ops[op].assembled;
  const uint64_t bytes = segments_bytes(part);
  overlapped_remove(parts, &part->rows);
  if (part->segments == NULL) {
    return;
  }
  room_make(parts, step->owner, bytes);
  struct kvp_kept_part *kept = malloc(sizeof *kept + bytes);
  if (kept == NULL) {
    return;
  }
  *kept = (struct kvp_kept_part){
      .next = parts->newest,
      .part = *part,
      .owner = step->owner,
      .queue = step->queue,
      .epoch = ((const struct kvp_wire_step *)(const void *)step->wire)->epoch,
      .step = step,
  };
  struct kvp_segment *segments = (struct kvp_segment *)(void *)(kept + 1);
  memcpy(segments, part->segments, bytes);
  kept->part.segments = segments;
  kept->state = own_store_touches(parts, &step->ops[op], &kept->part);
  if (kept->state == KVP_COMPRESSED_THERE) {
    kept->state = step_touches(parts, step, op + 1, &kept->part);
  }
  if (kept->state == KVP_COMPRESSED_THERE && pending_write(parts, kept)) {
    kept->state = KVP_COMPRESSED_WRITER_IN_FLIGHT;
  }
  parts->newest = kept;
  parts->count++;
  parts->segments_bytes += bytes;
}

/* What becomes of the parts of so many kept ones. */
static void op_spoil(struct kvp_compressed_parts *parts, const struct kvp_step_op *op, uint32_t count) {
  for (const struct kvp_device_op *it = op->first; it != NULL; it = kvp_step_op_next(op, it)) {
    struct kvp_device_writes writes;
    kvp_device_op_writes(it, &writes);
    for (uint32_t i = 0; i < count; i++) {
      struct kvp_kept_part *kept = parts->met[i];
      if (kept->state == KVP_COMPRESSED_THERE) {
        kept->state = writes_touch(parts, &writes, &kept->part);
      }
    }
  }
}

void kvp_compressed_parts_accept(struct kvp_compressed_parts *parts, struct kvp_step *step) {
  uint32_t met_count = 0;
  kvp_compressed_parts_begin(parts);
  for (struct kvp_kept_part *kept = parts->newest; kept != NULL; kept = kept->next) {
    if (kept->state == KVP_COMPRESSED_THERE && owners_meet(kept->owner, step->owner)) {
      parts->met[met_count++] = kept;
    }
  }
  for (uint32_t i = 0; i < step->op_count && met_count > 0; i++) {
    op_spoil(parts, &step->ops[i], met_count);
  }
  for (uint32_t i = 0; i < step->op_count && step->assembles; i++) {
    if (step->ops[i].assembled != NULL) {
      part_keep(parts, step, i);
    }
  }
  pending_add(parts, step);
}

void kvp_compressed_parts_finish(struct kvp_compressed_parts *parts, struct kvp_step *step) {
  pending_remove(step);
  for (struct kvp_kept_part **link = &parts->newest; step->assembles && *link != NULL;) {
    struct kvp_kept_part *kept = *link;
    if (kept->step == step && step->is_failed) {
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
