/* The map of a pool in characters. A cell is lettered by the session that holds most of it; what is less than half
 * held shows as ':', so that one busy block among a thousand free ones doesn't look like a full cell. */
#include "client/kvpoolctl/block_grid.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/text.h"

enum { group_cells = 10 };

static const char glyph_free = '.', glyph_few = ':', glyph_sealed = '#', glyph_quarantined = '!', glyph_gone = '?',
                  glyph_more = '+';

static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

struct cell {
  char glyph;
  size_t owner; /* whose colour; SIZE_MAX: the glyph's own */
};

/* Blocks of the cell being filled, by who has them. */
struct tally {
  uint64_t *by_owner; /* [owner_count + 1]; the last: sessions that are gone */
  size_t owner_count;
  uint64_t held, sealed, quarantined, all;
};

char kvp_ctl_block_letter(size_t owner) {
  if (owner < sizeof letters - 1) {
    return letters[owner];
  }
  return glyph_more;
}

/* owner: who holds most of the cell, if anybody of the list does. */
static char tally_glyph(const struct tally *tally, size_t owner) {
  if (tally->held == 0) {
    return glyph_free;
  }
  if (2 * tally->quarantined > tally->held) {
    return glyph_quarantined;
  }
  if (2 * tally->held < tally->all) {
    return glyph_few;
  }
  if (2 * tally->sealed > tally->held) {
    return glyph_sealed;
  }
  if (owner == SIZE_MAX) {
    return glyph_gone;
  }
  return kvp_ctl_block_letter(owner);
}

static struct cell tally_finish(struct tally *tally) {
  size_t most = 0;
  for (size_t i = 1; i <= tally->owner_count; i++) {
    most = tally->by_owner[i] > tally->by_owner[most] ? i : most;
  }
  struct cell cell = {.owner = tally->held > 0 && most < tally->owner_count ? most : SIZE_MAX};
  cell.glyph = tally_glyph(tally, cell.owner);
  memset(tally->by_owner, 0, (tally->owner_count + 1) * sizeof tally->by_owner[0]);
  tally->held = tally->sealed = tally->quarantined = tally->all = 0;
  return cell;
}

static void tally_add(struct tally *tally, const struct kvp_ctl_block_summary *summary, const kvpool_block_run *run,
                      uint32_t count) {
  tally->all += count;
  if (run->state == KVPOOL_BLOCK_FREE) {
    return;
  }
  tally->held += count;
  tally->sealed += run->state == KVPOOL_BLOCK_SEALED ? count : 0;
  tally->quarantined += run->state == KVPOOL_BLOCK_QUARANTINED ? count : 0;
  tally->by_owner[kvp_ctl_block_summary_owner(summary, run->session_id)] += count;
}

/* [cell_count]: the runs are consecutive, so one pass fills them in order. */
static void cells_fill(struct cell *cells, const kvpool_block_map *map, const struct kvp_ctl_block_summary *summary,
                       uint32_t first, uint32_t end, uint32_t per_cell) {
  struct tally tally = {.by_owner = kvp_ctl_allocate(summary->owner_count + 1, sizeof tally.by_owner[0]),
                        .owner_count = summary->owner_count};
  size_t cell = 0;
  for (size_t i = 0; i < kvpool_block_map_run_count(map); i++) {
    kvpool_block_run run;
    if (!kvp_ctl_block_run_clip(kvpool_block_map_run(map, i), first, end, &run)) {
      continue;
    }
    for (uint32_t left = run.count; left > 0;) {
      uint32_t room = per_cell - (uint32_t)tally.all;
      uint32_t count = left < room ? left : room;
      tally_add(&tally, summary, &run, count);
      left -= count;
      if (tally.all == per_cell) {
        cells[cell++] = tally_finish(&tally);
      }
    }
  }
  if (tally.all > 0) {
    cells[cell] = tally_finish(&tally);
  }
  free(tally.by_owner);
}

static const char *cell_color(const struct kvp_ctl *ctl, const struct cell *cell) {
  if (cell->glyph == glyph_free) {
    return kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_DIM);
  }
  if (cell->glyph == glyph_quarantined) {
    return kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_BAD);
  }
  return cell->owner == SIZE_MAX ? "" : kvp_ctl_terminal_owner(&ctl->terminal, cell->owner);
}

/* Colour sequences only where the colour changes: a map is read over slow lines too. */
static void row_print(const struct kvp_ctl *ctl, const struct cell *cells, size_t count) {
  const char *color = "";
  for (size_t i = 0; i < count; i++) {
    const char *wanted = cell_color(ctl, &cells[i]);
    kvp_ctl_print("%s", i % group_cells == 0 ? " " : "");
    if (strcmp(wanted, color) != 0) {
      kvp_ctl_print("%s%s", kvp_ctl_terminal_reset(&ctl->terminal), wanted);
      color = wanted;
    }
    kvp_ctl_print("%c", cells[i].glyph);
  }
  kvp_ctl_print("%s\n", color[0] != '\0' ? kvp_ctl_terminal_reset(&ctl->terminal) : "");
}

/* 1, 2, 5, 10, 20, ...: the first that makes them fit, so that the rows begin at round numbers. */
static uint32_t per_cell_choose(uint32_t blocks, uint64_t cells_max) {
  static const uint32_t steps[] = {1, 2, 5};
  for (uint64_t decade = 1;; decade *= 10) {
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
      if (cells_max * decade * steps[i] >= blocks) {
        return (uint32_t)(decade * steps[i]);
      }
    }
  }
}

static void key_print(const struct kvp_ctl *ctl, uint32_t per_cell) {
  const char *dim = kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_DIM);
  const char *reset = kvp_ctl_terminal_reset(&ctl->terminal);
  if (per_cell == 1) {
    kvp_ctl_print("%sone character a block: . free, a letter: leased by, # sealed, ! quarantined%s\n", dim, reset);
  } else {
    kvp_ctl_print("%sone character is %s blocks: . free, : under half held, a letter: mostly by,\n"
                  "# sealed, ! quarantined; look closer with --first-block N --count M%s\n",
                  dim, kvp_ctl_count(per_cell).text, reset);
  }
}

void kvp_ctl_block_grid_print(const struct kvp_ctl *ctl, const kvpool_block_map *map,
                              const struct kvp_ctl_block_summary *summary, uint32_t first, uint32_t end,
                              uint32_t rows_max) {
  int label_width = (int)strlen(kvp_ctl_count(end - 1).text);
  uint32_t groups = (ctl->terminal.width - (uint32_t)label_width - 1) / (group_cells + 1);
  groups -= groups > 4 ? groups % 2 : 0; /* rows then begin at rounder numbers */
  uint32_t row_cells = groups * group_cells;
  uint32_t blocks = end - first;
  uint32_t per_cell = per_cell_choose(blocks, (uint64_t)row_cells * rows_max);
  size_t cell_count = ((size_t)blocks + per_cell - 1) / per_cell;
  struct cell *cells = kvp_ctl_allocate(cell_count, sizeof cells[0]);
  cells_fill(cells, map, summary, first, end, per_cell);
  for (size_t begin = 0; begin < cell_count; begin += row_cells) {
    size_t count = cell_count - begin < row_cells ? cell_count - begin : row_cells;
    kvp_ctl_print("%s%*s%s", kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_DIM), label_width,
                  kvp_ctl_count(first + begin * per_cell).text, kvp_ctl_terminal_reset(&ctl->terminal));
    row_print(ctl, cells + begin, count);
  }
  free(cells);
  key_print(ctl, per_cell);
}
