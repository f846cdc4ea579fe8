/* Fused stores, indices and whole blocks through the real executor. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/format.h"
#include "proto/owner_entry.h"
#include "tests/contract/case_file.h"
#include "tests/unit/executor_world.h"

enum { out_offset = 1 << 20, ints_offset = 3 << 20 };

static const uint64_t narrow_row = narrow_row_bytes;

/* ---- fused store ---- */

struct fused_case {
  const char *name;
  enum kvp_format_id format;
  uint32_t width;
  bool has_cast_back;
};

/* A region made of the golden case's parameters: every byte of the cache, and of the cast-back where there is one. */
static void fused_golden_check(const struct fused_case *it) {
  enum { bytes_max = 1 << 20, weight_at = 1 << 18, table_at = 1 << 17, back_at = 3 << 18 };
  struct exec_harness link;
  struct case_file file;
  struct kvp_error error;
  char path[512];
  int region_fd = -1, buffer_fd = -1;
  (void)snprintf(path, sizeof path, "%s/%s", KVPOOL_GOLDEN_DIR, it->name);
  case_file_read(path, &file);
  const struct case_array *rows = case_file_array(&file, "rows"), *cache = case_file_array(&file, "cache"),
                          *table = case_file_array(&file, "cos_sin"), *weight = case_file_array(&file, "norm_weight"),
                          *slots = case_file_array(&file, "slots"), *positions = case_file_array(&file, "positions"),
                          *back = case_file_array(&file, "cast_back");
  const uint32_t blocks = (uint32_t)case_file_number(&file, "num_blocks");
  const uint32_t row_bytes = it->width * 2;
  world_assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  world_assert_ok(exec_harness_memory_create(&link, 1, cache->bytes, &region_fd));
  world_assert_ok(exec_harness_memory_create(&link, 2, bytes_max, &buffer_fd));
  int owner_fd = kvp_memory_fd_create("owners", blocks * sizeof(uint64_t), &error);
  uint8_t *region = exec_harness_map(region_fd, cache->bytes), *shared = exec_harness_map(buffer_fd, bytes_max);
  uint64_t *owners = (uint64_t *)(void *)exec_harness_map(owner_fd, blocks * sizeof(uint64_t));
  for (uint32_t i = 0; i < blocks; i++) {
    owners[i] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  }
  struct kvp_control_pool pool = {.pool_id = 1, .num_blocks = blocks, .region_count = 1};
  pool.regions[0] = (struct kvp_control_region){.memory_id = 1,
                                                .format = it->format,
                                                .width = it->width,
                                                .tokens_per_block = (uint32_t)case_file_number(&file, "block_size"),
                                                .num_layers = 1,
                                                .name = "golden"};
  world_assert_ok(exec_harness_request(&link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &owner_fd, 1));
  world_assert_ok(exec_harness_buffer_attach(&link, 1, 2, bytes_max, session));
  memset(region, 0xA5, cache->bytes);
  memcpy(shared, rows->data, rows->bytes);
  memcpy(shared + weight_at, weight->data, weight->bytes);
  memcpy(shared + table_at, table->data, table->bytes);
  const uint32_t table_row = (uint32_t)case_file_number(&file, "rotary_dims") * 4;
  const float eps = strtof(case_file_param(&file, "eps"), NULL);
  uint32_t eps_bits = 0;
  memcpy(&eps_bits, &eps, sizeof eps_bits);

  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, 1);
  struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_FUSED_STORE);
  op->pool_id = 1;
  op->source = step_view(1, 0, rows->rows, row_bytes, row_bytes);
  op->third = step_view(1, weight_at, 1, row_bytes, row_bytes);
  op->fourth = step_view(1, table_at, table->rows, table_row, table_row);
  op->second = it->has_cast_back ? step_view(1, back_at, rows->rows, row_bytes, row_bytes) : op->second;
  op->arrays[0] = step_encoder_array(&encoder, slots->data, (uint32_t)slots->bytes);
  op->arrays[1] = step_encoder_array(&encoder, positions->data, (uint32_t)positions->bytes);
  op->argument = case_file_number(&file, "rope_offset");
  op->numbers[0] = eps_bits;
  op->flags = (case_file_number(&file, "neox") != 0 ? KVP_OP_NEOX : 0U) |
              (case_file_number(&file, "hadamard") != 0 ? KVP_OP_HADAMARD : 0U) |
              (case_file_number(&file, "round_to_bf16") != 0 ? KVP_OP_ROUND_TO_BF16 : 0U);
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  assert_true(exec_harness_post(&link, KVP_COMMAND_STEP, 1, encoded, bytes));
  assert_int_equal(exec_harness_take(&link).kind, KVP_COMPLETION_ACCEPTED);
  struct exec_completion done = exec_harness_take(&link);
  assert_int_equal(done.kind, KVP_COMPLETION_DONE);
  assert_true(world_report(&done, 0).rows_stored > 10);
  assert_memory_equal(region, cache->data, cache->bytes);
  if (it->has_cast_back) {
    assert_memory_equal(shared + back_at, back->data, back->bytes);
  }
  free(done.payload);
  free(encoded);
  step_encoder_deinit(&encoder);
  assert_int_equal(exec_harness_stop(&link), 0);
  (void)munmap(region, cache->bytes);
  (void)munmap(shared, bytes_max);
  (void)munmap(owners, blocks * sizeof(uint64_t));
  (void)close(region_fd);
  (void)close(buffer_fd);
  (void)close(owner_fd);
  case_file_free(&file);
}

static void test_fused_golden(void **state) {
  (void)state;
  const struct fused_case cases[] = {
      {"fused_v41_interleaved", KVP_FORMAT_V41, 512, true},
      {"fused_v41_hadamard", KVP_FORMAT_V41, 512, true},
      {"fused_v41_neox_nornd", KVP_FORMAT_V41, 512, true},
      {"fused_v41_fp4", KVP_FORMAT_V41_FP4, 512, true},
      {"fused_index_fp4", KVP_FORMAT_INDEX_FP4, 128, false},
      {"fused_index_fp8_f32", KVP_FORMAT_INDEX_FP8_F32, 128, false},
      {"fused_index_mxfp8_hadamard", KVP_FORMAT_INDEX_MXFP8, 128, false},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    fused_golden_check(&cases[i]);
  }
}

static uint16_t bf16_of(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

/* Rows of "narrow", 16 elements: all of row i are 2^i, so that the norm makes them 1, and the weight what they become;
 * at 1 / 4 MiB the weight, 0.5 each. */
static struct kvp_wire_op *add_narrow(struct step_encoder *encoder, const int32_t *slots, const int32_t *positions,
                                      uint32_t count) {
  const float eps = 1e-30F;
  uint32_t bits = 0;
  memcpy(&bits, &eps, sizeof bits);
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_FUSED_STORE);
  op->pool_id = ring_pool_id;
  op->region = 1;
  op->source = step_view(buffer, 0, 8, narrow_row, narrow_row);
  op->third = step_view(buffer, 4096, 1, narrow_row, narrow_row);
  op->arrays[0] = step_encoder_array(encoder, slots, count * 4);
  op->arrays[1] = step_encoder_array(encoder, positions, count * 4);
  op->numbers[0] = bits;
  op->flags = KVP_OP_ROUND_TO_BF16;
  return op;
}

static void narrow_world_init(struct world *world) {
  world_init(world);
  world_ring_attach(world);
  for (int i = 0; i < 8; i++) {
    for (int k = 0; k < 16; k++) {
      const uint16_t value = bf16_of((float)(1 << i));
      const uint16_t weight = bf16_of(0.5F);
      memcpy(world->buffer + (size_t)i * narrow_row + (size_t)k * 2, &value, 2);
      memcpy(world->buffer + 4096 + (size_t)k * 2, &weight, 2);
    }
  }
}

/* On paper: each row is 0.5 sixteen times; turned by a quarter (cos 0, sin 1), a pair (0.5, 0.5) is (-0.5, 0.5). Rows
 * without a slot are not looked at, whatever their position is, unless they are cast back. */
static void test_fused_rows(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  narrow_world_init(&world);
  const uint16_t half = bf16_of(0.5F), minus = bf16_of(-0.5F);
  const float table[] = {1, 1, 0, 0, 0, 0, 1, 1}; /* position 0: as it is; 1: a quarter; 4 rotary dims */
  memcpy(world.buffer + 8192, table, sizeof table);
  memset(world.narrow, 0xA5, narrow_bytes);
  const int32_t slots[] = {40, -1, 33, 70};
  const int32_t positions[] = {1, -7, 0, 1};
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = add_narrow(&encoder, slots, positions, 4);
  op->fourth = step_view(buffer, 8192, 2, 16, 16);
  op->argument = 12; /* the last four elements */
  struct kvp_wire_report report = world_run_one(&world, &encoder);
  assert_int_equal(report.rows_stored, 3);
  assert_int_equal(report.rows_skipped, 1);
  assert_int_equal(report.bytes_read, 3 * narrow_row);
  assert_int_equal(report.bytes_written, 3 * narrow_row);
  for (int slot = 0; slot < num_blocks * ring_tokens; slot++) {
    for (int k = 0; k < 16; k++) {
      const bool turned = (slot == 40 || slot == 70) && (k == 12 || k == 14); /* pairs (12, 13), (14, 15) */
      const bool stored = slot == 33 || slot == 40 || slot == 70;
      uint16_t found = 0;
      memcpy(&found, world.narrow + (size_t)slot * narrow_row + (size_t)k * 2, 2);
      assert_int_equal(found, !stored ? 0xA5A5 : turned ? minus : half);
    }
  }
  /* The same with positions in a buffer, one of them outside the table: that row is counted and left out. */
  memset(world.narrow, 0xA5, narrow_bytes);
  memcpy(world.buffer + ints_offset, (int32_t[]){2, -7, -1, 1}, 16);
  step_encoder_init(&encoder, 1, session, step_epoch);
  op = add_narrow(&encoder, slots, positions, 4);
  op->fourth = step_view(buffer, 8192, 2, 16, 16);
  op->argument = 12;
  op->arrays[1] = step_encoder_buffer_array(&encoder, buffer, ints_offset, 16);
  report = world_run_one(&world, &encoder);
  assert_int_equal(report.flags, KVP_REPORT_UNCHECKED_ARRAYS);
  assert_int_equal(report.rows_stored, 1);
  assert_int_equal(report.rows_rejected, 2);
  assert_int_equal(world.narrow[40 * narrow_row], 0xA5);
  world_deinit(&world);
}

/* Without a table nothing is turned; NeoX and Hadamard reach the kernel. A constant row's transform has one entry. */
static void test_fused_flags(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  narrow_world_init(&world);
  const float table[] = {1, 0, 0, 1};
  memcpy(world.buffer + 8192, table, sizeof table);
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = add_narrow(&encoder, (int32_t[]){0}, (int32_t[]){INT32_MAX}, 1);
  op->flags |= KVP_OP_HADAMARD; /* 16 * 0.5 / sqrt(16) = 2, then zeros */
  op = add_narrow(&encoder, (int32_t[]){1}, (int32_t[]){0}, 1);
  op->fourth = step_view(buffer, 8192, 1, 16, 16);
  op->flags |= KVP_OP_NEOX; /* pairs (0, 2), (1, 3) of the first four: the second one is turned */
  op->second = step_view(buffer, out_offset, 1, narrow_row, narrow_row);
  struct exec_completion done = world_run(&world, &encoder);
  step_encoder_deinit(&encoder);
  free(done.payload);
  for (int k = 0; k < 16; k++) {
    uint16_t first = 0, second = 0, back = 0;
    memcpy(&first, world.narrow + (size_t)k * 2, 2);
    memcpy(&second, world.narrow + narrow_row + (size_t)k * 2, 2);
    memcpy(&back, world.buffer + out_offset + (size_t)k * 2, 2);
    assert_int_equal(first, k == 0 ? bf16_of(2) : 0);
    assert_int_equal(second, k == 1 ? bf16_of(-0.5F) : bf16_of(0.5F));
    assert_int_equal(back, second);
  }
  world_deinit(&world);
}

/* The record of a slot of "narrow" is these two values in turn. */
static void assert_narrow(const struct world *world, uint32_t layer, int slot, uint16_t even, uint16_t odd) {
  for (int k = 0; k < 16; k++) {
    uint16_t found = 0;
    memcpy(&found, world->narrow + (size_t)layer * narrow_layer_bytes + (size_t)slot * narrow_row + (size_t)k * 2, 2);
    assert_int_equal(found, k % 2 == 0 ? even : odd);
  }
}

/* Several layers, some of which may run at once: rows that one casts back and another one reads are in order. */
static void test_fused_chain(void **state) {
  (void)state;
  enum { second_weight = 4160, aside = 16384 };
  struct world world;
  struct step_encoder encoder;
  narrow_world_init(&world);
  const uint16_t half = bf16_of(0.5F), root = 0x3F35; /* sqrt(1/2) in BF16 */
  for (int k = 0; k < 16; k += 2) {                   /* 0.5, 0, 0.5, 0 ... */
    memcpy(world.buffer + second_weight + (size_t)k * 2, &half, 2);
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  for (int32_t i = 0; i < 6; i++) {
    struct kvp_wire_op *op = add_narrow(&encoder, &i, (int32_t[]){0}, 1);
    op->layer = (uint32_t)i % 2;
    if (i == 0 || i == 5) { /* half of the row is 0; kept aside by the first one, over its own source's by the last */
      op->third.offset_bytes = second_weight;
      op->second = step_view(buffer, i == 0 ? aside : 3 * narrow_row, 1, narrow_row, narrow_row);
    }
    if (i == 1) { /* reads what the first one has cast back: 0.5 / sqrt(1/8) * 0.5 */
      op->source = step_view(buffer, aside, 1, narrow_row, narrow_row);
    } else if (i == 5) {
      op->source = step_view(buffer, 0, 1, narrow_row, narrow_row);
    } else if (i == 4) { /* reads what the last one overwrites */
      op->source = step_view(buffer, 3 * narrow_row, 1, narrow_row, narrow_row);
    }
  }
  struct exec_completion done = world_run(&world, &encoder);
  step_encoder_deinit(&encoder);
  for (uint32_t i = 0; i < 6; i++) {
    assert_int_equal(world_report(&done, i).rows_stored, 1);
  }
  free(done.payload);
  assert_narrow(&world, 0, 0, half, 0);
  assert_narrow(&world, 1, 1, root, 0);
  assert_narrow(&world, 0, 2, half, half);
  assert_narrow(&world, 1, 3, half, half);
  assert_narrow(&world, 0, 4, half, half);
  assert_narrow(&world, 1, 5, half, 0);
  world_deinit(&world);
}

/* ---- indices ---- */

static int32_t int_at(const struct world *world, uint64_t offset) {
  int32_t value = 0;
  memcpy(&value, world->buffer + offset, sizeof value);
  return value;
}

static void assert_ints(const struct world *world, uint64_t offset, const int32_t *expected, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    assert_int_equal(int_at(world, offset + (uint64_t)i * 4), expected[i]);
  }
}

/* Two sequences of two queries, three columns; in place, to an output with a stride, and from an array. */
static void test_convert(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  const int32_t tables[] = {3, 0, 7, 8};                                /* tokens_per_block 64, blocks 0 .. 7 */
  const int32_t topk[] = {0, 65, 5, 127, 128, -1, 0, 1, 2, 64, 63, -2}; /* 128: past the table */
  const int32_t valid[] = {3, 2, 1, 3};
  const int32_t expected[] = {192, 1, 197, 63, -1, -1, 448, -1, -1, -1, 511, -1}; /* block 8 is none */
  for (int form = 0; form < 3; form++) {
    memset(world.buffer, 0x5A, 4096);
    memcpy(world.buffer + 1024, topk, sizeof topk);
    memcpy(world.buffer + 2048, tables, sizeof tables);
    step_encoder_init(&encoder, 1, session, step_epoch);
    struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_CONVERT_KV_INDEX);
    op->pool_id = pool_id;
    op->argument = 2;
    op->numbers[0] = 2;
    op->arrays[0] = form == 1 ? step_encoder_buffer_array(&encoder, buffer, 2048, sizeof tables)
                              : step_encoder_array(&encoder, tables, sizeof tables);
    op->arrays[1] = step_encoder_array(&encoder, valid, sizeof valid);
    if (form == 2) {
      op->arrays[2] = step_encoder_array(&encoder, topk, sizeof topk);
    } else {
      op->source = step_view(buffer, 1024, 4, 12, 12);
    }
    if (form > 0) {
      op->second = step_view(buffer, 0, 5, 12, 20);
    }
    const struct kvp_wire_report report = world_run_one(&world, &encoder);
    assert_int_equal(report.rows_rejected, 3);
    assert_int_equal(report.bytes_written, sizeof topk);
    assert_int_equal(report.flags, form == 1 ? KVP_REPORT_UNCHECKED_ARRAYS : 0);
    for (uint64_t i = 0; i < 4; i++) {
      assert_ints(&world, form == 0 ? 1024 + i * 12 : i * 20, expected + i * 3, 3);
    }
    assert_int_equal(int_at(&world, form == 0 ? 1024 + 48 : 12), 0x5A5A5A5A); /* between rows, behind the last */
    assert_int_equal(int_at(&world, form == 0 ? 0 : 80), 0x5A5A5A5A);
  }
  world_deinit(&world);
}

static void test_index_of_windows(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  world_ring_attach(&world);
  memset(world.buffer, 0x5A, 4096);
  const int32_t offset_len[] = {62, 4, -5, 0, 0, 5, 256, 1, 33, 2}; /* ring 32: 62, 63, 32, 33; too long; no slot */
  const int32_t slots[] = {62, 63, 32, 33, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 33, 34, -1, -1};
  const int32_t pivots[] = {10, 2, 100, 1, 5, 3, 7, 9, 0, -1, 0, 1, INT32_MAX, 2, 0, 0};
  const int32_t columns[] = {10, 11, 100, -1, 5, 6, 7, 7, -1, -1, -1, -1, -1, -1, -1, -1};
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_SWA_INDEX_DECODE);
  op->pool_id = ring_pool_id;
  op->argument = 4;
  op->second = step_view(buffer, 0, 5, 16, 16);
  op->arrays[0] = step_encoder_array(&encoder, offset_len, sizeof offset_len);
  op = step_encoder_op(&encoder, KVP_OP_EXPAND_SWA_INDEX);
  op->argument = 4;
  op->second = step_view(buffer, 1024, 4, 16, 16);
  op->arrays[0] = step_encoder_array(&encoder, pivots, sizeof pivots);
  struct exec_completion done = world_run(&world, &encoder);
  step_encoder_deinit(&encoder);
  assert_int_equal(world_report(&done, 0).rows_rejected, 2);
  assert_int_equal(world_report(&done, 1).rows_rejected, 2);
  free(done.payload);
  assert_ints(&world, 0, slots, 20);
  assert_ints(&world, 1024, columns, 16);
  assert_int_equal(int_at(&world, 80), 0x5A5A5A5A);
  assert_int_equal(int_at(&world, 1024 + 64), 0x5A5A5A5A);
  world_deinit(&world);
}

/* Either side from a view or an array, or absent. */
static void test_cat(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  memset(world.buffer, 0x5A, 4096);
  const int32_t left[] = {1, -1, 3, 4};
  const int32_t right[] = {0, -1, 2, 7, -3, INT32_MAX};
  memcpy(world.buffer + 2048, left, sizeof left);
  memcpy(world.buffer + 3072, right, sizeof right);
  step_encoder_init(&encoder, 1, session, step_epoch);
  for (uint32_t i = 0; i < 4; i++) {
    struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_KV_INDEX_CAT);
    op->argument = 100;
    op->numbers[0] = i == 2 ? 0 : 2;
    op->numbers[1] = i == 3 ? 0 : 3;
    const uint32_t row_bytes = (uint32_t)(op->numbers[0] + op->numbers[1]) * 4;
    op->second = step_view(buffer, (uint64_t)i * 256, 2, row_bytes, row_bytes + 4);
    if (i == 0) {
      op->source = step_view(buffer, 2048, 2, 8, 8);
      op->arrays[1] = step_encoder_array(&encoder, right, sizeof right);
    } else {
      op->arrays[0] = i == 2 ? KVP_WIRE_NO_ARRAY : step_encoder_array(&encoder, left, sizeof left);
      op->third = i == 3 ? op->third : step_view(buffer, 3072, 2, 12, 12);
    }
  }
  struct exec_completion done = world_run(&world, &encoder);
  step_encoder_deinit(&encoder);
  const int32_t both[] = {1, -1, 100, -1, 102, 0x5A5A5A5A, 3, 4, 107, -1, -1};
  const int32_t only_right[] = {100, -1, 102, 0x5A5A5A5A, 107, -1, -1};
  const int32_t only_left[] = {1, -1, 0x5A5A5A5A, 3, 4};
  assert_ints(&world, 0, both, 11);
  assert_ints(&world, 256, both, 11);
  assert_ints(&world, 512, only_right, 7);
  assert_ints(&world, 768, only_left, 5);
  for (uint32_t i = 0; i < 4; i++) {
    assert_int_equal(world_report(&done, i).rows_rejected, i == 3 ? 0 : 2);
  }
  free(done.payload);
  world_deinit(&world);
}

/* ---- whole blocks ---- */

/* Every region and layer of a pool; nothing of another one, not even of a pool with the same blocks. */
static void test_blocks(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  world_ring_attach(&world);
  for (int i = 0; i < main_bytes; i++) {
    world.main[i] = (uint8_t)(i * 7 + i / 256);
  }
  for (int i = 0; i < index_bytes; i++) {
    world.index[i] = (uint8_t)(i * 5 + i / 256);
  }
  memset(world.ring, 0x77, ring_bytes);
  uint8_t *expected = malloc(main_bytes), *expected_index = malloc(index_bytes);
  assert_true(expected != NULL && expected_index != NULL);
  memcpy(expected, world.main, main_bytes);
  memcpy(expected_index, world.index, index_bytes);
  const size_t stride = v41_block_stride, index_stride = index_block_stride;
  for (size_t layer = 0; layer < main_layers; layer++) {
    uint8_t *base = expected + layer * num_blocks * stride;
    memcpy(base + stride, base + 4 * stride, stride); /* 4 is sealed: to read only */
    memset(base + 2 * stride, 0, stride);
  }
  memcpy(expected_index + index_stride, expected_index + 4 * index_stride, index_stride);
  memset(expected_index + 2 * index_stride, 0, index_stride);
  const int32_t pairs[] = {4, 1, 0, 0};
  const int32_t blocks[] = {2};
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_COPY_BLOCKS);
  op->pool_id = pool_id;
  op->arrays[0] = step_encoder_array(&encoder, pairs, sizeof pairs);
  op = step_encoder_op(&encoder, KVP_OP_ZERO_BLOCKS);
  op->pool_id = pool_id;
  op->arrays[0] = step_encoder_array(&encoder, blocks, sizeof blocks);
  op = step_encoder_op(&encoder, KVP_OP_ZERO_BLOCKS); /* none */
  op->pool_id = pool_id;
  op->arrays[0] = step_encoder_array(&encoder, NULL, 0);
  struct exec_completion done = world_run(&world, &encoder);
  step_encoder_deinit(&encoder);
  const uint64_t block_bytes = main_layers * stride + index_stride;
  assert_int_equal(world_report(&done, 0).bytes_written, 2 * block_bytes);
  assert_int_equal(world_report(&done, 0).bytes_read, 2 * block_bytes);
  assert_int_equal(world_report(&done, 1).bytes_written, block_bytes);
  assert_int_equal(world_report(&done, 2).bytes_written, 0);
  free(done.payload);
  assert_memory_equal(world.main, expected, main_bytes);
  assert_memory_equal(world.index, expected_index, index_bytes);
  for (int i = 0; i < ring_bytes; i++) {
    assert_int_equal(world.ring[i], 0x77);
  }
  free(expected);
  free(expected_index);
  world_deinit(&world);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_fused_golden), cmocka_unit_test(test_fused_rows), cmocka_unit_test(test_fused_flags),
      cmocka_unit_test(test_fused_chain),  cmocka_unit_test(test_convert),    cmocka_unit_test(test_index_of_windows),
      cmocka_unit_test(test_cat),          cmocka_unit_test(test_blocks),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
