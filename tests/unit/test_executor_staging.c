/* What a device with memory of its own needs on the host side: runs of pages, the layout of a step, clocks, names. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/executor/device_clock.h"
#include "server/executor/device_cuda_name.h"
#include "server/executor/page_runs.h"
#include "server/executor/step_layout.h"

static uint64_t random_next(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

/* ---- runs of pages ---- */

enum { model_pages = 512 };

static bool model_has_room(const uint8_t *model, uint32_t count) {
  uint32_t length = 0;
  for (uint32_t i = 0; i < model_pages && length < count; i++) {
    length = model[i] != 0 ? 0 : length + 1;
  }
  return length >= count;
}

/* Random runs taken and given back, against a byte a page: no page is out twice, and what fits is found. */
static void test_page_runs(void **state) {
  (void)state;
  enum { rounds = 100000, runs_max = 64 };
  static uint8_t model[model_pages];
  struct kvp_page_runs runs;
  struct {
    uint32_t first, count;
  } taken[runs_max];
  uint32_t taken_count = 0;
  uint64_t random = 11;
  uint32_t refused = 0;
  assert_true(kvp_page_runs_init(&runs, model_pages));
  for (int round = 0; round < rounds; round++) {
    const bool takes = taken_count == 0 || (taken_count < runs_max && random_next(&random) % 2 == 0);
    if (takes) {
      const uint32_t count = 1 + (uint32_t)(random_next(&random) % (random_next(&random) % 4 == 0 ? 200 : 8));
      const uint32_t first = kvp_page_runs_take(&runs, count);
      assert_int_equal(first != KVP_NO_PAGES, model_has_room(model, count));
      refused += first == KVP_NO_PAGES;
      for (uint32_t i = 0; first != KVP_NO_PAGES && i < count; i++) {
        assert_true(first + i < model_pages);
        assert_int_equal(model[first + i]++, 0);
      }
      if (first != KVP_NO_PAGES) {
        taken[taken_count].first = first;
        taken[taken_count++].count = count;
      }
      continue;
    }
    const uint32_t k = (uint32_t)(random_next(&random) % taken_count);
    memset(model + taken[k].first, 0, taken[k].count);
    kvp_page_runs_give(&runs, taken[k].first, taken[k].count);
    taken[k] = taken[--taken_count];
  }
  assert_true(refused > 0);
  while (taken_count > 0) {
    taken_count--;
    kvp_page_runs_give(&runs, taken[taken_count].first, taken[taken_count].count);
  }
  assert_int_equal(kvp_page_runs_take(&runs, model_pages), 0); /* all of them in one piece again */
  assert_int_equal(kvp_page_runs_take(&runs, 1), KVP_NO_PAGES);
  kvp_page_runs_deinit(&runs);
}

/* ---- layouts ---- */

static void chain(struct kvp_device_op *ops, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    ops[i].next = &ops[i + 1];
  }
  ops[count] = (struct kvp_device_op){.kind = KVP_DEVICE_SIGNAL};
}

static struct kvp_step_layout layout;

/* On paper: 100 slots used by two ops, 50 bytes to write, 40 bytes read twice. */
static void test_layout_of_a_step(void **state) {
  (void)state;
  static _Alignas(64) uint8_t bytes[4096];
  static uint8_t results[80];
  struct kvp_device_op ops[6] = {0};
  ops[0].kind = ops[2].kind = KVP_DEVICE_STORE;
  ops[0].params.store.slots = ops[2].params.store.slots = (const int32_t *)(const void *)(bytes + 512);
  ops[0].params.store.row_count = ops[2].params.store.row_count = 100;
  ops[1].kind = KVP_DEVICE_WRITE;
  ops[1].params.transfer = (struct kvp_transfer_params){.row_count = 5, .row_bytes = 10, .host = bytes};
  for (int i = 3; i < 5; i++) {
    ops[i].kind = KVP_DEVICE_READ;
    ops[i].params.transfer =
        (struct kvp_transfer_params){.row_count = 4, .row_bytes = 10, .host = i == 3 ? results : results + 40};
  }
  ops[0].host_arrays = ops[2].host_arrays = KVP_ARRAY_SLOTS;
  chain(ops, 5);
  kvp_step_layout_make(&layout, ops, 80);
  assert_int_equal(layout.op_count, 5);
  assert_int_equal(layout.arrays_bytes, 448); /* 400 to 64 */
  assert_int_equal(layout.array_offset_bytes[layout.op_first_array[0]], 0);
  assert_int_equal(layout.array_offset_bytes[layout.op_first_array[2]], 0);
  assert_int_equal(layout.op_offset_bytes[1], 448);
  assert_int_equal(layout.results_offset_bytes, 512); /* 448 + 50 to 64 */
  assert_int_equal(layout.op_offset_bytes[3], 512);
  assert_int_equal(layout.op_offset_bytes[4], 552);
  assert_int_equal(layout.found_offset_bytes, 640);          /* 512 + 80 to 64 */
  assert_int_equal(layout.finished_offset_bytes, 640 + 448); /* 5 * 80 = 400 to 64 */
  assert_int_equal(layout.bytes, 640 + 448 + 64);

  /* Of arrays that lie in a buffer nothing is copied, nor of a fill. */
  ops[0].host_arrays = ops[2].host_arrays = 0;
  ops[1].kind = KVP_DEVICE_FILL;
  kvp_step_layout_make(&layout, ops, 80);
  assert_int_equal(layout.arrays_bytes, 0);
  assert_int_equal(layout.results_offset_bytes, 0);
  struct kvp_device_op nothing[1] = {0};
  chain(nothing, 0);
  kvp_step_layout_make(&layout, nothing, 80);
  assert_int_equal(layout.op_count, 0);
  assert_int_equal(layout.bytes, 64);
}

enum { area_bytes = 1 << 16, model_ops_max = kvp_ops_per_step_max };

static uint8_t area[area_bytes];

static void op_random(struct kvp_device_op *op, uint64_t *random) {
  const uint64_t begin = random_next(random) % (area_bytes / 8) * 8;
  uint64_t bytes = random_next(random) % 3 == 0 ? random_next(random) % 20000 : random_next(random) % 100;
  bytes = bytes > area_bytes - begin ? area_bytes - begin : bytes;
  *op = (struct kvp_device_op){.kind = random_next(random) % 2 == 0 ? KVP_DEVICE_LOAD : KVP_DEVICE_WRITE};
  if (op->kind == KVP_DEVICE_LOAD) {
    op->host_arrays = KVP_ARRAY_SEGMENTS;
    op->params.load.segments = (const struct kvp_segment *)(const void *)(area + begin);
    op->params.load.segment_count = bytes / sizeof(struct kvp_segment);
  } else {
    op->params.transfer = (struct kvp_transfer_params){.row_count = 1, .row_bytes = bytes, .host = area + begin};
  }
}

/* Arrays of a hostile step overlap in every way. Each op finds its bytes, arrays lie in the first part, and all
 * together are not more than the area and what aligning pieces takes. */
static void test_layout_of_overlaps(void **state) {
  (void)state;
  static uint8_t piece[area_bytes + 2 * 64 * model_ops_max];
  static struct kvp_device_op ops[model_ops_max + 1];
  uint64_t random = 5;
  for (int i = 0; i < area_bytes; i++) {
    area[i] = (uint8_t)random_next(&random);
  }
  for (int round = 0; round < 300; round++) {
    const uint32_t count = 1 + (uint32_t)(random_next(&random) % (round % 10 == 0 ? model_ops_max : 12));
    for (uint32_t i = 0; i < count; i++) {
      op_random(&ops[i], &random);
    }
    chain(ops, count);
    kvp_step_layout_make(&layout, ops, 0);
    assert_int_equal(layout.op_count, count);
    assert_true(layout.results_offset_bytes <= area_bytes + (uint64_t)64 * count);
    memset(piece, 0, sizeof piece);
    kvp_step_layout_copy(&layout, piece);
    for (uint32_t i = 0; i < count; i++) {
      const bool loads = ops[i].kind == KVP_DEVICE_LOAD;
      const void *from = loads ? (const void *)ops[i].params.load.segments : ops[i].params.transfer.host;
      const uint64_t bytes = loads ? ops[i].params.load.segment_count * 16 : ops[i].params.transfer.row_bytes;
      if (bytes == 0) {
        continue;
      }
      const uint64_t offset = loads ? layout.array_offset_bytes[layout.op_first_array[i]] : layout.op_offset_bytes[i];
      assert_memory_equal(piece + offset, from, bytes);
      assert_true(offset + bytes <= (loads ? layout.arrays_bytes : layout.results_offset_bytes));
      assert_int_equal(offset % 8, 0);
    }
  }
}

/* ---- clocks ---- */

static void test_clock(void **state) {
  (void)state;
  struct kvp_device_clock clock;
  kvp_device_clock_init(&clock);
  const uint64_t second = 1000000000;
  /* The device is 5 s ahead; stamps are seen 300, 20 and 100 ns after they were written. */
  kvp_device_clock_observe(&clock, 15 * second, 10 * second + 300);
  assert_int_equal(kvp_device_clock_host_ns(&clock, 15 * second), 10 * second + 300);
  kvp_device_clock_observe(&clock, 15 * second + 1000, 10 * second + 1020);
  kvp_device_clock_observe(&clock, 15 * second + 2000, 10 * second + 2100);
  assert_int_equal(kvp_device_clock_host_ns(&clock, 15 * second + 2000), 10 * second + 2020);
  /* A window later the old bound still counts, two windows later it is forgotten: the clocks have moved. */
  kvp_device_clock_observe(&clock, 18 * second, 13 * second + 500);
  assert_int_equal(kvp_device_clock_host_ns(&clock, 18 * second), 13 * second + 20);
  kvp_device_clock_observe(&clock, 21 * second, 16 * second + 700);
  assert_int_equal(kvp_device_clock_host_ns(&clock, 21 * second), 16 * second + 500);
  kvp_device_clock_observe(&clock, 105 * second, 100 * second + 900);
  assert_int_equal(kvp_device_clock_host_ns(&clock, 105 * second), 100 * second + 900);
}

/* ---- names ---- */

static void test_names(void **state) {
  (void)state;
  struct kvp_cuda_name name;
  struct kvp_error error;
  char text[kvp_cuda_uuid_text_bytes];
  assert_int_equal(kvp_cuda_name_parse("cuda:0", &name, &error), KVP_OK);
  assert_false(name.by_uuid);
  assert_int_equal(name.index, 0);
  assert_int_equal(kvp_cuda_name_parse("cuda:0015", &name, &error), KVP_OK);
  assert_int_equal(name.index, 15);
  const uint8_t uuid[] = {0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef,
                          0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10};
  assert_int_equal(kvp_cuda_name_parse("cuda:GPU-01234567-89AB-cdef-fedc-ba9876543210", &name, &error), KVP_OK);
  assert_true(name.by_uuid);
  assert_memory_equal(name.uuid, uuid, sizeof uuid);
  kvp_cuda_uuid_format(uuid, text);
  assert_string_equal(text, "GPU-01234567-89ab-cdef-fedc-ba9876543210");
  const char *const bad[] = {"cuda:",
                             "cuda:-1",
                             "cuda:00000",
                             "cuda:1x",
                             "cuda: 1",
                             "cuda",
                             "host:0",
                             "cuda:GPU-",
                             "cuda:gpu-01234567-89ab-cdef-fedc-ba9876543210",
                             "cuda:GPU-01234567-89ab-cdef-fedc-ba987654321",
                             "cuda:GPU-01234567-89ab-cdef-fedc-ba98765432100",
                             "cuda:GPU-01234567-89ab-cdef-fedc-ba987654321g",
                             "cuda:GPU-0123456789ab-cdef-fedc-ba98765432100-",
                             "cuda:GPU-01234567-89ab-cdef-fedc--a9876543210"};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    assert_int_equal(kvp_cuda_name_parse(bad[i], &name, &error), KVP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, bad[i]));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_page_runs),
      cmocka_unit_test(test_layout_of_a_step),
      cmocka_unit_test(test_layout_of_overlaps),
      cmocka_unit_test(test_clock),
      cmocka_unit_test(test_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
