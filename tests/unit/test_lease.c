/* The block allocator: single rules by hand, then random calls against a model that scans arrays. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/limits.h"
#include "server/supervisor/lease.h"

struct fixture {
  struct kvp_owner_table table;
  struct kvp_lease_table *leases;
};

/* Fences reached, by owner. */
static uint64_t of_each(const void *context, uint16_t owner) {
  const uint64_t *fences = context;
  return fences[owner];
}

static uint64_t of_all(const void *context, uint16_t owner) {
  (void)owner;
  return *(const uint64_t *)context;
}

static uint32_t reach(struct kvp_lease_table *leases, uint64_t fence) {
  return kvp_lease_reach(leases, of_all, &fence);
}

static void begin(struct fixture *fixture, uint32_t num_blocks) {
  struct kvp_error error;
  assert_int_equal(kvp_owner_table_init(&fixture->table, "test", num_blocks, &error), KVP_OK);
  assert_int_equal(kvp_lease_table_new(&fixture->table, &fixture->leases, &error), KVP_OK);
}

static void end(struct fixture *fixture) {
  kvp_lease_table_destroy(fixture->leases);
  kvp_owner_table_deinit(&fixture->table);
}

static uint64_t entry(uint64_t epoch, uint64_t state, uint64_t owner) {
  return epoch << 24 | state << 16 | owner;
}

static void test_allocates_all_in_order_then_none(void **state) {
  (void)state;
  struct fixture f;
  struct kvp_error error;
  int32_t blocks[130];
  begin(&f, 130);
  assert_int_equal(kvp_lease_allocate(f.leases, 7, 1, 65, blocks, &error), KVP_OK);
  assert_int_equal(kvp_lease_allocate(f.leases, 8, 2, 65, blocks + 65, &error), KVP_OK);
  for (int32_t i = 0; i < 130; i++) {
    assert_int_equal(blocks[i], i);
    assert_int_equal(kvp_owner_table_get(&f.table, (uint32_t)i), i < 65 ? entry(1, 1, 7) : entry(2, 1, 8));
  }
  assert_int_equal(kvp_lease_allocate(f.leases, 7, 3, 1, blocks, &error), KVP_OUT_OF_BLOCKS);
  assert_non_null(strstr(error.text, "1 blocks asked for, 0 of 130 are free (130 leased"));
  assert_int_equal(kvp_lease_owned_count(f.leases, 7), 65);
  assert_int_equal(kvp_lease_leased_count(f.leases), 130);
  end(&f);
}

/* On their way to a session: leased, but in its name only when they are passed on. */
static void test_blocks_of_nobody(void **state) {
  (void)state;
  struct fixture f;
  struct kvp_error error;
  int32_t blocks[10];
  begin(&f, 10);
  assert_int_equal(kvp_lease_allocate(f.leases, 1025, 1, 6, blocks, &error), KVP_OK);
  assert_int_equal(kvp_owner_table_get(&f.table, 5), entry(1, 1, 1025));
  assert_int_equal(kvp_lease_free(f.leases, 7, blocks, 6, 1, &error), KVP_NOT_OWNER);
  kvp_lease_pass_on(f.leases, 7, 4, blocks, 4);
  assert_int_equal(kvp_owner_table_get(&f.table, 0), entry(4, 1, 7));
  assert_int_equal(kvp_owner_table_get(&f.table, 3), entry(4, 1, 7));
  assert_int_equal(kvp_owner_table_get(&f.table, 4), entry(1, 1, 1025));
  assert_int_equal(kvp_lease_owned_count(f.leases, 7), 4);
  assert_int_equal(kvp_lease_owned_count(f.leases, 1025), 2);
  assert_int_equal(kvp_lease_leased_count(f.leases), 6);
  assert_int_equal(kvp_lease_free(f.leases, 1025, blocks + 4, 2, 9, &error), KVP_OK);
  assert_int_equal(reach(f.leases, 9), 2);
  assert_int_equal(kvp_lease_free_count(f.leases), 6);
  assert_int_equal(kvp_lease_free_all(f.leases, 7, 9), 4);
  end(&f);
}

static void test_a_range_names_the_first_block_in_use(void **state) {
  (void)state;
  struct fixture f;
  struct kvp_error error;
  begin(&f, 100);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 1, 1, 40, 10, &error), KVP_OK);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 2, 2, 30, 20, &error), KVP_IN_USE);
  assert_int_equal(error.value, 40);
  assert_int_equal(error.position, 10);
  assert_int_equal(kvp_lease_free_count(f.leases), 90);
  assert_int_equal(kvp_owner_table_get(&f.table, 39), 0);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 2, 2, 50, 50, &error), KVP_OK);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 2, 3, 100, 1, &error), KVP_OUT_OF_RANGE);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 2, 3, 99, 2, &error), KVP_OUT_OF_RANGE);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 2, 3, 5, UINT32_MAX, &error), KVP_OUT_OF_RANGE);
  end(&f);
}

static void test_a_refused_free_changes_nothing(void **state) {
  (void)state;
  struct fixture f;
  struct kvp_error error;
  begin(&f, 16);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 1, 1, 0, 8, &error), KVP_OK);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 2, 2, 8, 4, &error), KVP_OK);
  static const struct {
    int32_t blocks[3];
    enum kvp_status status;
    int64_t position;
  } cases[] = {
      {{0, 1, 16}, KVP_OUT_OF_RANGE, 2}, {{-1, 1, 2}, KVP_OUT_OF_RANGE, 0}, {{0, INT32_MIN, 2}, KVP_OUT_OF_RANGE, 1},
      {{0, 8, 2}, KVP_NOT_OWNER, 1},     {{0, 1, 12}, KVP_NOT_OWNER, 2},    {{3, 4, 3}, KVP_INVALID_ARGUMENT, 2},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    assert_int_equal(kvp_lease_free(f.leases, 1, cases[i].blocks, 3, 0, &error), cases[i].status);
    assert_int_equal(error.position, cases[i].position);
    assert_int_equal(error.value, cases[i].blocks[cases[i].position]);
    assert_string_equal(error.array, "blocks");
    assert_int_equal(error.op, -1);
    assert_int_equal(kvp_lease_owned_count(f.leases, 1), 8);
    assert_int_equal(kvp_lease_quarantined_count(f.leases), 0);
  }
  const int32_t good[] = {3, 4, 5}; /* what an earlier refusal looked at is as free to go as before */
  assert_int_equal(kvp_lease_free(f.leases, 1, good, 3, 0, &error), KVP_OK);
  end(&f);
}

static void test_quarantine_keeps_owner_and_epoch_until_the_fence(void **state) {
  (void)state;
  struct fixture f;
  struct kvp_error error;
  begin(&f, 4);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 9, 5, 0, 4, &error), KVP_OK);
  const int32_t first[] = {2};
  const int32_t second[] = {1, 3};
  assert_int_equal(kvp_lease_free(f.leases, 9, first, 1, 10, &error), KVP_OK);
  assert_int_equal(kvp_lease_free(f.leases, 9, second, 2, 11, &error), KVP_OK);
  assert_int_equal(kvp_owner_table_get(&f.table, 2), entry(5, 3, 9));
  assert_int_equal(kvp_lease_free(f.leases, 9, first, 1, 11, &error), KVP_NOT_OWNER);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 9, 6, 2, 1, &error), KVP_IN_USE);
  assert_int_equal(kvp_lease_quarantined_by(f.leases, 9), 3);
  assert_int_equal(reach(f.leases, 9), 0);
  assert_int_equal(reach(f.leases, 10), 1);
  assert_int_equal(kvp_owner_table_get(&f.table, 2), 0);
  assert_int_equal(kvp_owner_table_get(&f.table, 1), entry(5, 3, 9));
  assert_int_equal(reach(f.leases, 100), 2);
  assert_int_equal(kvp_lease_quarantined_by(f.leases, 9), 0);
  assert_int_equal(kvp_lease_free_count(f.leases), 3);
  assert_int_equal(kvp_lease_owned_count(f.leases, 9), 1);
  end(&f);
}

/* What holds one owner's blocks holds nobody else's. */
static void test_quarantines_are_the_owners_own(void **state) {
  (void)state;
  struct fixture f;
  struct kvp_error error;
  uint64_t fences[kvp_lease_owner_nobody + 1] = {[7] = 0, [9] = 0};
  begin(&f, 6);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 7, 1, 0, 3, &error), KVP_OK);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 9, 2, 3, 3, &error), KVP_OK);
  const int32_t of_seven[] = {2, 0}, of_nine[] = {3, 5}, later[] = {4};
  assert_int_equal(kvp_lease_free(f.leases, 7, of_seven, 2, 10, &error), KVP_OK);
  assert_int_equal(kvp_lease_free(f.leases, 9, of_nine, 2, 11, &error), KVP_OK);
  assert_int_equal(kvp_lease_free(f.leases, 9, later, 1, 12, &error), KVP_OK);
  fences[9] = 11;
  assert_int_equal(kvp_lease_reach(f.leases, of_each, fences), 2);
  assert_int_equal(kvp_owner_table_get(&f.table, 3) | kvp_owner_table_get(&f.table, 5), 0);
  assert_int_equal(kvp_owner_table_get(&f.table, 4), entry(2, 3, 9));
  assert_int_equal(kvp_owner_table_get(&f.table, 0), entry(1, 3, 7));
  assert_int_equal(kvp_owner_table_get(&f.table, 2), entry(1, 3, 7));
  assert_int_equal(kvp_lease_quarantined_by(f.leases, 7), 2);
  assert_int_equal(kvp_lease_quarantined_by(f.leases, 9), 1);
  assert_int_equal(kvp_lease_quarantined_count(f.leases), 3);
  fences[7] = 10;
  assert_int_equal(kvp_lease_reach(f.leases, of_each, fences), 2);
  assert_int_equal(kvp_lease_reach(f.leases, of_each, fences), 0);
  fences[9] = 12;
  assert_int_equal(kvp_lease_reach(f.leases, of_each, fences), 1);
  assert_int_equal(kvp_lease_free_count(f.leases), 5);
  end(&f);
}

/* Each block returns, none before its own fence. */
static void test_many_fences(void **state) {
  (void)state;
  enum { count = 5000 };
  struct fixture f;
  struct kvp_error error;
  begin(&f, count);
  assert_int_equal(kvp_lease_allocate_range(f.leases, 1, 1, 0, count, &error), KVP_OK);
  for (int32_t block = 0; block < count; block++) {
    assert_int_equal(kvp_lease_free(f.leases, 1, &block, 1, (uint64_t)block + 1, &error), KVP_OK);
  }
  for (uint64_t fence = 1; fence <= count; fence++) {
    (void)reach(f.leases, fence);
    for (uint64_t block = fence; block < count; block += 100) {
      assert_int_equal(kvp_owner_table_get(&f.table, (uint32_t)block), entry(1, 3, 1));
    }
  }
  assert_int_equal(kvp_lease_free_count(f.leases), count);
  end(&f);
}

/* ---- the model --------------------------------------------------------------------------------------------------
 */

enum { model_blocks_max = 300, model_owners = 5 };

struct model_block {
  int state; /* as in the entry */
  uint16_t owner;
  uint64_t epoch;
  uint64_t fence;
};

struct model {
  struct model_block blocks[model_blocks_max];
  uint32_t count;
};

static uint64_t seed;

static uint32_t random_below(uint32_t limit) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % limit);
}

static uint32_t model_count(const struct model *model, int block_state, int owner) {
  uint32_t count = 0;
  for (uint32_t b = 0; b < model->count; b++) {
    count += model->blocks[b].state == block_state && (owner < 0 || model->blocks[b].owner == owner);
  }
  return count;
}

static void compare(const struct model *model, const struct fixture *f) {
  for (uint32_t b = 0; b < model->count; b++) {
    const struct model_block *block = &model->blocks[b];
    uint64_t expected = block->state == 0 ? 0 : entry(block->epoch, (uint64_t)block->state, block->owner);
    assert_int_equal(kvp_owner_table_get(&f->table, b), expected);
  }
  assert_int_equal(kvp_lease_free_count(f->leases), model_count(model, 0, -1));
  assert_int_equal(kvp_lease_leased_count(f->leases), model_count(model, 1, -1));
  assert_int_equal(kvp_lease_quarantined_count(f->leases), model_count(model, 3, -1));
  for (int owner = 1; owner <= model_owners; owner++) {
    assert_int_equal(kvp_lease_owned_count(f->leases, (uint16_t)owner), model_count(model, 1, owner));
    assert_int_equal(kvp_lease_quarantined_by(f->leases, (uint16_t)owner), model_count(model, 3, owner));
  }
}

static void random_allocate(struct model *model, struct fixture *f, uint16_t owner, uint64_t epoch) {
  int32_t out[model_blocks_max + 8];
  uint32_t count = random_below(model->count / 4 + 4);
  bool fits = count <= model_count(model, 0, -1);
  enum kvp_status status = kvp_lease_allocate(f->leases, owner, epoch, count, out, NULL);
  assert_int_equal(status, fits ? KVP_OK : KVP_OUT_OF_BLOCKS);
  for (uint32_t i = 0; fits && i < count; i++) {
    assert_true(out[i] >= 0 && (uint32_t)out[i] < model->count);
    struct model_block *block = &model->blocks[out[i]];
    assert_int_equal(block->state, 0);
    *block = (struct model_block){1, owner, epoch, 0};
  }
}

static void random_range(struct model *model, struct fixture *f, uint16_t owner, uint64_t epoch) {
  uint32_t first = random_below(model->count + 2);
  uint32_t count = random_below(12);
  struct kvp_error error;
  enum kvp_status status = kvp_lease_allocate_range(f->leases, owner, epoch, first, count, &error);
  if (first >= model->count || first + count > model->count) {
    assert_int_equal(status, KVP_OUT_OF_RANGE);
    return;
  }
  for (uint32_t b = first; b < first + count; b++) {
    if (model->blocks[b].state != 0) {
      assert_int_equal(status, KVP_IN_USE);
      assert_int_equal(error.value, b);
      return;
    }
  }
  assert_int_equal(status, KVP_OK);
  for (uint32_t b = first; b < first + count; b++) {
    model->blocks[b] = (struct model_block){1, owner, epoch, 0};
  }
}

/* Mostly a block of the owner's, sometimes anything. */
static int32_t random_block(const struct model *model, uint16_t owner) {
  int32_t block = (int32_t)random_below(model->count + 2) - 1;
  if (random_below(20) == 0) {
    return block;
  }
  for (uint32_t tries = 0; tries < model->count; tries++) {
    uint32_t b = ((uint32_t)(block < 0 ? 0 : block) + tries) % model->count;
    if (model->blocks[b].state == 1 && model->blocks[b].owner == owner) {
      return (int32_t)b;
    }
  }
  return block;
}

static enum kvp_status model_free_status(const struct model *model, uint16_t owner, const int32_t *blocks,
                                         uint32_t i) {
  if (blocks[i] < 0 || (uint32_t)blocks[i] >= model->count) {
    return KVP_OUT_OF_RANGE;
  }
  if (model->blocks[blocks[i]].state != 1 || model->blocks[blocks[i]].owner != owner) {
    return KVP_NOT_OWNER;
  }
  for (uint32_t k = 0; k < i; k++) {
    if (blocks[k] == blocks[i]) {
      return KVP_INVALID_ARGUMENT;
    }
  }
  return KVP_OK;
}

static void random_free(struct model *model, struct fixture *f, uint16_t owner, uint64_t fence) {
  int32_t blocks[16];
  uint32_t count = random_below(16);
  enum kvp_status expected = KVP_OK;
  int64_t position = -1;
  for (uint32_t i = 0; i < count; i++) {
    blocks[i] = random_block(model, owner);
  }
  for (uint32_t i = 0; i < count && expected == KVP_OK; i++) {
    expected = model_free_status(model, owner, blocks, i);
    position = i;
  }
  struct kvp_error error;
  assert_int_equal(kvp_lease_free(f->leases, owner, blocks, count, fence, &error), expected);
  if (expected != KVP_OK) {
    assert_int_equal(error.position, position);
    return;
  }
  for (uint32_t i = 0; i < count; i++) {
    model->blocks[blocks[i]].state = 3;
    model->blocks[blocks[i]].fence = fence;
  }
}

static void random_free_all(struct model *model, struct fixture *f, uint16_t owner, uint64_t fence) {
  assert_int_equal(kvp_lease_free_all(f->leases, owner, fence), model_count(model, 1, owner));
  for (uint32_t b = 0; b < model->count; b++) {
    if (model->blocks[b].state == 1 && model->blocks[b].owner == owner) {
      model->blocks[b].state = 3;
      model->blocks[b].fence = fence;
    }
  }
}

static void random_reach(struct model *model, struct fixture *f, const uint64_t *reached) {
  uint32_t returned = 0;
  for (uint32_t b = 0; b < model->count; b++) {
    if (model->blocks[b].state == 3 && model->blocks[b].fence <= reached[model->blocks[b].owner]) {
      model->blocks[b] = (struct model_block){0};
      returned++;
    }
  }
  assert_int_equal(kvp_lease_reach(f->leases, of_each, reached), returned);
}

static void run_model(uint32_t num_blocks, uint32_t operations) {
  struct fixture f;
  struct model model = {.count = num_blocks};
  uint64_t sequence = 0;
  uint64_t reached[kvp_lease_owner_nobody + 1] = {0};
  begin(&f, num_blocks);
  for (uint32_t i = 0; i < operations; i++) {
    uint16_t owner = (uint16_t)(1 + random_below(model_owners));
    sequence += random_below(3);
    uint32_t what = random_below(40);
    if (what < 12) {
      random_allocate(&model, &f, owner, i + 1);
    } else if (what < 20) {
      random_range(&model, &f, owner, i + 1);
    } else if (what < 33) {
      random_free(&model, &f, owner, sequence);
    } else if (what < 34) {
      random_free_all(&model, &f, owner, sequence);
    } else {
      reached[owner] += random_below((uint32_t)(sequence - reached[owner]) + 1);
      random_reach(&model, &f, reached);
    }
    compare(&model, &f);
  }
  end(&f);
}

static void test_random_calls_against_a_model(void **state) {
  (void)state;
  static const uint32_t sizes[] = {1, 2, 63, 64, 65, 200, 300};
  seed = UINT64_C(0x6b76706f6f6c6401);
  print_message("seed 0x%llx\n", (unsigned long long)seed);
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    run_model(sizes[i], 4000);
  }
}

/* ---- size -------------------------------------------------------------------------------------------------------
 */

static double now_ms(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* Four levels of the set; what a session's death costs is printed, not asserted. */
static void test_two_million_blocks(void **state) {
  (void)state;
  enum { count = 2 * 1000 * 1000 };
  struct fixture f;
  struct kvp_error error;
  begin(&f, count);
  int32_t *blocks = malloc(count * sizeof *blocks);
  assert_non_null(blocks);
  double started = now_ms();
  assert_int_equal(kvp_lease_allocate(f.leases, 1, 1, count - 1, blocks, &error), KVP_OK);
  double allocated = now_ms();
  assert_int_equal(blocks[count - 2], count - 2);
  int32_t last = -1;
  assert_int_equal(kvp_lease_allocate(f.leases, kvp_sessions_max, 2, 1, &last, &error), KVP_OK);
  assert_int_equal(last, count - 1);
  double before_scan = now_ms();
  assert_int_equal(kvp_lease_free_all(f.leases, kvp_sessions_max, 0), 1); /* the last one: scans all of them */
  double scanned = now_ms();
  assert_int_equal(kvp_lease_free_all(f.leases, 1, 0), count - 1);
  double freed = now_ms();
  assert_int_equal(reach(f.leases, 0), count);
  double returned = now_ms();
  print_message("per million blocks: allocate %.2f ms, scan for one %.2f ms, free all %.2f ms, return %.2f ms\n",
                (allocated - started) / 2, (scanned - before_scan) / 2, (freed - scanned) / 2,
                (returned - freed) / 2);
  const int32_t far = count - 1;
  assert_int_equal(kvp_lease_allocate_range(f.leases, 1, 3, (uint32_t)far, 1, &error), KVP_OK);
  assert_int_equal(kvp_lease_free(f.leases, 1, &far, 1, 0, &error), KVP_OK);
  free(blocks);
  end(&f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_allocates_all_in_order_then_none),
      cmocka_unit_test(test_blocks_of_nobody),
      cmocka_unit_test(test_a_range_names_the_first_block_in_use),
      cmocka_unit_test(test_a_refused_free_changes_nothing),
      cmocka_unit_test(test_quarantine_keeps_owner_and_epoch_until_the_fence),
      cmocka_unit_test(test_many_fences),
      cmocka_unit_test(test_quarantines_are_the_owners_own),
      cmocka_unit_test(test_random_calls_against_a_model),
      cmocka_unit_test(test_two_million_blocks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
