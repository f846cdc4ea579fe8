/* Arrays in GPU memory that hold anything, and that change while a kernel reads them: nothing outside the session's
 * own blocks and the op's views is touched, and the counts add up. By the kernels for few rows and by those for many,
 * whatever the set's size.
 *
 *   contract_hostile [small]
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/hostile_scene.h"
#include "tests/gpu/report.h"
#include "tests/gpu/rewriter.h"

enum { tokens_per_block = 17 };

static uint64_t rows_max = 20000; /* of one op */
static uint32_t num_blocks = 1024;
static uint32_t rounds = 20;
static uint64_t rewrites = rewrites_many;
static uint64_t random_counter = 1;

static uint64_t random_bits(void) {
  return mix_bits(random_counter++ * UINT64_C(0x9E3779B97F4A7C15));
}

static int32_t random_below(uint64_t limit) {
  return (int32_t)(random_bits() % limit);
}

static uint64_t slot_limit(const struct scene *scene) {
  return (uint64_t)scene->geometry.num_blocks * scene->geometry.tokens_per_block;
}

/* Of a round: any bits; around the region; the edges of everything. */
static int32_t random_value(uint32_t round, uint64_t limit) {
  const int32_t edges[] = {INT32_MIN,          INT32_MIN + 1,  -2,        -1,         0,
                           (int32_t)limit - 1, (int32_t)limit, INT32_MAX, 0x7FC00000, -256};
  switch (round % 3) {
  case 0:
    return (int32_t)(uint32_t)random_bits();
  case 1:
    return random_below(limit + 40) - 20;
  default:
    return random_bits() % 2 == 0 ? edges[random_bits() % 10] : random_below(limit);
  }
}

static void *device_copy(const void *host, uint64_t bytes) {
  void *device = NULL;
  gpu_check(cudaMalloc(&device, bytes));
  gpu_check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
  return device;
}

static void expect_equal(const char *what, uint64_t found, uint64_t expected) {
  if (found != expected) {
    report_failed("%s: %llu instead of %llu", what, (unsigned long long)found, (unsigned long long)expected);
  }
}

static void expect_counts(const struct kvp_op_counts *found, const struct kvp_op_counts *expected) {
  expect_equal("rows_stored", found->rows_stored, expected->rows_stored);
  expect_equal("rows_loaded", found->rows_loaded, expected->rows_loaded);
  expect_equal("rows_skipped", found->rows_skipped, expected->rows_skipped);
  expect_equal("rows_rejected", found->rows_rejected, expected->rows_rejected);
  expect_equal("rows_nonfinite", found->rows_nonfinite, expected->rows_nonfinite);
  expect_equal("groups_saturated", found->groups_saturated, expected->groups_saturated);
  expect_equal("bytes_read", found->bytes_read, expected->bytes_read);
  expect_equal("bytes_written", found->bytes_written, expected->bytes_written);
}

static void expect_device_bytes(const char *what, const struct gpu_memory *device, const uint8_t *expected) {
  uint8_t *found = malloc(device->bytes);
  if (found == NULL) {
    report_failed("out of memory");
  }
  gpu_check(cudaMemcpy(found, device->base, device->bytes, cudaMemcpyDeviceToHost));
  for (uint64_t i = 0; i < device->bytes; i++) {
    if (found[i] != expected[i]) {
      report_failed("%s: byte %llu is 0x%02X, not 0x%02X", what, (unsigned long long)i, found[i], expected[i]);
    }
  }
  free(found);
}

/* Copies of the scene's memory that the host kernels run on. */
struct twin {
  uint8_t *region;
  uint8_t *source;
  uint8_t *out;
  uint8_t *scales;
};

static uint8_t *copied(const struct gpu_memory *memory) {
  uint8_t *copy = malloc(memory->bytes);
  if (copy == NULL) {
    report_failed("out of memory");
  }
  gpu_check(cudaMemcpy(copy, memory->base, memory->bytes, cudaMemcpyDeviceToHost));
  return copy;
}

static struct twin twin_make(const struct scene *scene) {
  return (struct twin){copied(&scene->region), copied(&scene->source), copied(&scene->out), copied(&scene->scales)};
}

static void twin_free(struct twin *twin) {
  free(twin->region);
  free(twin->source);
  free(twin->out);
  free(twin->scales);
}

/* ---- arrays that stay what they are ---- */

/* A slot that was there before becomes -1: what a record holds that two rows name is not said. */
static void distinct_slots(const struct scene *scene, int32_t *slots, uint64_t count) {
  uint64_t limit = slot_limit(scene);
  bool *seen = calloc(limit, sizeof(*seen));
  if (seen == NULL) {
    report_failed("out of memory");
  }
  for (uint64_t i = 0; i < count; i++) {
    if (slots[i] >= 0 && (uint64_t)slots[i] < limit) {
      slots[i] = seen[slots[i]] ? -1 : slots[i];
      seen[slots[i] < 0 ? 0 : slots[i]] |= slots[i] >= 0;
    }
  }
  free(seen);
}

static void stable_store(struct scene *scene, uint32_t round) {
  uint64_t count = scene->rows_max;
  int32_t *slots = malloc(count * sizeof(*slots));
  if (slots == NULL) {
    report_failed("out of memory");
  }
  for (uint64_t i = 0; i < count; i++) {
    slots[i] = random_value(round, slot_limit(scene));
  }
  distinct_slots(scene, slots, count);
  bool cast_back = scene->geometry.sizes.loaded_scale_bytes == 0 && round % 2 == 1;
  scene_clear_outputs(scene);
  struct twin twin = twin_make(scene);
  struct kvp_store_params params = scene_store(scene, count, cast_back);
  struct kvp_store_params host = params;
  host.layer.base = twin.region + (params.layer.base - scene->region.base);
  host.source.base = twin.source;
  host.slots = slots;
  host.cast_back.base = cast_back ? twin.out + scene_margin_bytes : NULL;
  host.check.entries = scene->owners;
  struct kvp_op_counts expected = {0};
  kvp_host_store(&host, 0, count, &expected);
  int32_t *device_slots = device_copy(slots, count * sizeof(*slots));
  params.slots = device_slots;
  struct kvp_op_counts counts = scene_run_store(scene, &params);
  expect_counts(&counts, &expected);
  expect_device_bytes("region", &scene->region, twin.region);
  expect_device_bytes("cast-back", &scene->out, twin.out);
  scene_check_region(scene, false);
  gpu_check(cudaFree(device_slots));
  twin_free(&twin);
  free(slots);
}

/* Good segments with destinations of their own, and among them some that are good for nothing. */
static uint64_t make_segments(const struct scene *scene, struct kvp_segment *segments, uint64_t count,
                              uint64_t total_k) {
  uint64_t next = 0;
  uint64_t made = 0;
  for (; made < count && next + tokens_per_block <= total_k; made++) {
    int32_t end = 1 + random_below(tokens_per_block);
    int32_t begin = random_below((uint64_t)end);
    int32_t block = random_below(scene->geometry.num_blocks);
    segments[made] = (struct kvp_segment){block, begin, end, (int32_t)next};
    next += (uint64_t)(end - begin) + random_bits() % 3;
    const int32_t bad[] = {INT32_MIN, -2, INT32_MAX, (int32_t)scene->geometry.num_blocks};
    switch (random_bits() % 8) {
    case 0:
      segments[made].src_block = bad[random_bits() % 4];
      break;
    case 1:
      segments[made].src_begin = random_bits() % 2 == 0 ? INT32_MIN : end + 1;
      break;
    case 2:
      segments[made].src_end = random_bits() % 2 == 0 ? INT32_MAX : tokens_per_block + 1;
      break;
    case 3:
      segments[made].dst_offset = random_bits() % 2 == 0 ? INT32_MAX : -1;
      break;
    case 4:
      segments[made].src_block = -1;
      break;
    default:
      break;
    }
  }
  return made;
}

static void stable_load(struct scene *scene) {
  uint64_t count = scene->rows_max / 4;
  uint64_t total_k = scene->rows_max;
  struct kvp_segment *segments = calloc(count, sizeof(*segments));
  if (segments == NULL) {
    report_failed("out of memory");
  }
  count = make_segments(scene, segments, count, total_k);
  scene_clear_outputs(scene);
  struct twin twin = twin_make(scene);
  struct kvp_load_params params = scene_load(scene, total_k);
  params.segment_count = count;
  struct kvp_load_params host = params;
  uint64_t taken = 0;
  host.layer.base = twin.region + (params.layer.base - scene->region.base);
  host.segments = segments;
  host.out.base = twin.out + scene_margin_bytes;
  host.scales.base = params.scales.base == NULL ? NULL : twin.scales + scene_margin_bytes;
  host.rows_taken = &taken;
  host.check.entries = scene->owners;
  struct kvp_op_counts expected = {0};
  kvp_host_load(&host, 0, count, &expected);
  struct kvp_segment *device_segments = device_copy(segments, count * sizeof(*segments));
  params.segments = device_segments;
  struct kvp_op_counts counts = scene_run_load(scene, &params);
  expect_counts(&counts, &expected);
  expect_device_bytes("out", &scene->out, twin.out);
  expect_device_bytes("scales", &scene->scales, twin.scales);
  expect_device_bytes("region", &scene->region, twin.region);
  scene_check_outputs(scene, total_k);
  gpu_check(cudaFree(device_segments));
  twin_free(&twin);
  free(segments);
}

/* Any bits, so that segments overlap and ask for more than there is. */
static void random_load(struct scene *scene, uint32_t round) {
  uint64_t count = scene->rows_max;
  uint64_t total_k = scene->rows_max / 2;
  int32_t *values = malloc(4 * count * sizeof(*values));
  if (values == NULL) {
    report_failed("out of memory");
  }
  for (uint64_t i = 0; i < 4 * count; i++) {
    const uint64_t limits[] = {scene->geometry.num_blocks, tokens_per_block, tokens_per_block, total_k};
    values[i] = random_value(round, limits[i % 4]);
  }
  struct kvp_load_params params = scene_load(scene, total_k);
  params.segment_count = count;
  int32_t *device_values = device_copy(values, 4 * count * sizeof(*values));
  params.segments = (const void *)device_values;
  scene_clear_outputs(scene);
  struct kvp_op_counts counts = scene_run_load(scene, &params);
  if (counts.rows_loaded > total_k) {
    report_failed("%llu rows loaded into %llu", (unsigned long long)counts.rows_loaded, (unsigned long long)total_k);
  }
  scene_check_outputs(scene, total_k);
  scene_check_region(scene, false);
  gpu_check(cudaFree(device_values));
  free(values);
}

/* ---- arrays that change while they are read ---- */

static void changing_store(struct scene *scene, bool on_host) {
  static struct rewriter rewriter;
  for (uint32_t i = 0; i < rewriter_choices_max; i++) {
    rewriter.choices[i] = random_value(i, slot_limit(scene));
  }
  rewriter_start(&rewriter, scene->rows_max, rewrites, on_host);
  bool cast_back = scene->geometry.sizes.loaded_scale_bytes == 0;
  struct kvp_store_params params = scene_store(scene, scene->rows_max, cast_back);
  params.slots = rewriter.values;
  scene_clear_outputs(scene);
  for (uint32_t round = 0; round < rounds; round++) {
    struct kvp_op_counts counts = scene_run_store(scene, &params);
    expect_equal("rows stored, skipped and rejected", counts.rows_stored + counts.rows_skipped + counts.rows_rejected,
                 params.row_count);
  }
  rewriter_end(&rewriter);
  scene_check_region(scene, false);
  if (cast_back) {
    scene_check_outputs(scene, params.row_count);
  }
}

static void changing_load(struct scene *scene, bool on_host) {
  static struct rewriter rewriter;
  uint64_t total_k = scene->rows_max / 2;
  for (uint32_t i = 0; i < rewriter_choices_max; i++) {
    rewriter.choices[i] = random_value(i, i % 4 == 0 ? total_k : num_blocks);
  }
  rewriter_start(&rewriter, 4 * scene->rows_max, rewrites, on_host);
  struct kvp_load_params params = scene_load(scene, total_k);
  params.segments = (const void *)rewriter.values;
  params.segment_count = scene->rows_max;
  scene_clear_outputs(scene);
  for (uint32_t round = 0; round < rounds; round++) {
    struct kvp_op_counts counts = scene_run_load(scene, &params);
    if (counts.rows_loaded > total_k) {
      report_failed("%llu rows loaded into %llu", (unsigned long long)counts.rows_loaded,
                    (unsigned long long)total_k);
    }
  }
  rewriter_end(&rewriter);
  scene_check_outputs(scene, total_k);
  scene_check_region(scene, false);
}

/* ---- plans that ask for more than their output ---- */

static void greedy_load(const struct kvp_format *format, const char *size, uint64_t segment_count) {
  enum { big_tokens = 4096 };
  struct scene scene;
  report_begin("greedy load %s, %s", format->name, size);
  scene_init(&scene, format, big_tokens, 8, big_tokens);
  struct kvp_segment *segments = calloc(segment_count, sizeof(*segments));
  if (segments == NULL) {
    report_failed("out of memory");
  }
  for (uint64_t i = 0; i < segment_count; i++) {
    segments[i] = (struct kvp_segment){(int32_t)(i % 3), 0, big_tokens, 0};
  }
  struct kvp_segment *device_segments = device_copy(segments, segment_count * sizeof(*segments));
  struct kvp_load_params params = scene_load(&scene, big_tokens);
  params.segments = device_segments;
  params.segment_count = segment_count;
  double began = gpu_seconds();
  struct kvp_op_counts counts = scene_run_load(&scene, &params);
  double seconds = gpu_seconds() - began;
  if (counts.rows_loaded == 0 || counts.rows_loaded > big_tokens) {
    report_failed("%llu rows loaded into %d", (unsigned long long)counts.rows_loaded, big_tokens);
  }
  scene_check_outputs(&scene, big_tokens);
  scene_check_region(&scene, true);
  report_passed("%.3g rows asked for, %llu loaded, in %.3f ms", (double)segment_count * big_tokens,
                (unsigned long long)counts.rows_loaded, seconds * 1e3);
  gpu_check(cudaFree(device_segments));
  free(segments);
  scene_deinit(&scene);
}

static void run_format(const struct kvp_format *format, const char *size) {
  struct scene scene;
  scene_init(&scene, format, tokens_per_block, num_blocks, rows_max);
  report_begin("hostile slots %s, %s", format->name, size);
  for (uint32_t round = 0; round < 6; round++) {
    stable_store(&scene, round);
  }
  report_passed("%llu slots of each kind", (unsigned long long)rows_max);
  report_begin("hostile segments %s, %s", format->name, size);
  for (uint32_t round = 0; round < 6; round++) {
    stable_load(&scene);
    random_load(&scene, round);
  }
  report_passed("%llu segments of each kind", (unsigned long long)rows_max);
  for (int on_host = 0; on_host < 2; on_host++) {
    const char *who = on_host == 1 ? "the CPU" : "another stream";
    report_begin("slots rewritten by %s %s, %s", who, format->name, size);
    changing_store(&scene, on_host == 1);
    report_passed("%u stores", rounds);
    report_begin("segments rewritten by %s %s, %s", who, format->name, size);
    changing_load(&scene, on_host == 1);
    report_passed("%u loads", rounds);
  }
  scene_deinit(&scene);
}

int main(int argc, char **argv) {
  bool small = argc > 1 && strcmp(argv[1], "small") == 0;
  rows_max = small ? 600 : rows_max;
  num_blocks = small ? 96 : num_blocks;
  rounds = small ? 3 : rounds;
  rewrites = small ? rewrites_few : rewrites;
  gpu_open();
  for (size_t i = 0; i < scene_size_count; i++) {
    const char *size = scene_size_pin(i);
    for (int id = 0; id < kvp_format_count; id++) {
      run_format(kvp_format_get((enum kvp_format_id)id), size);
    }
    greedy_load(kvp_format_get(KVP_FORMAT_V41), size, small ? 1000 : 1000000);
    greedy_load(kvp_format_get(KVP_FORMAT_INDEX_FP4), size, small ? 1000 : 1000000);
  }
  return 0;
}
