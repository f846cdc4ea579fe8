/* The ops of a step through libkvpool, against a kvpoold of its own. Records are bf16 of 64 elements, so that what comes
 * back is what went in; every other expected number was found on paper.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/client/check.h"
#include "tests/client/process.h"

enum {
  elements = 64,
  row_bytes = 2 * elements,
  tokens_per_block = 4, /* 16, compressed by 4 */
  ring_tokens = 8,
  paged_blocks = 16,
  rings = 3,
  buffer_bytes = 1 << 16,
};

static struct process daemon_process;
static kvpool_client *client;
static kvpool_pool *paged;
static kvpool_pool *ring;
static kvpool_session *session;
static kvpool_buffer *buffer;
static kvpool_step *step;
static kvpool_error error;

static kvpool_status open_pools(void) {
  const kvpool_region_spec paged_regions[] = {
      {.name = "kv", .format = "bf16", .width = elements, .compression_ratio = 4, .num_layers = 2},
      {.name = "other", .format = "bf16", .width = 8, .num_layers = 1}};
  const kvpool_region_spec ring_region = {.name = "swa", .format = "bf16", .width = elements, .num_layers = 1};
  const kvpool_pool_spec paged_spec = {.name = "paged",
                                       .kind = KVPOOL_POOL_PAGED,
                                       .block_size = 16,
                                       .num_blocks = paged_blocks,
                                       .regions = paged_regions,
                                       .region_count = 2};
  const kvpool_pool_spec ring_spec = {.name = "ring",
                                      .kind = KVPOOL_POOL_RING,
                                      .block_size = ring_tokens,
                                      .num_blocks = rings,
                                      .regions = &ring_region,
                                      .region_count = 1};
  kvpool_status status = kvpool_pool_create(client, &paged_spec, &paged, &error);
  return status == KVPOOL_OK ? kvpool_pool_create(client, &ring_spec, &ring, &error) : status;
}

static int setup(void **state) {
  (void)state;
  process_init(&daemon_process);
  process_start_daemon(&daemon_process);
  const kvpool_connect_options options = {
      .size_bytes = sizeof options, .timeout_ms = 30000, .wait_until_serving = true};
  if (kvpool_client_connect(daemon_process.socket, &options, &client, &error) != KVPOOL_OK ||
      open_pools() != KVPOOL_OK || kvpool_session_open(client, NULL, &session, &error) != KVPOOL_OK ||
      kvpool_blocks_allocate_range(session, paged, 0, paged_blocks, &error) != KVPOOL_OK ||
      kvpool_blocks_allocate_range(session, ring, 0, rings, &error) != KVPOOL_OK ||
      kvpool_buffer_create(session, NULL, buffer_bytes, &buffer, &error) != KVPOOL_OK ||
      kvpool_step_new(session, &step, &error) != KVPOOL_OK) {
    (void)fprintf(stderr, "setup: %s\n", error.text);
    process_cleanup();
    return -1;
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  kvpool_step_destroy(step);
  assert_ok(kvpool_buffer_release(buffer, &error));
  kvpool_session_close(session);
  kvpool_pool_destroy(paged);
  kvpool_pool_destroy(ring);
  kvpool_client_destroy(client);
  process_stop(&daemon_process);
  process_deinit(&daemon_process);
  return 0;
}

static int clear(void **state) {
  (void)state;
  kvpool_step_clear(step);
  return 0;
}

/* ---- pieces -----------------------------------------------------------------------------------------------------
 */

static kvpool_view view_at(uint64_t offset_bytes, uint64_t rows, uint32_t bytes) {
  return (kvpool_view){.buffer = buffer, .offset_bytes = offset_bytes, .rows = rows, .row_bytes = bytes};
}

static uint32_t array_of(const int32_t *values, size_t count) {
  uint32_t array = 0;
  assert_ok(kvpool_step_add_array(step, values, count, &array, &error));
  return array;
}

/* Rows whose elements are all `first`, `first + 1`, ... in bits. */
static void fill_rows(uint16_t *rows, size_t row_count, uint16_t first) {
  for (size_t i = 0; i < row_count * elements; i++) {
    rows[i] = (uint16_t)(first + i / elements);
  }
}

static void expect_rows(uint64_t offset_bytes, const int *firsts, size_t count) {
  uint16_t got[32 * elements];
  assert_true(count <= 32);
  assert_ok(kvpool_buffer_read(buffer, offset_bytes, got, count * row_bytes, &error));
  for (size_t i = 0; i < count * elements; i++) {
    if (got[i] != firsts[i / elements]) {
      fail_msg("element %zu of row %zu is 0x%04X, not 0x%04X", i % elements, i / elements, got[i],
               (unsigned)firsts[i / elements]);
    }
  }
}

static void expect_ints(uint64_t offset_bytes, const int32_t *expected, size_t count) {
  int32_t got[64];
  assert_true(count <= 64);
  assert_ok(kvpool_buffer_read(buffer, offset_bytes, got, count * sizeof *got, &error));
  for (size_t i = 0; i < count; i++) {
    if (got[i] != expected[i]) {
      fail_msg("[%zu] is %d, not %d", i, got[i], expected[i]);
    }
  }
}

/* Records of `count` slots from `first_slot` on: rows 0x4000, 0x4001, ... */
static void store_records(const kvpool_layer *layer, int32_t first_slot, size_t count, uint16_t first) {
  uint16_t rows[16 * elements];
  int32_t slots[16];
  fill_rows(rows, count, first);
  for (size_t i = 0; i < count; i++) {
    slots[i] = first_slot + (int32_t)i;
  }
  assert_ok(kvpool_rows_store(session, layer, rows, count, row_bytes, slots, count, NULL, &error));
}

/* ---- prefill ----------------------------------------------------------------------------------------------------
 */

static void test_assemble(void **state) {
  (void)state;
  const kvpool_layer swa_layer = {.pool = ring}, kv_layer = {.pool = paged, .layer = 1};
  uint16_t chunk_rows[3 * elements];
  fill_rows(chunk_rows, 3, 0x4200);
  store_records(&swa_layer, ring_tokens, ring_tokens, 0x4000); /* ring 1 */
  store_records(&kv_layer, 2 * tokens_per_block, tokens_per_block, 0x4100);
  assert_ok(kvpool_buffer_write(buffer, 0, chunk_rows, sizeof chunk_rows, &error));
  const int32_t swa_segments[] = {1, 6, 8, 0, 1, 0, 1, 2}, kv_segments[] = {2, 1, 3, 0};
  const int32_t gather_rows[] = {2, -1, 0}, slots[] = {ring_tokens + 7, -1, ring_tokens};
  const kvpool_view source = view_at(0, 3, row_bytes), out = view_at(4096, 9, row_bytes);
  uint32_t gather, store_slots;
  const kvpool_assemble_swa swa = {.layer = swa_layer, .segments = array_of(swa_segments, 8), .total_k = 3};
  gather = array_of(gather_rows, 3);
  store_slots = array_of(slots, 3);
  kvpool_assemble_chunk chunk = {.source = &source, .gather = &gather, .store_slots = &store_slots};
  kvpool_assemble_compressed compressed = {.layer = kv_layer, .segments = array_of(kv_segments, 4), .total_k = 2};
  assert_ok(kvpool_step_add_assemble(step, &out, &swa, &chunk, &compressed, 0, &error));
  kvpool_op_report reports[2];
  assert_ok(kvpool_step_run(step, reports, 1, &error));
  assert_int_equal(reports[0].main_kv_offset, 6);
  assert_int_equal(reports[0].rows_loaded, 5 + 3); /* and those that were copied */
  assert_int_equal(reports[0].rows_stored, 2);
  assert_false(reports[0].hazard_unchecked);
  const int first[] = {0x4006, 0x4007, 0x4000, 0x4202, 0, 0x4200, 0x4101, 0x4102};
  expect_rows(4096, first, 8);

  /* The next layer of the group: its window has this chunk's rows in it now, the compressed rows are kept. */
  kvpool_step_clear(step);
  const kvpool_assemble_swa again = {.layer = swa_layer, .segments = array_of(swa_segments, 8), .total_k = 3};
  compressed.segments = array_of(kv_segments, 4);
  compressed.keep_compressed = true;
  chunk = (kvpool_assemble_chunk){.reserved = 3};
  assert_ok(kvpool_step_add_assemble(step, &out, &again, &chunk, &compressed, 0, &error));
  assert_ok(kvpool_step_run(step, reports, 1, &error));
  assert_int_equal(reports[0].rows_loaded, 3);
  const int second[] = {0x4006, 0x4202, 0x4200, 0x4202, 0, 0x4200, 0x4101, 0x4102};
  expect_rows(4096, second, 8);
}

static void test_hazard(void **state) {
  (void)state;
  const kvpool_layer layer = {.pool = ring};
  uint16_t rows[elements];
  fill_rows(rows, 1, 0x4300);
  assert_ok(kvpool_buffer_write(buffer, 0, rows, sizeof rows, &error));
  const kvpool_view source = view_at(0, 1, row_bytes), out = view_at(4096, 1, row_bytes);
  const int32_t slot = 2 * ring_tokens + 3, segment[] = {2, 3, 4, 0};
  for (uint32_t flags = 0; flags <= KVPOOL_ALLOW_STORE_BEFORE_LOAD; flags++) {
    kvpool_step_clear(step);
    assert_ok(kvpool_step_add_store(step, &layer, &source, array_of(&slot, 1), NULL, &error));
    assert_ok(kvpool_step_add_load_flags(step, &layer, array_of(segment, 4), 1, &out, NULL, flags, &error));
    if (flags == 0) {
      assert_fails(kvpool_step_run(step, NULL, 0, &error), KVPOOL_HAZARD_STORE_BEFORE_LOAD, "19");
      assert_int_equal(error.op, 1);
      assert_int_equal(error.value, slot);
    } else {
      assert_ok(kvpool_step_run(step, NULL, 0, &error));
      expect_rows(4096, (const int[]){0x4300}, 1);
    }
  }
}

static void test_prefill_indices(void **state) {
  (void)state;
  const int32_t pivots[] = {1, 2, 10, 1, 0, 0, 7, 3}, right[] = {0, -1, 5, 6};
  const kvpool_view expanded = view_at(0, 2, 16), joined = view_at(4096, 2, 24);
  assert_ok(kvpool_step_add_expand_swa_index(step, array_of(pivots, 8), 4, &expanded, &error));
  const kvpool_matrix left_matrix = {.view = &expanded}, right_matrix = {.array = array_of(right, 4)};
  assert_ok(kvpool_step_add_kv_index_cat(step, &left_matrix, 4, &right_matrix, 2, 100, &joined, &error));
  const kvpool_view right_only = view_at(8192, 2, 8);
  assert_ok(kvpool_step_add_kv_index_cat(step, NULL, 0, &right_matrix, 2, 0, &right_only, &error));
  assert_ok(kvpool_step_run(step, NULL, 0, &error));
  expect_ints(0, (const int32_t[]){1, 2, 10, -1, 7, 8, 9, -1}, 8);
  expect_ints(4096, (const int32_t[]){1, 2, 10, -1, 100, -1, 7, 8, 9, -1, 105, 106}, 12);
  expect_ints(8192, right, 4);
}

/* ---- decode -----------------------------------------------------------------------------------------------------
 */

static void test_decode_indices(void **state) {
  (void)state;
  const kvpool_layer layer = {.pool = paged}, swa_layer = {.pool = ring};
  const int32_t topk[] = {5, 0, -1, 9, 4, 3}, tables[] = {7, 11, 2, 8}, valid[] = {3, 2};
  const kvpool_view in_place = view_at(0, 2, 12), apart = view_at(4096, 2, 12), window = view_at(8192, 1, 16);
  assert_ok(kvpool_buffer_write(buffer, 0, topk, sizeof topk, &error));
  uint32_t table_array = array_of(tables, 4), valid_array = array_of(valid, 2);
  const kvpool_matrix sent = {.array = array_of(topk, 6)}, written = {.view = &in_place};
  assert_ok(kvpool_step_add_convert_kv_index(step, &layer, &sent, table_array, 2, valid_array, 1, &apart, &error));
  assert_ok(kvpool_step_add_convert_kv_index(step, &layer, &written, table_array, 2, valid_array, 1, NULL, &error));
  const int32_t offset_len[] = {2 * ring_tokens + 6, 3};
  assert_ok(kvpool_step_add_swa_index_decode(step, &swa_layer, array_of(offset_len, 2), 4, &window, &error));
  kvpool_op_report reports[3];
  assert_ok(kvpool_step_run(step, reports, 3, &error));
  /* 4 tokens a block: 5 -> block 11, 0 -> block 7; of the second, 9 is past its table, 4 -> block 8, 3 isn't valid. */
  const int32_t slots[] = {11 * 4 + 1, 7 * 4, -1, -1, 8 * 4, -1};
  expect_ints(0, slots, 6);
  expect_ints(4096, slots, 6);
  expect_ints(8192, (const int32_t[]){22, 23, 16, -1}, 4);
  assert_int_equal(reports[0].rows_rejected, 1);
  assert_int_equal(reports[1].rows_rejected, 1);
  assert_int_equal(reports[2].rows_rejected, 0);
}

/* Rows of 1.0 with eps 3: 1 / sqrt(1 + 3) = 0.5, times weights of 2.0 is 1.0 again. Turned by a quarter, pairs become
 * (-1, 1); the Hadamard transform of 64 ones is 64 / sqrt(64) = 8 and zeros. */
static void test_fused_store(void **state) {
  (void)state;
  enum { weight_at = 1024, table_at = 2048, back_at = 4096 };
  uint16_t ones[2 * elements], weight[elements], got[2 * elements];
  float table[2][elements] = {{0}};
  for (int i = 0; i < elements; i++) {
    ones[i] = ones[elements + i] = 0x3F80;
    weight[i] = 0x4000;
    table[0][i] = i < elements / 2 ? 1.0F : 0.0F; /* no turn */
    table[1][i] = i < elements / 2 ? 0.0F : 1.0F; /* a quarter */
  }
  assert_ok(kvpool_buffer_write(buffer, 0, ones, sizeof ones, &error));
  assert_ok(kvpool_buffer_write(buffer, weight_at, weight, sizeof weight, &error));
  assert_ok(kvpool_buffer_write(buffer, table_at, table, sizeof table, &error));
  const kvpool_view table_view = view_at(table_at, 2, sizeof table[0]), back = view_at(back_at, 2, row_bytes);
  const kvpool_view last_view = view_at(table_at, 2, 16); /* two pairs */
  const int32_t slots[] = {9, -1}, positions[] = {1, 0};
  kvpool_fused_store fused = {.layer = {.pool = paged},
                              .source = view_at(0, 2, row_bytes),
                              .norm_weight = view_at(weight_at, 1, row_bytes),
                              .eps = 3.0F,
                              .cos_sin = &table_view,
                              .cast_back = &back};
  fused.slots = array_of(slots, 2);
  fused.positions = array_of(positions, 2);
  assert_ok(kvpool_step_add_fused_store(step, &fused, &error));
  kvpool_op_report report;
  assert_ok(kvpool_step_run(step, &report, 1, &error));
  assert_int_equal(report.rows_stored, 1);
  assert_int_equal(report.rows_skipped, 1);
  assert_ok(kvpool_buffer_read(buffer, back_at, got, sizeof got, &error));
  for (int i = 0; i < elements; i++) {
    assert_int_equal(got[i], i % 2 == 0 ? 0xBF80 : 0x3F80);
    assert_int_equal(got[elements + i], 0x3F80);
  }
  kvpool_record_list *list;
  assert_ok(kvpool_record_list_get(client, &fused.layer, NULL, slots, 1, &list, &error));
  assert_memory_equal(kvpool_record_list_item(list, 0)->raw, got, row_bytes);
  kvpool_record_list_destroy(list);

  fused.hadamard = true;
  fused.keep_float32 = true;
  fused.cos_sin = NULL;
  kvpool_step_clear(step);
  fused.slots = array_of(slots, 2);
  fused.positions = array_of(positions, 2);
  assert_ok(kvpool_step_add_fused_store(step, &fused, &error));
  assert_ok(kvpool_step_run(step, NULL, 0, &error));
  assert_ok(kvpool_buffer_read(buffer, back_at, got, sizeof got, &error));
  for (int i = 0; i < 2 * elements; i++) {
    assert_int_equal(got[i], i % elements == 0 ? 0x4100 : 0);
  }

  /* Neox pairs of 4 dims at 10: (10, 12) and (11, 13); position 1 is a quarter turn once more. */
  const float small[2][4] = {{1, 1, 0, 0}, {0, 0, 1, 1}};
  const uint32_t offset = 10;
  assert_ok(kvpool_buffer_write(buffer, table_at, small, sizeof small, &error));
  fused.hadamard = false;
  fused.neox = true;
  fused.cos_sin = &last_view;
  fused.rope_offset = &offset;
  kvpool_step_clear(step);
  fused.slots = array_of(slots, 2);
  fused.positions = array_of(positions, 2);
  assert_ok(kvpool_step_add_fused_store(step, &fused, &error));
  assert_ok(kvpool_step_run(step, NULL, 0, &error));
  assert_ok(kvpool_buffer_read(buffer, back_at, got, sizeof got, &error));
  for (int i = 0; i < elements; i++) {
    assert_int_equal(got[i], i == 10 || i == 11 ? 0xBF80 : 0x3F80);
    assert_int_equal(got[elements + i], 0x3F80);
  }
}

/* ---- blocks -----------------------------------------------------------------------------------------------------
 */

static void test_blocks(void **state) {
  (void)state;
  const kvpool_layer layer = {.pool = paged, .layer = 1};
  store_records(&layer, 3 * tokens_per_block, tokens_per_block, 0x4400);
  store_records(&layer, 4 * tokens_per_block, tokens_per_block, 0x4500);
  const int32_t pairs[] = {3, 12}, zeroed[] = {3, 4}, segments[] = {12, 0, 2, 0, 3, 0, 1, 2, 4, 3, 4, 3};
  const kvpool_view out = view_at(0, 4, row_bytes);
  assert_ok(kvpool_step_add_copy_blocks(step, paged, array_of(pairs, 2), &error));
  assert_ok(kvpool_step_add_zero_blocks(step, paged, array_of(zeroed, 2), &error));
  assert_ok(kvpool_step_add_load(step, &layer, array_of(segments, 12), 4, &out, NULL, &error));
  assert_ok(kvpool_step_run(step, NULL, 0, &error));
  expect_rows(0, (const int[]){0x4400, 0x4401, 0, 0}, 4);
}

/* ---- checks -----------------------------------------------------------------------------------------------------
 */

/* Seen before anything is sent: the error has the op's number, and the step stays as it was. */
static void test_arrays_that_are_not_there(void **state) {
  (void)state;
  const kvpool_layer layer = {.pool = paged}, none = {.pool = paged, .region = 2};
  const kvpool_view view = view_at(0, 1, row_bytes);
  const kvpool_matrix matrix = {.array = 5}, good = {.view = &view};
  const uint32_t missing = 6;
  uint32_t there = array_of(NULL, 0);
  assert_ok(kvpool_step_add_zero_blocks(step, paged, there, &error));
  const kvpool_assemble_swa swa = {.layer = layer, .segments = 1};
  const kvpool_assemble_chunk gather = {.source = &view, .gather = &missing}, slots = {.store_slots = &missing};
  const kvpool_assemble_chunk other = {.source = &view, .layer = &none};
  const kvpool_assemble_compressed compressed = {.layer = layer, .segments = 2};
  const kvpool_status invalid = KVPOOL_INVALID_ARGUMENT;
  assert_fails(kvpool_step_add_assemble(step, &view, &swa, NULL, NULL, 0, &error), invalid,
               "op 1: swa.segments is array 1 of a step that has 1");
  assert_int_equal(error.op, 1);
  assert_string_equal(error.array, "swa.segments");
  assert_fails(kvpool_step_add_assemble(step, &view, NULL, &gather, NULL, 0, &error), invalid, "chunk.gather");
  assert_fails(kvpool_step_add_assemble(step, &view, NULL, &slots, NULL, 0, &error), invalid, "chunk.store_slots");
  assert_fails(kvpool_step_add_assemble(step, &view, NULL, NULL, &compressed, 0, &error), invalid,
               "compressed.segments");
  assert_fails(kvpool_step_add_assemble(step, &view, NULL, &other, NULL, 0, &error), KVPOOL_UNKNOWN_REGION,
               "region 2");
  assert_int_equal(error.op, 1);
  kvpool_fused_store fused = {.layer = layer, .source = view, .norm_weight = view, .slots = 7};
  assert_fails(kvpool_step_add_fused_store(step, &fused, &error), invalid, "slots is array 7");
  fused.slots = there;
  fused.positions = 8;
  assert_fails(kvpool_step_add_fused_store(step, &fused, &error), invalid, "positions is array 8");
  assert_fails(kvpool_step_add_convert_kv_index(step, &layer, &matrix, there, 1, there, 1, &view, &error), invalid,
               "topk is array 5");
  assert_fails(kvpool_step_add_convert_kv_index(step, &layer, &good, 3, 1, there, 1, &view, &error), invalid,
               "block_tables is array 3");
  assert_fails(kvpool_step_add_convert_kv_index(step, &layer, &good, there, 1, 4, 1, &view, &error), invalid,
               "valid is array 4");
  assert_fails(kvpool_step_add_swa_index_decode(step, &layer, 9, 1, &view, &error), invalid, "offset_len is array 9");
  assert_fails(kvpool_step_add_expand_swa_index(step, 9, 1, &view, &error), invalid, "pivots is array 9");
  assert_fails(kvpool_step_add_kv_index_cat(step, &matrix, 1, NULL, 0, 0, &view, &error), invalid, "left is array 5");
  assert_fails(kvpool_step_add_kv_index_cat(step, NULL, 0, &matrix, 1, 0, &view, &error), invalid,
               "right is array 5");
  assert_fails(kvpool_step_add_copy_blocks(step, paged, 9, &error), invalid, "pairs is array 9");
  assert_fails(kvpool_step_add_zero_blocks(step, paged, 9, &error), invalid, "blocks is array 9");
  kvpool_op_report report;
  assert_ok(kvpool_step_run(step, &report, 1, &error)); /* the one op that was good */
  for (int i = 1; i < 1024; i++) {
    assert_ok(kvpool_step_add_zero_blocks(step, paged, there, &error));
  }
  assert_fails(kvpool_step_add_zero_blocks(step, paged, there, &error), KVPOOL_TOO_LARGE, "1024 ops");
  assert_int_equal(error.op, 1024);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(test_assemble, clear),
      cmocka_unit_test_setup(test_hazard, clear),
      cmocka_unit_test_setup(test_prefill_indices, clear),
      cmocka_unit_test_setup(test_decode_indices, clear),
      cmocka_unit_test_setup(test_fused_store, clear),
      cmocka_unit_test_setup(test_blocks, clear),
      cmocka_unit_test_setup(test_arrays_that_are_not_there, clear),
  };
  int failed = cmocka_run_group_tests_name("ops", tests, setup, teardown);
  process_cleanup();
  return failed;
}
