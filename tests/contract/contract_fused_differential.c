/* Random fused stores against the reference, every variant of the host kernels: formats, widths, strides, flags, rows
 * and weights of all kinds, slots and positions that were checked before and hostile ones that only the kernel checks.
 * All memory is pre-filled, ends or begins at a guard page, and is compared as a whole. And one row at a time against
 * ten thousand at once.
 *
 *   contract_fused_differential [cases] [seed]
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "kernels/host/variant.h"
#include "proto/owner_entry.h"
#include "tests/contract/guarded.h"
#include "tests/contract/random.h"
#include "tests/contract/reference.h"
#include "tests/contract/reference_ops.h"

enum { rows_max = 12, owner = 7, epoch = 1000, blocks_max = 8, positions_max = 20 };

static uint64_t case_count = 3000;
static uint64_t seed = 1;
static uint64_t cases_done;
static struct kvp_op_counts seen; /* of the reference, so that a test of nothing shows */

/* Everything of one case; both sides start from the same bytes. */
struct scene {
  struct kvp_geometry geometry;
  uint64_t owners[blocks_max];
  struct guarded region;
  struct guarded expected_region;
  struct guarded source;
  struct guarded weight;
  struct guarded cos_sin;
  struct guarded slots;
  struct guarded positions;
  struct guarded back;
  struct guarded expected_back;
  struct kvp_fused_store_params params; /* layer and cast-back are those of the reference */
};

static uint64_t random_stride(uint64_t row_bytes) {
  uint64_t aligned = (row_bytes + 15) / 16 * 16;
  return random_chance(2) ? aligned : aligned + 16 * (uint64_t)(1 + random_below(4));
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

static void fill_bf16(uint8_t *row, uint32_t elements) {
  uint32_t kind = random_chance(2) ? 0 : random_below(random_bf16_kinds);
  bool mixed = random_chance(6);
  for (uint32_t i = 0; i < elements; i++) {
    uint16_t bits = random_bf16(mixed && random_chance(50) ? random_bf16_special : kind);
    memcpy(row + 2 * (size_t)i, &bits, sizeof(bits));
  }
}

/* Angles mostly; some rows hold any numbers at all. */
static void fill_cos_sin(uint8_t *row, uint32_t rotary_dims) {
  bool hostile = random_chance(8);
  for (uint32_t i = 0; i < rotary_dims / 2; i++) {
    double angle = (double)random_below(1 << 24) / 4096.0;
    float pair[2] = {(float)cos(angle), (float)sin(angle)};
    if (hostile) {
      uint32_t bits = (uint32_t)random_bits();
      memcpy(&pair[random_below(2)], &bits, sizeof(bits));
    }
    memcpy(row + 4 * (size_t)i, &pair[0], sizeof(float));
    memcpy(row + 4 * (size_t)(rotary_dims / 2 + i), &pair[1], sizeof(float));
  }
}

/* Distinct slots and positions of the table, -1 and hostile ones among them where the kernel checks. */
static void fill_metadata(struct scene *scene, int32_t *slots, int32_t *positions) {
  uint32_t limit = scene->geometry.num_blocks * scene->geometry.tokens_per_block;
  uint64_t count = scene->params.store.row_count;
  uint32_t first = random_below(limit);
  for (uint64_t i = 0; i < count; i++) {
    slots[i] = random_chance(5) || i >= limit ? -1 : (int32_t)((first + i) % limit);
    if (scene->params.store.check.entries != NULL && random_chance(6)) {
      int32_t value = random_chance(2) ? (int32_t)limit : random_hostile();
      slots[i] = value >= 0 && value < (int32_t)limit ? -3 : value;
    }
    positions[i] = (int32_t)random_below((uint32_t)scene->params.position_count);
    if (!scene->params.positions_checked && random_chance(4)) {
      positions[i] = random_chance(2) ? (int32_t)scene->params.position_count : random_hostile();
    } else if (slots[i] == -1 && scene->params.store.cast_back.base == NULL) {
      positions[i] = random_hostile(); /* of a row that nobody looks at */
    }
  }
}

static void geometry_init(struct kvp_geometry *geometry) {
  static const uint32_t tokens[] = {1, 4, 16, 133};
  static const uint32_t widths[] = {8, 16, 32, 64, 128, 512, 2048, 65536};
  const struct kvp_format *format = kvp_format_get((enum kvp_format_id)random_below(kvp_format_count));
  uint32_t width = 0;
  if (format->id == KVP_FORMAT_BF16) {
    width = widths[random_chance(100) ? 7 : random_below(7)];
  }
  uint32_t tokens_per_block = width > 512 ? 1 : tokens[random_below(4)];
  assert_int_equal(
      kvp_geometry_init(format, width, tokens_per_block, 1 + random_below(blocks_max), 1, geometry, NULL), KVP_OK);
}

static float random_eps(void) {
  static const float values[] = {1e-6F, 1e-5F, 1e-6F, 1e-12F, 0x1p-149F, 0x1p-126F, 1.0F, 3e38F};
  return values[random_below(8)];
}

/* Shapes, strides and switches; memory filled with what a row is made of. */
static void scene_init(struct scene *scene) {
  *scene = (struct scene){0};
  geometry_init(&scene->geometry);
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  struct kvp_fused_store_params *params = &scene->params;
  uint64_t rows = random_below(sizes->elements > 512 ? 3 : rows_max + 1);
  params->position_count = 1 + random_below(positions_max);
  params->rotary_dims = 2 * random_below((sizes->elements < 128 ? sizes->elements : 128) / 2 + 1);
  params->rope_offset = random_chance(2) ? sizes->elements - params->rotary_dims
                                         : random_below(sizes->elements - params->rotary_dims + 1);
  params->eps = random_eps();
  params->flags = random_below(8);
  params->positions_checked = random_chance(2);
  for (uint32_t block = 0; block < blocks_max; block++) {
    enum kvp_block_state state = random_chance(5) ? (enum kvp_block_state)random_below(4) : KVP_BLOCK_LEASED;
    scene->owners[block] = kvp_owner_entry_make(random_below(epoch + 2), state, random_chance(5) ? 3 : owner);
  }
  uint64_t stride = random_stride(sizes->row_bytes);
  uint64_t cos_sin_bytes = params->rotary_dims * sizeof(float);
  uint64_t cos_sin_stride = random_stride(cos_sin_bytes);
  scene->region = guarded_make(scene->geometry.region_bytes, !random_chance(3), 0xA5);
  scene->expected_region = guarded_make(scene->geometry.region_bytes, true, 0xA5);
  scene->source = rows_make(rows, stride, sizes->row_bytes, 0);
  scene->weight = guarded_make(sizes->row_bytes, true, 0);
  scene->cos_sin = rows_make(params->position_count, cos_sin_stride, cos_sin_bytes, 0);
  scene->slots = guarded_make(rows * sizeof(int32_t), true, 0);
  scene->positions = guarded_make(rows * sizeof(int32_t), true, 0);
  for (uint64_t row = 0; row < rows; row++) {
    fill_bf16(scene->source.base + row * stride, sizes->elements);
  }
  fill_bf16(scene->weight.base, sizes->elements);
  for (uint64_t row = 0; row < params->position_count && cos_sin_bytes != 0; row++) {
    fill_cos_sin(scene->cos_sin.base + row * cos_sin_stride, params->rotary_dims);
  }
  params->store = (struct kvp_store_params){
      .layer = {scene->expected_region.base, &scene->geometry},
      .source = {scene->source.base, stride},
      .slots = (void *)scene->slots.base,
      .row_count = rows,
      .check = {random_chance(2) ? scene->owners : NULL, epoch, random_chance(4) ? 0 : owner}};
  params->norm_weight = (void *)scene->weight.base;
  params->positions = (void *)scene->positions.base;
  params->cos_sin = (struct kvp_rows){scene->cos_sin.base, cos_sin_stride};
}

static void scene_add_cast_back(struct scene *scene) {
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  uint64_t rows = scene->params.store.row_count;
  if (sizes->loaded_scale_bytes != 0 || rows == 0 || random_chance(2)) { /* index caches have none */
    return;
  }
  uint64_t stride = random_stride(sizes->row_bytes);
  bool at_end = random_chance(2);
  scene->back = guarded_make((rows - 1) * stride + sizes->row_bytes, at_end, 0x5A);
  scene->expected_back = guarded_make(scene->back.bytes, at_end, 0x5A);
  scene->params.store.cast_back = (struct kvp_rows){scene->expected_back.base, stride};
}

static void scene_deinit(struct scene *scene) {
  struct guarded *all[] = {&scene->region,  &scene->expected_region, &scene->source,   &scene->weight,
                           &scene->cos_sin, &scene->slots,           &scene->positions};
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
    guarded_free(all[i]);
  }
  if (scene->params.store.cast_back.base != NULL) {
    guarded_free(&scene->back);
    guarded_free(&scene->expected_back);
  }
}

static void add_seen(const struct kvp_op_counts *counts) {
  seen.rows_stored += counts->rows_stored;
  seen.rows_skipped += counts->rows_skipped;
  seen.rows_rejected += counts->rows_rejected;
  seen.rows_nonfinite += counts->rows_nonfinite;
  seen.groups_saturated += counts->groups_saturated;
}

static void run_case(void) {
  struct scene scene;
  scene_init(&scene);
  scene_add_cast_back(&scene);
  fill_metadata(&scene, (void *)scene.slots.base, (void *)scene.positions.base);
  struct kvp_fused_store_params params = scene.params;
  struct kvp_op_counts expected = {0};
  reference_fused_store(&params, &expected);
  add_seen(&expected);
  params.store.layer.base = scene.region.base;
  params.store.cast_back.base = scene.back.base;
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    if (scene.geometry.sizes.elements > variant->fused_elements_max) {
      continue; /* refused before it gets there */
    }
    guarded_fill(&scene.region, 0xA5);
    guarded_fill(&scene.back, 0x5A);
    struct kvp_op_counts counts = {0};
    uint64_t cut = random_below((uint32_t)params.store.row_count + 1);
    variant->fused_store[scene.geometry.format->id](&params, cut, params.store.row_count, &counts);
    variant->fused_store[scene.geometry.format->id](&params, 0, cut, &counts);
    assert_memory_equal(&counts, &expected, sizeof(counts));
    guarded_compare(&scene.region, &scene.expected_region);
    guarded_compare(&scene.back, &scene.expected_back);
  }
  scene_deinit(&scene);
}

static void test_random_cases(void **state) {
  (void)state;
  for (cases_done = 0; cases_done < case_count; cases_done++) {
    random_start((seed << 32) + cases_done);
    run_case();
  }
  assert_true(case_count < 1000 || (seen.rows_rejected > 100 && seen.rows_skipped > 100 &&
                                    seen.rows_nonfinite > 100 && seen.groups_saturated > 100));
}

/* Also after a failure: which case it was. */
static int print_cases_done(void **state) {
  (void)state;
  print_message(
      "%llu of %llu cases passed, seed %llu; rows stored %llu, skipped %llu, rejected %llu, non-finite %llu, "
      "groups saturated %llu\n",
      (unsigned long long)cases_done, (unsigned long long)case_count, (unsigned long long)seed,
      (unsigned long long)seen.rows_stored, (unsigned long long)seen.rows_skipped,
      (unsigned long long)seen.rows_rejected, (unsigned long long)seen.rows_nonfinite,
      (unsigned long long)seen.groups_saturated);
  return 0;
}

/* ---- the number of rows does not show ---- */

enum { many_rows = 10000, many_tokens = 64, many_positions = 512, many_rotary_dims = 64 };

struct many {
  struct kvp_geometry geometry;
  struct guarded source;
  struct guarded weight;
  struct guarded cos_sin;
  struct guarded together;
  struct guarded alone;
  int32_t slots[many_rows];
  int32_t positions[many_rows];
  struct kvp_fused_store_params params;
};

static void many_init(struct many *many, enum kvp_format_id id, uint32_t flags) {
  uint32_t blocks = (many_rows + many_tokens - 1) / many_tokens;
  assert_int_equal(kvp_geometry_init(kvp_format_get(id), 0, many_tokens, blocks, 1, &many->geometry, NULL), KVP_OK);
  const struct kvp_format_sizes *sizes = &many->geometry.sizes;
  many->source = guarded_make((uint64_t)many_rows * sizes->row_bytes, true, 0);
  many->weight = guarded_make(sizes->row_bytes, true, 0);
  many->cos_sin = guarded_make((uint64_t)many_positions * many_rotary_dims * sizeof(float), true, 0);
  many->together = guarded_make(many->geometry.region_bytes, true, 0xA5);
  many->alone = guarded_make(many->geometry.region_bytes, true, 0xA5);
  for (uint32_t row = 0; row < many_rows; row++) {
    fill_bf16(many->source.base + (uint64_t)row * sizes->row_bytes, sizes->elements);
    many->slots[row] = (int32_t)((row * UINT64_C(7919)) % many_rows);
    many->positions[row] = (int32_t)random_below(many_positions);
  }
  for (uint32_t i = 0; i < sizes->elements; i++) {
    uint16_t bits = random_bf16(0);
    memcpy(many->weight.base + 2 * (size_t)i, &bits, sizeof(bits));
  }
  for (uint32_t row = 0; row < many_positions; row++) {
    fill_cos_sin(many->cos_sin.base + (size_t)row * many_rotary_dims * sizeof(float), many_rotary_dims);
  }
  many->params = (struct kvp_fused_store_params){
      .store = {.layer = {many->together.base, &many->geometry},
                .source = {many->source.base, sizes->row_bytes},
                .slots = many->slots,
                .row_count = many_rows},
      .norm_weight = (void *)many->weight.base,
      .positions = many->positions,
      .cos_sin = {many->cos_sin.base, many_rotary_dims * sizeof(float)},
      .position_count = many_positions,
      .rotary_dims = many_rotary_dims,
      .rope_offset = sizes->elements - many_rotary_dims,
      .eps = 1e-6F,
      .flags = flags,
      .positions_checked = true,
  };
}

/* Ten thousand rows at once against as many ops of one row, each with the block where its record is as its region. */
static void check_many(const struct many *many, const struct kvp_host_variant *variant) {
  enum kvp_format_id id = many->geometry.format->id;
  uint64_t block_bytes = many->geometry.block_stride_bytes;
  struct kvp_fused_store_params params = many->params;
  struct kvp_geometry one_block = many->geometry;
  const uint32_t rows = case_count < 1000 ? many_rows / 50 : many_rows; /* a short run is one under a slow tool */
  struct kvp_op_counts together = {0};
  struct kvp_op_counts alone = {0};
  memset(many->together.base, 0xA5, many->together.bytes);
  params.store.row_count = rows;
  variant->fused_store[id](&params, 0, rows, &together);
  one_block.num_blocks = 1;
  one_block.layer_stride_bytes = block_bytes;
  params.store.layer.geometry = &one_block;
  params.store.row_count = 1;
  memset(many->alone.base, 0xA5, many->alone.bytes);
  for (uint32_t row = 0; row < rows; row++) {
    int32_t offset = many->slots[row] % many_tokens;
    params.store.layer.base = many->alone.base + (uint64_t)(many->slots[row] / many_tokens) * block_bytes;
    params.store.source.base =
        many->params.store.source.base + (uint64_t)row * many->params.store.source.stride_bytes;
    params.store.slots = &offset;
    params.positions = &many->positions[row];
    variant->fused_store[id](&params, 0, 1, &alone);
  }
  assert_memory_equal(many->alone.base, many->together.base, many->together.bytes);
  assert_memory_equal(&alone, &together, sizeof(alone));
  assert_int_equal(together.rows_stored, rows);
}

static void test_many_rows(void **state) {
  (void)state;
  static struct many many;
  random_start(seed);
  for (int id = 0; id < kvp_format_count; id++) {
    many_init(&many, (enum kvp_format_id)id, (uint32_t)(id % 4) | KVP_FUSED_ROUND_TO_BF16);
    uint8_t *first = NULL;
    const struct kvp_host_variant *variant;
    for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
      check_many(&many, variant);
      if (first == NULL) {
        first = malloc(many.together.bytes);
        assert_non_null(first);
        memcpy(first, many.together.base, many.together.bytes);
      }
      assert_memory_equal(many.together.base, first, many.together.bytes);
    }
    free(first);
    struct guarded *all[] = {&many.source, &many.weight, &many.cos_sin, &many.together, &many.alone};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
      guarded_free(all[i]);
    }
  }
}

/* ---- records and rows on both sides of 2^31 and 2^32 bytes, in address space that is never filled ---- */

enum { far_rows = 5, far_tokens = 4096, far_blocks = 2200, far_row_bytes = 1024, record_bytes = 528 };

/* Record 4067212 of 4096-token v41 blocks lies across 2^31, 8134408 across 2^32. */
static const int32_t far_slots[far_rows] = {0, 4067212, 8134407, 8134408, far_tokens *far_blocks - 1};
static const int32_t far_positions[far_rows] = {0, 8388608, 16777215, 16777216, 20000000}; /* of 256 bytes each */

static void *reserve(uint64_t bytes) {
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  assert_true(memory != MAP_FAILED);
  return memory;
}

/* Each far row against the reference's, whose region is one token and whose table is one row. */
static void check_far(const struct kvp_fused_store_params *params) {
  struct kvp_geometry one;
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_V41), 0, 1, 1, 1, &one, NULL), KVP_OK);
  const struct kvp_geometry *geometry = params->store.layer.geometry;
  for (size_t row = 0; row < far_rows; row++) {
    uint8_t block[1056];
    uint8_t back[far_row_bytes];
    int32_t nothing = 0;
    struct kvp_fused_store_params near = *params;
    near.store.layer = (struct kvp_layer){block, &one};
    near.store.source.base += row * near.store.source.stride_bytes;
    near.store.slots = &nothing;
    near.store.row_count = 1;
    near.store.cast_back = (struct kvp_rows){back, sizeof(back)};
    near.positions = &nothing;
    near.cos_sin.base += (uint64_t)far_positions[row] * near.cos_sin.stride_bytes;
    struct kvp_op_counts counts = {0};
    reference_fused_store(&near, &counts);
    uint64_t at = (uint64_t)far_slots[row] / far_tokens * geometry->block_stride_bytes +
                  (uint64_t)far_slots[row] % far_tokens * record_bytes;
    assert_memory_equal(params->store.layer.base + at, block, record_bytes);
    assert_memory_equal(params->store.cast_back.base + row * params->store.cast_back.stride_bytes, back,
                        sizeof(back));
  }
}

static void test_host_far_addresses(void **state) {
  (void)state;
  static const uint64_t row_stride = UINT64_C(1) << 30;
  struct kvp_geometry geometry;
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_V41), 0, far_tokens, far_blocks, 1, &geometry, NULL),
                   KVP_OK);
  uint64_t table_bytes = ((uint64_t)far_positions[far_rows - 1] + 1) * many_rotary_dims * sizeof(float);
  uint8_t *region = reserve(geometry.region_bytes);
  uint8_t *source = reserve(far_rows * row_stride);
  uint8_t *table = reserve(table_bytes);
  static uint16_t weight[far_row_bytes / 2];
  random_start(seed);
  for (size_t row = 0; row < far_rows; row++) {
    fill_bf16(source + row * row_stride, far_row_bytes / 2);
    fill_cos_sin(table + (uint64_t)far_positions[row] * many_rotary_dims * sizeof(float), many_rotary_dims);
  }
  fill_bf16((void *)weight, far_row_bytes / 2);
  struct kvp_fused_store_params params = {
      .store = {.layer = {region, &geometry},
                .source = {source, row_stride},
                .slots = far_slots,
                .row_count = far_rows,
                .cast_back = {source + far_row_bytes, row_stride}},
      .norm_weight = weight,
      .positions = far_positions,
      .cos_sin = {table, many_rotary_dims * sizeof(float)},
      .position_count = (uint64_t)far_positions[far_rows - 1] + 1,
      .rotary_dims = many_rotary_dims,
      .rope_offset = far_row_bytes / 2 - many_rotary_dims,
      .eps = 1e-6F,
      .flags = KVP_FUSED_ROUND_TO_BF16,
      .positions_checked = true,
  };
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    for (size_t row = 0; row < far_rows; row++) {
      memset(params.store.cast_back.base + row * row_stride, 0x5A, far_row_bytes);
    }
    struct kvp_op_counts counts = {0};
    variant->fused_store[KVP_FORMAT_V41](&params, 0, far_rows, &counts);
    check_far(&params);
    assert_int_equal(counts.rows_stored, far_rows);
  }
  (void)munmap(region, geometry.region_bytes);
  (void)munmap(source, far_rows * row_stride);
  (void)munmap(table, table_bytes);
}

int main(int argc, char **argv) {
  if (argc > 1) {
    case_count = strtoull(argv[1], NULL, 10);
  }
  if (argc > 2) {
    seed = strtoull(argv[2], NULL, 10);
  }
  reference_init();
  const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(test_random_cases, print_cases_done),
                                     cmocka_unit_test(test_many_rows), cmocka_unit_test(test_host_far_addresses)};
  return cmocka_run_group_tests_name("contract_fused_differential", tests, NULL, NULL);
}
