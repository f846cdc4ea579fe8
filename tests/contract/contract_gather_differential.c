/* Random gathered stores and copies of rows against plain ones, every variant of the host kernels: the rows that the
 * index names are laid out one by one and stored by the reference; rows that are made of nothing are zero, or nothing.
 * Indices and slots that were checked before, and hostile ones. All memory is pre-filled, ends or begins at a guard
 * page, and is compared as a whole; every op is cut in two ranges.
 *
 *   contract_gather_differential [cases] [seed]
 */
#include <assert.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/host/variant.h"
#include "proto/owner_entry.h"
#include "tests/contract/guarded.h"
#include "tests/contract/random.h"
#include "tests/contract/reference.h"

enum { rows_max = 24, source_max = 12, owner = 7, epoch = 1000, blocks_max = 6 };

static uint64_t case_count = 6000;
static uint64_t seed = 1;
static uint64_t cases_done;
static struct kvp_op_counts seen; /* of the reference, so that a test of nothing shows */

static uint64_t random_stride(uint64_t row_bytes) {
  return (random_chance(2) ? row_bytes : row_bytes + 16 * (uint64_t)(1 + random_below(4)));
}

static struct guarded rows_make(uint64_t rows, uint64_t stride, uint64_t row_bytes, uint8_t fill) {
  return guarded_make(rows == 0 ? 0 : (rows - 1) * stride + row_bytes, !random_chance(3), fill);
}

static void guarded_fill(struct guarded *memory, uint8_t fill) {
  if (memory->base != NULL) {
    memset(memory->base, fill, memory->bytes);
  }
}

static void guarded_compare(const struct guarded *actual, const struct guarded *expected) {
  if (actual->base != NULL) {
    assert_memory_equal(actual->base, expected->base, actual->bytes);
  }
}

static void rows_fill(struct guarded *rows, uint64_t count, uint64_t stride, uint32_t elements) {
  for (uint64_t row = 0; row < count; row++) {
    const uint32_t kind = random_below(random_bf16_kinds);
    for (uint64_t i = 0; i < elements; i++) {
      const uint16_t bits = random_bf16(kind);
      memcpy(rows->base + row * stride + 2 * i, &bits, sizeof bits);
    }
  }
}

/* An entry of the index: a row, -1, or, where nobody has checked it, anything. */
static int32_t random_entry(uint64_t source_rows, bool is_hostile) {
  if (is_hostile && random_chance(4)) {
    return random_chance(2) ? (int32_t)source_rows : random_hostile();
  }
  return source_rows == 0 || random_chance(5) ? -1 : (int32_t)random_below((uint32_t)source_rows);
}

static bool entry_is_row(int32_t entry, uint64_t source_rows) {
  return entry >= 0 && (uint64_t)entry < source_rows;
}

/* ---- gathered stores ---- */

struct scene {
  struct kvp_geometry geometry;
  uint64_t owners[blocks_max];
  uint64_t source_rows;
  uint64_t row_count;
  bool has_slots;
  bool has_gather;
  struct guarded region, expected_region;
  struct guarded source, slots, gather;
  struct guarded back, expected_back;
  struct kvp_store_params params; /* layer and cast-back: the kernel's */
};

static void owners_fill(struct scene *scene) {
  for (uint32_t block = 0; block < scene->geometry.num_blocks; block++) {
    scene->owners[block] =
        kvp_owner_entry_make(random_chance(4) ? epoch + random_below(3) : random_below(epoch),
                             random_chance(4) ? (enum kvp_block_state)random_below(4) : KVP_BLOCK_LEASED,
                             random_chance(5) ? random_below(9) : owner);
  }
}

/* Distinct slots; where arrays were checked, a zero row has none. */
static void arrays_fill(struct scene *scene, bool gather_hostile, bool slots_hostile) {
  const int32_t slot_count = (int32_t)(scene->geometry.num_blocks * scene->geometry.tokens_per_block);
  assert(slot_count > 0);
  const int32_t first = (int32_t)random_below((uint32_t)slot_count);
  int32_t *gather = (void *)scene->gather.base;
  int32_t *slots = (void *)scene->slots.base;
  for (uint64_t i = 0; i < scene->row_count; i++) {
    if (scene->has_gather) {
      gather[i] = random_entry(scene->source_rows, gather_hostile);
    }
    if (!scene->has_slots) {
      continue;
    }
    const bool must_skip = scene->has_gather && gather[i] == -1 && !gather_hostile && !slots_hostile;
    slots[i] = must_skip || random_chance(5) ? -1 : (int32_t)((first + (int64_t)i) % slot_count);
    if (slots_hostile && random_chance(5)) {
      slots[i] = random_chance(2) ? slot_count : random_hostile() | INT32_MIN;
    }
  }
}

static void scene_init(struct scene *scene) {
  static const uint32_t tokens[] = {16, 17, 64};
  static const uint32_t widths[] = {8, 64, 576};
  const struct kvp_format *format = kvp_format_get((enum kvp_format_id)random_below(kvp_format_count));
  memset(scene, 0, sizeof *scene);
  assert_int_equal(kvp_geometry_init(format, format->id == KVP_FORMAT_BF16 ? widths[random_below(3)] : 0,
                                     tokens[random_below(3)], 2 + random_below(blocks_max - 1), 1, &scene->geometry,
                                     NULL),
                   KVP_OK);
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  scene->has_gather = !random_chance(5);
  scene->has_slots = !scene->has_gather || !random_chance(4) ? !random_chance(4) : false;
  scene->row_count = random_below(rows_max + 1);
  scene->source_rows = scene->has_gather ? random_below(source_max + 1) : scene->row_count;
  const uint64_t stride = random_stride(sizes->row_bytes), back_stride = random_stride(sizes->row_bytes);
  const bool casts_back = sizes->loaded_scale_bytes == 0 && scene->row_count > 0 && !random_chance(3);
  scene->region = guarded_make(scene->geometry.region_bytes, !random_chance(3), 0xA5);
  scene->expected_region = guarded_make(scene->geometry.region_bytes, true, 0xA5);
  scene->source = rows_make(scene->source_rows, stride, sizes->row_bytes, 0);
  rows_fill(&scene->source, scene->source_rows, stride, sizes->elements);
  scene->gather = guarded_make(scene->has_gather ? scene->row_count * sizeof(int32_t) : 0, true, 0);
  scene->slots = guarded_make(scene->has_slots ? scene->row_count * sizeof(int32_t) : 0, true, 0);
  scene->back = rows_make(casts_back ? scene->row_count : 0, back_stride, sizes->row_bytes, 0x5A);
  scene->expected_back = rows_make(casts_back ? scene->row_count : 0, back_stride, sizes->row_bytes, 0x5A);
  const bool slots_hostile = scene->has_slots && random_chance(2);
  owners_fill(scene);
  arrays_fill(scene, random_chance(2), slots_hostile);
  scene->params = (struct kvp_store_params){
      .layer = {scene->region.base, &scene->geometry},
      .source = {scene->source.base, stride},
      .slots = (void *)scene->slots.base,
      .row_count = scene->row_count,
      .gather = (void *)scene->gather.base,
      .source_rows = scene->has_gather ? scene->source_rows : 0,
      .cast_back = {scene->back.base, back_stride},
      .back_is_copy = casts_back && random_chance(2),
      .check = {.entries = slots_hostile ? scene->owners : NULL, .epoch = epoch, .owner = owner},
  };
}

static void scene_deinit(struct scene *scene) {
  struct guarded *all[] = {&scene->region, &scene->expected_region, &scene->source, &scene->slots, &scene->gather,
                           &scene->back,   &scene->expected_back};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    guarded_free(all[i]);
  }
}

/* The copy of a row that its record doesn't matter to. */
static void expect_copy(const struct scene *scene, int32_t entry, uint8_t *back, struct kvp_op_counts *counts) {
  const uint64_t row_bytes = scene->geometry.sizes.row_bytes;
  if (entry_is_row(entry, scene->source_rows)) {
    memcpy(back, scene->source.base + (uint64_t)entry * scene->params.source.stride_bytes, row_bytes);
    counts->bytes_read += row_bytes;
  } else {
    memset(back, 0, row_bytes);
  }
  counts->rows_loaded += entry_is_row(entry, scene->source_rows) || entry == -1;
  counts->bytes_written += row_bytes;
}

/* Row by row: the row the index names by a plain store of one row, or what a row of nothing is. */
static void expect_rows(struct scene *scene, struct kvp_op_counts *counts) {
  const uint64_t row_bytes = scene->geometry.sizes.row_bytes;
  const int32_t *gather = (const void *)scene->gather.base;
  const int32_t *slots = (const void *)scene->slots.base;
  for (uint64_t i = 0; i < scene->row_count; i++) {
    const int32_t none = -1;
    const int32_t entry = scene->has_gather ? gather[i] : (int32_t)i;
    const int32_t slot = scene->has_slots ? slots[i] : none;
    uint8_t *back =
        scene->back.base == NULL ? NULL : scene->expected_back.base + i * scene->params.cast_back.stride_bytes;
    const bool copies = back != NULL && scene->params.back_is_copy;
    if (copies) {
      expect_copy(scene, entry, back, counts);
      back = NULL;
    }
    if (entry_is_row(entry, scene->source_rows)) {
      struct kvp_store_params one = scene->params;
      one.layer.base = scene->expected_region.base;
      one.source.base = scene->source.base + (uint64_t)entry * scene->params.source.stride_bytes;
      one.gather = NULL;
      one.slots = &slot;
      one.row_count = 1;
      one.cast_back.base = back;
      one.back_is_copy = false;
      const uint64_t read = counts->bytes_read;
      reference_store(&one, counts);
      counts->bytes_read = copies ? read : counts->bytes_read;
      continue;
    }
    const bool is_wrong = entry != -1 || slot != -1;
    counts->rows_rejected += is_wrong;
    counts->rows_skipped += !is_wrong;
    if (back != NULL) {
      memset(back, 0, row_bytes);
      counts->bytes_written += row_bytes;
    }
  }
}

static void run_store(void) {
  struct scene scene;
  struct kvp_op_counts expected = {0};
  scene_init(&scene);
  expect_rows(&scene, &expected);
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    struct kvp_op_counts counts = {0};
    const uint64_t cut = random_below((uint32_t)scene.row_count + 1);
    kvp_host_store_fn *store = variant->store[scene.geometry.format->id];
    guarded_fill(&scene.region, 0xA5);
    guarded_fill(&scene.back, 0x5A);
    store(&scene.params, 0, cut, &counts);
    store(&scene.params, cut, scene.row_count, &counts);
    assert_memory_equal(&counts, &expected, sizeof counts);
    guarded_compare(&scene.region, &scene.expected_region);
    guarded_compare(&scene.back, &scene.expected_back);
  }
  seen.rows_stored += expected.rows_stored;
  seen.rows_skipped += expected.rows_skipped;
  seen.rows_rejected += expected.rows_rejected;
  scene_deinit(&scene);
}

/* ---- copies ---- */

static void run_copy(void) {
  const bool has_gather = !random_chance(3);
  const uint64_t row_bytes = 16 * (uint64_t)(1 + random_below(70));
  const uint64_t row_count = random_below(rows_max + 1);
  const uint64_t source_rows = has_gather ? random_below(source_max + 1) : row_count;
  const uint64_t stride = random_stride(row_bytes), out_stride = random_stride(row_bytes);
  const bool is_hostile = random_chance(2);
  struct guarded source = rows_make(source_rows, stride, row_bytes, 0);
  struct guarded out = rows_make(row_count, out_stride, row_bytes, 0x5A);
  struct guarded expected_out = rows_make(row_count, out_stride, row_bytes, 0x5A);
  struct guarded gather = guarded_make(has_gather ? row_count * sizeof(int32_t) : 0, true, 0);
  struct kvp_op_counts expected = {.bytes_written = row_count * row_bytes};
  for (uint64_t i = 0; i < source.bytes; i++) {
    source.base[i] = (uint8_t)random_bits();
  }
  for (uint64_t i = 0; i < row_count; i++) {
    int32_t entry = (int32_t)i;
    if (has_gather) {
      entry = random_entry(source_rows, is_hostile);
      memcpy(gather.base + i * sizeof entry, &entry, sizeof entry);
    }
    if (entry_is_row(entry, source_rows)) {
      memcpy(expected_out.base + i * out_stride, source.base + (uint64_t)entry * stride, row_bytes);
      expected.bytes_read += row_bytes;
    } else {
      memset(expected_out.base + i * out_stride, 0, row_bytes);
    }
    expected.rows_loaded += entry == -1 || entry_is_row(entry, source_rows);
    expected.rows_rejected += entry != -1 && !entry_is_row(entry, source_rows);
  }
  const struct kvp_copy_rows_params params = {.source = {source.base, stride},
                                              .out = {out.base, out_stride},
                                              .gather = (void *)gather.base,
                                              .row_count = row_count,
                                              .source_rows = has_gather ? source_rows : 0,
                                              .row_bytes = (uint32_t)row_bytes};
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    struct kvp_op_counts counts = {0};
    const uint64_t cut = random_below((uint32_t)row_count + 1);
    guarded_fill(&out, 0x5A);
    variant->moves->copy_rows(&params, 0, cut, &counts);
    variant->moves->copy_rows(&params, cut, row_count, &counts);
    assert_memory_equal(&counts, &expected, sizeof counts);
    guarded_compare(&out, &expected_out);
  }
  seen.rows_loaded += expected.rows_loaded;
  seen.rows_rejected += expected.rows_rejected;
  guarded_free(&source);
  guarded_free(&out);
  guarded_free(&expected_out);
  guarded_free(&gather);
}

static void test_random_cases(void **state) {
  (void)state;
  for (cases_done = 0; cases_done < case_count; cases_done++) {
    random_start((seed << 32) + cases_done);
    if (random_chance(3)) {
      run_copy();
    } else {
      run_store();
    }
  }
  assert_true(case_count < 1000 || (seen.rows_stored > case_count && seen.rows_skipped > case_count &&
                                    seen.rows_rejected > case_count && seen.rows_loaded > case_count));
}

/* Also after a failure: which case it was. */
static int print_cases_done(void **state) {
  (void)state;
  print_message("%llu of %llu cases passed, seed %llu; %llu rows stored, %llu copied, %llu skipped, %llu wrong\n",
                (unsigned long long)cases_done, (unsigned long long)case_count, (unsigned long long)seed,
                (unsigned long long)seen.rows_stored, (unsigned long long)seen.rows_loaded,
                (unsigned long long)seen.rows_skipped, (unsigned long long)seen.rows_rejected);
  return 0;
}

int main(int argc, char **argv) {
  if (argc > 1) {
    case_count = strtoull(argv[1], NULL, 10);
  }
  if (argc > 2) {
    seed = strtoull(argv[2], NULL, 10);
  }
  reference_init();
  const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(test_random_cases, print_cases_done)};
  return cmocka_run_group_tests_name("contract_gather_differential", tests, NULL, NULL);
}
