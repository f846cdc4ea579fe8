/* Random stores and loads against the reference, every variant of the host kernels: formats, block sizes, strides,
 * slots and segments of all kinds, arrays checked before and hostile ones that only the kernel checks. All memory is
 * pre-filled, ends or begins at a guard page, and is compared as a whole.
 *
 *   contract_differential [cases] [seed]
 */
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
#include "tests/contract/reference.h"

enum { rows_max = 40, owner = 7, epoch = 1000, region_bytes_max = 8 << 20 };

static uint64_t case_count = 2000;
static uint64_t seed = 1;
static uint64_t random_state;
static uint64_t cases_done;

static uint64_t random_bits(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * UINT64_C(2685821657736338717) >> 16;
}

static uint32_t random_below(uint32_t limit) {
  return (uint32_t)(random_bits() % limit);
}
static bool random_chance(uint32_t one_in) {
  return random_below(one_in) == 0;
}

/* Everything of one case; both sides start from the same bytes. */
struct scene {
  struct kvp_geometry geometry;
  uint8_t *expected_region; /* of the whole region: both layers */
  uint8_t *start_region;
  struct guarded region;
  uint64_t layer_offset;
  uint64_t *owners;
  struct kvp_owner_check check;
};

static uint16_t random_element(uint32_t kind) {
  static const uint16_t special[] = {0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x0001,
                                     0x807F, 0x7F7F, 0xFF7F, 0x38D1, 0x38D2, 0x0080, 0x4580, 0x3F80};
  uint16_t sign = (uint16_t)(random_below(2) << 15);
  switch (kind) {
  case 0: /* around one */
    return sign | (uint16_t)(0x3D00 + random_below(0x0380));
  case 1: /* a wide range, so that small elements meet large ones */
    return sign | (uint16_t)(0x3000 + random_below(0x1400));
  case 2: /* any finite number */
    return sign | (uint16_t)random_below(0x7F80);
  case 3:
    return special[random_below(sizeof(special) / sizeof(special[0]))];
  default: /* ties: few mantissa bits */
    return sign | (uint16_t)((0x3D00 + random_below(0x0400)) & 0xFFF0);
  }
}

static void fill_rows(uint8_t *rows, uint64_t row_count, uint64_t stride, uint32_t elements) {
  for (uint64_t row = 0; row < row_count; row++) {
    uint32_t kind = random_below(5);
    bool mixed = random_chance(4);
    for (uint32_t i = 0; i < elements; i++) {
      uint16_t bits = random_element(mixed && random_chance(50) ? 3 : kind);
      memcpy(rows + row * stride + 2 * (size_t)i, &bits, sizeof(bits));
    }
  }
}

static void scene_init(struct scene *scene, const struct kvp_format *format) {
  static const uint32_t block_sizes[] = {1, 16, 17, 64, 133, 4096};
  static const uint32_t widths[] = {8, 64, 512, 576};
  uint32_t tokens = block_sizes[random_below(6)];
  uint32_t blocks = 1 + random_below(9);
  uint32_t width = format->id == KVP_FORMAT_BF16 ? widths[random_below(4)] : 0;
  struct kvp_error error;
  for (;;) {
    assert_int_equal(kvp_geometry_init(format, width, tokens, blocks, 2, &scene->geometry, &error), KVP_OK);
    if (scene->geometry.region_bytes <= region_bytes_max) {
      break;
    }
    blocks = 1;
    width = format->id == KVP_FORMAT_BF16 ? 64 : 0;
  }
  uint64_t bytes = scene->geometry.region_bytes;
  scene->region = guarded_make(bytes, !random_chance(3), 0xA5);
  scene->expected_region = malloc(bytes);
  scene->start_region = malloc(bytes);
  scene->owners = calloc(scene->geometry.num_blocks, sizeof(uint64_t));
  assert_true(scene->expected_region != NULL && scene->start_region != NULL && scene->owners != NULL);
  scene->layer_offset = random_below(2) * scene->geometry.layer_stride_bytes;
  for (uint32_t block = 0; block < scene->geometry.num_blocks; block++) {
    uint64_t entry_epoch = random_chance(4) ? epoch + random_below(3) : random_below(epoch);
    enum kvp_block_state state = random_chance(3) ? (enum kvp_block_state)random_below(4) : KVP_BLOCK_LEASED;
    scene->owners[block] = kvp_owner_entry_make(entry_epoch, state, random_chance(4) ? random_below(9) : owner);
  }
  scene->check = (struct kvp_owner_check){
      .entries = random_chance(2) ? scene->owners : NULL, .epoch = epoch, .owner = random_chance(4) ? 0 : owner};
}

static void scene_deinit(struct scene *scene) {
  free(scene->expected_region);
  free(scene->start_region);
  free(scene->owners);
  guarded_free(&scene->region);
}

static uint64_t random_stride(uint64_t row_bytes) {
  uint64_t aligned = (row_bytes + 15) / 16 * 16;
  return random_chance(2) ? aligned : aligned + 16 * (uint64_t)(1 + random_below(4));
}

static uint64_t rows_bytes(uint64_t rows, uint64_t stride, uint64_t row_bytes) {
  return rows == 0 ? 0 : (rows - 1) * stride + row_bytes;
}

static void guarded_fill(struct guarded *memory, uint8_t fill) {
  if (memory->base != NULL) {
    memset(memory->base, fill, memory->bytes);
  }
}

static void guarded_compare(const struct guarded *actual, const struct guarded *expected) {
  assert_int_equal(actual->bytes, expected->bytes);
  if (actual->base != NULL) {
    assert_memory_equal(actual->base, expected->base, actual->bytes);
  }
}

static void expect_counts(const struct kvp_op_counts *actual, const struct kvp_op_counts *expected) {
  assert_int_equal(actual->rows_stored, expected->rows_stored);
  assert_int_equal(actual->rows_loaded, expected->rows_loaded);
  assert_int_equal(actual->rows_skipped, expected->rows_skipped);
  assert_int_equal(actual->rows_rejected, expected->rows_rejected);
  assert_int_equal(actual->rows_nonfinite, expected->rows_nonfinite);
  assert_int_equal(actual->groups_saturated, expected->groups_saturated);
  assert_int_equal(actual->bytes_read, expected->bytes_read);
  assert_int_equal(actual->bytes_written, expected->bytes_written);
}

/* Which rows are over the budget, and what overlapping destinations hold, is not defined: their number is. */
static void expect_crowded_counts(const struct kvp_op_counts *actual, const struct kvp_op_counts *expected) {
  assert_int_equal(actual->rows_loaded, expected->rows_loaded);
  assert_int_equal(actual->rows_rejected, expected->rows_rejected);
  assert_int_equal(actual->bytes_written, expected->bytes_written);
}

/* Slots of distinct records; hostile ones among them where the kernel checks. */
static void fill_slots(const struct scene *scene, int32_t *slots, uint64_t count) {
  uint32_t limit = scene->geometry.num_blocks * scene->geometry.tokens_per_block;
  uint32_t next = random_below(limit);
  uint32_t step = 1 + (count > 0 && limit > 2 * count ? random_below((uint32_t)(limit / count) - 1) : 0);
  uint64_t used = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (random_chance(5) || used + step > limit) {
      slots[i] = -1;
      continue;
    }
    slots[i] = (int32_t)next;
    next = (next + step) % limit;
    used += step;
    if (scene->check.entries != NULL && random_chance(4)) {
      const int32_t hostile[] = {-2, INT32_MIN, INT32_MAX, (int32_t)limit, (int32_t)random_bits()};
      int32_t value = hostile[random_below(5)];
      slots[i] = value >= 0 && value < (int32_t)limit ? -3 : value;
    }
  }
}

static uint64_t slots_skipped(const int32_t *slots, uint64_t count) {
  uint64_t skipped = 0;
  for (uint64_t i = 0; i < count; i++) {
    skipped += slots[i] == -1;
  }
  return skipped;
}

/* Rows of the source, some more than once, zero rows, and sometimes entries that are wrong. */
static void fill_gather(int32_t *gather, uint64_t count, uint32_t source_rows, int32_t *slots) {
  const int32_t hostile[] = {-2, INT32_MIN, INT32_MAX, (int32_t)source_rows, (int32_t)source_rows + 1};
  bool wrong = random_chance(3);
  for (uint64_t i = 0; i < count; i++) {
    gather[i] = source_rows == 0 || random_chance(5) ? -1 : (int32_t)random_below(source_rows);
    if (gather[i] == -1 && !(wrong && random_chance(4))) {
      slots[i] = -1;
    }
    if (wrong && random_chance(6)) {
      gather[i] = hostile[random_below(5)];
    }
  }
}

static void run_store_case(struct scene *scene) {
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  uint64_t count = random_below(rows_max + 1);
  bool main_cache = sizes->loaded_scale_bytes == 0;
  bool gathers = random_chance(3);
  uint64_t source_rows = gathers ? random_below(rows_max) : count;
  uint64_t stride = random_stride(sizes->row_bytes);
  struct guarded slots = guarded_make(count * sizeof(int32_t), true, 0);
  struct guarded gather = guarded_make(gathers ? count * sizeof(int32_t) : 0, true, 0);
  struct guarded source = guarded_make(rows_bytes(source_rows, stride, sizes->row_bytes), true, 0);
  fill_rows(source.base, source_rows, stride, sizes->elements);
  fill_slots(scene, (void *)slots.base, count);
  if (gathers) {
    fill_gather((void *)gather.base, count, (uint32_t)source_rows, (void *)slots.base);
  }
  bool cast_back = main_cache && count > 0 && random_chance(2);
  uint64_t back_stride = random_stride(sizes->row_bytes);
  uint64_t back_bytes = cast_back ? rows_bytes(count, back_stride, sizes->row_bytes) : 0;
  struct guarded back = guarded_make(back_bytes, true, 0x5A);
  struct guarded expected_back = guarded_make(back_bytes, true, 0x5A);
  struct kvp_store_params params = {.layer = {scene->expected_region + scene->layer_offset, &scene->geometry},
                                    .source = {source.base, stride},
                                    .slots = cast_back && random_chance(4) ? NULL : (void *)slots.base,
                                    .row_count = count,
                                    .gather = (void *)gather.base,
                                    .source_rows = source_rows,
                                    .rows_skipped = slots_skipped((void *)slots.base, count),
                                    .cast_back = {expected_back.base, back_stride},
                                    .check = scene->check};
  memcpy(scene->expected_region, scene->start_region, scene->region.bytes);
  struct kvp_op_counts expected = {0};
  reference_store(&params, &expected);
  params.layer.base = scene->region.base + scene->layer_offset;
  params.cast_back.base = back.base;
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    memcpy(scene->region.base, scene->start_region, scene->region.bytes);
    guarded_fill(&back, 0x5A);
    struct kvp_op_counts counts = {0};
    uint64_t cut = random_below((uint32_t)count + 1);
    variant->store[scene->geometry.format->id](&params, 0, cut, &counts);
    variant->store[scene->geometry.format->id](&params, cut, count, &counts);
    expect_counts(&counts, &expected);
    assert_memory_equal(scene->region.base, scene->expected_region, scene->region.bytes);
    guarded_compare(&back, &expected_back);
  }
  guarded_free(&slots);
  guarded_free(&gather);
  guarded_free(&source);
  guarded_free(&back);
  guarded_free(&expected_back);
}

/* Far off or by one. */
static void make_hostile(const struct scene *scene, struct kvp_segment *segment, uint64_t total_k) {
  int32_t tokens = (int32_t)scene->geometry.tokens_per_block;
  int32_t rows = segment->src_end - segment->src_begin;
  const int32_t values[] = {-2, INT32_MIN, INT32_MAX, -1, (int32_t)random_bits()};
  int32_t value = values[random_below(5)];
  switch (random_below(8)) {
  case 0:
    segment->src_block = value;
    break;
  case 1:
    segment->src_block = (int32_t)scene->geometry.num_blocks;
    break;
  case 2:
    segment->src_begin = value;
    break;
  case 3:
    segment->src_begin = segment->src_end + 1;
    break;
  case 4:
    segment->src_end = value;
    break;
  case 5:
    segment->src_begin = tokens + 1 - rows;
    segment->src_end = tokens + 1;
    break;
  case 6:
    segment->dst_offset = value;
    break;
  default:
    segment->dst_offset = (int32_t)total_k + 1 - rows;
  }
}

/* Disjoint destinations with gaps, then some spoilt. A spoilt one that happens to be valid is left out: what
 * overlapping destinations hold is not defined. */
static uint64_t fill_segments(const struct scene *scene, struct kvp_segment *segments, uint64_t count) {
  uint32_t tokens = scene->geometry.tokens_per_block;
  uint32_t rows_limit = tokens < 70 ? tokens : 70;
  uint64_t next = random_below(3);
  for (uint64_t i = 0; i < count; i++) {
    uint32_t rows = random_chance(6) ? 0 : random_below(rows_limit + 1);
    uint32_t begin = random_below(tokens - rows + 1);
    int32_t block = random_chance(5) ? -1 : (int32_t)random_below(scene->geometry.num_blocks);
    segments[i] = (struct kvp_segment){block, (int32_t)begin, (int32_t)(begin + rows), (int32_t)next};
    next += rows + (random_chance(3) ? random_below(4) : 0);
  }
  return next + random_below(3);
}

static void spoil_segments(const struct scene *scene, struct kvp_segment *segments, uint64_t count,
                           uint64_t total_k) {
  for (uint64_t i = 0; i < count; i++) {
    if (!random_chance(3)) {
      continue;
    }
    struct kvp_segment kept = segments[i];
    make_hostile(scene, &segments[i], total_k);
    int64_t rows = (int64_t)segments[i].src_end - segments[i].src_begin;
    bool harmless = segments[i].src_begin >= 0 && rows >= 0 && segments[i].dst_offset >= 0 &&
                    segments[i].src_end <= (int64_t)scene->geometry.tokens_per_block &&
                    segments[i].dst_offset + rows <= (int64_t)total_k;
    if (harmless && segments[i].src_block == kept.src_block) {
      segments[i] = kept;
    }
  }
}

/* Valid or spoilt segments of any destinations, overlapping and more rows than the output has. */
static void crowd_segments(struct kvp_segment *segments, uint64_t count, uint64_t total_k) {
  for (uint64_t i = 0; i < count; i++) {
    int64_t rows = (int64_t)segments[i].src_end - segments[i].src_begin;
    if (rows >= 0 && rows <= (int64_t)total_k) {
      segments[i].dst_offset = (int32_t)random_below((uint32_t)(total_k - (uint64_t)rows) + 1);
    }
  }
}

/* What is known of an array that was checked. */
static void sum_segments(const struct kvp_segment *segments, uint64_t count, struct kvp_load_params *params) {
  for (uint64_t i = 0; i < count; i++) {
    uint64_t rows = (uint64_t)(segments[i].src_end - segments[i].src_begin);
    params->rows += rows;
    params->rows_zeroed += segments[i].src_block == -1 ? rows : 0;
    params->segment_rows_max = rows > params->segment_rows_max ? rows : params->segment_rows_max;
  }
}

static void run_load_case(struct scene *scene) {
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  uint64_t count = random_below(12);
  struct guarded segments = guarded_make(count * sizeof(struct kvp_segment), true, 0);
  uint64_t total_k = fill_segments(scene, (void *)segments.base, count);
  bool unchecked = scene->check.entries != NULL;
  bool crowded = unchecked && random_chance(4);
  if (unchecked) {
    spoil_segments(scene, (void *)segments.base, count, total_k);
  }
  if (crowded) {
    total_k = total_k / (1 + random_below(3));
    crowd_segments((void *)segments.base, count, total_k);
  }
  bool dense = random_chance(2);
  uint64_t stride = dense ? sizes->loaded_row_bytes : random_stride(sizes->loaded_row_bytes);
  uint64_t scale_stride = dense ? sizes->loaded_scale_bytes : random_stride(sizes->loaded_scale_bytes);
  bool has_scales = sizes->loaded_scale_bytes != 0;
  uint64_t out_bytes = rows_bytes(total_k, stride, sizes->loaded_row_bytes);
  uint64_t scales_bytes = has_scales ? rows_bytes(total_k, scale_stride, sizes->loaded_scale_bytes) : 0;
  bool at_end = !random_chance(3);
  struct guarded out = guarded_make(out_bytes, at_end, 0x5A);
  struct guarded scales = guarded_make(scales_bytes, at_end, 0x5A);
  struct guarded expected_out = guarded_make(out_bytes, at_end, 0x5A);
  struct guarded expected_scales = guarded_make(scales_bytes, at_end, 0x5A);
  memcpy(scene->region.base, scene->start_region, scene->region.bytes);
  struct kvp_load_params params = {.layer = {scene->region.base + scene->layer_offset, &scene->geometry},
                                   .segments = (void *)segments.base,
                                   .segment_count = count,
                                   .total_k = total_k,
                                   .out = {expected_out.base, stride},
                                   .scales = {expected_scales.base, scale_stride},
                                   .check = scene->check};
  uint64_t rows_taken = 0;
  if (unchecked) {
    params.rows_taken = &rows_taken;
  } else {
    sum_segments((void *)segments.base, count, &params);
  }
  struct kvp_op_counts expected = {0};
  reference_load(&params, &expected);
  params.out.base = out.base;
  params.scales.base = scales.base;
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    guarded_fill(&out, 0x5A);
    guarded_fill(&scales, 0x5A);
    struct kvp_op_counts counts = {0};
    uint64_t cut = random_below((uint32_t)count + 1);
    rows_taken = 0;
    variant->load[scene->geometry.format->id](&params, 0, cut, &counts);
    variant->load[scene->geometry.format->id](&params, cut, count, &counts);
    if (crowded) {
      expect_crowded_counts(&counts, &expected);
    } else {
      expect_counts(&counts, &expected);
      guarded_compare(&out, &expected_out);
      guarded_compare(&scales, &expected_scales);
    }
    assert_memory_equal(scene->region.base, scene->start_region, scene->region.bytes);
  }
  guarded_free(&segments);
  guarded_free(&out);
  guarded_free(&scales);
  guarded_free(&expected_out);
  guarded_free(&expected_scales);
}

/* What a region may hold before a load: any bytes, or records of a store. */
static void fill_region(struct scene *scene) {
  uint64_t bytes = scene->region.bytes;
  if (random_chance(4)) {
    for (uint64_t i = 0; i < bytes; i++) {
      scene->start_region[i] = (uint8_t)random_bits();
    }
    return;
  }
  memset(scene->start_region, 0xA5, bytes);
  const struct kvp_format_sizes *sizes = &scene->geometry.sizes;
  uint64_t count = rows_max;
  uint8_t *rows = malloc(count * sizes->row_bytes);
  int32_t slots[rows_max];
  assert_non_null(rows);
  fill_rows(rows, count, sizes->row_bytes, sizes->elements);
  uint32_t limit = scene->geometry.num_blocks * scene->geometry.tokens_per_block;
  for (uint64_t i = 0; i < count; i++) {
    slots[i] = (int32_t)random_below(limit);
  }
  struct kvp_store_params params = {.layer = {scene->start_region + scene->layer_offset, &scene->geometry},
                                    .source = {rows, sizes->row_bytes},
                                    .slots = slots,
                                    .row_count = count};
  struct kvp_op_counts counts = {0};
  reference_store(&params, &counts);
  free(rows);
}

static void test_random_cases(void **state) {
  (void)state;
  for (cases_done = 0; cases_done < case_count; cases_done++) {
    random_state = (seed << 32) + cases_done + 1;
    (void)random_bits();
    struct scene scene;
    scene_init(&scene, kvp_format_get((enum kvp_format_id)random_below(kvp_format_count)));
    fill_region(&scene);
    if (random_chance(2)) {
      run_store_case(&scene);
    } else {
      run_load_case(&scene);
    }
    scene_deinit(&scene);
  }
}

/* Also after a failure: which case it was. */
static int print_cases_done(void **state) {
  (void)state;
  print_message("%llu of %llu cases passed, seed %llu\n", (unsigned long long)cases_done,
                (unsigned long long)case_count, (unsigned long long)seed);
  return 0;
}

/* Records and output rows on both sides of 2^31 and 2^32 bytes, in address space that is never filled. Record 4067212
 * of 4096-token v41 blocks lies across 2^31, 8134408 across 2^32; output rows of 1024 bytes meet them evenly. */
enum { far_tokens = 4096, far_blocks = 2200, far_rows = 8, far_row_bytes = 1024 };

static const uint64_t far_total_k = 5000001;
static const int32_t far_slots[far_rows] = {0,       4067212, 4067213, 8134407,
                                            8134408, 8134409, 8134410, far_tokens *far_blocks - 1};
static const int32_t far_outputs[far_rows] = {0, 2097151, 2097152, 4194303, 4194304, 4194305, 4194306, 5000000};

static void *reserve(uint64_t bytes) {
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  assert_true(memory != MAP_FAILED);
  return memory;
}

struct far_expected {
  uint8_t block[1056]; /* a v41 block of one token: 528 bytes and padding */
  uint8_t loaded[far_row_bytes];
};

static void far_expected_make(struct kvp_rows row, struct far_expected *out) {
  struct kvp_geometry one;
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_V41), 0, 1, 1, 1, &one, NULL), KVP_OK);
  int32_t slot = 0;
  struct kvp_store_params params = {.layer = {out->block, &one},
                                    .source = row,
                                    .slots = &slot,
                                    .row_count = 1,
                                    .cast_back = {out->loaded, far_row_bytes}};
  struct kvp_op_counts counts = {0};
  reference_store(&params, &counts);
}

static void check_far(const struct kvp_host_variant *variant, const struct kvp_geometry *geometry, uint8_t *region,
                      uint8_t *out, uint8_t *source) {
  struct kvp_store_params store = {
      .layer = {region, geometry}, .source = {source, far_row_bytes}, .slots = far_slots, .row_count = far_rows};
  struct kvp_segment segments[far_rows];
  for (size_t row = 0; row < far_rows; row++) {
    int32_t offset = far_slots[row] % far_tokens;
    segments[row] = (struct kvp_segment){far_slots[row] / far_tokens, offset, offset + 1, far_outputs[row]};
  }
  struct kvp_load_params load = {.layer = {region, geometry},
                                 .segments = segments,
                                 .segment_count = far_rows,
                                 .total_k = far_total_k,
                                 .out = {out, far_row_bytes}};
  struct kvp_op_counts counts = {0};
  variant->store[KVP_FORMAT_V41](&store, 0, far_rows, &counts);
  variant->load[KVP_FORMAT_V41](&load, 0, far_rows, &counts);
  for (size_t row = 0; row < far_rows; row++) {
    struct far_expected expected;
    far_expected_make((struct kvp_rows){source + row * far_row_bytes, far_row_bytes}, &expected);
    uint64_t block = (uint64_t)far_slots[row] / far_tokens;
    uint64_t offset = (uint64_t)far_slots[row] % far_tokens;
    assert_memory_equal(region + block * geometry->block_stride_bytes + offset * 528, expected.block, 528);
    assert_memory_equal(out + (uint64_t)far_outputs[row] * far_row_bytes, expected.loaded, far_row_bytes);
  }
}

static void test_host_far_addresses(void **state) {
  (void)state;
  struct kvp_geometry geometry;
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_V41), 0, far_tokens, far_blocks, 1, &geometry, NULL),
                   KVP_OK);
  assert_true(geometry.region_bytes > UINT64_C(1) << 32);
  uint8_t *region = reserve(geometry.region_bytes);
  uint8_t *out = reserve(far_total_k * far_row_bytes);
  struct guarded source = guarded_make((uint64_t)far_rows * far_row_bytes, true, 0);
  random_state = 99;
  fill_rows(source.base, far_rows, far_row_bytes, far_row_bytes / 2);
  const struct kvp_host_variant *variant;
  for (size_t v = 0; (variant = kvp_host_variant_get(v)) != NULL; v++) {
    check_far(variant, &geometry, region, out, source.base);
    (void)madvise(region, geometry.region_bytes, MADV_DONTNEED);
    (void)madvise(out, far_total_k * far_row_bytes, MADV_DONTNEED);
  }
  guarded_free(&source);
  (void)munmap(region, geometry.region_bytes);
  (void)munmap(out, far_total_k * far_row_bytes);
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
                                     cmocka_unit_test(test_host_far_addresses)};
  return cmocka_run_group_tests_name("contract_differential", tests, NULL, NULL);
}
