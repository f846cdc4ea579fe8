/* Hierarchical bitmap. A bit of level n + 1 is set exactly when its word of level n is not zero. */
#include "server/supervisor/block_bitmap.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { word_bits = 64 };

bool kvp_block_bitmap_init(struct kvp_block_bitmap *bitmap, uint32_t block_count) {
  assert(block_count > 0);
  memset(bitmap, 0, sizeof *bitmap);
  bitmap->block_count = block_count;
  size_t bits = block_count;
  do {
    size_t words = (bits + word_bits - 1) / word_bits;
    assert(bitmap->level_count < kvp_block_bitmap_levels_max);
    uint64_t *level = calloc(words, sizeof *level);
    if (level == NULL) {
      kvp_block_bitmap_deinit(bitmap);
      return false;
    }
    bitmap->levels[bitmap->level_count++] = level;
    bits = words;
  } while (bits > 1);
  return true;
}

void kvp_block_bitmap_deinit(struct kvp_block_bitmap *bitmap) {
  for (uint32_t n = 0; n < bitmap->level_count; n++) {
    free(bitmap->levels[n]);
  }
  memset(bitmap, 0, sizeof *bitmap);
}

bool kvp_block_bitmap_has(const struct kvp_block_bitmap *bitmap, uint32_t block) {
  assert(block < bitmap->block_count);
  return bitmap->levels[0][block / word_bits] >> block % word_bits & 1;
}

void kvp_block_bitmap_add(struct kvp_block_bitmap *bitmap, uint32_t block) {
  assert(block < bitmap->block_count);
  for (uint32_t n = 0; n < bitmap->level_count; n++) {
    uint64_t *word = &bitmap->levels[n][block / word_bits];
    uint64_t before = *word;
    *word |= UINT64_C(1) << block % word_bits;
    if (before != 0) {
      return;
    }
    block /= word_bits;
  }
}

void kvp_block_bitmap_remove(struct kvp_block_bitmap *bitmap, uint32_t block) {
  assert(block < bitmap->block_count);
  for (uint32_t n = 0; n < bitmap->level_count; n++) {
    uint64_t *word = &bitmap->levels[n][block / word_bits];
    *word &= ~(UINT64_C(1) << block % word_bits);
    if (*word != 0) {
      return;
    }
    block /= word_bits;
  }
}

/* The least set bit of a level from `from` on, within from's word only. */
static bool next_in_word(const uint64_t *level, size_t from, size_t *out) {
  uint64_t rest = level[from / word_bits] >> from % word_bits;
  if (rest == 0) {
    return false;
  }
  *out = from + (size_t)__builtin_ctzll(rest);
  return true;
}

uint32_t kvp_block_bitmap_next(const struct kvp_block_bitmap *bitmap, uint32_t from) {
  assert(from <= bitmap->block_count);
  size_t at = from;
  size_t bits = bitmap->block_count;
  uint32_t n = 0;
  /* Up until a word has something at or behind `at`, ... */
  for (;;) {
    if (at < bits && next_in_word(bitmap->levels[n], at, &at)) {
      break;
    }
    if (at >= bits || ++n == bitmap->level_count) {
      return KVP_BLOCK_NONE;
    }
    at = at / word_bits + 1;
    bits = (bits + word_bits - 1) / word_bits;
  }
  /* ... and down again, where the first bit of each word is the one. */
  while (n > 0) {
    n--;
    at *= word_bits;
    bool found = next_in_word(bitmap->levels[n], at, &at);
    assert(found);
    (void)found;
  }
  return (uint32_t)at;
}
